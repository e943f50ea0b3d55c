"""The two sparse indexes of a segment.

.index       INT32 offset relative to the segment's base, INT32 position: the LAST offset of a batch, and where in the
             .log file that batch begins
.timeindex   INT64 timestamp (ms), INT32 relative offset: the largest timestamp so far, and the offset that has it

Both grow by one entry for each `index.interval.bytes` of log. Kafka preallocates the files, so that after a crash
zeros may follow the entries: an entry that does not grow ends the index. Crash story: an index is only a hint of
where to start walking the log; one that is missing or damaged is built again from the log.
"""

from __future__ import annotations

import errno
import os
from array import array
from bisect import bisect_right
from pathlib import Path
from struct import Struct


class SparseIndex:
    """Growing (key, value) pairs in a file; the base of both indexes. Loaded at the first look-up."""

    _entry: Struct

    def __init__(self, path: Path, base_offset: int) -> None:
        self.path = path
        self.base_offset = base_offset
        self._keys: array[int] | None = None
        self._values: array[int] = array("q")
        self._descriptor: int | None = None

    def _load(self) -> array[int]:
        if self._keys is None:
            keys, values = array("q"), array("q")
            data = self.path.read_bytes() if self.path.exists() else b""
            for key, value in self._entry.iter_unpack(data[: len(data) - len(data) % self._entry.size]):
                if keys and key <= keys[-1]:
                    break
                keys.append(key)
                values.append(value)
            if len(keys) == 1 and not keys[0] and not values[0]:
                keys, values = array("q"), array("q")
            self._keys, self._values = keys, values
        return self._keys

    def _append(self, key: int, value: int) -> None:
        keys = self._load()
        if keys and key <= keys[-1]:
            return
        # By position: over zeros that Kafka left after the entries, or half an entry of a disk that was full.
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if os.pwrite(self._descriptor, self._entry.pack(key, value), len(keys) * self._entry.size) != self._entry.size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        keys.append(key)
        self._values.append(value)

    def _floor(self, key: int) -> tuple[int, int] | None:
        """The last pair whose key is not above `key`."""
        keys = self._load()
        place = bisect_right(keys, key) - 1
        return (keys[place], self._values[place]) if place >= 0 else None

    def _last(self) -> tuple[int, int] | None:
        keys = self._load()
        return (keys[-1], self._values[-1]) if keys else None

    def close(self) -> None:
        """Close the file; a later entry opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def clear(self) -> None:
        """Forget all entries; the file becomes empty."""
        self._keys, self._values = array("q"), array("q")
        self.path.write_bytes(b"")


class OffsetIndex(SparseIndex):
    """Offset to position."""

    _entry = Struct(">ii")

    def append(self, offset: int, position: int) -> None:
        self._append(offset - self.base_offset, position)

    def position_for(self, offset: int) -> int:
        """Where to start walking the log for `offset`."""
        found = self._floor(offset - self.base_offset)
        return found[1] if found else 0

    @property
    def last(self) -> tuple[int, int] | None:
        """The last (offset, position)."""
        last = self._last()
        return (self.base_offset + last[0], last[1]) if last else None


class TimeIndex(SparseIndex):
    """Timestamp to offset."""

    _entry = Struct(">qi")

    def append(self, timestamp: int, offset: int) -> None:
        self._append(timestamp, offset - self.base_offset)

    def offset_before(self, timestamp: int) -> int:
        """An offset at or before the first record with a timestamp of `timestamp` or more."""
        found = self._floor(timestamp - 1)
        return self.base_offset + (found[1] if found else 0)

    @property
    def last(self) -> tuple[int, int] | None:
        """The last (timestamp, offset)."""
        last = self._last()
        return (last[0], self.base_offset + last[1]) if last else None
