"""Fixtures: a cluster, ours or Apache Kafka's, and a ZooKeeper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from tests.cli.place import NO_DELAY, Place
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import ZooKeeperServer
from tests.support.servers.shared_kafka import SharedKafkas


@pytest.fixture(
    scope="module", params=["ours", pytest.param("3.9.1", marks=[pytest.mark.peer, pytest.mark.test_all("version")])]
)
def place(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[Place]:
    if request.param == "ours":
        with KlogBroker(module_server_dir, *NO_DELAY) as broker, ZooKeeperServer(module_server_dir / "zk") as zookeeper:
            yield Place(broker.bootstrap_servers, zookeeper.connect)
    else:
        kafka = shared_kafkas.get("3.9.1")
        assert kafka.zookeeper_connect is not None
        yield Place(kafka.bootstrap_servers, kafka.zookeeper_connect)


@pytest.fixture
def zookeeper(place: Place) -> Iterator[KazooClient]:
    client = KazooClient(place.connect)
    client.start()
    client.ensure_path("/klog")
    client.chroot = "/klog"
    yield client
    client.stop()
    client.close()
