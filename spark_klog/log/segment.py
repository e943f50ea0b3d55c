"""One segment: a .log file of record batches, named by its first offset, with its two indexes.

    00000000000000000042.log        batches one after the other
    00000000000000000042.index      see index.py
    00000000000000000042.timeindex

Crash story: a write that was cut short, or a block of nonsense, is found by walking the batches (`recover`): the file
is cut before the first one that is not whole or whose CRC is wrong.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from spark_klog.errors import DecodeError, LogCorrupted
from spark_klog.log.index import OffsetIndex, TimeIndex
from spark_klog.records.batch import (
    MAX_HEADER_SIZE,
    MIN_BATCH_SIZE,
    Header,
    check_crc,
    first_batch_size,
    read_header,
    whole_batch_size,
)
from spark_klog.records.batch_v2 import BatchHeader
from spark_klog.wire.primitives import Buffer

_log = logging.getLogger(__name__)
_SCAN_BYTES = 1024 * 1024
#: The indexes hold offsets relative to the segment's base as INT32.
MAX_RELATIVE_OFFSET = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a log file. Holds the file open: a segment that is deleted meanwhile stays readable."""

    file: FileIO
    position: int
    size: int

    def __len__(self) -> int:
        return self.size

    def read(self) -> bytes:
        """The bytes themselves; OSError as of pread."""
        return os.pread(self.file.fileno(), self.size, self.position)


def segment_name(base_offset: int) -> str:
    """20 digits, so that names sort as offsets do."""
    return f"{base_offset:020d}"


class Segment:
    """An open segment. Only the newest one of a log is appended to."""

    def __init__(self, directory: Path, base_offset: int, index_interval: int) -> None:
        self.base_offset = base_offset
        self.path = directory / f"{segment_name(base_offset)}.log"
        self.file = FileIO(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")
        self.size = os.fstat(self.file.fileno()).st_size
        self.offset_index = OffsetIndex(self.path.with_suffix(".index"), base_offset)
        self.time_index = TimeIndex(self.path.with_suffix(".timeindex"), base_offset)
        self._index_interval = index_interval
        self._since_index = 0
        self._max_timestamp: tuple[int, int] | None = None
        if not (self.offset_index.path.exists() and self.time_index.path.exists()):
            if self.size:
                _log.warning("%s lacks an index, building both", self.path)
            self._rebuild(self.size)
            self.seal()

    @property
    def max_timestamp(self) -> tuple[int, int]:
        """The largest timestamp (ms) and an offset that has it; (-1, base offset) without records."""
        return self._max_timestamp or self.time_index.last or (-1, self.base_offset)

    def append(self, data: Buffer, headers: list[Header]) -> None:
        """Write batches whose offsets are set. OSError leaves the segment as it was."""
        self._write(data)
        position = self.size
        for header in headers:
            self._note(header, position)
            position += header.size
        self.size = position

    def _write(self, data: Buffer) -> None:
        view = memoryview(data)
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self.file.fileno(), view[done:], self.size + done)
        except OSError:
            os.ftruncate(self.file.fileno(), self.size)
            raise

    def _note(self, header: Header, position: int) -> None:
        """Index entries for the batch at `position` where they are due, as Kafka does it: before its size is counted.

        An entry that can't be written is left to the next batch: the records are there without it.
        """
        if header.max_timestamp > self.max_timestamp[0]:
            self._max_timestamp = (header.max_timestamp, header.last_offset)
        if self._since_index > self._index_interval:
            try:
                self.offset_index.append(header.last_offset, position)
                self._index_time()
                self._since_index = 0
            except OSError as error:
                _log.warning("%s: no index entry for offset %d: %s", self.path, header.last_offset, error)
        self._since_index += header.size

    def _index_time(self) -> None:
        if self._max_timestamp is not None:
            self.time_index.append(*self._max_timestamp)

    def headers(self, position: int, end: int | None = None) -> Iterator[tuple[int, Header]]:
        """(position, header) of the batches from a position that begins one; stops at a partial one."""
        end = self.size if end is None else end
        while position + MIN_BATCH_SIZE <= end:
            data = os.pread(self.file.fileno(), MAX_HEADER_SIZE, position)
            try:
                size = first_batch_size(data)
                if size is None or position + size > end:
                    return
                header = read_header(data)
            except DecodeError as error:
                raise LogCorrupted(f"{self.path} at position {position}: {error}") from None
            yield position, header
            position += size

    def position_of(self, offset: int) -> int | None:
        """Where the first batch begins whose last offset is `offset` or later; None beyond the segment."""
        for position, header in self.headers(self.offset_index.position_for(offset)):
            if header.last_offset >= offset:
                return position
        return None

    def read(self, offset: int, max_bytes: int) -> FileRange | None:
        """From the batch with `offset` on, `max_bytes` but at least one batch; None beyond the segment."""
        position = self.position_of(offset)
        if position is None:
            return None
        _, header = next(self.headers(position))
        return FileRange(self.file, position, min(self.size - position, max(max_bytes, header.size)))

    def next_offset(self) -> int | None:
        """The offset after the last record, found from the last index entry on.

        None where index and log do not agree, or bytes follow the last whole batch: then `recover` is due.
        """
        indexed = self.offset_index.last
        result, end = self.base_offset, 0
        try:
            for position, header in self.headers(indexed[1] if indexed else 0):
                if indexed and position == indexed[1] and header.last_offset != indexed[0]:
                    return None
                result, end = header.next_offset, position + header.size
        except LogCorrupted as error:
            _log.warning("%s", error)
            return None
        return result if end == self.size else None

    def recover(self) -> int:
        """Check every batch, cut the file at the first bad one, build the indexes anew; return the bytes cut."""
        good = 0
        previous = self.base_offset - 1
        try:
            for _, header, batch in self._walk():
                check_crc(header, batch)
                first = header.base_offset if isinstance(header, BatchHeader) else header.last_offset
                if first <= previous or header.last_offset - self.base_offset > MAX_RELATIVE_OFFSET:
                    raise DecodeError(f"offset {first} follows {previous}")
                previous = header.last_offset
                good += header.size
        except DecodeError as error:
            _log.warning("%s: bad batch at position %d, cutting %d bytes: %s", self.path, good, self.size - good, error)
        cut = self.size - good
        if cut:
            _log.warning("%s: cut from %d to %d bytes", self.path, self.size, good)
            os.ftruncate(self.file.fileno(), good)
        self._rebuild(good)
        return cut

    def _walk(self) -> Iterator[tuple[int, Header, memoryview]]:
        """(position, header, batch) from the start on; `DecodeError` at what is not a batch."""
        position, wanted = 0, _SCAN_BYTES
        while position < self.size:
            data = memoryview(os.pread(self.file.fileno(), wanted, position))
            at = 0
            while (size := whole_batch_size(data, at)) is not None:
                yield position + at, read_header(data, at), data[at : at + size]
                at += size
            if at == 0:
                if wanted >= self.size - position:
                    return
                wanted *= 2
            else:
                wanted = _SCAN_BYTES
            position += at

    def _rebuild(self, size: int) -> None:
        self.size = 0
        self.offset_index.clear()
        self.time_index.clear()
        self._since_index, self._max_timestamp = 0, None
        for position, header in self.headers(0, size):
            self._note(header, position)
            self.size = position + header.size

    def seal(self) -> None:
        """Complete and close the indexes: nothing more is appended, or the log is closed."""
        self._index_time()
        self.offset_index.close()
        self.time_index.close()

    def flush(self) -> None:
        """Wait until what was appended is on the disk."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()
