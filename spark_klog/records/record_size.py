"""How large a record batch with a single record can get before compression, as Kafka's producer counts it."""

from __future__ import annotations

from spark_klog.records.contract import Headers

#: Bytes of a batch's header, and the most of a record beside its key, value and headers.
OVERHEAD = 61 + 21
#: Sizes in bytes of a zigzag varint grow by one at each of these lengths.
VARINT_BOUNDS = (1 << 6, 1 << 13, 1 << 20, 1 << 27)
#: The most bytes that the lengths of key and value take, and the number of headers if there are none.
MOST_LENGTHS = 5 + 5 + 1


def largest_size(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    """The most bytes that a batch with this record alone takes before compression."""
    size = OVERHEAD + _field_size(key) + _field_size(value) + _varint_size(len(headers))
    for name, content in headers:
        size += _field_size(name.encode()) + _field_size(content)
    return size


def _field_size(content: bytes | None) -> int:
    return 1 if content is None else _varint_size(len(content)) + len(content)


def _varint_size(length: int) -> int:
    """Bytes of a zigzag varint of a number that is not negative."""
    return max(1, (length.bit_length() + 7) // 7)
