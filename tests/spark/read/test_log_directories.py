"""Data directories read without a broker, compared with the same topics read through a broker."""

from __future__ import annotations

import gzip
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from confluent_kafka import Producer
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.functions import col, lit
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from spark_klog.columns.schema import FULL, WITHOUT_HEADERS
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, CorruptBatchError, DataLossError
from spark_klog.files.arrow import ArrowFolder
from spark_klog.log.stored.directory import Directory, StoredDirectories
from spark_klog.spark.options import source_options
from spark_klog.spark.read.source import BatchQueryReader
from spark_klog.spark.write.sink_options import sink_options
from tests.spark.conftest import SparkLog
from tests.spark.support import (
    KAFKA_SCHEMA,
    Sent,
    create_topic,
    error_of,
    mixed_values,
    offsets_of,
    produce,
    read,
    values,
    wait_for,
)
from tests.support.brokers.batches import make_batch, read_records, walk
from tests.support.servers.kafka import Kafka

NOW = 1_700_000_000_000
# Nothing here is about a second attempt of a task.
pytestmark = pytest.mark.usefixtures("one_attempt")
CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
#: Small segments, and no retention: the records are years old.
SMALL = {"internal.segment.bytes": "12000", "log.index.interval.bytes": "500", "log.retention.ms": "-1"}
GOLDEN = Path(__file__).parents[2] / "data"


def load(spark: SparkSession, path: Path | str, **options: Any) -> DataFrame:
    """A DataFrame over a data directory."""
    reader = spark.read.format("klog").options(**{name: str(value) for name, value in options.items()})
    return reader.load(str(path))


def same(spark: SparkSession, path: Path | str, servers: str, **options: Any) -> int:
    """Check that directory and broker give the same rows; return their number."""
    stored, fetched = load(spark, path, **options), read(spark, servers, **options)
    assert stored.schema == fetched.schema
    rows = sorted(stored.collect(), key=_place)
    assert rows == sorted(fetched.collect(), key=_place)
    return len(rows)


def _place(row: Row) -> tuple[str, int, int]:
    return row.topic, row.partition, row.offset


def rows_without_spark(path: Path | str, schema: pa.Schema = WITHOUT_HEADERS, **options: Any) -> list[dict[str, Any]]:
    """The rows that the tasks of a query over a data directory return."""
    given = {"path": str(path)} | {name: str(value) for name, value in options.items()}
    reader = BatchQueryReader(source_options(given, streaming=False), schema)
    return [row for task in reader.partitions() for batch in reader.read(task) for row in batch.to_pylist()]


# ----- our own broker


@pytest.fixture(scope="module")
def ours(module_server_dir: Path) -> Iterator[EmbeddedCluster]:
    """A broker with many small segments; "codecs" has a partition for each codec, "more" two of plain records."""
    with EmbeddedCluster(data_dir=module_server_dir / "ours", settings=SMALL) as cluster:
        create_topic(cluster.bootstrap_servers, "codecs", len(CODECS))
        for partition, codec in enumerate(CODECS):
            for start in range(0, 600, 50):
                sent = mixed_values(50, partition, start=start, step=10)
                produce(cluster.bootstrap_servers, "codecs", sent, compression_type=codec)
        create_topic(cluster.bootstrap_servers, "more", 2)
        produce(cluster.bootstrap_servers, "more", values(20, partitions=2))
        yield cluster


@pytest.fixture(scope="module")
def folder(ours: EmbeddedCluster) -> Path:
    """The data directory of the broker, which keeps running."""
    return Path(ours.data_dir) / "broker-0"


def at(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, timezone.utc)


@pytest.mark.parametrize(
    "options",
    [
        {"subscribe": "codecs", "includeHeaders": True},
        {"subscribePattern": "^(codecs|more)$"},
        {"subscribe": "more", "startingOffsets": '{"more":{"0":3,"1":-2}}', "endingOffsets": '{"more":{"0":-1,"1":7}}'},
        {"subscribe": "codecs", "startingTimestamp": NOW + 2995, "endingTimestamp": NOW + 4001},
        {"assign": '{"codecs":[3]}', "minPartitions": 5},
        *(
            pytest.param(options, marks=pytest.mark.test_all("long"))
            for options in (
                {"assign": '{"codecs":[3,0],"more":[1]}'},
                {
                    "subscribe": "more",
                    "startingOffsetsByTimestamp": f'{{"more":{{"0":0,"1":{NOW + 10**9}}}}}',
                    "startingOffsetsByTimestampStrategy": "latest",
                },
                {"subscribe": "codecs", "startingOffsets": "-75"},
                {"subscribe": "codecs", "startingOffsets": "2023-11-14T22:13:23Z"},
                {"assign": '{"codecs":[3]}', "maxRecordsPerPartition": 130},
                {"assign": '{"codecs":[3]}', "maxBytesPerPartition": 3000},
            )
        ),
    ],
    ids=str,
)
def test_as_through_our_broker(
    spark: SparkSession, ours: EmbeddedCluster, folder: Path, options: dict[str, Any]
) -> None:
    assert len([*folder.glob("codecs-0/*.log")]) > 5
    assert same(spark, folder, ours.bootstrap_servers, **options) > 5


def test_without_a_subscription_all_topics_are_read(spark: SparkSession, ours: EmbeddedCluster, folder: Path) -> None:
    (folder / "__consumer_offsets-7").mkdir()
    shutil.copy(folder / "more-0" / f"{0:020d}.log", folder / "__consumer_offsets-7")
    try:
        assert {row[0] for row in load(spark, folder).select("topic").collect()} == {"codecs", "more"}
        assert rows_without_spark(folder, subscribePattern="offsets") == []
        assert len(rows_without_spark(folder, subscribe="__consumer_offsets")) == 10
    finally:
        shutil.rmtree(folder / "__consumer_offsets-7")
    assert load(spark, folder).schema == KAFKA_SCHEMA


def test_after_the_broker_has_stopped_or_was_killed(
    spark: SparkSession, make_cluster: Callable[..., EmbeddedCluster], topic: str, tmp_path: Path
) -> None:
    cluster = make_cluster(settings=SMALL)
    create_topic(cluster.bootstrap_servers, topic)
    for start in range(0, 600, 50):
        produce(cluster.bootstrap_servers, topic, mixed_values(50, 0, start=start, step=10))
    fetched = read(spark, cluster.bootstrap_servers, subscribe=topic, includeHeaders=True)
    expected = sorted(fetched.collect(), key=_place)
    folder = Path(cluster.data_dir) / "broker-0"
    shutil.copytree(folder, tmp_path / "live")
    cluster.stop()
    for place in (tmp_path / "live", folder):
        assert sorted(load(spark, place, includeHeaders=True).collect(), key=_place) == expected
    assert len(expected) == 600


def test_while_a_broker_writes(ours: EmbeddedCluster, folder: Path, topic: str) -> None:
    """Every read returns a prefix of the log, in order and without partial records."""
    create_topic(ours.bootstrap_servers, topic)
    stop = threading.Event()
    written = [0]

    def write() -> None:
        while not stop.is_set():
            produce(ours.bootstrap_servers, topic, values(100, written[0]))
            written[0] += 100

    writer = threading.Thread(target=write)
    writer.start()
    counts: list[int] = []
    try:

        def saw_it_grow() -> bool:
            before = written[0]
            rows = rows_without_spark(folder, subscribe=topic)
            assert [(row["offset"], row["value"]) for row in rows] == [(n, b"v%d" % n) for n in range(len(rows))]
            assert len(rows) >= before
            counts.append(len(rows))
            return len(set(counts)) >= 4

        wait_for(saw_it_grow, "four lengths of the log")
    finally:
        stop.set()
        writer.join()
    assert counts == sorted(counts)


def test_filters_are_pushed(spark: SparkSession, folder: Path) -> None:
    name = "spark.sql.python.filterPushdown.enabled"
    wanted = (col("partition") == 2) & (col("offset") >= 100) & (col("timestamp") >= lit(at(NOW + 4000)))
    expected = [("codecs", 2, offset) for offset in range(400, 600)]
    assert offsets_of(load(spark, folder, subscribe="codecs").where(wanted)) == expected
    spark.conf.set(name, "true")
    try:
        frame = load(spark, folder, subscribe="codecs").where(wanted)
        assert offsets_of(frame) == expected
        assert frame.rdd.getNumPartitions() == 1
        more = [("more", partition, offset) for partition in range(2) for offset in range(10)]
        assert offsets_of(load(spark, folder).where(col("topic") == "more")) == more
    finally:
        spark.conf.unset(name)


def test_a_schema_of_fewer_columns(spark: SparkSession, folder: Path) -> None:
    schema = StructType([StructField("offset", LongType()), StructField("value", BinaryType())])
    rows = spark.read.format("klog").schema(schema).option("subscribe", "more").load(str(folder)).collect()
    assert sorted((row.offset, bytes(row.value)) for row in rows) == sorted((n // 2, b"v%d" % n) for n in range(20))


# ----- paths


def test_addresses_of_directories(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    def offsets(address: Path | str) -> list[tuple[str, int, int]]:
        return sorted((row["topic"], row["partition"], row["offset"]) for row in rows_without_spark(address))

    for number in range(2):
        shutil.copytree(folder / f"more-{number}", tmp_path / "more" / f"more-{number}")
    expected = offsets(tmp_path / "more")
    assert len(expected) == 20
    for address in (f"file://{tmp_path}/more", f"file:{tmp_path}/more", f"{tmp_path}/more/"):
        assert offsets(address) == expected
    for number in range(2):
        shutil.copytree(folder / f"more-{number}", tmp_path / f"dir-{number}" / f"more-{number}")
    assert offsets(f"{tmp_path}/dir-0, file://{tmp_path}/dir-1") == expected
    assert offsets_of(spark.read.format("klog").option("path", f"{tmp_path}/dir-1").load()) == expected[10:]


def test_any_file_system_of_pyarrow(folder: Path) -> None:
    """File systems that the option path can't address: a subtree of another one, and one in memory."""
    inside = pafs.SubTreeFileSystem(str(folder.parent), pafs.LocalFileSystem())
    memory, _ = pafs.FileSystem.from_uri("mock:///")
    memory.create_dir("backup/more-1")
    for path in (folder / "more-1").glob("*.*"):
        with memory.open_output_stream(f"backup/more-1/{path.name}") as stream:
            stream.write(path.read_bytes())
    for filesystem, place in ((inside, folder.name), (memory, "backup")):
        directories = StoredDirectories([Directory(ArrowFolder(filesystem, "", ""), place, "somewhere")])
        assert ("more", 1) in directories.partitions()
        log = directories.open("more", 1)
        assert (log.start_offset, log.end_offset) == (0, 10)
        found = [record.value for batches in log.read(0, 10, pytest.fail) for record in read_records(batches.data)]
        assert found == [b"v%d" % number for number in range(1, 20, 2)]
        with pytest.raises(FileNotFoundError):
            ArrowFolder(filesystem, "", "").entries(f"{place}/nothing")
        with pytest.raises(FileNotFoundError):
            ArrowFolder(filesystem, "", "").open(f"{place}/nothing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kafka.bootstrap.servers": "h:1"}, "set only one of the options path and kafka.bootstrap.servers"),
        ({"kafka.group.id": "g"}, "option kafka.group.id does not apply to option path"),
        ({"kafka.fetch.max.bytes": "1"}, "option kafka.fetch.max.bytes does not apply to option path"),
        ({"startingOffsets": "group"}, "option startingOffsets=group needs brokers: log directories have no"),
        (
            {"endingOffsets": " Group "},
            "option endingOffsets=group needs brokers: log directories have no offsets of groups",
        ),
        ({"kafka.isolation.level": "some"}, "isolation.level=some: set read_uncommitted or read_committed"),
        ({"subscribe": "a", "assign": '{"a":[0]}'}, "found assign and subscribe"),
        ({"path": " , "}, "option path=' , ' names no directory"),
        ({"subscribe": "there-is-none"}, "topic there-is-none does not exist in"),
        ({"assign": '{"more":[0,5]}'}, "topic more has no partition 5"),
        ({"path": "/nowhere/at/all"}, "directory /nowhere/at/all does not exist"),
        ({"path": str(GOLDEN)}, "is not a data directory of a broker"),
        ({"path": "nothing://x"}, "'nothing://x' names no directory"),
        ({"startingOffsets": '{"more":{"0":1}}', "subscribe": "more"}, "missing: more-1"),
        ({"startingTimestamp": str(NOW + 10**10)}, r"KLOG_NO_OFFSET_FOR_TIMESTAMP"),
    ],
)
def test_what_is_refused(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BatchQueryReader(source_options({"path": str(folder)} | options, streaming=False), WITHOUT_HEADERS).partitions()
    assert message in str(caught.value)


def test_streams_and_writes_are_refused(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    def stream() -> None:
        writer = spark.readStream.format("klog").load(str(folder)).writeStream.format("noop")
        writer.option("checkpointLocation", str(tmp_path)).start().awaitTermination()

    assert "option path: only batch queries can read log directories" in error_of(stream)
    with pytest.raises(ConfigError, match="option path is for reading"):
        sink_options({"path": "/x", "kafka.bootstrap.servers": "h:1"})


# ----- many tasks, damage, loss


def large_partition(place: Path, batches: int = 110, size: int = 1_000_000) -> Path:
    """Write a partition of record batches with one record each, in two segments with indexes as Kafka writes them."""
    place.mkdir(parents=True)
    offset = 0
    for count in (batches // 2, batches - batches // 2):
        stem = place / f"{offset:020d}"
        base, position = offset, 0
        with stem.with_suffix(".log").open("wb") as log, stem.with_suffix(".index").open("wb") as index:
            for _ in range(count):
                batch = make_batch([(b"%d" % offset, bytes(size))], [NOW + offset])
                struct.pack_into(">q", batch, 0, offset)
                if position:
                    index.write(struct.pack(">ii", offset - base, position))
                position += log.write(batch)
                offset += 1
    return place


def test_a_large_partition_is_several_tasks(spark: SparkSession, tmp_path: Path) -> None:
    large_partition(tmp_path / "large-0")
    frame = load(spark, tmp_path)
    assert frame.rdd.getNumPartitions() == 3
    found = frame.selectExpr("cast(cast(key as string) as long) as number", "offset", "length(value) as size").collect()
    assert sorted((row.number, row.offset, row.size) for row in found) == [(n, n, 1_000_000) for n in range(110)]
    plan = BatchQueryReader(source_options({"path": str(tmp_path)}, streaming=False), WITHOUT_HEADERS).partitions()
    bounds = [(item.start, item.end) for part in plan for item in part.ranges]
    assert [high - low for low, high in bounds] == pytest.approx([110 / 3] * 3, abs=2)
    assert load(spark, tmp_path, minPartitions=8).rdd.getNumPartitions() == 8
    assert load(spark, tmp_path, maxBytesPerPartition=10_100_000).rdd.getNumPartitions() == 11
    assert load(spark, tmp_path, maxRecordsPerPartition=30).rdd.getNumPartitions() >= 4


def copy_of(folder: Path, tmp_path: Path, name: str = "codecs-0") -> Path:
    shutil.copytree(folder / name, tmp_path / "copy" / name)
    return tmp_path / "copy" / name


@pytest.mark.parametrize("damage", ["missing", "cut", "wrong"])
def test_indexes_need_not_be_right(folder: Path, tmp_path: Path, damage: str) -> None:
    options = {"startingTimestamp": NOW + 2000, "minPartitions": 5}
    expected = rows_without_spark(folder, assign='{"codecs":[3]}', **options)
    place = copy_of(folder, tmp_path, "codecs-3")
    for path in [*place.glob("*index")]:
        data = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(data[: len(data) // 2 + 1] if damage == "cut" else bytes(b ^ 0x15 for b in data))
    assert rows_without_spark(tmp_path / "copy", **options) == expected
    assert len(expected) == 400


def test_a_tail_that_is_cut_off(folder: Path, tmp_path: Path) -> None:
    place = copy_of(folder, tmp_path)
    last = max(place.glob("*.log"))
    data = last.read_bytes()
    first = [*walk(data)][-1].base_offset
    for size in (1, 30, len(data) - [*walk(data)][-1].position - 1):
        os.truncate(last, len(data) - size)
        assert len(rows_without_spark(tmp_path / "copy")) == first
        last.write_bytes(data)


@pytest.mark.parametrize("mode", ["fail", "skip"])
def test_a_corrupt_batch_and_a_corrupt_tail(
    spark: SparkSession, folder: Path, tmp_path: Path, spark_log: SparkLog, mode: str
) -> None:
    place = copy_of(folder, tmp_path)
    logs = sorted(place.glob("*.log"))
    data = bytearray(logs[1].read_bytes())
    batch = [*walk(bytes(data))][1]
    data[batch.position + batch.size - 1] ^= 1
    logs[1].write_bytes(data)
    options = {"badRecords": mode}
    if mode == "fail":
        assert f"codecs-0: batch of offsets {batch.base_offset}-" in error_of(load(spark, tmp_path / "copy").collect)
    else:
        found = {row.offset for row in load(spark, tmp_path / "copy", **options).select("offset").collect()}
        assert found == set(range(600)) - set(range(batch.base_offset, batch.last_offset + 1))
    logs[1].write_bytes((folder / "codecs-0" / logs[1].name).read_bytes())
    with logs[-1].open("ab") as file:
        file.write(b"garbage" * 20)
    if mode == "fail":
        assert f"{logs[-1]} at position" in error_of(load(spark, tmp_path / "copy").collect)
    else:
        assert load(spark, tmp_path / "copy", **options).count() == 600
        assert "the log ends before bytes that are not a record batch" in spark_log.text()


def test_segments_that_are_deleted_between_planning_and_reading(
    spark: SparkSession, folder: Path, tmp_path: Path
) -> None:
    place = copy_of(folder, tmp_path)
    options = {"path": str(tmp_path / "copy"), "maxRecordsPerPartition": "1000"}
    plan = BatchQueryReader(source_options(options, streaming=False), WITHOUT_HEADERS).partitions()
    assert [part.ranges for part in plan] == [(("codecs", 0, 0, 600),)]
    first, second, third, *_ = sorted(place.glob("*.log"))
    for path in (first, second):
        path.rename(f"{path}.deleted")
    start = int(third.stem)
    message = f"codecs-0: wanted [0, {start}), available [{start}, 600) (retention)"
    reader = BatchQueryReader(source_options(options, streaming=False), WITHOUT_HEADERS)
    with pytest.raises(DataLossError, match=r"KLOG_DATA_LOSS\.RETENTION") as caught:
        [*reader.read(plan[0])]
    assert message in str(caught.value)
    reader = BatchQueryReader(source_options(options | {"failOnDataLoss": "false"}, streaming=False), WITHOUT_HEADERS)
    found = [offset for batch in reader.read(plan[0]) for offset in batch.column("offset").to_pylist()]
    assert found == [*range(start, 600)]
    shutil.rmtree(place)
    reader = BatchQueryReader(source_options(options, streaming=False), WITHOUT_HEADERS)
    with pytest.raises(DataLossError, match=r"KLOG_DATA_LOSS\.DELETED.*codecs-0 was deleted"):
        [*reader.read(plan[0])]


def test_offsets_that_are_not_there(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    place = copy_of(folder, tmp_path)
    min(place.glob("*.log")).unlink()
    start = int(min(place.glob("*.log")).stem)
    given = {"assign": '{"codecs":[0]}', "startingOffsets": '{"codecs":{"0":0}}'}
    lost = f"codecs-0: wanted [0, 600), available [{start}, 600) (retention)"
    assert lost in error_of(load(spark, tmp_path / "copy", **given).collect)
    assert load(spark, tmp_path / "copy", **given, failOnDataLoss="false").count() == 600 - start
    beyond = {"assign": '{"codecs":[0]}', "endingOffsets": '{"codecs":{"0":601}}'}
    assert f"wanted [{start}, 601), available [{start}, 600) (not there yet)" in error_of(
        load(spark, tmp_path / "copy", **beyond).collect
    )


# ----- Kafka's own directories


@pytest.mark.parametrize(
    "version", [pytest.param("kafka-0.10.2.2", marks=pytest.mark.test_all("version")), "kafka-3.9.1"]
)
def test_golden_directories(spark: SparkSession, version: str) -> None:
    counts = {
        row.topic: row["count"] for row in load(spark, GOLDEN / version / "logs").groupBy("topic").count().collect()
    }
    lines = {path.stem: len(path.read_text().splitlines()) for path in (GOLDEN / version).glob("*.jsonl")}
    lines |= {"v2-transactions": 31} if version == "kafka-3.9.1" else {}
    assert counts == {topic: lines[topic] for topic in counts}
    assert len(counts) == len([*(GOLDEN / version / "logs").iterdir()])
    committed = load(spark, GOLDEN / version / "logs", **{"kafka.isolation.level": "read_committed"}).count()
    assert committed == sum(counts.values()) - (15 if version == "kafka-3.9.1" else 0)


def test_a_directory_of_kafka_07(tmp_path: Path) -> None:
    """Offsets are byte positions; messages of a compressed set share its offset. There are no keys or timestamps."""

    def message(payload: bytes, codec: int = 0) -> bytes:
        content = bytes([1, codec]) + struct.pack(">I", zlib.crc32(payload)) + payload
        return struct.pack(">i", len(content)) + content

    folder, expected, offset = tmp_path / "old-0", [], 0
    folder.mkdir()
    for number in range(4):
        stored = [message(b"%d" % number), message(gzip.compress(message(b"x%d" % number) + message(b"y")), 1)]
        expected += [(offset, b"%d" % number)]
        expected += [(offset + len(stored[0]), b"x%d" % number), (offset + len(stored[0]), b"y")]
        (folder / f"{offset:020d}.kafka").write_bytes(b"".join(stored))
        offset += sum(map(len, stored))
    for options in ({}, {"minPartitions": 3}, {"maxBytesPerPartition": 1}):
        rows = rows_without_spark(tmp_path, FULL, includeHeaders=True, **options)
        assert [(row["offset"], row["value"]) for row in rows] == expected
        names = "topic", "partition", "key", "timestampType", "headers"
        assert {tuple(row[name] for name in names) for row in rows} == {("old", 0, None, -1, None)}
    some = {
        "startingOffsets": f'{{"old":{{"0":{expected[1][0]}}}}}',
        "endingOffsets": f'{{"old":{{"0":{expected[4][0]}}}}}',
    }
    rows = rows_without_spark(tmp_path, subscribe="old", **some)
    assert [(row["offset"], row["value"]) for row in rows] == expected[1:4]
    for option, offset in (("startingOffsets", expected[1][0] - 1), ("endingOffsets", expected[3][0] + 1)):
        before = max(each for each, _ in expected if each <= offset)
        after = min(each for each, _ in expected if each > offset)
        wrong = {option: f'{{"old":{{"0":{offset}}}}}'}
        with pytest.raises(ConfigError, match=f"no message of old-0 begins at offset {offset}") as caught:
            rows_without_spark(tmp_path, subscribe="old", **wrong)
        assert f"the nearest offsets are {before} and {after}" in str(caught.value)
    path = min(folder.iterdir())
    path.write_bytes(path.read_bytes()[:10] + b"!" + path.read_bytes()[11:])
    with pytest.raises(CorruptBatchError, match="old-0: message of offset 0: CRC"):
        rows_without_spark(tmp_path)
    assert len(rows_without_spark(tmp_path, badRecords="skip")) == len(expected) - 1


@pytest.fixture(scope="module")
def kafka(module_server_dir: Path) -> Iterator[Kafka]:
    """Apache Kafka with small segments."""
    overrides = {
        "log.segment.bytes": 16384,
        "log.index.interval.bytes": 500,
        "log.cleaner.backoff.ms": 200,
        "log.cleaner.min.cleanable.ratio": 0.01,
    }
    with Kafka("3.9.1", module_server_dir / "kafka", overrides) as running:
        yield running


@pytest.mark.test_all("client")
@pytest.mark.peer
def test_transactions_of_kafka(spark: SparkSession, kafka: Kafka, topic: str) -> None:
    """Committed and aborted transactions, and an open one, over many segments, so that producer snapshots matter."""
    kafka.create_topic(topic, 2)
    producers: list[Producer] = []

    def transactions(end: str, records: int) -> None:
        settings = {"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": f"{topic}-{len(producers)}"}
        producer = Producer(settings | {"linger.ms": 0})
        producers.append(producer)
        producer.init_transactions(60)
        for _ in range(3 if end != "open" else 1):
            producer.begin_transaction()
            for number in range(records):
                producer.produce(topic, b"%s-%d " % (end.encode(), number) * 40, partition=number % 2)
                producer.flush(60)
            if end != "open":
                (producer.commit_transaction if end == "commit" else producer.abort_transaction)(60)

    def compare(level: str) -> int:
        options = {"subscribe": topic, "kafka.isolation.level": level, "minPartitions": 6}
        return same(spark, kafka.log_dir, kafka.bootstrap_servers, **options)

    for end in ("commit", "abort", "commit", "abort"):
        transactions(end, 60)
        produce(kafka.bootstrap_servers, topic, [Sent(b"plain", partition=partition) for partition in range(2)])
    assert len([*(kafka.log_dir / f"{topic}-0").glob("*.log")]) > 3
    assert compare("read_uncommitted") == 728
    assert compare("read_committed") == 368
    transactions("open", 40)
    produce(kafka.bootstrap_servers, topic, values(20, partitions=2))
    assert compare("read_committed") == 368
    assert compare("read_uncommitted") == 788
    producers[-1].abort_transaction(60)
    wait_for(lambda: read(spark, kafka.bootstrap_servers, subscribe=topic, **COMMITTED).count() == 388, "the abort")
    assert compare("read_committed") == 388


COMMITTED = {"kafka.isolation.level": "read_committed"}
