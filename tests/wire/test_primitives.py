"""Primitive types against bytes from their standards, in both directions."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, strategies as st

from spark_klog.errors import DecodeError
from spark_klog.wire.primitives import MAX_FRAME, Reader, Writer, append_uvarint, append_varlong, frame_size

_UMLAUT = "Grüße"
_UMLAUT_BYTES = "4772c3bcc39f65"

# (method of Reader and Writer, value, bytes in hex)
TABLE: list[tuple[str, Any, str]] = [
    ("int16", 258, "0102"),
    ("int16", -2, "fffe"),
    ("int16", -32768, "8000"),
    ("int32", 16909060, "01020304"),
    ("int32", -1, "ffffffff"),
    ("int32", -2147483648, "80000000"),
    # base 128: 150 and 300 are the examples of the protobuf encoding guide
    ("uvarint", 0, "00"),
    ("uvarint", 1, "01"),
    ("uvarint", 127, "7f"),
    ("uvarint", 128, "8001"),
    ("uvarint", 150, "9601"),
    ("uvarint", 300, "ac02"),
    ("uvarint", 16383, "ff7f"),
    ("uvarint", 16384, "808001"),
    ("uvarint", 2147483647, "ffffffff07"),
    ("uvarint", 4294967295, "ffffffff0f"),
    # zig-zag, the table of the protobuf encoding guide
    ("varint", 0, "00"),
    ("varint", -1, "01"),
    ("varint", 1, "02"),
    ("varint", -2, "03"),
    ("varint", 63, "7e"),
    ("varint", -64, "7f"),
    ("varint", 64, "8001"),
    ("varint", -65, "8101"),
    ("varint", 2147483647, "feffffff0f"),
    ("varint", -2147483648, "ffffffff0f"),
    ("varlong", 0, "00"),
    ("varlong", -1, "01"),
    ("varlong", 2147483648, "8080808010"),
    ("varlong", 9223372036854775807, "feffffffffffffffff01"),
    ("varlong", -9223372036854775808, "ffffffffffffffffff01"),
    ("nullable_string", None, "ffff"),
    ("nullable_string", "", "0000"),
    ("nullable_string", "abc", "0003616263"),
    ("nullable_string", _UMLAUT, "0007" + _UMLAUT_BYTES),
    ("nullable_string", "x" * 258, "0102" + "78" * 258),
]
METHODS = sorted({method for method, _, _ in TABLE})


def _ids(entry: object) -> str:
    return str(entry)[:24]


@pytest.mark.parametrize(("method", "value", "expected"), [row for row in TABLE if hasattr(Writer, row[0])], ids=_ids)
def test_writer_gives_the_bytes(method: str, value: Any, expected: str) -> None:
    writer = Writer()
    getattr(writer, method)(value)
    assert writer.to_bytes().hex() == expected
    assert len(writer) == len(expected) // 2


@pytest.mark.parametrize(("method", "value", "data"), TABLE, ids=_ids)
def test_reader_gives_the_value_and_stops_at_its_end(method: str, value: Any, data: str) -> None:
    reader = Reader(bytes.fromhex(data) + b"rest")
    got = getattr(reader, method)()
    assert got == value
    assert type(got) is type(value) or isinstance(got, memoryview)
    assert bytes(reader.take(reader.remaining)) == b"rest"


@pytest.mark.parametrize(("method", "value", "data"), TABLE, ids=_ids)
def test_reader_refuses_every_truncation(method: str, value: Any, data: str) -> None:
    whole = bytes.fromhex(data)
    for size in [*range(min(len(whole), 600)), len(whole) - 1]:
        with pytest.raises(DecodeError):
            getattr(Reader(whole[:size]), method)()


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("uvarint", "ffffffff10"),  # 33 bits
        ("uvarint", "808080808000"),  # six bytes
        ("varint", "ffffffff1f"),
        ("varint", "ffffffffffffffffff01"),
        ("varlong", "ffffffffffffffffff02"),  # 65 bits
        ("varlong", "8080808080808080808000"),  # eleven bytes
        ("nullable_string", "fffe61"),  # length -2
        ("nullable_string", "8000" + "61" * 9),
        ("nullable_string", "0001ff"),  # not UTF-8
        ("nullable_string", "0003eda080"),  # a lone surrogate
    ],
)
def test_reader_refuses(method: str, data: str) -> None:
    with pytest.raises(DecodeError):
        getattr(Reader(bytes.fromhex(data)), method)()


def test_skip_tags() -> None:
    # two tagged fields: tag 0 of 1 byte, tag 300 of 3 bytes
    tags = bytes.fromhex("02" + "0001aa" + "ac0203010203")
    reader = Reader(tags + b"!")
    reader.skip_tags()
    assert bytes(reader.take(1)) == b"!"
    for size in range(len(tags)):
        with pytest.raises(DecodeError):
            Reader(tags[:size]).skip_tags()


@pytest.mark.parametrize("size", [-1, 4, 1 << 62])
def test_take_refuses_what_is_not_there(size: int) -> None:
    reader = Reader(b"abc")
    with pytest.raises(DecodeError):
        reader.take(size)
    assert bytes(reader.take(3)) == b"abc"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_reader_takes_any_buffer(kind: type) -> None:
    assert Reader(kind(b"\x00\x03abc")).nullable_string() == "abc"


class _Range:
    """Stands for a range of a file: it only has a length."""

    def __len__(self) -> int:
        return 5


def test_writer_keeps_spliced_parts_by_reference_and_in_order() -> None:
    writer, part, large = Writer(), _Range(), b"z" * 4096
    writer.int16(1)
    writer.splice(part)
    writer.int16(2)
    writer.splice(large)
    writer.int16(3)
    parts = writer.parts
    assert any(entry is part for entry in parts)
    assert any(entry is large for entry in parts)
    plain = b"".join(b"<range>" if isinstance(entry, _Range) else bytes(entry) for entry in parts)  # type: ignore
    assert plain == b"\x00\x01<range>\x00\x02" + large + b"\x00\x03"
    assert len(writer) == 2 + 5 + 2 + 4096 + 2
    with pytest.raises(TypeError):
        writer.to_bytes()


@pytest.mark.parametrize(
    ("value", "size"),
    [(0, 1), (127, 1), (128, 2), (16383, 2), (16384, 3), (2**28 - 1, 4), (2**28, 5), (2**64 - 1, 10)],
)
def test_uvarint_size(value: int, size: int) -> None:
    data = bytearray()
    append_uvarint(data, value)
    assert len(data) == size


@pytest.mark.parametrize(("prefix", "size"), [("00000000", 0), ("00000102", 258), ("06400000", 104857600)])
def test_frame_size(prefix: str, size: int) -> None:
    assert frame_size(bytes.fromhex(prefix)) == size


@pytest.mark.parametrize("prefix", ["ffffffff", "80000000", "06400001", "7fffffff"])
def test_frame_size_refuses(prefix: str) -> None:
    assert MAX_FRAME == 100 << 20
    with pytest.raises(DecodeError):
        frame_size(bytes.fromhex(prefix))


def test_http_is_not_a_frame() -> None:
    with pytest.raises(DecodeError, match="wrong port"):
        frame_size(b"HTTP")


@given(st.integers(-(2**63), 2**63 - 1))
def test_varlong_against_the_definition(value: int) -> None:
    zigzag = (value * 2) if value >= 0 else (-value * 2 - 1)
    groups = []
    while True:
        groups.append(zigzag % 128)
        zigzag //= 128
        if not zigzag:
            break
    expected = bytes(group + 128 for group in groups[:-1]) + bytes(groups[-1:])
    data = bytearray()
    append_varlong(data, value)
    assert data == expected
    assert Reader(expected).varlong() == value


@given(st.binary(max_size=24), st.sampled_from([*METHODS, "skip_tags"]))
def test_any_bytes_give_a_value_or_decode_error(data: bytes, method: str) -> None:
    reader = Reader(data)
    try:
        value = getattr(reader, method)()
    except DecodeError:
        return
    assert 0 <= reader.remaining < max(1, len(data))
    read = data[: len(data) - reader.remaining]
    if method in ("int16", "int32"):
        assert struct.pack({"int16": ">h", "int32": ">i"}[method], value) == read
    elif isinstance(value, (str, memoryview)):
        content = value.encode() if isinstance(value, str) else bytes(value)
        assert read.endswith(content)


@given(st.binary(max_size=64), st.lists(st.sampled_from(METHODS), max_size=12))
def test_any_sequence_of_reads_stays_inside(data: bytes, methods: list[str]) -> None:
    reader = Reader(data)
    for method in methods:
        try:
            getattr(reader, method)()
        except DecodeError:
            break
        assert 0 <= reader.position <= len(data)
