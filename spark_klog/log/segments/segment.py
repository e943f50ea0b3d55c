"""One segment: a .log file of record batches, named by its first offset, with its indexes.

00000000000000000042.log        batches one after the other
00000000000000000042.index      see index.py
00000000000000000042.timeindex
00000000000000000042.txnindex   see transaction_index.py; only if there are aborted transactions

Crash story: `recover` walks the batches and finds incomplete writes and blocks of garbage. The first look-up notices
index files that are missing or belong to another log, and rebuilds them.
"""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from spark_klog.errors import LogCorrupted
from spark_klog.log.file_system import File, FileInfo, FileSystem, write_all
from spark_klog.log.segments.index import IndexMemory, OffsetIndex, TimeIndex
from spark_klog.log.segments.scan import DamagedBatch, IndexEntries, headers, scan
from spark_klog.log.segments.transaction_index import TransactionIndex
from spark_klog.records.contract import BatchRun, IndexState, IndexTarget
from spark_klog.records.formats.batch import Header
from spark_klog.records.formats.batch_v2 import BatchHeader
from spark_klog.records.kernels.reference import MAX_RELATIVE
from spark_klog.records.reading.reader import records_of
from spark_klog.wire.codecs import NONE
from spark_klog.wire.primitives import Buffer

LOG, INDEX, TIME_INDEX, TRANSACTION_INDEX = ".log", ".index", ".timeindex", ".txnindex"
#: Appended to names while segments are replaced or deleted, see recovery.py.
CLEANED, SWAP, DELETED = ".cleaned", ".swap", ".deleted"

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
#: Work in steps, between which other work may be done; returns its result. A step may ask for something long, which
#: needs neither the log nor its files, and is sent what that returns.
Steps = Generator[Callable[[], Any] | None, Any, _Result]
#: A batch without compression, of up to that many bytes, is looked through in less than a millisecond.
_SHORT_BATCH = 4096
#: The largest timestamp of no records, and its offset.
_NO_TIMESTAMP = (-1, -1)


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a log file. It keeps the file open, so that a deleted segment stays readable."""

    file: File
    position: int
    size: int

    def __len__(self) -> int:
        return self.size

    def read(self) -> bytes:
        """The bytes themselves; OSError."""
        return self.file.read_at(self.position, self.size)


def segment_name(base_offset: int) -> str:
    """20 digits, so that names sort as offsets do."""
    return f"{base_offset:020d}"


class Segment:
    """A segment. Only the newest one of a log is appended to, and keeps its file open.

    `made_ms` is the time when the .log file was created, or last written before it was opened.
    """

    def __init__(
        self,
        files: FileSystem,
        folder: Path,
        base_offset: int,
        interval: int,
        info: FileInfo,
        memory: IndexMemory,
        *,
        has_transactions: bool = False,
    ) -> None:
        self.base_offset = base_offset
        self.interval = interval
        name = segment_name(base_offset)
        self.path = folder / (name + LOG)
        self.size, self.made_ms = info
        self.offset_index = OffsetIndex(files, folder / (name + INDEX), base_offset, memory)
        self.time_index = TimeIndex(files, folder / (name + TIME_INDEX), base_offset, memory)
        self.transaction_index = TransactionIndex(files, folder / (name + TRANSACTION_INDEX), memory, has_transactions)
        self._files = files
        #: Weak: the file closes when nobody reads it, so that old segments need no descriptors; who reads a deleted
        #: segment still has its file.
        self._open_file: weakref.ref[File] | None = None
        self._kept_file: File | None = None
        #: A failed append has left bytes after the last batch that could not be truncated yet.
        self._has_rest = False
        #: The segment has left the log.
        self.is_detached = False
        #: False for the first segment of a log without records: its files are created by the first append.
        self.is_made = True
        self._first_timestamp: int | None = None
        #: None until the indexes have been compared with the log.
        self._state: IndexState | None = None

    # ----- files

    @property
    def file(self) -> File:
        """The open .log file. `FileNotFoundError` if the segment has left the log and nothing holds its file."""
        file = self._open_file() if self._open_file else None
        if file is None:
            if self.is_detached:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
            file = self._files.open(self.path)
            self._open_file = weakref.ref(file)
        return file

    def open_for_appends(self) -> None:
        """Make this the active segment: keep the file open until `close`. Creates files of a new segment; OSError."""
        if not self.size:
            made = self._files.create(self.path)
            self._open_file = weakref.ref(made)
            self.offset_index.clear()
            self.time_index.clear()
            self.is_made = True
        self._kept_file = self.file

    def _cut_rest(self) -> None:
        if self._has_rest:
            self.file.truncate(self.size)
            self._has_rest = False

    def cut(self, size: int) -> None:
        """Truncate the file to `size`; OSError. The indexes end before it, as `recover` has rebuilt them."""
        self.file.truncate(size)
        self.size = size
        self.flush()

    def flush(self) -> None:
        """Wait until all appends are on disk; OSError."""
        for file in self.unsynced_files():
            file.sync()
        self.transaction_index.note_synced(self.transaction_index.written_bytes)

    def unsynced_files(self) -> list[File]:
        """The open files that a flush must sync, which contain all appends; OSError."""
        self.complete()
        if not self.is_made:
            return []
        return [self.file, *self._written_indexes(), *filter(None, [self.transaction_index.unsynced_file()])]

    def _written_indexes(self) -> list[File]:
        return [*filter(None, [self.offset_index.written_file(), self.time_index.written_file()])]

    def complete(self) -> None:
        """Retry writes that a full disk has rejected, before a flush. An OSError leaves all unchanged."""
        self._cut_rest()
        self.transaction_index.write()

    def close(self) -> None:
        """Drop the references to the files; ranges keep theirs."""
        self.offset_index.close()
        self.time_index.close()
        self._kept_file = None

    def detach(self) -> None:
        """Drop the references to the files, as the segment has left the log; ranges keep theirs.

        From now on nothing is written to or opened at these paths.
        """
        self.is_detached = True
        for index in (self.offset_index, self.time_index, self.transaction_index):
            index.detach()
        self._kept_file = None

    def remove(self) -> None:
        """Remove the files that exist; OSError."""
        self.detach()
        for path in self.paths():
            self._files.remove(path)

    def rename(self, suffix: str) -> None:
        """Rename all files by adding a suffix. After an OSError the log still has the segment unless it `is_detached`.

        The .log file is first: a start accepts it without its indexes, and removes indexes without it.
        """
        for path in self.paths():
            with suppress(FileNotFoundError):
                self._files.rename(path, path.with_name(path.name + suffix))
            if not self.is_detached:
                self.detach()

    def paths(self) -> Iterable[Path]:
        """The .log file and its indexes, which may not exist."""
        return [self.path.with_suffix(suffix) for suffix in (LOG, INDEX, TIME_INDEX, TRANSACTION_INDEX)]

    # ----- indexes and appends

    @property
    def state(self) -> IndexState:
        """The state on which the next index entry depends; checks the indexes first, and rebuilds wrong ones."""
        if self._state is None and self.load_end() is None:
            # A crash may leave a compacted segment without indexes.
            level = logging.INFO if self.offset_index.is_missing else logging.WARNING
            _log.log(level, "%s: the indexes do not match the log, rebuilding them", self.path)
            self.rebuild_indexes()
        assert self._state is not None
        return self._state

    def check_indexes(self) -> bool:
        """Compare the indexes with the log, as the first look-up does; False if that was done before. OSError."""
        return self._state is None and not self.is_detached and self.state is not None

    def target(self) -> IndexTarget:
        """Where the next appended batches go."""
        return self.base_offset, self.size, self.interval

    @property
    def max_timestamp(self) -> int:
        """The largest timestamp (ms), -1 without records."""
        return self.state.max_timestamp

    def append(self, data: Buffer, run: BatchRun) -> None:
        """Append record batches with assigned offsets, as `run` describes. An OSError leaves the segment unchanged."""
        if self._has_rest:
            self._cut_rest()
        if self._kept_file is None:
            self.open_for_appends()  # only now: logs that get no records need no descriptor
            assert self._kept_file
        try:
            write_all(self._kept_file, self.size, data)
        except OSError:
            self._has_rest = True
            try:
                self._cut_rest()
            except OSError as error:
                _log.warning("%s: can't truncate the remains of a failed write yet: %s", self.path, error)
            raise
        self._state = run.state
        if run.offset_entries:
            self.offset_index.append(run.offset_entries)
        if run.time_entries:
            self.time_index.append(run.time_entries)
        self.size += run.end

    # ----- look-ups

    def position_of(self, offset: int) -> tuple[int, Header] | None:
        """(position, header) of the first batch whose last offset is `offset` or later; None after the end."""
        assert self.state
        entry = self.offset_index.floor(offset)
        try:
            return self._walk_to(offset, entry)
        except LogCorrupted:
            if entry is None:
                raise
            _log.warning("%s: the index entry for offset %d is wrong, rebuilding the indexes", self.path, entry[0])
            self.rebuild_indexes()
            return self._walk_to(offset, self.offset_index.floor(offset))

    def _walk_to(self, offset: int, entry: tuple[int, int] | None) -> tuple[int, Header] | None:
        for position, header in self._headers(entry[1] if entry else 0):
            if entry and position == entry[1] and not self._is_entry_of(entry[0], header):
                raise LogCorrupted(f"{self.path}: no batch of offset {entry[0]} at position {position}")
            if header.last_offset >= offset:
                return position, header
        return None

    def _headers(self, position: int) -> Iterator[tuple[int, Header]]:
        """(position, header) of the batches from a position on; `LogCorrupted` at an incomplete batch."""
        end = self.size  # batches may be appended meanwhile
        for each in self.headers(position):
            yield each
            position = each[0] + each[1].size
        if position != end:
            left = end - position
            raise LogCorrupted(f"{self.path}: incomplete batch at position {position}, {left} bytes left")

    def headers(self, position: int) -> Iterator[tuple[int, Header]]:
        """(position, header) of the complete batches there are now, from a position on; `LogCorrupted`, OSError."""
        return headers(self.file, self.path, position, self.size) if position < self.size else iter(())

    def read(self, offset: int, max_bytes: int, end: int | None = None) -> FileRange | None:
        """A range of up to `max_bytes`, but at least one batch, from the batch with `offset` on.

        None after the segment's end. Includes no batch with offsets from `end` on.
        """
        place = self.position_of(offset)
        if place is None:
            return None
        position, header = place
        stop = self.size
        if end is not None and (beyond := self.position_of(end)) is not None:
            stop = beyond[0]
        if stop <= position:
            return None
        return FileRange(self.file, position, min(stop - position, max(max_bytes, header.size)))

    def offset_after(self, part: FileRange) -> int | None:
        """An offset after all records in a range of this segment; by the index, so maybe some batches on.

        None if the index has no valid entry there: then use the end of the segment.
        """
        end = part.position + part.size
        entry = self.offset_index.at_position(end)
        if entry is None or not end <= entry[1] < self.size:
            return None
        try:
            _, header = next(self._headers(entry[1]))
        except LogCorrupted as error:  # the index is wrong, or the log: reading there says which
            _log.warning("%s", error)
            return None
        return entry[0] if self._is_entry_of(entry[0], header) else None

    def records_in(self, part: FileRange, base_offset: int) -> int:
        """How many offsets the complete batches of a range span; the range starts at `base_offset`."""
        end = part.position + part.size
        entry = self.offset_index.before_position(end)
        if entry:  # its batch may end after the range; from the entry before it there is a complete batch
            entry = self.offset_index.before_position(entry[1])
        start = max(part.position, entry[1] if entry else 0)
        try:
            return self._next_offset(part, start, base_offset) - base_offset
        except LogCorrupted as error:
            if start == part.position:
                raise
            _log.warning("%s: an index entry is wrong: %s", self.path, error)
            return self._next_offset(part, part.position, base_offset) - base_offset

    def _next_offset(self, part: FileRange, position: int, base_offset: int) -> int:
        """The offset after the complete batches of a range from `position` on; `base_offset` if there is none."""
        next_offset = base_offset
        for _, header in headers(part.file, self.path, position, part.position + part.size):
            next_offset = header.next_offset
        return next_offset

    def record_at(self, timestamp: int, first: int) -> Steps[tuple[int, int] | None]:
        """(timestamp, offset) of the first record from offset `first` on with a timestamp (ms) of at least `timestamp`.

        None if there is no such record. A step is a batch's header, or the records of a large or compressed batch.
        """
        if self.max_timestamp < timestamp:
            return None
        entry = self.time_index.before(timestamp)
        if entry and not self._confirms(*entry):
            _log.warning("%s: the time index entry for offset %d is wrong, rebuilding the indexes", self.path, entry[1])
            self.rebuild_indexes()
            entry = self.time_index.before(timestamp)
        for position, header in self._headers_from(max(first, entry[1] if entry else 0)):
            yield None
            if header.max_timestamp < timestamp:
                continue
            record: tuple[int, int] | None = yield from self._look(_first_since, position, header, first, timestamp)
            if record is not None:
                return record
        return None

    def max_timestamp_from(self, first: int) -> Steps[int]:
        """The largest timestamp (ms) of the records from offset `first` on, or -1; steps as in `record_at`."""
        if first <= self.base_offset:
            return self.max_timestamp
        largest = -1
        for position, header in self._headers_from(first):
            yield None
            if header.max_timestamp <= largest:
                continue
            if isinstance(header, BatchHeader) and header.base_offset >= first:
                largest = header.max_timestamp
            else:
                largest = max(largest, (yield from self._look(_largest_from, position, header, first)))
        return largest

    def _look(self, look: Callable[..., _Result], position: int, header: Header, *arguments: int) -> Steps[_Result]:
        """Look through the records of a batch."""
        work = partial(look, header, memoryview(self.file.read_at(position, header.size)), *arguments)
        is_long = header.codec_id != NONE.id or header.size > _SHORT_BATCH
        result: _Result = (yield work) if is_long else work()
        return result

    def _headers_from(self, offset: int) -> Iterator[tuple[int, Header]]:
        """(position, header) from the batch with `offset` on."""
        start = self.position_of(offset)
        return self._headers(start[0]) if start else iter(())

    def first_timestamp(self) -> int:
        """The largest timestamp (ms) of the first batch, or -1; segment.ms counts from it."""
        if self._first_timestamp is None:
            first = next(self.headers(0), None)
            if first is None:
                return -1
            self._first_timestamp = first[1].max_timestamp
        return self._first_timestamp

    # ----- checks

    def load_end(self) -> int | None:
        """The offset after the last record, found from the last index entry on.

        None if the indexes do not match the log, or if bytes follow the last complete batch: then call `recover`.
        """
        entry = self.offset_index.last
        start, next_offset, since = entry[1] if entry else 0, self.base_offset, 0
        timestamp, timestamp_offset = known = self.time_index.last or _NO_TIMESTAMP
        end = 0
        try:
            for position, header in self.headers(start):
                is_of_entry = entry is not None and position == entry[1]
                if entry and is_of_entry and not self._is_entry_of(entry[0], header):
                    return None
                if since > self.interval and not is_of_entry:
                    return None  # an entry is missing
                if header.max_timestamp > timestamp:
                    timestamp, timestamp_offset = header.max_timestamp, header.last_offset
                next_offset, end, since = header.next_offset, position + header.size, since + header.size
            # a closed segment's time index ends with its largest timestamp
            if end != self.size or (timestamp, timestamp_offset) != known or not self._has_timestamp(*known):
                return None
        except LogCorrupted as error:
            _log.warning("%s", error)
            return None
        self._state = IndexState(since, timestamp, timestamp_offset, known[0])
        return next_offset

    def _confirms(self, timestamp: int, offset: int) -> bool:
        """Whether the log agrees with an entry of the time index."""
        try:
            return self._has_timestamp(timestamp, offset)
        except LogCorrupted:
            return False

    def _is_entry_of(self, offset: int, header: Header) -> bool:
        """Whether an index entry fits a batch: it has its last offset; Kafka 0.10 wrote the first of a message set.

        Bytes between two batches may look like an old message, whose offset is then beyond what a segment can have.
        """
        if isinstance(header, BatchHeader):
            return header.base_offset <= offset <= header.last_offset
        return offset <= header.last_offset <= self.base_offset + MAX_RELATIVE

    def _has_timestamp(self, timestamp: int, offset: int) -> bool:
        """Whether `timestamp` is the largest of the batch with that offset, or there is none."""
        if timestamp < 0:  # no index has an entry of a negative one
            return (timestamp, offset) == _NO_TIMESTAMP
        place = self._walk_to(offset, self.offset_index.floor(offset))
        return place is not None and place[1].max_timestamp == timestamp

    def recover(self) -> tuple[int, DamagedBatch | None]:
        """Check every batch, and rebuild the indexes. Does not truncate.

        Returns the offset after the last sound batch, and the damage that ended the walk, if any.
        """
        return self._rebuild(checks=True)

    def rebuild_indexes(self) -> None:
        """Rebuild the indexes from headers alone; they end where headers can't be read."""
        self._rebuild(checks=False)
        self.seal()
        for file in self._written_indexes():
            file.sync()

    def set_indexes(self, entries: IndexEntries) -> list[File]:
        """Set the indexes of a sealed segment; returns their files, to be synced in any thread.

        After an OSError the next look-up rebuilds the indexes.
        """
        self._clear_indexes()
        self.offset_index.append(entries.offset_entries)
        self.time_index.append(entries.time_entries)
        self._state = entries.state
        self.seal()
        opened = self._written_indexes()
        self.close()
        return opened

    def _clear_indexes(self) -> None:
        self._state = None
        self.offset_index.clear()
        self.time_index.clear()

    def _rebuild(self, *, checks: bool) -> tuple[int, DamagedBatch | None]:
        self._clear_indexes()
        state, next_offset, damage = IndexState(), self.base_offset, None
        try:
            for run in scan(self.file, self.base_offset, self.size, self.interval, checks=checks):
                self.offset_index.append(run.offset_entries)
                self.time_index.append(run.time_entries)
                state, next_offset = run.state, run.next_offset
        except DamagedBatch as error:
            damage = error
        self._state = state  # set last: after a failed read the entries are incomplete
        return next_offset, damage

    def seal(self) -> None:
        """Complete the indexes, as no more appends follow or the log is being closed."""
        state = self.state
        self.time_index.append_last(state.max_timestamp, state.timestamp_offset)
        self._state = state._replace(indexed_timestamp=state.max_timestamp)


def _first_since(header: Header, batch: memoryview, first: int, timestamp: int) -> tuple[int, int] | None:
    """(timestamp, offset) of a batch's first record from offset `first` on with at least that timestamp (ms)."""
    for record in records_of(header, batch):
        if record.timestamp >= timestamp and record.offset >= first:
            return record.timestamp, record.offset
    return None


def _largest_from(header: Header, batch: memoryview, first: int) -> int:
    """The largest timestamp (ms) of a batch's records from offset `first` on, or -1."""
    return max((record.timestamp for record in records_of(header, batch) if record.offset >= first), default=-1)
