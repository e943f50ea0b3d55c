"""The Arrow types of schemas, of all drafts."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from spark_klog.errors import SchemaError
from spark_klog.schemas.json_schema.from_arrow import schema_of
from spark_klog.schemas.json_schema.schema import CONNECT, parse_schema

from .support import kind_of, record

_TEXT, _WHOLE = {"type": "string"}, {"type": "integer"}
_DECIMAL = {
    "type": "number",
    "connect.type": "bytes",
    "title": f"{CONNECT}Decimal",
    "connect.parameters": {"scale": "2", "connect.decimal.precision": "9"},
}


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "boolean"}, "bool"),
        (_WHOLE, "int64"),
        ({"type": "integer", "connect.type": "int8"}, "int8"),
        ({"type": "number"}, "double"),
        ({"type": "number", "connect.type": "float32"}, "float"),
        (_DECIMAL, "decimal128(9, 2)"),
        ({"type": "integer", "title": f"{CONNECT}Date"}, "date32[day]"),
        ({"type": "integer", "title": f"{CONNECT}Timestamp"}, "timestamp[us, tz=UTC]"),
        ({"type": "string", "format": "date-time"}, "timestamp[us, tz=UTC]"),
        ({"type": "string", "format": "date-time-local"}, "timestamp[us]"),
        ({"type": "string", "format": "date"}, "date32[day]"),
        ({"type": "string", "format": "time"}, "string"),
        ({"type": "string", "contentEncoding": "base64"}, "binary"),
        ({"type": "string", "connect.type": "bytes"}, "binary"),
        ({"type": "null"}, "null"),
        ({"const": 3}, "int64"),
        ({"enum": ["a", None]}, "string"),
        ({"type": "array", "items": _WHOLE}, "list<element: int64 not null>"),
        ({"type": "array"}, "list<element: string>"),
        (
            {"type": "array", "items": [_WHOLE, {"type": "number"}], "additionalItems": False},
            "list<element: double not null>",
        ),
        ({"prefixItems": [_WHOLE, _TEXT], "items": False}, "list<element: string not null>"),
        ({"type": "object", "additionalProperties": _WHOLE}, "map<string, int64>"),
        ({"type": "object", "patternProperties": {"^a": {"type": ["number", "null"]}}}, "map<string, double>"),
        (
            record(a=_WHOLE, b={"type": "object"}, required=("b", "c")),
            "struct<a: int64, b: string not null, c: string>",
        ),
        # free objects and values of several kinds are JSON text
        ({"type": "object"}, "string"),
        ({}, "string"),
        (True, "string"),
        ({"type": ["string", "integer"]}, "string"),
        ({"type": ["integer", "null"]}, "int64"),
        ({"anyOf": [{"type": "null"}, {"type": "string", "format": "date"}]}, "date32[day]"),
        ({"oneOf": [_WHOLE, {"type": "number"}]}, "double"),
        ({"oneOf": [{"type": "string", "format": "date"}, _TEXT]}, "string"),
        (
            {
                "oneOf": [
                    record(a=_WHOLE, k={"const": "x"}, required=("k",)),
                    record(b=_TEXT, k={"const": "y"}, required=("k",)),
                ]
            },
            "struct<a: int64, k: string not null, b: string>",
        ),
        ({"oneOf": [record(a=_WHOLE), _TEXT]}, "string"),
        (
            {**record(a=_WHOLE, b=_TEXT), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
            "struct<a: int64, b: string>",
        ),
        (
            {"allOf": [record(a=_WHOLE), record(a={"type": "number"}, b=_TEXT, required=("a",))]},
            "struct<a: int64 not null, b: string>",
        ),
        ({"allOf": [{"minimum": 3}, {"type": ["integer", "null"]}]}, "int64"),
        ({"properties": {"a": False, "b": True}}, "struct<b: string>"),
        (
            {"properties": {"b": {**_TEXT, "connect.index": 1}, "a": {**_WHOLE, "connect.index": 0}}},
            "struct<a: int64, b: string>",
        ),
        (
            record(a={"type": "integer", "default": 5}, b={"type": "integer", "default": "no"}),
            "struct<a: int64 not null, b: int64>",
        ),
        (
            record(value=_TEXT, children={"type": "array", "items": {"$ref": "#"}}),
            "struct<value: string, children: list<element: string>>",
        ),
        ({"$ref": "#/definitions/n~1m", "definitions": {"n/m": _WHOLE}}, "int64"),
        ({"$ref": "#x", "$defs": {"y": {"$anchor": "x", "type": "boolean"}}}, "bool"),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "$ref": "#/definitions/a",
                "type": "string",
                "definitions": {"a": _WHOLE},
            },
            "int64",
        ),
    ],
)
def test_types(schema: Any, kind: str) -> None:
    assert str(kind_of(schema)) == kind


def test_references_by_name_and_url() -> None:
    order = record(customer={"$ref": "customer.json"}, place={"$ref": "https://shop/place#/$defs/point"})
    place = {"$id": "https://shop/place", "$defs": {"point": record(x={"$ref": "#/$defs/n"}), "n": {"type": "number"}}}
    customer = record(name={"type": "string"}, parent={"$ref": "customer.json"})
    texts = {"customer.json": json.dumps(customer), "any name": json.dumps(place)}
    expected = "struct<customer: struct<name: string, parent: string>, place: struct<x: double>>"
    assert str(parse_schema(json.dumps(order), texts).column.type) == expected
    based = json.dumps({"$id": "https://shop/order", **order})
    assert str(parse_schema(based, texts).column.type) == expected


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (record(a=record(b={"type": "text"})), 'field a.b: "text" is not a type of JSON Schema'),
        (record(a={"$ref": "b.json"}), r"field a: \$ref b.json is neither in the schema nor among its references"),
        (record(a={"$ref": "#/$defs/b"}), r"field a: \$ref #/\$defs/b: there is no '\$defs'"),
        (record(a={"allOf": [_TEXT, _WHOLE]}), "field a: no value is a string and also an integer"),
        (record(a={**_DECIMAL, "connect.parameters": {"scale": "40"}}), "field a: a decimal with .*at most 38 digits"),
        (record(a={**_DECIMAL, "connect.parameters": {}}), "field a: a .*Decimal needs its scale, as "),
        (record(a={"type": "number", "title": _DECIMAL["title"], "scale": 2}), "field a: a .*Decimal needs its scale"),
        (record(a={"anyOf": {}}), "field a: 'anyOf' must be an array"),
        (record(a=[]), r"field a: \[\] is not a schema"),
        (False, "false is not a schema"),
    ],
)
def test_refused(schema: Any, words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        kind_of(schema)


def test_texts_that_are_no_schemas() -> None:
    for text in ("", "3", "[1]", '{"const": NaN}', "[" * 100_000):
        with pytest.raises(SchemaError, match="JSON Schema"):
            parse_schema(text)


def test_schemas_too_large() -> None:
    deep: Any = _TEXT
    for _ in range(70):
        deep = {"type": "array", "items": deep}
    with pytest.raises(SchemaError, match="more than 64 levels"):
        kind_of(deep)
    twice = {f"d{n}": record(a={"$ref": f"#/$defs/d{n + 1}"}, b={"$ref": f"#/$defs/d{n + 1}"}) for n in range(40)}
    with pytest.raises(SchemaError, match="more than 10,000 parts"):
        kind_of({"$ref": "#/$defs/d0", "$defs": {**twice, "d40": _TEXT}})


_KIND = pa.struct(
    [
        pa.field("n", pa.null()),
        pa.field("b", pa.bool_(), nullable=False),
        *[pa.field(str(kind), kind) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())],
        pa.field("f", pa.float32()),
        pa.field("d", pa.float64()),
        pa.field("s", pa.string()),
        pa.field("x", pa.binary()),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("local", pa.timestamp("us")),
        pa.field("price", pa.decimal128(9, 2)),
        pa.field("list", pa.list_(pa.field("element", pa.struct([pa.field("z", pa.int32())])))),
        pa.field("map", pa.map_(pa.string(), pa.list_(pa.field("element", pa.float64(), nullable=False)))),
        pa.field("inner", pa.struct([pa.field("a b", pa.struct([pa.field("\u20ac", pa.string())]))])),
    ]
)


def test_the_schema_of_a_type_has_that_type() -> None:
    assert parse_schema(schema_of(_KIND)).column.type == _KIND
    assert parse_schema(schema_of(_KIND)).name == "topLevelRecord"
    for kind in (pa.duration("us"), pa.list_(pa.time32("ms")), pa.map_(pa.int32(), pa.string())):
        with pytest.raises(SchemaError, match=r"JSON Schema has no type for .*: cast it"):
            schema_of(kind)
