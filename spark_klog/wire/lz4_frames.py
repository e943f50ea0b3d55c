"""Headers of lz4 frames, with the correct checksum or the one that Kafka clients before 0.10 wrote.

    magic       UINT32  0x184D2204 (little endian, as all of the format); 0x184D2A5x is a skippable frame: UINT32 size
    flags       UINT8   bit 0 dictionary id, 2 content checksum, 3 content size, 4 block checksums, 5 independent blocks
    block size  UINT8
    [content size UINT64] [dictionary id UINT32]
    header checksum UINT8   bits 8-15 of the XXH32 of the bytes from the flags on; the old checksum: from the magic on
    blocks      UINT32  size, its highest bit set: not compressed; the bytes; [UINT32 checksum]; size 0 ends them
    [content checksum UINT32]

Sources: LZ4 frame format description 1.6; KIP-57 for the old checksum, which old readers require; xxHash
specification 0.1.1, "XXH32 algorithm description".
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct

from spark_klog.errors import DecodeError
from spark_klog.wire.primitives import Buffer

_UINT32 = Struct("<I")
_STRIPE = Struct("<4I")
_MAGIC = 0x184D2204
_SKIPPABLE, _SKIPPABLE_MASK = 0x184D2A50, 0xFFFFFFF0
_DICTIONARY, _CONTENT_SIZE, _INDEPENDENT = 0x01, 0x08, 0x20
_FLAGS = 4

_PRIME1, _PRIME2, _PRIME3, _PRIME4, _PRIME5 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1
_MASK = 0xFFFFFFFF


def read_lz4_header(view: memoryview, position: int) -> tuple[bytes, int]:
    """The header of the frame at `position`, with the correct checksum, and the position of its blocks.

    For a skippable frame b"" and the position after it. `DecodeError` if there is no frame, or its checksum is neither
    the correct nor the old one.
    """
    if position + 8 > len(view):
        raise DecodeError(f"lz4 data are cut off at byte {len(view)}")
    magic: int = _UINT32.unpack_from(view, position)[0]
    if magic & _SKIPPABLE_MASK == _SKIPPABLE:
        end: int = position + 8 + _UINT32.unpack_from(view, position + 4)[0]
        if end > len(view):
            raise DecodeError(f"lz4 frame at byte {position} is cut off")
        return b"", end
    if magic != _MAGIC:
        raise DecodeError(f"no lz4 frame at byte {position}: magic {magic:#010x}")
    end = _checksum_position(view, position) + 1
    if end > len(view):
        raise DecodeError(f"lz4 frame at byte {position} is cut off")
    header = bytes(view[position:end])
    right, old = _checksums(header[:-1])
    if header[-1] not in (right, old):
        raise DecodeError(f"lz4 frame at byte {position} has header checksum {header[-1]:#04x}, computed {right:#04x}")
    return header[:-1] + bytes((right,)), end


def with_old_lz4_header(compressed: Buffer) -> bytes:
    """The lz4 frame `compressed` with the old header checksum, for message sets of magic 0."""
    frame = bytearray(compressed)
    position = _checksum_position(memoryview(frame), 0)
    _, frame[position] = _checksums(bytes(frame[:position]))
    return bytes(frame)


def has_linked_blocks(compressed: Buffer) -> bool:
    """Whether the blocks of the frame `compressed` depend on each other; False if it is not a frame."""
    view = memoryview(compressed)
    if len(view) <= _FLAGS or _UINT32.unpack_from(view, 0)[0] != _MAGIC:
        return False
    return not view[_FLAGS] & _INDEPENDENT


def _checksum_position(view: memoryview, start: int) -> int:
    flags = view[start + _FLAGS]
    return start + 6 + 8 * bool(flags & _CONTENT_SIZE) + 4 * bool(flags & _DICTIONARY)


@lru_cache(maxsize=64)
def _checksums(header: bytes) -> tuple[int, int]:
    """The correct and the old checksum of a header without its checksum; cached, as headers rarely differ."""
    return xxh32(header[_FLAGS:]) >> 8 & 0xFF, xxh32(header) >> 8 & 0xFF


def xxh32(data: bytes) -> int:
    """The XXH32 of `data` with seed 0; slow, for the few bytes of a header."""
    position = 0
    if len(data) < 16:
        value = _PRIME5
    else:
        lanes = [_PRIME1 + _PRIME2 & _MASK, _PRIME2, 0, -_PRIME1 & _MASK]
        for position in range(16, len(data) + 1, 16):
            words = _STRIPE.unpack_from(data, position - 16)
            lanes = [
                _rotate(lane + word * _PRIME2 & _MASK, 13) * _PRIME1 & _MASK
                for lane, word in zip(lanes, words, strict=True)
            ]
        value = sum(_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True))
    value += len(data)
    while position + 4 <= len(data):
        value = _rotate(value + _UINT32.unpack_from(data, position)[0] * _PRIME3 & _MASK, 17) * _PRIME4
        position += 4
    for byte in data[position:]:
        value = _rotate(value + byte * _PRIME5 & _MASK, 11) * _PRIME1
    value &= _MASK
    value = (value ^ value >> 15) * _PRIME2 & _MASK
    value = (value ^ value >> 13) * _PRIME3 & _MASK
    return value ^ value >> 16


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> 32 - bits) & _MASK
