"""A model of filters: random columns and rows, and which rows a filter must find, in plain Python.

Readers compare NaN and -0.0 as IEEE 754 does, or in one order of all numbers, in which -0.0 is less than 0.0 and NaN
the largest. A filter must find a row that is right by all orders, and must not find one that is right by none.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, timezone
from decimal import Context, Decimal
from itertools import product
from random import Random
from typing import Any

import pyarrow as pa

OPERATORS = ("=", "!=", "<", "<=", ">", ">=")
ID = "row_id"
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_EXACT = Context(prec=50)
_DAY_US = 86_400_000_000
_FIRST_US = (datetime.min.replace(tzinfo=timezone.utc) - _EPOCH).days * _DAY_US
_END_US = ((datetime.max.replace(tzinfo=timezone.utc) - _EPOCH).days + 1) * _DAY_US
#: U+10FFFF is the largest character.
_TEXTS = ("", "a", "z" * 31, "z" * 32, "z" * 33, "é'\"", "\U0001f600" * 40, "\U0010ffff" * 33, "NaN", "null")
_FLOATS = (0.0, -0.0, 1.5, -2.25, math.nan, math.inf, -math.inf, 1e-40, 3.4e38, 0.1)
#: The values of a row that stand for a column's: times in microseconds, dates in days.
Value = Any


@dataclass(frozen=True)
class Column:
    """A column to filter by, which may be a field of a struct: its path and type."""

    path: tuple[str, ...]
    type: pa.DataType


@dataclass(frozen=True)
class Condition:
    """A comparison of a column with a value, or "null" and "not null"."""

    column: Column
    operator: str
    value: Value = None


#: A condition; or "and", "or" of two filters.
Filter = Condition | tuple[str, "Filter", "Filter"]


def scalar(value: Value, kind: pa.DataType) -> pa.Scalar:
    """A value as Arrow has it."""
    if pa.types.is_timestamp(kind):
        return pa.scalar(value, pa.int64()).cast(kind)
    return pa.scalar(value, pa.int32()).cast(kind) if pa.types.is_date(kind) else pa.scalar(value, kind)


def array(values: Iterable[Value], kind: pa.DataType) -> pa.Array:
    if pa.types.is_struct(kind):
        rows = list(values)
        fields = [array([None if row is None else row[one.name] for row in rows], one.type) for one in kind]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=pa.array([row is None for row in rows]))
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.int64()).cast(kind)
    return pa.array(values, pa.int32()).cast(kind) if pa.types.is_date(kind) else pa.array(values, kind)


def primitives(random: Random, is_iceberg: bool) -> list[pa.DataType]:
    """One of each type that may be filtered by."""
    digits = random.randint(1, 38)
    kinds = [
        *(pa.bool_(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.date32()),
        *(pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.decimal128(digits, random.randint(0, digits))),
        *(pa.decimal128(6, 2), pa.decimal128(38, random.randint(0, 38))),
    ]
    return kinds if is_iceberg else [*kinds, pa.int8(), pa.int16()]


def others() -> list[pa.DataType]:
    """Types that no filter is about."""
    inner = pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.float64())])
    return [pa.list_(pa.field("element", inner)), pa.map_(pa.string(), pa.int64()), pa.binary()]


def value(random: Random, kind: pa.DataType, *, is_dated: bool = True) -> Value:
    """A value of a type; `is_dated` is without times that have no date of the years 1 to 9999."""
    if pa.types.is_boolean(kind):
        return random.random() < 0.5
    if pa.types.is_integer(kind):
        edge = 1 << (kind.bit_width - 1)
        return random.choice([-edge, edge - 1, 0, random.randint(-9, 9)])
    if pa.types.is_floating(kind):
        number = random.choice([*_FLOATS, random.uniform(-9, 9)])
        return struct.unpack("f", struct.pack("f", number))[0] if kind == pa.float32() else number
    if pa.types.is_string(kind):
        text = random.choice(_TEXTS) + random.choice(["", "", "a", "b", "\U0010ffff"])
        return text * 5000 if text and random.random() < 0.1 else text
    if pa.types.is_decimal(kind):
        largest = 10**kind.precision - 1
        digits = random.choice([-largest, largest, 0, 1, random.randint(-largest, largest)])
        return Decimal(digits).scaleb(-kind.scale, context=_EXACT) if digits else Decimal((0, (0,), -kind.scale))
    if pa.types.is_date(kind):
        days = (_FIRST_US // _DAY_US, _END_US // _DAY_US - 1)
        return random.choice([*days, -1, 0, random.randint(*days)])
    edges = [_FIRST_US, _FIRST_US + 1, -1, 0, 1, 999, 1000, _END_US - 1, _END_US - 1000, _END_US - 1001]
    edges += [random.randint(_FIRST_US, _END_US - 1), random.randint(0, 2_000_000)]
    return random.choice(edges if is_dated else [*edges, _END_US, _FIRST_US - 1, 1 << 60])


def values(random: Random, kind: pa.DataType, rows: int) -> list[Value]:
    """Values of the rows of a file: some with nulls, some all null, some in a narrow range."""
    if pa.types.is_struct(kind):
        fields = {one.name: values(random, one.type, rows) for one in kind}
        made = [{name: each[row] for name, each in fields.items()} for row in range(rows)]
        return [None if random.random() < 0.1 else one for one in made]
    share = random.choice([0, 0, 0.3, 1])
    if pa.types.is_list(kind):
        return [None if random.random() < share else [{"a": row, "b": math.nan}] * (row % 3) for row in range(rows)]
    if pa.types.is_map(kind):
        return [None if random.random() < share else [("k", row)] for row in range(rows)]
    if pa.types.is_binary(kind):
        return [None if random.random() < share else bytes([row, 255]) for row in range(rows)]
    is_dated = random.random() < 0.9
    pool = [value(random, kind, is_dated=is_dated) for _ in range(random.randint(1, 4))]
    return [None if random.random() < share else random.choice(pool) for _ in range(rows)]


def columns_of(schema: pa.Schema) -> list[Column]:
    """The columns of a schema that filters may be about."""
    return [column for field in schema for column in _columns((field.name,), field.type)]


def _columns(path: tuple[str, ...], kind: pa.DataType) -> Iterator[Column]:
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _columns((*path, field.name), field.type)
    elif not (pa.types.is_nested(kind) or pa.types.is_binary(kind)):
        yield Column(path, kind)


def at(row: dict[str, Any], path: tuple[str, ...]) -> Value:
    """The value of a column in a row."""
    found: Any = row
    for name in path:
        found = None if found is None else found[name]
    return found


def filters(random: Random, rows: list[dict[str, Any]], columns: list[Column], pairs: int) -> list[Filter]:
    """Some of each column, by its values and by others; and as many pairs of them."""
    made: list[Filter] = []
    for column in columns:
        there = [one for one in (at(row, column.path) for row in rows) if one is not None]
        dated = [one for one in there if not pa.types.is_timestamp(column.type) or _FIRST_US <= one < _END_US]
        for operator in random.sample(OPERATORS, 3):
            number = random.choice(dated) if dated and random.random() < 0.8 else value(random, column.type)
            made.append(Condition(column, operator, number))
        made.append(Condition(column, random.choice(["null", "not null"])))
    return [*made, *((random.choice(["and", "or"]), *random.sample(made, 2)) for _ in range(pairs))]


def bounds(rows: list[dict[str, Any]], wanted: Filter) -> tuple[set[int], set[int]]:
    """The ids of rows that a reader must find, and of those that it may."""
    must, may = set(), set()
    for row in rows:
        answers = _answers(row, wanted)
        if True in answers:
            may.add(row[ID])
            if answers == {True}:
                must.add(row[ID])
    return must, may


def _answers(row: dict[str, Any], wanted: Filter) -> set[bool | None]:
    """What readers may say of a row; None is null."""
    if isinstance(wanted, tuple):
        operator, *parts = wanted
        first, second = (_answers(row, part) for part in parts)
        decides = operator == "or"
        pairs = product(first, second)
        return {decides if decides in pair else None if None in pair else not decides for pair in pairs}
    here = at(row, wanted.column.path)
    if wanted.operator in ("null", "not null"):
        return {(here is None) == (wanted.operator == "null")}
    if here is None:
        return {None}
    there = wanted.value
    compared: dict[str, Callable[[Any, Any], bool]] = {
        "=": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        "<": lambda a, b: a < b,
        "<=": lambda a, b: a <= b,
        ">": lambda a, b: a > b,
        ">=": lambda a, b: a >= b,
    }
    if isinstance(here, str):
        here, there = here.encode(), there.encode()
    compare = compared[wanted.operator]
    answers: set[bool | None] = {compare(here, there)}
    if isinstance(here, float):
        answers |= {compare(_ordered(here, True), _ordered(there, True))}
        answers |= {compare(_ordered(here, False), _ordered(there, False))}
        if math.isnan(here):  # Arrow leaves out a row group whose other values all are the one that a row must not have
            answers |= {False}
    return answers


def _ordered(number: float, has_signs: bool) -> tuple[float, float]:
    """Numbers with NaN as the largest; with signs -0.0 is less than 0.0."""
    sign = math.copysign(1, number) if has_signs and number == 0 else 0.0
    return (math.inf, 1) if math.isnan(number) else (number, 0.0 if math.isinf(number) else sign)


def sql(wanted: Filter, name_of: Callable[[tuple[str, ...]], str], literal: Callable[[Value, pa.DataType], str]) -> str:
    """The filter in a dialect of SQL."""
    if isinstance(wanted, tuple):
        operator, first, second = wanted
        return f"({sql(first, name_of, literal)}) {operator} ({sql(second, name_of, literal)})"
    name = name_of(wanted.column.path)
    if wanted.operator in ("null", "not null"):
        return f"{name} IS {wanted.operator}"
    return f"{name} {wanted.operator} {literal(wanted.value, wanted.column.type)}"


def day(days: int) -> date:
    return date.fromordinal(date(1970, 1, 1).toordinal() + days)
