"""Spark reads other than batch_read's: into Parquet, larger records, many partitions, a stream."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.data import PARTITIONS, RECORD_SIZE, produce
from benchmarks.figures import Result
from benchmarks.jvm_connector import beside_jvm
from benchmarks.no_op import beside_no_op
from benchmarks.short_reads import fill_evenly
from benchmarks.sides import SideFailed, SparkSide, read_all, topic_options
from benchmarks.work import Bench, Work
from tests.support.kafka import Kafka

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
