"""Spark batch read of a topic on a real Kafka: `format("klog")` beside the JVM connector."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.data import PARTITIONS, RECORD_SIZE, ToolFailed, payload_file, produce
from benchmarks.jvm_connector import NAME as JVM
from benchmarks.jvm_connector import jvm_side
from benchmarks.report import Result, Side
from benchmarks.sides import SideFailed, SparkSide, alternate, klog_side
from benchmarks.work import Bench
from tests.support.kafka import Kafka

log = logging.getLogger(__name__)

CODECS = ("none", "lz4")
NOTES = [
    f"Batch read: {PARTITIONS} partitions of {RECORD_SIZE}-byte log-like JSON values without keys, written by "
    "ProducerPerformance (batch.size 65536, linger.ms 20) to Kafka 3.9.1 on the same machine; `count(*)` and "
    "`sum(length(value))`, local[2], the same options for both sides. Each side has a fresh session for each codec; "
    "its first run is the cold one (session start not included), the repeats of the two sides alternate. A wrong "
    "count or sum is a failure.",
]


def batch_read(bench: Bench) -> list[Result]:
    """One result for each codec."""
    work_dir = bench.folder("batch-read")
    with Kafka("3.9.1", work_dir / "broker", heap="1g") as kafka:
        results = []
        for codec in CODECS:
            result = Result(
                f"Spark batch read, count + sum(length), {bench.records:,} records, {codec}",
                "M rows/s",
                Side("klog"),
                Side(JVM),
                bench.command,
            )
            results.append(result)
            try:
                topic = f"bench-{codec}"
                kafka.create_topic(topic, partitions=PARTITIONS)
                produce(kafka.libs, kafka.bootstrap_servers, topic, bench.records, codec, work_dir)
            except ToolFailed as error:
                for side in result.sides:
                    side.failed = str(error)
                continue
            _compare(bench, result, work_dir / codec, kafka.bootstrap_servers, topic)
        return results
