"""Several node ids at one address: a port forward, or a load balancer that all brokers advertise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spark_klog.client import Admin, Consumer, Producer
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.clients.consumers import SECONDS

pytestmark = pytest.mark.usefixtures("driver")


class _OneAddress(ScriptedCluster):
    """Two nodes that advertise one port, where each request reaches its leader."""

    def __init__(self) -> None:
        super().__init__({"t": 2}, nodes=2)
        self.leaders["t", 1] = 1
        self.ports[1] = self.ports[0]

    def _leader_error(self, node: int, key: tuple[str, int]) -> int:
        return 0


@pytest.fixture
def brokers() -> Iterator[_OneAddress]:
    with _OneAddress() as running:
        yield running


def test_a_consumer_reads_both_nodes(brokers: _OneAddress) -> None:
    expected = {partition: [b"%d-%d" % (partition, number) for number in range(50)] for partition in range(2)}
    for partition, values in expected.items():
        brokers.append("t", partition, values, size=10)
    settings = {"bootstrap.servers": brokers.bootstrap_servers, "auto.offset.reset": "earliest", "max.poll.records": 7}
    found: dict[int, list[bytes | None]] = {0: [], 1: []}
    with Consumer(settings | {"max.partition.fetch.bytes": 500}) as consumer:
        consumer.assign([("t", 0), ("t", 1)])
        while sum(map(len, found.values())) < 100:
            records = consumer.poll(SECONDS)
            assert records
            for record in records:
                found[record.partition].append(record.value)
    assert found == expected


def test_an_admin_asks_both_nodes(brokers: _OneAddress) -> None:
    brokers.append("t", 1, [b"a", b"b"])
    with Admin({"bootstrap.servers": brokers.bootstrap_servers}) as admin:
        found = admin.list_offsets({("t", 0): "latest", ("t", 1): "latest"})
    assert [found["t", partition].offset for partition in range(2)] == [0, 2]


def test_a_producer_writes_to_both_nodes(brokers: _OneAddress) -> None:
    with Producer({"bootstrap.servers": brokers.bootstrap_servers}) as producer:
        for partition in range(2):
            producer.send("t", b"%d" % partition, partition=partition)
    assert [brokers.values("t", partition) for partition in range(2)] == [[b"0"], [b"1"]]
