"""Connections that a Python worker keeps for its next task."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from spark_klog.columns.schema import WITHOUT_HEADERS
from spark_klog.spark import worker_process
from spark_klog.spark.options import source_options
from spark_klog.spark.read.ranges import OffsetRange
from spark_klog.spark.read.tasks import read_ranges
from tests.support.brokers.scripted_broker import ScriptedCluster


@pytest.fixture
def brokers() -> Iterator[ScriptedCluster]:
    worker_process._forget_clusters()
    with ScriptedCluster({"t": 1}) as running:
        running.append("t", 0, [b"%d" % number for number in range(100)], size=10)
        yield running
    worker_process._forget_clusters()


def rows(brokers: ScriptedCluster, **settings: str) -> Iterator[int]:
    options = {"kafka.bootstrap.servers": brokers.bootstrap_servers, "subscribe": "t", **settings}
    options |= {"kafka.max.partition.fetch.bytes": "100"}
    wanted = [OffsetRange("t", 0, 0, 100)]
    for batch in read_ranges(source_options(options, streaming=False), wanted, WITHOUT_HEADERS):
        yield batch.num_rows


def connections(brokers: ScriptedCluster) -> set[int]:
    """The connections that fetches used."""
    return {asked.connection for asked in brokers.asked if asked.name == "Fetch"}


def test_connections_are_used_again_and_are_few(brokers: ScriptedCluster) -> None:
    for _ in range(3):
        assert sum(rows(brokers)) == 100
    assert len(connections(brokers)) == 1
    under_way = rows(brokers)
    for number in range(20):
        assert sum(rows(brokers, **{"kafka.client.id": f"client {number}"})) == 100
    assert len(worker_process._clusters) <= 8
    assert sum(under_way) == 100
    assert len(connections(brokers)) <= 23


def test_a_forked_process_has_none(brokers: ScriptedCluster) -> None:
    assert sum(rows(brokers)) == 100
    before = connections(brokers)
    child = os.fork()
    if not child:
        code = 1
        try:
            code = int(bool(worker_process._clusters) or sum(rows(brokers)) != 100)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sum(rows(brokers)) == 100
    assert len(connections(brokers)) == len(before) + 1
