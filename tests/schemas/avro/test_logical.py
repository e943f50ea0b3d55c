"""Logical types: as fastavro writes them, and back."""

from __future__ import annotations

import datetime as dt
import uuid
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from spark_klog.schemas.avro.columns import Types

from .support import decode, encode, rows, written

pytestmark = pytest.mark.usefixtures("kernel")
_UTC = dt.timezone.utc


def _logical(kind: str, logical: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": logical, **more}


def _decimal(precision: int, scale: int, size: int | None = None) -> dict[str, Any]:
    kind = {"type": "bytes"} if size is None else {"type": "fixed", "name": "F", "size": size}
    return {**kind, "logicalType": "decimal", "precision": precision, "scale": scale}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (_logical("int", "date"), dt.date(1969, 12, 31)),
        (_logical("int", "time-millis"), dt.time(23, 59, 59, 999_000)),
        (_logical("long", "time-micros"), dt.time(23, 59, 59, 999_999)),
        (_logical("long", "timestamp-millis"), dt.datetime(1960, 2, 29, 1, 2, 3, 4000, _UTC)),
        (_logical("long", "timestamp-micros"), dt.datetime(2024, 2, 29, 1, 2, 3, 4, _UTC)),
        (_logical("long", "local-timestamp-millis"), dt.datetime(2024, 2, 29, 1, 2, 3, 4000)),
        (_logical("long", "local-timestamp-micros"), dt.datetime(2024, 2, 29, 1, 2, 3, 4)),
        (_logical("string", "uuid"), uuid.UUID(int=7)),
        (_decimal(5, 2), Decimal("-123.45")),
        (_decimal(5, 2), Decimal("1.28")),
        (_decimal(38, 10), Decimal("-9999999999999999999999999999.9999999999")),
        (_decimal(38, 0), Decimal("9" * 38)),
        (_decimal(9, 0), Decimal(0)),
        (_decimal(5, 2, 3), Decimal("-123.45")),
        (_decimal(38, 38, 16), Decimal("-0." + "9" * 38)),
        (_decimal(20, 3, 30), Decimal("12345678901234567.891")),
    ],
    ids=str,
)
def test_as_fastavro_writes_them(schema: Any, value: Any) -> None:
    data = written(schema, value)
    read = rows(schema, data, types="arrow")
    assert read == [str(value) if isinstance(value, uuid.UUID) else value]
    both: tuple[Types, Types] = ("arrow", "spark")
    for types in both:
        assert encode(schema, decode(schema, data, types=types).values) == data


def test_wide_decimals() -> None:
    schema = _decimal(60, 5)
    data = written(schema, *(Decimal(f"{sign}{'7' * 55}.12345") for sign in "+-"))
    read = decode(schema, data, types="arrow").values
    assert read.type == pa.decimal256(60, 5)
    assert list(map(str, read.to_pylist())) == ["7" * 55 + ".12345", "-" + "7" * 55 + ".12345"]
    assert encode(schema, read) == data


@pytest.mark.parametrize("number", [0, 1, -1, 127, 128, -128, -129, 255, 256, 10**37, -(10**37), 10**38 - 1])
def test_decimals_have_as_few_bytes_as_they_need(number: int) -> None:
    value = pa.array([Decimal(number)], pa.decimal128(38, 0))
    (data,) = encode(_decimal(38, 0), value)
    size = (number if number >= 0 else ~number).bit_length() // 8 + 1  # as Java's BigInteger
    assert data == bytes([2 * size]) + number.to_bytes(size, "big", signed=True)


def test_durations() -> None:
    schema = {"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"}
    data = bytes.fromhex("010000000200000003000000")
    assert rows(schema, [data]) == [data]
    interval = decode(schema, [data], types="arrow").values
    assert interval.to_pylist() == [pa.MonthDayNano([1, 2, 3_000_000])]
    assert encode(schema, interval) == [data]
    assert decode(schema, [b"\xff" * 12], types="arrow").bad


@pytest.mark.parametrize(("kind", "logical"), [("int", "time-millis"), ("long", "time-micros")])
def test_times_of_day_that_are_none(kind: str, logical: str) -> None:
    values = written(kind, 0, -1, 86_400_000 * (1000 if kind == "long" else 1), 5)
    assert [row for row, _ in decode(_logical(kind, logical), values, types="arrow").bad] == [1, 2]
    assert not decode(_logical(kind, logical), values).bad


def test_nanoseconds() -> None:
    schema = _logical("long", "timestamp-nanos")
    data = written("long", 1_700_000_000_123_456_789)
    assert rows(schema, data) == [1_700_000_000_123_456_789]
    value = decode(schema, data, types="arrow").values
    assert value.type == pa.timestamp("ns", "UTC")
    assert encode(schema, value) == data


def test_enums_of_several_writers_are_one_dictionary() -> None:
    writer = {"type": "enum", "name": "E", "symbols": ["C", "A"]}
    reader = {"type": "enum", "name": "E", "symbols": ["A", "B", "C"]}
    read = decode(writer, written(writer, "A", "C"), reader, "arrow").values
    assert read.dictionary.to_pylist() == ["A", "B", "C"]
    assert read.to_pylist() == ["A", "C"]
    assert encode(writer, read) == written(writer, "A", "C")
