"""Spark writes to a topic on a real Kafka: beside the JVM connector, a writer that does nothing, and exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.broker_pair import check_count, topic
from benchmarks.data import RECORD_SIZE
from benchmarks.figures import Result, Side
from benchmarks.jvm_connector import beside_jvm
from benchmarks.no_op import NAME as NO_OP, no_op_side
from benchmarks.sides import SparkSide, alternate, klog_side
from benchmarks.work import Bench, Work
from spark_klog.records.formats.batch import iter_batches
from tests.support.kafka import Kafka

_CODECS = ("lz4", "none", "snappy", "gzip")
#: For both sides, so that the connector makes large batches, too.
_OPTIONS = {"kafka.linger.ms": "50", "kafka.batch.size": "1000000"}
_LARGE = 10_000
#: As docs/reference/writing.md advises; the connector sends no Arrow.
_CONFS_OF_LARGE = {"spark.sql.execution.arrow.maxRecordsPerBatch": "500"}
#: Rows of a micro-batch of the streams.
_MICRO_BATCH = 100_000
#: With 4,000,000 records as the setting 2,000,000 rows are written.
_PART = 2
_NAMES = itertools.count()


def _write(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("write")
    rows = bench.records // _PART
    with klog_side(folder / "data") as maker:
        maker.start()
        small = _data(maker, folder / "rows", rows, RECORD_SIZE)
        large_rows = max(1, rows * RECORD_SIZE // _LARGE)
        large = _data(maker, folder / "large", large_rows, _LARGE)
        # at least two micro-batches in a quick run
        per_batch = min(_MICRO_BATCH, rows // 2)
        batches = _data(maker, folder / "batches", rows, RECORD_SIZE, files=rows // per_batch)
    with Kafka("3.9.1", folder / "broker", {"log.segment.delete.delay.ms": "1000"}, heap="1g") as kafka:
        for codec in _CODECS:
            sizes: dict[str, list[float]] = {}

            def speed(side: SparkSide, codec: str = codec, sizes: dict[str, list[float]] = sizes) -> float:
                seconds, size = _written(kafka, side, small, rows, codec)
                sizes.setdefault(side.name, []).append(size)
                return rows / 1e6 / seconds

            work = f"Spark write, at least once, {rows:,} rows of {RECORD_SIZE} B from Parquet, {codec}"
            result = beside_jvm(bench, work, "M rows/s", folder / codec, speed)
            yield result
            means = [Side(side.name, sizes.get(side.name, [])[1:], failed=side.failed) for side in result.sides]
            yield Result(f"mean record batch of that, {codec}", "KB", *means, bench.command)
        yield _beside_no_op(bench, kafka, folder / "no-op", small, rows)
        work = f"Spark write, at least once, {large_rows:,} rows of {_LARGE:,} B from Parquet, none"
        yield beside_jvm(
            bench,
            work,
            "MB/s",
            folder / "of-large",
            lambda side: large_rows * _LARGE / 1e6 / _written(kafka, side, large, large_rows, "none")[0],
            confs=_CONFS_OF_LARGE,
        )
        yield _guarantees(bench, kafka, folder / "guarantees", batches, rows, per_batch)


def _data(side: SparkSide, folder: Path, rows: int, size: int, files: int = 4) -> Path:
    side.ask("make_rows", {}, folder=str(folder), rows=str(rows), size=str(size), files=str(files))
    return folder


def _written(kafka: Kafka, side: SparkSide, data: Path, rows: int, codec: str) -> tuple[float, float]:
    """The seconds of a write into a new topic, and the mean size of its record batches in KB."""
    with topic(kafka.bootstrap_servers, f"write-{next(_NAMES)}") as name:
        options = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "topic": name, "kafka.compression.type": codec}
        seconds = float(side.ask("write", options | _OPTIONS, folder=str(data))["seconds"])
        check_count(kafka, name, rows)
        sizes = [len(data) for log in kafka.log_dir.glob(f"{name}-[0-9]*/*.log") for data in _batches(log)]
    return seconds, sum(sizes) / len(sizes) / 1000


def _batches(log: Path) -> Iterator[bytes | memoryview]:
    for _, data in iter_batches(log.read_bytes()):
        yield data


def _beside_no_op(bench: Bench, kafka: Kafka, folder: Path, data: Path, rows: int) -> Result:
    work = f"Spark write, {rows:,} rows of {RECORD_SIZE} B from Parquet, lz4, beside a writer that does nothing"

    def speed(side: SparkSide) -> float:
        if side.name == result.klog.name:
            return rows / 1e6 / _written(kafka, side, data, rows, "lz4")[0]
        return rows / 1e6 / float(side.ask("write", {}, folder=str(data))["seconds"])

    result = Result(work, "M rows/s", Side("klog"), peer := Side(NO_OP), bench.command)
    alternate([(result.klog, lambda: klog_side(folder)), (peer, lambda: no_op_side(folder))], bench.repeat, speed)
    return result


def _guarantees(bench: Bench, kafka: Kafka, folder: Path, data: Path, rows: int, per_batch: int) -> Result:
    work = f"Spark stream, exactly once beside at least once, {rows:,} rows, {per_batch:,} a micro-batch, lz4"
    names = ("exactly-once", "at-least-once")
    result = Result(work, "M rows/s", Side(f"klog, {names[0]}"), peer := Side(f"klog, {names[1]}"), bench.command)

    def speed(guarantee: str) -> Callable[[SparkSide], float]:
        def run(side: SparkSide) -> float:
            with topic(kafka.bootstrap_servers, f"write-{next(_NAMES)}") as name:
                options = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "topic": name}
                options |= {"kafka.compression.type": "lz4", "deliveryGuarantee": guarantee}
                place = {"folder": str(data), "checkpoint": str(folder / name)}
                return rows / 1e6 / float(side.ask("write_stream", options, **place)["seconds"])

        return run

    # one session for both: only the guarantee differs
    with klog_side(folder) as side:
        side.start()
        for number in range(bench.repeat + 1):
            for figures, guarantee in zip((result.klog, peer), names, strict=True):
                value = speed(guarantee)(side)
                if number == 0:
                    figures.cold = value
                else:
                    figures.samples.append(value)
    return result


WRITE = Work(
    "write",
    _write,
    (
        f"Write: rows that Spark has written to Parquet before (log lines in JSON, no keys), to a new topic of 4 "
        "partitions on Kafka 3.9.1 on the same machine, in local[2], with batch.size "
        f"{_OPTIONS['kafka.batch.size']} and linger.ms {_OPTIONS['kafka.linger.ms']} for both sides; from the read "
        "of the Parquet files to the return of `save()`. The end offsets are compared with the rows; "
        "large rows with spark.sql.execution.arrow.maxRecordsPerBatch 500 for klog; "
        "the mean size of record batches is that of the broker's "
        "log files. The streams read one Parquet file a micro-batch with AvailableNow, in one session; "
        "transaction markers are part of what they write.",
        "Wanted: lz4, none, snappy and gzip 1.5 times the connector's rows, large rows 1.3 times, lz4 0.8 of a writer "
        "that does nothing, exactly once 0.9 of at least once.",
    ),
)
