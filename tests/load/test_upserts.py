"""Loads of changes: the table equals the source's state at the offsets of its last run, whatever dies meanwhile.

SPARK_KLOG_KILLS: 1,000,000 changes of 100,000 keys with that many kills (default: 6,000 of 600, and three).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyiceberg.transforms import BucketTransform
from pyiceberg.utils.config import Config

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, LoadError
from spark_klog.files import open_folder
from spark_klog.files.arrow import ArrowFolder
from spark_klog.files.folder import LocalFolder
from spark_klog.load.audit import status
from spark_klog.load.journal import paths
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import VALUES, WriteSettings
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.schemas.column_format import ColumnFormat, RegistrySettings
from spark_klog.schemas.json_schema.ddl import parse_schema, schema_text
from spark_klog.security.config import Settings
from spark_klog.tables.changes import debezium_type
from spark_klog.tables.delta import storage_options
from spark_klog.tables.opening import open_table
from tests.load.buckets import bucket
from tests.load.change_source import KEYED, ROW, ChangeSource, offsets_of, rows_of
from tests.load.support import Killed, die, failing, kills, run
from tests.spark.support import Sent, consume, create_topic, produce, wait_for
from tests.support.clients.klog import klog
from tests.support.runs.soak import SOAK

FORMATS = ("delta", "iceberg")
BY_ID = WriteSettings(schema=ROW, upsert_key="id")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """With a catalog `local` of Iceberg."""
    properties = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/iceberg"}
    return _catalog(monkeypatch, properties)


def _catalog(monkeypatch: pytest.MonkeyPatch, properties: Mapping[str, str]) -> dict[str, str]:
    for name, value in properties.items():
        name = name.upper().replace(".", "__").replace("-", "_")
        monkeypatch.setenv(f"PYICEBERG_CATALOG__LOCAL__{name}", value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # it has read the environment at its import
    return dict(os.environ)


def address_of(kind: str, folder: Path, name: str = "rows") -> str:
    return f"delta:{folder}/{name}" if kind == "delta" else f"iceberg:local.space.{name}"


def content(address: str) -> pa.Table:
    """The table as another program reads it; one without rows, if there is none."""
    kind, _, place = address.partition(":")
    if kind == "delta":
        url, options = storage_options(place) if "://" in place else (place, {})
        is_there = DeltaTable.is_deltatable(url, options)
        return DeltaTable(url, storage_options=options).to_pyarrow_table() if is_there else pa.table({"id": []})
    catalog = load_catalog("local")
    name = place.removeprefix("local.")
    return catalog.load_table(name).scan().to_arrow() if catalog.table_exists(name) else pa.table({"id": []})


def check(source: ChangeSource, address: str) -> Mapping[str, int]:
    """The table equals the source's rows at the offsets of its last run, which are returned."""
    offsets = offsets_of(address, source.topic)
    assert rows_of(content(address)) == source.rows(offsets)
    return offsets


def test_a_table_that_is_partitioned_before_its_first_row(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any
) -> None:
    """A call without records has created it, and its user has partitioned it: it stays so."""
    source, address = ChangeSource(cluster.bootstrap_servers, topic, 30), address_of("iceberg", tmp_path)
    assert run(source.servers, address, topic, settings=KEYED).runs == []
    with load_catalog("local").load_table("space.rows").update_spec() as update:
        update.add_field("key", BucketTransform(4))
    source.change(100)
    assert run(source.servers, address, topic, settings=KEYED).runs == [1]
    check(source, address)
    [field] = load_catalog("local").load_table("space.rows").spec().fields
    assert str(field.transform) == "bucket[4]"


@pytest.mark.parametrize(
    ("kind", "step"),
    [("delta", 12), *(pytest.param(kind, 2 if SOAK else 9, marks=pytest.mark.test_all("kill")) for kind in FORMATS)],
)
def test_killed_at_each_change(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str, step: int
) -> None:
    source = ChangeSource(cluster.bootstrap_servers, topic, 30)
    source.change(200)
    number, died = 0, True
    while died:
        number += step
        address = address_of(kind, tmp_path, f"t{number}")
        try:
            with failing(LocalFolder, number, die):
                run(source.servers, address, topic, settings=KEYED, max_task_records=40)
            died = False
        except Killed:
            pass
        assert check(source, address) in ({}, source.end)
        run(source.servers, address, topic, settings=KEYED, max_task_records=40)
        assert check(source, address) == source.end
        found = status(address)
        assert (found.findings, found.unfinished, len(found.runs)) == ([], "", 1)
        assert run(source.servers, address, topic, settings=KEYED).runs == []
        location = Path(open_table(address).location.removeprefix("file://"))
        assert not list(location.glob("_klog/runs/*/changes"))
    assert number > 20


@pytest.mark.test_all("kill")
@pytest.mark.parametrize("kind", FORMATS)
def test_killed_at_each_change_in_a_bucket(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, s3_process: str, monkeypatch: Any, kind: str
) -> None:
    source = ChangeSource(cluster.bootstrap_servers, topic, 30)
    source.change(200)
    keys = {"s3.access-key-id": "key", "s3.secret-access-key": "secret", "s3.region": "us-east-1"}
    keys["s3.endpoint"] = f"http://{s3_process}"
    bucket(s3_process, "lake")
    _catalog(monkeypatch, {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db", "warehouse": "s3://lake/wh", **keys})
    number, died = 0, True
    while died:
        number += 12 if SOAK else 40
        uri = bucket(s3_process, f"upserts{number}")
        address = f"delta:{uri}" if kind == "delta" else address_of(kind, tmp_path, f"t{number}")
        try:
            with failing(ArrowFolder, number, die):
                run(source.servers, address, topic, settings=KEYED, max_task_records=40)
            died = False
        except Killed:
            pass
        assert check(source, address) in ({}, source.end)
        run(source.servers, address, topic, settings=KEYED, max_task_records=40)
        assert check(source, address) == source.end
        assert status(address).findings == []
        store = open_folder(open_table(address).location)
        assert not [path for path in store.paths_below("_klog/runs") if "/changes/" in path]
    assert number > 20


@pytest.mark.test_all("kill")
@pytest.mark.parametrize("kind", FORMATS)
def test_random_kills(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: dict[str, str], kind: str
) -> None:
    """A process that merges is killed again and again, while changes arrive."""
    rounds = kills() or 3
    count, keys = (1_000_000, 100_000) if kills() else (6_000, 600)
    source = ChangeSource(cluster.bootstrap_servers, topic, keys)
    address, chance = address_of(kind, tmp_path), random.Random(7)
    given = {"servers": source.servers, "topic": topic, "table": address}
    given |= {"settings": {"schema": ROW, "upsert_key": "key"}, "records": count // rounds}  # type: ignore[dict-item]
    command = [sys.executable, "-m", "tests.load.upsert_program", json.dumps(given)]
    seen: Mapping[str, int] = {}
    killed = attempts = 0
    longest = 2.0  # seconds of a call that nobody killed
    while killed < rounds:
        attempts += 1
        assert attempts < 10 * rounds
        if attempts <= rounds:
            source.change(count // rounds)
        begun = time.monotonic()
        with subprocess.Popen(command, env=environment) as process:
            try:
                process.wait(longest * (0.2 + 0.8 * chance.random()))
                longest = time.monotonic() - begun
                assert process.returncode == 0
            except subprocess.TimeoutExpired:
                process.kill()
                killed += 1
        offsets = check(source, address)
        assert all(offsets.get(key, 0) >= offset for key, offset in seen.items())
        seen = offsets
    deadline = time.monotonic() + 300
    while check(source, address) != source.end:
        assert time.monotonic() < deadline
        run(source.servers, address, topic, settings=KEYED)
    assert status(address).findings == []


def _debezium(*events: Any) -> list[Sent]:
    return [Sent(None if each is None else json.dumps(each).encode(), b"k") for each in events]


@pytest.mark.test_all("long")
@pytest.mark.parametrize("kind", FORMATS)
def test_debeziums_json(cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str) -> None:
    servers, address = cluster.bootstrap_servers, address_of(kind, tmp_path)
    create_topic(servers, topic)
    ada, bob = {"id": 1, "name": "Ada"}, {"id": 2, "name": "Bob"}
    settings = WriteSettings(schema=schema_text(debezium_type(parse_schema(ROW))), upsert_key="id", envelope="debezium")

    def rows(*events: Any) -> list[tuple[Any, ...]]:
        produce(servers, topic, _debezium(*events))
        run(servers, address, topic, settings=settings)
        found = content(address)
        return sorted(zip(*(found[name].to_pylist() for name in ("id", "name", "_klog_offset")), strict=True))

    assert rows(
        {"before": None, "after": ada, "source": {"lsn": 1}, "op": "r", "ts_ms": 1},
        {"schema": {"type": "struct"}, "payload": {"before": None, "after": bob, "op": "c"}},
    ) == [(1, "Ada", 0), (2, "Bob", 1)]
    # the key changes, in one event and in Debezium's two with a tombstone
    assert rows(
        {"before": ada, "after": {"id": 3, "name": "Ada"}, "op": "u"},
        {"before": bob, "after": None, "op": "d"},
        None,
        {"before": None, "after": {"id": 4, "name": "Bob"}, "op": "c"},
    ) == [(3, "Ada", 2), (4, "Bob", 5)]
    assert rows({"op": "m"}) == [(3, "Ada", 2), (4, "Bob", 5)], "a run that changes no row is one"
    assert len(status(address).runs) == 3
    assert rows({"op": "t"}, {"before": None, "after": bob, "op": "c"}) == [(2, "Bob", 8)]


def test_compaction_leaves_a_tombstone_alone(tmp_path: Path) -> None:
    """The log's cleaner has taken the deletion, whose envelope has the row, before a run has seen it."""
    settings = WriteSettings(schema=schema_text(debezium_type(parse_schema(ROW))), upsert_key="id", envelope="debezium")
    address = address_of("delta", tmp_path)
    keys = [b'{"id": 1}', b'{"schema": {"type": "struct"}, "payload": {"id": 2}}', b'{"id": 3}']

    def event(key: int, op: str) -> Sent:
        row = {"id": key + 1, "name": "a"}
        value = {"before": row if op == "d" else None, "after": None if op == "d" else row, "op": op}
        return Sent(json.dumps(value).encode(), keys[key])

    cleaner = {"log.cleaner.backoff.ms": "100", "log.cleaner.min.cleanable.ratio": "0.01"}
    with EmbeddedCluster(data_dir=tmp_path / "broker", settings=cleaner) as cluster:
        servers = cluster.bootstrap_servers
        create_topic(servers, "rows", **{"cleanup.policy": "compact", "internal.segment.bytes": "3000"})
        produce(servers, "rows", [event(key, "c") for key in range(3)])
        run(servers, address, "rows", settings=settings)
        for key in (0, 1):
            produce(servers, "rows", [event(key, "d"), Sent(None, keys[key])])
        for _ in range(60):  # the active segment is not compacted
            produce(servers, "rows", [event(2, "u")])
        wait_for(lambda: [each.key for each in consume(servers, "rows")].count(keys[0]) == 1, "compaction")
        left = [(each.offset, each.value) for each in consume(servers, "rows")]
        assert [one for one in left if one[0] < 7] == [(4, None), (6, None)]
        run(servers, address, "rows", settings=settings)
    assert content(address).select(["id", "_klog_offset"]).to_pylist() == [{"id": 3, "_klog_offset": 66}]
    assert status(address).findings == []


def _envelope(*names: str) -> dict[str, Any]:
    texts = [{"name": name, "type": ["null", "string"], "default": None} for name in names]
    row = {"type": "record", "name": "Value", "fields": [{"name": "id", "type": "int"}, *texts]}
    fields = [
        {"name": "before", "type": ["null", row], "default": None},
        {"name": "after", "type": ["null", "Value"], "default": None},
        {"name": "op", "type": "string"},
        {"name": "ts_ms", "type": ["null", "long"], "default": None},
    ]
    return {"type": "record", "name": "Envelope", "fields": fields}


_KEY = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "int"}]}


def _avro(url: str, topic: str, schema: Any, rows: Sequence[Any], field: str) -> list[bytes | None]:
    write = AvroSerializer(SchemaRegistryClient({"url": url}), json.dumps(schema))
    return [None if row is None else write(row, SerializationContext(topic, field, [])) for row in rows]


def test_debeziums_avro(cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any) -> None:
    """Tombstones delete by the record's key; a column that the database gets is one of the table."""
    servers, address = cluster.bootstrap_servers, address_of("iceberg", tmp_path)
    create_topic(servers, topic)
    settings = WriteSettings(upsert_key="key", envelope="debezium")
    with SchemaRegistry({"bootstrap.servers": servers}, "0") as registry:
        at = RegistrySettings(Settings({"url": registry.url}))
        formats = tuple(ColumnFormat(name, "avro", at, subject=f"{topic}-{name}") for name in ("key", "value"))

        def rows(schema: Any, ids: list[int], values: list[Any]) -> list[Any]:
            keys = _avro(registry.url, topic, _KEY, [{"id": one} for one in ids], MessageField.KEY)
            texts = _avro(registry.url, topic, schema, values, MessageField.VALUE)
            produce(servers, topic, [Sent(text, key) for text, key in zip(texts, keys, strict=True)])
            run(servers, address, topic, settings=settings, formats=formats, evolution="latest")
            found = (
                content(address).drop_columns(["_klog_incarnation", "_klog_partition", "_klog_timestamp"]).to_pylist()
            )
            return sorted(found, key=lambda row: row["id"])

        ada, bob = {"id": 1, "name": "Ada"}, {"id": 2, "name": "Bob"}
        created = [{"after": ada, "op": "c"}, {"after": bob, "op": "r"}, None]
        assert rows(_envelope("name"), [1, 2, 2], created) == [{**ada, "_klog_offset": 0}]
        more = {"id": 3, "name": "Cy", "mail": "cy@example.com"}
        assert rows(_envelope("name", "mail"), [3], [{"after": more, "op": "c"}]) == [
            {**ada, "mail": None, "_klog_offset": 0},
            {**more, "_klog_offset": 3},
        ]


def test_the_status_of_a_run_that_merges(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Its files are the table's, which are not counted: no 0 beside the rows that it has written."""
    address = address_of("delta", tmp_path)
    create_topic(cluster.bootstrap_servers, topic)
    produce(cluster.bootstrap_servers, topic, [Sent(b'{"id": 1, "name": "a"}', b"1")])
    run(cluster.bootstrap_servers, address, topic, settings=BY_ID)
    assert rows_of(content(address)) == [(1, "a", 0)]
    lines = [line.split() for line in klog("load", "status", address).stdout.splitlines()]
    assert lines[0] == ["run", "kind", "finished", "records", "files", "bad", "lag"]
    assert lines[1][:2] + lines[1][3:] == ["00000001", "load", "1", "-", "0", "0"]
    assert json.loads(klog("load", "status", address, "--json").stdout)["runs"][0]["files"] is None


def test_what_is_refused(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers, address = cluster.bootstrap_servers, address_of("delta", tmp_path)
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b'{"id": 1, "name": "a"}', b"1")])
    run(servers, address, topic, settings=BY_ID)
    with pytest.raises(LoadError, match="with --upsert-key id, not without --upsert-key: use"):
        run(servers, address, topic, settings=WriteSettings(schema=ROW))
    of_values = address_of("delta", tmp_path / "values")
    run(servers, of_values, topic, settings=WriteSettings(schema=ROW, table_columns=VALUES))
    with pytest.raises(LoadError, match="a load without --upsert-key, not with --upsert-key id: use"):
        run(servers, of_values, topic, settings=BY_ID)
    with pytest.raises(ConfigError, match=r"key 'id' names fields of keys or values, .*: give --value-format"):
        run(servers, address, topic, settings=WriteSettings(upsert_key="id"))
    with pytest.raises(ConfigError, match="envelope debezium is one of values with fields: give --value-format"):
        run(servers, address, topic, settings=WriteSettings(upsert_key="key", envelope="debezium"))
    with pytest.raises(ConfigError, match="an upsert key is for a table"):
        run(servers, tmp_path / "files", topic, settings=BY_ID)
    with pytest.raises(ConfigError, match="changes of several topics have no order"):
        run(servers, address, topic, "another", settings=BY_ID)
    with pytest.raises(ConfigError, match="is by the time of records"):
        WriteSettings(schema=ROW, upsert_key="id", layout="day")
    with pytest.raises(ConfigError, match="no such field, only id, name"):
        WriteSettings(schema=ROW, upsert_key="ids")


def test_records_that_are_no_changes_are_dead_letters(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers, address = cluster.bootstrap_servers, address_of("delta", tmp_path)
    create_topic(servers, topic)
    good = [Sent(b'{"id": %d, "name": "a"}' % number, b"k") for number in (1, 2)]
    produce(servers, topic, [good[0], Sent(None, b"k"), good[1]])
    with pytest.raises(LoadError, match="has 1 bad record batches or values, more than --max-bad 0"):
        run(servers, address, topic, settings=BY_ID)
    loaded = run(servers, address, topic, settings=BY_ID, max_bad=MaxBad(1))
    assert (loaded.runs, loaded.bad) == ([1], 1)
    [letters] = (tmp_path / "rows" / paths.LETTERS).iterdir()
    letter = json.loads(letters.read_text())
    assert (letter["offset"], letter["value"]) == (1, None)
    assert letter["reason"].startswith("the record has no id, which is in the key of its row")
    assert content(address)["_klog_offset"].to_pylist() == [0, 2]
    assert status(address).findings == []
