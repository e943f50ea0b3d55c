"""Schemas that are inferred of JSON: beside Spark's inference, and whatever the order and division of the values."""

from __future__ import annotations

import json
import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.errors import SchemaError
from spark_klog.schemas.json_schema import inference
from spark_klog.schemas.json_schema.columns import DDL, JSON_TEXT, stored_type
from spark_klog.schemas.json_schema.ddl import DEEPEST, parse_schema, schema_text
from spark_klog.schemas.json_schema.decoder import JsonDecoder
from spark_klog.schemas.json_schema.from_arrow import column_of
from spark_klog.schemas.json_schema.inference import Seen, grown_schema, unplaced
from tests.support.runs.soak import SOAK


def _seen(*rows: Any) -> Seen:
    seen = Seen()
    for row in rows:
        seen.add_row(row if isinstance(row, bytes) else json.dumps(row).encode())
    return seen


def _inferred(*rows: Any) -> str:
    return schema_text(grown_schema(None, _seen(*rows)))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([True, False, None], "boolean"),
        ([1, -(1 << 63), (1 << 63) - 1], "bigint"),
        ([1, 2.5], "double"),
        ([1 << 53, 0.5], "double"),
        ([(1 << 53) + 1, 0.5], "json"),
        ([1 << 63], "decimal(19,0)"),
        ([1 << 63, 1], "decimal(20,0)"),
        ([10**37], "decimal(38,0)"),
        ([10**38], "json"),
        ([1 << 63, 0.5], "json"),
        (["", "2024-01-01"], "string"),
        (["1", 1], "json"),
        ([True, 0], "json"),
        ([{"x": 1}, {"y": "z", "a": None}], "struct<x: bigint, y: string>"),
        ([{"x": 1}, [1]], "json"),
        ([[], [1, None], [2.5]], "array<double>"),
        ([[1, "a"]], "array<json>"),
        ([[{"x": 1}], [{"x": "y"}]], "array<struct<x: json>>"),
        ([{"x": 1, "X": 2}], "json"),
        ([{"": 1}], "json"),
        ([[[]], [[1]]], "array<array<bigint>>"),
        ([{}, 1], "json"),
    ],
)
def test_types(values: list[Any], expected: str) -> None:
    assert _inferred(*({"f": value} for value in values)) == f"f {expected}"


def test_what_says_nothing_gets_no_column() -> None:
    assert _inferred({"a": None, "b": [], "c": {}, "d": {"e": [None]}, "f": 1}) == "f bigint"
    assert _inferred(b"rubbish", [1], 5, None, {}) == ""


def test_levels_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: Any = 1
    for _ in range(DEEPEST + 20):
        deep = {"x": deep}
    text = _inferred(deep)
    assert text.endswith(": json" + ">" * text.count("<"))
    assert schema_text(parse_schema(text)) == text
    assert _inferred({"a`b": 1, "odd name": {"c,d": "x"}}) == "`a``b` bigint, `odd name` struct<`c,d`: string>"
    monkeypatch.setattr(inference, "MOST_NAMES", 5)
    wide = [{"by": {f"k{n}": n}} for n in range(6)]
    assert _inferred(*wide[:5]) == "by struct<k0: bigint, k1: bigint, k2: bigint, k3: bigint, k4: bigint>"
    assert _inferred(*wide) == "by json"
    with pytest.raises(SchemaError, match="more than 5 fields of different names"):
        _inferred({f"k{n}": n for n in range(6)})
    monkeypatch.setattr(inference, "MAX_COLUMNS", 6)
    assert _inferred({"a": {"x": 1, "y": 1}, "b": {"x": 1, "y": 1, "z": 1}}) == "a struct<x: bigint, y: bigint>, b json"


def test_known_fields_keep_their_types() -> None:
    known = parse_schema("id string, at struct<lat: double>, l array<struct<x: int>>")
    seen = _seen({"id": 1, "at": {"lon": 1}, "new": True, "ID": 1, "_key": 1, "l": [{"y": 1}]})
    grown = grown_schema(known, seen, {"_key"})
    assert schema_text(grown) == (
        "id string, at struct<lat: double, lon: bigint>, l array<struct<x: int, y: bigint>>, new boolean"
    )
    assert unplaced({"id": 1, "at": {"lat": 1}, "l": [{"y": 1}]}, grown) == ""
    assert unplaced({"ID": 1}, grown) == "ID"
    assert unplaced({"at": {"Lat": 1}}, grown) == "at.Lat"
    assert unplaced({"l": [{"x": 1}, {"z": 0}]}, grown) == "l.[].z"
    assert unplaced({"z": None, "y": [{}], "x": {"w": []}}, grown) == ""


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "a", "2024-01-01T00:00:00Z", "1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcAB"), inner, max_size=3),
    max_leaves=8,
)
_RECORDS = st.lists(st.dictionaries(st.sampled_from("abcd"), _VALUES, max_size=4), min_size=1, max_size=8)


@settings(max_examples=1000 if SOAK else 120, deadline=None)
@given(_RECORDS, st.randoms(use_true_random=False))
def test_order_and_division_change_nothing_and_nothing_is_lost(records: list[Any], chance: random.Random) -> None:
    expected = _seen(*records)
    kind = grown_schema(None, expected)
    shuffled = records[:]
    chance.shuffle(shuffled)
    cut = chance.randint(0, len(records))
    merged = Seen.of_json(json.loads(json.dumps(_seen(*shuffled[:cut]).to_json())))
    merged.merge(_seen(*shuffled[cut:]))
    assert merged.to_json() == expected.to_json()
    assert grown_schema(None, merged) == kind

    rows = [json.dumps(record).encode() for record in records]
    decoder = JsonDecoder(column_of(kind, DDL), whole=expected.with_silent)
    strange: list[int] = []
    decoded = decoder.decode(pa.array(rows, pa.binary()), [None], strange=strange)
    assert decoded.values.type == stored_type(kind)
    assert decoded.bad == []
    for record, value in zip(records, decoded.values.to_pylist(), strict=True):
        _check(record, value, kind)


def _check(value: Any, column: Any, kind: pa.DataType) -> None:
    """Compare a JSON value with that of its column; fields that say nothing may have none."""
    if kind == JSON_TEXT:
        assert (None if column is None else json.loads(column)) == value
    elif pa.types.is_struct(kind) and value is not None:
        for field in kind:
            _check(value.get(field.name), column[field.name], field.type)
        names = {field.name for field in kind}
        assert not any(inference._says_something(value[name]) for name in value.keys() - names)
    elif pa.types.is_list(kind) and value is not None:
        assert len(value) == len(column)
        for one, other in zip(value, column, strict=True):
            _check(one, other, kind.value_type)
    else:
        assert column == value
        assert type(column) is not bool or type(value) is bool


def test_strange_rows_are_found() -> None:
    """Whatever the schema, a row that would make it grow is strange; most rows that would not are not."""
    records = [{"id": n, "x": 1.5, "note": None, "l": [], "o": {}, "s": {"a": "b", "c": None}} for n in range(20)]
    seen = _seen(*records)
    kind = grown_schema(None, seen)
    decoder = JsonDecoder(column_of(kind, DDL), whole=seen.with_silent)
    for new in ({"n": 1}, {"note": 1}, {"l": [0]}, {"o": {"x": 1}}, {"s": {"c": 1}}, {"id": 1.5}, {"x": (1 << 53) + 1}):
        rows = [json.dumps(record).encode() for record in [*records, new]]
        strange: list[int] = []
        decoder.decode(pa.array(rows, pa.binary()), [None], strange=strange)
        assert len(records) in strange, new
        assert grown_schema(None, _seen(*records, new)) != kind, new
    strange = []
    decoder.decode(pa.array(rows[:-1], pa.binary()), [None], strange=strange)
    assert strange == []
    # of a large block few rows are looked at
    many = [*rows[:-1] * 200, b'{"new": 1}', *rows[:-1] * 100]
    decoder.decode(pa.array(many, pa.binary()), [None], strange=strange)
    assert 4000 in strange
    assert len(strange) == 512
