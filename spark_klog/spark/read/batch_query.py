"""Plan a batch query: the offset ranges that each task reads, from a cluster or from data directories."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from types import MappingProxyType
from uuid import UUID

from spark_klog.base.names import TopicPartition
from spark_klog.base.settings import some_of
from spark_klog.client.offsets import NO_OFFSET
from spark_klog.client.places import BeforeEndSpec, GroupSpec, Offsets, OffsetSpec, Spec, TimeSpec, check_covers
from spark_klog.errors import ConfigError, NoOffsetForTimestamp
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from spark_klog.records.contract import LOG_APPEND_TIME
from spark_klog.spark.options import SourceOptions
from spark_klog.spark.read.pushdown import Pushed
from spark_klog.spark.read.ranges import (
    LeaderOf,
    LossReporter,
    OffsetRange,
    beyond,
    check_ends,
    check_order,
    clip,
    no_leader,
    nonempty_ranges,
)

_log = logging.getLogger(__name__)


class QuerySource(ABC):
    """What a query reads: the partitions of its subscription, at brokers or in data directories."""

    #: Ids of the topics that `partitions` found, if the brokers give them.
    topic_ids: Mapping[str, UUID] = MappingProxyType({})

    @property
    def leader_of(self) -> LeaderOf:
        """The leaders in the last metadata."""
        return no_leader

    @abstractmethod
    def close(self) -> None:
        """Close the connections, end the threads."""

    @abstractmethod
    def partitions(self) -> list[TopicPartition]:
        """The subscribed partitions; `ConfigError` if a topic or partition named by the options does not exist."""

    @abstractmethod
    def list_offsets(self, times: Mapping[TopicPartition, int]) -> Offsets:
        """The first offset at or after each time (ms, EARLIEST or LATEST); NO_OFFSET if no record is that late."""

    @abstractmethod
    def timestamp_types(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        """The timestamp type (records/contract.py) of the record batch at each offset; omits offsets without one."""

    @abstractmethod
    def tasks(self, ranges: list[OffsetRange]) -> list[tuple[OffsetRange, ...]]:
        """Split and pack ranges into tasks, within the limits of the options."""

    def earliest(self, partitions: Collection[TopicPartition]) -> Offsets:
        return self.list_offsets(dict.fromkeys(partitions, EARLIEST))

    def latest(self, partitions: Collection[TopicPartition]) -> Offsets:
        """The end of each partition: the offset after the last record that the isolation level lets a query read."""
        return self.list_offsets(dict.fromkeys(partitions, LATEST))

    def log_ends(self, partitions: Collection[TopicPartition]) -> Offsets:
        """The end of each partition's log: at brokers whatever the isolation level is, in directories as `latest`."""
        return self.latest(partitions)

    def timestamps(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int | None]:
        """The timestamp (ms) of the record at each offset, as far as the source tells: data directories do not."""
        return {}

    def resolve(self, spec: Spec, partitions: Collection[TopicPartition], option: str) -> Offsets:
        """One offset per partition for where a query starts or ends: earliest, latest, offsets, times, a shift.

        `NoOffsetForTimestamp`, naming `option`, if the spec is strict and a partition has no record that late.
        """
        assert not isinstance(spec, GroupSpec)  # see `BrokerSource`
        if isinstance(spec, BeforeEndSpec):
            first, end = self.earliest(partitions), self.latest(partitions)
            return {key: max(first[key], end[key] - spec.count) for key in partitions}
        values = spec.values(partitions)
        given = {key: value for key, value in values.items() if value >= 0 and isinstance(spec, OffsetSpec)}
        times = {key: value for key, value in values.items() if key not in given}
        offsets = given | (self.list_offsets(times) if times else {})
        late = [key for key, offset in offsets.items() if offset == NO_OFFSET]
        if late and isinstance(spec, TimeSpec) and spec.strict:
            names = some_of([f"{topic}-{partition} (at {times[topic, partition]})" for topic, partition in late])
            raise NoOffsetForTimestamp(
                f"option {option}: no record at or after the timestamp in {names}; "
                "set startingOffsetsByTimestampStrategy=latest to start at the end of such partitions"
            )
        return offsets | (self.latest(late) if late else {})


def select(
    there: Mapping[str, Collection[int]], assign: Mapping[str, Collection[int]] | None, *, missing_ok: bool = False
) -> list[TopicPartition]:
    """The partitions of topics, sorted: all, or those of `assign`; `ConfigError` if one of them is not `there`."""
    for topic, numbers in (assign or {}).items():
        missing = sorted(set(numbers) - set(there.get(topic, ())))
        if missing and not missing_ok:
            raise ConfigError(f"topic {topic} has no partition {some_of([str(number) for number in missing])}")
    return [
        (topic, partition)
        for topic in sorted(there)
        for partition in there[topic]
        if assign is None or partition in assign[topic]
    ]


def plan_batch_query(
    source: QuerySource, options: SourceOptions, pushed: Pushed
) -> tuple[list[tuple[OffsetRange, ...]], Offsets]:
    """The ranges of each task of a batch query, and the offset at which the query ends in each partition.

    `ConfigError` if the options do not fit the partitions, `DataLossError` if offsets are gone and failOnDataLoss is
    true.
    """
    partitions = source.partitions()
    check_covers(options.starting_option, options.starting, partitions)
    check_covers(options.ending_option, options.ending, partitions)
    names = options.starting_option, options.ending_option
    check_order(options.starting, options.ending, partitions, *names)
    partitions = [key for key in partitions if pushed.keeps(key)]
    # This order of requests keeps records that are written or deleted meanwhile from looking like a loss.
    low = source.earliest(partitions)
    is_all = options.starting == OffsetSpec(EARLIEST)
    start = low if is_all else source.resolve(options.starting, partitions, options.starting_option)
    end = source.resolve(options.ending, partitions, options.ending_option)
    high = end if options.ending == OffsetSpec(LATEST) else source.latest(partitions)
    if isinstance(options.starting, TimeSpec):
        _warn_of_late_times(source, options.starting, low, start, high, options.starting_option)
    # Retention may have passed the others by now; those after the log's end are losses, see `beyond`.
    begun = {key: offset for key, offset in start.items() if low[key] < offset <= high[key]}
    check_ends(begun, end, *names)
    kept, lost = clip(nonempty_ranges(start, end), low, high)
    late = beyond(start, end, low, high)
    ends = source.log_ends([span[:2] for span in late]) if late else {}
    late = [span for span in late if span.start > ends[span[:2]]]  # the others start in open transactions
    LossReporter(options.on_data_loss).report(lost + late)
    kept = [pushed.clip(span) for span in kept]
    return source.tasks(_clip_times(source, kept, pushed.first_time, pushed.end_time)), end


def _warn_of_late_times(
    source: QuerySource, spec: TimeSpec, low: Offsets, start: Offsets, high: Offsets, option: str
) -> None:
    """Warn if there are records, and none at or after the times at which the query starts: a year may be mistyped."""
    last = {key: end - 1 for key, end in high.items() if end > low[key]}
    if not last or any(start[key] < end for key, end in high.items()):
        return
    newest = max((time for time in source.timestamps(last).values() if time is not None), default=None)
    _log.warning(
        "option %s: no record at or after %s, so that the query reads nothing%s",
        *(option, _time_text(min(spec.values(last).values()))),
        "" if newest is None else f"; the newest record is of {_time_text(newest)}",
    )


def _time_text(time: int) -> str:
    try:
        return datetime.fromtimestamp(time / 1000, timezone.utc).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):  # beyond the year 9999
        return f"{time} ms"


def _clip_times(
    source: QuerySource, ranges: list[OffsetRange], first_time: int | None, end_time: int | None
) -> list[OffsetRange]:
    """Cut ranges to the offsets whose timestamps can lie in [first_time, end_time) ms; drops empty ranges.

    The upper bound cuts a range only if the record batches at its start, its end and the cut all have log append time:
    a topic may have been switched to log append time and back.
    """
    # ListOffsets gives negative times a meaning of their own; no record is older than 0 anyway.
    ranges = [span for span in ranges if span.start < span.end]
    if first_time is not None and first_time > 0 and ranges:
        first_offsets = source.list_offsets({span[:2]: first_time for span in ranges})
        starts = {key: offset for key, offset in first_offsets.items() if offset != NO_OFFSET}
        ranges = [span._replace(start=max(span.start, starts[span[:2]])) for span in ranges if span[:2] in starts]
    ranges = [span for span in ranges if span.start < span.end]
    if end_time is not None and end_time > 0 and ranges:
        first = source.timestamp_types({span[:2]: span.start for span in ranges})
        last = source.timestamp_types({span[:2]: span.end - 1 for span in ranges})
        safe = [span[:2] for span in ranges if first.get(span[:2]) == last.get(span[:2]) == LOG_APPEND_TIME]
        upper = source.list_offsets(dict.fromkeys(safe, end_time)) if safe else {}
        cuts = {span[:2]: upper[span[:2]] for span in ranges if NO_OFFSET < upper.get(span[:2], NO_OFFSET) < span.end}
        at_cut = source.timestamp_types(cuts) if cuts else {}
        cuts = {key: offset for key, offset in cuts.items() if at_cut.get(key, LOG_APPEND_TIME) == LOG_APPEND_TIME}
        ranges = [span._replace(end=cuts.get(span[:2], span.end)) for span in ranges]
    return [span for span in ranges if span.start < span.end]
