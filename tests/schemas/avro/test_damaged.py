"""Rows that do not decode: they are null and reported, and the others are as if they were not there."""

from __future__ import annotations

import io
import re
import resource
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from spark_klog.columns.room import TOO_MANY_ABSENT
from spark_klog.errors import SchemaError
from spark_klog.records.contract import BinaryColumn
from spark_klog.schemas.avro.decoder import AvroDecoder
from spark_klog.schemas.avro.schema import parse_schema

from .support import decode, record, written

pytestmark = pytest.mark.usefixtures("kernel")
_MANY = bytes.fromhex("feffffffffffffffff01")  # 2^63 - 1
_FEWEST = bytes.fromhex("ffffffffffffffffff01")  # -2^63
_DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": 0}


def _array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


_DAMAGED = [
    ("int", b"", "cut off"),
    ("int", b"\x80", "cut off"),
    ("int", b"\x80\x80\x80\x80\x10", "more than 32 bits"),
    ("long", b"\x01\x02", "left over"),
    ("boolean", b"\x02", "neither 0 nor 1"),
    ("float", b"\x00\x00\x00", "cut off"),
    ("double", b"\x00" * 7, "cut off"),
    ("string", b"\x04a", "cut off"),
    ("string", b"\x01", "negative length|cut off"),
    ("string", _MANY, "cut off"),
    ("string", _FEWEST, "negative length|cut off"),
    ("string", b"\x04\xc3\x28", "not UTF-8"),
    ("string", b"\x06\xed\xa0\x80", "not UTF-8"),
    ("string", b"\x10abcdefg\xff", "not UTF-8"),
    ("bytes", _MANY + b"abc", "cut off"),
    ({"type": "fixed", "name": "F", "size": 4}, b"abc", "cut off"),
    ({"type": "enum", "name": "E", "symbols": ["A"]}, b"\x02", "no such symbol"),
    ({"type": "enum", "name": "E", "symbols": ["A"]}, b"\x01", "no such symbol"),
    (["null", "int"], b"\x04", "no such branch|cut off"),
    (_array("int"), _MANY, "cut off"),
    (_array("int"), _FEWEST + b"\x00", "negative length|cut off"),
    (_array("int"), b"\x04\x02\x04", "cut off"),
    (_array("double"), b"\x04" + bytes(15), "cut off"),
    (_array("null"), b"\x82\x10\x00", "too many items of no bytes"),
    (_array(record(name="Nothing")), b"\x80\x20\x00", "too many items of no bytes"),
    ({"type": "map", "values": "null"}, b"\x04\x02a\x02", "cut off"),
    (_DECIMAL, b"\x00", "a decimal"),
    (_DECIMAL, b"\x04\x03\xe8", "a decimal"),
    (_DECIMAL, b"\x22" + b"\x01" + bytes(16), "a decimal"),
    ({"type": "long", "logicalType": "timestamp-millis"}, _MANY, "beyond what the column can hold"),
]


@pytest.mark.parametrize(("schema", "data", "reason"), _DAMAGED, ids=str)
def test_a_damaged_row_among_others(schema: Any, data: bytes, reason: str) -> None:
    schema = record(("before", "string"), ("field", _array(schema)), ("after", "int"))
    good = b"\x02a\x00\x02"
    after = b"" if "cut off" in reason else b"\x00\x02"
    result = decode(schema, [good, b"\x02b\x02" + data + after, good])
    if "left over" not in reason:  # what is left over of the field may be a value of the next ones
        assert [row for row, _ in result.bad] == [1]
    assert result.values.to_pylist()[::2] == [{"before": "a", "field": [], "after": 1}] * 2


@pytest.mark.parametrize(("schema", "data", "reason"), _DAMAGED, ids=str)
def test_reasons(schema: Any, data: bytes, reason: str, kernel: str) -> None:
    (bad,) = decode(schema, [data]).bad
    assert bad.row == 0
    if kernel == "native" or "cut off" not in bad.reason:
        assert re.search(reason, bad.reason)


def test_a_block_of_a_negative_size(kernel: str) -> None:
    if kernel == "native":  # fastavro does not look at the size
        assert "negative length" in decode(_array("int"), [b"\x03\x01\x02\x02\x00"]).bad[0].reason


def test_the_reason_names_the_field(kernel: str) -> None:
    inner = record(("zip", ["null", "string"]), name="Address")
    schema = record(("id", "long"), ("addresses", _array(inner)), ("byName", {"type": "map", "values": "boolean"}))
    good = {"id": 5, "addresses": [{"zip": "x"}], "byName": {"k": True}}
    (data,) = written(schema, good)
    bad = decode(schema, [data[:1], data[:3], data[:4], data[:-2] + b"\x07" + data[-1:]]).bad
    assert len(bad) == 4
    if kernel == "native":
        fields = [row.reason.partition(":")[0] for row in bad]
        assert fields == ["field addresses", "field addresses[].zip", "field addresses[].zip", "field byName{}"]


def test_a_long_number() -> None:
    assert decode("long", [b"\xfe" + b"\xff" * 8 + b"\x01"]).values.to_pylist() == [2**63 - 1]
    assert decode("long", [b"\xff" * 9 + b"\x01"]).values.to_pylist() == [-(2**63)]


def test_blocks_with_their_size() -> None:
    assert decode(_array("int"), [b"\x03\x04\x02\x04\x02\x06\x00"]).values.to_pylist() == [[1, 2, 3]]
    skipped = record(("a", _array("int")), ("b", "int"))
    assert decode(skipped, [b"\x03\x04\x02\x04\x00\x0e"], record(("b", "int"))).values.to_pylist() == [{"b": 7}]


def test_counts_do_not_allocate() -> None:
    wide = record(*((f"d{number}", "string", "x" * 1000) for number in range(20)), name="W")
    number = {"name": "n", "type": "int"}
    reader = record(("items", _array({**wide, "fields": [number, *wide["fields"]]})))
    writer = record(("items", _array({**wide, "fields": [number]})))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    claims = [_MANY + b"\x02" * 10, b"\xfe\xff\xff\xff\x0f" + b"\x02" * 10, b"\x14" + b"\x02" * 10]
    assert len(decode(writer, claims * 5, reader).bad) == 15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB


_SYMBOLS = {"type": "enum", "name": "E", "symbols": ["s" * 200, "t"]}
_SMALL = record(("n", "int"), name="I")
_NULLS = [(f"n{number}", ["null", "long"], None) for number in range(1000)]
_GROWN = record(("n", "int"), *_NULLS[:20], ("text", "string", "x" * 800), name="I")
_WIDE = record(*_NULLS, name="I")
_DEFAULTED = record(("n", "int"), ("text", "string", "x" * 900), name="I")


@pytest.mark.parametrize(
    ("kind", "read", "value", "fits", "bad"),
    [
        (_array(_SMALL), _array(_GROWN), lambda number: [{"n": 1}] * number, 4419, 4420),
        ({"type": "map", "values": _SMALL}, {"type": "map", "values": _GROWN}, None, 2000, 8000),
        (_array(_SMALL), _array(_DEFAULTED), lambda number: [{"n": 1}] * number, 4500, 5500),
        (_array(["null", _SMALL]), _array(["null", _GROWN]), lambda number: [None] * number, 4400, 5500),
        (_array("null"), _array(["null", _WIDE]), lambda number: [None] * number, 450, 500),
        (_array(_SYMBOLS), _array(_SYMBOLS), lambda number: ["s" * 200] * number, 25_000, 35_000),
        (_array(_SYMBOLS), _array(_SYMBOLS), lambda number: ["t"] * number, 400, 35_000),
    ],
    ids=["fields", "map", "default", "nulls", "nothing", "symbols", "short symbols"],
)
def test_items_that_grow_in_columns(kind: Any, read: Any, value: Any, fits: int, bad: int) -> None:
    """A record may take 4 MiB and 64 bytes for each of its bytes in lists; what has less is read as by fastavro."""
    make = value or (lambda number: {f"k{one}": {"n": 1} for one in range(number)})
    data = written(record(("a", kind)), *({"a": make(number)} for number in (fits, bad, 1)))
    result = decode(record(("a", kind)), list(data), record(("a", read)))
    is_bounded = make(1) != ["t"]
    assert [(row, text.endswith(TOO_MANY_ABSENT)) for row, text in result.bad] == [(1, True)] * is_bounded
    expected = [fastavro.schemaless_reader(io.BytesIO(one), record(("a", kind)), record(("a", read))) for one in data]
    if is_bounded:
        expected[1] = None
    assert result.values.to_pylist(maps_as_pydicts="strict") == expected


def test_all_rows_bad_or_null_or_none() -> None:
    schema = record(("a", "int"), ("b", ["null", {"type": "map", "values": _array("string")}]))
    assert decode(schema, [b"", None, b"\xff"]).values.to_pylist() == [None] * 3
    assert decode(schema, []).values.to_pylist() == []
    decoder = AvroDecoder(parse_schema(schema))
    assert decoder.decode(pa.array([b"a", b"b"]), []).values.to_pylist() == [None, None]
    with pytest.raises(SchemaError, match="not int32"):
        decoder.decode(pa.array([1], pa.int32()), [])


def test_the_columns_of_records() -> None:
    decoder = AvroDecoder(parse_schema("string"))
    programs = [decoder.program(parse_schema("string"))]
    column = BinaryColumn(pa.array([0, 2, 2, 4], pa.int32()).buffers()[1], b"\x02a\x02b", b"\x05", 1)
    assert decoder.decode(column, programs).values.to_pylist() == ["a", None, "b"]
    large = pa.array([b"\x02a"], pa.large_binary())
    assert decoder.decode(large, programs).values.to_pylist() == ["a"]


def test_batches_do_not_see_each_other() -> None:
    schema = record(("a", "string"), ("b", _array("int")), ("c", ["null", "boolean"]))
    decoder = AvroDecoder(parse_schema(schema))
    programs = [decoder.program(parse_schema(schema))]
    good = {"a": "x" * 50_000, "b": list(range(1000)), "c": True}
    (data,) = written(schema, good)
    results = [decoder.decode(pa.array([data, data[:-1], data]), programs) for _ in range(5)]
    for result in results:
        assert result.values.to_pylist() == [good, None, good]
        assert len(result.bad) == 1


def test_a_call_that_fails_leaves_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = record(("a", "string"), ("b", _array("int")))
    decoder = AvroDecoder(parse_schema(schema))
    programs = [decoder.program(parse_schema(schema))]
    column = pa.array(written(schema, {"a": "x", "b": [1]}, {"a": "y", "b": []}))
    with monkeypatch.context() as patched:
        patched.setattr("spark_klog.schemas.avro.decoder.array_of", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            decoder.decode(column, programs)
    with pytest.raises((ValueError, IndexError)):  # one number for two rows
        decoder.decode(column, programs, which=bytes(4))
    assert decoder.decode(column[:1], programs).values.to_pylist() == [{"a": "x", "b": [1]}]
