"""Our broker and Kafka 3.9.1 up at the same time, with the same settings, for clients that take turns at them."""

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
from benchmarks.record_batches import take_turns
from benchmarks.report import Side
from benchmarks.sides import SideFailed
from tests.support.kafka import Kafka

KAFKA = "Kafka 3.9.1, ZooKeeper mode, -Xmx1g"
#: Records of the benchmarks may be of long ago; the files of deleted topics go before the next run fills the disk.
SETTINGS = {"log.retention.ms": "-1", "log.segment.delete.delay.ms": "1000"}
_SECONDS = 30.0


@contextmanager
def broker_pair(folder: Path) -> Iterator[tuple[KlogBroker, Kafka]]:
    """Both brokers, ready."""
    klog = KlogBroker(folder / "klog", SETTINGS)
    try:
        klog.start()
        with Kafka("3.9.1", folder / "kafka", SETTINGS, heap="1g") as kafka:
            yield klog, kafka
    finally:
        klog.stop()


def compare(brokers: tuple[Broker, Broker], repeat: int, run: Callable[[Broker], float]) -> tuple[Side, Side]:
    """`run` at our broker and at Kafka in turn: a warm-up of each, then `repeat` runs."""
    klog, kafka = brokers
    sides = Side("klog"), Side(KAFKA)
    take_turns([(sides[0], lambda: run(klog)), (sides[1], lambda: run(kafka))], repeat)
    return sides


@contextmanager
def topic(broker: Broker, name: str, partitions: int = PARTITIONS) -> Iterator[str]:
    """A new topic whose partitions have leaders, deleted afterwards."""
    create_topic(broker, name, partitions)
    try:
        yield name
    finally:
        admin = _admin(broker)  # a client that nothing holds would go before its answer comes
        admin.delete_topics([name])[name].result(_SECONDS)


def create_topic(broker: Broker, name: str, partitions: int = PARTITIONS) -> None:
    """Create a topic, and return when each of its partitions has a leader."""
    admin = _admin(broker)
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result(_SECONDS)
    deadline = time.monotonic() + _SECONDS
    while True:
        # all topics: to ask for one that is not known yet could create it
        found = admin.list_topics(timeout=_SECONDS).topics.get(name)
        if found and len(found.partitions) == partitions and all(p.leader >= 0 for p in found.partitions.values()):
            return
        if time.monotonic() > deadline:
            raise SideFailed(f"topic {name} has no leaders after {_SECONDS:.0f} s")
        time.sleep(0.05)


def check_count(broker: Broker, name: str, wanted: int, partitions: int = PARTITIONS) -> None:
    """`SideFailed` unless the topic, from which nothing was deleted, holds so many records."""
    consumer = Consumer({**_client(broker), "group.id": "bench"})
    try:
        places = [TopicPartition(name, partition) for partition in range(partitions)]
        found = sum(consumer.get_watermark_offsets(place, timeout=_SECONDS)[1] for place in places)
    finally:
        consumer.close()
    if found != wanted:
        raise SideFailed(f"topic {name} holds {found} records, {wanted} were sent")


def _admin(broker: Broker) -> AdminClient:
    return AdminClient(_client(broker))


def _client(broker: Broker) -> dict[str, str | int]:
    return {"bootstrap.servers": broker.bootstrap_servers, "log_level": 3}  # errors only
