"""Spark batch read of a topic from a real Kafka: `format("klog")` and the JVM connector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.data import PARTITIONS, RECORD_SIZE, produce
from benchmarks.figures import Result
from benchmarks.jvm_connector import beside_jvm
from benchmarks.sides import SparkSide, read_all, topic_options
from benchmarks.work import Bench, Work
from tests.support.kafka import Kafka

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
