"""A producer in use sees new partitions of a topic after metadata.max.age.ms."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn

import pyarrow as pa
import pytest

from spark_klog import aio
from spark_klog.client import Admin, Producer
from spark_klog.client.producer import intake
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, ConnectionFailed
from spark_klog.protocol.apis import METADATA
from tests.support.brokers.model_cluster import ModelCluster
from tests.support.clients.on_loop import run
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
    """`send` asks for metadata without waiting; that late response is too old for calls that wait for metadata."""
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
            time.sleep(0.01)  # longer than metadata.max.age.ms
            may_answer.set()
            brokers.add_partitions("t", 1)
            assert producer.partitions("t") == 4
            producer.send("t", b"new", partition=3)
        assert brokers.log["t", 3] == [b"new"]


def _slow(brokers: ModelCluster) -> list[float]:
    """Let each answer about metadata take 0.2 s from now on; the times at which they were asked for."""
    answer, asked = brokers.answer, list[float]()

    def late(node: int, key: int, version: int, message: Any) -> Any:
        found = answer(node, key, version, message)
        if key == METADATA.key:
            asked.append(time.monotonic())
            time.sleep(0.2)
        return found

    brokers.answer = late  # type: ignore[method-assign]
    return asked


def test_calls_that_end_early_share_a_renewal() -> None:
    """As those of `asyncio.timeout`, each of which ends before a slow broker answers."""
    with ModelCluster(1, {"t": 1}) as brokers:

        async def main() -> None:
            async with aio.Producer({"bootstrap.servers": brokers.servers, "metadata.max.age.ms": "400"}) as producer:
                assert await producer.partitions("t") == 1
                asked = _slow(brokers)
                brokers.add_partitions("t", 1)
                await asyncio.sleep(0.4)
                for _ in range(40):
                    with suppress(asyncio.TimeoutError):
                        if await asyncio.wait_for(producer.partitions("t"), 0.05) == 2:
                            break
                else:
                    pytest.fail(f"asked {len(asked)} times for nothing")

        run(main())


def test_a_slow_renewal_goes_on_in_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of a thread wait a limited time for it, and go on with what is known."""
    monkeypatch.setattr(intake, "_LONGEST_RENEWAL", 0.05)
    with ModelCluster(1, {"t": 1}) as brokers:
        with Producer({"bootstrap.servers": brokers.servers, "metadata.max.age.ms": "400"}) as producer:
            assert producer.partitions("t") == 1
            _slow(brokers)
            brokers.add_partitions("t", 1)
            wait_until(lambda: producer.partitions("t") == 2)


@pytest.mark.usefixtures("driver")
def test_at_our_broker() -> None:
    with EmbeddedCluster() as cluster:
        servers = {"bootstrap.servers": cluster.bootstrap_servers}
        with Producer(servers | ALWAYS) as producer, Admin(servers) as admin:
            producer.send("t", b"first").result(60)
            admin.create_partitions({"t": 3}).check()
            wait_until(lambda: _sends_to(producer, 2), seconds=60)
            producer.flush()
