"""The connector's options: those of Spark's Kafka connector by name, and what is refused."""

from __future__ import annotations

import difflib
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from spark_klog.client.config import ClientConfig, client_config, without_effect
from spark_klog.errors import ConfigError
from spark_klog.spark.offsets import (
    OffsetSpec,
    Spec,
    parse_assign,
    parse_offsets,
    parse_timestamp,
    parse_timestamps,
)

_log = logging.getLogger(__name__)

#: What stands before the names of Kafka's settings.
PREFIX = "kafka."
_SUBSCRIPTIONS = ("assign", "subscribe", "subscribePattern")
#: Options that decide where a read ends: a stream has no end.
_ENDING = ("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets")
#: Options of micro-batches; in a batch query they have no effect, as with Spark's Kafka connector.
_TRIGGER = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
_SOURCE = (
    "path",
    *_SUBSCRIPTIONS,
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsets",
    "startingOffsetsByTimestampStrategy",
    *_ENDING,
    *_TRIGGER,
    "minPartitions",
    "maxRecordsPerPartition",
    "maxBytesPerPartition",
    "failOnDataLoss",
    "badRecords",
    "badRecordsPath",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "kafkaConsumer.pollTimeoutMs",
    "groupIdPrefix",
    "offsetsPath",
    "estimateRecordBytes",
)
_KNOWN = (*_SOURCE, "includeHeaders", "topic")
#: Settings that the connector decides itself, as Spark's does.
_PROTECTED = {
    "key.deserializer": "keys are binary: cast the column instead",
    "value.deserializer": "values are binary: cast the column instead",
    "key.serializer": "keys are binary or strings",
    "value.serializer": "values are binary or strings",
    "auto.offset.reset": "use startingOffsets and failOnDataLoss",
    "enable.auto.commit": "Spark's checkpoint is the truth of a query",
    "interceptor.classes": "there are none",
}
#: What of Kafka's settings means something where directories are read.
_OF_DIRECTORIES = ("isolation.level", "decompressed.max.bytes")
#: Options of Spark's own for a streaming write, which it hands to the sink, too.
_SPARKS = frozenset({"checkpointlocation", "queryname"})
_TRUTH = {"true": True, "false": False}
#: A broker may answer with latest offsets that are older than those of an answer before: then it is asked again.
_OFFSET_RETRIES, _OFFSET_RETRY_MS = 5, 200


def _canonical(name: str) -> str:
    return name.lower()


_KNOWN_BY_KEY = {_canonical(name): name for name in _KNOWN}
_COUNT = re.compile(r"\d{1,19}")
_DURATION = re.compile(r"(\d{1,18})\s*(ms|s|m|min|h|d)?")
_UNIT_MS = {None: 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


@dataclass(frozen=True)
class Subscription:
    """What to read: exactly one of the three. `assign` is {topic: [partitions]}."""

    topics: tuple[str, ...] | None = None
    pattern: str | None = None
    assign: dict[str, list[int]] | None = None

    def names(self, topic: str, partition: int) -> bool:
        """Whether a partition is read if it is there and not internal."""
        if self.assign is not None:
            return partition in self.assign.get(topic, ())
        if self.pattern is not None:
            return re.search(self.pattern, topic) is not None
        return topic in (self.topics or ())


#: All topics that are not internal: each has the empty string in its name.
ALL_TOPICS = Subscription(pattern="")


@dataclass(frozen=True)
class GroupOffsetsOptions:
    """Where a query's progress is shown: the group's offsets at its coordinator, and in trees of directories.

    `trees` are addresses as `directories.opening.open_tree` takes them. With `dual` the group moves between coordinator
    and ZooKeeper, which is the last of them: what either has counts.
    """

    group: str
    coordinator: bool
    trees: tuple[str, ...]
    dual: bool = False


@dataclass(frozen=True)
class TriggerLimits:
    """How much a micro-batch takes: records, bytes; not before so many records wait, or so many ms have passed."""

    max_offsets: int | None = None
    max_bytes: int | None = None
    min_offsets: int | None = None
    max_delay_ms: int = 15 * 60_000

    @property
    def any(self) -> bool:
        return (self.max_offsets, self.max_bytes, self.min_offsets) != (None, None, None)


@dataclass(frozen=True)
class SplitLimits:
    """How partitions are split into tasks: at least so many tasks, at most so many records or bytes in one."""

    min_partitions: int | None = None
    max_records: int | None = None
    max_bytes: int | None = None


@dataclass(frozen=True)
class BadRecordsOptions:
    """What becomes of corrupt batches: "fail", "skip" or "deadletter" (to a folder or URI, `path`)."""

    mode: str = "fail"
    path: str | None = None


@dataclass(frozen=True)
class SourceOptions:
    """Options of a read, checked. `on_data_loss` is "fail", "warn" or "report".

    `starting_option` and `ending_option` are the names of those that said so, for messages. With `paths`, data
    directories are read, without a broker; `client` holds the settings that mean something there.
    """

    client: dict[str, str]
    subscription: Subscription
    starting: Spec
    starting_option: str
    ending: Spec
    ending_option: str
    on_data_loss: str
    trigger: TriggerLimits
    split: SplitLimits
    bad_records: BadRecordsOptions
    offset_retries: int
    offset_retry_ms: int
    group_offsets: GroupOffsetsOptions | None
    paths: tuple[str, ...] = ()
    #: How long a task waits for records that should be there; None: kafka.request.timeout.ms.
    poll_timeout_ms: int | None = None
    estimate_record_bytes: bool = False


@dataclass(frozen=True)
class SinkOptions:
    """Options of a write, checked."""

    client: dict[str, str]
    topic: str | None


def _split(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(client settings without their prefix, connector options by lower-case name), all names known."""
    settings: dict[str, str] = {}
    own: dict[str, str] = {}
    for name, value in options.items():
        key = _canonical(name)
        if key.startswith(PREFIX):
            setting = key[len(PREFIX) :]
            if setting in _PROTECTED:
                raise ConfigError(f"option {name} can't be set: {_PROTECTED[setting]}")
            settings[setting] = value
        elif key in _KNOWN_BY_KEY:
            if key != "path" or value:  # Spark gives an empty one where there is none
                own[key] = value
        else:
            close = difflib.get_close_matches(key, [*_KNOWN_BY_KEY, "kafka.bootstrap.servers"], 1)
            hint = f"; did you mean {_KNOWN_BY_KEY.get(close[0], close[0])}?" if close else ""
            raise ConfigError(f"unknown option {name!r}{hint}")
    if "path" not in own:
        if "bootstrap.servers" not in settings:
            raise ConfigError(
                "option kafka.bootstrap.servers is not set: HOST:PORT[,HOST:PORT...] of a broker is wanted"
            )
        client_config(settings, PREFIX)
        _warn_without_effect(*without_effect(settings))
    return settings, own


@cache
def _warn_without_effect(*names: str) -> None:
    """Log the settings that have no effect, once in a process."""
    if names:
        _log.warning("these options have no effect: %s", ", ".join(f"{PREFIX}{name}" for name in names))


def _boolean(own: dict[str, str], name: str, default: bool) -> bool:
    text = own.get(_canonical(name), str(default)).lower()
    if text not in _TRUTH:
        raise ConfigError(f"option {name}={text}: true or false is wanted")
    return _TRUTH[text]


def _count(own: dict[str, str], name: str, smallest: int = 1) -> int | None:
    text = own.get(_canonical(name))
    if text is None:
        return None
    if not _COUNT.fullmatch(text.strip()) or int(text) < smallest:
        raise ConfigError(f"option {name}={text}: a number from {smallest} on is wanted")
    return int(text)


def _milliseconds(own: dict[str, str], name: str, default: int) -> int:
    """A duration as Spark writes it: 15m, 30s, 500ms; a bare number is ms."""
    text = own.get(_canonical(name))
    if text is None:
        return default
    match = _DURATION.fullmatch(text.strip().lower())
    if not match:
        raise ConfigError(f"option {name}={text}: a duration like 15m, 30s or 500ms is wanted")
    return int(match[1]) * _UNIT_MS[match[2]]


def _choice(own: dict[str, str], name: str, choices: Mapping[str, str]) -> str:
    """The value that a word stands for; the first is the default."""
    text = own.get(_canonical(name), next(iter(choices))).lower()
    if text not in choices:
        raise ConfigError(f"option {name}={text}: {', '.join(choices)} are the choices")
    return choices[text]


def _subscription(own: dict[str, str], default: Subscription | None) -> Subscription:
    given = [name for name in _SUBSCRIPTIONS if _canonical(name) in own]
    if not given and default is not None:
        return default
    if len(given) != 1:
        what = f"{' and '.join(given)} exclude each other" if given else "none is set"
        raise ConfigError(f"exactly one of the options {', '.join(_SUBSCRIPTIONS)} is wanted: {what}")
    name, text = given[0], own[_canonical(given[0])]
    if name == "assign":
        return Subscription(assign=parse_assign(text))
    if name == "subscribePattern":
        text = text.strip()
        if not text:
            raise ConfigError("option subscribePattern is empty: it would match no topic")
        try:
            re.compile(text)
        except re.error as error:
            raise ConfigError(f"option subscribePattern={text!r} is no regular expression: {error}") from None
        return Subscription(pattern=text)
    topics = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not topics:
        raise ConfigError(f"option subscribe={text!r} names no topic")
    return Subscription(topics=topics)


def _group_offsets(settings: dict[str, str], own: dict[str, str]) -> GroupOffsetsOptions | None:
    """offsets.storage and dual.commit.enabled are those of Kafka's consumers (1.0 chapter "Distribution")."""
    group, connect, path = settings.get("group.id"), settings.get("zookeeper.connect"), own.get("offsetspath")
    if group is None:
        for name, value in (("offsetsPath", path), ("kafka.offsets.storage", settings.get("offsets.storage"))):
            if value is not None:
                raise ConfigError(f"option {name} needs kafka.group.id: offsets are kept by group")
        for name in ("zookeeper.connect", "dual.commit.enabled"):
            if name in settings:
                _log.warning("option kafka.%s has no effect without kafka.group.id: offsets are kept by group", name)
        return None
    default = "zookeeper" if connect is not None else "kafka" if path is None else None
    storage = settings.get("offsets.storage", default)
    if storage not in (None, "kafka", "zookeeper"):
        raise ConfigError(f"option kafka.offsets.storage={storage}: kafka or zookeeper is wanted")
    if storage == "zookeeper" and connect is None:
        raise ConfigError("option kafka.offsets.storage=zookeeper needs kafka.zookeeper.connect")
    dotted = {f"{PREFIX}{name}": value for name, value in settings.items()}
    # as Kafka's default: who keeps offsets in ZooKeeper says so to begin the way back
    dual = _boolean(dotted, "kafka.dual.commit.enabled", storage == "kafka") and connect is not None
    trees = [path] if path is not None else []
    if connect is not None and (storage == "zookeeper" or dual):
        trees.append(f"zookeeper://{connect}")
    return GroupOffsetsOptions(group, storage == "kafka" or dual, tuple(trees), dual)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _place(settings: dict[str, str], own: dict[str, str], which: str, default: str, strict: bool) -> tuple[str, Spec]:
    """(option, what it says) of where to start or end: a timestamp for all, before one for each, before offsets."""
    name = f"{which}Timestamp"
    if _canonical(name) in own:
        return name, parse_timestamp(name, own[_canonical(name)], strict)
    name = f"{which}OffsetsByTimestamp"
    if _canonical(name) in own:
        return name, parse_timestamps(name, own[_canonical(name)], strict)
    name = f"{which}Offsets"
    return name, parse_offsets(name, own.get(_canonical(name), default), _now_ms, settings.get("group.id"))


def _paths(settings: dict[str, str], own: dict[str, str], streaming: bool) -> tuple[str, ...]:
    """The data directories, as Kafka's log.dirs has them; none where brokers are asked."""
    if "path" not in own:
        return ()
    if streaming:
        raise ConfigError("option path: log directories are read by batch queries only; a stream needs brokers")
    if "bootstrap.servers" in settings:
        raise ConfigError("options path and kafka.bootstrap.servers exclude each other: directories need no broker")
    for name in settings:
        if name not in _OF_DIRECTORIES:
            raise ConfigError(f"option kafka.{name} means nothing where option path is read: there is no broker")
    for name in ("startingOffsets", "endingOffsets"):
        if own.get(_canonical(name), "").strip().lower() == "group":
            raise ConfigError(f"option {name}=group: log directories are read without the offsets of groups")
    directory_config(settings)
    paths = tuple(part.strip() for part in own["path"].split(",") if part.strip())
    if not paths:
        raise ConfigError(f"option path={own['path']!r} names no directory")
    return paths


def directory_config(settings: Mapping[str, str]) -> ClientConfig:
    """The settings of a read of directories; its brokers are never asked. `ConfigError` for a bad value."""
    return client_config({"bootstrap.servers": "no-broker:1", **settings}, PREFIX)


def source_options(options: Mapping[str, str], streaming: bool) -> SourceOptions:
    """The options of a read; `ConfigError` names what is unknown, in conflict, or wrong in such a query."""
    settings, own = _split(options)
    paths = _paths(settings, own, streaming)
    if "topic" in own:
        raise ConfigError("option topic is for writing; use subscribe, subscribePattern or assign")
    strict = _choice(own, "startingOffsetsByTimestampStrategy", {"error": "error", "latest": "latest"}) == "error"
    start_option, starting = _place(settings, own, "starting", "latest" if streaming else "earliest", strict)
    end_option, ending = _place(settings, own, "ending", "latest", False)
    _check_query(own, streaming, starting, start_option, ending, end_option)
    mode = _choice(own, "badRecords", {"fail": "fail", "skip": "skip", "deadletter": "deadletter"})
    path = own.get("badrecordspath")
    if (mode == "deadletter") != (path is not None):
        raise ConfigError("options badRecords=deadletter and badRecordsPath need each other")
    retries, pause = _count(own, "fetchOffset.numRetries", 0), _count(own, "fetchOffset.retryIntervalMs", 0)
    return SourceOptions(
        settings,
        _subscription(own, ALL_TOPICS if paths else None),
        starting,
        start_option,
        ending,
        end_option,
        _choice(own, "failOnDataLoss", {"true": "fail", "false": "warn", "report": "report"}),
        _trigger_limits(own),
        SplitLimits(
            _count(own, "minPartitions"), _count(own, "maxRecordsPerPartition"), _count(own, "maxBytesPerPartition")
        ),
        BadRecordsOptions(mode, path),
        _OFFSET_RETRIES if retries is None else retries,
        _OFFSET_RETRY_MS if pause is None else pause,
        _group_offsets(settings, own),
        paths,
        _count(own, "kafkaConsumer.pollTimeoutMs"),
        _boolean(own, "estimateRecordBytes", False),
    )


def _check_query(
    own: dict[str, str], streaming: bool, starting: Spec, start_option: str, ending: Spec, end_option: str
) -> None:
    if streaming:
        for name in _ENDING:
            if _canonical(name) in own:
                raise ConfigError(f"option {name} is for batch queries; a stream has no end")
    else:
        for name in _TRIGGER:
            if _canonical(name) in own:
                _log.warning("option %s has no effect in a batch query", name)
    if not streaming and isinstance(starting, OffsetSpec) and starting.holds_latest:
        raise ConfigError(
            f"option {start_option} can't be latest (-1) in a batch query: there would be nothing to read"
        )
    if isinstance(ending, OffsetSpec) and ending.holds_earliest:
        raise ConfigError(f"option {end_option} can't be earliest (-2): there would be nothing to read")


def _trigger_limits(own: dict[str, str]) -> TriggerLimits:
    limits = TriggerLimits(
        _count(own, "maxOffsetsPerTrigger"),
        _count(own, "maxBytesPerTrigger"),
        _count(own, "minOffsetsPerTrigger"),
        _milliseconds(own, "maxTriggerDelay", TriggerLimits.max_delay_ms),
    )
    if limits.max_offsets is not None and limits.min_offsets is not None and limits.max_offsets < limits.min_offsets:
        raise ConfigError(
            f"option maxOffsetsPerTrigger={limits.max_offsets} is below minOffsetsPerTrigger={limits.min_offsets}"
        )
    return limits


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    """The options of a write; `ConfigError` names what is unknown or for reading only."""
    settings, own = _split({name: value for name, value in options.items() if _canonical(name) not in _SPARKS})
    for name in _SOURCE:
        if _canonical(name) in own:
            raise ConfigError(f"option {name} is for reading")
    topic = own.get("topic", "").strip() or None
    return SinkOptions(settings, topic)


def include_headers(options: Mapping[str, Any]) -> bool:
    """The option includeHeaders."""
    return _boolean({_canonical(name): value for name, value in options.items()}, "includeHeaders", False)
