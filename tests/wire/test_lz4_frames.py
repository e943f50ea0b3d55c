"""Header checksums of lz4 frames, right and old ones, against liblz4 and frames of Kafka 0.10.2.2."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import lz4.frame
import pytest
from hypothesis import given, strategies as st

from spark_klog.errors import DecodeError
from spark_klog.wire.codecs import codec_by_name
from spark_klog.wire.lz4_frames import read_lz4_header, with_old_lz4_header, xxh32

LZ4 = codec_by_name("lz4")
LOGS = Path(__file__).parent.parent / "data" / "kafka-0.10.2.2" / "logs"
SAMPLE = b"the quick brown fox " * 50


def _stored_frames(topic: str) -> Iterator[bytes]:
    """The values of a partition's compressed messages."""
    data = (LOGS / f"{topic}-0" / "00000000000000000000.log").read_bytes()
    position = 0
    while position < len(data):
        # offset INT64, size INT32, crc UINT32, magic INT8, attributes INT8, [timestamp INT64], key BYTES, value BYTES
        size, magic, attributes = struct.unpack_from(">8xi4xbb", data, position)
        key = position + 18 + 8 * magic
        (key_size,) = struct.unpack_from(">i", data, key)
        assert key_size == -1 or attributes & 7 == 0
        if attributes & 7 == 3:
            (value_size,) = struct.unpack_from(">i", data, key + 4)
            yield data[key + 8 : key + 8 + value_size]
        position += 12 + size


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", 0x02CC5D05),
        (b"a", 0x550D7456),
        (b"abc", 0x32D153FF),
        (b"Nobody inspects the spammish repetition", 0xE2293B2F),
    ],
)
def test_published_values_of_xxh32(data: bytes, value: int) -> None:
    assert xxh32(data) == value


@given(st.binary(max_size=80))
def test_xxh32_is_that_of_liblz4(data: bytes) -> None:
    # a frame's content checksum is the XXH32 of the content
    frame = lz4.frame.compress(data, content_checksum=True)
    assert xxh32(data) == int.from_bytes(frame[-4:], "little")


@given(st.integers(0, 2**64 - 1))
def test_headers_of_liblz4_have_the_right_checksum(content_size: int) -> None:
    context = lz4.frame.create_compression_context()
    header = lz4.frame.compress_begin(context, source_size=content_size & (2**63 - 1), content_checksum=True)
    assert read_lz4_header(memoryview(b"12" + header + bytes(4)), 2) == (header, 2 + len(header))


def test_old_frames_of_kafka() -> None:
    old = list(_stored_frames("v0-lz4"))
    assert len(old) == 9
    for frame in old:
        with pytest.raises(RuntimeError):
            lz4.frame.decompress(frame)
        right, position = read_lz4_header(memoryview(frame), 0)
        content = lz4.frame.decompress(right + frame[position:])
        assert LZ4.decompress(frame, len(content)) == content
        assert LZ4.decompress(frame + bytes(LZ4.compress(b"abc")) + frame, 100_000) == content + b"abc" + content
        # our frames get the same header as Kafka's, with the old checksum
        assert with_old_lz4_header(LZ4.compress(content))[:7] == frame[:7]
    for frame in _stored_frames("v1-lz4"):
        assert LZ4.decompress(frame, 100_000) == lz4.frame.decompress(frame)


@pytest.mark.parametrize("data", [b"", SAMPLE, SAMPLE * 200])
def test_old_header_of_our_frames(data: bytes) -> None:
    frame = bytes(LZ4.compress(data))
    old = with_old_lz4_header(memoryview(frame))
    assert (old[6], frame[6]) == (0x1A, 0x82)  # the old one as in Kafka's logs
    assert old[:6] + old[7:] == frame[:6] + frame[7:]
    assert LZ4.decompress(old, len(data)) == data


@pytest.mark.parametrize("dictionary", [False, True])
@pytest.mark.parametrize("content_size", [False, True])
def test_every_checksum_but_the_two_is_refused(content_size: bool, dictionary: bool) -> None:
    flags = 0x60 | 0x08 * content_size | dictionary
    descriptor = bytes((flags, 0x40)) + struct.pack("<Q", 3) * content_size + bytes(4) * dictionary
    whole = b"\x04\x22\x4d\x18" + descriptor
    taken = set()
    for checksum in range(256):
        frame = whole + bytes((checksum,)) + b"\x03\x00\x00\x80abc" + bytes(4)
        try:
            assert LZ4.decompress(frame, 3) == b"abc"
            taken.add(checksum)
        except DecodeError:
            with pytest.raises(DecodeError, match=f"header checksum {checksum:#04x}"):
                LZ4.decompress(frame, 3)
    # liblz4's own XXH32, as above
    assert taken == {lz4.frame.compress(part, content_checksum=True)[-3] for part in (descriptor, whole)}


def test_cut_headers_and_other_magics() -> None:
    frame = lz4.frame.compress(SAMPLE)  # with the content's size
    for size in range(1, 15):
        with pytest.raises(DecodeError, match="cut off"):
            LZ4.decompress(frame[:size], 10_000)
    with pytest.raises(DecodeError, match="magic 0x184c2102"):  # the legacy frame
        LZ4.decompress(struct.pack("<II", 0x184C2102, 0), 10_000)
