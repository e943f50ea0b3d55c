"""Which message of a schema's file a record is, as Confluent's serializers write it after the schema's id.

The count of the indexes and the indexes, from the outermost message to the record's, are zigzag varints; the single
byte 0 stands for the first message of the file.
"""

from __future__ import annotations

from spark_klog.errors import SchemaError

#: Messages that are nested in one another, at most.
MOST_INDEXES = 64
_LARGEST = 5  # bytes of a number
#: Bytes of their count and all of them, at most.
LONGEST = (1 + MOST_INDEXES) * _LARGEST


def read_indexes(data: bytes, at: int = 0) -> tuple[tuple[int, ...], int]:
    """The indexes that begin at a byte, and the byte after them. `SchemaError` if they are cut off or too many."""
    count, at = _read_number(data, at)
    if count == 0:
        return (0,), at
    if not 0 < count <= MOST_INDEXES:
        raise SchemaError(f"{count} message indexes: the record is no Protobuf of a schema registry, or is damaged")
    indexes = []
    for _ in range(count):
        index, at = _read_number(data, at)
        if index < 0:
            raise SchemaError(f"{index} is no message index")
        indexes.append(index)
    return tuple(indexes), at


def write_indexes(indexes: tuple[int, ...]) -> bytes:
    if indexes == (0,):
        return b"\0"
    return b"".join(map(_number, (len(indexes), *indexes)))


def _read_number(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for size in range(_LARGEST):
        if at + size >= len(data):
            raise SchemaError("the message indexes are cut off")
        byte = data[at + size]
        value |= (byte & 0x7F) << 7 * size
        if byte < 0x80:
            return value >> 1 ^ -(value & 1), at + size + 1
    raise SchemaError("a message index of more than 32 bits")


def _number(value: int) -> bytes:
    value <<= 1  # zigzag of a number that is not negative
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)
