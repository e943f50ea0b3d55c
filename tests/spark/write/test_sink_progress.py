"""Figures of a sink's writes by topic: in the logs of Spark's Python processes, and in progress records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession, functions as F
from pyspark.sql.types import StringType, StructField, StructType

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError
from spark_klog.spark.listener import ProgressListener, SinkProgress, observed, sink_progress
from spark_klog.spark.write.sink import StreamWriter, Written, count_rows, total
from spark_klog.spark.write.sink_options import sink_options
from tests.spark.support import Seen, Sent, consume, create_topic, produce, wait_for

_LOGGING = "spark.sql.pyspark.worker.logging.enabled"
Figures = dict[str, tuple[int, int]]


def size_of(record: Seen) -> int:
    headers = sum(len(name.encode()) + len(value or b"") for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers


def consumed(servers: str, *topics: str) -> Figures:
    """(records, bytes) of each topic, read by librdkafka."""
    records = {topic: consume(servers, topic) for topic in topics}
    return {topic: (len(found), sum(map(size_of, found))) for topic, found in records.items()}


def test_counts() -> None:
    headers = [None, [{"key": "ä", "value": b"12"}], [], [{"key": "k", "value": None}] * 2]
    rows = pa.RecordBatch.from_pydict(
        {
            "key": pa.array(["a", None, "äö", "b"]),
            "value": pa.array([b"123", b"", None, b"4"], pa.binary()),
            "topic": pa.array(["x", "y", "x", "y"]),
            "headers": pa.array(headers, pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        }
    )
    assert count_rows(rows, None) == {"x": (2, 1 + 3 + 4), "y": (2, 2 + 2 + 1 + 1 + 2)}
    assert count_rows(rows.slice(1), "z") == {"z": (3, 4 + 2 + 2 + 1 + 1 + 2)}
    assert count_rows(rows.slice(2, 1), None) == {"x": (1, 4)}
    assert count_rows(rows.slice(4), None) == count_rows(rows.slice(4), "z") == {}
    assert total([{"x": (1, 2)}, {}, {"y": (3, 4), "x": (5, 6)}]) == {"x": (6, 8), "y": (3, 4)}


@pytest.fixture
def logging_spark(spark: SparkSession) -> Iterator[SparkSession]:
    """A session of its own, as Spark keeps the logs of each session."""
    made = spark.newSession()
    made.conf.set(_LOGGING, "true")
    yield made
    made.conf.unset(_LOGGING)


def logged(spark: SparkSession) -> list[tuple[str | None, str, int, int]]:
    """(micro-batch, topic, records, bytes) of the sink's log lines."""
    found = spark.tvf.python_worker_logs().where("logger = 'spark_klog.spark.write.sink'").select("context")
    rows = [row[0] for row in found.collect()]
    return [(row.get("batch_id"), row["topic"], int(row["records"]), int(row["bytes"])) for row in rows]


@pytest.mark.test_all("long")
def test_batch_write(logging_spark: SparkSession, cluster: EmbeddedCluster, topic: str) -> None:
    servers, names = cluster.bootstrap_servers, [f"{topic}-{letter}" for letter in "ab"]
    for name in names:
        create_topic(servers, name, 2)
    frame = logging_spark.range(0, 100, 1, 2).selectExpr(
        f"if(id % 3 = 2, '{names[1]}', '{names[0]}') as topic",
        "if(id % 2 = 1, concat('k', id), null) as key",
        "repeat('x', cast(id as int)) as value",
    )
    frame.write.format("klog").option("kafka.bootstrap.servers", servers).mode("append").save()
    found = {name: (records, size) for batch, name, records, size in logged(logging_spark) if batch is None}
    assert found == consumed(servers, *names)
    assert sum(records for records, _ in found.values()) == 100


@pytest.mark.test_all("long")  # test_micro_batches calls the writer without Spark
def test_progress_records_of_a_stream(
    spark: SparkSession, cluster: EmbeddedCluster, topic: str, tmp_path: Path
) -> None:
    servers, names = cluster.bootstrap_servers, [f"{topic}-{letter}" for letter in "ab"]
    for name in (topic, *names):
        create_topic(servers, name, 2)
    headers = (("h", b"12"), ("ü", None))
    produce(
        servers, topic, [Sent(b"x" * n, b"k" if n % 2 else None, n % 2, headers=headers[: n % 3]) for n in range(90)]
    )
    stream = spark.readStream.format("klog").option("kafka.bootstrap.servers", servers).option("subscribe", topic)
    stream = stream.options(startingOffsets="earliest", includeHeaders="true")
    to = F.when(F.col("partition") == 0, names[0]).otherwise(names[1]).alias("topic")
    rows = observed(stream.load().select("key", "value", "headers", to), *names, "none")
    told: list[SinkProgress] = []
    listener = ProgressListener(on_written=told.append)
    spark.streams.addListener(listener)
    try:
        writer = rows.writeStream.format("klog").option("kafka.bootstrap.servers", servers).queryName(topic)
        query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
        assert query.awaitTermination(300)
        wait_for(lambda: sum(sum(one.records.values()) for one in told) == 90, "the listener's events", 60)
    finally:
        spark.streams.removeListener(listener)
    assert len(told) == 1
    assert listener.written[topic] == told[-1]
    assert json.loads(told[0].to_json())["batch_id"] == 0
    found = {name: (sum(one.records[name] for one in told), sum(one.bytes[name] for one in told)) for name in names}
    assert found == consumed(servers, *names)
    assert {one.records["none"] + one.bytes["none"] for one in told} == {0}


def test_what_can_be_observed(spark: SparkSession) -> None:
    rows = spark.createDataFrame([("x",)], "value string")
    for topics in ((), ("a", "b")):
        with pytest.raises(ConfigError, match="observed counts rows by topic: name the topics"):
            observed(rows, *topics)
    assert observed(rows, "a").collect() == rows.collect()
    assert sink_progress("q", 1, {}) is None


def test_micro_batches(caplog: pytest.LogCaptureFixture) -> None:
    """Call the writer without Spark, which keeps the logs of a stream in the stream's own session."""
    options = sink_options({"kafka.bootstrap.servers": "127.0.0.1:9", "topic": "t"}, streaming=True)
    writer = StreamWriter(options, StructType([StructField("value", StringType())]))
    writer.commit([Written({"b": (1, 20)}), None, Written({"b": (2, 30), "a": (3, 40)}), Written({})], 7)
    assert [record.getMessage() for record in caplog.records] == [
        "micro-batch 7: wrote 3 records of 40 bytes to a",
        "micro-batch 7: wrote 3 records of 50 bytes to b",
    ]
    context = vars(caplog.records[1])["context"]
    assert context == {"topic": "b", "records": "3", "bytes": "50", "batch_id": "7"}
