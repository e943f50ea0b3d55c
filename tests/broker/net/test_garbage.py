"""A broker's garbage collections are short; what it freezes for that is freed by reference counts alone."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_klog.base.memory import uncollected
from spark_klog.base.names import PLAINTEXT
from spark_klog.broker.broker import Broker
from spark_klog.broker.event_loop import short_collections
from spark_klog.broker.groups.group import Join
from spark_klog.broker.metadata.internal_topics import OFFSETS_TOPIC
from spark_klog.broker.net.acceptor import Acceptor, ConnectionLimits
from spark_klog.broker.net.server import Server
from spark_klog.broker.security.config import Listener
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.trees.paths import Endpoint
from tests.support.brokers.batches import make_batch
from tests.support.waiting import until

#: ApiVersions version 0, correlation id 1, no client id.
API_VERSIONS = bytes.fromhex("0000000a 0012 0000 00000001 ffff")


@pytest.fixture
def without_collections() -> Iterator[None]:
    gc.unfreeze()  # conftest.py has frozen the tests
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def started_broker(tmp_path: Path) -> Broker:
    broker = Broker(BrokerConfig("127.0.0.1", 1000, tmp_path / "data"))
    broker.start([Endpoint("PLAINTEXT", "PLAINTEXT", "127.0.0.1", 1000)])
    return broker


@pytest.mark.usefixtures("without_collections")
def test_a_deleted_topic_leaves_no_cycle(tmp_path: Path) -> None:
    async def run() -> None:
        broker = started_broker(tmp_path)
        broker.follower.watch()
        await broker.changes.create_topic("t", 2, {"segment.bytes": "100"})
        for _ in range(3):
            broker.logs.logs["t", 0].append(memoryview(bytearray(make_batch([(None, b"value")], [1]))))
        broker.logs.logs["t", 0].read(0, 1000)
        gone = [weakref.ref(broker.logs.logs["t", partition]) for partition in (0, 1)]
        gone += [weakref.ref(segment) for segment in broker.logs.logs["t", 0].segments]
        topic = weakref.ref(broker.registry.topics["t"])
        await broker.changes.delete_topics({"t": None})
        await broker.changes.ended()
        await until(lambda: topic() is None and not any(one() for one in gone), "the topic's objects are freed")
        broker.close()

    asyncio.run(run())


@pytest.mark.usefixtures("without_collections")
def test_a_connection_that_ends_leaves_no_cycle(tmp_path: Path) -> None:
    async def run() -> None:
        broker = started_broker(tmp_path)
        server = Server(broker)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            limits = ConnectionLimits(10, 10, broker.metrics)
            acceptor = Acceptor(
                broker, server.connections, limits, Listener(PLAINTEXT, PLAINTEXT, "127.0.0.1", port), listening, None
            )
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(API_VERSIONS)
            await reader.readexactly(4)
            (connection,) = [weakref.ref(one) for one in server.connections.opened]
            writer.close()
            await until(lambda: connection() is None, "the connection is freed")
            acceptor.close()
        broker.close()

    asyncio.run(run())


@pytest.mark.usefixtures("without_collections")
def test_a_group_that_goes_leaves_no_cycle(tmp_path: Path) -> None:
    async def run() -> None:
        broker = started_broker(tmp_path)
        await broker.coordinator.load()
        await broker.coordinator.code("g")
        join = Join("", None, "client", "host", 1000, 60_000, "consumer", (("range", b""),), False)
        joining = asyncio.create_task(broker.groups.join("g", join))
        await until(lambda: broker.groups.get("g"), "a member that waits")
        group = broker.groups.get("g")
        assert group is not None
        gone = weakref.ref(group)
        del group
        await broker.changes.delete_topics({OFFSETS_TOPIC: None})
        await joining
        del joining
        await until(lambda: gone() is None, "the group is freed")
        broker.groups.stop()
        broker.close()

    asyncio.run(run())


@pytest.mark.usefixtures("without_collections")
def test_what_lives_long_is_looked_at_once() -> None:
    """What is there before is frozen, and what a long full collection leaves, and data loaded without collections."""
    before = [[number] for number in range(1000)]
    with short_collections():
        assert gc.get_freeze_count() >= len(before)
        long_lived = [[number] for number in range(300_000)]
        gc.collect()
        assert gc.get_freeze_count() >= len(long_lived)
        assert len(gc.get_objects()) < len(long_lived)
    gc.unfreeze()
    gc.enable()
    with uncollected(freezes=True):
        assert not gc.isenabled()
        loaded = [[number] for number in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(loaded)
