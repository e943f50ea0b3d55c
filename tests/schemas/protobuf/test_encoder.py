"""Columns written as messages: what fits, and what is refused by name."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest

from spark_klog.errors import EncodeError, SchemaError
from spark_klog.schemas.protobuf.decoder import ProtobufDecoder
from spark_klog.schemas.protobuf.encoder import ProtobufEncoder
from spark_klog.schemas.protobuf.from_arrow import schema_of

from .support import WIDE, message_class, order, schema

pytestmark = pytest.mark.usefixtures("kernel")


_FITTING: list[Any] = [
    ("int64 a = 1;", pa.int8(), -5, -5),
    ("int64 a = 1;", pa.uint32(), 2**32 - 1, 2**32 - 1),
    ("uint32 a = 1;", pa.int32(), -1, 2**32 - 1),
    ("fixed64 a = 1;", pa.int64(), -1, 2**64 - 1),
    ("uint64 a = 1;", pa.uint64(), 2**64 - 1, 2**64 - 1),
    ("sint32 a = 1;", pa.int32(), -(2**31), -(2**31)),
    ("int32 a = 1;", pa.date32(), dt.date(1970, 1, 3), 2),
    ("double a = 1;", pa.float32(), 0.5, 0.5),
    ("E a = 1;", pa.string(), "B", -2),
    ("E a = 1;", pa.dictionary(pa.int32(), pa.string()), "A", 1),
    ("E a = 1;", pa.string(), "UNKNOWN_ENUM_VALUE_E_-7", -7),
    ("bytes a = 1;", pa.binary(2), b"ab", b"ab"),
    ("string a = 1;", pa.large_string(), "x", "x"),
    ("string a = 1;", pa.string_view(), "long enough not to be inlined", "long enough not to be inlined"),
    ("bytes a = 1;", pa.binary_view(), b"ab", b"ab"),
    ("map<string, int64> a = 1;", pa.map_(pa.string_view(), pa.int64()), [("k", 1)], {"k": 1}),
    ("repeated int32 a = 1;", pa.list_(pa.int32()), [1, -1, 300], [1, -1, 300]),
    ("repeated int32 a = 1 [packed = false];", pa.list_(pa.int32()), [1, 0], [1, 0]),
    ("repeated E a = 1;", pa.list_(pa.string()), ["A", "Z"], [1, 0]),
    ("repeated string a = 1;", pa.list_(pa.string()), ["", "b"], ["", "b"]),
    ("repeated string a = 1;", pa.list_(pa.string()), None, []),
    ("map<string, int64> a = 1;", pa.map_(pa.string(), pa.int64()), [("", 0), ("k", 1)], {"": 0, "k": 1}),
    ("optional int32 a = 1;", pa.int32(), None, 0),
    ("int32 A = 1;", pa.int32(), 5, 5),
]
_MISFITS: list[Any] = [
    ("int32 a = 1;", pa.int64(), "field a: a column of int64 can't be written as int32: cast it"),
    ("int32 a = 1;", pa.uint32(), "field a: a column of uint32"),
    ("string a = 1;", pa.binary(), "field a: a column of binary can't be written as string"),
    ("E a = 1;", pa.int32(), "field a: a column of int32 can't be written as enum"),
    ("float a = 1;", pa.float64(), "field a: a column of double can't be written as float"),
    ("repeated int32 a = 1;", pa.int32(), "can't be written as repeated"),
    ("int32 a = 1;", pa.list_(pa.int32()), "can't be written as int32"),
    ("map<string, int32> a = 1;", pa.map_(pa.int32(), pa.int32()), "field a.key: "),
    ("google.protobuf.Timestamp a = 1;", pa.int64(), "can't be written as google.protobuf.Timestamp"),
    ("int32 b = 1;", pa.int32(), r"field a: message M\d+ has no such field"),
    ("int32 A = 1; int32 aA = 2; M m = 3;", pa.struct([pa.field("b", pa.int32())]), "field a: "),
]
_BAD_ROWS: list[Any] = [
    ("int32 a = 1;", pa.int32(), None, "row 1: field a: is null"),
    ("E a = 1;", pa.string(), "C", "row 1: field a: .*no value of"),
    ("E a = 1;", pa.string(), "UNKNOWN_ENUM_VALUE_E_1", "no value of"),
    ("E a = 1;", pa.string(), "UNKNOWN_ENUM_VALUE_E_01", "no value of"),
    ("E a = 1;", pa.string(), "UNKNOWN_ENUM_VALUE_E_", "no value of"),
    ("E a = 1;", pa.string(), "UNKNOWN_ENUM_VALUE_E_2147483648", "no value of"),
    ("repeated int32 a = 1;", pa.list_(pa.int32()), [None], "field a.*: is null"),
    ("map<string, int32> a = 1;", pa.map_(pa.string(), pa.int32()), [("k", None)], "field a.*: is null"),
]
_TIMES = ("google.protobuf.Timestamp a = 1;", "google.protobuf.Duration a = 1;")
#: All bodies in one file: protoc takes its time for each.
_BODIES = list(dict.fromkeys([case[0] for case in (*_FITTING, *_MISFITS, *_BAD_ROWS)] + [*_TIMES]))


def _file(*bodies: str, syntax: str = "proto3") -> str:
    imports = 'import "google/protobuf/timestamp.proto"; import "google/protobuf/duration.proto";'
    messages = "\n".join(f"message M{number} {{ {body} }}" for number, body in enumerate(bodies))
    return f'syntax = "{syntax}"; {imports} enum E {{ Z = 0; A = 1; B = -2; }} message M {{}}\n{messages}'


def _encode(body: str, kind: pa.DataType, *values: Any) -> list[Any]:
    """Columns `a` of a type, written as a message of the body, as google.protobuf reads it."""
    made = schema(_file(*_BODIES), f"M{_BODIES.index(body)}")
    struct = pa.struct([pa.field("a", kind)])
    written = ProtobufEncoder(made, struct).encode(pa.array([{"a": value} for value in values], struct))
    return [message_class(made).FromString(value) for value in written.to_pylist()]


def test_all_types(kernel: str) -> None:
    made = schema(WIDE)
    messages = [order(made, number) for number in range(7)]
    values = [message.SerializeToString() for message in messages]
    decoded = ProtobufDecoder(made).decode(pa.array(values, pa.binary()), [made])
    encoder = ProtobufEncoder(made, decoded.values.type)
    for message in messages:
        message.ClearField("nothing")
    whole = encoder.encode(decoded.values, b"prefix").to_pylist()
    assert [message_class(made).FromString(value[7:]) for value in whole] == messages
    assert encoder.encode(decoded.values.slice(2, 3), b"prefix").to_pylist() == whole[2:5]
    sizes = [len(message.SerializeToString()) for message in messages]
    assert [len(value) - 7 for value in whole] == sizes
    several = pa.concat_arrays([decoded.values[:1], pa.nulls(2, decoded.values.type)])
    assert encoder.encode(several).to_pylist() == [whole[0][7:], None, None]


@pytest.mark.parametrize(("body", "kind", "value", "expected"), _FITTING, ids=str)
def test_what_fits(body: str, kind: pa.DataType, value: Any, expected: Any) -> None:
    for message in _encode(body, kind, value, value):
        ((name, _),) = message.DESCRIPTOR.fields_by_name.items()
        written = getattr(message, name)
        assert (dict(written) if isinstance(expected, dict) else written) == expected


@pytest.mark.parametrize("micros", [0, 1, -1, -1_000_000, -1_500_001, 10**15])
def test_times(micros: int) -> None:
    (message,) = _encode(_TIMES[0], pa.timestamp("us"), micros)
    assert message.a.ToMicroseconds() == micros
    assert 0 <= message.a.nanos < 10**9
    (message,) = _encode(_TIMES[1], pa.duration("us"), micros)
    assert message.a.ToMicroseconds() == micros
    assert message.a.seconds * message.a.nanos >= 0
    (message,) = _encode(_TIMES[0], pa.timestamp("ms", "UTC"), 5)
    assert message.a.nanos == 5_000_000


@pytest.mark.parametrize(("body", "kind", "reason"), _MISFITS, ids=str)
def test_what_does_not_fit(body: str, kind: pa.DataType, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        _encode(body, kind)


@pytest.mark.parametrize(("body", "kind", "value", "reason"), _BAD_ROWS, ids=str)
def test_a_row_that_does_not_fit(body: str, kind: pa.DataType, value: Any, reason: str) -> None:
    good = [] if "list" in str(kind) or "map" in str(kind) else "A" if kind == pa.string() else 1
    with pytest.raises(EncodeError, match=reason):
        _encode(body, kind, good, value)


def test_proto2() -> None:
    body = "required int32 a = 1; optional int32 b = 2 [default = 5]; optional group G = 3 { optional int32 x = 1; }"
    made = schema(_file(body, "optional E a = 1;", syntax="proto2"), "M0")
    kind = pa.struct([pa.field("a", pa.int32()), pa.field("g", pa.struct([pa.field("x", pa.int32())]))])
    encoder = ProtobufEncoder(made, kind)
    written = encoder.encode(pa.array([{"a": 0, "g": {"x": 2}}, {"a": 1, "g": None}], kind)).to_pylist()
    assert written == [b"\x08\0\x1b\x08\2\x1c", b"\x08\1"]
    with pytest.raises(EncodeError, match="row 0: field a: is null"):
        encoder.encode(pa.array([{"a": None, "g": None}], kind))
    with pytest.raises(SchemaError, match="field a: is required, but there is no such column"):
        ProtobufEncoder(made, pa.struct([pa.field("b", pa.int32())]))
    kind = pa.struct([pa.field("a", pa.string())])
    encoder = ProtobufEncoder(schema(_file(body, "optional E a = 1;", syntax="proto2"), "M1"), kind)
    with pytest.raises(EncodeError, match="no value of"):
        encoder.encode(pa.array([{"a": "UNKNOWN_ENUM_VALUE_E_7"}], kind))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (pa.decimal128(10, 2), "field a: Protobuf has no type for decimal128"),
        (pa.timestamp("us"), "field a: Protobuf has no type for timestamp"),
        (pa.list_(pa.list_(pa.int32())), r"field a\[\]: Protobuf has no lists or maps directly in others"),
        (pa.map_(pa.float64(), pa.int32()), "field a: Protobuf's maps have keys of"),
        (pa.struct([]), "field a: a struct without fields"),
    ],
    ids=str,
)
def test_types_without_a_schema(kind: pa.DataType, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        schema_of(pa.struct([pa.field("a", kind)]))
    with pytest.raises(SchemaError, match="field a-b: Protobuf's names are letters, digits and _"):
        schema_of(pa.struct([pa.field("a-b", pa.int32())]))
    with pytest.raises(SchemaError, match="Protobuf records are messages"):
        schema_of(kind if not pa.types.is_struct(kind) else pa.int32())


def test_a_oneof_has_one_value() -> None:
    """Two are refused; a message without fields, which has no column, ends the others as it does for google."""
    made = schema(
        'syntax = "proto3"; message M { oneof o { Empty empty = 1; string s = 2; In in = 3; } repeated In all = 4; } '
        "message Empty {} message In { oneof p { int32 x = 1; int32 y = 2000; } }"
    )
    decoder = ProtobufDecoder(made)
    encoder = ProtobufEncoder(made, decoder.type)
    inner = {"x": None, "y": None}
    good = [{"s": "a", "in": None, "all": [{"x": 1, "y": None}, inner]}, {"s": None, "in": inner, "all": []}]
    written = encoder.encode(pa.array(good, decoder.type))
    assert decoder.decode(written, [made]).values.to_pylist() == good
    for row, path in (
        ({"s": "", "in": inner, "all": []}, "in"),
        ({"s": None, "in": {"x": 0, "y": 0}, "all": []}, r"in\.y"),
        ({"s": None, "in": None, "all": [inner, {"x": 1, "y": 1}]}, r"all\[\]\.y"),
    ):
        with pytest.raises(EncodeError, match=f"^row 1: field {path}: is set beside another field of its oneof: all"):
            encoder.encode(pa.array([good[0], row], decoder.type))
    records = [b"\x12\1a\x0a\0", b"\x0a\0\x12\1a", b"\x1a\2\x08\1\x0a\0", b"\x1a\2\x08\1\x0a\0\x1a\0"]
    read = decoder.decode(pa.array(records), [made]).values.to_pylist()
    assert [(row["s"], row["in"]) for row in read] == [(None, None), ("a", None), (None, None), (None, inner)]
