"""The offset map of log compaction: the last offset of each key, in a fixed amount of memory.

One table of slots, all zero at first:

    digest       16 bytes   BLAKE2b of the key
    offset + 1   INT64      0: the slot is empty

A digest stands for its key, as MD5 in Kafka (SkimpyOffsetMap): among n keys two have the same digest with probability
n**2 / 2**129, about 10**-24 for a hundred million. Collisions are resolved by double hashing.
"""

from __future__ import annotations

import hashlib
import mmap
from struct import Struct

from spark_klog.errors import ConfigError
from spark_klog.wire.primitives import Buffer

#: log.cleaner.dedupe.buffer.size and log.cleaner.io.buffer.load.factor of Kafka.
DEDUPE_BUFFER_SIZE = 128 * 1024 * 1024
LOAD_FACTOR = 0.9

_DIGEST_SIZE = 16
_SLOT = Struct(f"<{_DIGEST_SIZE}sq")
_NUMBERS = Struct("<QQ")
_SMALLEST = 3


class OffsetMap:
    """Last offsets of keys. It maps `memory` bytes, but does not touch unused ones, so creating it is fast."""

    def __init__(self, memory: int = DEDUPE_BUFFER_SIZE, load_factor: float = LOAD_FACTOR) -> None:
        """`load_factor` (0 to 1) bounds how full the table gets. `ConfigError` if no key fits."""
        if memory // _SLOT.size < _SMALLEST:
            raise ConfigError(
                f"an offset map of {memory} bytes is too small, log cleaning would never make progress: "
                f"raise log.cleaner.dedupe.buffer.size to {_SMALLEST * _SLOT.size} at least"
            )
        if not 0 < load_factor <= 1:
            raise ConfigError(f"the load factor of an offset map must be above 0 and at most 1, not {load_factor}")
        # A prime, so that every step width visits every slot; one slot stays empty, so that every search ends.
        self._slots = _prime_up_to(memory // _SLOT.size)
        self.capacity = min(max(1, int(self._slots * load_factor)), self._slots - 1)
        self._table = mmap.mmap(-1, self._slots * _SLOT.size)
        self._size = 0

    def __len__(self) -> int:
        """The number of keys."""
        return self._size

    def put(self, key: Buffer, offset: int) -> bool:
        """Set a key's offset; False, without effect, if the map is full and does not have the key."""
        position, digest, found = self._find(key)
        if not found:
            if self._size >= self.capacity:
                return False
            self._size += 1
        _SLOT.pack_into(self._table, position, digest, offset + 1)
        return True

    def get(self, key: Buffer) -> int:
        """The key's offset, -1 if it has none."""
        return self._find(key)[2] - 1

    def clear(self) -> None:
        """Forget all keys."""
        if self._size:
            before, self._table = self._table, mmap.mmap(-1, len(self._table))
            before.close()  # else the deallocator would unmap it, during which no other thread runs
            self._size = 0

    def close(self) -> None:
        """Give back the memory: for 128 MB that takes up to 150 ms, during which other threads run."""
        self._table.close()

    def _find(self, key: Buffer) -> tuple[int, bytes, int]:
        """(position of the key's slot, digest, offset + 1); 0 for an empty slot."""
        digest = hashlib.blake2b(key, digest_size=_DIGEST_SIZE).digest()
        first, second = _NUMBERS.unpack(digest)
        slot, step = first % self._slots, second % (self._slots - 1) + 1
        while True:
            stored, found = _SLOT.unpack_from(self._table, slot * _SLOT.size)
            if not found or stored == digest:
                return slot * _SLOT.size, digest, found
            slot = (slot + step) % self._slots


def _prime_up_to(number: int) -> int:
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number -= 1
    return number
