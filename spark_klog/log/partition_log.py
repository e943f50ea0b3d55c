"""The log of one topic-partition: a folder of segments.

    TOPIC-PARTITION/
        00000000000000000000.log .index .timeindex .txnindex     see segments/segment.py
        00000000000000000042.snapshot                            see producer_state.py
        partition.metadata leader-epoch-checkpoint klog.json     see partition_files.py

Appended offsets are dense. The tuple of segments is replaced, never changed, so readers keep a consistent list, and a
deleted segment stays readable for holders of a range of it.
"""

from __future__ import annotations

import errno
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from spark_klog.base.clock import system_ms
from spark_klog.errors import ConfigError, DecodeError, LogRetired, OffsetOutOfRange
from spark_klog.log.config import LOG_APPEND_TIME, LogConfig
from spark_klog.log.file_system import FileInfo, FileSystem, Folder
from spark_klog.log.flushing import Flush, Flushed
from spark_klog.log.partition_files import (
    LEADER_EPOCHS,
    OVERRIDES,
    PARTITION_METADATA,
    LeaderEpochs,
    partition_of_folder,
    read_overrides,
    retired_folder,
    topic_id_of,
    write_overrides,
    write_topic_id,
)
from spark_klog.log.producer_state import SNAPSHOT, check_batches, duplicate_of
from spark_klog.log.recovery import open_segments
from spark_klog.log.segments.index import IndexMemory
from spark_klog.log.segments.segment import (
    DELETED,
    FileRange,
    Segment,
    Steps,
    segment_name,
)
from spark_klog.log.segments.transaction_index import AbortedTransaction
from spark_klog.records import kernels
from spark_klog.records.building.assignment import assign_offsets
from spark_klog.records.contract import BatchRun, IndexState, Kernel
from spark_klog.records.formats.batch import MAX_HEADER_SIZE, iter_batches, read_header
from spark_klog.records.formats.batch_v2 import BatchHeader, read_batch_header
from spark_klog.records.kernels.reference import MAX_RELATIVE, run_of

_log = logging.getLogger(__name__)
_RETRY_MS = 60_000
_NONE = -1
#: Times of ListOffsets.
_LATEST, _EARLIEST = -1, -2
_DAY_MS = 24 * 3600 * 1000
_PRODUCER_EXPIRATION_MS = _DAY_MS
#: How far ahead of this one a producer's clock may well be (Kafka 4's message.timestamp.after.max.ms).
_SKEW_MS = 3600 * 1000
_LOCAL = FileSystem()
#: How many segments a request may delete while other requests wait.
SEGMENTS_AT_ONCE = 8


class DeletedFiles:
    """The deleted files of one log that still exist. `now_ms` returns the time in ms since the epoch."""

    def __init__(self, files: FileSystem, now_ms: Callable[[], int]) -> None:
        self._files = files
        self._now_ms = now_ms
        #: (time of removal in ms, paths), the earliest first.
        self._waiting: deque[tuple[int, list[Path]]] = deque()

    def add(self, segment: Segment, delay_ms: int) -> None:
        """Rename the files of a segment, so that no start finds it again. After an OSError it is unchanged."""
        try:
            segment.rename(DELETED)
        except OSError as error:
            if not segment.is_detached:
                raise
            _log.warning("%s: its indexes stay until the next start: %s", segment.path, error)
        try:
            self._files.remove(segment.path.with_suffix(SNAPSHOT))
        except OSError as error:
            _log.warning("%s: its snapshot of producers stays until a later start: %s", segment.path, error)
        paths = [path.with_name(path.name + DELETED) for path in segment.paths()]
        self._waiting.append((self._now_ms() + delay_ms, paths))

    @property
    def are_due(self) -> bool:
        """Whether `remove_due` has something to do."""
        return bool(self._waiting) and self._waiting[0][0] <= self._now_ms()

    def remove_due(self) -> None:
        """Remove the files that are due, in any thread. After an OSError, retry the failed ones in a minute."""
        now, left, failure = self._now_ms(), [], None
        while self._waiting and self._waiting[0][0] <= now:
            for path in self._waiting.popleft()[1]:
                try:
                    self._files.remove(path)
                except OSError as error:
                    failure = error
                    left.append(path)
        if failure is not None:
            self._waiting.append((now + _RETRY_MS, left))
            raise failure


class BatchTooLarge(ConfigError):
    """A record batch is larger than `max.message.bytes`."""


class Appended(NamedTuple):
    """Result of an append: the offsets of the first and last record, and the log append time (ms, else -1).

    For a duplicate, the offsets of its first append.
    """

    base_offset: int
    last_offset: int
    append_time: int = -1


def assigned(
    kernel: Kernel,
    records: memoryview,
    active: Segment,
    first: int,
    leader_epoch: int,
    append_time: int | None,
) -> tuple[memoryview, BatchRun]:
    """Assign offsets from `first` on, in place if possible: (record batches, their run).

    `append_time`: the timestamp (ms) of all records; None keeps their own. `DecodeError`.
    """
    if append_time is None and len(records):
        run = kernel.scan_batches(records, 0, active.state, active.target(), first, leader_epoch)
        if run.end == len(records):
            return records, run
    data = assign_offsets(records, first, leader_epoch=leader_epoch, append_time=append_time).data
    return data, run_in(data, active)


def run_in(data: memoryview, segment: Segment) -> BatchRun:
    """The run of record batches with assigned offsets, for the indexes of this segment."""
    batches, position = [], 0
    for header, _ in iter_batches(data):
        batches.append((position, header))
        position += header.size
    state = segment.state if segment.size else IndexState()
    return run_of(batches, 0, state, segment.target(), segment.base_offset)


def is_full(active: Segment, size: int, timestamp: int, config: LogConfig, now_ms: int) -> bool:
    """Whether an append of `size` bytes with this largest timestamp (ms) needs a new segment: by size, age, indexes."""
    if not active.size:
        return False
    if active.size + size > config.segment_bytes:
        return True
    limit = config.segment_index_bytes
    if active.offset_index.is_full(limit) or active.time_index.is_full(limit):
        return True
    # the age as in Kafka: by timestamps if the records have them, else by the clock
    first = active.first_timestamp()
    return (timestamp - first if first >= 0 and timestamp >= 0 else now_ms - active.made_ms) > config.segment_ms


class PartitionLog:
    """An open log. One thread at a time may change it; creates `directory` if it is missing.

    `clean`: the last stop was clean. `recovery_point`: the log was flushed up to this offset. `start_offset`: records
    before it were deleted. Raises what `recovery.open_segments` raises.
    """

    def __init__(
        self,
        directory: Path,
        config: LogConfig,
        topic_id: UUID | None = None,
        *,
        clean: bool = False,
        recovery_point: int = 0,
        start_offset: int = 0,
        overrides: Mapping[str, Any] | None = None,
        files: FileSystem = _LOCAL,
        now_ms: Callable[[], int] = system_ms,
        memory: IndexMemory | None = None,
    ) -> None:
        parsed = partition_of_folder(directory.name)
        if parsed is None:
            raise ConfigError(f"{directory} is not named TOPIC-PARTITION")
        self.topic, self.partition = parsed
        self.directory = directory
        self.files = files
        self._now_ms = now_ms
        self.kernel = kernels.load()
        is_new_folder = files.make_folder(directory)
        self._defaults = config
        self._overrides = {} if is_new_folder else read_overrides(files, directory)
        if overrides is not None and overrides != self._overrides:  # the folder may be left from a failed creation
            write_overrides(files, directory, overrides, is_new=is_new_folder)
            self._overrides = dict(overrides)
        self.config = replace(config, **self._overrides)
        #: None until `set_topic_id`: Kafka before 2.8 has no topic ids.
        self.topic_id = None if is_new_folder else topic_id_of(files, directory)
        if self.topic_id is None and topic_id is not None:
            write_topic_id(files, directory, topic_id, is_new=is_new_folder)
            self.topic_id = topic_id
        self._memory = IndexMemory() if memory is None else memory
        self._segments, self.end_offset, self.producers = open_segments(
            files,
            directory,
            self.config,
            clean=clean,
            recovery_point=recovery_point,
            start_offset=start_offset,
            now_ms=now_ms(),
            memory=self._memory,
        )
        self.start_offset = max(start_offset, self._segments[0].base_offset)
        self.producers.forget_before(self.start_offset)
        self._epochs = LeaderEpochs(files, directory)
        # The folder's directory entry may not be on disk: the folder is new, or from before a crash or a failure.
        is_new_name = is_new_folder or not clean or not self.end_offset
        # Nor are its small files. An id is given for a new log, whose folder a failure may have left.
        is_new = is_new_folder or not clean or topic_id is not None
        small_files = (PARTITION_METADATA, OVERRIDES, LEADER_EPOCHS) if is_new else ()
        point = min(recovery_point, self.end_offset)
        self.flushed = Flushed(files, directory, point, now_ms, has_new_name=is_new_name, small_files=small_files)
        if not (clean or recovery_point):
            self._epochs.mend(self._segments[0].base_offset)
        #: Why the log rejects appends until it is reopened.
        self.failure: OSError | None = None
        #: False once it is closed or retired.
        self.is_open = True
        #: Compacted segments are replacing others: their files have no other use until that is done.
        self.is_swapping = False
        #: Whether a timestamp in the future has been logged.
        self._has_warned = False
        self.deleted_files = DeletedFiles(files, now_ms)
        #: Since it was opened: offsets before the appends, bytes appended, segments that retention deleted.
        self.opened_at, self.appended_bytes, self.expired_segments = self.end_offset, 0, 0
        #: The segments as they were opened, if all that they have is known to be on the disk.
        is_on_disk = not self.end_offset or (clean and self.recovery_point == self.end_offset)
        self._opened = self._segments if is_on_disk else None

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
        segments = self._segments
        for index in range(self._index_at(offset), len(segments)):
            if stop is not None and segments[index].base_offset >= stop:
                return None
            ends_within = stop is not None and (index == len(segments) - 1 or stop < segments[index + 1].base_offset)
            data = segments[index].read(offset, max_bytes, stop if ends_within else None)
            if data is not None:
                return data
        return None

    def _index_at(self, offset: int) -> int:
        """The index of the segment that contains the offset; 0 for earlier offsets."""
        return max(0, bisect_right(self._segments, offset, key=lambda segment: segment.base_offset) - 1)

    def is_in_older_segment(self, offset: int, end: int) -> bool:
        """Whether `offset` is in a segment before the one that `end` is in."""
        for segment in reversed(self._segments):  # mostly the last one
            if segment.base_offset <= end:
                return offset < segment.base_offset
        return False

    def records_in(self, part: FileRange) -> int:
        """The number of records in the complete batches of a range from `read`; gaps from compaction count as records.

        0 if retention or compaction has just removed the segment.
        """
        first = read_header(part.file.read_at(part.position, min(part.size, MAX_HEADER_SIZE)))
        segment = self._segments[self._index_at(first.base_offset)]
        return segment.records_in(part, first.base_offset) if segment.file is part.file else 0

    def offset_after(self, offset: int, part: FileRange) -> int:
        """An offset after all records of a range that `read` returned for `offset`.

        It comes from the index, so it may be some batches on.
        """
        segments, index = self._segments, self._index_at(offset)
        while index < len(segments) - 1 and segments[index].file is not part.file:
            index += 1
        following = segments[index + 1].base_offset if index < len(segments) - 1 else self.end_offset
        return segments[index].offset_after(part) or following

    def check_indexes(self) -> Iterator[None]:
        """Check the indexes before a look-up in all segments, one in a step; the log may change between. OSError."""
        yield from (None for segment in self._segments if segment.check_indexes())

    def aborted_transactions(self, first: int, end: int) -> list[AbortedTransaction]:
        """The aborted transactions with records in [first, end), for read_committed consumers.

        `DecodeError` for a damaged index, OSError.
        """
        aborted: list[AbortedTransaction] = []
        for segment in self._segments[self._index_at(first) :]:
            overlapping, is_complete = segment.transaction_index.overlapping(first, end)
            aborted += overlapping
            if is_complete:
                break
        return aborted

    def search(self, timestamp: int | None) -> Steps[tuple[int, int] | None]:
        """(timestamp, offset) of the first record with a `timestamp` (ms) or a later one, or None; in steps.

        For None that of the largest timestamp, None for an empty log. The log may change between steps. The walk is
        long if records before the log's start have larger timestamps than those after it.
        """
        start, last = self.start_offset, self._segments[-1]
        with_records = [segment for segment, after in pairwise(self._segments) if after.base_offset > start] + [last]
        if timestamp is None:
            timestamp = _NONE
            for segment in with_records:
                timestamp = max(timestamp, (yield from segment.max_timestamp_from(start)))
            if timestamp < 0:
                return None
        for segment in with_records:
            record = yield from segment.record_at(timestamp, start)
            if record is not None:
                return record
        return None

    def offsets_before(self, timestamp: int, count: int) -> list[int]:
        """At most `count` offsets for ListOffsets version 0, the largest first.

        These are the first offsets of segments started before `timestamp` (ms), and for -1 (latest) the end of the log;
        for -2 (earliest) only the log's first offset.
        """
        if timestamp == _EARLIEST:
            return [self.start_offset][: max(0, count)]
        starts = [
            max(segment.base_offset, self.start_offset)
            for segment in self._segments
            if timestamp == _LATEST or segment.made_ms <= timestamp
        ]
        ends = [self.end_offset] if timestamp == _LATEST and self.end_offset > starts[-1] else []
        return [*ends, *reversed(starts)][: max(0, count)]

    @property
    def has_many_unflushed(self) -> bool:
        """Whether flush.messages requires a flush."""
        return self.end_offset - self.flushed.recovery_point >= self.config.flush_messages

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
        """How many of the oldest segments to delete; the count stops at the first to keep.

        A segment is deleted if it ends at or before the log's start; with cleanup.policy=delete also if its newest
        record is older than retention.ms, or if the log without it still has retention.bytes.
        """
        config, now_ms, size, count = self.config, self._now_ms(), self.size, 0
        ends = [segment.base_offset for segment in self._segments[1:]] + [self.end_offset]
        for segment, end in zip(self._segments, ends, strict=True):
            newest_ms = segment.max_timestamp if segment.max_timestamp >= 0 else segment.made_ms
            is_old = config.deletes and 0 <= config.retention_ms < now_ms - newest_ms
            is_much = config.deletes and 0 <= config.retention_bytes <= size - segment.size
            if not (end <= self.start_offset or is_old or is_much):
                break
            count += 1
            size -= segment.size
        return count

    @property
    def is_flush_due(self) -> bool:
        """Whether flush.ms requires a flush."""
        is_over = self._now_ms() - self.flushed.at_ms >= self.config.flush_ms
        return is_over and self.recovery_point < self.end_offset and self.failure is None and self.is_open

    def set_topic_id(self, topic_id: UUID) -> None:
        """Set the topic's id of a log that has none; OSError."""
        write_topic_id(self.files, self.directory, topic_id)
        self.topic_id = topic_id

    @property
    def overrides(self) -> Mapping[str, Any]:
        """The topic's own values of `LogConfig`."""
        return self._overrides

    def set_overrides(self, overrides: Mapping[str, Any]) -> None:
        """Set the topic's own values of `LogConfig`, also for later starts; OSError.

        Settings of segments apply from the next segment on, those of retention at its next run.
        """
        self.check_open()
        if overrides == self._overrides:
            return
        config = replace(self._defaults, **overrides)
        write_overrides(self.files, self.directory, overrides)
        self._overrides, self.config = dict(overrides), config

    def check_size(self, size: int) -> None:
        """`BatchTooLarge` if a batch of `size` bytes is larger than `max.message.bytes`."""
        if size > self.config.max_message_bytes:
            raise BatchTooLarge(
                f"batch of {size} bytes for {self.directory.name}, max.message.bytes is {self.config.max_message_bytes}"
            )

    def append(self, records: memoryview, *, flushes: bool = True) -> Appended:
        """Append complete record batches; assigns their offsets, in place if possible (`records` must be writable).

        `CorruptBatchError` for a wrong CRC, `DecodeError` for incomplete batches, `BatchTooLarge`, `ProducerRefused`,
        `LogRetired`, OSError. Nothing is appended then, except if the flush for flush.messages could not begin, or
        failed: then the state of the disk is unknown, and the log rejects appends until it is reopened. Without
        `flushes` the caller does that flush, see `has_many_unflushed`.
        """
        appended = self.append_unflushed(records, of_client=False, rolls=True)
        assert appended is not None
        if flushes and self.has_many_unflushed:
            self.flush()
        return appended

    def has_appended(self, records: memoryview) -> bool:
        """Whether batches are all duplicates of what producers have written last."""
        headers = [header for header, _ in iter_batches(records)]
        known = [header for header in headers if isinstance(header, BatchHeader) and header.producer_id >= 0]
        return len(known) == len(headers) and duplicate_of(self.producers, known) is not None

    def append_unflushed(self, records: memoryview, *, of_client: bool, rolls: bool) -> Appended | None:
        """As `append`, but leaves flushes to the caller.

        Batches `of_client` with producer ids are checked as log/producer_state.py says; if all are duplicates, the
        result is that of their first append.
        Without `rolls` also the one before a roll: if that is due, nothing is appended, and the result is None.
        """
        if self.failure is not None or not self.is_open:
            self._check_takes()
        config, active, first, now_ms = self.config, self._segments[-1], self.end_offset, self._now_ms()
        append_time = now_ms if config.message_timestamp_type == LOG_APPEND_TIME else None
        try:
            data, run = assigned(self.kernel, records, active, first, self._epochs.latest, append_time)
        except DecodeError as error:
            raise type(error)(f"produced to {self.directory.name}: {error}") from None
        end, size = run.next_offset, len(data)
        self.check_size(run.largest)
        producers = []
        if run.producers:
            producers = [read_batch_header(data, position) for position in run.producers]
            known = check_batches(self.producers, data, run.producers, producers, of_client=of_client)
            if known is not None:
                return Appended(*known[:2], _NONE if append_time is None else known.timestamp)
        if end - 1 - first > MAX_RELATIVE:
            raise DecodeError(f"produced to {self.directory.name}: {end - first} offsets at once")
        is_far = active.size > 0 and end - 1 - active.base_offset > MAX_RELATIVE
        if is_far or is_full(active, size, run.state.max_timestamp, config, now_ms):
            if not rolls and self.flushed.snapshot_at != first:
                return None
            self._roll()
            active = self._segments[-1]
            run = run_in(data, active)
        if self.start_offset == self.end_offset and self._epochs.begin(first):
            self.flushed.note_made(LEADER_EPOCHS)
        if not active.is_made:
            self.flushed.note_made()
        if producers and any(header.is_control for header in producers):
            active.transaction_index.prepare()
        active.append(data, run)
        self.end_offset = end
        self.appended_bytes += size
        if producers:
            self._note_producers(data, run, producers)
        return Appended(first, end - 1, _NONE if append_time is None else append_time)

    def _roll(self) -> None:
        """Flush, then start a new segment. After an OSError there is no new segment."""
        active = self._segments[-1]
        active.seal()
        if self.flushed.snapshot_at != self.end_offset:  # else a flush beside the appends has just covered it
            self._flush(with_snapshot=True)
        new = self.segment(self.end_offset, FileInfo(0, self._now_ms()))
        folder = self.files.open_folder(self.directory)
        try:
            new.open_for_appends()
        except OSError:
            self._remove_new(new, folder)
            raise
        finally:
            folder.close()
        active.close()
        self._segments = (*self._segments, new)
        self.flushed.note_made()
        _log.info("%s rolled at offset %d", self.directory.name, self.end_offset)

    def segment(self, base_offset: int, info: FileInfo, *, has_transactions: bool = False) -> Segment:
        """Create a `Segment` in this log's folder, without adding it to the log."""
        interval = self.config.index_interval_bytes
        return Segment(
            self.files, self.directory, base_offset, interval, info, self._memory, has_transactions=has_transactions
        )

    def _remove_new(self, segment: Segment, folder: Folder) -> None:
        """Remove the files of a segment that could not be started: a start would take it for the active one."""
        try:
            segment.remove()
            folder.sync()
        except OSError as error:
            self.fail(error, "a segment that could not be started can't be removed")
            raise

    def fail(self, error: OSError, what: str) -> None:
        """Reject appends until the log is reopened: files and memory may differ."""
        self.failure = error
        _log.error("%s: %s, the log rejects appends until it is reopened: %s", self.directory, what, error)

    def _note_producers(self, data: memoryview, run: BatchRun, headers: list[BatchHeader]) -> None:
        for position, header in zip(run.producers, headers, strict=True):
            aborted = self.producers.add(header, data[position : position + header.size])
            if aborted is not None:
                self._segments[-1].transaction_index.append(aborted)
                self.flushed.note_made()  # its file may be new

    def flush(self) -> None:
        """Wait until all appended records are on disk. After an OSError the log rejects appends."""
        self._flush(with_snapshot=False)

    def _flush(self, *, with_snapshot: bool) -> None:
        flush = self.begin_flush(with_snapshot=with_snapshot)
        try:
            flush.run()
        except OSError as error:
            self.end_flush(flush, error)
            raise
        self.end_flush(flush)

    def begin_flush(self, *, with_snapshot: bool) -> Flush:
        """Start a flush, whose `run` may be called in any thread; a roll needs one with a snapshot. OSError."""
        self._check_takes()
        opened = self._segments[-1].unsynced_files()
        path = self.directory / (segment_name(self.end_offset) + SNAPSHOT)
        snapshot = (path, self.producers.encode()) if with_snapshot else None
        return self.flushed.begin(self.end_offset, opened, snapshot, self._segments[-1].transaction_index)

    def end_flush(self, flush: Flush, error: OSError | None = None) -> None:
        """Finish a flush. If it failed the log rejects appends. OSError, also for a flush beside one that failed."""
        if not self.is_open:
            return
        if error is not None:
            # The kernel may have dropped the dirty pages: a later fsync that succeeds would prove nothing.
            self.fail(error, "flush failed")
            return
        self._check_takes()  # the kernel reports an error to only one of several syncs
        self.flushed.end(flush)

    def roll(self) -> None:
        """Start a new segment unless the active one is empty; OSError."""
        self._check_takes()
        if self._segments[-1].size:
            self._roll()

    def delete_records(self, before: int) -> int:
        """Delete the records before offset `before`; returns the log's new start offset.

        Deletes up to `SEGMENTS_AT_ONCE` segments now, the others with retention. `OffsetOutOfRange` if `before` is
        negative or after the high watermark; `LogRetired`.
        """
        self.check_open()
        if not 0 <= before <= self.high_watermark:
            raise OffsetOutOfRange(self.topic, self.partition, (before, before), (self.start_offset, self.end_offset))
        self._start_at(max(self.start_offset, before))
        try:
            self.delete_expired(SEGMENTS_AT_ONCE)
        except OSError as error:  # the new start is in force
            _log.warning("%s: deleting segments before offset %d later: %s", self.directory, before, error)
        return self.start_offset

    def _start_at(self, offset: int) -> None:
        self.start_offset = offset
        self.producers.forget_before(offset)

    def delete_expired(self, most: int | None = None) -> int:
        """Delete the segments that retention does not keep, at most `most`; returns how many.

        Deletes nothing during a swap of compacted segments, nor after a `failure`: an unfinished swap may need them at
        the next start.
        `LogRetired`: a new log may own the file names. OSError: the segments before the failed one were deleted.
        """
        self.check_open()
        if self.failure is not None or self.is_swapping:
            return 0
        self._warn_of_the_future()
        count = self._count_expired()
        if most is not None and count > most:
            count = most
        elif count == len(self._segments):
            if self._segments[-1].size:
                self._roll()
            else:
                count -= 1
        for _ in range(count):
            self._delete_oldest()
        if count:
            _log.info("%s starts at offset %d: deleted %d segments", self.directory.name, self.start_offset, count)
        return count

    def _warn_of_the_future(self) -> None:
        """Log once that a record's timestamp keeps records longer than retention.ms says."""
        ahead_ms = max(self._segments[0].max_timestamp, self._segments[-1].max_timestamp) - self._now_ms()
        if ahead_ms > _SKEW_MS and self.config.deletes and self.config.retention_ms >= 0 and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s has a record whose timestamp is %.1f days in the future: retention.ms keeps its segment, and all "
                "later ones, for that much longer. To refuse such records set the topic's "
                "message.timestamp.after.max.ms, to ignore producers' timestamps message.timestamp.type=LogAppendTime; "
                "kafka-delete-records (DeleteRecords) removes records by offset",
                *(self.directory.name, ahead_ms / _DAY_MS),
            )

    def _delete_oldest(self) -> None:
        # The file first: a start would take a remaining one for the start of the log, with a hole after it.
        self.deleted_files.add(self._segments[0], self.config.file_delete_delay_ms)
        self._segments = self._segments[1:]
        self._start_at(max(self.start_offset, self._segments[0].base_offset))
        self.expired_segments += 1

    def note_refused(self, header: BatchHeader) -> None:
        """See `ProducerState.note_refused`."""
        self.producers.note_refused(header, self._now_ms())

    def forget_producers(self) -> None:
        """Forget producers that have not written for a day, as with Kafka's producer.id.expiration.ms."""
        self.producers.expire(self._now_ms() - _PRODUCER_EXPIRATION_MS)

    def replace_segments(self, old: tuple[Segment, ...], new: Segment | None) -> None:
        """Replace adjacent segments by a compacted one; the caller has renamed the files."""
        index = self._segments.index(old[0])
        assert self._segments[index : index + len(old)] == old
        self._segments = (*self._segments[:index], *((new,) if new else ()), *self._segments[index + len(old) :])

    def close(self) -> None:
        """Flush and close, so that the log needs no recovery. After an OSError it is closed, but needs recovery."""
        try:
            is_changed = self.appended_bytes or self._segments is not self._opened or self.flushed.small_files
            if is_changed or self.failure is not None:
                self._segments[-1].seal()
                self._flush(with_snapshot=bool(self.end_offset))
        finally:
            self.is_open = False
            for segment in self._segments:
                segment.close()

    def _check_takes(self) -> None:
        self.check_open()
        if self.failure is not None:
            raise copy(self.failure)  # a shared exception would keep the frames, and records, of all rejected appends

    def check_open(self) -> None:
        """Raise `LogRetired` if the log was deleted, set aside or closed."""
        if not self.is_open:
            raise LogRetired(errno.ESTALE, "the log was deleted or closed", str(self.directory))

    def retire(self, suffix: str) -> Path:
        """Retire the log: rename its folder so that it is not a partition's. Returns the new path.

        After an OSError the log is unchanged. Responses may still be sending from the .log files, so the last
        `FileRange` closes them. Nothing writes to the old path any more: a new log may own it.
        """
        retired = retired_folder(self.directory, suffix)
        with self.flushed.paths.lock:
            self.files.rename(self.directory, retired)
            self.flushed.paths.are_ours = False
        self.is_open = False
        for segment in self._segments:
            segment.detach()
        return retired
