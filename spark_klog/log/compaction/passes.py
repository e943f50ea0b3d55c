"""The two passes of log compaction over record batches. The caller handles files and threads.

`build_map` reads the dirty part of a log, from the first dirty offset on, and collects the last offset of each key. A
`Cleaner` reads all segments from the first one up to the end of the map, and keeps

 * a record with a key, unless the map has a later offset for it;
 * a tombstone (no value) until its delete horizon, which the first cleaning sets to delete.retention.ms later. Magic 0
   and 1 have no field for it; their tombstones expire by the time at which the segment was last modified;
 * no record without a key, and none of an aborted transaction;
 * a transaction's marker while any of its batches exists, and then until its delete horizon;
 * the header of a batch that loses all records, if it has the last sequence or epoch of an active producer, or ends
   the cleanable part. Other empty batches and wrappers are dropped.

Batches at or after the end of the map stay, except those of aborted transactions. Batches that lose nothing pass
unchanged. The others keep base offset, last offset, producer and base sequence, from which a broker restores offsets
and sequence numbers; also codec, leader epoch, timestamp type, and the flags for transactions and control.

Sources: Kafka's documentation, "Log Compaction"; KIP-98 (transactions), KIP-534 (delete horizon), KAFKA-17076 (the end
of the part that was cleaned is kept).
"""

from __future__ import annotations

import hashlib
import heapq
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from struct import Struct

from spark_klog.errors import ConfigError, DecodeError, LogCorrupted
from spark_klog.log.segments.transaction_index import AbortedTransaction
from spark_klog.records.contract import LOG_APPEND_TIME, NO_TIMESTAMP, ColumnBuilder, RecordColumns
from spark_klog.records.formats.batch import Header, check_crc, read_header
from spark_klog.records.formats.batch_v2 import (
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    LOG_APPEND_TIME_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
    body,
    build_batch,
)
from spark_klog.records.formats.message_set import MessageHeader, build_message_set, inner_set, plain_records
from spark_klog.records.kernels import load
from spark_klog.records.reading.reader import ABORT, COMMIT, read_marker
from spark_klog.wire.codecs import NONE, codec_by_id
from spark_klog.wire.primitives import Buffer, Reader, append_uvarint, append_varlong, wrap_int64

#: log.cleaner.dedupe.buffer.size and log.cleaner.io.buffer.load.factor of Kafka.
DEDUPE_BUFFER_SIZE = 128 * 1024 * 1024
LOAD_FACTOR = 0.9
_DIGEST_SIZE = 16
_SLOT = Struct(f"<{_DIGEST_SIZE}sq")
_NUMBERS = Struct("<QQ")
_SMALLEST = 3
_MAX_OFFSET = (1 << 63) - 1
#: The attributes that a batch keeps.
_KEPT_BITS = LOG_APPEND_TIME_BIT | TRANSACTIONAL_BIT | CONTROL_BIT
Batches = Iterable[tuple[Header, memoryview]]


class CleanedTransactions:
    """Tracks the transactions of record batches in offset order, including control batches."""

    def __init__(self, aborted: Iterable[AbortedTransaction] = ()) -> None:
        """`aborted` may contain duplicates and transactions outside the batches."""
        self._waiting = [(transaction.first_offset, transaction) for transaction in aborted]
        heapq.heapify(self._waiting)
        #: By producer id: the current aborted transaction, and whether a batch of it was seen.
        self._aborted: dict[int, tuple[AbortedTransaction, bool]] = {}
        self._committed: set[int] = set()
        self._kept: list[AbortedTransaction] = []

    def discards(self, header: Header, batch: memoryview) -> bool:
        """True for a batch of an aborted transaction, and for a marker whose transaction has no batches left.

        `DecodeError` if a control batch can't be read.
        """
        if not isinstance(header, BatchHeader):
            return False
        while self._waiting and self._waiting[0][0] <= header.last_offset:
            transaction = heapq.heappop(self._waiting)[1]
            if transaction.last_offset >= header.base_offset:  # else it ended before the first batch
                self._aborted.setdefault(transaction.producer_id, (transaction, False))
        if header.is_control:
            return self._ends(header, batch)
        if not header.is_transactional:
            return False
        if header.producer_id in self._aborted:
            self._aborted[header.producer_id] = self._aborted[header.producer_id][0], True
            return True
        self._committed.add(header.producer_id)
        return False

    def take_kept(self) -> list[AbortedTransaction]:
        """The aborted transactions that ended since the last call and had at least one batch."""
        kept, self._kept = self._kept, []
        return kept

    def _ends(self, header: BatchHeader, batch: memoryview) -> bool:
        marker = read_marker(header, batch)
        if marker is None:
            return True  # an earlier round has emptied it
        if marker.type == ABORT:
            transaction, was_seen = self._aborted.pop(header.producer_id, (None, False))
            if transaction is not None and was_seen:
                self._kept.append(transaction)
            return not was_seen
        if marker.type == COMMIT:
            was_seen = header.producer_id in self._committed
            self._committed.discard(header.producer_id)
            return not was_seen
        return False


class OffsetMap:
    """The last offset of each key, in a fixed amount of memory: one table of slots, all zero at first.

        digest       16 bytes   BLAKE2b of the key
        offset + 1   INT64      0: the slot is empty

    A digest stands for its key, as MD5 in Kafka (SkimpyOffsetMap): among n keys two have the same digest with
    probability n**2 / 2**129, about 10**-24 for a hundred million. Collisions are resolved by double hashing. The map
    does not touch unused bytes of its `memory`, so creating it is fast.
    """

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
        return self._size

    def put(self, key: Buffer, offset: int) -> bool:
        """Set a key's offset; False, without effect, if the map is full and does not have the key."""
        position, digest, after = self._find(key)
        if not after:
            if self._size >= self.capacity:
                return False
            self._size += 1
        _SLOT.pack_into(self._table, position, digest, offset + 1)
        return True

    def get(self, key: Buffer) -> int:
        """The key's offset, -1 if it has none."""
        return self._find(key)[2] - 1

    def clear(self) -> None:
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
            stored, after = _SLOT.unpack_from(self._table, slot * _SLOT.size)
            if not after or stored == digest:
                return slot * _SLOT.size, digest, after
            slot = (slot + step) % self._slots


def _prime_up_to(number: int) -> int:
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number -= 1
    return number


@dataclass(frozen=True, slots=True)
class LastRecord:
    """An active producer: the offset of its last data record (None if it has only markers), and its epoch."""

    data_offset: int | None
    producer_epoch: int


@dataclass(frozen=True, slots=True)
class CleaningRound:
    """Parameters of one round. `end` is the result of `build_map`; `now` and `delete_retention` are in ms."""

    end: int
    first_uncleanable: int
    now: int
    delete_retention: int
    active_producers: Mapping[int, LastRecord] = field(default_factory=dict)


@dataclass(slots=True)
class CleanerStats:
    """Record batches and bytes read and written; `without_key` counts records, of which a topic should have none."""

    batches_read: int = 0
    bytes_read: int = 0
    batches_written: int = 0
    bytes_written: int = 0
    without_key: int = 0


def build_map(
    batches: Batches, offsets: OffsetMap, start: int, end: int, aborted: Iterable[AbortedTransaction] = ()
) -> int:
    """Collect the last offset of each key in [start, end). Returns the offset up to which this was done.

    That is `end`, or less if the map became full: the next round does the rest. `batches` are in order from the batch
    with `start` on; `aborted` may contain other transactions. `LogCorrupted` at a damaged batch.
    """
    transactions = CleanedTransactions(aborted)
    builder = load().builder(frozenset({"key", "offset"}))
    for header, batch in batches:
        if header.last_offset >= end:
            break
        with _naming(header):
            check_crc(header, batch)
            if transactions.discards(header, batch) or header.is_control:
                continue
            columns = _columns(builder, header, _content(header, batch))
            for offset, key in zip(_offsets(columns), _keys(columns), strict=True):
                if key is not None and offset >= start and not offsets.put(key, offset):
                    return offset
    return end


class Cleaner:
    """The second pass of one round, over all segments in order."""

    def __init__(
        self, offsets: OffsetMap, cleaning_round: CleaningRound, aborted: Iterable[AbortedTransaction] = ()
    ) -> None:
        """`aborted`: the entries of the segments' transaction indexes."""
        self.stats = CleanerStats()
        self._offsets = offsets
        self._round = cleaning_round
        self._transactions = CleanedTransactions(aborted)
        self._builder = load().builder(frozenset({"key", "value", "offset"}))

    def clean(self, batches: Batches, retain_legacy_tombstones: bool = True) -> Iterator[tuple[Header, Buffer]]:
        """The remaining batches of a segment with their headers; an unchanged batch is the same view.

        `retain_legacy_tombstones`: see `plan.retains_legacy_tombstones`. `LogCorrupted` at a damaged batch.
        """
        for header, batch in batches:
            self.stats.batches_read += 1
            self.stats.bytes_read += header.size
            with _naming(header):
                check_crc(header, batch)
                if isinstance(header, BatchHeader):
                    cleaned = self._clean_batch(header, batch)
                else:
                    cleaned = self._clean_message(header, batch, retain_legacy_tombstones)
            if cleaned is None:
                continue
            if cleaned is not batch:
                header = read_header(cleaned)
            self.stats.batches_written += 1
            self.stats.bytes_written += header.size
            yield header, cleaned

    def take_aborted(self) -> list[AbortedTransaction]:
        """The remaining aborted transactions since the last call, for the cleaned segment's transaction index."""
        return self._transactions.take_kept()

    def _clean_batch(self, header: BatchHeader, batch: memoryview) -> Buffer | None:
        is_over = self._transactions.discards(header, batch)
        horizon = header.delete_horizon
        has_passed = horizon is not None and horizon <= self._round.now
        if not header.count or (is_over and (has_passed or not header.is_control)):
            return self._without_records(header, batch)
        if not header.is_control and header.base_offset >= self._round.end:
            return batch
        content = body(header, batch)
        if header.is_control:
            kept, begins_horizon = [True] * header.count, is_over
        else:
            kept, has_tombstones = self._kept(_columns(self._builder, header, content), not has_passed)
            # Beyond the map, older records of a tombstone still exist: its horizon must not start yet.
            begins_horizon = has_tombstones and header.last_offset < self._round.end
        if not any(kept):
            return self._without_records(header, batch)
        if horizon is None and begins_horizon:
            horizon = self._round.now + self._round.delete_retention
        elif all(kept):
            return batch
        return retain_records(header, content, kept, horizon)

    def _without_records(self, header: BatchHeader, batch: memoryview) -> Buffer | None:
        """The batch without records, or None if it can be dropped."""
        last = self._round.active_producers.get(header.producer_id)
        if last is None:
            is_needed = False
        elif last.data_offset is None:
            is_needed = header.is_control and header.producer_epoch == last.producer_epoch
        else:
            is_needed = header.last_offset == last.data_offset
        if is_needed or header.next_offset == self._round.first_uncleanable:
            return empty_batch(header) if header.count else batch
        return None

    def _clean_message(self, header: MessageHeader, message: memoryview, retains_tombstones: bool) -> Buffer | None:
        content = _content(header, message)
        kept, _ = self._kept(_columns(self._builder, header, content), retains_tombstones)
        if all(kept):
            return message
        if not any(kept):
            return None
        last_offset = header.offset if header.magic else None
        append_time = header.timestamp if header.timestamp_type == LOG_APPEND_TIME else None
        records = plain_records(content, header.magic, last_offset, append_time)
        return build_message_set(
            [record for record, is_kept in zip(records, kept, strict=True) if is_kept],
            header.magic,
            codec_by_id(header.codec_id),
        )

    def _kept(self, columns: RecordColumns, retains_tombstones: bool) -> tuple[list[bool], bool]:
        """(for each record, whether to keep it; whether any kept record is a tombstone)."""
        kept, has_tombstones = [], False
        assert columns.value is not None
        validity = columns.value.validity
        for row, (offset, key) in enumerate(zip(_offsets(columns), _keys(columns), strict=True)):
            has_value = _is_valid(validity, row)
            if offset >= self._round.end:
                is_kept = True
            elif key is None:
                is_kept = False
                self.stats.without_key += 1
            else:
                is_kept = (has_value or retains_tombstones) and offset >= self._offsets.get(key)
            has_tombstones = has_tombstones or (is_kept and not has_value)
            kept.append(is_kept)
        return kept, has_tombstones


@contextmanager
def _naming(header: Header) -> Iterator[None]:
    """Name a damaged batch in `LogCorrupted`: rewriting it would give it a valid checksum."""
    try:
        yield
    except DecodeError as error:
        raise LogCorrupted(f"the batch that ends at offset {header.last_offset} can't be compacted: {error}") from error


def _content(header: Header, batch: memoryview) -> Buffer:
    """The decompressed records of a batch or messages of a wrapper; an uncompressed message itself."""
    if isinstance(header, BatchHeader):
        return body(header, batch) if header.count else b""
    return inner_set(header, batch) if header.codec_id else batch


def _columns(builder: ColumnBuilder, header: Header, content: Buffer) -> RecordColumns:
    if isinstance(header, BatchHeader):
        builder.append(content, header.count, header.base_offset, header.base_timestamp, None, 0, _MAX_OFFSET)
    else:
        last_offset = header.offset if header.codec_id and header.magic else None
        builder.append_messages(content, header.magic, last_offset, None, 0, _MAX_OFFSET)
    return builder.finish()


def _offsets(columns: RecordColumns) -> memoryview:
    assert columns.offset is not None
    return memoryview(columns.offset).cast("B").cast("q")


def _keys(columns: RecordColumns) -> Iterator[Buffer | None]:
    assert columns.key is not None
    bounds = memoryview(columns.key.offsets).cast("B").cast("i")
    data, validity = columns.key.data, columns.key.validity
    for row in range(columns.count):
        yield data[bounds[row] : bounds[row + 1]] if _is_valid(validity, row) else None


def _is_valid(validity: Buffer | None, row: int) -> bool:
    return validity is None or bool(validity[row >> 3] >> (row & 7) & 1)


def retain_records(header: BatchHeader, records: Buffer, kept: Sequence[bool], delete_horizon: int | None) -> bytes:
    """The batch with those records for which `kept` is true, at least one.

    The base timestamp becomes that of the first kept record, or the delete horizon (KIP-534); timestamp deltas are
    written relative to it. The rest of each record is copied as it is.

    `records` is the decompressed body, `kept` has an entry per record, `delete_horizon` (ms) may be None.
    `DecodeError` if the body does not have `len(kept)` records.
    """
    reader = Reader(records)
    kept_records = bytearray()
    base, latest = delete_horizon, NO_TIMESTAMP
    for is_kept in kept:
        record = reader.take(reader.varint())
        if not is_kept:
            continue
        fields = Reader(record)
        attributes = fields.take(1)
        delta = fields.varlong()
        timestamp = header.append_time
        if timestamp is None:
            timestamp = wrap_int64(header.base_timestamp + delta)
        if base is None:
            base = timestamp
        latest = max(latest, timestamp)
        delta = wrap_int64(timestamp - base)
        content = bytearray(attributes)
        append_varlong(content, delta)
        content += fields.take(fields.remaining)
        append_uvarint(kept_records, len(content) << 1)
        kept_records += content
    if reader.remaining:
        raise DecodeError(
            f"batch at offset {header.base_offset}: {reader.remaining} bytes left over after {len(kept)} records"
        )
    return build_batch(
        kept_records,
        sum(kept),
        codec=codec_by_id(header.codec_id),
        base_timestamp=NO_TIMESTAMP if base is None else base,
        max_timestamp=latest,
        attributes=header.attributes & _KEPT_BITS | (0 if delete_horizon is None else DELETE_HORIZON_BIT),
        **_kept_fields(header),
    )


def empty_batch(header: BatchHeader) -> bytes:
    """The batch without records: it only keeps the offsets and sequence numbers."""
    return build_batch(
        b"",
        0,
        codec=NONE,
        base_timestamp=NO_TIMESTAMP,
        max_timestamp=header.max_timestamp,
        attributes=header.attributes & _KEPT_BITS,
        **_kept_fields(header),
    )


def _kept_fields(header: BatchHeader) -> dict[str, int]:
    names = "base_offset", "last_offset_delta", "producer_id", "producer_epoch", "base_sequence", "leader_epoch"
    return {name: getattr(header, name) for name in names}
