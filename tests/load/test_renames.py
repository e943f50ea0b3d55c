"""Fields that are renamed by Avro's aliases become renamed columns of Iceberg: fastavro says what the rows are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from pyiceberg.catalog import load_catalog

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError
from spark_klog.files.folder import LocalFolder
from spark_klog.load.audit import status
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import VALUES, WriteSettings
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.schemas.column_format import ColumnFormat, RegistrySettings
from spark_klog.security.config import Settings
from tests.load.support import Killed, die, failing, run
from tests.load.test_upserts import address_of, content, environment
from tests.spark.support import Sent, create_topic, produce

__all__ = ["environment"]


@pytest.fixture(scope="module")
def registry(cluster: EmbeddedCluster) -> Iterator[str]:
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0") as running:
        SchemaRegistryClient({"url": running.url}).set_compatibility(level="NONE")
        yield running.url


def _text(name: str, *aliases: str) -> dict[str, Any]:
    return {"name": name, "type": ["null", "string"], "default": None, "aliases": list(aliases)}


def _schema(*fields: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    inner = {"type": "record", "name": "Place", "fields": [place]}
    items = {"name": "places", "type": {"type": "array", "items": inner}, "default": []}
    return {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "long"}, *fields, items]}


_FIRST = _schema(_text("a"), place={"name": "lat", "type": "double", "default": 0.0})
_RENAMED = _schema(_text("c", "a"), place={"name": "latitude", "type": "double", "default": 0.0, "aliases": ["lat"]})
#: Its `a` is another field than the first one's.
_AGAIN = _schema(_text("c"), _text("a"), place={"name": "latitude", "type": "double", "default": 0.0})
_DAYS = [datetime(2026, 1, day, tzinfo=timezone.utc) for day in range(1, 7)]


class _Topic:
    """Sends rows by schemas of a registry, and reads what it has sent by another schema."""

    def __init__(self, servers: str, url: str, name: str) -> None:
        self.servers, self.name, self._client = servers, name, SchemaRegistryClient({"url": url})
        self._sent: list[tuple[dict[str, Any], bytes]] = []
        self.format = ColumnFormat("value", "avro", RegistrySettings(Settings({"url": url})), subject=f"{name}-value")
        create_topic(servers, name)

    def send(self, schema: dict[str, Any], name: str, *ids: int) -> None:
        place = schema["fields"][-1]["type"]["items"]["fields"][0]["name"]
        rows = [{"id": number, name: f"{name}{number}", "places": [{place: number + 0.5}]} for number in ids]
        self.send_rows(schema, *rows)

    def send_rows(self, schema: dict[str, Any], *rows: dict[str, Any]) -> None:
        schema_id = self._client.register_schema(f"{self.name}-value", Schema(json.dumps(schema), "AVRO"))
        for row in rows:
            body = BytesIO()
            fastavro.schemaless_writer(body, fastavro.parse_schema(schema), row)
            self._sent.append((schema, body.getvalue()))
        new = self._sent[-len(rows) :]
        produce(self.servers, self.name, [Sent(b"\0" + schema_id.to_bytes(4, "big") + body, b"k") for _, body in new])

    def rows(self, schema: dict[str, Any]) -> list[Any]:
        return [fastavro.schemaless_reader(BytesIO(body), by, schema) for by, body in self._sent]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(WriteSettings(), marks=pytest.mark.test_all("long")),
        WriteSettings(upsert_key="id"),
    ],
    ids=["records", "upserts"],
)
def test_a_renamed_field_is_a_renamed_column(
    cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path, environment: Any, settings: WriteSettings
) -> None:
    """Also one of the rows in a list; rows that a killed run has written by the old name stay; ids are the same."""
    address = address_of("iceberg", tmp_path)
    source = _Topic(cluster.bootstrap_servers, registry, topic)

    def load(**options: Any) -> Any:
        options = {"settings": settings, "formats": (source.format,), "max_task_records": 2, **options}
        return run(source.servers, address, topic, **options)

    def rows() -> list[Any]:
        is_records = settings == WriteSettings()
        found = content(address).sort_by("offset" if is_records else "_klog_offset").to_pylist()
        if is_records:
            return [row["value"] for row in found]
        return [{name: value for name, value in row.items() if not name.startswith("_")} for row in found]

    def ids() -> dict[str, int]:
        schema = load_catalog("local").load_table(address.removeprefix("iceberg:local.")).schema()
        prefix = "value." if settings == WriteSettings() else ""
        return {
            name: schema.find_field(f"{prefix}{name}").field_id
            for name in ("a", "c", "places.lat", "places.latitude")
            if f"{prefix}{name}".replace("places", "places.element") in schema.column_names
        }

    source.send(_FIRST, "a", 0, 1)
    load()
    assert rows() == source.rows(_FIRST)
    before = ids()
    assert list(before) == ["a", "places.lat"]
    source.send(_FIRST, "a", 2, 3)
    source.send(_RENAMED, "c", 4, 5)
    with pytest.raises(Killed), failing(LocalFolder, -8, die):
        load()
    assert load(evolution="latest").bad == 0
    assert rows() == source.rows(_RENAMED)
    assert ids() == {"c": before["a"], "places.latitude": before["places.lat"]}
    source.send(_RENAMED, "c", 6)
    load()
    source.send(_AGAIN, "a", 7)
    load(evolution="latest")
    assert [{**row, "a": row.get("a")} for row in source.rows(_AGAIN)][6:] == rows()[6:]
    # what was written as `a` by the first schema is in c, and the new a is another column
    assert [(row["c"], row["a"]) for row in rows()] == [
        *((f"{'a' if n < 4 else 'c'}{n}", None) for n in range(7)),
        (None, "a7"),
    ]
    assert ids()["c"] == before["a"]
    assert status(address).findings == []


def test_a_name_that_another_topic_has_stays(
    cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path, environment: Any
) -> None:
    """A call with one of two topics does not rename the other one's columns, whose rows are in them."""
    address = address_of("iceberg", tmp_path)
    mine, other = (_Topic(cluster.bootstrap_servers, registry, f"{topic}-{name}") for name in ("a", "b"))
    source = replace(mine.format, subject=None)

    def load(*topics: _Topic) -> None:
        names = [one.name for one in topics]
        settings = WriteSettings(table_columns=VALUES)
        run(mine.servers, address, *names, settings=settings, formats=(source,), evolution="latest")

    for one in (mine, other):
        one.send(_FIRST, "a", 0)
    load(mine, other)
    mine.send(_RENAMED, "c", 1)
    load(mine)
    for one, schema, name in ((mine, _RENAMED, "c"), (other, _FIRST, "a")):
        one.send(schema, name, 2)
    load(mine, other)
    found = {(row["_klog_topic"], row["id"]): row for row in content(address).to_pylist()}
    for one, last in ((mine, "c"), (other, "a")):
        for number in range(3):
            row = found.pop((one.name, number), None)
            name = "a" if number == 0 else last
            if (one, number) == (other, 1):
                assert row is None
                continue
            assert row is not None
            assert {key: row[key] for key in ("a", "c")} == {"a": None, "c": None, name: f"{name}{number}"}
            place = {"lat": None, "latitude": None, "lat" if name == "a" else "latitude": number + 0.5}
            assert row["places"] == [place]
    assert not found


def test_the_event_time_is_renamed(
    cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path, environment: Any
) -> None:
    """The table stays partitioned by the field; who calls it by its former name, as a cron job does, goes on."""
    address = address_of("iceberg", tmp_path)
    source = _Topic(cluster.bootstrap_servers, registry, topic)

    def schema(name: str, *aliases: str) -> dict[str, Any]:
        time = {"name": name, "type": {"type": "long", "logicalType": "timestamp-micros"}, "aliases": list(aliases)}
        return {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "long"}, time]}

    def send(number: int, by: dict[str, Any]) -> None:
        source.send_rows(by, {"id": number, by["fields"][1]["name"]: _DAYS[number]})

    def load(event_time: str, evolution: Any = "latest") -> None:
        settings = WriteSettings(layout="day", event_time=event_time, table_columns=VALUES)
        run(source.servers, address, topic, settings=settings, formats=(source.format,), evolution=evolution)

    send(0, schema("ts"))
    load("ts")
    send(1, schema("event_ts", "ts"))
    with pytest.raises(LoadError, match="a load with --event-time ts, not with --event-time event_ts"):
        load("event_ts")
    load("ts")
    for number, name in ((2, "ts"), (3, "event_ts")):
        send(number, schema("event_ts", "ts"))
        load(name, "keep")
    send(4, schema("event_ts"))
    load("ts")
    with pytest.raises(LoadError, match="a load with --event-time event_ts, not with --event-time ts"):
        load("ts")
    send(5, schema("event_ts"))
    load("event_ts")
    table = load_catalog("local").load_table(address.removeprefix("iceberg:local."))
    assert sorted(zip(*table.scan().to_arrow().select(["id", "event_ts"]).to_pydict().values(), strict=True)) == list(
        enumerate(_DAYS)
    )
    assert table.scan(row_filter="event_ts >= '2026-01-03T00:00:00+00:00'").count() == 4
    assert len({task.file.partition[0] for task in table.scan().plan_files()}) == 6


def test_who_dies_before_the_plan_has_renamed_nothing(
    cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path, environment: Any
) -> None:
    """The next call may have the former schema: it would add the former name again, beside the rows under the new."""
    address = address_of("iceberg", tmp_path)
    source = _Topic(cluster.bootstrap_servers, registry, topic)

    settings = WriteSettings(upsert_key="id")

    def load(evolution: Any) -> list[Any]:
        run(source.servers, address, topic, settings=settings, formats=(source.format,), evolution=evolution)
        return [{name: row[name] for name in row if name in "ac"} for row in content(address).sort_by("id").to_pylist()]

    source.send(_FIRST, "a", 0)
    load("latest")
    source.send(_RENAMED, "c", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spark_klog.load.run.make_tasks", lambda *_arguments, **_options: die())
        with pytest.raises(Killed):
            load("latest")
    assert load("keep") == [{"a": "a0"}, {"a": None}]
    source.send(_RENAMED, "c", 2)
    assert load("latest") == [{"c": "a0"}, {"c": None}, {"c": "c2"}]


@pytest.mark.parametrize("settings", [WriteSettings(upsert_key="id"), WriteSettings(table_columns=VALUES)])
def test_a_version_that_is_taken_back_gives_back_the_names(
    cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path, environment: Any, settings: WriteSettings
) -> None:
    """Its run was refused after the columns were renamed; also the rows of a task that was complete are there."""
    address = address_of("iceberg", tmp_path)
    source = _Topic(cluster.bootstrap_servers, registry, topic)

    def load(**options: Any) -> None:
        formats, limit = (source.format,), {"max_task_records": 1}
        run(source.servers, address, topic, settings=settings, formats=formats, evolution="latest", **limit, **options)

    source.send(_FIRST, "a", 0)
    load()
    source.send(_RENAMED, "c", 1)
    produce(source.servers, topic, [Sent(b"\0\0\0\0\1", b"k")])
    with pytest.raises(LoadError, match="more than --max-bad 0"):
        load()
    assert "c" in content(address).column_names
    SchemaRegistryClient({"url": registry}).delete_version(f"{topic}-value", 2)
    source.send(_FIRST, "a", 3)
    load(max_bad=MaxBad(1))
    rows = [{name: row[name] for name in row if name in "ac"} for row in content(address).sort_by("id").to_pylist()]
    assert rows == [{"a": "a0"}, {"a": None if settings.upsert_key else "c1"}, {"a": "a3"}]
    assert "lat: double" in str(content(address).schema)


def test_numbers_that_a_version_makes_wider(
    cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path, environment: Any
) -> None:
    """As by a --schema of JSON: more digits of a decimal, int to long; a version with fewer ones changes nothing."""
    source = _Topic(cluster.bootstrap_servers, registry, topic)

    def schema(digits: int, number: str) -> dict[str, Any]:
        price = {"type": "bytes", "logicalType": "decimal", "precision": digits, "scale": 2}
        fields = [{"name": "id", "type": number}, {"name": "prices", "type": {"type": "array", "items": price}}]
        return {"type": "record", "name": "Row", "fields": fields}

    rows: list[dict[str, Any]] = []
    for digits, number, row in (
        (4, "int", {"id": 1, "prices": [Decimal("12.34")]}),
        (20, "long", {"id": 1 << 40, "prices": [Decimal("-123456789012345678.90"), Decimal("0.05")]}),
        (6, "int", {"id": 2, "prices": [Decimal("1234.56")]}),
    ):
        rows.append(row)
        source.send_rows(schema(digits, number), row)
        address, options = address_of("iceberg", tmp_path), {"evolution": "latest", "formats": (source.format,)}
        run(source.servers, address, topic, settings=WriteSettings(table_columns=VALUES), **options)
    found = content(address).sort_by("_klog_offset").select(["id", "prices"])
    assert found.to_pylist() == rows
    assert found.schema.field("prices").type.value_type == pa.decimal128(20, 2)
