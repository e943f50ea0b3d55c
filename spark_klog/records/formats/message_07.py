"""Messages and logs of Kafka 0.7: messages one after the other, each preceded by its length.

    length      INT32    bytes after this field
    magic       INT8     0 or 1
    attributes  INT8     magic 1 only: bits 0-1 codec (0 none, 1 gzip, 2 snappy)
    crc         UINT32   CRC-32 of the payload
    payload              the rest

A message's offset is the position of its length field in the stream of all messages ever written to the partition; a
file is named after the offset of its first byte. With a codec the payload is a compressed set of such messages, which
share the offset of the message that holds them. Sets may be nested, as in 0.7.

Source: 0.7 design chapter, "Message format" and "Log".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct

from spark_klog.errors import CorruptBatchError, DecodeError
from spark_klog.records.contract import NO_TIMESTAMP, NO_TIMESTAMP_TYPE, Record
from spark_klog.wire.checksums import crc32
from spark_klog.wire.codecs import GZIP, MAX_DECOMPRESSED, NO_CODEC, SNAPPY, codec_by_id
from spark_klog.wire.primitives import Buffer

_LENGTH = Struct(">i")
_MAGIC_0 = Struct(">bI")
_MAGIC_1 = Struct(">bbI")
_CODEC_MASK = 0x03
_CODEC_IDS = (NO_CODEC, GZIP, SNAPPY)
_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Message07:
    """A message's fields (see the module), the `offset` of its length field, and the offset after it."""

    offset: int
    next_offset: int
    magic: int
    attributes: int
    crc: int
    payload: memoryview

    is_control = False

    @property
    def codec_id(self) -> int:
        return self.attributes & _CODEC_MASK


def iter_messages_07(data: Buffer, base_offset: int = 0) -> Iterator[Message07]:
    """The messages of a file or fetch that begins at `base_offset`, compressed ones as they are.

    Leaves out a partial message at the end. `DecodeError`, naming the offset, for an impossible message; CRCs are not
    checked.
    """
    view = memoryview(data)
    position = 0
    while len(view) - position > _LENGTH.size:
        length: int = _LENGTH.unpack_from(view, position)[0]
        start = position + _LENGTH.size
        magic = view[start]
        offset = base_offset + position
        if magic not in (0, 1):
            raise DecodeError(f"no message at offset {offset}: unknown magic {magic}, length {length}")
        head = _MAGIC_1 if magic else _MAGIC_0
        if length < head.size:
            raise DecodeError(f"no message at offset {offset}: length {length}")
        position = start + length
        if position > len(view):
            return
        fields = head.unpack_from(view, start)
        payload = view[start + head.size : position]
        yield Message07(offset, base_offset + position, magic, fields[1] if magic else 0, fields[-1], payload)


def check_crc_07(message: Message07) -> None:
    """Raise `CorruptBatchError` unless the stored CRC-32 is that of the payload."""
    actual = crc32(message.payload)
    if actual != message.crc:
        raise CorruptBatchError(
            f"message of offset {message.offset}: CRC {message.crc:#010x} is stored, the payload has {actual:#010x}"
        )


def records_07(message: Message07, limit: int = MAX_DECOMPRESSED) -> Iterator[Record]:
    """The record of a message, or the records of a compressed one, all with its offset; no key, no timestamp.

    `CorruptBatchError` for a wrong CRC, `DecodeError` if a compressed payload is not a set of messages, or its sets
    are larger than `limit` bytes together.
    """
    stack = [iter((message,))]
    while stack:
        nested = next(stack[-1], None)
        if nested is None:
            stack.pop()
            continue
        check_crc_07(nested)
        if not nested.codec_id:
            yield Record(message.offset, NO_TIMESTAMP, NO_TIMESTAMP_TYPE, None, bytes(nested.payload), ())
            continue
        if nested.codec_id not in _CODEC_IDS:
            raise DecodeError(f"message of offset {message.offset}: unknown compression codec {nested.codec_id}")
        if len(stack) > _MAX_DEPTH:
            raise DecodeError(f"message of offset {message.offset}: sets are nested more than {_MAX_DEPTH} deep")
        inner = codec_by_id(nested.codec_id).decompress(nested.payload, limit)
        limit -= len(inner)
        stack.append(_whole_set(inner, message.offset))


def _whole_set(data: Buffer, offset: int) -> Iterator[Message07]:
    end = 0
    for message in iter_messages_07(data):
        yield message
        end = message.next_offset
    if end != len(data):
        raise DecodeError(f"message of offset {offset}: its compressed set is cut off")
