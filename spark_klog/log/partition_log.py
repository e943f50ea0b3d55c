"""The log of one topic-partition: a folder of segments.

    TOPIC-PARTITION/
        00000000000000000000.log .index .timeindex .txnindex     see segment.py
        00000000000000000042.snapshot                            see producer_state.py
        partition.metadata leader-epoch-checkpoint klog.json     see partition_files.py

Appended offsets are dense. Readers see the segment list as it was when they looked: it is replaced, never changed, and
a segment that is deleted meanwhile stays readable for whom holds a range of it.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

from spark_klog.errors import ConfigError, DecodeError, LogRetired, OffsetOutOfRange
from spark_klog.log import lookup, timestamp_lookup
from spark_klog.log.append_run import Appended, assigned, is_full, run_in
from spark_klog.log.config import LOG_APPEND_TIME, LogConfig
from spark_klog.log.deleted_files import DeletedFiles
from spark_klog.log.file_system import FileInfo, FileSystem, LocalFileSystem
from spark_klog.log.flushing import Flush, Flushed
from spark_klog.log.index_memory import IndexMemory
from spark_klog.log.leader_epochs import LeaderEpochs
from spark_klog.log.names import partition_of_folder, retired_folder
from spark_klog.log.partition_files import read_overrides, topic_id_of, write_overrides, write_topic_id
from spark_klog.log.producer_state import SNAPSHOT
from spark_klog.log.recovery import open_segments
from spark_klog.log.retention import expired, facts_of
from spark_klog.log.segment import FileRange, Segment, segment_name
from spark_klog.log.sequences import check_batches, headers_at
from spark_klog.log.transaction_index import AbortedTransaction
from spark_klog.records import kernels
from spark_klog.records.batch_run import MAX_RELATIVE
from spark_klog.records.batch_v2 import BatchHeader
from spark_klog.records.contract import BatchRun

_log = logging.getLogger(__name__)
_NONE = -1
_PRODUCER_EXPIRATION_MS = 24 * 3600 * 1000
_LOCAL = LocalFileSystem()
#: Segments that are deleted while others wait.
SEGMENTS_AT_ONCE = 8


class BatchTooLarge(ConfigError):
    """A batch above `max.message.bytes`."""


def system_ms() -> int:
    """The time of the machine in ms since the epoch."""
    return time.time_ns() // 1_000_000


class PartitionLog:
    """An open log. One thread at a time may change it; `directory` is made where it is missing.

    `clean`: the last stop was a clean one. `recovery_point`: offset up to which the log was flushed before.
    `start_offset`: the records before it were deleted. Errors as of `recovery.open_segments`.
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
        self._kernel = kernels.load()
        is_new_folder = files.make_folder(directory)
        self._defaults = config
        self._overrides = read_overrides(files, directory)
        if overrides is not None and overrides != self._overrides:  # the folder may be of a creation that failed
            write_overrides(files, directory, overrides)
            self._overrides = dict(overrides)
        self.config = replace(config, **self._overrides)
        #: None until it is given one: Kafka of before 2.8 wrote none.
        self.topic_id = topic_id_of(files, directory)
        if self.topic_id is None and topic_id is not None:
            self.set_topic_id(topic_id)
        self._memory = IndexMemory() if memory is None else memory
        opened = open_segments(
            files,
            directory,
            self.config,
            clean=clean,
            recovery_point=recovery_point,
            start_offset=start_offset,
            now_ms=now_ms(),
            memory=self._memory,
        )
        self._segments, self.end_offset, self.producers = opened
        self.start_offset = max(start_offset, self._segments[0].base_offset)
        self.producers.forget_before(self.start_offset)
        self._epochs = LeaderEpochs(files, directory)
        if is_new_folder:
            self._epochs.begin(self.end_offset)  # here, as the first append is not to wait for the disk
        # The folder's name may not be on the disk: it was made now, or before a crash or a failure.
        is_new_name = is_new_folder or not clean or not self.end_offset
        self.flushed = Flushed(files, directory, min(recovery_point, self.end_offset), now_ms, has_new_name=is_new_name)
        #: Why the log takes no more until it is opened again.
        self.failure: OSError | None = None
        #: False once it is closed or retired.
        self.is_open = True
        self.deleted_files = DeletedFiles(files, now_ms)
        #: Since it was opened: offsets before the appends, bytes appended, segments that retention deleted.
        self.opened_at, self.appended_bytes, self.expired_segments = self.end_offset, 0, 0

    def set_topic_id(self, topic_id: UUID) -> None:
        """The topic's id, for a log that has none; OSError."""
        write_topic_id(self.files, self.directory, topic_id)
        self.topic_id = topic_id

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments now, the active one last."""
        return self._segments

    @property
    def high_watermark(self) -> int:
        """The end of what consumers may read: without replication the end of the log."""
        return self.end_offset

    @property
    def recovery_point(self) -> int:
        """The offset up to which the log has been flushed."""
        return self.flushed.recovery_point

    @property
    def last_stable_offset(self) -> int:
        """The end of what read_committed consumers may read: where the oldest open transaction begins."""
        unstable = self.producers.first_unstable_offset
        return self.high_watermark if unstable is None else min(unstable, self.high_watermark)

    @property
    def leader_epoch(self) -> int:
        """The epoch that batches are appended with."""
        return self._epochs.latest

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """(the largest epoch not above `epoch`, the offset after its last record), -1 where that is not known.

        As Kafka answers OffsetForLeaderEpoch (KIP-101, KIP-279).
        """
        return self._epochs.end_of(epoch, self.start_offset, self.end_offset)

    @property
    def size(self) -> int:
        """Bytes of all .log files."""
        return sum(segment.size for segment in self._segments)

    @property
    def overrides(self) -> Mapping[str, Any]:
        """The topic's own values of `LogConfig`."""
        return self._overrides

    def set_overrides(self, overrides: Mapping[str, Any]) -> None:
        """Take these for the topic's own values of `LogConfig`, from now on and at later starts; OSError.

        What is about segments holds from the next one on; what retention deletes is looked at in its time.
        """
        self.check_open()
        if overrides == self._overrides:
            return
        config = replace(self._defaults, **overrides)
        write_overrides(self.files, self.directory, overrides)
        self._overrides, self.config = dict(overrides), config

    def append(self, records: memoryview, *, of_client: bool = False, flushes: bool = True) -> Appended:
        """Append whole batches, assigning their offsets (in place where it can be; `records` must be writable).

        Those `of_client` that have producer ids are checked as log/sequences.py says; where all are duplicates the
        answer is that of their first append.

        `CorruptBatchError` for a wrong CRC, `DecodeError` for what is not whole batches, `BatchTooLarge`,
        `ProducerRefused`; `LogRetired`; OSError where the disk fails. Nothing is appended then; but where a flush fails
        that flush.messages asks for, nobody knows what is on the disk, and the log takes no more until it is opened
        again. Without `flushes` the caller sees to that flush: `has_many_unflushed`.
        """
        self._check_takes()
        first = self.end_offset
        append_time = self._now_ms() if self.config.message_timestamp_type == LOG_APPEND_TIME else None
        try:
            data, run = assigned(self._kernel, records, self._segments[-1], first, self.leader_epoch, append_time)
        except DecodeError as error:
            raise type(error)(f"produced to {self.directory.name}: {error}") from None
        if run.largest > self.config.max_message_bytes:
            raise BatchTooLarge(
                f"batch of {run.largest} bytes for {self.directory.name}, max.message.bytes is "
                f"{self.config.max_message_bytes}"
            )
        producers = headers_at(data, run.producers)
        known = check_batches(self.producers, data, run.producers, producers, of_client=of_client)
        if known is not None:
            return Appended(*known[:2], _NONE if append_time is None else known.timestamp)
        if run.next_offset - 1 - first > MAX_RELATIVE:
            raise DecodeError(f"produced to {self.directory.name}: {run.next_offset - first} offsets at once")
        if self._is_full(len(data), run):
            self._roll()
            run = run_in(data, self._segments[-1])
        if self.start_offset == self.end_offset:
            self._epochs.begin(first)
        active = self._segments[-1]
        if any(header.is_control for header in producers):
            active.transaction_index.prepare()
        active.append(data, run)
        self.end_offset = run.next_offset
        self.appended_bytes += len(data)
        self._note_producers(data, run, producers)
        if flushes and self.has_many_unflushed:
            try:
                self.flush()
            except OSError as error:
                if self.failure is None:  # it could not be begun, but the batches are appended
                    self.fail(error, "flush failed")
                raise
        return Appended(first, self.end_offset - 1, _NONE if append_time is None else append_time)

    def _is_full(self, size: int, run: BatchRun) -> bool:
        active = self._segments[-1]
        is_far = active.size > 0 and run.next_offset - 1 - active.base_offset > MAX_RELATIVE
        return is_far or is_full(active, size, run.state.max_timestamp, self.config, self._now_ms())

    def _roll(self) -> None:
        """Begin a new segment; what there is has been flushed then. OSError: there is no new segment."""
        active = self._segments[-1]
        active.seal()
        if self.flushed.snapshot_at != self.end_offset:  # else a flush beside the appends has ended just now
            self._flush(with_snapshot=True)
        new = self.segment(self.end_offset, FileInfo(0, self._now_ms()))
        try:
            new.open_for_appends()
        except OSError:
            self._remove_new(new)
            raise
        active.close()
        self._segments = (*self._segments, new)
        self.flushed.note_made()
        _log.info("%s rolled at offset %d", self.directory.name, self.end_offset)

    def segment(self, base_offset: int, info: FileInfo, *, has_transactions: bool = False) -> Segment:
        """A segment in this log's folder; it is not one of the log's yet."""
        interval = self.config.index_interval_bytes
        return Segment(
            self.files, self.directory, base_offset, interval, info, self._memory, has_transactions=has_transactions
        )

    def _remove_new(self, segment: Segment) -> None:
        """Remove the files of a segment that could not be begun, for good: a start would take it for the active one."""
        try:
            segment.remove()
            self.files.sync_folder(self.directory)
        except OSError as error:
            self.fail(error, "a segment that could not be begun can't be removed")
            raise

    def fail(self, error: OSError, what: str) -> None:
        """Take no more: what is in the files is not what is in memory, until the log is opened again."""
        self.failure = error
        _log.error("%s: %s, nothing is appended until the log is opened again: %s", self.directory, what, error)

    def _note_producers(self, data: memoryview, run: BatchRun, headers: list[BatchHeader]) -> None:
        for position, header in zip(run.producers, headers, strict=True):
            aborted = self.producers.add(header, data[position : position + header.size])
            if aborted is not None:
                self._segments[-1].transaction_index.append(aborted)
                self.flushed.note_made()  # its file may be new

    def flush(self) -> None:
        """Return when all that was appended is on the disk; OSError, and then the log takes no more."""
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
        """Begin a flush, whose `run` may be called in any thread; a roll needs one with a snapshot. OSError."""
        self._check_takes()
        opened = self._segments[-1].unsynced_files()
        path = self.directory / (segment_name(self.end_offset) + SNAPSHOT)
        snapshot = (path, self.producers.encode()) if with_snapshot else None
        return self.flushed.begin(self.end_offset, opened, snapshot, self._segments[-1].transaction_index)

    def end_flush(self, flush: Flush, error: OSError | None = None) -> None:
        """A flush has run, or failed: then the log takes no more. OSError, also for a flush beside one that failed."""
        if not self.is_open:
            return
        if error is not None:
            # The kernel may have dropped the dirty pages: a later fsync that succeeds would prove nothing.
            self.fail(error, "flush failed")
            return
        self._check_takes()  # the kernel tells an error to one of those who sync
        self.flushed.end(flush)

    @property
    def has_many_unflushed(self) -> bool:
        """Whether flush.messages asks for a flush."""
        return self.end_offset - self.recovery_point >= self.config.flush_messages

    def waits_to_roll(self, size: int, timestamp: int) -> bool:
        """Whether an append of so many bytes, up to that time (ms), begins a new segment and waits for a flush then."""
        return self.flushed.snapshot_at != self.end_offset and self.is_full(size, timestamp)

    def is_full(self, size: int, timestamp: int) -> bool:
        """Whether so many bytes of records, up to that time (ms), belong into a new segment."""
        active, now_ms = self._segments[-1], self._now_ms()
        if self.config.message_timestamp_type == LOG_APPEND_TIME:
            timestamp = now_ms
        return is_full(active, size, max(timestamp, active.max_timestamp), self.config, now_ms)

    @property
    def waits_to_expire(self) -> bool:
        """Whether retention leaves no segment, so that a new one begins, and waits for a flush then."""
        if self.flushed.snapshot_at == self.end_offset or not self._segments[-1].size or self.failure is not None:
            return False
        return self._count_expired() == len(self._segments)

    def _count_expired(self) -> int:
        facts = facts_of(self._segments, self.end_offset)
        return expired(facts, self.config, self.size, self.start_offset, self._now_ms())

    def roll(self) -> None:
        """Begin a new segment, if there is anything in the active one; OSError."""
        self._check_takes()
        if self._segments[-1].size:
            self._roll()

    def read(self, offset: int, max_bytes: int, end: int | None = None) -> FileRange | None:
        """A range of one segment's file that begins with the batch that holds `offset`; at least one batch.

        None where there is nothing before `end` (the high watermark, or a last stable offset). `OffsetOutOfRange`
        before the log's start or beyond its end.
        """
        if not self.start_offset <= offset <= self.end_offset:
            raise OffsetOutOfRange(self.topic, self.partition, (offset, offset), (self.start_offset, self.end_offset))
        stop = end if end is not None and end < self.end_offset else None
        return lookup.read(self._segments, offset, max_bytes, stop)

    def records_in(self, found: FileRange) -> int:
        """See `lookup.records_in`."""
        return lookup.records_in(self._segments, found)

    def offset_after(self, offset: int, found: FileRange) -> int:
        """See `lookup.offset_after`."""
        return lookup.offset_after(self._segments, self.end_offset, offset, found)

    def aborted_transactions(self, first: int, end: int) -> list[AbortedTransaction]:
        """See `lookup.aborted_transactions`."""
        return lookup.aborted_transactions(self._segments, first, end)

    def offset_for_timestamp(self, timestamp: int) -> tuple[int, int] | None:
        """(timestamp, offset) of the first record with a timestamp (ms) of `timestamp` or more, or None."""
        return timestamp_lookup.offset_for_timestamp(self._segments, self.start_offset, timestamp)

    def offsets_before(self, timestamp: int, count: int) -> list[int]:
        """See `timestamp_lookup.offsets_before`."""
        return timestamp_lookup.offsets_before(self._segments, self.start_offset, self.end_offset, timestamp, count)

    def max_timestamp(self) -> tuple[int, int] | None:
        """(timestamp, offset) of the record with the largest timestamp; None for an empty log."""
        return timestamp_lookup.max_timestamp(self._segments, self.start_offset)

    def delete_records(self, before: int) -> int:
        """Delete the records before offset `before`; the log's first offset afterwards. Segments before it go now, if
        they are not many, or with those that expire.

        `OffsetOutOfRange` if it is negative or beyond the high watermark; `LogRetired`.
        """
        self.check_open()
        if not 0 <= before <= self.high_watermark:
            raise OffsetOutOfRange(self.topic, self.partition, (before, before), (self.start_offset, self.end_offset))
        self._start_at(max(self.start_offset, before))
        try:
            self.delete_expired(SEGMENTS_AT_ONCE)
        except OSError as error:  # the start is in force, the files go in time
            _log.warning("%s: segments before offset %d are deleted later: %s", self.directory, before, error)
        return self.start_offset

    def _start_at(self, offset: int) -> None:
        self.start_offset = offset
        self.producers.forget_before(offset)

    def delete_expired(self, most: int | None = None) -> int:
        """Delete what the settings of retention no longer keep, `most` segments; how many were deleted.

        None after a `failure`: a swap of compacted segments, which the next start ends, may name them. `LogRetired`:
        the names of its files may be those of a new log. OSError: those before the one that failed were deleted.
        """
        self.check_open()
        if self.failure is not None:
            return 0
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
            _log.info("%s begins at offset %d: %d segments deleted", self.directory.name, self.start_offset, count)
        return count

    def _delete_oldest(self) -> None:
        # The file goes first: a start would take one that is left for the beginning of the log, with a hole after it.
        self.deleted_files.add(self._segments[0], self.config.file_delete_delay_ms)
        self._segments = self._segments[1:]
        self._start_at(max(self.start_offset, self._segments[0].base_offset))
        self.expired_segments += 1

    @property
    def is_flush_due(self) -> bool:
        """Whether flush.ms asks for it."""
        is_over = self._now_ms() - self.flushed.at_ms >= self.config.flush_ms
        return is_over and self.recovery_point < self.end_offset and self.failure is None and self.is_open

    def flush_due(self) -> None:
        """Flush where it is due; OSError."""
        if self.is_flush_due:
            self.flush()

    def note_refused(self, header: BatchHeader) -> None:
        """A client's batch was not appended, as its transaction is not known; what follows it must wait for it."""
        self.producers.note_refused(header, self._now_ms())

    def forget_producers(self) -> None:
        """Forget producers that have been silent for a day, as Kafka's producer.id.expiration.ms."""
        self.producers.expire(self._now_ms() - _PRODUCER_EXPIRATION_MS)

    def replace_segments(self, old: tuple[Segment, ...], new: Segment | None) -> None:
        """Put a compacted segment in the place of neighbours; the caller has renamed the files."""
        place = self._segments.index(old[0])
        assert self._segments[place : place + len(old)] == old
        self._segments = (*self._segments[:place], *((new,) if new else ()), *self._segments[place + len(old) :])

    def close(self) -> None:
        """Flush and close; a log that is closed so needs no recovery. OSError: it is closed, but does need it."""
        try:
            self._segments[-1].seal()
            self._flush(with_snapshot=True)
        finally:
            self.is_open = False
            for segment in self._segments:
                segment.close()

    def _check_takes(self) -> None:
        self.check_open()
        if self.failure is not None:
            raise copy(self.failure)  # raised itself it would keep the frames, and records, of all refused appends

    def check_open(self) -> None:
        """`LogRetired` if the log was deleted, set aside or closed."""
        if not self.is_open:
            raise LogRetired(errno.ESTALE, "the log was deleted or closed", str(self.directory))

    def retire(self, suffix: str) -> Path:
        """Rename the folder to one that is no partition's, and serve it no more; returns its new path.

        OSError: the log is as it was. The .log files are closed by the last `FileRange` that holds them: a response may
        be under way. Nothing is written to the old path from now on: a new log may be there.
        """
        retired = retired_folder(self.directory, suffix)
        with self.flushed.paths.lock:
            self.files.rename(self.directory, retired)
            self.flushed.paths.are_ours = False
        self.is_open = False
        for segment in self._segments:
            segment.detach()
        return retired
