"""What a query asks of a cluster of many partitions and brokers: requests, partitions in them, connections.

The numbers do not depend on the machine. The cluster is simulated; docs/explanation/scale.md has its sizes and times.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.sampling import next_timestamps
from spark_klog.columns.schema import FULL
from spark_klog.spark import worker_process
from spark_klog.spark.options import SourceOptions, source_options
from spark_klog.spark.read.stream import RangePartition, StreamReader
from spark_klog.spark.read.tasks import read_ranges
from spark_klog.spark.versions import ReadAllAvailable
from tests.support.brokers.simulated_cluster import SimulatedCluster

TOPICS, PARTITIONS, BROKERS, RECORDS = 40, 5, 8, 20


@pytest.fixture(scope="module")
def running() -> Iterator[SimulatedCluster]:
    with SimulatedCluster(TOPICS, PARTITIONS, BROKERS, RECORDS) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: SimulatedCluster) -> SimulatedCluster:
    running.tell("forget")
    return running


def _options(cluster: SimulatedCluster, **more: str) -> SourceOptions:
    servers = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "subscribepattern": "t.*"}
    return source_options({**servers, "startingoffsets": "earliest", **more}, True)


@pytest.fixture
def reader(cluster: SimulatedCluster) -> Iterator[StreamReader]:
    reader = StreamReader(_options(cluster), FULL)
    yield reader
    reader.stop()


def _asked(cluster: SimulatedCluster) -> tuple[dict[str, int], dict[str, int]]:
    """The requests by API, and the partitions in them, since the last call."""
    figures = cluster.figures()
    cluster.tell("forget")
    return {api: count for api, count in figures["requests"].items() if api != "ApiVersions"}, figures["partitions"]


def _planned(reader: StreamReader, start: Any, end: Any) -> int:
    tasks: list[Any] = reader.partitions(start, end)
    return sum(span.end - span.start for task in tasks for span in task.ranges)


def test_plans(cluster: SimulatedCluster, reader: StreamReader) -> None:
    """A plan asks for metadata once, and each leader once; for first offsets only of partitions with news."""
    first = reader.latestOffset({}, ReadAllAvailable())
    requests, partitions = _asked(cluster)
    assert requests == {"Metadata": 3, "ListOffsets": 3 * BROKERS}  # connecting, the start, the end
    assert partitions == {"ListOffsets": 3 * TOPICS * PARTITIONS}
    assert reader.latestOffset(first, ReadAllAvailable()) == first
    requests, partitions = _asked(cluster)
    assert requests == {"Metadata": 1, "ListOffsets": BROKERS}
    assert partitions == {"ListOffsets": TOPICS * PARTITIONS}
    cluster.tell("append", every=100, records=7)
    second = reader.latestOffset(first, ReadAllAvailable())
    requests, partitions = _asked(cluster)
    assert partitions == {"ListOffsets": TOPICS * PARTITIONS + 2}
    assert requests["ListOffsets"] <= BROKERS + 2
    assert _planned(reader, first, second) == 14
    assert _asked(cluster) == ({}, {})


def _tasks(reader: StreamReader, end: Any) -> list[RangePartition]:
    return [task for task in reader.partitions({}, end) if isinstance(task, RangePartition)]


def _rows_of(options: SourceOptions, tasks: list[RangePartition]) -> int:
    return sum(
        batch.num_rows
        for task in tasks
        for batch in read_ranges(options, task.ranges, FULL, task.topic_ids, leaders=task.leaders)
    )


def _records(tasks: list[RangePartition]) -> int:
    return sum(span.end - span.start for task in tasks for span in task.ranges)


@pytest.mark.parametrize("least", [50, 37])
def test_a_task_is_one_fetch(cluster: SimulatedCluster, least: int) -> None:
    """Ranges of one leader are in one task, which needs no metadata but the worker's first."""
    options = _options(cluster, minpartitions=str(least))
    reader = StreamReader(options, FULL)
    end = reader.latestOffset({}, ReadAllAvailable())
    tasks, all_records = _tasks(reader, end), _records(_tasks(reader, end))
    reader.stop()
    assert least <= len(tasks) <= least + BROKERS
    nodes = [set(task.leaders) for task in tasks]
    assert sum(map(len, nodes)) <= len(tasks) + BROKERS
    assert all(first.isdisjoint(second) for first, second in pairwise(nodes[:BROKERS]))  # tasks that run at once
    cluster.tell("forget")
    worker_process._forget_clusters()
    assert _rows_of(options, tasks) == all_records
    figures = cluster.figures()
    worker_process._forget_clusters()
    assert figures["requests"]["Fetch"] == sum(map(len, nodes))
    assert figures["requests"]["Metadata"] == 1
    assert figures["opened"] <= 2 * BROKERS
    assert figures["requests"].get("ListOffsets", 0) == 0


def test_leaders_that_have_moved_since_the_plan(cluster: SimulatedCluster) -> None:
    """A task whose leaders are not right any more reads the same records, also of brokers that it does not know."""
    options = _options(cluster, minpartitions="50")
    reader = StreamReader(options, FULL)
    tasks = _tasks(reader, reader.latestOffset({}, ReadAllAvailable()))
    reader.stop()
    for task in tasks:
        task.leaders = tuple(
            999 if span.partition == 1 else node for span, node in zip(task.ranges, task.leaders, strict=True)
        )
    for number in range(0, TOPICS, 10):
        cluster.tell("move", topic=f"t{number:05}", partition=2, node=number % BROKERS)
    worker_process._forget_clusters()
    rows = _rows_of(options, tasks)
    worker_process._forget_clusters()
    assert rows == _records(tasks)


def test_a_sample_of_many_partitions_is_bounded() -> None:
    """A connection keeps the memory of its largest answer: no request asks for more than 1 MiB of a sample."""
    with SimulatedCluster(1, 200, 1, RECORDS) as one:
        with Cluster.connect({"bootstrap.servers": one.bootstrap_servers}) as client:
            assert len(next_timestamps(client, {("t00000", number): 3 for number in range(200)})) == 200
        assert one.figures()["requests"]["Fetch"] == 4


def test_a_leader_that_moves_costs_its_partitions_alone(cluster: SimulatedCluster, reader: StreamReader) -> None:
    first = reader.latestOffset({}, ReadAllAvailable())
    cluster.tell("move", topic="t00007", partition=1, node=0)
    _asked(cluster)
    assert reader.latestOffset(first, ReadAllAvailable()) == first
    requests, partitions = _asked(cluster)
    assert requests == {"Metadata": 1, "ListOffsets": BROKERS}
    assert partitions == {"ListOffsets": TOPICS * PARTITIONS}


def test_all_brokers_are_slow(cluster: SimulatedCluster) -> None:
    """Of a request's time each of many brokers gets a quarter of what is left: one that takes longer than its share of
    a fair division can still answer."""
    cluster.tell("slow", node=-1, seconds=0.5)
    try:
        settings = {"bootstrap.servers": cluster.bootstrap_servers, "request.timeout.ms": "20000"}
        with Cluster.connect(settings) as client:
            cluster.tell("slow", node=-1, seconds=3.5)  # 20 s by 8 brokers are 2.5 s
            assert len(client.metadata(None)) == TOPICS
    finally:
        cluster.tell("slow", node=-1)


def test_many_silent_brokers_are_asked_first() -> None:
    """Each of them had a quarter of what was left: after twelve that was too little for any answer."""
    brokers, silent = 20, 12
    with SimulatedCluster(10, 1, brokers) as large:
        with Cluster.connect({"bootstrap.servers": large.bootstrap_servers, "request.timeout.ms": "20000"}) as client:
            large.tell("slow", node=-1, seconds=100)
            for node in range(silent, brokers):
                large.tell("slow", node=node, seconds=0.3)
            assert len(client.metadata(None)) == 10
            assert len(client.metadata(None)) == 10
            large.tell("forget")
            assert len(client.metadata(None)) == 10  # by one that has answered
            assert large.figures()["nodes"] == 1


def test_a_silent_broker_delays_the_others_little(cluster: SimulatedCluster, reader: StreamReader) -> None:
    """A micro-batch reads what other brokers lead; what the broker leads is read when it answers again."""
    first = reader.latestOffset({}, ReadAllAvailable())
    cluster.tell("append", every=1, records=3)
    cluster.tell("slow", node=5, seconds=100)
    try:
        begin = time.monotonic()
        second = reader.latestOffset(first, ReadAllAvailable())
        assert time.monotonic() - begin < 25  # of the 30 of a request
    finally:
        cluster.tell("slow", node=5)
    silent = TOPICS * PARTITIONS // BROKERS
    assert _planned(reader, first, second) == 3 * (TOPICS * PARTITIONS - silent)
    third = reader.latestOffset(second, ReadAllAvailable())
    assert _planned(reader, second, third) == 3 * silent
