"""What the options mean in offsets now, whatever has the log: brokers, or directories."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol
from uuid import UUID

from spark_klog.client.offsets import NO_OFFSET
from spark_klog.errors import NoOffsetForTimestamp
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST
from spark_klog.records.contract import LOG_APPEND_TIME
from spark_klog.spark.loss import LossReporter
from spark_klog.spark.offsets import BeforeEndSpec, GroupSpec, Offsets, OffsetSpec, Spec, TimeSpec, TopicPartition
from spark_klog.spark.options import SourceOptions
from spark_klog.spark.planning import (
    OffsetRange,
    beyond,
    check_covers,
    check_order,
    check_resolved,
    clip,
    ranges,
    wanted_times,
)
from spark_klog.spark.pushdown import Pushed


class LogOffsets(Protocol):
    """Who can be asked for offsets."""

    def list_offsets(self, times: Mapping[TopicPartition, int]) -> Offsets:
        """The offset of each partition at a time (ms, or EARLIEST, LATEST); NO_OFFSET where no record is that late."""

    def timestamp_types(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        """The type of timestamps (see records/contract.py) of the batch with the offset, where there is one."""


class BatchLog(LogOffsets, Protocol):
    """What a batch query reads."""

    topic_ids: Mapping[str, UUID]
    """Of the topics that `partitions` has found, as far as brokers give them."""

    def partitions(self) -> list[TopicPartition]:
        """Those of the subscription; `ConfigError` where a named one does not exist."""

    def resolve(self, spec: Spec, partitions: Collection[TopicPartition], option: str) -> Offsets:
        """As `resolve` below, for any spec that the options may have."""

    def tasks(self, wanted: list[OffsetRange]) -> list[tuple[OffsetRange, ...]]:
        """The ranges of each task, as the options ask for."""


def earliest(log: LogOffsets, partitions: Collection[TopicPartition]) -> Offsets:
    """The first offset of each partition."""
    return log.list_offsets(dict.fromkeys(partitions, EARLIEST))


def latest(log: LogOffsets, partitions: Collection[TopicPartition]) -> Offsets:
    """The offset after the last record that may be read of each partition."""
    return log.list_offsets(dict.fromkeys(partitions, LATEST))


def resolve(log: LogOffsets, spec: Spec, partitions: Collection[TopicPartition], option: str) -> Offsets:
    """The offsets that a spec, but of a group, means now; `ConfigError` where a strict one finds no record."""
    assert not isinstance(spec, GroupSpec)  # who knows groups has its own way
    if isinstance(spec, BeforeEndSpec):
        first, end = earliest(log, partitions), latest(log, partitions)
        return {key: max(first[key], end[key] - spec.records) for key in partitions}
    given, asked = wanted_times(spec, partitions)
    found = given | (log.list_offsets(asked) if asked else {})
    late = [key for key, offset in found.items() if offset == NO_OFFSET]
    if late and isinstance(spec, TimeSpec) and spec.strict:
        names = ", ".join(f"{topic}-{partition} (at {asked[topic, partition]})" for topic, partition in late)
        raise NoOffsetForTimestamp(
            f"option {option}: no record at or after the timestamp in {names}; "
            "set startingOffsetsByTimestampStrategy=latest to start at the end of such partitions"
        )
    return found | (latest(log, late) if late else {})


def clip_times(
    log: LogOffsets, wanted: list[OffsetRange], first_time: int | None, end_time: int | None
) -> list[OffsetRange]:
    """The parts of ranges that can have timestamps in [first_time, end_time) ms; without the empty ones.

    An upper bound only counts where the range begins and ends with log append time, and has it at the bound: a topic
    may have been switched to it, and back.
    """
    wanted = [item for item in wanted if item.start < item.end]
    # ListOffsets takes times below 0 for something else; no record is that early
    if first_time is not None and first_time > 0 and wanted:
        found = log.list_offsets({item[:2]: first_time for item in wanted})
        starts = {key: offset for key, offset in found.items() if offset != NO_OFFSET}
        wanted = [item._replace(start=max(item.start, starts[item[:2]])) for item in wanted if item[:2] in starts]
    wanted = [item for item in wanted if item.start < item.end]
    if end_time is not None and end_time > 0 and wanted:
        first = log.timestamp_types({item[:2]: item.start for item in wanted})
        last = log.timestamp_types({item[:2]: item.end - 1 for item in wanted})
        safe = [item[:2] for item in wanted if first.get(item[:2]) == last.get(item[:2]) == LOG_APPEND_TIME]
        found = log.list_offsets(dict.fromkeys(safe, end_time)) if safe else {}
        cuts = {item[:2]: found[item[:2]] for item in wanted if NO_OFFSET < found.get(item[:2], NO_OFFSET) < item.end}
        at_cut = log.timestamp_types(cuts) if cuts else {}
        found = {key: offset for key, offset in found.items() if at_cut.get(key, LOG_APPEND_TIME) == LOG_APPEND_TIME}
        wanted = [item._replace(end=_end(item.end, found.get(item[:2], NO_OFFSET))) for item in wanted]
    return [item for item in wanted if item.start < item.end]


def _end(end: int, found: int) -> int:
    return end if found == NO_OFFSET else min(end, found)


def plan(log: BatchLog, options: SourceOptions, pushed: Pushed) -> list[tuple[OffsetRange, ...]]:
    """The ranges of each task of a batch query.

    `ConfigError` where the options do not go with what is there, `DataLossError` where offsets are gone and
    failOnDataLoss is true.
    """
    partitions = log.partitions()
    check_covers(options.starting_option, options.starting, partitions)
    check_covers(options.ending_option, options.ending, partitions)
    check_order(options.starting, options.ending, partitions, options.starting_option, options.ending_option)
    partitions = [key for key in partitions if pushed.keeps(key)]
    # In this order what is written or deleted meanwhile does not look like a loss.
    low = earliest(log, partitions)
    is_all = options.starting == OffsetSpec(EARLIEST)
    start = low if is_all else log.resolve(options.starting, partitions, options.starting_option)
    end = log.resolve(options.ending, partitions, options.ending_option)
    high = end if options.ending == OffsetSpec(LATEST) else latest(log, partitions)
    begun = {key: offset for key, offset in start.items() if offset > low[key]}  # not where retention has moved it
    check_resolved(begun, end, high, options.starting_option, options.ending_option)
    kept, lost = clip(ranges(start, end), low, high)
    LossReporter(options.on_data_loss).report(lost + beyond(start, end, low, high))
    kept = [pushed.clip(item) for item in kept]
    return log.tasks(clip_times(log, kept, pushed.first_time, pushed.end_time))
