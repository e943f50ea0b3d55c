"""Calls that are shorter than what a slow line needs: what has begun goes on in the next call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from spark_klog.client import Consumer
from tests.support.brokers.tcp_proxy import TcpProxy
from tests.support.clients.topics import make_topic
from tests.support.servers.certificates import Certificates
from tests.support.servers.kafka import HOST, free_port
from tests.support.servers.secure_broker import SecureBroker

pytestmark = pytest.mark.usefixtures("driver")
#: Seconds: less than a connection takes, with TLS and SASL, at this latency; the group's look-ups come after it.
_POLL, _LATENCY = 0.1, 0.08


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
