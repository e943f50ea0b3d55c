"""Record batch v2 (magic 2, Kafka 0.11 and later; KIP-98, KIP-82).

    base offset            INT64
    batch length           INT32    bytes after this field
    partition leader epoch INT32
    magic                  INT8     2
    crc                    UINT32   CRC-32C of all that follows
    attributes             INT16    bits 0-2 codec, 3 timestamp type (1: log append time), 4 transactional,
                                    5 control, 6 the base timestamp is a delete horizon
    last offset delta      INT32
    base timestamp         INT64    ms since the epoch
    max timestamp          INT64    ms; with log append time that of every record
    producer id            INT64    -1: none
    producer epoch         INT16
    base sequence          INT32
    record count           INT32
    records                compressed together if a codec is set

The CRC does not cover base offset, length and leader epoch, so that a broker can set them in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

from spark_klog.errors import CorruptBatchError, DecodeError
from spark_klog.wire.checksums import crc32c
from spark_klog.wire.codecs import MAX_DECOMPRESSED, NONE, Codec, codec_by_id
from spark_klog.wire.primitives import Buffer

_HEADER = Struct(">qiibIhiqqqhii")
#: Bytes before the records.
HEADER_SIZE = _HEADER.size
#: Bytes of base offset and length: what `length` does not count.
LOG_OVERHEAD = Struct(">qi").size
_CRC_POSITION, _CRC_START = Struct(">qiib").size, Struct(">qiibI").size
_MAX_TIMESTAMP_POSITION, _PRODUCER_POSITION = Struct(">qiibIhiq").size, Struct(">qiibIhiqq").size
_BASE_OFFSET = Struct(">q")
_LENGTH = Struct(">i")
_LEADER_EPOCH = Struct(">i")
_CRC = Struct(">I")
_ATTRIBUTES = Struct(">h")
_MAX_TIMESTAMP = Struct(">q")
#: Producer id, epoch and base sequence.
_PRODUCER = Struct(">qhi")
#: Bits of the attributes.
_CODEC_BITS = 0x07
LOG_APPEND_TIME_BIT, TRANSACTIONAL_BIT, CONTROL_BIT, DELETE_HORIZON_BIT = 0x08, 0x10, 0x20, 0x40


@dataclass(slots=True)  # not frozen: that takes three times as long, and each batch has one
class BatchHeader:
    """The fields before the records; the module's docstring has their meaning and units."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    count: int

    @property
    def size(self) -> int:
        """Bytes of the whole batch."""
        return self.length + LOG_OVERHEAD

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec_id(self) -> int:
        return self.attributes & 0x07

    @property
    def timestamp_type(self) -> int:
        return (self.attributes >> 3) & 1

    @property
    def append_time(self) -> int | None:
        """The log append time (ms) of all its records; None if each has its own time."""
        return self.max_timestamp if self.attributes & LOG_APPEND_TIME_BIT else None

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL_BIT)

    @property
    def delete_horizon(self) -> int | None:
        """Time (ms) until which compaction keeps the batch's tombstones or marker (KIP-534); None if not set."""
        return self.base_timestamp if self.attributes & DELETE_HORIZON_BIT else None


def read_batch_header(data: Buffer, position: int = 0) -> BatchHeader:
    """The header at `position`; `DecodeError` if it is cut off or impossible."""
    if len(data) - position < HEADER_SIZE:
        raise DecodeError(f"batch header at position {position} is cut off")
    header = BatchHeader(*_HEADER.unpack_from(data, position))
    if header.length < HEADER_SIZE - LOG_OVERHEAD:
        raise DecodeError(f"batch at position {position} has length {header.length}")
    if header.count < 0 or header.last_offset_delta < 0 or header.base_offset < 0:
        raise DecodeError(
            f"batch at position {position}: base offset {header.base_offset}, "
            f"last offset delta {header.last_offset_delta}, {header.count} records"
        )
    return header


def check_batch_crc(header: BatchHeader, batch: memoryview) -> None:
    """Raise `CorruptBatchError` unless the stored CRC-32C is that of the bytes."""
    actual = crc32c(batch[_CRC_START:])
    if actual != header.crc:
        raise CorruptBatchError(
            f"batch of offsets {header.base_offset}-{header.last_offset}: "
            f"CRC {header.crc:#010x} is stored, the bytes have {actual:#010x}"
        )


def body(header: BatchHeader, batch: memoryview, limit: int = MAX_DECOMPRESSED) -> Buffer:
    """The batch's records, decompressed; `DecodeError` if they are damaged or larger than `limit` bytes."""
    records = batch[HEADER_SIZE:]
    if header.codec_id == NONE.id:
        return records
    return codec_by_id(header.codec_id).decompress(records, limit)


def with_records(batch: memoryview, records: Buffer, codec: Codec, level: int | None = None) -> bytes:
    """The batch with its records, given here without compression, in another codec; all else of its header stays."""
    payload = codec.compress(records, level)
    head = bytearray(batch[:HEADER_SIZE])
    _LENGTH.pack_into(head, _BASE_OFFSET.size, HEADER_SIZE - LOG_OVERHEAD + len(payload))
    _ATTRIBUTES.pack_into(head, _CRC_START, _ATTRIBUTES.unpack_from(head, _CRC_START)[0] & ~_CODEC_BITS | codec.id)
    _CRC.pack_into(head, _CRC_POSITION, crc32c(payload, crc32c(head[_CRC_START:])))
    return b"".join((head, payload))


def set_base_offset(batch: memoryview, base_offset: int, leader_epoch: int) -> None:
    """Assign offset and leader epoch in place; the CRC does not cover them. `batch` must be writable."""
    _BASE_OFFSET.pack_into(batch, 0, base_offset)
    _LEADER_EPOCH.pack_into(batch, LOG_OVERHEAD, leader_epoch)


def set_append_time(batch: memoryview, timestamp: int) -> None:
    """Give every record this log append time (ms), in place, and renew the CRC."""
    _ATTRIBUTES.pack_into(batch, _CRC_START, _ATTRIBUTES.unpack_from(batch, _CRC_START)[0] | LOG_APPEND_TIME_BIT)
    _MAX_TIMESTAMP.pack_into(batch, _MAX_TIMESTAMP_POSITION, timestamp)
    _CRC.pack_into(batch, _CRC_POSITION, crc32c(batch[_CRC_START:]))


def set_producer(batch: memoryview, producer_id: int, epoch: int, base_sequence: int) -> None:
    """Set the producer's id, epoch and base sequence, in place, and renew the CRC."""
    _PRODUCER.pack_into(batch, _PRODUCER_POSITION, producer_id, epoch, base_sequence)
    _CRC.pack_into(batch, _CRC_POSITION, crc32c(batch[_CRC_START:]))


def set_produced(
    batch: memoryview, producer_id: int, epoch: int, base_sequence: int, *, is_transactional: bool
) -> None:
    """Turn a batch of a log into one that a producer may send, in place; the records stay as they are.

    Clears what only a log sets (base offset, leader epoch, delete horizon), sets the producer's fields and the
    transactional bit, and renews the CRC. Timestamps stay: records count from the base timestamp in any case.
    """
    set_base_offset(batch, 0, -1)
    attributes: int = _ATTRIBUTES.unpack_from(batch, _CRC_START)[0] & ~(TRANSACTIONAL_BIT | DELETE_HORIZON_BIT)
    _ATTRIBUTES.pack_into(batch, _CRC_START, attributes | (TRANSACTIONAL_BIT if is_transactional else 0))
    set_producer(batch, producer_id, epoch, base_sequence)


def build_batch(
    records: Buffer,
    count: int,
    *,
    base_timestamp: int,
    max_timestamp: int,
    codec: Codec = NONE,
    level: int | None = None,
    base_offset: int = 0,
    last_offset_delta: int | None = None,
    attributes: int = 0,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    leader_epoch: int = -1,
) -> bytes:
    """Build a batch of `count` encoded records; `attributes` without the codec's bits, timestamps in ms."""
    payload = codec.compress(records, level)
    head = bytearray(HEADER_SIZE)
    _HEADER.pack_into(
        head,
        0,
        base_offset,
        HEADER_SIZE - LOG_OVERHEAD + len(payload),
        leader_epoch,
        2,
        0,
        attributes | codec.id,
        count - 1 if last_offset_delta is None else last_offset_delta,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        count,
    )
    _CRC.pack_into(head, _CRC_POSITION, crc32c(payload, crc32c(head[_CRC_START:])))
    return b"".join((head, payload))  # the only copy of the records
