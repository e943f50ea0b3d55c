"""Compaction of Iceberg tables: rows stay, runs go on, files with deleted rows stay."""

from __future__ import annotations

import multiprocessing
import os
import resource
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import (
    DataFile as IcebergFile,
    DataFileContent,
)
from pyiceberg.table.snapshots import Operation
from pyiceberg.types import LongType

from spark_klog.columns.schema import FULL
from spark_klog.errors import LoadError
from spark_klog.files import open_folder
from spark_klog.tables import iceberg_compaction, iceberg_rows
from spark_klog.tables.iceberg import IcebergTable
from spark_klog.tables.iceberg_files import Footers
from tests.load.support import in_child
from tests.tables.iceberg_tables import LOAD, TOPIC, Warehouse, before_commit, delete_by_file, rows, run_of, write

_KILL = pytest.mark.test_all("kill")


def _loaded(warehouse: Warehouse, runs: int = 4) -> IcebergTable:
    """A table with files of two hours in each run."""
    table, schema = warehouse.prepared()
    for number in range(1, runs + 1):
        firsts = [(hour, number * 10 + hour * 5) for hour in (0, 1)]
        files = [write(table, schema, f"{number}-{hour}", rows(range(one, one + 5), hour)) for hour, one in firsts]
        table.append(files, run_of(number, number * 10 + 10))
    return table


def test_small_files_become_one_by_partition(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path)
    table = _loaded(warehouse)
    before, offsets = warehouse.stranger(), warehouse.offsets()
    assert table.compact(1) == 0
    assert table.compact(1 << 20) == 8
    assert warehouse.offsets() == offsets
    snapshot = warehouse.stranger().current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary.operation == Operation.REPLACE  # which readers of changes skip
    assert (snapshot.summary["total-records"], snapshot.summary["total-data-files"]) == ("40", "2")
    found = list(table.files())
    assert [one.offsets for one in found] == [{(TOPIC, 0): (10, 44)}, {(TOPIC, 0): (15, 49)}]
    assert all(one.path.startswith("data/") for one in found)
    assert (
        before.scan(snapshot_id=before.metadata.current_snapshot_id).to_arrow().num_rows == 40
    )  # what went can be read
    assert table.compact(1 << 20) == 0
    assert table.last_run(LOAD) == run_of(4, 50)
    table.append([], run_of(5, 50))
    assert len(warehouse.offsets(row_filter="timestamp < '2024-01-01T01:00:00+00:00'")) == 20
    folder = open_folder(table.location)
    assert {name.split("-")[0] for name in folder.paths_below("data")} == {"data/compacted"}


def test_a_run_that_commits_meanwhile(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path)
    table = _loaded(warehouse)
    other, schema = warehouse.prepared()
    before_commit(table, lambda: other.append([write(other, schema, "5", rows(range(60, 65)))], run_of(5, 65)))
    assert table.compact(1 << 20) == 8
    assert warehouse.offsets() == [*range(10, 50), *range(60, 65)]
    assert table.last_run(LOAD) == run_of(5, 65)


def test_files_that_others_replace_meanwhile_stay(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path)
    table = _loaded(warehouse)
    before_commit(table, lambda: warehouse.stranger().delete("timestamp < '2024-01-01T01:00:00+00:00'"))
    assert table.compact(1 << 20) == 4
    assert warehouse.offsets() == [one for one in range(10, 50) if one % 10 >= 5]
    rewritten = open_folder(table.location).paths_below("data")
    assert len(rewritten) == 1  # the other one was removed
    before_commit(table, lambda: warehouse.open().compact(1 << 20))
    assert table.compact(1 << 20) == 0


def _live_file(warehouse: Warehouse, path: str) -> IcebergFile:
    [file] = [one.file for one in warehouse.stranger().scan().plan_files() if one.file.file_path.endswith(path)]
    return file


def test_deleted_rows_stay_deleted(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path)
    table = _loaded(warehouse)

    def delete() -> None:
        delete_by_file(warehouse.stranger(), _live_file(warehouse, "1-0.parquet"), 2, DataFileContent.POSITION_DELETES)

    before_commit(table, delete)
    assert table.compact(1 << 20) == 4  # of the other partition
    schema = table.prepare(table.schema(), "hour", "timestamp", LOAD)  # type: ignore[arg-type]
    for number in (5, 6):  # newer than what was deleted
        table.append([write(table, schema, str(number), rows([number * 10]))], run_of(number, 70))
    assert table.compact(1 << 20) == 2
    names = {one.path.rpartition("/")[2] for one in table.files()}
    assert {f"{number}-0.parquet" for number in range(1, 5)} <= names
    assert warehouse.offsets() == [*range(10, 12), *range(13, 50), 50, 60]


def test_a_row_that_the_commit_of_its_file_deletes(tmp_path: Path) -> None:
    """As Flink does with a key that changes twice: the delete file is no newer than the data file."""
    warehouse = Warehouse(tmp_path)
    table, schema = warehouse.prepared()
    footers, base = Footers(warehouse.stranger().metadata), warehouse.stranger().location()
    written = [write(table, schema, name, rows(range(first, first + 5))) for name, first in (("a", 10), ("b", 20))]
    files = [footers.data_file(f"{base}/{one.path}", one.size, one.metadata) for one in written]
    delete_by_file(warehouse.stranger(), files[0], 2, DataFileContent.POSITION_DELETES, files)
    left = [10, 11, 13, 14, *range(20, 25)]
    assert warehouse.offsets() == left
    assert table.compact(1 << 20) == 0
    assert warehouse.offsets() == left


def test_columns_that_files_lack(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path)
    columns = pa.schema([("offset", pa.int64()), ("s", pa.struct([("a", pa.int32()), ("b", pa.string())]))])
    table = warehouse.open()
    schema = table.prepare(columns, "none", "offset", LOAD)
    first = [{"offset": 1, "s": {"a": 1, "b": "b"}}, {"offset": 2, "s": None}]
    table.append([write(table, schema, "1", first)], run_of(1, 2))
    with warehouse.stranger().update_schema() as update:
        update.rename_column("s.a", "aa")
        update.update_column("s.a", LongType())
        update.delete_column("s.b")
    struct = pa.struct([("aa", pa.int64()), ("c", pa.date32())])
    columns = pa.schema([("offset", pa.int64()), ("s", struct), ("n", pa.bool_())])
    schema = table.prepare(columns, "none", "offset", LOAD)
    table.append([write(table, schema, "2", [{"offset": 3, "s": {"aa": 3}, "n": True}])], run_of(2, 3))
    expected = [
        {"offset": 1, "s": {"aa": 1, "c": None}, "n": None},
        {"offset": 2, "s": None, "n": None},
        {"offset": 3, "s": {"aa": 3, "c": None}, "n": True},
    ]
    assert table.compact(1 << 20) == 2
    assert warehouse.stranger().scan().to_arrow().sort_by("offset").to_pylist() == expected


def test_files_without_ids_of_fields(tmp_path: Path) -> None:
    """Others may add files whose columns are the table's by name: they stay, beside files that are compacted."""
    warehouse = Warehouse(tmp_path)
    table, schema = warehouse.prepared("none")
    for number in (1, 2):
        table.append([write(table, schema, f"{number}", rows([number]))], run_of(number, number + 1))
    for number in (7, 8):
        plain = pa.schema([one.remove_metadata() for one in FULL])
        pq.write_table(pa.Table.from_pylist(rows([number]), plain), tmp_path / f"{number}.parquet")
    warehouse.stranger().add_files([f"file://{tmp_path}/{number}.parquet" for number in (7, 8)])
    before = warehouse.stranger().scan().to_arrow().sort_by("offset").to_pylist()
    table.compact(1 << 20)
    assert warehouse.stranger().scan().to_arrow().sort_by("offset").to_pylist() == before
    assert [row["offset"] for row in before] == [1, 2, 7, 8]


def test_rows_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warehouse = Warehouse(tmp_path)
    table = _loaded(warehouse)
    real = iceberg_compaction.file_rows
    monkeypatch.setattr(iceberg_compaction, "file_rows", lambda *file: (one.slice(1) for one in real(*file)))
    with pytest.raises(LoadError, match="files of 20 records have 16: nothing was replaced"):
        table.compact(1 << 20)
    assert warehouse.offsets() == [*range(10, 50)]
    assert open_folder(table.location).names("data") == []


_POINTS = {
    "while it writes": (iceberg_rows, "_projected", False),
    "before the commit": (SqlCatalog, "commit_table", False),
    "after the commit": (SqlCatalog, "commit_table", True),
}


@pytest.mark.parametrize("point", [pytest.param(one, marks=() if _POINTS[one][2] else _KILL) for one in _POINTS])
def test_killed(tmp_path: Path, point: str) -> None:
    warehouse = Warehouse(tmp_path)
    table = _loaded(warehouse)
    owner, name, is_after = _POINTS[point]
    real = getattr(owner, name)

    def die(*arguments: Any) -> None:
        if is_after:
            real(*arguments)
        os._exit(9)

    def compact() -> None:
        setattr(owner, name, die)
        warehouse.open().compact(1 << 20)

    assert in_child(compact) == 9
    assert warehouse.offsets() == [*range(10, 50)]
    assert len(list(table.files())) == (2 if is_after else 8)
    assert table.compact(1 << 20) == (0 if is_after else 8)
    assert warehouse.offsets() == [*range(10, 50)]
    assert table.last_run(LOAD) == run_of(4, 50)


def _peak_mb(options: dict[str, str], results: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    IcebergTable("c.ns.t", options).compact(1 << 30)
    results.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)


@pytest.mark.test_all("long")
def test_memory_is_that_of_a_row_group(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path)
    table, schema = warehouse.prepared()
    for number in range(1, 4):
        records = rows(range(number * 100_000, number * 100_000 + 20_000), value=b"x" * 5000)
        name = str(number)
        table.append([write(table, schema, name, records, row_group_size=2000)], run_of(number, number * 100_000))
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    worker = context.Process(target=_peak_mb, args=(warehouse.options, results))
    worker.start()
    worker.join(120)
    assert results.get() < 200  # of 300 MB of values
    assert len(list(table.files())) == 1
