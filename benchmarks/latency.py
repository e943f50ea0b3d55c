"""The latency of records from a producer through a micro-batch to the sink."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from confluent_kafka import Producer

from benchmarks.data import PARTITIONS
from benchmarks.figures import Result, Side
from benchmarks.jvm_connector import NAME as JVM, jvm_side
from benchmarks.sides import SideFailed, SparkSide, klog_side, recorded
from benchmarks.work import Bench, Work
from tests.support.kafka import Kafka

#: Records of a probe, over all partitions.
_RECORDS = 100
#: Probes for each repeat; as many warm-up probes come first.
_PROBES = 20
_SECONDS = 60.0


def _latency(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("latency")
    figures: list[tuple[Side, list[float]]] = [(Side("klog"), []), (Side(JVM), [])]
    with Kafka("3.9.1", folder / "broker", full_speed=True) as kafka:
        for (figure, found), make in zip(figures, (klog_side, jvm_side), strict=True):
            topic = f"latency-{make.__name__}"
            kafka.create_topic(topic, partitions=PARTITIONS)
            with recorded(figure), make(folder) as side:
                side.start()
                found += _measure(side, kafka.bootstrap_servers, topic, folder / topic, _PROBES * bench.repeat)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        result = Result(
            f"micro-batches of {_RECORDS} new records, append to sink, {name} of {_PROBES * bench.repeat}",
            "ms",
            *(Side(figure.name, failed=figure.failed) for figure, _ in figures),
            bench.command,
            higher_is_better=False,
        )
        for side_, (_, found) in zip(result.sides, figures, strict=True):
            if found:
                side_.samples.append(sorted(found)[min(len(found) - 1, int(share * len(found)))])
        yield result


def _measure(side: SparkSide, servers: str, topic: str, folder: Path, probes: int) -> list[float]:
    """Milliseconds of each probe after the warm-up. A probe starts when the one before has arrived."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 0})
    options = {"kafka.bootstrap.servers": servers, "subscribe": topic, "startingOffsets": "earliest"}
    side.ask("probes", options, folder=str(folder))
    found = []
    for number in range(_PROBES + probes):
        started = time.perf_counter()
        for record in range(_RECORDS):
            producer.produce(topic, f"{number} {record}".encode(), partition=record % PARTITIONS)
        if producer.flush(_SECONDS):
            raise SideFailed("the probe could not be produced")
        arrived = 0
        while arrived < _RECORDS:
            counts = side.next(_SECONDS)["probes"]
            arrived += counts.get(str(number), 0)
        if number >= _PROBES:
            found.append((time.perf_counter() - started) * 1000)
    answer = side.ask("stop", {})
    while "stopped" not in answer:
        answer = side.next(_SECONDS)
    return found


LATENCY = Work(
    "latency",
    _latency,
    (
        f"Latency: a stream of {PARTITIONS} partitions into foreachBatch, which collects, in local[2], the next "
        "micro-batch as soon as there is something. From the producer's first call to the line that says that all "
        f"{_RECORDS} records have arrived; a probe follows when the one before is there. {_PROBES} come before those "
        "that count.",
    ),
)
