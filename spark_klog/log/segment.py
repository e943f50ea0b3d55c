"""One segment: a .log file of record batches, named by its first offset, with its indexes.

    00000000000000000042.log        batches one after the other
    00000000000000000042.index      see index.py
    00000000000000000042.timeindex
    00000000000000000042.txnindex   see transaction_index.py; only where there are aborted transactions

Crash story: a write that was cut short, or a block of nonsense, is found by walking the batches (`recover`). Index
files that are missing, or are not of this log, are noticed at the first look-up and built anew.
"""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spark_klog.errors import LogCorrupted
from spark_klog.log.file_system import File, FileInfo, FileSystem, write_all
from spark_klog.log.index import OffsetIndex, TimeIndex
from spark_klog.log.index_memory import IndexMemory
from spark_klog.log.scan import DamagedBatch, headers, scan
from spark_klog.log.transaction_index import TransactionIndex
from spark_klog.records.batch import Header
from spark_klog.records.batch_v2 import BatchHeader
from spark_klog.records.contract import BatchRun, IndexState, IndexTarget
from spark_klog.records.reader import records_of
from spark_klog.wire.primitives import Buffer

_log = logging.getLogger(__name__)
LOG, INDEX, TIME_INDEX, TRANSACTION_INDEX = ".log", ".index", ".timeindex", ".txnindex"


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a log file. Holds the file open: a segment that is deleted meanwhile stays readable."""

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

    `made_ms` is when the file was made, or written to last before it was opened.
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
        name = segment_name(base_offset)
        self.path = folder / (name + LOG)
        self.size, self.made_ms = info
        self.offset_index = OffsetIndex(files, folder / (name + INDEX), base_offset, memory)
        self.time_index = TimeIndex(files, folder / (name + TIME_INDEX), base_offset, memory)
        self.transaction_index = TransactionIndex(files, folder / (name + TRANSACTION_INDEX), memory, has_transactions)
        self.interval = interval
        self._files = files
        self._open_file: weakref.ref[File] | None = None
        self._kept_file: File | None = None
        #: After an append that failed, bytes may follow the last batch that could not be cut off.
        self._has_rest = False
        #: The log has the segment no more.
        self.is_detached = False
        self._first_timestamp: int | None = None
        #: None until the indexes have been compared with the log.
        self._state: IndexState | None = None

    @property
    def file(self) -> File:
        """The open .log file. `FileNotFoundError` where the log has the segment no more, and nobody holds its file."""
        file = self._open_file() if self._open_file else None
        if file is None:
            if self.is_detached:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
            file = self._files.open(self.path)
            self._open_file = weakref.ref(file)
        return file

    def open_for_appends(self) -> None:
        """Keep the file open until `close`: this segment is the active one. Makes the files of a new one; OSError."""
        if not self.size:
            self._kept_file = self._files.create(self.path)
            self._open_file = weakref.ref(self._kept_file)
            self.offset_index.clear()
            self.time_index.clear()
        self._kept_file = self.file

    @property
    def state(self) -> IndexState:
        """What the next index entry depends on; the indexes agree with the log then."""
        if self._state is None and self.load_end() is None:
            level = logging.INFO if self.offset_index.is_missing else logging.WARNING  # after compaction there are none
            _log.log(level, "%s: the indexes are not those of the log, building them anew", self.path)
            self.rebuild_indexes()
        assert self._state is not None
        return self._state

    def target(self) -> IndexTarget:
        """Where batches go that are appended now."""
        return IndexTarget(self.base_offset, self.size, self.interval)

    @property
    def max_timestamp(self) -> int:
        """The largest timestamp (ms), -1 without records."""
        return self.state.max_timestamp

    def append(self, data: Buffer, run: BatchRun) -> None:
        """Write batches whose offsets are set; `run` is of these. OSError leaves the segment as it was."""
        self._cut_rest()
        try:
            write_all(self.file, self.size, data)
        except OSError:
            self._has_rest = True
            try:
                self._cut_rest()
            except OSError as error:
                _log.warning("%s: what a failed write has left can't be cut off yet: %s", self.path, error)
            raise
        self._state = run.state
        self.offset_index.append(run.offset_entries)
        self.time_index.append(run.time_entries)
        self.size += run.end

    def _cut_rest(self) -> None:
        if self._has_rest:
            self.file.truncate(self.size)
            self._has_rest = False

    def position_of(self, offset: int) -> tuple[int, Header] | None:
        """Where the first batch begins whose last offset is `offset` or later, with its header; None beyond the end."""
        assert self.state
        entry = self.offset_index.floor(offset)
        try:
            return self._walk_to(offset, entry)
        except LogCorrupted:
            if entry is None:
                raise
            _log.warning("%s: the index entry for offset %d is wrong, building it anew", self.path, entry[0])
            self.rebuild_indexes()
            return self._walk_to(offset, self.offset_index.floor(offset))

    def _walk_to(self, offset: int, entry: tuple[int, int] | None) -> tuple[int, Header] | None:
        for position, header in self._headers(entry[1] if entry else 0):
            if entry and position == entry[1] and not _is_entry_of(entry[0], header):
                raise LogCorrupted(f"{self.path}: no batch of offset {entry[0]} at position {position}")
            if header.last_offset >= offset:
                return position, header
        return None

    def _headers(self, position: int) -> Iterator[tuple[int, Header]]:
        """(position, header) of the batches from a position on; `LogCorrupted` where no whole batch begins."""
        for found in headers(self.file, self.path, position, self.size):
            yield found
            position = found[0] + found[1].size
        if position != self.size:
            left = self.size - position
            raise LogCorrupted(f"{self.path}: no whole batch at position {position}, {left} bytes are left")

    def read(self, offset: int, max_bytes: int, end: int | None = None) -> FileRange | None:
        """From the batch with `offset` on, `max_bytes` but at least one batch; None beyond the segment.

        No batch with offsets from `end` on.
        """
        found = self.position_of(offset)
        if found is None:
            return None
        position, header = found
        stop = self.size
        if end is not None and (beyond := self.position_of(end)) is not None:
            stop = beyond[0]
        if stop <= position:
            return None
        return FileRange(self.file, position, min(stop - position, max(max_bytes, header.size)))

    def offset_after(self, found: FileRange) -> int | None:
        """An offset that no record in a range of this segment reaches: by the index, so it may be some batches beyond.

        None where the index has no right entry there: then the end of the segment is one. `LogCorrupted`.
        """
        end = found.position + found.size
        entry = self.offset_index.at_position(end)
        if entry is None or not end <= entry[1] < self.size:
            return None
        _, header = next(self._headers(entry[1]))
        return entry[0] if _is_entry_of(entry[0], header) else None

    def records_in(self, found: FileRange, base_offset: int) -> int:
        """How many offsets the whole batches of a range of this segment span, of which the first is `base_offset`."""
        end = found.position + found.size
        entry = self.offset_index.before_position(end)
        if entry:  # its batch may end beyond the range: from the entry before it there is a whole one
            entry = self.offset_index.before_position(entry[1])
        next_offset = base_offset
        for _, header in headers(found.file, self.path, max(found.position, entry[1] if entry else 0), end):
            next_offset = header.next_offset
        return next_offset - base_offset

    def record_at(self, timestamp: int, first: int) -> tuple[int, int] | None:
        """(timestamp, offset) of the first record from offset `first` on with a timestamp (ms) of `timestamp` or more.

        None where there is none.
        """
        if self.max_timestamp < timestamp:
            return None
        entry = self.time_index.before(timestamp)
        if entry and not self._confirms(*entry):
            _log.warning("%s: the time index entry for offset %d is wrong, building it anew", self.path, entry[1])
            self.rebuild_indexes()
            entry = self.time_index.before(timestamp)
        for position, header in self._headers_from(max(first, entry[1] if entry else 0)):
            if header.max_timestamp < timestamp:
                continue
            for record in records_of(header, memoryview(self.file.read_at(position, header.size))):
                if record.timestamp >= timestamp and record.offset >= first:
                    return record.timestamp, record.offset
        return None

    def max_timestamp_from(self, first: int) -> int:
        """The largest timestamp (ms) of the records from offset `first` on, -1 without any."""
        if first <= self.base_offset:
            return self.max_timestamp
        largest = -1
        for position, header in self._headers_from(first):
            if header.max_timestamp <= largest:
                continue
            if isinstance(header, BatchHeader) and header.base_offset >= first:
                largest = header.max_timestamp
                continue
            for record in records_of(header, memoryview(self.file.read_at(position, header.size))):
                if record.offset >= first:
                    largest = max(largest, record.timestamp)
        return largest

    def _headers_from(self, offset: int) -> Iterator[tuple[int, Header]]:
        """(position, header) from the batch with `offset` on."""
        start = self.position_of(offset)
        return self._headers(start[0]) if start else iter(())

    def first_timestamp(self) -> int:
        """The largest timestamp (ms) of the first batch, -1 without one; segments are rolled by it."""
        if self._first_timestamp is None:
            first = next(headers(self.file, self.path, 0, self.size), None)
            if first is None:
                return -1
            self._first_timestamp = first[1].max_timestamp
        return self._first_timestamp

    def load_end(self) -> int | None:
        """The offset after the last record, found from the last index entry on.

        None where the indexes are not those of the log, or bytes follow the last whole batch: then `recover` is due.
        """
        entry = self.offset_index.last
        start, next_offset, since = entry[1] if entry else 0, self.base_offset, 0
        timestamp, timestamp_offset = known = self.time_index.last or (-1, -1)
        end = 0
        try:
            for position, header in headers(self.file, self.path, start, self.size):
                is_of_entry = entry is not None and position == entry[1]
                if entry and is_of_entry and not _is_entry_of(entry[0], header):
                    return None
                if since > self.interval and not is_of_entry:
                    return None  # an entry was due
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
        """Whether the log has what an entry of the time index says."""
        try:
            return self._has_timestamp(timestamp, offset)
        except LogCorrupted:
            return False

    def _has_timestamp(self, timestamp: int, offset: int) -> bool:
        """Whether the largest timestamp of the batch with that offset is so."""
        if timestamp < 0:
            return True
        found = self._walk_to(offset, self.offset_index.floor(offset))
        return found is not None and found[1].max_timestamp == timestamp

    def recover(self) -> tuple[int, DamagedBatch | None]:
        """Check every batch, and build the indexes anew.

        (The offset after the last sound batch, what ended the walk before the end of the file.) Nothing is cut.
        """
        return self._rebuild(checks=True)

    def rebuild_indexes(self) -> None:
        """Build the indexes anew from headers alone; there are no entries from where that can't go on."""
        self._rebuild(checks=False)
        self.seal()
        self.offset_index.sync()
        self.time_index.sync()

    def _rebuild(self, *, checks: bool) -> tuple[int, DamagedBatch | None]:
        self._state = None
        self.offset_index.clear()
        self.time_index.clear()
        state, next_offset, damage = IndexState(), self.base_offset, None
        try:
            for run in scan(self.file, self.base_offset, self.size, self.interval, checks=checks):
                self.offset_index.append(run.offset_entries)
                self.time_index.append(run.time_entries)
                state, next_offset = run.state, run.next_offset
        except DamagedBatch as error:
            damage = error
        self._state = state  # not before: what a read that failed has left is only half of the entries
        return next_offset, damage

    def cut(self, size: int) -> None:
        """Make the file that short; OSError. The indexes end before it: `recover` has built them up to there."""
        self.file.truncate(size)
        self.size = size
        self.flush()

    def seal(self) -> None:
        """Complete and close the indexes: nothing more is appended, or the log is closed."""
        state = self.state
        self.time_index.append_last(state.max_timestamp, state.timestamp_offset)
        self._state = state._replace(indexed_timestamp=state.max_timestamp)

    def flush(self) -> None:
        """Return when what was appended is on the disk; OSError."""
        self.file.sync()
        self.offset_index.sync()
        self.time_index.sync()
        self.transaction_index.sync()

    def unsynced_files(self) -> list[File]:
        """The open files that a flush has to sync, with all that was appended in them; OSError."""
        self.complete()
        indexes = [self.offset_index.written_file(), self.time_index.written_file()]
        return [self.file, *filter(None, [*indexes, self.transaction_index.unsynced_file()])]

    def complete(self) -> None:
        """Write what `flush` needs and a full disk may have refused; OSError, and all is as it was."""
        self._cut_rest()
        self.transaction_index.write()

    def close(self) -> None:
        """Let go of the files; a range that is being read keeps its own."""
        self.offset_index.close()
        self.time_index.close()
        self._kept_file = None

    def detach(self) -> None:
        """Let go of the files, which the log has no more: nothing is written to or opened at these paths from now on.

        A range that is being read keeps its file.
        """
        self.is_detached = True
        for index in (self.offset_index, self.time_index, self.transaction_index):
            index.detach()
        self._kept_file = None

    def remove(self) -> None:
        """Remove the files, there or not; OSError."""
        self.detach()
        for path in self.paths():
            self._files.remove(path)

    def rename(self, suffix: str) -> None:
        """Rename all files by adding a suffix. OSError: the log still has the segment unless it `is_detached`.

        The .log file comes first: a start believes it without its indexes, and removes indexes without it.
        """
        for path in self.paths():
            with suppress(FileNotFoundError):
                self._files.rename(path, path.with_name(path.name + suffix))
            if not self.is_detached:
                self.detach()

    def paths(self) -> Iterable[Path]:
        """The .log file and its indexes, there or not."""
        return [self.path.with_suffix(suffix) for suffix in (LOG, INDEX, TIME_INDEX, TRANSACTION_INDEX)]


def _is_entry_of(offset: int, header: Header) -> bool:
    """An entry has the last offset of its batch; those of Kafka 0.10 the first one of a message set."""
    if isinstance(header, BatchHeader):
        return header.base_offset <= offset <= header.last_offset
    return offset <= header.last_offset
