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

import heapq
import mmap
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from struct import Struct

from spark_klog.errors import ConfigError, DecodeError, LogCorrupted
from spark_klog.log.segments.transaction_index import AbortedTransaction
from spark_klog.records.contract import LOG_APPEND_TIME, NO_TIMESTAMP, CleaningLimits, ColumnBuilder
from spark_klog.records.formats.batch import PREFIX, Header, check_crc, read_header
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
from spark_klog.records.kernels.reference import siphash
from spark_klog.records.reading.reader import ABORT, COMMIT, read_marker
from spark_klog.wire.codecs import NONE, codec_by_id
from spark_klog.wire.primitives import Buffer

#: log.cleaner.dedupe.buffer.size and log.cleaner.io.buffer.load.factor of Kafka.
DEDUPE_BUFFER_SIZE = 128 * 1024 * 1024
LOAD_FACTOR = 0.9
_DIGEST_SIZE = 16
_SLOT = Struct(f"<{_DIGEST_SIZE}sq")
_NUMBERS = Struct("<QQ")
_SMALLEST = 3
#: More than lies between two primes below 2**32.
_PRIME_GAP = 400
_MAX_OFFSET = (1 << 63) - 1
#: The attributes that a batch keeps.
_KEPT_BITS = LOG_APPEND_TIME_BIT | TRANSACTIONAL_BIT | CONTROL_BIT
#: Rows of one run of batches; their columns are small, beside the map.
_RUN_ROWS = 1 << 16
#: Reads a segment's batches: what is there from a position on, at least a whole batch, or nothing at the end.
ReadBatches = Callable[[int], memoryview]


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
        if not isinstance(header, BatchHeader) or not (header.is_transactional or header.is_control):
            return False
        while self._waiting and self._waiting[0][0] <= header.last_offset:
            transaction = heapq.heappop(self._waiting)[1]
            if transaction.last_offset >= header.base_offset:  # else it ended before the first batch
                self._aborted.setdefault(transaction.producer_id, (transaction, False))
        if header.is_control:
            return self._ends(header, batch)
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
    """The last offset of each key (`KeyOffsets`), in a fixed amount of memory.

    A digest stands for its key, as MD5 in Kafka (SkimpyOffsetMap): among n keys two have the same digest with
    probability n**2 / 2**129, about 10**-24 for a hundred million, and nobody can choose such keys, as the digest's
    secret is random. The map does not touch unused bytes of its `memory`, so creating it is fast.
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
        self._most_slots, self._load_factor = memory // _SLOT.size, load_factor
        self._use(self._most_slots)
        self.table = _zeros(self.slots * _SLOT.size)
        self.secret = os.urandom(_DIGEST_SIZE)
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def put(self, key: Buffer, offset: int) -> bool:
        """See `KeyOffsets`; the native kernel does the same."""
        position, digest, after = self._find(key)
        if not after:
            if self.size >= self.capacity:
                return False
            self.size += 1
        _SLOT.pack_into(self.table, position, digest, offset + 1)
        return True

    def get(self, key: Buffer) -> int:
        """See `KeyOffsets`."""
        return self._find(key)[2] - 1

    def clear(self, keys: int | None = None) -> None:
        """Forget all keys. Of its memory the map then uses what so many keys need (None: as before)."""
        if keys is not None:
            self._use(min(self._most_slots, int(keys / self._load_factor) + _PRIME_GAP))
        if self.size or len(self.table) != self.slots * _SLOT.size:
            before, self.table = self.table, _zeros(self.slots * _SLOT.size)
            before.close()  # else the deallocator would unmap it, during which no other thread runs
            self.size = 0

    def close(self) -> None:
        """Give back the memory: for 128 MB that takes up to 150 ms, during which other threads run."""
        self.table.close()

    def _use(self, slots: int) -> None:
        # A prime, so that every step width visits every slot; one slot stays empty, so that every search ends.
        self.slots = _prime_up_to(slots)
        self.capacity = min(max(1, int(self.slots * self._load_factor)), self.slots - 1)

    def _find(self, key: Buffer) -> tuple[int, bytes, int]:
        """(position of the key's slot, digest, offset + 1); 0 for an empty slot."""
        digest = siphash(key, self.secret)
        first, second = _NUMBERS.unpack(digest)
        slot, step = first % self.slots, second % (self.slots - 1) + 1
        while True:
            stored, after = _SLOT.unpack_from(self.table, slot * _SLOT.size)
            if not after or stored == digest:
                return slot * _SLOT.size, digest, after
            slot = (slot + step) % self.slots


def _zeros(size: int) -> mmap.mmap:
    """Memory of zeros, in large pages if the system has them: with small ones a look-up mostly waits for its page."""
    table = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory rarely may have them
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            table.madvise(mmap.MADV_HUGEPAGE)
    return table


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
    segments: Iterable[ReadBatches],
    offsets: OffsetMap,
    start: int,
    end: int,
    aborted: Iterable[AbortedTransaction] = (),
) -> int:
    """Collect the last offset of each key in [start, end). Returns the offset up to which this was done.

    That is `end`, or less if the map became full: the next round does the rest. `segments` are in order from the one
    with `start` on; `aborted` may contain other transactions. `LogCorrupted` at a damaged batch.
    """
    transactions, kernel = CleanedTransactions(aborted), load()
    builder = kernel.builder(frozenset({"key", "offset"}))
    for read in segments:
        position = 0
        while data := read(position):
            size, _ = builder.append_batches(data, 0, start, end, _RUN_ROWS, _MAX_OFFSET)
            if not size:
                header, batch = _first_batch(data)
                if (header.base_offset if isinstance(header, BatchHeader) else header.offset) >= end:
                    return end
                size = header.size
                with _naming(header):
                    check_crc(header, batch)
                    if not (transactions.discards(header, batch) or header.is_control):
                        _append(builder, header, _content(header, batch), start, end)
            position += size
            full = kernel.put_keys(offsets, builder.finish())
            if full is not None:
                return full
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
        self._kernel = load()
        self._builder = self._kernel.builder(frozenset({"key", "value", "offset"}))
        self._horizon = cleaning_round.now + cleaning_round.delete_retention
        ends = {last.data_offset for last in cleaning_round.active_producers.values() if last.data_offset is not None}
        stays = array("q", sorted(ends | {cleaning_round.first_uncleanable - 1})).tobytes()
        self._limits = CleaningLimits(cleaning_round.end, cleaning_round.now, self._horizon, stays)

    def clean(self, read: ReadBatches, retain_legacy_tombstones: bool = True) -> Iterator[Buffer]:
        """What is left of a segment's batches, one or more at a time.

        `retain_legacy_tombstones`: see `plan.retains_legacy_tombstones`. `LogCorrupted` at a damaged batch.
        """
        position, stats = 0, self.stats
        while data := read(position):
            size, left, batches, written, without_key = self._kernel.clean_batches(self._offsets, data, self._limits)
            stats.without_key += without_key
            if not size:
                header, batch = _first_batch(data)
                with _naming(header):
                    check_crc(header, batch)
                    if isinstance(header, BatchHeader):
                        cleaned = self._clean_batch(header, batch)
                    else:
                        cleaned = self._clean_message(header, batch, retain_legacy_tombstones)
                left, size, batches, written = cleaned or b"", header.size, 1, int(cleaned is not None)
            position += size
            stats.batches_read += batches
            stats.bytes_read += size
            stats.batches_written += written
            stats.bytes_written += len(left)
            if left:
                yield left

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
            kept, begins_horizon = b"\1" * header.count, is_over
        else:
            kept, has_tombstones = self._kept(header, content, not has_passed)
            # Beyond the map, older records of a tombstone still exist: its horizon must not start yet.
            begins_horizon = has_tombstones and header.last_offset < self._round.end
        if not any(kept):
            return self._without_records(header, batch)
        if horizon is None and begins_horizon:
            horizon = self._horizon
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
        kept, _ = self._kept(header, content, retains_tombstones)
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

    def _kept(self, header: Header, content: Buffer, retains_tombstones: bool) -> tuple[bytes, bool]:
        """(1 for each record to keep, else 0; whether any kept record is a tombstone)."""
        _append(self._builder, header, content, 0, _MAX_OFFSET)
        columns = self._builder.finish()
        kept, has_tombstones, without_key = self._kernel.kept_rows(
            self._offsets, columns, self._round.end, retains_tombstones
        )
        self.stats.without_key += without_key
        return kept, has_tombstones


def _first_batch(data: memoryview) -> tuple[Header, memoryview]:
    """The batch that the data begin with; `LogCorrupted` if its header is impossible."""
    try:
        header = read_header(data)
    except DecodeError as error:
        offset = PREFIX.unpack_from(data)[0]
        raise LogCorrupted(f"the batch of offset {offset} can't be compacted: {error}") from error
    return header, data[: header.size]


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


def _append(builder: ColumnBuilder, header: Header, content: Buffer, first: int, end: int) -> None:
    if isinstance(header, BatchHeader):
        builder.append(content, header.count, header.base_offset, header.base_timestamp, None, first, end)
    else:
        last_offset = header.offset if header.codec_id and header.magic else None
        builder.append_messages(content, header.magic, last_offset, None, first, end)


def retain_records(header: BatchHeader, records: Buffer, kept: bytes, delete_horizon: int | None) -> bytes:
    """The batch with those records for which `kept` has 1, at least one.

    The base timestamp becomes that of the first kept record, or the delete horizon (KIP-534).

    `records` is the decompressed body, `kept` has a byte per record, `delete_horizon` (ms) may be None.
    `DecodeError` if the body does not have `len(kept)` records.
    """
    body, base, latest = load().retained(records, kept, header.base_timestamp, header.append_time, delete_horizon)
    return build_batch(
        body,
        sum(kept),
        codec=codec_by_id(header.codec_id),
        base_timestamp=base,
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
