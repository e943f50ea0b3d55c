"""The steps of exactly-once batch writes against our broker and Kafka; tasks run in this process, without Spark."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from spark_klog.client.admin.admin import Admin
from spark_klog.errors import ConfigError
from spark_klog.spark.write import exactly_once_driver
from spark_klog.spark.write.exactly_once import Decision
from spark_klog.spark.write.exactly_once_batch import (
    EarlierWrite,
    ExactlyOnceBatchWriter,
    OtherRunOfWrite,
    PartlyWritten,
    ReplannedWrite,
    WrittenInBatch,
)
from spark_klog.spark.write.exactly_once_driver import NotDecided
from spark_klog.spark.write.producers import PRODUCERS
from spark_klog.spark.write.sink_options import sink_options
from tests.support.clients.transactional.readers import by_confluent
from tests.support.servers.shared_kafka import SharedKafkas
from tests.support.waiting import wait_until

from .support import OURS_AND_KAFKA, brokers_of

_SCHEMA = StructType().add("topic", "string").add("key", "string").add("value", "string")
_ABORTED, _COMMITTED = ("PrepareAbort", "CompleteAbort"), ("PrepareCommit", "CompleteCommit")


@pytest.fixture(scope="module", params=OURS_AND_KAFKA)
def servers(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[str]:
    settings = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"}
    with brokers_of(request.param, module_server_dir, shared_kafkas, settings) as servers:
        yield servers


class Write:
    """Runs of one batch write to one partition."""

    def __init__(self, servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers, self.topic, self._monkeypatch = servers, topic, monkeypatch
        with Admin({"bootstrap.servers": servers}) as admin:
            admin.create_topic(topic, 1)

    def begin(self, **more: str) -> ExactlyOnceBatchWriter:
        """The writer of another run, as the data source makes it."""
        options = {"kafka.bootstrap.servers": self.servers, "topic": self.topic, "writeId": f"day/{self.topic}"}
        checked = sink_options(options | {"deliveryGuarantee": "exactly-once"} | more)
        assert checked.named is not None
        writer = ExactlyOnceBatchWriter(checked, checked.named, _SCHEMA)
        writer.claim()
        return copy.deepcopy(writer)  # Spark pickles it

    def task(self, writer: ExactlyOnceBatchWriter, number: int, *values: str) -> WrittenInBatch:
        """What a task that writes these values reports; Spark may drop it."""
        return self.task_of(writer, number, pa.record_batch([pa.array(values, pa.string())], ["value"]))

    def task_of(self, writer: ExactlyOnceBatchWriter, number: int, rows: pa.RecordBatch) -> WrittenInBatch:
        context = SimpleNamespace(get=lambda: SimpleNamespace(partitionId=lambda: number))
        self._monkeypatch.setattr(exactly_once_driver, "TaskContext", context)
        written = writer.write(iter([rows]))
        assert isinstance(written, WrittenInBatch)
        return written

    def state(self, written: WrittenInBatch) -> str:
        assert written.transaction is not None
        name = written.transaction.transactional_id
        with Admin({"bootstrap.servers": self.servers}) as admin:
            return admin.describe_transactions([name]).check()[name].state

    def read(self) -> list[str]:
        return sorted(by_confluent(self.servers, self.topic, 0))

    def becomes(self, *values: str) -> None:
        """Coordinators answer EndTxn before they write the markers."""
        wait_until(lambda: self.read() == sorted(values), f"{values}", 30)


@pytest.fixture
def write(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    yield Write(servers, topic, monkeypatch)
    PRODUCERS.forget()


def test_a_write_runs_twice(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    first = write.begin()
    lost = write.task(first, 0, "a copy whose message Spark drops")
    first.commit([write.task(first, 0, "a"), None, write.task(first, 1, "b")])
    assert write.state(lost) in _ABORTED
    write.becomes("a", "b")
    caplog.set_level(logging.WARNING, "spark_klog.spark.write.exactly_once_batch")
    again = write.begin()
    assert f"writeId=day/{write.topic} was written before: this run writes nothing" in caplog.text
    written = again.write(iter([pa.record_batch([pa.array(["a"])], ["value"])]))
    again.commit([written])
    again.abort([written])
    write.becomes("a", "b")


def test_rows_to_the_topic_of_the_decisions(write: Write) -> None:
    """By a column; the option is refused before any request."""
    writer = write.begin(topic="")
    rows = pa.record_batch([[write.topic, "__klog_decisions"], ["k", "k"], ["a", "b"]], ["topic", "key", "value"])
    with pytest.raises(ConfigError, match="column 'topic' has __klog_decisions, the topic of the decisions"):
        write.task_of(writer, 0, rows)
    assert write.read() == []


def test_two_runs_at_a_time(write: Write) -> None:
    """The later one goes on. The earlier one is told, and leaves no transaction open."""
    old = write.begin()
    before = write.task(old, 0, "old")
    new = write.begin()
    assert write.state(before) in _ABORTED
    ours = write.task(new, 0, "new")
    after = write.task(old, 1, "old")  # its task starts again
    with pytest.raises(OtherRunOfWrite, match=f"writeId=day/{write.topic}: another run of this write has begun since"):
        old.commit([before, after])
    assert write.state(after) == "Ongoing"
    old.abort([before, after])
    assert write.state(after) in _ABORTED
    assert write.state(ours) == "Ongoing"
    new.commit([ours])
    write.becomes("new")
    with pytest.raises(OtherRunOfWrite):
        old.commit([write.task(old, 0, "late")])


@pytest.mark.parametrize("by", ["abort", "the next run"])
def test_a_driver_that_dies_after_its_decision(write: Write, by: str) -> None:
    first = write.begin()
    task = write.task(first, 0, "a")
    _decide_and_die(first, task)
    assert write.state(task) == "Ongoing"
    if by == "abort":  # Spark calls it if `commit` fails
        first.abort([task])
    else:
        again = write.begin()
        again.commit([again.write(iter([]))])
    assert write.state(task) in _COMMITTED
    write.becomes("a")


def _decide_and_die(writer: ExactlyOnceBatchWriter, *tasks: WrittenInBatch) -> None:
    claimed = writer._own_claim()
    transactions = tuple(one.transaction for one in tasks if one.transaction is not None)
    decision = Decision(writer._number, transactions, writer._target)
    assert writer._log(claimed.identity, is_claimed=True).append(claimed.begun.number, decision)


def test_a_driver_that_dies_before_its_decision(write: Write) -> None:
    first = write.begin()
    task = write.task(first, 0, "lost")
    again = write.begin()
    assert write.state(task) in _ABORTED
    again.commit([write.task(again, 0, "a")])
    write.becomes("a")


def test_a_write_without_rows_is_written_as_well(write: Write) -> None:
    first = write.begin()
    first.commit([write.task(first, 0)])
    again = write.begin()
    again.commit([again.write(iter([pa.record_batch([pa.array(["a"])], ["value"])]))])
    assert write.read() == []


def test_another_topic_with_the_same_id(write: Write) -> None:
    first = write.begin()
    first.commit([write.task(first, 0, "a")])
    with pytest.raises(ConfigError, match=f"was written to the topic {write.topic} before, and this one is"):
        write.begin(topic=f"{write.topic}-2")


def test_versions(write: Write) -> None:
    """As micro-batches: each once, in order, with gaps."""
    for version in (3, 3, 4, 9, 9):
        writer = write.begin(writeVersion=str(version))
        if version > writer._own_claim().begun.decided:
            writer.commit([write.task(writer, 0, str(version))])
        else:
            writer.commit([writer.write(iter([]))])
    running = write.begin(writeVersion="10")
    task = write.task(running, 0, "10")
    with pytest.raises(EarlierWrite, match="version 8 can't be written after version 9, nothing of it is written"):
        write.begin(writeVersion="8")
    running.commit([task])  # which the one that was refused has not stopped
    write.becomes("3", "4", "9", "10")


def test_a_version_with_another_plan(write: Write) -> None:
    """A micro-batch with other offsets than the decided one of its number, as in a checkpoint that was restored."""
    for plan in ("1..2", "1..2"):
        writer = write.begin(writeVersion="1", writePlan=plan)
        if writer._own_claim().begun.decided < 1:
            writer.commit([write.task(writer, 0, "1")])
    running = write.begin(writeVersion="2", writePlan="2..3")
    task = write.task(running, 0, "2")
    with pytest.raises(
        ReplannedWrite, match=f"day/{write.topic} writeVersion=1: this version was written before, made"
    ):
        write.begin(writeVersion="1", writePlan="1..3")
    running.commit([task])  # which the one that was refused has not stopped
    write.begin(writeVersion="2")  # whose plan is not known
    write.becomes("1", "2")


def test_a_version_that_was_decided_without_a_plan(write: Write) -> None:
    first = write.begin(writeVersion="1")
    first.commit([write.task(first, 0, "1")])
    again = write.begin(writeVersion="1", writePlan="1..2")
    assert again._own_claim().begun.decided == 1


def test_a_write_that_takes_too_long(write: Write) -> None:
    """What counts is the time since the first transaction was opened, and not what Spark did before."""
    writer = write.begin(**{"kafka.transaction.timeout.ms": "60000"})
    claimed = writer._own_claim()
    writer._claimed = replace(claimed, at=claimed.at - 3600)
    task = write.task(writer, 0, "a")
    late = replace(task, opened_at=time.time() - 31)
    with pytest.raises(NotDecided, match=r"writeId=day/.* took [3-9]\d\.\d s, more than half of kafka\."):
        writer.commit([late])
    assert write.state(task) == "Ongoing"
    writer.commit([replace(write.task(writer, 1), opened_at=late.opened_at), task])
    write.becomes("a")


def test_a_write_without_rows_that_takes_long(write: Write) -> None:
    """Nothing is open that could time out."""
    writer = write.begin()
    claimed = writer._own_claim()
    writer._claimed = replace(claimed, at=claimed.at - 3600)
    writer.commit([replace(write.task(writer, 0), opened_at=time.time() - 3600)])
    assert write.begin()._own_claim().begun.decided == 0


@pytest.mark.test_all("long")
def test_transactions_that_time_out_after_the_decision(write: Write) -> None:
    first = write.begin()
    in_time = write.task(first, 0, "in time")
    late_writer = copy.deepcopy(first)  # of a worker with another timeout
    late_writer._options.client["transaction.timeout.ms"] = "1000"
    late = write.task(late_writer, 1, "late")
    _decide_and_die(first, in_time, late)
    wait_until(lambda: write.state(late) in _ABORTED, "the timeout", 60)
    for _ in range(2):
        with pytest.raises(PartlyWritten, match=r"version 0: the rows of task 1 are not written"):
            write.begin()
    write.becomes("in time")
