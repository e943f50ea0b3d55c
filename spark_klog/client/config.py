"""Client settings by Kafka's names (without the prefix `kafka.` that Spark options have)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from spark_klog.errors import ConfigError
from spark_klog.wire.codecs import MAX_DECOMPRESSED, Codec, codec_by_name
from spark_klog.wire.frames import MAX_FRAME

_READ_UNCOMMITTED, _READ_COMMITTED = "read_uncommitted", "read_committed"
_ACKS = {"0": 0, "1": 1, "-1": -1, "all": -1}
_TRUTH = {"true": True, "false": False}
_NUMBER = re.compile(r"[+-]?[0-9]{1,19}")
_MAX_INT, _MAX_LONG = 0x7FFFFFFF, 0x7FFFFFFFFFFFFFFF
#: The smallest and the largest value. Kafka's clients take 0 for all of them, too; a timeout of 0 lets no call succeed.
_NUMBERS = {
    "int": (0, _MAX_INT),
    "positive int": (1, _MAX_INT),
    "long": (0, _MAX_LONG),
    "positive long": (1, _MAX_LONG),
}

#: Settings of Kafka's own clients that are known and have no effect here: replacing the format must be enough.
_WITHOUT_EFFECT = frozenset(
    [
        "allow.auto.create.topics",
        "auto.commit.interval.ms",
        "auto.include.jmx.reporter",
        "auto.offset.reset",
        "check.crcs",
        "client.dns.lookup",
        "client.rack",
        "connections.max.idle.ms",
        "default.api.timeout.ms",
        "enable.auto.commit",
        "enable.metrics.push",
        "exclude.internal.topics",
        "fetch.max.wait.ms",
        "fetch.min.bytes",
        "group.instance.id",
        "group.protocol",
        "group.remote.assignor",
        "heartbeat.interval.ms",
        "interceptor.classes",
        "key.deserializer",
        "key.serializer",
        "linger.ms",
        "max.block.ms",
        "max.in.flight.requests.per.connection",
        "max.poll.interval.ms",
        "max.poll.records",
        "metadata.max.age.ms",
        "metadata.max.idle.ms",
        "metadata.recovery.rebootstrap.trigger.ms",
        "metadata.recovery.strategy",
        "metric.reporters",
        "metrics.num.samples",
        "metrics.recording.level",
        "metrics.sample.window.ms",
        "partition.assignment.strategy",
        "partitioner.adaptive.partitioning.enable",
        "partitioner.availability.timeout.ms",
        "receive.buffer.bytes",
        "reconnect.backoff.max.ms",
        "reconnect.backoff.ms",
        "retries",
        "send.buffer.bytes",
        "session.timeout.ms",
        "share.acknowledgement.mode",
        "socket.connection.setup.timeout.max.ms",
        "transaction.timeout.ms",
        "transaction.two.phase.commit.enable",
        "value.deserializer",
        "value.serializer",
    ]
)
#: Settings that decide where records go, or whether they count: to ignore them would do something else than was asked.
_REFUSED = {
    "transactional.id": "rows are written without transactions",
    "partitioner.class": "give the rows a column partition instead",
    "config.providers": "settings are taken as they are written",
}

#: Names that librdkafka has for settings of Kafka's, as kcat and confluent-kafka take them.
_LIBRDKAFKAS = {
    "compression.codec": "compression.type",
    "fetch.message.max.bytes": "max.partition.fetch.bytes",
    "fetch.wait.max.ms": "fetch.max.wait.ms",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "message.max.bytes": "max.request.size",
    "message.send.max.retries": "retries",
    "message.timeout.ms": "delivery.timeout.ms",
    "metadata.broker.list": "bootstrap.servers",
    "queue.buffering.max.ms": "linger.ms",
    "request.required.acks": "acks",
    "socket.receive.buffer.bytes": "receive.buffer.bytes",
    "socket.send.buffer.bytes": "send.buffer.bytes",
    "socket.timeout.ms": "request.timeout.ms",
}


def _setting(name: str, default: Any, kind: str) -> Any:
    return field(default=default, metadata={"name": name, "kind": kind})


@dataclass(frozen=True)
class ClientConfig:
    """Parsed settings. Times in ms, sizes in bytes."""

    bootstrap_servers: tuple[tuple[str, int], ...]
    client_id: str = _setting("client.id", "spark_klog", "text")
    connect_timeout_ms: int = _setting("socket.connection.setup.timeout.ms", 10_000, "positive long")
    request_timeout_ms: int = _setting("request.timeout.ms", 30_000, "positive int")
    retry_backoff_ms: int = _setting("retry.backoff.ms", 100, "long")
    retry_backoff_max_ms: int = _setting("retry.backoff.max.ms", 1_000, "long")
    delivery_timeout_ms: int = _setting("delivery.timeout.ms", 120_000, "positive int")
    fetch_max_bytes: int = _setting("fetch.max.bytes", 50 * 1024 * 1024, "int")
    partition_fetch_bytes: int = _setting("max.partition.fetch.bytes", 8 * 1024 * 1024, "int")
    isolation_level: int = _setting("isolation.level", 0, "isolation")
    acks: int = _setting("acks", -1, "acks")
    enable_idempotence: bool | None = _setting("enable.idempotence", None, "boolean")
    compression_type: str = _setting("compression.type", "none", "codec")
    batch_size: int = _setting("batch.size", 256 * 1024, "int")
    max_request_size: int = _setting("max.request.size", 1024 * 1024, "int")
    buffer_memory: int = _setting("buffer.memory", 32 * 1024 * 1024, "long")
    gzip_level: int | None = _setting("compression.gzip.level", None, "level")
    lz4_level: int | None = _setting("compression.lz4.level", None, "level")
    zstd_level: int | None = _setting("compression.zstd.level", None, "level")
    decompressed_max_bytes: int = _setting("decompressed.max.bytes", MAX_DECOMPRESSED, "positive int")
    security_protocol: str = _setting("security.protocol", "PLAINTEXT", "security")
    #: What stands before the names of settings where the user has written them.
    prefix: str = ""

    def named(self, name: str) -> str:
        """A setting as the user writes it, for messages."""
        return self.prefix + name

    @property
    def codec(self) -> Codec:
        return codec_by_name(self.compression_type)

    @property
    def compression_level(self) -> int | None:
        """The level that is set for the codec, None for its default."""
        levels = {"gzip": self.gzip_level, "lz4": self.lz4_level, "zstd": self.zstd_level}
        return levels.get(self.compression_type)

    @property
    def is_idempotent(self) -> bool:
        """Whether a producer asks for an id: by default with acks=all, as Kafka's does."""
        return self.acks == _ACKS["all"] and self.enable_idempotence is not False

    @property
    def response_max_bytes(self) -> int:
        """The largest response that is taken."""
        return max(MAX_FRAME, 2 * self.fetch_max_bytes)


_KNOWN = {item.metadata["name"]: item for item in fields(ClientConfig) if item.metadata}
_ELSEWHERE = frozenset({"bootstrap.servers", "group.id", "zookeeper.connect", "offsets.storage", "dual.commit.enabled"})


def parse_bootstrap(text: str, name: str = "bootstrap.servers") -> tuple[tuple[str, int], ...]:
    """(host, port) pairs of "HOST:PORT,HOST:PORT"; `ConfigError` where it is not that."""
    servers = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        host, colon, port = part.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{name}: {part!r} is not HOST:PORT")
        servers.append((host.strip("[]"), int(port)))
    if not servers:
        raise ConfigError(f"{name} is empty: HOST:PORT[,HOST:PORT...] is wanted")
    return tuple(servers)


def _value(kind: str, name: str, text: str) -> Any:
    text = text.strip()
    if kind in _NUMBERS:
        smallest, largest = _NUMBERS[kind]
        if not _NUMBER.fullmatch(text) or not smallest <= int(text) <= largest:
            raise ConfigError(f"{name}={text}: set a number from {smallest} to {largest}")
        return int(text)
    if kind == "boolean":
        truth = text.strip().lower()
        if truth not in _TRUTH:
            raise ConfigError(f"{name}={text}: true or false is wanted")
        return _TRUTH[truth]
    if kind == "isolation":
        if text not in (_READ_UNCOMMITTED, _READ_COMMITTED):
            raise ConfigError(f"{name}={text}: {_READ_UNCOMMITTED} or {_READ_COMMITTED} is wanted")
        return int(text == _READ_COMMITTED)
    if kind == "acks":
        if text not in _ACKS:
            raise ConfigError(f"{name}={text}: 0, 1, -1 or all is wanted")
        return _ACKS[text]
    if kind == "level":
        try:
            level = int(text)
        except ValueError:
            raise ConfigError(f"{name}={text}: a number is wanted") from None
        codec_by_name(name.split(".")[-2]).check_level(level)
        return level
    if kind == "codec":
        return codec_by_name(text).name
    if kind == "security" and text.upper() != "PLAINTEXT":
        raise ConfigError(f"{name}={text} is not supported yet; PLAINTEXT is")
    return text


def _hint(name: str, prefix: str) -> str:
    """What to do about an unknown setting."""
    if name in _LIBRDKAFKAS:
        return f"it is librdkafka's, Kafka's name for it is {prefix}{_LIBRDKAFKAS[name]}"
    close = difflib.get_close_matches(name, ["bootstrap.servers", *_KNOWN, *sorted(_WITHOUT_EFFECT)], 1, 0.85)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    return "remove it: only settings of Kafka's Java clients are known, not those of other clients"


def without_effect(settings: Mapping[str, str]) -> list[str]:
    """The names of those settings that `client_config` takes and ignores, sorted."""
    return sorted(name for name in settings if name in _WITHOUT_EFFECT)


def client_config(settings: Mapping[str, str], prefix: str = "") -> ClientConfig:
    """Parse settings by Kafka's names; `ConfigError` for an unknown name, a bad value, or no bootstrap.servers.

    `prefix` is what the user has written before the names, for messages.
    """
    if "bootstrap.servers" not in settings:
        raise ConfigError(f"{prefix}bootstrap.servers is not set: HOST:PORT[,HOST:PORT...] of a broker is wanted")
    servers = parse_bootstrap(settings["bootstrap.servers"], f"{prefix}bootstrap.servers")
    values: dict[str, Any] = {"bootstrap_servers": servers, "prefix": prefix}
    for name, text in settings.items():
        typed = prefix + name
        if name in _KNOWN:
            item = _KNOWN[name]
            values[item.name] = _value(item.metadata["kind"], typed, text)
        elif name in _REFUSED:
            raise ConfigError(f"setting {typed} is not supported: {_REFUSED[name]}")
        elif name == "partitioner.ignore.keys":
            if text.strip().lower() != "false":
                raise ConfigError(f"setting {typed}={text} is not supported: give the rows a column partition instead")
        elif name.startswith(("sasl.", "ssl.", "security.providers")):
            raise ConfigError(f"setting {typed}: TLS and SASL are not supported yet")
        elif name not in _ELSEWHERE and name not in _WITHOUT_EFFECT:
            raise ConfigError(f"unknown client setting {typed!r}; {_hint(name, prefix)}")
    config = ClientConfig(**values)
    if config.enable_idempotence and not config.is_idempotent:
        acks = f"{prefix}acks={settings['acks']}"
        raise ConfigError(f"{prefix}enable.idempotence=true needs {prefix}acks=all, not {acks}")
    return config
