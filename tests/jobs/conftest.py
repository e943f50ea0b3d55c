"""Fixtures for the tests of batch_load.py: a cluster with ZooKeeper, and a process that runs most loads of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spark_klog.embedded import EmbeddedCluster
from tests.jobs.support import Driver, Load
from tests.jobs.truth import Truth


@pytest.fixture(scope="module")
def zookeeper_cluster(module_server_dir: Path) -> Iterator[EmbeddedCluster]:
    """One of our brokers, with ZooKeeper."""
    with EmbeddedCluster(zookeeper=True, data_dir=module_server_dir / "zookeeper-cluster") as running:
        yield running


@pytest.fixture(scope="module")
def driver(module_server_dir: Path) -> Iterator[Driver]:
    made = Driver(module_server_dir / "driver")
    yield made
    made.stop()


@pytest.fixture
def truth(zookeeper_cluster: EmbeddedCluster) -> Truth:
    return Truth(zookeeper_cluster.bootstrap_servers)


@pytest.fixture
def make_load(zookeeper_cluster: EmbeddedCluster, driver: Driver, server_dir: Path) -> Iterator[Callable[..., Load]]:
    """Create loads in the test's folder that run in the driver; at the end, kill their runs by spark-submit."""
    made: list[Load] = []

    def make(topics: str, table: str = "") -> Load:
        made.append(Load(zookeeper_cluster.bootstrap_servers, topics, server_dir / "load", driver, table=table))
        return made[-1]

    yield make
    for load in made:
        load.stop()
