"""Streams: triggers, checkpoints, topics that appear and go, group offsets, killed brokers and workers."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from spark_klog.embedded import EmbeddedCluster
from tests.spark.conftest import SparkLog
from tests.spark.support import (
    Job,
    consume,
    create_topic,
    delete_topic,
    needs_admission_control,
    offsets_of,
    produce,
    read,
    values,
    wait_for,
)

SECONDS = 60


def all_of(topic: str, partitions: int, count: int) -> list[tuple[str, int, int]]:
    return [(topic, partition, offset) for partition in range(partitions) for offset in range(count)]


@pytest.mark.test_all("long")  # write/test_sink.py has a run with limits, exactly_once/ restarts
@needs_admission_control
def test_available_now_with_a_limit_and_restarts(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    create_topic(servers, topic, 4)
    produce(servers, topic, values(1000, partitions=4))
    job = Job(spark, servers, tmp_path, subscribe=topic, maxOffsetsPerTrigger="400")
    rows = job.run()
    assert sum(rows) == 1000
    assert max(rows) <= 400 + 4  # rounded up by at most one for each partition
    assert len(rows) >= 3
    produce(servers, topic, values(200, 1000, partitions=4))
    assert sum(job.run()) == 200
    assert job.run() == []
    assert offsets_of(job.result) == all_of(topic, 4, 300)
    assert {row.value for row in job.result.collect()} == {record.value for record in values(1200)}
    assert job.committed() == {(topic, partition): 300 for partition in range(4)}


@needs_admission_control
def test_once_reads_all_in_one_batch_whatever_the_limit(
    spark: SparkSession, servers: str, topic: str, tmp_path: Path
) -> None:
    create_topic(servers, topic)
    produce(servers, topic, values(100))
    job = Job(spark, servers, tmp_path, subscribe=topic, maxOffsetsPerTrigger="30")
    query = job.start(once=True)
    assert query.awaitTermination(SECONDS)
    assert [progress["numInputRows"] for progress in query.recentProgress] == [100]
    assert offsets_of(job.result) == all_of(topic, 1, 100)


def test_without_a_trigger_batches_follow_at_once(
    spark: SparkSession, servers: str, topic: str, tmp_path: Path
) -> None:
    create_topic(servers, topic)
    frame = Job(spark, servers, tmp_path, subscribe=topic).frame()
    writer = frame.writeStream.format("memory").queryName("no_trigger")
    query = writer.option("checkpointLocation", str(tmp_path)).start()
    try:
        for number in range(3):
            produce(servers, topic, values(10, 10 * number))
            query.processAllAvailable()
            assert offsets_of(spark.table("no_trigger")) == all_of(topic, 1, 10 * number + 10)
    finally:
        query.stop()


@pytest.mark.parametrize(
    "trigger", [{"continuous": "1 second"}, pytest.param({"realTime": "5 seconds"}, marks=needs_admission_control)]
)
def test_triggers_that_spark_has_for_sources_in_the_jvm_only(
    spark: SparkSession, servers: str, topic: str, tmp_path: Path, trigger: dict[str, str]
) -> None:
    create_topic(servers, topic)
    writer = Job(spark, servers, tmp_path, subscribe=topic).frame().writeStream.format("console").outputMode("update")

    def run() -> None:
        query = writer.option("checkpointLocation", str(tmp_path)).trigger(**trigger).start()
        query.awaitTermination(SECONDS)

    with pytest.raises(PySparkException, match=r"not support continuous processing|INPUT_STREAM_NOT_SUPPORTED"):
        run()


@pytest.mark.test_all("long")  # test_available_now.py has its option
def test_available_now_without_a_limit_is_one_batch(
    spark: SparkSession, servers: str, topic: str, tmp_path: Path
) -> None:
    create_topic(servers, topic, 2)
    produce(servers, topic, values(500, partitions=2))
    job = Job(spark, servers, tmp_path, assign=json.dumps({topic: [1]}))
    assert job.run() == [250]
    assert offsets_of(job.result) == [(topic, 1, offset) for offset in range(250)]


@pytest.mark.test_all("long")  # without a trigger a query has this one, and other queries are started again
@needs_admission_control
def test_processing_time_stop_and_restart(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    create_topic(servers, topic, 2)
    job = Job(spark, servers, tmp_path, subscribe=topic, maxOffsetsPerTrigger="40")
    query = job.start(processingTime="100 milliseconds")
    try:
        for wave in range(2):
            produce(servers, topic, values(100, 100 * wave, partitions=2))
            wait_for(lambda wave=wave: sum(job.committed().values()) > 100 * wave, "rows of the wave", query=query)
    finally:
        query.stop()  # at any point of a micro-batch
    assert max(progress["numInputRows"] for progress in query.recentProgress) <= 42
    job.run()
    assert offsets_of(job.result) == all_of(topic, 2, 100)


def test_starting_at_latest(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    create_topic(servers, topic)
    produce(servers, topic, values(10))
    job = Job(spark, servers, tmp_path, subscribe=topic)
    del job.options["startingOffsets"]  # latest is the default of a stream
    query = job.start(processingTime="100 milliseconds")
    try:
        wait_for(lambda: (job.checkpoint / "offsets" / "0").exists() or query.lastProgress, "a start", query=query)
        produce(servers, topic, values(5, 10))
        wait_for(lambda: job.committed() == {(topic, 0): 15}, "the end", query=query)
    finally:
        query.stop()
    assert offsets_of(job.result) == [(topic, 0, offset) for offset in range(10, 15)]


def test_a_topic_that_appears_is_read_from_its_start(
    spark: SparkSession, servers: str, topic: str, tmp_path: Path
) -> None:
    create_topic(servers, f"{topic}-1")
    produce(servers, f"{topic}-1", values(10))
    job = Job(spark, servers, tmp_path, subscribePattern=f"{topic}-.*", startingOffsets="latest")
    query = job.start(processingTime="100 milliseconds")
    try:
        wait_for(lambda: query.lastProgress is not None, "a start", query=query)
        create_topic(servers, f"{topic}-2", 2)
        produce(servers, f"{topic}-2", values(10, partitions=2))
        wait_for(lambda: sum(job.committed().values()) == 20, "the new topic", query=query)
    finally:
        query.stop()
    assert offsets_of(job.result) == all_of(f"{topic}-2", 2, 5)


def test_a_topic_that_is_made_anew(
    spark: SparkSession, servers: str, topic: str, tmp_path: Path, spark_log: SparkLog
) -> None:
    create_topic(servers, topic)
    produce(servers, topic, values(10))
    job = Job(spark, servers, tmp_path, subscribe=topic, failOnDataLoss="report")
    query = job.start(processingTime="100 milliseconds")
    try:
        wait_for(lambda: job.committed() == {(topic, 0): 10}, "the first log", query=query)
        delete_topic(servers, topic)
        create_topic(servers, topic)
        produce(servers, topic, values(4))
        wait_for(lambda: job.committed() == {(topic, 0): 4}, "the second log", query=query)
    finally:
        query.stop()
    assert f"{topic}-0 was read up to offset 10, but its log was recreated since" in spark_log.text()
    assert sorted(offsets_of(job.result)) == sorted(all_of(topic, 1, 10) + all_of(topic, 1, 4))


Group = dict[tuple[str, int], int]


def watch_group(job: Job, topic: str, servers: str, group: Callable[[], Group]) -> None:
    """Produce in waves: the group's offsets are never ahead of the checkpoint, and reach the end."""
    query = job.start(processingTime="100 milliseconds")
    end = 0

    def follows() -> bool:
        shown = group()
        committed = job.committed()  # read later: it can only have grown
        assert all(offset <= committed.get(key, -1) for key, offset in shown.items()), (shown, committed)
        return shown == {(topic, 0): end, (topic, 1): end}

    try:
        for _ in range(2):
            produce(servers, topic, values(60, 2 * end, partitions=2))
            end += 30
            wait_for(follows, f"the group at {end}", query=query)
    finally:
        query.stop()


@needs_admission_control
def test_group_offsets_in_a_folder(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    create_topic(servers, topic, 2)
    tree = tmp_path / "the tree"
    options = {"kafka.group.id": "g", "offsetsPath": str(tree), "commitOffsets": "true"}
    job = Job(spark, servers, tmp_path, subscribe=topic, **options)

    def group() -> Group:
        # Read with the package's own tree: tests/directories tests the format of the files.
        from spark_klog.trees.consumers import OffsetDirectory
        from spark_klog.trees.opening import open_tree

        shown = open_tree(str(tree))
        try:
            return OffsetDirectory(shown, "g").fetch([(topic, 0), (topic, 1)])
        finally:
            shown.close()

    watch_group(job, topic, servers, group)
    produce(servers, topic, values(20, 120, partitions=2))
    assert job.run() == [20]  # one micro-batch, and no later one that publishes its offsets
    assert group() == {(topic, 0): 70, (topic, 1): 70}


@pytest.mark.test_all("long")  # test_group_progress.py has it without a query
@needs_admission_control
def test_a_group_that_can_not_be_written_does_not_stop_the_query(
    spark: SparkSession, servers: str, topic: str, tmp_path: Path, spark_log: SparkLog
) -> None:
    create_topic(servers, topic)
    (tmp_path / "file").write_text("not a folder")
    options = {"kafka.group.id": "g", "offsetsPath": str(tmp_path / "file"), "commitOffsets": "true"}
    produce(servers, topic, values(30))
    job = Job(spark, servers, tmp_path, subscribe=topic, maxOffsetsPerTrigger="10", **options)
    assert sum(job.run()) == 30
    assert offsets_of(job.result) == all_of(topic, 1, 30)
    assert "retrying until it succeeds" in spark_log.text()


def test_a_broker_that_is_killed(
    spark: SparkSession, make_cluster: Callable[..., EmbeddedCluster], topic: str, tmp_path: Path
) -> None:
    cluster = make_cluster()
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    job = Job(spark, servers, tmp_path, subscribe=topic, maxOffsetsPerTrigger="500")
    query = job.start(processingTime="100 milliseconds")
    try:
        writer = threading.Thread(target=produce, args=(servers, topic, values(2000, partitions=2)))
        writer.start()
        wait_for(lambda: sum(job.committed().values()) > 0, "rows", query=query)
        cluster.kill(0)
        cluster.restart(0)
        writer.join()
        there = [(record.topic, record.partition, record.offset) for record in consume(servers, topic)]
        wait_for(lambda: sum(job.committed().values()) == len(there), "the end", query=query)
        assert query.isActive
    finally:
        query.stop()
    assert offsets_of(job.result) == there
    assert {bytes(row.value) for row in job.result.collect()} == {record.value for record in values(2000)}


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        if parent == pid:
            found.append(int(folder.name))
    return found


def workers(jvm: int) -> list[int]:
    """The Python workers that run tasks: pyspark.daemon forks them. (Others plan queries.)"""
    found = []
    for daemon in children(jvm):
        try:
            command = Path(f"/proc/{daemon}/cmdline").read_bytes()
        except OSError:
            continue
        if b"pyspark.daemon\0pyspark.worker" in command:
            found += children(daemon)
    return found


def test_workers_that_are_killed(
    spark: SparkSession, servers: str, topic: str, tmp_path: Path, spark_log: SparkLog
) -> None:
    create_topic(servers, topic, 4)
    produce(servers, topic, values(12_000, partitions=4), batch_num_messages=2)
    # Many small requests make tasks long enough to be killed.
    frame = read(spark, servers, subscribe=topic, **{"kafka.max.partition.fetch.bytes": 1})
    jvm = spark.sparkContext._gateway.proc.pid
    failures: list[BaseException] = []

    def failed_tasks() -> int:
        return spark_log.text().count("Exception in task")

    def active_tasks() -> int:
        tracker = spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
        return sum(stage.numActiveTasks for stage in stages if stage is not None)

    def write() -> None:
        try:
            frame.write.parquet(str(tmp_path / "output"))
        except BaseException as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while writer.is_alive() and not failed_tasks():
            if not active_tasks() or not workers(jvm):
                time.sleep(0.05)
                continue
            before = failed_tasks()
            time.sleep(0.1)  # by then the workers read, for a second or more
            for pid in workers(jvm):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while writer.is_alive() and failed_tasks() == before and time.monotonic() < deadline:
                time.sleep(0.05)
    finally:
        writer.join()
    assert failures == []
    assert failed_tasks()
    assert offsets_of(spark.read.parquet(str(tmp_path / "output"))) == all_of(topic, 4, 3_000)
