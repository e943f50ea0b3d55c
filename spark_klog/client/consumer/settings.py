"""Consumer settings with Kafka's names and defaults."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from spark_klog.base.names import check_topic_name
from spark_klog.base.settings import (
    BOOLEAN,
    INT,
    INT32_MAX,
    POSITIVE_INT,
    TEXT,
    Kind,
    choice,
    items,
    setting,
    settings_of,
    value_of,
)
from spark_klog.client.consumer.assignors import ASSIGNORS
from spark_klog.client.settings import ClientConfig, client_config, setting_texts, without_effect
from spark_klog.errors import ConfigError
from spark_klog.protocol.tables.records import EARLIEST, LATEST, READ_COMMITTED

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


def _reset(text: str) -> ResetPolicy:
    """auto.offset.reset; `by_duration:` takes an ISO 8601 duration (KIP-1106)."""
    if text.lower() in _PLACES:
        return _PLACES[text.lower()]
    match = _DURATION.fullmatch(text)
    parts = {unit: value for unit, value in match.groupdict().items() if value} if match else {}
    if not parts:
        raise ValueError("earliest, latest, none, or by_duration: with a duration such as PT1H")
    return ResetPolicy(None, round(sum(_UNIT_MS[unit] * float(value) for unit, value in parts.items())))


def _assignors(text: str) -> tuple[str, ...]:
    """partition.assignment.strategy: assignors by name, or by their Java classes."""
    names = tuple(_JAVAS.get(part.rpartition(".")[2], part) for part in items(text))
    known = ", ".join(ASSIGNORS)
    for name in names:
        if name not in ASSIGNORS:
            raise ConfigError(f"partition.assignment.strategy: {name!r} is unknown; set one or more of {known}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"one or more of {known}, each once")
    return names


def _topics(text: str) -> tuple[str, ...]:
    """retry.topics."""
    names = tuple(items(text))
    for name in names:
        check_topic_name(name)
    if len(set(names)) < len(names):
        raise ValueError("names of topics, each once")
    return names


def _delays(text: str) -> tuple[int, ...]:
    """retry.delays.ms."""
    parts = items(text)
    delays = tuple(int(part) for part in parts if part.isdecimal())
    if len(delays) < len(parts) or any(delay > INT32_MAX for delay in delays) or list(delays) != sorted(delays):
        raise ValueError("milliseconds, one number for each of retry.topics, none less than the one before")
    return delays


RESET = Kind("reset", _reset)
CLASSIC, CONSUMER = "classic", "consumer"
_PROTOCOL = choice("protocol", {CLASSIC: CLASSIC, CONSUMER: CONSUMER}, any_case=True)
#: Settings that only members of one protocol have, with what to do instead. Java's client and librdkafka refuse them.
_OF_CLASSIC = {
    "partition.assignment.strategy": "the coordinator assigns, set group.remote.assignor or leave both out",
    "session.timeout.ms": "leave it out, the broker's group.consumer.session.timeout.ms is the timeout",
    "heartbeat.interval.ms": "leave it out, the broker's group.consumer.heartbeat.interval.ms is the interval",
}
_OF_LETTERS = ("retry.topics", "retry.delays.ms", "retry.attempts", "dead.letter.deserialization.errors")
_OF_CONSUMER = {"group.remote.assignor": "the members assign, set partition.assignment.strategy or leave both out"}


@dataclass(frozen=True)
class ConsumerConfig:
    """Parsed settings. Times in ms, sizes in bytes; `client` has the settings that all clients share."""

    client: ClientConfig
    group_id: str | None = setting("group.id", None, TEXT)
    group_instance_id: str | None = setting("group.instance.id", None, TEXT)
    assignors: tuple[str, ...] = setting(
        "partition.assignment.strategy", ("range", "cooperative-sticky"), Kind("assignors", _assignors)
    )
    session_timeout_ms: int = setting("session.timeout.ms", 45_000, POSITIVE_INT)
    heartbeat_interval_ms: int = setting("heartbeat.interval.ms", 3_000, POSITIVE_INT)
    max_poll_interval_ms: int = setting("max.poll.interval.ms", 300_000, POSITIVE_INT)
    enable_auto_commit: bool = setting("enable.auto.commit", True, BOOLEAN)
    auto_commit_interval_ms: int = setting("auto.commit.interval.ms", 5_000, INT)
    auto_offset_reset: ResetPolicy = setting("auto.offset.reset", _PLACES["latest"], RESET)
    client_rack: str = setting("client.rack", "", Kind("rack", str))
    default_api_timeout_ms: int = setting("default.api.timeout.ms", 60_000, POSITIVE_INT)
    fetch_max_wait_ms: int = setting("fetch.max.wait.ms", 500, INT)
    fetch_min_bytes: int = setting("fetch.min.bytes", 1, INT)
    max_poll_records: int = setting("max.poll.records", 500, POSITIVE_INT)
    #: Whether patterns leave out internal topics.
    exclude_internal_topics: bool = setting("exclude.internal.topics", True, BOOLEAN)
    #: Whether brokers with auto.create.topics.enable create missing topics. Off as in librdkafka, unlike in Java.
    allow_auto_create_topics: bool = setting("allow.auto.create.topics", False, BOOLEAN)
    #: Whether record batches with a wrong checksum are refused.
    check_crcs: bool = setting("check.crcs", True, BOOLEAN)
    group_protocol: str = setting("group.protocol", CLASSIC, _PROTOCOL)
    #: The server-side assignor, with group.protocol=consumer; None leaves it to the coordinator.
    group_remote_assignor: str | None = setting("group.remote.assignor", None, TEXT)
    dead_letter_topic: str | None = setting("dead.letter.topic", None, TEXT)
    #: Whether records that do not deserialize become dead letters.
    dead_letter_deserialization_errors: bool = setting("dead.letter.deserialization.errors", False, BOOLEAN)
    #: The topics in which records wait to be tried again, each with its delay.
    retry_topics: tuple[str, ...] | None = setting("retry.topics", None, Kind("topics", _topics))
    retry_delays_ms: tuple[int, ...] | None = setting("retry.delays.ms", None, Kind("delays", _delays))
    #: How often a record is tried again before it is a dead letter; None: once in each of the topics.
    retry_attempts: int | None = setting("retry.attempts", None, POSITIVE_INT)

    @property
    def is_cooperative(self) -> bool:
        """Whether rebalances are cooperative: true if cooperative-sticky is the only assignor."""
        return self.assignors == ("cooperative-sticky",)


_OWN = settings_of(ConsumerConfig)


def consumer_config(settings: Mapping[str, Any]) -> ConsumerConfig:
    """Parse settings by Kafka's names; values and `ConfigError` as in `client_config`."""
    shared = {name: value for name, value in settings.items() if name not in _OWN}
    shared.setdefault("max.partition.fetch.bytes", str(_PARTITION_FETCH_BYTES))
    if "retry.topics" in settings:
        shared.setdefault("isolation.level", "read_committed")
    values: dict[str, Any] = {"client": client_config(shared)}
    for name, text in setting_texts({name: settings[name] for name in settings if name in _OWN}).items():
        value = values[_OWN[name].name] = value_of(_OWN[name].metadata["kind"], name, text)
        if value == "" and name in ("group.id", "group.instance.id"):
            raise ConfigError(f"{name} is empty: set a name, or leave the setting out")
    config = ConsumerConfig(**values)
    ignored = without_effect(shared)
    if ignored:
        _log.warning("settings without effect on a consumer: %s", ", ".join(ignored))
    of_other = _OF_CONSUMER if config.group_protocol == CLASSIC else _OF_CLASSIC
    if foreign := [name for name in of_other if name in settings]:
        advice = of_other[foreign[0]]
        raise ConfigError(f"{foreign[0]} has no effect with group.protocol={config.group_protocol}: {advice}")
    if config.heartbeat_interval_ms >= config.session_timeout_ms:
        raise ConfigError(
            f"heartbeat.interval.ms={config.heartbeat_interval_ms} must be less than "
            f"session.timeout.ms={config.session_timeout_ms}"
        )
    _check_letters(config, settings)
    return config


def _check_letters(config: ConsumerConfig, settings: Mapping[str, Any]) -> None:
    """`ConfigError` unless the settings of dead letters and retries fit together."""
    topic, names, delays = config.dead_letter_topic, config.retry_topics or (), config.retry_delays_ms or ()
    if topic is None:
        if idle := [name for name in _OF_LETTERS if name in settings]:
            raise ConfigError(f"{idle[0]} needs dead.letter.topic: the topic for records that can't be processed")
        return
    check_topic_name(topic)
    if config.group_id is None:
        raise ConfigError("dead.letter.topic needs group.id: a letter is written with the commit of its offset")
    if topic in names:
        raise ConfigError(f"{topic} can't be both dead.letter.topic and one of retry.topics")
    if len(names) != len(delays):
        raise ConfigError(f"retry.delays.ms has {len(delays)} numbers for {len(names)} retry.topics: set one for each")
    if config.retry_attempts is not None and not names:
        raise ConfigError("retry.attempts needs retry.topics: the topics in which records wait")
    if names and config.client.isolation_level != READ_COMMITTED:
        raise ConfigError("retry.topics needs isolation.level=read_committed: retries are written in transactions")


def check_consumer_settings(settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a bad value of a setting that only consumers have; other settings are not looked at."""
    consumer_config({name: settings[name] for name in ("bootstrap.servers", *_OWN) if name in settings})
