"""zstd by zstandard, and by cramjam where that is not installed: they take and refuse the same."""

from __future__ import annotations

import random
import struct
from concurrent.futures import ThreadPoolExecutor

import cramjam
import pytest
import zstandard
from hypothesis import given, settings, strategies as st

from spark_klog.errors import DecodeError
from spark_klog.wire import codecs
from spark_klog.wire.codecs import CODECS

MB = 1 << 20
ZSTD = CODECS[4]
SAMPLE = b"the quick brown fox jumps over the lazy dog " * 70
_LIBRARIES = {"zstandard": codecs._Zstandard(), "cramjam": codecs._CramjamZstd()}
_LARGE = random.Random(1).randbytes(5 * MB) + bytes(6 * MB)


@pytest.fixture(params=_LIBRARIES)
def _library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_zstd", lambda: _LIBRARIES[request.param])


def _stream(data: bytes, *, has_checksum: bool = False) -> bytes:
    """A frame without content size, with blocks ended early."""
    stream = zstandard.ZstdCompressor(write_checksum=has_checksum).compressobj()
    parts = [stream.compress(data[:100]), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*parts, stream.compress(data[100:]), stream.flush()])


def _one_window(data: bytes) -> bytes:
    return bytes(zstandard.ZstdCompressor(write_content_size=True, write_checksum=True).compress(data))


_FRAMES = {"stream": _stream, "one window": _one_window, "cramjam": lambda data: bytes(cramjam.zstd.compress(data))}


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("level", [None, -131072, -1, 1, 9, 10, 22])
def test_others_read_what_is_written(level: int | None) -> None:
    for data in (b"", b"a", SAMPLE, bytes(MB)):
        stored = bytes(ZSTD.compress(data, level))
        assert zstandard.ZstdDecompressor().decompressobj().decompress(stored) == data
        assert bytes(cramjam.zstd.decompress(stored)) == data
        assert ZSTD.decompress(stored, len(data)) == data


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("name", _FRAMES)
@pytest.mark.parametrize("data", [b"a", SAMPLE, _LARGE], ids=["1 B", "3 KB", "11 MB"])
def test_frames_and_limits(name: str, data: bytes) -> None:
    stored = _FRAMES[name](data)
    skippable = struct.pack("<II", 0x184D2A53, 5) + b"12345"
    for whole, count in ((stored, 1), (stored + skippable + _stream(b"") + stored, 2)):
        assert ZSTD.decompress(whole, count * len(data)) == data * count
        with pytest.raises(DecodeError, match="grow beyond"):
            ZSTD.decompress(whole, count * len(data) - 1)
        for cut in (1, 3, len(stored) // 2):
            with pytest.raises(DecodeError):
                ZSTD.decompress(whole[:-cut], count * len(data))


@pytest.mark.usefixtures("_library")
def test_a_frame_that_claims_more_than_it_has() -> None:
    """libzstd's stream reader does not check the claim of a frame whose last block is empty."""

    def block(size: int, kind: int, *, is_last: bool = False) -> bytes:
        return (size << 3 | kind << 1 | is_last).to_bytes(3, "little")

    head = b"\x28\xb5\x2f\xfd\xa0" + (131072).to_bytes(4, "little")
    compressed = block(2, 2) + b"\x00\x00"  # no literals, no sequences
    with pytest.raises(DecodeError):
        ZSTD.decompress(head + block(6, 0) + b"abcdef" + compressed + block(0, 0, is_last=True), MB)


@pytest.mark.usefixtures("_library")
def test_threads_do_not_disturb_each_other() -> None:
    def work(index: int) -> bool:
        data = SAMPLE * (index + 1)
        return all(ZSTD.decompress(ZSTD.compress(data, level), MB) == data for level in (1, 3, 12))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(16)))


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(_FRAMES)), st.lists(st.tuples(st.integers(0, 300), st.integers(1, 255)), max_size=3))
def test_both_take_and_refuse_the_same(name: str, changes: list[tuple[int, int]]) -> None:
    stored = bytearray(_FRAMES[name](SAMPLE) + _stream(SAMPLE[:50], has_checksum=True))
    for position, mask in changes:
        stored[position % len(stored)] ^= mask
    results: list[bytes | None] = []
    with pytest.MonkeyPatch.context() as patch:
        for library in _LIBRARIES.values():
            patch.setattr(codecs, "_zstd", lambda library=library: library)
            try:
                results.append(bytes(ZSTD.decompress(stored, MB)))
            except DecodeError:
                results.append(None)
    assert results[0] == results[1]


@given(st.binary(min_size=1, max_size=40))
def test_headers_are_read_as_the_library_reads_them(rest: bytes) -> None:
    stored = b"\x28\xb5\x2f\xfd" + rest + bytes(20)
    try:
        found = codecs._header(memoryview(stored), 0)
    except DecodeError:
        found = None
    try:
        expected = zstandard.get_frame_parameters(stored)
    except zstandard.ZstdError:
        assert found is None or found[0] > 128 * MB  # a window beyond what the library can address
        return
    assert (found is None) == (expected.dict_id > 0)
    if found is None:
        return
    window, claimed, has_checksum, end = found
    size = None if expected.content_size == zstandard.CONTENTSIZE_UNKNOWN else expected.content_size
    assert (window, claimed, has_checksum) == (expected.window_size, size, expected.has_checksum)
    assert end == zstandard.frame_header_size(stored)
