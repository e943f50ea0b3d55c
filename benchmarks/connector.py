"""The ConsumerConnector: a stream beside kafka-python's consumer, and the rebalance time of a ZooKeeper group."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from kafka import KafkaConsumer, TopicPartition  # type: ignore[import-untyped]

from benchmarks.data import PARTITIONS, RECORD_SIZE, produce
from benchmarks.figures import Result, Side
from benchmarks.record_batches import take_turns
from benchmarks.sides import SideFailed
from benchmarks.work import Bench, Work
from spark_klog.classic import ConsumerConnector
from spark_klog.trees.zookeeper import ZooKeeperTree
from tests.support.kafka import Kafka

log = logging.getLogger(__name__)

_TOPIC = "bench"
_SECONDS = 600.0
_MEMBERS, _MANY = 20, 200
_groups = (f"bench-{number}" for number in itertools.count())


def _run(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("connector")
    with Kafka("3.9.1", folder / "broker", full_speed=True) as kafka:
        kafka.create_topic(_TOPIC, partitions=PARTITIONS)
        produce(kafka.libs, kafka.bootstrap_servers, _TOPIC, bench.records, "lz4", folder)
        ours, theirs = Side("ConsumerConnector"), Side("kafka-python")
        sides = [(ours, lambda: _stream(kafka, bench.records)), (theirs, lambda: _kafka_python(kafka, bench.records))]
        take_turns(sides, bench.repeat)
        work = f"{bench.records:,} records of {RECORD_SIZE} B, lz4, one by one"
        yield Result(
            f"A stream of ConsumerConnector, and kafka-python, {work}", "M records/s", ours, theirs, bench.command
        )
        kafka.create_topic("many", partitions=_MANY)
        group = Side("ConsumerConnector")
        take_turns([(group, lambda: _settles(kafka))], bench.repeat)
        work = f"A group of {_MEMBERS} members in ZooKeeper over {_MANY} partitions, from the last join on"
        yield Result(work, "s", group, None, bench.command, False)


def _rate(records: int, read: Callable[[], int]) -> float:
    started = time.perf_counter()
    count = read()
    rate = count / (time.perf_counter() - started) / 1e6
    log.info("%.3f M records/s", rate)
    if count != records:
        raise SideFailed(f"read {count} records; there are {records}")
    return rate


def _connector(kafka: Kafka, group: str) -> ConsumerConnector:
    settings = {"zookeeper.connect": kafka.zookeeper_connect, "group.id": group, "auto.offset.reset": "smallest"}
    return ConsumerConnector(settings)


def _stream(kafka: Kafka, records: int) -> float:
    def read() -> int:
        with _connector(kafka, next(_groups)) as connector:
            count = size = 0
            for message in connector.create_message_streams({_TOPIC: 1})[_TOPIC][0]:
                size += len(message.value or b"")
                count += 1
                if count == records:
                    break
            return count

    return _rate(records, read)


def _kafka_python(kafka: Kafka, records: int) -> float:
    def read() -> int:
        consumer = KafkaConsumer(bootstrap_servers=kafka.bootstrap_servers)
        try:
            partitions = [TopicPartition(_TOPIC, number) for number in range(PARTITIONS)]
            consumer.assign(partitions)
            consumer.seek_to_beginning(*partitions)
            count = size = 0
            for message in consumer:
                size += len(message.value or b"")
                count += 1
                if count == records:
                    break
            return count
        finally:
            consumer.close()

    return _rate(records, read)


def _settles(kafka: Kafka) -> float:
    """Seconds from the last member's call until the owner nodes show the final assignment."""
    group = next(_groups)
    assert kafka.zookeeper_connect is not None
    tree = ZooKeeperTree(kafka.zookeeper_connect)
    top = f"/consumers/{group}/owners/many"

    def shares() -> list[int]:
        payloads = tree.get_many([f"{top}/{number}" for number in range(_MANY)])
        return sorted(Counter(payload for payload in payloads if payload is not None).values())

    def wait() -> None:
        deadline = time.monotonic() + _SECONDS
        while shares() != [_MANY // _MEMBERS] * _MEMBERS:
            if time.monotonic() > deadline:
                raise SideFailed(f"{shares()} partitions a member after {_SECONDS:.0f} s")
            time.sleep(0.01)

    with ExitStack() as stack:
        members = [_connector(kafka, group) for _ in range(_MEMBERS)]
        for member in members:
            stack.callback(member.shutdown)
        for member in members[:-1]:
            member.create_message_streams({"many": 1})
        started = time.perf_counter()
        joining = threading.Thread(target=members[-1].create_message_streams, args=({"many": 1},))
        joining.start()
        wait()
        seconds = time.perf_counter() - started
        joining.join()
        log.info("settled in %.3f s", seconds)
    tree.close()
    return seconds


CONNECTOR = Work(
    "connector",
    _run,
    (
        "ConsumerConnector: a topic of 4 partitions at Kafka 3.9.1 with ZooKeeper, read from the page cache, from the "
        "making of the consumer to the last record, each record taken by a loop that adds up the values' lengths. "
        "Defaults of both sides. Wanted: 3 times kafka-python.",
        "The group: members of one process, with a ZooKeeper session and threads of their own each. Wanted: 2 s.",
    ),
)
