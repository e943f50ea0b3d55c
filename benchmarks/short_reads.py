"""Spark reads few records of each of thousands of partitions, as a stream's micro-batch of a wide topic does."""

from __future__ import annotations

from collections.abc import Iterator

from confluent_kafka import Producer

from benchmarks.broker_pair import create_topic
from benchmarks.broker_process import KlogBroker
from benchmarks.data import RECORD_SIZE, ToolFailed
from benchmarks.figures import Result, Side
from benchmarks.sides import alternate, klog_side, read_all, topic_options
from benchmarks.work import Bench, Work

#: Several topics: creating thousands of folders takes longer than an admin client waits.
_TOPICS, _PARTITIONS, _RECORDS = 10, 500, 10


def _short_reads(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("short-reads")
    broker = KlogBroker(folder / "klog", {"log.retention.ms": "-1"})
    try:
        broker.start()
        servers = broker.bootstrap_servers
        topics = [f"wide-{number}" for number in range(_TOPICS)]
        for topic in topics:
            create_topic(servers, topic, _PARTITIONS)
            fill_evenly(servers, topic, _PARTITIONS, _RECORDS)
        partitions = _TOPICS * _PARTITIONS
        work = f"Spark batch read, count + sum(length), {partitions:,} partitions of {_RECORDS} records"
        result = Result(work, "s", Side("klog"), None, bench.command, higher_is_better=False)
        options = topic_options(servers, ",".join(topics))
        sides = [(result.klog, lambda: klog_side(folder))]
        alternate(sides, bench.repeat, lambda side: read_all(side, options, partitions * _RECORDS))
        yield result
    finally:
        broker.stop()


def fill_evenly(servers: str, topic: str, partitions: int, records: int) -> None:
    """Write the same number of records to each partition, which ProducerPerformance can't do."""
    producer = Producer({"bootstrap.servers": servers, "queue.buffering.max.messages": partitions * records + 1})
    for number in range(partitions * records):
        producer.produce(topic, b"v" * RECORD_SIZE, partition=number % partitions)
    if producer.flush(60):
        raise ToolFailed(f"{topic} could not be filled")


SHORT_READS = Work(
    "short-reads",
    _short_reads,
    (f"Short reads: as the batch read, of {_TOPICS} topics of our own broker.",),
)
