"""The log of one topic-partition: a folder of segments.

    TOPIC-PARTITION/
        00000000000000000000.log .index .timeindex .txnindex     see segment_files.py
        00000000000000000042.snapshot                            see producer_state.py
        partition.metadata leader-epoch-checkpoint klog.json     see partition_files.py

Appended offsets are dense. The tuple of segments is replaced, never changed, so readers keep a consistent list, and a
deleted segment stays readable for holders of a range of it.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

from spark_klog.clock import system_ms
from spark_klog.errors import ConfigError, DecodeError, LogRetired, OffsetOutOfRange
from spark_klog.log.append_run import Appended, assigned, is_full, run_in
from spark_klog.log.config import LOG_APPEND_TIME, LogConfig
from spark_klog.log.deleted_files import DeletedFiles
from spark_klog.log.files.file_system import FileInfo, FileSystem, Folder, LocalFileSystem
from spark_klog.log.files.leader_epochs import LeaderEpochs
from spark_klog.log.files.names import partition_of_folder, retired_folder
from spark_klog.log.files.partition_files import read_overrides, topic_id_of, write_overrides, write_topic_id
from spark_klog.log.flushing import Flush, Flushed
from spark_klog.log.producer_state import SNAPSHOT
from spark_klog.log.readable_log import ReadableLog
from spark_klog.log.recovery import open_segments
from spark_klog.log.segments.index_memory import IndexMemory
from spark_klog.log.segments.segment import Segment
from spark_klog.log.segments.segment_files import segment_name
from spark_klog.log.sequences import check_batches, headers_at
from spark_klog.records import kernels
from spark_klog.records.contract import BatchRun
from spark_klog.records.formats.batch_v2 import BatchHeader
from spark_klog.records.kernels.batch_run import MAX_RELATIVE

_log = logging.getLogger(__name__)
_NONE = -1
_DAY_MS = 24 * 3600 * 1000
_PRODUCER_EXPIRATION_MS = _DAY_MS
#: How far ahead of this one a producer's clock may well be (Kafka 4's message.timestamp.after.max.ms).
_SKEW_MS = 3600 * 1000
_LOCAL = LocalFileSystem()
#: How many segments a request may delete while other requests wait.
SEGMENTS_AT_ONCE = 8


class BatchTooLarge(ConfigError):
    """A record batch is larger than `max.message.bytes`."""


class PartitionLog(ReadableLog):
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
        self._kernel = kernels.load()
        is_new_folder = files.make_folder(directory)
        self._defaults = config
        self._overrides = read_overrides(files, directory)
        if overrides is not None and overrides != self._overrides:  # the folder may be left from a failed creation
            write_overrides(files, directory, overrides)
            self._overrides = dict(overrides)
        self.config = replace(config, **self._overrides)
        #: None until `set_topic_id`: Kafka before 2.8 has no topic ids.
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
            self._epochs.begin(self.end_offset)  # here, so that the first append does not wait for the disk
        # The folder's directory entry may not be on disk: the folder is new, or from before a crash or a failure.
        is_new_name = is_new_folder or not clean or not self.end_offset
        self.flushed = Flushed(files, directory, min(recovery_point, self.end_offset), now_ms, has_new_name=is_new_name)
        self.failure: OSError | None = None
        self.is_open = True
        #: Compacted segments are replacing others: their files have no other use until that is done.
        self.is_swapping = False
        #: Whether a timestamp in the future has been logged.
        self._has_warned = False
        self.deleted_files = DeletedFiles(files, now_ms)
        #: Since it was opened: offsets before the appends, bytes appended, segments that retention deleted.
        self.opened_at, self.appended_bytes, self.expired_segments = self.end_offset, 0, 0

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

    def append(self, records: memoryview, *, of_client: bool = False, flushes: bool = True) -> Appended:
        """Append complete record batches; assigns their offsets, in place if possible (`records` must be writable).

        Batches `of_client` with producer ids are checked as log/sequences.py says; if all are duplicates, the result is
        that of their first append.

        `CorruptBatchError` for a wrong CRC, `DecodeError` for incomplete batches, `BatchTooLarge`, `ProducerRefused`,
        `LogRetired`, OSError. Nothing is appended then, except if the flush for flush.messages could not begin, or
        failed: then the state of the disk is unknown, and the log rejects appends until it is reopened. Without
        `flushes` the caller does that flush, see `has_many_unflushed`.
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
            self.flush()
        return Appended(first, self.end_offset - 1, _NONE if append_time is None else append_time)

    def _is_full(self, size: int, run: BatchRun) -> bool:
        active = self._segments[-1]
        is_far = active.size > 0 and run.next_offset - 1 - active.base_offset > MAX_RELATIVE
        return is_far or is_full(active, size, run.state.max_timestamp, self.config, self._now_ms())

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
            self._segments[-1].seal()
            self._flush(with_snapshot=True)
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
