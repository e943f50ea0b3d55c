"""Resolve where a query starts or ends (earliest, latest, a time, a shift) to one offset per partition.

Clusters and data directories resolve the same way. A group's offsets need a cluster: `broker_source.resolve`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from spark_klog.client.offsets import NO_OFFSET
from spark_klog.errors import NoOffsetForTimestamp
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST
from spark_klog.spark.offsets import BeforeEndSpec, GroupSpec, Offsets, OffsetSpec, Spec, TimeSpec, TopicPartition


class OffsetSource(Protocol):
    """Source of partitions' offsets: a cluster or data directories."""

    def list_offsets(self, times: Mapping[TopicPartition, int]) -> Offsets:
        """The first offset at or after each time (ms, EARLIEST or LATEST); NO_OFFSET if no record is that late."""

    def timestamp_types(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        """The timestamp type (records/contract.py) of the record batch at each offset; omits offsets without one."""


def earliest(source: OffsetSource, partitions: Collection[TopicPartition]) -> Offsets:
    """The first offset of each partition."""
    return source.list_offsets(dict.fromkeys(partitions, EARLIEST))


def latest(source: OffsetSource, partitions: Collection[TopicPartition]) -> Offsets:
    """The end of each partition: the offset after the last record that the isolation level lets a query read."""
    return source.list_offsets(dict.fromkeys(partitions, LATEST))


def resolve(source: OffsetSource, spec: Spec, partitions: Collection[TopicPartition], option: str) -> Offsets:
    """One offset per partition for any spec but a group.

    `NoOffsetForTimestamp`, naming `option`, if the spec is strict and a partition has no record that late.
    """
    assert not isinstance(spec, GroupSpec)
    if isinstance(spec, BeforeEndSpec):
        first, end = earliest(source, partitions), latest(source, partitions)
        return {key: max(first[key], end[key] - spec.count) for key in partitions}
    given, times = split_times(spec, partitions)
    found = given | (source.list_offsets(times) if times else {})
    late = [key for key, offset in found.items() if offset == NO_OFFSET]
    if late and isinstance(spec, TimeSpec) and spec.strict:
        names = ", ".join(f"{topic}-{partition} (at {times[topic, partition]})" for topic, partition in late)
        raise NoOffsetForTimestamp(
            f"option {option}: no record at or after the timestamp in {names}; "
            "set startingOffsetsByTimestampStrategy=latest to start at the end of such partitions"
        )
    return found | (latest(source, late) if late else {})


def split_times(spec: OffsetSpec | TimeSpec, partitions: Collection[TopicPartition]) -> tuple[Offsets, Offsets]:
    """(offsets that the spec gives, times to look up with ListOffsets: EARLIEST, LATEST or ms)."""
    given, times = {}, {}
    for key, value in spec.values(partitions).items():
        if value >= 0 and isinstance(spec, OffsetSpec):
            given[key] = value
        else:
            times[key] = value
    return given, times
