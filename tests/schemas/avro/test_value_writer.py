"""Values written one at a time have the bytes that the encoder of columns gives them."""

from __future__ import annotations

import datetime as dt
import io
import json
import random
import uuid
from collections import ChainMap, UserDict
from decimal import Decimal
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.errors import EncodeError
from spark_klog.schemas.avro.codec import AvroCodec
from spark_klog.schemas.avro.value_writer import value_writer
from spark_klog.schemas.values import ValueColumn, to_values

from .model import records, values
from .support import record

_UTC = dt.timezone.utc


def by_column(schema: Any, value: Any) -> bytes | None:
    codec = AvroCodec()
    parsed = codec.parse(json.dumps(schema))
    kind = codec.decoder(parsed).type
    row = ValueColumn(kind).of(value)
    data: bytes | None = codec.encoder(parsed, row.type).encode(row, b"prefix")[0].as_py()
    return data


def by_value(schema: Any, value: Any) -> bytes:
    return value_writer(AvroCodec().parse(json.dumps(schema)), b"prefix")(value)


def _of_fastavro(schema: Any, value: Any) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return stream.getvalue()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_poll_returns_has_the_bytes_that_it_was_read_from(data: st.DataObject) -> None:
    schema = data.draw(records())
    written = _of_fastavro(schema, data.draw(values(schema)))
    codec = AvroCodec()
    decoder = codec.decoder(codec.parse(json.dumps(schema)))
    decoded = decoder.decode(pa.array([written], pa.binary()), [decoder.program(codec.parse(json.dumps(schema)))])
    assert not decoded.bad
    assert by_value(schema, to_values(decoded.values)[0]) == b"prefix" + written


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


_DECIMAL = _logical("bytes", "decimal", precision=3, scale=1)
_EAST = dt.datetime(2024, 1, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=2)))
_UNION = ["null", "int", "string"]


@pytest.mark.parametrize(
    ("schema", "value", "like"),
    [
        ("int", np.int8(-5), -5),
        ("double", 3, 3.0),
        ("double", np.float32(1.5), 1.5),
        ("float", 0.1, 0.1),
        ("float", 1 << 24, float(1 << 24)),
        ("boolean", np.bool_(True), True),
        ("bytes", bytearray(b"x"), b"x"),
        (_DECIMAL, Decimal("1.500"), Decimal("1.5")),
        (_DECIMAL, Decimal("1E+1"), Decimal("10.0")),
        (_DECIMAL, Decimal("0E+9999"), Decimal(0)),
        (_DECIMAL, Decimal("1.5" + "0" * 5000), Decimal("1.5")),
        (_DECIMAL, -5, Decimal(-5)),
        (_logical("int", "date"), 5, dt.date(1970, 1, 6)),
        *(
            (_logical("long", f"{local}timestamp-{unit}"), number, number)
            for local in ("", "local-")
            for unit in ("millis", "micros", "nanos")
            for number in (1_600_000_000_000, -1)
        ),
        (_logical("long", "timestamp-millis"), _EAST, dt.datetime(2024, 1, 1, tzinfo=_UTC)),
        (_logical("long", "timestamp-nanos"), _AT[0].replace(tzinfo=_UTC), 1_714_979_289_123_000_000),
        (_logical("string", "uuid"), uuid.UUID(int=5), str(uuid.UUID(int=5))),
        ({"type": "array", "items": "int"}, (1, 2), [1, 2]),
        ({"type": "array", "items": "double"}, np.array([1.5, 2]), [1.5, 2.0]),
        ({"type": "map", "values": "int"}, UserDict(a=1), {"a": 1}),
        (record(("a", "int"), ("b", "int"), name="S"), ChainMap({"a": 1}, {"b": 2}), {"a": 1, "b": 2}),
        (["int", "long"], 5, ("long", 5)),
        (["null", "float", "double"], 0.1, ("double", 0.1)),
        (_UNION, {"member1": "x"}, "x"),
        (_UNION, {"member0": 7, "member1": None}, 7),
        (_UNION, None, None),
        (["null"], None, None),
    ],
)
def test_what_else_is_written(schema: Any, value: Any, like: Any) -> None:
    schema = record(("f", schema))
    assert by_value(schema, {"f": value}) == b"prefix" + _of_fastavro(schema, {"f": like})


@pytest.mark.parametrize(
    ("schema", "value", "said"),
    [
        ("int", 1 << 31, "more than 32 bits"),
        ("long", -(1 << 63) - 1, "more than 64 bits"),
        ("int", True, "an int, not bool"),
        ("int", 1.0, "an int, not float 1.0"),
        ("int", 1.5, "an int, not float 1.5"),
        ("int", Decimal("1.5"), "an int, not Decimal"),
        ("int", "5", "an int, not str '5'"),
        ("int", None, "is null"),
        ("null", 5, "None, not int"),
        ("boolean", 1, "a bool, not int"),
        ("double", True, "a float, not bool"),
        ("double", (1 << 60) + 1, "not among the floats of 64 bits"),
        ("double", 1 << 5000, "not among the floats of 64 bits"),
        ("double", Decimal("0.1"), "a float, not Decimal"),
        ("float", 1e300, "not among the floats of 32 bits"),
        ("float", (1 << 24) + 1, "not among the floats of 32 bits"),
        ("string", b"x", "a str, not bytes"),
        ("string", "\ud800", "no Unicode"),
        ("bytes", "x", "bytes, not str"),
        ({"type": "fixed", "name": "F", "size": 2}, b"x", "1 bytes, not 2"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "B", "not a symbol of the enum: 'B'"),
        (_logical("int", "date"), dt.datetime(2024, 1, 1), "a date, not datetime"),
        (_logical("long", "timestamp-millis"), dt.datetime(2024, 1, 1), "with a time zone, not datetime"),
        (_logical("long", "timestamp-millis"), dt.date(2024, 1, 1), "with a time zone, not date"),
        (_logical("long", "timestamp-millis"), 1.5, "with a time zone, not float"),
        (_logical("long", "timestamp-nanos"), _AT[2].replace(tzinfo=_UTC), "beyond what"),
        (_logical("long", "local-timestamp-millis"), _EAST, "without a time zone, not datetime"),
        (_DECIMAL, Decimal("0.01"), "more than 1 digits after the point"),
        (_DECIMAL, Decimal("100"), "more than 3 digits"),
        (_DECIMAL, Decimal("1" * 5000), "more than 3 digits"),
        (_DECIMAL, Decimal("1E+9999"), "more than 3 digits"),
        (_DECIMAL, Decimal("1E-9999"), "more than 1 digits"),
        (_DECIMAL, Decimal("NaN"), "a finite Decimal"),
        (_DECIMAL, 1.5, "a Decimal, not float"),
        ({"type": "array", "items": "int"}, "12", "a list, not str"),
        ({"type": "array", "items": "int"}, {"a": 1}, "a list, not dict"),
        ({"type": "array", "items": "int"}, [1, 2.5], r"\[\]: it must be an int, not float 2.5"),
        ({"type": "map", "values": "int"}, {"k": 2.5}, "{}: it must be an int"),
        ({"type": "map", "values": "int"}, {1: 1}, "{}: it must be a str"),
        (record(("a", "int"), name="S"), {"a": 1, "b": 1}, ": there is no field 'b': it has a"),
        (record(("a", "int"), name="S"), {"a": "x"}, r"\.a: it must be an int"),
        (record(("a", "int"), name="S"), (1,), ": it must be a dict, not tuple"),
        ({"type": "array", "items": record(("a", "int"), name="S")}, [{}], r"\[\]\.a: is missing"),
        (_UNION, 5, "a dict of one of member0, member1, not int"),
        (_UNION, {"member0": 1, "member1": "x"}, "several members"),
        (_UNION, {"member2": 1}, "there is no field 'member2'"),
        (_UNION, {"member0": "x"}, r"\.member0: it must be an int"),
        (["int", "string"], None, "is null"),
        (["int", "string"], {}, "is null"),
    ],
)
def test_what_does_not_fit(schema: Any, value: Any, said: str) -> None:
    with pytest.raises(EncodeError, match=rf"^field f.*{said}"):
        by_value(record(("f", schema)), {"f": value})


def test_defaults_in_lists_and_maps_are_those_of_fastavro() -> None:
    item = record(("a", ["string", "null"], "x"), ("b", "int", 7), ("c", ["null", "int"]), name="I")
    schema = record(("l", {"type": "array", "items": item}), ("m", {"type": "map", "values": "I"}), ("t", "double"))
    for empty in ({}, {"c": 5}):
        for number in (1, 1.0):
            value = {"l": [empty, {"b": 1}], "m": {"k": empty}, "t": number}
            full = {"l": [{"c": None, **empty}, {"b": 1, "c": None}], "m": {"k": {"c": None, **empty}}, "t": number}
            assert by_value(schema, value) == b"prefix" + _of_fastavro(schema, full)


def test_fields_that_are_left_out() -> None:
    inner = record(("c", "int", 7), ("d", "string", "x"), name="S")
    schema = record(("a", ["null", "int"]), ("b", ["int", "null"], 5), ("s", inner, {"c": 1, "d": ""}))
    for value, expected in (
        ({}, b"\0\0\x0a\2\0"),
        ({"b": None, "s": {}}, b"\0\2\x0e\2x"),
        ({"a": 1, "s": {"d": "y"}}, b"\2\2\0\x0a\x0e\2y"),
    ):
        assert by_value(schema, value) == by_column(schema, value) == b"prefix" + expected
    with pytest.raises(EncodeError, match="field b: is missing, and the schema has no default"):
        by_value(record(("a", ["null", "int"]), ("b", "int")), {"a": 1})
    with pytest.raises(EncodeError, match='field b: the default "x" is no int'):
        by_value(record(("b", "int", "x")), {})
