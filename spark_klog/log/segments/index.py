"""The two sparse indexes of a segment: offset index and time index.

.index       INT32 offset relative to the segment's base, INT32 position: the LAST offset of a batch, and the position
             in the .log file where that batch begins
.timeindex   INT64 timestamp (ms), INT32 relative offset: the largest timestamp so far, and the offset that has it

Both get an entry for each `index.interval.bytes` of log, at the same batch; the time index only if the largest
timestamp has grown. Kafka preallocates the files, so zeros may follow the entries after a crash.

Crash story: an index only tells where to start walking the log, and is not trusted. `Segment` compares both with the
log at the first look-up, and rebuilds them if they differ. So entries are written a few thousand at a time, and if the
disk is full they stay in memory until the next write.

Memory: entries are loaded at the first look-up. Those of sealed segments may be released again, see `IndexMemory`.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from pathlib import Path
from struct import Struct
from threading import Lock
from typing import Protocol

from spark_klog.log.file_system import File, FileSystem, write_all
from spark_klog.records.kernels.reference import OFFSET_ENTRY, TIME_ENTRY

_log = logging.getLogger(__name__)
#: Enough for both indexes of about 13 sealed segments of 1 GiB.
DEFAULT_LIMIT = 64 * 1024 * 1024
#: Bytes of entries that may wait in memory.
_UNWRITTEN = 16 * 1024


class Releasable(Protocol):
    """An index that can be read again from its file."""

    def release(self) -> None:
        """Drop the loaded entries."""


class IndexMemory:
    """Releases the least recently used indexes when all together exceed `limit` bytes.

    It counts only indexes whose entries are all in their files, not those being appended to. The lock is for the log
    cleaner, which reads in its own thread.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self.limit = limit
        self._sizes: OrderedDict[Releasable, int] = OrderedDict()
        self._lock = Lock()
        #: Bytes of all indexes counted.
        self.used = 0

    def note_use(self, index: Releasable, size: int) -> None:
        """Count an index of `size` bytes as just used. The last used one is never released."""
        with self._lock:
            self.used += size - self._sizes.pop(index, 0)
            self._sizes[index] = size
            while self.used > self.limit and len(self._sizes) > 1:
                oldest, freed = self._sizes.popitem(last=False)
                self.used -= freed
                oldest.release()

    def forget(self, index: Releasable) -> None:
        """Stop counting an index: it is being appended to, or was removed."""
        with self._lock:
            self.used -= self._sizes.pop(index, 0)


class SparseIndex:
    """Ascending (key, value) pairs in a file; the base of both indexes."""

    _entry: Struct

    def __init__(self, files: FileSystem, path: Path, base_offset: int, memory: IndexMemory) -> None:
        self.path = path
        self.base_offset = base_offset
        self._files = files
        self._memory = memory
        #: Immutable until entries are added, so that loading need not copy what was read.
        self._data: bytes | bytearray | None = None
        self._written = 0
        #: Bytes of the entries when they were last released.
        self._released_size: int | None = None
        self._file: File | None = None
        #: Until `close` entries may be added, and are not released.
        self._is_growing = False
        self._is_detached = False
        #: Whether the file was missing when it was read.
        self.is_missing = False

    def _load(self) -> bytes | bytearray:
        loaded = self._data
        if loaded is None:
            loaded = self._data = self._read()
            self._written = len(loaded)
        if not self._is_growing:
            self._memory.note_use(self, len(loaded))
        return loaded

    def _read(self) -> bytes:
        if self._is_detached:
            return b""
        try:
            data = self._files.read(self.path)
        except FileNotFoundError:
            data, self.is_missing = b"", True
        used = -(-len(data.rstrip(b"\0")) // self._entry.size) * self._entry.size
        return data[: min(used, len(data) - len(data) % self._entry.size)]

    def _grow(self) -> bytearray:
        self._is_growing = True
        self._memory.forget(self)
        data = self._load()
        if not isinstance(data, bytearray):
            data = self._data = bytearray(data)
        return data

    def release(self) -> None:
        """Drop the loaded entries; the next look-up reads them again."""
        if self._data is not None:
            self._released_size = len(self._data)
        self._data = None

    @property
    def size(self) -> int:
        """Bytes of all entries; those that were released need not be read again."""
        if self._data is None and self._released_size is not None:
            return self._released_size
        return len(self._load())

    def _pair(self, data: bytes | bytearray, number: int) -> tuple[int, int]:
        key, value = self._entry.unpack_from(data, number * self._entry.size)
        return key, value

    def append(self, entries: bytes) -> None:
        """Add encoded entries with ascending keys. `write` is called when enough have accumulated."""
        data = self._grow()
        data += entries
        if len(data) - self._written >= _UNWRITTEN:
            self.write()

    def write(self) -> None:
        """Write the entries that are not in the file yet; if the disk fails, they stay for the next time."""
        data = self._data
        if self._is_detached or data is None or self._written == len(data):
            return
        try:
            if self._file is None:
                self._file = self._files.create(self.path)
            # By position: overwrite zeros that Kafka preallocated, or a partial entry from a full disk.
            write_all(self._file, self._written, data[self._written :])
        except OSError as error:
            _log.warning("%s: %d bytes of entries are not written yet: %s", self.path, len(data) - self._written, error)
        else:
            self._written = len(data)

    def _floor(self, key: int) -> tuple[int, int] | None:
        """The last pair with a key of at most `key`."""
        data = self._load()
        numbers = range(len(data) // self._entry.size)
        after = bisect_right(numbers, key, key=lambda number: self._pair(data, number)[0])
        return self._pair(data, after - 1) if after else None

    @property
    def last(self) -> tuple[int, int] | None:
        """The last entry, as of look-ups."""
        data = self._load()
        return self._absolute(self._pair(data, len(data) // self._entry.size - 1)) if data else None

    def _absolute(self, pair: tuple[int, int] | None) -> tuple[int, int] | None:
        """The pair with its offset absolute."""
        raise NotImplementedError

    def is_full(self, limit: int) -> bool:
        """Whether `limit` bytes have no room for two more entries (one is for the end of the segment)."""
        data = self._data
        if data is None or not self._is_growing:
            data = self._load()
        return len(data) + 2 * self._entry.size > limit

    def written_file(self) -> File | None:
        """Write the entries, as far as the disk accepts them. Returns the open file; None if nothing was written."""
        self.write()
        return self._file

    def close(self) -> None:
        """Write the entries and drop the reference to the file, which a flush may hold; a later entry reopens it."""
        self.write()
        self._file = None
        if self._data is not None and self._written == len(self._data):
            self._is_growing = False
            self._memory.note_use(self, self._written)

    def detach(self) -> None:
        """Do not touch the file any more: it belongs to another segment, or will be removed."""
        self._is_detached = True
        self._memory.forget(self)
        self._file = None

    def clear(self) -> None:
        """Forget all entries; the file becomes empty. OSError."""
        self._is_growing = True
        self._memory.forget(self)
        if not self._is_detached:
            if self._file is None:
                self._file = self._files.create(self.path)
            self._file.truncate(0)
        self._data, self._written = bytearray(), 0


class OffsetIndex(SparseIndex):
    """Offset to position."""

    _entry = OFFSET_ENTRY

    def floor(self, offset: int) -> tuple[int, int] | None:
        """The last (offset, position) entry with an offset not above `offset`."""
        return self._absolute(self._floor(offset - self.base_offset))

    def before_position(self, position: int) -> tuple[int, int] | None:
        """The last (offset, position) entry of a batch that begins before `position`."""
        number, data = self._first_at(position)
        return self._absolute(self._pair(data, number - 1)) if number else None

    def at_position(self, position: int) -> tuple[int, int] | None:
        """The first (offset, position) entry of a batch that begins at `position` or later."""
        number, data = self._first_at(position)
        return self._absolute(self._pair(data, number)) if number * self._entry.size < len(data) else None

    def _first_at(self, position: int) -> tuple[int, bytes | bytearray]:
        data = self._load()
        numbers = range(len(data) // self._entry.size)
        return bisect_left(numbers, position, key=lambda number: self._pair(data, number)[1]), data

    def _absolute(self, pair: tuple[int, int] | None) -> tuple[int, int] | None:
        return (self.base_offset + pair[0], pair[1]) if pair else None


class TimeIndex(SparseIndex):
    """Timestamp to offset."""

    _entry = TIME_ENTRY

    def append_last(self, timestamp: int, offset: int) -> None:
        """Add the entry at the end of a segment, unless the last one has that timestamp."""
        last = self.last
        if timestamp >= 0 and (last is None or timestamp > last[0]):
            self.append(self._entry.pack(timestamp, offset - self.base_offset))

    def before(self, timestamp: int) -> tuple[int, int] | None:
        """The last (timestamp, offset) entry below `timestamp`: no record up to that offset has it."""
        return self._absolute(self._floor(timestamp - 1))

    def _absolute(self, pair: tuple[int, int] | None) -> tuple[int, int] | None:
        return (pair[0], self.base_offset + pair[1]) if pair else None
