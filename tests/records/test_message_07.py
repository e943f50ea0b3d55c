"""Messages of Kafka 0.7, built by hand with struct and zlib by its design chapter."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Sequence

import pytest
import snappy
from hypothesis import given, settings, strategies as st
from kafka.codec import snappy_encode

from spark_klog.errors import CorruptBatchError, DecodeError
from spark_klog.records.contract import Record
from spark_klog.records.formats.message_07 import (
    Message07,
    check_crc_07,
    iter_messages_07,
    records_07,
)

NONE, GZIP, SNAPPY = range(3)
PAYLOADS = [b"first", b"", b"\x00\xff" * 40, b"a longer one " * 300]
COMPRESS: dict[int, Callable[[bytes], bytes]] = {GZIP: gzip.compress, SNAPPY: snappy_encode}


def _message(payload: bytes, attributes: int | None = 0) -> bytes:
    """A message of magic 1, or of magic 0 if `attributes` is None."""
    head = b"\x00" if attributes is None else bytes([1, attributes])
    content = head + struct.pack(">I", zlib.crc32(payload)) + payload
    return struct.pack(">i", len(content)) + content


def _set(payloads: Sequence[bytes] = PAYLOADS, attributes: int | None = 0) -> bytes:
    return b"".join(_message(payload, attributes) for payload in payloads)


def _compressed(inner: bytes, codec: int = GZIP) -> bytes:
    return _message(COMPRESS[codec](inner), codec)


def _read(data: bytes | bytearray, base_offset: int = 0) -> list[tuple[int, bytes | None]]:
    """(offset, payload) of all records; checks that their other fields are unset."""
    records = [record for message in iter_messages_07(data, base_offset) for record in records_07(message)]
    assert all(record == Record(record.offset, -1, -1, None, record.value, ()) for record in records)
    return [(record.offset, record.value) for record in records]


# ----- the layout


def test_messages_by_hand() -> None:
    magic_0 = bytes.fromhex("00000008 00") + zlib.crc32(b"abc").to_bytes(4, "big") + b"abc"
    magic_1 = bytes.fromhex("00000009 01 00") + zlib.crc32(b"abc").to_bytes(4, "big") + b"abc"
    assert (magic_0, magic_1) == (_message(b"abc", None), _message(b"abc"))
    first, second = iter_messages_07(magic_0 + magic_1, 1000)
    assert (first.offset, first.next_offset, first.magic, first.attributes) == (1000, 1012, 0, 0)
    assert (second.offset, second.next_offset, second.magic, second.attributes) == (1012, 1025, 1, 0)
    assert first.crc == second.crc == zlib.crc32(b"abc")
    assert bytes(first.payload) == bytes(second.payload) == b"abc"
    assert (first.codec_id, first.is_control) == (0, False)


@pytest.mark.parametrize("base_offset", [0, 1, 536_870_912, 2**40])
@pytest.mark.parametrize("attributes", [None, 0])
def test_an_offset_is_the_position_in_the_stream(base_offset: int, attributes: int | None) -> None:
    data = _set(PAYLOADS, attributes)
    overhead = 9 if attributes is None else 10
    starts = [base_offset]
    for payload in PAYLOADS:
        starts.append(starts[-1] + overhead + len(payload))
    assert starts[-1] == base_offset + len(data)
    assert _read(data, base_offset) == list(zip(starts, PAYLOADS, strict=False))
    assert [message.next_offset for message in iter_messages_07(data, base_offset)] == starts[1:]


def test_messages_of_both_magics_one_after_the_other() -> None:
    data = _set(PAYLOADS, None) + _set(PAYLOADS) + _set(PAYLOADS[:1], None)
    assert [value for _, value in _read(data)] == [*PAYLOADS, *PAYLOADS, PAYLOADS[0]]


def test_unused_attributes_are_passed_over() -> None:
    assert _read(_message(b"abc", 0xFC)) == [(0, b"abc")]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer(kind: type) -> None:
    assert _read(kind(_set())) == _read(_set())


# ----- sets in messages


@pytest.mark.parametrize("codec", [GZIP, SNAPPY])
@pytest.mark.parametrize("attributes", [None, 0])
def test_messages_of_a_compressed_set_share_its_offset(codec: int, attributes: int | None) -> None:
    before = _message(b"before")
    wrapper = _compressed(_set(PAYLOADS, attributes), codec)
    data = before + wrapper + _message(b"after")
    end = 70 + len(before) + len(wrapper)
    expected = [(70, b"before"), *((70 + len(before), payload) for payload in PAYLOADS), (end, b"after")]
    assert _read(data, 70) == expected
    assert [message.codec_id for message in iter_messages_07(data)] == [NONE, codec, NONE]


def test_raw_snappy() -> None:
    assert _read(_message(snappy.compress(_set()), SNAPPY), 5) == [(5, payload) for payload in PAYLOADS]


@pytest.mark.parametrize("depth", range(1, 9))
def test_sets_in_sets(depth: int) -> None:
    inner = _set(PAYLOADS)
    for level in range(depth):
        inner = _message(b"x%d" % level) + _compressed(inner, level % 2 + 1) + _message(b"y%d" % level)
    expected = (
        [b"x%d" % level for level in reversed(range(depth))] + PAYLOADS + [b"y%d" % level for level in range(depth)]
    )
    found = _read(inner, 300)
    assert [value for _, value in found] == expected
    first = len(_message(b"x0"))
    assert {offset for offset, _ in found[1:-1]} == {300 + first}
    assert (found[0][0], found[-1][0]) == (300, 300 + len(inner) - len(_message(b"y0")))


def test_too_many_sets_in_sets_are_refused() -> None:
    inner = _set()
    for _ in range(8):
        inner = _compressed(inner)
    assert len(_read(inner)) == len(PAYLOADS)
    with pytest.raises(DecodeError, match="offset 12: sets are nested more than 8 deep"):
        _read(_compressed(inner), 12)
    for _ in range(200):
        inner = _compressed(inner)
    with pytest.raises(DecodeError, match="sets are nested more than 8 deep"):
        _read(inner)


def test_sets_grow_to_the_limit_only_all_together() -> None:
    inner = _set([b"x" * 1000])
    two = _compressed(_compressed(inner) + _compressed(inner))
    total = 2 * len(inner) + 2 * len(_compressed(inner))
    (message,) = iter_messages_07(two)
    assert len(list(records_07(message, total))) == 2
    with pytest.raises(DecodeError, match="beyond"):
        list(records_07(message, total - 1))


def test_a_bomb_costs_no_memory() -> None:
    """Neither many sets that each stay below the limit, nor one that exceeds it."""
    inner = _set([bytes(900_000)])
    many = _compressed(_compressed(inner) * 200)
    one = _compressed(_compressed(_set([bytes(100_000_000)])))
    for data in (many, one):
        (message,) = iter_messages_07(data)
        tracemalloc.start()
        try:
            with pytest.raises(DecodeError, match="beyond"):
                for _ in records_07(message, 2_000_000):
                    pass
            assert tracemalloc.get_traced_memory()[1] < 30_000_000
        finally:
            tracemalloc.stop()


def test_a_set_of_nothing_has_no_records() -> None:
    assert _read(_compressed(b"") + _message(b"next")) == [(len(_compressed(b"")), b"next")]


@pytest.mark.parametrize(
    "inner", [b"\x00", _set()[:-1], _set() + b"\x00\x00", _message(b"abc")[:4], bytes(5), b"\xff" * 20]
)
def test_a_set_that_is_none_is_refused(inner: bytes) -> None:
    with pytest.raises(DecodeError) as failed:
        _read(_compressed(inner))
    assert not isinstance(failed.value, CorruptBatchError)


def test_codec_3_is_none_of_07() -> None:
    with pytest.raises(DecodeError, match="offset 9: unknown compression codec 3"):
        _read(_message(gzip.compress(_set()), 3), 9)


@pytest.mark.parametrize("payload", [b"", b"no gzip", gzip.compress(_set())[:-1]], ids=["empty", "other", "cut"])
def test_a_payload_that_does_not_decompress_is_refused(payload: bytes) -> None:
    for codec in (GZIP, SNAPPY):
        with pytest.raises(DecodeError):
            _read(_message(payload, codec))


# ----- damage


@pytest.mark.parametrize(
    "data",
    [_message(b"payload", None), _message(b"payload"), _compressed(_set([b"a", b"b"]))],
    ids=["magic 0", "magic 1", "compressed"],
)
def test_every_flipped_bit_of_magic_checksum_and_payload_is_noticed(data: bytes) -> None:
    """The checksum covers the payload only: neither the length nor the attributes."""
    assert _read(data)
    for position in range(4, len(data)):
        if position == 5 and data[4] == 1:
            continue
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(DecodeError):
                _read(damaged)


def test_a_wrong_checksum_is_a_corrupt_batch_naming_the_offset() -> None:
    data = _message(b"good") + _message(b"bad")[:-1] + b"D" + _message(b"good")
    messages = list(iter_messages_07(data, 100))
    assert [[record.value for record in records_07(messages[number])] for number in (0, 2)] == [[b"good"]] * 2
    assert messages[1].offset == 114
    for check in (check_crc_07, lambda message: list(records_07(message))):
        with pytest.raises(CorruptBatchError, match="message of offset 114: CRC 0x"):
            check(messages[1])


@pytest.mark.parametrize("codec", [GZIP, SNAPPY])
def test_a_wrong_checksum_within_a_set_is_a_corrupt_batch(codec: int) -> None:
    with pytest.raises(CorruptBatchError):
        _read(_compressed(_message(b"good") + _message(b"bad")[:-1] + b"D", codec))


@pytest.mark.parametrize("attributes", [None, 0])
def test_partial_message_at_the_end_is_left_out(attributes: int | None) -> None:
    payloads = [b"one", b"", b"three"]
    data = _set(payloads, attributes)
    ends = [message.next_offset for message in iter_messages_07(data)]
    for size in range(len(data) + 1):
        found = _read(data[:size])
        assert [value for _, value in found] == payloads[: sum(end <= size for end in ends)]


@pytest.mark.parametrize(("magic", "least"), [(0, 5), (1, 6)])
def test_impossible_lengths_are_refused(magic: int, least: int) -> None:
    for length in (least - 1, 1, 0, -1, -(2**31)):
        data = _message(b"x") + struct.pack(">ib", length, magic) + bytes(20)
        messages = iter_messages_07(data, 7)
        assert next(messages).offset == 7
        with pytest.raises(DecodeError, match=f"offset {7 + len(_message(b'x'))}: length {length}"):
            next(messages)
    assert list(iter_messages_07(struct.pack(">ib", 2**31 - 1, magic) + bytes(20))) == []


@pytest.mark.parametrize("magic", [2, 3, 127, 128, 255])
def test_unknown_magics_are_refused(magic: int) -> None:
    data = bytearray(_message(b"x"))
    data[4] = magic
    with pytest.raises(DecodeError, match=f"no message at offset 55: unknown magic {magic}"):
        list(iter_messages_07(data, 55))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 1 << 40))
def test_rubbish_is_refused_or_read_never_something_else(data: bytes, base_offset: int) -> None:
    for start in (b"", _set(), b"\x00\x00\x00\x09\x01", b"\x00\x00\x00\x14\x01\x01"):
        try:
            for offset, _ in _read(start + data, base_offset):
                assert base_offset <= offset < base_offset + len(start + data)
        except DecodeError:
            pass


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=50), min_size=1), st.sampled_from([None, GZIP, SNAPPY]), st.integers(0, 1))
def test_any_payloads(payloads: list[bytes], codec: int | None, magic: int) -> None:
    data = _set(payloads, None if magic == 0 else 0) if codec is None else _compressed(_set(payloads), codec)
    assert [value for _, value in _read(data)] == payloads
    messages: list[Message07] = list(iter_messages_07(data))
    assert len(messages) == (len(payloads) if codec is None else 1)
