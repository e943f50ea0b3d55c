"""Spark reads: batches, a data directory, streams, many short ranges, latency of micro-batches."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from confluent_kafka import Producer

from benchmarks.brokers import KlogBroker, create_topic
from benchmarks.data import PARTITIONS, RECORD_SIZE, ToolFailed, produce
from benchmarks.figures import Bench, Result, Side, Work, latencies
from benchmarks.sides import (
    JVM,
    SideFailed,
    SparkSide,
    alternate,
    beside_jvm,
    beside_no_op,
    jvm_side,
    klog_side,
    read_all,
    recorded,
    topic_options,
)
from tests.support.servers.kafka import Kafka

CODECS = ("none", "lz4")


def _batch_read(bench: Bench) -> Iterator[Result]:
    work_dir = bench.folder("batch-read")
    with Kafka("3.9.1", work_dir / "broker", full_speed=True) as kafka:
        for codec in CODECS:
            topic = f"bench-{codec}"
            kafka.create_topic(topic, partitions=PARTITIONS)
            produce(kafka.libs, kafka.bootstrap_servers, topic, bench.records, codec, work_dir)
            yield _compare(bench, codec, work_dir / codec, kafka.bootstrap_servers, topic)


def _compare(bench: Bench, codec: str, work_dir: Path, bootstrap_servers: str, topic: str) -> Result:
    def speed(side: SparkSide) -> float:
        return bench.records / 1e6 / read_all(side, topic_options(bootstrap_servers, topic), bench.records)

    work = f"Spark batch read, count + sum(length), {bench.records:,} records, {codec}"
    return beside_jvm(bench, work, "M rows/s", work_dir, speed)


BATCH_READ = Work(
    "batch-read",
    _batch_read,
    (
        f"Batch read: {PARTITIONS} partitions of {RECORD_SIZE}-byte values (log lines in JSON, no keys), "
        "written by ProducerPerformance with batch.size=65536 and linger.ms=20 to Kafka 3.9.1 on the same "
        "machine. `count(*)` and `sum(length(value))` in local[2], the same options for both sides, from "
        "`spark.read` to the answer. Each side has a new session for each codec; its first run is the cold "
        "one (without the session's start), then the sides take turns. A wrong count or sum is a failure.",
    ),
)


_TOPIC = "stored"
_BROKER = "klog through the broker"


def _directory_read(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("directory-read")
    with Kafka("3.9.1", folder / "broker", full_speed=True) as kafka:
        kafka.create_topic(_TOPIC, partitions=PARTITIONS)
        produce(kafka.libs, kafka.bootstrap_servers, _TOPIC, bench.records, "lz4", folder)
        options = {"klog": {"path": str(kafka.log_dir), "subscribe": _TOPIC}}
        options[_BROKER] = options[JVM] = topic_options(kafka.bootstrap_servers, _TOPIC)

        def through_broker() -> SparkSide:
            side = klog_side(folder / "through-broker")
            side.name = _BROKER
            return side

        def speed(side: SparkSide) -> float:
            return bench.records / 1e6 / read_all(side, options[side.name], bench.records)

        ours, broker, jvm = Side("klog"), Side(_BROKER), Side(JVM)
        makers = [(ours, lambda: klog_side(folder)), (broker, through_broker), (jvm, lambda: jvm_side(folder))]
        alternate(makers, bench.repeat, speed)
        work = f"Spark batch read of a data directory, count + sum(length), {bench.records:,} records, lz4"
        for peer in (broker, jvm):
            yield Result(work, "M rows/s", ours, peer, bench.command)


DIRECTORY_READ = Work(
    "directory-read",
    _directory_read,
    (
        "Directory read: as the batch read, but klog reads Kafka's data directory by path, without the broker; all "
        "sides run on the same machine, with the broker up.",
    ),
)


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


_TRIGGER = 1_000_000
_LARGE = (1024, 10 * 1024)
_MANY, _MANY_RECORDS = 200, 25
_VERY_MANY = 1000
#: The JVM connector takes a minute per run.
_REPEATS_OF_MANY = 2


def _reads(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("reads")
    with Kafka("3.9.1", folder / "broker", full_speed=True) as kafka:
        servers = kafka.bootstrap_servers

        def fill(topic: str, partitions: int, records: int, codec: str = "none", size: int = RECORD_SIZE) -> None:
            kafka.create_topic(topic, partitions=partitions)
            produce(kafka.libs, servers, topic, records, codec, folder, size)

        fill("small", PARTITIONS, bench.records)
        small = topic_options(servers, "small")

        def parquet(side: SparkSide) -> float:
            written = str(folder / "parquet")
            return bench.records / 1e6 / read_all(side, small, bench.records, work="parquet", folder=written)

        work = f"Spark read into Parquet, {bench.records:,} records, none"
        yield beside_jvm(bench, work, "M rows/s", folder, parquet)

        def stream(side: SparkSide, options: dict[str, str]) -> float:
            return bench.records / 1e6 / _stream(side, options, bench.records, folder / "checkpoint")

        work = f"Spark stream, AvailableNow, {_TRIGGER:,} offsets a trigger, {bench.records:,} records, none"
        unit, count = "M rows/s", {"records": bench.records, "trigger": _TRIGGER}
        yield beside_jvm(bench, work, unit, folder, lambda side: stream(side, small))
        yield beside_no_op(bench, work, unit, folder, small, stream, **count)
        for size in _LARGE:
            topic, records = f"large-{size}", max(100, bench.records * RECORD_SIZE // size)
            fill(topic, PARTITIONS, records, size=size)
            work = f"Spark batch read, count + sum(length), {records:,} records of {size:,} B, none"
            large, megabytes = topic_options(servers, topic), _megabytes(records, size)
            yield beside_jvm(bench, work, "MB/s", folder, partial(megabytes, options=large))
            yield beside_no_op(bench, work, "MB/s", folder, large, megabytes, records=records, size=size)
        kafka.create_topic("many", partitions=_MANY)
        fill_evenly(servers, "many", _MANY, _MANY_RECORDS)
        many = topic_options(servers, "many")
        yield beside_jvm(
            bench,
            f"Spark batch read, count + sum(length), {_MANY} partitions of {_MANY_RECORDS} records",
            "s",
            folder,
            lambda side: read_all(side, many, _MANY * _MANY_RECORDS),
            min(bench.repeat, _REPEATS_OF_MANY),
            higher_is_better=False,
        )
        kafka.create_topic("very-many", partitions=_VERY_MANY)
        fill_evenly(servers, "very-many", _VERY_MANY, 1)
        very_many = topic_options(servers, "very-many")
        work = f"Spark plans a batch over {_VERY_MANY:,} partitions"
        yield beside_jvm(bench, work, "s", folder, lambda side: _plan(side, very_many), higher_is_better=False)


def _megabytes(records: int, size: int) -> Callable[[SparkSide, dict[str, str]], float]:
    return lambda side, options: records * size / 1e6 / read_all(side, options, records, size)


def _stream(side: SparkSide, options: dict[str, str], records: int, checkpoint: Path) -> float:
    """Seconds of a stream with AvailableNow, `_TRIGGER` offsets per micro-batch, from the query's start to its end."""
    shutil.rmtree(checkpoint, ignore_errors=True)
    options = options | {"maxOffsetsPerTrigger": str(_TRIGGER)}
    answer = side.ask("stream", options, folder=str(checkpoint))
    if answer["rows"] != records:
        raise SideFailed(f"read {answer['rows']} rows; there are {records} records")
    return float(answer["seconds"])


def _plan(side: SparkSide, options: dict[str, str]) -> float:
    answer = side.ask("plan", options)
    if not 0 < answer["rows"] <= _VERY_MANY:  # tasks: small partitions share one
        raise SideFailed(f"planned {answer['rows']} tasks; there are {_VERY_MANY} partitions")
    return float(answer["seconds"])


READS = Work(
    "reads",
    _reads,
    (
        f"Other reads: as the batch read; the stream goes into Spark's sink that drops all, Parquet has all columns; "
        f"of the {_MANY} partitions there are {_REPEATS_OF_MANY} repeats at most.",
    ),
)


#: Records of a probe, over all partitions.
_NEW_RECORDS = 100
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
    work = f"micro-batches of {_NEW_RECORDS} new records, append to sink"
    yield from latencies(work, figures, _PROBES * bench.repeat, bench.command)


def _measure(side: SparkSide, servers: str, topic: str, folder: Path, probes: int) -> list[float]:
    """Milliseconds of each probe after the warm-up. A probe starts when the one before has arrived."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 0})
    options = {"kafka.bootstrap.servers": servers, "subscribe": topic, "startingOffsets": "earliest"}
    side.ask("probes", options, folder=str(folder))
    found = []
    for number in range(_PROBES + probes):
        started = time.perf_counter()
        for record in range(_NEW_RECORDS):
            producer.produce(topic, f"{number} {record}".encode(), partition=record % PARTITIONS)
        if producer.flush(_SECONDS):
            raise SideFailed("the probe could not be produced")
        arrived = 0
        while arrived < _NEW_RECORDS:
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
        f"{_NEW_RECORDS} records have arrived; a probe follows when the one before is there. {_PROBES} come before "
        "those that count.",
    ),
)
