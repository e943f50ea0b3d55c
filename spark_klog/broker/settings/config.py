"""The broker's settings, under Kafka's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from spark_klog.broker.metadata.internal_topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from spark_klog.broker.security.config import SECURITY_SETTINGS, SecurityConfig, security_settings
from spark_klog.broker.settings.kafka_names import WITHOUT_USE, advice, without_secret
from spark_klog.broker.settings.log_settings import BROKER_LOG_SETTINGS, broker_log_settings
from spark_klog.errors import ConfigError
from spark_klog.log.config import LogConfig
from spark_klog.trees.tree import SESSION_SECONDS
from spark_klog.wire.codecs import MAX_DECOMPRESSED
from spark_klog.wire.primitives import MAX_FRAME

_TRUTH = {"true": True, "false": False}


def _setting(name: str, default: Any, least: int = 1) -> Any:
    return field(default=default, metadata={"name": name, "least": least})


@dataclass(frozen=True)
class BrokerConfig:
    """Configuration of a broker: addresses, data directory and settings. Sizes in bytes, times in ms.

    `directories` is the tree that brokers share: "zookeeper://CONNECT", a folder, or None for a standalone broker.
    """

    host: str
    port: int
    data_dir: Path
    broker_id: int = 0
    directories: str | None = None
    #: Address that serves metrics; None serves none.
    metrics_address: tuple[str, int] | None = None
    num_partitions: int = _setting("num.partitions", 1)
    auto_create_topics: bool = _setting("auto.create.topics.enable", True)
    log: LogConfig = field(default_factory=LogConfig)
    housekeeping_ms: int = _setting("log.retention.check.interval.ms", 300_000)
    checkpoint_ms: int = _setting("log.flush.offset.checkpoint.interval.ms", 60_000)
    cleaner_enabled: bool = _setting("log.cleaner.enable", True)
    cleaner_backoff_ms: int = _setting("log.cleaner.backoff.ms", 15_000)
    cleaner_memory_bytes: int = _setting("log.cleaner.dedupe.buffer.size", 128 * 1024 * 1024)
    request_max_bytes: int = _setting("socket.request.max.bytes", MAX_FRAME)
    fetch_max_bytes: int = _setting("fetch.max.bytes", 55 * 1024 * 1024)
    offsets_retention_minutes: int = _setting("offsets.retention.minutes", 7 * 24 * 60)
    offsets_check_ms: int = _setting("offsets.retention.check.interval.ms", 600_000)
    group_initial_delay_ms: int = _setting("group.initial.rebalance.delay.ms", 3000, least=0)
    group_min_session_ms: int = _setting("group.min.session.timeout.ms", 6000)
    group_max_session_ms: int = _setting("group.max.session.timeout.ms", 1_800_000)
    group_max_size: int = _setting("group.max.size", 0x7FFFFFFF)
    fetch_session_slots: int = _setting("max.incremental.fetch.session.cache.slots", 1000)
    fetch_session_eviction_ms: int = _setting("min.incremental.fetch.session.eviction.ms", 120_000)
    decompressed_max_bytes: int = _setting("decompressed.max.bytes", MAX_DECOMPRESSED)
    offsets_partitions: int = _setting("offsets.topic.num.partitions", 1)
    transaction_partitions: int = _setting("transaction.state.log.num.partitions", 1)
    transaction_max_timeout_ms: int = _setting("transaction.max.timeout.ms", 900_000)
    transaction_check_ms: int = _setting("transaction.abort.timed.out.transaction.cleanup.interval.ms", 10_000)
    transactional_id_expiration_ms: int = _setting("transactional.id.expiration.ms", 7 * 24 * 3600 * 1000)
    transactional_id_check_ms: int = _setting("transaction.remove.expired.transaction.cleanup.interval.ms", 3_600_000)
    offset_metadata_max_bytes: int = _setting("offset.metadata.max.bytes", 4096)
    # The first four are not Kafka's, which has no such limits.
    queued_max_response_bytes: int = _setting("queued.max.response.bytes", 256 * 1024 * 1024)
    authentication_timeout_ms: int = _setting("authentication.timeout.ms", 30_000)
    receive_timeout_ms: int = _setting("request.receive.timeout.ms", 120_000)
    send_timeout_ms: int = _setting("response.send.timeout.ms", 60_000)
    failed_authentication_delay_ms: int = _setting("connection.failed.authentication.delay.ms", 100)
    max_idle_ms: int = _setting("connections.max.idle.ms", 600_000)
    max_connections: int = _setting("max.connections", 10_000)
    max_connections_per_ip: int = _setting("max.connections.per.ip", 10_000)
    queued_max_bytes: int = _setting("queued.max.request.bytes", 256 * 1024 * 1024)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    paths_07: bool = _setting("klog.zookeeper.paths.0.7", True)
    zookeeper_session_timeout_ms: int = _setting("zookeeper.session.timeout.ms", int(1000 * SESSION_SECONDS))

    def default_partitions(self, topic: str) -> int:
        """The number of partitions of a topic that is created without one."""
        of_internal = {OFFSETS_TOPIC: self.offsets_partitions, TRANSACTIONS_TOPIC: self.transaction_partitions}
        return of_internal.get(topic, self.num_partitions)


def _parse(kind: str, name: str, text: str, least: int) -> int | bool:
    try:
        value = _TRUTH[text.lower()] if kind == "bool" else int(text)
    except (KeyError, ValueError):
        raise ConfigError(
            f"setting {name}={text} must be {'true or false' if kind == 'bool' else 'a number'}"
        ) from None
    if kind == "int" and value < least:
        raise ConfigError(f"setting {name}={text} must be {least} or more")
    return value


_BROKER_SETTINGS = {
    item.metadata["name"]: (item.name, str(item.type), item.metadata["least"])
    for item in fields(BrokerConfig)
    if item.metadata
}


def parse_settings(texts: Iterable[str]) -> dict[str, str]:
    """Parse "NAME=VALUE" texts into values by name; `ConfigError` for any other text."""
    result = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise ConfigError(f"setting {without_secret(text)!r} is not NAME=VALUE")
        result[name] = value
    return result


def broker_settings(settings: Mapping[str, str], known_elsewhere: Iterable[str] = ()) -> dict[str, Any]:
    """`BrokerConfig` arguments from settings under Kafka's names; `ConfigError` for an unknown name or a bad value.

    `known_elsewhere` has further names to suggest for a misspelled one.
    """
    result: dict[str, Any] = {}
    of_logs, of_security = {}, {}
    for name, value in settings.items():
        if name in BROKER_LOG_SETTINGS:
            of_logs[name] = value
        elif name in SECURITY_SETTINGS:
            of_security[name] = value
        elif name in _BROKER_SETTINGS:
            attribute, kind, least = _BROKER_SETTINGS[name]
            result[attribute] = _parse(kind, name, value.strip(), least)
        else:
            known = {*_BROKER_SETTINGS, *BROKER_LOG_SETTINGS, *SECURITY_SETTINGS, *known_elsewhere}
            raise ConfigError(f"unknown setting {name!r}; {advice(name, known, WITHOUT_USE)}")
    return result | {
        "log": LogConfig(**broker_log_settings(of_logs)),
        "security": security_settings(of_security),
    }


def broker_setting_values(config: BrokerConfig) -> dict[str, Any]:
    """Values of a broker's settings, by Kafka's names."""
    values = {name: getattr(config, attribute) for name, (attribute, *_) in _BROKER_SETTINGS.items()}
    return values | {
        name: getattr(config.log, item.attribute) for name, item in BROKER_LOG_SETTINGS.items() if item.topic
    }
