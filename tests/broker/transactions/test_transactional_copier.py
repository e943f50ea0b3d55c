"""Kafka's own proof of exactly-once: a topic copied in transactions while copiers and the broker are killed."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.support.clients.transactional.copier import Copier
from tests.support.clients.transactional.readers import by_confluent
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import NEWEST, Kafka, Version

pytestmark = [pytest.mark.peer, pytest.mark.test_all("kill")]

#: `make soak` sets this.
_IS_SOAK = "SPARK_KLOG_KILLS" in os.environ
_KILLS = int(os.environ.get("SPARK_KLOG_KILLS", "2"))
_PARTITIONS = 2
_GROUP = "copiers"
_AT_ONCE = 600
#: A copier that was killed in a transaction waits this long for its own offsets: it asks for stable ones before it
#: fences its old instance. One that has to wait longer for the broker is fenced, and ends.
_TRANSACTION_MS = 3000
_PATIENCE = 120
#: Of records that are copied until each partition has aborted ones.
_ROUNDS = 5


@pytest.fixture
def broker(server_dir: Path) -> Iterator[KlogBroker]:
    settings = {
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "100",
        "group.initial.rebalance.delay.ms": "100",
    }
    words = [word for item in settings.items() for word in ("--set", "=".join(item))]
    with KlogBroker(server_dir, *words) as running:
        admin = AdminClient({"bootstrap.servers": running.bootstrap_servers})
        for made in admin.create_topics([NewTopic(name, _PARTITIONS, 1) for name in ("in", "out")]).values():
            made.result(20)
        yield running


class Input:
    """The numbers in the topic `in`, ascending in each partition."""

    def __init__(self, servers: str) -> None:
        self._producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "log_level": 0})
        self.sent: dict[int, list[str]] = {number: [] for number in range(_PARTITIONS)}

    def add(self, count: int) -> None:
        for partition, values in self.sent.items():
            new = [str(number) for number in range(len(values), len(values) + count)]
            for value in new:
                self._producer.produce("in", value, partition=partition)
            values += new
        assert self._producer.flush(60) == 0


class Watcher:
    """A read_committed consumer that reads `out` all the time."""

    def __init__(self, servers: str) -> None:
        settings = {"group.id": "watcher", "isolation.level": "read_committed", "enable.auto.commit": False}
        self._consumer = Consumer({"bootstrap.servers": servers, "log_level": 0, **settings})
        self._consumer.assign([TopicPartition("out", number, 0) for number in range(_PARTITIONS)])
        self.seen: dict[int, list[str]] = defaultdict(list)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            for message in self._consumer.consume(1000, 0.1):
                if message.error() is None:
                    self.seen[message.partition() or 0].append((message.value() or b"").decode())

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._consumer.close()


def _committed(servers: str) -> dict[int, int]:
    with closing(Consumer({"bootstrap.servers": servers, "group.id": _GROUP, "log_level": 0})) as consumer:
        places = consumer.committed([TopicPartition("in", number) for number in range(_PARTITIONS)], 30)
    return {place.partition: place.offset for place in places}


def _has_aborted(servers: str, source: Input, partition: int) -> bool:
    """Whether a partition of `out` has records of aborted transactions among those of all of `source`."""
    return len(by_confluent(servers, "out", partition, committed=False)) > len(source.sent[partition])


def _wait(condition: Callable[[], object], copiers: list[Copier]) -> None:
    """Wait; copiers that fail meanwhile are started again, as in Kafka's own test."""
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < deadline, [(copier.copied, copier.ends) for copier in copiers]
        for copier in copiers:
            copier.start_if_ended()
        time.sleep(0.02)


def _kill_on_the_way(broker: KlogBroker, copiers: list[Copier], source: Input, victims: list[Copier]) -> None:
    """Kill the broker and one of the victims by turns, each time after some more records were copied."""
    rng = random.Random(9)
    for copier in copiers:
        copier.start_if_ended()
    for number in range(_KILLS):
        aim = sum(copier.copied for copier in copiers) + rng.randrange(20, 200)

        def has_come_on(aim: int = aim) -> bool:
            if any(copier.is_done for copier in copiers):  # everything may be copied
                source.add(_AT_ONCE)
            return sum(copier.copied for copier in copiers) >= aim

        _wait(has_come_on, copiers)
        time.sleep(rng.uniform(0, 0.03))
        if number % 2 and victims:
            rng.choice(victims).kill()
        else:
            broker.kill()
            broker.start()


@pytest.mark.parametrize(
    ("by_group", "version"),
    [(False, NEWEST), (True, NEWEST), (True, "3.9.1")],
    ids=["partitions", "group", "group-of-3.9.1"],
)
def test_copies_come_once_whatever_is_killed(
    broker: KlogBroker, server_dir: Path, by_group: bool, version: Version
) -> None:
    """Consumers read each record once and in order, also one that reads all the time; aborted ones lie in between.

    A copier has a partition of its own, or those that its group assigns, and then fences their previous owner
    (KIP-447). The group misses a killed member after ten seconds, so only `make soak` kills members.
    """
    servers = broker.bootstrap_servers
    kafka = Kafka(version, server_dir / "kafka")
    source = Input(servers)
    source.add(_AT_ONCE)
    common = ["--broker-list", servers, "--input-topic", "in", "--output-topic", "out", "--consumer-group", _GROUP]
    common += ["--transaction-size", "20", "--transaction-timeout", str(_TRANSACTION_MS), "--enable-random-aborts"]
    common += ["--group-mode", "--use-group-metadata"] if by_group else []
    copiers = [
        Copier(
            kafka,
            server_dir / f"copier-{number}.log",
            *(*common, "--transactional-id", f"copier-{number}", "--input-partition", str(number)),
        )
        for number in range(_PARTITIONS)
    ]
    watcher = Watcher(servers)
    try:
        _kill_on_the_way(broker, copiers, source, copiers if _IS_SOAK or not by_group else [])
        for _ in range(_ROUNDS):
            _wait(lambda: _committed(servers) == {number: len(sent) for number, sent in source.sent.items()}, copiers)
            if all(_has_aborted(servers, source, number) for number in source.sent):
                break
            source.add(_AT_ONCE)  # copiers abort at random: none of these transactions had records of a partition
        deadline = time.monotonic() + 60
        while watcher.seen != source.sent and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for copier in copiers:
            copier.close()
        watcher.close()
    assert watcher.seen == source.sent
    for partition, sent in source.sent.items():
        assert by_confluent(servers, "out", partition) == sent
        assert _has_aborted(servers, source, partition)
