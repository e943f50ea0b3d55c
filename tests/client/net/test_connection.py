"""Each request gets its own response, whatever else is in flight, and ends by its deadline."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from spark_klog.client import cluster as cluster_module, requests, retry
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.client.net.connection import Connection, Handle
from spark_klog.client.offsets import offset_range
from spark_klog.client.producer.producer import Producer
from spark_klog.client.settings import client_config
from spark_klog.errors import ConnectionFailed, DecodeError, KlogError, RequestTimedOut
from spark_klog.protocol.apis import FETCH, LIST_OFFSETS, METADATA
from tests.support.brokers.faults import Fault, double, dripped, dropped, late, misaddressed, reordered, silent, slowed
from tests.support.brokers.kafka_python_wire import read_records
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.servers.kafka import HOST

TOPICS = {"t": 3, "u": 1}
METADATA_OF_T = {"topics": [{"name": "t"}]}


@pytest.fixture
def brokers() -> Iterator[ScriptedCluster]:
    with ScriptedCluster(TOPICS) as running:
        yield running


def _settings(brokers: ScriptedCluster, request_ms: int) -> dict[str, str]:
    return {"bootstrap.servers": brokers.bootstrap_servers, "request.timeout.ms": str(request_ms)}


def _connect(brokers: ScriptedCluster, request_ms: int = 20_000) -> Connection:
    return Connection(HOST, brokers.ports[0], client_config(_settings(brokers, request_ms)))


def _send_fetch(connection: Connection, partition: int, wait_ms: int = 0, offset: int = 0) -> Handle:
    entry = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
    return connection.send(
        FETCH, {"max_wait_ms": wait_ms, "min_bytes": 1, "topics": [{"topic": "t", "partitions": [entry]}]}
    )


def _values(answer: dict[str, Any]) -> list[bytes]:
    return [value for _, _, value in read_records(bytes(answer["responses"][0]["partitions"][0]["records"]))]


def test_each_request_gets_its_own_answer_in_any_order(brokers: ScriptedCluster) -> None:
    for partition in range(3):
        brokers.append("t", partition, [b"%d" % partition] * 50)
    with _connect(brokers) as connection:
        handles = [_send_fetch(connection, partition) for partition in range(3)]
        topics = connection.request(METADATA, METADATA_OF_T)["topics"]
        assert [topic["name"] for topic in topics] == ["t"]
        for partition in (2, 0, 1):
            assert _values(connection.receive(handles[partition])) == [b"%d" % partition] * 50
        assert not connection.pending


def test_answers_that_come_in_another_order_are_matched(brokers: ScriptedCluster) -> None:
    for partition in range(2):
        brokers.append("t", partition, [b"%d" % partition])
    brokers.on("Fetch", reordered())
    with _connect(brokers) as connection:
        first, second = _send_fetch(connection, 0), _send_fetch(connection, 1)
        assert _values(connection.receive(first)) == [b"0"]
        assert _values(connection.receive(second)) == [b"1"]


def test_reads_and_a_producer_that_share_a_cluster_do_not_mix(brokers: ScriptedCluster) -> None:
    for partition in range(3):
        brokers.append("t", partition, [b"%d-%d" % (partition, number) for number in range(100)], size=10)
    settings = _settings(brokers, 20_000) | {"max.partition.fetch.bytes": "500", "max.request.size": "1000"}
    with Cluster.connect(settings) as cluster:
        producer = Producer.of_cluster(cluster)
        found: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
        reads = {partition: fetch_range(cluster, "t", partition, 0, 100) for partition in range(3)}
        while reads:
            for partition, read in list(reads.items()):
                fetched = next(read, None)
                if fetched is None:
                    del reads[partition]
                    continue
                # the last batch may reach beyond the range
                found[partition] += [value for _, offset, value in read_records(bytes(fetched.data)) if offset < 100]
                # `send` would start a thread, which must not share a cluster with the reads
                producer.send_arrow(pa.RecordBatch.from_pylist([{"topic": "u", "value": b"x" * 300}]))
                producer.send_arrow(pa.RecordBatch.from_pylist([{"topic": "t", "value": b"y", "partition": partition}]))
        producer.flush()
    for partition in range(3):
        # the last batch may have records produced meanwhile
        assert found[partition][:100] == [b"%d-%d" % (partition, number) for number in range(100)]
        assert set(brokers.values("t", partition)[100:]) == {b"y"}
    assert set(brokers.values("u", 0)) == {b"x" * 300}


def test_metadata_and_offsets_do_not_wait_behind_a_fetch(brokers: ScriptedCluster) -> None:
    with Cluster.connect(_settings(brokers, 20_000)) as cluster:
        cluster.partitions(["t"])
        handle = _send_fetch(cluster.connection(0), 0, wait_ms=10_000)
        begin = time.monotonic()
        cluster.metadata(["t"])
        assert offset_range(cluster, "t", 0) == (0, 0)
        assert time.monotonic() - begin < 8
        brokers.append("t", 0, [b"v"])
        assert _values(cluster.connection(0).receive(handle)) == [b"v"]


@pytest.mark.parametrize("fault", [double(), misaddressed()], ids=["double", "misaddressed"])
def test_an_answer_that_nobody_asked_for_is_named(brokers: ScriptedCluster, fault: Fault) -> None:
    brokers.on("Metadata", fault)
    with _connect(brokers) as connection:
        if fault.times == 2:
            connection.request(METADATA, METADATA_OF_T)  # the duplicate arrives before the next response
        with pytest.raises(DecodeError, match=r"127\.0\.0\.1.*not under way"):
            connection.request(METADATA, METADATA_OF_T)
        assert connection.closed


@pytest.mark.parametrize("fault", [late(100), silent(), dripped(2)], ids=["late", "silent", "dripped"])
def test_a_call_ends_at_its_deadline(brokers: ScriptedCluster, fault: Fault) -> None:
    brokers.always("Metadata", fault)
    with _connect(brokers, 300) as connection:
        begin = time.monotonic()
        with pytest.raises(RequestTimedOut, match="did not answer within"):
            connection.request(METADATA, METADATA_OF_T)
        assert 0.3 <= time.monotonic() - begin < 30
    with _connect(brokers) as connection:
        begin = time.monotonic()
        with pytest.raises(RequestTimedOut):
            connection.request(METADATA, METADATA_OF_T, deadline=begin + 0.2)
        assert 0.2 <= time.monotonic() - begin < 30


def test_a_forgotten_request_leaves_nothing(brokers: ScriptedCluster) -> None:
    for partition in range(3):
        brokers.append("t", partition, [b"%d" % partition])
    with _connect(brokers) as connection:
        first, second, third = (_send_fetch(connection, partition) for partition in range(3))
        assert _values(connection.receive(second)) == [b"1"]  # buffers the first response
        connection.forget(first)
        fourth = _send_fetch(connection, 0)
        connection.forget(third)
        assert _values(connection.receive(fourth)) == [b"0"]
        assert not connection.closed
        assert not connection.pending
        with pytest.raises(ValueError, match="not under way"):
            connection.receive(first)
        connection.forget(_send_fetch(connection, 0, wait_ms=10_000, offset=1))
        assert connection.closed  # else the connection would have to wait for the response


def test_a_read_that_is_given_up_costs_the_next_one_nothing(brokers: ScriptedCluster) -> None:
    brokers.append("t", 0, [b"%d" % number for number in range(100)], size=1)
    settings = _settings(brokers, 20_000) | {"max.partition.fetch.bytes": "100"}
    with Cluster.connect(settings) as cluster:
        for _ in range(20):
            read = fetch_range(cluster, "t", 0, 0, 100)
            assert next(read).offset == 0
            read.close()
        assert not cluster.connection(0).pending
        assert [fetched.offset for fetched in fetch_range(cluster, "t", 0, 0, 100)] == list(range(100))


def test_answers_put_aside_have_a_bound(brokers: ScriptedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    brokers.append("t", 0, [bytes(10_000)])
    brokers.append("t", 1, [b"1"])
    with _connect(brokers) as connection:
        monkeypatch.setattr(connection, "_most_copied", 25_000)
        handles = [_send_fetch(connection, 0) for _ in range(3)]
        last = _send_fetch(connection, 1)
        with pytest.raises(ConnectionFailed, match="25000 bytes of responses"):
            connection.receive(last)
        with pytest.raises(ConnectionFailed, match="is closed"):
            connection.receive(handles[0])


def test_a_lost_connection_loses_all_that_is_under_way(brokers: ScriptedCluster) -> None:
    brokers.on("Fetch", dropped())
    with _connect(brokers) as connection:
        first, second = _send_fetch(connection, 0), _send_fetch(connection, 1)
        for handle in (second, first):
            with pytest.raises(ConnectionFailed):
                connection.receive(handle)


def test_a_throttled_client_is_silent_for_a_while(brokers: ScriptedCluster) -> None:
    brokers.on("Metadata", slowed(400))
    message = {"topics": [{"name": "t", "partitions": [{"partition_index": 0, "timestamp": -1}]}]}
    with _connect(brokers) as connection:
        connection.request(METADATA, METADATA_OF_T)
        assert connection.is_throttled
        with pytest.raises(RequestTimedOut, match=r"throttles this client \(quota\)"):
            connection.request(LIST_OFFSETS, message, deadline=time.monotonic() + 0.05)
        connection.request(LIST_OFFSETS, message)
    before, after = brokers.asked[-2:]
    assert after.at - before.at >= 0.4


def test_a_shorter_throttling_does_not_end_a_longer_one(brokers: ScriptedCluster) -> None:
    """The longer throttle time of two requests in flight counts, as in Kafka's ClusterConnectionStates."""
    brokers.on("Fetch", slowed(600_000), slowed(1))
    with _connect(brokers) as connection:
        first, second = _send_fetch(connection, 0), _send_fetch(connection, 1)
        connection.receive(first)
        until = connection.throttled_until
        connection.receive(second)
        assert connection.throttled_until == until


def test_a_throttling_broker_holds_up_no_other() -> None:
    """Of requests to several brokers at once, only those to the throttling broker wait."""
    with ScriptedCluster({"t": 2}, nodes=2) as brokers:
        brokers.leaders.update({("t", 0): 0, ("t", 1): 1})
        with Cluster.connect({"bootstrap.servers": brokers.bootstrap_servers}) as cluster:
            cluster.metadata(["t"])
            messages = {
                node: {"topics": [{"name": "t", "partitions": [{"partition_index": node, "timestamp": -1}]}]}
                for node in (0, 1)
            }
            cluster.request_each(LIST_OFFSETS, messages)
            brokers.on("ListOffsets", slowed(3000))
            cluster.request(0, LIST_OFFSETS, messages[0])
            assert cluster.plain_connection(0).is_throttled
            answers = cluster.request_each(LIST_OFFSETS, messages)
            assert not any(isinstance(answer, KlogError) for answer in answers.values())
            with cluster.within(60_000):
                brokers.on("ListOffsets", slowed(100_000))
                cluster.request(0, LIST_OFFSETS, messages[0])
                refused = cluster.request_each(LIST_OFFSETS, messages)
    throttled, other, after, *last = [asked for asked in brokers.asked if asked.name == "ListOffsets"][2:]
    assert [asked.node for asked in (throttled, other, after, *last)] == [0, 1, 0, 0, 1]
    assert after.at - throttled.at >= 3
    assert isinstance(refused[0], RequestTimedOut)
    assert not isinstance(refused[1], KlogError)


def test_a_wait_is_logged_and_its_end_says_how_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    for module in (retry, cluster_module, requests):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(requests, "wait_until_ready", lambda _, seconds: sleep(seconds))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    settings = {"bootstrap.servers": f"127.0.0.1:{port}", "socket.connection.setup.timeout.ms": "2500"}
    with (
        caplog.at_level("WARNING", "spark_klog"),
        pytest.raises(ConnectionFailed, match=r"tried for 2\.\d s \(socket\.connection\.setup\.timeout\.ms\)$"),
    ):
        Cluster.connect(settings)
    messages = [text for text in caplog.messages if str(port) in text]
    assert 1 <= len(messages) <= 2
    assert re.match(r"still trying after [12] s, giving up in [01] s \(", messages[0])
