"""Tables of loads between whose runs Spark with the real Delta and Iceberg changes them: done right, or refused by name
until Spark has undone it, as the error says. Equality deletes are written by Iceberg's own library, as Flink's are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyiceberg.transforms import BucketTransform

from spark_klog.errors import LoadError
from spark_klog.tables.delta import DeltaLakeTable
from spark_klog.tables.iceberg import IcebergTable
from tests.support.spark.spark_tables import SparkTables
from tests.tables.change_support import Change
from tests.tables.test_delta import _COLUMNS, _file, _run
from tests.tables.test_upserts import Source

pytestmark = [pytest.mark.peer, pytest.mark.test_all("client")]


class _Case(NamedTuple):
    """What Spark does to a table `{t}`, by which word it is refused ("": it is not), and how Spark undoes it."""

    does: tuple[str, ...]
    refused: str = ""
    undoes: tuple[str, ...] = ()


def _set(name: str, value: str) -> str:
    return f"ALTER TABLE {{t}} SET TBLPROPERTIES ('delta.{name}' = '{value}')"


_TOUCHES = "UPDATE {t} SET _klog_offset = _klog_offset"
_OF_CONSTRAINT = _Case(
    ("ALTER TABLE {t} ADD CONSTRAINT low CHECK (_klog_offset >= 0)",),
    "the constraint delta.constraints.low",
    ("ALTER TABLE {t} DROP CONSTRAINT low",),
)
_CASES = {
    "deletion vectors": _Case((_set("enableDeletionVectors", "true"), "DELETE FROM {t} WHERE _klog_offset = 1")),
    "change data feed": _Case((_set("enableChangeDataFeed", "true"), f"{_TOUCHES} WHERE true")),
    "v2 checkpoints": _Case(
        (
            _set("checkpointPolicy", "v2"),
            _set("checkpointInterval", "2"),
            *[_TOUCHES] * 3,
        )
    ),
    "timestamp without zone": _Case(
        (_set("feature.timestampNtz", "supported"), "ALTER TABLE {t} ADD COLUMN at TIMESTAMP_NTZ")
    ),
    "variant": _Case(("ALTER TABLE {t} ADD COLUMN v VARIANT",)),
    "maintenance": _Case(("OPTIMIZE {t}", "VACUUM {t} RETAIN 0 HOURS", "ALTER TABLE {t} ADD COLUMN note STRING")),
    "constraint": _OF_CONSTRAINT,
    "column mapping": _Case(
        (
            _set("columnMapping.mode", "name"),
            "ALTER TABLE {t} RENAME COLUMN _klog_offset TO place",
            "ALTER TABLE {t} RENAME COLUMN place TO _klog_offset",
        ),
        r"columnMapping\.mode=name",
        (_set("columnMapping.mode", "none"),),
    ),
    "liquid clustering": _Case(
        ("ALTER TABLE {t} CLUSTER BY (_klog_offset)",),
        "feature clustering, domainMetadata, which deltalake does not write: load into another",
    ),
    "in-commit timestamps": _Case(
        (_set("enableInCommitTimestamps", "true"),),
        "feature inCommitTimestamp, .*DROP FEATURE inCommitTimestamp, or load",
        ("ALTER TABLE {t} DROP FEATURE inCommitTimestamp",),
    ),
    "row tracking": _Case(
        (_set("enableRowTracking", "true"),),
        "feature domainMetadata, rowTracking, .*DROP FEATURE rowTracking, ALTER TABLE ... DROP FEATURE domainMetadata",
        ("ALTER TABLE {t} DROP FEATURE rowTracking", "ALTER TABLE {t} DROP FEATURE domainMetadata"),
    ),
    "type widening": _Case(
        (_set("enableTypeWidening", "true"), "ALTER TABLE {t} ADD COLUMN small INT"),
        "feature typeWidening, .*DROP FEATURE typeWidening TRUNCATE HISTORY, again after a day, or load",
        (
            _set("enableTypeWidening", "false"),
            _set("dropFeatureTruncateHistory.retentionDuration", "interval 0 hours"),  # instead of the day
            "ALTER TABLE {t} DROP FEATURE typeWidening TRUNCATE HISTORY",
        ),
    ),
    "a feature that is dropped without the history": _Case(
        (_set("feature.vacuumProtocolCheck", "supported"), "ALTER TABLE {t} DROP FEATURE vacuumProtocolCheck"),
        "feature checkpointProtection, .*DROP FEATURE checkpointProtection TRUNCATE HISTORY, again after a day",
    ),
    "column defaults": _Case(
        (_set("feature.allowColumnDefaults", "supported"), "ALTER TABLE {t} ADD COLUMN who STRING"),
        "feature allowColumnDefaults, which deltalake does not write: load into another",
    ),
}


@pytest.fixture(scope="module")
def delta(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkTables]:
    with SparkTables("delta", tmp_path_factory.mktemp("spark")) as running:
        for setting in (
            "spark.databricks.delta.snapshotPartitions=1",
            "spark.databricks.delta.retentionDurationCheck.enabled=false",
            "spark.sql.sources.parallelPartitionDiscovery.parallelism=2",  # VACUUM has 10,000 tasks
        ):
            running.do(f"SET {setting}")
        yield running


@pytest.mark.parametrize("name", _CASES)
def test_a_delta_table_that_spark_changes(delta: SparkTables, tmp_path: Path, name: str) -> None:
    case, folder = _CASES[name], tmp_path / "table"
    source, of_spark = Source("delta", tmp_path), f"delta.`{folder}`"
    source.merge([Change(number, "a", 0, number) for number in range(3)], 1)
    for statement in case.does:
        delta.do(statement.format(t=of_spark))
    if case.refused:
        before = DeltaTable(folder).version()
        files = set(folder.rglob("*.parquet"))
        for _ in range(2):
            with pytest.raises(LoadError, match=case.refused):
                source.merge([Change(0, "b", 0, 3)], 2)
            with pytest.raises(LoadError, match=case.refused):
                source.table.check("append")
        assert (DeltaTable(folder).version(), set(folder.rglob("*.parquet"))) == (before, files)
        if not case.undoes:
            return
        for statement in case.undoes:
            delta.do(statement.format(t=of_spark))
    there = [0, 2] if name == "deletion vectors" else [0, 1, 2]
    source.merge([Change(0, "b", 0, 3), Change(9, "n", 0, 4)], 2)
    source.merge([Change(2, None, 0, 5)], 3)
    source.table.compact(1 << 30)
    wanted = [(0, "b"), *((number, "a") for number in there if number == 1), (9, "n")]
    rows = delta.sql(f"SELECT id, name FROM {of_spark} ORDER BY id")
    assert list(zip(rows["id"].to_pylist(), rows["name"].to_pylist(), strict=True)) == wanted
    mine = pa.Table.from_batches(source.table.rows(["id", "name"])).to_pylist()
    assert sorted(tuple(row.values()) for row in mine) == wanted


def test_a_delta_table_of_records_that_spark_changes(delta: SparkTables, tmp_path: Path) -> None:
    """One table with all that appends comply with, append-only too."""
    name = f"delta.`{tmp_path}`"
    table = DeltaLakeTable(str(tmp_path))
    table.prepare(_COLUMNS, "none", "", "load")
    table.append([_file(tmp_path, 10)], _run(1))
    for statement in (
        _set("enableDeletionVectors", "true"),
        _set("enableChangeDataFeed", "true"),
        _set("checkpointPolicy", "v2"),
        _set("checkpointInterval", "2"),
        _set("feature.timestampNtz", "supported"),
        "ALTER TABLE {t} ADD COLUMNS (at TIMESTAMP_NTZ, v VARIANT)",
        "DELETE FROM {t} WHERE offset = 12",
        _set("appendOnly", "true"),
    ):
        delta.do(statement.format(t=name))
    wanted = [10, 11, *range(13, 20)]
    for number in (2, 3, 4):
        table.prepare(_COLUMNS, "none", "", "load", "tasks")
        table.append([_file(tmp_path, number * 10)], _run(number))
        wanted += range(number * 10, number * 10 + 10)
        assert delta.sql(f"SELECT offset FROM {name} ORDER BY 1")["offset"].to_pylist() == wanted
    with pytest.raises(LoadError, match="takes appends only"):
        table.prepare(_COLUMNS, "none", "", "load", key=("offset",))
    assert table.compact(1 << 30) > 1
    assert delta.sql(f"SELECT offset FROM {name} ORDER BY 1")["offset"].to_pylist() == wanted
    assert sorted(pa.Table.from_batches(table.rows(["offset"]))["offset"].to_pylist()) == wanted
    assert table.last_run("load") == _run(4)


def test_an_iceberg_table_of_upserts_that_spark_merges_into_and_rewrites(tmp_path: Path) -> None:
    """Iceberg's MERGE and rewrite_data_files plan with its own column `_partition` beside the table's."""
    options = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": str(tmp_path)}
    source, name = Source("iceberg", tmp_path), "local.space.table"
    table = source.table = IcebergTable(name, options)
    source.merge([Change(number, "a", 0, number) for number in range(6)], 1)
    with SparkTables("iceberg", tmp_path / "spark", "local", tmp_path) as spark:
        spark.sql("SET `spark.sql.catalog.local.jdbc.init-catalog-tables`=false")

        def check(**names: str | None) -> None:
            wanted = sorted((int(key[2:]), value) for key, value in names.items())
            spark.sql(f"REFRESH TABLE {name}")
            rows = spark.sql(f"SELECT id, name FROM {name} ORDER BY 1")
            assert list(zip(rows["id"].to_pylist(), rows["name"].to_pylist(), strict=True)) == wanted
            mine = pa.Table.from_batches(table.rows(["id", "name"])).to_pylist()
            assert sorted(tuple(row.values()) for row in mine) == wanted

        for mode, number in (("copy-on-write", 2), ("merge-on-read", 4)):
            spark.do(f"ALTER TABLE {name} SET TBLPROPERTIES ('format-version' = '2', 'write.merge.mode' = '{mode}')")
            spark.do(
                f"MERGE INTO {name} t USING (SELECT 0L AS id UNION ALL SELECT 1L) c ON t.id = c.id "
                "WHEN MATCHED AND c.id = 0 THEN UPDATE SET t.name = 'theirs' WHEN MATCHED THEN DELETE "
                "WHEN NOT MATCHED THEN INSERT (id, name) VALUES (c.id, 'new')"
            )
            source.merge([Change(1, "b", 0, 10 * number), Change(2, "b", 0, 10 * number + 1)], number)
            check(id0="theirs", id1="b", id2="b", id3="a", id4="a", id5="a")
            spark.do("CALL local.system.rewrite_data_files('space.table', options => map('rewrite-all', 'true'))")
            source.merge([Change(0, "a", 0, 10 * number + 5)], number + 1)
            check(id0="a", id1="b", id2="b", id3="a", id4="a", id5="a")
        assert table.last_run("load") is not None


def test_equality_deletes_of_icebergs_library(tmp_path: Path) -> None:
    """Spark sees the rows that the load counts, before and after upserts."""
    options = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": str(tmp_path)}
    source = Source("iceberg", tmp_path)
    table = source.table = IcebergTable("local.space.table", options)
    source.merge([Change(number, "ab"[number % 2], 0, number) for number in range(8)], 1)
    with load_catalog("local", **options).load_table("space.table").update_spec() as spec:
        spec.add_field("id", BucketTransform(2), "of_id")  # the deletes are of the spec before, and of all partitions
    source.merge([Change(number, "c", 0, number) for number in range(8, 12)], 2)
    with SparkTables("iceberg", tmp_path / "spark", "local", tmp_path) as spark:
        spark.sql("SET `spark.sql.catalog.local.jdbc.init-catalog-tables`=false")

        def check(*ids: int) -> None:
            spark.sql("REFRESH TABLE local.space.table")
            assert spark.sql("SELECT id FROM local.space.table ORDER BY 1")["id"].to_pylist() == list(ids)
            assert sorted(pa.Table.from_batches(table.rows(["id"]))["id"].to_pylist()) == list(ids)

        check(*range(12))
        spark.delete_by_value("local.space.table", "name", "a")
        check(1, 3, 5, 7, 8, 9, 10, 11)
        source.merge([Change(2, "a", 0, 20), Change(3, None, 0, 21), Change(9, "c", 0, 22)], 3)
        check(1, 2, 5, 7, 8, 9, 10, 11)
        assert table.compact(1 << 30) >= 0
        check(1, 2, 5, 7, 8, 9, 10, 11)
        assert table.last_run("load") is not None
