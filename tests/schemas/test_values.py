"""Python values of Arrow columns, against pyarrow's own, and back."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from spark_klog.errors import EncodeError
from spark_klog.schemas.values import ValueColumn, to_values


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
        (pa.int32(), "x", "Could not convert 'x'"),
        (pa.struct([("a", pa.list_(pa.int32()))]), {"a": [1, "x"]}, "field a: Could not convert 'x'"),
        (pa.struct([("a", pa.struct([("b", pa.int8())]))]), {"a": {"b": 300}}, "field a.b: "),
        (pa.struct([("a", pa.struct([("b", pa.int8())]))]), {"a": 5}, "field a: it must be a dict, not int"),
        (pa.map_(pa.string(), pa.struct([("a", pa.int8())])), {"k": {"b": 1}}, r"field {}: there is no field 'b': it"),
        (pa.struct([]), {"b": 1}, "there is no field 'b': it has none"),
    ],
)
def test_what_does_not_fit(kind: pa.DataType, value: Any, said: str) -> None:
    with pytest.raises(EncodeError, match=said):
        ValueColumn(kind).of(value)


def test_of_a_key_twice_the_last_value_counts() -> None:
    rows = pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int32()))
    assert to_values(rows) == [{"a": 2}]
