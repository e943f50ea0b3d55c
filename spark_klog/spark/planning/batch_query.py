"""Plan a batch query: the offset ranges that each task reads, from a cluster or from data directories."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol
from uuid import UUID

from spark_klog.client.offsets import NO_OFFSET
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST
from spark_klog.records.contract import LOG_APPEND_TIME
from spark_klog.spark.offsets import Offsets, OffsetSpec, Spec, TopicPartition
from spark_klog.spark.options.reads import SourceOptions
from spark_klog.spark.planning.loss import LossReporter
from spark_klog.spark.planning.pushdown import Pushed
from spark_klog.spark.planning.ranges import (
    OffsetRange,
    beyond,
    check_covers,
    check_order,
    check_resolved,
    clip,
    nonempty_ranges,
)
from spark_klog.spark.planning.resolution import OffsetSource, earliest, latest


class BatchQuerySource(OffsetSource, Protocol):
    """What a batch query reads: the partitions of its subscription, at brokers or in data directories."""

    topic_ids: Mapping[str, UUID]
    """Ids of the topics that `partitions` found, if the brokers give them."""

    def partitions(self) -> list[TopicPartition]:
        """The subscribed partitions; `ConfigError` if a topic or partition named by the options does not exist."""

    def resolve(self, spec: Spec, partitions: Collection[TopicPartition], option: str) -> Offsets:
        """As `resolution.resolve`, for every spec that the options accept."""

    def log_ends(self, partitions: Collection[TopicPartition]) -> Offsets:
        """The end of each partition's log: at brokers whatever the isolation level is, in directories as `latest`."""

    def tasks(self, ranges: list[OffsetRange]) -> list[tuple[OffsetRange, ...]]:
        """Split and pack ranges into tasks, within the limits of the options."""


def clip_times(
    source: OffsetSource, ranges: list[OffsetRange], first_time: int | None, end_time: int | None
) -> list[OffsetRange]:
    """Cut ranges to the offsets whose timestamps can lie in [first_time, end_time) ms; drops empty ranges.

    The upper bound cuts a range only if the record batches at its start, its end and the cut all have log append time:
    a topic may have been switched to log append time and back.
    """
    ranges = [item for item in ranges if item.start < item.end]
    # ListOffsets gives negative times a meaning of their own; no record is older than 0 anyway.
    if first_time is not None and first_time > 0 and ranges:
        found = source.list_offsets({item[:2]: first_time for item in ranges})
        starts = {key: offset for key, offset in found.items() if offset != NO_OFFSET}
        ranges = [item._replace(start=max(item.start, starts[item[:2]])) for item in ranges if item[:2] in starts]
    ranges = [item for item in ranges if item.start < item.end]
    if end_time is not None and end_time > 0 and ranges:
        first = source.timestamp_types({item[:2]: item.start for item in ranges})
        last = source.timestamp_types({item[:2]: item.end - 1 for item in ranges})
        safe = [item[:2] for item in ranges if first.get(item[:2]) == last.get(item[:2]) == LOG_APPEND_TIME]
        found = source.list_offsets(dict.fromkeys(safe, end_time)) if safe else {}
        cuts = {item[:2]: found[item[:2]] for item in ranges if NO_OFFSET < found.get(item[:2], NO_OFFSET) < item.end}
        at_cut = source.timestamp_types(cuts) if cuts else {}
        cuts = {key: offset for key, offset in cuts.items() if at_cut.get(key, LOG_APPEND_TIME) == LOG_APPEND_TIME}
        ranges = [item._replace(end=cuts.get(item[:2], item.end)) for item in ranges]
    return [item for item in ranges if item.start < item.end]


def plan_batch_query(
    source: BatchQuerySource, options: SourceOptions, pushed: Pushed
) -> tuple[list[tuple[OffsetRange, ...]], Offsets]:
    """The ranges of each task of a batch query, and the offset at which the query ends in each partition.

    `ConfigError` if the options do not fit the partitions, `DataLossError` if offsets are gone and failOnDataLoss is
    true.
    """
    partitions = source.partitions()
    check_covers(options.starting_option, options.starting, partitions)
    check_covers(options.ending_option, options.ending, partitions)
    check_order(options.starting, options.ending, partitions, options.starting_option, options.ending_option)
    partitions = [key for key in partitions if pushed.keeps(key)]
    # This order of requests keeps records that are written or deleted meanwhile from looking like a loss.
    low = earliest(source, partitions)
    is_all = options.starting == OffsetSpec(EARLIEST)
    start = low if is_all else source.resolve(options.starting, partitions, options.starting_option)
    end = source.resolve(options.ending, partitions, options.ending_option)
    high = end if options.ending == OffsetSpec(LATEST) else latest(source, partitions)
    begun = {key: offset for key, offset in start.items() if offset > low[key]}  # retention may have passed the others
    check_resolved(begun, end, high, options.starting_option, options.ending_option)
    kept, lost = clip(nonempty_ranges(start, end), low, high)
    late = beyond(start, end, low, high)
    ends = source.log_ends([item[:2] for item in late]) if late else {}
    late = [item for item in late if item.start > ends[item[:2]]]  # the others start in open transactions
    LossReporter(options.on_data_loss).report(lost + late)
    kept = [pushed.clip(item) for item in kept]
    return source.tasks(clip_times(source, kept, pushed.first_time, pushed.end_time)), end
