"""Clients whose metadata are old, or that ask a broker whose metadata are: the other brokers know better."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spark_klog.client import Consumer
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.client.offsets import list_offsets
from spark_klog.columns.schema import FULL
from spark_klog.errors import RequestTimedOut
from spark_klog.protocol.tables.records import LATEST
from spark_klog.spark.options import source_options
from spark_klog.spark.read.stream import RangePartition, StreamReader
from spark_klog.spark.versions import ReadAllAvailable
from tests.support.brokers.simulated_cluster import SimulatedCluster

TOPICS, PARTITIONS, BROKERS, RECORDS = 4, 2, 3, 20
KEYS = [(f"t{topic:05}", partition) for topic in range(TOPICS) for partition in range(PARTITIONS)]
MOVED = ("t00001", 0)  # from broker 1 to broker 2


@pytest.fixture
def brokers() -> Iterator[SimulatedCluster]:
    with SimulatedCluster(TOPICS, PARTITIONS, BROKERS, RECORDS) as cluster:
        yield cluster


def _settings(brokers: SimulatedCluster) -> dict[str, str]:
    """Broker 0 is the first that is asked."""
    return {"bootstrap.servers": brokers.bootstrap_servers.split(",")[0], "request.timeout.ms": "10000"}


def _move(brokers: SimulatedCluster) -> None:
    brokers.tell("stale", node=0)
    brokers.tell("move", topic=MOVED[0], partition=MOVED[1], node=2)
    brokers.tell("append", every=1, records=1)
    brokers.tell("forget")


@pytest.mark.usefixtures("driver")
def test_a_consumer_goes_on_at_the_new_leader(brokers: SimulatedCluster) -> None:
    with Consumer({**_settings(brokers), "auto.offset.reset": "latest"}) as consumer:
        consumer.assign(KEYS)
        assert {consumer.position(*key) for key in KEYS} == {RECORDS}
        _move(brokers)
        read, end = 0, time.monotonic() + 8
        while read < len(KEYS) and time.monotonic() < end:
            read += len(consumer.poll(0.5))
    assert read == len(KEYS)
    assert sum(brokers.figures()["metadata_by"].values()) < 8


def test_look_ups_of_a_leader_that_refuses_are_made_after_growing_pauses(brokers: SimulatedCluster) -> None:
    """All brokers tell the old leader, which refuses."""
    with Consumer({**_settings(brokers), "auto.offset.reset": "latest"}) as consumer:
        consumer.assign(KEYS)
        for key in KEYS:
            consumer.position(*key)
        for node in range(BROKERS):
            brokers.tell("stale", node=node)
        for topic, partition in KEYS:
            brokers.tell("move", topic=topic, partition=partition, node=(int(topic[1:]) + partition + 1) % BROKERS)
            consumer.poll(0.07)  # each fails at another time
        brokers.tell("forget")
        consumer.poll(5)
    asked = brokers.figures()["metadata_by"]
    assert len(asked) == BROKERS, "all are asked in turns"
    assert sum(asked.values()) < 12


@pytest.mark.parametrize(
    "call",
    [lambda cluster: list_offsets(cluster, {MOVED: LATEST}), lambda cluster: list(fetch_range(cluster, *MOVED, 0, 9))],
    ids=["list_offsets", "fetch_range"],
)
def test_a_leader_that_is_silent_and_replaced(brokers: SimulatedCluster, call: Callable[[Cluster], Any]) -> None:
    """It may take all the time of one call. The next one, as that of a repeated task, asks who is the leader now."""
    with Cluster.connect({**_settings(brokers), "request.timeout.ms": "700"}) as cluster:
        assert call(cluster)
        brokers.tell("slow", node=1, seconds=60)
        brokers.tell("move", topic=MOVED[0], partition=MOVED[1], node=2)
        with pytest.raises(RequestTimedOut):
            call(cluster)
        assert call(cluster)


def test_a_task_that_is_repeated_does_not_ask_a_silent_leader_again(brokers: SimulatedCluster) -> None:
    """Its plan names that leader."""
    settings = {f"kafka.{name}": value for name, value in _settings(brokers).items()}
    options = {**settings, "kafka.request.timeout.ms": "700", "subscribe": MOVED[0], "startingoffsets": "earliest"}
    reader = StreamReader(source_options(options, True), FULL)
    try:
        end = reader.latestOffset({}, ReadAllAvailable())
        tasks = [task for task in reader.partitions({}, end) if isinstance(task, RangePartition)]
        [task] = [task for task in tasks if task.ranges[0][:2] == MOVED]
        assert sum(batch.num_rows for batch in reader.read(task)) == RECORDS
        brokers.tell("slow", node=1, seconds=60)
        brokers.tell("move", topic=MOVED[0], partition=MOVED[1], node=2)
        with pytest.raises(RequestTimedOut):
            list(reader.read(task))
        assert sum(batch.num_rows for batch in reader.read(task)) == RECORDS
    finally:
        reader.stop()


def test_a_task_of_short_ranges_leaves_a_silent_leader(brokers: SimulatedCluster) -> None:
    """The fetch of them together takes a part of the time only; each is then fetched from its new leader."""
    settings = {f"kafka.{name}": value for name, value in _settings(brokers).items()}
    options = {**settings, "kafka.request.timeout.ms": "2000", "subscribepattern": "t.*", "startingoffsets": "earliest"}
    reader = StreamReader(source_options(options, True), FULL)
    try:
        tasks = reader.partitions({}, reader.latestOffset({}, ReadAllAvailable()))
        spans = [span for task in tasks if isinstance(task, RangePartition) for span in task.ranges]
        of_one = tuple(span for span in spans if (int(span.topic[1:]) + span.partition) % BROKERS == 1)
        assert len(of_one) > 1
        task = RangePartition(of_one, {}, lambda topic, partition: 1)
        assert sum(batch.num_rows for batch in reader.read(task)) == RECORDS * len(of_one)
        brokers.tell("slow", node=1, seconds=60)
        for span in of_one:
            brokers.tell("move", topic=span.topic, partition=span.partition, node=2)
        assert sum(batch.num_rows for batch in reader.read(task)) == RECORDS * len(of_one)
    finally:
        reader.stop()


def test_many_clients_do_not_ask_the_same_broker(brokers: SimulatedCluster) -> None:
    program = (
        "import sys; from spark_klog.client.cluster import Cluster\n"
        "clients = [Cluster.connect({'bootstrap.servers': sys.argv[1]}) for _ in range(40)]\n"
        "for client in clients if sys.argv[2:] else []:\n    client.doubt()\n    client.metadata([])\n"
    )
    one = _settings(brokers)["bootstrap.servers"]
    for arguments in ([brokers.bootstrap_servers], [one, "all lose that one"]):
        brokers.tell("forget")
        subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=60)
        asked = brokers.figures()["metadata_by"]
        assert (
            len(asked) == BROKERS
        )  # if each is asked with the same probability, one is left out in 1 of a million runs


@pytest.mark.parametrize("is_retried", [True, False])
def test_old_metadata_do_not_replace_newer_ones(brokers: SimulatedCluster, is_retried: bool) -> None:
    """KIP-320: leader epochs only grow."""
    with Cluster.connect(_settings(brokers)) as cluster:
        cluster.metadata(None)
        _move(brokers)
        if is_retried:
            assert list_offsets(cluster, dict.fromkeys(KEYS, LATEST)) == dict.fromkeys(KEYS, RECORDS + 1)
        else:
            cluster.doubt()
            cluster.metadata(None)
        assert cluster.last_leader(*MOVED) == 2
        for node in (1, 2):  # only the stale broker is left
            brokers.tell("stop", node=node)
        told = cluster.metadata([MOVED[0]])[MOVED[0]]["partitions"][MOVED[1]]
        assert brokers.figures()["metadata_by"][str(0)]
        assert (told["leader_id"], told["leader_epoch"]) == (2, 1)
        assert cluster.last_leader(*MOVED) == 2


def test_a_stream_goes_on_at_the_new_leader(brokers: SimulatedCluster) -> None:
    settings = {f"kafka.{name}": value for name, value in _settings(brokers).items()}
    options = source_options({**settings, "subscribepattern": "t.*", "startingoffsets": "earliest"}, True)
    reader = StreamReader(options, FULL)
    try:
        first = reader.latestOffset({}, ReadAllAvailable())
        _move(brokers)
        second = reader.latestOffset(first, ReadAllAvailable())
        assert sum(span.end - span.start for task in reader.partitions(first, second) for span in task.ranges) == len(
            KEYS
        )
    finally:
        reader.stop()


@pytest.mark.parametrize("subscription", [{"subscribepattern": "t.*"}, {"subscribe": "t00000,t00001"}])
def test_a_topic_that_one_broker_lacks_is_not_deleted(brokers: SimulatedCluster, subscription: dict[str, str]) -> None:
    settings = {f"kafka.{name}": value for name, value in _settings(brokers).items()}
    reader = StreamReader(source_options({**settings, **subscription, "startingoffsets": "earliest"}, True), FULL)
    try:
        first = reader.latestOffset({}, ReadAllAvailable())
        brokers.tell("stale", node=0, lacks="t00001")
        begin = time.monotonic()
        assert reader.latestOffset(first, ReadAllAvailable()) == first
        assert time.monotonic() - begin < 5
        brokers.tell("append", every=1, records=1)
        assert set(reader.latestOffset(first, ReadAllAvailable())["t00001"].values()) == {RECORDS + 1}
    finally:
        reader.stop()
