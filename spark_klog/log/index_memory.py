"""Bound on the memory that loaded indexes of sealed segments use, over all logs of a data directory."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Protocol

#: Some 13 sealed segments of 1 GiB with both indexes.
DEFAULT_LIMIT = 64 * 1024 * 1024


class Releasable(Protocol):
    """An index that can be read from its file again."""

    def release(self) -> None:
        """Forget the entries that were loaded."""


class IndexMemory:
    """Releases the indexes that were used least recently when all together exceed `limit` bytes.

    An index is counted only while all of its entries are in its file: one that is being appended to is not. The log
    cleaner reads in a thread of its own, hence the lock.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self.limit = limit
        self._sizes: OrderedDict[Releasable, int] = OrderedDict()
        self._lock = Lock()
        #: Bytes of all indexes counted.
        self.used = 0

    def note_use(self, index: Releasable, size: int) -> None:
        """Count an index of `size` bytes as used now. The one used last is never released."""
        with self._lock:
            self.used += size - self._sizes.pop(index, 0)
            self._sizes[index] = size
            while self.used > self.limit and len(self._sizes) > 1:
                oldest, freed = self._sizes.popitem(last=False)
                self.used -= freed
                oldest.release()

    def forget(self, index: Releasable) -> None:
        """Stop counting an index: it is being appended to, or is gone."""
        with self._lock:
            self.used -= self._sizes.pop(index, 0)
