"""The log, and the query's final error, when a broker goes away."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_klog.embedded import EmbeddedCluster

from .conftest import SparkLog
from .support import Job, create_topic, error_of, produce, values


@pytest.mark.test_all("again")  # tests/client/net/test_connection.py has both texts
def test_the_log_names_the_time_waited_and_the_setting(
    spark: SparkSession,
    spark_log: SparkLog,
    make_cluster: Callable[..., EmbeddedCluster],
    topic: str,
    tmp_path: Path,
) -> None:
    cluster = make_cluster()
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 1)
    produce(servers, topic, values(10))
    limits = {"kafka.request.timeout.ms": "4000", "kafka.socket.connection.setup.timeout.ms": "4000"}
    query = Job(spark, servers, tmp_path, subscribe=topic, **limits).start(processingTime="0 seconds")
    try:
        query.processAllAvailable()
        cluster.kill(0)
        error = error_of(lambda: query.awaitTermination(120))
    finally:
        query.stop()
    port = servers.rpartition(":")[2]
    # while the query waits, the log has the time waited, the time left, the setting and the broker
    assert re.search(
        rf"still trying after [1-3] s, giving up in [1-3] s \(kafka\.[a-z.]+\.ms\): .*{port}", spark_log.text()
    )
    assert re.search(
        rf"{port}.*; tried for \d(\.\d)? s \(kafka\.(request|socket\.connection\.setup)\.timeout\.ms\)", error
    )
