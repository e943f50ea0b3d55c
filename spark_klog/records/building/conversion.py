"""Conversion between magics: down for old consumers, up for old producers.

Conversion keeps the codec. Down it keeps offsets and gaps between them, and drops what an older magic can't hold:
headers (magic 2 only), timestamps (magic 1 and 2), and control batches, which consumers never see.

A few bytes can decompress to millions of records, so a batch of very many is converted in slices, each to a batch of
its own: the memory is that of the decompressed bytes and of one slice.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice

from spark_klog.errors import DecodeError, ErrorCode, ProtocolError
from spark_klog.records import kernels
from spark_klog.records.contract import LOG_APPEND_TIME, Record, RecordColumns
from spark_klog.records.formats.batch import check_crc, iter_batches, read_header, whole_batch_size, whole_batches
from spark_klog.records.formats.batch_v2 import LOG_APPEND_TIME_BIT, BatchHeader, body, build_batch, with_records
from spark_klog.records.formats.message_set import (
    MessageHeader,
    build_message_set,
    build_wrapper,
    inner_set,
    read_message_header,
)
from spark_klog.records.kernels.reference import append_record
from spark_klog.records.reading.produced import check_records
from spark_klog.records.reading.reader import records_of
from spark_klog.wire.codecs import MAX_DECOMPRESSED, NONE, ZSTD, Codec, codec_by_id
from spark_klog.wire.primitives import Buffer

_MAX_OFFSET = (1 << 63) - 1
#: The most records that are objects at a time, some 20 MB.
_SLICE_RECORDS = 1 << 16
#: The most bytes of a wrapper's messages that become one batch, unless one message has more.
_SLICE_BYTES = 1 << 24
#: zstd's levels above it compress a megabyte in a second or two: up to so many bytes of records are compressed by them.
_FAST_ZSTD, _SLOWLY_COMPRESSED = 9, 512 * 1024
_COLUMNS = frozenset({"key", "value", "timestamp"})


@dataclass
class Converted:
    """Converted batches: how many records they have, and how many headers were dropped."""

    data: bytearray = field(default_factory=bytearray)
    records: int = 0
    lost_headers: int = 0


def down_convert(data: Buffer, magic: int, first_offset: int = 0, limit: int = MAX_DECOMPRESSED) -> Converted:
    """Convert whole batches to a message set of `magic` (0 or 1); batches of that magic or older stay as they are.

    Uncompressed records before `first_offset` are left out, as in Kafka. `CorruptBatchError`, `DecodeError`;
    `ProtocolError` (UNSUPPORTED_COMPRESSION_TYPE) for zstd, which older magics do not have.
    """
    result = Converted()
    for header, batch in iter_batches(data):
        check_crc(header, batch)
        if header.magic <= magic:
            result.data += batch
            continue
        if header.is_control:
            continue
        if header.codec_id == ZSTD:
            raise ProtocolError(
                ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"batch of offset {header.base_offset} as magic {magic}: zstd"
            )
        if isinstance(header, BatchHeader):
            _add_messages(result, header, body(header, batch, limit), magic, first_offset)
            continue
        left = records_of(header, batch, limit)
        if not header.codec_id:
            left = (record for record in left if record.offset >= first_offset)
        while records := list(islice(left, _SLICE_RECORDS)):
            _check_offsets(records)
            result.data += build_message_set(records, magic, codec_by_id(header.codec_id))
            result.records += len(records)
    return result


def _add_messages(result: Converted, header: BatchHeader, records: Buffer, magic: int, first_offset: int) -> None:
    """Add a batch's decompressed records; those of a compressed batch become wrappers of so many records each."""
    codec, kernel, append_time = codec_by_id(header.codec_id), kernels.load(), header.append_time
    is_inner, position, left = bool(header.codec_id), 0, header.count
    first = 0 if is_inner else first_offset
    kind = LOG_APPEND_TIME_BIT if append_time is not None and magic else 0
    while True:
        start = header.base_offset, header.base_timestamp, append_time
        run = kernel.message_set(records, position, left, _SLICE_RECORDS, *start, first, magic, is_inner)
        if is_inner and run.records:
            result.data += build_wrapper(run.data, magic, codec, run.last_offset, run.max_timestamp, attributes=kind)
        else:
            result.data += run.data
        result.records += run.records
        result.lost_headers += run.headers
        position, left = run.position, left - run.read
        if not left:
            return


def up_convert(data: Buffer, limit: int = MAX_DECOMPRESSED) -> bytearray:
    """Convert produced batches to magic 2: each wrapper, and each run of uncompressed messages, becomes one batch.

    Offsets count from 0, since producers may send any. All wrappers together may decompress to `limit` bytes. Batches
    of magic 2 stay as they are. `CorruptBatchError`, `DecodeError` unless all are whole.
    """
    view, position, kernel, result = memoryview(data), 0, kernels.load(), _Raised()
    builder = kernel.builder(_COLUMNS | {"timestampType"})
    while position < len(view) or not position:
        size = kernel.message_run(view[position : position + _SLICE_BYTES], 0, _MAX_OFFSET)
        if not size:
            whole = whole_batch_size(view, position)
            if whole is None:
                raise DecodeError(f"{len(data)} bytes are not whole record batches")
            size = whole
        messages = view[position : position + size]
        header = read_header(messages)
        if isinstance(header, BatchHeader) or header.codec_id:
            result.add_plain(builder.finish())
            check_crc(header, messages)
            if isinstance(header, BatchHeader):
                result.data += messages
            else:
                inner = memoryview(inner_set(header, messages, limit))
                limit -= len(inner)
                kind = LOG_APPEND_TIME_BIT if header.append_time is not None else 0
                for columns in _slices(header, inner):  # a wrapper's type is that of its messages, whatever they say
                    result.add(columns, [(columns.count, kind)], codec_by_id(header.codec_id))
        else:
            builder.append_messages(messages, header.magic, None, None, ~_MAX_OFFSET, _MAX_OFFSET + 1)
            if builder.rows >= _SLICE_RECORDS or builder.size >= _SLICE_BYTES:
                result.add_plain(builder.finish())
        position += size
    result.add_plain(builder.finish())
    return result.data


class _Raised:
    """Batches of magic 2 with offsets from 0 on."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._following = 0

    def add_plain(self, columns: RecordColumns) -> None:
        """Add messages that were not compressed, if there are any."""
        self.add(columns, _spans(columns), NONE)

    def add(self, columns: RecordColumns, spans: Iterable[tuple[int, int]], codec: Codec) -> None:
        """Add a batch of each span: the end of its rows, its attributes."""
        row = 0
        for stop, attributes in spans:
            span = replace(columns, count=stop)
            encoded, _, base_timestamp, max_timestamp = kernels.load().encode(span, row, sys.maxsize)
            self.data += build_batch(
                encoded,
                stop - row,
                base_timestamp=base_timestamp,
                max_timestamp=max_timestamp,
                codec=codec,
                base_offset=self._following,
                attributes=attributes,
            )
            self._following += stop - row
            row = stop


def _spans(columns: RecordColumns) -> Iterator[tuple[int, int]]:
    """(end, attributes) of rows that fit into a batch: it has one timestamp type, and as append time one timestamp."""
    assert columns.timestamp_type is not None
    assert columns.timestamp is not None
    kinds, times = bytes(columns.timestamp_type), bytes(columns.timestamp)
    if LOG_APPEND_TIME not in kinds:  # as a byte: the other types have none of it
        if columns.count:
            yield columns.count, 0
        return
    rows = zip(memoryview(kinds).cast("i"), memoryview(times).cast("q"), strict=True)
    row = 0
    for append_time, span in groupby(rows, lambda each: each[1] if each[0] == LOG_APPEND_TIME else None):
        row += sum(1 for _ in span)
        yield row, 0 if append_time is None else LOG_APPEND_TIME_BIT


def compressed_as(data: Buffer, codec: Codec, level: int | None, limit: int = MAX_DECOMPRESSED) -> bytearray:
    """Give produced batches of magic 2 a topic's codec; those that have it stay as they are.

    Large batches get none of zstd's slow levels. A batch may decompress to `limit` bytes. `CorruptBatchError`,
    `DecodeError` for records that are damaged, or do not match the header.
    """
    result, kernel = bytearray(), kernels.load()
    for header, batch in whole_batches(data):
        assert isinstance(header, BatchHeader)
        check_crc(header, batch)
        if header.codec_id != codec.id:
            records = body(header, batch, limit)
            check_records(header, records, kernel)
            is_bounded = codec.id == ZSTD and len(records) > _SLOWLY_COMPRESSED
            chosen = min(level, _FAST_ZSTD) if is_bounded and level is not None else level
            batch = memoryview(with_records(batch, records, codec, chosen))
        result += batch
    return result


def _slices(header: MessageHeader, inner: memoryview) -> Iterator[RecordColumns]:
    """The records of a wrapper, whose decompressed messages are given; `CorruptBatchError`, `DecodeError`."""
    kernel, position = kernels.load(), 0
    builder = kernel.builder(_COLUMNS)
    while position < len(inner):
        size = kernel.message_run(inner[position : position + _SLICE_BYTES], 0, _MAX_OFFSET)
        if not size:  # a message that is larger than a slice, or a bad one, which the builder refuses
            size = whole_batch_size(inner, position) or len(inner) - position
            if size <= _SLICE_BYTES and read_message_header(inner, position).offset == _MAX_OFFSET:
                raise DecodeError(f"message of offset {_MAX_OFFSET} inside a compressed message")
        messages = inner[position : position + size]
        builder.append_messages(messages, header.magic, None, header.append_time, ~_MAX_OFFSET, _MAX_OFFSET + 1)
        yield builder.finish()
        position += size


def _check_offsets(records: Sequence[Record]) -> None:
    """`DecodeError` unless all offsets are in [0, 2**63)."""
    lowest, highest = min(record.offset for record in records), max(record.offset for record in records)
    if lowest < 0 or highest > _MAX_OFFSET:
        raise DecodeError(f"records of offsets {lowest} to {highest} in a batch")


def batch_of(records: Sequence[Record], codec: Codec = NONE, level: int | None = None) -> bytes:
    """Build a batch of magic 2 from records in offset order, at least one; all of one timestamp type."""
    body = bytearray()
    base_offset, base_timestamp = records[0].offset, records[0].timestamp
    for record in records:
        append_record(
            body,
            record.timestamp - base_timestamp,
            record.offset - base_offset,
            record.key,
            record.value,
            record.headers,
        )
    return build_batch(
        body,
        len(records),
        base_timestamp=base_timestamp,
        max_timestamp=max(record.timestamp for record in records),
        codec=codec,
        level=level,
        base_offset=base_offset,
        last_offset_delta=records[-1].offset - base_offset,
        attributes=LOG_APPEND_TIME_BIT if records[0].timestamp_type == LOG_APPEND_TIME else 0,
    )
