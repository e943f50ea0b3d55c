"""Settings of the connector and of the producer, by the names of Kafka 0.8 to 0.10 and of 0.7."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from spark_klog.base.settings import (
    BOOLEAN,
    INT,
    POSITIVE_INT,
    TEXT,
    Kind,
    choice,
    items,
    setting,
    settings_of,
    value_of,
    words,
)
from spark_klog.client.consumer.settings import RESET, ResetPolicy
from spark_klog.client.settings import check_settings, of_bytes, setting_texts
from spark_klog.errors import ConfigError
from spark_klog.protocol.tables.records import LATEST

#: The names of Kafka 0.7, and others in use, for those of 0.8 to 0.10.
_CONNECTOR_OTHER_NAMES = {
    "auto.commit": "auto.commit.enable",
    "autocommit.enable": "auto.commit.enable",
    "autocommit.interval.ms": "auto.commit.interval.ms",
    "autooffset.reset": "auto.offset.reset",
    "consumerid": "consumer.id",
    "fetch.size": "fetch.message.max.bytes",
    "groupid": "group.id",
    "queuedchunks.max": "queued.max.message.chunks",
    "rebalance.retries.max": "rebalance.max.retries",
    "zk.connect": "zookeeper.connect",
    "zk.sessiontimeout.ms": "zookeeper.session.timeout.ms",
    "zookeeper.sessiontimeout.ms": "zookeeper.session.timeout.ms",
}
#: Settings of those clients that have no meaning here.
_CONNECTOR_WITHOUT_EFFECT = words(
    """
    backoff.increment.ms num.consumer.fetchers offsets.channel.backoff.ms offsets.channel.socket.timeout.ms
    offsets.commit.max.retries refresh.leader.backoff.ms socket.buffersize socket.receive.buffer.bytes
    zk.connectiontimeout.ms zk.synctime.ms zookeeper.connection.timeout.ms zookeeper.sync.time.ms
    """
)
_CONNECTOR_REFUSED = {
    "bootstrap.servers": "bootstrap.servers: brokers are found in ZooKeeper, set zookeeper.connect instead"
}
_FOREVER = -1
_TIMEOUT = Kind("timeout", lambda text: _FOREVER if text == str(_FOREVER) else INT.parse(text))
_STORAGE = choice("storage", {"zookeeper": "zookeeper", "kafka": "kafka"}, any_case=True)
_ASSIGNOR = choice("assignor", {"range": "range"}, "range, the documents' algorithm; others are not supported")
#: The names of Kafka 0.7 for those of 0.8 to 0.10.
_PRODUCER_OTHER_NAMES = {
    "batch.size": "batch.num.messages",
    "broker.list": "metadata.broker.list",
    "compression.type": "compression.codec",
    "queue.enqueueTimeout.ms": "queue.enqueue.timeout.ms",
    "queue.size": "queue.buffering.max.messages",
    "queue.time": "queue.buffering.max.ms",
    "socket.timeout.ms": "request.timeout.ms",
    "topic.metadata.refresh.interval.ms": "metadata.max.age.ms",
    "zk.connect": "zookeeper.connect",
    "zk.sessiontimeout.ms": "zookeeper.session.timeout.ms",
}
_PRODUCER_WITHOUT_EFFECT = words(
    """
    buffer.size connect.timeout.ms num.retries reconnect.interval reconnect.time.interval.ms send.buffer.bytes
    zk.connectiontimeout.ms zk.synctime.ms zookeeper.connection.timeout.ms zookeeper.sync.time.ms
    """
)
_PRODUCER_REFUSED = {
    name: f"{name} names a Java class: {instead}"
    for name, instead in {
        "serializer.class": "pass encoder=FUNCTION to the Producer",
        "key.serializer.class": "pass key_encoder=FUNCTION to the Producer",
        "partitioner.class": "pass partitioner=FUNCTION to the Producer",
        "event.handler": "pass event_handler=FUNCTION to the Producer",
        "callback.handler": "pass callback_handler=OBJECT to the Producer",
    }.items()
}
_CODECS = {"0": "none", "1": "gzip", "2": "snappy", "3": "lz4"}
_BROKER_07 = re.compile(r"^[0-9]+:([^:]+:[0-9]+)$")
_TYPE = choice("type", {"sync": False, "async": True})


def _sorted(
    settings: Mapping[str, Any],
    config: Any,
    other_names: Mapping[str, str],
    without_effect: AbstractSet[str],
    refused: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of the settings of `config`, by the names of its fields, and the texts of other settings.

    `ConfigError` for a wrong value, for two names of one setting, and with the text of a name in `refused`.
    """
    client = "ConsumerConnector" if config is ConnectorConfig else "Producer"
    check_settings(client, settings, "'zookeeper.connect': 'HOST:PORT'")
    own = settings_of(config)
    values: dict[str, Any] = {}
    shared: dict[str, str] = {}
    seen: dict[str, str] = {}
    for written, text in setting_texts(settings).items():
        name = other_names.get(written, written)
        if name in seen:
            raise ConfigError(f"{seen[name]} and {written} are the same setting: set one of them")
        seen[name] = written
        if name in refused:
            raise ConfigError(refused[name])
        if name in own:
            values[own[name].name] = value_of(own[name].metadata["kind"], written, text)
        elif name not in without_effect:
            shared[name] = text
    return values, shared


def _reset(text: str) -> ResetPolicy:
    policy: ResetPolicy = RESET.parse(text)
    if policy.duration_ms is not None:
        raise ValueError("smallest, largest or fail")
    return policy


@dataclass(frozen=True)
class ConnectorConfig:
    """Parsed settings. Times in ms, sizes in bytes; `client` has the settings that all clients of the package share."""

    client: Mapping[str, Any]
    zookeeper_connect: str = setting("zookeeper.connect", "", TEXT)
    group_id: str = setting("group.id", "", TEXT)
    consumer_id: str | None = setting("consumer.id", None, TEXT)
    session_timeout_ms: int = setting("zookeeper.session.timeout.ms", 6_000, POSITIVE_INT)
    auto_commit: bool = setting("auto.commit.enable", True, BOOLEAN)
    auto_commit_interval_ms: int = setting("auto.commit.interval.ms", 60_000, POSITIVE_INT)
    reset: ResetPolicy = setting("auto.offset.reset", ResetPolicy(LATEST), Kind("reset", _reset))
    rebalance_max_retries: int = setting("rebalance.max.retries", 4, POSITIVE_INT)
    rebalance_backoff_ms: int = setting("rebalance.backoff.ms", 2_000, POSITIVE_INT)
    queued_max_chunks: int = setting("queued.max.message.chunks", 2, POSITIVE_INT)
    consumer_timeout_ms: int = setting("consumer.timeout.ms", _FOREVER, _TIMEOUT)
    offsets_storage: str = setting("offsets.storage", "zookeeper", _STORAGE)
    dual_commit: bool | None = setting("dual.commit.enabled", None, BOOLEAN)
    exclude_internal_topics: bool = setting("exclude.internal.topics", True, BOOLEAN)
    fetch_message_max_bytes: int = setting("fetch.message.max.bytes", 1024 * 1024, POSITIVE_INT)
    fetch_wait_max_ms: int = setting("fetch.wait.max.ms", 100, INT)
    fetch_min_bytes: int = setting("fetch.min.bytes", 1, INT)
    socket_timeout_ms: int = setting("socket.timeout.ms", 30_000, POSITIVE_INT)
    assignor: str = setting("partition.assignment.strategy", "range", _ASSIGNOR)

    @property
    def storages(self) -> tuple[str, ...]:
        """Where offsets are committed: offsets.storage, and with dual.commit.enabled ZooKeeper, too."""
        is_dual = self.offsets_storage == "kafka" and self.dual_commit is not False
        return ("kafka", "zookeeper") if is_dual else (self.offsets_storage,)

    @property
    def rebalance_seconds(self) -> float:
        """How long a rebalance waits for other members to release partitions."""
        return self.rebalance_max_retries * self.rebalance_backoff_ms / 1000

    def client_settings(self, servers: list[str]) -> dict[str, Any]:
        """The settings of a cluster at these addresses."""
        own = {"client.id": self.group_id, "request.timeout.ms": self.socket_timeout_ms}
        return {**own, **of_bytes(self.client), "bootstrap.servers": servers}


def connector_config(settings: Mapping[str, Any]) -> ConnectorConfig:
    """Parse settings by Kafka's names; `ConfigError` for a wrong value, or without zookeeper.connect or group.id.

    Settings that are not the connector's are client settings, for example of TLS; `client_config` checks them.
    """
    values, shared = _sorted(
        settings, ConnectorConfig, _CONNECTOR_OTHER_NAMES, _CONNECTOR_WITHOUT_EFFECT, _CONNECTOR_REFUSED
    )
    config = ConnectorConfig(shared, **values)
    for name, value in (("zookeeper.connect", config.zookeeper_connect), ("group.id", config.group_id)):
        if not value:
            raise ConfigError(f"{name} is required by a ConsumerConnector")
    return config


def _brokers(text: str) -> str:
    """The list without the ids of 0.7's ID:HOST:PORT."""
    return ",".join(_BROKER_07.sub(r"\1", part) for part in items(text))


def _codec(text: str) -> str:
    codec = _CODECS.get(text, text)
    if codec not in _CODECS.values():
        raise ValueError(f"one of {', '.join(_CODECS.values())}, or its number from 0 to 3")
    return codec


@dataclass(frozen=True)
class ProducerConfig:
    """Parsed settings. Times in ms; `client` has the settings that all clients of the package share."""

    client: Mapping[str, Any]
    brokers: str = setting("metadata.broker.list", "", Kind("brokers", _brokers))
    zookeeper_connect: str = setting("zookeeper.connect", "", TEXT)
    session_timeout_ms: int = setting("zookeeper.session.timeout.ms", 6_000, POSITIVE_INT)
    is_async: bool = setting("producer.type", False, _TYPE)
    acks: str = setting("request.required.acks", "-1", TEXT)
    request_timeout_ms: int = setting("request.timeout.ms", 10_000, POSITIVE_INT)
    retries: int = setting("message.send.max.retries", 3, INT)
    codec: str = setting("compression.codec", "none", Kind("codec", _codec))
    compressed_topics: frozenset[str] = setting(
        "compressed.topics", frozenset(), Kind("topics", lambda text: frozenset(items(text)))
    )
    queue_ms: int = setting("queue.buffering.max.ms", 5_000, INT)
    queue_size: int = setting("queue.buffering.max.messages", 10_000, POSITIVE_INT)
    batch_size: int = setting("batch.num.messages", 200, POSITIVE_INT)
    enqueue_timeout_ms: int = setting("queue.enqueue.timeout.ms", -1, _TIMEOUT)

    def client_settings(self, servers: str | list[str], codec: str) -> dict[str, Any]:
        """The settings of a client producer at these addresses."""
        delivery = (self.retries + 1) * self.request_timeout_ms
        own = {"request.timeout.ms": self.request_timeout_ms, "delivery.timeout.ms": delivery, "max.block.ms": delivery}
        own_texts = {"acks": self.acks, "compression.type": codec, "bootstrap.servers": servers}
        return {**own, **of_bytes(self.client), **own_texts}


def producer_config(settings: Mapping[str, Any]) -> ProducerConfig:
    """Parse settings by Kafka's names; `ConfigError` for a wrong value, or unless one way to find brokers is set.

    Settings that are not the producer's are client settings, for example of TLS.
    """
    values, shared = _sorted(
        settings, ProducerConfig, _PRODUCER_OTHER_NAMES, _PRODUCER_WITHOUT_EFFECT, _PRODUCER_REFUSED
    )
    config = ProducerConfig(shared, **values)
    if bool(config.brokers) == bool(config.zookeeper_connect):
        raise ConfigError("set one of metadata.broker.list (0.7: broker.list) and zookeeper.connect (0.7: zk.connect)")
    return config
