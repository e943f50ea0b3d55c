"""Spark batch read of a broker's data directory, and of the same topic through the broker."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.data import PARTITIONS, produce
from benchmarks.figures import Result, Side
from benchmarks.jvm_connector import NAME, jvm_side
from benchmarks.sides import SparkSide, alternate, klog_side, read_all, topic_options
from benchmarks.work import Bench, Work
from tests.support.kafka import Kafka

_TOPIC = "stored"
_BROKER = "klog through the broker"


def _directory_read(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("directory-read")
    with Kafka("3.9.1", folder / "broker", full_speed=True) as kafka:
        kafka.create_topic(_TOPIC, partitions=PARTITIONS)
        produce(kafka.libs, kafka.bootstrap_servers, _TOPIC, bench.records, "lz4", folder)
        options = {"klog": {"path": str(kafka.log_dir), "subscribe": _TOPIC}}
        options[_BROKER] = options[NAME] = topic_options(kafka.bootstrap_servers, _TOPIC)

        def through_broker() -> SparkSide:
            side = klog_side(folder / "through-broker")
            side.name = _BROKER
            return side

        def speed(side: SparkSide) -> float:
            return bench.records / 1e6 / read_all(side, options[side.name], bench.records)

        ours, broker, jvm = Side("klog"), Side(_BROKER), Side(NAME)
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
