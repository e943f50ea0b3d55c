"""Rows as JSON values, by a schema of theirs or by a given one."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from typing import Any

import jsonschema
import pyarrow as pa
import pytest

from spark_klog.errors import EncodeError, SchemaError
from spark_klog.schemas.json_schema.from_arrow import schema_of
from spark_klog.schemas.json_schema.schema import CONNECT

from .support import decode, encode, kind_of, record

_TEXT, _WHOLE, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_UTC = dt.timezone.utc
_KIND = pa.struct(
    [
        pa.field("first", pa.string()),
        pa.field("b", pa.bool_(), nullable=False),
        pa.field("i", pa.int8()),
        pa.field("f", pa.float32()),
        pa.field("d", pa.float64()),
        pa.field("x", pa.binary()),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("local", pa.timestamp("us")),
        pa.field("price", pa.decimal128(20, 10)),
        pa.field("list", pa.list_(pa.field("element", pa.struct([pa.field("z", pa.int32())])))),
        pa.field("map", pa.map_(pa.string(), pa.list_(pa.field("element", pa.float64(), nullable=False)))),
        pa.field("inner", pa.struct([pa.field('a "b', pa.string()), pa.field("c", pa.string())])),
    ]
)
_FULL = {
    "first": 'a "quoted" \\ \u20ac \n \x00 text',
    "b": True,
    "i": -128,
    "f": 0.5,
    "d": 1e300,
    "x": b"\x00\xff",
    "day": dt.date(1, 1, 1),
    "at": dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, _UTC),
    "local": dt.datetime(2024, 1, 2, 3, 4, 5),
    "price": Decimal("-0.0000000001"),
    "list": [{"z": 1}, None, {"z": None}],
    "map": [("k", [0.1, -0.0]), ('"', None), ("", [])],
    "inner": {'a "b': "\\", "c": None},
}


def test_all_types_there_and_back() -> None:
    empty: dict[str, Any] = {**dict.fromkeys(_KIND.names), "b": False}
    rows = [_FULL, empty, None, {**empty, "inner": {'a "b': None, "c": "c"}, "map": [], "list": []}]
    values = pa.array(rows, _KIND)
    schema = json.loads(schema_of(_KIND))
    for part in (values, values[1:], values[2:3], values[:0], pa.concat_arrays([values, values])[3:6]):
        written = encode(schema, part, b"\0\0\0\0\1")
        assert all(data is None or data.startswith(b"\0\0\0\0\1{") for data in written)
        bare = [None if data is None else data[5:] for data in written]
        for data in bare:
            if data is not None:
                jsonschema.validate(json.loads(data), schema)
        decoded = decode(schema, *bare)
        assert not decoded.bad
        assert decoded.values.to_pylist() == part.to_pylist()
    assert json.loads(encode(schema, values[1:2])[0] or b"") == {"b": False}
    assert json.loads(encode(schema, values[3:])[0] or b"")["inner"] == {"c": "c"}


def test_layouts_of_text_and_bytes() -> None:
    rows = [{"a": "long enough not to be inlined", "b": b"\0", "c": [("k", 1)]}, {"a": None, "b": None, "c": None}]
    kinds = [pa.string(), pa.binary()], [pa.large_string(), pa.large_binary()], [pa.string_view(), pa.binary_view()]
    written = []
    for text, data in kinds:
        kind = pa.struct([("a", text), ("b", data), ("c", pa.map_(text, pa.int64()))])
        written.append((schema_of(kind), encode(json.loads(schema_of(kind)), pa.array(rows, kind))))
    assert written == written[:1] * 3


def test_null_is_left_out_or_written_as_the_schema_says() -> None:
    schema = record(
        a={"type": ["integer", "null"]}, b={"type": ["integer", "null"]}, c=_WHOLE, required=("b", "c")
    )  # a may be left out, b may be null
    values = pa.array([{"a": None, "b": None, "c": 1}, {"a": 2, "b": 2, "c": 2}])
    assert encode(schema, values) == [b'{"b":null,"c":1}', b'{"a":2,"b":2,"c":2}']
    with pytest.raises(EncodeError, match=r"^row 1: field c is null, which the schema does not allow$"):
        encode(schema, pa.array([{"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "c": None}]))
    with pytest.raises(EncodeError, match=r"^row 0: field \[\] is null"):
        encode({"type": "array", "items": _WHOLE}, pa.array([[1, None]]))


def test_null_is_not_left_out_where_a_default_would_be_read() -> None:
    schema = record(a={"type": "integer", "default": 7}, b={"type": ["integer", "null"], "default": 7})
    assert encode(schema, pa.array([{"a": 1, "b": None}])) == [b'{"a":1}']
    with pytest.raises(EncodeError, match=r"^row 1: field a is null, which the schema does not allow$"):
        encode(schema, pa.array([{"a": 1}, {"a": None}]))
    several = {"type": "array", "items": schema}
    with pytest.raises(EncodeError, match=r"^row 0: field \[\]\.a is null, which the schema does not allow$"):
        encode(several, pa.array([[{"a": 1}, {"a": None}]]))
    # what a value leaves out in a list
    assert encode(several, pa.array([[{"a": 1}, {}]], kind_of(several))) == [b'[{"a":1},{}]']


def test_fields_by_name() -> None:
    schema = record(id=_WHOLE, Name=_TEXT, kind={"type": "string", "default": "x"}, n={"type": ["null", "string"]})
    schema["required"] = ["id", "kind", "n"]
    values = pa.array([{"NAME": "a", "id": 1}])
    assert encode(schema, values) == [b'{"id":1,"Name":"a","kind":"x","n":null}']
    for row, words in (
        ({"Name": "a"}, "field id is required, but missing: add it"),
        ({"id": 1, "other": 2}, "field other is no property of the schema: remove it"),
        ({"id": "1"}, "field id must be an integer of 64 bits, which string can't be written as: cast it"),
        ({"id": 1, "Name": {"a": 1}}, "field Name must be a string, which struct<a: int64> can't be written as"),
    ):
        with pytest.raises(SchemaError, match=words):
            encode(schema, pa.array([row]))
    with pytest.raises(SchemaError, match="must be null, which timestamp"):
        encode({"type": "null"}, pa.array([5], pa.timestamp("us", "UTC")))


def test_numbers_times_and_enums() -> None:
    assert encode(_NUMBER, pa.array([1, -(2**63)])) == [b"1", b"-9223372036854775808"]
    assert encode(_NUMBER, pa.array([Decimal("1.10")])) == [b"1.10"]
    assert encode({"type": "integer", "title": f"{CONNECT}Date"}, pa.array([dt.date(1970, 1, 2)])) == [b"1"]
    at = pa.array([dt.datetime(1969, 12, 31, 23, 59, 59, 999_999), None], pa.timestamp("us", "UTC"))
    assert encode({"type": "integer", "title": f"{CONNECT}Timestamp"}, at) == [b"-1", None]
    assert encode({"type": "string", "format": "date-time"}, at) == [b'"1969-12-31T23:59:59.999999Z"', None]
    price = {"type": "number", "title": f"{CONNECT}Decimal", "connect.parameters": {"scale": "2"}}
    assert encode(price, pa.array([5])) == [b"5.00"]
    for number in (float("nan"), float("inf")):
        with pytest.raises(EncodeError, match="row 1: the value is NaN or infinite, which JSON has not"):
            encode(_NUMBER, pa.array([1.0, number]))
    for schema, kind in (
        ({"type": "integer", "connect.type": "int8"}, pa.int16()),
        ({"type": "number", "connect.type": "float32"}, pa.float64()),
        ({"type": "string", "format": "date-time"}, pa.timestamp("us")),
        (price, pa.decimal128(10, 3)),
        (_TEXT, pa.binary()),
        ({"type": "array", "items": _WHOLE}, pa.int64()),
        ({"type": "object", "additionalProperties": _WHOLE}, pa.struct([("a", pa.int64())])),
    ):
        with pytest.raises(SchemaError, match=r"the schema must be .* can't be written as: cast it"):
            encode(schema, pa.array([], kind))
    assert encode({"enum": ["a", "b"]}, pa.array(["b", None])) == [b'"b"', None]
    with pytest.raises(EncodeError, match=r'row 1: the value is not among the values of its enum, .*"a", "b"'):
        encode({"enum": ["a", "b"]}, pa.array(["b", "c"]))
    with pytest.raises(EncodeError, match="row 0: the value is a time before the year 1 or after 9999"):
        encode({"type": "string", "format": "date"}, pa.array([10_000_000], pa.date32()))


def test_values_without_a_type() -> None:
    assert encode({}, pa.array(['{"a": 1}', None, "5"])) == [b'{"a": 1}', None, b"5"]
    assert encode({}, pa.array([{"a": 1, "b": None}])) == [b'{"a":1}']
    assert encode({"type": "object"}, pa.array([{"a": [1, None]}])) == [b'{"a":[1,null]}']
    for text, words in (("{", "must be JSON: no JSON"), ("NaN", "must be JSON: NaN"), ("5", "the JSON of an object")):
        with pytest.raises(EncodeError, match=f"row 0: the value .*{words}"):
            encode({"type": "object"}, pa.array([text]))
    with pytest.raises(SchemaError, match="must be an object, which int64"):
        encode({"type": "object"}, pa.array([1]))


def test_validation() -> None:
    schema = record(id={"type": "integer", "minimum": 3})
    assert encode(schema, pa.array([{"id": 2}])) == [b'{"id":2}']
    with pytest.raises(EncodeError, match=r"^row 1: field id is not valid: 2 is less than the minimum of 3$"):
        encode(schema, pa.array([{"id": 3}, {"id": 2}]), validates=True)


def test_the_first_bad_row_is_named() -> None:
    values = pa.array([{"a": [{"x": 1.0}]}] * 1000 + [{"a": [{"x": float("nan")}]}] * 3)
    schema = record(a={"type": "array", "items": record(x=_NUMBER)})
    with pytest.raises(EncodeError, match=r"^row 1000: field a\[\]\.x is NaN"):
        encode(schema, values)
