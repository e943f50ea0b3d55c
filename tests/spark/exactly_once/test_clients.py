"""Connections of the driver's steps: reused by the next step with the same settings, closed after errors."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from spark_klog.errors import ConnectionFailed, ProtocolError
from spark_klog.spark import worker_process
from spark_klog.spark.write.exactly_once_driver import step_admin
from tests.support.brokers.scripted_broker import ScriptedCluster


@pytest.fixture
def brokers() -> Iterator[ScriptedCluster]:
    worker_process._forget_clusters()
    with ScriptedCluster({"t": 1}) as made:
        yield made
    worker_process._forget_clusters()


def step(brokers: ScriptedCluster, **more: str) -> int:
    """Request metadata; return the number of the connection used."""
    with step_admin({"bootstrap.servers": brokers.bootstrap_servers, **more}) as admin:
        admin.cluster.metadata([])
        return brokers.asked[-1].connection


def test_one_connection_for_the_same_settings(brokers: ScriptedCluster) -> None:
    first = step(brokers)
    assert step(brokers) == first
    other = step(brokers, **{"client.id": "other"})
    assert other != first
    assert step(brokers) == first
    assert step(brokers, **{"client.id": "other"}) == other


def test_the_connections_of_a_step_that_failed_are_closed(brokers: ScriptedCluster) -> None:
    first = step(brokers)
    settings = {"bootstrap.servers": brokers.bootstrap_servers}
    with pytest.raises(ProtocolError), step_admin(settings) as admin:
        admin.describe_topic("missing")
    assert step(brokers) != first


def test_bounds(brokers: ScriptedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    connections = [step(brokers, **{"client.id": str(n)}) for n in range(worker_process._MOST_CLUSTERS + 1)]
    assert step(brokers, **{"client.id": "1"}) == connections[1]
    assert step(brokers, **{"client.id": "0"}) not in connections
    monkeypatch.setattr(worker_process, "_IDLE_SECONDS", 0.0)
    assert step(brokers, **{"client.id": "1"}) not in connections


def test_brokers_that_are_gone() -> None:
    with ScriptedCluster({"t": 1}) as brokers:
        settings = {"bootstrap.servers": brokers.bootstrap_servers, "request.timeout.ms": "3000"}
        with step_admin(settings) as admin:
            admin.cluster.metadata([])
    with pytest.raises(ConnectionFailed), step_admin(settings) as admin:
        admin.list_transactions()


def test_brokers_that_were_never_there() -> None:
    """The step does not begin: it would claim the decision log for nothing."""
    settings = {"bootstrap.servers": "127.0.0.1:1", "request.timeout.ms": "1000"}
    with pytest.raises(ConnectionFailed), step_admin(settings):
        pytest.fail("the step has begun")


def test_a_forked_process_has_connections_of_its_own(brokers: ScriptedCluster) -> None:
    first = step(brokers)
    child = multiprocessing.get_context("fork").Process(target=step, args=(brokers,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert brokers.asked[-1].connection != first
    assert step(brokers) == first
