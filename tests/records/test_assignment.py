"""Assignment of offsets to produced batches: kafka-python builds them, and reads the results."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings, strategies as st
from kafka.codec import (
    gzip_decode,
    gzip_encode,
    lz4_decode,
    lz4_decode_old_kafka,
    lz4_encode,
    lz4_encode_old_kafka,
    snappy_decode,
    snappy_encode,
)
from kafka.record.memory_records import MemoryRecords, MemoryRecordsBuilder
from kafka.record.util import calc_crc32c

from spark_klog.errors import CorruptBatchError, DecodeError
from spark_klog.records.building.assignment import Assigned, assign_offsets
from spark_klog.records.formats.batch import read_header

TIME, APPEND_TIME = 1_700_000_000_000, 1_800_000_000_000
NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
ENCODE: dict[tuple[int, int], Callable[[bytes], bytes]] = {
    (0, GZIP): gzip_encode,
    (1, GZIP): gzip_encode,
    (0, SNAPPY): snappy_encode,
    (1, SNAPPY): snappy_encode,
    (0, LZ4): lz4_encode_old_kafka,
    (1, LZ4): lz4_encode,
}
DECODE: dict[tuple[int, int], Callable[[bytes], bytes]] = {
    (0, GZIP): gzip_decode,
    (1, GZIP): gzip_decode,
    (0, SNAPPY): snappy_decode,
    (1, SNAPPY): snappy_decode,
    (0, LZ4): lz4_decode_old_kafka,
    (1, LZ4): lz4_decode,
}
KINDS = [
    *((magic, codec) for magic in (0, 1) for codec in (NONE, GZIP, SNAPPY, LZ4)),
    *((2, codec) for codec in (NONE, GZIP, SNAPPY, LZ4, ZSTD)),
]
Pair = tuple["bytes | None", "bytes | None"]
PAIRS: list[Pair] = [(b"key", b"value"), (None, b""), (b"", None), (None, None), (b"k" * 30, b"v" * 2000)]


class Read(NamedTuple):
    """A record as kafka-python reads it; timestamp and its type are None in magic 0."""

    offset: int
    timestamp: int | None
    timestamp_type: int | None
    key: bytes | None
    value: bytes | None


def _produced(magic: int, codec: int, pairs: Sequence[Pair] = PAIRS) -> bytearray:
    """A batch or message set as kafka-python's producer sends it: offsets from 0 on, a wrapper has offset 0."""
    builder = MemoryRecordsBuilder(magic=magic, compression_type=codec, batch_size=1 << 30)
    for index, (key, value) in enumerate(pairs):
        builder.append(TIME + index, key, value)
    builder.close()
    return bytearray(builder.buffer())


def _message(magic: int, offset: int, key: bytes | None, value: bytes | None, attributes: int = 0) -> bytes:
    """One message, by hand."""
    content = struct.pack(">bb", magic, attributes) + (struct.pack(">q", TIME) if magic else b"")
    for field in (key, value):
        content += struct.pack(">i", -1) if field is None else struct.pack(">i", len(field)) + field
    return struct.pack(">qiI", offset, 4 + len(content), zlib.crc32(content)) + content


def _wrapper(magic: int, codec: int, inner_offsets: Sequence[int], offset: int = 0) -> bytearray:
    """A wrapper of `PAIRS` whose messages have these offsets."""
    inner = b"".join(_message(magic, o, *pair) for o, pair in zip(inner_offsets, PAIRS, strict=False))
    return bytearray(_message(magic, offset, None, ENCODE[magic, codec](inner), codec))


def _read(data: bytes | bytearray | memoryview) -> list[Read]:
    """All records as kafka-python reads them; it validates the checksums of batches and messages."""
    found: list[Read] = []
    for batch in MemoryRecords(bytes(data)):
        assert batch.validate_crc()
        for record in batch:
            assert record.validate_crc()
            found.append(Read(record.offset, record.timestamp, record.timestamp_type, record.key, record.value))
    return found


def _expected(magic: int, first: int, pairs: Sequence[Pair] = PAIRS, append_time: int | None = None) -> list[Read]:
    kind = None if magic == 0 else 0 if append_time is None else 1
    return [
        Read(first + i, None if magic == 0 else TIME + i if append_time is None else append_time, kind, key, value)
        for i, (key, value) in enumerate(pairs)
    ]


def _assign(data: bytearray, first: int, **options: int) -> Assigned:
    """Assign offsets; checks the returned headers and next offset against the bytes."""
    assigned = assign_offsets(memoryview(data), first, **options)
    position = 0
    for header in assigned.headers:
        assert header == read_header(bytes(assigned.data), position)
        position += 12 + struct.unpack_from(">i", assigned.data, position + 8)[0]
    assert position == len(assigned.data)
    assert assigned.next_offset == assigned.headers[-1].next_offset
    return assigned


def _is_same_memory(assigned: Assigned, data: bytearray) -> bool:
    """Whether a write to one is visible in the other."""
    before, data[0] = data[0], data[0] ^ 0xFF
    same = len(assigned.data) == len(data) and assigned.data[0] == data[0]
    data[0] = before
    return same


# ----- each magic


@pytest.mark.parametrize("codec", [NONE, GZIP, SNAPPY, LZ4, ZSTD])
@pytest.mark.parametrize("first", [0, 1, 1000, 2**62])
def test_a_batch_gets_base_offset_and_leader_epoch_in_place(codec: int, first: int) -> None:
    data = _produced(2, codec)
    before = bytes(data)
    assigned = _assign(data, first, leader_epoch=0x01020304)
    assert _is_same_memory(assigned, data)
    assert data[:8] == first.to_bytes(8, "big")
    assert data[12:16] == b"\x01\x02\x03\x04"
    assert (data[8:12], data[16:]) == (before[8:12], before[16:])  # length; all from the magic on, with the checksum
    assert _read(data) == _expected(2, first)
    assert assigned.next_offset == first + 5


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("first", [0, 1000, 2**62])
def test_messages_get_their_offsets_in_place(magic: int, first: int) -> None:
    data = _produced(magic, NONE)
    before = bytes(data)
    assigned = _assign(data, first)
    assert _is_same_memory(assigned, data)
    position = 0
    for number in range(5):
        size = 12 + struct.unpack_from(">i", before, position + 8)[0]
        assert data[position : position + 8] == (first + number).to_bytes(8, "big")
        assert data[position + 8 : position + size] == before[position + 8 : position + size]
        position += size
    assert _read(data) == _expected(magic, first)
    assert [header.offset for header in assigned.headers] == list(range(first, first + 5))  # type: ignore[union-attr]


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4])
@pytest.mark.parametrize("sent", [0, 4, -1, 777])
def test_a_wrapper_of_magic_1_gets_its_last_offset_in_place(codec: int, sent: int) -> None:
    """Whatever offset the producer sent, only these 8 bytes change: nothing is compressed again."""
    data = _produced(1, codec)
    data[:8] = struct.pack(">q", sent)
    before = bytes(data)
    assigned = _assign(data, 1000)
    assert _is_same_memory(assigned, data)
    assert data[:8] == (1004).to_bytes(8, "big")
    assert data[8:] == before[8:]
    assert _read(data) == _expected(1, 1000)
    assert (len(assigned.headers), assigned.next_offset) == (1, 1005)


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4])
@pytest.mark.parametrize("inner", [[0, 0, 0, 0, 0], [1, 2, 3, 4, 5], [0, 1, 3, 4, 5], [5, 4, 3, 2, 1], [-1] * 5])
def test_a_wrapper_of_magic_1_that_does_not_count_from_0_is_made_anew(codec: int, inner: list[int]) -> None:
    data = _wrapper(1, codec, inner)
    before = bytes(data)
    assigned = _assign(data, 1000)
    assert not _is_same_memory(assigned, data)
    assert data == before
    assert [(r.offset, r.key, r.value) for r in _read(assigned.data)] == [
        (1000 + number, *pair) for number, pair in enumerate(PAIRS)
    ]
    assert assigned.data[17] == codec
    assert _inner_offsets(assigned.data) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4])
@pytest.mark.parametrize("inner", [range(5), range(1000, 1005), [0] * 5, [9, 8, 7, 6, -5]])
def test_a_wrapper_of_magic_0_is_made_anew_with_absolute_offsets(codec: int, inner: Sequence[int]) -> None:
    data = _wrapper(0, codec, inner, inner[-1])
    before = bytes(data)
    assigned = _assign(data, 1000)
    assert data == before or list(inner) == list(range(1000, 1005))
    assert _read(assigned.data) == _expected(0, 1000)
    assert struct.unpack_from(">q", assigned.data) == (1004,)
    assert (assigned.data[16], assigned.data[17]) == (0, codec)
    assert _inner_offsets(assigned.data) == [1000, 1001, 1002, 1003, 1004]


def _inner_offsets(data: memoryview) -> list[int]:
    """The offsets stored inside a wrapper."""
    magic, codec = data[16], data[17] & 7
    inner = DECODE[magic, codec](bytes(data[34 if magic else 26 :]))
    offsets, position = [], 0
    while position < len(inner):
        offset, length = struct.unpack_from(">qi", inner, position)
        offsets.append(offset)
        position += 12 + length
    return offsets


def test_a_wrapper_of_one_message() -> None:
    for magic in (0, 1):
        data = _wrapper(magic, GZIP, [0])
        assigned = _assign(data, 50)
        assert _read(assigned.data)[0][0] == 50
        assert _is_same_memory(assigned, data) == (magic == 1)


# ----- several in a row


def test_batches_of_all_kinds_in_a_row() -> None:
    data, expected, following = bytearray(), [], 7
    for magic, codec in KINDS * 2:
        data += _produced(magic, codec)
        expected += _expected(magic, following)
        following += 5
    assigned = _assign(data, 7, leader_epoch=3)
    assert _read(assigned.data) == expected
    assert assigned.next_offset == following
    # five messages, three wrappers in each old magic; a batch for each codec
    assert len(assigned.headers) == 2 * (5 + 3 + 5 + 3 + 5)


@pytest.mark.parametrize(
    "kinds", [[(2, GZIP)] * 3, [(1, NONE), (1, GZIP), (2, ZSTD), (0, NONE)], [(1, LZ4), (1, SNAPPY)]]
)
def test_no_wrapper_to_be_made_anew_means_the_same_memory(kinds: list[tuple[int, int]]) -> None:
    data = bytearray().join(_produced(*kind) for kind in kinds)
    assigned = _assign(data, 1000)
    assert _is_same_memory(assigned, data)
    expected = [record for number, (magic, _) in enumerate(kinds) for record in _expected(magic, 1000 + 5 * number)]
    assert _read(data) == expected


# ----- log append time


@pytest.mark.parametrize(("magic", "codec"), KINDS)
def test_append_time_is_every_records_timestamp(magic: int, codec: int) -> None:
    data = _produced(magic, codec) + _produced(magic, codec)
    assigned = _assign(data, 1000, append_time=APPEND_TIME)
    expected = _expected(magic, 1000, PAIRS * 2, APPEND_TIME)
    assert _read(assigned.data) == expected
    assert _is_same_memory(assigned, data) == (magic > 0 or codec == NONE)


@pytest.mark.parametrize("codec", [NONE, GZIP, ZSTD])
def test_append_time_of_a_batch_is_its_max_timestamp_and_attribute(codec: int) -> None:
    """The base timestamp and the records stay."""
    data = _produced(2, codec)
    before = bytes(data)
    _assign(data, 5, append_time=APPEND_TIME)
    assert data[21:23] == bytes([0, codec | 8])
    assert data[35:43] == APPEND_TIME.to_bytes(8, "big")
    assert (data[23:35], data[43:]) == (before[23:35], before[43:])


def test_append_time_of_a_wrapper_is_its_timestamp_and_attribute() -> None:
    data = _produced(1, GZIP)
    before = bytes(data)
    _assign(data, 5, append_time=APPEND_TIME)
    assert data[16:26] == bytes([1, GZIP | 8]) + APPEND_TIME.to_bytes(8, "big")
    assert (data[8:12], data[26:]) == (before[8:12], before[26:])


@pytest.mark.parametrize("codec", [GZIP, LZ4])
def test_append_time_of_a_wrapper_that_is_made_anew(codec: int) -> None:
    assigned = _assign(_wrapper(1, codec, [3, 3, 3, 3, 3]), 1000, append_time=APPEND_TIME)
    assert _read(assigned.data) == _expected(1, 1000, append_time=APPEND_TIME)


# ----- refused data


def _with_flipped_bit(data: bytearray, position: int) -> bytearray:
    damaged = bytearray(data)
    damaged[position] ^= 1
    return damaged


def _crc_v2(data: bytearray) -> bytearray:
    """The batch with a valid checksum, computed by kafka-python."""
    struct.pack_into(">I", data, 17, calc_crc32c(bytes(data[21:])))
    return data


def _field(position: int, form: str, value: int) -> bytearray:
    data = _produced(2, NONE)
    struct.pack_into(form, data, position, value)
    return _crc_v2(data)


def _holding(magic: int, inner: bytes) -> bytearray:
    return bytearray(_message(magic, 0, None, gzip.compress(inner), GZIP))


_INNER = b"".join(_message(1, number, None, b"v") for number in range(3))
BAD: dict[str, tuple[bytearray, type[DecodeError]]] = {
    **{f"checksum {kind}": (_with_flipped_bit(_produced(*kind), -1), CorruptBatchError) for kind in KINDS},
    "empty": (bytearray(), DecodeError),
    "cut off v2": (_produced(2, NONE)[:-1], DecodeError),
    "cut off v1": (_produced(1, NONE)[:-1], DecodeError),
    "cut off header": (_produced(2, NONE)[:30], DecodeError),
    "rubbish": (bytearray(b"\xff" * 100), DecodeError),
    "zeros": (bytearray(100), DecodeError),
    "fewer offsets than records": (_field(23, ">i", 3), DecodeError),
    "more offsets than records": (_field(23, ">i", 5), DecodeError),
    "another count": (_field(57, ">i", 4), DecodeError),
    "no records": (_crc_v2(bytearray(_produced(2, NONE)[:57] + bytes(4))), DecodeError),
    "negative count": (_field(57, ">i", -1), DecodeError),
    "negative delta": (_field(23, ">i", -1), DecodeError),
    "wrapper without value": (bytearray(_message(1, 0, None, None, GZIP)), DecodeError),
    "wrapper of nothing": (_holding(1, b""), DecodeError),
    "wrapper of rubbish": (_holding(1, b"rubbish" * 9), DecodeError),
    "wrapper of half": (_holding(1, _INNER[:-1]), DecodeError),
    "wrapper not compressed": (bytearray(_message(1, 0, None, _INNER, GZIP)), DecodeError),
    "wrapper of zstd": (bytearray(_message(1, 0, None, _INNER, ZSTD)), DecodeError),
    "codec 7": (bytearray(_message(0, 0, None, _INNER, 7)), DecodeError),
    **{
        f"damage in a wrapper of magic {magic}, offset {offset}": (
            _holding(magic, _message(magic, offset, None, b"value")[:-1] + b"!"),
            CorruptBatchError,
        )
        for magic in (0, 1)
        for offset in (0, 5)
    },
    **{
        f"{what} in a wrapper of magic {magic}, offset {offset}": (_holding(magic, inner), DecodeError)
        for magic in (0, 1)
        for offset in (0, 5)
        for what, inner in {
            "set": _message(magic, offset, None, gzip.compress(_message(magic, offset, None, b"v")), GZIP),
            "other magic": _message(1 - magic, offset, None, b"v"),
            "batch": bytes(_produced(2, NONE)),
        }.items()
    },
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_changes_nothing(name: str) -> None:
    """A refused batch changes neither its own bytes nor the good batches before it."""
    bad, kind = BAD[name]
    good = _produced(2, GZIP) + _produced(1, NONE) + _produced(1, GZIP) + _produced(0, GZIP)
    for before in (b"", bytes(good)) if bad else (b"",):
        data = bytearray(before + bad)
        with pytest.raises(kind) as failed:
            assign_offsets(memoryview(data), 1000, leader_epoch=5, append_time=APPEND_TIME)
        assert isinstance(failed.value, CorruptBatchError) == (kind is CorruptBatchError)
        assert data == before + bad


@pytest.mark.parametrize("magic", [0, 1])
def test_a_wrapper_grows_to_the_limit_only(magic: int) -> None:
    inner = b"".join(_message(magic, number, *pair) for number, pair in enumerate(PAIRS))
    data = _wrapper(magic, GZIP, range(5))
    before = bytes(data)
    with pytest.raises(DecodeError, match=f"beyond {len(inner) - 1} bytes"):
        assign_offsets(memoryview(data), 1000, limit=len(inner) - 1)
    assert data == before
    assert _read(_assign(data, 1000, limit=len(inner)).data)[4].offset == 1004


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_a_batch_is_not_decompressed(codec: int) -> None:
    """The header has the count, so the limit of decompressed bytes does not apply."""
    data = _produced(2, codec)
    assert _assign(data, 1000, limit=1).next_offset == 1005


fields = st.none() | st.binary(max_size=20)
rows = st.lists(st.tuples(fields, fields), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.lists(st.tuples(fields, fields), min_size=1, max_size=5)), min_size=1
    ),
    st.integers(0, 1 << 62),
    st.none() | st.integers(0, 1 << 42),
)
def test_any_batches(batches: list[tuple[tuple[int, int], list[Pair]]], first: int, append_time: int | None) -> None:
    data, expected, following = bytearray(), [], first
    for (magic, codec), pairs in batches:
        data += _produced(magic, codec, pairs)
        expected += _expected(magic, following, pairs, append_time)
        following += len(pairs)
    assigned = assign_offsets(memoryview(data), first, append_time=append_time)
    assert _read(assigned.data) == expected
    assert assigned.next_offset == following
