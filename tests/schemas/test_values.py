"""Python values of Arrow columns, against pyarrow's own, and back."""

from __future__ import annotations

import datetime as dt
import random
from collections import ChainMap, UserDict
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spark_klog.base.names import Format
from spark_klog.errors import EncodeError
from spark_klog.schemas.column_format import ColumnFormat
from spark_klog.schemas.column_writing import WriteFormat
from spark_klog.schemas.row_serializing import RowSerializer
from spark_klog.schemas.values import ValueColumn, to_values

_NAIVE = dt.datetime(2024, 1, 2, 3, 4, 5)


def _type(chance: random.Random, depth: int) -> pa.DataType:
    kind = chance.randrange(7 if depth else 3)
    if kind < 3:
        return (pa.int64(), pa.string(), pa.bool_())[kind]
    if kind == 3:
        return pa.list_(_type(chance, depth - 1))
    if kind == 4:
        return pa.map_(pa.string(), _type(chance, depth - 1))
    return pa.struct([(f"f{number}", _type(chance, depth - 1)) for number in range(chance.randrange(1, 4))])


def _value(chance: random.Random, kind: pa.DataType) -> Any:
    if chance.random() < 0.2:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _value(chance, field.type) for field in kind}
    if pa.types.is_map(kind):
        return {f"k{number}": _value(chance, kind.item_type) for number in range(chance.randrange(4))}
    if pa.types.is_list(kind):
        return [_value(chance, kind.value_type) for _ in range(chance.randrange(4))]
    if pa.types.is_string(kind):
        return chance.choice(["", "a", "\u20ac"])
    return chance.random() < 0.5 if pa.types.is_boolean(kind) else chance.randrange(-5, 5)


def test_both_ways() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        kind = _type(chance, 3)
        values = [_value(chance, kind) for _ in range(20)]
        column = ValueColumn(kind)
        rows = pa.concat_arrays([column.of(value) for value in values])
        assert to_values(rows) == values, seed
        assert to_values(rows) == rows.to_pylist(maps_as_pydicts="strict")
        start, count = chance.randrange(20), chance.randrange(20)
        assert to_values(rows.slice(start, count)) == values[start : start + count], seed


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (pa.int32(), "x", "it must be an int, not str 'x'"),
        (pa.struct([("a", pa.list_(pa.int32()))]), {"a": [1, "x"]}, r"field a\[\]: it must be an int, not str 'x'"),
        (pa.int32(), 1.0, "it must be an int, not float 1.0"),
        (pa.int32(), Decimal("1.5"), "it must be an int, not Decimal 1.5"),
        (pa.int32(), True, "it must be an int, not bool"),
        (pa.bool_(), 1, "tried to convert to boolean"),
        (pa.float64(), True, "it must be a float, not bool"),
        (pa.float64(), (1 << 60) + 1, "outside of the range"),
        (pa.float32(), 1e300, "it must be a float of 32 bits, not float 1e"),
        (pa.float32(), 1 << 2000, "it must be a float of 32 bits, not int"),
        (pa.string(), b"x", "it must be a str, not bytes"),
        (pa.binary(), "x", "it must be bytes, not str 'x'"),
        (pa.decimal128(9, 2), Decimal("1" * 5000), "."),
        (pa.decimal128(9, 2), 1.5, "."),
        (pa.date32(), _NAIVE, "it must be a date, not datetime 2024-01-02 03:04:05"),
        (pa.date32(), 5, "it must be a date, not int 5"),
        (pa.timestamp("us", "UTC"), 5, "it must be a datetime with a time zone, not int 5"),
        (pa.timestamp("us", "UTC"), _NAIVE, "it must be a datetime with a time zone, not datetime"),
        (pa.timestamp("us"), _NAIVE.replace(tzinfo=dt.timezone.utc), "it must be a datetime without a time zone"),
        (pa.duration("us"), 1.5, "it must be a timedelta, not float 1.5"),
        (pa.map_(pa.string(), pa.int32()), {"k": 1.5}, "field {}: it must be an int"),
        (pa.map_(pa.string(), pa.int32()), [("k", 1)], "it must be a dict, not list"),
        (pa.list_(pa.string()), "abc", "it must be a list, not str 'abc'"),
        (pa.struct([("a", pa.int32())]), (1,), "it must be a dict, not tuple"),
        (pa.struct([("a", pa.struct([("b", pa.int8())]))]), {"a": {"b": 300}}, "field a.b: "),
        (pa.struct([("a", pa.struct([("b", pa.int8())]))]), {"a": 5}, "field a: it must be a dict, not int"),
        (pa.map_(pa.string(), pa.struct([("a", pa.int8())])), {"k": {"b": 1}}, r"field {}: there is no field 'b': it"),
        (pa.struct([]), {"b": 1}, "there is no field 'b': it has none"),
    ],
)
def test_what_does_not_fit(kind: pa.DataType, value: Any, said: str) -> None:
    with pytest.raises(EncodeError, match=said):
        ValueColumn(kind).of(value)


def test_mappings_and_numpy() -> None:
    kind = pa.struct([("a", pa.int32()), ("m", pa.map_(pa.string(), pa.list_(pa.float64())))])
    column = ValueColumn(kind)
    value = ChainMap({"a": np.int8(5)}, {"m": UserDict(k=np.array([1, 2]), l=(3,))})
    assert to_values(column.of(value)) == [{"a": 5, "m": {"k": [1.0, 2.0], "l": [3.0]}}]
    assert to_values(ValueColumn(pa.timestamp("us")).of(_NAIVE)) == [_NAIVE]


@pytest.mark.parametrize(
    ("name", "text", "values", "expected"),
    [
        (
            "protobuf",
            'syntax="proto3"; message M { repeated I l = 1; map<string, I> m = 2; } '
            "message I { int32 a = 1; string b = 2; }",
            [{"l": [{"a": 1}, {"a": 2}]}, {"m": {"k": {"b": "x"}}}, {"l": [{}]}],
            [b"\n\2\b\1\n\2\b\2", b"\x12\b\n\1k\x12\3\x12\1x", b"\n\0"],
        ),
        (
            "json-schema",
            '{"type": "object", "properties": {"l": {"type": "array", "items": {"type": "object", "required": ["q"], '
            '"properties": {"q": {"type": "integer", "default": 5}, "r": {"type": "string"}}}}}}',
            [{"l": [{"r": "x"}, {}]}, {"l": []}, {"l": [{"q": 1}]}],
            [b'{"l":[{"q":5,"r":"x"},{"q":5}]}', b'{"l":[]}', b'{"l":[{"q":1}]}'],
        ),
    ],
)
def test_fields_left_out_in_lists_and_maps(name: Format, text: str, values: list[Any], expected: list[bytes]) -> None:
    serializer = RowSerializer(WriteFormat(ColumnFormat("value", name, None, text), "t"))
    assert [serializer.serialize(value) for value in values] == expected


def test_of_a_key_twice_the_last_value_counts() -> None:
    rows = pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int32()))
    assert to_values(rows) == [{"a": 2}]
