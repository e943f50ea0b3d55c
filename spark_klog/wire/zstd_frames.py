"""Bounds of zstd frames: their end and the most that they can hold. A decompressor takes a cut frame for the end of the
data, and allocates as much as a frame claims to hold.

    magic       UINT32  0xFD2FB528 (little endian, as all of the format); 0x184D2A5x is a skippable frame: UINT32 size
    header      2-14 bytes: window size, dictionary id, content size if known, whether there is a checksum
    blocks      UINT24  bit 0 the last one, bits 1-2 type, bits 3-23 size; then the bytes
                        type 0: `size` bytes as they are, 1: one byte, `size` times, 2: compressed into `size` bytes,
                        3: reserved
    [checksum UINT32]   lowest bytes of the content's XXH64

Source: RFC 8878, 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from spark_klog.errors import DecodeError

_SKIPPABLE = 0x184D2A50
_RUN, _COMPRESSED, _RESERVED = 1, 2, 3
_MOST_OF_A_BLOCK = 128 * 1024
#: What a stream of libzstd, Java's too, takes at most; compressors use it from level 20 on.
_LARGEST_WINDOW = 128 << 20
_CHECKSUM_OF_NOTHING = bytes.fromhex("99e9d851")


class ZstdFrame(NamedTuple):
    """A whole frame: its bytes, its window (bytes), its claimed content size (None: unknown), the largest possible."""

    data: memoryview
    window: int
    claimed: int | None
    most: int


def zstd_frames(view: memoryview) -> Iterator[ZstdFrame]:
    """The frames of `view` without skippable ones.

    `DecodeError` or `zstandard.ZstdError` if one is cut off or invalid, needs a window above 128 MB, or claims more
    than its blocks can hold. An empty frame (`most` is 0) has been verified; the others must be decompressed to find
    damage.
    """
    import zstandard

    position = 0
    while position < len(view):
        if int.from_bytes(view[position : position + 4], "little") & ~0xF == _SKIPPABLE:
            if position + 8 > len(view):
                raise _cut_off()
            position += 8 + int.from_bytes(view[position + 4 : position + 8], "little")
            continue
        start = position
        header = zstandard.get_frame_parameters(view[start:])
        if header.dict_id:
            raise DecodeError(f"zstd frame at byte {start} needs dictionary {header.dict_id}; Kafka knows none")
        if header.window_size > _LARGEST_WINDOW:
            needed = f"needs a window of {header.window_size} bytes"
            raise DecodeError(f"zstd frame at byte {start} {needed}; Kafka reads at most {_LARGEST_WINDOW}")
        position += zstandard.frame_header_size(view[start:])
        position, most = _blocks(view, position)
        position += 4 * header.has_checksum
        if position > len(view):
            break
        claimed = None if header.content_size == zstandard.CONTENTSIZE_UNKNOWN else header.content_size
        if claimed is not None and claimed > most:
            raise DecodeError(f"zstd frame at byte {start} claims {claimed} bytes, its blocks hold at most {most}")
        if claimed == 0 and most:  # the library would believe the claim
            raise DecodeError(f"zstd frame at byte {start} claims to be empty, its blocks are not")
        if not most and header.has_checksum and view[position - 4 : position] != _CHECKSUM_OF_NOTHING:
            raise DecodeError(f"zstd frame at byte {start} is damaged: wrong checksum")
        yield ZstdFrame(view[start:position], header.window_size, claimed, most)
    if position > len(view):
        raise _cut_off()


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
