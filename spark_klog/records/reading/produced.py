"""Validation of produced batches, in addition to what a log checks of all batches.

Kafka's LogValidator decompresses every batch. This checks only the header of a compressed batch, and that its bytes
can decompress to as many records as it claims: a false count moves the log's offsets by a bounded step, and readers
find the batch corrupt. The kernel checks the records of uncompressed batches.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from spark_klog.errors import DecodeError
from spark_klog.records import kernels
from spark_klog.records.contract import NO_TIMESTAMP, Kernel
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
_OFFSETS, _KEYS = frozenset({"offset"}), frozenset({"key"})
_FEW_OFFSETS = memoryview(array("q", range(1 << 14))).cast("B")


class RejectedRecords(DecodeError):
    """Records that a topic does not take; `indexes` are their numbers in the batch, at most `MOST_INDEXES`."""

    def __init__(self, text: str, reason: str, indexes: Sequence[int]) -> None:
        super().__init__(text)
        self.reason, self.indexes = reason, indexes


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
            raise RejectedRecords(text, "no key, which records of a compacted topic must have", _first(missing))


def _first(indexes: Iterable[int]) -> list[int]:
    return list(islice(indexes, MOST_INDEXES))
