"""A table that a load has made is the same to deltalake, pyiceberg, DuckDB, Polars, and Spark with the real jars."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from spark_klog.embedded import EmbeddedCluster
from spark_klog.load.settings import WriteSettings
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.schemas.column_format import ColumnFormat, RegistrySettings
from spark_klog.security.config import Settings
from tests.load.support import run
from tests.load.tables import CATALOG, NAME, Kind, Lake, make_lake
from tests.spark.support import Sent, create_topic, produce
from tests.support.spark.spark_tables import SparkTables

_KINDS = pytest.mark.parametrize("kind", ["delta", "iceberg"])
_TIME = 1_700_000_000_123
_UTC = dt.timezone.utc
_AVRO: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "count", "type": "int"},
        {"name": "ratio", "type": "float"},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 3}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "is_paid", "type": ["null", "boolean"], "default": None},
        {"name": "raw", "type": "bytes"},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "counts", "type": {"type": "map", "values": "long"}},
        {
            "name": "place",
            "type": [
                "null",
                {"type": "record", "name": "Place", "fields": [{"name": "city", "type": ["null", "string"]}]},
            ],
        },
    ],
}


def _order(number: int) -> dict[str, Any]:
    return {
        "id": 5_000_000_000 + number,
        "count": -number,
        "ratio": number / 4,
        "price": Decimal(number * 1001) / 1000,
        "day": dt.date(2024, 2, 28) + dt.timedelta(number),
        "at": dt.datetime(2024, 2, 28, 23, 59, 59, 999_999, _UTC) + dt.timedelta(hours=number),
        "is_paid": None if number % 3 == 0 else number % 2 == 0,
        "raw": bytes(range(number)),
        "tags": [f"é{index}" for index in range(number % 3)],
        "counts": {"a": number} if number % 2 else {},
        "place": None if number % 4 == 0 else {"city": None if number % 4 == 1 else f"city {number}"},
    }


def _plain(value: Any) -> Any:
    """A value of any reader's: its maps are dicts, its bytes `bytes`, its times in UTC."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value.astimezone(_UTC)
    return value


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    rows = [{name: _plain(value) for name, value in row.items()} for row in table.to_pylist()]
    return sorted(rows, key=lambda row: (row["topic"], row["partition"], row["offset"]))


def by_duckdb(lake: Lake, name: str = NAME) -> pa.Table | None:
    """By DuckDB's extension for the format; None if it can't be had."""
    with duckdb.connect() as connection:
        try:
            connection.execute(f"INSTALL {lake.kind}")
            connection.execute(f"LOAD {lake.kind}")
        except duckdb.IOException:
            return None
        place = lake.uri if lake.kind == "delta" else lake.catalog.load_table(name).metadata_location
        return connection.sql(f"SELECT * FROM {lake.kind}_scan('{place}')").to_arrow_table()


@pytest.fixture
def lake(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    return make_lake(kind, tmp_path, monkeypatch)


def _load_records(servers: str, topic: str, lake: Lake) -> list[dict[str, Any]]:
    """Load records of all kinds by the hour, in two runs; return the rows that readers must see."""
    create_topic(servers, topic, 2)
    sent = [
        Sent(None, b"a tombstone", 0, _TIME),
        Sent(b"", None, 0, _TIME + 1),
        Sent(b"\x00\xff", b"\x80", 0, _TIME + 3_600_000, (("name", b"value"), ("name", None), ("é", b""))),
        Sent(b"the epoch", b"", 1, 1),
        Sent(b"the next day", b"k", 1, 86_400_000),
    ]
    settings = WriteSettings(layout="hour")
    produce(servers, topic, sent[:3])
    run(servers, lake.address, topic, settings=settings)
    produce(servers, topic, sent[3:])
    run(servers, lake.address, topic, settings=settings)
    rows, ends = [], {0: 0, 1: 0}
    for record in sent:
        rows.append(
            {
                "key": record.key,
                "value": record.value,
                "topic": topic,
                "partition": record.partition,
                "offset": ends[record.partition],
                "timestamp": dt.datetime.fromtimestamp(0, _UTC) + dt.timedelta(milliseconds=record.timestamp),
                "timestampType": 0,
                "headers": [{"key": key, "value": value} for key, value in record.headers] or None,
            }
        )
        ends[record.partition] += 1
    return rows


def _load_orders(servers: str, topic: str, lake: Lake) -> list[dict[str, Any]]:
    """Load Avro records as rows; return the values that readers must see, by offset."""
    create_topic(servers, topic)
    with SchemaRegistry({"bootstrap.servers": servers}, "0") as registry:
        write = AvroSerializer(SchemaRegistryClient({"url": registry.url}), json.dumps(_AVRO))
        context = SerializationContext(topic, MessageField.VALUE, [])
        orders = [_order(number) for number in range(9)]
        produce(servers, topic, [Sent(write(order, context)) for order in orders])
        formats = (ColumnFormat("value", "avro", RegistrySettings(Settings({"url": registry.url}))),)
        run(servers, lake.address, topic, formats=formats)
    return orders


def _values(table: pa.Table) -> list[dict[str, Any]]:
    values = [row["value"] for row in rows_of(table)]
    return [{**value, "counts": dict(value["counts"])} for value in values]


@_KINDS
def test_records(cluster: EmbeddedCluster, topic: str, lake: Lake) -> None:
    rows = _load_records(cluster.bootstrap_servers, topic, lake)
    for name, read in lake.readers().items():
        seen = [{column: row[column] for column in rows[0]} for row in rows_of(read())]
        if name == "pyiceberg":  # reads a null list of structs as an empty one
            seen = [{**row, "headers": row["headers"] or None} for row in seen]
        assert seen == rows, name
    assert len(lake.data_files()) == 4, "a file for each hour"


@_KINDS
def test_rows_of_avro(cluster: EmbeddedCluster, topic: str, lake: Lake) -> None:
    orders = _load_orders(cluster.bootstrap_servers, topic, lake)
    for name, read in lake.readers().items():
        assert _values(read()) == orders, name


@_KINDS
@pytest.mark.peer
@pytest.mark.test_all("client")
def test_spark_and_duckdb(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """The real jars, and DuckDB's extension where it can be had; Spark appends, and the load goes on after it."""
    servers = cluster.bootstrap_servers
    records = make_lake(kind, tmp_path / "records", monkeypatch)
    if kind == "delta":
        orders, name = make_lake(kind, tmp_path / "orders", monkeypatch), NAME
    else:  # Spark's session has one catalog
        name = "db.orders"
        orders = replace(records, address=f"iceberg:{CATALOG}.{name}")
    rows, wanted = _load_records(servers, topic, records), _load_orders(servers, f"{topic}-orders", orders)

    def name_of(lake: Lake) -> str:
        return f"delta.`{lake.uri}`" if kind == "delta" else lake.address.removeprefix("iceberg:")

    with SparkTables(kind, tmp_path / "spark", CATALOG, records.warehouse) as spark:
        for table in (spark.sql(f"SELECT * FROM {name_of(records)}"), by_duckdb(records)):
            if table is not None:
                assert [{column: row[column] for column in rows[0]} for row in rows_of(table)] == rows
        for table in (spark.sql(f"SELECT * FROM {name_of(orders)}"), by_duckdb(orders, name)):
            if table is not None:
                assert _values(table) == wanted
        columns = spark.sql(f"DESCRIBE {name_of(records)}").to_pylist()
        types = {row["col_name"]: row["data_type"] for row in columns}
        assert {name: types[name] for name in ("key", "offset", "timestamp", "headers")} == {
            "key": "binary",
            "offset": "bigint",
            "timestamp": "timestamp",
            "headers": "array<struct<key:string,value:binary>>",
        }
        spark.sql(f"INSERT INTO {name_of(records)} SELECT * FROM {name_of(records)} WHERE value = 'the epoch'")
    # outside of the session, which keeps a lock on the catalog's database
    produce(servers, topic, [Sent(b"after Spark", None, 0, _TIME)])
    run(servers, records.address, topic, settings=WriteSettings(layout="hour"))
    values = sorted(row["value"] or b"" for row in rows_of(next(iter(records.readers().values()))()))
    assert values == sorted([*(row["value"] or b"" for row in rows), b"the epoch", b"after Spark"])
