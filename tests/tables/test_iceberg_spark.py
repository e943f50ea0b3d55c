"""An Iceberg table between runs of a load and Spark with the real Iceberg: each reads what the other has made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from spark_klog.columns.schema import FULL
from spark_klog.errors import LoadError
from spark_klog.files import open_folder
from tests.support.spark.spark_tables import SparkTables
from tests.tables.iceberg_tables import LOAD, Warehouse, rows, run_of, write

pytestmark = pytest.mark.test_all("client")
_TABLE = "c.ns.t"


def test_spark_reads_and_changes_a_table_of_a_load(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path)
    struct = pa.struct([("at", pa.timestamp("us", tz="UTC")), ("n", pa.int32()), ("tags", pa.list_(pa.string()))])
    columns = FULL.set(1, pa.field("value", struct))
    table, schema = warehouse.prepared("hour", columns)
    numbers, expected = iter(range(1, 100)), set[int]()

    def run(*files: tuple[int, int, int], **options: Any) -> None:
        """A run with files of (first, last, hour)."""
        nonlocal schema
        number = next(numbers)
        written = []
        for first, last, hour in files:
            records = rows(range(first, last), hour)
            for record in records:
                record["value"] = {"n": record["offset"], "tags": ["a", None]}
            written.append(write(table, schema, f"{number}-{hour}", records, **options))
            expected.update(range(first, last))
        table.append(written, run_of(number, 0))

    with SparkTables("iceberg", tmp_path / "spark", "c", tmp_path) as spark:
        # it leaves a result open, which locks the database
        spark.sql("SET `spark.sql.catalog.c.jdbc.init-catalog-tables`=false")

        def seen(where: str = "true") -> list[int]:
            text = f"SELECT offset, value.n, value.tags, headers FROM {_TABLE} WHERE {where} ORDER BY offset"
            spark.sql(f"REFRESH TABLE {_TABLE}")  # Spark keeps a table for 30 s
            found = spark.sql(text).to_pylist()
            assert all(row["n"] == row["offset"] and row["tags"] == ["a", None] for row in found)
            assert all(len(row["headers"]) == 1 for row in found)
            return [row["offset"] for row in found]

        def agree() -> None:
            assert seen() == sorted(expected) == warehouse.offsets()

        run((0, 10, 0), (10, 20, 1))
        run((20, 30, 0), row_group_size=3)
        agree()
        assert seen("timestamp >= timestamp'2024-01-01 01:00:00'") == [*range(10, 20)]
        assert seen("value.n > 25") == [*range(26, 30)]
        assert table.compact(1 << 20) == 2
        agree()
        [partitions] = [spark.sql(f"SELECT partition, record_count FROM {_TABLE}.partitions ORDER BY 1").to_pylist()]
        assert [one["record_count"] for one in partitions] == [20, 10]
        history = spark.sql(f"SELECT operation, summary FROM {_TABLE}.snapshots ORDER BY committed_at").to_pylist()
        assert [one["operation"] for one in history] == ["append", "append", "replace"]
        assert dict(history[1]["summary"])["klog.run"] == "2"

        # deletes by position, which a compaction of ours leaves alone
        modes = ", ".join(f"'write.{one}.mode' = 'merge-on-read'" for one in ("delete", "update", "merge"))
        spark.sql(f"ALTER TABLE {_TABLE} SET TBLPROPERTIES ({modes})")
        spark.sql(f"DELETE FROM {_TABLE} WHERE offset IN (3, 12)")
        expected.difference_update((3, 12))
        run((30, 35, 0))
        run((35, 40, 0))
        agree()
        assert table.compact(1 << 20) == 2
        agree()
        spark.sql(f"INSERT INTO {_TABLE} SELECT * FROM (SELECT * FROM {_TABLE}) WHERE offset = 0")
        assert seen("offset = 0") == [0, 0]
        spark.sql(f"DELETE FROM {_TABLE} WHERE offset = 0")
        expected.discard(0)
        run((40, 45, 2))

        # what Spark's maintenance makes of it: all files are new, and the runs' snapshots are gone
        done = spark.sql("CALL c.system.rewrite_data_files(table => 'ns.t', options => map('rewrite-all', 'true'))")
        assert done.to_pylist()[0]["rewritten_data_files_count"] > 3
        spark.sql("CALL c.system.rewrite_manifests('ns.t')")
        open_folder(table.location).write("_klog/load.json", b"{}")
        spark.sql(
            "CALL c.system.expire_snapshots(table => 'ns.t', older_than => TIMESTAMP '2100-01-01', retain_last => 1)"
        )
        agree()
        assert table.last_run(LOAD) == run_of(5, 0)
        run((45, 50, 2))
        agree()

        # a column that Spark adds, one of the load's that becomes wider, and one that the load adds
        spark.sql(f"ALTER TABLE {_TABLE} ADD COLUMN who STRING")
        spark.sql(f"ALTER TABLE {_TABLE} ALTER COLUMN value.n TYPE BIGINT")
        spark.sql(f"INSERT INTO {_TABLE} SELECT * FROM (SELECT * FROM {_TABLE}) WHERE false")
        run((50, 55, 2))  # with the schema from before
        columns = pa.schema([*columns, ("more", pa.decimal128(9, 2))])
        schema = table.prepare(columns, "hour", "timestamp", LOAD)
        run((55, 60, 3))
        agree()
        names = spark.sql(f"SELECT * FROM {_TABLE} LIMIT 1").column_names
        assert names[-2:] == ["who", "more"]
        assert table.compact(1 << 20) > 0
        agree()

        spark.sql(f"ALTER TABLE {_TABLE} WRITE DISTRIBUTED BY PARTITION")
        [first] = spark.sql(
            f"SELECT snapshot_id AS id FROM {_TABLE}.snapshots WHERE summary['klog.run'] = '6' ORDER BY committed_at"
        )["id"].to_pylist()
        head = warehouse.stranger().metadata.current_snapshot_id
        spark.sql(f"CALL c.system.rollback_to_snapshot('ns.t', {first})")
        with pytest.raises(LoadError, match=r"was rolled back: run 8 of load load-1 .* has its runs up to 6"):
            table.last_run(LOAD)
        spark.sql(f"CALL c.system.set_current_snapshot('ns.t', {head})")
        agree()
        spark.sql(f"ALTER TABLE {_TABLE} REPLACE PARTITION FIELD timestamp_hour WITH days(timestamp)")
        with pytest.raises(LoadError, match="is partitioned by the day of timestamp"):
            table.prepare(columns, "hour", "timestamp", LOAD)
        schema = table.prepare(columns, "day", "timestamp", LOAD)
        run((60, 65, 3))
        assert table.compact(1 << 20) == 0  # files of the layout before stay
        agree()
        spark.sql(f"ALTER TABLE {_TABLE} SET TBLPROPERTIES ('format-version' = '3')")
        with pytest.raises(LoadError, match="format version 3: pyiceberg writes 1 and 2"):
            table.prepare(columns, "day", "timestamp", LOAD)
