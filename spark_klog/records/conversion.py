"""Conversion between magics: down for fetchers, up for producers and logs of an older format.

A codec stays what it is. What an older magic can't hold is dropped and counted: headers (magic 2 only), timestamps
(magic 1 and 2), and control batches, which no consumer is to see. Offsets stay as they are; so do holes between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from spark_klog.errors import DecodeError, ErrorCode, ProtocolError
from spark_klog.records.batch import Header, check_crc, iter_batches, whole_batches
from spark_klog.records.batch_v2 import BatchHeader, build_batch
from spark_klog.records.contract import LOG_APPEND_TIME, NO_TIMESTAMP, Record
from spark_klog.records.message_set import build_message_set, message_records
from spark_klog.records.reader import records_of
from spark_klog.records.reference import append_record
from spark_klog.wire.codecs import MAX_DECOMPRESSED, NONE, Codec, codec_by_id
from spark_klog.wire.primitives import Buffer

_ZSTD = 4
_TIMESTAMP_TYPE_BIT = 0x08
_MAX_OFFSET = (1 << 63) - 1
_MAX_OFFSET_DELTA = (1 << 31) - 1


@dataclass
class Converted:
    """The batches in the other magic, and how many records, headers and timestamps did not make it."""

    data: bytearray = field(default_factory=bytearray)
    records: int = 0
    lost_headers: int = 0
    lost_timestamps: int = 0


def down_convert(data: Buffer, magic: int, first_offset: int = 0, limit: int = MAX_DECOMPRESSED) -> Converted:
    """Whole batches as a message set of `magic` (0 or 1); batches of that magic or an older one stay as they are.

    Records before `first_offset` are left out where they are not compressed, as Kafka does. `CorruptBatchError`,
    `DecodeError`; `ProtocolError` (UNSUPPORTED_COMPRESSION_TYPE) for zstd, which older magics do not have.
    """
    result = Converted()
    for header, batch in iter_batches(data):
        check_crc(header, batch)
        if header.magic <= magic:
            result.data += batch
            continue
        if header.is_control:
            continue
        if header.codec_id == _ZSTD:
            raise ProtocolError(
                ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"batch of offset {header.base_offset} as magic {magic}: zstd"
            )
        records = list(records_of(header, batch, limit))
        if not header.codec_id:
            records = [record for record in records if record.offset >= first_offset]
        if not records:
            continue
        _check_offsets(records)
        result.data += build_message_set(records, magic, codec_by_id(header.codec_id))
        result.records += len(records)
        result.lost_headers += sum(len(record.headers) for record in records)
        if magic == 0:
            result.lost_timestamps += sum(record.timestamp != NO_TIMESTAMP for record in records)
    return result


def up_convert(data: Buffer, *, renumber: bool = False, limit: int = MAX_DECOMPRESSED) -> bytearray:
    """Whole batches as batches of magic 2: a wrapper becomes one, and so do uncompressed messages in a row.

    With `renumber` offsets count from 0 on: those of a producer may be anything. Batches of magic 2 stay as they are.
    `CorruptBatchError`, `DecodeError`.
    """
    result = bytearray()
    following = 0
    for codec, records in _groups(data, renumber, limit):
        if isinstance(records, memoryview):
            result += records
            continue
        if renumber:
            records = [record._replace(offset=following + delta) for delta, record in enumerate(records)]
            following += len(records)
        else:
            _check_offsets(records)
            _check_order(records)
        result += batch_of(records, codec)
    return result


def _groups(data: Buffer, renumber: bool, limit: int) -> Iterator[tuple[Codec, Sequence[Record] | memoryview]]:
    """(codec, the records of a batch to make) or (codec, a batch to keep)."""
    waiting: list[Record] = []
    for header, batch in whole_batches(data):
        check_crc(header, batch)
        is_plain = not isinstance(header, BatchHeader) and not header.codec_id
        if waiting and not (is_plain and _fits(waiting, header) and (renumber or _follows(waiting, header))):
            yield NONE, waiting
            waiting = []
        if isinstance(header, BatchHeader):
            yield NONE, batch
        elif header.codec_id:
            yield codec_by_id(header.codec_id), list(message_records(header, batch, limit))
        else:
            waiting += message_records(header, batch, limit)
    if waiting:
        yield NONE, waiting


def _fits(records: Sequence[Record], header: Header) -> bool:
    """A batch has one type of timestamps; with log append time it has one timestamp, too."""
    if (header.timestamp_type == LOG_APPEND_TIME) != (records[0].timestamp_type == LOG_APPEND_TIME):
        return False
    return header.timestamp_type != LOG_APPEND_TIME or header.max_timestamp == records[0].timestamp


def _follows(records: Sequence[Record], header: Header) -> bool:
    """A batch's offsets rise, and are less than 2**31 apart."""
    return records[-1].offset <= header.last_offset <= records[0].offset + _MAX_OFFSET_DELTA


def _check_offsets(records: Sequence[Record]) -> None:
    """`DecodeError` unless all are offsets that there can be."""
    lowest, highest = min(record.offset for record in records), max(record.offset for record in records)
    if lowest < 0 or highest > _MAX_OFFSET:
        raise DecodeError(f"records of offsets {lowest} to {highest} in a batch")


def _check_order(records: Sequence[Record]) -> None:
    """`DecodeError` unless one batch can hold these offsets."""
    offsets = [record.offset for record in records]
    if offsets != sorted(offsets) or offsets[-1] - offsets[0] > _MAX_OFFSET_DELTA:
        raise DecodeError(f"records of offsets {offsets[0]} to {offsets[-1]}: not in order, or too far apart")


def batch_of(records: Sequence[Record], codec: Codec = NONE, level: int | None = None) -> bytes:
    """A batch of magic 2 of the records, at least one, by offset; headers, timestamps and their type as they are."""
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
        attributes=_TIMESTAMP_TYPE_BIT if records[0].timestamp_type == LOG_APPEND_TIME else 0,
    )
