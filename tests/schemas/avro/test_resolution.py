"""Resolution of a writer's schema to a reader's: cases of the specification, and those where implementations differ."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from spark_klog.errors import SchemaError
from spark_klog.schemas.avro.decoder import AvroDecoder
from spark_klog.schemas.avro.schema import parse_schema
from spark_klog.schemas.rows import BadRow

from .support import decode, record, rows, written

pytestmark = pytest.mark.usefixtures("kernel")


def _enum(*symbols: str, name: str = "E", **more: Any) -> dict[str, Any]:
    return {"type": "enum", "name": name, "symbols": list(symbols), **more}


def _decimal(precision: int, scale: int) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


def _time(logical: str) -> dict[str, Any]:
    return {"type": "int" if logical == "time-millis" else "long", "logicalType": logical}


@pytest.mark.parametrize(
    ("writer", "reader", "value", "expected"),
    [
        ("int", "long", -5, -5),
        ("int", "float", 16777217, 16777216.0),
        ("int", "double", 7, 7.0),
        ("long", "float", 2**40, 2.0**40),
        ("long", "double", -(2**62), -(2.0**62)),
        ("float", "double", 1.5, 1.5),
        ("string", "bytes", "\u00e4", b"\xc3\xa4"),
        ("bytes", "string", b"\xc3\xa4", "\u00e4"),
        ("int", ["null", "long"], 3, 3),
        (["null", "int"], "long", 3, 3),
        (["int", "string"], ["string", "null", "int"], 3, {"member0": None, "member1": 3}),
        (["int", "string"], ["string", "null", "int"], "x", {"member0": "x", "member1": None}),
        # the branch of the same type comes before one that it is promoted to, as in Java
        ("int", ["double", "string", "int"], 3, {"member0": None, "member1": None, "member2": 3}),
        ("int", ["string", "double", "float"], 3, {"member0": None, "member1": 3.0, "member2": None}),
        (["null", "float"], ["null", "float", "double"], 1.5, 1.5),
        (_enum("A", "B"), _enum("B", "A"), "A", "A"),
        (_enum("A", "B"), _enum("B", default="B"), "A", "B"),
        (_enum("A", "B"), _enum("A"), "A", "A"),
        (_enum("A", name="a.E"), _enum("A", name="b.E"), "A", "A"),
        (_enum("A", name="a.E"), _enum("A", name="b.F", aliases=["a.E"]), "A", "A"),
        (_decimal(5, 2), _decimal(9, 2), Decimal("-1.05"), Decimal("-1.05")),
        (_decimal(5, 2), "bytes", Decimal("-1.05"), b"\x97"),
        (_time("timestamp-millis"), "long", 5, 5),
        (_time("time-millis"), _time("time-micros"), 5, 5000),
        ({"type": "array", "items": "int"}, {"type": "array", "items": ["null", "long"]}, [1, 2], [1, 2]),
        ({"type": "map", "values": "int"}, {"type": "map", "values": "double"}, {"k": 1}, [("k", 1.0)]),
    ],
    ids=str,
)
def test_values(writer: Any, reader: Any, value: Any, expected: Any) -> None:
    assert rows(writer, [*written(writer, value), None], reader) == [expected, None]


@pytest.mark.parametrize("writer", ["millis", "micros", "nanos"])
@pytest.mark.parametrize("reader", ["millis", "micros", "nanos"])
def test_times_stay_the_same_in_other_units(writer: str, reader: str) -> None:
    given = {"millis": -1, "micros": -1000, "nanos": -1_000_000}[writer]
    schemas = [_time(f"timestamp-{unit}") for unit in (writer, reader)]
    value = decode(schemas[0], written("long", given), schemas[1], "arrow").values
    assert value.cast(pa.int64()).to_pylist() == [{"millis": -1, "micros": -1000, "nanos": -1_000_000}[reader]]


def test_times_are_rounded_to_the_past() -> None:
    values = decode(_time("timestamp-nanos"), written("long", -1, 1), _time("timestamp-micros")).values
    assert values.cast(pa.int64()).to_pylist() == [-1, 0]


def test_fields_by_name_by_alias_and_by_default() -> None:
    writer = record(("kept", "int"), ("old", "string"), ("gone", {"type": "map", "values": ["null", "bytes"]}))
    reader = record(
        ("added", {"type": "array", "items": record(("x", "int"), ("y", "string", "why"), name="I")}, [{"x": 1}]),
        {"name": "new", "type": "string", "aliases": ["older", "old"]},
        ("kept", "long"),
        ("bytes", "bytes", "\u00ff"),
        ("either", ["null", _enum("A", "B")], "B"),
        ("fixed", {"type": "fixed", "name": "F", "size": 2}, "\u0001\u0002"),
        ("number", ["double", "string"], "NaN text"),
    )
    values = written(writer, {"kept": 7, "old": "o", "gone": {"k": None, "l": b"x"}})
    assert rows(writer, values, reader) == [
        {
            "added": [{"x": 1, "y": "why"}],
            "new": "o",
            "kept": 7,
            "bytes": b"\xff",
            "either": "B",
            "fixed": b"\x01\x02",
            "number": {"member0": None, "member1": "NaN text"},
        }
    ]


def test_a_field_keeps_its_name_before_an_alias_takes_it() -> None:
    writer = record(("a", "int"), ("b", "int"))
    reader = record({"name": "c", "type": "int", "aliases": ["a"], "default": 0}, ("a", "int"))
    assert rows(writer, written(writer, {"a": 1, "b": 2}), reader) == [{"c": 0, "a": 1}]


def test_records_need_not_have_one_name() -> None:
    writer = record(("a", "int"), name="a.Written")
    assert rows(writer, written(writer, {"a": 1}), record(("a", "int"), name="topLevelRecord")) == [{"a": 1}]


def test_records_in_unions_by_name_then_by_structure() -> None:
    one, two = record(("x", "int"), name="n.One"), record(("x", "int"), ("y", "int"), name="n.Two")
    readers = [
        record(("x", "int"), name="other.One"),
        record(("x", "int"), ("y", "int", 0), name="n.Two"),
    ]
    values = written([one, two], ("n.One", {"x": 1}), ("n.Two", {"x": 2, "y": 3}))
    assert rows([one, two], values, readers) == [
        {"member0": {"x": 1}, "member1": None},
        {"member0": None, "member1": {"x": 2, "y": 3}},
    ]
    renamed = [record(("z", "int"), name="A"), record(("x", "int"), name="B")]
    assert rows(one, written(one, {"x": 1}), renamed) == [{"member0": None, "member1": {"x": 1}}]


@pytest.mark.parametrize(
    ("writer", "reader", "text"),
    [
        ("long", "int", "long is not int"),
        ("double", "float", "double is not float"),
        ("string", "int", "string is not int"),
        (_enum("A"), "string", "enum E is not string"),
        (_enum("A"), _enum("A", name="F"), "enum E is not enum F"),
        ({"type": "fixed", "name": "F", "size": 2}, {"type": "fixed", "name": "F", "size": 3}, "2 bytes are not 3"),
        ({"type": "fixed", "name": "F", "size": 2}, "bytes", "fixed F is not bytes"),
        (_decimal(5, 2), _decimal(5, 1), "the scales differ"),
        (record(("a", "int")), record(("a", "string")), "field a: int is not string"),
        (record(("a", "int")), record(("a", "int"), ("b", "int")), "field b: the writer's record R has no such field"),
        (
            record(("a", {"type": "array", "items": record(("x", "int"), name="I")})),
            record(("a", {"type": "array", "items": record(("x", "boolean"), name="I")})),
            r"field a\[\].x: int is not boolean",
        ),
        (["null", "string"], "int", "string is not int"),
        ("string", ["null", "int"], "string is not union<null, int>"),
        (record(), record(("a", "int", "seven")), 'field a: the default "seven" is no int'),
        (record(), record(("a", ["null", "int"], "seven")), 'field a: the default "seven" is no union'),
    ],
)
def test_no_value_can_be_read(writer: Any, reader: Any, text: str) -> None:
    decoder = AvroDecoder(parse_schema(reader))
    with pytest.raises(SchemaError, match=text):
        decoder.program(parse_schema(writer))


def test_only_values_of_the_branch_that_does_not_match_are_bad() -> None:
    writer = record(("a", ["null", "int", "string"]))
    result = decode(writer, written(writer, {"a": 1}, {"a": None}, {"a": "x"}, {"a": 2}), record(("a", ["int"])))
    assert [row for row, _ in result.bad] == [1, 2]
    assert result.values.to_pylist() == [{"a": 1}, None, None, {"a": 2}]
    assert "does not match" in result.bad[0].reason


def test_symbols_that_the_reader_does_not_have() -> None:
    result = decode(_enum("A", "B"), written(_enum("A", "B"), "B", "A"), _enum("A", "C"))
    assert [row for row, _ in result.bad] == [0]
    assert result.values.to_pylist() == [None, "A"]


def test_several_writers_in_one_column() -> None:
    old, new = record(("a", "int")), record(("b", "string"), ("a", "long"))
    reader = record(("a", "long"), ("b", ["null", "string"], None))
    decoder = AvroDecoder(parse_schema(reader))
    programs = [decoder.program(parse_schema(writer)) for writer in (old, new)]
    head = b"head"
    values = [
        *written(old, {"a": 1}),
        head + written(new, {"b": "x", "a": 2})[0],
        b"of a schema that nobody knows",
        head + written(old, {"a": 3})[0],
        None,
        head,
    ]
    which = pa.array([0, 1, -1, 0, 0, 1], pa.int32()).buffers()[1]
    starts = pa.array([0, 4, 0, 4, 0, 5], pa.int32()).buffers()[1]
    result = decoder.decode(pa.array(values, pa.binary()), programs, which, starts)
    assert result.values.to_pylist() == [{"a": 1, "b": None}, {"a": 2, "b": "x"}, None, {"a": 3, "b": None}, None, None]
    assert [row for row, _ in result.bad] == [5]
    assert isinstance(result.bad[0], BadRow)
