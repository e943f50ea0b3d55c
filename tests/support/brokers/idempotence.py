"""What a partition of a model broker knows of producers, without the package's code.

The checks follow KIP-98 and Kafka's `ProducerAppendInfo`.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import NamedTuple

from spark_klog.errors import ErrorCode

#: Producer id, epoch, base sequence and record count in a batch of magic 2.
_NUMBERS = struct.Struct(">qhii")
_POSITION = 43
_KEPT_BATCHES = 5


class Numbers(NamedTuple):
    """Those of a batch; a producer without idempotence has the id -1."""

    producer_id: int
    epoch: int
    first: int
    count: int

    @classmethod
    def of(cls, batch: bytes) -> Numbers:
        return cls(*_NUMBERS.unpack_from(batch, _POSITION))

    @property
    def last(self) -> int:
        return (self.first + self.count - 1) & 0x7FFFFFFF


class _Producer:
    """(first sequence, last sequence, base offset) of its last batches."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.batches: deque[tuple[int, int, int]] = deque(maxlen=_KEPT_BATCHES)


class Producers:
    """A partition's producers, by id."""

    def __init__(self) -> None:
        self._known: dict[int, _Producer] = {}

    def append(self, batch: Numbers, base: int, *, takes_any_first: bool = False) -> tuple[int, int]:
        """(error code, base offset) of a batch that gets the offset `base` if it is new.

        A batch that is there already has the offset that it got, one with an error -1. `takes_any_first`: an unknown
        producer may begin with any sequence, as from Kafka 2.5 on.
        """
        if batch.producer_id < 0:
            return 0, base
        known = self._known.get(batch.producer_id)
        if known is not None and batch.epoch < known.epoch:
            return int(ErrorCode.INVALID_PRODUCER_EPOCH), -1
        if known is None or batch.epoch > known.epoch:
            if known is not None and batch.first != 0:
                return int(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER), -1
            if known is None and batch.first != 0 and not takes_any_first:
                return int(ErrorCode.UNKNOWN_PRODUCER_ID), -1
            known = self._known[batch.producer_id] = _Producer(batch.epoch)
        for first, last, offset in known.batches:
            if (first, last) == (batch.first, batch.last):
                return 0, offset
        if known.batches and batch.first != (known.batches[-1][1] + 1) & 0x7FFFFFFF:
            return int(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER), -1
        known.batches.append((batch.first, batch.last, base))
        return 0, base

    def expect(self, producer_id: int, last: int) -> None:
        """Set a known producer's last sequence."""
        self._known[producer_id].batches.append((last, last, -1))

    def forget(self) -> None:
        self._known.clear()
