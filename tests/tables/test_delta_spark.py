"""A Delta table between runs of a load and Spark with the real Delta."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from spark_klog.errors import LoadError
from spark_klog.tables.delta import DeltaLakeTable
from tests.support.runs.soak import SOAK, in_soak
from tests.support.spark.spark_tables import SparkTables
from tests.tables.change_support import Change, change_batch, written
from tests.tables.test_delta import _COLUMNS, _file, _offsets, _run
from tests.tables.test_upserts import Source

pytestmark = [pytest.mark.peer, pytest.mark.test_all("client")]


@pytest.fixture(scope="module")
def delta(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkTables]:
    with SparkTables("delta", tmp_path_factory.mktemp("spark")) as running:
        running.do("SET spark.databricks.delta.snapshotPartitions=1")  # a RESTORE has thousands of tasks by default
        yield running


def test_spark_restores_and_changes_a_table_of_a_load(delta: SparkTables, tmp_path: Path) -> None:
    folder = tmp_path / "table"
    name = f"delta.`{folder}`"
    table = DeltaLakeTable(str(folder))
    table.prepare(_COLUMNS, "none", "", "load")

    def version() -> int:
        return DeltaTable(folder).version()

    def at(which: int) -> str:
        """A time at which the version was the last one: for Spark it begins with its file, not with its commitInfo."""
        ms = (folder / "_delta_log" / f"{which:020}.json").stat().st_mtime_ns // 1_000_000
        return datetime.fromtimestamp(ms / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f")

    def refused(message: str) -> None:
        uses: list[Any] = [lambda: table.last_run("load"), lambda: table.append([_file(folder, 90)], _run(4))]
        for use in (*uses, lambda: DeltaLakeTable(str(folder)).last_run("load")):
            with pytest.raises(LoadError, match=message):
                use()

    versions = []
    for number in (1, 2, 3):
        table.append([_file(folder, number * 10)], _run(number))
        versions.append(version())
        time.sleep(0.01)  # or two files are of one millisecond

    lost = f"was restored to a version before {versions[2]}, which has run 3"
    delta.do(f"RESTORE TABLE {name} TO VERSION AS OF {versions[1]}")
    assert _offsets(folder) == list(range(10, 30))
    assert table.schema() is not None
    refused(lost)
    delta.do(f"INSERT INTO {name} SELECT 1000L, 't', 0")
    refused(lost)
    delta.do(f"RESTORE TABLE {name} TO VERSION AS OF {versions[2]}")
    assert _offsets(folder) == list(range(10, 40))
    assert table.last_run("load") == _run(3)

    run, last = 3, versions[2]
    if SOAK:
        delta.do(f"RESTORE TABLE {name} TO TIMESTAMP AS OF '{at(versions[0])}'")
        assert _offsets(folder) == list(range(10, 20))
        refused(lost)
        delta.do(f"RESTORE TABLE {name} TO VERSION AS OF {versions[2]}")

        delta.do(f"DELETE FROM {name} WHERE offset = 12")
        kept = version()
        table.append([_file(folder, 40)], _run(4))
        assert _offsets(folder) == [10, 11, *range(13, 50)]
        delta.do(f"RESTORE TABLE {name} TO VERSION AS OF {kept}")
        refused("which has run 4")
        delta.do(f"RESTORE TABLE {name} TO VERSION AS OF {kept + 1}")
        table.append([_file(folder, 50)], _run(5))
        assert delta.sql(f"SELECT offset FROM {name} ORDER BY 1")["offset"].to_pylist() == [10, 11, *range(13, 60)]
        run, last = 5, version()

    delta.do(f"REPLACE TABLE {name} USING delta AS SELECT 1L AS offset, 't' AS topic, 0 AS partition")
    refused(f"was replaced by version .*, after version {last}, which has run {run}")
    delta.do(f"RESTORE TABLE {name} TO VERSION AS OF {last}")
    assert table.last_run("load") == _run(run)


@in_soak
def test_spark_adds_a_column_to_a_table_of_changes(delta: SparkTables, tmp_path: Path) -> None:
    source = Source("delta", tmp_path)
    rows = f"delta.`{tmp_path / 'table'}`"
    source.merge([Change(1, "a", 0, 0), Change(2, "b", 0, 1)], 1)
    first = DeltaTable(tmp_path / "table").version()
    delta.do(f"ALTER TABLE {rows} ADD COLUMN note STRING")
    delta.do(f"UPDATE {rows} SET note = 'mine'")
    source.merge([Change(1, "c", 0, 2), Change(3, "d", 0, 3)], 2)
    found = delta.sql(f"SELECT id, name, note FROM {rows} ORDER BY 1").to_pylist()
    assert [tuple(row.values()) for row in found] == [(1, "c", "mine"), (2, "b", "mine"), (3, "d", None)]
    delta.do(f"RESTORE TABLE {rows} TO VERSION AS OF {first}")
    files = written(tmp_path / "changes", [change_batch([Change(4, "e", 0, 4)])])
    with pytest.raises(LoadError, match="which has run 2"):
        source.table.upsert(files, _run(3))
    assert isinstance(source.table.schema(), pa.Schema)


def test_rows_that_spark_has_deleted_by_vectors(delta: SparkTables, tmp_path: Path) -> None:
    """Upserts, reads of rows and compactions leave them deleted; a later change brings a row back."""
    source = Source("delta", tmp_path)
    folder = tmp_path / "table"
    name = f"delta.`{folder}`"
    table = source.table

    def check(*ids: int) -> None:
        assert delta.sql(f"SELECT id FROM {name} ORDER BY id")["id"].to_pylist() == list(ids)
        assert sorted(pa.Table.from_batches(table.rows(["id"]))["id"].to_pylist()) == list(ids)

    source.merge([Change(number, "a", 0, number) for number in range(8)], 1)
    delta.do(f"ALTER TABLE {name} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    source.merge([Change(8, "b", 0, 10)], 2)
    delta.do(f"DELETE FROM {name} WHERE id IN (3, 4)")
    assert list(folder.glob("deletion_vector_*"))
    check(0, 1, 2, 5, 6, 7, 8)
    source.merge([Change(3, "c", 0, 20), Change(0, None, 0, 21), Change(5, "c", 0, 22)], 3)
    check(1, 2, 3, 5, 6, 7, 8)
    delta.do(f"DELETE FROM {name} WHERE id = 6")
    assert table.compact(1 << 30) > 1
    check(1, 2, 3, 5, 7, 8)
    found = delta.sql(f"SELECT id, name FROM {name} ORDER BY 1")
    assert found["name"].to_pylist() == ["a", "a", "c", "c", "a", "b"]
