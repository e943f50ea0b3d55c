"""Settings in responses to DescribeConfigs and CreateTopics: text, type, and the source of each value.

A setting's synonyms are the places that are searched for its value: the topic, the broker's configuration, the default.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spark_klog.broker.metadata.registry import Topic
from spark_klog.broker.security.config import PLAINTEXT, Listener
from spark_klog.broker.settings.config import BrokerConfig, broker_setting_values
from spark_klog.broker.settings.log_settings import broker_name, is_list, known_topic_settings, setting_texts
from spark_klog.broker.settings.setting_documentation import DOCUMENTATION
from spark_klog.log.config import LogConfig
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.configs import BROKER_SOURCE, DEFAULT_SOURCE, TOPIC_SOURCE

_BOOLEAN, _STRING, _INT, _LONG, _DOUBLE, _LIST, _PASSWORD = 1, 2, 3, 5, 6, 7, 9
_TYPES = {bool: _BOOLEAN, int: _LONG, float: _DOUBLE}
_SECRET = "ssl.key.password"
#: Settings that are 32-bit numbers in Kafka; other numbers have 64 bits.
_INTS = frozenset(
    {
        "broker.id",
        "connection.failed.authentication.delay.ms",
        "fetch.max.bytes",
        "group.initial.rebalance.delay.ms",
        "group.max.session.timeout.ms",
        "group.max.size",
        "group.min.session.timeout.ms",
        "index.interval.bytes",
        "log.flush.offset.checkpoint.interval.ms",
        "log.index.interval.bytes",
        "log.index.size.max.bytes",
        "log.segment.bytes",
        "max.connections",
        "max.connections.per.ip",
        "max.incremental.fetch.session.cache.slots",
        "max.message.bytes",
        "message.max.bytes",
        "min.insync.replicas",
        "num.partitions",
        "offset.metadata.max.bytes",
        "offsets.retention.minutes",
        "offsets.topic.num.partitions",
        "segment.bytes",
        "segment.index.bytes",
        "socket.request.max.bytes",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms",
        "transaction.max.timeout.ms",
        "transaction.remove.expired.transaction.cleanup.interval.ms",
        "transaction.state.log.num.partitions",
        "transactional.id.expiration.ms",
        "zookeeper.session.timeout.ms",
    }
)


def topic_entries(config: BrokerConfig, topic: Topic) -> list[Message]:
    """All settings of a topic: its own, else the broker's."""
    own = known_topic_settings(topic.name, topic.settings)
    values = setting_texts(replace(config.log, **own))
    defaults = setting_texts(LogConfig())
    of_broker = setting_texts(config.log)
    entries = []
    for name, (text, value) in values.items():
        synonyms = []
        if name in topic.settings:
            text = topic.settings[name]
            synonyms.append(_synonym(name, text, TOPIC_SOURCE))
        if (at_broker := broker_name(name)) is not None:
            synonyms += _synonyms(at_broker, of_broker[name][0], defaults[name][0])
        entries.append(_entry(name, text, value, synonyms, read_only=False))
    return entries


def broker_entries(config: BrokerConfig) -> list[Message]:
    """The settings of a broker; they can be changed only by a restart."""
    values = broker_setting_values(config) | _deployment(config)
    bare = BrokerConfig(config.host, config.port, config.data_dir)
    defaults = broker_setting_values(bare) | _deployment(bare)
    return [
        _entry(name, _text(value), value, _synonyms(name, _text(value), _text(defaults[name])), read_only=True)
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
        "klog.users.file": str(security.users_file or ""),
        "listener.security.protocol.map": ",".join(f"{item.name}:{item.protocol}" for item in listeners),
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


def _entry(name: str, text: str, value: object, synonyms: list[Message], *, read_only: bool) -> Message:
    return {
        "name": name,
        "value": None if name == _SECRET else text,
        "read_only": read_only,
        "config_source": synonyms[0]["source"] if synonyms else DEFAULT_SOURCE,
        "is_sensitive": name == _SECRET,
        "synonyms": synonyms,
        "config_type": _type(name, value),
        "documentation": DOCUMENTATION.get(name),
    }


def _type(name: str, value: object) -> int:
    if name == _SECRET:
        return _PASSWORD
    if name in _INTS:
        return _INT
    if name == "segment.jitter.ms":  # the value here is a string, since the setting has no effect
        return _LONG
    if is_list(name) or name == "sasl.enabled.mechanisms":
        return _LIST
    return _BOOLEAN if value in ("true", "false") else _TYPES.get(type(value), _STRING)
