"""A producer in use sees new partitions of a topic after metadata.max.age.ms."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import pyarrow as pa
import pytest

from spark_klog.client import Admin, Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, ConnectionFailed
from spark_klog.protocol.apis import METADATA
from tests.support.brokers.model_cluster import ModelCluster
from tests.support.waiting import wait_until

ALWAYS = {"metadata.max.age.ms": "1"}


def _sends_to(producer: Producer, partition: int) -> bool:
    try:
        producer.send("t", b"explicit", partition=partition)
    except ConfigError:
        return False
    return True


@pytest.mark.usefixtures("driver")
def test_records_reach_a_new_partition() -> None:
    """By explicit partition, without a key, and from Arrow."""
    with ModelCluster(2, {"t": 1}) as brokers:
        with Producer({"bootstrap.servers": brokers.servers, "batch.size": "100", **ALWAYS}) as producer:
            producer.send("t", b"first")
            assert not _sends_to(producer, 1)
            brokers.add_partitions("t", 1)
            wait_until(lambda: _sends_to(producer, 1), seconds=60)
            for _ in range(4):
                producer.send("t", b"turns" + bytes(100))
            brokers.add_partitions("t", 1)
            wait_until(lambda: producer.partitions("t") == 3, seconds=60)
            rows = {"value": [b"row"], "partition": pa.array([2], pa.int32())}
            producer.send_arrow(pa.table(rows), "t")
        written = {number: [value.rstrip(b"\0") for value in brokers.log["t", number]] for number in range(3)}
    assert written == {0: [b"first"] + [b"turns"] * 2, 1: [b"explicit"] + [b"turns"] * 2, 2: [b"row"]}


def test_they_are_not_looked_for_earlier() -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        with Producer({"bootstrap.servers": brokers.servers}) as producer:
            producer.send("t", b"first")
            brokers.add_partitions("t", 1)
            assert not _sends_to(producer, 1)
            assert producer.refresh()
            assert _sends_to(producer, 1)


@pytest.mark.usefixtures("driver")
def test_metadata_that_can_not_be_had_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        with Producer({"bootstrap.servers": brokers.servers, **ALWAYS}) as producer:
            producer.send("t", b"0")
            asked = []

            def fail(*topics: object, **_: object) -> NoReturn:
                asked.append(topics)
                raise ConnectionFailed("no broker")

            with monkeypatch.context() as broken:
                broken.setattr(producer._cluster, "asking_metadata", fail)
                wait_until(lambda: producer.partitions("t") == 1 and len(asked) > 1, seconds=60)
                producer.send("t", b"1")
                producer.flush()
            missing = brokers.topics.pop("t")
            producer.send("t", b"2")
            producer.flush()
            brokers.topics["t"] = missing
            brokers.add_partitions("t", 1)
            wait_until(lambda: producer.partitions("t") == 2, seconds=60)
        assert brokers.log["t", 0] == [b"0", b"1", b"2"]


@pytest.mark.usefixtures("driver")
def test_fewer_partitions_of_a_topic_made_anew() -> None:
    with ModelCluster(1, {"t": 3}) as brokers:
        settings = {"bootstrap.servers": brokers.servers, "linger.ms": "0", **ALWAYS}
        with Producer(settings) as producer:
            for _ in range(3):
                producer.send("t", b"before").result(60)
            brokers.topics["t"] = 1
            wait_until(lambda: producer.partitions("t") == 1, seconds=60)
            assert [producer.send("t", b"after").partition for _ in range(3)] == [0, 0, 0]


@pytest.mark.usefixtures("driver")
def test_an_answer_that_comes_after_a_newer_one() -> None:
    """`send` asks for metadata without waiting; calls that wait for metadata get newer ones than that late response."""
    asked, may_answer = threading.Event(), threading.Event()
    with ModelCluster(1, {"t": 3}) as brokers:
        answer = brokers.answer

        def late(node: int, key: int, version: int, message: Any) -> Any:
            found = answer(node, key, version, message)
            if key == METADATA.key:
                asked.set()
                assert may_answer.wait(60)
            return found

        with Producer({"bootstrap.servers": brokers.servers, **ALWAYS}) as producer:
            producer.send("t", b"first").result(60)
            brokers.answer = late  # type: ignore[method-assign]
            while not asked.is_set():
                producer.send("t", b"asks")
            may_answer.set()
            brokers.add_partitions("t", 1)
            assert producer.partitions("t") == 4
            producer.send("t", b"new", partition=3)
        assert brokers.log["t", 3] == [b"new"]


@pytest.mark.usefixtures("driver")
def test_at_our_broker() -> None:
    with EmbeddedCluster() as cluster:
        servers = {"bootstrap.servers": cluster.bootstrap_servers}
        with Producer(servers | ALWAYS) as producer, Admin(servers) as admin:
            producer.send("t", b"first").result(60)
            admin.create_partitions({"t": 3}).check()
            wait_until(lambda: _sends_to(producer, 2), seconds=60)
            producer.flush()
