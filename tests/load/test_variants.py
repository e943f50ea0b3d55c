"""Values of JSON as a column of VARIANT: in Delta, where Spark reads it; refused everywhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.schema import VariantType
from pyspark.sql.variant_utils import VariantUtils

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, LoadError
from spark_klog.files.folder import LocalFolder
from spark_klog.load.audit import status
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import VALUES, WriteSettings
from spark_klog.load.verify import verify
from spark_klog.tables.delta import DeltaLakeTable
from tests.load.support import Killed, die, failing, run
from tests.spark.support import Sent, create_topic, produce
from tests.support.spark.spark_tables import SparkTables

_VARIANT = WriteSettings(schema="variant")
_VALUES = (
    {"user": {"name": "Ada", "tags": ["x", "y"]}, "n": 1, "price": 1.25},
    {"user": {"name": "Eve"}, "n": "two", "big": 1 << 40},
    [1, None],
    None,
    "text",
)


@pytest.fixture
def servers(cluster: EmbeddedCluster, topic: str) -> str:
    create_topic(cluster.bootstrap_servers, topic)
    return cluster.bootstrap_servers


def _send(servers: str, topic: str, *values: Any) -> None:
    produce(servers, topic, [Sent(each if isinstance(each, bytes) else json.dumps(each).encode()) for each in values])


def _values(folder: Path) -> list[Any]:
    """As pyspark reads them from the files; ... of a record without a value."""
    rows = pa.table(DeltaLakeTable(str(folder))._existing().to_pyarrow_table()).sort_by("offset")["value"]
    return [
        ... if not row.is_valid else json.loads(VariantUtils.to_json(row["value"].as_py(), row["metadata"].as_py()))
        for row in rows
    ]


def test_runs(servers: str, topic: str, tmp_path: Path) -> None:
    address = f"delta:{tmp_path}"
    _send(servers, topic, *_VALUES)
    produce(servers, topic, [Sent(None)])
    assert run(servers, address, topic, settings=_VARIANT).runs == [1]
    assert _values(tmp_path) == [*_VALUES, ...]
    table = DeltaTable(tmp_path)
    assert isinstance(next(field.type for field in table.schema().fields if field.name == "value"), VariantType)
    assert "variantType" in (table.protocol().writer_features or [])
    lines = map(json.loads, (tmp_path / "_delta_log" / f"{1:020}.json").read_text().splitlines())
    [statistics] = [json.loads(line["add"]["stats"]) for line in lines if "add" in line]
    assert not any("value" in part for part in statistics.values() if isinstance(part, dict))

    _send(servers, topic, {"a": 1}, b"{", {"a": [2]})
    with pytest.raises(LoadError, match=r"has 1 bad .* or without --schema into another table, which takes any"):
        run(servers, address, topic, settings=_VARIANT)
    assert run(servers, f"{address}-bytes", topic).bad == 0
    assert run(servers, address, topic, settings=_VARIANT, max_bad=MaxBad(1)).bad == 1
    assert _values(tmp_path)[-2:] == [{"a": 1}, {"a": [2]}]
    assert status(address).findings == []
    assert DeltaLakeTable(str(tmp_path)).compact(1 << 30) == 2
    assert _values(tmp_path) == [*_VALUES, ..., {"a": 1}, {"a": [2]}]
    assert verify(address, {"bootstrap.servers": servers}).findings == []


def test_a_run_that_is_killed(servers: str, topic: str, tmp_path: Path) -> None:
    _send(servers, topic, *_VALUES)
    with pytest.raises(Killed), failing(LocalFolder, -4, die):  # after the files of its task
        run(servers, f"delta:{tmp_path}", topic, settings=_VARIANT)
    assert run(servers, f"delta:{tmp_path}", topic, settings=_VARIANT).runs == [1]
    assert _values(tmp_path) == [*_VALUES]


def test_other_schemas_and_tables(servers: str, topic: str, tmp_path: Path) -> None:
    """A load of VARIANT stays one, and a table has one or not."""
    one, other = tmp_path / "one", tmp_path / "other"
    _send(servers, topic, {"a": 1})
    run(servers, f"delta:{one}", topic, settings=_VARIANT)
    with pytest.raises(LoadError, match=r"the value is struct<a: bigint>, and was variant"):
        run(servers, f"delta:{one}", topic, settings=WriteSettings(schema="a bigint"))
    kinds = {"struct": pa.struct([("metadata", pa.binary()), ("value", pa.binary())]), "none": None}
    for name, kind in kinds.items():
        columns = [("topic", pa.string()), ("value", kind)] if kind else [("topic", pa.string())]
        DeltaTable.create(other / name, pa.schema(columns))
    with pytest.raises(LoadError, match=r"value is struct<.*> in the table and variant in the load"):
        run(servers, f"delta:{other / 'struct'}", topic, settings=_VARIANT)
    run(servers, f"delta:{other / 'none'}", topic, settings=_VARIANT)
    assert _values(other / "none") == [{"a": 1}]


@pytest.mark.parametrize(
    ("output", "settings", "message"),
    [
        ("/files", {}, "--schema variant is for --table delta:, as files have no such type"),
        ("iceberg:tests.db.t", {}, "format version 3 on, which pyiceberg 0.12 does not write"),
        ("delta:/t", {"table_columns": VALUES}, "is one column without fields"),
        ("delta:/t", {"upsert_key": "id"}, "is one column without fields"),
        ("delta:/t", {"event_time": "at", "layout": "day"}, "is one column without fields"),
    ],
)
def test_refused(topic: str, tmp_path: Path, output: str, settings: Any, message: str) -> None:
    output = output.replace("/", f"{tmp_path}/", 1)
    with pytest.raises(ConfigError, match=message):
        run("localhost:1", output, topic, settings=WriteSettings(schema="variant", **settings))


@pytest.mark.peer
@pytest.mark.test_all("client")
def test_spark_reads_it(servers: str, topic: str, tmp_path: Path) -> None:
    folder = tmp_path / "table"
    _send(servers, topic, *_VALUES)
    run(servers, f"delta:{folder}", topic, settings=_VARIANT)
    name = f"delta.`{folder}`"
    with SparkTables("delta", tmp_path / "spark") as spark:
        rows = spark.sql(
            f"SELECT value:user.name::string AS name, variant_get(value, '$.price', 'decimal(9,2)') AS price, "
            f"schema_of_variant(value) AS kind, to_json(value) AS text, value:big::bigint AS big FROM {name} "
            "ORDER BY offset"
        ).to_pylist()
        assert [row["name"] for row in rows] == ["Ada", "Eve", None, None, None]
        assert [str(row["price"]) for row in rows[:2]] == ["1.25", "None"]
        assert rows[1]["big"] == 1 << 40
        assert rows[4]["kind"] == "STRING"
        assert [json.loads(row["text"]) for row in rows] == [*_VALUES]
        [count] = spark.sql(f"SELECT count(*) AS n FROM {name} WHERE value:price::double > 1").to_pylist()
        assert count == {"n": 1}
        spark.do(f"INSERT INTO {name} (value, topic, partition, offset) SELECT parse_json('[7]'), 't', 0, 1000")
        spark.do(f"OPTIMIZE {name}")
    _send(servers, topic, {"last": True})
    assert run(servers, f"delta:{folder}", topic, settings=_VARIANT).runs == [2]
    assert _values(folder) == [*_VALUES, {"last": True}, [7]]
