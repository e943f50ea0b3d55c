"""Spark writes: batches and streams of rows, and the latency of small micro-batches."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.brokers import check_count, create_topic, topic
from benchmarks.data import PARTITIONS, RECORD_SIZE
from benchmarks.figures import Bench, Result, Side, Work, latencies
from benchmarks.machine import processor_time
from benchmarks.sides import NO_OP, SideFailed, SparkSide, alternate, beside_jvm, klog_side, no_op_side, recorded
from spark_klog.records.formats.batch import iter_batches
from tests.support.servers.kafka import Kafka

_CODECS = ("lz4", "none", "snappy", "gzip")
#: For both sides, so that the connector makes large batches, too.
_OPTIONS = {"kafka.linger.ms": "50", "kafka.batch.size": "1000000"}
_LARGE = 10_000
#: As docs/reference/writing.md recommends; the connector sends no Arrow.
_CONFS_OF_LARGE = {"spark.sql.execution.arrow.maxRecordsPerBatch": "500"}
#: Rows of a micro-batch of the streams.
_MICRO_BATCH = 100_000
#: With --records 4,000,000, 2,000,000 rows are written.
_PART = 2
#: The bound of the module's docstring.
_BOUND = "a no-op and Kafka's part on all cores"
_NAMES = itertools.count()


@dataclass(frozen=True)
class _Rows:
    """Rows in Parquet files, and the unit of their speed."""

    folder: Path
    count: int
    size: int
    unit: str
    amount: float
    confs: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return f"{self.count:,} rows of {self.size:,} B from Parquet"


@dataclass(frozen=True)
class _Run:
    """A write: its seconds, the mean size of its record batches in KB, and seconds of processor time."""

    seconds: float
    batch_size: float
    spark: float
    broker: float


def _write(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("write")
    count = bench.records // _PART
    few = max(1, count * RECORD_SIZE // _LARGE)
    rows = _Rows(folder / "rows", count, RECORD_SIZE, "M rows/s", count / 1e6)
    large = _Rows(folder / "large", few, _LARGE, "MB/s", few * _LARGE / 1e6, _CONFS_OF_LARGE)
    with klog_side(folder / "data") as maker:
        maker.start()
        _make(maker, rows.folder, count, RECORD_SIZE)
        _make(maker, large.folder, few, _LARGE)
    with Kafka("3.9.1", folder / "broker", {"log.segment.delete.delay.ms": "1000"}, full_speed=True) as kafka:
        result, no_op = _beside_no_op(bench, kafka, folder / "no-op", rows, "lz4")
        yield result
        for codec in _CODECS:
            yield from _beside_connector(bench, kafka, folder / codec, rows, codec, no_op)
        result, no_op = _beside_no_op(bench, kafka, folder / "no-op-of-large", large, "none")
        yield result
        yield from _beside_connector(bench, kafka, folder / "of-large", large, "none", no_op)


def _make(side: SparkSide, folder: Path, rows: int, size: int, files: int = 4) -> None:
    side.ask("make_rows", {}, folder=str(folder), rows=str(rows), size=str(size), files=str(files))


def _written(kafka: Kafka, side: SparkSide, rows: _Rows, codec: str) -> _Run:
    """Write to a new topic, and check its end offsets against the number of rows."""
    with topic(kafka.bootstrap_servers, f"write-{next(_NAMES)}") as name:
        options = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "topic": name, "kafka.compression.type": codec}
        spark, broker = processor_time(side.pid), processor_time(kafka.pid)
        seconds = float(side.ask("write", options | _OPTIONS, folder=str(rows.folder))["seconds"])
        spark, broker = processor_time(side.pid) - spark, processor_time(kafka.pid) - broker
        check_count(kafka, name, rows.count)
        sizes = [len(data) for log in kafka.log_dir.glob(f"{name}-[0-9]*/*.log") for data in _batches(log)]
    return _Run(seconds, sum(sizes) / len(sizes) / 1000, spark, broker)


def _batches(log: Path) -> Iterator[bytes | memoryview]:
    for _, data in iter_batches(log.read_bytes()):
        yield data


def _beside_no_op(bench: Bench, kafka: Kafka, folder: Path, rows: _Rows, codec: str) -> tuple[Result, float]:
    """Compare with a writer that does nothing; also return that writer's processor time."""
    work = f"Spark write, {rows}, {codec}, beside a writer that does nothing"
    result = Result(work, rows.unit, Side("klog"), peer := Side(NO_OP), bench.command)
    times: list[float] = []

    def speed(side: SparkSide) -> float:
        if side.name == result.klog.name:
            return rows.amount / _written(kafka, side, rows, codec).seconds
        before = processor_time(side.pid)
        seconds = float(side.ask("write", {}, folder=str(rows.folder))["seconds"])
        times.append(processor_time(side.pid) - before)
        return rows.amount / seconds

    makers = [(result.klog, lambda: klog_side(folder, rows.confs)), (peer, lambda: no_op_side(folder, rows.confs))]
    alternate(makers, bench.repeat, speed)
    return result, median(times[1:] or [math.nan])


def _beside_connector(
    bench: Bench, kafka: Kafka, folder: Path, rows: _Rows, codec: str, no_op: float
) -> Iterator[Result]:
    """Run the same write by klog and by the connector; `no_op` is the processor time of a writer that does nothing."""
    runs: dict[str, list[_Run]] = {}

    def speed(side: SparkSide) -> float:
        run = _written(kafka, side, rows, codec)
        runs.setdefault(side.name, []).append(run)
        return rows.amount / run.seconds

    work = f"Spark write, at least once, {rows}, {codec}"
    result = beside_jvm(bench, work, rows.unit, folder, speed, confs=rows.confs)
    yield result

    def figures(name: str, unit: str, figure: Callable[[_Run], float], higher_is_better: bool) -> Result:
        klog, peer = (
            Side(side.name, [figure(run) for run in runs.get(side.name, [])[1:]], failed=side.failed)
            for side in result.sides
        )
        return Result(f"{name} of that, {rows.size:,} B, {codec}", unit, klog, peer, bench.command, higher_is_better)

    yield figures("mean record batch", "KB", lambda run: run.batch_size, True)
    yield figures("processor time of Spark and Kafka", "s", lambda run: run.spark + run.broker, False)
    cores = os.cpu_count() or 1
    bound = [rows.amount * cores / (no_op + run.broker) for run in runs.get(result.klog.name, [])[1:]]
    yield Result(f"{work}, beside its bound", rows.unit, result.klog, Side(_BOUND, bound), bench.command)


WRITE = Work(
    "write",
    _write,
    (
        f"Write: rows that Spark has written to Parquet before (log lines in JSON, no keys), to a new topic of 4 "
        "partitions on Kafka 3.9.1 on the same machine, in local[2], with batch.size "
        f"{_OPTIONS['kafka.batch.size']} and linger.ms {_OPTIONS['kafka.linger.ms']} for both sides; from the read "
        "of the Parquet files to the return of `save()`. The end offsets are compared with the rows; "
        "large rows with spark.sql.execution.arrow.maxRecordsPerBatch 500 for klog; "
        "the mean size of record batches is that of the broker's log files.",
        "The bound of a write is the processor time of the writer that does nothing and that of Kafka during the "
        "write, over all cores: nothing that gets its rows from Spark through Arrow and writes to this Kafka can be "
        "faster.",
        "Wanted: lz4, none, snappy and gzip 1.5 times the connector's rows, large rows 1.3 times, lz4 0.8 of a writer "
        "that does nothing.",
    ),
)


#: The options of streams that are compared, by name.
_UPDATES = "write_updates in foreachBatch"
_SAVES = "at least once in foreachBatch"
_GUARANTEES = {
    "exactly-once": {"deliveryGuarantee": "exactly-once"},
    _UPDATES: {},
    _SAVES: {},
    "at-least-once": {"deliveryGuarantee": "at-least-once"},
}


def _write_guarantees(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("write-guarantees")
    rows, data = bench.records // _PART, folder / "rows"
    # at least two micro-batches in a quick run
    per_batch = min(_MICRO_BATCH, rows // 2)
    work = f"{rows:,} rows, {per_batch:,} a micro-batch, lz4"
    exact, updates, saves, peer = (Side(f"klog, {name}") for name in _GUARANTEES)

    def speed(kafka: Kafka, side: SparkSide, guarantee: str) -> float:
        with topic(kafka.bootstrap_servers, f"write-{next(_NAMES)}") as name:
            options = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "topic": name}
            options |= {"kafka.compression.type": "lz4", **_GUARANTEES[guarantee]}
            place = {"folder": str(data), "checkpoint": str(folder / name)}
            kind = "write_stream"
            if guarantee in (_UPDATES, _SAVES):
                kind, place["by"] = "batch_stream", "write_updates" if guarantee == _UPDATES else "save"
            return rows / 1e6 / float(side.ask(kind, options, **place)["seconds"])

    log_settings = {"log.segment.delete.delay.ms": "1000"}
    # one session for all: only the guarantee differs
    with Kafka("3.9.1", folder / "broker", log_settings, full_speed=True) as kafka, klog_side(folder / "side") as side:
        side.start()
        _make(side, data, rows, RECORD_SIZE, files=rows // per_batch)
        for _ in range(bench.repeat + 1):
            for figures, guarantee in zip((exact, updates, saves, peer), _GUARANTEES, strict=True):
                value = speed(kafka, side, guarantee)
                figures.add(value)
    beside = "beside at least once"
    yield Result(f"Spark stream, exactly once {beside}, {work}", "M rows/s", exact, peer, bench.command)
    for plain in (peer, saves):
        yield Result(f"Spark stream, {_UPDATES} {beside}, {work}", "M rows/s", updates, plain, bench.command)


WRITE_GUARANTEES = Work(
    "write-guarantees",
    _write_guarantees,
    (
        "What exactly once costs: streams that read one Parquet file a micro-batch with AvailableNow, in one session "
        "in local[2], and write to a new topic of 4 partitions on Kafka 3.9.1; transaction markers are part of what "
        "they write.",
        "Wanted: exactly once, and `write_updates`, 0.9 of at least once.",
    ),
)


#: Records of a probe, over all partitions.
_RECORDS = 100
#: Probes for each repeat; as many warm-up probes come first.
_PROBES = 20
#: Detects a stream that hangs. The first probes wait for Python workers to start.
_SECONDS = 240.0


def _write_latency(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("write-latency")
    guarantees = [guarantee for guarantee in _GUARANTEES if guarantee not in (_UPDATES, _SAVES)]
    figures: list[tuple[Side, list[float]]] = [(Side(f"klog, {guarantee}"), []) for guarantee in guarantees]
    with Kafka("3.9.1", folder / "broker", full_speed=True) as kafka:
        for (figure, found), guarantee in zip(figures, guarantees, strict=True):
            with recorded(figure), klog_side(folder / guarantee.replace(" ", "-")) as side:
                side.start()
                found += _measure(side, kafka.bootstrap_servers, guarantee, folder, _PROBES * bench.repeat)
    work, (exact, peer) = f"micro-batches of {_RECORDS} records, topic to Spark to topic", figures
    yield from latencies(work, [exact, peer], _PROBES * bench.repeat, bench.command)


def _measure(side: SparkSide, servers: str, guarantee: str, folder: Path, probes: int) -> list[float]:
    """Milliseconds of each probe after the warm-up. A probe starts when the one before has arrived."""
    label = guarantee.replace(", ", "-").replace(" ", "-")
    source, target = f"{label}-from", f"{label}-to"
    for name in (source, target):
        create_topic(servers, name)
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 0})
    address = {"kafka.bootstrap.servers": servers}
    side.ask(
        "copy",
        {**address, "subscribe": source, "startingOffsets": "earliest"},
        to={**address, "topic": target, **_GUARANTEES[guarantee]},
        folder=str(folder / f"checkpoint-{label}"),
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
