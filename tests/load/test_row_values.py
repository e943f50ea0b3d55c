"""Loads of Avro keys and values: written by confluent-kafka, read back by pyarrow, DuckDB and JSON's own parser."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import fastavro
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, ConnectionFailed, LoadError
from spark_klog.files.folder import LocalFolder
from spark_klog.load import files
from spark_klog.load.audit import status
from spark_klog.load.journal import paths
from spark_klog.load.journal.history import read_plan
from spark_klog.load.journal.store import open_store
from spark_klog.load.rows import fitted, merged
from spark_klog.load.run import LoadOptions, MaxBad, load
from spark_klog.load.settings import WriteSettings
from spark_klog.restore import RestoreOptions, plan_restore, replay
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.schemas.column_format import ColumnFormat, RegistrySettings
from spark_klog.schemas.registry import client as registry_client
from spark_klog.security.config import Settings
from tests.load.support import InProcess, Killed, by_duckdb, by_pyarrow, die, expected, failing, in_child, run
from tests.load.test_upserts import address_of, content, environment
from tests.schemas.registry.asking import ask
from tests.spark.support import Sent, create_topic, produce
from tests.support.clients.klog import klog
from tests.support.clients.mirrors import read_topic

__all__ = ["environment"]

_TIME = 1_700_002_800_000  # 2023-11-14T23:00Z
_DIED = 9
_V1: dict[str, Any] = {
    "type": "record",
    "name": "shop.Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "tags", "type": {"type": "map", "values": {"type": "array", "items": "string"}}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "place", "type": {"type": "record", "name": "Place", "fields": [{"name": "lat", "type": "double"}]}},
    ],
}
_KEY = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "int"}]}


def _fields(*names: str) -> dict[str, Any]:
    """A schema with optional strings beside the id."""
    more = [{"name": name, "type": ["null", "string"], "default": None} for name in names]
    return {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "long"}, *more]}


@pytest.fixture(scope="module")
def registry(cluster: EmbeddedCluster) -> Iterator[str]:
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0") as running:
        yield running.url


def _order(number: int) -> dict[str, Any]:
    at = datetime.fromtimestamp(_TIME / 1000, timezone.utc) + timedelta(hours=number)
    return {"id": number, "at": at, "tags": {"k": ["ä", "b"]}, "price": Decimal("1.25"), "place": {"lat": 0.5}}


def _written(url: str, topic: str, schema: Any, rows: Sequence[Any], field: str = MessageField.VALUE) -> list[bytes]:
    """Rows as confluent-kafka's serializer writes them; it registers the schema."""
    write = AvroSerializer(SchemaRegistryClient({"url": url}), json.dumps(schema))
    return [write(row, SerializationContext(topic, field, [])) for row in rows]


def _avro(url: str | None, topic: str = "", column: Any = "value", **named: Any) -> ColumnFormat:
    settings = None if url is None else RegistrySettings(Settings({"url": url, "retries.deadline.ms": "2000"}))
    if not named and url is not None:
        named = {"subject": f"{topic}-{column}"}
    return ColumnFormat(column, "avro", settings, **named)


def _rows(output: Path) -> list[Any]:
    """Values in the order of offsets, by pyarrow: the schema of the newest file is that of the folder."""
    newest = max(output.rglob("*.parquet"), key=lambda path: path.name.split("+")[2])
    found = ds.dataset(output, schema=pq.read_schema(newest), format="parquet", partitioning=None).to_table()
    return [row["value"] for row in sorted(found.to_pylist(), key=lambda row: row["offset"])]


def _run(servers: str, output: Path, topic: str, url: str | None, **options: Any) -> Any:
    return run(servers, output, topic, **{"formats": (_avro(url, topic),), **options})


def test_a_message_of_a_protobuf_schema(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    """Not the first: the run keeps which; records of another one are bad. A duration is text in JSON."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    text = (
        'syntax = "proto3"; package shop; import "google/protobuf/duration.proto"; message Created { int64 id = 1; } '
        "message Shipped { int64 order = 1; google.protobuf.Duration took = 2; } message Paid { int64 cents = 1; }"
    )
    id = SchemaRegistryClient({"url": registry}).register_schema(f"{topic}-value", Schema(text, "PROTOBUF"))
    before = b"\0" + id.to_bytes(4, "big")
    shipped = before + b"\2\2" + b"\x08\5\x12\2\x08\3"
    produce(servers, topic, [Sent(shipped), Sent(before + b"\0" + b"\x08\1"), Sent(shipped)])

    def load(message: str | None, **options: Any) -> Any:
        settings = RegistrySettings(Settings({"url": registry}))
        form = ColumnFormat("value", "protobuf", settings, subject=f"{topic}-value", message=message)
        return _run(
            servers, tmp_path, topic, registry, formats=(form,), settings=WriteSettings("json", "none"), **options
        )

    def values() -> list[Any]:
        files = sorted((tmp_path / topic).rglob("*.jsonl"), key=lambda file: file.name.split("+")[2])
        return [json.loads(line)["value"] for file in files for line in file.read_text().splitlines()]

    assert [(item.records, item.bad) for item in load("Shipped", max_bad=MaxBad(1)).partitions] == [(2, 1)]
    row = {"order": 5, "took": "3.000000s"}
    assert values() == [row, row]
    produce(servers, topic, [Sent(shipped)])
    with pytest.raises(LoadError, match=r"message shop\.Shipped, not shop\.Paid: --schema-evolution latest takes it"):
        load("Paid")
    load("shop.Shipped")
    produce(servers, topic, [Sent(shipped)])
    load(None, evolution="latest")
    assert values() == [row] * 4


def test_keys_and_values(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    """Ids before records and in headers, nulls, and every kind of column, in each of the formats of files."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    orders = [_order(number) for number in range(3)]
    values = _written(registry, topic, _V1, orders)
    keys = _written(registry, topic, _KEY, [{"id": 7}], MessageField.KEY)
    conf = {"schema.id.serializer": header_schema_id_serializer}
    write = AvroSerializer(SchemaRegistryClient({"url": registry}), json.dumps(_V1), conf=conf)
    headers: list[tuple[str, bytes]] = []
    value = write(orders[2], SerializationContext(topic, MessageField.VALUE, headers))
    sent = [Sent(values[0], keys[0]), Sent(None, keys[0]), Sent(values[1]), Sent(value, headers=tuple(headers))]
    produce(servers, topic, sent)
    formats = _avro(registry, topic, "key"), _avro(registry, topic)
    for name in ("parquet", "arrow", "json"):
        codec = "none" if name == "json" else "zstd"
        asked = WriteSettings(name, codec)
        loaded = run(servers, tmp_path / name, topic, settings=asked, formats=formats)
        assert [(item.records, item.bad) for item in loaded.partitions] == [(4, 0)]
        # the bytes of the log, as without a schema
        assert loaded.partitions[0].bytes == sum(len(one.value or b"") + len(one.key or b"") for one in sent)
        assert status(str(tmp_path / name)).findings == []
    wanted = [orders[0], None, orders[1], orders[2]]
    for row in filter(None, wanted):
        row["tags"] = [*row["tags"].items()]
    for name, kind in (("parquet", "parquet"), ("arrow", "ipc")):
        table = ds.dataset(sorted((tmp_path / name).rglob(f"*.{name}")), format=kind).to_table()
        assert table["value"].to_pylist() == wanted
        assert table["key"].to_pylist() == [{"id": 7}, {"id": 7}, None, None]
        assert all(field.nullable for field in table.schema.field("value").type)
    [file] = (tmp_path / "json").rglob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    at = "2023-11-14T23:00:00+00:00"
    first = {"id": 0, "at": at, "tags": {"k": ["ä", "b"]}, "price": "1.25", "place": {"lat": 0.5}}
    assert lines[0]["value"] == first
    assert [line["value"] is None for line in lines] == [False, True, False, False]
    with duckdb.connect() as connection:
        found = connection.execute(
            f"SELECT value.id, value.place.lat FROM '{tmp_path}/parquet/**/*.parquet' ORDER BY 1"
        )
        assert found.fetchall() == [(0, 0.5), (1, 0.5), (2, 0.5), (None, None)]
    with pytest.raises(LoadError, match="parsed values"):
        plan_restore(RestoreOptions(str(tmp_path / "parquet"), {"bootstrap.servers": servers}))


def test_event_time_and_plain_records(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    """Folders by a field; records without ids, by the text of a schema; a reader's schema that is not the writer's."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, [Sent(value[5:]) for value in _written(registry, topic, _V1, map(_order, range(3)))])  # type: ignore[arg-type]
    asked = WriteSettings(layout="hour", event_time="at")
    run(servers, tmp_path, topic, settings=asked, formats=(_avro(None, text=json.dumps(_V1)),))
    hours = sorted(str(path.parent.relative_to(tmp_path / topic)) for path in tmp_path.rglob("*.parquet"))
    assert hours == ["date=2023-11-14/hour=23", "date=2023-11-15/hour=00", "date=2023-11-15/hour=01"]
    settings = WriteSettings(layout="hour", event_time="when")
    with pytest.raises(ConfigError, match="the schema has no field 'when'"):
        run(servers, tmp_path / "b", topic, settings=settings, formats=(_avro(None, text=json.dumps(_V1)),))
    assert not (tmp_path / "b").exists()
    empty = {"type": "record", "name": "Empty", "fields": []}
    with pytest.raises(ConfigError, match="format parquet can't hold"):
        run(servers, tmp_path / "c", topic, formats=(_avro(None, text=json.dumps(empty)),))
    inner = {"type": "record", "name": "Inner", "fields": [{"name": name, "type": "int"} for name in ("id", "ID")]}
    alike = {"type": "record", "name": "Alike", "fields": [{"name": "in", "type": {"type": "array", "items": inner}}]}
    with pytest.raises(ConfigError, match="have fields that differ by case only, id and ID"):
        run(servers, tmp_path / "c", topic, formats=(_avro(None, text=json.dumps(alike)),))


def test_what_does_not_decode(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    """Poisoned records are dead letters, with their bytes and why; they are never null, and can be sent again."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    good = _written(registry, topic, _V1, [_order(number) for number in range(3)])
    unknown = b"\x00" + (999_999).to_bytes(4, "big") + good[0][5:]
    poison = [unknown, good[1][:-3], b"", b"{}", b"\x00\x00", good[2] + b"x"]
    produce(
        servers, topic, [Sent(good[0]), *map(Sent, poison), Sent(good[1], b"k", headers=(("h", b"1"),)), Sent(None)]
    )
    with pytest.raises(LoadError, match=rf"has {len(poison)} bad record batches or values, more than --max-bad 0"):
        _run(servers, tmp_path, topic, registry)
    assert not list(tmp_path.rglob("*.parquet"))
    loaded = _run(servers, tmp_path, topic, registry, max_bad=MaxBad(70, True))
    assert [(item.records, item.bad, item.gaps) for item in loaded.partitions] == [
        (3, len(poison), {"unparsed": len(poison)})
    ]
    assert [row and row["id"] for row in _rows(tmp_path)] == [0, 1, None]
    [file] = (tmp_path / paths.LETTERS).glob("values+*")
    letters = [json.loads(line) for line in file.read_text().splitlines()]
    assert [base64.b64decode(one["value"]) for one in letters] == poison
    assert [(one["topic"], one["partition"], one["offset"]) for one in letters] == [
        (topic, 0, 1 + number) for number in range(len(poison))
    ]
    assert "schema id 999999: the schema registry" in letters[0]["reason"]
    assert all(one["reason"].startswith("the value does not decode: ") for one in letters)
    assert status(str(tmp_path)).findings == []
    again = replay(str(tmp_path), {"bootstrap.servers": servers}, f"{topic}-again")
    assert again.records == len(poison)
    assert [record.value for record in read_topic(servers, f"{topic}-again", 1)[0]] == poison


def test_the_registry_learns_an_id(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    """Records that did not decode are tried again, by the tasks that had them, and leave no letters behind."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    known = _written(registry, topic, _fields("a"), [{"id": number} for number in range(20)])
    number = 700_000
    unknown = [b"\0" + number.to_bytes(4, "big") + value[5:] for value in known[:5]]
    produce(servers, topic, map(Sent, [*known, *unknown]))
    run_folder = tmp_path / "_klog/runs/00000001"
    for _ in range(2):
        with pytest.raises(LoadError, match="or once the schema registry has what they need"):
            _run(servers, tmp_path, topic, registry, max_task_records=10)
        assert len(list((tmp_path / paths.LETTERS).iterdir())) == 1
        kept = sorted(path.name for path in run_folder.glob("offsets-*"))
    times = {name: (run_folder / name).stat().st_mtime_ns for name in kept}
    assert ask(registry, "PUT", f"/mode/{topic}-more", {"mode": "IMPORT"})[0] == 200
    more = {"schema": json.dumps({**_fields("a"), "doc": "more"}), "id": number, "version": 1}
    assert ask(registry, "POST", f"/subjects/{topic}-more/versions", more)[0] == 200
    loaded = _run(servers, tmp_path, topic, registry, max_task_records=10)
    assert [(item.records, item.bad) for item in loaded.partitions] == [(25, 0)]
    assert [row["id"] for row in _rows(tmp_path)] == [*range(20), *range(5)]
    assert not list((tmp_path / paths.LETTERS).iterdir())
    renewed = [name for name in kept if (run_folder / name).stat().st_mtime_ns != times[name]]
    assert renewed == kept[-1:]
    assert not (run_folder / "refused").exists()
    assert status(str(tmp_path)).findings == []


@pytest.mark.test_all("kill")
def test_killed_while_it_tries_again(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    """At each change that the call makes after a refusal: nothing is lost or double, and no letter stays."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    known = _written(registry, topic, _fields("a"), [{"id": number} for number in range(20)])
    number = 700_001
    produce(servers, topic, map(Sent, [*known, *(b"\0" + number.to_bytes(4, "big") + value[5:] for value in known)]))
    refused = tmp_path / "refused"
    with pytest.raises(LoadError):
        _run(servers, refused, topic, registry, max_task_records=15)
    assert ask(registry, "PUT", f"/mode/{topic}-more", {"mode": "IMPORT"})[0] == 200
    more = {"schema": json.dumps({**_fields("a"), "doc": topic}), "id": number, "version": 1}
    assert ask(registry, "POST", f"/subjects/{topic}-more/versions", more)[0] == 200
    change, died = 0, True
    while died:
        change += 1
        output = tmp_path / f"{change}"
        shutil.copytree(refused, output)
        try:
            with failing(LocalFolder, change, die):
                _run(servers, output, topic, registry, max_task_records=15)
            died = False
        except Killed:
            pass
        _run(servers, output, topic, registry, max_task_records=15)
        assert by_duckdb(output) == by_pyarrow(output) == expected(topic, {0: 40})
        assert not list((output / paths.LETTERS).iterdir())
        assert (status(str(output)).findings, status(str(output)).unfinished) == ([], "")
    assert change > 8


def _unreadable(servers: str, topic: str, registry: str) -> dict[str, Any]:
    """A topic whose second version lacks a field without default; returns that version."""
    create_topic(servers, topic)
    old = _fields("a")
    old["fields"].append({"name": "b", "type": "string"})
    produce(servers, topic, map(Sent, _written(registry, topic, old, [{"id": n, "b": "x"} for n in range(10)])))
    return _fields("a", "c")


def test_only_a_newer_version_reads_on(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    """Good records are neither dead letters nor lost: the run waits for a call that takes the newest version."""
    servers = cluster.bootstrap_servers
    new = _unreadable(servers, topic, registry)
    _run(servers, tmp_path, topic, registry)
    produce(servers, topic, map(Sent, _written(registry, topic, new, [{"id": 10 + n, "c": "y"} for n in range(10)])))
    for _ in range(2):
        with pytest.raises(LoadError, match=r"version 2 now, which version 1, the load's, can't read: .* latest"):
            _run(servers, tmp_path, topic, registry, max_bad=MaxBad(100, True), max_task_records=5)
        assert not (tmp_path / paths.LETTERS).exists()
        assert by_duckdb(tmp_path) == expected(topic, {0: 10})
    # a refused run, which later records do not join
    produce(servers, topic, map(Sent, _written(registry, topic, _fields("a", "c", "d"), [{"id": 20, "d": "z"}])))
    loaded = _run(servers, tmp_path, topic, registry, max_task_records=5, evolution="latest")
    assert (loaded.runs, loaded.bad) == ([2, 3], 0)
    assert by_duckdb(tmp_path) == by_pyarrow(tmp_path) == expected(topic, {0: 21})
    empty = dict.fromkeys("abcd")
    assert _rows(tmp_path) == [
        *({**empty, "id": n, "b": "x"} for n in range(10)),
        *({**empty, "id": n, "c": "y"} for n in range(10, 20)),
        {**empty, "id": 20, "d": "z"},
    ]
    assert (status(str(tmp_path)).findings, status(str(tmp_path)).unfinished) == ([], "")


def test_a_refused_run_takes_another_schema(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Also one that was given as a text, which was the wrong one; the letters of the first trial are no more."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b"\x02"), Sent(b"\x04\x06")])
    with pytest.raises(LoadError, match=r"1 bad record .* with another schema and --schema-evolution latest"):
        run(servers, tmp_path, topic, formats=(_avro(None, text='"int"'),))
    assert list((tmp_path / paths.LETTERS).iterdir())
    two = {"type": "record", "name": "Two", "fields": [{"name": "a", "type": "int"}]}
    run(
        servers,
        tmp_path,
        topic,
        formats=(_avro(None, text=json.dumps(two)),),
        evolution="latest",
        max_bad=MaxBad(1),
    )
    assert _rows(tmp_path) == [{"a": 1}]
    assert len(list((tmp_path / paths.LETTERS).iterdir())) == 1
    assert status(str(tmp_path)).findings == []


@pytest.mark.test_all("kill")
def test_killed_while_a_refused_run_takes_the_newest_schema(
    cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path
) -> None:
    """At each change of the call: nothing is lost or double, no letter stays, and the next call ends it."""
    servers = cluster.bootstrap_servers
    new = _unreadable(servers, topic, registry)
    refused = tmp_path / "refused"
    _run(servers, refused, topic, registry)
    produce(servers, topic, map(Sent, _written(registry, topic, new, [{"id": 10 + n, "c": "y"} for n in range(10)])))
    with pytest.raises(LoadError):
        _run(servers, refused, topic, registry, max_task_records=5)
    change, died = 0, True
    while died:
        change += 1
        output = tmp_path / f"{change}"
        shutil.copytree(refused, output)
        try:
            with failing(LocalFolder, change, die):
                _run(servers, output, topic, registry, max_task_records=5, evolution="latest")
            died = False
        except Killed:
            pass
        _run(servers, output, topic, registry, max_task_records=5, evolution="latest")
        assert by_duckdb(output) == by_pyarrow(output) == expected(topic, {0: 20})
        assert [row["id"] for row in _rows(output)] == [*range(20)]
        assert not (output / paths.LETTERS).exists()
        assert (status(str(output)).findings, status(str(output)).unfinished) == ([], "")
    assert change > 8


@pytest.mark.parametrize("kind", ["files", "json", "delta", "iceberg"])
@pytest.mark.parametrize("logical", ["date", "timestamp-micros", "local-timestamp-micros"])
def test_event_times_of_no_year(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, logical: str, kind: str
) -> None:
    """They lie in the folder of the first or last day, or are bad records where the format has no such partition."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    field = {"type": {"type": "int" if logical == "date" else "long", "logicalType": logical}, "name": "d"}
    bits, unit = (31, 1) if logical == "date" else (63, 86_400_000_000)
    times = [20_000 * unit, (1 << bits) - 1, -(1 << bits), 20_001 * unit, (1 << bits) - 2]
    plain = fastavro.parse_schema({"type": "record", "name": "V", "fields": [{"name": "d", "type": "long"}]})
    values = []
    for at in times:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, plain, {"d": at})
        values.append(Sent(out.getvalue()))
    produce(servers, topic, values)
    text = json.dumps({"type": "record", "name": "V", "fields": [field]})
    settings = WriteSettings("json" if kind == "json" else "parquet", layout="day", event_time="d")
    output = tmp_path / "out" if kind in ("files", "json") else address_of(kind, tmp_path)
    loaded = run(servers, output, topic, settings=settings, formats=(_avro(None, text=text),), max_bad=MaxBad(5))
    is_all = kind in ("files", "delta")
    assert [(one.records, one.bad) for one in loaded.partitions] == [(5, 0) if is_all else (2, 3)]
    if kind != "json":
        paths = [str(path) for path in tmp_path.rglob("*.parquet")]
        rows = ds.dataset(paths).to_table() if kind == "files" else content(str(output))
        days = rows.sort_by("offset")["value"].combine_chunks().field("d")
        assert days.cast(pa.int32() if bits == 31 else pa.int64()).to_pylist() == (
            times if is_all else [times[0], times[3]]
        )
    if kind == "files":
        folders = sorted({path.parent.name for path in output.rglob("*.parquet")})
        assert folders == [f"date={one:%Y-%m-%d}" for one in (date.min, date(2024, 10, 4), date(2024, 10, 5), date.max)]
    assert status(str(output)).findings == []


def test_times_that_json_does_not_have(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Such a record would end each run with --format json; Parquet has these times."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    stamp = {"type": "long", "logicalType": "timestamp-micros"}
    text = json.dumps({"type": "map", "values": stamp})
    infinite = b"\xfe" + b"\xff" * 8 + b"\x01"  # the largest number
    values = [b"\x02\x02a" + time + b"\x00" for time in (b"\x02", infinite, b"\x04")]
    produce(servers, topic, [Sent(value) for value in values])
    json_lines = WriteSettings("json", "none")
    formats = (_avro(None, text=text),)
    loaded = run(servers, tmp_path / "json", topic, settings=json_lines, formats=formats, max_bad=MaxBad(1))
    assert [(item.records, item.bad) for item in loaded.partitions] == [(2, 1)]
    [file] = (tmp_path / "json" / topic).rglob("*.jsonl")
    seen = [json.loads(line)["value"] for line in file.read_text().splitlines()]
    assert seen == [{"a": f"1970-01-01T00:00:00.00000{number}+00:00"} for number in (1, 2)]
    [file] = (tmp_path / "json" / paths.LETTERS).iterdir()
    assert "a time before the year 1 or after 9999" in json.loads(file.read_text())["reason"]
    loaded = run(servers, tmp_path / "parquet", topic, formats=formats)
    assert [(item.records, item.bad) for item in loaded.partitions] == [(3, 0)]


def test_a_load_keeps_its_schema(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    """A run dies, the subject gets a version, the run is finished, and later runs take new versions when told so."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    store = open_store(str(tmp_path))
    first, second = _fields("a"), _fields("b")
    produce(servers, topic, map(Sent, _written(registry, topic, first, [{"id": n, "a": "x"} for n in range(40)])))

    def dies() -> None:
        with failing(LocalFolder, 5, lambda: os._exit(_DIED)):
            _run(servers, tmp_path, topic, registry, max_task_records=10)

    assert in_child(dies) == _DIED
    killed = read_plan(store, 1)
    assert killed is not None
    assert killed.settings["rows"][0]["version"] == 1
    produce(servers, topic, map(Sent, _written(registry, topic, second, [{"id": 40, "b": "y"}])))
    # the rest of the run, and another one: both by the schema with which the load began
    loaded = _run(servers, tmp_path, topic, registry, max_task_records=10)
    assert loaded.runs == [1, 2]
    assert {str(pq.read_schema(item.path).field("value").type) for item in files(str(tmp_path))} == {
        "struct<id: int64, a: string>"
    }
    assert _rows(tmp_path)[39:] == [{"id": 39, "a": "x"}, {"id": 40, "a": None}]

    produce(servers, topic, map(Sent, _written(registry, topic, second, [{"id": 41, "b": "z"}])))
    loaded = _run(servers, tmp_path, topic, registry, evolution="latest")
    assert loaded.runs == [3]
    plan = read_plan(store, 3)
    assert plan is not None
    assert (plan.settings["rows"][0]["version"], plan.settings["rows"][0]["subject"]) == (2, f"{topic}-value")
    # files of the new schema have the fields of the old one
    assert _rows(tmp_path)[39:] == [
        {"id": 39, "a": "x", "b": None},
        {"id": 40, "a": None, "b": None},
        {"id": 41, "a": None, "b": "z"},
    ]
    with duckdb.connect() as connection:
        found = connection.execute(
            f"SELECT value.id, value.a, value.b FROM read_parquet('{tmp_path}/**/*.parquet', union_by_name=true) "
            'WHERE "offset" >= 39 ORDER BY 1'
        )
        assert found.fetchall() == [(39, "x", None), (40, None, None), (41, None, "z")]
    # a later run keeps what the one before it had, and asks nobody for it
    produce(servers, topic, map(Sent, _written(registry, topic, second, [{"id": 42, "b": "w"}])))
    assert _run(servers, tmp_path, topic, registry).runs == [4]
    assert _rows(tmp_path)[42] == {"id": 42, "a": None, "b": "w"}
    assert by_pyarrow(tmp_path) == by_duckdb(tmp_path) == expected(topic, {0: 43})
    assert status(str(tmp_path)).findings == []


def test_another_schema_is_refused(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    """Of the call, or of the subject if it changes a type; what is refused writes nothing."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    asked = SchemaRegistryClient({"url": registry})
    asked.set_compatibility(f"{topic}-value", "NONE")
    produce(servers, topic, map(Sent, _written(registry, topic, _fields("a"), [{"id": 1}])))
    _run(servers, tmp_path, topic, registry)
    changed = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "int"}]}
    produce(servers, topic, map(Sent, _written(registry, topic, changed, [{"id": 2}])))
    other = asked.get_latest_version(f"{topic}-value").schema_id
    for options, words in (
        ({"evolution": "latest"}, r"value\.id is int32 by the new schema, and int64 in the load's files"),
        (
            {"formats": (_avro(registry, subject="other"),)},
            "version 1, not by subject other: --schema-evolution latest",
        ),
        ({"formats": (_avro(registry, schema_id=other),)}, rf"not by id {other}\b"),
        ({"formats": (_avro(registry, text='"string"'),)}, "--value-schema is another one"),
        ({"formats": (_avro(None, text='"string"'),)}, "with --schema-registry, not without it"),
        ({"formats": ()}, "with values as avro, not values as bytes"),
        ({"formats": (_avro(registry, topic, "key"), _avro(registry, topic))}, "not values as avro and keys as avro"),
    ):
        with pytest.raises(LoadError, match=words):
            _run(servers, tmp_path, topic, registry, **options)
    assert by_duckdb(tmp_path) == expected(topic, {0: 1})
    # by the schema that it has, the load goes on
    assert _run(servers, tmp_path, topic, registry).runs == [2]
    assert _rows(tmp_path) == [{"id": 1, "a": None}, {"id": 2, "a": None}]


def test_a_registry_that_was_made_anew(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Its ids are of other schemas: records are read by those, as the schema that the load keeps."""
    servers, subject = cluster.bootstrap_servers, f"{topic}-value"
    create_topic(servers, topic)

    def people(*names: str) -> dict[str, Any]:
        return {"type": "record", "name": "Person", "fields": [{"name": name, "type": "string"} for name in names]}

    def send(url: str, schema: Any, first: str, last: str) -> int:
        produce(servers, topic, map(Sent, _written(url, topic, schema, [{"first": first, "last": last}])))
        return int(SchemaRegistryClient({"url": url}).get_latest_version(subject).schema_id)

    with SchemaRegistry({"bootstrap.servers": servers}, "0", f"{topic}-schemas") as running:
        url = running.url
        ids = [send(url, people("first", "last"), "Ada", "Lovelace")]
        _run(servers, tmp_path, topic, url)
    with SchemaRegistry({"bootstrap.servers": servers}, url.rpartition(":")[2], f"{topic}-schemas-2"):
        ids.append(send(url, people("last", "first"), "Grace", "Hopper"))
        _run(servers, tmp_path, topic, url)
        ids.append(send(url, people("last", "first"), "Edsger", "Dijkstra"))
        _run(servers, tmp_path, topic, url, evolution="latest")
        ids.append(send(url, people("last", "first"), "Barbara", "Liskov"))
        _run(servers, tmp_path, topic, url)
    assert len(set(ids)) == 1
    assert [(row["first"], row["last"]) for row in _rows(tmp_path)] == [
        ("Ada", "Lovelace"),
        ("Grace", "Hopper"),
        ("Edsger", "Dijkstra"),
        ("Barbara", "Liskov"),
    ]
    assert status(str(tmp_path)).findings == []


def test_the_registry_goes_away(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that can't learn a schema ends, and the next one goes on from what is complete; no record is lost."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    with SchemaRegistry({"bootstrap.servers": servers}, "0") as running:
        url = running.url
        old = _written(url, topic, _fields("a"), [{"id": n} for n in range(20)])
        produce(servers, topic, map(Sent, old))
        _run(servers, tmp_path, topic, url)
        new = _written(url, topic, _fields("a", "b"), [{"id": 20 + n} for n in range(20)])
        produce(servers, topic, map(Sent, [*old, *new]))
        monkeypatch.setattr(registry_client, "_registries", {})  # as a new process has none

        class Closing(InProcess):
            def run(self, tasks: Any, job: Any) -> None:
                running.close()
                super().run(tasks, job)

        # Records of the load's schema need nobody once the run has begun; those of the other have nobody to ask.
        options = LoadOptions(
            {"bootstrap.servers": servers},
            [topic],
            str(tmp_path),
            formats=(_avro(url, topic),),
            max_task_records=10,
        )
        with pytest.raises(LoadError, match="values can't be decoded now, run again later: the schema registry"):
            load(options, Closing())
    assert by_duckdb(tmp_path) == expected(topic, {0: 20})
    assert status(str(tmp_path)).unfinished == "00000002"
    kept = sorted((tmp_path / "_klog/runs/00000002").glob("offsets-*"))
    monkeypatch.setattr(registry_client, "_registries", {})
    with pytest.raises(ConnectionFailed):  # nobody says whether the id is still the schema's
        _run(servers, tmp_path, topic, url, max_task_records=10)
    with SchemaRegistry({"bootstrap.servers": servers}, url.rpartition(":")[2]):
        assert _run(servers, tmp_path, topic, url, max_task_records=10).runs == [2]
    assert len(kept) >= 1
    assert by_duckdb(tmp_path) == by_pyarrow(tmp_path) == expected(topic, {0: 60})
    assert [row["id"] for row in _rows(tmp_path)] == [*range(20), *range(40)]
    assert (status(str(tmp_path)).findings, status(str(tmp_path)).unfinished) == ([], "")
    monkeypatch.setattr(registry_client, "_registries", {})
    with pytest.raises(ConnectionFailed):
        _run(servers, tmp_path / "new", topic, url)
    assert not (tmp_path / "new").exists()


def test_no_secret_in_the_journal(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, map(Sent, _written(registry, topic, _fields("a"), [{"id": 1}])))
    settings = Settings({"url": registry, "basic.auth.user.info": "me:hunter2"})
    source = ColumnFormat("value", "avro", RegistrySettings(settings), subject=f"{topic}-value")
    run(servers, tmp_path, topic, formats=(source,))
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in kept if b"hunter2" in path.read_bytes()]


@pytest.mark.parametrize(
    ("old", "new", "whole"),
    [
        (pa.struct([("a", pa.int32())]), pa.struct([("b", pa.string())]), {"a": None, "b": "x"}),
        (
            pa.struct([("l", pa.list_(pa.struct([("a", pa.int32())])))]),
            pa.struct([("l", pa.list_(pa.struct([("b", pa.string())])))]),
            {"l": [{"a": None, "b": "x"}, None]},
        ),
        (
            pa.struct([("m", pa.map_(pa.string(), pa.struct([("a", pa.int32())])))]),
            pa.struct([("m", pa.map_(pa.string(), pa.struct([("b", pa.string())])))]),
            {"m": [("k", {"a": None, "b": "x"}), ("n", None)]},
        ),
    ],
)
def test_types_of_files(old: pa.DataType, new: pa.DataType, whole: dict[str, Any]) -> None:
    """Rows of a new schema by the type of both, whole and cut."""

    def own(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: own(item) for name, item in value.items() if name != "a"}
        return [own(item) for item in value] if isinstance(value, list) else value

    kind = merged(old, new, "value")
    kept = {**whole}
    if "m" in whole:
        kept["m"] = [("k", {"b": "x"}), ("n", None)]
    rows = pa.array([own(kept), None, own(kept)], new)
    assert fitted(rows, kind).to_pylist() == [whole, None, whole]
    assert fitted(rows.slice(1), kind).to_pylist() == [None, whole]
    fitted(rows, kind).validate(full=True)
    assert merged(kind, new, "value") == kind


def _registered(url: str, subject: str, schema: Any) -> int:
    return SchemaRegistryClient({"url": url}).register_schema(subject, Schema(json.dumps(schema), "AVRO"))


def test_topics_have_schemas_of_their_own(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    """Also one that a later run adds; those that a run leaves out keep theirs."""
    servers = cluster.bootstrap_servers
    topics = [f"{topic}-{number}" for number in range(3)]
    for name, field in zip(topics, "abc", strict=True):
        create_topic(servers, name)
        produce(servers, name, map(Sent, _written(registry, name, _fields(field), [{"id": 1, field: "x"}])))
    formats = (_avro(registry, subject=None),)
    run(servers, tmp_path, *topics[:2], formats=formats)
    newer = _fields("a", "d")
    produce(servers, topics[0], map(Sent, _written(registry, topics[0], newer, [{"id": 2, "a": "y", "d": "z"}])))
    run(servers, tmp_path, *topics[1:], formats=formats)
    run(servers, tmp_path, *topics, formats=formats)
    assert [_rows(tmp_path / name) for name in topics] == [
        [{"id": 1, "a": "x"}, {"id": 2, "a": "y"}],
        [{"id": 1, "b": "x"}],
        [{"id": 1, "c": "x"}],
    ]
    found = status(str(tmp_path))
    assert found.findings == []
    assert [(one["topic"], one["subject"], one["version"]) for one in found.schemas] == [
        (name, f"{name}-value", 1) for name in topics
    ]
    said = klog("load", "status", str(tmp_path)).stdout.splitlines()
    assert f"value of {topics[0]} is avro, subject {topics[0]}-value, version 1, id {found.schemas[0]['id']}" in said


def test_by_an_older_schema(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    """The id of a schema, which is not the subject's latest one: each record by its own, to that one."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    number = _registered(registry, f"{topic}-value", _fields())
    produce(servers, topic, map(Sent, _written(registry, topic, _fields("a"), [{"id": 1, "a": "x"}])))
    run(servers, tmp_path, topic, formats=(_avro(registry, schema_id=number),))
    assert _rows(tmp_path) == [{"id": 1}]
    assert run(servers, tmp_path, topic, formats=(_avro(registry, schema_id=number),)).runs == []
