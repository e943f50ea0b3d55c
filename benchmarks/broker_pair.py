"""Our broker and Kafka 3.9.1, running at the same time with the same settings, for clients that use them in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic  # the stubs of .admin do not export it

from benchmarks.broker_process import Broker, KlogBroker
from benchmarks.data import PARTITIONS
from benchmarks.figures import Side
from benchmarks.record_batches import take_turns
from benchmarks.sides import SideFailed
from tests.support.kafka import Kafka

KAFKA = "Kafka 3.9.1, ZooKeeper mode, -Xmx1g"
#: Records may have old timestamps; deleted files must go before the next run fills the disk.
SETTINGS = {"log.retention.ms": "-1", "log.segment.delete.delay.ms": "1000"}
_SECONDS = 30.0


@contextmanager
def broker_pair(folder: Path) -> Iterator[tuple[KlogBroker, Kafka]]:
    """Yield both brokers, ready."""
    klog = KlogBroker(folder / "klog", SETTINGS)
    try:
        klog.start()
        with Kafka("3.9.1", folder / "kafka", SETTINGS, full_speed=True) as kafka:
            yield klog, kafka
    finally:
        klog.stop()


def compare(brokers: tuple[Broker, Broker], repeat: int, run: Callable[[Broker], float]) -> tuple[Side, Side]:
    """Run `run` at our broker and at Kafka in turn: a warm-up of each, then `repeat` runs."""
    klog, kafka = brokers
    sides = Side("klog"), Side(KAFKA)
    take_turns([(sides[0], lambda: run(klog)), (sides[1], lambda: run(kafka))], repeat)
    return sides


@contextmanager
def topic(servers: str, name: str, partitions: int = PARTITIONS) -> Iterator[str]:
    """Yield a new topic whose partitions have leaders; delete it afterwards."""
    create_topic(servers, name, partitions)
    try:
        yield name
    finally:
        delete_topic(servers, name)


def delete_topic(servers: str, name: str) -> None:
    """Delete a topic; the broker deletes its files a little later."""
    admin = _admin(servers)  # keeps the client alive until the response arrives
    admin.delete_topics([name])[name].result(_SECONDS)


def create_topic(servers: str, name: str, partitions: int = PARTITIONS) -> None:
    """Create a topic, and wait until each broker knows a leader of each partition."""
    admin = _admin(servers)
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result(_SECONDS)
    deadline = time.monotonic() + _SECONDS
    for server in servers.split(","):
        admin = _admin(server)
        while not _has_leaders(admin, name, partitions):
            if time.monotonic() > deadline:
                raise SideFailed(f"topic {name} has no leaders after {_SECONDS:.0f} s")
            time.sleep(0.05)


def _has_leaders(admin: AdminClient, name: str, partitions: int) -> bool:
    # ask for all topics, as a request for an unknown topic could create it
    found = admin.list_topics(timeout=_SECONDS).topics.get(name)
    return found is not None and sum(entry.leader >= 0 for entry in found.partitions.values()) == partitions


def partitions_by_leader(servers: str, name: str) -> dict[int, list[int]]:
    """The partitions of a topic, by their leader's port."""
    found = _admin(servers).list_topics(name, timeout=_SECONDS)
    by_port: dict[int, list[int]] = {}
    for partition in found.topics[name].partitions.values():
        by_port.setdefault(found.brokers[partition.leader].port, []).append(partition.id)
    return by_port


def check_count(broker: Broker, name: str, wanted: int, partitions: int = PARTITIONS) -> None:
    """Raise `SideFailed` unless the topic, from which nothing was deleted, has `wanted` records."""
    consumer = Consumer({**_client(broker.bootstrap_servers), "group.id": "bench"})
    try:
        places = [TopicPartition(name, partition) for partition in range(partitions)]
        found = sum(consumer.get_watermark_offsets(place, timeout=_SECONDS)[1] for place in places)
    finally:
        consumer.close()
    if found != wanted:
        raise SideFailed(f"topic {name} holds {found} records, {wanted} were sent")


def _admin(servers: str) -> AdminClient:
    return AdminClient(_client(servers))


def _client(servers: str) -> dict[str, str | int]:
    return {"bootstrap.servers": servers, "log_level": 3}  # errors only
