"""The offset map of log compaction: the last offset of each key, in memory of a fixed size.

One table of slots, all zero at first:

    digest       16 bytes   BLAKE2b of the key
    offset + 1   INT64      0: the slot is empty

A digest stands for its key, as MD5 does in Kafka (SkimpyOffsetMap): two different keys of n have the same one with
a probability of n**2 / 2**129, some 10**-24 for a hundred million. A slot is looked for by double hashing.
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
    """Last offsets of keys. It takes `memory` bytes, but those not used yet are not touched: that holds up nobody."""

    def __init__(self, memory: int = DEDUPE_BUFFER_SIZE, load_factor: float = LOAD_FACTOR) -> None:
        """`load_factor` (0 to 1) is how full the table may become. `ConfigError` where not one key fits."""
        if memory // _SLOT.size < _SMALLEST:
            raise ConfigError(
                f"an offset map of {memory} bytes is too small, log cleaning would never make progress: "
                f"raise log.cleaner.dedupe.buffer.size to {_SMALLEST * _SLOT.size} at least"
            )
        if not 0 < load_factor <= 1:
            raise ConfigError(f"the load factor of an offset map is above 0 and at most 1, not {load_factor}")
        # a prime, so that every step comes by every slot; one slot stays empty, so that every search ends
        self._slots = _prime_up_to(memory // _SLOT.size)
        self.capacity = min(max(1, int(self._slots * load_factor)), self._slots - 1)
        self._table = mmap.mmap(-1, self._slots * _SLOT.size)
        self._size = 0

    def __len__(self) -> int:
        """How many keys there are."""
        return self._size

    def put(self, key: Buffer, offset: int) -> bool:
        """Set a key's offset; False, and nothing is done, where the map is full and has no such key."""
        position, digest, found = self._find(key)
        if not found:
            if self._size >= self.capacity:
                return False
            self._size += 1
        _SLOT.pack_into(self._table, position, digest, offset + 1)
        return True

    def get(self, key: Buffer) -> int:
        """The key's offset, -1 where there is none."""
        return self._find(key)[2] - 1

    def clear(self) -> None:
        """Forget all keys."""
        self._table = mmap.mmap(-1, len(self._table))
        self._size = 0

    def _find(self, key: Buffer) -> tuple[int, bytes, int]:
        """(position of the key's slot, digest, offset + 1); 0 where the slot is empty."""
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
