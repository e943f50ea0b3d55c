"""What an open log answers: offsets, look-ups by offset and by time, and whether a roll, flush or deletion is due."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from spark_klog.errors import OffsetOutOfRange
from spark_klog.log.append_run import is_full
from spark_klog.log.config import LOG_APPEND_TIME, LogConfig
from spark_klog.log.files.leader_epochs import LeaderEpochs
from spark_klog.log.flushing import Flushed
from spark_klog.log.producer_state import ProducerState
from spark_klog.log.retention import expired, facts_of
from spark_klog.log.segments import lookup, timestamp_lookup
from spark_klog.log.segments.segment import Segment, Steps
from spark_klog.log.segments.segment_files import FileRange
from spark_klog.log.segments.transaction_index import AbortedTransaction

_Result = TypeVar("_Result")


def _result(steps: Steps[_Result]) -> _Result:
    answer: object = None
    while True:
        try:
            work = steps.send(answer)
        except StopIteration as end:
            result: _Result = end.value
            return result
        answer = None if work is None else work()


class ReadableLog:
    """The base of `PartitionLog`, which changes these attributes."""

    topic: str
    partition: int
    #: The first and the next offset.
    start_offset: int
    end_offset: int
    producers: ProducerState
    flushed: Flushed
    config: LogConfig
    #: Why the log rejects appends until it is reopened.
    failure: OSError | None
    #: False once it is closed or retired.
    is_open: bool
    _segments: tuple[Segment, ...]
    _epochs: LeaderEpochs
    _now_ms: Callable[[], int]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The current segments, the active one last."""
        return self._segments

    @property
    def high_watermark(self) -> int:
        """The end for consumers: without replication the end of the log."""
        return self.end_offset

    @property
    def recovery_point(self) -> int:
        """The end of the flushed part of the log."""
        return self.flushed.recovery_point

    @property
    def last_stable_offset(self) -> int:
        """The end for read_committed consumers: the start of the oldest open transaction, if there is one."""
        unstable = self.producers.first_unstable_offset
        return self.high_watermark if unstable is None else min(unstable, self.high_watermark)

    @property
    def leader_epoch(self) -> int:
        """The epoch that batches are appended with."""
        return self._epochs.latest

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """See `LeaderEpochs.end_of`."""
        return self._epochs.end_of(epoch, self.start_offset, self.end_offset)

    @property
    def size(self) -> int:
        """Bytes of all .log files."""
        return sum(segment.size for segment in self._segments)

    def read(self, offset: int, max_bytes: int, end: int | None = None) -> FileRange | None:
        """A range of one segment's file that starts with the batch that contains `offset`; at least one batch.

        None if there is no batch before `end` (the high watermark or last stable offset). `OffsetOutOfRange` before the
        log's start or after its end.
        """
        if not self.start_offset <= offset <= self.end_offset:
            raise OffsetOutOfRange(self.topic, self.partition, (offset, offset), (self.start_offset, self.end_offset))
        stop = end if end is not None and end < self.end_offset else None
        return lookup.read(self._segments, offset, max_bytes, stop)

    def is_in_older_segment(self, offset: int, end: int) -> bool:
        """Whether `offset` is in a segment before the one that `end` is in."""
        for segment in reversed(self._segments):  # mostly the last one
            if segment.base_offset <= end:
                return offset < segment.base_offset
        return False

    def records_in(self, found: FileRange) -> int:
        """See `lookup.records_in`."""
        return lookup.records_in(self._segments, found)

    def offset_after(self, offset: int, found: FileRange) -> int:
        """See `lookup.offset_after`."""
        return lookup.offset_after(self._segments, self.end_offset, offset, found)

    def check_indexes(self) -> Iterator[None]:
        """Check the indexes before a look-up in all segments, one in a step; the log may change between. OSError."""
        yield from (None for segment in self._segments if segment.check_indexes())

    def aborted_transactions(self, first: int, end: int) -> list[AbortedTransaction]:
        """See `lookup.aborted_transactions`."""
        return lookup.aborted_transactions(self._segments, first, end)

    def offset_for_timestamp(self, timestamp: int) -> tuple[int, int] | None:
        """(timestamp, offset) of the first record with a timestamp (ms) of `timestamp` or more, or None."""
        return _result(self.search(timestamp))

    def search(self, timestamp: int | None) -> Steps[tuple[int, int] | None]:
        """`offset_for_timestamp` in steps, or for None `max_timestamp`; the log may change between.

        The walk is long if records before the log's start have larger timestamps than those after it.
        """
        if timestamp is None:
            return timestamp_lookup.max_timestamp(self._segments, self.start_offset)
        return timestamp_lookup.offset_for_timestamp(self._segments, self.start_offset, timestamp)

    def offsets_before(self, timestamp: int, count: int) -> list[int]:
        """See `timestamp_lookup.offsets_before`."""
        return timestamp_lookup.offsets_before(self._segments, self.start_offset, self.end_offset, timestamp, count)

    def max_timestamp(self) -> tuple[int, int] | None:
        """(timestamp, offset) of the record with the largest timestamp; None for an empty log."""
        return _result(self.search(None))

    @property
    def has_many_unflushed(self) -> bool:
        """Whether flush.messages requires a flush."""
        return self.end_offset - self.recovery_point >= self.config.flush_messages

    def waits_to_roll(self, size: int, timestamp: int) -> bool:
        """Whether an append of `size` bytes with this largest timestamp (ms) needs a roll and a flush before it."""
        return self.flushed.snapshot_at != self.end_offset and self.is_full(size, timestamp)

    def is_full(self, size: int, timestamp: int) -> bool:
        """Whether an append of `size` bytes with this largest timestamp (ms) needs a new segment."""
        active, now_ms = self._segments[-1], self._now_ms()
        if self.config.message_timestamp_type == LOG_APPEND_TIME:
            timestamp = now_ms
        return is_full(active, size, max(timestamp, active.max_timestamp), self.config, now_ms)

    @property
    def waits_to_expire(self) -> bool:
        """Whether retention deletes all segments, and needs a roll and a flush before it."""
        if self.flushed.snapshot_at == self.end_offset or not self._segments[-1].size or self.failure is not None:
            return False
        return self._count_expired() == len(self._segments)

    def _count_expired(self) -> int:
        facts = facts_of(self._segments, self.end_offset)
        return expired(facts, self.config, self.size, self.start_offset, self._now_ms())

    @property
    def is_flush_due(self) -> bool:
        """Whether flush.ms requires a flush."""
        is_over = self._now_ms() - self.flushed.at_ms >= self.config.flush_ms
        return is_over and self.recovery_point < self.end_offset and self.failure is None and self.is_open
