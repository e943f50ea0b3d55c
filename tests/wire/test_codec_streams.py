"""Streams that the formats allow, but our codecs do not write: members, frames, headers, blocks of all kinds."""

from __future__ import annotations

import gzip
import itertools
import random
import struct
import zlib
from collections.abc import Callable

import cramjam
import lz4.frame
import pytest
import zstandard
from hypothesis import given, settings, strategies as st

from spark_klog.errors import DecodeError
from spark_klog.wire import codecs
from spark_klog.wire.codecs import CODECS

MB = 1 << 20
GZIP, SNAPPY, LZ4, ZSTD = (CODECS[codec_id] for codec_id in (1, 2, 3, 4))
XERIAL = bytes.fromhex("82534e4150505900" + "00000001" + "00000001")
SAMPLE = b"the quick brown fox jumps over the lazy dog " * 70


def _noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def _raw(data: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(data))


def _blocks(*contents: bytes) -> bytes:
    return b"".join(struct.pack(">i", len(block)) + block for block in map(_raw, contents))


def _xerial(data: bytes) -> bytes:
    return XERIAL + _blocks(*(data[start : start + 40_000] for start in range(0, len(data), 40_000)))


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def _zstd_stream(data: bytes) -> bytes:
    """A stream as Java and librdkafka write it: without content size, with blocks ended early."""
    stream = zstandard.ZstdCompressor().compressobj()
    parts = [stream.compress(data[:100]), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*parts, stream.compress(data[100:]), stream.flush()])


def _lz4(**options: bool | int) -> Callable[[bytes], bytes]:
    return lambda data: lz4.frame.compress(data, **options)


#: (codec, a writer of its format that is not this package)
WRITERS: dict[str, tuple[codecs.Codec, Callable[[bytes], bytes]]] = {
    "gzip": (GZIP, gzip.compress),
    "xerial": (SNAPPY, _xerial),
    "lz4": (LZ4, _lz4()),
    "lz4, linked blocks of 4 MB": (LZ4, _lz4(block_linked=True, block_size=7)),
    "lz4, linked blocks of 64 KB": (LZ4, _lz4(block_linked=True, block_size=4)),
    "lz4, checksums": (LZ4, _lz4(block_checksum=True, content_checksum=True, store_size=False)),
    "zstd": (ZSTD, _zstd),
    "zstd stream": (ZSTD, _zstd_stream),
}


@pytest.mark.parametrize("sizes", [(0,), (5,), (3, 0, 70_000), (400_000, 300_000, 1), (0, 0)])
@pytest.mark.parametrize("name", WRITERS)
def test_members_one_after_the_other(name: str, sizes: tuple[int, ...]) -> None:
    codec, write = WRITERS[name]
    parts = [_noise(size // 2) + bytes(size - size // 2) for size in sizes]
    stored = b"".join(map(write, parts))
    assert codec.decompress(stored, sum(sizes)) == b"".join(parts)
    if sum(sizes):
        with pytest.raises(DecodeError, match="grow beyond"):
            codec.decompress(stored, sum(sizes) - 1)
    with pytest.raises(DecodeError):
        codec.decompress(stored[:-1] if stored != XERIAL * len(sizes) else stored + b"\x00", sum(sizes))


@pytest.mark.parametrize("name", WRITERS)
def test_a_mb_of_empty_members(name: str) -> None:
    codec, write = WRITERS[name]
    member = write(b"")
    assert codec.decompress(member * (MB // len(member)), 0) == b""


@pytest.mark.parametrize(("codec", "write"), [(LZ4, _lz4()), (ZSTD, _zstd)], ids=["lz4", "zstd"])
def test_skippable_frames_are_skipped(codec: codecs.Codec, write: Callable[[bytes], bytes]) -> None:
    skippable = struct.pack("<II", 0x184D2A53, 5) + b"12345"
    assert codec.decompress(skippable + write(b"abc") + skippable + write(b"def") + skippable, 6) == b"abcdef"
    assert codec.decompress(skippable, 0) == b""
    for size in range(1, len(skippable)):
        with pytest.raises(DecodeError):
            codec.decompress(write(b"abc") + skippable[:size], MB)


@pytest.fixture(params=["zlib-ng", "zlib"])
def _gzip_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both libraries for gzip; zlib is for machines for which zlib-ng has no wheel."""
    if request.param == "zlib":
        monkeypatch.setattr(codecs, "zlib", zlib)
    elif codecs.zlib is zlib:
        pytest.skip("zlib-ng is not installed")


@pytest.mark.usefixtures("_gzip_library")
@pytest.mark.parametrize("size", [0, 1, 100, 300_000, 5_000_000])
def test_gzip_with_either_library(size: int) -> None:
    data = _noise(size // 2) + bytes(size - size // 2)
    for level in (None, 1, 9):
        assert gzip.decompress(bytes(GZIP.compress(data, level))) == data
    stored = gzip.compress(data, 6)
    assert GZIP.decompress(stored + stored, 2 * size) == data + data
    for cut in {1, 5, 9, 10, len(stored) // 2, len(stored) - 8, len(stored) - 1}:
        with pytest.raises(DecodeError, match="cut off"):
            GZIP.decompress(stored[:cut], size)
    for rest in (b"\x00", b"\x00\x00\x00", b"garbage at the end"):
        with pytest.raises(DecodeError):
            GZIP.decompress(stored + rest, size)
    if size:
        with pytest.raises(DecodeError, match="grow beyond"):
            GZIP.decompress(stored, size - 1)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 255)), min_size=1, max_size=3))
def test_both_gzip_libraries_take_and_refuse_the_same(changes: list[tuple[int, int]]) -> None:
    stored = bytearray(gzip.compress(SAMPLE, mtime=0))
    for position, mask in changes:
        stored[position % len(stored)] ^= mask
    results = []
    with pytest.MonkeyPatch.context() as patch:
        for library in (codecs.zlib, zlib):
            patch.setattr(codecs, "zlib", library)
            try:
                results.append(bytes(GZIP.decompress(stored, MB)))
            except DecodeError:
                results.append(None)
    assert results[0] == results[1]


@pytest.mark.usefixtures("_gzip_library")
def test_gzip_member_with_name_and_extra_field() -> None:
    deflate = zlib.compressobj(wbits=-15)
    raw = deflate.compress(SAMPLE) + deflate.flush()
    # RFC 1952: FEXTRA | FNAME, 4 bytes of extra field, a name up to its zero byte
    head = bytes.fromhex("1f8b080c000000000003") + b"\x04\x00ABCD" + b"name\x00"
    tail = struct.pack("<II", zlib.crc32(SAMPLE), len(SAMPLE))
    assert GZIP.decompress(head + raw + tail, MB) == SAMPLE


@pytest.mark.parametrize("size", [1, 60, 61, 100_000])
def test_raw_snappy_is_read(size: int) -> None:
    data = SAMPLE * 40
    data = data[:size]
    assert SNAPPY.decompress(_raw(data), size) == data
    with pytest.raises(DecodeError, match="grow beyond"):
        SNAPPY.decompress(_raw(data), size - 1)


def test_xerial_bytes_by_hand() -> None:
    # a raw block: its size as a varint, then a literal of (tag >> 2) + 1 bytes
    block = b"\x03" + bytes([(3 - 1) << 2]) + b"abc"
    stored = XERIAL + struct.pack(">i", len(block)) + block
    assert SNAPPY.decompress(stored + stored[16:], 6) == b"abcabc"
    assert SNAPPY.compress(b"abc") == stored
    with pytest.raises(DecodeError, match="grow beyond"):
        SNAPPY.decompress(stored + stored[16:], 5)
    for size in (-1, 0, len(block) + 1, 2**31 - 1, -(2**31)):
        with pytest.raises(DecodeError):
            SNAPPY.decompress(XERIAL + struct.pack(">i", size) + block, MB)


def test_xerial_versions_as_java_reads_them() -> None:
    """snappy-java 1.1.10.7 does not check the first header's version; in later headers it must be 1 or more."""

    def stream(version: int, compatible: int, content: bytes) -> bytes:
        return XERIAL[:8] + struct.pack(">ii", version, compatible) + _blocks(content)

    for version, compatible in itertools.product((-1, 0, 1, 2, 1 << 24), (0, 1, 7)):
        assert SNAPPY.decompress(stream(version, compatible, b"abc"), MB) == b"abc"
        both = stream(1, 1, b"abc") + stream(version, compatible, b"def")
        if version >= 1:
            assert SNAPPY.decompress(both, MB) == b"abcdef"
        else:
            with pytest.raises(DecodeError, match=f"version {version}"):
                SNAPPY.decompress(both, MB)


def test_damaged_xerial_headers() -> None:
    stored = _xerial(b"abc")
    for size in range(1, 16):
        with pytest.raises(DecodeError):
            SNAPPY.decompress(stored + stored[:size], MB)
    for position in range(8):
        damaged = bytearray(stored)
        damaged[position] ^= 1
        with pytest.raises(DecodeError):
            SNAPPY.decompress(damaged, MB)
        with pytest.raises(DecodeError):
            SNAPPY.decompress(stored + damaged, MB)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (b"\x04\x08abc", "expected 4"),  # claims more than it has
        (b"\x02\x08abc", "damaged"),  # claims less
        (b"\x41\x00a", "which it can't hold"),
        (b"\xff\xff\x03\x00a", "which it can't hold"),
        (b"\xff\xff\xff\xff\x0f\x00a", "grow beyond"),
        (b"\xff\xff\xff\xff\xff\x7f\x00a", "does not end"),
        (b"\x83\x80\x80\x80\x80\x00\x08abc", "does not end"),
        (b"\x80", "does not end"),
    ],
)
def test_snappy_sizes_that_are_wrong(block: bytes, reason: str) -> None:
    for stored in (block, XERIAL + struct.pack(">i", len(block)) + block):
        with pytest.raises(DecodeError, match=reason):
            SNAPPY.decompress(stored, MB)


def _zstd_frame(size: int | None, *blocks: tuple[int, int, bytes]) -> bytes:
    """A frame of blocks (type, size, bytes) with a window of 1 KB; `size` is the content size that it claims."""
    head = b"\x00\x00" if size is None else b"\xc0\x00" + struct.pack("<Q", size)
    last = len(blocks) - 1
    body = (
        (size << 3 | kind << 1 | (index == last)).to_bytes(3, "little") + data
        for index, (kind, size, data) in enumerate(blocks)
    )
    return b"\x28\xb5\x2f\xfd" + head + b"".join(body)


def test_zstd_frames_by_hand() -> None:
    raw, run, empty = (0, 3, b"abc"), (1, 5, b"x"), (0, 0, b"")
    assert zstandard.ZstdDecompressor().decompress(_zstd_frame(8, raw, run)) == b"abcxxxxx"
    for size in (None, 8):
        assert ZSTD.decompress(_zstd_frame(size, raw, run, empty) + _zstd_frame(size, empty, run, raw), 16) == (
            b"abcxxxxxxxxxxabc"
        )
    assert ZSTD.decompress(_zstd_frame(0, empty, empty), 0) == b""
    for wrong in (0, 7, 9, MB, 1 << 40, 2**64 - 2):
        with pytest.raises(DecodeError):
            ZSTD.decompress(_zstd_frame(wrong, raw, run), 2 * MB)
    with pytest.raises(DecodeError):
        ZSTD.decompress(_zstd_frame(None, raw, (3, 0, b"")), MB)  # a reserved type of block


def test_empty_zstd_frames_are_what_the_library_calls_so() -> None:
    # they are never decompressed: check every header, with all sequences of one or two empty blocks
    blocks = [bytes([last | kind << 1, 0, 0]) + b"x" * (kind == 1) for kind in (0, 1, 3) for last in (0, 1)]
    bodies = [b"".join(some) for count in (1, 2) for some in itertools.product(blocks, repeat=count)]
    empty = 0
    windows, tails = (0x00, 0x89), (b"", b"\x99\xe9\xd8\x51", bytes(4))  # 1 KB, 144 MB
    for head, window, body, tail in itertools.product(range(256), windows, bodies, tails):
        single = head >> 5 & 1
        sizes = bytes((single, 2, 4, 8)[head >> 6] + (0, 1, 2, 4)[head & 3])
        stored = b"\x28\xb5\x2f\xfd" + bytes([head]) + bytes([window])[single:] + sizes + body + tail
        try:
            with zstandard.ZstdDecompressor().stream_reader(stored, read_across_frames=True) as reader:
                whole = reader.read() == b""
        except zstandard.ZstdError:
            whole = False
        try:
            taken = ZSTD.decompress(stored, 0) == b""
        except DecodeError:
            taken = False
        empty += taken
        assert taken <= whole, stored.hex()
    assert empty > 200


def test_zstd_that_needs_a_dictionary_is_refused() -> None:
    dictionary = b"\x07"
    for blocks in (b"\x01\x00\x00", b"\x19\x00\x00abc"):
        with pytest.raises(DecodeError, match="dictionary 7"):
            ZSTD.decompress(b"\x28\xb5\x2f\xfd\x01\x00" + dictionary + blocks, MB)


def test_zstd_of_a_window_of_128_mb() -> None:
    # Java writes this at level 22, however small the content is
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    stored = stream.compress(SAMPLE) + stream.flush()
    assert zstandard.get_frame_parameters(stored).window_size == 128 * MB
    assert ZSTD.decompress(stored + stored, MB) == SAMPLE + SAMPLE
    larger = stored[:5] + b"\x89" + stored[6:]
    assert zstandard.get_frame_parameters(larger).window_size == 144 * MB
    with pytest.raises(DecodeError, match="window of 150994944 bytes"):
        ZSTD.decompress(larger, MB)
