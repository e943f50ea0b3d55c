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
unchanged; the others keep their offsets, codec and sequences (records/building/retain.py).

Sources: Kafka's documentation, "Log Compaction"; KIP-98 (transactions), KIP-534 (delete horizon), KAFKA-17076 (the end
of the part that was cleaned is kept).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from spark_klog.errors import DecodeError, LogCorrupted
from spark_klog.log.compaction.cleaned_transactions import CleanedTransactions
from spark_klog.log.compaction.offset_map import OffsetMap
from spark_klog.log.segments.transaction_index import AbortedTransaction
from spark_klog.records.building.retain import empty_batch, retain_records
from spark_klog.records.contract import LOG_APPEND_TIME, ColumnBuilder, RecordColumns
from spark_klog.records.formats.batch import Header, check_crc, read_header
from spark_klog.records.formats.batch_v2 import BatchHeader, body
from spark_klog.records.formats.message_set import MessageHeader, build_message_set, inner_set, plain_records
from spark_klog.records.kernels import load
from spark_klog.wire.codecs import codec_by_id
from spark_klog.wire.primitives import Buffer

_MAX_OFFSET = (1 << 63) - 1

Batches = Iterable[tuple[Header, memoryview]]


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
