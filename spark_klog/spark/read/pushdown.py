"""Apply the filters that Spark pushes down to a batch query, to read less of the log.

topic, partition, offset   exact, if the filter compares with constants: Spark need not check the rows
timestamp, lower bound     reading starts at the first record that late, by ListOffsets: all records before it are
                           earlier, even if timestamps are out of order
timestamp, upper bound     reading ends at the first record that late, but only with log append time, which never
                           decreases; with create time an earlier record may follow
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone

from spark_klog.base.names import TopicPartition
from spark_klog.base.settings import INT64_MAX
from spark_klog.spark.read.ranges import OffsetRange
from spark_klog.spark.versions import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND_PER_MS = 1000
_NEVER_NULL = frozenset({"topic", "partition", "offset", "timestamp", "timestampType"})


def spark_pushes_filters() -> bool:
    """Whether Spark started this process to push filters. If not, a reader with `pushFilters` fails the query."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _WORKER in sys.modules or (main is not None and main.name == _WORKER)


@dataclass
class Pushed:
    """The parts of the log that pass the filters; bounds are half-open, times are ms, None is no bound."""

    topics: frozenset[str] | None = None
    partitions: list[tuple[int, int]] = field(default_factory=list)
    partition_sets: list[frozenset[int]] = field(default_factory=list)
    first_offset: int = 0
    end_offset: int = INT64_MAX
    first_time: int | None = None
    end_time: int | None = None

    def keeps(self, key: TopicPartition) -> bool:
        topic, partition = key
        return (
            (self.topics is None or topic in self.topics)
            and all(low <= partition < high for low, high in self.partitions)
            and all(partition in numbers for numbers in self.partition_sets)
        )

    def clip(self, span: OffsetRange) -> OffsetRange:
        """Cut a range to the bounds of offsets; the result may be empty."""
        start = max(span.start, self.first_offset)
        return span._replace(start=start, end=max(start, min(span.end, self.end_offset)))

    def push(self, filters: Iterable[Filter]) -> list[Filter]:
        """Apply filters; returns those that Spark must still apply to the rows."""
        return [condition for condition in filters if not self._apply(condition)]

    def _apply(self, condition: Filter) -> bool:
        """Apply a filter if it is known; whether no row is left that Spark must check."""
        column = ".".join(getattr(condition, "attribute", ()))
        if isinstance(condition, IsNotNull):
            return column in _NEVER_NULL
        if column == "topic" and isinstance(condition, EqualTo | EqualNullSafe | In):
            topics = frozenset(condition.value if isinstance(condition, In) else [condition.value])
            self.topics = topics if self.topics is None else self.topics & topics
            return True
        if column == "timestamp":
            self._apply_time(condition)
            return False
        if column == "partition" and isinstance(condition, In):
            self.partition_sets.append(frozenset(condition.value))
            return True
        bounds = _bounds(condition)
        if bounds is None or column not in ("partition", "offset"):
            return False
        if column == "partition":
            self.partitions.append(bounds)
        else:
            self.first_offset = max(self.first_offset, bounds[0])
            self.end_offset = min(self.end_offset, bounds[1])
        return True

    def _apply_time(self, condition: Filter) -> None:
        value = getattr(condition, "value", None)
        if not isinstance(value, datetime):
            return
        aware = value if value.tzinfo else value.replace(tzinfo=timezone.utc)
        delta = aware - _EPOCH
        microseconds = (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds
        below, rest = divmod(microseconds, _MICROSECOND_PER_MS)
        if isinstance(condition, EqualTo | EqualNullSafe | GreaterThan | GreaterThanOrEqual):
            self.first_time = below if self.first_time is None else max(below, self.first_time)
        if isinstance(condition, EqualTo | EqualNullSafe | LessThan | LessThanOrEqual):
            # The first millisecond of which no record can pass.
            end = below + 1 if rest or not isinstance(condition, LessThan) else below
            self.end_time = end if self.end_time is None else min(end, self.end_time)


def _bounds(condition: Filter) -> tuple[int, int] | None:
    """The [low, high) of integers that pass a filter; None if it is not such a comparison."""
    value = getattr(condition, "value", None)
    if type(value) is not int:
        return None
    if isinstance(condition, EqualTo | EqualNullSafe):
        return value, value + 1
    if isinstance(condition, GreaterThan):
        return value + 1, INT64_MAX
    if isinstance(condition, GreaterThanOrEqual):
        return value, INT64_MAX
    if isinstance(condition, LessThan):
        return -INT64_MAX, value
    if isinstance(condition, LessThanOrEqual):
        return -INT64_MAX, value + 1
    return None
