"""Compressed data for the target `codecs`: functions that fix checksums and frames, and independent decompressors."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import lz4.frame
import zstandard

from spark_klog.wire.lz4_frames import xxh32

MAX_INFLATED = 1 << 20


def _mend_gzip(payload: bytes) -> bytes:
    """Make a gzip member of deflate data."""
    inflate = zlib.decompressobj(-15)
    try:
        content = inflate.decompress(payload, MAX_INFLATED)
    except zlib.error:
        content = b""
    deflated = payload[: len(payload) - len(inflate.unused_data)]
    trailer = struct.pack("<II", zlib.crc32(content), len(content))
    return bytes.fromhex("1f8b0800000000000003") + deflated + trailer + inflate.unused_data


def _mend_snappy(payload: bytes) -> bytes:
    """Put a xerial header before the payload, and sizes that fit before its blocks."""
    result = bytearray(b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01")
    while payload:
        size = min(payload[0], len(payload) - 1)
        result += struct.pack(">i", size) + payload[1 : 1 + size]
        payload = payload[1 + size :]
    return bytes(result)


def _mend_lz4(payload: bytes) -> bytes:
    """Make a frame with the right header checksum; if its bit 0 is set, with the checksum of old Kafka clients."""
    frame = bytearray(b"\x04\x22\x4d\x18" + payload)
    if len(frame) > 6:
        position = 6 + 8 * bool(frame[4] & 8) + 4 * bool(frame[4] & 1)
        if position < len(frame):
            start = 0 if frame[position] & 1 else 4
            frame[position] = xxh32(bytes(frame[start:position])) >> 8 & 0xFF
    return bytes(frame)


def _mend_zstd(payload: bytes) -> bytes:
    return b"\x28\xb5\x2f\xfd" + payload


#: By codec: adds the magic bytes and fixes what would make most mutated data fail at once.
MEND: dict[int, Callable[[bytes], bytes]] = {1: _mend_gzip, 2: _mend_snappy, 3: _mend_lz4, 4: _mend_zstd}


def _gzip_oracle(payload: bytes) -> bytes | None:
    result = b""
    while payload:
        inflate = zlib.decompressobj(31)
        result += inflate.decompress(payload)
        payload = inflate.unused_data
    return result


def _lz4_oracle(payload: bytes) -> bytes | None:
    result = b""
    try:
        while payload:
            frame = lz4.frame.LZ4FrameDecompressor()
            result += frame.decompress(payload)
            payload = frame.unused_data or b""
    except RuntimeError:  # the header checksum of old Kafka clients
        return None
    return result


def _zstd_oracle(payload: bytes) -> bytes | None:
    try:
        with zstandard.ZstdDecompressor().stream_reader(payload, read_across_frames=True) as reader:
            return bytes(reader.read())
    except zstandard.ZstdError as error:
        if "Allocation error" in str(error):  # a stream allocates the frame's whole window
            return None
        raise


#: By codec: an independent decompressor for data that ours accepts; None if it can't decide.
ORACLES: dict[int, Callable[[bytes], bytes | None]] = {1: _gzip_oracle, 3: _lz4_oracle, 4: _zstd_oracle}
