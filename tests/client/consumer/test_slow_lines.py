"""Lines that are slower than the timeouts of calls and requests: what has begun goes on, also in the next call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from spark_klog.client import Consumer, ConsumerRecord
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.brokers.tcp_proxy import TcpProxy
from tests.support.clients.topics import make_topic
from tests.support.servers.certificates import Certificates
from tests.support.servers.kafka import HOST, free_port
from tests.support.servers.secure_broker import SecureBroker

pytestmark = pytest.mark.usefixtures("driver")
#: Seconds: less than a connection takes, with TLS and SASL, at this latency; the group's look-ups come after it.
_POLL, _LATENCY = 0.1, 0.15

#: Bytes a second.
_RATE = 100_000


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
        assert sum(line.connections for line in lines) <= 6  # else calls give up what has begun


@pytest.fixture
def brokers() -> Iterator[ScriptedCluster]:
    """A broker at the end of a slow line, on which the metadata of one of its topics take some seconds."""
    with ScriptedCluster({"t": 8000, "u": 1}) as running:
        port, real = free_port(), running.ports[0]
        running.ports[0] = port
        with TcpProxy(port, real, rate=_RATE):
            yield running


def test_metadata_that_take_longer_than_a_call(brokers: ScriptedCluster) -> None:
    brokers.append("t", 0, [b"v"])
    with Consumer({"bootstrap.servers": brokers.bootstrap_servers}) as consumer:
        consumer.assign([("t", 0, 0)])
        assert [record.value for record in _polled(consumer)] == [b"v"]
    assert brokers.count("Metadata") == 1


def test_records_that_take_longer_than_request_timeout_ms(brokers: ScriptedCluster) -> None:
    value = bytes(300_000)
    brokers.append("u", 0, [value])
    settings = {"bootstrap.servers": brokers.bootstrap_servers, "fetch.max.wait.ms": "100"}
    with Consumer({**settings, "request.timeout.ms": "1000"}) as consumer:
        consumer.assign([("u", 0, 0)])
        assert [record.value for record in _polled(consumer)] == [value]
    assert brokers.count("Fetch") <= 2


def _polled(consumer: Consumer) -> list[ConsumerRecord]:
    until = time.monotonic() + 30
    while not (records := consumer.poll(_POLL)):
        assert time.monotonic() < until, "no records"
    return records
