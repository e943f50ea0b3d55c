"""The latency of records from a topic through an exactly-once stream to a read_committed consumer of another topic."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.broker_pair import create_topic
from benchmarks.data import PARTITIONS
from benchmarks.figures import Result, Side
from benchmarks.sides import SideFailed, SparkSide, klog_side, recorded
from benchmarks.work import Bench, Work
from tests.support.kafka import Kafka

#: Records of a probe, over all partitions.
_RECORDS = 100
#: Probes for each repeat; as many warm-up probes come first.
_PROBES = 20
#: Detects a stream that hangs. The first probes wait for Python workers to start.
_SECONDS = 240.0
_GUARANTEES = ("exactly-once", "at-least-once")


def _write_latency(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("write-latency")
    figures: list[tuple[Side, list[float]]] = [(Side(f"klog, {guarantee}"), []) for guarantee in _GUARANTEES]
    with Kafka("3.9.1", folder / "broker", full_speed=True) as kafka:
        for (figure, found), guarantee in zip(figures, _GUARANTEES, strict=True):
            with recorded(figure), klog_side(folder / guarantee) as side:
                side.start()
                found += _measure(side, kafka.bootstrap_servers, guarantee, folder, _PROBES * bench.repeat)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        result = Result(
            f"micro-batches of {_RECORDS} records, topic to Spark to topic, {name} of {_PROBES * bench.repeat}",
            "ms",
            *(Side(figure.name, failed=figure.failed) for figure, _ in figures),
            bench.command,
            higher_is_better=False,
        )
        for side_, (_, found) in zip(result.sides, figures, strict=True):
            if found:
                side_.samples.append(sorted(found)[min(len(found) - 1, int(share * len(found)))])
        yield result


def _measure(side: SparkSide, servers: str, guarantee: str, folder: Path, probes: int) -> list[float]:
    """Milliseconds of each probe after the warm-up. A probe starts when the one before has arrived."""
    source, target = f"{guarantee}-from", f"{guarantee}-to"
    for name in (source, target):
        create_topic(servers, name)
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 0})
    address = {"kafka.bootstrap.servers": servers}
    side.ask(
        "copy",
        {**address, "subscribe": source, "startingOffsets": "earliest"},
        to={**address, "topic": target, "deliveryGuarantee": guarantee},
        folder=str(folder / f"checkpoint-{guarantee}"),
    )
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": "none", "isolation.level": "read_committed", "fetch.wait.max.ms": 10}
    )
    consumer.assign([TopicPartition(target, partition, 0) for partition in range(PARTITIONS)])
    found = []
    for number in range(_PROBES + probes):
        started = time.perf_counter()
        for record in range(_RECORDS):
            producer.produce(source, f"{number}", partition=record % PARTITIONS)
        if producer.flush(_SECONDS):
            raise SideFailed("the probe could not be produced")
        _await(consumer, str(number).encode())
        if number >= _PROBES:
            found.append((time.perf_counter() - started) * 1000)
    consumer.close()
    side.ask("stop", {})
    return found


def _await(consumer: Consumer, value: bytes) -> None:
    """Wait for the records of a probe, each of them once."""
    deadline = time.monotonic() + _SECONDS
    for _ in itertools.repeat(None, _RECORDS):
        message = None
        while message is None:
            if time.monotonic() > deadline:
                raise SideFailed(f"probe {value.decode()} did not arrive within {_SECONDS:.0f} s")
            message = consumer.poll(0.1)
        if message.error() is not None or message.value() != value:
            raise SideFailed(f"a record of probe {value.decode()} is {message.value()!r}, {message.error()}")


WRITE_LATENCY = Work(
    "write-latency",
    _write_latency,
    (
        f"Write latency: a stream of {PARTITIONS} partitions to a topic of as many on Kafka 3.9.1, in local[2], the "
        "next micro-batch as soon as there is something. From the producer's first call until librdkafka, with "
        f"read_committed and fetch.wait.max.ms 10, has all {_RECORDS} records of the probe; the next one follows then. "
        f"{_PROBES} come "
        "before those that count. Wanted: at most 300 ms (p50) exactly once.",
    ),
)
