"""Settings of the ConsumerConnector, by the names of Kafka 0.8 to 0.10 and of 0.7."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_klog.classic.settings import setting, sort_settings
from spark_klog.client.config import parse_value
from spark_klog.client.consumer.settings import ResetPolicy, parse_reset
from spark_klog.errors import ConfigError
from spark_klog.protocol.tables.list_offsets import LATEST

#: The names of Kafka 0.7, and others in use, for those of 0.8 to 0.10.
_OTHER_NAMES = {
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
#: Settings of those consumers that have no meaning here.
_WITHOUT_EFFECT = frozenset(
    [
        "backoff.increment.ms",
        "num.consumer.fetchers",
        "offsets.channel.backoff.ms",
        "offsets.channel.socket.timeout.ms",
        "offsets.commit.max.retries",
        "refresh.leader.backoff.ms",
        "socket.buffersize",
        "socket.receive.buffer.bytes",
        "zk.connectiontimeout.ms",
        "zk.synctime.ms",
        "zookeeper.connection.timeout.ms",
        "zookeeper.sync.time.ms",
    ]
)
_REFUSED = {"bootstrap.servers": "bootstrap.servers: brokers are found in ZooKeeper, set zookeeper.connect instead"}
_STORAGES = ("zookeeper", "kafka")
_FOREVER = -1
_LARGEST = ResetPolicy(LATEST)


@dataclass(frozen=True)
class ConnectorConfig:
    """Parsed settings. Times in ms, sizes in bytes; `client` has the settings that all clients of the package share."""

    client: Mapping[str, Any]
    zookeeper_connect: str = setting("zookeeper.connect", "", "text")
    group_id: str = setting("group.id", "", "text")
    consumer_id: str | None = setting("consumer.id", None, "text")
    session_timeout_ms: int = setting("zookeeper.session.timeout.ms", 6_000, "positive int")
    auto_commit: bool = setting("auto.commit.enable", True, "boolean")
    auto_commit_interval_ms: int = setting("auto.commit.interval.ms", 60_000, "positive int")
    reset: ResetPolicy = field(default=_LARGEST, metadata={"name": "auto.offset.reset", "kind": "reset"})
    rebalance_max_retries: int = setting("rebalance.max.retries", 4, "positive int")
    rebalance_backoff_ms: int = setting("rebalance.backoff.ms", 2_000, "positive int")
    queued_max_chunks: int = setting("queued.max.message.chunks", 2, "positive int")
    consumer_timeout_ms: int = setting("consumer.timeout.ms", _FOREVER, "timeout")
    offsets_storage: str = setting("offsets.storage", "zookeeper", "storage")
    dual_commit: bool | None = setting("dual.commit.enabled", None, "boolean")
    exclude_internal_topics: bool = setting("exclude.internal.topics", True, "boolean")
    fetch_message_max_bytes: int = setting("fetch.message.max.bytes", 1024 * 1024, "positive int")
    fetch_wait_max_ms: int = setting("fetch.wait.max.ms", 100, "int")
    fetch_min_bytes: int = setting("fetch.min.bytes", 1, "int")
    socket_timeout_ms: int = setting("socket.timeout.ms", 30_000, "positive int")
    assignor: str = setting("partition.assignment.strategy", "range", "assignor")

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
        return {**own, **self.client, "bootstrap.servers": servers}


def connector_config(settings: Mapping[str, Any]) -> ConnectorConfig:
    """Parse settings by Kafka's names; `ConfigError` for a wrong value, or without zookeeper.connect or group.id.

    Settings that are not the connector's are client settings, for example of TLS; `client_config` checks them.
    """
    values, shared = sort_settings(settings, ConnectorConfig, _parse, _OTHER_NAMES, _WITHOUT_EFFECT, _REFUSED)
    config = ConnectorConfig(shared, **values)
    for name, value in (("zookeeper.connect", config.zookeeper_connect), ("group.id", config.group_id)):
        if not value:
            raise ConfigError(f"{name} is required by a ConsumerConnector")
    return config


def _parse(kind: str, name: str, text: str) -> Any:
    text = text.strip()
    if kind == "reset":
        policy = parse_reset(name, text)
        if policy.duration_ms is not None:
            raise ConfigError(f"{name}={text}: set smallest, largest or fail")
        return policy
    if kind == "timeout":
        return _FOREVER if text == str(_FOREVER) else parse_value("int", name, text)
    if kind == "storage":
        if text.lower() not in _STORAGES:
            raise ConfigError(f"{name}={text}: set {' or '.join(_STORAGES)}")
        return text.lower()
    if kind == "assignor":
        if text != "range":
            raise ConfigError(f"{name}={text}: set range, the documents' algorithm; others are not supported")
        return text
    return parse_value(kind, name, text)
