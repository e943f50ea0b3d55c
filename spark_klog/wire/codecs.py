"""Compression codecs, one table by the id in a batch's attributes (bits 0-2).

0 none     1 gzip (RFC 1952, members one after the other)
2 snappy   written as xerial blocks: 82 'SNAPPY' 00, INT32 version 1, INT32 compatible 1, then (INT32 size, raw block)
           again and again; read as those or as one raw block (librdkafka writes that)
3 lz4      frame format, independent 64 KB blocks    4 zstd (RFC 8878)

Decompression is bounded: what would grow beyond `limit` is a `DecodeError`, before it is allocated.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct

import cramjam
import lz4.frame
import snappy
import zstandard

from spark_klog.errors import ConfigError, DecodeError
from spark_klog.wire.lz4_frames import lz4_frames
from spark_klog.wire.primitives import Buffer

#: Bytes that one compressed batch may decompress to.
MAX_DECOMPRESSED = 256 * 1024 * 1024

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + b"\x00\x00\x00\x01\x00\x00\x00\x01"
_XERIAL_BLOCK = 32 * 1024
_SIZE = Struct(">i")
_LZ4_FIRST_BUFFER = 64 * 1024
_TARGET_IS_FULL = "failed to write whole buffer"
_PIECE = 256 * 1024
_ZSTD_SKIPPABLE = 0x184D2A50
_ZSTD_RLE = 1


@dataclass(frozen=True)
class Codec:
    """A row of the table: `compress(data, level)` (None: its default), `decompress(data, limit)` (`DecodeError`)."""

    id: int
    name: str
    compress: Callable[[Buffer, int | None], Buffer]
    decompress: Callable[[Buffer, int], Buffer]


def _too_large(limit: int) -> DecodeError:
    return DecodeError(f"compressed data grow beyond {limit} bytes")


def _plain(data: Buffer, _: int | None) -> Buffer:
    return data


def _gzip_compress(data: Buffer, level: int | None) -> bytes:
    deflate = zlib.compressobj(-1 if level is None else level, zlib.DEFLATED, 31)
    return deflate.compress(data) + deflate.flush()


def _gzip_decompress(data: Buffer, limit: int) -> bytes:
    # piece by piece: a member's object copies what follows the member, which many tiny ones would make quadratic
    view = memoryview(data)
    parts: list[bytes] = []
    size = position = 0
    while position < len(view):
        member = zlib.decompressobj(31)
        while not member.eof:
            piece = view[position : position + _PIECE]
            if not piece:
                raise DecodeError("compressed data are cut off")
            try:
                part = member.decompress(piece, limit - size + 1)
            except zlib.error as error:
                raise DecodeError(f"compressed data are damaged: {error}") from None
            position += len(piece) - len(member.unused_data or b"")
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _lz4_compress(data: Buffer, level: int | None) -> bytes:
    compressed: bytes = lz4.frame.compress(
        data,
        compression_level=0 if level is None else level,
        block_size=lz4.frame.BLOCKSIZE_MAX64KB,
        block_linked=False,
        store_size=False,
    )
    return compressed


def _lz4_decompress(data: Buffer, limit: int) -> Buffer:
    parts: list[Buffer] = []
    size = 0
    for frame in lz4_frames(data):
        parts.append(_lz4_frame(frame, limit - size))
        size += len(parts[-1])
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _lz4_frame(frame: memoryview, limit: int) -> memoryview:
    # cramjam is ten times as fast as lz4.frame here; it decompresses into a buffer of ours, so that is the bound
    size = min(limit, max(_LZ4_FIRST_BUFFER, 16 * len(frame)))
    while True:
        target = bytearray(size)
        try:
            written = cramjam.lz4.decompress_into(frame, target)
        except cramjam.DecompressionError as error:
            if _TARGET_IS_FULL not in str(error):
                raise DecodeError(f"lz4 data are damaged: {error}") from None
            if size == limit:
                raise _too_large(limit) from None
            size = min(limit, 8 * size)
        else:
            return memoryview(target)[:written]


def _zstd_compress(data: Buffer, level: int | None) -> bytes:
    return zstandard.ZstdCompressor(level=3 if level is None else level).compress(data)


def _check_zstd_frames(data: Buffer) -> None:
    """Raise unless `data` are whole frames (RFC 8878, 3.1); the stream reader takes a cut one for the end."""
    view = memoryview(data)
    position = 0
    while position < len(view):
        if int.from_bytes(view[position : position + 4], "little") & ~0xF == _ZSTD_SKIPPABLE:
            position += 8 + int.from_bytes(view[position + 4 : position + 8], "little")
            continue
        has_checksum: bool = zstandard.get_frame_parameters(view[position:]).has_checksum
        position += zstandard.frame_header_size(view[position:])
        is_last = False
        while not is_last and position < len(view):
            block = int.from_bytes(view[position : position + 3], "little")
            is_last = bool(block & 1)
            position += 3 + (1 if block >> 1 & 3 == _ZSTD_RLE else block >> 3)
        position += 4 * has_checksum
        if not is_last:
            raise DecodeError("compressed data are cut off")
    if position > len(view):
        raise DecodeError("compressed data are cut off")


def _zstd_decompress(data: Buffer, limit: int) -> bytes:
    try:
        _check_zstd_frames(data)
        with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as stream:
            result = stream.read(limit + 1)
    except zstandard.ZstdError as error:
        raise DecodeError(f"zstd data are damaged: {error}") from None
    if len(result) > limit:
        raise _too_large(limit)
    return result


def _snappy_compress(data: Buffer, _: int | None) -> bytes:
    view = memoryview(data)
    parts: list[Buffer] = [_XERIAL_HEADER]
    for start in range(0, len(view), _XERIAL_BLOCK):
        block = snappy.compress(bytes(view[start : start + _XERIAL_BLOCK]))
        parts += [_SIZE.pack(len(block)), block]
    return b"".join(parts)


def _snappy_block(block: Buffer, room: int, limit: int) -> bytes:
    size = shift = 0
    for byte in block[:5]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if size > room:
        raise _too_large(limit)
    try:
        result: bytes = snappy.decompress(bytes(block))
    except Exception as error:  # the binding raises different classes from version to version
        raise DecodeError(f"snappy data are damaged: {error}") from None
    return result


def _snappy_decompress(data: Buffer, limit: int) -> bytes:
    view = memoryview(data)
    if bytes(view[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        return _snappy_block(view, limit, limit)
    if len(view) < len(_XERIAL_HEADER):
        raise DecodeError("snappy header is cut off")
    parts: list[bytes] = []
    size, position = 0, len(_XERIAL_HEADER)
    while position < len(view):
        if position + _SIZE.size > len(view):
            raise DecodeError("snappy block size is cut off")
        block_size: int = _SIZE.unpack_from(view, position)[0]
        position += _SIZE.size
        if not 0 <= block_size <= len(view) - position:
            raise DecodeError(f"snappy block of {block_size} bytes, {len(view) - position} are left")
        part = _snappy_block(view[position : position + block_size], limit - size, limit)
        parts.append(part)
        size += len(part)
        position += block_size
    return b"".join(parts)


NONE = Codec(0, "none", _plain, _plain)
CODECS: dict[int, Codec] = {
    codec.id: codec
    for codec in (
        NONE,
        Codec(1, "gzip", _gzip_compress, _gzip_decompress),
        Codec(2, "snappy", _snappy_compress, _snappy_decompress),
        Codec(3, "lz4", _lz4_compress, _lz4_decompress),
        Codec(4, "zstd", _zstd_compress, _zstd_decompress),
    )
}


def codec_by_id(codec_id: int) -> Codec:
    """The codec of an attributes value; `DecodeError` for 5-7."""
    codec = CODECS.get(codec_id)
    if codec is None:
        raise DecodeError(f"unknown compression codec {codec_id}")
    return codec


def codec_by_name(name: str) -> Codec:
    """The codec of a `compression.type` value; `ConfigError` for any other."""
    for codec in CODECS.values():
        if codec.name == name.lower():
            return codec
    names = ", ".join(codec.name for codec in CODECS.values())
    raise ConfigError(f"unknown compression.type {name!r}; known are {names}")
