"""A query's start is resolved once and kept in the checkpoint; records that the log no longer has are reported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition

from spark_klog.columns.schema import WITHOUT_HEADERS
from spark_klog.errors import DataLossError
from spark_klog.spark.options import source_options
from spark_klog.spark.read import stream
from spark_klog.spark.read.broker_source import BrokerSource
from spark_klog.spark.read.source import BatchQueryReader, KlogDataSource
from spark_klog.spark.read.stream import RangePartition, StreamReader
from spark_klog.spark.versions import JsonOffsets, ReadAllAvailable, ReadLimit
from tests.spark.support import (
    ImpatientJob,
    Job,
    create_topic,
    delete_records,
    delete_topic,
    needs_admission_control,
    offsets_of,
    produce,
    values,
    wait_for,
)

SECONDS = 60


def rows(topic: str, first: int, end: int, partition: int = 0) -> list[tuple[str, int, int]]:
    return [(topic, partition, offset) for offset in range(first, end)]


class FailingJob(Job):
    """A job whose tasks fail while a file exists."""

    def __init__(self, spark: SparkSession, servers: str, folder: Path, **options: Any) -> None:
        super().__init__(spark, servers, folder, **options)
        self.stumbling_block = folder / "fail"

    def frame(self) -> DataFrame:
        path = str(self.stumbling_block)

        def stumble(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            import os

            if os.path.exists(path):
                raise RuntimeError("stumbled")
            yield from batches

        frame = super().frame()
        return frame.mapInArrow(stumble, frame.schema)

    def fail(self) -> None:
        """Run the query until a task of its first micro-batch fails."""
        self.stumbling_block.touch()
        with pytest.raises(StreamingQueryException, match="stumbled"):
            self.run()
        self.stumbling_block.unlink()


def logged(job: Job, number: int) -> dict[str, dict[str, int]]:
    """The offsets of a micro-batch in the checkpoint."""
    found: dict[str, dict[str, int]] = json.loads(
        (job.checkpoint / "offsets" / str(number)).read_text().splitlines()[2]
    )
    return found


@pytest.mark.usefixtures("one_attempt")
@needs_admission_control
def test_a_first_batch_that_failed_starts_again_where_it_started(
    spark: SparkSession, servers: str, topic: str, tmp_path: Path
) -> None:
    """The repeated micro-batch keeps its start: "-3" would mean other records by then."""
    create_topic(servers, topic)
    produce(servers, topic, values(10))
    job = FailingJob(spark, servers, tmp_path, subscribe=topic, startingOffsets="-3")
    job.fail()
    assert logged(job, 0) == {topic: {"0": 10}, f'start of query {{"{topic}":{{"0":7}}}}': {}}
    produce(servers, topic, values(5, 10))
    assert job.run() == [3, 5]
    assert offsets_of(job.result) == rows(topic, 7, 15)
    assert logged(job, 1) == {topic: {"0": 15}}


def test_no_batch_follows_where_nothing_has_come(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    """No micro-batch follows without new records, although its entry would differ: the first has the query's start."""
    create_topic(servers, topic)
    produce(servers, topic, values(10))
    job = Job(spark, servers, tmp_path, subscribe=topic, startingOffsets="latest")
    assert job.run() == []
    assert logged(job, 0) == {topic: {"0": 10}, f'start of query {{"{topic}":{{"0":10}}}}': {}}
    job.run()
    assert not (job.checkpoint / "offsets" / "1").exists()
    produce(servers, topic, values(2, 10))
    assert job.run() == [2]
    assert offsets_of(job.result) == rows(topic, 10, 12)


def stream_reader(servers: str, topic: str, **options: str) -> StreamReader:
    subscribed = {"subscribe": topic} if topic else {}
    source = KlogDataSource({"kafka.bootstrap.servers": servers, **subscribed, **options})
    return source.streamReader(source.schema())


def ranges_of(partitions: Sequence[InputPartition]) -> list[tuple[int, int]]:
    found = []
    for item in partitions:
        assert isinstance(item, RangePartition)
        found += [(entry.start, entry.end) for entry in item.ranges]
    return sorted(found)


class Plans:
    """A query's micro-batches as Spark plans them, without Spark, until a restart: `run` again for a new process."""

    def __init__(self, servers: str, topic: str, **options: str) -> None:
        self._arguments, self._options = (servers, topic), {"startingOffsets": "earliest", **options}
        self.end: JsonOffsets | None = None
        self.lost: list[tuple[str, int, int, str]] = []

    def run(self, limit: ReadLimit | None = None, **options: str) -> list[list[tuple[str, int, int]]]:
        """Plan until nothing follows; return the (topic, start, end) of each micro-batch's ranges."""
        reader = stream_reader(*self._arguments, **{**self._options, **options})
        reader.prepareForTriggerAvailableNow()
        self.lost, planned = [], []
        try:
            while True:
                begin = reader.initialOffset() if self.end is None else self.end
                end = reader.latestOffset(begin, limit or reader.getDefaultReadLimit())
                if end == self.end:
                    return planned
                parts = reader.partitions(begin, end)
                planned.append([(entry.topic, entry.start, entry.end) for part in parts for entry in part.ranges])
                found = reader.reportLatestOffset().get("lost ranges", [])
                self.lost += [(item["topic"], item["start"], item["end"], item["cause"]) for item in found]
                self.end = end
        finally:
            reader.stop()


@needs_admission_control
def test_limits_do_not_count_what_is_gone(servers: str, topic: str) -> None:
    create_topic(servers, topic)
    produce(servers, topic, values(10))
    plans = Plans(servers, topic, maxOffsetsPerTrigger="10", failOnDataLoss="report")
    assert plans.run() == [[(topic, 0, 10)]]
    produce(servers, topic, values(1000, 10))
    delete_records(servers, topic, {0: 1000})
    assert plans.run() == [[(topic, 1000, 1010)]]
    assert plans.lost == [(topic, 10, 1000, "retention")]


@needs_admission_control
def test_a_partition_whose_first_records_were_deleted_before_it_was_seen(servers: str, topic: str) -> None:
    create_topic(servers, f"{topic}-1")
    produce(servers, f"{topic}-1", values(3))
    plans = Plans(servers, "", subscribePattern=f"{topic}-.", failOnDataLoss="report")
    assert plans.run() == [[(f"{topic}-1", 0, 3)]]
    create_topic(servers, f"{topic}-2")
    produce(servers, f"{topic}-2", values(9))
    delete_records(servers, f"{topic}-2", {0: 5})
    assert plans.run() == [[(f"{topic}-2", 5, 9)]]
    assert plans.lost == [(f"{topic}-2", 0, 5, "retention")]


@needs_admission_control
def test_a_start_beyond_the_end_is_not_there_yet(servers: str, topic: str) -> None:
    create_topic(servers, topic)
    produce(servers, topic, values(5))
    plans = Plans(servers, topic, startingOffsets=json.dumps({topic: {"0": 100}}))
    with pytest.raises(DataLossError, match=r"KLOG_DATA_LOSS.NOT_THERE_YET.*available \[0, 5\)"):
        plans.run()
    plans.run(failOnDataLoss="report")
    assert [(start, cause) for _, start, _, cause in plans.lost] == [(100, "not there yet")]
    produce(servers, topic, values(2, 5))
    assert plans.run() == [[(topic, 5, 7)]]


@needs_admission_control
def test_a_topic_that_went_and_came_back_is_read_from_its_start(
    servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_GONE_SECONDS", 0.1)
    for name in (f"{topic}-1", f"{topic}-2"):
        create_topic(servers, name)
        produce(servers, name, values(5))
    plans = Plans(servers, "", subscribePattern=f"{topic}-.", failOnDataLoss="report")
    assert [sorted(ranges) for ranges in plans.run()] == [[(f"{topic}-1", 0, 5), (f"{topic}-2", 0, 5)]]
    delete_topic(servers, f"{topic}-2")
    plans.run()
    assert plans.lost == [(f"{topic}-2", 5, 5, "deleted")]
    assert plans.end == {f"{topic}-1": {"0": 5}}
    create_topic(servers, f"{topic}-2")
    produce(servers, f"{topic}-2", values(3))
    assert plans.run() == [[(f"{topic}-2", 0, 3)]]


@needs_admission_control
def test_latest_offsets_are_those_of_topics(servers: str, topic: str) -> None:
    """Monitors read latest offsets as numbers; the estimate is optional, and its key can't be a topic's name."""
    create_topic(servers, topic)
    produce(servers, topic, values(5))
    latest = {topic: {"0": 5}}
    for options, more in (({}, set()), ({"estimateRecordBytes": "true"}, {"record bytes"})):
        reader = stream_reader(servers, topic, startingOffsets="earliest", **options)
        reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        shown = reader.reportLatestOffset()
        assert {name: value for name, value in shown.items() if " " not in name} == latest
        assert shown.keys() - latest.keys() == more


@pytest.mark.parametrize("records", [3, 5, 9])
@needs_admission_control
def test_a_batch_of_a_topic_made_anew_is_the_same_when_it_is_run_again(servers: str, topic: str, records: int) -> None:
    """A restarted process can't know that the topic was created again: the checkpoint has the micro-batch's start."""
    create_topic(servers, topic)
    produce(servers, topic, values(5))
    options = {"startingOffsets": "earliest", "failOnDataLoss": "report", "fetchOffset.retryIntervalMs": "10"}
    reader, again = (stream_reader(servers, topic, **options) for _ in range(2))
    first = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    delete_topic(servers, topic)
    create_topic(servers, topic)
    produce(servers, topic, values(records))
    end = reader.latestOffset(first, ReadAllAvailable())
    assert end != first
    [lost] = reader.reportLatestOffset()["lost ranges"]
    assert (lost["start"], lost["cause"]) == (5, "recreated")
    assert ranges_of(reader.partitions(first, end)) == [(0, records)]
    assert ranges_of(again.partitions(first, end)) == [(0, records)]
    produce(servers, topic, values(2))
    assert ranges_of(again.partitions(end, again.latestOffset(end, ReadAllAvailable()))) == [(records, records + 2)]
    for each in (reader, again):
        each.stop()


@needs_admission_control
def test_a_topic_that_is_made_anew_again_and_again(servers: str, topic: str) -> None:
    """Spark takes an end that equals the one before for no news: each topic's micro-batch has an end of its own."""
    reader = stream_reader(servers, topic, startingOffsets="earliest", failOnDataLoss="false")
    end: JsonOffsets = {}
    for number in range(4):
        if number:
            delete_topic(servers, topic)
        create_topic(servers, topic)
        produce(servers, topic, values(2))
        begin, end = end, reader.latestOffset(end, ReadAllAvailable())
        assert end != begin
        again = stream_reader(servers, topic, failOnDataLoss="false")
        assert ranges_of(reader.partitions(begin, end)) == ranges_of(again.partitions(begin, end)) == [(0, 2)]
        again.stop()
        assert reader.latestOffset(end, ReadAllAvailable()) == end
    reader.stop()


@needs_admission_control
def test_a_deleted_topic_is_looked_for_with_pauses(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups last `_GONE_SECONDS`, whatever the options say: a broker that just started may not know the topic."""
    create_topic(servers, topic)
    produce(servers, topic, values(5))
    options = {"startingOffsets": "earliest", "failOnDataLoss": "report"}
    retries = {"fetchOffset.retryIntervalMs": "0", "fetchOffset.numRetries": "0"}
    reader, again = (stream_reader(servers, topic, **options, **retries) for _ in range(2))
    first = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    delete_topic(servers, topic)
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        assert seconds > 0.02
        now += seconds

    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(stream, "_GONE_SECONDS", 1.0)
    assert reader.latestOffset(first, ReadAllAvailable()) == first  # the next plans look for it
    assert now == 0.0
    assert again.latestOffset(first, ReadAllAvailable()) != first  # the first plan of a process looks at once
    assert ranges_of(again.partitions({}, first)) == []
    assert 2.0 <= now < 5.0
    for each in (reader, again):
        each.stop()


@needs_admission_control
def test_available_now_reads_no_further_than_a_topic_made_anew(servers: str, topic: str) -> None:
    """If it did, the checkpoint would be ahead of the new log, and records up to there would never be read."""
    create_topic(servers, topic)
    produce(servers, topic, values(100))
    options = {"startingOffsets": "earliest", "failOnDataLoss": "report", "maxOffsetsPerTrigger": "50"}
    reader = stream_reader(servers, topic, **options)
    reader.prepareForTriggerAvailableNow()
    limit = reader.getDefaultReadLimit()
    first = reader.latestOffset(reader.initialOffset(), limit)
    delete_topic(servers, topic)
    create_topic(servers, topic)
    produce(servers, topic, values(5))
    second = reader.latestOffset(first, limit)
    assert ranges_of(reader.partitions(first, second)) == [(0, 5)]
    assert reader.latestOffset(second, limit) == second
    reader.stop()


@needs_admission_control
def test_a_broker_that_lags_behind_makes_no_topic_anew(
    servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that lags behind answers with the deleted topic's id; the reader must not take it for a new topic."""
    create_topic(servers, topic)
    produce(servers, topic, values(5))
    options = {"startingOffsets": "earliest", "failOnDataLoss": "report", "fetchOffset.retryIntervalMs": "10"}
    reader = stream_reader(servers, topic, **options)
    first = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    former = reader._cluster.topic_ids[topic]
    delete_topic(servers, topic)
    create_topic(servers, topic)
    produce(servers, topic, values(3))
    second = reader.latestOffset(first, ReadAllAvailable())
    produce(servers, topic, values(2))
    look_up = BrokerSource.partitions

    def lagging(source: BrokerSource, **options: Any) -> list[tuple[str, int]]:
        there = look_up(source, **options)
        source.topic_ids = {topic: former}
        source.cluster.topic_ids[topic] = former
        return there

    with monkeypatch.context() as patched:
        patched.setattr(BrokerSource, "partitions", lagging)
        third = reader.latestOffset(second, ReadAllAvailable())
    assert ranges_of(reader.partitions(second, third)) == [(3, 5)]
    assert reader.latestOffset(third, ReadAllAvailable()) == third
    reader.stop()


@needs_admission_control
def test_a_partition_that_was_away_is_read_on(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker or an ACL may hide a partition for a while; then the query continues where it was."""
    monkeypatch.setattr(stream, "_GONE_SECONDS", 0.0)
    create_topic(servers, topic, 2)
    produce(servers, topic, values(10, partitions=2))
    options = {
        "startingOffsets": "earliest",
        "failOnDataLoss": "report",
        "fetchOffset.numRetries": "0",
        "minOffsetsPerTrigger": "3",
    }
    reader, again = (stream_reader(servers, topic, **options) for _ in range(2))
    first = reader.latestOffset({}, reader.getDefaultReadLimit())
    with monkeypatch.context() as patch:
        patch.setattr(BrokerSource, "partitions", lambda *_, **__: [(topic, 0)])
        second = reader.latestOffset(first, ReadAllAvailable())
    assert second == {topic: {"0": 5}}
    produce(servers, topic, values(2, partitions=2))
    assert reader.latestOffset(second, reader.getDefaultReadLimit()) == second, "too little"
    produce(servers, topic, values(2, partitions=2))
    third = reader.latestOffset(second, ReadAllAvailable())
    assert third == {topic: {"0": 7, "1": 7}, f'start of micro-batch {{"{topic}":{{"1":5}}}}': {}}
    assert ranges_of(reader.partitions(second, third)) == ranges_of(again.partitions(second, third)) == [(5, 7), (5, 7)]
    for each in (reader, again):
        each.stop()


@pytest.mark.test_all("long")
def test_all_topics_may_go(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    """The checkpoint still shows a micro-batch: a query that started at latest again would skip new topics' records."""
    create_topic(servers, f"{topic}-1")
    produce(servers, f"{topic}-1", values(5))
    options = {"failOnDataLoss": "false", "startingOffsets": "latest"}
    job = ImpatientJob(spark, servers, tmp_path, subscribePattern=f"{topic}-.", **options)
    assert job.run() == []
    delete_topic(servers, f"{topic}-1")
    assert job.run() == []
    assert job.committed() == {}
    create_topic(servers, f"{topic}-2")
    produce(servers, f"{topic}-2", values(4))
    assert job.run() == [4]
    assert offsets_of(job.result) == rows(f"{topic}-2", 0, 4)


def five_records_and_an_open_one(servers: str, topic: str) -> Producer:
    """Produce five records, and one in a transaction that stays open; return its producer."""
    create_topic(servers, topic)
    produce(servers, topic, values(5))
    producer = Producer({"bootstrap.servers": servers, "transactional.id": topic, "log_level": 0})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"open")
    producer.flush(30)
    return producer


def test_an_open_transaction_is_no_shorter_log(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    """After a switch from read_uncommitted the query is ahead of read_committed's end: that is no truncation."""
    producer = five_records_and_an_open_one(servers, topic)
    job = Job(spark, servers, tmp_path, subscribe=topic)
    assert job.run() == [6]
    job.options["kafka.isolation.level"] = "read_committed"
    query = job.start(processingTime="100 milliseconds")
    try:
        wait_for(lambda: not query.status["isTriggerActive"] and query.isActive, "a trigger", SECONDS, query)
        producer.produce(topic, b"more")
        producer.commit_transaction(30)
        wait_for(lambda: job.committed() == {(topic, 0): 8}, "what was committed", SECONDS, query)
    finally:
        query.stop()
    assert offsets_of(job.result) == rows(topic, 0, 7)


@needs_admission_control
def test_a_planned_micro_batch_waits_for_an_open_transaction(
    servers: str, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A read_uncommitted run planned the micro-batch: with read_committed no record of it is lost or skipped."""
    producer = five_records_and_an_open_one(servers, topic)
    options = {"startingOffsets": "earliest", "failOnDataLoss": "false", "kafkaConsumer.pollTimeoutMs": "60000"}
    before = stream_reader(servers, topic, **options)
    end = before.latestOffset(before.initialOffset(), ReadAllAvailable())
    again = stream_reader(servers, topic, **options, **{"kafka.isolation.level": "read_committed"})
    [task] = again.partitions({}, end)
    told = f"{topic}-0 gave no record at offset 5 for 60 s: a transaction that began at offset 5 is open"
    with caplog.at_level("INFO", "spark_klog"), ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: [row for batch in again.read(task) for row in batch.column("offset").to_pylist()])
        wait_for(lambda: found.done() or told in caplog.text, "the reason for the wait")
        producer.commit_transaction(30)
        assert found.result() == [0, 1, 2, 3, 4, 5]
    for each in (before, again):
        each.stop()


@pytest.mark.parametrize(("start", "is_lost"), [(6, False), (7, True)])
def test_a_batch_query_that_starts_in_an_open_transaction(servers: str, topic: str, start: int, is_lost: bool) -> None:
    """A read_uncommitted group may have committed such an offset; only a start after the log's end is a loss."""
    producer = five_records_and_an_open_one(servers, topic)
    options = {"kafka.bootstrap.servers": servers, "subscribe": topic, "kafka.isolation.level": "read_committed"}
    options["startingOffsets"] = json.dumps({topic: {"0": start}})
    reader = BatchQueryReader(source_options(options, streaming=False), WITHOUT_HEADERS)
    if is_lost:
        with pytest.raises(DataLossError, match="not there yet"):
            reader.partitions()
    else:
        assert ranges_of(reader.partitions()) == []
    producer.abort_transaction(30)
