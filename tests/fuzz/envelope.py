"""Wrap *sources*, which a fuzzer mutates, into logs whose checksums match.

A source is a log in which nothing is compressed yet, and whose lengths and checksums may be wrong. A batch's attributes
name the codec to compress its body with; a message's attributes name the codec for the message set in its value. So a
mutation inside a compressed batch changes a record, not the compressed data, and readers get as far as that record.
`Mode.RAW` leaves the bytes as they are.

This module does not use the package, so that it does not repeat the package's mistakes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from enum import IntEnum

import crc32c
import lz4.frame
import snappy
import zstandard

_XERIAL_HEADER = b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01"
_BATCH_HEADER = 61
_MESSAGE_HEADERS = (18, 26)
_MAX_DEPTH = 3
_MAX_DEPTH_07 = 10


class Mode(IntEnum):
    """How a source is changed; each mode does more than the one before."""

    RAW = 0
    MEND = 1
    """Lengths and checksums of batches and messages fit, what is compressed is taken as it is."""
    WRAP = 2
    """What attributes say is compressed gets compressed."""
    FIT = 3
    """Lengths of keys, values, headers and records and the record count fit, too."""


def _gzip(data: bytes) -> bytes:
    deflate = zlib.compressobj(1, zlib.DEFLATED, 31)
    return deflate.compress(data) + deflate.flush()


def _xerial(data: bytes) -> bytes:
    block: bytes = snappy.compress(data)
    return _XERIAL_HEADER + struct.pack(">i", len(block)) + block


def _lz4(data: bytes) -> bytes:
    compressed: bytes = lz4.frame.compress(data, block_size=lz4.frame.BLOCKSIZE_MAX64KB, store_size=False)
    return compressed


_ZSTD = zstandard.ZstdCompressor(level=1)
COMPRESS: dict[int, Callable[[bytes], bytes]] = {1: _gzip, 2: _xerial, 3: _lz4, 4: _ZSTD.compress}


def wrap(source: bytes, mode: Mode) -> bytes:
    """Wrap a log with batches of any magic."""
    return source if mode == Mode.RAW else _set(source, mode, 0)


def _set(source: bytes, mode: Mode, depth: int) -> bytes:
    result = bytearray()
    position = 0
    while len(source) - position > 16:
        length: int = struct.unpack_from(">i", source, position + 8)[0]
        left = len(source) - position
        size = length + 12 if 5 <= length <= left - 12 else left
        entry = bytearray(source[position : position + size])
        if entry[16] == 2:
            _finish_batch(entry, mode)
        elif entry[16] < 2:
            _finish_message(entry, mode, depth)
        result += entry
        position += size
    return bytes(result) + source[position:]


def _finish_batch(batch: bytearray, mode: Mode) -> None:
    if len(batch) < _BATCH_HEADER:
        return
    body = bytes(batch[_BATCH_HEADER:])
    if mode >= Mode.FIT:
        body, count = _fit_records(body)
        struct.pack_into(">i", batch, 57, count)
    if mode >= Mode.WRAP and (compress := COMPRESS.get(batch[22] & 7)):
        body = compress(body)
    batch[_BATCH_HEADER:] = body
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    struct.pack_into(">I", batch, 17, crc32c.crc32c(bytes(batch[21:])))


def _finish_message(message: bytearray, mode: Mode, depth: int) -> None:
    head = _MESSAGE_HEADERS[message[16]]
    if len(message) < head + 8:
        struct.pack_into(">i", message, 8, len(message) - 12)
        return
    compress = COMPRESS.get(message[17] & 7) if mode >= Mode.WRAP and depth < _MAX_DEPTH else None
    if compress or mode >= Mode.FIT:
        key_size = struct.unpack_from(">i", message, head)[0]
        if not -1 <= key_size <= len(message) - head - 8:
            key_size = key_size % (len(message) - head - 7)
            struct.pack_into(">i", message, head, key_size)
        start = head + 4 + max(key_size, 0)
        value = bytes(message[start + 4 :])
        if compress:
            value = compress(_set(value, mode, depth + 1))
        is_null = not value and message[start : start + 4] == b"\xff" * 4
        struct.pack_into(">i", message, start, -1 if is_null else len(value))
        message[start + 4 :] = value
    struct.pack_into(">i", message, 8, len(message) - 12)
    struct.pack_into(">I", message, 12, zlib.crc32(message[16:]))


def wrap_07(source: bytes, mode: Mode, depth: int = 0) -> bytes:
    """Wrap a log of Kafka 0.7."""
    if mode == Mode.RAW:
        return source
    result = bytearray()
    position = 0
    while len(source) - position > 4:
        length: int = struct.unpack_from(">i", source, position)[0]
        left = len(source) - position - 4
        content = source[position + 4 :][: length if 1 <= length <= left else left]
        position += 4 + len(content)
        head = 6 if content[0] == 1 else 5
        if content[0] < 2 and len(content) >= head:
            payload = content[head:]
            if content[0] and mode >= Mode.WRAP and depth < _MAX_DEPTH_07 and content[1] & 3 in (1, 2):
                payload = COMPRESS[content[1] & 3](wrap_07(payload, mode, depth + 1))
            content = content[: head - 4] + struct.pack(">I", zlib.crc32(payload)) + payload
        result += struct.pack(">i", len(content)) + content
    return bytes(result) + source[position:]


class _Lenient:
    """Reads varints and fields; beyond the end it reads zeros."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    @property
    def left(self) -> int:
        return max(0, len(self.data) - self.position)

    def take(self, size: int) -> bytes:
        taken = self.data[self.position : self.position + size]
        self.position += size
        return taken

    def varint(self) -> tuple[int, bytes]:
        """Return the value and its encoding."""
        written = bytearray()
        value = 0
        while len(written) < 10:
            byte = (self.take(1) or b"\x00")[0]
            value |= (byte & 0x7F) << 7 * len(written)
            written.append(byte)
            if byte < 0x80:
                break
        return (value >> 1) ^ -(value & 1), bytes(written)

    def field(self, nullable: bool = True) -> bytes:
        """Read a field, and return it with a size that fits."""
        size, _ = self.varint()
        if size < 0 and nullable:
            return b"\x01"
        content = self.take(min(abs(size), self.left))
        return varint(len(content)) + content


def varint(value: int) -> bytes:
    """Encode as a zig-zag varint."""
    number = 2 * value if value >= 0 else -2 * value - 1
    groups = [number % 128]
    while number := number // 128:
        groups.append(number % 128)
    return bytes([*(group + 128 for group in groups[:-1]), groups[-1]])


def _fit_records(body: bytes) -> tuple[bytes, int]:
    """Return the records, with sizes that fit, and their number."""
    reader = _Lenient(body)
    result = bytearray()
    count = 0
    while reader.left:
        reader.varint()
        record = reader.take(1) or b"\x00"
        record += reader.varint()[1] + reader.varint()[1] + reader.field() + reader.field()
        headers = []
        for _ in range(min(abs(reader.varint()[0]), reader.left)):
            headers.append(reader.field(nullable=False) + reader.field())
        record += varint(len(headers)) + b"".join(headers)
        result += varint(len(record)) + record
        count += 1
    return bytes(result), count
