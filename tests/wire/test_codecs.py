"""Compression codecs against independent implementations; levels; cut, damaged and arbitrary data."""

from __future__ import annotations

import argparse
import gzip
import inspect
import random
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import cramjam
import lz4.frame
import pytest
import zstandard
from hypothesis import given, settings, strategies as st

from spark_klog.errors import ConfigError, DecodeError
from spark_klog.wire.codecs import CODECS, Codec, codec_by_id, codec_by_name

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


# writers and readers of each format from other packages
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
def test_others_read_what_it_writes_and_so_does_it(codec: Codec, size: int, make: Callable[[int], bytes]) -> None:
    data = make(size)
    compressed = bytes(codec.compress(data, None))
    assert READERS[codec.id](compressed) == data
    for kind in (bytes, bytearray, memoryview):
        assert codec.decompress(kind(compressed), max(size, 1)) == data
    assert codec.compress(memoryview(data), None) == compressed


#: Levels that compress more and more; without lz4's 9, see test_default_levels_are_kafkas.
LEVELS = {
    "gzip": (1, 3, 6, 9),
    "lz4": (1, 3, 8, 10, 12, 17),
    "zstd": (-131072, -7, 1, 3, 9, 15, 22),
}


@pytest.mark.parametrize("name", LEVELS)
def test_higher_levels_give_less(name: str) -> None:
    codec, data = codec_by_name(name), inspect.getsource(argparse).encode()
    sizes = []
    for level in LEVELS[name]:
        compressed = bytes(codec.compress(data, level))
        assert READERS[codec.id](compressed) == data
        assert codec.decompress(compressed, len(data)) == data
        sizes.append(len(compressed))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.9 * sizes[0]


@pytest.mark.parametrize("codec", COMPRESSING, ids=_NAMES)
def test_no_level_is_the_default_level(codec: Codec) -> None:
    assert codec.compress(SAMPLE) == codec.compress(SAMPLE, None) == codec.compress(SAMPLE, codec.default_level)


def test_default_levels_are_kafkas() -> None:
    # org.apache.kafka.common.record.CompressionType; its lz4 writes level 9 with the fast compressor, as others write 0
    defaults = {codec.name: codec.default_level for codec in CODECS.values()}
    assert defaults == {"none": None, "gzip": -1, "snappy": None, "lz4": 9, "zstd": 3}
    fast = lz4.frame.compress(SAMPLE * 20, 0, block_size=4, block_linked=False, store_size=False)
    assert CODECS[3].compress(SAMPLE * 20, 9) == fast
    assert CODECS[1].compress(SAMPLE, -1) == CODECS[1].compress(SAMPLE, 6)


@pytest.mark.parametrize(
    ("name", "level", "message"),
    [
        ("gzip", 0, "compression level 0 is out of the range of gzip: 1 to 9, or -1"),
        ("gzip", 10, "compression level 10 is out of the range of gzip: 1 to 9, or -1"),
        ("gzip", -2, "compression level -2 is out of the range of gzip: 1 to 9, or -1"),
        ("lz4", 0, "compression level 0 is out of the range of lz4: 1 to 17"),
        ("lz4", 18, "compression level 18 is out of the range of lz4: 1 to 17"),
        ("zstd", 23, "compression level 23 is out of the range of zstd: -131072 to 22"),
        ("zstd", -131073, "compression level -131073 is out of the range of zstd: -131072 to 22"),
        ("snappy", 1, "snappy has no compression levels, but 1 was given"),
        ("none", 0, "none has no compression levels, but 0 was given"),
    ],
)
def test_levels_that_there_are_not(name: str, level: int, message: str) -> None:
    for refused in (lambda codec: codec.check_level(level), lambda codec: codec.compress(b"abc", level)):
        with pytest.raises(ConfigError) as raised:
            refused(codec_by_name(name))
        assert str(raised.value) == message


@pytest.mark.parametrize("codec", COMPRESSING, ids=_NAMES)
def test_threads_do_not_disturb_each_other(codec: Codec) -> None:
    # zstd keeps one context per thread
    levels = LEVELS.get(codec.name, (None,))

    def work(index: int) -> bool:
        data = _text(50_000 + index)
        return all(codec.decompress(codec.compress(data, level), MB) == data for level in levels[:5])

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(16)))


def test_lz4_frame_is_independent_blocks_of_64_kb() -> None:
    info = lz4.frame.get_frame_info(bytes(codec_by_name("lz4").compress(SAMPLE, None)))
    assert (info["block_size"], info["block_linked"]) == (65536, False)


def test_none_passes_through() -> None:
    assert CODECS[0].compress(SAMPLE, None) is SAMPLE
    assert CODECS[0].decompress(SAMPLE, 0) is SAMPLE


@pytest.mark.parametrize("codec", COMPRESSING, ids=_NAMES)
def test_every_truncation_is_noticed(codec: Codec) -> None:
    stored = bytes(codec.compress(SAMPLE, None))
    # a xerial header alone is a complete stream without blocks
    whole = {16} if codec.id == 2 else set()
    for size in set(range(1, len(stored))) - whole:
        with pytest.raises(DecodeError):
            codec.decompress(stored[:size], MB)


@pytest.mark.parametrize("codec", COMPRESSING, ids=_NAMES)
def test_bytes_left_over_are_noticed(codec: Codec) -> None:
    stored = bytes(codec.compress(SAMPLE, None))
    for rest in (b"\x00", b"\x00\x00\x00", b"\x00\x00\x00\x07", b"garbage at the end", stored[:5]):
        with pytest.raises(DecodeError):
            codec.decompress(stored + rest, MB)


def _stored(codec_id: int) -> list[bytes]:
    """Streams of one codec that differ in sizes, checksums, and number of members or frames."""
    own = bytes(CODECS[codec_id].compress(SAMPLE))
    others = [WRITERS[codec_id](SAMPLE)] if codec_id in WRITERS else [_snappy_raw(SAMPLE)]
    if codec_id == 3:
        others.append(lz4.frame.compress(SAMPLE, content_checksum=True, block_checksum=True, block_linked=True))
    if codec_id == 4:
        stream = zstandard.ZstdCompressor().compressobj()
        others.append(stream.compress(SAMPLE) + stream.flush())
    return [own, *others, own + bytes(CODECS[codec_id].compress(b"")) + others[-1]]


STORED = [(codec, stored) for codec in COMPRESSING for stored in _stored(codec.id)]
_POSITION = st.one_of(st.integers(0, 24), st.integers(0, 10_000))
#: (position, number of bytes to remove, bytes to insert)
_CHANGES = st.lists(st.tuples(_POSITION, st.integers(0, 3), st.binary(max_size=3)), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(STORED), _CHANGES)
def test_changed_data_give_bytes_or_decode_error(
    case: tuple[Codec, bytes], changes: list[tuple[int, int, bytes]]
) -> None:
    codec, data = case
    stored = bytearray(data)
    for position, size, replacement in changes:
        position %= len(stored) + 1
        stored[position : position + size] = replacement
    try:
        assert len(codec.decompress(stored, 3 * len(SAMPLE))) <= 3 * len(SAMPLE)
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
def test_any_bytes_give_bytes_or_decode_error(codec: Codec, magic: bytes, data: bytes) -> None:
    try:
        assert len(codec.decompress(magic + data, 1000)) <= 1000
    except DecodeError:
        pass


@pytest.mark.parametrize(
    ("codec_id", "stored", "position"),
    [
        (1, gzip.compress(SAMPLE), -5),  # the last byte of the CRC-32
        (1, gzip.compress(SAMPLE), -1),  # of the size
        (3, lz4.frame.compress(SAMPLE, content_checksum=True), -1),
        (3, lz4.frame.compress(SAMPLE, block_checksum=True), -5),
        (4, _zstd(SAMPLE), -1),
        (4, _zstd(b""), -1),
    ],
)
def test_checksums_of_the_formats_are_checked(codec_id: int, stored: bytes, position: int) -> None:
    assert CODECS[codec_id].decompress(stored, MB) in (SAMPLE, b"")
    damaged = bytearray(stored)
    damaged[position] ^= 1
    with pytest.raises(DecodeError):
        CODECS[codec_id].decompress(damaged, MB)


@pytest.mark.parametrize("codec", COMPRESSING, ids=_NAMES)
def test_no_bytes_are_no_compressed_data(codec: Codec) -> None:
    with pytest.raises(DecodeError, match="no compressed data"):
        codec.decompress(b"", MB)
    with pytest.raises(DecodeError, match="no compressed data"):
        codec.decompress(memoryview(b"abc")[3:], MB)
    assert codec.decompress(codec.compress(b""), 0) == b""
