"""Writes that can't be exactly once fail with the reason, before any request to a broker."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from spark_klog.errors import ConfigError
from spark_klog.spark.decisions import continue_at
from spark_klog.spark.write import exactly_once_driver
from spark_klog.spark.write.decisions.decision_place import DecisionPlace
from spark_klog.spark.write.decisions.entries import Identity
from spark_klog.spark.write.exactly_once import Begun, Transaction
from spark_klog.spark.write.exactly_once_driver import (
    CheckpointMismatch,
    Claimed,
    ExactlyOnceWriter,
    WrittenInTransaction,
)
from spark_klog.spark.write.sink_options import sink_options
from tests.spark.support import error_of

SCHEMA = StructType([StructField("value", StringType())])
#: No broker listens at this address.
OPTIONS = {"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "t", "deliveryGuarantee": "exactly-once"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decisionTopic": "a b"}, "option decisionTopic: "),
        (
            {"deliveryGuarantee": "at-least-once", "decisionTopic": "d"},
            "decisionTopic needs deliveryGuarantee=exactly",
        ),
    ],
)
def test_options_of_decisions(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sink_options({**OPTIONS, "checkpointLocation": "s3a://a/b", **options}, streaming=True)
    assert message in str(caught.value)


def config_error(text: str) -> str:
    """The line of our `ConfigError`; fails if Spark shows an error of pickling instead."""
    return text.split("\nspark_klog.errors.ConfigError: ")[1].splitlines()[0]


def test_batch_writes_without_a_name(spark: SparkSession) -> None:
    writer = spark.range(3).selectExpr("cast(id as string) as value").write.format("klog").mode("append")
    for more in ({}, {"checkpointLocation": "/tmp/a"}):
        error = config_error(error_of(writer.options(**OPTIONS, **more).save))
        assert "deliveryGuarantee=exactly-once of a batch write needs the option writeId" in error


@pytest.mark.parametrize(
    ("given", "streaming", "told"),
    [
        ({"writeId": "a"}, True, "option writeId is for batch writes"),
        ({"writeId": "a", "deliveryGuarantee": "at-least-once"}, False, "option writeId needs delivery"),
        ({"writeVersion": "1", "deliveryGuarantee": "at-least-once"}, False, "option writeVersion needs delivery"),
        ({"writeVersion": "1"}, False, "needs the option writeId"),
        ({"writeId": "a", "writePlan": "b"}, False, "option writePlan needs writeVersion"),
        ({"writeId": "a", "writeVersion": "-1"}, False, "writeVersion=-1 must be an integer of at least 0"),
        ({"writeId": " a"}, False, "writeId=' a' must be 1 to 249 printable characters"),
        ({"writeId": "a", "kafka.acks": "1"}, False, "deliveryGuarantee=exactly-once needs kafka.acks=all"),
        ({"writeId": "a", "decisionTopic": "t"}, False, "option topic=t is the topic of the decisions: set another"),
        ({"topic": "__klog_decisions"}, True, "option topic=__klog_decisions is the topic of the decisions"),
    ],
)
def test_options_of_batch_writes(given: dict[str, str], streaming: bool, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        sink_options({**OPTIONS, "checkpointLocation": "/a", **given}, streaming=streaming)


@pytest.mark.parametrize("given", [{}, {"writeId": "a", "deliveryGuarantee": "exactly-once"}])
def test_a_checkpoint_of_a_batch_write(given: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    options = {**OPTIONS, "deliveryGuarantee": "at-least-once", **given}
    sink_options(options)
    sink_options({**options, "checkpointlocation": "/a"})
    (record,) = caplog.records
    assert "option checkpointLocation has no effect in a batch write" in record.getMessage()


@pytest.mark.parametrize(
    ("options", "batch", "told"),
    [
        ({}, "7", "batch='7' must be the number of a micro-batch, an integer of at least 0"),
        ({}, 7.0, "batch=7.0 must be the number"),
        ({}, True, "batch=True must be the number"),
        ({}, -1, "batch=-1 must be the number"),
        ({"deliveryGuarantee": None}, 7, "needs the options of the query's writer, deliveryGuarantee=exactly-once too"),
        ({"deliveryGuarantee": "at-least-once"}, 7, "deliveryGuarantee=exactly-once too"),
        ({"checkpointLocation": None}, 7, "needs the option checkpointLocation"),
        ({"createTopics": 0}, 7, "option createTopics=0 must be an integer of at least 1"),
        ({"useLatestVersion": True}, 7, "option useLatestVersion needs schemaRegistryUrl"),
    ],
)
def test_arguments_of_continue_at(options: dict[str, Any], batch: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        continue_at({**OPTIONS, "checkpointLocation": "s3a://a/b", **options}, batch)


def test_a_micro_batch_that_does_not_follow_the_last_decision() -> None:
    """Going on is right after at-least-once writes; beside another run it would duplicate rows."""
    behind, ahead = str(CheckpointMismatch(3, 10, "topic d (k)")), str(CheckpointMismatch(12, 10, "topic d (k)"))
    assert "Stop one of two runs, and start this one again if it is the other. Only if there was no other," in behind
    assert "the rows of micro-batches 3 to 10 are there already, and are written again" in behind
    assert "another run" not in ahead
    assert "To go on, stop the query and call spark_klog.spark.decisions.continue_at(OPTIONS, 12)" in ahead


class _Writes(Exception):
    """A task has begun to write."""


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ExactlyOnceWriter, Claimed]]:
    """The writer of a task of a micro-batch in a Python worker, but without Spark and brokers."""

    def begins(*_: Any) -> None:
        raise _Writes

    def make(batch: int, decided: int, *, is_replanned: bool = False) -> tuple[ExactlyOnceWriter, Claimed]:
        context = SimpleNamespace(getLocalProperty=lambda _: str(batch), partitionId=lambda: 0)
        monkeypatch.setattr(exactly_once_driver, "TaskContext", SimpleNamespace(get=lambda: context))
        monkeypatch.setattr(exactly_once_driver, "PRODUCERS", SimpleNamespace(borrow_transactional=begins))
        monkeypatch.setattr(exactly_once_driver, "prepare_worker", lambda: None)
        options = sink_options({**OPTIONS, "checkpointlocation": "s3a://a/b"}, streaming=True)
        writer = ExactlyOnceWriter(options, SCHEMA)
        place = DecisionPlace("d", "stream/s3a://a/b")
        writer._claimed = Claimed(Begun(7, decided), Identity(), place, 0.0, is_replanned)
        return writer, writer._claimed

    return make


@pytest.mark.parametrize("batch", [9, 12, 0])
def test_tasks_of_a_micro_batch_that_does_not_follow(task: Callable[..., Any], batch: int) -> None:
    writer, _ = task(batch, 10)
    with pytest.raises(CheckpointMismatch):
        writer.write(iter([]))


@pytest.mark.parametrize(
    ("batch", "decided", "message"),
    [
        (3, 10, "the last decision in topic d (stream/s3a://a/b) is of 10: another run of this query uses the"),
        (
            12,
            10,
            "wrote at-least-once meanwhile. To go on, stop the query and call spark_klog.spark.decisions.con",
        ),
        (1, -1, "topic d (stream/s3a://a/b) has no decision of this checkpoint: it is a copy, or was moved here, or"),
    ],
)
def test_tasks_of_a_micro_batch_that_the_topic_does_not_expect(
    task: Callable[..., Any], batch: int, decided: int, message: str
) -> None:
    writer, _ = task(batch, decided)
    with pytest.raises(CheckpointMismatch) as caught:
        writer.write(iter([]))
    assert message in str(caught.value)
    assert f"continue_at(OPTIONS, {batch})" in str(caught.value)
    assert str(copy.copy(caught.value)) == str(caught.value)


def test_tasks_of_a_decided_micro_batch(task: Callable[..., Any]) -> None:
    """They write nothing, and take all rows; if Spark has planned other rows for it they are refused."""
    writer, claimed = task(10, 10)
    rows = iter([pa.record_batch({"value": ["a"]})] * 3)
    assert writer.write(rows) == WrittenInTransaction({}, claimed, None)
    assert list(rows) == []
    writer, _ = task(10, 10, is_replanned=True)
    with pytest.raises(CheckpointMismatch, match="other offsets"):
        writer.write(iter([]))


@pytest.mark.parametrize(("batch", "decided", "is_replanned"), [(11, 10, False), (11, 10, True), (0, -1, False)])
def test_tasks_of_a_micro_batch_that_follows(
    task: Callable[..., Any], batch: int, decided: int, is_replanned: bool
) -> None:
    writer, _ = task(batch, decided, is_replanned=is_replanned)
    with pytest.raises(_Writes):
        writer.write(iter([]))


def test_spark_gives_a_micro_batch_up(task: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tasks that have ended have written is settled at once, for readers not to wait for it."""
    writer, claimed = task(11, 10)
    settled: list[tuple[Any, ...]] = []
    monkeypatch.setattr(exactly_once_driver, "settle", lambda _, *given: settled.append(given))
    writer.abort([None], 11)
    assert settled == []
    writer.abort([None, WrittenInTransaction({}, claimed, Transaction("x", 1, 0))], 11)
    assert settled == [(claimed, (Transaction("x", 1, 0),))]
