"""Reading of fetched or stored batches: checksums, control batches, aborted transactions, corrupt batches.

Control batches (KIP-98): they mark the end of a transaction in each partition that it wrote to.

key    INT16 version, INT16 type (0 abort, 1 commit)
value  INT16 version, INT32 coordinator epoch
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from struct import Struct
from typing import NamedTuple

from spark_klog.errors import DecodeError
from spark_klog.records import kernels
from spark_klog.records.contract import ColumnBuilder, Headers, Kernel, Record, RecordColumns
from spark_klog.records.formats.batch import (
    Header,
    check_crc,
    iter_batches,
    next_offset_after,
    read_header,
    whole_batch_size,
)
from spark_klog.records.formats.batch_v2 import BatchHeader, body
from spark_klog.records.formats.message_set import MessageHeader, inner_set, message_records
from spark_klog.records.kernels.reference import iter_records
from spark_klog.records.reading.offset_order import NOTHING
from spark_klog.wire.codecs import MAX_DECOMPRESSED
from spark_klog.wire.primitives import Buffer

ABORT, COMMIT = 0, 1
_VERSION = 0
_KEY = Struct(">hh")
_VALUE = Struct(">hi")
_OFFSET = Struct(">q")
#: Limit for decompressing a control batch, in bytes; Kafka's are some ten bytes, uncompressed.
_MAX_SIZE = 64 * 1024
_MANY = 1 << 62


class EndTransactionMarker(NamedTuple):
    """The record of a control batch: ABORT, COMMIT or another type; `coordinator_epoch` is -1 if it has none."""

    type: int
    coordinator_epoch: int


def read_marker(header: BatchHeader, batch: memoryview) -> EndTransactionMarker | None:
    """The marker of a control batch, None if compaction has removed it.

    `DecodeError` if the batch holds anything else.
    """
    if not header.count:
        return None
    record = next(iter_records(header, batch, _MAX_SIZE))
    if record.key is None or len(record.key) < _KEY.size:
        raise DecodeError(f"control batch at offset {header.base_offset} holds no control record")
    epoch = _VALUE.unpack_from(record.value)[1] if record.value and len(record.value) >= _VALUE.size else -1
    return EndTransactionMarker(_KEY.unpack_from(record.key)[1], epoch)


def encode_marker(marker: EndTransactionMarker) -> tuple[bytes, bytes]:
    """The marker's record: (key, value)."""
    return _KEY.pack(_VERSION, marker.type), _VALUE.pack(_VERSION, marker.coordinator_epoch)


class AbortedTransactions:
    """Filter of the batches that a read_committed consumer skips (KIP-98).

    Takes (producer id, first offset) pairs, from the fetch response or a segment's transaction index. A producer's
    batches are aborted from that offset on until its abort marker.
    """

    def __init__(self, transactions: Iterable[tuple[int, int]] = ()) -> None:
        self._waiting = [(first_offset, producer_id) for producer_id, first_offset in transactions]
        heapq.heapify(self._waiting)
        self._aborted: set[int] = set()

    def skips(self, header: Header, batch: memoryview) -> bool:
        """Whether the consumer skips the batch. Call it for every batch in offset order, control batches too."""
        while self._waiting and self._waiting[0][0] <= header.last_offset:
            self._aborted.add(heapq.heappop(self._waiting)[1])
        if isinstance(header, MessageHeader):
            return False
        if header.is_control:
            if header.producer_id in self._aborted:
                marker = read_marker(header, batch)
                if marker is not None and marker.type == ABORT:
                    self._aborted.discard(header.producer_id)
            return True
        return header.is_transactional and header.producer_id in self._aborted


def visible_batches(data: Buffer, aborted: AbortedTransactions | None = None) -> Iterator[tuple[Header, memoryview]]:
    """Whole batches of any magic, without control batches and, given `aborted`, aborted ones.

    `CorruptBatchError` for a wrong CRC, `DecodeError` for an invalid batch.
    """
    for header, batch in iter_batches(data):
        check_crc(header, batch)
        if not _is_hidden(header, batch, aborted):
            yield header, batch


def _is_hidden(header: Header, batch: memoryview, aborted: AbortedTransactions | None) -> bool:
    return header.is_control if aborted is None else aborted.skips(header, batch)


def records_of(header: Header, batch: memoryview, limit: int = MAX_DECOMPRESSED) -> Iterator[Record]:
    """The records of one batch of any magic, whose CRC was checked; `DecodeError` if it is damaged."""
    if isinstance(header, BatchHeader):
        return iter_records(header, batch, limit)
    return message_records(header, batch, limit)


class RecordFields(NamedTuple):
    """A record's bytes, and its timestamp in ms; -1 for none."""

    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp: int = -1


class BadBatch(NamedTuple):
    """A corrupt batch: its offset field (base offset; of a wrapper the last offset), its bytes, and the error.

    Or a single record that can't be decoded into columns: its offset, the bytes of what does not decode, or of its
    value, the error, and the whole record, if it was read.
    """

    offset: int
    data: memoryview
    error: DecodeError
    record: RecordFields | None = None


def refuse(bad: BadBatch) -> None:
    """Raise the error of a corrupt batch: what stored logs do with one by default."""
    raise bad.error


def append_batch(
    builder: ColumnBuilder,
    header: Header,
    batch: memoryview,
    first: int,
    end: int,
    limit: int = MAX_DECOMPRESSED,
) -> None:
    """Add the records with offsets in [first, end) of a batch, whose CRC was checked, to a builder."""
    if isinstance(header, BatchHeader):
        records, base_offset, base_timestamp = body(header, batch, limit), header.base_offset, header.base_timestamp
        builder.append(records, header.count, base_offset, base_timestamp, header.append_time, first, end)
    elif header.codec_id:
        messages, last_offset = inner_set(header, batch, limit), header.offset if header.magic else None
        builder.append_messages(messages, header.magic, last_offset, header.append_time, first, end)
    else:
        builder.append_messages(batch, header.magic, None, None, first, end)


class RecordReader:
    """Reads the visible records of batches into columns, which are full with `rows` records or `size` bytes.

    Bytes are those of keys and values. Records of several chunks, of one partition or of many, share columns until
    these are full. A record batch may decompress to `limit` bytes. Without `checks`, record batches with a wrong CRC
    are read; messages of magic 0 and 1 are always checked. The error of a corrupt batch is raised, or, with
    `yields_bad`, the batch is yielded, and reading goes on after it.
    """

    def __init__(
        self,
        columns: frozenset[str],
        *,
        rows: int = _MANY,
        size: int = _MANY,
        limit: int = MAX_DECOMPRESSED,
        checks: bool = True,
        yields_bad: bool = False,
        kernel: Kernel | None = None,
    ) -> None:
        self._kernel = kernel or kernels.load()
        self._builder = self._kernel.builder(columns)
        self._most_rows, self._most_bytes = rows, size
        self._limit, self._checks, self._yields_bad = limit, checks, yields_bad

    @property
    def rows(self) -> int:
        """The records read since the last columns."""
        return self._builder.rows

    def finish(self) -> RecordColumns:
        """The records read since the last columns, perhaps none."""
        return self._builder.finish()

    def read(
        self,
        data: Buffer,
        first: int,
        end: int,
        aborted: AbortedTransactions | None = None,
        damaged: Mapping[int, DecodeError] = NOTHING,
    ) -> Iterator[RecordColumns | BadBatch]:
        """Read the records with offsets in [first, end); yield columns that are full, and bad batches.

        With `aborted` leaves out the records of aborted transactions. Ignores batches that begin at `end` or later,
        even if they are corrupt. `damaged` maps positions of batches with wrong offsets to their errors (see
        offset_order.py). `DecodeError` for an unknown magic or an impossible length: the position of the next batch is
        unknown then.
        """
        builder, view = self._builder, memoryview(data)
        stops = [*damaged, len(view)]  # runs end there
        position, next_offset = 0, first
        walked = 0  # `next_offset` is that of the batch at this position; corrupt batches do not count
        one_by_one = 0  # a run of messages up to this position holds a corrupt one
        while True:
            if builder.rows >= self._most_rows or builder.size >= self._most_bytes:
                yield builder.finish()
            if next_offset >= end or position == len(view):
                return
            while stops[0] < position:
                stops.pop(0)
            run, following = builder.append_batches(
                view[: stops[0]], position, first, end, self._most_rows, self._most_bytes
            )
            if run > position:
                walked, position, next_offset = run, run, following
                continue
            header, error = None, damaged.get(position)
            if error is None:
                try:
                    header = read_header(view, position)
                except DecodeError as invalid:
                    error = invalid
            size = whole_batch_size(view, position) if header is None else header.size
            if size is None or size > len(view) - position:
                return
            batch = view[position : position + size]
            if header is not None:
                if header.base_offset >= end:
                    return
                is_message = isinstance(header, MessageHeader)
                may_be_behind = is_message and header.last_offset >= end  # a wrapper has no base offset of its own
                if may_be_behind and next_offset_after(view[walked:position], next_offset) >= end:
                    return
                if is_message and not header.codec_id and position >= one_by_one:
                    # one message at a time would be slow
                    run = self._kernel.message_run(view[: stops[0]], position, end)
                    try:
                        builder.append_messages(view[position:run], header.magic, None, None, first, end)
                    except DecodeError:
                        one_by_one = run
                    else:
                        position = run
                        continue
                try:
                    if self._checks or is_message:
                        check_crc(header, batch)
                    if not _is_hidden(header, batch, aborted) and header.last_offset >= first:
                        append_batch(builder, header, batch, first, end, self._limit)
                except DecodeError as corrupt:
                    error = corrupt
                else:
                    next_offset = header.next_offset
            if error is not None:
                if not self._yields_bad:
                    raise error
                next_offset = next_offset_after(view[walked:position], next_offset)
                yield BadBatch(_OFFSET.unpack_from(batch)[0], batch, error)
            walked = position = position + size
