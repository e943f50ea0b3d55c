"""Connections that open more slowly than a call may take: they go on opening in the next one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from spark_klog.broker.faults import Delay, Fault
from spark_klog.client import Admin, Consumer
from spark_klog.client.cluster import Cluster
from spark_klog.client.settings import client_config
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConnectionFailed, RequestTimedOut
from tests.support.brokers.faults import late
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.brokers.tcp_proxy import TcpProxy
from tests.support.clients.topics import make_topic
from tests.support.servers.certificates import Certificates
from tests.support.servers.kafka import HOST, free_port
from tests.support.servers.secure_broker import SecureBroker

pytestmark = pytest.mark.usefixtures("driver")
#: Seconds: less than a connection takes, with TLS and SASL, at this latency; the group's look-ups come after it.
_POLL, _LATENCY = 0.1, 0.15


@pytest.fixture(scope="module")
def broker(module_server_dir: Path, certificates: Certificates) -> Iterator[SecureBroker]:
    with SecureBroker(module_server_dir / "klog", certificates) as running:
        yield running


def test_short_polls_join_a_group(broker: SecureBroker, topic: str) -> None:
    make_topic(broker.servers("PLAINTEXT"), topic, 1)
    with ExitStack() as stack:
        lines = [TcpProxy(free_port(), broker.ports["SASL_SSL"], latency=_LATENCY) for _ in range(3)]
        for line in lines:
            stack.enter_context(line)
        settings = broker.client("SASL_SSL", "SCRAM-SHA-256") | {
            "bootstrap.servers": ",".join(f"{HOST}:{line.port}" for line in lines),
            "group.id": topic,
        }
        consumer = stack.enter_context(Consumer(settings))
        consumer.subscribe([topic])
        until = time.monotonic() + 30
        while not consumer.assignment():
            assert time.monotonic() < until, "it does not join"
            consumer.poll(_POLL)
        assert sum(line.connections for line in lines) <= 7  # else calls give up what has begun


def test_a_broker_that_is_slow_to_open() -> None:
    """More than a look-up has: it gets more time at each attempt."""
    with ScriptedCluster({"t": 1}) as brokers:
        brokers.append("t", 0, [b"v"])
        brokers.always("ApiVersions", late(2.5))
        with Consumer({"bootstrap.servers": brokers.bootstrap_servers}) as consumer:
            consumer.assign([("t", 0, 0)])
            until = time.monotonic() + 30
            while not (records := consumer.poll(_POLL)):
                assert time.monotonic() < until, "no records"
        assert [record.value for record in records] == [b"v"]
        assert brokers.count("ApiVersions") <= 6


def test_leaders_that_are_told_later_than_a_short_call_waits() -> None:
    """A look-up gets more time at each attempt."""
    with ScriptedCluster({"t": 1}) as brokers:
        brokers.append("t", 0, [b"v"])
        brokers.always("Metadata", late(1.5))
        with Consumer({"bootstrap.servers": brokers.bootstrap_servers, "auto.offset.reset": "earliest"}) as consumer:
            consumer.assign([("t", 0)])
            until = time.monotonic() + 30
            while not (records := consumer.poll(_POLL)):
                assert time.monotonic() < until, "no records"
        assert [record.value for record in records] == [b"v"]


@pytest.mark.test_all("long")
def test_a_topic_that_has_grown_is_told_later_than_a_short_call_waits(topic: str) -> None:
    with EmbeddedCluster(faults=[]) as cluster, Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
        admin.create_topic(topic, 1)
        settings = {"bootstrap.servers": cluster.bootstrap_servers, "group.id": topic, "metadata.max.age.ms": "500"}
        with Consumer(settings) as consumer:
            consumer.subscribe([topic])
            until = time.monotonic() + 60
            while not consumer.assignment():
                assert time.monotonic() < until
                consumer.poll(_POLL)
            cluster.inject(Fault(Delay(1500), api="Metadata", count=1_000_000))
            admin.create_partitions({topic: 2})
            while len(consumer.assignment()) < 2:
                assert time.monotonic() < until, "the new partition is not seen"
                consumer.poll(_POLL)


class _FirstIsLost(TcpProxy):
    """Takes the first connection and does nothing with it, as a frozen process."""

    def _accept(self) -> None:
        with self._listener.accept()[0]:
            super()._accept()


def test_an_opening_that_gets_nowhere_is_given_up(broker: SecureBroker) -> None:
    with _FirstIsLost(free_port(), broker.ports["SSL"]) as line:
        settings = broker.client("SSL") | {"bootstrap.servers": f"{HOST}:{line.port}"}
        with Cluster(client_config(settings)) as cluster:
            assert _calls(cluster) < 6


def test_an_opening_is_given_up_as_soon_after_many_that_were_refused() -> None:
    with ScriptedCluster({"t": 1}) as brokers:
        port = free_port()
        with Cluster(client_config({"bootstrap.servers": f"{HOST}:{port}", "retry.backoff.max.ms": "100"})) as cluster:
            assert _calls(cluster, most=3) == 3
            with _FirstIsLost(port, brokers.ports[0]):
                assert _calls(cluster) < 6


def _calls(cluster: Cluster, most: int = 10) -> int:
    """How many short calls it takes until there is an answer."""
    for calls in range(1, most):
        with suppress(ConnectionFailed, RequestTimedOut), cluster.within(500):
            cluster.metadata([])
            return calls
    return most
