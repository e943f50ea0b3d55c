"""Compression codecs, one table by the id in a batch's attributes (bits 0-2).

0 none     1 gzip (RFC 1952, members one after the other)
2 snappy   written as xerial blocks: 82 'SNAPPY' 00, INT32 version 1, INT32 compatible 1, then any number of (INT32
           size, raw block); read as one or more such streams of any version, or as one raw block, which librdkafka
           writes: UVARINT size, then its elements
3 lz4      frame format, written as independent blocks of 64 KB: Java's reader accepts no other
4 zstd     RFC 8878, frames one after the other

Empty data are a `DecodeError`, and so are data that would grow beyond `limit`. Beside the result, decompression takes
a few pieces of 4 MB; plus the window (at most 128 MB, and no more than it fills) of a zstd frame without a content
size, or the size of a snappy block.

The libraries are imported on first use, to keep the broker's start short.

`zstd_frames` finds where zstd frames end and the most that they can hold: a decompressor takes a cut frame for the end
of the data, and allocates as much as a frame claims to hold. A frame (RFC 8878, 3.1):

    magic       UINT32  0xFD2FB528 (little endian, as all of the format); 0x184D2A5x is a skippable frame: UINT32 size
    header      2-14 bytes: window size, dictionary id, content size if known, whether there is a checksum
    blocks      UINT24  bit 0 the last one, bits 1-2 type, bits 3-23 size; then the bytes
                        type 0: `size` bytes as they are, 1: one byte, `size` times, 2: compressed into `size` bytes,
                        3: reserved
    [checksum UINT32]   lowest bytes of the content's XXH64
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import Any, NamedTuple

from spark_klog.errors import ConfigError, DecodeError
from spark_klog.wire.lz4_frames import read_lz4_header
from spark_klog.wire.primitives import Buffer

#: The ids of codecs.
NO_CODEC, GZIP, SNAPPY, LZ4, ZSTD = range(5)
_SKIPPABLE = 0x184D2A50
_ZSTD_MAGIC = 0xFD2FB528
_RUN, _COMPRESSED, _RESERVED = 1, 2, 3
_DICTIONARY_ID_BYTES, _CONTENT_SIZE_BYTES = (0, 1, 2, 4), (0, 2, 4, 8)
_MOST_OF_A_BLOCK = 128 * 1024
#: What a stream of libzstd, Java's too, takes at most; compressors use it from level 20 on.
_LARGEST_WINDOW = 128 << 20
_CHECKSUM_OF_NOTHING = bytes.fromhex("99e9d851")
#: Bytes that one compressed batch may decompress to, by default.
MAX_DECOMPRESSED = 256 * 1024 * 1024
_PIECE = 4 * 1024 * 1024
_GZIP = 31
_GZIP_INPUT, _GZIP_LEAST_INPUT = 256 * 1024, 1024
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + b"\x00\x00\x00\x01\x00\x00\x00\x01"
_XERIAL_BLOCK = 32 * 1024
_SIZE = Struct(">i")
_XERIAL_MAGIC_AS_SIZE: int = _SIZE.unpack_from(_XERIAL_MAGIC)[0]
_LZ4_FAST, _KAFKA_LZ4_FAST = 0, 9
_ZSTD_SCRATCH = 256 * 1024
_CRAMJAM_IS_FULL = "failed to write whole buffer"
_ZSTD_IS_FULL = "did not decompress full frame"
_ZSTD_KEPT_WINDOW = 8 * 1024 * 1024
_ZSTD_KEPT_LEVEL = 9


@dataclass(frozen=True)
class Codec:
    """A compression codec. `levels` and `default_level` are Kafka's; None if the codec has no levels."""

    id: int
    name: str
    _compress: Callable[[Buffer, int], Buffer]
    _decompress: Callable[[Buffer, int], Buffer]
    levels: range | None = None
    default_level: int | None = None

    def check_level(self, level: int | None) -> None:
        """`ConfigError` unless `compress` takes `level`; None is the default level."""
        if level is None or level == self.default_level:
            return
        if self.levels is None:
            raise ConfigError(f"{self.name} has no compression levels, but {level} was given")
        if level not in self.levels:
            raise ConfigError(f"compression level {level} is out of the range of {self.name}: {self.level_words}")

    @property
    def level_words(self) -> str:
        """The levels of a codec that has any, such as "1 to 9, or -1"."""
        levels = self.levels or range(1)
        return f"{levels[0]} to {levels[-1]}" + ("" if self.default_level in levels else f", or {self.default_level}")

    def compress(self, data: Buffer, level: int | None = None) -> Buffer:
        """Compress `data`; `ConfigError` for a level that the codec does not have."""
        self.check_level(level)
        return self._compress(data, (self.default_level or 0) if level is None else level)

    def decompress(self, data: Buffer, limit: int) -> Buffer:
        """Decompress `data`; `DecodeError` if they are damaged, or hold more than `limit` bytes."""
        return self._decompress(data, limit)


class DecompressedTooLarge(DecodeError):
    """Compressed data that hold more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"compressed data grow beyond {limit} bytes")


class _Output:
    """Collector of a result of at most `limit` bytes. A single part becomes the result without a copy."""

    __slots__ = ("_limit", "result", "room")

    def __init__(self, data: Buffer, limit: int) -> None:
        if not len(data):
            raise DecodeError("no compressed data")
        self._limit = limit
        self.result: bytes | bytearray = b""
        #: One byte more than may still be added: asking a library for `room` bytes shows whether there are too many.
        self.room = limit + 1

    def add(self, part: bytes | bytearray) -> None:
        self.room -= len(part)
        if self.room <= 0:
            raise self.too_large()
        if not self.result:
            self.result = part
        elif part:
            # grows in place, so that the parts and the whole are never in memory together
            if isinstance(self.result, bytes):
                self.result = bytearray(self.result)
            self.result += part

    def too_large(self) -> DecodeError:
        return DecompressedTooLarge(self._limit)


def _plain(data: Buffer, _: int) -> Buffer:
    return data


def _pick_zlib() -> Any:
    try:
        from zlib_ng import zlib_ng
    except ImportError:  # there is no wheel for this platform
        import zlib

        return zlib
    return zlib_ng


#: zlib-ng, or the standard library's zlib, with the same functions.
zlib: Any = _pick_zlib()


def _gzip_compress(data: Buffer, level: int) -> bytes:
    deflate = zlib.compressobj(level, zlib.DEFLATED, _GZIP)
    compressed: bytes = deflate.compress(data) + deflate.flush()
    return compressed


def _gzip_decompress(data: Buffer, limit: int) -> Buffer:
    output = _Output(data, limit)
    view = memoryview(data)
    position, input_size = 0, _GZIP_INPUT
    while position < len(view):
        start = position
        member = zlib.decompressobj(_GZIP)
        while not member.eof:
            piece = view[position : position + input_size]
            try:
                part = member.decompress(piece, min(output.room, _PIECE))
            except zlib.error as error:
                raise DecodeError(f"gzip data are damaged: {error}") from None
            if not piece and not part:
                raise DecodeError("gzip data are cut off")
            position += len(piece) - len(member.unused_data) - len(member.unconsumed_tail)
            input_size = _GZIP_INPUT
            output.add(part)
        # zlib copies the bytes after a member: with many tiny members and large input that takes quadratic time
        input_size = min(_GZIP_INPUT, max(_GZIP_LEAST_INPUT, 2 * (position - start)))
    return output.result


def _snappy_compress(data: Buffer, _: int) -> bytes:
    import snappy

    view = memoryview(data)
    parts: list[bytes] = [_XERIAL_HEADER]
    for start in range(0, len(view), _XERIAL_BLOCK):
        block = snappy.compress(view[start : start + _XERIAL_BLOCK])
        parts += (_SIZE.pack(len(block)), block)
    return b"".join(parts)


def _snappy_decompress(data: Buffer, limit: int) -> Buffer:
    output = _Output(data, limit)
    view = memoryview(data)
    if view[: len(_XERIAL_MAGIC)] != _XERIAL_MAGIC:
        output.add(_snappy_block(view, output))
        return output.result
    position = 0
    while position < len(view):
        if position + _SIZE.size > len(view):
            raise DecodeError("snappy block size is cut off")
        size: int = _SIZE.unpack_from(view, position)[0]
        if size == _XERIAL_MAGIC_AS_SIZE:
            _check_xerial_header(view[position : position + len(_XERIAL_HEADER)], is_first=not position)
            position += len(_XERIAL_HEADER)
            continue
        position += _SIZE.size
        if not 0 <= size <= len(view) - position:
            raise DecodeError(f"snappy block of {size} bytes, {len(view) - position} are left")
        output.add(_snappy_block(view[position : position + size], output))
        position += size
    return output.result


def _check_xerial_header(header: memoryview, *, is_first: bool) -> None:
    if len(header) < len(_XERIAL_HEADER):
        raise DecodeError("snappy header is cut off")
    if header[: len(_XERIAL_MAGIC)] != _XERIAL_MAGIC:
        raise DecodeError("snappy header is damaged")
    version: int = _SIZE.unpack_from(header, len(_XERIAL_MAGIC))[0]
    if version < 1 and not is_first:  # Java's reader does not check the first version either
        raise DecodeError(f"snappy header has version {version}, the first one is 1")


def _snappy_block(block: memoryview, output: _Output) -> bytes:
    import snappy

    claimed = shift = 0
    for byte in block[:5]:
        claimed |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    else:
        raise DecodeError("snappy data are damaged: the size does not end")
    if claimed >= output.room:
        raise output.too_large()
    if 3 * claimed > 64 * len(block):  # the densest element takes 3 bytes and copies 64
        raise DecodeError(f"snappy block of {len(block)} bytes claims {claimed}, which it can't hold")
    try:
        result: bytes = snappy.decompress(block)
    except Exception as error:  # the exception's class depends on the binding's version
        raise DecodeError(f"snappy data are damaged: {error.__cause__ or error}") from None
    return result


def _lz4_compress(data: Buffer, level: int) -> bytes:
    import lz4.frame

    compressed: bytes = lz4.frame.compress(
        data,
        # in Kafka level 9 is the fast compressor; 1-8 and 10-17 are levels of the slow one
        compression_level=_LZ4_FAST if level == _KAFKA_LZ4_FAST else level,
        block_size=lz4.frame.BLOCKSIZE_MAX64KB,
        block_linked=False,
        store_size=False,
    )
    return compressed


def _lz4_decompress(data: Buffer, limit: int) -> Buffer:
    import lz4.frame

    output = _Output(data, limit)
    view = memoryview(data)
    context = lz4.frame.create_decompression_context()
    position = 0
    while position < len(view):
        header, position = read_lz4_header(view, position)
        if not header:
            continue
        try:
            lz4.frame.decompress_chunk(context, header, max_length=0)
            is_end = False
            while not is_end:
                rest = view[position:]
                part, read, is_end = lz4.frame.decompress_chunk(context, rest, max_length=min(output.room, _PIECE))
                if not (part or read or is_end):
                    raise DecodeError("lz4 data are cut off")
                position += read
                output.add(part)
        except RuntimeError as error:
            raise DecodeError(f"lz4 data are damaged: {error}") from None
    return output.result


class ZstdFrame(NamedTuple):
    """A whole frame: its bytes, its window (bytes), its claimed content size (None: unknown), the largest possible."""

    data: memoryview
    window: int
    claimed: int | None
    most: int


def zstd_frames(view: memoryview) -> Iterator[ZstdFrame]:
    """The frames of `view` without skippable ones.

    `DecodeError` if one is cut off or invalid, needs a window above 128 MB, or claims more than its blocks can hold. An
    empty frame (`most` is 0) has been verified; the others must be decompressed to find damage.
    """
    position = 0
    while position < len(view):
        magic = int.from_bytes(view[position : position + 4], "little")
        if magic & ~0xF == _SKIPPABLE:
            if position + 8 > len(view):
                raise _cut_off()
            position += 8 + int.from_bytes(view[position + 4 : position + 8], "little")
            continue
        start = position
        if magic != _ZSTD_MAGIC and len(view) - start >= 4:
            raise DecodeError(f"zstd data are damaged: no frame begins at byte {start}")
        window, claimed, has_checksum, position = _header(view, start)
        if window > _LARGEST_WINDOW:
            needed = f"needs a window of {window} bytes"
            raise DecodeError(f"zstd frame at byte {start} {needed}; Kafka reads at most {_LARGEST_WINDOW}")
        position, most = _blocks(view, position)
        position += 4 * has_checksum
        if position > len(view):
            break
        if claimed is not None and claimed > most:
            raise DecodeError(f"zstd frame at byte {start} claims {claimed} bytes, its blocks hold at most {most}")
        if claimed == 0 and most:  # the library would believe the claim
            raise DecodeError(f"zstd frame at byte {start} claims to be empty, its blocks are not")
        if not most and has_checksum and view[position - 4 : position] != _CHECKSUM_OF_NOTHING:
            raise DecodeError(f"zstd frame at byte {start} is damaged: wrong checksum")
        yield ZstdFrame(view[start:position], window, claimed, most)
    if position > len(view):
        raise _cut_off()


def _header(view: memoryview, start: int) -> tuple[int, int | None, bool, int]:
    """Window (bytes), claimed content size, whether a checksum follows the blocks, and where the blocks begin."""
    position = start + 5
    if position > len(view):
        raise _cut_off()
    descriptor = view[start + 4]
    if descriptor & 0x08:
        raise DecodeError(f"zstd frame at byte {start} is damaged: its header has the reserved bit")
    is_single_segment = descriptor >> 5 & 1
    window_position = position
    position += 1 - is_single_segment
    dictionary_end = position + _DICTIONARY_ID_BYTES[descriptor & 3]
    size_bytes = _CONTENT_SIZE_BYTES[descriptor >> 6] or is_single_segment
    end = dictionary_end + size_bytes
    if end > len(view):
        raise _cut_off()
    if dictionary := int.from_bytes(view[position:dictionary_end], "little"):
        raise DecodeError(f"zstd frame at byte {start} needs dictionary {dictionary}; Kafka knows none")
    claimed = None
    if size_bytes:
        claimed = int.from_bytes(view[dictionary_end:end], "little") + (256 if size_bytes == 2 else 0)
    if is_single_segment:
        window = claimed or 0
    else:
        eighth = 1 << 7 + (view[window_position] >> 3)
        window = eighth * (8 + (view[window_position] & 7))
    return window, claimed, bool(descriptor & 4), end


def _blocks(view: memoryview, position: int) -> tuple[int, int]:
    """The end of the blocks that begin at `position`, and the most bytes that they can hold."""
    most = 0
    while True:
        if position + 3 > len(view):
            raise _cut_off()
        block = view[position] | view[position + 1] << 8 | view[position + 2] << 16
        kind, size = block >> 1 & 3, block >> 3
        if kind == _RESERVED:
            raise DecodeError(f"zstd block at byte {position} is damaged: reserved type 3")
        most += _MOST_OF_A_BLOCK if kind == _COMPRESSED else size
        position += 3 + (1 if kind == _RUN else size)
        if block & 1:
            return position, most


def _cut_off() -> DecodeError:
    return DecodeError("zstd data are cut off")


class _Zstandard(threading.local):
    """zstd by the package `zstandard`, with objects for each thread: to create one takes longer than a small batch.

    Objects that hold much memory are not kept. The package takes 24 MB, so the base install has none.
    """

    def __init__(self) -> None:
        import zstandard

        self._library = zstandard
        self.error: type[Exception] = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor()
        self._level = 3
        self._compressor = zstandard.ZstdCompressor(level=self._level)

    def compress(self, data: Buffer, level: int) -> bytes:
        if level > _ZSTD_KEPT_LEVEL:
            return self._library.ZstdCompressor(level=level).compress(data)
        if level != self._level:
            self._level, self._compressor = level, self._library.ZstdCompressor(level=level)
        return self._compressor.compress(data)

    def add(self, frame: ZstdFrame, output: _Output) -> None:
        kept = frame.window <= _ZSTD_KEPT_WINDOW
        decompressor = self._decompressor if kept else self._library.ZstdDecompressor()
        size = min(frame.most, output.room)
        try:
            output.add(decompressor.decompress(frame.data, max_output_size=size))
        except self.error as error:
            if size == output.room and _ZSTD_IS_FULL in str(error):
                raise output.too_large() from None
            raise


class _CramjamZstd(threading.local):
    """zstd by cramjam, which python-snappy needs anyway. A batch costs 8 us more than by `zstandard`."""

    def __init__(self) -> None:
        import cramjam

        self._library = cramjam.zstd
        self.error: type[Exception] = cramjam.DecompressionError
        self._scratch = bytearray(_ZSTD_SCRATCH)

    def compress(self, data: Buffer, level: int) -> bytes:
        return bytes(self._library.compress(data, level))

    def add(self, frame: ZstdFrame, output: _Output) -> None:
        size = min(frame.most if frame.claimed is None else frame.claimed, output.room)
        is_small = size <= len(self._scratch)
        # Java claims no size: a small batch could be one of 128 KB
        target = self._scratch if is_small else bytearray(size)
        try:
            written: int = self._library.decompress_into(frame.data, memoryview(target)[:size])
        except self.error as error:
            if size == output.room and _CRAMJAM_IS_FULL in str(error):
                raise output.too_large() from None
            raise
        if is_small:
            output.add(bytes(memoryview(target)[:written]))
            return
        del target[written:]
        output.add(target)


@cache
def _zstd() -> _Zstandard | _CramjamZstd:
    try:
        return _Zstandard()
    except ImportError:
        return _CramjamZstd()


def _zstd_compress(data: Buffer, level: int) -> bytes:
    return _zstd().compress(data, level)


def _zstd_decompress(data: Buffer, limit: int) -> Buffer:
    output = _Output(data, limit)
    library = _zstd()
    try:
        for frame in zstd_frames(memoryview(data)):
            if frame.claimed is not None and frame.claimed >= output.room:
                raise output.too_large()
            room = output.room
            if frame.most:
                library.add(frame, output)
            if frame.claimed not in (None, room - output.room):
                raise DecodeError(f"zstd data are damaged: a frame has {room - output.room} of {frame.claimed} bytes")
    except library.error as error:
        raise DecodeError(f"zstd data are damaged: {error}") from None
    return output.result


NONE = Codec(NO_CODEC, "none", _plain, _plain)
CODECS: dict[int, Codec] = {
    codec.id: codec
    for codec in (
        NONE,
        Codec(GZIP, "gzip", _gzip_compress, _gzip_decompress, range(1, 10), -1),
        Codec(SNAPPY, "snappy", _snappy_compress, _snappy_decompress),
        Codec(LZ4, "lz4", _lz4_compress, _lz4_decompress, range(1, 18), _KAFKA_LZ4_FAST),
        Codec(ZSTD, "zstd", _zstd_compress, _zstd_decompress, range(-131072, 23), 3),
    )
}


def codec_by_id(codec_id: int) -> Codec:
    """The codec of an id in a batch's attributes; `DecodeError` for an unknown one."""
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
    raise ConfigError(f"unknown compression.type {name!r}; the known ones are {names}")
