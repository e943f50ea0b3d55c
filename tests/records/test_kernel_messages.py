"""Messages of magic 0 and 1 in every kernel, against kafka-python and a model in plain Python."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st
from kafka.record.legacy_records import LegacyRecordBatch, LegacyRecordBatchBuilder

from spark_klog.errors import CorruptBatchError, DecodeError
from spark_klog.records.contract import COLUMNS, Kernel
from tests.support.available_kernels import KERNELS
from tests.support.checker.record_model import to_lists

ALL = frozenset(COLUMNS)
EVERYTHING = (-(1 << 62), 1 << 62)
TIME = 1_500_000_000_000
MAGICS = (0, 1)
#: Position of the first byte that the CRC-32 covers.
CRC_START = 16


class Message(NamedTuple):
    """The fields of a message; `timestamp` in ms, None in magic 0; `attributes` bit 3 is log append time."""

    offset: int
    key: bytes | None = None
    value: bytes | None = None
    timestamp: int | None = None
    attributes: int = 0


@pytest.fixture(params=KERNELS, ids=[kernel.name for kernel in KERNELS])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return request.param


@pytest.fixture(params=MAGICS, ids=["magic0", "magic1"])
def magic(request: pytest.FixtureRequest) -> int:
    return request.param


def _with_crc(message: bytes) -> bytes:
    return message[:12] + struct.pack(">I", zlib.crc32(message[CRC_START:])) + message[CRC_START:]


def _field(value: bytes | None) -> bytes:
    return struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value


def encode(message: Message, magic: int) -> bytes:
    """Encode a message by the protocol guide."""
    content = struct.pack(">bb", magic, message.attributes)
    if magic:
        content += struct.pack(">q", message.timestamp or 0)
    content += _field(message.key) + _field(message.value)
    return _with_crc(struct.pack(">qiI", message.offset, 4 + len(content), 0) + content)


def encode_all(messages: Sequence[Message], magic: int) -> bytes:
    return b"".join(encode(message, magic) for message in messages)


def expected(messages: Sequence[Message], magic: int, append_time: int | None = None) -> dict[str, list[Any]]:
    """The result that `to_lists` must give for all columns of these messages, with unchanged offsets."""
    kinds = [message.attributes >> 3 & 1 if magic else -1 for message in messages]
    times = [message.timestamp or 0 if magic else -1 for message in messages]
    return {
        "key": [message.key for message in messages],
        "value": [message.value for message in messages],
        "offset": [message.offset for message in messages],
        "timestamp": times if append_time is None else [append_time] * len(messages),
        "timestampType": kinds if append_time is None else [1] * len(messages),
        "headers": [None] * len(messages),
    }


def decoded(
    kernel: Kernel,
    data: bytes,
    magic: int,
    span: tuple[int, int] = EVERYTHING,
    last_offset: int | None = None,
    append_time: int | None = None,
    columns: frozenset[str] = ALL,
) -> dict[str, list[Any]]:
    builder = kernel.builder(columns)
    builder.append_messages(data, magic, last_offset, append_time, *span)
    return to_lists(builder.finish())


MESSAGES = [
    Message(7, b"key", b"value", TIME),
    Message(8, None, b"", TIME + 5, 8),
    Message(9, b"", None, -1),
    Message(12, None, None, 0),
    Message(13, b"k" * 300, b"v" * 20_000, TIME - 1),
    *(Message(20 + 2 * i, b"k%d" % i, b"v%d" % i if i % 3 else None, TIME + i) for i in range(20)),
]


def test_all_columns(kernel: Kernel, magic: int) -> None:
    assert decoded(kernel, encode_all(MESSAGES, magic), magic) == expected(MESSAGES, magic)


def test_messages_of_kafka_python(kernel: Kernel, magic: int) -> None:
    builder = LegacyRecordBatchBuilder(magic, 0, 1 << 30)
    source = random.Random(3)
    rows = [
        (offset, TIME + source.randrange(1 << 40), *(source.choice([None, b"", source.randbytes(50)]) for _ in "kv"))
        for offset in range(100)
    ]
    for offset, timestamp, key, value in rows:
        assert builder.append(offset, timestamp, key, value) is not None
    found = decoded(kernel, bytes(builder.build()), magic)
    assert found["offset"] == [row[0] for row in rows]
    assert found["timestamp"] == [row[1] if magic else -1 for row in rows]
    assert found["timestampType"] == [0 if magic else -1] * 100
    assert found["key"] == [row[2] for row in rows]
    assert found["value"] == [row[3] for row in rows]


def test_kafka_python_reads_the_models_messages(magic: int) -> None:
    for message in MESSAGES:
        [record] = LegacyRecordBatch(bytearray(encode(message, magic)), magic)
        assert (record.offset, record.key, record.value) == (message.offset, message.key, message.value)
        assert record.validate_crc()
        assert record.timestamp == (message.timestamp if magic else None)
        assert record.timestamp_type == (message.attributes >> 3 if magic else None)


@pytest.mark.parametrize("names", [(), ("offset",), ("key",), ("value", "timestamp"), ("timestampType", "headers")])
def test_subsets_of_columns(kernel: Kernel, magic: int, names: tuple[str, ...]) -> None:
    wanted = {name: values for name, values in expected(MESSAGES, magic).items() if name in names}
    assert decoded(kernel, encode_all(MESSAGES, magic), magic, columns=frozenset(names)) == wanted


def test_log_append_time_of_a_wrapper(kernel: Kernel, magic: int) -> None:
    assert decoded(kernel, encode_all(MESSAGES, magic), magic, append_time=99) == expected(MESSAGES, magic, 99)


def test_ranges_of_offsets(kernel: Kernel, magic: int) -> None:
    data = encode_all(MESSAGES, magic)
    edges = [0, 7, 8, 10, 12, 13, 14, 58, 59, 1 << 40]
    for first in edges:
        for end in edges:
            wanted = [message for message in MESSAGES if first <= message.offset < end]
            assert decoded(kernel, data, magic, (first, end)) == expected(wanted, magic)


@pytest.mark.parametrize("last_offset", [4, 5, 1000, 1 << 40, (1 << 63) - 1])
def test_relative_offsets(kernel: Kernel, last_offset: int) -> None:
    messages = [Message(offset, b"k", b"v", TIME) for offset in (0, 1, 3, 4)]
    data = encode_all(messages, 1)
    shift = last_offset - 4
    moved = [message._replace(offset=message.offset + shift) for message in messages]
    whole = moved if last_offset < (1 << 63) - 1 else moved[:-1]
    assert decoded(kernel, data, 1, (0, (1 << 63) - 1), last_offset) == expected(whole, 1)
    for first in range(shift - 1, shift + 3):
        for end in range(shift - 1, min(shift + 6, 1 << 63)):
            wanted = [message for message in moved if first <= message.offset < end]
            assert decoded(kernel, data, 1, (first, end), last_offset) == expected(wanted, 1)


def test_messages_in_a_wrapper_have_create_times_whatever_they_say(kernel: Kernel) -> None:
    # as in Kafka's consumer, where every record has the timestamp type of its batch
    data = encode_all([Message(0, b"k", b"v", TIME, 8), Message(1, b"k", b"v", TIME)], 1)
    assert decoded(kernel, data, 1, last_offset=1)["timestampType"] == [0, 0]
    assert decoded(kernel, data, 1)["timestampType"] == [1, 0]


EXTREMES = (-(1 << 63), -(1 << 63) + 1, -1, 0, 1, 1 << 62, (1 << 63) - 2, (1 << 63) - 1)


def test_relative_offsets_that_leave_64_bits_are_in_no_range(kernel: Kernel) -> None:
    for last in EXTREMES:
        for offset in EXTREMES:
            data = encode_all([Message(offset, timestamp=1), Message(last, timestamp=2)], 1)
            for last_offset in EXTREMES:
                moved = [offset + last_offset - last, last_offset]
                for span in ((-(1 << 63), (1 << 63) - 1), (0, 5), (-(1 << 63), 0)):
                    found = decoded(kernel, data, 1, span, last_offset, columns=frozenset({"offset"}))
                    assert found["offset"] == [number for number in moved if span[0] <= number < span[1]]


@pytest.mark.parametrize("last_offset", [None, 17])
def test_no_messages_add_nothing(kernel: Kernel, magic: int, last_offset: int | None) -> None:
    builder = kernel.builder(ALL)
    builder.append_messages(b"", magic, last_offset, None, *EVERYTHING)
    assert builder.rows == builder.size == 0
    assert to_lists(builder.finish()) == expected([], magic)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_messages_of_any_buffer(kernel: Kernel, kind: type) -> None:
    builder = kernel.builder(ALL)
    builder.append_messages(kind(b"x" + encode_all(MESSAGES, 1))[1:], 1, None, None, *EVERYTHING)
    assert to_lists(builder.finish()) == expected(MESSAGES, 1)


def test_messages_and_records_in_one_builder(kernel: Kernel) -> None:
    builder = kernel.builder(ALL)
    record = b"\x12\x00\x00\x00\x02k\x01\x02\x02h\x01"[:1] + b"\x00\x00\x00\x02k\x01\x02\x02h\x01"
    record = bytes([2 * (len(record) - 1)]) + record[1:]
    for last, data in ((11, encode(Message(10, b"a", None, 5), 1)), (31, encode(Message(30, None, b"b", 6), 0))):
        builder.append_messages(data, 1 if last == 11 else 0, None, None, *EVERYTHING)
        builder.append(record, 1, last, 7, None, *EVERYTHING)
    assert builder.size == 4
    found = to_lists(builder.finish())
    assert found == {
        "key": [b"a", b"k", None, b"k"],
        "value": [None, None, b"b", None],
        "offset": [10, 11, 30, 31],
        "timestamp": [5, 7, -1, 7],
        "timestampType": [0, 0, -1, 0],
        "headers": [None, (("h", None),), None, (("h", None),)],
    }


# ----- damage


def _refused(kernel: Kernel, data: bytes, magic: int, error: type[DecodeError], last_offset: int | None = None) -> str:
    """Append data that must be refused, without changing the builder; returns the error's text."""
    builder = kernel.builder(ALL)
    before = MESSAGES[:3]
    builder.append_messages(encode_all(before, magic), magic, None, None, *EVERYTHING)
    rows, size = builder.rows, builder.size
    for prefix in (b"", encode_all(MESSAGES[3:], magic)):
        for span in (EVERYTHING, (0, 1)):
            with pytest.raises(error) as caught:
                builder.append_messages(prefix + data, magic, last_offset, None, *span)
            assert type(caught.value) is error
            assert (builder.rows, builder.size) == (rows, size)
    assert to_lists(builder.finish()) == expected(before, magic)
    return str(caught.value)


def _raw(magic: int, content: bytes, size: int | None = None, attributes: int = 0) -> bytes:
    """A message of offset 77 with a valid CRC; `content` follows the timestamp."""
    content = struct.pack(">bb", magic, attributes) + (bytes(8) if magic == 1 else b"") + content
    return _with_crc(struct.pack(">qiI", 77, 4 + len(content) if size is None else size, 0) + content)


_INT = struct.Struct(">i").pack
BAD: dict[str, Callable[[int], bytes]] = {
    "key beyond the message": lambda magic: _raw(magic, _INT(5) + b"k" + _INT(-1)),
    "key that swallows the value's size": lambda magic: _raw(magic, _INT(4) + _INT(-1)),
    "key of size -2": lambda magic: _raw(magic, _INT(-2) + _INT(-1)),
    "key of the smallest size": lambda magic: _raw(magic, _INT(-(1 << 31)) + _INT(-1)),
    "key of the largest size": lambda magic: _raw(magic, _INT((1 << 31) - 1) + _INT(-1)),
    "value beyond the message": lambda magic: _raw(magic, _INT(-1) + _INT(1)),
    "value of size -2": lambda magic: _raw(magic, _INT(-1) + _INT(-2) + b"  "),
    "value of the largest size": lambda magic: _raw(magic, _INT(-1) + _INT((1 << 31) - 1)),
    "a byte after the value": lambda magic: _raw(magic, _INT(-1) + _INT(0) + b"x"),
    "size of zero": lambda magic: _raw(magic, _INT(-1) + _INT(-1), 0),
    "size of -1": lambda magic: _raw(magic, _INT(-1) + _INT(-1), -1),
    "the smallest size": lambda magic: _raw(magic, _INT(-1) + _INT(-1), -(1 << 31)),
    "the largest size": lambda magic: _raw(magic, _INT(-1) + _INT(-1), (1 << 31) - 1),
    "size one too small": lambda magic: _raw(magic, _INT(-1) + _INT(-1), 13 + 8 * magic),
    "size one too large": lambda magic: _raw(magic, _INT(-1) + _INT(-1), 15 + 8 * magic),
    "magic 2": lambda magic: _raw(2, _INT(-1) * 20),
    "magic -1": lambda magic: _raw(-1, _INT(-1) * 20),
    "the other magic": lambda magic: _raw(1 - magic, _INT(-1) + _INT(-1)),
    **{
        f"codec {codec}": lambda magic, codec=codec: _raw(magic, _INT(-1) + _INT(0), None, codec)  # type: ignore[misc]
        for codec in range(1, 8)
    },
    "garbage after a message": lambda magic: _raw(magic, _INT(-1) + _INT(-1)) + b"garbage",
    "zeros": lambda magic: bytes(100),
    "one byte": lambda magic: b"\x00",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_messages_are_refused_and_nothing_is_added(kernel: Kernel, magic: int, name: str) -> None:
    _refused(kernel, BAD[name](magic), magic, DecodeError)
    if magic:
        _refused(kernel, BAD[name](magic), magic, DecodeError, 1000)


def test_every_truncation_is_refused(kernel: Kernel, magic: int) -> None:
    data = encode(Message(5, b"key", b"value", TIME), magic)
    for size in range(1, len(data)):
        _refused(kernel, data[:size], magic, DecodeError)


def test_every_changed_bit(kernel: Kernel, magic: int) -> None:
    message = Message(5, b"k", b"v", TIME)
    data = encode(message, magic)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 0x80 >> bit % 8
        if bit < 64:  # the offset: no checksum covers it
            offset = int.from_bytes(changed[:8], "big", signed=True)
            span = (-(1 << 63), (1 << 63) - 1)
            assert decoded(kernel, bytes(changed), magic, span) == expected([message._replace(offset=offset)], magic)
        elif bit < 96 or bit // 8 == 16:  # size and magic determine which bytes are checked
            with pytest.raises(DecodeError):
                decoded(kernel, bytes(changed), magic)
        else:
            text = _refused(kernel, bytes(changed), magic, CorruptBatchError)
            assert text.startswith("message of offset 5: CRC 0x")


def test_a_wrong_crc_is_named_with_its_offset(kernel: Kernel, magic: int) -> None:
    data = bytearray(encode_all(MESSAGES[:4], magic))
    data[-1] ^= 1
    last = bytes(data[len(encode_all(MESSAGES[:3], magic)) :])
    stored, actual = struct.unpack_from(">I", last, 12)[0], zlib.crc32(last[16:])
    text = f"message of offset 12: CRC {stored:#010x} is stored, the bytes have {actual:#010x}"
    assert _refused(kernel, bytes(data), magic, CorruptBatchError) == text


def test_a_message_that_is_cut_off_is_met_before_a_wrong_crc(kernel: Kernel, magic: int) -> None:
    wrong = bytearray(encode(MESSAGES[0], magic))
    wrong[-1] ^= 1
    _refused(kernel, bytes(wrong) + encode(MESSAGES[1], magic)[:-1], magic, DecodeError)
    _refused(kernel, BAD["the other magic"](magic) + bytes(wrong), magic, DecodeError)
    _refused(kernel, bytes(wrong) + BAD["the other magic"](magic), magic, CorruptBatchError)


def test_crcs_of_every_length(kernel: Kernel) -> None:
    """The kernel's own CRC-32 against zlib's: each length and alignment, and larger ones."""
    source = random.Random(4)
    sizes = [*range(80), 255, 256, 257, 4095, 65_536, 1_000_003]
    for magic in MAGICS:
        messages = [Message(size, None, source.randbytes(size), TIME) for size in sizes]
        assert decoded(kernel, encode_all(messages, magic), magic) == expected(messages, magic)
        messages = [Message(0, key, b"\xff" * 40, -1) for key in (b"\x00" * 31, b"\xff" * 33, None)]
        assert decoded(kernel, encode_all(messages, magic), magic) == expected(messages, magic)


# ----- runs of messages


def test_runs_end_at_another_magic_a_codec_an_offset_and_the_end(kernel: Kernel) -> None:
    zeros, ones = encode_all(MESSAGES[:3], 0), encode_all(MESSAGES[3:6], 1)
    wrapper = encode(Message(50, None, b"..", TIME, 1), 1)
    data = zeros + ones + wrapper + ones
    borders = [0, len(zeros), len(zeros + ones), len(zeros + ones + wrapper), len(data)]
    assert kernel.message_run(data, borders[0], 1 << 62) == borders[1]
    assert kernel.message_run(data, borders[1], 1 << 62) == borders[2]
    assert kernel.message_run(data, borders[2], 1 << 62) == borders[2]
    assert kernel.message_run(data, borders[3], 1 << 62) == borders[4]
    assert kernel.message_run(data, borders[4], 1 << 62) == borders[4]
    for index, message in enumerate(MESSAGES[:3]):
        assert kernel.message_run(data, 0, message.offset) == len(encode_all(MESSAGES[:index], 0))
        assert kernel.message_run(memoryview(data), 0, message.offset + 1) == len(encode_all(MESSAGES[: index + 1], 0))


def test_runs_hold_whole_messages_only(kernel: Kernel, magic: int) -> None:
    data = encode_all(MESSAGES[:3], magic)
    ends = [len(encode_all(MESSAGES[:count], magic)) for count in range(4)]
    for size in range(len(data) + 1):
        assert kernel.message_run(data[:size], 0, 1 << 62) == max(end for end in ends if end <= size)


def test_runs_stop_before_record_batches_and_what_is_unknown(kernel: Kernel, magic: int) -> None:
    data = encode_all(MESSAGES[:3], magic)
    for other in (2, 3, 127, 128, 255):
        tail = struct.pack(">qiI", 5, 100, 0) + bytes([other]) + bytes(200)
        assert kernel.message_run(data + tail, 0, 1 << 62) == len(data)
        assert kernel.message_run(tail, 0, 1 << 62) == 0


@pytest.mark.parametrize("size", [-(1 << 31), -1, 0, 1, 13])
def test_a_size_that_no_message_has_ends_a_run_with_an_error(kernel: Kernel, magic: int, size: int) -> None:
    data = encode_all(MESSAGES[:3], magic)
    tail = struct.pack(">qiIbb", 20, size + (8 * magic if size == 13 else 0), 0, magic, 0) + bytes(30)
    for before in (b"", data):
        with pytest.raises(DecodeError, match=f"position {len(before)}"):
            kernel.message_run(before + tail, 0, 1 << 62)


# ----- both kernels


def _outcome(kernel: Kernel, data: bytes, magic: int, last_offset: int | None, span: tuple[int, int]) -> Any:
    builder = kernel.builder(ALL)
    try:
        builder.append_messages(data, magic, last_offset, None, *span)
    except DecodeError as error:
        return type(error), builder.rows
    return to_lists(builder.finish())


def _run(kernel: Kernel, data: bytes, position: int, end: int) -> Any:
    try:
        return kernel.message_run(data, position, end)
    except DecodeError as error:
        return type(error)


_BYTES = st.none() | st.binary(max_size=12)
_OFFSETS = st.integers(-3, 40) | st.sampled_from(EXTREMES)
_MESSAGES = st.lists(
    st.builds(Message, _OFFSETS, _BYTES, _BYTES, st.integers(-1, 1 << 45), st.sampled_from([0, 0, 0, 8, 1, 16])),
    max_size=5,
)
_CHANGES = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 255)), max_size=3)


@pytest.mark.skipif(len(KERNELS) == 1, reason="there is one kernel only")
@settings(max_examples=150, deadline=None)  # the fuzz target reader compares them, too
@given(
    _MESSAGES,
    st.sampled_from([0, 1, 1]),
    st.sampled_from([0, 1, 1]),
    _CHANGES,
    st.booleans(),
    st.none() | _OFFSETS,
    st.tuples(_OFFSETS, _OFFSETS),
    st.binary(max_size=20),
)
def test_kernels_agree(
    messages: list[Message],
    written: int,
    magic: int,
    changes: list[tuple[int, int]],
    mend: bool,
    last_offset: int | None,
    span: tuple[int, int],
    tail: bytes,
) -> None:
    pieces = []
    for message in messages:
        piece = bytearray(encode(message, written))
        for position, mask in changes:
            if position < len(piece):
                piece[position] ^= mask
        pieces.append(_with_crc(bytes(piece)) if mend else bytes(piece))
    data = b"".join(pieces)
    for whole in (data, data + tail):
        for bounds in (span, EVERYTHING):
            first, second = (_outcome(kernel, whole, magic, last_offset, bounds) for kernel in KERNELS)
            assert first == second
        for position in (0, len(pieces[0]) if pieces else 0, 3):
            first, second = (_run(kernel, whole, position, span[1]) for kernel in KERNELS)
            assert first == second


@pytest.mark.skipif(len(KERNELS) == 1, reason="there is one kernel only")
@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=120), st.integers(0, 1), st.integers(0, 130))
def test_kernels_agree_on_any_bytes(data: bytes, magic: int, position: int) -> None:
    first, second = (_outcome(kernel, data, magic, 9, EVERYTHING) for kernel in KERNELS)
    assert first == second
    first, second = (_run(kernel, data, position, 50) for kernel in KERNELS)
    assert first == second
