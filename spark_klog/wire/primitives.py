"""Primitive types of the wire protocol over a bounded reader and a growing writer.

INT8..INT64   big endian, two's complement        UINT32    big endian
UVARINT       base 128, least significant group first, high bit = more follows
VARINT        UVARINT of the zig-zag form (n << 1) ^ (n >> 31); VARLONG the same with 64 bits
STRING        INT16 length N, N bytes of UTF-8; N = -1 is null. Its compact form has the same limit of 32,767 bytes
BYTES         INT32 length N, N bytes; N = -1 is null
COMPACT_*     UVARINT length N + 1; 0 is null     ARRAY     INT32 count, -1 is null
UUID          16 bytes

Sources: protocol guide, "Protocol Primitive Types"; KIP-482 for the compact forms.
"""

from __future__ import annotations

from collections.abc import Sized
from math import inf
from struct import Struct
from typing import Any

from spark_klog.errors import DecodeError, EncodeError, FrameTooLarge

_INT16, _INT32 = Struct(">h"), Struct(">i")

Buffer = bytes | bytearray | memoryview
#: Bytes of a reader's allowance that a tagged field costs; it mostly takes time.
TAG_BYTES = 240
#: The most elements of an array, and tagged fields of a structure, as in Kafka 4.4 (MessageUtil): it refuses more.
MAX_ELEMENTS, MAX_TAGS = 1_000_000, 10_000
#: Bytes of the longest STRING in either form, as in Kafka (Short.MAX_VALUE).
MAX_STRING = 0x7FFF
SIZE = Struct(">i")
#: The largest request that a broker accepts (Kafka: socket.request.max.bytes), and the largest response for a client.
MAX_FRAME = 100 * 1024 * 1024


class AllowanceExceeded(DecodeError):
    """Decoding would take more memory than the reader allows."""


class Reader:
    """Reader of primitives from a buffer, never beyond its end.

    Every method raises `DecodeError` if the buffer is too short or a length is impossible; lengths are compared with
    the bytes left before anything is allocated. `allowance` is the memory in bytes that decoded values may still take,
    see `spend`.
    """

    __slots__ = ("allowance", "buffer", "end", "position")

    def __init__(self, buffer: Buffer, allowance: float = inf) -> None:
        self.buffer = memoryview(buffer)
        self.position = 0
        self.end = len(self.buffer)
        self.allowance = allowance

    def spend(self, size: int) -> None:
        """Deduct `size` bytes from the allowance, before they are allocated; `AllowanceExceeded`."""
        self.allowance -= size
        if self.allowance < 0:
            raise AllowanceExceeded(f"its elements would take more memory than allowed, at position {self.position}")

    @property
    def remaining(self) -> int:
        """Bytes not read yet."""
        return self.end - self.position

    def take(self, size: int) -> memoryview:
        """The next `size` bytes, as a view."""
        start = self.position
        if size < 0 or size > self.end - start:
            raise DecodeError(f"{size} bytes needed at position {start}, {self.end - start} are left")
        self.position = start + size
        return self.buffer[start : start + size]

    def unpack(self, form: Struct) -> tuple[Any, ...]:
        """The values of a format."""
        start = self.position
        stop = start + form.size
        if stop > self.end:
            raise DecodeError(f"{form.size} bytes needed at position {start}, {self.end - start} are left")
        self.position = stop
        return form.unpack_from(self.buffer, start)

    def int16(self) -> int:
        value: int = self.unpack(_INT16)[0]
        return value

    def int32(self) -> int:
        value: int = self.unpack(_INT32)[0]
        return value

    def uvarint(self, bits: int = 32) -> int:
        result = shift = 0
        while True:
            if self.position >= self.end:
                raise DecodeError(f"varint cut off at position {self.position}")
            byte = self.buffer[self.position]
            self.position += 1
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift >= bits:
                raise DecodeError(f"varint of more than {bits} bits before position {self.position}")
        if result >> bits:
            raise DecodeError(f"varint of more than {bits} bits before position {self.position}")
        return result

    def varint(self) -> int:
        value = self.uvarint()
        return (value >> 1) ^ -(value & 1)

    def varlong(self) -> int:
        value = self.uvarint(64)
        return (value >> 1) ^ -(value & 1)

    def text(self, size: int) -> str:
        if size > MAX_STRING:
            raise DecodeError(f"string of {size} bytes at position {self.position}, at most {MAX_STRING} are allowed")
        view = self.take(size)
        try:
            return str(view, "utf-8")
        except UnicodeDecodeError as error:
            raise DecodeError(f"string before position {self.position} is not UTF-8: {error.reason}") from None

    def nullable_string(self) -> str | None:
        size = self.int16()
        return None if size == -1 else self.text(size)

    def tag_count(self) -> int:
        """The number of tagged fields that follow."""
        count = self.uvarint()
        if count > min(self.remaining, MAX_TAGS):
            raise DecodeError(
                f"{count} tagged fields before position {self.position}, {self.remaining} bytes are left, and at most "
                f"{MAX_TAGS} fields are allowed"
            )
        return count

    def skip_tags(self) -> None:
        """Skip tagged fields (KIP-482)."""
        for _ in range(self.tag_count()):
            self.spend(TAG_BYTES)
            self.uvarint()
            self.take(self.uvarint())


class Writer:
    """Writer of primitives. Keeps large parts (record bytes, ranges of a file) by reference, see `parts`.

    Strings that are too long raise `EncodeError`, numbers beyond their type `struct.error`.
    """

    __slots__ = ("_parts", "current")

    def __init__(self) -> None:
        self._parts: list[Sized] = []
        self.current = bytearray()

    @property
    def parts(self) -> list[Sized]:
        """The written parts in order: bytearrays, and the arguments of `splice`."""
        return [*self._parts, self.current] if self.current else list(self._parts)

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts) + len(self.current)

    def to_bytes(self) -> bytes:
        """All parts joined; TypeError if a spliced part is not bytes."""
        return b"".join(self.parts)  # type: ignore[arg-type]

    def splice(self, part: Sized) -> None:
        """Append `part` without copying it."""
        self._parts += [self.current, part]
        self.current = bytearray()

    def raw(self, data: Buffer) -> None:
        self.current += data

    def int16(self, value: int) -> None:
        self.current += _INT16.pack(value)

    def int32(self, value: int) -> None:
        self.current += _INT32.pack(value)

    def uvarint(self, value: int) -> None:
        append_uvarint(self.current, value)

    def nullable_string(self, value: str | None) -> None:
        if value is None:
            self.int16(-1)
            return
        data = utf8(value)
        self.int16(len(data))
        self.current += data


def utf8(text: str) -> bytes:
    """The bytes of a STRING; `EncodeError`."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise EncodeError(f"string {text[:50]!r}... is not Unicode: {error.reason}") from None
    if len(data) > MAX_STRING:
        raise EncodeError(f"string of {len(data)} bytes ({text[:50]!r}...), at most {MAX_STRING} are allowed")
    return data


def wrap_int64(value: int) -> int:
    """`value` modulo 2^64 as INT64; timestamps overflow as in Java."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def append_varlong(target: bytearray, value: int) -> None:
    """Append an INT64 as VARLONG; a value of 32 bits has the same bytes as VARINT."""
    append_uvarint(target, (value << 1) ^ (value >> 63))


def append_uvarint(target: bytearray, value: int) -> None:
    """Append a value of 0 or more as UVARINT."""
    while value > 0x7F:
        target.append(value & 0x7F | 0x80)
        value >>= 7
    target.append(value)


def frame_size(data: Buffer, limit: int = MAX_FRAME, position: int = 0) -> int:
    """The size in the 4-byte prefix at a position; `FrameTooLarge` if it is negative or above `limit`."""
    size: int = SIZE.unpack_from(data, position)[0]
    if not 0 <= size <= limit:
        raise FrameTooLarge(size, limit)
    return size
