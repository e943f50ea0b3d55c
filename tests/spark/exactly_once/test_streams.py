"""Exactly-once streams from topic to topic, read by librdkafka with read_committed; and refused queries."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import spark_klog
from spark_klog.client.admin.admin import Admin
from spark_klog.errors import ConfigError
from spark_klog.spark.decisions import continue_at
from spark_klog.spark.write.decisions.decision_place import decision_place
from spark_klog.spark.write.decisions.entries import Identity
from spark_klog.spark.write.sink_options import sink_options
from tests.spark.support import Sent, create_topic, error_of, produce, set_topic
from tests.support.runs.soak import in_soak

from .support import PARTITIONS, fill, once, read

_SECONDS = 500


def start(
    spark: SparkSession,
    servers: str,
    topic: str,
    checkpoint: object,
    to: str | None = None,
    rows: str = "10",
    **more: str,
) -> StreamingQuery:
    """Start a query that copies TOPIC-from to the topic, or to `to`, with `rows` records per micro-batch."""
    stream = spark.readStream.format("klog").option("kafka.bootstrap.servers", servers)
    stream = stream.option("subscribe", f"{topic}-from").option("startingOffsets", "earliest")
    writer = stream.option("maxOffsetsPerTrigger", rows).load().select("key", "value").writeStream.format("klog")
    writer = writer.option("kafka.bootstrap.servers", servers).option("topic", to or topic)
    writer = writer.options(**{"deliveryGuarantee": "exactly-once", **more})
    if checkpoint is not None:
        writer = writer.option("checkpointLocation", str(checkpoint))
    return writer.trigger(availableNow=True).start()


def copy(spark: SparkSession, servers: str, topic: str, checkpoint: object, **more: str) -> None:
    spark_klog.run_available_now(lambda: start(spark, servers, topic, checkpoint, **more), _SECONDS)


def prepare(servers: str, topic: str, records: int) -> None:
    create_topic(servers, f"{topic}-from", PARTITIONS)
    create_topic(servers, topic, PARTITIONS)
    fill(servers, topic, 0, records)


def forget_last(checkpoint: Path, *folders: str) -> int:
    """Remove the newest micro-batch from these folders of a checkpoint, all of which have it; return its number."""
    last = max(int(path.name) for path in (checkpoint / folders[0]).iterdir() if path.name.isdecimal())
    for folder in folders:
        (checkpoint / folder / str(last)).unlink()
        (checkpoint / folder / f".{last}.crc").unlink()
    return last


def test_runs_one_after_the_other(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    """Spark repeats a decided micro-batch, or plans it anew with the same rows: its tasks write nothing."""
    prepare(servers, topic, 17)
    prefix = {"transactionalIdPrefix": "team-a."}
    checkpoint = tmp_path / "checkpoint"
    copy(spark, servers, topic, checkpoint, **prefix)
    assert read(servers, topic) == once(17)
    forget_last(checkpoint, "offsets", "commits")
    copy(spark, servers, topic, checkpoint, **prefix)
    assert read(servers, topic) == once(17)
    forget_last(checkpoint, "commits")  # as if the run had ended before Spark's commit
    fill(servers, topic, 17, 24)
    copy(spark, servers, topic, f"file://{checkpoint}", **prefix)
    assert read(servers, topic) == read(servers, topic, committed=False) == once(24)
    log = decision_place(str(checkpoint), None).open({"bootstrap.servers": servers}, Identity("team-a."))
    assert log.read().decided >= 0
    with Admin({"bootstrap.servers": servers}) as admin:
        prefix_of_ids = log.identity.id_prefix
        ids = [one for one in admin.list_transactions() if one.transactional_id.startswith(prefix_of_ids)]
    assert {one.state for one in ids} == {"CompleteCommit"}
    assert len(ids) <= 2 * PARTITIONS + 2  # 9 tasks: workers reuse their ids


@pytest.mark.test_all("long")  # a failed query costs four attempts of each task
@in_soak
def test_an_older_checkpoint(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    """The sink refuses micro-batches before the last decided one."""
    prepare(servers, topic, 30)
    copy(spark, servers, topic, tmp_path)
    for folder in ("commits", "offsets"):  # only micro-batch 0 is left
        for path in (tmp_path / folder).iterdir():
            if path.name.strip(".").split(".")[0] != "0":
                path.unlink()
    query = start(spark, servers, topic, tmp_path)
    error = error_of(lambda: query.awaitTermination(_SECONDS))
    assert "Spark runs micro-batch 1, but the last decision" in error
    assert "another run of this query uses the checkpoint, or the checkpoint is older" in error
    assert read(servers, topic) == once(30)


@pytest.mark.test_all("long")
def test_a_checkpoint_that_went_back_by_a_micro_batch(
    spark: SparkSession, servers: str, topic: str, tmp_path: Path
) -> None:
    """If the newest file of `offsets` is lost (power failure, repair), Spark plans the micro-batch with more rows."""
    prepare(servers, topic, 20)
    copy(spark, servers, topic, tmp_path)
    last = forget_last(tmp_path, "offsets", "commits")
    fill(servers, topic, 20, 26)
    query = start(spark, servers, topic, tmp_path, rows="100")
    error = error_of(lambda: query.awaitTermination(_SECONDS))
    assert f"Spark has planned micro-batch {last} again, with other offsets" in error
    assert read(servers, topic) == read(servers, topic, committed=False) == once(20)


@pytest.mark.test_all("long")
def test_failed_tasks_leave_nothing_open(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    create_topic(servers, f"{topic}-from")
    create_topic(servers, topic, PARTITIONS, **{"max.message.bytes": "1000"})
    produce(servers, f"{topic}-from", [Sent(b"%d" % n) for n in range(9)])
    produce(servers, f"{topic}-from", [Sent(b"x" * 2000)])
    query = start(spark, servers, topic, tmp_path)
    assert "MESSAGE_TOO_LARGE" in error_of(lambda: query.awaitTermination(_SECONDS))
    with Admin({"bootstrap.servers": servers}) as admin:
        assert admin.list_transactions(states=["Ongoing"]) == []
    assert read(servers, topic) == Counter()
    set_topic(servers, topic, "max.message.bytes", "10000")
    copy(spark, servers, topic, tmp_path)
    assert read(servers, topic) == once(9) + Counter(["x" * 2000])


@pytest.mark.test_all("long")  # test_continue_at.py, without Spark
@in_soak
def test_a_checkpoint_of_an_at_least_once_query(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    prepare(servers, topic, 10)
    copy(spark, servers, topic, tmp_path, deliveryGuarantee="at-least-once")
    fill(servers, topic, 10, 16)
    query = start(spark, servers, topic, tmp_path)
    error = error_of(lambda: query.awaitTermination(_SECONDS))
    assert "has no decision of this checkpoint" in error
    (batch,) = re.findall(r"continue_at\(OPTIONS, (\d+)\)", error)[:1]
    given = {"kafka.bootstrap.servers": servers, "deliveryGuarantee": "exactly-once"}
    continue_at({**given, "checkpointLocation": str(tmp_path)}, int(batch))
    copy(spark, servers, topic, tmp_path)
    assert read(servers, topic) == once(16)


@pytest.mark.test_all("long")
def test_a_checkpoint_that_is_deleted(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    """Without its checkpoint the query counts as a new one and writes all rows again."""
    prepare(servers, topic, 10)
    for runs in (1, 2):
        copy(spark, servers, topic, tmp_path / "checkpoint")
        assert read(servers, topic) == Counter(dict.fromkeys(once(10), runs))
        shutil.rmtree(tmp_path / "checkpoint")


@pytest.mark.test_all("long")
def test_another_topic_with_the_same_checkpoint(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    prepare(servers, topic, 10)
    create_topic(servers, f"{topic}-2", PARTITIONS)
    copy(spark, servers, topic, tmp_path)
    fill(servers, topic, 10, 30)
    copy(spark, servers, topic, tmp_path, to=f"{topic}-2")
    assert read(servers, topic) == once(10)
    assert read(servers, f"{topic}-2") == once(30) - once(10)


@pytest.mark.test_all("long")
@in_soak
def test_more_time_than_the_brokers_allow(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    prepare(servers, topic, 10)
    query = start(spark, servers, topic, tmp_path, **{"kafka.transaction.timeout.ms": "900001"})
    error = error_of(lambda: query.awaitTermination(_SECONDS))
    assert "INVALID_TRANSACTION_TIMEOUT" in error
    assert "larger than the broker's transaction.max.timeout.ms" in error
    assert read(servers, topic, committed=False) == Counter()
    copy(spark, servers, topic, tmp_path)
    assert read(servers, topic) == once(10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"deliveryGuarantee": "once"}, "must be one of at-least-once, exactly-once", id="unknown"),
        pytest.param({"kafka.acks": "1"}, "needs kafka.acks=all and kafka.enable.idempotence=true", id="acks"),
        pytest.param(
            {"kafka.transactional.id": "mine"}, "exactly-once writes in .* see transactionalIdPrefix", id="id"
        ),
        pytest.param({"transactionalIdPrefix": ""}, "must be 1 to 249 printable characters", id="empty prefix"),
        pytest.param({"transactionalIdPrefix": "a "}, "must be 1 to 249 printable characters", id="space"),
        pytest.param({"transactionalIdPrefix": "a" * 250}, "must be 1 to 249 printable characters", id="long prefix"),
        pytest.param(
            {"transactionalIdPrefix": "a", "deliveryGuarantee": "at-least-once"},
            "transactionalIdPrefix needs deliveryGuarantee=exactly-once",
            id="prefix without transactions",
        ),
    ],
)
def test_refused_options(options: dict[str, str], message: str) -> None:
    given = {"kafka.bootstrap.servers": "h:1", "checkpointlocation": "/x", "deliveryGuarantee": "exactly-once"}
    assert sink_options(given, streaming=True).checkpoint == "/x"
    assert sink_options(given, streaming=True).client["transaction.timeout.ms"] == "900000"
    assert sink_options(given, streaming=True).id_prefix == "klog-"
    assert sink_options({**given, "transactionalidprefix": "a."}, streaming=True).id_prefix == "a."
    with pytest.raises(ConfigError, match=message):
        sink_options({**given, **options}, streaming=True)


def test_a_checkpoint_that_the_writer_does_not_name(
    spark: SparkSession, servers: str, topic: str, tmp_path: Path
) -> None:
    prepare(servers, topic, 10)
    spark.conf.set("spark.sql.streaming.checkpointLocation", str(tmp_path))
    try:
        query = start(spark, servers, topic, None)
        error = error_of(lambda: query.awaitTermination(_SECONDS))
    finally:
        spark.conf.unset("spark.sql.streaming.checkpointLocation")
    assert "needs the option checkpointLocation on the writer" in error
