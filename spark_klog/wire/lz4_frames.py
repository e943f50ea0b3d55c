"""Where lz4 frames end: the decompressors at hand read the first frame and differ in what they do about the rest.

    magic       UINT32  0x184D2204 (little endian, as all of the format); 0x184D2A5x is a skippable frame: UINT32 size
    flags       UINT8   bit 0 dictionary id, 2 content checksum, 3 content size, 4 block checksums
    block size  UINT8
    [content size UINT64] [dictionary id UINT32]
    header checksum UINT8
    blocks      UINT32  size, its highest bit set: not compressed; the bytes; [UINT32 checksum]; size 0 ends them
    [content checksum UINT32]

Source: LZ4 frame format description 1.6.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

from spark_klog.errors import DecodeError
from spark_klog.wire.primitives import Buffer

_UINT32 = Struct("<I")
_MAGIC = 0x184D2204
_SKIPPABLE, _SKIPPABLE_MASK = 0x184D2A50, 0xFFFFFFF0
_DICTIONARY, _CONTENT_CHECKSUM, _CONTENT_SIZE, _BLOCK_CHECKSUM = 0x01, 0x04, 0x08, 0x10
_SIZE_MASK = 0x7FFFFFFF


def lz4_frames(data: Buffer) -> Iterator[memoryview]:
    """Each frame of `data`, skippable ones left out; `DecodeError` where one is cut off or is none."""
    view = memoryview(data)
    position = 0
    while position < len(view):
        magic = _uint32(view, position)
        if magic & _SKIPPABLE_MASK == _SKIPPABLE:
            end = position + 8 + _uint32(view, position + 4)
        elif magic == _MAGIC:
            end = _frame_end(view, position)
        else:
            raise DecodeError(f"no lz4 frame at byte {position}: magic {magic:#010x}")
        if end > len(view):
            raise DecodeError(f"lz4 frame at byte {position} is cut off")
        if magic == _MAGIC:
            yield view[position:end]
        position = end


def _uint32(view: memoryview, position: int) -> int:
    if position + 4 > len(view):
        raise DecodeError(f"lz4 data are cut off at byte {len(view)}")
    value: int = _UINT32.unpack_from(view, position)[0]
    return value


def _frame_end(view: memoryview, start: int) -> int:
    if start + 7 > len(view):
        raise DecodeError(f"lz4 frame at byte {start} is cut off")
    flags = view[start + 4]
    position = start + 7 + 8 * bool(flags & _CONTENT_SIZE) + 4 * bool(flags & _DICTIONARY)
    checksum = 4 * bool(flags & _BLOCK_CHECKSUM)
    while size := _uint32(view, position) & _SIZE_MASK:
        position += 4 + size + checksum
    return position + 4 + 4 * bool(flags & _CONTENT_CHECKSUM)
