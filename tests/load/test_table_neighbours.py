"""Tables of loads beside others: Spark between runs, two loads at once, topics that change between runs."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.transforms import DayTransform

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError
from spark_klog.files import open_folder
from spark_klog.load.audit import status
from spark_klog.load.journal import paths
from spark_klog.load.run import LoadOptions, MaxBad, load
from spark_klog.load.settings import VALUES, WriteSettings
from spark_klog.schemas.column_format import ColumnFormat
from spark_klog.tables.opening import open_table
from tests.load.change_source import KEYED, ChangeSource, offsets_of, rows_of
from tests.load.support import InProcess, Unlocked, expected, race, run
from tests.load.tables import CATALOG, NAME, Kind, Lake, check_each_once, make_lake, places
from tests.spark.support import Sent, consume, create_topic, delete_records, delete_topic, produce, set_topic, values
from tests.support.runs.soak import SOAK, in_soak
from tests.support.spark.spark_tables import SparkTables

_KINDS = pytest.mark.parametrize("kind", ["delta", "iceberg"])
_SECONDS = 60


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> Lake:
    return make_lake(kind, tmp_path, monkeypatch)


def _orphans(lake: Lake) -> set[str]:
    """The files of attempts that the table does not have."""
    table = open_table(lake.address)
    there = {path for path in open_folder(table.location).paths_below("") if paths.token_of(path)}
    return there - {item.path for item in table.files()}


@pytest.mark.test_all("long")
@_KINDS
def test_two_loads_race(cluster: EmbeddedCluster, topic: str, lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again, without locks: whoever loses is told so, and each record is there once."""
    rounds = 20 if SOAK else 5
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    monkeypatch.setattr("spark_klog.load.run.locked", Unlocked)
    options = LoadOptions({"bootstrap.servers": servers}, [topic], lake.address, max_task_records=20)
    lost: list[str] = []
    assert not lake.exists()  # pyiceberg makes the tables of its catalog, which two can't do at once

    for number in range(rounds):
        produce(servers, topic, values(60, start=number * 60, partitions=2))
        lost += race(options)
        sent = 60 * (number + 1)
        check_each_once(lake, topic, sent)
        load(options, InProcess())
        assert check_each_once(lake, topic, sent) == sent
        load(options, InProcess())
        assert not _orphans(lake)
    assert status(lake.address).findings == []
    assert lost
    assert all("another run" in one or "run again" in one.lower() or "another attempt" in one for one in lost), lost


@pytest.mark.peer
@in_soak  # slices: tables/test_delta_spark.py and tables/test_iceberg_spark.py
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_spark_between_runs(cluster: EmbeddedCluster, topic: str, tmp_path: Path, lake: Lake) -> None:
    """It appends, compacts, and removes old versions with their files: the load goes on, and nobody loses a row."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    name = f"delta.`{lake.uri}`" if lake.kind == "delta" else f"{CATALOG}.{NAME}"
    row = "null, null, 'theirs', 9, {}, current_timestamp(), 0, null"
    if lake.kind == "delta":
        begin = ["SET spark.databricks.delta.retentionDurationCheck.enabled=false"]
        begin.append("SET spark.sql.sources.parallelPartitionDiscovery.parallelism=2")  # VACUUM has 10,000 tasks
        care = [f"OPTIMIZE {name}", f"VACUUM {name} RETAIN 0 HOURS"]
    else:
        begin = [f"SET `spark.sql.catalog.{CATALOG}.jdbc.init-catalog-tables`=false"]  # its open result locks SQLite
        later = "older_than => TIMESTAMP '2100-01-01'"
        care = [
            f"CALL {CATALOG}.system.rewrite_data_files(table => 'db.clicks', options => map('rewrite-all', 'true'))",
            f"CALL {CATALOG}.system.expire_snapshots(table => 'db.clicks', {later}, retain_last => 1)",
        ]
    with SparkTables(lake.kind, tmp_path / "spark", CATALOG, lake.warehouse) as spark:
        for statement in begin:
            spark.do(statement)
        for number in range(4):
            produce(servers, topic, values(40, start=number * 40, partitions=2))
            assert run(servers, lake.address, topic, max_task_records=10).runs == [number + 1]
            if lake.kind == "iceberg":
                spark.sql(f"REFRESH TABLE {name}")
            spark.sql(f"INSERT INTO {name} VALUES ({row.format(number)})")
            for statement in () if number % 2 else care:
                spark.do(statement)
            wanted = [*expected(topic, dict.fromkeys(range(2), 20 * (number + 1)))]
            wanted = sorted([*wanted, *(("theirs", 9, offset) for offset in range(number + 1))])
            assert places(spark.sql(f"SELECT topic, partition, offset FROM {name}")) == wanted
            for reader, read in lake.readers().items():
                assert places(read()) == wanted, reader
    assert status(lake.address).findings == []
    assert run(servers, lake.address, topic).runs == []


_AVRO = {"type": "record", "name": "Row", "fields": [{"name": "at", "type": "long"}, {"name": "day", "type": "int"}]}
_JSON_SCHEMA = {"type": "object", "properties": {name: {"type": "integer"} for name in ("at", "day")}}
_OF_VALUES = WriteSettings(table_columns=VALUES)


@_KINDS
def test_numbers_for_columns_of_times(cluster: EmbeddedCluster, topic: str, lake: Lake) -> None:
    """Another has made the table: numbers, whose unit nobody knows, are refused by name, and times are taken."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b'{"at": 1700000000000, "day": 19000}')])
    columns = pa.schema([("at", pa.timestamp("us", tz="UTC")), ("day", pa.date32())])
    if lake.kind == "delta":
        DeltaTable.create(lake.uri, columns)
    else:
        lake.catalog.create_namespace("db")
        lake.catalog.create_table(NAME, columns)
    numbers = "at bigint, day int"
    ways: list[dict[str, Any]] = [
        {"settings": replace(_OF_VALUES, schema=numbers)},
        {"settings": WriteSettings(upsert_key="day", schema=numbers)},
        {"settings": _OF_VALUES, "formats": (ColumnFormat("value", "avro", text=json.dumps(_AVRO)),)},
        {"settings": _OF_VALUES, "formats": (ColumnFormat("value", "json-schema", text=json.dumps(_JSON_SCHEMA)),)},
    ]
    for way in ways:
        with pytest.raises(LoadError, match=r"at is timestamp.* in the table") as caught:
            run(servers, lake.address, topic, **way)
        assert "day is date" in str(caught.value)
    produce(servers, topic, [Sent(b'{"at": "2023-11-14T22:13:20Z", "day": "2022-01-08"}')])
    times = replace(_OF_VALUES, schema="at timestamp, day date")
    loaded = run(servers, lake.address, topic, settings=times, max_bad=MaxBad(1))
    assert (loaded.runs, loaded.bad) == ([1], 1), "a number is no time in JSON, either"
    at = datetime(2023, 11, 14, 22, 13, 20, tzinfo=timezone.utc)
    for reader, read in lake.readers().items():
        assert read().select(["at", "day"]).to_pylist() == [{"at": at, "day": date(2022, 1, 8)}], reader


@_KINDS
def test_an_upsert_into_a_partitioned_table(cluster: EmbeddedCluster, topic: str, lake: Lake) -> None:
    """That others have made: a row that changes its partition leaves the old one."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    columns = pa.schema([("id", pa.int64()), ("date", pa.date32())])
    if lake.kind == "delta":
        DeltaTable.create(lake.uri, columns, partition_by=["date"])
    else:
        lake.catalog.create_namespace("db")
        with lake.catalog.create_table(NAME, columns).update_spec() as spec:
            spec.add_field("date", DayTransform())
    settings = WriteSettings(upsert_key="id", schema="id bigint, date date")
    first = [Sent(b'{"id": %d, "date": "2026-01-0%d"}' % (number, number % 3 + 1)) for number in range(9)]
    for sent in (first, [Sent(b'{"id": 0, "date": "2026-01-05"}'), Sent(b'{"id": 1}')]):
        produce(servers, topic, sent)
        run(servers, lake.address, topic, settings=settings)
    wanted = {number: date(2026, 1, number % 3 + 1) for number in range(9)} | {0: date(2026, 1, 5), 1: None}
    for reader, read in lake.readers().items():
        if (lake.kind, reader) != ("delta", "duckdb"):  # which reads the files, where Delta has no partition columns
            assert {row["id"]: row["date"] for row in read().select(["id", "date"]).to_pylist()} == wanted, reader
        assert len(read()) == 9


@_KINDS
def test_a_topic_that_loses_records_and_is_made_anew(cluster: EmbeddedCluster, topic: str, lake: Lake) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, values(20))
    run(servers, lake.address, topic)
    produce(servers, topic, values(20, start=20))
    delete_records(servers, topic, {0: 30})
    assert run(servers, lake.address, topic, fail_on_loss=False).runs == [2]
    first = expected(topic, {0: 20}) + [(topic, 0, offset) for offset in range(30, 40)]
    delete_topic(servers, topic)
    create_topic(servers, topic)
    produce(servers, topic, values(5))
    assert run(servers, lake.address, topic, fail_on_loss=False).runs == [3]
    for reader, read in lake.readers().items():
        assert places(read()) == sorted(first + expected(topic, {0: 5})), reader
    assert len(status(lake.address).findings) == 2


@pytest.mark.test_all("long")
@_KINDS
def test_a_topic_that_is_compacted_between_runs(topic: str, lake: Lake, server_dir: Path) -> None:
    """A table of changes has the source's rows, although the log has no longer all changes."""
    cleaner = {
        "log.cleaner.backoff.ms": "50",
        "log.cleaner.min.cleanable.ratio": "0.01",
        "internal.segment.bytes": "4096",
    }
    with EmbeddedCluster(data_dir=server_dir / "cluster", settings=cleaner) as cluster:
        source = ChangeSource(cluster.bootstrap_servers, topic, 40)
        set_topic(source.servers, topic, "cleanup.policy", "compact")
        gone = 0
        for number in range(6):
            source.change(300)
            if number % 3 != 1:  # runs that are far behind, too
                run(source.servers, lake.address, topic, settings=KEYED, max_task_records=50)
                for reader, read in lake.readers().items():
                    assert rows_of(read()) == source.rows(offsets_of(lake.address, topic)), reader
            gone = sum(source.end.values()) - len(consume(source.servers, topic))
        assert gone > 300
        assert offsets_of(lake.address, topic) == source.end
        assert status(lake.address).findings == []
