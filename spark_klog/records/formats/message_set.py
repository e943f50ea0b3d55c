"""Message sets of magic 0 (Kafka 0.8 and 0.9) and 1 (0.10; KIP-31, KIP-32): messages one after the other.

    offset      INT64
    size        INT32    bytes after this field
    crc         UINT32   CRC-32 of all that follows
    magic       INT8     0 or 1
    attributes  INT8     bits 0-2 codec, 3 timestamp type (magic 1; 1: log append time)
    timestamp   INT64    magic 1 only: ms since the epoch, -1: none
    key         BYTES
    value       BYTES

A message with a codec is a wrapper: its value is a compressed message set of the same magic, whose messages have no
codec. The wrapper's offset is that of its last message. Inside a wrapper of magic 0 offsets are absolute; in magic 1
they are relative, so that a broker only sets the wrapper's offset. A wrapper of magic 1 has the largest timestamp of
its messages; with log append time all of them have its timestamp.

Source: protocol guide, "Message sets" and "Compression".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct

from spark_klog.errors import ConfigError, CorruptBatchError, DecodeError
from spark_klog.records.contract import CREATE_TIME, LOG_APPEND_TIME, NO_TIMESTAMP, NO_TIMESTAMP_TYPE, Record
from spark_klog.records.formats.batch_v2 import LOG_APPEND_TIME_BIT
from spark_klog.wire.checksums import crc32
from spark_klog.wire.codecs import GZIP, LZ4, MAX_DECOMPRESSED, NO_CODEC, NONE, SNAPPY, Codec, codec_by_id
from spark_klog.wire.lz4_frames import with_old_lz4_header
from spark_klog.wire.primitives import Buffer

_PREFIX = Struct(">qi")
_MAGIC_0 = Struct(">Ibb")
_MAGIC_1 = Struct(">Ibbq")
_CRC = Struct(">I")
_OFFSET = Struct(">q")
_INT32 = Struct(">i")
_CRC_POSITION = _PREFIX.size
_CRC_START = _PREFIX.size + _CRC.size
_HEADER_SIZE = (_PREFIX.size + _MAGIC_0.size, _PREFIX.size + _MAGIC_1.size)
#: By magic: the smallest value of `size`, that of a message with null key and value.
MIN_LENGTH = (_MAGIC_0.size + 2 * _INT32.size, _MAGIC_1.size + 2 * _INT32.size)
_CODEC_MASK = 0x07
_CODEC_IDS = (NO_CODEC, GZIP, SNAPPY, LZ4)


@dataclass(slots=True)  # not frozen, as `BatchHeader`
class MessageHeader:
    """The fields before key and value; the module's docstring has their meaning and units.

    Has the properties of `BatchHeader` that all magics share: a message counts as a batch.
    """

    offset: int
    length: int
    crc: int
    magic: int
    attributes: int
    timestamp: int

    is_control = False
    is_transactional = False
    producer_id = -1

    @property
    def size(self) -> int:
        """Bytes of the whole message."""
        return self.length + _PREFIX.size

    @property
    def base_offset(self) -> int:
        """The message's offset; 0 for a wrapper, whose first offset only its content tells."""
        return 0 if self.codec_id else self.offset

    @property
    def last_offset(self) -> int:
        return self.offset

    @property
    def next_offset(self) -> int:
        return self.offset + 1

    @property
    def codec_id(self) -> int:
        return self.attributes & _CODEC_MASK

    @property
    def timestamp_type(self) -> int:
        return (self.attributes & LOG_APPEND_TIME_BIT) >> 3 if self.magic else NO_TIMESTAMP_TYPE

    @property
    def append_time(self) -> int | None:
        """The log append time (ms) of all its messages; None if each has its own time."""
        return self.timestamp if self.timestamp_type == LOG_APPEND_TIME else None

    @property
    def max_timestamp(self) -> int:
        return self.timestamp


def read_message_header(data: Buffer, position: int = 0) -> MessageHeader:
    """The header at `position`; `DecodeError` if it is cut off, too short, or not of magic 0 or 1."""
    if len(data) - position < _HEADER_SIZE[0]:
        raise DecodeError(f"message header at position {position} is cut off")
    offset, length = _PREFIX.unpack_from(data, position)
    crc, magic, attributes = _MAGIC_0.unpack_from(data, position + _CRC_POSITION)
    if magic not in (0, 1):
        raise DecodeError(f"message of magic {magic} at position {position}, expected magic 0 or 1")
    if length < MIN_LENGTH[magic]:
        raise DecodeError(f"message of magic {magic} at position {position} has length {length}")
    timestamp = NO_TIMESTAMP
    if magic:
        if len(data) - position < _HEADER_SIZE[1]:
            raise DecodeError(f"message header at position {position} is cut off")
        timestamp = _MAGIC_1.unpack_from(data, position + _CRC_POSITION)[3]
    return MessageHeader(offset, length, crc, magic, attributes, timestamp)


def check_message_crc(header: MessageHeader, message: memoryview) -> None:
    """Raise `CorruptBatchError` unless the stored CRC-32 is that of the bytes."""
    actual = crc32(message[_CRC_START:])
    if actual != header.crc:
        raise CorruptBatchError(
            f"message of offset {header.offset}: CRC {header.crc:#010x} is stored, the bytes have {actual:#010x}"
        )


def iter_messages(data: Buffer) -> Iterator[tuple[MessageHeader, memoryview]]:
    """(header, bytes) of each message of a whole set, wrappers as they are; `DecodeError` if the last is cut off."""
    view = memoryview(data)
    position = 0
    while position < len(view):
        header = read_message_header(view, position)
        if header.size > len(view) - position:
            raise DecodeError(
                f"message at position {position} has {header.size} bytes, {len(view) - position} are left"
            )
        yield header, view[position : position + header.size]
        position += header.size


def key_and_value(header: MessageHeader, message: memoryview) -> tuple[memoryview | None, memoryview | None]:
    """Views of key and value; `DecodeError` if they do not fill the rest of the message exactly."""
    position = _HEADER_SIZE[header.magic]
    fields: list[memoryview | None] = []
    for _ in range(2):
        if len(message) - position < _INT32.size:
            raise DecodeError(f"message of offset {header.offset} is cut off")
        size: int = _INT32.unpack_from(message, position)[0]
        position += _INT32.size
        if size < -1 or size > len(message) - position:
            raise DecodeError(
                f"message of offset {header.offset}: field of {size} bytes, {len(message) - position} are left"
            )
        fields.append(None if size == -1 else message[position : position + size])
        position += max(size, 0)
    if position != len(message):
        raise DecodeError(f"message of offset {header.offset}: {len(message) - position} bytes left over")
    return fields[0], fields[1]


def inner_set(header: MessageHeader, message: memoryview, limit: int = MAX_DECOMPRESSED) -> Buffer:
    """The decompressed message set of a wrapper; `DecodeError` if it is empty, damaged or larger than `limit` bytes."""
    _, value = key_and_value(header, message)
    if header.codec_id not in _CODEC_IDS:
        raise DecodeError(f"message of offset {header.offset}: unknown compression codec {header.codec_id}")
    if value is None:
        raise DecodeError(f"compressed message of offset {header.offset} has no value")
    inner = codec_by_id(header.codec_id).decompress(value, limit)
    if not len(inner):
        raise DecodeError(f"compressed message of offset {header.offset} holds no messages")
    return inner


def message_records(header: MessageHeader, message: memoryview, limit: int = MAX_DECOMPRESSED) -> Iterator[Record]:
    """The record of a message, or the records of a wrapper, whose CRC was checked; errors as in `plain_records`."""
    if header.codec_id:
        last_offset = header.offset if header.magic else None
        return plain_records(inner_set(header, message, limit), header.magic, last_offset, header.append_time)
    return plain_records(message, header.magic, None, None)


def plain_records(messages: Buffer, magic: int, last_offset: int | None, append_time: int | None) -> Iterator[Record]:
    """The records of an uncompressed message set; parameters as in `ColumnBuilder.append_messages`.

    `CorruptBatchError` for a wrong CRC, `DecodeError` for an invalid message, one of another magic, or a wrapper:
    Kafka rejects nested wrappers, too.
    """
    contents = list(iter_messages(messages))
    shift = 0 if last_offset is None or not contents else last_offset - contents[-1][0].offset
    is_inner = magic and last_offset is not None
    kind_of_all = LOG_APPEND_TIME if append_time is not None else CREATE_TIME if is_inner else None
    for header, content in contents:
        check_message_crc(header, content)
        if header.magic != magic:
            raise DecodeError(f"message of magic {header.magic} among messages of magic {magic}")
        if header.codec_id:
            raise DecodeError(f"compressed message of offset {header.offset} inside a compressed message")
        key, value = key_and_value(header, content)
        yield Record(
            header.offset + shift,
            header.timestamp if append_time is None else append_time,
            header.timestamp_type if kind_of_all is None else kind_of_all,
            None if key is None else bytes(key),
            None if value is None else bytes(value),
            (),
        )


def set_message_offset(message: memoryview, offset: int) -> None:
    """Set the offset in place; the CRC does not cover it. `message` must be writable."""
    _OFFSET.pack_into(message, 0, offset)


def set_message_append_time(message: memoryview, timestamp: int) -> None:
    """Give a message or wrapper of magic 1 this log append time (ms), in place, and renew the CRC."""
    crc, magic, attributes, _ = _MAGIC_1.unpack_from(message, _CRC_POSITION)
    _MAGIC_1.pack_into(message, _CRC_POSITION, crc, magic, attributes | LOG_APPEND_TIME_BIT, timestamp)
    _CRC.pack_into(message, _CRC_POSITION, crc32(message[_CRC_START:]))


def build_message(
    magic: int, offset: int, timestamp: int, key: Buffer | None, value: Buffer | None, attributes: int = 0
) -> bytes:
    """Build one message; magic 0 has no `timestamp` (ms)."""
    content = bytearray(_MAGIC_1.size if magic else _MAGIC_0.size)
    if magic:
        _MAGIC_1.pack_into(content, 0, 0, magic, attributes, timestamp)
    else:
        _MAGIC_0.pack_into(content, 0, 0, magic, attributes)
    for field in (key, value):
        content += _INT32.pack(-1 if field is None else len(field))
        content += field or b""
    _CRC.pack_into(content, 0, crc32(memoryview(content)[_CRC.size :]))
    return _PREFIX.pack(offset, len(content)) + content


def build_message_set(records: Sequence[Record], magic: int, codec: Codec = NONE, level: int | None = None) -> bytes:
    """Build a message set of the records, at least one: a message each, with a codec all in one wrapper.

    Headers are dropped. With log append time the first record's timestamp is used for all. `ConfigError` for zstd,
    which magic 0 and 1 do not have.
    """
    if codec.id not in _CODEC_IDS:
        raise ConfigError(f"messages of magic {magic} can't be compressed by {codec.name}")
    kind = LOG_APPEND_TIME_BIT if magic and records[0].timestamp_type == LOG_APPEND_TIME else 0
    is_wrapped = codec is not NONE
    shift = records[0].offset if is_wrapped and magic else 0
    messages = b"".join(
        build_message(
            magic,
            record.offset - shift,
            record.timestamp,
            record.key,
            record.value,
            0 if is_wrapped else kind,
        )
        for record in records
    )
    if not is_wrapped:
        return messages
    timestamp = records[0].timestamp if kind else max(record.timestamp for record in records)
    return build_wrapper(messages, magic, codec, records[-1].offset, timestamp, attributes=kind, level=level)


def build_wrapper(
    messages: Buffer,
    magic: int,
    codec: Codec,
    last_offset: int,
    timestamp: int,
    *,
    attributes: int = 0,
    level: int | None = None,
) -> bytes:
    """Build the message that holds a compressed message set; `attributes` without the codec's bits."""
    value = codec.compress(messages, level)
    if codec.id == LZ4 and magic == 0:
        value = with_old_lz4_header(value)
    return build_message(magic, last_offset, timestamp, None, value, codec.id | attributes)
