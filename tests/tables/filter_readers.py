"""Readers of tables that skip files by statistics: each finds the ids of rows by a filter of `filter_model`."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyiceberg.expressions as ice
from deltalake import DeltaTable, QueryBuilder
from pyiceberg.table import Table as Iceberg

from tests.support.spark.spark_tables import SparkTables
from tests.tables.filter_model import ID, Column, Filter, Value, day, scalar, sql

Reader = Callable[[Filter], set[int]]
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_ICEBERG: dict[str, Any] = {
    "=": ice.EqualTo,
    "!=": ice.NotEqualTo,
    "<": ice.LessThan,
    "<=": ice.LessThanOrEqual,
    ">": ice.GreaterThan,
    ">=": ice.GreaterThanOrEqual,
}


def delta_readers(folder: str) -> dict[str, Reader]:
    """deltalake's dataset, its table by DNF's and by expressions, its DataFusion; Polars; DuckDB over the dataset."""
    table = DeltaTable(folder)
    dataset = table.to_pyarrow_dataset()
    engine = QueryBuilder().register("t", table)
    duck = duckdb.connect()
    duck.execute("SET TimeZone = 'UTC'")
    duck.register("t", dataset)

    def by_duckdb(wanted: Filter) -> set[int]:
        rows = duck.execute(f"SELECT {ID} FROM t WHERE {sql(wanted, _dotted, _duckdb_literal)}").fetchall()
        return {row for (row,) in rows}

    def by_datafusion(wanted: Filter) -> set[int]:
        rows = engine.execute(f"SELECT {ID} FROM t WHERE {sql(wanted, _subscripted, _datafusion_literal)}").read_all()
        return set(pa.table(rows)[ID].to_pylist())

    return {
        "to_pyarrow_dataset": lambda wanted: _ids(dataset.to_table(columns=[ID], filter=_of_arrow(wanted))),
        "to_pandas": lambda wanted: set(table.to_pandas(columns=[ID], filters=_of_arrow(wanted))[ID]),
        "QueryBuilder": by_datafusion,
        "Polars": lambda wanted: _by_polars(pl.scan_delta(folder), wanted),
        "DuckDB": by_duckdb,
    }


def iceberg_readers(table: Iceberg) -> dict[str, Reader]:
    """pyiceberg and Polars."""

    def by_pyiceberg(wanted: Filter) -> set[int]:
        return _ids(table.scan(row_filter=_of_iceberg(wanted), selected_fields=(ID,)).to_arrow())

    def by_polars(wanted: Filter) -> set[int]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a package of its own would plan the scan more quickly
            return _by_polars(pl.scan_iceberg(table), wanted)

    return {"pyiceberg": by_pyiceberg, "Polars": by_polars}


def by_spark(spark: SparkTables, name: str, wanted: Sequence[Filter]) -> list[set[int]]:
    """The ids by each of the filters, all in one statement: each of them has a scan of its own."""
    texts = (sql(one, _dotted_by_spark, _spark_literal) for one in wanted)
    rows = spark.sql(
        " UNION ALL ".join(f"SELECT {number} AS n, {ID} FROM {name} WHERE {text}" for number, text in enumerate(texts))
    )
    made: list[set[int]] = [set() for _ in wanted]
    for number, row in zip(rows["n"].to_pylist(), rows[ID].to_pylist(), strict=True):
        made[number].add(row)
    return made


def _ids(table: pa.Table) -> set[int]:
    return set(table[ID].to_pylist())


def _of_arrow(wanted: Filter) -> Any:
    if isinstance(wanted, tuple):
        first, second = map(_of_arrow, wanted[1:])
        return first & second if wanted[0] == "and" else first | second
    column = ds.field(*wanted.column.path)
    if wanted.operator in ("null", "not null"):
        return column.is_null() if wanted.operator == "null" else column.is_valid()
    return _COMPARISONS[wanted.operator](column, scalar(wanted.value, wanted.column.type))


def _of_iceberg(wanted: Filter) -> Any:
    if isinstance(wanted, tuple):
        return (ice.And if wanted[0] == "and" else ice.Or)(*map(_of_iceberg, wanted[1:]))
    name = ".".join(wanted.column.path)
    if wanted.operator in ("null", "not null"):
        return ice.IsNull(name) if wanted.operator == "null" else ice.NotNull(name)
    number, kind = wanted.value, wanted.column.type
    if number != number:  # pyiceberg compares with no NaN
        return ice.IsNaN(name) if wanted.operator == "=" else ice.AlwaysTrue()
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        number = scalar(number, kind).as_py().isoformat()
    return _ICEBERG[wanted.operator](name, number)


def _by_polars(frame: pl.LazyFrame, wanted: Filter) -> set[int]:
    return set(frame.filter(_of_polars(wanted)).select(ID).collect()[ID].to_list())


def _of_polars(wanted: Filter) -> pl.Expr:
    if isinstance(wanted, tuple):
        first, second = map(_of_polars, wanted[1:])
        return first & second if wanted[0] == "and" else first | second
    column = pl.col(wanted.column.path[0])
    for name in wanted.column.path[1:]:
        column = column.struct.field(name)
    if wanted.operator in ("null", "not null"):
        return column.is_null() if wanted.operator == "null" else column.is_not_null()
    kind = wanted.column.type
    number = scalar(wanted.value, kind).as_py()
    literal = pl.lit(number)
    if pa.types.is_timestamp(kind):
        literal = pl.lit(number, pl.Datetime("us", kind.tz))
    elif not pa.types.is_string(kind):
        literal = literal.cast(pl.Series(pl.from_arrow(pa.array([], kind))).dtype)
    return _COMPARISONS[wanted.operator](column, literal)  # type: ignore[no-any-return]


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(f'"{name}"' for name in path)


def _dotted_by_spark(path: tuple[str, ...]) -> str:
    return ".".join(f"`{name}`" for name in path)


def _subscripted(path: tuple[str, ...]) -> str:
    return f'"{path[0]}"' + "".join(f"['{name}']" for name in path[1:])


def _literal(number: Value, kind: pa.DataType, types: dict[str, str]) -> str:
    """A literal that the three dialects have, but for the names of types."""
    if pa.types.is_string(kind):
        doubled = number.replace("'", "''")
        return f"'{doubled}'"
    if pa.types.is_decimal(kind):
        return f"CAST('{number:f}' AS DECIMAL({kind.precision}, {kind.scale}))"
    if pa.types.is_date(kind):
        return f"CAST('{day(number)}' AS DATE)"
    return f"CAST('{number}' AS {types.get(str(kind), 'BIGINT')})"


_TYPES = {"bool": "BOOLEAN", "float": "REAL", "double": "DOUBLE"}


def _duckdb_literal(number: Value, kind: pa.DataType) -> str:
    if pa.types.is_timestamp(kind):
        return f"{'make_timestamptz' if kind.tz else 'make_timestamp'}({number})"
    return _literal(number, kind, _TYPES)


def _datafusion_literal(number: Value, kind: pa.DataType) -> str:
    if pa.types.is_timestamp(kind):
        zone = 'Some("UTC")' if kind.tz else "None"
        return f"arrow_cast(CAST('{number}' AS BIGINT), 'Timestamp(Microsecond, {zone})')"
    return _literal(number, kind, _TYPES)


def _spark_literal(number: Value, kind: pa.DataType) -> str:
    if pa.types.is_string(kind):
        escaped = number.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    if pa.types.is_timestamp(kind):
        at = f"timestamp_micros(CAST('{number}' AS BIGINT))"
        return at if kind.tz else f"CAST({at} AS TIMESTAMP_NTZ)"
    return _literal(number, kind, {"bool": "BOOLEAN", "float": "FLOAT", "double": "DOUBLE"})


def names_of(wanted: Filter) -> set[Column]:
    """The columns of a filter."""
    if isinstance(wanted, tuple):
        return names_of(wanted[1]) | names_of(wanted[2])
    return {wanted.column}
