"""Values written one at a time have the bytes that the encoder of columns gives them."""

from __future__ import annotations

import datetime as dt
import json
import random
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.errors import SchemaError
from spark_klog.schemas.avro.codec import AvroCodec
from spark_klog.schemas.avro.value_writer import value_writer
from spark_klog.schemas.values import ValueColumn

from .model import kind_of, records, values
from .support import record

_UTC = dt.timezone.utc


def by_column(schema: Any, value: Any) -> bytes | None:
    codec = AvroCodec()
    parsed = codec.parse(json.dumps(schema))
    kind = codec.decoder(parsed).type
    row = ValueColumn(kind).of(value)
    data: bytes | None = codec.encoder(parsed, row.type).encode(row, b"prefix")[0].as_py()
    return data


def by_value(schema: Any, value: Any) -> bytes | None:
    writer = value_writer(AvroCodec().parse(json.dumps(schema)), b"prefix")
    assert writer is not None
    return writer(value)


def _own(value: Any) -> Any:
    """A value of fastavro's without the names of branches."""
    if isinstance(value, tuple):
        return _own(value[1])
    if isinstance(value, dict):
        return {key: _own(one) for key, one in value.items()}
    return [_own(one) for one in value] if isinstance(value, list) else value


def _is_simple(schema: Any) -> bool:
    kind = kind_of(schema)
    if kind == "union":
        return len(schema) == 2 and "null" in schema and all(one == "null" or _is_simple(one) for one in schema)
    if kind == "record":
        return all(_is_simple(field["type"]) for field in schema["fields"])
    if kind in ("array", "map"):
        return _is_simple(schema["items" if kind == "array" else "values"])
    return kind != "null"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_same_bytes(data: st.DataObject) -> None:
    schema = data.draw(records())
    value = _own(data.draw(values(schema)))
    writer = value_writer(AvroCodec().parse(json.dumps(schema)), b"prefix")
    assert (writer is not None) == _is_simple(schema)
    if writer is not None:
        assert writer(value) == by_column(schema, value)


def _logical(kind: str, logical: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": logical, **more}


def _decimals(precision: int, scale: int) -> list[Decimal]:
    chance = random.Random(precision * 100 + scale)
    numbers = [chance.randrange(-(10 ** chance.randrange(1, precision + 1)) + 1, 10**precision) for _ in range(50)]
    numbers += [0, -1, 1, 127, 128, -128, -129, 255, -256, 10**precision - 1, 1 - 10**precision]
    return [Decimal(f"{number}E-{scale}") for number in numbers if abs(number) < 10**precision]


_AT = [
    dt.datetime(2024, 5, 6, 7, 8, 9, 123000),
    dt.datetime(1969, 12, 31, 23, 59, 59, 999000),
    dt.datetime(1, 1, 1),
    dt.datetime(9999, 12, 31, 23, 59, 59, 999000),
]


@pytest.mark.parametrize(
    ("schema", "examples"),
    [
        (_logical("int", "date"), [dt.date(1, 1, 1), dt.date(1970, 1, 1), dt.date(9999, 12, 31)]),
        (_logical("long", "timestamp-millis"), [one.replace(tzinfo=_UTC) for one in _AT]),
        (_logical("long", "timestamp-micros"), [one.replace(tzinfo=_UTC) + dt.timedelta(0, 0, -1) for one in _AT[:2]]),
        (_logical("long", "timestamp-micros"), [_AT[0].replace(tzinfo=dt.timezone(dt.timedelta(hours=5)))]),
        (_logical("long", "local-timestamp-millis"), _AT),
        (_logical("long", "local-timestamp-micros"), _AT),
        (_logical("long", "timestamp-nanos"), [-1, 1 << 62]),
        (_logical("int", "time-millis"), [0, 86_399_999]),
        (_logical("string", "uuid"), ["12345678-1234-5678-1234-567812345678"]),
        (_logical("bytes", "decimal", precision=9, scale=2), _decimals(9, 2)),
        (_logical("bytes", "decimal", precision=38, scale=10), _decimals(38, 10)),
        (_logical("fixed", "decimal", name="F", size=8, precision=18, scale=3), _decimals(18, 3)),
        ("float", [0.1, -0.0, float("inf"), 3.4e38]),
        ("string", ["", "\u20ac" * 100]),
        (["string", "null"], ["x"]),
        ({"type": "map", "values": ["null", "int"]}, [{}, {"a": None, "b": -1}]),
    ],
)
def test_logical_types(schema: Any, examples: list[Any]) -> None:
    for value in examples:
        assert by_value(schema, value) == by_column(schema, value) is not None, value


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ("int", 1 << 31),
        ("int", True),
        ("int", None),
        ("boolean", 1),
        ("double", 1),
        ("float", 1e300),
        ("string", b"x"),
        ("string", "\ud800"),
        ("bytes", bytearray(b"x")),
        ({"type": "fixed", "name": "F", "size": 2}, b"x"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "B"),
        (_logical("int", "date"), dt.datetime(2024, 1, 1)),
        (_logical("long", "timestamp-millis"), dt.datetime(2024, 1, 1)),
        (_logical("long", "timestamp-millis"), dt.datetime(2024, 1, 1, 0, 0, 0, 1, tzinfo=_UTC)),
        (_logical("long", "local-timestamp-millis"), dt.datetime(2024, 1, 1, tzinfo=_UTC)),
        (_logical("bytes", "decimal", precision=3, scale=1), Decimal("0.01")),
        (_logical("bytes", "decimal", precision=3, scale=1), Decimal("100")),
        (_logical("bytes", "decimal", precision=3, scale=1), Decimal("1E+9999")),
        (_logical("bytes", "decimal", precision=3, scale=1), Decimal("NaN")),
        (_logical("fixed", "decimal", name="F", size=1, precision=2, scale=0), 5),
        ({"type": "array", "items": "int"}, (1,)),
        ({"type": "map", "values": "int"}, {1: 1}),
        (record(("a", "int")), {"a": 1, "b": 1}),
        (record(("a", "int")), {}),
        (record(("a", record(("b", "int"), name="S"))), {"a": {}}),
    ],
)
def test_anything_else_is_for_the_encoder(schema: Any, value: Any) -> None:
    assert by_value(schema, value) is None


def test_fields_that_are_left_out() -> None:
    inner = record(("c", "int", 7), ("d", "string", "x"), name="S")
    schema = record(("a", ["null", "int"]), ("b", ["int", "null"], 5), ("s", inner, {"c": 1, "d": ""}))
    for value, expected in (
        ({}, b"\0\0\x0a\2\0"),
        ({"b": None, "s": {}}, b"\0\2\x0e\2x"),
        ({"a": 1, "s": {"d": "y"}}, b"\2\2\0\x0a\x0e\2y"),
    ):
        assert by_value(schema, value) == by_column(schema, value) == b"prefix" + expected
    with pytest.raises(SchemaError, match="field b: is missing, and the schema has no default"):
        by_column(record(("a", ["null", "int"]), ("b", "int")), {"a": 1})


def test_a_member_of_a_union() -> None:
    schema = record(("a", ["null", "int", "string"]))
    assert by_column(schema, {"a": {"member1": "x"}}) == b"prefix\4\2x"
    assert by_column(schema, {"a": None}) == by_column(schema, {}) == b"prefix\0"
