"""Compression codecs against independent implementations, bombs, cut and damaged data."""

from __future__ import annotations

import gzip
import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable

import cramjam
import lz4.frame
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_klog.errors import ConfigError, DecodeError
from spark_klog.wire.codecs import CODECS, MAX_DECOMPRESSED, codec_by_id, codec_by_name

MB = 1 << 20
COMPRESSING = [codec for codec in CODECS.values() if codec.id]
_NAMES = [codec.name for codec in COMPRESSING]
XERIAL = bytes.fromhex("82534e4150505900" + "00000001" + "00000001")


def _text(size: int) -> bytes:
    """`size` bytes that compress by about a half."""
    source = random.Random(size)
    return bytes(97 + min(source.getrandbits(4), source.getrandbits(4)) for _ in range(size))


def _noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


SAMPLE = _text(3000)


def _snappy_raw(data: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(data))


def _read_xerial(data: bytes) -> bytes:
    assert data[:16] == XERIAL
    position, blocks = 16, []
    while position < len(data):
        (size,) = struct.unpack_from(">i", data, position)
        blocks.append(bytes(cramjam.snappy.decompress_raw(data[position + 4 : position + 4 + size])))
        position += 4 + size
    assert position == len(data)
    return b"".join(blocks)


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


# what writes each format, and what reads it, without this package
WRITERS: dict[int, Callable[[bytes], bytes]] = {1: gzip.compress, 3: lz4.frame.compress, 4: _zstd}
READERS: dict[int, Callable[[bytes], bytes]] = {
    1: gzip.decompress,
    2: _read_xerial,
    3: lz4.frame.decompress,
    4: lambda data: bytes(cramjam.zstd.decompress(data)),
}


def test_ids_and_names() -> None:
    assert {codec.id: codec.name for codec in CODECS.values()} == {
        0: "none",
        1: "gzip",
        2: "snappy",
        3: "lz4",
        4: "zstd",
    }
    assert codec_by_id(3).name == codec_by_name("LZ4").name == "lz4"
    for codec_id in (5, 6, 7, -1):
        with pytest.raises(DecodeError):
            codec_by_id(codec_id)
    with pytest.raises(ConfigError, match="brotli"):
        codec_by_name("brotli")


@pytest.mark.parametrize("make", [_text, _noise, bytes], ids=["text", "noise", "zeros"])
@pytest.mark.parametrize("size", [0, 1, 2, 100, 32767, 32768, 32769, 65536, 65537, 700_001])
@pytest.mark.parametrize("codec", COMPRESSING, ids=_NAMES)
def test_others_read_what_it_writes_and_so_does_it(codec, size: int, make: Callable[[int], bytes]) -> None:  # type: ignore[no-untyped-def]
    data = make(size)
    compressed = bytes(codec.compress(data, None))
    assert READERS[codec.id](compressed) == data
    for kind in (bytes, bytearray, memoryview):
        assert codec.decompress(kind(compressed), max(size, 1)) == data
    assert codec.compress(memoryview(data), None) == compressed


@pytest.mark.parametrize(("name", "level"), [("gzip", 1), ("gzip", 9), ("lz4", 9), ("zstd", 1), ("zstd", 15)])
def test_levels(name: str, level: int) -> None:
    codec, data = codec_by_name(name), _text(50_000)
    compressed = bytes(codec.compress(data, level))
    assert READERS[codec.id](compressed) == data
    assert compressed != codec.compress(data, None)


def test_lz4_frame_is_independent_blocks_of_64_kb() -> None:
    info = lz4.frame.get_frame_info(bytes(codec_by_name("lz4").compress(SAMPLE, None)))
    assert (info["block_size"], info["block_linked"]) == (65536, False)


def test_none_passes_through() -> None:
    assert CODECS[0].compress(SAMPLE, None) is SAMPLE
    assert CODECS[0].decompress(SAMPLE, 0) is SAMPLE


@pytest.mark.parametrize("codec_id", WRITERS)
@pytest.mark.parametrize("sizes", [(0,), (5,), (3, 0, 70_000), (400_000, 300_000, 1), (0, 0)])
def test_members_one_after_the_other(codec_id: int, sizes: tuple[int, ...]) -> None:
    parts = [_noise(size) for size in sizes]
    stored = b"".join(WRITERS[codec_id](part) for part in parts)
    assert CODECS[codec_id].decompress(stored, MB) == b"".join(parts)


def test_gzip_member_with_name_and_extra_field() -> None:
    deflate = zlib.compressobj(wbits=-15)
    raw = deflate.compress(SAMPLE) + deflate.flush()
    # RFC 1952: FEXTRA | FNAME, 4 bytes of extra field, a name up to its zero byte
    head = bytes.fromhex("1f8b080c000000000003") + b"\x04\x00ABCD" + b"name\x00"
    tail = struct.pack("<II", zlib.crc32(SAMPLE), len(SAMPLE))
    assert CODECS[1].decompress(head + raw + tail, MB) == SAMPLE


def test_zstd_skippable_frame_is_skipped() -> None:
    skippable = struct.pack("<II", 0x184D2A53, 5) + b"12345"
    assert CODECS[4].decompress(skippable + _zstd(b"abc") + skippable + _zstd(b"def"), MB) == b"abcdef"
    for size in range(1, len(skippable)):
        with pytest.raises(DecodeError):
            CODECS[4].decompress(_zstd(b"abc") + skippable[:size], MB)


def test_zstd_without_content_size() -> None:
    stream = zstandard.ZstdCompressor(write_checksum=False).compressobj()
    stored = stream.compress(_text(300_000)) + stream.flush()
    assert CODECS[4].decompress(stored, MB) == _text(300_000)
    with pytest.raises(DecodeError):
        CODECS[4].decompress(stored[:-1], MB)


@pytest.mark.parametrize("size", [1, 60, 61, 100_000])
def test_raw_snappy_is_read(size: int) -> None:
    data = _text(size)
    assert CODECS[2].decompress(_snappy_raw(data), size) == data
    with pytest.raises(DecodeError, match="grow beyond"):
        CODECS[2].decompress(_snappy_raw(data), size - 1)


def test_xerial_bytes_by_hand() -> None:
    # a raw block: varint length, then a literal of (tag >> 2) + 1 bytes
    block = b"\x03" + bytes([(3 - 1) << 2]) + b"abc"
    stored = XERIAL + struct.pack(">i", len(block)) + block
    assert CODECS[2].decompress(stored + stored[16:], 6) == b"abcabc"
    assert CODECS[2].compress(b"abc", None) == stored
    with pytest.raises(DecodeError, match="grow beyond"):
        CODECS[2].decompress(stored + stored[16:], 5)
    for size in (-1, len(block) + 1, 2**31 - 1):
        with pytest.raises(DecodeError):
            CODECS[2].decompress(XERIAL + struct.pack(">i", size) + block, MB)


def _bomb(codec_id: int) -> bytes:
    """300 MB of zeros, compressed piece by piece."""
    zeros = bytes(MB)
    if codec_id == 1:
        deflate = zlib.compressobj(1, wbits=31)
        return b"".join([deflate.compress(zeros) for _ in range(300)]) + deflate.flush()
    if codec_id == 2:
        block = _snappy_raw(zeros)
        return XERIAL + (struct.pack(">i", len(block)) + block) * 300
    if codec_id == 3:
        with lz4.frame.LZ4FrameCompressor(block_size=lz4.frame.BLOCKSIZE_MAX4MB) as frame:
            return frame.begin() + b"".join(frame.compress(zeros) for _ in range(300)) + frame.flush()
    stream = zstandard.ZstdCompressor().compressobj()
    return b"".join([stream.compress(zeros) for _ in range(300)]) + stream.flush()


@pytest.mark.parametrize("codec", COMPRESSING, ids=_NAMES)
def test_bomb_is_refused_in_bounded_memory(codec) -> None:  # type: ignore[no-untyped-def]
    stored = _bomb(codec.id)
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match="grow beyond 2097152"):
            codec.decompress(stored, 2 * MB)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * MB


def test_snappy_that_claims_four_gigabytes() -> None:
    for claimed in ("ffffffff0f", "ffffffffff7f", "8080808010"):
        with pytest.raises(DecodeError):
            CODECS[2].decompress(bytes.fromhex(claimed) + b"\x00a", MAX_DECOMPRESSED)


@pytest.mark.parametrize("codec", COMPRESSING, ids=_NAMES)
def test_limit_is_exact(codec) -> None:  # type: ignore[no-untyped-def]
    for data in (bytes(100_000), _text(100_000)):
        stored = codec.compress(data, None)
        assert codec.decompress(stored, 100_000) == data
        with pytest.raises(DecodeError, match="grow beyond 99999 bytes"):
            codec.decompress(stored, 99_999)


@pytest.mark.parametrize("codec_id", WRITERS)
def test_thousands_of_empty_members(codec_id: int) -> None:
    stored = WRITERS[codec_id](b"") * 3000
    assert CODECS[codec_id].decompress(stored, MB) == b""


@pytest.mark.parametrize("codec", COMPRESSING, ids=_NAMES)
def test_every_truncation_is_noticed(codec) -> None:  # type: ignore[no-untyped-def]
    stored = bytes(codec.compress(SAMPLE, None))
    # the header of xerial blocks alone is a whole stream of no blocks
    whole = {16} if codec.id == 2 else set()
    for size in set(range(1, len(stored))) - whole:
        with pytest.raises(DecodeError):
            codec.decompress(stored[:size], MB)


@pytest.mark.parametrize("codec", COMPRESSING, ids=_NAMES)
def test_bytes_left_over_are_noticed(codec) -> None:  # type: ignore[no-untyped-def]
    stored = bytes(codec.compress(SAMPLE, None))
    for rest in (b"\x00", b"\x00\x00\x00", b"\x00\x00\x00\x07", b"garbage at the end", stored[:5]):
        with pytest.raises(DecodeError):
            codec.decompress(stored + rest, MB)


_CHANGES = st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(COMPRESSING), _CHANGES, st.booleans())
def test_damaged_data_give_bytes_or_decode_error(codec, changes: list[tuple[int, int]], head: bool) -> None:  # type: ignore[no-untyped-def]
    stored = bytearray(codec.compress(SAMPLE, None))
    for position, mask in changes:
        stored[position % (24 if head else len(stored))] ^= mask
    try:
        assert len(codec.decompress(stored, 4 * len(SAMPLE))) <= 4 * len(SAMPLE)
    except DecodeError:
        pass


_MAGICS = [
    b"",
    b"\x1f\x8b\x08",
    XERIAL[:8],
    XERIAL,
    b"\x04\x22\x4d\x18",
    b"\x28\xb5\x2f\xfd",
    b"\x50\x2a\x4d\x18",
]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(COMPRESSING), st.sampled_from(_MAGICS), st.binary(max_size=60))
def test_any_bytes_give_bytes_or_decode_error(codec, magic: bytes, data: bytes) -> None:  # type: ignore[no-untyped-def]
    try:
        assert len(codec.decompress(magic + data, 1000)) <= 1000
    except DecodeError:
        pass


@pytest.mark.parametrize("codec_id", [1, 4])
def test_checksums_of_the_formats_are_checked(codec_id: int) -> None:
    stored = bytearray(WRITERS[codec_id](SAMPLE))
    stored[-5 if codec_id == 1 else -1] ^= 1  # the last byte of gzip's CRC-32, of zstd's content checksum
    with pytest.raises(DecodeError):
        CODECS[codec_id].decompress(stored, MB)
