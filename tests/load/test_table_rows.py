"""Loads of values into Delta tables: written by confluent-kafka, read by deltalake, DuckDB, Polars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from deltalake import DeltaTable

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, LoadError
from spark_klog.files.folder import LocalFolder
from spark_klog.load.audit import status
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import VALUES, WriteSettings
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.schemas.column_format import ColumnFormat, RegistrySettings
from spark_klog.security.config import Settings
from tests.load.support import Killed, die, failing, run
from tests.spark.support import Sent, create_topic, produce
from tests.support.runs.soak import SOAK

_OF_VALUES = WriteSettings(table_columns=VALUES)


@pytest.fixture(scope="module")
def registry(cluster: EmbeddedCluster) -> Iterator[str]:
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0") as running:
        SchemaRegistryClient({"url": running.url}).set_compatibility(level="NONE")
        yield running.url


def _schema(*names: str, id_type: str = "int", **more: Any) -> dict[str, Any]:
    optional = [{"name": name, "type": ["null", "string"], "default": None, **more.get(name, {})} for name in names]
    return {"type": "record", "name": "Row", "fields": [{"name": "id", "type": id_type}, *optional]}


def _send(servers: str, url: str, topic: str, schema: dict[str, Any], rows: list[dict[str, Any] | None]) -> None:
    write = AvroSerializer(SchemaRegistryClient({"url": url}), json.dumps(schema))
    context = SerializationContext(topic, MessageField.VALUE, [])
    produce(servers, topic, [Sent(None if row is None else write(row, context), b"k") for row in rows])


def _load(servers: str, location: Path, topic: str, url: str, **options: Any) -> Any:
    formats = (ColumnFormat("value", "avro", RegistrySettings(Settings({"url": url})), subject=f"{topic}-value"),)
    return run(servers, f"delta:{location}", topic, **{"formats": formats, "settings": _OF_VALUES, **options})


def _rows(location: Path) -> list[dict[str, Any]]:
    """The rows in the order of offsets, without where they are from, by three readers that agree."""
    found = sorted(DeltaTable(location).to_pyarrow_table().to_pylist(), key=lambda row: row["_klog_offset"])
    by_polars = polars.read_delta(str(location)).to_dicts()
    assert sorted(by_polars, key=lambda row: row["_klog_offset"]) == found
    with duckdb.connect() as connection:
        uris = DeltaTable(location).file_uris()
        query = f"SELECT count(*), sum(_klog_offset) FROM read_parquet({uris!r}, union_by_name=true)"
        assert connection.execute(query).fetchone() == (len(found), sum(row["_klog_offset"] for row in found))
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in found]


def test_a_column_for_each_field(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    _send(servers, registry, topic, _schema("a"), [{"id": 1, "a": "x"}, None])
    _load(servers, tmp_path, topic, registry)
    table = DeltaTable(tmp_path)
    names = ["id", "a", "_klog_key", "_klog_topic", "_klog_partition", "_klog_offset", "_klog_timestamp"]
    assert [field.name for field in table.schema().fields] == names
    first, second = sorted(table.to_pyarrow_table().to_pylist(), key=lambda row: row["_klog_offset"])
    assert {**first, "_klog_timestamp": None} == dict(zip(names, [1, "x", b"k", topic, 0, 0, None], strict=True))
    assert (second["id"], second["_klog_offset"]) == (None, 1)
    assert [action["min._klog_offset"] for action in pa.table(table.get_add_actions(flatten=True)).to_pylist()] == [0]
    with pytest.raises(LoadError, match="with --table-columns values, not with --table-columns records"):
        _load(servers, tmp_path, topic, registry, settings=WriteSettings())


def test_a_killed_run_takes_a_newer_schema(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    """Its plan has version 1; records of later versions add columns in the same call, and no complete task runs again.
    A field that is renamed by an alias is read by its new name.
    """
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    _send(servers, registry, topic, _schema("a"), [{"id": 0, "a": "x"}])
    _load(servers, tmp_path, topic, registry)
    _send(servers, registry, topic, _schema("a"), [{"id": n, "a": "x"} for n in range(1, 11)])
    _send(servers, registry, topic, _schema("a", "b"), [{"id": n, "a": "x", "b": "y"} for n in range(11, 21)])
    renamed = _schema("c", "b", c={"aliases": ["a"]})
    _send(servers, registry, topic, renamed, [{"id": n, "c": "x", "b": "y"} for n in range(21, 26)])
    with pytest.raises(Killed), failing(LocalFolder, -8, die):
        _load(servers, tmp_path, topic, registry, max_task_records=10)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("_klog/runs/00000002/offsets-*")}
    assert len(kept) == 1
    loaded = _load(servers, tmp_path, topic, registry, max_task_records=10, evolution="latest")
    assert (loaded.runs, loaded.bad) == ([2], 0)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    rows = _rows(tmp_path)
    assert [row["id"] for row in rows] == list(range(26))
    assert [row["b"] for row in rows] == [None] * 11 + ["y"] * 15
    assert {row["a"] or row["c"] for row in rows} == {"x"}
    assert status(str(tmp_path)).findings == []


def test_a_type_that_a_table_does_not_have(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    """It is refused by its name before anything is written; by the old schema the load goes on."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    _send(servers, registry, topic, _schema("a"), [{"id": 1}])
    _load(servers, tmp_path, topic, registry)
    _send(servers, registry, topic, _schema("a", id_type="long"), [{"id": 1 << 40}, {"id": 2}])
    for _ in range(2):
        with pytest.raises(LoadError, match="id is int32 in the table and int64 in the load"):
            _load(servers, tmp_path, topic, registry, evolution="latest")
    assert not (tmp_path / "_klog/runs/00000002").exists()
    with pytest.raises(LoadError, match="version 2 now, which version 1"):
        _load(servers, tmp_path, topic, registry)


def test_each_type(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    """Maps, lists, records, decimals, times; a field is added inside a list meanwhile."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    item: dict[str, Any] = {"type": "record", "name": "Item", "fields": [{"name": "x", "type": "int"}]}
    schema: dict[str, Any] = {
        "type": "record",
        "name": "Row",
        "fields": [
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
            {"name": "day", "type": {"type": "int", "logicalType": "date"}},
            {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
            {"name": "tags", "type": {"type": "map", "values": {"type": "array", "items": "string"}}},
            {"name": "items", "type": {"type": "array", "items": item}},
            {"name": "raw", "type": "bytes"},
        ],
    }
    at = datetime(2026, 11, 23, 10, 0, 0, 123_456, timezone.utc)
    row = {"at": at, "day": at.date(), "price": Decimal("1.25"), "tags": {"k": ["ä", "b"]}, "raw": b"\xff"}
    rows: list[dict[str, Any]] = [{**row, "items": [{"x": 1}, {"x": 2}]}, {**row, "items": [{"x": 3, "y": "z"}]}]
    for number in range(2):
        _send(servers, registry, topic, schema, [rows[number]])
        settings = WriteSettings(table_columns="values")
        _load(servers, tmp_path, topic, registry, evolution="latest", settings=settings)
        item["fields"].append({"name": "y", "type": ["null", "string"], "default": None})
    rows[0]["items"] = [{"x": 1, "y": None}, {"x": 2, "y": None}]
    table = DeltaTable(tmp_path).to_pyarrow_table()
    found = table.sort_by("_klog_offset").to_pylist(maps_as_pydicts="strict")
    assert [{name: one[name] for name in rows[0]} for one in found] == rows


def test_an_existing_table_with_wider_columns(
    cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path
) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    mine = pa.schema([pa.field("id", pa.int64()), pa.field("note", pa.string())])
    DeltaTable.create(tmp_path, mine)
    _send(servers, registry, topic, _schema("a"), [{"id": 1, "a": "x"}])
    _load(servers, tmp_path, topic, registry)
    assert _rows(tmp_path) == [{"id": 1, "note": None, "a": "x"}]


@pytest.mark.test_all("long")
def test_runs_each_with_a_new_field(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    expected: list[dict[str, Any]] = []
    names: list[str] = []
    runs = 30 if SOAK else 10
    for number in range(runs):
        names.append(f"f{number}")
        rows = [{"id": number * 10 + row, names[-1]: f"{row}"} for row in range(10)]
        _send(servers, registry, topic, _schema(*names), [*rows])
        expected += rows
        if number % 3 == 2:
            with pytest.raises(Killed), failing(LocalFolder, number // 3 + 2, die):
                _load(servers, tmp_path, topic, registry, evolution="latest", max_task_records=5)
        if number % 5 == 4:
            DeltaTable(tmp_path).optimize.compact()
            DeltaTable(tmp_path).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
        _load(servers, tmp_path, topic, registry, evolution="latest", max_task_records=5)
        empty = dict.fromkeys(["id", *names])
        assert _rows(tmp_path) == [{**empty, **row} for row in expected]
    assert len(status(str(tmp_path)).runs) == runs


def test_values_of_json(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """What does not parse is a dead letter."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b'{"a":1,"at":"2026-11-23T10:00:00Z"}'), Sent(b"no"), Sent(b'{"a":2}')])
    settings = WriteSettings(table_columns=VALUES, schema="a bigint, at timestamp", event_time="at", layout="day")
    loaded = run(servers, f"delta:{tmp_path}", topic, settings=settings, max_bad=MaxBad(1))
    assert loaded.bad == 1
    found = (
        DeltaTable(tmp_path)
        .to_pyarrow_table()
        .sort_by("_klog_offset")
        .select(["a", "_klog_offset", "date"])
        .to_pylist()
    )
    assert [(row["a"], row["_klog_offset"], str(row["date"])) for row in found] == [
        (1, 0, "2026-11-23"),
        (2, 2, "2023-11-14"),
    ]


def test_rows_sorted_by_the_records_key(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b'{"a":1}', key) for key in (b"c", b"a", None, b"b", b"a")])
    run(
        servers, f"delta:{tmp_path}", topic, settings=WriteSettings(table_columns=VALUES, schema="a int", sort_by="key")
    )
    found = DeltaTable(tmp_path).to_pyarrow_table()
    places = list(zip(found["_klog_key"].to_pylist(), found["_klog_offset"].to_pylist(), strict=True))
    assert places == [(b"a", 1), (b"a", 4), (b"b", 3), (b"c", 0), (None, 2)]


def test_options_that_do_not_go_together(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b"{}")])
    with pytest.raises(ConfigError, match="needs a --value-format"):
        run(servers, f"delta:{tmp_path}", topic, settings=_OF_VALUES)
    with pytest.raises(ConfigError, match="is for --table"):
        run(servers, tmp_path, topic, settings=WriteSettings(table_columns=VALUES, schema="a int"))
    for schema, layout, words in (
        ("`_Klog_Offset` bigint", "none", "have the field _Klog_Offset"),
        ("a int, A int", "none", "a and A differ by case only"),
        ("date date", "day", "date is the table's partition column"),
    ):
        with pytest.raises((LoadError, ConfigError), match=words):
            run(servers, f"delta:{tmp_path}", topic, settings=replace(_OF_VALUES, schema=schema, layout=layout))
        assert list(tmp_path.rglob("*.*")) == []
