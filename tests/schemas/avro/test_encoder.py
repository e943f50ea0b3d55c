"""Arrow types to Avro: what fits, what is refused before the first row, and what at a row."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest

from spark_klog.errors import EncodeError, SchemaError
from spark_klog.schemas.avro.encoder import AvroEncoder
from spark_klog.schemas.avro.schema import parse_schema

from .support import encode, record, written

pytestmark = pytest.mark.usefixtures("kernel")
_ENUM = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
_INTS = {"type": "array", "items": "int"}
_FIXED = {"type": "fixed", "name": "F", "size": 2}


def _logical(kind: str, logical: str) -> dict[str, Any]:
    return {"type": kind, "logicalType": logical}


@pytest.mark.parametrize(
    ("schema", "array", "values"),
    [
        ("int", pa.array([1, -2], pa.int8()), [1, -2]),
        ("int", pa.array([1, 60000], pa.uint16()), [1, 60000]),
        ("long", pa.array([2**32 - 1], pa.uint32()), [2**32 - 1]),
        ("long", pa.array([-3], pa.int16()), [-3]),
        ("double", pa.array([1.5], pa.float32()), [1.5]),
        ("string", pa.array(["a", "\u20ac"], pa.large_string()), ["a", "\u20ac"]),
        ("string", pa.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
        ("string", pa.array(["a", "long enough not to be inlined"], pa.string_view()), None),
        ("bytes", pa.array([b"ab"], pa.binary(2)), [b"ab"]),
        ("bytes", pa.array([b"", b"ab"], pa.large_binary()), [b"", b"ab"]),
        (_FIXED, pa.array([b"ab"], pa.binary()), [b"ab"]),
        (_FIXED, pa.array([b"ab"], pa.binary(2)), [b"ab"]),
        (_ENUM, pa.array(["B", "A"]), ["B", "A"]),
        (_ENUM, pa.array(["B", "A"]).dictionary_encode(), ["B", "A"]),
        ("boolean", pa.array([True, False]), [True, False]),
        (
            {"type": "array", "items": "int"},
            pa.array([[1], []], pa.large_list(pa.int64().__class__ and pa.int32())),
            [[1], []],
        ),
        (_INTS, pa.array([[1, 2]], pa.list_(pa.int32(), 2)), [[1, 2]]),
        (["null", "string"], pa.array(["x", "y"]), ["x", "y"]),
        (["string", "null"], pa.array(["x", "y"]), ["x", "y"]),
        (["null", "int", "string"], pa.array(["x"]), ["x"]),
        (["int", "long"], pa.array([2**40]), [2**40]),
        (["null", "float", "double"], pa.array([2.5]), [2.5]),
        (_logical("int", "date"), pa.array([dt.date(2024, 1, 1)]), [dt.date(2024, 1, 1)]),
        (_logical("int", "time-millis"), pa.array([dt.time(1)], pa.time32("s")), [dt.time(1)]),
        (_logical("long", "time-micros"), pa.array([dt.time(1)], pa.time32("ms")), [dt.time(1)]),
        (_logical("int", "time-millis"), pa.array([dt.time(1)], pa.time64("ns")), [dt.time(1)]),
        (_logical("long", "time-micros"), pa.array([5], pa.int64()), [5]),
    ],
    ids=str,
)
def test_types_that_fit(schema: Any, array: pa.Array, values: Any) -> None:
    assert encode(schema, array) == written(schema, *(array.to_pylist() if values is None else values))


def test_timestamps_in_any_unit() -> None:
    for unit in ("s", "ms", "us", "ns"):
        value = pa.array([-1], pa.timestamp("s", "Europe/Berlin")).cast(pa.timestamp(unit, "Europe/Berlin"))
        assert encode(_logical("long", "timestamp-millis"), value) == written("long", -1000)
        naive = pa.array([-1], pa.timestamp("s")).cast(pa.timestamp(unit))
        assert encode(_logical("long", "local-timestamp-micros"), naive) == written("long", -1_000_000)
    late = pa.array([-1], pa.timestamp("ns", "UTC"))
    assert encode(_logical("long", "timestamp-micros"), late) == written("long", -1)
    too_late = pa.array([2**62], pa.timestamp("us", "UTC"))
    with pytest.raises(EncodeError, match="beyond"):
        encode(_logical("long", "timestamp-nanos"), too_late)


def test_fields_by_name() -> None:
    schema = record(
        ("ID", "long"),
        ("missing", "string", "d"),
        ("absent", ["int", "null"]),
        ("items", {"type": "map", "values": record(("b", "int"), ("a", ["null", "int"]), name="I")}),
    )
    kind = pa.struct(
        [
            ("items", pa.map_(pa.string(), pa.struct([("a", pa.int32()), ("b", pa.int32())]))),
            ("id", pa.int32()),
        ]
    )
    rows = [{"items": [("k", {"a": None, "b": 1}), ("l", {"a": 2, "b": 3})], "id": 9}, None, {"items": [], "id": 1}]
    expected = written(
        schema,
        {"ID": 9, "missing": "d", "absent": None, "items": {"k": {"b": 1, "a": None}, "l": {"b": 3, "a": 2}}},
        {"ID": 1, "missing": "d", "absent": None, "items": {}},
    )
    values = pa.array(rows, kind)
    assert encode(schema, values, b"\x00abc") == [b"\x00abc" + expected[0], None, b"\x00abc" + expected[1]]
    assert encode(schema, values.slice(2)) == [expected[1]]
    assert encode(schema, values[:0]) == []


def test_a_column_is_written_once() -> None:
    """Columns of two fields whose names differ by case only: each field has its own, or its default."""
    schema = record(("Id", "long", -1), ("id", "long"))
    values = pa.array([{"id": 7}], pa.struct([("id", pa.int64())]))
    assert encode(schema, values) == written(schema, {"Id": -1, "id": 7})
    both = pa.array([{"id": 7, "Id": 8}], pa.struct([("id", pa.int64()), ("Id", pa.int64())]))
    assert encode(schema, both) == written(schema, {"Id": 8, "id": 7})
    with pytest.raises(SchemaError, match="field id: column ID fits several fields of the schema"):
        encode(schema, pa.array([{"ID": 7}], pa.struct([("ID", pa.int64())])))


def test_a_null_row_is_a_null_whatever_the_schema() -> None:
    assert encode(["null", "int"], pa.array([1, None], pa.int32())) == [b"\x02\x02", None]


def test_members_of_a_union() -> None:
    schema = record(("u", ["string", "null", "int", {"type": "array", "items": "int"}]))
    kind = pa.struct([("member0", pa.string()), ("member1", pa.int32()), ("member2", pa.list_(pa.int32()))])
    members = [{"member0": "x"}, {"member1": 7}, {"member2": [1, 2]}, None, {}]
    values = pa.array([{"u": member} for member in members], pa.struct([("u", kind)]))
    assert encode(schema, values) == written(schema, *({"u": value} for value in ("x", 7, [1, 2], None, None)))
    both = pa.array([{"u": {"member0": "x", "member1": 1}}], pa.struct([("u", kind)]))
    with pytest.raises(EncodeError, match="field u: has several members"):
        encode(schema, both)
    without_null = record(("u", ["string", "int", {"type": "array", "items": "int"}]))
    with pytest.raises(EncodeError, match="field u: is null"):
        encode(without_null, values)


def test_what_is_under_a_null_is_not_written() -> None:
    inner = pa.StructArray.from_arrays([pa.array(["x", "y"])], ["a"], mask=pa.array([False, True]))
    schema = record(("s", ["null", record(("a", "string"), name="I")]))
    values = pa.StructArray.from_arrays([inner], ["s"])
    assert encode(schema, values) == written(schema, {"s": {"a": "x"}}, {"s": None})


@pytest.mark.parametrize(
    ("schema", "kind", "text"),
    [
        ("int", pa.int64(), "int64 can't be written as int"),
        ("int", pa.uint32(), "uint32 can't be written as int"),
        ("long", pa.uint64(), "uint64"),
        ("long", pa.timestamp("us", "UTC"), "timestamp.* can't be written as long: cast it"),
        (_logical("long", "timestamp-micros"), pa.timestamp("us"), "can't be written as long .timestamp-micros."),
        (_logical("long", "local-timestamp-micros"), pa.timestamp("us", "UTC"), "can't be written"),
        ("float", pa.float64(), "double can't be written as float"),
        ("string", pa.binary(), "binary can't be written as string"),
        ("bytes", pa.string(), "string can't be written as bytes"),
        (record(("a", "int")), pa.binary(), "binary can't be written as record"),
        (_FIXED, pa.binary(3), r"fixed_size_binary\[3\] can't be written as fixed F"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2}, pa.decimal128(5, 1), "decimal"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2}, pa.decimal128(6, 2), "decimal"),
        (record(("a", "int")), pa.struct([("a", pa.string())]), "field a: string can't be written as int"),
        (record(("a", "int")), pa.struct([]), "field a: is missing"),
        (record(("a", "int")), pa.struct([("a", pa.int32()), ("b", pa.int32())]), "record R has no field b"),
        (
            record(("a", {"type": "array", "items": record(("x", "int"), name="I")})),
            pa.struct([("a", pa.list_(pa.struct([("x", pa.bool_())])))]),
            r"field a\[\].x: bool can't be written as int",
        ),
        (["null", "int"], pa.string(), "string can't be written as int"),
        (["null", "int", "long"], pa.string(), "string can't be written as union"),
        ({"type": "map", "values": "int"}, pa.map_(pa.int32(), pa.int32()), "map"),
    ],
    ids=str,
)
def test_types_that_do_not_fit(schema: Any, kind: pa.DataType, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        AvroEncoder(parse_schema(schema), kind)


@pytest.mark.parametrize(
    ("schema", "array", "text"),
    [
        (record(("a", "int")), pa.array([{"a": 1}, {"a": None}]), "field a: is null"),
        (
            record(("a", {"type": "array", "items": "string"})),
            pa.array([{"a": []}, {"a": ["x", None]}], pa.struct([("a", pa.list_(pa.string()))])),
            r"field a\[\]: is null",
        ),
        (record(("e", _ENUM)), pa.array([{"e": "A"}, {"e": "C"}]), "field e: is not a symbol"),
        (record(("f", _FIXED)), pa.array([{"f": b"ab"}, {"f": b"abc"}]), "field f: does not have the size"),
    ],
    ids=str,
)
def test_values_that_do_not_fit(schema: Any, array: pa.Array, text: str, kernel: str) -> None:
    if array.type.field(0).type == pa.int64():
        array = array.cast(pa.struct([("a", pa.int32())]))
    with pytest.raises(EncodeError, match="row 1: " + text if kernel == "native" else text):
        encode(schema, array)


@pytest.mark.parametrize("number", [pa.int16(), pa.int32()])
def test_nulls_below_a_null_are_no_nulls_of_their_field(number: pa.DataType) -> None:
    inner = pa.struct([pa.field("n", number, nullable=False)])
    kind = pa.struct([pa.field("l", pa.list_(inner)), pa.field("m", pa.map_(pa.string(), inner))])
    numbers = pa.array([1, None], number)
    structs = pa.StructArray.from_arrays([numbers], fields=list(inner), mask=pa.array([False, True]))
    lists = pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), structs)
    maps = pa.MapArray.from_arrays(pa.array([0, 2], pa.int32()), pa.array(["a", "b"]), structs)
    values = pa.StructArray.from_arrays([lists, maps], fields=list(kind))
    entry = ["null", record(("n", "int"), name="I")]
    schema = record(("l", {"type": "array", "items": entry}), ("m", {"type": "map", "values": ["null", "I"]}))
    encoded = AvroEncoder(parse_schema(schema), kind).encode(values)
    assert encoded.to_pylist() == [b"\x04\x02\x02\x00\x00" + b"\x04\x02a\x02\x02\x02b\x00\x00"]
