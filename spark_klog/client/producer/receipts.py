"""Outcomes of a producer's records: receipts of batches, deliveries of records."""

from __future__ import annotations

import copy
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from spark_klog.base.interrupts import Latch
from spark_klog.base.names import TopicPartition
from spark_klog.errors import DeliveryPending, KlogError

_log = logging.getLogger(__name__)


class RecordMetadata(NamedTuple):
    """Where a record is in the log.

    `offset` is -1 if the broker did not tell it (acks=0). `timestamp` is in ms: the record's, or the broker's if the
    topic has message.timestamp.type=LogAppendTime.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int


#: Called with an error and None, or None and the metadata.
OnDelivery = Callable[["KlogError | None", "RecordMetadata | None"], None]


def fresh(error: KlogError) -> KlogError:
    """A copy to raise: each raise adds to an exception's traceback, which keeps the frames' values alive."""
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    return copied


class Receipt:
    """The outcome of a batch, which its records' deliveries share. All but reading is done under a lock.

    A batch that was split is confirmed part by part, in order; records of parts confirmed before an error have none.
    """

    __slots__ = ("_left", "_parts", "_written", "callbacks", "done", "error", "key")

    def __init__(self, key: TopicPartition) -> None:
        self.key = key
        self.done = Latch()
        self.error: KlogError | None = None
        #: The first record of each confirmed part, its offset and append time.
        self._parts: list[tuple[int, int, int]] = []
        #: Parts that are not confirmed, and records that are.
        self._left, self._written = 1, 0
        #: Callbacks to call, each with its record's position in the batch and timestamp.
        self.callbacks: deque[tuple[OnDelivery, int, int]] = deque()

    def cut(self, count: int) -> None:
        """Call back only for the first `count` records."""
        while self.callbacks and self.callbacks[-1][1] >= count:
            self.callbacks.pop()

    def split(self) -> None:
        self._left += 1

    def confirm(self, base_offset: int, append_time: int, part: tuple[int, int]) -> None:
        """Confirm a part: its first record's position in the batch, and the number of its records."""
        first, count = part
        self._parts.append((first, base_offset, append_time))
        self._left -= 1
        self._written += count
        if not self._left:
            self.done.set()

    @property
    def base_offset(self) -> int:
        """The offset of the first record, -1 if it is not known."""
        return self._parts[0][1] if self._parts else -1

    def fail(self, error: KlogError) -> None:
        if not self.done.is_set():
            self.error = error
            self.done.set()

    def error_of(self, index: int) -> KlogError | None:
        """The error of a record, if it failed."""
        return None if index < self._written else self.error

    def metadata(self, index: int, timestamp: int) -> RecordMetadata:
        parts = self._parts
        is_whole = len(parts) == 1  # most are not split
        first, base, append_time = parts[0] if is_whole else next(part for part in reversed(parts) if part[0] <= index)
        offset = base + index - first if base >= 0 else -1
        return RecordMetadata(*self.key, offset, append_time if append_time >= 0 else timestamp)


class Receipts:
    """The receipts of a producer. All but `call_back` are called under the producer's lock."""

    def __init__(self) -> None:
        self._open: set[Receipt] = set()
        #: Receipts with callbacks to call.
        self._completed: deque[Receipt] = deque()
        self._calling = threading.RLock()
        self._caller: int | None = None
        self._process = os.getpid()

    def new(self, key: TopicPartition) -> Receipt:
        receipt = Receipt(key)
        self._open.add(receipt)
        return receipt

    def drop(self, receipt: Receipt) -> None:
        """Forget the receipt of a batch that has got no record."""
        receipt.done.set()
        self._open.discard(receipt)

    def confirm(self, receipt: Receipt, base_offset: int, append_time: int, part: tuple[int, int]) -> None:
        receipt.confirm(base_offset, append_time, part)
        if not receipt.done.is_set():
            return
        self._open.discard(receipt)
        if receipt.callbacks:
            self._completed.append(receipt)

    def fail_all(self, error: KlogError) -> None:
        for receipt in self._open:
            receipt.fail(error)
            if receipt.callbacks:
                self._completed.append(receipt)
        self._open.clear()

    @property
    def is_calling(self) -> bool:
        """Whether this is within a callback that this thread calls."""
        return self._caller == threading.get_ident()

    @property
    def open(self) -> frozenset[Receipt]:
        """The receipts of batches that are neither confirmed nor failed."""
        return frozenset(self._open)

    def call_back(self, until: float = math.inf) -> bool:
        """Call the callbacks of completed batches, one at a time; do not hold the producer's lock.

        In a process forked since nothing is called. After an interrupt in a callback the next call continues. Ends at
        `until`, a reading of `time.monotonic`; returns whether all were called.
        """
        if os.getpid() != self._process:
            return True
        while self._completed:
            if until < math.inf and time.monotonic() >= until:
                return False
            with self._calling:
                if not self._completed:
                    break
                receipt = self._completed[0]
                if not receipt.callbacks:
                    self._completed.popleft()
                    continue
                callback, index, timestamp = receipt.callbacks[0]
                error = receipt.error_of(index)
                metadata = None if error is not None else receipt.metadata(index, timestamp)
                before, self._caller = self._caller, threading.get_ident()
                try:
                    del receipt.callbacks[0]  # right before the call: an interrupt before leaves it to be called
                    callback(error, metadata)
                except Exception:
                    _log.exception("on_delivery of a record of %s-%s failed", *receipt.key)
                finally:
                    self._caller = before
        with self._calling:
            pass  # another thread may call the last one
        return True

    def call_back_within(self, seconds: float) -> None:
        """Like `call_back`, but do nothing if a callback of another thread takes longer than this."""
        if self._calling.acquire(timeout=seconds):
            try:
                self.call_back()
            finally:
                self._calling.release()


class Delivery:
    """The outcome of one record, like a `concurrent.futures.Future` that can't be cancelled. Thread-safe."""

    __slots__ = ("_index", "_receipt", "_timestamp")

    def __init__(self, receipt: Receipt, index: int, timestamp: int) -> None:
        self._receipt = receipt
        self._index = index
        self._timestamp = timestamp

    @property
    def topic(self) -> str:
        return self._receipt.key[0]

    @property
    def partition(self) -> int:
        return self._receipt.key[1]

    def done(self) -> bool:
        """Whether the record is confirmed or has failed."""
        return self._receipt.done.is_set()

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Wait up to `timeout` seconds until the record is confirmed; raise its error if it failed.

        `DeliveryPending`, a `concurrent.futures.TimeoutError`, if neither has happened in time. Do not call it in
        `on_delivery`.
        """
        error = self.exception(timeout)
        if error is not None:
            raise fresh(error)
        return self._receipt.metadata(self._index, self._timestamp)

    def exception(self, timeout: float | None = None) -> KlogError | None:
        """Wait like `result`, and return the record's error, None if it is confirmed."""
        if not self._receipt.done.wait(timeout):
            raise DeliveryPending(*self._receipt.key, timeout or 0.0)
        return self._receipt.error_of(self._index)

    def __repr__(self) -> str:
        state = "pending"
        if self.done():
            state = "failed" if self._receipt.error_of(self._index) else "confirmed"
        return f"<Delivery to {self.topic}-{self.partition}, {state}>"
