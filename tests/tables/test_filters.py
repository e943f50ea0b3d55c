"""Statistics hide no row: by random filters each reader of a table finds what is in it.

What a reader gets wrong by itself it gets wrong without statistics, too: in a table of the same rows that deltalake or
pyiceberg has written without any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyarrow.fs import LocalFileSystem

from spark_klog.load.journal.model import Range
from spark_klog.load.settings import WriteSettings
from spark_klog.load.tasks.writers import OpenFile
from spark_klog.tables.change_files import ChangeFiles, ChangeWriter
from spark_klog.tables.changes import ChangeFormat
from spark_klog.tables.delta import DeltaLakeTable
from spark_klog.tables.table import DataFile, Run, Table
from tests.support.runs.soak import SOAK, in_soak
from tests.support.spark.spark_tables import SparkTables
from tests.tables.filter_model import (
    ID,
    Column,
    Filter,
    array,
    bounds,
    columns_of,
    filters,
    others,
    primitives,
    values,
)
from tests.tables.filter_readers import Reader, by_spark, delta_readers, iceberg_readers
from tests.tables.iceberg_tables import Warehouse

_HOUR = 473_352
_HOUR_US = 3_600_000_000
_PAIRS = 20
#: Filters of a test that runs with each change, and of one by Spark, to which each is a query.
_FEW = 25
_BY_SPARK = 50 if SOAK else 10
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """Rows in files, whose columns are `schema`; `layout` is by the column `timestamp`."""

    schema: pa.Schema
    files: Sequence[Rows]
    layout: str = "none"

    @property
    def rows(self) -> Rows:
        return [row for each in self.files for row in each]

    @property
    def columns(self) -> list[Column]:
        partitions = [Column(("date",), pa.date32()), Column(("hour",), pa.int32())]
        mine = columns_of(self.schema)
        return [*mine, *partitions] if "date" in self.rows[0] else mine

    def table(self, rows: Rows, schema: pa.Schema) -> pa.Table:
        return pa.table([array([row[one.name] for row in rows], one.type) for one in schema], schema=schema)


def made(random: Random, *, is_iceberg: bool, layout: str = "none") -> Case:
    """Up to four files of up to six rows, with columns of all types, some in structs."""
    kinds = primitives(random, is_iceberg)
    inside = random.sample(kinds, 3)
    nested = pa.struct([pa.field("deep", pa.struct([pa.field("x", inside[0])])), pa.field("y", inside[1])])
    fields = [pa.field(f"c{number}", kind) for number, kind in enumerate([*kinds, *others(), nested])]
    random.shuffle(fields)
    schema = pa.schema([*fields, pa.field("timestamp", pa.timestamp("us", "UTC")), pa.field(ID, pa.int64())])
    files = []
    for number in range(random.randint(2, 4)):
        count = random.randint(1, 6)
        columns = {field.name: values(random, field.type, count) for field in schema}
        columns[ID] = list(range(number * 10, number * 10 + count))
        if layout == "hour":
            columns["timestamp"] = [(_HOUR + number) * _HOUR_US + random.randint(0, _HOUR_US - 1) for _ in range(count)]
        if layout == "hour" and not is_iceberg:  # Delta's partition columns
            columns["date"], columns["hour"] = [(_HOUR + number) // 24] * count, [(_HOUR + number) % 24] * count
        files.append([{name: each[row] for name, each in columns.items()} for row in range(count)])
    return Case(schema, files, layout)


def append(table: Table, case: Case, folder: Path) -> None:
    """As a load's tasks write files, in row groups of two rows, and a run commits them."""
    schema = table.prepare(case.schema, case.layout, "timestamp", "load")
    items = []
    for number, rows in enumerate(case.files):
        hour = _HOUR + number if case.layout == "hour" else None
        at_hour = datetime.fromtimestamp((_HOUR + number) * 3600, timezone.utc)
        path = f"t/{at_hour:date=%Y-%m-%d/hour=%-H}/{number}.parquet" if hour else f"t/{number}.parquet"
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        file = OpenFile(folder / path, schema, WriteSettings(), None)
        for batch in case.table(rows, schema).to_batches(max_chunksize=2):
            file.add(batch, np.zeros(1, np.int64))
            file.flush()
        entry = file.complete(path, Range("t", 0, 0, len(rows)), 0, len(rows) - 1)
        items.append(DataFile(path, entry.size, pq.read_metadata(folder / path), hour))
    table.append(items, Run("load", 1, "token", {}))


def check(case: Case, wanted: Sequence[Filter], readers: dict[str, Reader], plain: dict[str, Reader]) -> None:
    """Each reader finds the right rows, or answers as it does without statistics."""
    for one in wanted:
        must, may = bounds(case.rows, one)
        for name, read in readers.items():
            seen = _answer(read, one)
            if isinstance(seen, type) or not must <= seen <= may:
                assert seen == _answer(plain[name], one), f"{name} finds {seen} by {one}, not {must}"


def _answer(read: Reader, wanted: Filter) -> set[int] | type[Exception]:
    try:
        return read(wanted)
    except Exception as error:
        return type(error)


def delta_tables(case: Case, folder: Path) -> tuple[str, str]:
    """Our table, and that of deltalake without statistics."""
    ours, plain = folder / "ours", folder / "plain"
    append(DeltaLakeTable(str(ours)), case, ours)
    partitions = [pa.field("date", pa.date32()), pa.field("hour", pa.int32())] if case.layout == "hour" else []
    schema = pa.schema([*case.schema, *partitions])
    for rows in case.files:
        write_deltalake(
            plain,
            case.table(rows, schema),
            mode="append",
            partition_by=[one.name for one in partitions] or None,
            configuration={"delta.dataSkippingNumIndexedCols": "0"},
        )
    return str(ours), str(plain)


def iceberg_tables(case: Case, folder: Path, how: str, namespace: str = "ns") -> tuple[Warehouse, Warehouse]:
    """Our table, and that of pyiceberg without statistics."""
    ours, plain = (Warehouse(folder, f"{namespace}.{name}") for name in ("ours", "plain"))
    table = ours.open()
    if how == "upsert":
        upsert(table, case, folder)
    else:
        append(table, case, Path(table.location.removeprefix("file://")))
    if how == "compaction":
        assert table.compact(1 << 30) == len(case.files)
    without = {"write.metadata.metrics.default": "none"}
    other = plain.catalog.create_table(f"{namespace}.plain", case.schema, properties=without)
    for rows in case.files:
        other.append(case.table(rows, case.schema))
    return ours, plain


def upsert(table: Table, case: Case, folder: Path) -> None:
    """A run of changes for each file; each but the first one changes rows of the one before it, too."""
    key = pa.struct([case.schema.field(ID)])
    value = pa.struct([one for one in case.schema if one.name != ID])
    change_format = ChangeFormat(key, value)
    before: Rows = []
    for number, rows in enumerate(case.files, 1):
        changed = [*rows, *before[::2]]
        records = {
            "key": array(changed, key),
            "value": array(changed, value),
            "topic": pa.array(["rows"] * len(changed)),
            "partition": pa.array([0] * len(changed), pa.int32()),
            "offset": pa.array([number * 100 + row for row in range(len(changed))], pa.int64()),
            "timestamp": pa.array([number] * len(changed), pa.int64()).cast(pa.timestamp("us", "UTC")),
        }
        paths: list[str] = []
        writer = ChangeWriter(change_format.key, folder, lambda path, _changes, to=paths: to.append(str(path)))
        writer.add(change_format.changes(pa.RecordBatch.from_pydict(records)))
        writer.finish()
        table.prepare(change_format.row, "none", "", "load")
        files = ChangeFiles(LocalFileSystem(), paths, change_format.key)
        table.upsert(files, Run("load", number, "token", {}))
        before = rows


_SEEDS = pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.test_all("long")) for seed in range(2, 16 if SOAK else 3))]
)


@pytest.mark.parametrize("layout", ["none", "hour"])
@_SEEDS
def test_delta(tmp_path: Path, seed: int, layout: str) -> None:
    random = Random(seed)
    case = made(random, is_iceberg=False, layout=layout)
    ours, plain = delta_tables(case, tmp_path)
    wanted = filters(random, case.rows, case.columns, _PAIRS)
    check(case, wanted if seed > 1 else random.sample(wanted, _FEW), delta_readers(ours), delta_readers(plain))


@pytest.mark.parametrize("how", ["append", "compaction", "upsert"])
@_SEEDS
def test_iceberg(tmp_path: Path, seed: int, how: str) -> None:
    random = Random(seed)
    case = made(random, is_iceberg=True, layout="hour" if how == "append" else "none")
    ours, plain = iceberg_tables(case, tmp_path, how)
    wanted = filters(random, case.rows, columns_of(case.schema), _PAIRS)
    wanted = wanted if seed > 1 else random.sample(wanted, _FEW)
    check(case, wanted, iceberg_readers(ours.stranger()), iceberg_readers(plain.stranger()))


_LISTS = pa.list_(pa.struct([("a", pa.int32()), ("b", pa.int32()), ("c", pa.list_(pa.int32()))]))
_STRUCTS = pa.struct([("a", pa.int32()), ("b", pa.list_(pa.int32())), ("c", pa.struct([("d", pa.string())]))])


@pytest.mark.parametrize(
    "properties",
    [
        {},
        *({"delta.dataSkippingNumIndexedCols": count} for count in ("-1", "0", "5", "40")),
        {"delta.dataSkippingStatsColumns": "s2,s50"},
    ],
)
@pytest.mark.parametrize("first", [_LISTS, _STRUCTS, pa.map_(pa.string(), pa.int32()), pa.binary(), pa.float64()])
def test_columns_that_delta_counts(tmp_path: Path, first: pa.DataType, properties: dict[str, str]) -> None:
    """Those with statistics are the first 32, unless the table says which ones."""
    schema = pa.schema([*((f"f{number}", first) for number in range(6)), *((f"s{n}", pa.string()) for n in range(60))])
    DeltaTable.create(tmp_path, schema, configuration=properties)
    texts = {f"s{number}": f"v{number}" for number in range(60)}
    rows: Rows = [{**dict.fromkeys(schema.names), **texts}] * 2
    append(DeltaLakeTable(str(tmp_path)), Case(schema, [rows]), tmp_path)
    dataset = DeltaTable(tmp_path).to_pyarrow_dataset()
    for name, text in texts.items():
        assert dataset.count_rows(filter=ds.field(name) == text) == 2, name


@pytest.mark.peer
@pytest.mark.test_all("client")
def test_delta_by_spark(tmp_path: Path) -> None:
    with SparkTables("delta", tmp_path / "spark") as spark:
        spark.do("SET spark.databricks.delta.snapshotPartitions=1")
        for seed in range(2 if SOAK else 1):
            random = Random(seed)
            case = made(random, is_iceberg=False, layout="none" if seed % 2 else "hour")
            ours, plain = delta_tables(case, tmp_path / str(seed))
            _check_by_spark(spark, case, random, f"delta.`{ours}`", f"delta.`{plain}`")


@pytest.mark.peer
@pytest.mark.test_all("client")
@in_soak
def test_iceberg_by_spark(tmp_path: Path) -> None:
    cases = {}
    for how in ("append", "compaction", "upsert"):
        random = Random(how)
        case = made(random, is_iceberg=True, layout="hour" if how == "append" else "none")
        iceberg_tables(case, tmp_path, how, how)
        cases[how] = random, case
    with SparkTables("iceberg", tmp_path / "spark", "c", tmp_path) as spark:
        for how, (random, case) in cases.items():
            _check_by_spark(spark, case, random, f"c.{how}.ours", f"c.{how}.plain")


def _check_by_spark(spark: SparkTables, case: Case, random: Random, ours: str, plain: str) -> None:
    wanted = random.sample(filters(random, case.rows, case.columns, _PAIRS), _BY_SPARK)
    found, without = (by_spark(spark, name, wanted) for name in (ours, plain))
    for one, seen, other in zip(wanted, found, without, strict=True):
        must, may = bounds(case.rows, one)
        assert must <= seen <= may or seen == other, f"Spark finds {seen} by {one}, not {must}"
    # these may be answered by statistics alone
    is_left_out = (pa.types.is_nested, pa.types.is_binary, pa.types.is_timestamp)
    ordered = [one.name for one in case.schema if not any(has(one.type) for has in is_left_out)]
    extremes = [f"min({name}), max({name})" for name in ordered] + [f"count({name})" for name in case.schema.names]
    first, second = (spark.sql(f"SELECT {', '.join(extremes)} FROM {name}").to_pydict() for name in (ours, plain))
    for name in case.schema.names:  # pyiceberg writes a null list as an empty one
        second[f"count({name})"] = [sum(row[name] is not None for row in case.rows)]
    for name, [number] in first.items():
        [other] = second[name]
        assert number == other or (number != number and other != other), name
