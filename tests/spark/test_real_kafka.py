"""Source and sink at Apache Kafka, with confluent-kafka on the other side."""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import timezone
from typing import Any

import pytest
from chispa import assert_df_equality
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession
from pyspark.sql.functions import col, lit

from spark_klog.columns.schema import WITHOUT_HEADERS
from spark_klog.spark.options import source_options
from spark_klog.spark.read.source import FilteringBatchQueryReader
from spark_klog.spark.read.stream import RangePartition
from spark_klog.spark.versions import LessThan
from tests.support.servers.kafka import NEWEST, OTHERS_OF_KRAFT
from tests.support.servers.shared_kafka import SharedKafkas

from .conftest import SparkLog
from .support import (
    KAFKA_SCHEMA_WITH_HEADERS,
    Sent,
    consume,
    create_topic,
    delete_records,
    error_of,
    expected_rows,
    mixed_values,
    offsets_of,
    produce,
    read,
    values,
    wait_for,
)

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("one_attempt")]

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
SECONDS = 60


@pytest.fixture(
    scope="module",
    params=[
        NEWEST,
        *(pytest.param(version, marks=pytest.mark.test_all("version")) for version in ("3.9.1", *OTHERS_OF_KRAFT)),
    ],
)
def servers(request: pytest.FixtureRequest, shared_kafkas: SharedKafkas) -> str:
    """A broker of Apache Kafka."""
    return shared_kafkas.get(request.param).bootstrap_servers


def test_batch_read(spark: SparkSession, servers: str, topic: str) -> None:
    create_topic(servers, topic, len(CODECS))
    sent: list[Sent] = []
    for partition, codec in enumerate(CODECS):
        records = mixed_values(200, partition)
        produce(servers, topic, records, compression_type=codec)
        sent += records
    found = read(spark, servers, subscribe=topic, includeHeaders=True)
    wanted = spark.createDataFrame(expected_rows(topic, sent), KAFKA_SCHEMA_WITH_HEADERS)
    assert_df_equality(found.orderBy("partition", "offset"), wanted)


@pytest.mark.parametrize(
    "codec", [pytest.param(codec, marks=pytest.mark.test_all("codec")) for codec in CODECS[:-1]] + ["zstd"]
)
def test_batch_write(spark: SparkSession, servers: str, topic: str, codec: str) -> None:
    create_topic(servers, topic, 3)
    records = [record for partition in range(2) for record in mixed_values(200, partition)]
    rows = spark.createDataFrame(expected_rows(topic, records), KAFKA_SCHEMA_WITH_HEADERS)
    writer = rows.select("key", "value", "headers").write.format("klog").mode("append")
    options = {"kafka.bootstrap.servers": servers, "kafka.compression.type": codec, "topic": topic}
    writer.options(**options).save()
    contents = Counter((record.key, record.value, record.headers) for record in records)
    assert Counter((record.key, record.value, record.headers) for record in consume(servers, topic)) == contents


def test_log_append_time(spark: SparkSession, servers: str, topic: str) -> None:
    create_topic(servers, topic, **{"message.timestamp.type": "LogAppendTime"})
    produce(servers, topic, values(20), compression_type="gzip")
    wanted = [(record.offset, record.timestamp_type, record.timestamp) for record in consume(servers, topic)]
    frame = read(spark, servers, subscribe=topic).orderBy("offset")
    found = frame.selectExpr("offset", "timestampType", "unix_millis(timestamp) as ms").collect()
    assert [tuple(row) for row in found] == wanted
    assert {kind for _, kind, _ in wanted} == {1}


def test_transactions(spark: SparkSession, servers: str, topic: str) -> None:
    create_topic(servers, topic, 2)
    producers: list[Producer] = []
    number = 0

    def transaction(end: str) -> None:
        nonlocal number
        settings = {"bootstrap.servers": servers, "transactional.id": f"{topic}-{len(producers)}"}
        producer = Producer(settings | {"compression.type": CODECS[len(producers) % len(CODECS)]})
        producers.append(producer)
        producer.init_transactions(SECONDS)
        for _ in range(2):
            producer.begin_transaction()
            for _ in range(25):
                producer.produce(topic, f"{end}-{number}".encode(), partition=number % 2)
                number += 1
            assert producer.flush(SECONDS) == 0
            if end == "open":
                return
            (producer.commit_transaction if end == "commit" else producer.abort_transaction)(SECONDS)

    for end in ("commit", "abort", "commit", "abort", "open"):
        transaction(end)
        produce(servers, topic, [Sent(b"plain-%d" % partition, partition=partition) for partition in range(2)])

    def seen(level: str) -> tuple[list[Any], list[Any]]:
        theirs = [(r.partition, r.offset, r.value) for r in consume(servers, topic, isolation_level=level)]
        frame = read(spark, servers, subscribe=topic, **{"kafka.isolation.level": level})
        ours = frame.select("partition", "offset", "value").collect()
        return sorted((row.partition, row.offset, bytes(row.value)) for row in ours), theirs

    for level in ("read_committed", "read_uncommitted"):
        ours, theirs = seen(level)
        assert ours == theirs
        kinds = Counter(value.split(b"-")[0] for _, _, value in ours)
        aborted = {b"abort": 100, b"open": 25} if level == "read_uncommitted" else {}
        plain = 10 if level == "read_uncommitted" else 8  # the last ones come after the open transaction
        assert kinds == {b"commit": 100, b"plain": plain, **aborted}

    producers[-1].commit_transaction(SECONDS)
    wait_for(lambda: len(consume(servers, topic, isolation_level="read_committed")) == 135, "the commit")
    ours, theirs = seen("read_committed")
    assert ours == theirs


def known(servers: str, topic: str) -> set[tuple[str, int]]:
    found = AdminClient({"bootstrap.servers": servers}).list_topics(topic, timeout=10).topics[topic].partitions
    return {(topic, partition) for partition, entry in found.items() if entry.leader >= 0}


def test_deleted_records(spark: SparkSession, servers: str, topic: str, spark_log: SparkLog) -> None:
    create_topic(servers, topic)
    produce(servers, topic, values(30))
    delete_records(servers, topic, {0: 15})
    # A batch query starts at the log's start by default.
    assert offsets_of(read(spark, servers, subscribe=topic)) == [(topic, 0, offset) for offset in range(15, 30)]
    old = {"subscribe": topic, "startingOffsets": json.dumps({topic: {"0": 3}})}
    lost = f"{topic}-0: wanted [3, 30), available [15, 30)"
    assert lost in error_of(lambda: read(spark, servers, **old).collect())
    assert offsets_of(read(spark, servers, failOnDataLoss=False, **old)) == [
        (topic, 0, offset) for offset in range(15, 30)
    ]
    assert f"records can't be read (failOnDataLoss is not true): {lost}" in spark_log.text()


@pytest.mark.parametrize(("kind", "end"), [("LogAppendTime", 10), ("CreateTime", 30)])
def test_an_upper_bound_of_time_counts_with_log_append_time(
    spark: SparkSession, servers: str, topic: str, kind: str, end: int
) -> None:
    """With create time a record before the bound may follow one after it, so the range is not cut."""
    create_topic(servers, topic, **{"message.timestamp.type": kind})
    for wave in range(3):
        now = time.time_ns() // 1_000_000
        produce(servers, topic, [record._replace(timestamp=now) for record in values(10, 10 * wave)])
        time.sleep(0.05)
    frame = read(spark, servers, subscribe=topic)
    bound = next(row.timestamp for row in frame.orderBy("offset").collect() if row.offset == 10)
    expected = [(topic, 0, offset) for offset in range(10)]
    assert offsets_of(frame.where(col("timestamp") < lit(bound))) == expected
    name = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(name, "true")
    try:
        assert offsets_of(read(spark, servers, subscribe=topic).where(col("timestamp") < lit(bound))) == expected
    finally:
        spark.conf.unset(name)
    options = source_options({"kafka.bootstrap.servers": servers, "subscribe": topic}, streaming=False)
    reader = FilteringBatchQueryReader(options, WITHOUT_HEADERS)
    late = LessThan(("timestamp",), bound.astimezone(timezone.utc))
    assert list(reader.pushFilters([late])) == [late]
    [planned] = reader.partitions()
    assert isinstance(planned, RangePartition)
    assert planned.ranges == ((topic, 0, 0, end),)
