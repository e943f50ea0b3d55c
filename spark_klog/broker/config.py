"""The broker's settings, by Kafka's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from spark_klog.errors import ConfigError
from spark_klog.log.partition_log import LogConfig
from spark_klog.wire.codecs import MAX_DECOMPRESSED
from spark_klog.wire.frames import MAX_FRAME

_TRUTH = {"true": True, "false": False}


def _setting(name: str, default: Any) -> Any:
    return field(default=default, metadata={"name": name})


@dataclass(frozen=True)
class BrokerConfig:
    """Where the broker listens and keeps its logs, and its settings. Sizes in bytes, times in ms.

    `directories` is the tree that brokers share: "zookeeper://CONNECT", a folder, or None for a broker that is alone.
    """

    host: str
    port: int
    data_dir: Path
    broker_id: int = 0
    directories: str | None = None
    num_partitions: int = _setting("num.partitions", 1)
    auto_create_topics: bool = _setting("auto.create.topics.enable", True)
    segment_bytes: int = _setting("log.segment.bytes", 1024 * 1024 * 1024)
    index_interval_bytes: int = _setting("log.index.interval.bytes", 4096)
    max_message_bytes: int = _setting("message.max.bytes", 1024 * 1024 + 12)
    request_max_bytes: int = _setting("socket.request.max.bytes", MAX_FRAME)
    fetch_max_bytes: int = _setting("fetch.max.bytes", 55 * 1024 * 1024)
    decompressed_max_bytes: int = _setting("decompressed.max.bytes", MAX_DECOMPRESSED)
    offsets_partitions: int = _setting("offsets.topic.num.partitions", 1)
    offset_metadata_max_bytes: int = _setting("offset.metadata.max.bytes", 4096)
    zookeeper_session_timeout_ms: int = _setting("zookeeper.session.timeout.ms", 18000)

    @property
    def log(self) -> LogConfig:
        return LogConfig(self.segment_bytes, self.index_interval_bytes, self.max_message_bytes)


def _parse(kind: str, name: str, text: str) -> int | bool:
    try:
        value = _TRUTH[text.lower()] if kind == "bool" else int(text)
    except (KeyError, ValueError):
        raise ConfigError(
            f"setting {name}={text}: {'true or false' if kind == 'bool' else 'a number'} is wanted"
        ) from None
    if kind == "int" and value <= 0:
        raise ConfigError(f"setting {name}={text}: must be above 0")
    return value


def _parsed(settings: Iterable[tuple[str, str]], known: Mapping[str, tuple[str, str]], what: str) -> dict[str, Any]:
    """Attribute values of settings; `known` maps a setting's name to (attribute, kind)."""
    result: dict[str, Any] = {}
    for name, text in settings:
        if name not in known:
            raise ConfigError(f"unknown {what} {name!r}; known are {', '.join(sorted(known))}")
        attribute, kind = known[name]
        result[attribute] = _parse(kind, name, text)
    return result


_BROKER_SETTINGS = {
    item.metadata["name"]: (item.name, str(item.type)) for item in fields(BrokerConfig) if item.metadata
}
_TOPIC_SETTINGS = {
    "segment.bytes": ("segment_bytes", "int"),
    "index.interval.bytes": ("index_interval_bytes", "int"),
    "max.message.bytes": ("max_message_bytes", "int"),
}


def broker_settings(settings: Iterable[str]) -> dict[str, Any]:
    """`BrokerConfig` arguments of "NAME=VALUE" texts; `ConfigError` for an unknown name or a bad value."""
    pairs = []
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"setting {setting!r} is not NAME=VALUE")
        pairs.append((name.strip(), value.strip()))
    return _parsed(pairs, _BROKER_SETTINGS, "setting")


def topic_settings(settings: Mapping[str, str]) -> dict[str, int]:
    """`LogConfig` arguments of a topic's settings; `ConfigError` for an unknown name or a bad value."""
    return _parsed(settings.items(), _TOPIC_SETTINGS, "topic setting")


def parse_listen(text: str) -> tuple[str, int]:
    """(host, port) of "HOST:PORT"; port 0 takes a free one."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
