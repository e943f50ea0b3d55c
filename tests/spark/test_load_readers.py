"""Spark and DuckDB read the output of a load: a topic's folder, the whole output, a list of files."""

from __future__ import annotations

import io
import json
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import fastavro
from pyspark.sql import DataFrame, SparkSession, functions as F

from spark_klog.embedded import EmbeddedCluster
from spark_klog.load import files
from spark_klog.load.run import LoadOptions, load
from spark_klog.load.settings import WriteSettings
from spark_klog.load.tasks.task import SparkRunner
from spark_klog.schemas.column_format import ColumnFormat

from .support import Sent, create_topic, produce

_TIME, _HOUR_MS, _COUNT = 1_700_000_000_000, 3_600_000, 90
_COLUMNS = "topic", "partition", "offset", "key", "value", "timestamp", "headers"
Row = tuple[Any, ...]


def _sent(topic: str) -> tuple[list[Sent], list[Row]]:
    """Records of three hours in two partitions, and the rows that readers must return."""
    sent, rows, offsets = [], [], [0, 0]
    for number in range(_COUNT):
        headers = (("n", b"%d" % number), ("none", None)) if number % 3 == 1 else ()
        value = None if number % 11 == 3 else b"value %d" % number
        key = None if number % 7 == 2 else b"key %d" % (number % 5)
        partition, time = number % 2, _TIME + number % 3 * _HOUR_MS
        sent.append(Sent(value, key, partition, time, headers))
        rows.append((topic, partition, offsets[partition], key, value, time, [*headers] or None))
        offsets[partition] += 1
    return sent, sorted(rows, key=lambda row: row[:3])


def _plain(row: Row) -> Row:
    headers = None if row[6] is None else [(item["key"], _bytes(item["value"])) for item in row[6]]
    return (*row[:3], _bytes(row[3]), _bytes(row[4]), row[5], headers)


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)


def _by_spark(frame: DataFrame) -> list[Row]:
    wanted = [F.unix_millis(name).alias(name) if name == "timestamp" else F.col(name) for name in _COLUMNS]
    return [_plain(row) for row in frame.select(*wanted).orderBy("topic", "partition", "offset").collect()]


def _by_duckdb(files: str, where: str = "true") -> list[Row]:
    wanted = ", ".join(f"epoch_ms({name})" if name == "timestamp" else f'"{name}"' for name in _COLUMNS)
    source = f"read_parquet({files}, union_by_name=true, hive_partitioning=true)"
    with duckdb.connect() as connection:
        found = connection.execute(f"SELECT {wanted} FROM {source} WHERE {where} ORDER BY topic, partition, 3")
        return [_plain(row) for row in found.fetchall()]


def _load(spark: SparkSession, servers: str, topic: str, output: Path, settings: WriteSettings) -> None:
    options = LoadOptions({"bootstrap.servers": servers}, [topic], str(output), settings, max_task_records=20)
    loaded = load(options, SparkRunner(lambda: spark))
    assert sum(item.records for item in loaded.partitions) == _COUNT


def test_as_spark_and_duckdb_read_it(spark: SparkSession, cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    sent, rows = _sent(topic)
    produce(servers, topic, sent)
    _load(spark, servers, topic, tmp_path, WriteSettings(layout="hour"))
    folder = spark.read.parquet(f"{tmp_path}/{topic}")
    whole = spark.read.option("recursiveFileLookup", True).parquet(str(tmp_path))
    assert _by_spark(folder) == _by_spark(whole) == _by_duckdb(f"'{tmp_path}/**/*.parquet'") == rows
    paths = [item.path for item in files(str(tmp_path))]
    assert len(paths) > 3
    assert _by_spark(spark.read.option("recursiveFileLookup", True).parquet(*paths)) == _by_duckdb(str(paths)) == rows
    _check_an_hour(folder, tmp_path, rows)


def _check_an_hour(folder: DataFrame, output: Path, rows: list[Row]) -> None:
    """A filter on the folders' columns, an hour, reads only the files of that hour."""
    assert set(folder.columns) >= {"date", "hour"}
    hour = folder.where((F.col("date") == "2023-11-14") & (F.col("hour") == 23))
    wanted = [row for row in rows if row[5] == _TIME + _HOUR_MS]
    assert _by_spark(hour) == _by_duckdb(f"'{output}/**/*.parquet'", "date = '2023-11-14' AND hour = 23") == wanted
    read = {row[0] for row in hour.select(F.input_file_name()).distinct().collect()}
    assert read
    assert all("date=2023-11-14/hour=23/" in name for name in read)


def test_rows_of_two_schemas(spark: SparkSession, cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Spark reads files of an older and a newer schema as one table, with every kind of column."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    fields: list[dict[str, Any]] = [
        {"name": "id", "type": "long"},
        {"name": "at", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
        {"name": "tags", "type": {"type": "map", "values": {"type": "array", "items": "string"}}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "either", "type": ["string", "boolean"]},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "place", "type": {"type": "record", "name": "Place", "fields": [{"name": "lat", "type": "double"}]}},
    ]
    place = {"type": "record", "name": "Place", "fields": [{"name": "lon", "type": ["null", "double"]}]}
    newer = [*fields[:6], {"name": "place", "type": place}, {"name": "more", "type": "int"}]
    order = {
        "id": 1,
        "at": datetime(2023, 11, 14, 23),
        "tags": {"k": ["a", "b"]},
        "price": Decimal("1.25"),
        "either": True,
        "kind": "B",
        "place": {"lat": 0.5},
    }
    rows = [order, {**order, "id": 2, "either": "text", "place": {"lon": 1.5}, "more": 7}]
    for names, row in zip((fields, newer), rows, strict=True):
        schema = {"type": "record", "name": "Order", "fields": names}
        data = io.BytesIO()
        fastavro.schemaless_writer(data, fastavro.parse_schema(schema), row)
        produce(servers, topic, [Sent(data.getvalue())])
        formats = (ColumnFormat("value", "avro", text=json.dumps(schema)),)
        options = LoadOptions(
            {"bootstrap.servers": servers}, [topic], str(tmp_path), formats=formats, evolution="latest"
        )
        assert len(load(options, SparkRunner(lambda: spark)).runs) == 1
    frame = spark.read.option("mergeSchema", True).parquet(f"{tmp_path}/{topic}")
    found = [row.asDict(recursive=True)["value"] for row in frame.orderBy("offset").collect()]
    either = {"member0": None, "member1": True}, {"member0": "text", "member1": None}
    assert found == [
        {**rows[0], "either": either[0], "place": {"lat": 0.5, "lon": None}, "more": None},
        {**rows[1], "either": either[1], "place": {"lat": None, "lon": 1.5}},
    ]
    with duckdb.connect() as connection:
        source = f"read_parquet('{tmp_path}/**/*.parquet', union_by_name=true)"
        seen = connection.execute(f"SELECT value.id, value.place.lat, value.more FROM {source} ORDER BY 1").fetchall()
    assert seen == [(1, 0.5, None), (2, None, 7)]
