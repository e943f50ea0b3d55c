"""Our producer and consumer with our broker through a proxy that delays, splits, coalesces and cuts.

SPARK_KLOG_FAULT_SECONDS (default 3) is the duration, SPARK_KLOG_FAULT_SEED (default 0) the seed, which does not fix
the times of faults.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from confluent_kafka import Consumer as ConfluentConsumer, TopicPartition as ConfluentPartition

from spark_klog.client import Consumer, Producer
from spark_klog.protocol.tables.records import LATEST
from tests.support.brokers.tcp_proxy import TcpProxy
from tests.support.clients.consumers import Server
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import HOST, free_port

_SECONDS = float(os.environ.get("SPARK_KLOG_FAULT_SECONDS", "3"))
_SEED = int(os.environ.get("SPARK_KLOG_FAULT_SEED", "0"))
_PARTITIONS, _RECORDS = 3, 40
#: Seconds: delivery.timeout.ms of a flush, the timeout of a poll, and what a loaded machine may take beyond.
_DELIVERY, _POLL, _SLACK = 60.0, 0.2, 20.0
_T = TypeVar("_T")
Values = dict[int, list[bytes]]


@pytest.fixture(scope="module")
def proxy(module_server_dir: Path) -> Iterator[tuple[Server, TcpProxy]]:
    port = free_port()
    advertised = ("--set", f"advertised.listeners=PLAINTEXT://{HOST}:{port}")
    with KlogBroker(module_server_dir / "klog", *advertised) as broker, TcpProxy(port, broker.port, _SEED) as proxy:
        yield Server(f"{HOST}:{port}", None), proxy


def _within(seconds: float, call: Callable[[], _T]) -> _T:
    begin = time.monotonic()
    try:
        return call()
    finally:
        assert time.monotonic() - begin < seconds + _SLACK


def _take(consumer: Consumer, found: Values, is_arrow: bool) -> None:
    if is_arrow:
        batch = _within(1.0, lambda: consumer.poll_arrow(_POLL))
        rows = [] if batch is None else batch.to_pylist()
        records = [(row["partition"], row["offset"], row["value"]) for row in rows]
    else:
        polled = _within(1.0, lambda: consumer.poll(_POLL))
        records = [(record.partition, record.offset, record.value or b"") for record in polled]
    for partition, offset, value in records:
        assert offset == len(found[partition])  # the poll returns each record once, in order
        found[partition].append(value)


def _oracle(server: Server, topic: str, counts: dict[int, int]) -> Values:
    """All records of the topic as librdkafka reads them; `counts` has their number by partition."""
    found: Values = {partition: [] for partition in counts}
    settings = {"bootstrap.servers": server.servers, "group.id": topic, "enable.partition.eof": False}
    theirs = ConfluentConsumer(settings)
    theirs.assign([ConfluentPartition(topic, partition, 0) for partition in counts])
    deadline = time.monotonic() + 60
    while sum(map(len, found.values())) < sum(counts.values()) and time.monotonic() < deadline:
        message = theirs.poll(1.0)
        if message is not None and message.error() is None:
            found[message.partition()].append(message.value())
    theirs.close()
    return found


def test_nothing_is_lost_and_with_idempotence_nothing_comes_twice(proxy: tuple[Server, TcpProxy]) -> None:
    server, between = proxy
    topic = server.topic(_PARTITIONS)
    sent: Values = {partition: [] for partition in range(_PARTITIONS)}
    found: Values = {partition: [] for partition in sent}
    shared = {"bootstrap.servers": server.servers, "request.timeout.ms": 5000, "retry.backoff.ms": 10}
    writing = {"acks": "all", "enable.idempotence": True, "delivery.timeout.ms": 1000 * int(_DELIVERY)}
    with Consumer({**shared, "fetch.max.wait.ms": 20}) as consumer:
        consumer.assign([(topic, partition, 0) for partition in sent])
        with Producer({**shared, **writing, "batch.size": 300}) as producer:
            cuts = between.cuts
            between.disturb()
            end = time.monotonic() + _SECONDS
            rounds = 0
            while rounds < 5 or between.cuts == cuts or time.monotonic() < end:
                rounds += 1
                for partition, values in sent.items():
                    for _ in range(_RECORDS):
                        values.append(b"%d-%d-%s" % (partition, len(values), b"x" * (len(values) % 50)))
                        producer.send(topic, values[-1], partition=partition)
                _within(_DELIVERY, producer.flush)
                _take(consumer, found, rounds % 2 == 0)
            between.calm()
            _within(_DELIVERY, producer.flush)
        ends = {partition: _end(server, topic, partition) for partition in sent}
        deadline = time.monotonic() + 60
        while any(len(found[key]) < ends[key] for key in ends) and time.monotonic() < deadline:
            _take(consumer, found, is_arrow=False)
    assert found == _oracle(server, topic, ends) == sent


def _end(server: Server, topic: str, partition: int) -> int:
    with server.consumer() as consumer:
        consumer.assign([(topic, partition, LATEST)])
        return consumer.position(topic, partition)
