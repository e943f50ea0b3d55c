"""JSON values as rows: what is read, what is bad and why."""

from __future__ import annotations

import base64
import datetime as dt
import json
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spark_klog.errors import SchemaError
from spark_klog.schemas.json_schema.decoder import JsonDecoder
from spark_klog.schemas.json_schema.schema import CONNECT, parse_schema

from .support import decode, encode, reason, record, rows_of

_TEXT, _WHOLE, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_DECIMAL = {"type": "number", "title": f"{CONNECT}Decimal", "connect.parameters": {"scale": "2"}}
_ORDER = record(
    id=_WHOLE,
    name={"type": ["string", "null"]},
    tags={"type": "array", "items": _TEXT},
    place=record(lat=_NUMBER, required=("lat",)),
    price=_DECIMAL,
    required=("id", "name"),
)
_UTC = dt.timezone.utc
_AT, _LOCAL = ({"type": "string", "format": name} for name in ("date-time", "date-time-local"))
_MILLISECONDS, _DAYS = ({"type": "integer", "title": f"{CONNECT}{name}"} for name in ("Timestamp", "Date"))
_COUNTS = {"type": "object", "additionalProperties": _WHOLE}


def test_nulls_and_missing_properties() -> None:
    row = {"id": 1, "name": None, "tags": None, "place": None, "price": None}
    assert rows_of(_ORDER, {"id": 1}, {"id": 1, "name": None, "tags": None, "place": None}, None) == [row, row, None]
    nullable = {**_ORDER, "type": ["object", "null"]}
    assert rows_of(nullable, b"null", b' {"id" :\n1, "other": [{"id": 2}] } ') == [None, row]


def test_defaults() -> None:
    schema = record(
        a={"type": "string", "default": "x"}, b={"type": ["integer", "null"], "default": 1}, required=("a",)
    )
    assert rows_of(schema, {}, {"a": "y", "b": None}) == [{"a": "x", "b": None}, {"a": "y", "b": None}]
    known = {"format": "date", "type": "string", "default": "2024-01-02"}
    assert rows_of(record(a=_WHOLE, day=known), {"a": 1}) == [{"a": 1, "day": dt.date(2024, 1, 2)}]
    nested = record(inner={**record(z=_WHOLE), "default": {"z": 3}})
    assert rows_of(nested, {}) == [{"inner": {"z": 3}}]


_TIMES = {
    "2024-02-29T23:59:59Z": dt.datetime(2024, 2, 29, 23, 59, 59, tzinfo=_UTC),
    "2024-01-02t03:04:05.5z": dt.datetime(2024, 1, 2, 3, 4, 5, 500_000, _UTC),
    "2024-01-02T03:04:05.1234567+02:00": dt.datetime(2024, 1, 2, 1, 4, 5, 123_456, _UTC),
    "1969-12-31T23:59:59.9999999Z": dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, _UTC),
    "2024-01-02T03:04:05": dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=_UTC),
    "2024-01-02": dt.datetime(2024, 1, 2, tzinfo=_UTC),
    "2024-01-02 03:04-0730": dt.datetime(2024, 1, 2, 10, 34, tzinfo=_UTC),
    "0001-01-01T00:00:00Z": dt.datetime(1, 1, 1, tzinfo=_UTC),
}


def test_times() -> None:
    schema = _AT
    for text, time in _TIMES.items():
        assert rows_of(schema, text) == [time]
    assert rows_of(schema, *_TIMES) == list(_TIMES.values())
    local = _LOCAL
    assert rows_of(local, "2024-01-02T03:04:05.25") == [dt.datetime(2024, 1, 2, 3, 4, 5, 250_000)]
    assert rows_of({"type": "string", "format": "date"}, "2024-02-29") == [dt.date(2024, 2, 29)]
    connect = _MILLISECONDS
    assert rows_of(connect, -1, 1000) == [
        dt.datetime(1969, 12, 31, 23, 59, 59, 999_000, _UTC),
        dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=_UTC),
    ]
    assert rows_of(_DAYS, -1) == [dt.date(1969, 12, 31)]


def test_numbers() -> None:
    assert rows_of(_WHOLE, b"1.0", b"1e3", b"-0", b"9223372036854775807") == [1, 1000, 0, 2**63 - 1]
    assert rows_of(_NUMBER, b"12345678901234567890123", b"1e-999", b"5") == [1.2345678901234568e22, 0.0, 5.0]
    prices = record(price=_DECIMAL)
    # base64 of 1234, as Kafka Connect writes decimals that are not set to be numbers: also if it looks like digits
    sent = [b'{"price": 12.30}', b'{"price": "BNI="}', b'{"price": "1234"}', b'{"price": 1e2}', b'{"price": 1.230e1}']
    digits = Decimal(int.from_bytes(b"\xd7\x6d\xf8", "big", signed=True)).scaleb(-2)
    expected = [Decimal("12.30"), Decimal("12.34"), digits, Decimal(100), Decimal("12.30")]
    assert [row["price"] for row in rows_of(prices, *sent)] == expected
    assert rows_of({"type": "array", "items": _DECIMAL}, b"[1.10]") == [[Decimal("1.10")]]


def test_decimals_of_too_many_digits() -> None:
    nine = {**_DECIMAL, "connect.parameters": {"scale": "2", "connect.decimal.precision": "9"}}
    words = "field p must be a decimal(9, 2), not one with 8 digits before the point and 0 after it"
    assert reason(record(p=nine), b'{"p": 12345678}') == words


def test_json_text_maps_and_binary() -> None:
    mixed = {"type": ["string", "integer", "object", "array"]}
    texts = rows_of(mixed, "\u20ac", 5, {"a": [1.5, None, True]}, b'"\\ud800"')
    assert texts == ['"\u20ac"', "5", '{"a":[1.5,null,true]}', '"\\ud800"']
    assert rows_of({}, b"null", b" 1 ") == [None, "1"]
    counts = {"type": "object", "additionalProperties": record(n=_WHOLE)}
    assert rows_of(counts, {"a": {"n": 1}, "\u20ac": {}}) == [[("a", {"n": 1}), ("\u20ac", {"n": None})]]
    assert rows_of({"type": "string", "contentEncoding": "base64"}, "AAH/", "") == [b"\x00\x01\xff", b""]
    tree = record(value=_WHOLE, children={"type": "array", "items": {"$ref": "#"}})
    assert rows_of(tree, {"value": 1, "children": [{"value": 2, "children": []}]}) == [
        {"value": 1, "children": ['{"value":2,"children":[]}']}
    ]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (b"", "no JSON: it is empty"),
        (b"  ", "no JSON: it is empty"),
        (b"\x00", "no JSON: Expecting value at character 0"),
        (b'{"id": 1, "name": ""} x', "no JSON: Extra data at character 22"),
        (b'{"id": 1, "name": ""}}{"v":{}', "no JSON: Extra data at character 21"),
        (b'{"id": 1, "name": "a', "no JSON: Unterminated string starting at at character 18"),
        (b'{"id": 1, "name": "\xff"}', "not UTF-8 (invalid start byte at byte 19)"),
        (b'{"id": 1, "name": "\x01"}', "no JSON: Invalid control character at at character 19"),
        (b'{"id": 1, "name": "\\ud800"}', "field name has half of a surrogate pair, which no text may have"),
        (b'{"id": 1, "name": "", "place": {"lat": NaN}}', "field place.lat is NaN, which is not JSON"),
        (b'{"id": 1, "name": "", "place": {"lat": -Infinity}}', "field place.lat is a number that a double can't hold"),
        (b'{"id": 1, "name": "", "place": {"lat": Inf}}', "no JSON: Expecting value at character 39"),
        (b'{"id": 1, "name": "", "place": {"lat": 1e999}}', "field place.lat is a number that a double can't hold"),
        (b'{"id": 1, "name": "", "place": {}}', "field place.lat is required, but missing"),
        (b'{"name": ""}', "field id is required, but missing"),
        (b'{"id": null, "name": ""}', "field id must not be null"),
        (b"{}", "field id is required, but missing"),
        (b'{"id": 9223372036854775808, "name": ""}', "field id must be an integer of 64 bits, not a number"),
        (b'{"id": 1' + b"0" * 10_000 + b', "name": ""}', "field id must be an integer of 64 bits, not a number"),
        (b'{"id": 1.5, "name": ""}', "field id must be an integer of 64 bits, not a number"),
        (b'{"id": true, "name": ""}', "field id must be an integer of 64 bits, not a boolean"),
        (b'{"id": 1, "name": 5}', "field name must be a string, not a number"),
        (b'{"id": 1, "name": "", "tags": ["a", null]}', "field tags[1] must be a string, not null"),
        (b'{"id": 1, "name": "", "tags": {}}', "field tags must be an array, not an object"),
        (b'{"id": 1, "id": 2, "name": ""}', "field id is there twice"),
        (b'{"id": 1, "name": "", "place": {"lat": 1, "lat": 1}}', "field place.lat is there twice"),
        (b'{"id": 1, "name": "", "price": "?"}', "field price must be a decimal(38, 2), not a string"),
        (
            b'{"id": 1, "name": "", "price": 1.005}',
            "field price must be a decimal(38, 2), not one with 1 digits before the point and 3 after it",
        ),
        (
            b'{"id": 1, "name": "", "price": 1e9999}',
            "field price must be a decimal(38, 2), not one with 10000 digits before the point and 0 after it",
        ),
        (b'{"id": 1e99999999999999999999, "name": ""}', "field id must be an integer of 64 bits, not a number"),
        (b"null", "the value must be an object, not null"),
        (b"[]", "the value must be an object, not an array"),
        (b"[" * 1_000_000, "nested too deeply"),
        (b'{"id": 1, "name": ' + b"[" * 1_000_000, "nested too deeply"),
    ],
)
def test_bad_rows(row: bytes, text: str) -> None:
    assert reason(_ORDER, row) == text


@pytest.mark.parametrize(
    ("schema", "row", "text"),
    [
        (
            _AT,
            b'"noon"',
            "the value must be a time such as 2024-12-31T23:59:59Z, not another string",
        ),
        (
            _AT,
            b'"2024-02-30T00:00:00Z"',
            "the value is no time: day is out of range for month",
        ),
        (
            _AT,
            b'"0001-01-01T00:00:00+01:00"',
            "the value is no time: date value out of range",
        ),
        ({"type": "string", "format": "date"}, b'"0000-01-01"', "the value is no date: year 0 is out of range"),
        (
            _LOCAL,
            b'"2024-01-01T00:00:00Z"',
            "the value must be a time such as 2024-12-31T23:59:59, not another string",
        ),
        (
            _MILLISECONDS,
            b"999999999999999",
            "the value is a time before the year 1 or after 9999",
        ),
        (
            _DAYS,
            b"2932897",
            "the value is a time before the year 1 or after 9999",
        ),
        ({"type": "integer", "connect.type": "int8"}, b"128", "the value must be an integer of 8 bits, not a number"),
        ({"type": "number", "connect.type": "float32"}, b"1e39", "the value is a number that a float can't hold"),
        ({"type": "string", "contentEncoding": "base64"}, b'"a"', "the value is not base64"),
        ({"type": "null"}, b"1", "the value must be null, not a number"),
        ({"type": "object"}, b"1", "the value must be an object, not a number"),
        ({}, b'{"a": {"b": 1, "b": 2}}', "field b is there twice"),
        ({}, b"1e999", "the value has a number that is too large, NaN or infinite"),
        (_COUNTS, b'{"a": 1, "a": 1}', "field a is there twice"),
        (
            _COUNTS,
            b'{"a": 1, "b": "x"}',
            "field b must be an integer of 64 bits, not a string",
        ),
    ],
)
def test_other_bad_values(schema: Any, row: bytes, text: str) -> None:
    assert reason(schema, row) == text


@pytest.mark.parametrize("text", ["0.12345678901234567890", "1.50", "-0.0", "12345678901234567890123.25", "1E-400"])
def test_text_keeps_the_digits(text: str) -> None:
    row = f'{{"a":{{"ü":[{text},null,true,7]}}}}'
    assert rows_of({"type": "object"}, row.encode()) == [row]
    assert rows_of({"type": "object", "properties": {"a": {}}}, row.encode()) == [{"a": row[5:-1]}]


def test_deep_nesting_where_nobody_looks() -> None:
    assert reason(_ORDER, b'{"id": 1, "name": "", "x": ' + b"[" * 100_000 + b"]" * 100_000) != ""
    row = b'{"id": 1, "name": "", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert rows_of(_ORDER, row)[0]["id"] == 1
    decoded = decode(_ORDER, b"{", row, b'{"id": 2, "name": "Inf, NaN", "x": [NaN, -Infinity]}')
    assert [number for number, _ in decoded.bad] == [0]
    assert [value and value["id"] for value in decoded.values.to_pylist()] == [None, 1, 2]


def test_bad_rows_among_many() -> None:
    schema = record(id=_WHOLE, required=("id",))
    rows: list[bytes | None] = [f'{{"id": {number}}}'.encode() for number in range(3000)]
    bad = {5: b"{", 511: b'{"id": "x"}', 512: b"", 2999: b"{}"}
    for row, data in bad.items():
        rows[row] = data
    rows[7] = None
    decoded = decode(schema, *rows)
    assert [row for row, _ in decoded.bad] == list(bad)
    expected = [None if number in (*bad, 7) else {"id": number} for number in range(3000)]
    assert decoded.values.to_pylist() == expected


def test_starts_and_rows_without_a_schema() -> None:
    decoder = JsonDecoder(parse_schema(json.dumps(record(id=_WHOLE))).column)
    rows = [b'\0\0\0\0\1{"id": 1}', b'{"id": 2}', b"xyz", None]
    starts, which = np.array([5, 0, 9, 0], np.int32), np.array([0, 0, -1, -1], np.int32)
    sliced = pa.array([b"-", *rows], pa.binary())[1:]
    for values in (pa.array(rows, pa.binary()), sliced, sliced.cast(pa.large_binary())):
        decoded = decoder.decode(values, [None], which.tobytes(), starts.tobytes())
        assert (decoded.values.to_pylist(), decoded.bad) == ([{"id": 1}, {"id": 2}, None, None], [])
    assert decoder.decode(pa.array(rows, pa.binary()), []).values.to_pylist() == [None] * 4
    assert decoder.decode(pa.array([], pa.binary()), [None]).values.to_pylist() == []
    with pytest.raises(SchemaError, match="JSON records are a binary column, not list<item: int64>: cast it"):
        decoder.decode(pa.array([[1]]), [None])


def test_validation() -> None:
    schema = record(id={"type": "integer", "minimum": 3}, tags={"type": "array", "items": {"pattern": "^a"}})
    assert decode(schema, b'{"id": 2}').bad == []
    assert reason(schema, b'{"id": 2}', validates=True) == "field id is not valid: 2 is less than the minimum of 3"
    long = json.dumps({"tags": ["a", "b" * 1000]}).encode()
    assert reason(schema, long, validates=True).startswith("field tags[1] is not valid: 'bbb")
    assert len(reason(schema, long, validates=True)) < 400
    assert decode(schema, b'{"id": 3, "tags": ["ab"]}', validates=True).values.to_pylist() == [
        {"id": 3, "tags": ["ab"]}
    ]
    texts = {"other.json": json.dumps({"type": "integer", "maximum": 5})}
    for base in ({}, {"$id": "https://shop/order"}):
        parsed = parse_schema(json.dumps({**base, **record(id={"$ref": "other.json"})}), texts)
        decoder = JsonDecoder(parsed.column, validates=True)
        decoded = decoder.decode(pa.array([b'{"id": 5}', b'{"id": 6}']), [decoder.program(parsed)])
        assert decoded.bad == [(1, "field id is not valid: 6 is greater than the maximum of 5")]
    with pytest.raises(SchemaError, match="#/properties/id/minimum: 'x' is not of type 'number'"):
        decode(record(id={"minimum": "x"}), validates=True)


@pytest.mark.parametrize(
    ("schema", "row"),
    [
        (record(id=_WHOLE), b'{"id": 1}, "w": 5'),
        (record(id=_WHOLE), b'{"id": 1} , "w": {"id": 2}'),
        (record(id=_WHOLE), b'{"id": 1}, "v": {"id": 2}'),
        (record(id=_WHOLE), b'{"id": 1}, "v": null'),
        (record(id=_WHOLE), b'null, "v": {"id": 2}'),
        (record(id=_WHOLE), b'null, "v": null'),
        (record(id=_WHOLE), b' null, "w": 5'),
        (record(id=_WHOLE), b'{"id": 1}}\n{"v": {"id": 2}'),
        (_WHOLE, b'1, "w": 2'),
        ({"type": "array", "items": _WHOLE}, b'[1], "w": [2]'),
    ],
)
def test_what_goes_on_after_a_value_makes_it_bad(schema: Any, row: bytes) -> None:
    assert reason(schema, row).startswith("no JSON: Extra data at character ")


def test_a_decimal_in_base64_whose_name_is_escaped() -> None:
    rows = [b'{"gr\\u00f6": "1234"}', '{"grö": "1234"}'.encode(), b'{"gr\\u00f6": 1.5}']
    made = int.from_bytes(base64.b64decode("1234"), "big", signed=True)
    expected = [{"grö": Decimal(made).scaleb(-2)}] * 2 + [{"grö": Decimal("1.50")}]
    assert [rows_of(record(grö=_DECIMAL), row)[0] for row in rows] == expected


def test_integers_that_no_float_is() -> None:
    row = b'{"id": 1234567890123456789e0, "more": {"a": 9007199254740993.0}}'
    schema = record(id=_WHOLE, more=_COUNTS)
    assert rows_of(schema, row) == [{"id": 1234567890123456789, "more": [("a", 9007199254740993)]}]
    text = "field id must be an integer of 64 bits, not a number"
    assert reason(schema, b'{"id": 9007199254740992.5}') == text


def test_minus_zero_is_valid() -> None:
    """jsonschema gets the 0 that it is, and no Decimal."""
    schema = {"properties": {"n": {"type": "integer"}, "price": {"type": "number", "multipleOf": 0.01}}}
    decoded = decode(schema, b'{"n": -0, "price": -0}', validates=True)
    assert not decoded.bad
    (row,) = decoded.values.to_pylist()
    assert (row["n"], str(row["price"])) == (0, "-0.0")
    values = pa.array([{"n": 0, "price": -0.0}], pa.struct([("n", pa.int64()), ("price", pa.float64())]))
    assert len(encode(schema, values, validates=True)) == 1


def test_a_map_of_which_a_key_is_required() -> None:
    schema = {"type": "object", "required": ["id"], "additionalProperties": _TEXT}
    assert rows_of(schema, {"id": "a", "more": "b"}) == [[("id", "a"), ("more", "b")]]
    assert rows_of(record(values=schema), {"values": {"id": "a"}}) == [{"values": [("id", "a")]}]
