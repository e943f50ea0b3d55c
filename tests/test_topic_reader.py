"""`spark_klog.read`: what it gives pyarrow, pandas and DuckDB, where it begins and ends, and when it lets go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import confluent_kafka
import duckdb
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spark_klog
from spark_klog.client import Admin, Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import (
    ConfigError,
    ConnectionFailed,
    KlogError,
    OffsetOutOfRange,
    PartitionsMismatch,
    ProtocolError,
    ReaderClosed,
    RequestTimedOut,
    StartAfterEnd,
)
from tests.support.brokers.faults import error, silent, sound
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.clients.topics import make_topic
from tests.support.servers.any_broker import serving
from tests.support.servers.kafka import NEWEST
from tests.support.servers.shared_kafka import SharedKafkas

PARTITIONS = 3
RECORDS = 3000
#: The time of record n is so many ms later, and n minutes.
FIRST = datetime(2026, 11, 21, 10, 0, tzinfo=timezone.utc)
UNKNOWN_TOPIC = 3


def minute(number: int) -> datetime:
    return FIRST + timedelta(minutes=number)


@pytest.fixture(scope="module")
def clicks(cluster: EmbeddedCluster) -> str:
    """A topic that librdkafka has written: record n is in partition n modulo PARTITIONS, at minute n."""
    make_topic(cluster.bootstrap_servers, "clicks", PARTITIONS)
    producer = confluent_kafka.Producer({"bootstrap.servers": cluster.bootstrap_servers, "compression.type": "lz4"})
    for number in range(RECORDS):
        key, headers = (None if number % 7 == 0 else b"k%d" % number), [("n", b"%d" % number)] if number % 2 else None
        time = int(minute(number).timestamp() * 1000)
        producer.produce("clicks", b"v%d" % number, key, number % PARTITIONS, timestamp=time, headers=headers)
    assert producer.flush(30) == 0
    return "clicks"


def numbers(cluster: EmbeddedCluster, *arguments: Any, **named: Any) -> list[int]:
    """The numbers of the records that a read has, sorted."""
    with spark_klog.read("clicks", *arguments, bootstrap_servers=cluster.bootstrap_servers, **named) as reader:
        return sorted(int(value.as_py()[1:]) for batch in reader for value in batch["value"])


def connections(servers: str) -> int:
    port = int(servers.rpartition(":")[2])
    there = psutil.Process().net_connections()
    return sum(bool(one.raddr) and one.raddr.port == port and one.status == psutil.CONN_ESTABLISHED for one in there)


def test_all_records_of_all_partitions(cluster: EmbeddedCluster, clicks: str) -> None:
    columns = ["offset", "key", "value", "partition", "topic", "timestamp", "timestampType", "headers"]
    reader = spark_klog.read(clicks, columns=columns, bootstrap_servers=cluster.bootstrap_servers)
    assert isinstance(reader, pa.RecordBatchReader)
    table = reader.read_all()
    table.validate(full=True)
    assert table.schema.names == columns
    rows = table.to_pylist()
    for partition in range(PARTITIONS):
        assert [row["offset"] for row in rows if row["partition"] == partition] == list(range(RECORDS // PARTITIONS))
    for row in rows:
        number = row["offset"] * PARTITIONS + row["partition"]
        assert row == {
            "offset": row["offset"],
            "key": None if number % 7 == 0 else b"k%d" % number,
            "value": b"v%d" % number,
            "partition": row["partition"],
            "topic": clicks,
            "timestamp": minute(number),
            "timestampType": 0,
            "headers": [{"key": "n", "value": b"%d" % number}] if number % 2 else None,
        }


def test_who_takes_a_reader_as_it_is(cluster: EmbeddedCluster, clicks: str, tmp_path: Path) -> None:
    def read() -> pa.RecordBatchReader:
        return spark_klog.read(clicks, columns=["partition", "value"], bootstrap_servers=cluster.bootstrap_servers)

    assert len(read().read_pandas()) == RECORDS
    reader = read()
    assert duckdb.sql("SELECT partition, count(*) FROM reader GROUP BY 1 ORDER BY 1").fetchall() == [
        (partition, RECORDS // PARTITIONS) for partition in range(PARTITIONS)
    ]
    assert reader
    with read() as reader, pq.ParquetWriter(tmp_path / "clicks.parquet", reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)
    assert pq.read_table(tmp_path / "clicks.parquet").num_rows == RECORDS
    assert pa.RecordBatchReader.from_stream(read()).read_all().num_rows == RECORDS


@pytest.mark.parametrize(
    ("start", "end", "first", "last"),
    [
        ("earliest", "latest", 0, RECORDS),
        (minute(700), minute(900), 700, 900),
        ("2026-11-21T10:10:00Z", "2026-11-21T11:20:00+01:00", 10, 20),
        ("-10", "latest", RECORDS - 10 * PARTITIONS, RECORDS),
        (5, 7, 5 * PARTITIONS, 7 * PARTITIONS),
        ({"clicks": "earliest"}, 2, 0, 2 * PARTITIONS),
        ({"clicks": -2}, {"clicks": -1}, 0, RECORDS),
        ({"clicks": {0: 990, "1": 990, "2": 990}}, {"clicks": "LATEST"}, 990 * PARTITIONS, RECORDS),
        ('{"clicks": -2}', '{"clicks": {"0": 1, "1": 1, "2": 1}}', 0, PARTITIONS),
        (datetime.now(timezone.utc) + timedelta(days=9999), "latest", RECORDS, RECORDS),
        ("latest", "latest", RECORDS, RECORDS),
    ],
)
def test_where_a_read_begins_and_ends(
    cluster: EmbeddedCluster, clicks: str, start: Any, end: Any, first: int, last: int
) -> None:
    assert clicks
    assert numbers(cluster, start, end) == list(range(first, last))


@pytest.mark.peer
@pytest.mark.parametrize("version", [NEWEST, pytest.param("0.10.2.2", marks=pytest.mark.test_all("version"))])
def test_topics_of_kafka(version: str, server_dir: Path, shared_kafkas: SharedKafkas, topic: str) -> None:
    with serving(version, server_dir, shared_kafkas) as servers:
        make_topic(servers, topic, 2)
        make_topic(servers, f"{topic}-short", 30)
        producer = confluent_kafka.Producer({"bootstrap.servers": servers, "compression.type": "lz4"})
        for number in range(4000):
            time = int(minute(number).timestamp() * 1000)
            producer.produce(topic, b"%d" % number, partition=number % 2, timestamp=time)
        for number in range(60):
            producer.produce(f"{topic}-short", b"%d" % number, partition=number % 30)
        assert producer.flush(30) == 0

        def values(*arguments: Any) -> list[int]:
            found = spark_klog.read(*arguments, bootstrap_servers=servers).read_all()["value"]
            return sorted(int(value) for value in found.to_pylist())

        assert values(topic) == list(range(4000))
        assert values(f"{topic}-short") == list(range(60))
        assert values(topic, minute(100), minute(200)) == list(range(100, 200))
        assert values([topic, f"{topic}-short"], {topic: "latest", f"{topic}-short": "earliest"}) == list(range(60))


def test_a_start_in_the_future(cluster: EmbeddedCluster, clicks: str, caplog: pytest.LogCaptureFixture) -> None:
    assert numbers(cluster, start="2999-01-01T00:00:00Z") == []
    assert "start is in the future, and no record is as late" in caplog.text
    caplog.clear()
    assert numbers(cluster, start="latest") == []
    assert caplog.text == ""


def test_a_read_ends_where_the_partitions_ended_when_it_began(cluster: EmbeddedCluster, topic: str) -> None:
    make_topic(cluster.bootstrap_servers, topic, 1)
    settings = {"bootstrap.servers": cluster.bootstrap_servers}
    with Producer(settings) as producer:
        producer.send(topic, b"before").result(10)
        reader = spark_klog.read(topic, settings=settings)
        recent = spark_klog.read(topic, "-1h", settings=settings)
        producer.send(topic, b"after").result(10)
    assert reader.read_all()["value"].to_pylist() == recent.read_all()["value"].to_pylist() == [b"before"]


def test_aborted_and_open_transactions(cluster: EmbeddedCluster, topic: str) -> None:
    make_topic(cluster.bootstrap_servers, topic, 1)
    servers = cluster.bootstrap_servers
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, "transactional.id": topic})
    producer.init_transactions(30)
    for value in ("aborted", "committed", "open"):
        producer.begin_transaction()
        producer.produce(topic, value)
        producer.flush(30)
        if value == "aborted":
            producer.abort_transaction(30)
        elif value == "committed":
            producer.commit_transaction(30)

    def values(level: str) -> list[bytes]:
        reader = spark_klog.read(topic, bootstrap_servers=servers, settings={"isolation.level": level})
        return list(reader.read_all()["value"].to_pylist())

    try:
        assert values("read_committed") == [b"committed"]
        assert values("read_uncommitted") == [b"aborted", b"committed", b"open"]
    finally:
        producer.abort_transaction(30)


def test_several_topics_of_many_short_partitions(cluster: EmbeddedCluster, topic: str) -> None:
    settings = {"bootstrap.servers": cluster.bootstrap_servers}
    names = [f"{topic}-a", f"{topic}-b"]
    with Producer(settings) as producer:
        for name in names:
            make_topic(cluster.bootstrap_servers, name, 40)
            for partition in range(1, 40):
                for number in range(partition):
                    producer.send(name, b"%s %d %d" % (name.encode(), partition, number), partition=partition)
    rows = spark_klog.read(names, columns=["topic", "partition", "offset", "value"], settings=settings).read_all()
    found = sorted(row["value"] for row in rows.to_pylist())
    assert found == sorted(
        b"%s %d %d" % (name.encode(), p, n) for name in names for p in range(1, 40) for n in range(p)
    )
    for row in rows.to_pylist():
        assert row["value"] == f"{row['topic']} {row['partition']} {row['offset']}".encode()


@pytest.fixture
def scripted() -> Iterator[ScriptedCluster]:
    with ScriptedCluster({"t": 1}) as brokers:
        for number in range(20):
            brokers.append("t", 0, [b"%d" % number] * 100)
        yield brokers


def scripted_read(brokers: ScriptedCluster, **settings: Any) -> pa.RecordBatchReader:
    small = {"max.partition.fetch.bytes": 1000, "request.timeout.ms": 3000}
    return spark_klog.read("t", bootstrap_servers=brokers.bootstrap_servers, settings=small | settings)


def test_the_connections_are_closed_at_the_end(scripted: ScriptedCluster) -> None:
    servers = scripted.bootstrap_servers
    reader = scripted_read(scripted)
    assert connections(servers)
    assert sum(batch.num_rows for batch in reader) == 2000
    assert connections(servers) == 0
    with pytest.raises(StopIteration):
        reader.read_next_batch()


@pytest.mark.parametrize("is_begun", [True, False])
def test_the_connections_are_closed_with_the_reader(cluster: EmbeddedCluster, clicks: str, is_begun: bool) -> None:
    servers = cluster.bootstrap_servers
    before = connections(servers)
    with spark_klog.read(clicks, bootstrap_servers=servers) as reader:
        if is_begun:
            reader.read_next_batch()
        else:
            assert connections(servers) > before
    assert connections(servers) == before
    with pytest.raises(ReaderClosed):
        reader.read_next_batch()
    reader.close()
    reader = spark_klog.read(clicks, bootstrap_servers=servers)
    assert connections(servers) > before
    del reader
    assert connections(servers) == before


def test_a_broker_that_falls_silent_is_an_error_in_time(scripted: ScriptedCluster) -> None:
    reader = scripted_read(scripted)
    scripted.on("Fetch", sound(), sound())
    scripted.always("Fetch", silent())
    with pytest.raises((RequestTimedOut, ConnectionFailed)) as caught:
        reader.read_all()
    assert isinstance(caught.value, KlogError)
    assert connections(scripted.bootstrap_servers) == 0
    with pytest.raises(ReaderClosed):
        reader.read_next_batch()


def test_an_interrupt_ends_a_read_at_once(scripted: ScriptedCluster) -> None:
    reader = scripted_read(scripted, **{"request.timeout.ms": 60_000})
    scripted.on("Fetch", sound())
    scripted.always("Fetch", silent())
    began = time.monotonic()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        reader.read_all()
    assert time.monotonic() - began < 20
    assert connections(scripted.bootstrap_servers) == 0
    with pytest.raises(ReaderClosed):
        reader.read_next_batch()


def test_no_more_is_fetched_than_is_read() -> None:
    """A batch is full at 8 MiB. One fetch is sent ahead; others wait until somebody reads."""
    with ScriptedCluster({"t": 1}) as brokers:
        for _ in range(30):
            brokers.append("t", 0, [bytes(1_000_000)])
        with scripted_read(brokers, **{"max.partition.fetch.bytes": 1_000_000}) as reader:
            assert brokers.count("Fetch") == 0
            rows = reader.read_next_batch().num_rows
            assert rows < 12
            assert brokers.count("Fetch") <= rows + 3


def test_a_topic_that_is_deleted_meanwhile(scripted: ScriptedCluster) -> None:
    reader = scripted_read(scripted)
    scripted.always("Fetch", error(UNKNOWN_TOPIC))
    with pytest.raises(ProtocolError, match="UNKNOWN_TOPIC_OR_PARTITION"):
        reader.read_all()


def test_a_passing_failure_is_retried(scripted: ScriptedCluster) -> None:
    not_leader = 6
    reader = scripted_read(scripted)
    scripted.on("Fetch", sound(), error(not_leader), sound(), error(not_leader))
    assert reader.read_all()["value"].to_pylist() == [b"%d" % number for number in range(20) for _ in range(100)]


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"topics": []}, ConfigError, "at least one topic"),
        ({"topics": "a b"}, ConfigError, "illegal topic name"),
        ({"topics": "nowhere"}, ProtocolError, "topic nowhere: UNKNOWN_TOPIC_OR_PARTITION"),
        ({"columns": []}, ConfigError, "at least one column"),
        ({"columns": ["valeu"]}, ConfigError, "no such columns: valeu"),
        ({"start": "yesterday"}, ConfigError, "^start='yesterday' must be earliest, .*, or an ISO time with its zone$"),
        ({"start": "2026-11-21T10:00:00"}, ConfigError, "names no time zone"),
        ({"end": datetime(2026, 11, 21)}, ConfigError, "end=2026-11-21 00:00:00 names no time zone"),
        ({"start": "group"}, ConfigError, "a read has no group"),
        ({"start": -5}, ConfigError, "start='-5' is that many before the end"),
        ({"start": 1.5}, ConfigError, "start=1.5 must be"),
        ({"start": True}, ConfigError, "start=True must be"),
        ({"start": {"clicks": {"0": 1}}}, PartitionsMismatch, "] start must name .* missing: clicks-1, clicks-2"),
        ({"end": {"clicks": "latest", "views": "latest"}}, PartitionsMismatch, "not read: topic views"),
        ({"start": {"clicks": minute(1)}}, ConfigError, "topic clicks has .2026-11-21 10:01:00"),
        ({"start": {}}, ConfigError, "must be a JSON object with one entry per topic"),
        ({"start": {"clicks": "first"}}, ConfigError, 'topic clicks has "first": give an offset for each partition'),
        ({"start": 10_000}, OffsetOutOfRange, "offset 10000 of clicks-0 .* holds \\[0, 1000\\)"),
        ({"end": 10_000}, OffsetOutOfRange, "clicks-0"),
        ({"start": 5, "end": 4}, StartAfterEnd, "clicks-0 from 5 to 4"),
        ({"start": minute(10), "end": minute(5)}, StartAfterEnd, "start lies after end"),
        ({"cluster": "prod"}, ConfigError, "give only one of bootstrap_servers and cluster$"),
        (
            {"settings": {"bootstrap.servers": "other:1"}},
            ConfigError,
            "only one of bootstrap_servers and bootstrap.servers",
        ),
        ({"settings": {"sasl.password": "s3cret", "group": "g"}}, ConfigError, "unknown client setting 'group'"),
        ({"settings": {"isolation_level": "read_committed"}}, ConfigError, "isolation.level"),
    ],
)
def test_errors_of_the_call(
    cluster: EmbeddedCluster, clicks: str, arguments: dict[str, Any], kind: type[Exception], text: str
) -> None:
    servers = cluster.bootstrap_servers
    before = connections(servers)
    with pytest.raises(kind, match=text):
        spark_klog.read(**{"topics": clicks, "bootstrap_servers": servers, **arguments})
    assert connections(servers) == before


def test_records_that_are_deleted_before_they_are_read(cluster: EmbeddedCluster, topic: str) -> None:
    make_topic(cluster.bootstrap_servers, topic, 1)
    settings = {"bootstrap.servers": cluster.bootstrap_servers}
    with Producer(settings) as producer:
        producer.send(topic, b"v").result(10)
        producer.send(topic, b"w").result(10)
    reader = spark_klog.read(topic, settings=settings)
    with Admin(settings) as admin:
        admin.delete_records({(topic, 0): 1})
    with pytest.raises(OffsetOutOfRange, match="holds \\[1, 2\\)"):
        reader.read_all()


def test_named_clusters(cluster: EmbeddedCluster, clicks: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "clusters.toml"
    path.write_text(f'[local]\n"bootstrap.servers" = "{cluster.bootstrap_servers}"\n[unnamed]\n"client.id" = "x"\n')
    monkeypatch.setenv("KLOG_CONFIG", str(path))
    assert spark_klog.read(clicks, cluster="local").read_all().num_rows == RECORDS
    with pytest.raises(ConfigError, match=r"bootstrap\.servers is required"):
        spark_klog.read(clicks, cluster="unnamed")
    with pytest.raises(ConfigError, match="no cluster 'prod'"):
        spark_klog.read(clicks, cluster="prod")


def test_the_package_needs_no_pyarrow_and_the_read_says_that_it_does() -> None:
    code = """
import sys
import spark_klog
assert "pyarrow" not in sys.modules
sys.modules["pyarrow"] = None
try:
    spark_klog.read("clicks")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "spark_klog.read needs pyarrow, which is not installed: pip install 'spark-klog[spark]'\n"
