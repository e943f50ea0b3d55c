"""Bound the memory of loaded indexes of sealed segments, over all logs of a data directory."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Protocol

#: Enough for both indexes of about 13 sealed segments of 1 GiB.
DEFAULT_LIMIT = 64 * 1024 * 1024


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
