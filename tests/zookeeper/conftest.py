"""A ZooKeeper per module; a tree and brokers per test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import ZooKeeperServer


@pytest.fixture(scope="module")
def zookeeper(module_server_dir: Path) -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer(module_server_dir / "zookeeper", tick_ms=500) as running:
        yield running


@pytest.fixture
def chroot(zookeeper: ZooKeeperServer, topic: str) -> str:
    """The `zookeeper.connect` of a test's brokers, with a chroot of its own."""
    return f"{zookeeper.connect}/{topic}"


@pytest.fixture
def tree(chroot: str) -> Iterator[KazooClient]:
    client = KazooClient(chroot, timeout=10)
    client.start(20)
    yield client
    client.stop()
    client.close()


@pytest.fixture
def make_broker(chroot: str, server_dir: Path) -> Iterator[Callable[..., KlogBroker]]:
    brokers: list[KlogBroker] = []

    def make(broker_id: int, *settings: str) -> KlogBroker:
        # otherwise clients that still know a deleted topic would create it again
        arguments = ["--broker-id", str(broker_id), "--zookeeper", chroot, "--set", "auto.create.topics.enable=false"]
        for setting in settings:
            arguments += ["--set", setting]
        broker = KlogBroker(server_dir, *arguments, name=f"broker-{len(brokers)}")
        brokers.append(broker)
        broker.start()
        return broker

    yield make
    for broker in brokers:
        broker.stop()
