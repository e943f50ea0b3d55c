"""A query's start and end, its tasks, and its pushed filters, against records with known timestamps."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, lit

from spark_klog.columns.schema import FULL
from spark_klog.embedded import EmbeddedCluster
from spark_klog.spark.options import source_options
from spark_klog.spark.read.source import BatchQueryReader
from tests.spark.conftest import SparkLog
from tests.spark.support import Job, Sent, create_topic, error_of, offsets_of, produce, read

TOPIC = "starts"
TIME = 1_700_000_000_000
#: Partition 0 has ten records, a minute apart; partition 1 has three older ones.
RECORDS = [
    *(Sent(b"a%d" % number, partition=0, timestamp=TIME + 60_000 * number) for number in range(10)),
    *(Sent(b"b%d" % number, partition=1, timestamp=TIME - 60_000 * (3 - number)) for number in range(3)),
]


@pytest.fixture(scope="module")
def servers(cluster: EmbeddedCluster) -> str:
    create_topic(cluster.bootstrap_servers, TOPIC, 2)
    produce(cluster.bootstrap_servers, TOPIC, RECORDS)
    return cluster.bootstrap_servers


def offsets(first: range, second: range) -> list[tuple[str, int, int]]:
    return [(TOPIC, 0, offset) for offset in first] + [(TOPIC, 1, offset) for offset in second]


def both(first: int, second: int) -> str:
    return json.dumps({TOPIC: {"0": first, "1": second}})


FOURTH = TIME + 4 * 60_000
ISO = datetime.fromtimestamp(FOURTH / 1000, timezone.utc).isoformat()
LATEST = {"startingOffsetsByTimestampStrategy": "latest"}
STARTS: list[tuple[dict[str, Any], range, range]] = [
    ({"startingTimestamp": FOURTH} | LATEST, range(4, 10), range(0)),
    ({"startingTimestamp": FOURTH - 1, "startingOffsets": "earliest"} | LATEST, range(4, 10), range(0)),
    ({"startingOffsetsByTimestamp": both(FOURTH + 1, TIME - 100_000)}, range(5, 10), range(2, 3)),
    # precedence: a timestamp for all partitions, one for each, offsets
    ({"startingTimestamp": 0, "startingOffsetsByTimestamp": both(FOURTH, FOURTH)}, range(10), range(3)),
    ({"startingOffsetsByTimestamp": both(0, 0), "startingOffsets": both(9, 2)}, range(10), range(3)),
    ({"startingOffsets": both(7, -2)}, range(7, 10), range(3)),
    ({"startingOffsets": json.dumps({TOPIC: "earliest"})}, range(10), range(3)),
    ({"endingOffsets": json.dumps({TOPIC: "latest"}), "startingOffsets": both(9, 2)}, range(9, 10), range(2, 3)),
    ({"startingOffsets": "-2"}, range(8, 10), range(1, 3)),
    ({"startingOffsets": "-1000"}, range(10), range(3)),
    ({"startingOffsets": ISO}, range(4, 10), range(0)),
    ({"startingOffsets": "-10m"}, range(0), range(0)),
    ({"startingOffsets": "-5000w"}, range(10), range(3)),
    ({"endingTimestamp": FOURTH}, range(4), range(3)),
    ({"endingOffsetsByTimestamp": both(FOURTH, TIME - 60_000)}, range(4), range(2)),
    ({"endingOffsets": both(3, -1)}, range(3), range(3)),
    ({"startingOffsets": "-4", "endingOffsets": "-1"}, range(6, 9), range(2)),
]


@pytest.mark.parametrize(("options", "first", "second"), STARTS)
def test_starts_and_ends(
    spark: SparkSession, servers: str, options: dict[str, Any], first: range, second: range
) -> None:
    assert offsets_of(read(spark, servers, subscribe=TOPIC, **options)) == offsets(first, second)


def test_words_for_topics_that_are_refused(spark: SparkSession, servers: str) -> None:
    for options, text in (
        (
            {"startingOffsets": {TOPIC: "latest"}},
            f"latest (-1) in a batch query: there would be nothing to read of topic {TOPIC}",
        ),
        ({"endingOffsets": {TOPIC: "earliest"}}, "option endingOffsets can't be earliest (-2)"),
        ({"startingOffsets": {TOPIC: "earliest", "other": "earliest"}}, "not read: topic other"),
    ):
        given = {name: json.dumps(value) for name, value in options.items()}
        assert text in error_of(lambda given=given: read(spark, servers, subscribe=TOPIC, **given).collect())


def test_no_record_that_late_is_an_error_by_default(spark: SparkSession, servers: str) -> None:
    text = error_of(lambda: read(spark, servers, subscribe=TOPIC, startingTimestamp=FOURTH).collect())
    assert f"no record at or after the timestamp in {TOPIC}-1 (at {FOURTH})" in text


def test_a_start_after_all_records_is_warned_of(servers: str, caplog: pytest.LogCaptureFixture) -> None:
    """A mistyped year reads nothing; a start at some record, or in an empty topic, says nothing."""
    create_topic(servers, "unwritten", 1)
    for topic, start in ((TOPIC, ISO), ("unwritten", "2130-01-01T00:00:00Z"), (TOPIC, "2130-01-01T00:00:00Z")):
        assert caplog.messages == []
        given = {"kafka.bootstrap.servers": servers, "subscribe": topic, "startingOffsets": start}
        BatchQueryReader(source_options(given, streaming=False), FULL).partitions()
    newest = datetime.fromtimestamp(TIME / 1000 + 9 * 60, timezone.utc).isoformat(timespec="milliseconds")
    assert caplog.messages == [
        "option startingOffsets: no record at or after 2130-01-01T00:00:00.000+00:00, so that the query reads nothing; "
        f"the newest record is of {newest}"
    ]


def test_a_stream_starts_at_a_time_and_only_once(spark: SparkSession, servers: str, tmp_path: Path) -> None:
    job = Job(spark, servers, tmp_path, subscribe=TOPIC, startingTimestamp=str(FOURTH), **LATEST)
    assert sum(job.run()) == 6
    job.options["startingTimestamp"] = "0"
    assert job.run() == []
    assert offsets_of(job.result) == offsets(range(4, 10), range(0))


@pytest.mark.test_all("long")  # test_starts_and_ends has the words
def test_a_stream_starts_at_the_words_for_whole_topics(spark: SparkSession, servers: str, tmp_path: Path) -> None:
    create_topic(servers, "rewound", 2)
    produce(servers, "rewound", [Sent(b"r%d" % number, partition=number % 2) for number in range(10)])
    for start, rows in (
        ({TOPIC: "latest", "rewound": "earliest"}, 10),
        ({TOPIC: {"0": 8, "1": -1}, "rewound": "latest"}, 2),
    ):
        options = {"subscribePattern": f"{TOPIC}|rewound", "startingOffsets": json.dumps(start)}
        assert sum(Job(spark, servers, tmp_path / str(rows), **options).run()) == rows


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("endingOffsets", both(1, 1)),
        pytest.param("endingTimestamp", "1", marks=pytest.mark.test_all("long")),
        pytest.param("endingOffsetsByTimestamp", both(1, 1), marks=pytest.mark.test_all("long")),
    ],
)
def test_a_stream_has_no_end(spark: SparkSession, servers: str, tmp_path: Path, option: str, value: str) -> None:
    job = Job(spark, servers, tmp_path, subscribe=TOPIC, **{option: value})
    with pytest.raises(StreamingQueryException, match=f"option {option} is for batch queries"):
        job.run()


def committed(servers: str, group: str) -> dict[int, int]:
    """The group's committed offsets of TOPIC by partition, read by confluent-kafka."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": group, "log_level": 0})
    try:
        found = consumer.committed([TopicPartition(TOPIC, partition) for partition in range(2)], timeout=30)
    finally:
        consumer.close()
    return {entry.partition: entry.offset for entry in found if entry.offset >= 0}


def test_the_groups_offsets_at_the_coordinator(spark: SparkSession, servers: str, tmp_path: Path) -> None:
    job = Job(spark, servers, tmp_path, subscribe=TOPIC, commitOffsets="true", **{"kafka.group.id": "query"})
    assert sum(job.run()) == 13
    deadline = time.monotonic() + 60
    while committed(servers, "query") != {0: 10, 1: 3}:
        assert time.monotonic() < deadline, committed(servers, "query")
        time.sleep(0.1)
    # another query starts at a group's offsets, which another client has committed
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "other", "log_level": 0})
    consumer.commit(offsets=[TopicPartition(TOPIC, 0, 6)], asynchronous=False)
    consumer.close()
    options = {"subscribe": TOPIC, "startingOffsets": "group", "kafka.group.id": "other"}
    assert offsets_of(read(spark, servers, **options)) == offsets(range(6, 10), range(3))


def test_another_applications_offsets_stay(
    spark: SparkSession, spark_log: SparkLog, servers: str, tmp_path: Path
) -> None:
    """A query with kafka.group.id, as format("kafka") has it for ACLs, commits nothing unless commitOffsets says so.

    The log says so once for each query, although Spark makes its reader in two processes.
    """
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "application", "log_level": 0})
    consumer.commit(offsets=[TopicPartition(TOPIC, 0, 6)], asynchronous=False)
    consumer.close()
    for start, rows in (("earliest", 13), ("group", 7)):
        options = {"kafka.group.id": "application", "startingOffsets": start}
        spark_log.begin()
        assert sum(Job(spark, servers, tmp_path / start, subscribe=TOPIC, **options).run()) == rows
        assert spark_log.text().count("kafka.group.id=application: the query commits no offsets") == 1
    assert committed(servers, "application") == {0: 6}


def tasks(frame: DataFrame) -> int:
    return frame.rdd.getNumPartitions()


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 2),
        ({"minPartitions": 5}, 5),
        ({"minPartitions": 100}, 13),
        ({"maxRecordsPerPartition": 4}, 4),
        ({"maxRecordsPerPartition": 4, "minPartitions": 6}, 6),
        ({"maxBytesPerPartition": 1_000_000}, 2),
    ],
)
def test_tasks(spark: SparkSession, servers: str, options: dict[str, Any], count: int) -> None:
    frame = read(spark, servers, subscribe=TOPIC, **options)
    assert tasks(frame) == count
    assert offsets_of(frame) == offsets(range(10), range(3))


def test_tasks_by_bytes(spark: SparkSession, servers: str) -> None:
    assert 2 < tasks(read(spark, servers, subscribe=TOPIC, maxBytesPerPartition=50)) <= 13


@pytest.fixture
def pushdown(spark: SparkSession) -> Iterator[None]:
    name = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(name, "true")
    yield
    spark.conf.unset(name)


def at(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, timezone.utc)


FILTERS: list[tuple[Any, range, range, int]] = [
    # condition, offsets that pass in both partitions, number of tasks
    (lambda: col("partition") == 1, range(0), range(3), 1),
    (lambda: col("partition").isin(0, 7), range(10), range(0), 1),
    (lambda: (col("offset") >= 2) & (col("offset") < 4), range(2, 4), range(2, 3), 2),
    (lambda: col("offset") > 5, range(6, 10), range(0), 1),
    (lambda: col("topic") == "another", range(0), range(0), 1),
    (lambda: col("timestamp") >= lit(at(FOURTH)), range(4, 10), range(0), 1),
    # create time: an earlier record may follow a later one, so nothing is cut off at the end
    (lambda: col("timestamp") < lit(at(FOURTH)), range(4), range(3), 2),
    (lambda: col("value") == b"a3", range(3, 4), range(0), 2),
]


@pytest.mark.parametrize("number", range(len(FILTERS)))
def test_filters_are_pushed(spark: SparkSession, servers: str, pushdown: None, number: int) -> None:
    condition, first, second, left = FILTERS[number]
    frame = read(spark, servers, subscribe=TOPIC).where(condition())
    assert tasks(frame) == left
    assert offsets_of(frame) == offsets(first, second)


@pytest.mark.parametrize("number", range(0, len(FILTERS), 3))
def test_filters_without_pushdown(spark: SparkSession, servers: str, number: int) -> None:
    condition, first, second, _ = FILTERS[number]
    assert offsets_of(read(spark, servers, subscribe=TOPIC).where(condition())) == offsets(first, second)
