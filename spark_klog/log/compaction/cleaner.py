"""Compact a log: run the two passes (passes.py) over its segments, and replace their files.

    *.log.cleaned   being written: not part of the log
    *.log.swap      complete and flushed: replaces its group of segments, also after a crash (recovery.py)

The passes only read sealed segments, so they can run beside appends and reads. Files of the log are renamed in the
thread that changes it, which never waits for the disk. A damaged batch ends a round with `LogCorrupted`; segments
cleaned before it stay cleaned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from spark_klog.errors import DecodeError, LogCorrupted
from spark_klog.log.compaction.passes import Cleaner, CleaningRound, LastRecord, OffsetMap, build_map
from spark_klog.log.compaction.plan import (
    Cleanable,
    SegmentInfo,
    cleanable,
    group_segments,
    retains_legacy_tombstones,
)
from spark_klog.log.file_system import File, FileInfo, Folder, write_all
from spark_klog.log.flushing import Flush
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.segments.scan import IndexEntries, ReadsAt, index_entries
from spark_klog.log.segments.segment import CLEANED, SWAP, Segment
from spark_klog.log.segments.transaction_index import AbortedTransaction, encode_transaction_index
from spark_klog.records.formats.batch import first_batch_size

_log = logging.getLogger(__name__)
_READ_BYTES = 256 * 1024
_WRITE_BYTES = 1024 * 1024
_Result = TypeVar("_Result")


class InOwner(Protocol):
    """Runs a function in the thread that changes the log; returns its result or raises its error."""

    def __call__(self, function: Callable[[], _Result], /) -> _Result: ...


def _at_once(function: Callable[[], _Result], /) -> _Result:
    return function()


def plan(log: PartitionLog, checkpoint: int | None, now_ms: int) -> Cleanable:
    """The cleanable part of the log, and whether cleaning is due; `checkpoint` is the end of the last round."""
    return cleanable(
        [_info(segment) for segment in log.segments],
        log.config,
        checkpoint=checkpoint,
        log_start_offset=log.start_offset,
        log_end_offset=log.end_offset,
        last_stable_offset=log.last_stable_offset,
        now=now_ms,
    )


def compact(
    log: PartitionLog,
    cleanable: Cleanable,
    offsets: OffsetMap,
    now_ms: int,
    in_owner: InOwner = _at_once,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Run one round over the part that `plan` found. Returns the offset up to which the log is clean.

    If the log or its segments are deleted meanwhile, the round ends without further changes. `in_owner` runs functions
    in the thread that appends to and deletes the log; only there files are opened and renamed, so that none can belong
    to a new log of that name. `check` is called for each batch, or run of batches of 256 KB at most: it may wait, or
    raise to end the round. `LogCorrupted`, OSError: groups cleaned before stay cleaned.
    """
    try:
        return _Round(log, cleanable, offsets, in_owner, check).run(now_ms)
    except _Gone:
        _log.info("%s: compaction stopped, as its segments were deleted", log.directory)
        return cleanable.first_dirty_offset


#: A cleaned segment in its temporary file: size, remaining aborted transactions, entries of its indexes.
Cleaned = tuple[int, list[AbortedTransaction], IndexEntries]


class _Gone(Exception):
    """The log no longer has the segments."""


class SegmentBatches:
    """The batches of a sealed segment, read in large pieces (`ReadBatches`).

    With a read for each batch, the thread would let the others run for a microsecond again and again, and so never give
    way to them: whoever waits for the interpreter is woken too late each time, and begins to wait again.
    """

    def __init__(self, file: ReadsAt, path: Path, end: int, check: Callable[[], None]) -> None:
        self._file, self._path, self._end, self._check = file, path, end, check
        self._data, self._start = memoryview(b""), 0

    def __call__(self, position: int) -> memoryview:
        """See `ReadBatches`. `LogCorrupted` at bytes that are no batch, or if the last one is incomplete."""
        self._check()
        left, data = self._end - position, self._data[position - self._start :]
        while left:
            try:
                size = first_batch_size(data) or 0
            except DecodeError as error:
                raise LogCorrupted(f"{self._path} at position {position}: {error}") from None
            if 0 < size <= len(data):
                break
            wanted = min(left, max(size, _READ_BYTES))
            if wanted < size or wanted <= len(data):
                raise LogCorrupted(f"{self._path}: incomplete batch at position {position}, {left} bytes left")
            data = memoryview(self._file.read_at(position, wanted))
            self._data, self._start = data, position
            if len(data) < wanted:
                missing = wanted - len(data)
                raise LogCorrupted(f"{self._path}: {missing} bytes are missing from position {position + len(data)} on")
        return data


@dataclass
class _Round:
    _log: PartitionLog
    _found: Cleanable
    _offsets: OffsetMap
    _in_owner: InOwner
    _check: Callable[[], None]

    def run(self, now_ms: int) -> int:
        log, cleanable = self._log, self._found
        self._flush()
        segments, infos, aborted, producers = self._in_owner(self._facts)
        self._offsets.clear(cleanable.first_uncleanable_offset - cleanable.first_dirty_offset)
        dirty = [
            segment
            for segment, following in zip(segments, [*segments[1:], None], strict=True)
            if following is None or following.base_offset > cleanable.first_dirty_offset
        ]
        end = build_map(
            map(self._batches, dirty),
            self._offsets,
            cleanable.first_dirty_offset,
            cleanable.first_uncleanable_offset,
            aborted,
        )
        retention = log.config.delete_retention_ms
        cleaning = CleaningRound(end, cleanable.first_uncleanable_offset, now_ms, retention, producers)
        cleaner = Cleaner(self._offsets, cleaning, aborted)
        by_base = {segment.base_offset: segment for segment in segments}
        infos = [info for info in infos if info.base_offset < end]
        for group in group_segments(infos, log.config, cleanable.first_uncleanable_offset):
            old = tuple(by_base[info.base_offset] for info in group)
            kept = [retains_legacy_tombstones(infos, info, cleanable.first_dirty_offset, retention) for info in group]
            try:
                self._swap(old, self._write_cleaned(cleaner, old, kept))
            except Exception:
                self._remove_cleaned(old)
                raise
        _log.info("%s compacted up to offset %d: %s", log.directory.name, end, cleaner.stats)
        return end

    def _swap(self, old: tuple[Segment, ...], cleaned: Cleaned) -> None:
        """Replace `old` by the cleaned segment.

        After an OSError the log is unchanged, or rejects appends until reopening it completes the swap.
        """
        self._write_transactions(old, cleaned[1])
        folder = self._in_owner(partial(self._begin_swap, old))
        self._sync_folder(folder)
        indexes = self._in_owner(partial(self._end_swap, old, cleaned))
        self._sync_folder(folder)
        folder.close()
        self._sync(indexes)

    def _write_transactions(self, old: Sequence[Segment], aborted: Sequence[AbortedTransaction]) -> None:
        paths = self._log.flushed.paths
        with paths.lock:  # it waits for the disk, so not in the owner's thread
            if not paths.are_ours:
                raise _Gone
            if aborted:
                self._log.files.replace(_swapped(_transactions_path(old)), encode_transaction_index(aborted))
            else:
                self._log.files.remove(_swapped(_transactions_path(old)))

    def _begin_swap(self, old: Sequence[Segment]) -> Folder:
        """Returns the log's folder, to sync in any thread."""
        self._check_there(old)
        folder = self._log.files.open_folder(self._log.directory)
        self._log.files.rename(_cleaned_path(old), _swapped(old[0].path))  # from here on the swap is in force
        self._log.is_swapping = True
        return folder

    def _sync_folder(self, folder: Folder) -> None:
        try:
            folder.sync()
        except OSError as error:
            self._in_owner(partial(self._fail_swap, error))
            raise

    def _fail_swap(self, error: OSError) -> None:
        self._check_there(())
        self._log.fail(error, "a swap of compacted segments was not completed")

    def _end_swap(self, old: tuple[Segment, ...], cleaned: Cleaned) -> list[File]:
        """Returns the indexes to sync in any thread."""
        self._check_there(old)
        log, files, base = self._log, self._log.files, old[0]
        size, aborted, entries = cleaned
        try:
            for segment in old:
                log.deleted_files.add(segment, log.config.file_delete_delay_ms)
            for index in set(base.paths()) - {base.path}:
                files.remove(index)  # an index of `old` that could not be renamed would be taken for the new segment's
            if aborted:
                files.rename(_swapped(_transactions_path(old)), _transactions_path(old))
            files.rename(_swapped(base.path), base.path)
        except OSError as error:
            self._fail_swap(error)
            raise
        info = FileInfo(size, old[-1].made_ms)
        new = log.segment(base.base_offset, info, has_transactions=bool(aborted))
        indexes: list[File] = []
        if size:
            try:
                indexes = new.set_indexes(entries)
            except OSError as error:
                _log.warning("%s: no indexes of a compacted segment yet: %s", log.directory, error)
        log.replace_segments(old, new)
        log.is_swapping = False
        return indexes

    def _sync(self, indexes: Sequence[File]) -> None:
        try:
            for file in indexes:
                file.sync()
        except OSError as error:  # an index only tells where to start, and is compared with the log at a start
            _log.warning("%s: an index of a compacted segment is not on the disk: %s", self._log.directory, error)

    def _flush(self) -> None:
        """Flush transaction markers before records are removed because of them."""
        flush = self._in_owner(self._begin_flush)
        if flush is None:
            return
        try:
            flush.run()
        except OSError as error:
            self._in_owner(partial(self._log.end_flush, flush, error))
            self._check_there(())  # the files may be missing because the log was deleted
            raise
        self._in_owner(partial(self._log.end_flush, flush))

    def _begin_flush(self) -> Flush | None:
        self._check_there(())
        return self._log.begin_flush(with_snapshot=False) if self._log.recovery_point < self._log.end_offset else None

    def _facts(
        self,
    ) -> tuple[list[Segment], list[SegmentInfo], list[AbortedTransaction], dict[int, LastRecord]]:
        """The log's segments, their infos, aborted transactions and active producers."""
        log = self._log
        self._check_there(())
        segments = [segment for segment in log.segments if segment.base_offset < self._found.first_uncleanable_offset]
        if not segments:
            raise _Gone
        # The entry of a transaction that started in these segments is in the segment of its marker, maybe a later one.
        aborted = log.aborted_transactions(segments[0].base_offset, self._found.first_uncleanable_offset)
        producers = {
            producer_id: LastRecord(producer.batches[-1].last_offset if producer.batches else None, producer.epoch)
            for producer_id, producer in log.producers.producers.items()
        }
        return segments, [_info(segment) for segment in segments], aborted, producers

    def _check_there(self, segments: Collection[Segment]) -> None:
        if not (self._log.is_open and set(segments) <= set(self._log.segments)):
            raise _Gone

    def _opened(self, segment: Segment) -> File:
        self._check_there([segment])
        return segment.file

    def _batches(self, segment: Segment) -> SegmentBatches:
        return SegmentBatches(self._in_owner(partial(self._opened, segment)), segment.path, segment.size, self._go_on)

    def _go_on(self) -> None:
        self._check()
        if not self._log.is_open:
            raise _Gone

    def _write_cleaned(self, cleaner: Cleaner, old: Sequence[Segment], legacy_kept: Sequence[bool]) -> Cleaned:
        """Write the segment that replaces `old` to a temporary name."""
        file = self._in_owner(partial(self._make_cleaned, old))
        size, waiting = 0, bytearray()
        for segment, kept in zip(old, legacy_kept, strict=True):
            for batches in cleaner.clean(self._batches(segment), kept):
                waiting += batches
                if len(waiting) >= _WRITE_BYTES:
                    write_all(file, size, waiting)
                    size += len(waiting)
                    waiting.clear()
        write_all(file, size, waiting)
        size += len(waiting)
        file.sync()
        # here, so that the look-up after the swap need not read the segment in the owner's thread
        entries = index_entries(file, old[0].base_offset, size, self._log.config.index_interval_bytes)
        file.close()
        return size, cleaner.take_aborted(), entries

    def _make_cleaned(self, old: Sequence[Segment]) -> File:
        self._check_there(old)
        self._log.files.remove(_cleaned_path(old))
        return self._log.files.create(_cleaned_path(old))

    def _remove_cleaned(self, old: Sequence[Segment]) -> None:
        """Remove what a round has written when it ends early: the disk may be full."""
        paths = self._log.flushed.paths
        with paths.lock:  # not in the owner's thread, which may be stopping
            if paths.are_ours:
                try:
                    self._log.files.remove(_cleaned_path(old))
                except OSError as error:
                    _log.warning("%s stays until the next start: %s", _cleaned_path(old), error)


def _cleaned_path(old: Sequence[Segment]) -> Path:
    return old[0].path.with_name(old[0].path.name + CLEANED)


def _swapped(path: Path) -> Path:
    return path.with_name(path.name + SWAP)


def _transactions_path(old: Sequence[Segment]) -> Path:
    return old[0].transaction_index.path


def _info(segment: Segment) -> SegmentInfo:
    timestamp = segment.max_timestamp
    return SegmentInfo(
        segment.base_offset,
        segment.size,
        segment.first_timestamp(),
        timestamp if timestamp >= 0 else segment.made_ms,
        segment.made_ms,
        segment.offset_index.size,
        segment.time_index.size,
    )
