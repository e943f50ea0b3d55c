"""What a log knows of its producers: the last batches of each, and which transactions are open.

A snapshot (OFFSET.snapshot, 20 digits) holds it as it was before that offset, in Kafka's format:

    version   INT16   1
    crc       UINT32  CRC-32C of all that follows
    count     INT32
    entries           producer id INT64, epoch INT16, last sequence INT32, last offset INT64, offset delta INT32,
                      timestamp INT64 (ms), coordinator epoch INT32, first offset of the open transaction INT64 (-1)

A producer has up to five entries here, one a batch, the oldest first, so that a batch which is sent again is known
after a restart too. Kafka writes one, that of the last batch, and of several takes the last.

Source: KIP-98; KIP-360. Crash story: a snapshot is written as a whole or not at all; the log from there on is replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from spark_klog.errors import DecodeError
from spark_klog.log.file_system import FileSystem
from spark_klog.log.transaction_index import AbortedTransaction
from spark_klog.records.batch_v2 import BatchHeader
from spark_klog.records.control import ABORT, EndTransactionMarker, read_marker
from spark_klog.wire.checksums import crc32c

SNAPSHOT = ".snapshot"
_VERSION = 1
_START = Struct(">hI")
_COUNT = Struct(">i")
_ENTRY = Struct(">qhiqiqiq")
#: Kafka's: so many batches of a producer are known, to answer one that is sent again.
_BATCHES = 5
#: Refused producers that are remembered; clients may make up as many as they like.
_MOST_REFUSED = 10_000
#: There is no open transaction.
NO_OFFSET = -1


class ProducerBatch(NamedTuple):
    """A batch as its producer numbers it: `last_sequence`, and the offset of its last record."""

    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp: int


@dataclass
class Producer:
    """One producer id: its epoch, its last batches (newest last), and where its open transaction begins (-1: none)."""

    epoch: int = -1
    batches: list[ProducerBatch] = field(default_factory=list)
    last_timestamp: int = -1
    coordinator_epoch: int = -1
    transaction_first_offset: int = NO_OFFSET

    @property
    def is_in_transaction(self) -> bool:
        return self.transaction_first_offset != NO_OFFSET


class _Refused(NamedTuple):
    """The least sequence of an epoch that was not let into the log, and when (ms)."""

    epoch: int
    sequence: int
    timestamp: int


class ProducerState:
    """Of one log, up to `end_offset`."""

    def __init__(self) -> None:
        self.producers: dict[int, Producer] = {}
        self.end_offset = 0
        #: How many have ended since the log was opened.
        self.ended_transactions = 0
        #: The ids with an open transaction: there may be many more producers than these.
        self._open: set[int] = set()
        self._refused: dict[int, _Refused] = {}

    @property
    def first_unstable_offset(self) -> int | None:
        """Where the oldest open transaction begins."""
        return min((self.producers[each].transaction_first_offset for each in self._open), default=None)

    def add(self, header: BatchHeader, batch: memoryview) -> AbortedTransaction | None:
        """Take note of a batch of a producer; the transaction that it aborts. `DecodeError` for a bad marker."""
        marker = None
        self.end_offset = header.next_offset
        if header.is_control:
            marker = read_marker(header, batch)
            if marker is None:
                return None  # compaction has taken it out, and all that it ended
        producer = self.producers.setdefault(header.producer_id, Producer())
        if header.producer_epoch != producer.epoch:
            producer.epoch = header.producer_epoch
            producer.batches.clear()
        self._refused.pop(header.producer_id, None)
        producer.last_timestamp = header.max_timestamp
        if marker is not None:
            return self._end_transaction(header, producer, marker)
        producer.batches.append(
            ProducerBatch(
                advanced(header.base_sequence, header.last_offset_delta),
                header.last_offset,
                header.last_offset_delta,
                header.max_timestamp,
            )
        )
        del producer.batches[:-_BATCHES]
        if header.is_transactional and producer.transaction_first_offset == NO_OFFSET:
            producer.transaction_first_offset = header.base_offset
            self._open.add(header.producer_id)
        return None

    def _end_transaction(
        self, header: BatchHeader, producer: Producer, marker: EndTransactionMarker
    ) -> AbortedTransaction | None:
        first, producer.transaction_first_offset = producer.transaction_first_offset, NO_OFFSET
        self._open.discard(header.producer_id)
        self.ended_transactions += 1
        producer.coordinator_epoch = marker.coordinator_epoch
        if marker.type != ABORT or first == NO_OFFSET:
            return None
        unstable = self.first_unstable_offset
        stable = header.next_offset if unstable is None else unstable
        return AbortedTransaction(header.producer_id, first, header.last_offset, stable)

    def note_refused(self, header: BatchHeader, now_ms: int) -> None:
        """A batch was not let in, since its transaction was not, or not yet, known: it may be sent again.

        Of a producer that is not known no other sequence tells that there is a gap before what comes next. Not kept
        over a restart, as in Kafka.
        """
        before = self._refused.get(header.producer_id)
        if before is None or (header.producer_epoch, -header.base_sequence) > (before.epoch, -before.sequence):
            if before is None and len(self._refused) >= _MOST_REFUSED:
                del self._refused[next(iter(self._refused))]
            self._refused[header.producer_id] = _Refused(header.producer_epoch, header.base_sequence, now_ms)

    def refused_sequence(self, header: BatchHeader) -> int | None:
        """The least sequence of the batch's epoch that was not let in, if since then nothing was."""
        refused = self._refused.get(header.producer_id)
        return None if refused is None or refused.epoch != header.producer_epoch else refused.sequence

    def forget_before(self, offset: int) -> None:
        """Records before `offset` were deleted: transactions that began there begin with what is left of them."""
        for each in self._open:
            producer = self.producers[each]
            producer.transaction_first_offset = max(producer.transaction_first_offset, offset)

    def expire(self, before_ms: int) -> None:
        """Forget producers that have written nothing since, and have no open transaction."""
        for producer_id, producer in list(self.producers.items()):
            if producer.last_timestamp < before_ms and producer.transaction_first_offset == NO_OFFSET:
                del self.producers[producer_id]
        for producer_id, refused in list(self._refused.items()):
            if refused.timestamp < before_ms:
                del self._refused[producer_id]

    def encode(self) -> bytes:
        """A snapshot's content."""
        entries = b"".join(_ENTRY.pack(*entry) for entry in self._entries())
        body = _COUNT.pack(len(entries) // _ENTRY.size) + entries
        return _START.pack(_VERSION, crc32c(body)) + body

    def _entries(self) -> Iterator[tuple[int, ...]]:
        for producer_id, item in sorted(self.producers.items()):
            for batch in item.batches or [ProducerBatch(-1, -1, 0, item.last_timestamp)]:
                yield producer_id, item.epoch, *batch, item.coordinator_epoch, item.transaction_first_offset

    @classmethod
    def decode(cls, data: bytes) -> ProducerState:
        """`DecodeError` where it is no snapshot of version 1, or its checksum is wrong."""
        try:
            version, crc = _START.unpack_from(data)
            (count,) = _COUNT.unpack_from(data, _START.size)
            entries = list(_ENTRY.iter_unpack(data[_START.size + _COUNT.size :]))
        except Exception as error:
            raise DecodeError(f"{len(data)} bytes are no snapshot of producers: {error}") from None
        if version != _VERSION or len(entries) != count or crc != crc32c(data[_START.size :]):
            raise DecodeError(f"{len(data)} bytes are no snapshot of producers, version {version}, {count} entries")
        state = cls()
        for producer_id, epoch, sequence, offset, delta, timestamp, coordinator_epoch, first in entries:
            before = state.producers.get(producer_id)
            batches = before.batches[1 - _BATCHES :] if before is not None and before.epoch == epoch else []
            if offset >= 0:
                batches.append(ProducerBatch(sequence, offset, delta, timestamp))
            state.producers[producer_id] = Producer(epoch, batches, timestamp, coordinator_epoch, first)
            if first != NO_OFFSET:
                state._open.add(producer_id)
        return state


def advanced(sequence: int, by: int) -> int:
    """The sequence `by` records later; they wrap from 2^31 - 1 to 0. -1, of batches without sequences, stays."""
    return sequence if sequence < 0 else (sequence + by) & 0x7FFFFFFF


def load_snapshot(files: FileSystem, path: Path) -> ProducerState:
    """The state in a snapshot file named by its offset; `DecodeError`, OSError."""
    try:
        state = ProducerState.decode(files.read(path))
    except DecodeError as error:
        raise DecodeError(f"{path}: {error}") from None
    state.end_offset = int(path.stem)
    return state
