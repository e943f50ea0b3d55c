"""Validation of produced batches, in addition to what a log checks of all batches.

Kafka's LogValidator decompresses every batch. This checks only the header of a compressed batch, and that its bytes
can decompress to as many records as it claims: a false count moves the log's offsets by a bounded step, and readers
find the batch corrupt. The kernel checks the records of uncompressed batches.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from itertools import islice, pairwise
from typing import NamedTuple

from spark_klog.errors import DecodeError
from spark_klog.records import kernels
from spark_klog.records.contract import NO_TIMESTAMP, BinaryColumn, HeadersColumn, Kernel
from spark_klog.records.formats.batch import check_crc, iter_batches, magic_of, whole_batch_size
from spark_klog.records.formats.batch_v2 import CONTROL_BIT, HEADER_SIZE, BatchHeader, body, read_batch_header
from spark_klog.wire.codecs import GZIP, LZ4, MAX_DECOMPRESSED, NO_CODEC, SNAPPY, codec_by_id
from spark_klog.wire.lz4_frames import has_linked_blocks
from spark_klog.wire.primitives import Buffer

#: Rejected records that are named: each takes some 70 bytes of the response.
MOST_INDEXES = 1000
_MAGIC = 2
#: Bytes of the smallest record: length, attributes, four varints of a byte, no headers.
_SMALLEST_RECORD = 7
#: Bytes that one byte can decompress to at most, by codec. zstd has no such bound, only `limit`.
_MOST_EXPANDED = {NO_CODEC: 1, GZIP: 1032, SNAPPY: 22, LZ4: 256}
_MAX_OFFSET = (1 << 63) - 1
#: Bytes of a schema's id and of its GUID, each after a byte that tells which of them it is.
_ID_SIZE, _GUID_SIZE, _OF_GUID = 5, 17, b"\1"
_OFFSETS, _KEYS = frozenset({"offset"}), frozenset({"key"})
_FEW_OFFSETS = memoryview(array("q", range(1 << 14))).cast("B")


class RejectedRecords(DecodeError):
    """Records that a topic does not take; `reasons` of at most `MOST_INDEXES`, by their numbers in the batch."""

    def __init__(self, text: str, reasons: Mapping[int, str]) -> None:
        super().__init__(text)
        self.reasons = reasons


class Produced(NamedTuple):
    """Valid batches: their largest timestamp (ms), and whether any is part of a transaction."""

    timestamp: int
    is_transactional: bool


def check_produced(data: Buffer, kernel: Kernel, *, is_one: bool = False, limit: int = MAX_DECOMPRESSED) -> Produced:
    """Validate produced batches.

    `DecodeError` for

    - a magic other than 2;
    - a control batch: only brokers write them;
    - a count, last offset delta and size that do not agree, or uncompressed records that do not match the count or
      whose offset deltas are not 0, 1, 2 and so on;
    - a codec that is unknown, which would end each reader's way through the log;
    - a negative timestamp other than -1 (none);
    - an lz4 frame with linked blocks: Java clients can't read it, Apache Kafka rejects it;
    - more than one batch, if `is_one` (Produce 3 and later).

    `CorruptBatchError` if the CRC of a rejected batch is wrong. The log itself rejects anything but whole batches.
    """
    plain = kernel.plain_produced(data, limit)
    if plain is not None:
        return Produced(plain, False)
    view, position, timestamp, is_transactional = memoryview(data), 0, NO_TIMESTAMP, False
    while (magic := magic_of(view, position)) is not None:
        if magic != _MAGIC:
            raise DecodeError(f"a batch of magic {magic}, where only {_MAGIC} is taken")
        size = whole_batch_size(view, position)
        if size is None:
            break
        header, batch = read_batch_header(view, position), view[position : position + size]
        try:
            _check_batch(header, batch, kernel, limit)
        except DecodeError:
            check_crc(header, batch)
            raise
        timestamp = max(timestamp, header.max_timestamp)
        is_transactional = is_transactional or header.is_transactional
        position += size
        if is_one and position < len(view):
            raise DecodeError("more than one record batch for a partition in a request")
    return Produced(timestamp, is_transactional)


def _check_batch(header: BatchHeader, batch: memoryview, kernel: Kernel, limit: int) -> None:
    if header.attributes & CONTROL_BIT:
        raise DecodeError("a control batch, which only brokers write")
    if header.count < 1 or header.count != header.last_offset_delta + 1:
        raise DecodeError(f"a batch of {header.count} records has last offset delta {header.last_offset_delta}")
    codec_by_id(header.codec_id)
    payload = len(batch) - HEADER_SIZE
    if header.count > min(limit, payload * _MOST_EXPANDED.get(header.codec_id, limit)) // _SMALLEST_RECORD:
        raise DecodeError(f"a batch of {header.count} records has {payload} bytes, which can't hold them")
    if header.base_timestamp < NO_TIMESTAMP or header.max_timestamp < NO_TIMESTAMP:
        raise DecodeError(f"a batch has base timestamp {header.base_timestamp}, max timestamp {header.max_timestamp}")
    if header.codec_id == LZ4 and has_linked_blocks(batch[HEADER_SIZE:]):
        raise DecodeError("an lz4 frame whose blocks depend on each other: write independent ones")
    if header.codec_id == NO_CODEC:
        check_records(header, batch[HEADER_SIZE:], kernel)


def check_records(header: BatchHeader, records: Buffer, kernel: Kernel) -> None:
    """`DecodeError` unless a batch has `count` records, here uncompressed, with the offset deltas 0, 1, 2 and so on."""
    builder = kernel.builder(_OFFSETS)
    builder.append(records, header.count, 0, header.base_timestamp, None, 0, _MAX_OFFSET)
    offsets = builder.finish().offset
    assert offsets is not None
    size = 8 * header.count
    expected = _FEW_OFFSETS if size <= len(_FEW_OFFSETS) else memoryview(array("q", range(header.count))).cast("B")
    if memoryview(offsets).cast("B") != expected[:size]:
        raise DecodeError(f"the records of a batch of {header.count} do not have the offset deltas 0, 1, 2 and so on")


def check_keys(data: Buffer, limit: int = MAX_DECOMPRESSED) -> None:
    """`RejectedRecords` for records without a key, which a compacted topic can't have; `CorruptBatchError`.

    Decompresses each batch to at most `limit` bytes.
    """
    builder = kernels.load().builder(_KEYS)
    for header, batch in iter_batches(data):
        assert isinstance(header, BatchHeader)
        check_crc(header, batch)
        builder.append(body(header, batch, limit), header.count, 0, header.base_timestamp, None, 0, _MAX_OFFSET)
        keys = builder.finish().key
        assert keys is not None
        if keys.null_count:
            assert keys.validity is not None
            valid = memoryview(keys.validity).cast("B")
            missing = (index for index in range(header.count) if not valid[index >> 3] >> (index & 7) & 1)
            count = f"{keys.null_count} of {header.count} records of a batch"
            text = f"{count} have no key, which those of a compacted topic must have"
            reason = "no key, which records of a compacted topic must have"
            raise RejectedRecords(text, dict.fromkeys(islice(missing, MOST_INDEXES), reason))


def schema_ids(
    data: Buffer, columns: Iterable[str], limit: int = MAX_DECOMPRESSED
) -> dict[str, dict[bytes | None, list[int]]]:
    """What names the schemas of records, by column, "key" or "value"; `CorruptBatchError`.

    Each with the numbers of the first `MOST_INDEXES` records that it names.
    It is INT8 0 and an INT32, or INT8 1 and a GUID; less, or other bytes, of a record that names none; None of a null,
    which needs no schema. The last header `__value_schema_id` (or of the key) counts, if its value is not null; without
    one, what the value begins with. Decompresses each batch to at most `limit` bytes.
    """
    named: dict[str, dict[bytes | None, list[int]]] = {column: {} for column in columns}
    first = 0
    builder = kernels.load().builder(frozenset({*named, "headers"}))
    for header, batch in iter_batches(data):
        assert isinstance(header, BatchHeader)
        check_crc(header, batch)
        builder.append(body(header, batch, limit), header.count, 0, header.base_timestamp, None, 0, _MAX_OFFSET)
        records = builder.finish()
        assert records.headers is not None
        for column, ids in named.items():
            values = records.key if column == "key" else records.value
            assert values is not None
            for index, schema in enumerate(_schema_ids(values, records.headers, f"__{column}_schema_id", header.count)):
                if (indexes := ids.get(schema)) is None:
                    ids[schema] = [first + index]
                elif len(indexes) < MOST_INDEXES:
                    indexes.append(first + index)
        first += header.count
    return named


def _schema_ids(values: BinaryColumn, headers: HeadersColumn, name: str, count: int) -> list[bytes | None]:
    ends, data = memoryview(values.offsets).cast("B").cast("i").tolist(), bytes(values.data)
    ids: list[bytes | None] = [data[start : min(end, start + _ID_SIZE)] for start, end in pairwise(ends)]
    if any(head[:1] == _OF_GUID for head in set(ids) if head):
        ids = [
            data[start : min(end, start + _GUID_SIZE)] if head and head[:1] == _OF_GUID else head
            for head, (start, end) in zip(ids, pairwise(ends), strict=True)
        ]
    if headers.total and name.encode() in bytes(headers.keys.data):
        for index, row in enumerate(headers.rows(0, count)):
            for given, value in row:
                if given == name and value is not None:
                    ids[index] = value[: _GUID_SIZE if value[:1] == _OF_GUID else _ID_SIZE]
    if values.null_count:
        assert values.validity is not None
        valid = memoryview(values.validity).cast("B")
        ids = [head if valid[row >> 3] >> (row & 7) & 1 else None for row, head in enumerate(ids)]
    return ids
