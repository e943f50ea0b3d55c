"""Support for tests of consumers: brokers of all kinds, records, and group members of the package and of librdkafka."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from confluent_kafka import Consumer as ConfluentConsumer, Producer as ConfluentProducer

from spark_klog.base.names import TopicPartition
from spark_klog.client import Consumer, RebalanceListener
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import list_offsets
from spark_klog.protocol.tables.records import LATEST
from tests.support.clients.topics import create_topic
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import ALL_VERSIONS, NEWEST, Version, versions
from tests.support.servers.kfake import serving_kfake
from tests.support.servers.shared_kafka import SharedKafkas

#: The timestamp (ms) of sent records.
NOW = 1_700_000_000_000
#: Seconds that a test waits for a condition.
SECONDS = 30.0


def servers(*others: Version) -> list[Any]:
    """Parameters of a fixture: our broker and Kafka's newest; `others` and kfake are for `make soak`."""
    names = [*versions(NEWEST, *others), *(["kfake"] if ALL_VERSIONS else [])]
    return ["klog", *(pytest.param(name, marks=pytest.mark.peer) for name in names)]


SERVERS = servers("0.10.2.2", "3.9.1")


class Line(NamedTuple):
    """A sent record."""

    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


class Server(NamedTuple):
    """A running broker, and its Kafka version; None for this project's broker, "kfake" for franz-go's."""

    servers: str
    version: Version | Literal["kfake"] | None

    @property
    def is_old(self) -> bool:
        return self.version == "0.10.2.2"

    def topic(self, partitions: int = 1, **configs: str) -> str:
        name = f"t-{uuid.uuid4().hex[:10]}"
        with Cluster.connect({"bootstrap.servers": self.servers}) as cluster:
            create_topic(cluster, name, partitions)
            deadline = time.monotonic() + SECONDS
            while len(cluster.partitions([name])[name]) < partitions:
                assert time.monotonic() < deadline
            list_offsets(cluster, {(name, number): LATEST for number in range(partitions)})
        return name

    def send(self, topic: str, lines: list[Line], partition: int = 0, **settings: Any) -> None:
        given = {name.replace("_", "."): value for name, value in settings.items()}
        producer = ConfluentProducer({"bootstrap.servers": self.servers, "linger.ms": 5, **given})
        produce(producer, topic, lines, partition)
        assert producer.flush(SECONDS) == 0

    def consumer(self, *, include_headers: bool = False, **settings: Any) -> Consumer:
        given = {name.replace("_", "."): value for name, value in settings.items()}
        return Consumer({"bootstrap.servers": self.servers, **given}, include_headers=include_headers)


@contextmanager
def running(name: Version | Literal["klog", "kfake"], folder: Path, kafkas: SharedKafkas) -> Iterator[Server]:
    """Yield the shared broker of this version of Kafka, or start kfake, or a klog broker in `folder`."""
    if name == "kfake":
        with serving_kfake() as servers:
            yield Server(servers, "kfake")
        return
    if name == "klog":
        with KlogBroker(folder) as broker:
            yield Server(broker.bootstrap_servers, None)
        return
    yield Server(kafkas.get(name).bootstrap_servers, name)


def produce(producer: ConfluentProducer, topic: str, lines: list[Line], partition: int) -> None:
    for line in lines:
        more = {"headers": list(line.headers)} if line.headers else {}
        producer.produce(topic, line.value, line.key, partition, timestamp=line.timestamp, **more)


def next_offsets(consumer: Consumer, count: int) -> list[int]:
    """Poll until there are `count` records, at most `SECONDS`; return the records' offsets."""
    found: list[int] = []
    deadline = time.monotonic() + SECONDS
    while len(found) < count and time.monotonic() < deadline:
        found += [record.offset for record in consumer.poll(0.2)]
    return found


def short(count: int, start: int = 0) -> list[Line]:
    return [Line(NOW, None, b"%d" % number, ()) for number in range(start, start + count)]


class Heard(RebalanceListener):
    """A listener that records its calls in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[TopicPartition]]] = []

    def on_assigned(self, partitions: list[TopicPartition]) -> None:
        self.calls.append(("assigned", partitions))

    def on_revoked(self, partitions: list[TopicPartition]) -> None:
        self.calls.append(("revoked", partitions))

    def on_lost(self, partitions: list[TopicPartition]) -> None:
        self.calls.append(("lost", partitions))


class Ours:
    """The package's consumer as a group member, with the values it has read."""

    def __init__(self, server: Server, topic: str, strategy: str, **settings: Any) -> None:
        given = {"group_id": f"g-{topic}", "partition_assignment_strategy": strategy, "heartbeat_interval_ms": 300}
        self.consumer = server.consumer(auto_offset_reset="earliest", session_timeout_ms=6000, **given, **settings)
        self.heard = Heard()
        self.consumer.subscribe([topic], self.heard)
        self.values: list[bytes | None] = []

    def poll(self) -> None:
        self.values += [record.value for record in self.consumer.poll(0.02)]

    def owned(self) -> set[int]:
        return {partition for _, partition in self.consumer.assignment()}

    def close(self) -> None:
        self.consumer.close()


class Theirs:
    """A librdkafka consumer as a group member."""

    def __init__(self, server: Server, topic: str, strategy: str) -> None:
        self.consumer = ConfluentConsumer(
            {
                "bootstrap.servers": server.servers,
                "group.id": f"g-{topic}",
                "partition.assignment.strategy": strategy,
                "auto.offset.reset": "earliest",
                "session.timeout.ms": 6000,
                "heartbeat.interval.ms": 300,
            }
        )
        self.consumer.subscribe([topic])
        self.values: list[bytes | None] = []

    def poll(self) -> None:
        for message in self.consumer.consume(100, 0.02):
            assert message.error() is None
            self.values.append(message.value())

    def owned(self) -> set[int]:
        return {item.partition for item in self.consumer.assignment()}

    def close(self) -> None:
        self.consumer.close()


Member = Ours | Theirs


def poll_until(members: list[Member], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, [(type(item).__name__, item.owned(), len(item.values)) for item in members]
        for member in members:
            member.poll()


def is_shared(members: list[Member], partitions: int) -> bool:
    """Whether each partition has one owner, and the members' counts differ by at most one."""
    owned = [member.owned() for member in members]
    sizes = [len(item) for item in owned]
    return sum(sizes) == partitions == len(set().union(*owned)) and max(sizes) - min(sizes) <= 1


#: A group member for python -c; prints "assigned" and, on revocation, "rebalances". Arguments: servers, group, topic.
MEMBER_PROGRAM = """
import sys
from spark_klog.client import Consumer, RebalanceListener

class Told(RebalanceListener):
    def on_revoked(self, partitions):
        print("rebalances", flush=True)

    def on_assigned(self, partitions):
        print("assigned", flush=True)

servers, group, topic = sys.argv[1:]
settings = {"bootstrap.servers": servers, "group.id": group, "heartbeat.interval.ms": 300, "session.timeout.ms": 6000,
            "partition.assignment.strategy": "range", "auto.offset.reset": "earliest"}
consumer = Consumer(settings)
consumer.subscribe([topic], Told())
while True:
    consumer.poll(0.1)
"""
