"""Compute the offset ranges of queries: what is readable, what is lost, limits, tasks. Report what is lost."""

from __future__ import annotations

import heapq
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias, TypeVar

from spark_klog.base.names import TopicPartition
from spark_klog.base.settings import some_of
from spark_klog.client.places import Offsets, OffsetSpec, Spec, TimeSpec
from spark_klog.errors import DataLossError, StartAfterEnd
from spark_klog.spark.options import SplitLimits

_log = logging.getLogger(__name__)
#: The leader of a topic and partition, None if it is not known.
LeaderOf: TypeAlias = Callable[[str, int], int | None]
#: A task costs Spark tens of milliseconds, a small range less than one: beyond 32 tasks small ranges share tasks of up
#: to 10,000 records.
_FULL_TASKS, _SHARED_RECORDS = 32, 10_000

RETENTION, TRUNCATED, RECREATED, DELETED = "retention", "truncated", "recreated", "deleted"
NOT_YET, UNSUBSCRIBED = "not there yet", "unsubscribed"
#: Lost ranges that have a line of the log each, of those of one call.
_SHOWN = 10
#: How a query goes on; jobs have options of their own.
OPTION_ADVICE = "set failOnDataLoss=false or report to continue without them"
#: The checkpoint keeps no offset of a partition that a query no longer reads.
_NAMED_AGAIN = "if it is named again later, the query reads it from its first record on"


class OffsetRange(NamedTuple):
    """[start, end) of a topic-partition."""

    topic: str
    partition: int
    start: int
    end: int


_Ranges = TypeVar("_Ranges", bound=Sequence[OffsetRange])


def check_order(
    starting: Spec, ending: Spec, partitions: Collection[TopicPartition], start_option: str, end_option: str
) -> None:
    """`StartAfterEnd` if both specs are offsets, or both timestamps, and a partition would end before it starts."""
    for kind in (OffsetSpec, TimeSpec):
        if isinstance(starting, kind) and isinstance(ending, kind):
            check_ends(starting.values(partitions), ending.values(partitions), start_option, end_option)


def check_ends(first: Offsets, last: Offsets, start_option: str, end_option: str) -> None:
    """`StartAfterEnd` if a partition would end before it starts."""
    wrong = [
        f"{topic}-{partition} from {first[topic, partition]} to {last[topic, partition]}"
        for topic, partition in sorted(first)
        if first[topic, partition] > last[topic, partition] >= 0
    ]
    if wrong:
        raise StartAfterEnd(f"{start_option} lies after {end_option}: {some_of(wrong)}")


def nonempty_ranges(start: Offsets, end: Offsets) -> list[OffsetRange]:
    return sorted(OffsetRange(*key, start[key], until) for key, until in end.items() if start.get(key, until) < until)


class Lost(NamedTuple):
    """Offsets that a query can't read: it needs [start, end), the log has [available_start, available_end).

    `cause`: "retention" (the log starts later by now), "truncated" (the log ends before offsets already read),
    "recreated" (a new topic has the name), "deleted" (no such topic or partition), "not there yet" (after the log's
    end), "unsubscribed" (the query's options no longer name the partition).
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
                f"{name} is no longer named by the options subscribe, subscribePattern or assign; the query has read "
                f"it up to offset {self.start}"
            )
        if self.cause == DELETED:
            return f"{name} was deleted; the query has read it up to offset {self.start}"
        if self.cause == RECREATED and self.available_end < 0:  # found by a task
            return f"{name}: wanted [{self.start}, {self.end}) of a deleted topic; a new topic has its name"
        if self.cause in (TRUNCATED, RECREATED):
            return f"{name} was read up to offset {self.start}, but its log was {self.cause} since: {available}"
        lost = f"[{self.start}, {self.end})" if self.start < self.end else f"offset {self.start}"
        return f"{name}: wanted {lost}, {available} ({self.cause})"


def clip(ranges: list[OffsetRange], earliest: Offsets, latest: Offsets) -> tuple[list[OffsetRange], list[Lost]]:
    """Cut ranges to the offsets that the log has: (ranges, what was cut off)."""
    kept, lost = [], []
    for span in ranges:
        low, high = earliest[span[:2]], latest[span[:2]]
        if span.start < low:
            lost.append(Lost(*span, low, high, RETENTION))
        elif span.end > high:
            lost.append(Lost(*span, low, high, NOT_YET))
        start, end = max(span.start, low), min(span.end, high)
        if start < end:
            kept.append(span._replace(start=start, end=end))
    return kept, lost


def beyond(start: Offsets, end: Offsets, earliest: Offsets, latest: Offsets) -> list[Lost]:
    """Starts after the log's end, as losses. Their ranges are empty, so `clip` does not see them."""
    return [
        Lost(*key, offset, offset, earliest[key], latest[key], NOT_YET)
        for key, offset in sorted(start.items())
        if offset > latest[key] and end[key] <= offset
    ]


def plan_micro_batch(
    start: Offsets, end: Offsets, earliest: Offsets, recreated: Collection[str], *, is_first: bool = False
) -> tuple[list[OffsetRange], list[Lost]]:
    """The readable ranges of a micro-batch, and the lost parts of [start, end).

    `earliest` has the existing partitions; one without a start is new and is read from offset 0 on. A deleted one,
    which may be missing from `end`, has lost its range. An end before the start means that the log became shorter:
    none of it is new, unless the topic is in `recreated`; then all of it is. For the query's first micro-batch
    (`is_first`) it means that the log has not reached the start yet. The available end of a lost range is the
    micro-batch's end.
    """
    readable, lost = readable_start(start, earliest, recreated), []
    for key, until in end.items():
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
    lost += [Lost(*key, offset, offset, -1, -1, DELETED) for key, offset in start.items() if key not in end]
    return nonempty_ranges(readable, end), sorted(lost)


def readable_start(start: Offsets, earliest: Offsets, recreated: Collection[str]) -> Offsets:
    """The first readable offset at or after `start` for each partition in `earliest`; see `plan_micro_batch`."""
    return {
        key: low if key[0] in recreated and key in start else max(start.get(key, 0), low)
        for key, low in earliest.items()
    }


def unread(start: Offsets, latest: Offsets) -> Offsets:
    return {key: max(0, latest[key] - start.get(key, latest[key])) for key in latest}


def limit_rows(start: Offsets, latest: Offsets, rows: int) -> Offsets:
    """End offsets for at most `rows` records, shared over the partitions in proportion to their unread records.

    As in Spark's Kafka connector, a share below one record is rounded up, so that no partition starves; a micro-batch
    may therefore hold a few records more than `rows`.
    """
    counts = unread(start, latest)
    total = sum(counts.values())
    if total <= rows:
        return dict(latest)
    end = {}
    for key, count in counts.items():
        if not count:
            end[key] = latest[key]
            continue
        share = rows * count / total
        end[key] = min(latest[key], start[key] + (math.ceil(share) if share < 1 else math.floor(share)))
    return end


def limit_bytes(start: Offsets, latest: Offsets, size: int, record_sizes: Mapping[TopicPartition, float]) -> Offsets:
    """End offsets for about `size` bytes: the same fraction of each partition's unread records."""
    counts = unread(start, latest)
    total = sum(count * record_sizes.get(key, 0.0) for key, count in counts.items())
    if total <= size:
        return dict(latest)
    return limit_rows(start, latest, max(1, int(sum(counts.values()) * size / total)))


def split(
    ranges: list[OffsetRange], limits: SplitLimits, record_sizes: Mapping[TopicPartition, float]
) -> list[OffsetRange]:
    """Split ranges evenly: none above the limits, and at least `min_partitions` of them if there are enough records.

    More ranges than that are split, too, where one has more than a task's share: small ones share tasks, see `pack`.
    `record_sizes` are average bytes a record. A range of one record is never split, however large the record is.
    """
    parts, least = [], limits.min_partitions or 0
    share = sum(span.end - span.start for span in ranges)
    if least and len(ranges) > max(_FULL_TASKS, least):
        share = max(-(-share // least), _SHARED_RECORDS)
    for span in ranges:
        count = span.end - span.start
        most = min(limits.max_records or count, share)
        size = record_sizes.get(span[:2], 0.0)
        if limits.max_bytes and size:
            most = min(most, max(1, int(limits.max_bytes / size)))
        parts.append(-(-count // most))
    missing = least - sum(parts)
    # Repeatedly give one more part to the range whose parts are the largest.
    largest = [(-(span.end - span.start) / parts[index], index) for index, span in enumerate(ranges)]
    heapq.heapify(largest)
    while missing > 0 and largest and -largest[0][0] > 1:
        index = largest[0][1]
        parts[index] += 1
        missing -= 1
        heapq.heapreplace(largest, (-(ranges[index].end - ranges[index].start) / parts[index], index))
    return [piece for span, number in zip(ranges, parts, strict=True) for piece in _pieces(span, number)]


def _pieces(span: OffsetRange, number: int) -> list[OffsetRange]:
    count = span.end - span.start
    bounds = [span.start + count * index // number for index in range(number + 1)]
    return [span._replace(start=low, end=high) for low, high in pairwise(bounds)]


def no_leader(topic: str, partition: int) -> None:
    """The leaders of data directories."""


def pack(
    ranges: list[OffsetRange], limits: SplitLimits, leader_of: LeaderOf = no_leader
) -> list[tuple[OffsetRange, ...]]:
    """The ranges of each task: one range, or several small ones if there would be too many tasks.

    A task gets ranges of as few leaders as possible, as it fetches those of one leader together.
    """
    tasks = max(_FULL_TASKS, limits.min_partitions or 0)
    if len(ranges) <= tasks or limits.max_bytes:
        return [(span,) for span in ranges]
    small = [span.end - span.start for span in ranges if span.end - span.start <= _SHARED_RECORDS]
    shared = max(1, tasks - (len(ranges) - len(small)))
    most = min(sum(small) // shared, _SHARED_RECORDS, limits.max_records or _SHARED_RECORDS)
    return in_turns(map(tuple, grouped(sorted_by_leader(ranges, leader_of), most)), leader_of)


def sorted_by_leader(ranges: Iterable[OffsetRange], leader_of: LeaderOf) -> list[OffsetRange]:
    """The ranges with those of one leader beside each other, else in their order."""

    def place(span: OffsetRange) -> int:
        node = leader_of(span.topic, span.partition)
        return -1 if node is None else node

    return sorted(ranges, key=place)


def in_turns(tasks: Iterable[_Ranges], leader_of: LeaderOf) -> list[_Ranges]:
    """The tasks in an order in which neighbours, which run at the same time, ask different leaders."""
    turns: Counter[int | None] = Counter()

    def turn(ranges: _Ranges) -> int:
        node = leader_of(ranges[0].topic, ranges[0].partition)
        turns[node] += 1
        return turns[node]

    return sorted(tasks, key=turn)


def grouped(ranges: Sequence[OffsetRange], records: int, most: float = math.inf) -> list[list[OffsetRange]]:
    """Ranges in groups of up to so many records, or of a larger one, and of `most` ranges."""
    groups: list[list[OffsetRange]] = []
    room = 0
    for span in ranges:
        room -= span.end - span.start
        if room < 0 or not groups or len(groups[-1]) == most:
            groups.append([])
            room = records - (span.end - span.start)
        groups[-1].append(span)
    return groups


class LossReporter:
    """Reports lost ranges by `mode`: "fail" raises, "warn" logs, "report" logs and adds them to the progress record.

    `advice` says how a query or job goes on without them; `explanation`, why the ranges may be older than the query.
    """

    def __init__(self, mode: str, advice: str = OPTION_ADVICE, explanation: str = "") -> None:
        self._mode, self._advice, self._explanation = mode, advice, explanation
        self._micro_batch: list[Lost] = []
        self._is_shown = False

    def begin_micro_batch(self) -> None:
        """Forget the ranges that are in a progress record.

        Others stay for the next one: a micro-batch that a restart repeats has no progress record of its own.
        """
        if self._is_shown:
            self._micro_batch.clear()

    def report(self, lost: Sequence[Lost]) -> None:
        """Raise `DataLossError` with the first ranges if the mode is "fail", else log these, and how many others."""
        if not lost:
            return
        if self._mode == "fail":
            causes = {loss.cause for loss in lost}
            advice = self._advice
            if UNSUBSCRIBED in causes:
                advice = f"name it again to continue with it, or {advice}: {_NAMED_AGAIN}"
            explained = f". {self._explanation[0].upper()}{self._explanation[1:]}" if self._explanation else ""
            raise DataLossError(
                f"records can't be read: {some_of([str(loss) for loss in lost], separator='; ')}; {advice}{explained}",
                lost[0].cause if len(causes) == 1 else "",
            )
        for loss in lost[:_SHOWN]:
            text = f"{loss}; {_NAMED_AGAIN}" if loss.cause == UNSUBSCRIBED else loss
            _log.warning("records can't be read (failOnDataLoss is not true): %s", text)
        if len(lost) > _SHOWN:
            _log.warning(
                "records can't be read (failOnDataLoss is not true): %s ranges more; failOnDataLoss=report shows all "
                "of them in the progress record",
                f"{len(lost) - _SHOWN:,}",
            )
        if self._mode == "report":
            self._micro_batch = list(dict.fromkeys([*self._micro_batch, *lost]))
            self._is_shown = False

    def show(self) -> list[dict[str, object]]:
        """The lost ranges of the micro-batch, for its progress record."""
        self._is_shown = True
        return [loss._asdict() for loss in self._micro_batch]
