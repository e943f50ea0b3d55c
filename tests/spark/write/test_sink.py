"""Writes, read back by confluent-kafka."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from spark_klog.broker.faults import Drop, ErrorAnswer, Fault
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError
from spark_klog.records.formats.batch import iter_batches
from spark_klog.spark.read.source import KlogDataSource
from tests.spark.support import (
    HEADERS_TYPE,
    Seen,
    Sent,
    consume,
    create_topic,
    error_of,
    needs_admission_control,
    produce,
    producer_ids,
    values,
)

CODEC_IDS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
IN_EACH_RUN = [("none", BinaryType()), ("zstd", StringType())]
SECONDS = 60

# Nothing here is about a second attempt of a task.
pytestmark = pytest.mark.usefixtures("one_attempt")


def write(frame: DataFrame, servers: str, mode: str = "append", **options: str) -> None:
    writer = frame.write.format("klog").option("kafka.bootstrap.servers", servers)
    writer.options(**options).mode(mode).save()


def pairs(records: list[Seen]) -> list[tuple[bytes | None, bytes | None]]:
    return sorted(((record.key, record.value) for record in records), key=repr)


def codecs_on_disk(cluster: EmbeddedCluster, topic: str) -> set[int]:
    logs = (cluster.data_dir / "broker-0").glob(f"{topic}-[0-9]*/*.log")
    return {header.codec_id for log in logs for header, _ in iter_batches(log.read_bytes())}


@pytest.mark.parametrize(
    ("codec", "kind"),
    [
        pytest.param(
            codec,
            kind,
            id=f"{codec}-{kind.simpleString()}",
            marks=[] if (codec, kind) in IN_EACH_RUN else pytest.mark.test_all("codec"),
        )
        for codec in CODEC_IDS
        for kind in (StringType(), BinaryType())
    ],
)
def test_keys_values_and_compression(
    spark: SparkSession, cluster: EmbeddedCluster, servers: str, topic: str, codec: str, kind: Any
) -> None:
    create_topic(servers, topic, 3)
    rows: list[Any] = [(f"key-{n % 5}" if n % 4 else None, f"välue {n} " * 5 if n % 3 else None) for n in range(200)]
    schema = StructType([StructField("key", StringType()), StructField("value", StringType())])
    frame = spark.createDataFrame(rows, schema).select(*(col(name).cast(kind).alias(name) for name in ("key", "value")))
    write(frame, servers, topic=topic, **{"kafka.compression.type": codec})
    wanted = [tuple(None if cell is None else cell.encode() for cell in row) for row in rows]
    assert pairs(consume(servers, topic)) == sorted(wanted, key=repr)
    assert codecs_on_disk(cluster, topic) == {CODEC_IDS[codec]}


def test_acks(spark: SparkSession, servers: str, topic: str) -> None:
    create_topic(servers, topic)
    write(spark.range(50).selectExpr("cast(id as string) as value"), servers, topic=topic, **{"kafka.acks": "0"})
    assert Counter(record.value for record in consume(servers, topic)) == {b"%d" % n: 1 for n in range(50)}


def test_topic_column_and_option(spark: SparkSession, servers: str, topic: str) -> None:
    names = [f"{topic}-{letter}" for letter in "abc"]
    for name in names:
        create_topic(servers, name, 2)
    frame = spark.createDataFrame([(names[n % 2], f"{n}") for n in range(20)], "topic string, value string")
    write(frame, servers)
    write(frame, servers, topic=names[2])
    found = [{record.value for record in consume(servers, name)} for name in names]
    assert found[0] == {b"%d" % n for n in range(0, 20, 2)}
    assert found[1] == {b"%d" % n for n in range(1, 20, 2)}
    assert found[2] == found[0] | found[1]


def test_partition_column(spark: SparkSession, servers: str, topic: str) -> None:
    """Columns of other names are not written, whatever their types."""
    create_topic(servers, topic, 4)
    frame = spark.range(40).selectExpr(
        "cast(id % 3 as int) as partition", "'same' as key", "cast(id as string) as value", "id", "true as flag"
    )
    write(frame, servers, topic=topic)
    found = {(record.partition, record.value) for record in consume(servers, topic)}
    assert found == {(n % 3, b"%d" % n) for n in range(40)}


def test_order_within_a_partition(spark: SparkSession, servers: str, topic: str) -> None:
    create_topic(servers, topic, 2)
    frame = spark.range(0, 20_000, 1, 1).selectExpr("cast(id % 7 as string) as key", "cast(id as string) as value")
    write(frame, servers, topic=topic, **{"kafka.batch.size": "5000", "kafka.max.request.size": "20000"})
    by_key: dict[bytes | None, list[int]] = {}
    for record in consume(servers, topic):
        assert record.value is not None
        by_key.setdefault(record.key, []).append(int(record.value))
    assert by_key == {b"%d" % key: list(range(key, 20_000, 7)) for key in range(7)}


def test_headers(spark: SparkSession, servers: str, topic: str) -> None:
    create_topic(servers, topic)
    rows = [
        (b"0", [("a", b"1"), ("ü", None), ("a", b"")]),
        (b"1", None),
        (b"2", []),
    ]
    schema = StructType([StructField("value", BinaryType()), StructField("headers", HEADERS_TYPE)])
    write(spark.createDataFrame(rows, schema), servers, topic=topic)
    assert {record.value: record.headers for record in consume(servers, topic)} == {
        b"0": (("a", b"1"), ("ü", None), ("a", b"")),
        b"1": (),
        b"2": (),
    }


def test_keys_go_where_librdkafka_puts_them(spark: SparkSession, servers: str, topic: str) -> None:
    keys = [f"key-{n}" * (n % 5) + "ü" * (n % 3) for n in range(300)]
    for name in ("ours", "theirs"):
        create_topic(servers, f"{topic}-{name}", 7)
    write(
        spark.createDataFrame([(key, key) for key in keys], "key string, value string"), servers, topic=f"{topic}-ours"
    )
    produce(
        servers,
        f"{topic}-theirs",
        [Sent(key.encode(), key.encode(), partition=-1) for key in keys],
        partitioner="murmur2_random",
    )
    ours, theirs = (
        Counter((record.key, record.partition) for record in consume(servers, f"{topic}-{name}") if record.key)
        for name in ("ours", "theirs")
    )
    assert ours == theirs
    assert len({partition for _, partition in ours}) == 7


def test_timestamp_column(spark: SparkSession, servers: str, topic: str) -> None:
    """Timestamps become milliseconds, whatever the session's time zone; null becomes the time of writing."""
    create_topic(servers, topic)
    before = time.time_ns() // 1_000_000
    frame = spark.sql(
        "select cast(id as string) as value, "
        "if(id = 2, null, timestamp_micros(1700000000123456 + id * 1000)) as timestamp from range(3)"
    )
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kathmandu")
    try:
        write(frame, servers, topic=topic)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    found = {record.value: record.timestamp for record in consume(servers, topic)}
    assert (found[b"0"], found[b"1"]) == (1_700_000_000_123, 1_700_000_000_124)
    assert before <= found[b"2"] <= time.time_ns() // 1_000_000


def test_unknown_topics(spark: SparkSession, servers: str, topic: str) -> None:
    """The broker creates topics if a producer's metadata request allows it; the sink's requests do not."""
    names = [f"{topic}-{letter}" for letter in "ab"]
    frame = spark.createDataFrame([(names[n % 2], f"{n}") for n in range(20)], "topic string, value string")
    text = error_of(lambda: write(frame.coalesce(1), servers))
    assert "UNKNOWN_TOPIC_OR_PARTITION" in text
    assert f"topics {names[0]}, {names[1]}" in text
    assert not set(names) & set(AdminClient({"bootstrap.servers": servers}).list_topics(timeout=30).topics)
    for _ in range(2):  # tasks may race to create the topics; the second write finds them
        write(frame.repartition(4), servers, createTopics="3")
    for name, start in zip(names, (0, 1), strict=True):
        found = AdminClient({"bootstrap.servers": servers}).list_topics(name, timeout=30).topics[name]
        assert len(found.partitions) == 3
        assert Counter(r.value for r in consume(servers, name)) == {b"%d" % n: 2 for n in range(start, 20, 2)}


def test_no_rows(spark: SparkSession, servers: str, topic: str) -> None:
    create_topic(servers, topic)
    none = spark.createDataFrame([], "value string")
    write(none, servers, topic=topic)
    assert consume(servers, topic) == []
    assert "UNKNOWN_TOPIC_OR_PARTITION" in error_of(lambda: write(none, servers, topic=f"{topic}-x"))


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ("'x' as key", {"topic": "t"}, "no column 'value': the columns are key"),
        ("id as value", {"topic": "t"}, "column 'value' must be string or binary, not bigint: cast it"),
        ("1 as key, 'x' as value", {"topic": "t"}, "column 'key' must be string or binary, not int: cast it"),
        ("'x' as value", {}, "no topic to write to: set the option 'topic' or add a column 'topic'"),
        ("'x' as value, 1 as topic", {}, "column 'topic' must be string, not int: cast it"),
        ("'x' as value, id as partition", {"topic": "t"}, "column 'partition' must be integer, not bigint: cast it"),
        ("'x' as value, id as timestamp", {"topic": "t"}, "column 'timestamp' must be timestamp, not bigint: cast it"),
        (
            "'x' as value, 'k' as key, 'l' as key",
            {"topic": "t"},
            "there are 2 columns 'key': rename or drop all but one",
        ),
        (
            "'x' as value, array('a') as headers",
            {"topic": "t"},
            "column 'headers' must be array<struct<key:string,value:binary>>, not array<string>: cast it",
        ),
        (
            "'x' as value",
            {"topic": "t", "topics": "t"},
            "unknown option 'topics'; did you mean subscribe (to read",
        ),
        ("'x' as value", {"subscribe": "t"}, "option subscribe is for reading"),
        ("'x' as value", {"topic": "t", "kafka.acks": "some"}, "acks=some: set 0, 1, -1 or all"),
    ],
)
def test_refused(spark: SparkSession, columns: str, options: dict[str, str], message: str) -> None:
    """Make the writer as Spark does, which takes a Python process for each."""
    schema = spark.range(1).selectExpr(*columns.split(", ")).schema
    source = KlogDataSource({"kafka.bootstrap.servers": "127.0.0.1:9", **options})
    with pytest.raises(ConfigError) as failed:
        source.writer(schema, overwrite=False)
    assert message in str(failed.value)


def test_refused_by_way_of_spark(spark: SparkSession, servers: str) -> None:
    frame = spark.range(1).selectExpr("'x' as value", "array('a') as headers")
    message = "column 'headers' must be array<struct<key:string,value:binary>>, not array<string>: cast it"
    assert message in error_of(lambda: write(frame, servers, topic="t"))


def test_overwrite_is_refused(spark: SparkSession, servers: str, topic: str) -> None:
    frame = spark.range(1).selectExpr("'x' as value")
    text = error_of(lambda: write(frame, servers, "overwrite", topic=topic))
    assert 'a topic can\'t be overwritten: use mode("append")' in text


def stream_of(spark: SparkSession, servers: str, topic: str) -> DataFrame:
    reader = spark.readStream.format("klog").option("kafka.bootstrap.servers", servers)
    options = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "100"}
    return reader.options(**options, includeHeaders="true").load()


@needs_admission_control
def test_stream(spark: SparkSession, cluster: EmbeddedCluster, servers: str, topic: str, tmp_path: Path) -> None:
    """Each record is written once, in few micro-batches or many, and the tasks of all share producers."""
    source, target = f"{topic}-in", f"{topic}-out"
    create_topic(servers, source, 2)
    create_topic(servers, target, 3)

    def run() -> None:
        writer = stream_of(spark, servers, source).select("key", "value", "headers").writeStream.format("klog")
        options = {"kafka.bootstrap.servers": servers, "topic": target, "kafka.compression.type": "lz4"}
        query = (
            writer.options(**options, checkpointLocation=str(tmp_path))
            .queryName("sink")
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(SECONDS)

    sent = [Sent(b"%d" % n, b"k%d" % (n % 9), n % 2, headers=(("n", b"%d" % n),) * (n % 3)) for n in range(500)]
    for part in (sent[:300], sent[300:]):
        produce(servers, source, part)
        run()
    found = consume(servers, target)
    assert Counter((record.key, record.value, record.headers) for record in found) == {
        (record.key, record.value, record.headers): 1 for record in sent
    }
    assert codecs_on_disk(cluster, target) == {CODEC_IDS["lz4"]}
    # ten tasks ran, two at a time
    assert 1 <= len(producer_ids(servers, target, 3)) <= 4


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (["key"], {"topic": "t"}, "no column 'value'"),
        (["value"], {}, "no topic to write to"),
        (["value"], {"topic": "t", "nonsense": "x"}, "unknown option 'nonsense'"),
    ],
)
def test_stream_refused(columns: list[str], options: dict[str, str], message: str) -> None:
    """Make the writer as Spark does, which takes a Python process for each."""
    schema = StructType([StructField(name, BinaryType()) for name in columns])
    source = KlogDataSource({"kafka.bootstrap.servers": "127.0.0.1:9", "checkpointLocation": "/x", **options})
    with pytest.raises(ConfigError) as failed:
        source.streamWriter(schema, overwrite=False)
    assert message in str(failed.value)


def test_stream_refused_by_way_of_spark(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    create_topic(servers, topic)
    produce(servers, topic, values(1))

    def run() -> None:
        writer = stream_of(spark, servers, topic).select("key").writeStream.format("klog").option("topic", "t")
        writer = writer.options(**{"kafka.bootstrap.servers": servers, "checkpointLocation": str(tmp_path)})
        query = writer.trigger(availableNow=True).start()
        try:
            query.awaitTermination(SECONDS)
        finally:
            query.stop()

    assert "no column 'value'" in error_of(run)


@pytest.mark.test_all("long")
@pytest.mark.parametrize("guarantee", ["at-least-once", "exactly-once"])
def test_a_stream_without_records_finds_that_its_topic_is_missing(
    spark: SparkSession, servers: str, topic: str, tmp_path: Path, guarantee: str
) -> None:
    create_topic(servers, topic)
    target = f"{topic}-{guarantee}"

    def run(**more: str) -> None:
        writer = stream_of(spark, servers, topic).select("value").writeStream.format("klog")
        options = {"topic": target, "deliveryGuarantee": guarantee, "checkpointLocation": str(tmp_path), **more}
        query = writer.option("kafka.bootstrap.servers", servers).options(**options).start()
        try:
            query.processAllAvailable()
        finally:
            query.stop()

    assert f"topic {target} (option createTopics=PARTITIONS creates topics)" in error_of(run)
    run(createTopics="2")
    assert (
        len(AdminClient({"bootstrap.servers": servers}).list_topics(target, timeout=30).topics[target].partitions) == 2
    )


def test_answers_that_are_lost_and_errors_that_pass_write_no_row_twice(spark: SparkSession, topic: str) -> None:
    """Rows without keys still reach all partitions."""
    faults = [Fault(Drop(after=True), api="Produce", skip=skip, count=1) for skip in (2, 30, 90)]
    faults += [Fault(ErrorAnswer("NOT_LEADER_OR_FOLLOWER"), api="Produce", skip=skip, count=1) for skip in (10, 50)]
    with EmbeddedCluster(brokers=2, faults=faults) as cluster:
        servers = cluster.bootstrap_servers
        create_topic(servers, topic, 4)
        frame = spark.range(0, 20_000, 1, 2).selectExpr("lpad(id, 100, '0') as value")
        write(frame, servers, topic=topic, **{"kafka.batch.size": "2000", "kafka.max.request.size": "4000"})
        assert all(cluster.faults_fired().values())
        there = consume(servers, topic)
    assert Counter(record.value for record in there) == {b"%0100d" % n: 1 for n in range(20_000)}
    placed = Counter(record.partition for record in there)
    # the distribution depends on timing: a partition gets no rows while its leader is unknown
    assert len(placed) == 4, placed
