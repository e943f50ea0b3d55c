"""Parse and check the options of a read, which have the names of Spark's Kafka connector."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from spark_klog.base.addresses import without_user
from spark_klog.base.clock import system_ms
from spark_klog.base.names import topic_pattern
from spark_klog.base.settings import items
from spark_klog.client.places import (
    GroupSpec,
    OffsetSpec,
    Spec,
    parse_assign,
    parse_offsets,
    parse_timestamp,
    parse_timestamps,
)
from spark_klog.client.settings import ClientConfig, client_config
from spark_klog.errors import ConfigError
from spark_klog.spark.options.names import (
    ENDING,
    PREFIX,
    SINK,
    SUBSCRIPTIONS,
    TRIGGER,
    boolean,
    chosen,
    count,
    milliseconds,
    split,
)

_log = logging.getLogger(__name__)

#: Kafka's settings that apply to directories.
_OF_DIRECTORIES = ("isolation.level", "decompressed.max.bytes")
#: Defaults for retries of ListOffsets: a broker may return latest offsets older than those it returned before.
_OFFSET_RETRIES, _OFFSET_RETRY_MS = 5, 200


@dataclass(frozen=True)
class Subscription:
    """The topics or partitions to read: exactly one of the three. `assign` is {topic: [partitions]}."""

    topics: tuple[str, ...] | None = None
    pattern: str | None = None
    assign: dict[str, list[int]] | None = None

    def names(self, topic: str, partition: int) -> bool:
        """Whether the subscription includes a partition, if it exists and is not internal."""
        if self.assign is not None:
            return partition in self.assign.get(topic, ())
        if self.pattern is not None:
            return re.search(self.pattern, topic) is not None
        return topic in (self.topics or ())


#: All topics that are not internal: the empty pattern matches every name.
ALL_TOPICS = Subscription(pattern="")


@dataclass(frozen=True)
class GroupOffsetsOptions:
    """Where the offsets of `group` are: at its coordinator, and in trees of directories.

    If `commits`, a stream publishes its progress there; otherwise it only reads them, for `startingOffsets=group`.
    `trees` are addresses for `trees.opening.open_tree`. With `dual` the group migrates between coordinator
    and ZooKeeper, which is the last tree: reads take the larger offset of both.
    """

    group: str
    coordinator: bool
    trees: tuple[str, ...]
    dual: bool = False
    commits: bool = True


@dataclass(frozen=True)
class TriggerLimits:
    """Limits of a micro-batch: maximum records and bytes; minimum records, which `max_delay_ms` overrides."""

    max_offsets: int | None = None
    max_bytes: int | None = None
    min_offsets: int | None = None
    max_delay_ms: int = 15 * 60_000

    @property
    def any(self) -> bool:
        return (self.max_offsets, self.max_bytes, self.min_offsets) != (None, None, None)


@dataclass(frozen=True)
class SplitLimits:
    """How to split partitions into tasks: the minimum of tasks, the maximum of records and bytes in each."""

    min_partitions: int | None = None
    max_records: int | None = None
    max_bytes: int | None = None


@dataclass(frozen=True)
class BadRecordsOptions:
    """How to handle corrupt record batches: "fail", "skip" or "deadletter" (to `path`, a folder or URI)."""

    mode: str = "fail"
    path: str | None = None


@dataclass(frozen=True)
class SourceOptions:
    """Checked options of a read. `on_data_loss` is "fail", "warn" or "report".

    `starting_option` and `ending_option` name the options that set `starting` and `ending`, for messages. With `paths`
    the query reads data directories without a broker; `client` then has only settings that apply there.
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
    #: How long a task waits for records that should exist; None means kafka.request.timeout.ms.
    poll_timeout_ms: int | None = None
    estimate_record_bytes: bool = False


def _subscription(own: dict[str, str], default: Subscription | None) -> Subscription:
    given = [name for name in SUBSCRIPTIONS if name in own]
    if not given and default is not None:
        return default
    if len(given) != 1:
        found = f"found {' and '.join(given)}" if given else "none is set"
        raise ConfigError(f"set exactly one of the options assign, subscribe and subscribePattern; {found}")
    name, text = given[0], own[given[0]]
    if name == "assign":
        return Subscription(assign=parse_assign(text))
    if name == "subscribePattern":
        text = text.strip()
        if not text:
            raise ConfigError("option subscribePattern is empty")
        topic_pattern(f"option subscribePattern={text!r}", text)
        return Subscription(pattern=text)
    topics = tuple(dict.fromkeys(items(text)))
    if not topics:
        raise ConfigError(f"option subscribe={text!r} names no topic")
    return Subscription(topics=topics)


def _group_offsets(
    settings: dict[str, str], own: dict[str, str], *, streaming: bool, is_read: bool
) -> GroupOffsetsOptions | None:
    """Parse the group and its stores, with offsets.storage and dual.commit.enabled of Kafka's consumers (1.0 chapter
    "Distribution"). `is_read` if the query starts or ends at the group's offsets.

    The group alone does not make a stream commit: with format("kafka") it doesn't, and another application may use the
    group.
    """
    group, connect, path = settings.get("group.id"), settings.get("zookeeper.connect"), own.get("offsetsPath")
    commits = boolean(own, "commitOffsets", False)
    if group is None:
        if commits:
            raise ConfigError("option commitOffsets needs kafka.group.id, the group whose offsets to commit")
        for name, value in (("offsetsPath", path), ("kafka.offsets.storage", settings.get("offsets.storage"))):
            if value is not None:
                raise ConfigError(f"option {name} needs kafka.group.id: offsets are stored per group")
        for name in ("zookeeper.connect", "dual.commit.enabled"):
            if name in settings:
                _log.warning("option kafka.%s has no effect without kafka.group.id: offsets are stored per group", name)
        return None
    if streaming and not commits:
        if path is not None and not is_read:
            raise ConfigError("option offsetsPath needs commitOffsets=true, to commit a query's progress there")
        if "commitOffsets" not in own:
            _warn_commits_nothing(group)
    default = "zookeeper" if connect is not None else "kafka" if path is None else None
    storage = settings.get("offsets.storage", default)
    if storage not in (None, "kafka", "zookeeper"):
        raise ConfigError(f"option kafka.offsets.storage={storage} must be kafka or zookeeper")
    if storage == "zookeeper" and connect is None:
        raise ConfigError("option kafka.offsets.storage=zookeeper needs kafka.zookeeper.connect")
    dotted = {f"{PREFIX}{name}": value for name, value in settings.items()}
    # The default is Kafka's: on when offsets go to the coordinator.
    dual = boolean(dotted, "kafka.dual.commit.enabled", storage == "kafka") and connect is not None
    trees = [path] if path is not None else []
    if connect is not None and (storage == "zookeeper" or dual):
        trees.append(f"zookeeper://{connect}")
    return GroupOffsetsOptions(group, storage == "kafka" or dual, tuple(trees), dual, commits)


@cache
def _warn_commits_nothing(group: str) -> None:
    """Log, once per process, that a query has a group and leaves its offsets alone: earlier versions committed them."""
    _log.warning(
        'kafka.group.id=%s: the query commits no offsets of this group, as with format("kafka"); earlier versions of '
        "klog did. Set commitOffsets=true to show the query's progress as the group's offsets, false to silence this",
        group,
    )


def _bound(settings: dict[str, str], own: dict[str, str], which: str, default: str, strict: bool) -> tuple[str, Spec]:
    """(option, spec) of the start or end. By precedence: one timestamp, timestamps per partition, offsets."""
    name = f"{which}Timestamp"
    if name in own:
        return name, parse_timestamp(name, own[name], strict)
    name = f"{which}OffsetsByTimestamp"
    if name in own:
        return name, parse_timestamps(name, own[name], strict)
    name = f"{which}Offsets"
    return name, parse_offsets(name, own.get(name, default), system_ms, settings.get("group.id"))


def _paths(settings: dict[str, str], own: dict[str, str], streaming: bool) -> tuple[str, ...]:
    """The data directories of the option path, separated by commas as in Kafka's log.dirs; empty for brokers."""
    if "path" not in own:
        return ()
    if streaming:
        raise ConfigError("option path: only batch queries can read log directories; a stream needs brokers")
    if "bootstrap.servers" in settings:
        raise ConfigError("set only one of the options path and kafka.bootstrap.servers: directories need no broker")
    for name in settings:
        if name not in _OF_DIRECTORIES:
            raise ConfigError(f"option kafka.{name} does not apply to option path, which needs no broker: remove it")
    for name in ("startingOffsets", "endingOffsets"):
        if own.get(name, "").strip().lower() == "group":
            raise ConfigError(f"option {name}=group needs brokers: log directories have no offsets of groups")
    directory_config(settings)
    paths = tuple(items(own["path"]))
    if not paths:
        raise ConfigError(f"option path={without_user(own['path'])!r} names no directory")
    return paths


def directory_config(settings: Mapping[str, str]) -> ClientConfig:
    """The client settings for reading directories; the broker address is a dummy. `ConfigError` for a bad value."""
    return client_config({"bootstrap.servers": "no-broker:1", **settings}, PREFIX)


def source_options(options: Mapping[str, str], streaming: bool) -> SourceOptions:
    """Check the options of a read; `ConfigError` for options that are unknown, conflict, or don't suit the query."""
    settings, own = split(options)
    paths = _paths(settings, own, streaming)
    for name in SINK:
        if name in own:
            hint = ": use subscribe, subscribePattern or assign" if name == "topic" else ""
            raise ConfigError(f"option {name} is for writing{hint}")
    strict = chosen(own, "startingOffsetsByTimestampStrategy", {"error": "error", "latest": "latest"}) == "error"
    start_option, starting = _bound(settings, own, "starting", "latest" if streaming else "earliest", strict)
    end_option, ending = _bound(settings, own, "ending", "latest", False)
    _check_query(own, streaming, starting, start_option, ending, end_option)
    is_read = isinstance(starting, GroupSpec) or isinstance(ending, GroupSpec)
    mode = chosen(own, "badRecords", {"fail": "fail", "skip": "skip", "deadletter": "deadletter"})
    path = own.get("badRecordsPath")
    if (mode == "deadletter") != (path is not None):
        raise ConfigError("options badRecords=deadletter and badRecordsPath require each other")
    retries, pause = count(own, "fetchOffset.numRetries", 0), count(own, "fetchOffset.retryIntervalMs", 0)
    return SourceOptions(
        client=settings,
        subscription=_subscription(own, ALL_TOPICS if paths else None),
        starting=starting,
        starting_option=start_option,
        ending=ending,
        ending_option=end_option,
        on_data_loss=chosen(own, "failOnDataLoss", {"true": "fail", "false": "warn", "report": "report"}),
        trigger=_trigger_limits(own),
        split=SplitLimits(
            count(own, "minPartitions"), count(own, "maxRecordsPerPartition"), count(own, "maxBytesPerPartition")
        ),
        bad_records=BadRecordsOptions(mode, path),
        offset_retries=_OFFSET_RETRIES if retries is None else retries,
        offset_retry_ms=_OFFSET_RETRY_MS if pause is None else pause,
        group_offsets=_group_offsets(settings, own, streaming=streaming, is_read=is_read),
        paths=paths,
        poll_timeout_ms=count(own, "kafkaConsumer.pollTimeoutMs"),
        estimate_record_bytes=boolean(own, "estimateRecordBytes", False),
    )


def _check_query(
    own: dict[str, str], streaming: bool, starting: Spec, start_option: str, ending: Spec, end_option: str
) -> None:
    if streaming:
        for name in ENDING:
            if name in own:
                raise ConfigError(f"option {name} is for batch queries: a stream has no end")
    else:
        for name in TRIGGER:
            if own.pop(name, None) is not None:  # its value does not matter then
                _log.warning("option %s has no effect in a batch query", name)
    if not streaming and isinstance(starting, OffsetSpec) and starting.holds_latest:
        raise ConfigError(
            f"option {start_option} can't be latest (-1) in a batch query: there would be nothing to read"
        )
    if isinstance(ending, OffsetSpec) and ending.holds_earliest:
        raise ConfigError(f"option {end_option} can't be earliest (-2): there would be nothing to read")


def _trigger_limits(own: dict[str, str]) -> TriggerLimits:
    limits = TriggerLimits(
        count(own, "maxOffsetsPerTrigger"),
        count(own, "maxBytesPerTrigger"),
        count(own, "minOffsetsPerTrigger"),
        milliseconds(own, "maxTriggerDelay", TriggerLimits.max_delay_ms),
    )
    if limits.max_offsets is not None and limits.min_offsets is not None and limits.max_offsets < limits.min_offsets:
        raise ConfigError(
            f"option maxOffsetsPerTrigger={limits.max_offsets} is below minOffsetsPerTrigger={limits.min_offsets}"
        )
    return limits


def include_headers(options: Mapping[str, Any]) -> bool:
    """Parse the option includeHeaders."""
    given = {name.lower(): value for name, value in options.items()}
    return boolean({"includeHeaders": given.get("includeheaders", "false")}, "includeHeaders", False)
