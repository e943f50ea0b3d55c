"""Which offsets to read: pure functions from what the log has to the ranges of a query."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import NamedTuple

from spark_klog.errors import PartitionsMismatch, StartAfterEnd
from spark_klog.spark.offsets import Offsets, OffsetSpec, Spec, TimeSpec, TopicPartition
from spark_klog.spark.options import SplitLimits

#: Each task costs Spark tens of milliseconds, a small range less than one: beyond so many tasks small ranges share
#: them, up to so many records in one.
_FULL_TASKS, _SHARED_RECORDS = 32, 10_000

RETENTION, TRUNCATED, RECREATED, DELETED = "retention", "truncated", "recreated", "deleted"
NOT_YET, UNSUBSCRIBED = "not there yet", "unsubscribed"


class OffsetRange(NamedTuple):
    """[start, end) of a topic-partition."""

    topic: str
    partition: int
    start: int
    end: int


def check_covers(option: str, spec: Spec, partitions: Collection[TopicPartition]) -> None:
    """`ConfigError` unless a map of offsets or timestamps names exactly the partitions that are read."""
    if not isinstance(spec, OffsetSpec | TimeSpec) or spec.everywhere is not None:
        return
    named = {key for key, _ in spec.each}
    missing, extra = sorted(set(partitions) - named), sorted(named - set(partitions))
    if missing or extra:
        words = [
            f"{what} {', '.join(f'{topic}-{partition}' for topic, partition in keys)}"
            for what, keys in (("it lacks", missing), ("it names, and they are not read:", extra))
            if keys
        ]
        raise PartitionsMismatch(f"option {option} must name exactly the partitions that are read: {'; '.join(words)}")


def check_order(
    starting: Spec, ending: Spec, partitions: Collection[TopicPartition], start_option: str, end_option: str
) -> None:
    """`StartAfterEnd` where both are numbers, or both are timestamps, and a partition would end before it begins."""
    if type(starting) is not type(ending):
        return
    if not isinstance(starting, OffsetSpec | TimeSpec) or not isinstance(ending, OffsetSpec | TimeSpec):
        return
    _refuse(_values(starting, partitions), _values(ending, partitions), start_option, end_option)


def check_resolved(start: Offsets, end: Offsets, latest: Offsets, start_option: str, end_option: str) -> None:
    """`StartAfterEnd` where a partition would end before it begins, by options of different forms.

    Not where it would begin after the log's end: that is a loss, see `beyond`.
    """
    _refuse({key: offset for key, offset in start.items() if offset <= latest[key]}, end, start_option, end_option)


def _refuse(first: Offsets, last: Offsets, start_option: str, end_option: str) -> None:
    wrong = [
        f"{topic}-{partition} from {first[topic, partition]} to {last[topic, partition]}"
        for topic, partition in sorted(first)
        if first[topic, partition] > last[topic, partition] >= 0
    ]
    if wrong:
        raise StartAfterEnd(f"{start_option} lies after {end_option}: {', '.join(wrong)}")


def _values(spec: OffsetSpec | TimeSpec, partitions: Collection[TopicPartition]) -> Offsets:
    """Offsets, EARLIEST, LATEST, or timestamps in ms."""
    each = dict(spec.each)
    return {key: each[key] if spec.everywhere is None else spec.everywhere for key in partitions}


def wanted_times(spec: OffsetSpec | TimeSpec, partitions: Collection[TopicPartition]) -> tuple[Offsets, Offsets]:
    """(offsets that are given, what to ask ListOffsets for: EARLIEST, LATEST or a timestamp in ms)."""
    given, asked = {}, {}
    for key, value in _values(spec, partitions).items():
        if value >= 0 and isinstance(spec, OffsetSpec):
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
    """Offsets that can't be read: [start, end) was wanted, the log has [available_start, available_end).

    `cause`: "retention" (deleted: the log begins later), "truncated" (the log ends before what was read of it),
    "recreated" (another topic of that name), "deleted" (no such topic or partition), "not there yet",
    "unsubscribed" (the query's options name it no longer).
    """

    topic: str
    partition: int
    start: int
    end: int
    available_start: int
    available_end: int
    cause: str

    def __str__(self) -> str:
        name = f"{self.topic}-{self.partition}"
        available = f"available [{self.available_start}, {self.available_end})"
        if self.cause == UNSUBSCRIBED:
            return (
                f"{name} is no longer named by the options subscribe, subscribePattern or assign, and the query has "
                f"read it up to offset {self.start}"
            )
        if self.cause == DELETED:
            return f"{name} is gone (deleted); the query has read it up to offset {self.start}"
        if self.cause == RECREATED and self.available_end < 0:  # found by a task
            return f"{name}: wanted [{self.start}, {self.end}) of a topic that is gone; another one has its name now"
        if self.cause in (TRUNCATED, RECREATED):
            return f"{name} was read up to offset {self.start}, it is another log now ({self.cause}): {available}"
        return f"{name}: wanted [{self.start}, {self.end}), {available} ({self.cause})"


def clip(
    wanted: list[OffsetRange],
    earliest: Mapping[TopicPartition, int],
    latest: Mapping[TopicPartition, int],
) -> tuple[list[OffsetRange], list[Lost]]:
    """Cut ranges to what the log has; what was cut off is listed."""
    kept, lost = [], []
    for item in wanted:
        low, high = earliest[item[:2]], latest[item[:2]]
        if item.start < low:
            lost.append(Lost(*item, low, high, RETENTION))
        elif item.end > high:
            lost.append(Lost(*item, low, high, NOT_YET))
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
        Lost(*key, offset, offset, earliest[key], latest[key], NOT_YET)
        for key, offset in sorted(start.items())
        if offset > latest[key] and end[key] <= offset
    ]


def plan_batch(
    start: Mapping[TopicPartition, int],
    end: Mapping[TopicPartition, int],
    earliest: Mapping[TopicPartition, int],
    recreated: Collection[str],
    *,
    is_first: bool = False,
) -> tuple[list[OffsetRange], list[Lost]]:
    """The ranges of a micro-batch that can be read, and what of [start, end) can't.

    `earliest` has the partitions that are there; those without a start appeared since and are read from offset 0 on.
    A partition that is gone, of which `end` may know no more, has lost what was wanted of it.
    An end before the start says that the log has become shorter: nothing of it is new, unless the topic is in
    `recreated`; then all of it is. Where the query starts (`is_first`), the log has not come there yet.
    A lost range's available end is the batch's.
    """
    readable, lost = readable_start(start, earliest, recreated), []
    for key, until in sorted(end.items()):
        first = start.get(key, 0)
        low = earliest.get(key)
        if low is None:
            if first < until:
                lost.append(Lost(*key, first, until, -1, -1, DELETED))
        elif key[0] in recreated and key in start:
            lost.append(Lost(*key, first, max(first, until), low, until, RECREATED))
        elif until < first:
            lost.append(Lost(*key, first, first, low, until, NOT_YET if is_first else TRUNCATED))
        elif first < min(low, until):
            lost.append(Lost(*key, first, min(low, until), low, until, RETENTION))
    lost += [Lost(*key, offset, offset, -1, -1, DELETED) for key, offset in sorted(start.items()) if key not in end]
    return ranges(readable, end), lost


def readable_start(
    start: Mapping[TopicPartition, int], earliest: Mapping[TopicPartition, int], recreated: Collection[str]
) -> Offsets:
    """The first offset from `start` on that each partition has, of those in `earliest`; see `plan_batch`."""
    return {
        key: low if key[0] in recreated and key in start else max(start.get(key, 0), low)
        for key, low in earliest.items()
    }


def waiting(start: Mapping[TopicPartition, int], latest: Mapping[TopicPartition, int]) -> Offsets:
    """How many records of each partition wait to be read."""
    return {key: max(0, latest[key] - start.get(key, latest[key])) for key in latest}


def limit_rows(start: Offsets, latest: Offsets, rows: int) -> Offsets:
    """End offsets for at most `rows` records, shared in proportion to what waits, no partition left out for ever.

    As Spark's Kafka connector does it: shares below one record are rounded up, so that a batch may hold a few
    records more than `rows`.
    """
    there = waiting(start, latest)
    total = sum(there.values())
    if total <= rows:
        return dict(latest)
    end = {}
    for key, count in there.items():
        if not count:
            end[key] = latest[key]
            continue
        share = rows * count / total
        end[key] = min(latest[key], start[key] + (math.ceil(share) if share < 1 else math.floor(share)))
    return end


def limit_bytes(start: Offsets, latest: Offsets, size: int, record_sizes: Mapping[TopicPartition, float]) -> Offsets:
    """End offsets for about `size` bytes, of which each partition gives the same part of what waits there."""
    there = waiting(start, latest)
    total = sum(count * record_sizes.get(key, 0.0) for key, count in there.items())
    if total <= size:
        return dict(latest)
    return limit_rows(start, latest, max(1, int(sum(there.values()) * size / total)))


def split(
    wanted: list[OffsetRange], limits: SplitLimits, record_sizes: Mapping[TopicPartition, float]
) -> list[OffsetRange]:
    """Ranges of even size: none above the limits, and at least `min_partitions` where there are so many records.

    A range of one record is never split, however large the record is.
    """
    parts = []
    for item in wanted:
        count = item.end - item.start
        most = limits.max_records or count
        size = record_sizes.get(item[:2], 0.0)
        if limits.max_bytes and size:
            most = min(most, max(1, int(limits.max_bytes / size)))
        parts.append(-(-count // most))
    missing = (limits.min_partitions or 0) - sum(parts)
    # The range whose parts are the largest gets one more, again and again.
    largest = [(-(item.end - item.start) / parts[index], index) for index, item in enumerate(wanted)]
    heapq.heapify(largest)
    while missing > 0 and largest and -largest[0][0] > 1:
        index = largest[0][1]
        parts[index] += 1
        missing -= 1
        heapq.heapreplace(largest, (-(wanted[index].end - wanted[index].start) / parts[index], index))
    return [piece for item, number in zip(wanted, parts, strict=True) for piece in _pieces(item, number)]


def _pieces(item: OffsetRange, number: int) -> list[OffsetRange]:
    count = item.end - item.start
    bounds = [item.start + count * index // number for index in range(number + 1)]
    return [item._replace(start=low, end=high) for low, high in pairwise(bounds)]


def pack(wanted: list[OffsetRange], limits: SplitLimits) -> list[tuple[OffsetRange, ...]]:
    """The ranges of each task: one, or some where there would be many tasks with little to read."""
    tasks = max(_FULL_TASKS, limits.min_partitions or 0)
    if len(wanted) <= tasks or limits.max_bytes:
        return [(item,) for item in wanted]
    small = [item.end - item.start for item in wanted if item.end - item.start <= _SHARED_RECORDS]
    shared = max(1, tasks - (len(wanted) - len(small)))
    most = min(sum(small) // shared, _SHARED_RECORDS, limits.max_records or _SHARED_RECORDS)
    packed: list[list[OffsetRange]] = []
    room = 0
    for item in wanted:
        room -= item.end - item.start
        if room < 0 or not packed:
            packed.append([])
            room = most - (item.end - item.start)
        packed[-1].append(item)
    return [tuple(items) for items in packed]
