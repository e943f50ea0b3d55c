"""Our consumer beside confluent-kafka's, reading a whole topic from Kafka into one Python process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from confluent_kafka import Consumer as ConfluentConsumer, TopicPartition

from benchmarks.data import PARTITIONS, RECORD_SIZE, produce
from benchmarks.figures import Result, Side
from benchmarks.sides import SideFailed, recorded
from benchmarks.work import Bench, Work
from spark_klog.client import Consumer
from tests.support.kafka import Kafka

log = logging.getLogger(__name__)

_TOPIC = "bench"
_SECONDS = 600.0
_AT_ONCE = 10_000


def _consume(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("consumer")
    with Kafka("3.9.1", folder / "broker", heap="1g") as kafka:
        for codec in ("lz4", "none"):
            topic = f"{_TOPIC}-{codec}"
            kafka.create_topic(topic, partitions=PARTITIONS)
            produce(kafka.libs, kafka.bootstrap_servers, topic, bench.records, codec, folder)
            arrow = _timed(bench, "poll_arrow", lambda topic=topic: _poll_arrow(kafka, topic, bench.records))
            theirs = _timed(bench, "confluent_kafka", lambda topic=topic: _confluent(kafka, topic, bench.records))
            work = f"{bench.records:,} records of {RECORD_SIZE} B, {codec}"
            name = f"Consumer: poll_arrow, and confluent_kafka.consume({_AT_ONCE}), {work}"
            yield Result(name, "M records/s", arrow, theirs, bench.command)
            ours = _timed(bench, "poll", lambda topic=topic: _poll(kafka, topic, bench.records))
            name = f"Consumer: poll, and confluent_kafka.consume({_AT_ONCE}), {work}"
            yield Result(name, "M records/s", ours, theirs, bench.command)


def _timed(bench: Bench, name: str, run: Callable[[], int]) -> Side:
    """A warm-up and the repeats of one side, in millions of records a second."""
    side = Side(name)
    with recorded(side):
        for number in range(bench.repeat + 1):
            started = time.perf_counter()
            count = run()
            if count != bench.records:
                raise SideFailed(f"read {count} records; there are {bench.records}")
            rate = count / (time.perf_counter() - started) / 1e6
            log.info("%s: run %d of %d: %.3f", name, number, bench.repeat, rate)
            if number:
                side.samples.append(rate)
            else:
                side.cold = rate
    return side


def _ours(kafka: Kafka, topic: str) -> Consumer:
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "max.poll.records": _AT_ONCE})
    consumer.assign([(topic, partition, 0) for partition in range(PARTITIONS)])
    return consumer


def _poll_arrow(kafka: Kafka, topic: str, records: int) -> int:
    with _ours(kafka, topic) as consumer:
        count, deadline = 0, time.monotonic() + _SECONDS
        while count < records and time.monotonic() < deadline:
            batch = consumer.poll_arrow(1.0)
            count += 0 if batch is None else batch.num_rows
        return count


def _poll(kafka: Kafka, topic: str, records: int) -> int:
    with _ours(kafka, topic) as consumer:
        count, deadline = 0, time.monotonic() + _SECONDS
        while count < records and time.monotonic() < deadline:
            count += len(consumer.poll(1.0))
        return count


def _confluent(kafka: Kafka, topic: str, records: int) -> int:
    consumer = ConfluentConsumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "bench"})
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    try:
        count, deadline = 0, time.monotonic() + _SECONDS
        while count < records and time.monotonic() < deadline:
            count += len(consumer.consume(_AT_ONCE, 1.0))
        return count
    finally:
        consumer.close()


CONSUMER = Work(
    "consumer",
    _consume,
    (
        "Consumer: a topic of 4 partitions, written once by ProducerPerformance (batches of up to 64 KB) and read from "
        "the page cache, from the making of a consumer to the last record, one process and thread of Python for each "
        "side. poll_arrow gives all columns but headers; poll gives records, confluent_kafka its messages, and neither "
        "looks at them. Defaults of both sides. Wanted: lz4 by poll_arrow 8 times as fast as confluent_kafka.",
    ),
)
