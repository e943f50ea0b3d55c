"""Batch reads of records that confluent-kafka produced."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from chispa import assert_df_equality
from pyspark.sql import SparkSession
from pyspark.sql.functions import col, length
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from spark_klog.columns.schema import WITHOUT_HEADERS
from spark_klog.errors import DataLossError
from spark_klog.spark.options import source_options
from spark_klog.spark.read.ranges import OffsetRange
from spark_klog.spark.read.source import BatchQueryReader
from spark_klog.spark.read.stream import StreamReader
from spark_klog.spark.read.tasks import read_ranges
from spark_klog.spark.versions import ReadAllAvailable
from tests.spark.conftest import SparkLog
from tests.spark.support import (
    KAFKA_SCHEMA,
    KAFKA_SCHEMA_WITH_HEADERS,
    Sent,
    create_topic,
    delete_topic,
    error_of,
    expected_rows,
    mixed_values,
    offsets_of,
    produce,
    read,
    values,
    wait_for,
)
from tests.support.servers.kafka import free_port

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
NOW = 1_700_000_000_000


@pytest.fixture(scope="module")
def two_topics(servers: str) -> str:
    """batch-a with offsets [0, 5) in each of two partitions, batch-b with [0, 3) in one."""
    create_topic(servers, "batch-a", 2)
    create_topic(servers, "batch-b", 1)
    produce(servers, "batch-a", values(10, partitions=2))
    produce(servers, "batch-b", values(3))
    return servers


def part(topic: str, partition: int, start: int, end: int) -> list[tuple[str, int, int]]:
    return [(topic, partition, offset) for offset in range(start, end)]


ALL_A = part("batch-a", 0, 0, 5) + part("batch-a", 1, 0, 5)
ALL_B = part("batch-b", 0, 0, 3)


@pytest.mark.parametrize(
    ("option", "schema"),
    [(None, KAFKA_SCHEMA), ("false", KAFKA_SCHEMA), ("true", KAFKA_SCHEMA_WITH_HEADERS)],
)
def test_schema_is_that_of_sparks_kafka_connector(
    spark: SparkSession, two_topics: str, option: str | None, schema: StructType
) -> None:
    options = {"includeHeaders": option} if option else {}
    assert read(spark, two_topics, subscribe="batch-a", **options).schema == schema


def test_what_was_produced_with_every_codec(spark: SparkSession, servers: str, topic: str) -> None:
    create_topic(servers, topic, len(CODECS))
    sent: list[Sent] = []
    for partition, codec in enumerate(CODECS):
        records = mixed_values(300, partition, NOW + 1000 * partition)
        produce(servers, topic, records, compression_type=codec)
        sent += records
    wanted = spark.createDataFrame(expected_rows(topic, sent), KAFKA_SCHEMA_WITH_HEADERS)
    found = read(spark, servers, subscribe=topic, includeHeaders=True)
    assert_df_equality(found.orderBy("partition", "offset"), wanted)
    assert_df_equality(read(spark, servers, subscribe=topic).orderBy("partition", "offset"), wanted.drop("headers"))


def test_a_record_larger_than_a_fetch(spark: SparkSession, servers: str, topic: str) -> None:
    create_topic(servers, topic)
    produce(servers, topic, [Sent(bytes([65 + number]) * 300_000) for number in range(4)])
    frame = read(spark, servers, subscribe=topic, **{"kafka.max.partition.fetch.bytes": 1000})
    assert [row[0] for row in frame.orderBy("offset").select(length("value")).collect()] == [300_000] * 4


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"subscribe": "batch-a"}, ALL_A),
        ({"subscribe": " batch-b , batch-a "}, ALL_A + ALL_B),
        ({"subscribePattern": "^batch-.$"}, ALL_A + ALL_B),
        ({"subscribePattern": "^batch-[b-z]$"}, ALL_B),
        ({"subscribePattern": "atch-[ab]$"}, ALL_A + ALL_B),
        ({"subscribePattern": "^atch-[ab]"}, []),
        ({"assign": '{"batch-a":[1],"batch-b":[0]}'}, part("batch-a", 1, 0, 5) + ALL_B),
        (
            {
                "subscribe": "batch-a",
                "startingOffsets": '{"batch-a":{"0":-2,"1":3}}',
                "endingOffsets": '{"batch-a":{"0":2,"1":-1}}',
            },
            part("batch-a", 0, 0, 2) + part("batch-a", 1, 3, 5),
        ),
        (
            {"assign": '{"batch-a":[0]}', "startingOffsets": '{"batch-a":{"0":5}}', "endingOffsets": "latest"},
            [],
        ),
    ],
)
def test_what_is_read(
    spark: SparkSession, two_topics: str, options: dict[str, str], wanted: list[tuple[str, int, int]]
) -> None:
    assert offsets_of(read(spark, two_topics, **options)) == wanted


def test_fewer_columns_in_another_order(spark: SparkSession, two_topics: str) -> None:
    schema = StructType([StructField("offset", KAFKA_SCHEMA["offset"].dataType), StructField("value", BinaryType())])
    reader = spark.read.format("klog").schema(schema)
    frame = reader.options(**{"kafka.bootstrap.servers": two_topics, "subscribe": "batch-b"}).load()
    assert frame.schema == schema
    assert [(row.offset, bytes(row.value)) for row in frame.orderBy("offset").collect()] == [
        (0, b"v0"),
        (1, b"v1"),
        (2, b"v2"),
    ]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (StructField("value", StringType()), "column value is binary, but the schema says string: read it as it is"),
        (StructField("vlaue", BinaryType()), "no such columns: vlaue; the known ones are key, value"),
    ],
)
def test_a_wrong_schema_is_refused(spark: SparkSession, two_topics: str, field: StructField, message: str) -> None:
    reader = spark.read.format("klog").schema(StructType([field]))
    options = {"kafka.bootstrap.servers": two_topics, "subscribe": "batch-b"}
    assert message in error_of(lambda: reader.options(**options).load().collect())


def test_a_schema_with_a_column_twice_is_refused(spark: SparkSession, two_topics: str) -> None:
    fields = [StructField("value", BinaryType()), StructField("value", BinaryType())]
    reader = spark.read.format("klog").schema(StructType(fields))
    options = {"kafka.bootstrap.servers": two_topics, "subscribe": "batch-b"}
    told = error_of(lambda: reader.options(**options).load().collect())
    assert "column value more than once" in told or "COLUMN_ALREADY_EXISTS" in told


def test_a_start_that_resolves_after_the_end_is_refused(spark: SparkSession, servers: str, topic: str) -> None:
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b"v", timestamp=1000 * number) for number in range(1, 11)])
    options = {"startingTimestamp": "6000", "endingOffsets": f'{{"{topic}": {{"0": 3}}}}'}
    told = error_of(lambda: read(spark, servers, subscribe=topic, **options).collect())
    assert "[KLOG_START_OFFSET_AFTER_END_OFFSET]" in told
    assert f"startingTimestamp lies after endingOffsets: {topic}-0 from 5 to 3" in told


def test_a_topic_that_goes_before_its_task_runs(servers: str) -> None:
    settings = {"kafka.bootstrap.servers": servers, "kafka.request.timeout.ms": "3000", "subscribe": "gone"}
    ranges = [OffsetRange("gone", 0, 3, 9)]
    with pytest.raises(DataLossError, match="gone-0 was deleted"):
        list(read_ranges(source_options(settings, streaming=False), ranges, WITHOUT_HEADERS))
    settings["failOnDataLoss"] = "false"
    assert list(read_ranges(source_options(settings, streaming=False), ranges, WITHOUT_HEADERS)) == []


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_topic_that_is_made_anew_before_its_task_runs(servers: str, topic: str, is_streaming: bool) -> None:
    create_topic(servers, topic)
    produce(servers, topic, values(10))

    def task(mode: str) -> Callable[[], list[pa.RecordBatch]]:
        settings = {"kafka.bootstrap.servers": servers, "kafka.request.timeout.ms": "2000", "subscribe": topic}
        settings |= {"startingOffsets": "earliest", "failOnDataLoss": mode}
        options = source_options(settings, streaming=is_streaming)
        if not is_streaming:
            batch = BatchQueryReader(options, WITHOUT_HEADERS)
            (partition,) = batch.partitions()
            return lambda: list(batch.read(partition))
        stream = StreamReader(options, WITHOUT_HEADERS)
        (partition,) = stream.partitions({}, stream.latestOffset({}, ReadAllAvailable()))
        stream.stop()
        return lambda: list(stream.read(partition))

    fails, goes_on = task("true"), task("false")
    assert sum(batch.num_rows for batch in task("true")()) == 10
    delete_topic(servers, topic)
    create_topic(servers, topic)
    produce(servers, topic, values(10, start=50))
    with pytest.raises(
        DataLossError, match=rf"{topic}-0: wanted \[0, 10\) of a deleted topic; a new topic has its name"
    ):
        fails()
    assert goes_on() == []


@pytest.fixture(params=["true", "false"])
def pushdown(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[None]:
    name = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(name, request.param)
    yield
    spark.conf.unset(name)


@pytest.mark.usefixtures("pushdown")
def test_filters(spark: SparkSession, two_topics: str) -> None:
    frame = read(spark, two_topics, subscribe="batch-a")
    filtered = frame.where((col("partition") == 1) & (col("offset") >= 2) & col("key").isNull())
    assert offsets_of(filtered) == part("batch-a", 1, 2, 5)


def test_limit_ends_early_without_an_error(spark: SparkSession, servers: str, topic: str, spark_log: SparkLog) -> None:
    create_topic(servers, topic, 2)
    produce(servers, topic, values(20_000, partitions=2), batch_size=2000)
    frame = read(spark, servers, subscribe=topic, **{"kafka.max.partition.fetch.bytes": 5000})
    assert len(frame.limit(3).collect()) == 3
    assert frame.count() == 20_000  # the workers' connections still work
    assert "ERROR" not in spark_log.text()
    assert "Traceback" not in spark_log.text()


def test_an_empty_topic(spark: SparkSession, servers: str, topic: str) -> None:
    create_topic(servers, topic, 3)
    frame = read(spark, servers, subscribe=topic)
    assert frame.count() == 0
    assert frame.schema == KAFKA_SCHEMA


BEYOND = [
    # start and end offset in batch-b, which has [0, 3); the range that the error names; the readable rows
    ("9", "12", "[9, 12)", []),
    ("1", "12", "[1, 12)", part("batch-b", 0, 1, 3)),
    ("9", "-1", "offset 9", []),
]


@pytest.mark.parametrize(("start", "end", "wanted", "rest"), BEYOND)
def test_offsets_beyond_the_log(
    spark: SparkSession,
    two_topics: str,
    spark_log: SparkLog,
    start: str,
    end: str,
    wanted: str,
    rest: list[tuple[str, int, int]],
) -> None:
    options = {
        "subscribe": "batch-b",
        "startingOffsets": f'{{"batch-b":{{"0":{start}}}}}',
        "endingOffsets": f'{{"batch-b":{{"0":{end}}}}}',
    }
    lost = f"batch-b-0: wanted {wanted}, available [0, 3)"
    text = error_of(lambda: read(spark, two_topics, **options).collect())
    assert f"records can't be read: {lost} (not there yet); set failOnDataLoss=false" in text
    assert "failOnDataLoss is not true" not in spark_log.text()
    assert offsets_of(read(spark, two_topics, failOnDataLoss=False, **options)) == rest
    assert f"records can't be read (failOnDataLoss is not true): {lost}" in spark_log.text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subscribe": "batch-b,nosuch"}, "topic nosuch does not exist at 127.0.0.1:"),
        ({"assign": '{"batch-b":[0,4,5]}'}, "topic batch-b has no partition 4, 5"),
        ({"subscribe": "batch-b", "startingOfsets": "earliest"}, "did you mean startingOffsets?"),
        ({"subscribe": "batch-b", "assign": '{"batch-b":[0]}'}, "found assign and subscribe"),
        (
            {"subscribe": "batch-b", "startingOffsets": '{"batch-b":{"1":0}}'},
            "option startingOffsets must name exactly the partitions that are read: missing: batch-b-0; "
            "not read: batch-b-1",
        ),
    ],
)
def test_refused(spark: SparkSession, two_topics: str, options: dict[str, str], message: str) -> None:
    assert message in error_of(lambda: read(spark, two_topics, **options).collect())


def test_an_unknown_topic_is_not_made(spark: SparkSession, servers: str) -> None:
    for _ in range(2):
        assert "topic never does not exist" in error_of(lambda: read(spark, servers, subscribe="never").collect())


def test_no_broker(spark: SparkSession) -> None:
    address = f"127.0.0.1:{free_port()}"
    soon = {"kafka.socket.connection.setup.timeout.ms": 1000}
    text = error_of(lambda: read(spark, address, subscribe="t", **soon).collect())
    assert address in text
    assert "ConnectionFailed" in text


@pytest.mark.parametrize("ending", ["latest", "json"])
def test_writing_while_a_query_is_planned_is_no_loss(servers: str, topic: str, ending: str) -> None:
    create_topic(servers, topic)
    options = {"kafka.bootstrap.servers": servers, "subscribe": topic}
    if ending == "json":
        options["endingOffsets"] = json.dumps({topic: {"0": -1}})
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            produce(servers, topic, values(200, number), linger_ms=0, batch_num_messages=1)
            number += 200

    writer = threading.Thread(target=write)
    writer.start()
    try:
        ends: list[int] = []

        def saw_the_log_grow() -> bool:
            reader = BatchQueryReader(source_options(options, streaming=False), WITHOUT_HEADERS)
            ends.extend(item.end for partition in reader.partitions() for item in partition.ranges)
            return len(set(ends)) >= 10

        wait_for(saw_the_log_grow, "ten lengths of the log")
    finally:
        stop.set()
        writer.join()
    assert ends == sorted(ends)
