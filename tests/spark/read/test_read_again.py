"""DataFrames that Spark reads again with the plan of their first use: a warning, an error that explains, the recipe."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
from pyspark.sql import SparkSession

from spark_klog.client.cluster import Cluster
from spark_klog.spark.read.tasks import Plan, warn_if_read_again
from tests.spark.conftest import SparkLog
from tests.spark.support import create_topic, delete_records, error_of, produce, read, values, wait_for

_WARNING = "records are not read: "


def _until_warned(log: SparkLog, action: Callable[[], object]) -> None:
    """A worker process warns at its second read, and Spark may have as many as it has cores."""

    def is_warned() -> bool:
        action()
        return _WARNING in log.text()

    wait_for(is_warned, "the warning")


def test_a_frame_that_is_used_again(spark: SparkSession, servers: str, topic: str, spark_log: SparkLog) -> None:
    create_topic(servers, topic)
    frame = read(spark, servers, subscribe=topic)
    assert frame.count() == 0
    assert frame.count() == 0
    assert _WARNING not in spark_log.text(), "there is nothing newer"
    produce(servers, topic, values(3))
    _until_warned(spark_log, frame.count)
    assert f"{topic}-0 ends at offset 3, this read at 0; the DataFrame was planned at " in spark_log.text()
    assert read(spark, servers, subscribe=topic).count() == 3


def test_once_in_a_process(servers: str, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    """The tasks of an action, and their retries, are one read; after the warning there is no other one."""
    create_topic(servers, topic)
    produce(servers, topic, values(3))
    plan = Plan({(topic, 0): 2})
    context = mock.Mock()
    with Cluster.connect({"bootstrap.servers": servers}) as cluster, mock.patch("pyspark.TaskContext") as spark:
        spark.get.return_value = context
        for execution, warnings in ((None, 0), ("7", 0), ("7", 0), ("8", 1), ("8", 1), ("9", 1)):
            context.getLocalProperty.return_value = execution
            warn_if_read_again(plan, cluster)
            assert len(caplog.messages) == warnings, execution


def test_an_end_that_was_chosen(spark: SparkSession, servers: str, topic: str, spark_log: SparkLog) -> None:
    create_topic(servers, topic)
    produce(servers, topic, values(3))
    chosen = read(spark, servers, subscribe=topic, endingOffsets=f'{{"{topic}":{{"0":2}}}}')
    twice = read(spark, servers, subscribe=topic)
    assert twice.union(twice).count() == 6, "one action, whose tasks read the plan twice"
    produce(servers, topic, values(3))
    assert {chosen.count() for _ in range(4)} == {2}
    assert _WARNING not in spark_log.text()


@pytest.mark.usefixtures("one_attempt")
def test_a_frame_whose_records_are_gone(spark: SparkSession, servers: str, topic: str) -> None:
    create_topic(servers, topic)
    produce(servers, topic, values(5))
    frame = read(spark, servers, subscribe=topic)
    assert frame.count() == 5
    delete_records(servers, topic, {0: 4})
    text = error_of(frame.count)
    assert "[KLOG_DATA_LOSS.RETENTION]" in text
    assert "call load() again for each use, in a stream within foreachBatch" in text
