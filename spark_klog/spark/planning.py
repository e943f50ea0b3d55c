"""Which offsets to read: pure functions from what the log has to the ranges of a query."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from spark_klog.errors import ConfigError
from spark_klog.spark.offsets import Offsets, OffsetSpec, TopicPartition


class OffsetRange(NamedTuple):
    """[start, end) of a topic-partition."""

    topic: str
    partition: int
    start: int
    end: int


def check_covers(option: str, spec: OffsetSpec, partitions: Collection[TopicPartition]) -> None:
    """`ConfigError` unless an offset map names exactly the partitions that are read."""
    if spec.everywhere is not None:
        return
    named = {key for key, _ in spec.each}
    missing, extra = sorted(set(partitions) - named), sorted(named - set(partitions))
    if missing or extra:
        words = [
            f"{what} {', '.join(f'{topic}-{partition}' for topic, partition in keys)}"
            for what, keys in (("it lacks", missing), ("it names, and they are not read:", extra))
            if keys
        ]
        raise ConfigError(f"option {option} must name exactly the partitions that are read: {'; '.join(words)}")


def wanted_times(spec: OffsetSpec, partitions: Collection[TopicPartition]) -> tuple[Offsets, Offsets]:
    """(offsets that are given, partitions to ask ListOffsets for with EARLIEST or LATEST)."""
    given, asked = {}, {}
    each = dict(spec.each)
    for key in partitions:
        value = spec.everywhere if spec.everywhere is not None else each[key]
        if value >= 0:
            given[key] = value
        else:
            asked[key] = value
    return given, asked


def ranges(start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int]) -> list[OffsetRange]:
    """The ranges that are not empty, of partitions that both name."""
    return [
        OffsetRange(topic, partition, start[topic, partition], until)
        for (topic, partition), until in sorted(end.items())
        if start.get((topic, partition), until) < until
    ]


class Lost(NamedTuple):
    """Offsets [start, end) that can't be read, and what the log has: [available_start, available_end)."""

    topic: str
    partition: int
    start: int
    end: int
    available_start: int
    available_end: int

    def __str__(self) -> str:
        return (
            f"{self.topic}-{self.partition}: wanted [{self.start}, {self.end}), "
            f"available [{self.available_start}, {self.available_end})"
        )


def clip(
    wanted: list[OffsetRange],
    earliest: Mapping[TopicPartition, int],
    latest: Mapping[TopicPartition, int],
) -> tuple[list[OffsetRange], list[Lost]]:
    """Cut ranges to what the log has; what was cut off is listed."""
    kept, lost = [], []
    for item in wanted:
        low, high = earliest[item[:2]], latest[item[:2]]
        if item.start < low or item.end > high:
            lost.append(Lost(*item, low, high))
        start, end = max(item.start, low), min(item.end, high)
        if start < end:
            kept.append(item._replace(start=start, end=end))
    return kept, lost


def beyond(
    start: Mapping[TopicPartition, int],
    end: Mapping[TopicPartition, int],
    earliest: Mapping[TopicPartition, int],
    latest: Mapping[TopicPartition, int],
) -> list[Lost]:
    """Starts after the log's end: their ranges are empty, so that `clip` does not see them."""
    return [
        Lost(*key, offset, offset, earliest[key], latest[key])
        for key, offset in sorted(start.items())
        if offset > latest[key] and end[key] <= offset
    ]


def limit_rows(start: Offsets, latest: Offsets, rows: int) -> Offsets:
    """End offsets for at most `rows` records, shared in proportion to what waits, no partition left out for ever.

    As Spark's Kafka connector does it: shares below one record are rounded up, so that a batch may hold a few
    records more than `rows`.
    """
    waiting = {key: latest[key] - start.get(key, latest[key]) for key in latest}
    total = sum(count for count in waiting.values() if count > 0)
    if total <= rows:
        return dict(latest)
    end = {}
    for key, count in waiting.items():
        if count <= 0:
            end[key] = start.get(key, latest[key])
            continue
        share = rows * count / total
        end[key] = min(latest[key], start[key] + (math.ceil(share) if share < 1 else math.floor(share)))
    return end
