"""The state of a log's producers: the last record batches of each, and the open transactions.

A snapshot (OFFSET.snapshot, 20 digits) stores the state before that offset, in Kafka's format:

    version   INT16   1
    crc       UINT32  CRC-32C of all that follows
    count     INT32
    entries           producer id INT64, epoch INT16, last sequence INT32, last offset INT64, offset delta INT32,
                      timestamp INT64 (ms), coordinator epoch INT32, first offset of the open transaction INT64 (-1)

A producer has up to five entries, one per record batch, the oldest first, so that a batch sent again is recognized
after a restart, too. Kafka writes only the entry of the last batch, and of several entries it uses the last. Crash
story: a snapshot is written completely or not at all; a start replays the log after it.

Before an append `check_batches` checks epochs and sequences. A producer numbers its records per partition from 0 on;
2^31 - 1 is followed by 0. Rules for its record batches:

    a batch equal to one of its last five    is a duplicate: not appended, the answer is that of the first append
    an epoch below the known one             INVALID_PRODUCER_EPOCH: another instance has taken over
    an epoch above the known one             must start at sequence 0
    the known epoch                          must continue after the last batch
    an unknown producer id                   may start anywhere, as its records may have been deleted (Kafka 2.5), but
                                             not after a batch that was refused for its transaction (Kafka 3.6)

Otherwise the error is OUT_OF_ORDER_SEQUENCE_NUMBER. A batch without transaction while one is open is INVALID_TXN_STATE.
Batches that brokers write (markers, offsets within a transaction) have no sequences: only the epoch is checked, and for
markers the coordinator's epoch. A marker of transaction.version 2 has the epoch of the producer's next transaction, and
can't end that one (`check_late_marker`).

Source: KIP-98, KIP-360, KIP-890, KIP-1228.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from spark_klog.base.cache import Newest
from spark_klog.errors import DecodeError, ErrorCode, KlogError
from spark_klog.log.file_system import FileSystem
from spark_klog.log.segments.transaction_index import AbortedTransaction
from spark_klog.records.formats.batch_v2 import BatchHeader
from spark_klog.records.reading.reader import ABORT, EndTransactionMarker, read_marker
from spark_klog.wire.checksums import crc32c

SNAPSHOT = ".snapshot"
_VERSION = 1
_START = Struct(">hI")
_COUNT = Struct(">i")
_ENTRY = Struct(">qhiqiqiq")
#: How many batches of a producer to remember, to recognize one that is sent again; as in Kafka.
_BATCHES = 5
#: Bound on remembered refused producers: clients can invent any number of producer ids.
_MOST_REFUSED = 10_000
_MAX_EPOCH = 0x7FFF
#: Means: no open transaction.
NO_OFFSET = -1


class ProducerBatch(NamedTuple):
    """The last sequence and the last offset of a record batch."""

    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp: int


@dataclass
class ProducerEntry:
    """A producer id: its epoch, its last batches (newest last), and the start of its open transaction (-1: none)."""

    epoch: int = -1
    batches: list[ProducerBatch] = field(default_factory=list)
    last_timestamp: int = -1
    coordinator_epoch: int = -1
    transaction_first_offset: int = NO_OFFSET
    #: How many of its transactions have ended since the log was opened.
    ended_transactions: int = field(default=0, compare=False)

    @property
    def is_in_transaction(self) -> bool:
        return self.transaction_first_offset != NO_OFFSET


_NEW = ProducerEntry()


class _Refused(NamedTuple):
    """The smallest refused sequence of an epoch, and when it was refused (ms)."""

    epoch: int
    sequence: int
    timestamp: int


class ProducerState:
    """The producers of one log, up to `end_offset`."""

    def __init__(self) -> None:
        self.producers: dict[int, ProducerEntry] = {}
        self.end_offset = 0
        #: Producer ids with an open transaction: few of all producers.
        self._open: set[int] = set()
        self._refused: Newest[int, _Refused] = Newest(_MOST_REFUSED)

    @property
    def first_unstable_offset(self) -> int | None:
        """The start of the oldest open transaction."""
        return min((self.producers[each].transaction_first_offset for each in self._open), default=None)

    def add(self, header: BatchHeader, batch: memoryview) -> AbortedTransaction | None:
        """Apply a producer's batch. Returns the transaction that it aborts. `DecodeError` for a bad marker."""
        marker = None
        self.end_offset = header.next_offset
        if header.is_control:
            marker = read_marker(header, batch)
            if marker is None:
                return None  # compaction has removed the marker and its transaction
        producer = self.producers.setdefault(header.producer_id, ProducerEntry())
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
        self, header: BatchHeader, producer: ProducerEntry, marker: EndTransactionMarker
    ) -> AbortedTransaction | None:
        first, producer.transaction_first_offset = producer.transaction_first_offset, NO_OFFSET
        self._open.discard(header.producer_id)
        producer.ended_transactions += 1
        producer.coordinator_epoch = marker.coordinator_epoch
        if marker.type != ABORT or first == NO_OFFSET:
            return None
        unstable = self.first_unstable_offset
        stable = header.next_offset if unstable is None else unstable
        return AbortedTransaction(header.producer_id, first, header.last_offset, stable)

    def note_refused(self, header: BatchHeader, now_ms: int) -> None:
        """Remember a batch that was refused because its transaction is not known yet; the producer may send it again.

        For an unknown producer this is the only way to notice a gap before its next batch. As in Kafka, a restart
        forgets it.
        """
        before = self._refused.get(header.producer_id)
        if before is None or (header.producer_epoch, -header.base_sequence) > (before.epoch, -before.sequence):
            self._refused[header.producer_id] = _Refused(header.producer_epoch, header.base_sequence, now_ms)

    def refused_sequence(self, header: BatchHeader) -> int | None:
        """The smallest refused sequence of the batch's epoch, if no batch was appended since."""
        refused = self._refused.get(header.producer_id)
        return None if refused is None or refused.epoch != header.producer_epoch else refused.sequence

    def forget_before(self, offset: int) -> None:
        """Move the starts of open transactions to `offset`, as the records before it were deleted."""
        for each in self._open:
            producer = self.producers[each]
            producer.transaction_first_offset = max(producer.transaction_first_offset, offset)

    def expire(self, before_ms: int) -> None:
        """Forget producers that have not written since `before_ms` and have no open transaction."""
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
        for producer_id, state in sorted(self.producers.items()):
            for batch in state.batches or [ProducerBatch(-1, -1, 0, state.last_timestamp)]:
                yield producer_id, state.epoch, *batch, state.coordinator_epoch, state.transaction_first_offset

    @classmethod
    def decode(cls, data: bytes) -> ProducerState:
        """Decode a snapshot; `DecodeError` if it is not of version 1 or its checksum is wrong."""
        try:
            version, crc = _START.unpack_from(data)
            (count,) = _COUNT.unpack_from(data, _START.size)
            entries = list(_ENTRY.iter_unpack(data[_START.size + _COUNT.size :]))
        except Exception as error:
            raise DecodeError(f"{len(data)} bytes are not a producer snapshot: {error}") from None
        if version != _VERSION or len(entries) != count or crc != crc32c(data[_START.size :]):
            raise DecodeError(f"{len(data)} bytes are not a producer snapshot: version {version}, {count} entries")
        state = cls()
        for producer_id, epoch, sequence, offset, delta, timestamp, coordinator_epoch, first in entries:
            before = state.producers.get(producer_id)
            batches = before.batches[1 - _BATCHES :] if before is not None and before.epoch == epoch else []
            if offset >= 0:
                batches.append(ProducerBatch(sequence, offset, delta, timestamp))
            state.producers[producer_id] = ProducerEntry(epoch, batches, timestamp, coordinator_epoch, first)
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


class ProducerRefused(KlogError):
    """A producer's batch was refused; `code` is the response's error code."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Duplicate(NamedTuple):
    """The first append of duplicate batches: first and last offset, largest timestamp (ms) of the last batch."""

    base_offset: int
    last_offset: int
    timestamp: int


class _Known(NamedTuple):
    """The state that the next batch of a producer must follow; epoch -1 for an unknown producer."""

    epoch: int
    last_sequence: int
    is_in_transaction: bool


def check_batches(
    state: ProducerState,
    data: memoryview,
    positions: Sequence[int],
    headers: Sequence[BatchHeader],
    *,
    of_client: bool,
) -> Duplicate | None:
    """Check the batches of one append; results and errors as in `check_clients`."""
    if of_client:
        return check_clients(state, headers)
    for position, header in zip(positions, headers, strict=True):
        batch = data[position : position + header.size]
        check_brokers(state, header, read_marker(header, batch) if header.is_control else None)
    return None


def check_clients(state: ProducerState, headers: Sequence[BatchHeader]) -> Duplicate | None:
    """Check the batches of one append by a client; all have producer ids.

    Returns `Duplicate` if all were appended before, None if they may be appended. `ProducerRefused`; `DecodeError` for
    a negative epoch or sequence.
    """
    duplicate = duplicate_of(state, headers)
    if duplicate is not None:
        return duplicate
    known: dict[int, _Known] = {}
    for header in headers:
        before = known.get(header.producer_id) or _known(state.producers.get(header.producer_id, _NEW))
        _check(header, before, state.refused_sequence(header))
        last = advanced(header.base_sequence, header.last_offset_delta)
        known[header.producer_id] = _Known(header.producer_epoch, last, before.is_in_transaction)
    return None


def check_brokers(state: ProducerState, header: BatchHeader, marker: EndTransactionMarker | None) -> None:
    """Check a batch of a broker; `marker` is set for a control batch. `ProducerRefused`."""
    known = state.producers.get(header.producer_id, _NEW)
    _check_epoch(header, known.epoch)
    if marker is not None and marker.coordinator_epoch < known.coordinator_epoch:
        raise ProducerRefused(
            ErrorCode.TRANSACTION_COORDINATOR_FENCED,
            f"marker of coordinator epoch {marker.coordinator_epoch}, but epoch {known.coordinator_epoch} has written",
        )


def check_late_marker(state: ProducerState, producer_id: int, epoch: int) -> None:
    """`ProducerRefused` for a marker of a transaction that has raised the epoch, if the next one is open already.

    Its epoch is that of the next transaction, since each end raises it; only after the last epoch it can't be. A marker
    that is sent again before the next one changes nothing.
    """
    known = state.producers.get(producer_id, _NEW)
    if known.is_in_transaction and epoch == known.epoch < _MAX_EPOCH:
        raise ProducerRefused(
            ErrorCode.INVALID_PRODUCER_EPOCH,
            f"late marker: producer {producer_id} has an open transaction with its epoch {epoch}",
        )


def _known(producer: ProducerEntry) -> _Known:
    last = producer.batches[-1].last_sequence if producer.batches else -1
    return _Known(producer.epoch, last, producer.is_in_transaction)


def duplicate_of(state: ProducerState, headers: Sequence[BatchHeader]) -> Duplicate | None:
    """The first append of batches that producers send again; None if one of them is new."""
    first = last = None
    for header in headers:
        producer = state.producers.get(header.producer_id)
        if producer is None or producer.epoch != header.producer_epoch:
            return None
        last_sequence = advanced(header.base_sequence, header.last_offset_delta)
        for batch in producer.batches:
            if batch.last_sequence == last_sequence and batch.offset_delta == header.last_offset_delta:
                last = batch
                break
        else:
            return None
        first = first or last
    assert first is not None
    assert last is not None
    return Duplicate(first.last_offset - first.offset_delta, last.last_offset, last.timestamp)


def _check(header: BatchHeader, known: _Known, refused: int | None) -> None:
    if header.producer_epoch < 0 or header.base_sequence < 0:
        raise DecodeError(
            f"batch of producer {header.producer_id} with a negative epoch or sequence: epoch "
            f"{header.producer_epoch}, base sequence {header.base_sequence}"
        )
    _check_epoch(header, known.epoch)
    if known.epoch < 0:
        if refused is not None and header.base_sequence > refused:
            raise ProducerRefused(
                ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"producer {header.producer_id} of epoch {header.producer_epoch} sends sequence "
                f"{header.base_sequence}, but the refused sequence {refused} must come first",
            )
        return
    is_new_epoch = header.producer_epoch != known.epoch
    expected = 0 if is_new_epoch else advanced(known.last_sequence, 1) if known.last_sequence >= 0 else 0
    if header.base_sequence != expected:
        raise ProducerRefused(
            ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
            f"producer {header.producer_id} of epoch {header.producer_epoch} sends sequence {header.base_sequence}, "
            f"expected {expected}",
        )
    if known.is_in_transaction and not header.is_transactional:
        raise ProducerRefused(
            ErrorCode.INVALID_TXN_STATE,
            f"producer {header.producer_id} has an open transaction, but sends a batch without one",
        )


def _check_epoch(header: BatchHeader, known: int) -> None:
    if header.producer_epoch < known:
        raise ProducerRefused(
            ErrorCode.INVALID_PRODUCER_EPOCH,
            f"producer {header.producer_id} has epoch {header.producer_epoch}, the log knows epoch {known}",
        )
