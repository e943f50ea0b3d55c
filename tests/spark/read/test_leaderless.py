"""A partition without a leader waits while the query reads the others; the query fails if that takes too long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ErrorCode, RequestTimedOut
from spark_klog.spark.read import stream as stream_module
from spark_klog.spark.read.source import KlogDataSource
from spark_klog.spark.read.stream import StreamReader
from spark_klog.spark.versions import ReadAllAvailable
from tests.spark.support import Sent, create_topic, produce, wait_for
from tests.support.brokers.faults import error
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.brokers.simulated_cluster import SimulatedCluster


def reader(cluster: EmbeddedCluster, topic: str, **options: str) -> StreamReader:
    given = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "subscribe": topic, "startingOffsets": "earliest"}
    source = KlogDataSource(given | options)
    made = source.streamReader(source.schema())
    assert isinstance(made, StreamReader)
    return made


def leaders(cluster: EmbeddedCluster, topic: str) -> dict[int, int]:
    with_leaders = reader(cluster, topic)
    found = with_leaders._cluster.metadata([topic])[topic]
    with_leaders.stop()
    return {entry["partition_index"]: entry["leader_id"] for entry in found["partitions"]}


def test_the_others_go_on(
    make_cluster: Callable[..., EmbeddedCluster], topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = make_cluster(brokers=2)
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 4)
    produce(servers, topic, [Sent(b"x", partition=partition) for partition in range(4)])
    by_partition = leaders(cluster, topic)
    assert set(by_partition.values()) == {0, 1}
    led = sorted(partition for partition, node in by_partition.items() if node == 0)
    stream = reader(cluster, topic, **{"kafka.request.timeout.ms": "600000"})
    first = stream.latestOffset({}, ReadAllAvailable())
    assert first == {topic: dict.fromkeys("0123", 1)}

    cluster.kill(1)
    produce(servers, topic, [Sent(b"y", partition=partition) for partition in led])
    with caplog.at_level(logging.WARNING, "spark_klog"):
        second = stream.latestOffset(first, ReadAllAvailable())
        assert second == {topic: {str(partition): 1 + (partition in led) for partition in range(4)}}
        for _ in range(3):
            assert stream.latestOffset(second, ReadAllAvailable()) == second
    said = [message for message in caplog.messages if message.startswith("no leader of ")]
    assert 1 <= len(said) <= 3, said
    assert all(f"{topic}-{partition}" in said[0] for partition in by_partition if partition not in led)

    # a query that has waited too long fails, and its error names the time and the setting
    impatient = reader(cluster, topic, **{"kafka.request.timeout.ms": "1500"})

    def ask_for_ever() -> None:
        while True:
            assert impatient.latestOffset(second, ReadAllAvailable()) == second

    with pytest.raises(RequestTimedOut, match=r"no leader of .* has answered for \d+ s \(kafka.request.timeout.ms is"):
        ask_for_ever()

    cluster.restart(1)
    produce(servers, topic, [Sent(b"z", partition=partition) for partition in range(4)])
    after = {topic: {str(partition): 2 + (partition in led) for partition in range(4)}}
    caplog.clear()
    with caplog.at_level(logging.WARNING, "spark_klog"):
        wait_for(lambda: stream.latestOffset(second, ReadAllAvailable()) == after, "the leader's return")
    assert "all partitions have leaders that answer again" in caplog.messages
    for each in (stream, impatient):
        each.stop()


def test_available_now_reads_all(make_cluster: Callable[..., EmbeddedCluster], topic: str) -> None:
    """AvailableNow fails: if it left the partition out, it would end without its records."""
    cluster = make_cluster(brokers=2)
    create_topic(cluster.bootstrap_servers, topic, 2)
    produce(cluster.bootstrap_servers, topic, [Sent(b"x", partition=partition) for partition in range(2)])
    stream = reader(cluster, topic, **{"kafka.request.timeout.ms": "1500"})
    stream.prepareForTriggerAvailableNow()
    cluster.kill(1)
    with pytest.raises(Exception, match=r"LEADER_NOT_AVAILABLE|no broker answers|NOT_LEADER|is not part of"):
        stream.latestOffset({}, ReadAllAvailable())
    stream.stop()


def test_a_batch_that_is_run_again_needs_no_leader_of_what_it_does_not_read() -> None:
    with ScriptedCluster({"t": 3}, nodes=2) as brokers:
        brokers.append("t", 0, [b"x"] * 3)
        brokers.leaders["t", 1] = -1
        settings = {"kafka.bootstrap.servers": brokers.bootstrap_servers, "kafka.request.timeout.ms": "2000"}
        source = KlogDataSource({**settings, "subscribe": "t"})
        stream = source.streamReader(source.schema())
        assert isinstance(stream, StreamReader)
        found = stream.partitions({"t": {"0": 1, "1": 5}}, {"t": {"0": 3, "1": 5, "2": 0}})
        stream.stop()
    assert [item for task in found for item in task.ranges] == [("t", 0, 1, 3)]  # type: ignore[attr-defined]


def test_two_short_outages_are_not_one_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a long trigger interval the reader makes no request between two outages."""
    waited = 0.0
    monkeypatch.setattr(
        stream_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + waited, sleep=time.sleep)
    )
    with ScriptedCluster({"t": 2}, nodes=2) as brokers:
        for partition in range(2):
            brokers.append("t", partition, [b"x"])
            brokers.leaders["t", partition] = partition
        source = KlogDataSource({"kafka.bootstrap.servers": brokers.bootstrap_servers, "subscribe": "t"})
        stream = source.streamReader(source.schema())
        assert isinstance(stream, StreamReader)
        first = stream.latestOffset({}, ReadAllAvailable())
        brokers.leaders["t", 1] = -1
        assert stream.latestOffset(first, ReadAllAvailable()) == first
        brokers.leaders["t", 1] = 1

        waited = 60.0
        brokers.append("t", 1, [b"y"])
        brokers.on("ListOffsets", *[error(ErrorCode.NOT_LEADER_OR_FOLLOWER, partition=1)] * 2)
        assert stream.latestOffset(first, ReadAllAvailable()) == {"t": {"0": 1, "1": 2}}
        stream.stop()


def test_a_leader_that_answers_late_gets_the_whole_time_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leads is read then: it gets the time for first offsets, too."""
    monkeypatch.setattr(stream_module, "_ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(stream_module, "_MOVING_SECONDS", 0.1)
    with SimulatedCluster(topics=2, partitions=2, brokers=2, records=5) as brokers:
        settings = {"kafka.bootstrap.servers": brokers.bootstrap_servers, "kafka.request.timeout.ms": "1200"}
        source = KlogDataSource({**settings, "subscribe": "t00000,t00001", "startingOffsets": "earliest"})
        stream = source.streamReader(source.schema())
        assert isinstance(stream, StreamReader)
        end = stream.latestOffset({}, ReadAllAvailable())
        brokers.tell("slow", node=1, seconds=0.6, apis=["ListOffsets"])
        brokers.tell("append", every=1, records=1)
        ends, until = [], time.monotonic() + 4
        while time.monotonic() < until:
            end = stream.latestOffset(end, ReadAllAvailable())
            ends.append(end)
        assert ends[0] == {"t00000": {"0": 6, "1": 5}, "t00001": {"0": 5, "1": 6}}
        assert ends[-1] == {name: {"0": 6, "1": 6} for name in ("t00000", "t00001")}
        brokers.tell("slow", node=1, seconds=60.0, apis=["ListOffsets"])

        def ask_for_ever() -> None:
            while True:
                stream.latestOffset(end, ReadAllAvailable())

        with pytest.raises(RequestTimedOut, match=r"no leader of t00000-1, t00001-0 has answered for \d+ s"):
            ask_for_ever()
        stream.stop()
