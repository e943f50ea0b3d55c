"""Settings in responses to DescribeConfigs and CreateTopics: text, type, and the source of each value.

A setting's synonyms are the places that are searched for its value: the topic, the broker's configuration, the default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spark_klog.base.names import PLAINTEXT
from spark_klog.broker.metadata.registry import Topic
from spark_klog.broker.security.config import Listener
from spark_klog.broker.settings.config import BROKER_SETTINGS, BrokerConfig, broker_setting_values
from spark_klog.broker.settings.group_settings import GROUP_SETTINGS
from spark_klog.broker.settings.log_settings import (
    BROKER_LOG_SETTINGS,
    TOPIC_SETTINGS,
    broker_name,
    known_topic_settings,
    setting_texts,
)
from spark_klog.log.config import LogConfig
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.configs import BROKER_SOURCE, DEFAULT_SOURCE, GROUP_SOURCE, TOPIC_SOURCE
from spark_klog.schemas.registry.settings import BROKER_URL

_OF_TOPICS = {
    "cleanup.policy": "How old segments are cleaned up: delete, compact, or both.",
    "compression.gzip.level": "Level of batches that the broker compresses by gzip: 1 to 9, or -1.",
    "compression.lz4.level": "Level of batches that the broker compresses by lz4: 1 to 17.",
    "compression.type": "Codec of batches in the log: uncompressed, gzip, snappy, lz4, zstd, or that of the producer. "
    "The broker compresses batches of other codecs anew.",
    "compression.zstd.level": "Level of batches that the broker compresses by zstd: -131072 to 22.",
    "confluent.key.schema.validation": "Whether keys must begin with the id of a schema of their subject.",
    "confluent.key.subject.name.strategy": "How the subjects of keys' schemas are called.",
    "confluent.value.schema.validation": "Whether values must begin with the id of a schema of their subject.",
    "confluent.value.subject.name.strategy": "How the subjects of values' schemas are called.",
    "delete.retention.ms": "Time in milliseconds that compaction keeps tombstones and transaction markers.",
    "file.delete.delay.ms": "Time in milliseconds between the deletion of a segment and the removal of its files.",
    "flush.messages": "Number of records after which the log is flushed to disk.",
    "flush.ms": "Time in milliseconds after which records are flushed to disk.",
    "follower.replication.throttled.replicas": "Without effect: there is no replication.",
    "index.interval.bytes": "Bytes of the log between two entries of the offset index.",
    "leader.replication.throttled.replicas": "Without effect: there is no replication.",
    "max.compaction.lag.ms": "Longest time in milliseconds before a record is compacted.",
    "max.message.bytes": "Largest record batch, in bytes.",
    "message.downconversion.enable": "Old consumers get message sets of their format; no other value is supported.",
    "message.format.version": "Without effect: the log stores record batches of magic 2.",
    "message.timestamp.after.max.ms": "How far a timestamp may be ahead of the broker's clock, in milliseconds.",
    "message.timestamp.type": "Source of records' timestamps: CreateTime (the producer) or LogAppendTime.",
    "min.cleanable.dirty.ratio": "Smallest uncompacted share of a log at which it is compacted.",
    "min.compaction.lag.ms": "Shortest time in milliseconds before a record is compacted.",
    "min.insync.replicas": "Without effect: there is no replication.",
    "preallocate": "Files are not preallocated; no other value is supported.",
    "retention.bytes": "Size of a partition, in bytes, above which its oldest segments are deleted; -1 for no limit.",
    "retention.ms": "Age in milliseconds at which segments are deleted; -1 for no limit.",
    "segment.bytes": "Size in bytes at which a new segment is rolled.",
    "segment.index.bytes": "Largest index of a segment, in bytes.",
    "segment.jitter.ms": "Without effect: segments are rolled exactly after segment.ms.",
    "segment.ms": "Age in milliseconds at which a new segment is rolled.",
    "unclean.leader.election.enable": "Without effect: there is no replication.",
}
_OF_BROKERS = {
    "advertised.listeners": "Addresses that the broker gives to clients.",
    "authentication.timeout.ms": "Time in milliseconds within which a client must authenticate.",
    "auto.create.topics.enable": "Whether Metadata requests create missing topics.",
    "broker.id": "Id of the broker.",
    BROKER_URL: "Addresses of the schema registry that validates topics' schemas, or file:PATH of a file with them. "
    "Other settings of its client begin with confluent., too.",
    "connection.failed.authentication.delay.ms": "Delay in milliseconds of the response to a failed authentication.",
    "controller.listener.names": "Listeners of these names are left out: there are no controllers.",
    "connections.max.idle.ms": "Time in milliseconds after which an idle connection is closed.",
    "decompressed.max.bytes": "Largest record batch after decompression, in bytes.",
    "fetch.max.bytes": "Largest response to Fetch, in bytes.",
    "group.consumer.heartbeat.interval.ms": "Time in milliseconds between heartbeats of KIP-848's members.",
    "group.consumer.max.size": "Largest number of members in a group of KIP-848.",
    "group.consumer.session.timeout.ms": "Session timeout of KIP-848's members, in milliseconds.",
    "group.initial.rebalance.delay.ms": "Time in milliseconds that a new group waits for more members.",
    "group.max.session.timeout.ms": "Longest session timeout of group members, in milliseconds.",
    "group.max.size": "Largest number of members in a group.",
    "group.min.session.timeout.ms": "Shortest session timeout of group members, in milliseconds.",
    "host.name": "Host on which the broker listens, as before Kafka 0.9; listeners overrides it.",
    "klog.users.file": "File of users, with their credentials and rules.",
    "klog.zookeeper.paths.0.7": "Whether topics are also registered for consumers of Kafka 0.7.",
    "listener.security.protocol.map": "Security protocol of each listener.",
    "listeners": "Addresses on which the broker listens.",
    "log.cleaner.backoff.ms": "Time in milliseconds between checks for logs to compact.",
    "log.cleaner.dedupe.buffer.size": "Memory for compaction, in bytes.",
    "log.cleaner.enable": "Whether logs are compacted.",
    "log.dir": "The data directory; log.dirs overrides it.",
    "log.dirs": "The data directory.",
    "log.flush.offset.checkpoint.interval.ms": "Time in milliseconds between two checkpoints of recovery points.",
    "log.retention.check.interval.ms": "Time in milliseconds between checks for segments to delete.",
    "log.retention.hours": "log.retention.ms in hours.",
    "log.retention.minutes": "log.retention.ms in minutes.",
    "log.roll.hours": "log.roll.ms in hours.",
    "max.connections": "Largest number of connections.",
    "max.connections.per.ip": "Largest number of connections from one IP address.",
    "max.incremental.fetch.session.cache.slots": "Largest number of fetch sessions.",
    "metrics.listen": "HOST:PORT where Prometheus finds /metrics.",
    "min.incremental.fetch.session.eviction.ms": "Time in milliseconds for which a fetch session is not evicted.",
    "node.id": "Id of the broker, the same as broker.id.",
    "num.partitions": "Number of partitions of topics that are created without one.",
    "offset.metadata.max.bytes": "Largest metadata of a committed offset, in bytes.",
    "offsets.retention.check.interval.ms": "Time in milliseconds between checks for expired committed offsets.",
    "offsets.retention.minutes": "Time in minutes for which the offsets of an empty group are kept.",
    "offsets.topic.num.partitions": "Number of partitions of __consumer_offsets.",
    "port": "Port on which the broker listens, as before Kafka 0.9; listeners overrides it.",
    "queued.max.request.bytes": "Memory for requests that have not been answered yet, in bytes.",
    "queued.max.response.bytes": "Memory for responses that clients have not read yet, in bytes.",
    "request.receive.timeout.ms": "Time in milliseconds within which a request that has begun must arrive.",
    "response.send.timeout.ms": "Time in milliseconds within which a client must read more of its response.",
    "sasl.enabled.mechanisms": "Supported SASL mechanisms.",
    "socket.request.max.bytes": "Largest request, in bytes.",
    "ssl.client.auth": "Whether clients must present a certificate: none, requested or required.",
    "ssl.key.password": "Password of the private key.",
    "ssl.keystore.location": "PEM file with the private key and its certificates.",
    "ssl.keystore.type": "PEM; no other value is supported.",
    "ssl.truststore.location": "PEM file with the CA certificates for clients.",
    "ssl.truststore.type": "PEM; no other value is supported.",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "Milliseconds between checks of timeouts.",
    "transaction.max.timeout.ms": "Longest timeout of a transaction, in milliseconds.",
    "transaction.remove.expired.transaction.cleanup.interval.ms": "Milliseconds between checks for expired ids.",
    "transaction.state.log.num.partitions": "Number of partitions of __transaction_state.",
    "transaction.version": "Last version of transactions that the broker serves (KIP-890), 0 to 2. The cluster has the "
    "lowest of its brokers.",
    "transactional.id.expiration.ms": "Time in milliseconds for which an unused transactional id is kept.",
    "zookeeper.connect": "Addresses of ZooKeeper; empty for a single broker.",
    "zookeeper.session.timeout.ms": "Timeout of the session with ZooKeeper, in milliseconds.",
}
DOCUMENTATION = {
    **{name: text for topic, text in _OF_TOPICS.items() if (name := broker_name(topic))},
    **_OF_TOPICS,
    **_OF_BROKERS,
}


_SECRET = "ssl.key.password"
_BOOLEAN, _STRING, _INT, _LONG, _DOUBLE, _LIST, _PASSWORD = 1, 2, 3, 5, 6, 7, 9
_TYPES = {"boolean": _BOOLEAN, "string": _STRING, "int": _INT, "long": _LONG, "double": _DOUBLE, "list": _LIST}
#: The protocol's type of each setting that is no string.
_TYPE_OF = {
    **{name: _TYPES[row.metadata["kind"].name] for name, row in (BROKER_SETTINGS | TOPIC_SETTINGS).items()},
    **{name: _TYPES[kind.name] for name, (_, kind) in BROKER_LOG_SETTINGS.items()},
    "broker.id": _INT,
    **dict.fromkeys(GROUP_SETTINGS, _INT),
    "follower.replication.throttled.replicas": _LIST,
    "leader.replication.throttled.replicas": _LIST,
    "message.downconversion.enable": _BOOLEAN,
    "min.insync.replicas": _INT,
    "preallocate": _BOOLEAN,
    "sasl.enabled.mechanisms": _LIST,
    "segment.jitter.ms": _LONG,
    _SECRET: _PASSWORD,
    "unclean.leader.election.enable": _BOOLEAN,
}


def topic_entries(config: BrokerConfig, topic: Topic) -> list[Message]:
    """All settings of a topic: its own, else the broker's."""
    own = known_topic_settings(topic.name, topic.settings)
    defaults, of_broker = setting_texts(LogConfig()), setting_texts(config.log)
    entries = []
    for name, text in setting_texts(replace(config.log, **own)).items():
        synonyms = []
        if name in topic.settings:
            text = topic.settings[name]
            synonyms.append(_synonym(name, text, TOPIC_SOURCE))
        if (at_broker := broker_name(name)) is not None:
            synonyms += _synonyms(at_broker, of_broker[name], defaults[name])
        entries.append(_entry(name, text, synonyms, read_only=False))
    return entries


def group_entries(config: BrokerConfig, own: Mapping[str, str]) -> list[Message]:
    """All settings of a group: its own, else the broker's."""
    bare = broker_setting_values(BrokerConfig(config.host, config.port, config.data_dir))
    of_broker = broker_setting_values(config)
    entries = []
    for name, at_broker in GROUP_SETTINGS.items():
        synonyms = _synonyms(at_broker, _text(of_broker[at_broker]), _text(bare[at_broker]))
        if name in own:
            synonyms.insert(0, _synonym(name, own[name], GROUP_SOURCE))
        entries.append(_entry(name, synonyms[0]["value"], synonyms, read_only=False))
    return entries


def broker_entries(config: BrokerConfig) -> list[Message]:
    """The settings of a broker; they can be changed only by a restart."""
    values = broker_setting_values(config) | _deployment(config)
    bare = BrokerConfig(config.host, config.port, config.data_dir)
    defaults = broker_setting_values(bare) | _deployment(bare)
    return [
        _entry(name, _text(value), _synonyms(name, _text(value), _text(defaults[name])), read_only=True)
        for name, value in sorted(values.items())
    ]


def _deployment(config: BrokerConfig) -> dict[str, Any]:
    """Settings of addresses, directories and security; for a config without any, these are the defaults."""
    security = config.security
    listeners = security.listeners or (Listener(PLAINTEXT, PLAINTEXT, config.host, config.port),)
    zookeeper = (config.directories or "").partition("zookeeper://")
    return {
        "advertised.listeners": ",".join(map(str, security.advertised or listeners)),
        "broker.id": config.broker_id,
        BROKER_URL: re.sub("//[^,]*@", "//", config.schema_registry.get("url", "")),
        "klog.users.file": str(security.users_file or ""),
        "listener.security.protocol.map": ",".join(f"{listener.name}:{listener.protocol}" for listener in listeners),
        "listeners": ",".join(map(str, listeners)),
        "log.dirs": str(config.data_dir.absolute()),
        "sasl.enabled.mechanisms": ",".join(security.mechanisms),
        "ssl.client.auth": security.client_auth,
        _SECRET: security.key_password,
        "ssl.keystore.location": str(security.key_store or ""),
        "ssl.truststore.location": str(security.trust_store or ""),
        "zookeeper.connect": zookeeper[2],
    }


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _synonyms(name: str, text: str, default: str) -> list[Message]:
    """Synonyms of a broker setting: its value, unless that is the default, then the default."""
    chosen = [_synonym(name, text, BROKER_SOURCE)] if text != default else []
    return [*chosen, _synonym(name, default, DEFAULT_SOURCE)]


def _synonym(name: str, text: str, source: int) -> Message:
    return {"name": name, "value": None if name == _SECRET else text, "source": source}


def _entry(name: str, text: str, synonyms: list[Message], *, read_only: bool) -> Message:
    return {
        "name": name,
        "value": None if name == _SECRET else text,
        "read_only": read_only,
        "config_source": synonyms[0]["source"] if synonyms else DEFAULT_SOURCE,
        "is_sensitive": name == _SECRET,
        "synonyms": synonyms,
        "config_type": _TYPE_OF.get(name, _STRING),
        "documentation": DOCUMENTATION.get(name),
    }
