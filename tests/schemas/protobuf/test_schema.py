"""Schemas of Protobuf: texts, descriptors, messages, and what of another schema can be read."""

from __future__ import annotations

import base64
from typing import Any

import pyarrow as pa
import pytest

from spark_klog.errors import SchemaError, SchemaTimedOut
from spark_klog.schemas.codec import codec_of
from spark_klog.schemas.protobuf.columns import columns_of
from spark_klog.schemas.protobuf.decoder import ProtobufDecoder
from spark_klog.schemas.protobuf.encoder import ProtobufEncoder
from spark_klog.schemas.protobuf.message_indexes import read_indexes, write_indexes
from spark_klog.schemas.protobuf.schema import parse_schema
from spark_klog.schemas.protoc.files import parse_proto

from .support import WIDE, message_class, schema

_PART = 'syntax = "proto3"; package parts; message Part { string text = 1; }'
_WHOLE = 'syntax = "proto3"; import "lib/part.proto"; message Whole { parts.Part part = 1; }'


def test_the_columns() -> None:
    kind = columns_of(schema(WIDE).message).type
    types = {field.name: str(field.type) + (" not null" if not field.nullable else "") for field in kind}
    line = "struct<sku: string not null, count: int32 not null, prices: list<element: double not null> not null>"
    assert types == {
        "id": "int64 not null",
        "name": "string",
        "at": "timestamp[us, tz=UTC]",
        "took": "duration[us]",
        "lines": f"map<string, {line}> not null",
        "more": f"list<element: {line} not null> not null",
        "kind": "string not null",
        "kinds": "list<element: string not null> not null",
        "card": "int32",
        "cash": "string",
        "gift": line,
        "tip": "struct<value: int64 not null>",
        "extra": "struct<type_url: string not null, value: binary not null>",
        "deltas": "list<element: int32 not null> not null",
        **dict.fromkeys(("u32", "f32", "s32", "far"), "int32 not null"),
        **dict.fromkeys(("u64", "f64", "s64", "zig"), "int64 not null"),
        "raw": "binary not null",
        "weight": "double not null",
        "ratio": "float not null",
        "paid": "bool not null",
        "flags": "map<int32, bool> not null",
        "tags": "list<element: string not null> not null",
        "price": "struct<value: binary not null, precision: int32 not null, scale: int32 not null>",
        "bits": "list<element: bool not null> not null",
    }


def test_descriptors_in_base64() -> None:
    _, files = parse_proto(_WHOLE, {"lib/part.proto": _PART})
    part, whole = (base64.b64encode(file.SerializeToString()).decode() for file in files)
    for text, reference in ((_WHOLE, _PART), (whole, _PART), (_WHOLE, part), (whole, part)):
        made = parse_schema(text, {"lib/part.proto": reference})
        assert str(ProtobufDecoder(made).type) == "struct<part: struct<text: string not null>>"
    assert parse_schema(_WHOLE, {"lib/part.proto": _PART}) is parse_schema(_WHOLE, {"lib/part.proto": _PART})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("message {", "Expected message name"),
        ('syntax = "proto3"; message M { Gone a = 1; }', '"Gone" is not defined'),
        ('syntax = "proto3"; import "gone.proto";', "gone.proto"),
        ('syntax = "proto3"; enum E { A = 0; }', "the file has no message"),
    ],
    ids=str,
)
def test_texts_that_are_no_schemas(text: str, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        parse_schema(text, {})


def test_protoc_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_klog.schemas.protoc.files._PARSE_SECONDS", 0.001)
    with pytest.raises(SchemaTimedOut, match="protoc did not parse the schema within"):
        parse_schema('syntax = "proto3"; message Late {}', {})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ("message M { M m = 1; }", "m"),
        (
            "message M { message A { repeated B b = 1; } message B { map<string, A> a = 1; } A x = 1; }",
            r"x\.b\.a\.value",
        ),
        ("message M { google.protobuf.Struct s = 1; }", "s"),
    ],
    ids=str,
)
def test_messages_that_contain_themselves(body: str, field: str) -> None:
    made = schema(f'syntax = "proto3"; import "google/protobuf/struct.proto"; {body}')
    with pytest.raises(SchemaError, match=f"field {field}.*: message .* contains itself"):
        ProtobufDecoder(made)


_COMPATIBLE: list[Any] = [
    ("int32 a = 1;", "int64 b = 1;", -1, -1),
    ("int64 a = 1;", "int32 b = 1;", 2**32 + 5, 5),
    ("int32 a = 1;", "bool b = 1;", 7, True),
    ("int32 a = 1;", "E b = 1;", 1, "B"),
    ("E a = 1;", "uint32 b = 1;", 1, 1),
    ("sint32 a = 1;", "sint64 b = 1;", -7, -7),
    ("string a = 1;", "bytes b = 1;", "x", b"x"),
    ("int32 a = 1;", "repeated int32 b = 1;", 5, [5]),
    ("repeated string a = 1;", "string b = 1;", ["x", "y"], "y"),
    ("string a = 1;", "string b = 2;", "x", ""),
    ("M0 a = 1;", "bytes b = 1;", {"a": 5}, b"\x08\5"),
]
_OTHERS: list[Any] = [
    ("int32 a = 1;", "sint32 b = 1;", "field b is sint32, but was written as int32"),
    ("int32 a = 1;", "string b = 1;", "field b is string, but was written as int32"),
    ("float a = 1;", "fixed32 b = 1;", "field b is fixed32, but was written as float"),
    ("repeated int32 a = 1;", "int32 b = 1;", "field b is one int32, but was written as a list of them"),
    ("message I { int32 x = 1; } I a = 1;", "message I { bytes x = 1; } I b = 1;", "field b.x is bytes"),
]
_PAIRS = [(case[0], case[1]) for case in (*_COMPATIBLE, *_OTHERS)]


def _decode(writer: str, reader: str, **fields: Any) -> Any:
    number = _PAIRS.index((writer, reader))
    made = []
    for bodies in zip(*_PAIRS, strict=True):  # all in two files: protoc takes its time for each
        messages = " ".join(f"message M{index} {{ {body} }}" for index, body in enumerate(bodies))
        made.append(schema(f'syntax = "proto3"; enum E {{ A = 0; B = 1; }} {messages}', f"M{number}"))
    decoder = ProtobufDecoder(made[1])
    data = message_class(made[0])(**fields).SerializeToString()
    decoded = decoder.decode(pa.array([data]), [decoder.program(made[0])])
    assert not decoded.bad
    return decoded.values.to_pylist()[0]


@pytest.mark.parametrize(("writer", "reader", "given", "read"), _COMPATIBLE, ids=str)
def test_compatible_types(writer: str, reader: str, given: Any, read: Any) -> None:
    assert _decode(writer, reader, a=given) == {"b": read}


@pytest.mark.parametrize(("writer", "reader", "reason"), _OTHERS, ids=str)
def test_types_that_would_mean_something_else(writer: str, reader: str, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        _decode(writer, reader)


def test_editions_and_extensions(kernel: str) -> None:
    made = schema(
        """edition = "2023";
        message M {
            int32 a = 1;
            int32 b = 2 [features.field_presence = IMPLICIT];
            I i = 3 [features.message_encoding = DELIMITED];
            repeated int32 p = 4 [features.repeated_field_encoding = EXPANDED]; K k = 5;
            int32 r = 6 [features.field_presence = LEGACY_REQUIRED]; extensions 100 to 200;
            message I { string s = 1; }
            enum K { option features.enum_type = CLOSED; X = 0; Y = 1; }
        }
        extend M { string more = 100; }
        """
    )
    message = message_class(made)(a=0, b=0, p=[1, 2], k=1, r=3)
    message.i.s = "q"
    data = message.SerializeToString()
    decoder = ProtobufDecoder(made)
    decoded = decoder.decode(pa.array([data, data + b"\xa2\6\1z"]), [made])
    assert decoded.values.to_pylist() == [{"a": 0, "b": 0, "i": {"s": "q"}, "p": [1, 2], "k": "Y", "r": 3}] * 2
    assert ProtobufEncoder(made, decoder.type).encode(decoded.values).to_pylist() == [data] * 2


def test_message_indexes() -> None:
    for indexes in ((0,), (1,), (0, 1), (63, 64, 300)):
        assert read_indexes(b"x" + write_indexes(indexes) + b"y", 1) == (indexes, len(write_indexes(indexes)) + 1)
    assert write_indexes((0,)) == b"\0"
    assert write_indexes((1, 0)) == b"\4\2\0"
    for data, reason in (
        (b"", "cut off"),
        (b"\x04\2", "cut off"),
        (b"\1", "-1 message indexes"),
        (b"\2\1", "-1 is no"),
    ):
        with pytest.raises(SchemaError, match=reason):
            read_indexes(data)
    with pytest.raises(SchemaError, match="65 message indexes"):
        read_indexes(b"\x82\1" + b"\0" * 65)
    with pytest.raises(SchemaError, match="more than 32 bits"):
        read_indexes(b"\xff" * 5 + b"\0")
    decoder = ProtobufDecoder(schema(WIDE))
    with pytest.raises(SchemaError, match="its file has no message 7"):
        decoder.program(decoder.reader, b"\2\x0e")
    with pytest.raises(SchemaError, match="1 bytes are left over"):
        decoder.program(decoder.reader, b"\0\0")
    with pytest.raises(SchemaError, match=r"message shop\.Other, another one"):
        decoder.program(decoder.reader, b"\2\2")


def test_which_message_it_is_with_maps() -> None:
    text = 'syntax = "proto3"; message M { map<string, string> a = 1; message In { int32 x = 1; } message On {} }'
    made = parse_schema(text, {}, "M.In")
    assert made.indexes == (0, 0)
    assert made.message_of((0, 1)).full_name == "M.On"
    assert made.message_of((0, 2)).full_name == "M.On"
    serialized = base64.b64encode(parse_proto(text, {})[1][-1].SerializeToString()).decode()
    made = parse_schema(serialized, {}, "M.In")
    assert made.indexes == (0, 1)
    assert made.message_of((0, 2)).full_name == "M.On"
    with pytest.raises(SchemaError, match="has no message 0/3"):
        made.message_of((0, 3))


def test_the_schema_of_a_type_is_read_as_that_type() -> None:
    codec = codec_of("protobuf", "a.b.Row")
    kind = columns_of(schema(WIDE).message).type
    text = codec.schema_of(kind)
    made = codec.parse(text)
    assert codec.name(made) == "a.b.Row"
    assert codec.decoder(made).type == kind


def test_a_message_of_another_name_is_another_message() -> None:
    files = {
        name: schema(f'syntax = "proto3"; package {package}; message {name} {{ int64 id = 1; }}', f"{package}.{name}")
        for package, name in (("shop", "Created"), ("shop", "Refunded"))
    }
    moved = schema('syntax = "proto3"; package store; message Created { int64 id = 1; }')
    decoder = ProtobufDecoder(files["Created"])
    with pytest.raises(SchemaError, match=r"it is message shop\.Refunded, another one than shop\.Created"):
        decoder.program(files["Refunded"])
    record = message_class(moved)(id=5).SerializeToString()
    assert decoder.decode(pa.array([record]), [decoder.program(moved)]).values.to_pylist() == [{"id": 5}]
