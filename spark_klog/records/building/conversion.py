"""Conversion between magics: down for old consumers, up for old producers and logs in an older format.

Conversion keeps the codec, offsets and gaps between offsets. It drops what an older magic can't hold: headers (magic 2
only), timestamps (magic 1 and 2), and control batches, which consumers never see.

A few bytes can decompress to millions of records, so a batch of very many is converted in slices, each to a batch of
its own: the memory is that of the decompressed bytes and of one slice.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from spark_klog.errors import DecodeError, ErrorCode, ProtocolError
from spark_klog.records import kernels
from spark_klog.records.contract import LOG_APPEND_TIME, Record, RecordColumns
from spark_klog.records.formats.batch import Header, check_crc, iter_batches, whole_batch_size, whole_batches
from spark_klog.records.formats.batch_v2 import LOG_APPEND_TIME_BIT, BatchHeader, build_batch
from spark_klog.records.formats.message_set import (
    MessageHeader,
    build_message_set,
    inner_set,
    message_records,
    read_message_header,
)
from spark_klog.records.kernels.reference import append_record
from spark_klog.records.reading.reader import records_of
from spark_klog.wire.codecs import MAX_DECOMPRESSED, NONE, ZSTD, Codec, codec_by_id
from spark_klog.wire.primitives import Buffer

_MAX_OFFSET = (1 << 63) - 1
_MAX_OFFSET_DELTA = (1 << 31) - 1
#: The most records that are objects at a time, some 20 MB.
_SLICE_RECORDS = 1 << 16
#: The most bytes of a wrapper's messages that become one batch, unless one message has more.
_SLICE_BYTES = 1 << 24
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
        left = records_of(header, batch, limit)
        if not header.codec_id:
            left = (record for record in left if record.offset >= first_offset)
        while records := list(islice(left, _SLICE_RECORDS)):
            _check_offsets(records)
            result.data += build_message_set(records, magic, codec_by_id(header.codec_id))
            result.records += len(records)
            result.lost_headers += sum(len(record.headers) for record in records)
    return result


def up_convert(data: Buffer, *, renumber: bool = False, limit: int = MAX_DECOMPRESSED) -> bytearray:
    """Convert whole batches to magic 2: each wrapper, and each run of uncompressed messages, becomes one batch.

    With `renumber` offsets count from 0, since producers may send any, and all wrappers together may decompress to
    `limit` bytes; else each one. Batches of magic 2 stay as they are. `CorruptBatchError`, `DecodeError`.
    """
    result = bytearray()
    following = 0
    for codec, records in _groups(data, renumber, limit):
        if isinstance(records, memoryview):
            result += records
        elif isinstance(records, _Slice):
            result += _renumbered(records, codec, following)
            following += records.columns.count
        elif renumber:
            records = [record._replace(offset=following + delta) for delta, record in enumerate(records)]
            following += len(records)
            result += batch_of(records, codec)
        else:
            _check_offsets(records)
            _check_order(records)
            result += batch_of(records, codec)
    return result


class _Slice(NamedTuple):
    """Records of a wrapper, whose offsets do not matter."""

    columns: RecordColumns
    has_append_time: bool


def _groups(data: Buffer, renumber: bool, limit: int) -> Iterator[tuple[Codec, Sequence[Record] | _Slice | memoryview]]:
    """(codec, records of a batch to build) or (codec, a batch to keep)."""
    waiting: list[Record] = []
    for header, batch in whole_batches(data):
        check_crc(header, batch)
        is_plain = not isinstance(header, BatchHeader) and not header.codec_id
        is_next = is_plain and len(waiting) < _SLICE_RECORDS
        if waiting and not (is_next and _fits(waiting, header) and (renumber or _follows(waiting, header))):
            yield NONE, waiting
            waiting = []
        if isinstance(header, BatchHeader):
            yield NONE, batch
        elif not header.codec_id:
            waiting += message_records(header, batch, limit)
        elif renumber:
            inner = memoryview(inner_set(header, batch, limit))
            limit -= len(inner)
            for found in _slices(header, inner):
                yield codec_by_id(header.codec_id), found
        else:
            yield codec_by_id(header.codec_id), list(message_records(header, batch, limit))
    if waiting:
        yield NONE, waiting


def _slices(header: MessageHeader, inner: memoryview) -> Iterator[_Slice]:
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
        yield _Slice(builder.finish(), header.append_time is not None)
        position += size


def _renumbered(records: _Slice, codec: Codec, base_offset: int) -> bytes:
    """Build a batch whose offsets count from `base_offset`."""
    body, count, base_timestamp, max_timestamp = kernels.load().encode(records.columns, 0, sys.maxsize)
    return build_batch(
        body,
        count,
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp,
        codec=codec,
        base_offset=base_offset,
        attributes=LOG_APPEND_TIME_BIT if records.has_append_time else 0,
    )


def _fits(records: Sequence[Record], header: Header) -> bool:
    """Whether one batch can hold both: it has one timestamp type, and with log append time one timestamp."""
    if (header.timestamp_type == LOG_APPEND_TIME) != (records[0].timestamp_type == LOG_APPEND_TIME):
        return False
    return header.timestamp_type != LOG_APPEND_TIME or header.max_timestamp == records[0].timestamp


def _follows(records: Sequence[Record], header: Header) -> bool:
    """Whether the next offset can be in the same batch: offsets rise, and are less than 2**31 apart."""
    return records[-1].offset <= header.last_offset <= records[0].offset + _MAX_OFFSET_DELTA


def _check_offsets(records: Sequence[Record]) -> None:
    """`DecodeError` unless all offsets are in [0, 2**63)."""
    lowest, highest = min(record.offset for record in records), max(record.offset for record in records)
    if lowest < 0 or highest > _MAX_OFFSET:
        raise DecodeError(f"records of offsets {lowest} to {highest} in a batch")


def _check_order(records: Sequence[Record]) -> None:
    """`DecodeError` unless one batch can hold these offsets."""
    offsets = [record.offset for record in records]
    if offsets != sorted(offsets) or offsets[-1] - offsets[0] > _MAX_OFFSET_DELTA:
        raise DecodeError(f"records of offsets {offsets[0]} to {offsets[-1]}: not in order, or too far apart")


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
