"""Micro-batches of `foreachBatch` into topics, exactly once, and batch writes with a name; librdkafka reads them."""

from __future__ import annotations

import json
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark import inheritable_thread_target
from pyspark.sql import DataFrame, SparkSession, functions as F
from pyspark.sql.streaming.query import StreamingQuery

import spark_klog
from spark_klog.errors import ConfigError
from spark_klog.spark.write.decisions.decision_place import planned
from spark_klog.spark.write.updates import RunningQuery, _Records
from tests.spark.support import Sent, consume, create_topic, error_of, produce

from .support import once, read

_SECONDS = 300
#: 2023-11-14T22:13:20Z, in ms.
_START = 1_700_000_000_000
_HOUR = 3_600_000


def _send(servers: str, topic: str, first: int, end: int) -> None:
    """Numbers as values; each has a word, and a time 10 minutes after the one before."""
    words = ("a", "b", "c")
    produce(
        servers,
        f"{topic}-from",
        [Sent(b"%d" % n, words[n % 3].encode(), 0, _START + n * _HOUR // 6) for n in range(first, end)],
    )


def _counts(spark: SparkSession, servers: str, topic: str, rows: int = 5) -> tuple[DataFrame, DataFrame]:
    """The records of TOPIC-from, and how many there are of each word in each hour."""
    stream = spark.readStream.format("klog").option("kafka.bootstrap.servers", servers)
    stream = stream.option("subscribe", f"{topic}-from").option("startingOffsets", "earliest")
    clicks = stream.option("maxOffsetsPerTrigger", str(rows)).load()
    by_hour = clicks.withWatermark("timestamp", "1 day").groupBy(
        F.window("timestamp", "1 hour"), F.col("key").cast("string").alias("word")
    )
    return clicks, by_hour.agg(F.count("*").alias("count"), F.max("offset").alias("last"))


def _start(df: DataFrame, process: Callable[[DataFrame, int], None], checkpoint: Path) -> StreamingQuery:
    writer = df.writeStream.foreachBatch(process).outputMode("update").option("checkpointLocation", str(checkpoint))
    return writer.trigger(availableNow=True).start()


def _run(df: DataFrame, process: Callable[[DataFrame, int], None], checkpoint: Path) -> None:
    spark_klog.run_available_now(lambda: _start(df, process, checkpoint), _SECONDS)


def _refusal(df: DataFrame, process: Callable[[DataFrame, int], None], checkpoint: Path) -> str:
    query = _start(df, process, checkpoint)
    return error_of(lambda: query.awaitTermination(_SECONDS))


def _expected(end: int) -> dict[tuple[str, int], int]:
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for n in range(end):
        counts["abc"[n % 3], (_START + n * _HOUR // 6) // _HOUR] += 1
    return counts


def _updates(servers: str, topic: str) -> dict[str, list[dict[str, Any]]]:
    """The values of each key, in their order."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in consume(servers, topic, isolation_level="read_committed"):
        found[(record.key or b"").decode()].append(json.loads(record.value or b"null"))
    return found


def test_a_windowed_aggregation_and_a_second_topic(
    spark: SparkSession, servers: str, topic: str, tmp_path: Path
) -> None:
    """A run stops between the writes and Spark's commit of the micro-batch: the next run repeats it."""
    for name, partitions in ((f"{topic}-from", 1), (topic, 2), (f"{topic}-all", 1)):
        create_topic(servers, name, partitions)
    _send(servers, topic, 0, 12)
    options = {"kafka.bootstrap.servers": servers}
    checkpoint = tmp_path / "checkpoint"
    calls: list[int] = []
    plans: list[tuple[str, str]] = []

    def process(df: DataFrame, batch_id: int) -> None:
        calls.append(batch_id)
        plans.append((planned(checkpoint, batch_id), RunningQuery.find(df.sparkSession, (), batch_id).plan))
        df = df.withColumn("batch", F.lit(batch_id))
        columns = ["count", "batch"]
        spark_klog.write_updates(
            df, batch_id, name="counts", topic=topic, key=["window", "word"], columns=columns, **options
        )
        last = F.col("last").cast("string")
        spark_klog.write_updates(df, batch_id, name="last", topic=f"{topic}-all", value=last, **options)

    _run(_counts(spark, servers, topic, rows=10)[1], process, checkpoint)
    repeated = max(calls)
    for file in (checkpoint / "commits").glob(f"*{repeated}*"):
        file.unlink()
    _send(servers, topic, 12, 20)
    _run(_counts(spark, servers, topic, rows=10)[1], process, checkpoint)
    assert calls.count(repeated) == 2
    assert all(in_file == found != "" for in_file, found in plans)
    found = _updates(servers, topic)
    for updates in found.values():
        batches, counts = [one["batch"] for one in updates], [one["count"] for one in updates]
        assert batches == sorted(set(batches))  # no key twice in a micro-batch
        assert counts == sorted(set(counts))
    ours = {
        (key["word"], int(key["window"]["start"][11:13])): updates[-1]["count"]
        for key, updates in ((json.loads(text), updates) for text, updates in found.items())
    }
    assert ours == {(word, hour % 24): count for (word, hour), count in _expected(20).items()}
    assert json.loads(next(iter(found)))["window"]["start"].endswith("Z")
    rows = read(servers, f"{topic}-all")
    assert set(rows.values()) == {1}
    assert len(rows) == sum(map(len, found.values()))


@pytest.mark.test_all("long")
def test_what_is_refused(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    """Two calls with one name; a second run in the same process repeats a micro-batch whose function has failed."""
    create_topic(servers, f"{topic}-from")
    create_topic(servers, topic)
    _send(servers, topic, 0, 4)
    clicks = _counts(spark, servers, topic)[0].select(F.col("value").cast("string").alias("value"))
    options = {"kafka.bootstrap.servers": servers, "topic": topic}

    def twice(df: DataFrame, batch_id: int) -> None:
        spark_klog.write_updates(df, batch_id, name="a", **options)
        spark_klog.write_updates(df.limit(1), batch_id, name="a", **options)

    def wrong_number(df: DataFrame, batch_id: int) -> None:
        spark_klog.write_updates(df, batch_id + 1, name="b", **options)

    def in_a_thread(df: DataFrame, batch_id: int) -> None:
        errors: list[Exception] = []

        def write() -> None:
            try:
                spark_klog.write_updates(df, batch_id, name="a", **options)
            except Exception as error:
                errors.append(error)

        for target in (write, inheritable_thread_target(df.sparkSession)(write)):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        assert len(errors) == 1, errors
        raise errors[0]

    checkpoint = tmp_path / "checkpoint"
    assert "write_updates was called twice with name='a' for micro-batch 0" in _refusal(clicks, twice, checkpoint)
    assert "batch_id=1 must be the number that foreachBatch passes, 0" in _refusal(clicks, wrong_number, checkpoint)
    assert "the query of this micro-batch is unknown: Spark tells it" in _refusal(clicks, in_a_thread, checkpoint)
    assert read(servers, topic) == once(4)  # of the first call of all three runs
    shutil.copytree(checkpoint, tmp_path / "copy")

    def well(df: DataFrame, batch_id: int) -> None:
        spark_klog.write_updates(df, batch_id, name="a", **options)

    _run(clicks, well, checkpoint)
    shutil.copytree(checkpoint, tmp_path / "restored")
    _send(servers, topic, 4, 6)
    _run(clicks, well, checkpoint)
    _send(servers, topic, 6, 8)
    error = _refusal(clicks, well, tmp_path / "restored")  # which plans micro-batch 1 with what was sent since, too
    assert "writeVersion=1: this version was written before, made of other offsets than it has now" in error
    assert read(servers, topic) == once(6)
    _run(clicks, well, checkpoint)
    assert read(servers, topic) == once(8)
    error = _refusal(clicks, well, tmp_path / "copy")  # which is at micro-batch 0
    assert "version 0 can't be written after version 2, nothing of it is written" in error
    assert read(servers, topic) == once(8)


def test_arguments(spark: SparkSession) -> None:
    rows = spark.sql("SELECT * FROM VALUES ('a', 1, false), ('b', 2, true) AS rows (name, n, `is gone`)")
    for condition in ("is gone", "n > 1", F.col("n") == 2):
        made = _Records(rows, set(), "t").rows("name", None, ["n"], condition)
        assert sorted(tuple(row) for row in made.collect()) == [("a", '{"n":1}'), ("b", None)]
    with pytest.raises(ConfigError, match=r"write \*\*options, not options=options"):
        spark_klog.write_updates(rows, 0, name="x", key="name", columns=["n"], query_id="q", options={})


@pytest.mark.test_all("long")
def test_tombstones(spark: SparkSession, servers: str, topic: str) -> None:
    create_topic(servers, topic)
    rows = spark.sql("SELECT * FROM VALUES ('a', 1, false), ('b', 2, true), ('c', 3, null) AS rows (name, n, gone)")
    options = {"kafka.bootstrap.servers": servers, "topic": topic, "query_id": topic}
    spark_klog.write_updates(rows, 0, name="x", key="name", columns=["n"], tombstones="gone", **options)
    made = rows.selectExpr("name AS key", "cast(n AS string) AS value")
    spark_klog.write_updates(made, 0, name="y", tombstones="key = 'a'", **options)
    spark_klog.write_updates(
        made, 0, name="y", tombstones=F.col("key") == "a", **(options | {"query_id": f"{topic}-2"})
    )
    found = sorted((one.key, one.value or b"") for one in consume(servers, topic, isolation_level="read_committed"))
    first = [(b"a", b'{"n":1}'), (b"b", b""), (b"c", b'{"n":3}')]
    second = [(b"a", b""), (b"b", b"2"), (b"c", b"3")]
    assert found == sorted(first + second + second)
    with pytest.raises(ConfigError, match="tombstones= needs key="):
        spark_klog.write_updates(rows, 1, name="z", columns=["n"], tombstones="gone", **options)


@pytest.mark.test_all("long")  # test_batch_steps has the steps
def test_batch_writes(spark: SparkSession, servers: str, topic: str) -> None:
    create_topic(servers, topic, 2)
    rows = spark.range(20, numPartitions=3).selectExpr("cast(id AS string) AS value")
    writer = rows.write.format("klog").mode("append").option("kafka.bootstrap.servers", servers)
    writer = writer.option("topic", topic).option("deliveryGuarantee", "exactly-once")
    assert "of a batch write needs the option writeId" in error_of(writer.save)
    writer.option("writeId", f"{topic}/1").save()
    failing = rows.select(
        F.when(F.col("value") == "7", F.raise_error(F.lit("no"))).otherwise(F.col("value")).alias("value")
    )
    again = failing.write.format("klog").mode("append").option("kafka.bootstrap.servers", servers)
    again = again.option("topic", topic).option("deliveryGuarantee", "exactly-once")
    assert "no" in error_of(again.option("writeId", f"{topic}/2").save)
    assert read(servers, topic) == once(20)
    writer.option("writeId", f"{topic}/1").save()
    assert read(servers, topic) == once(20)
    writer.option("writeId", f"{topic}/2").save()
    assert set(read(servers, topic).values()) == {2}


@pytest.mark.test_all("long")
def test_update_mode_of_the_sink(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    """Spark refuses it before it asks the sink, so the message names nothing of this package."""
    create_topic(servers, f"{topic}-from")
    counts = _counts(spark, servers, topic)[1].selectExpr("word AS key", "cast(count AS string) AS value")
    writer = counts.writeStream.format("klog").option("kafka.bootstrap.servers", servers).option("topic", topic)
    query = writer.option("checkpointLocation", str(tmp_path)).outputMode("update").trigger(availableNow=True).start()
    assert "klog does not support Update mode" in error_of(lambda: query.awaitTermination(_SECONDS))
