"""The stages of a read: each alone on one core, and Spark with a source that does nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.data import PARTITIONS, produce
from benchmarks.figures import Result, Side
from benchmarks.no_op import beside_no_op
from benchmarks.record_batches import speed, take_turns
from benchmarks.sides import SparkSide, read_all, topic_options
from benchmarks.work import Bench, Work
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.client.offsets import offset_range
from spark_klog.columns.decode import PartitionDecoder
from spark_klog.columns.schema import WITHOUT_HEADERS
from spark_klog.records.formats.batch import check_crc, iter_batches
from spark_klog.records.formats.batch_v2 import BatchHeader, body
from spark_klog.wire.primitives import Buffer
from tests.support.kafka import Kafka


def _breakdown(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("breakdown")
    with Kafka("3.9.1", folder / "broker", full_speed=True) as kafka:
        for codec in ("none", "lz4"):
            topic = f"parts-{codec}"
            kafka.create_topic(topic, partitions=PARTITIONS)
            produce(kafka.libs, kafka.bootstrap_servers, topic, bench.records, codec, folder)
            yield from _stages(bench, kafka.bootstrap_servers, topic, codec)
            yield _whole(bench, folder / codec, kafka.bootstrap_servers, topic, codec)


def _stages(bench: Bench, servers: str, topic: str, codec: str) -> Iterator[Result]:
    with Cluster.connect({"bootstrap.servers": servers}) as cluster:
        ranges = [(partition, *offset_range(cluster, topic, partition)) for partition in range(PARTITIONS)]

        def fetch(take: Callable[[memoryview, int, int], object]) -> int:
            for partition, start, end in ranges:
                for fetched in fetch_range(cluster, topic, partition, start, end):
                    take(fetched.data, fetched.offset, end)
            return bench.records

        decoder = PartitionDecoder(topic, 0, WITHOUT_HEADERS)
        chunk: list[tuple[bytes, int, int]] = []
        fetch(lambda data, first, end: chunk.append((bytes(data), first, end)) if len(chunk) < 16 else None)
        batches = [batch for data, _, _ in chunk for batch in iter_batches(data)]
        records = sum(header.count for header, _ in batches if isinstance(header, BatchHeader))

        def every(take: Callable[[BatchHeader, memoryview], object]) -> Callable[[], int]:
            def run() -> int:
                for header, batch in batches:
                    assert isinstance(header, BatchHeader)
                    take(header, batch)
                return records

            return run

        def decode(data: Buffer, first: int, end: int) -> None:
            for _ in decoder.decode(data, first, end):
                pass

        def decode_chunk() -> int:
            for item in chunk:
                decode(*item)
            return records

        stages: list[tuple[str, Callable[[], int]]] = [
            ("socket: fetch only", lambda: fetch(lambda *_: None)),
            ("CRC-32C only", every(check_crc)),
            *([("decompress only", every(body))] if codec != "none" else []),
            ("CRC, decompress, records to Arrow", decode_chunk),
            ("all of these: fetch to Arrow", lambda: fetch(decode)),
        ]
        sides = [(Side("klog"), partial(speed, run)) for _, run in stages]
        take_turns(sides, bench.repeat)
        for (name, _), (side, _) in zip(stages, sides, strict=True):
            yield Result(f"breakdown, one core, {codec}: {name}", "M records/s", side, None, bench.command)


def _whole(bench: Bench, folder: Path, servers: str, topic: str, codec: str) -> Result:
    def run(side: SparkSide, options: dict[str, str]) -> float:
        return bench.records / 1e6 / read_all(side, options, bench.records)

    work = f"breakdown, local[2], {codec}: Spark batch read"
    options = topic_options(servers, topic)
    return beside_no_op(bench, work, "M rows/s", folder, options, run, records=bench.records)


BREAKDOWN = Work(
    "breakdown",
    _breakdown,
    (
        "Breakdown: the stages of a read without Spark, in one process on one core; fetches go to Kafka on the same "
        "machine, whose own work is in them. The source that does nothing yields one prebuilt Arrow batch of 65,536 "
        "rows with the same columns again and again: what is left of the ratio to 1 is ours, the rest is Spark's way "
        "from a Python worker's Arrow stream to rows in the JVM.",
    ),
)
