"""Admin clients of the driver's steps: reused by the next step with the same settings, closed after errors."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from spark_klog.errors import AdminClosed, ConnectionFailed, ProtocolError
from spark_klog.spark.write import exactly_once_driver as clients
from spark_klog.spark.write.exactly_once_driver import Clients
from tests.support.scripted_broker import ScriptedCluster


@pytest.fixture
def brokers() -> Iterator[ScriptedCluster]:
    with ScriptedCluster({"t": 1}) as made:
        yield made


@pytest.fixture
def kept() -> Iterator[Clients]:
    made = Clients()
    yield made
    made.forget()


def step(kept: Clients, brokers: ScriptedCluster, **more: str) -> int:
    """Request metadata; return the number of the connection used."""
    with kept.borrow({"bootstrap.servers": brokers.bootstrap_servers, **more}) as admin:
        admin.cluster.metadata([])
        return brokers.asked[-1].connection


def test_one_connection_for_the_same_settings(kept: Clients, brokers: ScriptedCluster) -> None:
    first = step(kept, brokers)
    assert step(kept, brokers) == first
    other = step(kept, brokers, **{"client.id": "other"})
    assert other != first
    assert step(kept, brokers) == first
    assert step(kept, brokers, **{"client.id": "other"}) == other


def test_two_at_a_time(kept: Clients, brokers: ScriptedCluster) -> None:
    settings = {"bootstrap.servers": brokers.bootstrap_servers}
    with kept.borrow(settings) as one, kept.borrow(settings) as two:
        assert one is not two


def test_a_client_whose_step_failed_is_closed(kept: Clients, brokers: ScriptedCluster) -> None:
    settings = {"bootstrap.servers": brokers.bootstrap_servers}
    with pytest.raises(ProtocolError), kept.borrow(settings) as admin:
        admin.describe_topic("missing")
    with pytest.raises(AdminClosed):
        admin.list_topics()
    with kept.borrow(settings) as other:
        assert other is not admin


def test_bounds(kept: Clients, brokers: ScriptedCluster) -> None:
    connections = [step(kept, brokers, **{"client.id": str(n)}) for n in range(clients._MOST_IDLE + 1)]
    assert step(kept, brokers, **{"client.id": "1"}) == connections[1]
    assert step(kept, brokers, **{"client.id": "0"}) not in connections

    at_once = Clients(seconds=0.0)
    assert step(at_once, brokers) != step(at_once, brokers)


def test_brokers_that_are_gone(kept: Clients) -> None:
    with ScriptedCluster({"t": 1}) as brokers:
        settings = {"bootstrap.servers": brokers.bootstrap_servers, "request.timeout.ms": "3000"}
        with kept.borrow(settings) as admin:
            admin.cluster.metadata([])
    with pytest.raises(ConnectionFailed), kept.borrow(settings) as admin:
        admin.list_transactions()


def test_a_forked_process_has_clients_of_its_own(brokers: ScriptedCluster) -> None:
    first = step(clients.CLIENTS, brokers)
    child = multiprocessing.get_context("fork").Process(target=step, args=(clients.CLIENTS, brokers))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert brokers.asked[-1].connection != first
    assert step(clients.CLIENTS, brokers) == first
    clients.CLIENTS.forget()
