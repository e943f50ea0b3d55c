"""The log of one topic-partition: a folder of segments.

    TOPIC-PARTITION/
        00000000000000000000.log .index .timeindex .txnindex     see segment.py
        00000000000000000042.snapshot                            see producer_state.py
        partition.metadata leader-epoch-checkpoint klog.json     see partition_files.py

Appended offsets are dense. Readers see the segment list as it was when they looked: it is replaced, never changed, and
a segment that is deleted meanwhile stays readable for whom holds a range of it.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from spark_klog.errors import ConfigError, DecodeError, OffsetOutOfRange
from spark_klog.log.config import LOG_APPEND_TIME, LogConfig
from spark_klog.log.file_system import FileInfo, FileSystem, LocalFileSystem
from spark_klog.log.partition_files import (
    leader_epochs_of,
    read_overrides,
    topic_id_of,
    write_leader_epochs,
    write_overrides,
    write_topic_id,
)
from spark_klog.log.producer_state import SNAPSHOT
from spark_klog.log.recovery import DELETED, open_segments
from spark_klog.log.retention import SegmentFacts, expired
from spark_klog.log.segment import FileRange, Segment, segment_name
from spark_klog.log.sequences import check_batches, headers_at
from spark_klog.log.transaction_index import AbortedTransaction
from spark_klog.records import kernels
from spark_klog.records.assignment import assign_offsets
from spark_klog.records.batch import MAX_HEADER_SIZE, iter_batches, read_header
from spark_klog.records.batch_run import MAX_RELATIVE, run_of
from spark_klog.records.batch_v2 import BatchHeader
from spark_klog.records.contract import BatchRun, IndexState

_log = logging.getLogger(__name__)
_LEGAL_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
#: Without replication a leader stays one for ever: a log goes on with the last epoch that it has.
_FIRST_EPOCH = 0
_NONE = -1
_LATEST, _EARLIEST = -1, -2
_PRODUCER_EXPIRATION_MS = 24 * 3600 * 1000
_LOCAL = LocalFileSystem()


class BatchTooLarge(ConfigError):
    """A batch above `max.message.bytes`."""


class Appended(NamedTuple):
    """What an append did: the offsets of the first and the last record; the time (ms) that a log of LogAppendTime gave
    them, else -1. A duplicate was appended before, and these are the offsets it was given then.
    """

    base_offset: int
    last_offset: int
    append_time: int = -1


def check_topic_name(topic: str) -> None:
    """`ConfigError` for a name that Kafka refuses (letters, digits, '.', '_', '-'; at most 249)."""
    if topic in (".", "..") or not _LEGAL_TOPIC.fullmatch(topic):
        raise ConfigError(f"illegal topic name {topic[:300]!r}: 1 to 249 of a-z A-Z 0-9 . _ - are allowed")


def partition_of_folder(name: str) -> tuple[str, int] | None:
    """(topic, partition) of a folder's name, None for another folder."""
    topic, dash, partition = name.rpartition("-")
    return (topic, int(partition)) if dash and topic and partition.isdecimal() else None


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
    ) -> None:
        parsed = partition_of_folder(directory.name)
        if parsed is None:
            raise ConfigError(f"{directory} is not named TOPIC-PARTITION")
        self.topic, self.partition = parsed
        self.directory = directory
        self.files = files
        self._now_ms = now_ms
        self._kernel = kernels.load()
        files.make_folder(directory)
        if overrides:
            write_overrides(files, directory, overrides)
        self._defaults = config
        self._overrides = read_overrides(files, directory)
        self.config = replace(config, **self._overrides)
        #: None until it is given one: Kafka of before 2.8 wrote none.
        self.topic_id = topic_id_of(files, directory)
        if self.topic_id is None and topic_id is not None:
            self.set_topic_id(topic_id)
        opened = open_segments(
            files,
            directory,
            self.config,
            clean=clean,
            recovery_point=recovery_point,
            start_offset=start_offset,
            now_ms=now_ms(),
        )
        self._segments, self.end_offset, self.producers = opened
        self.start_offset = min(max(start_offset, self._segments[0].base_offset), self.end_offset)
        #: What lies before it is on the disk.
        self.recovery_point = min(recovery_point, self.end_offset)
        self._flushed_ms = now_ms()
        self._has_new_files = True
        self._failure: OSError | None = None
        self._deleted: list[tuple[int, list[Path]]] = []
        #: Since it was opened: offsets before the appends, bytes appended, flushes, segments that retention deleted.
        self.opened_at, self.appended_bytes, self.flushes, self.expired_segments = self.end_offset, 0, 0, 0

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
    def last_stable_offset(self) -> int:
        """The end of what read_committed consumers may read: where the oldest open transaction begins."""
        unstable = self.producers.first_unstable_offset
        return self.high_watermark if unstable is None else min(unstable, self.high_watermark)

    @cached_property
    def _epochs(self) -> list[tuple[int, int]]:
        """(epoch, start offset) of each: read when they are first asked for, as a start opens thousands of logs."""
        return leader_epochs_of(self.files, self.directory)

    @property
    def leader_epoch(self) -> int:
        """The epoch that batches are appended with."""
        return self._epochs[-1][0] if self._epochs else _FIRST_EPOCH

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """(the largest epoch not above `epoch`, the offset after its last record), -1 where that is not known.

        As Kafka answers OffsetForLeaderEpoch (KIP-101, KIP-279).
        """
        if epoch == self.leader_epoch:
            return epoch, self.end_offset
        after = bisect_right(self._epochs, epoch, key=lambda entry: entry[0])
        if epoch < 0 or after == len(self._epochs):
            return _NONE, _NONE
        return (self._epochs[after - 1][0] if after else epoch), self._epochs[after][1]

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
        if overrides == self._overrides:
            return
        config = replace(self._defaults, **overrides)
        write_overrides(self.files, self.directory, overrides)
        self._overrides, self.config = dict(overrides), config

    def append(self, records: memoryview, *, of_client: bool = False) -> Appended:
        """Append whole batches, assigning their offsets (in place where it can be; `records` must be writable).

        Those `of_client` that have producer ids are checked as log/sequences.py says; where all are duplicates the
        answer is that of their first append.

        `CorruptBatchError` for a wrong CRC, `DecodeError` for what is not whole batches, `BatchTooLarge`,
        `ProducerRefused`; OSError where the disk fails. Nothing is appended then; but where a flush fails that
        flush.messages asks for, nobody knows what is on the disk, and the log takes no more until it is opened again.
        """
        if self._failure is not None:
            raise self._failure
        append_time = self._now_ms() if self.config.message_timestamp_type == LOG_APPEND_TIME else None
        data, run = self._assigned(records, append_time)
        if run.largest > self.config.max_message_bytes:
            raise BatchTooLarge(
                f"batch of {run.largest} bytes for {self.directory.name}, max.message.bytes is "
                f"{self.config.max_message_bytes}"
            )
        producers = headers_at(data, run.producers)
        known = check_batches(self.producers, data, run.producers, producers, of_client=of_client)
        if known is not None:
            return Appended(*known[:2], _NONE if append_time is None else known.timestamp)
        first = self.end_offset
        if self._is_full(len(data), run):
            self._roll()
            run = _run_of(data, self._segments[-1])
        if not self._segments[0].size:
            write_leader_epochs(self.files, self.directory, self.leader_epoch, first)
            self._epochs = [(self.leader_epoch, first)]
        active = self._segments[-1]
        active.append(data, run)
        self.end_offset = run.next_offset
        self.appended_bytes += len(data)
        self._note_producers(data, run, producers)
        if self.end_offset - self.recovery_point >= self.config.flush_messages:
            self.flush()
        return Appended(first, self.end_offset - 1, _NONE if append_time is None else append_time)

    def _assigned(self, records: memoryview, append_time: int | None) -> tuple[memoryview, BatchRun]:
        active = self._segments[-1]
        if append_time is None and len(records):
            run = self._kernel.scan_batches(
                records, 0, active.state, active.target(), self.end_offset, self.leader_epoch
            )
            if run.end == len(records):
                return records, run
        try:
            assigned = assign_offsets(records, self.end_offset, leader_epoch=self.leader_epoch, append_time=append_time)
        except DecodeError as error:
            raise type(error)(f"produced to {self.directory.name}: {error}") from None
        return assigned.data, _run_of(assigned.data, active)

    def _is_full(self, size: int, run: BatchRun) -> bool:
        """Whether the batches belong into a new segment: by size, by age, or as an index would be full."""
        active, config = self._segments[-1], self.config
        if not active.size:
            return False
        if active.size + size > config.segment_bytes:
            return True
        if run.next_offset - 1 - active.base_offset > MAX_RELATIVE:
            return True
        limit = config.segment_index_bytes
        if active.offset_index.is_full(limit) or active.time_index.is_full(limit):
            return True
        return self._age(active, run.state.max_timestamp) > config.segment_ms

    def _age(self, active: Segment, timestamp: int) -> int:
        """As Kafka: by the records' own time where they have one, else by the clock."""
        first = active.first_timestamp()
        return timestamp - first if first >= 0 and timestamp >= 0 else self._now_ms() - active.made_ms

    def _roll(self) -> None:
        """Begin a new segment; what there is has been flushed then. OSError: nothing has changed."""
        active = self._segments[-1]
        active.seal()
        self.flush()
        self._write_snapshot()
        info = FileInfo(0, self._now_ms())
        new = Segment(self.files, self.directory, self.end_offset, self.config.index_interval_bytes, info)
        new.open_for_appends()
        active.close()
        self._segments = (*self._segments, new)
        self._has_new_files = True
        _log.info("%s rolled at offset %d", self.directory.name, self.end_offset)

    def _write_snapshot(self) -> None:
        path = self.directory / (segment_name(self.end_offset) + SNAPSHOT)
        self.files.replace(path, self.producers.encode())

    def _note_producers(self, data: memoryview, run: BatchRun, headers: list[BatchHeader]) -> None:
        for position, header in zip(run.producers, headers, strict=True):
            aborted = self.producers.add(header, data[position : position + header.size])
            if aborted is not None:
                self._segments[-1].transaction_index.append(aborted)

    def flush(self) -> None:
        """Return when all that was appended is on the disk; OSError, and then the log takes no more."""
        try:
            self._segments[-1].flush()
            if self._has_new_files:
                self.files.sync_folder(self.directory)
                self._has_new_files = False
        except OSError as error:
            # what the operating system could not write it may have dropped: trying again would prove nothing
            self._failure = error
            _log.error("%s: flush failed, nothing is appended until the log is opened again: %s", self.directory, error)
            raise
        self.recovery_point = self.end_offset
        self._flushed_ms = self._now_ms()
        self.flushes += 1

    def read(self, offset: int, max_bytes: int, end: int | None = None) -> FileRange | None:
        """A range of one segment's file that begins with the batch that holds `offset`; at least one batch.

        None where there is nothing before `end` (the high watermark, or a last stable offset). `OffsetOutOfRange`
        before the log's start or beyond its end.
        """
        segments = self._segments
        if not self.start_offset <= offset <= self.end_offset:
            raise OffsetOutOfRange(self.topic, self.partition, (offset, offset), (self.start_offset, self.end_offset))
        stop = end if end is not None and end < self.end_offset else None
        for segment in segments[max(0, self._place(segments, offset)) :]:
            if stop is not None and segment.base_offset >= stop:
                return None
            found = segment.read(offset, max_bytes, stop)
            if found is not None:
                return found
        return None

    def records_in(self, found: FileRange) -> int:
        """How many records are in the whole batches of what `read` gave; holes of compaction count as records."""
        segments = self._segments
        first = read_header(found.file.read_at(found.position, min(found.size, MAX_HEADER_SIZE)))
        segment = segments[max(0, self._place(segments, first.base_offset))]
        # else retention or compaction has just taken it away
        return segment.records_in(found, first.base_offset) if segment.file is found.file else 0

    @staticmethod
    def _place(segments: tuple[Segment, ...], offset: int) -> int:
        return bisect_right(segments, offset, key=lambda segment: segment.base_offset) - 1

    def aborted_transactions(self, first: int, end: int) -> list[AbortedTransaction]:
        """Those with records in [first, end), for read_committed consumers; `DecodeError` for a damaged index."""
        segments = self._segments
        found: list[AbortedTransaction] = []
        for segment in segments[max(0, self._place(segments, first)) :]:
            entries = segment.transaction_index.read()
            found += [item for item in entries if item.last_offset >= first and item.first_offset < end]
            if any(item.last_stable_offset >= end for item in entries):
                break
        return found

    def offset_for_timestamp(self, timestamp: int) -> tuple[int, int] | None:
        """(timestamp, offset) of the first record with a timestamp (ms) of `timestamp` or more, or None."""
        for segment in self._segments:
            found = segment.record_at(timestamp)
            if found is not None and found[1] >= self.start_offset:
                return found
        return None

    def offsets_before(self, timestamp: int, count: int) -> list[int]:
        """At most `count` offsets as ListOffsets 0 answers with them, the largest first.

        They are the first offsets of the segments begun before `timestamp` (ms), and the end of the log where that is
        -1 (the latest); for -2 (the earliest) the log's first offset alone.
        """
        if timestamp == _EARLIEST:
            found = [self.start_offset]
        else:
            starts = [
                max(segment.base_offset, self.start_offset)
                for segment in self._segments
                if timestamp == _LATEST or segment.made_ms <= timestamp
            ]
            ends = [self.end_offset] if timestamp == _LATEST and self.end_offset > starts[-1] else []
            found = [*ends, *reversed(starts)]
        return found[: max(0, count)]

    def max_timestamp(self) -> tuple[int, int] | None:
        """(timestamp, offset) of the record with the largest timestamp; None for an empty log."""
        timestamp = max(segment.max_timestamp for segment in self._segments)
        return self.offset_for_timestamp(timestamp) if timestamp >= 0 else None

    def delete_records(self, before: int) -> int:
        """Delete the records before offset `before`, a segment at a time; the log's first offset afterwards.

        `OffsetOutOfRange` where it is beyond the high watermark.
        """
        if before > self.high_watermark:
            raise OffsetOutOfRange(self.topic, self.partition, (before, before), (self.start_offset, self.end_offset))
        self._start_at(max(self.start_offset, before))
        self.delete_expired()
        return self.start_offset

    def _start_at(self, offset: int) -> None:
        self.start_offset = offset
        self.producers.forget_before(offset)

    def delete_expired(self) -> int:
        """Delete what the settings of retention no longer keep; how many segments."""
        segments = self._segments
        count = expired(self._facts(), self.config, self.size, self.start_offset, self._now_ms())
        if count == len(segments):
            if segments[-1].size:
                self._roll()
            else:
                count -= 1
        if not count:
            return 0
        gone, self._segments = self._segments[:count], self._segments[count:]
        self._start_at(max(self.start_offset, self._segments[0].base_offset))
        self.expired_segments += count
        self.delete_files(gone)
        _log.info("%s begins at offset %d: %d segments deleted", self.directory.name, self.start_offset, count)
        return count

    def _facts(self) -> Iterator[SegmentFacts]:
        ends = [segment.base_offset for segment in self._segments[1:]] + [self.end_offset]
        for segment, end in zip(self._segments, ends, strict=True):
            newest = segment.max_timestamp
            yield SegmentFacts(end, segment.size, newest if newest >= 0 else segment.made_ms)

    def delete_files(self, segments: tuple[Segment, ...]) -> None:
        """Rename the files of segments that the log has no more; they are removed after file.delete.delay.ms."""
        paths = []
        for segment in segments:
            segment.close()
            paths += segment.rename(DELETED)
            self.files.remove(segment.path.with_suffix(SNAPSHOT))
        self._deleted.append((self._now_ms() + self.config.file_delete_delay_ms, paths))

    def flush_due(self) -> None:
        """Flush where flush.ms asks for it; OSError."""
        is_due = self._now_ms() - self._flushed_ms >= self.config.flush_ms
        if is_due and self.recovery_point < self.end_offset and self._failure is None:
            self.flush()

    def remove_deleted(self) -> None:
        """Remove the files whose file.delete.delay.ms is over; OSError."""
        now = self._now_ms()
        while self._deleted and self._deleted[0][0] <= now:
            for path in self._deleted.pop(0)[1]:
                self.files.remove(path)

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
        """Flush and close; a log that is closed so needs no recovery."""
        self._segments[-1].seal()
        if self._failure is None:
            self.flush()
            self._write_snapshot()
        for segment in self._segments:
            segment.close()

    def retire(self, suffix: str) -> Path:
        """Rename the folder to one that is no partition's, and serve it no more; returns its new path.

        The .log files are closed by the last `FileRange` that holds them: a response may be under way.
        """
        retired = self.directory.with_name(f"{self.directory.name}.{uuid4().hex}-{suffix}")
        self.files.rename(self.directory, retired)
        for segment in self._segments:
            segment.close()
        return retired

    def delete(self) -> None:
        """Remove the log. The folder is renamed first, so that a crash in between leaves no half a log."""
        shutil.rmtree(self.retire("delete"), ignore_errors=True)


def _run_of(data: memoryview, segment: Segment) -> BatchRun:
    """The run of batches whose offsets are set, for the indexes of this segment."""
    batches, position = [], 0
    for header, _ in iter_batches(data):
        batches.append((position, header))
        position += header.size
    state = segment.state if segment.size else IndexState()
    return run_of(batches, 0, state, segment.target(), segment.base_offset)
