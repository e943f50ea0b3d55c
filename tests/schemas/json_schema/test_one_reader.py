"""JSON values as a load reads them by a DDL text, a source by a JSON Schema, and `klog produce -s` by an Arrow type."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.cli.records.form import parse_json
from spark_klog.cli.records.json_rows import RowReader
from spark_klog.errors import ConfigError
from spark_klog.schemas.json_schema.columns import DDL
from spark_klog.schemas.json_schema.ddl import parse_schema as parse_ddl
from spark_klog.schemas.json_schema.decoder import JsonDecoder
from spark_klog.schemas.json_schema.from_arrow import column_of, schema_of
from spark_klog.schemas.json_schema.schema import parse_schema

BAD = "bad"
_NOON = dt.datetime(2026, 11, 21, 10, tzinfo=dt.timezone.utc)
_MIDNIGHT = dt.datetime(2026, 11, 21, tzinfo=dt.timezone.utc)
_DAY = dt.date(2026, 11, 21)
_MICROS = _NOON.replace(microsecond=123456)
_NOTHING: dict[str, Any] = {}
#: Type, JSON, value, and where a dialect is meant to differ: `load`, `rows` or `produce`.
_TABLE: list[tuple[str, str, Any, dict[str, Any]]] = [
    (kind, text, value, exceptions[0] if exceptions else _NOTHING)
    for kind, text, value, *exceptions in (  # type: ignore[misc]
        ("bigint", "1", 1),
        ("bigint", "-9223372036854775808", -(2**63)),
        ("bigint", "9223372036854775807", 2**63 - 1),
        ("bigint", "9223372036854775808", BAD),
        ("bigint", "1.0", 1),
        ("bigint", "1e2", 100),
        ("bigint", "1.5", BAD),
        ("bigint", "1e30", BAD),
        ("bigint", "-0", 0),
        ("bigint", '"1"', BAD),
        ("bigint", "true", BAD),
        ("bigint", "NaN", BAD),
        ("bigint", "null", None),
        ("int", "2147483647", 2**31 - 1),
        ("int", "2147483648", BAD),
        ("int", "2147483647.0", 2**31 - 1),
        ("smallint", "32768", BAD),
        ("tinyint", "-128", -128),
        ("tinyint", "128", BAD),
        ("double", "1", 1.0),
        ("double", "1.5", 1.5),
        ("double", "-0", -0.0),
        ("double", "-0.0", -0.0),
        ("float", "-0", -0.0),
        ("double", "1e308", 1e308),
        ("double", "1e309", BAD),
        ("double", "-1e400", BAD),
        ("double", "NaN", BAD),
        ("double", "Infinity", BAD),
        ("double", "-Infinity", BAD),
        ("double", '"NaN"', BAD, {"produce": float("nan")}),
        ("double", '"-Infinity"', BAD, {"produce": float("-inf")}),
        ("double", '"1.5"', BAD),
        ("float", "1.5", 1.5),
        ("float", "1e39", BAD),
        ("boolean", "true", True),
        ("boolean", "1", BAD),
        ("boolean", '"true"', BAD),
        ("string", '"ä"', "ä"),
        ("string", '"\\ud83d\\ude00"', "😀"),
        ("string", '"\\ud800"', BAD),
        ("string", "1", BAD),
        ("string", "{}", BAD),
        ("string", "null", None),
        ("decimal(5,2)", "1.25", Decimal("1.25")),
        ("decimal(5,2)", "1", Decimal(1)),
        ("decimal(5,2)", "1.250", Decimal("1.25"), {}),
        ("decimal(5,2)", "1.255", BAD),
        ("decimal(5,2)", "1000", BAD),
        ("decimal(5,2)", "1e2", Decimal(100)),
        ("decimal(5,2)", '"1.25"', Decimal("1.25"), {"rows": BAD}),  # base64, as Kafka Connect writes it
        ("decimal(5,2)", '"fQ=="', BAD, {"rows": Decimal("1.25")}),
        ("decimal(5,2)", '"x"', BAD),
        ("decimal(5,2)", '"NaN"', BAD),
        ("decimal(5,2)", '"1_0"', BAD),
        ("decimal(5,2)", "true", BAD),
        ("date", '"2026-11-21"', _DAY),
        ("date", '"2026-11-21Z"', BAD, {"load": _DAY}),  # as Debezium's isostring writes it
        ("date", '"2026-02-30"', BAD),
        ("date", '"20261121"', BAD),
        ("date", '"2026-11-21T10:00:00Z"', BAD),
        ("date", '"0000-01-01"', BAD),
        ("date", "20000", BAD),
        ("timestamp", '"2026-11-21T10:00:00Z"', _NOON),
        ("timestamp", '"2026-11-21 10:00:00"', _NOON),
        ("timestamp", '"2026-11-21T10:00Z"', _NOON),
        ("timestamp", '"2026-11-21T10"', _NOON),
        ("timestamp", '"2026-11-21T12:30:00+02:30"', _NOON),
        ("timestamp", '"2026-11-21T12:30:00+0230"', _NOON),
        ("timestamp", '"2026-11-21"', _MIDNIGHT),
        ("timestamp", '"2026-11-21T10:00:00.123456Z"', _MICROS),
        ("timestamp", '"2026-11-21T10:00:00.123456789Z"', _MICROS),
        ("timestamp", '"2026-11-21T10:00:60Z"', BAD),
        ("timestamp", '"2026-11-21T10:00:00+25:00"', BAD),
        ("timestamp", '"9999-12-31T23:30:00-01:00"', BAD),
        ("timestamp", '"0000-12-31T23:30:00Z"', BAD),
        ("timestamp", '"noon"', BAD),
        ("timestamp", "1763719200000", BAD),
        ("array<int>", "[1, 2.0]", [1, 2]),
        ("array<int>", "[]", []),
        ("array<int>", "[null]", [None]),
        ("array<int>", '["x"]', BAD),
        ("array<int>", "{}", BAD),
        ("array<date>", '["2026-11-21", null]', [_DAY, None]),
        ("struct<a: int, b: string>", '{"a": 1.0}', {"a": 1, "b": None}, {"produce": {"a": 1}}),  # b may have a default
        ("struct<a: int, b: string>", '{"a": 1, "b": "x", "c": 2}', {"a": 1, "b": "x"}, {"produce": BAD}),
        ("struct<a: int, b: string>", "[]", BAD),
    )
]


def _decoded(decoder: JsonDecoder, row: bytes, beside: bytes | None) -> Any:
    decoded = decoder.decode(pa.array([row, beside], pa.binary()), [None])
    decoded.values.validate(full=True)
    assert not decoded.bad or all(reason for _, reason in decoded.bad)
    return BAD if any(number == 0 for number, _ in decoded.bad) else decoded.values[0].as_py()["x"]


def _read(kind: pa.DataType, row: bytes) -> Any:
    """As `klog produce -s`."""
    try:
        value, shape = RowReader(kind).read(parse_json(row))
    except ConfigError:
        return BAD
    return pa.array([value], shape)[0].as_py()["x"]


def _text(value: Any) -> Any:
    """What tells values apart, 0.0 and -0.0 too, and NaN not from NaN."""
    return repr(value) if isinstance(value, float) else value


@settings(deadline=None)
@given(st.lists(st.one_of(st.sampled_from(["0", "-0", "-0.0", "-0e2", "1e-400", "-1e-400"]), st.floats().map(str))))
def test_each_number_is_the_same_whatever_is_beside_it(numbers: list[str]) -> None:
    rows: list[bytes] = [b'{"x": %s}' % number.encode() for number in numbers]
    decoder = JsonDecoder(column_of(parse_ddl("x double"), DDL))
    alone = [_decoded(decoder, row, None) for row in rows]
    decoded = decoder.decode(pa.array([*rows, b"bad"], pa.binary()), [None])
    bad = {number for number, _ in decoded.bad}
    beside = [BAD if row in bad else decoded.values[row].as_py()["x"] for row in range(len(rows))]
    assert list(map(_text, beside)) == list(map(_text, alone))


@pytest.mark.parametrize(("ddl", "text", "value", "exceptions"), _TABLE)
def test_one_answer(ddl: str, text: str, value: Any, exceptions: dict[str, Any]) -> None:
    kind, row = parse_ddl(f"x {ddl}"), f'{{"x": {text}}}'.encode()
    readers = {
        "load": JsonDecoder(column_of(kind, DDL)),
        "rows": JsonDecoder(parse_schema(schema_of(kind)).column),
    }
    for name, decoder in readers.items():
        for beside in (None, b'{"x": null}', b"bad"):  # Arrow's parser reads the first two, Python's the third
            assert _text(_decoded(decoder, row, beside)) == _text(exceptions.get(name, value)), (name, beside)
    assert _text(_read(kind, row)) == _text(exceptions.get("produce", value))


def test_what_a_json_schema_says_of_nulls() -> None:
    """A list of it has nulls if it says so only; those of a DDL text, and of a type whose items are nullable, may."""
    row = b'{"x": [null]}'
    schema = {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "integer"}}}}
    assert _decoded(JsonDecoder(parse_schema(json.dumps(schema)).column), row, None) == BAD
    assert _decoded(JsonDecoder(column_of(parse_ddl("x array<bigint>"), DDL)), row, None) == [None]
    item = pa.field("item", pa.int64(), nullable=False)
    assert _read(pa.struct([("x", pa.list_(item))]), row) == BAD


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (pa.uint32(), "4294967295", 2**32 - 1),
        (pa.uint32(), "-1", BAD),
        (pa.time64("us"), '"10:00:00.5"', dt.time(10, 0, 0, 500_000)),
        (pa.time64("us"), '"10:00:00.1234567"', dt.time(10, 0, 0, 123_456)),
        (pa.time32("ms"), '"10:00:00.1239"', dt.time(10, 0, 0, 123_000)),
        (pa.time64("us"), '"24:00:00"', BAD),
        (pa.duration("us"), '"1.5s"', dt.timedelta(seconds=1.5)),
        (pa.duration("ms"), '"-0.0015s"', dt.timedelta(milliseconds=-1)),
        (pa.duration("us"), '"1.5"', BAD),
        (pa.duration("us"), '"99999999999999s"', BAD),
        (pa.timestamp("us"), '"2026-11-21T10:00:00"', _NOON.replace(tzinfo=None)),
        (pa.timestamp("us"), '"2026-11-21T10:00:00Z"', BAD),
        (pa.timestamp("ms", "UTC"), '"2026-11-21T10:00:00.0019Z"', _NOON.replace(microsecond=1000)),
        (pa.binary(), '"ä"', "ä".encode()),
        (pa.binary(), '{"base64": "AP8="}', b"\x00\xff"),
        (pa.binary(), '{"base64": 1}', BAD),
        (pa.binary(), '"\\ud800"', BAD),
        (pa.map_(pa.int32(), pa.string()), '{"1": "a"}', [(1, "a")]),
        (pa.map_(pa.int32(), pa.string()), '{"x": "a"}', BAD),
        (pa.map_(pa.bool_(), pa.string()), '{"true": "a"}', [(True, "a")]),
        (pa.struct([]), "{}", {}),
        (pa.null(), "null", None),
        (pa.null(), "1", BAD),
    ],
)
def test_types_that_only_rows_have(kind: pa.DataType, text: str, value: Any) -> None:
    assert _read(pa.struct([("x", kind)]), f'{{"x": {text}}}'.encode()) == value


@pytest.mark.parametrize(
    ("kind", "text", "value", "reason"),
    [
        (pa.binary(2), '"YWJj"', None, "has 3 bytes, not 2"),
        (pa.binary(3), '"YWJj"', b"abc", ""),
        (pa.timestamp("ns"), '"9999-01-01"', None, "is a time that nanoseconds can't hold"),
        (pa.timestamp("ns"), '"1677-09-22"', -9223286400000000000, ""),
        (pa.uint64(), "18446744073709551615.0", 2**64 - 1, ""),
        (pa.uint64(), "18446744073709551616.0", None, "must be an integer"),
        (pa.duration("us"), '"1.9999999999999999999999999999999s"', 1_999_999, ""),
        (pa.duration("us"), '"-1.9999999999999999999999999999999s"', -1_999_999, ""),
        (pa.large_string(), '"a"', "a", ""),
    ],
    ids=str,
)
def test_a_value_at_the_bound_of_its_type(kind: pa.DataType, text: str, value: Any, reason: str) -> None:
    """A bad value is a bad row, beside others that are not."""
    column = column_of(pa.struct([("id", kind)]), DDL)
    rows = [f'{{"id": {text}}}'.encode(), b'{"id": null}']
    decoded = JsonDecoder(column).decode(pa.array(rows, pa.binary()), [None])
    assert [(row.row, reason in row.reason) for row in decoded.bad] == ([(0, True)] if reason else [])
    assert decoded.values.flatten()[0].equals(pa.array([value, None], kind))
