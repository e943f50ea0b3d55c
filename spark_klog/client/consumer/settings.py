"""Consumer settings with Kafka's names and defaults."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from spark_klog.client.consumer.assignors import ASSIGNORS
from spark_klog.client.settings import ClientConfig, client_config, parse_value, setting_texts, without_effect
from spark_klog.errors import ConfigError
from spark_klog.protocol.tables.records import EARLIEST, LATEST

_log = logging.getLogger(__name__)
#: Kafka's default. The default of `ClientConfig` is larger, for Spark tasks that read one partition each.
_PARTITION_FETCH_BYTES = 1024 * 1024
_DURATION = re.compile(
    r"by_duration:P(?:(?P<days>[0-9]{1,9})D)?"
    r"(?:T(?:(?P<hours>[0-9]{1,9})H)?(?:(?P<minutes>[0-9]{1,9})M)?(?:(?P<seconds>[0-9]{1,9}(?:\.[0-9]{1,3})?)S)?)?",
    re.IGNORECASE,
)
_JAVAS = {
    "RangeAssignor": "range",
    "RoundRobinAssignor": "roundrobin",
    "StickyAssignor": "sticky",
    "CooperativeStickyAssignor": "cooperative-sticky",
}
_UNIT_MS = {"days": 86_400_000, "hours": 3_600_000, "minutes": 60_000, "seconds": 1000}


class ResetPolicy(NamedTuple):
    """Where to begin without a position: `place` is EARLIEST, LATEST or None (raise); or `duration_ms` before now."""

    place: int | None
    duration_ms: int | None = None

    def time(self, now_ms: int) -> int | None:
        """The time for ListOffsets: EARLIEST, LATEST or ms; None for the policy none."""
        return self.place if self.duration_ms is None else max(0, now_ms - self.duration_ms)


_PLACES = {
    "earliest": ResetPolicy(EARLIEST),
    "latest": ResetPolicy(LATEST),
    "none": ResetPolicy(None),
    "fail": ResetPolicy(None),
    # librdkafka's other names
    "smallest": ResetPolicy(EARLIEST),
    "beginning": ResetPolicy(EARLIEST),
    "largest": ResetPolicy(LATEST),
    "end": ResetPolicy(LATEST),
    "error": ResetPolicy(None),
}


def parse_reset(name: str, text: str) -> ResetPolicy:
    """Parse auto.offset.reset; `ConfigError`. `by_duration:` takes an ISO 8601 duration (KIP-1106)."""
    text = text.strip()
    if text.lower() in _PLACES:
        return _PLACES[text.lower()]
    found = _DURATION.fullmatch(text)
    parts = {unit: value for unit, value in found.groupdict().items() if value} if found else {}
    if not parts:
        raise ConfigError(f"{name}={text}: set earliest, latest, none, or by_duration: with a duration such as PT1H")
    return ResetPolicy(None, round(sum(_UNIT_MS[unit] * float(value) for unit, value in parts.items())))


def _setting(name: str, default: Any, kind: str) -> Any:
    return field(default=default, metadata={"name": name, "kind": kind})


@dataclass(frozen=True)
class ConsumerConfig:
    """Parsed settings. Times in ms, sizes in bytes; `client` has the settings that all clients share."""

    client: ClientConfig
    group_id: str | None = _setting("group.id", None, "text")
    group_instance_id: str | None = _setting("group.instance.id", None, "text")
    assignors: tuple[str, ...] = field(
        default=("range", "cooperative-sticky"), metadata={"name": "partition.assignment.strategy", "kind": "assignors"}
    )
    session_timeout_ms: int = _setting("session.timeout.ms", 45_000, "positive int")
    heartbeat_interval_ms: int = _setting("heartbeat.interval.ms", 3_000, "positive int")
    max_poll_interval_ms: int = _setting("max.poll.interval.ms", 300_000, "positive int")
    enable_auto_commit: bool = _setting("enable.auto.commit", True, "boolean")
    auto_commit_interval_ms: int = _setting("auto.commit.interval.ms", 5_000, "int")
    auto_offset_reset: ResetPolicy = field(
        default=_PLACES["latest"], metadata={"name": "auto.offset.reset", "kind": "reset"}
    )
    client_rack: str = _setting("client.rack", "", "rack")
    default_api_timeout_ms: int = _setting("default.api.timeout.ms", 60_000, "positive int")
    fetch_max_wait_ms: int = _setting("fetch.max.wait.ms", 500, "int")
    fetch_min_bytes: int = _setting("fetch.min.bytes", 1, "int")
    max_poll_records: int = _setting("max.poll.records", 500, "positive int")
    #: Whether patterns leave out internal topics.
    exclude_internal_topics: bool = _setting("exclude.internal.topics", True, "boolean")
    #: Whether brokers with auto.create.topics.enable create missing topics. Off as in librdkafka, unlike in Java.
    allow_auto_create_topics: bool = _setting("allow.auto.create.topics", False, "boolean")
    #: Whether record batches with a wrong checksum are refused.
    check_crcs: bool = _setting("check.crcs", True, "boolean")
    group_protocol: str = _setting("group.protocol", "classic", "protocol")

    @property
    def is_cooperative(self) -> bool:
        """Whether rebalances are cooperative: true if cooperative-sticky is the only assignor."""
        return self.assignors == ("cooperative-sticky",)


_OWN = {item.metadata["name"]: item for item in fields(ConsumerConfig) if item.metadata}


def consumer_config(settings: Mapping[str, Any]) -> ConsumerConfig:
    """Parse settings by Kafka's names; values and `ConfigError` as in `client_config`."""
    shared = {name: value for name, value in settings.items() if name not in _OWN}
    shared.setdefault("max.partition.fetch.bytes", str(_PARTITION_FETCH_BYTES))
    values: dict[str, Any] = {"client": client_config(shared)}
    for name, text in setting_texts({name: settings[name] for name in settings if name in _OWN}).items():
        values[_OWN[name].name] = _parse(_OWN[name].metadata["kind"], name, text)
    config = ConsumerConfig(**values)
    ignored = without_effect(shared)
    if ignored:
        _log.warning("settings without effect on a consumer: %s", ", ".join(ignored))
    if config.heartbeat_interval_ms >= config.session_timeout_ms:
        raise ConfigError(
            f"heartbeat.interval.ms={config.heartbeat_interval_ms} must be less than "
            f"session.timeout.ms={config.session_timeout_ms}"
        )
    return config


def check_consumer_settings(settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a bad value of a setting that only consumers have; other settings are not looked at."""
    consumer_config({name: settings[name] for name in ("bootstrap.servers", *_OWN) if name in settings})


def _parse(kind: str, name: str, text: str) -> Any:
    if kind == "reset":
        return parse_reset(name, text)
    if kind == "assignors":
        return _parse_assignors(name, text)
    if kind == "rack":
        return text.strip()
    if kind == "protocol":
        if text.strip().lower() != "classic":
            raise ConfigError(f"{name}={text}: set classic, groups of KIP-848 are not supported")
        return "classic"
    value = parse_value(kind, name, text)
    if value == "":
        raise ConfigError(f"{name} is empty: set a name, or leave the setting out")
    return value


def _parse_assignors(name: str, text: str) -> tuple[str, ...]:
    """Parse assignors, given by name or as Java classes."""
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    found = tuple(_JAVAS.get(part.rpartition(".")[2], part) for part in wanted)
    for part in found:
        if part not in ASSIGNORS:
            raise ConfigError(f"{name}: {part!r} is unknown; set one or more of {', '.join(ASSIGNORS)}")
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"{name}={text}: set one or more of {', '.join(ASSIGNORS)}, each once")
    return found
