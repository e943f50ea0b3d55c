"""The embedded broker beside Kafka 4.1 (KRaft): how fast it is up, and how much memory it holds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.broker_process import Broker, FirstAnswer, KlogBroker, resident_mb
from benchmarks.data import create_topic, produce
from benchmarks.report import Result, Side
from benchmarks.sides import SideFailed, klog_side, read_all, recorded, topic_options
from benchmarks.work import Bench, Work
from tests.support.kafka import Kafka, kafka_libs

log = logging.getLogger(__name__)

_KAFKA = "Kafka 4.1.0 KRaft, -Xmx1g"
_TOPIC = "bench"
_SETTLE_SECONDS = 2.0


@dataclass
class Figures:
    """One broker's: a side for each line of the report."""

    name: str
    ready: Side = field(init=False)
    answer: Side = field(init=False)
    idle: Side = field(init=False)
    loaded: Side = field(init=False)

    def __post_init__(self) -> None:
        self.ready, self.answer, self.idle, self.loaded = (Side(self.name) for _ in range(4))


def _broker(bench: Bench) -> Iterator[Result]:
    work_dir = bench.folder("broker")
    klog = Figures("klog")
    _measure(bench, klog, work_dir / "klog", lambda: KlogBroker(work_dir / "klog" / "broker"))
    kafka = Figures(_KAFKA)
    home = work_dir / "kafka"
    _measure(bench, kafka, home, lambda: Kafka("4.1.0", home / "broker", heap="1g"))
    records = f"{bench.records:,} records"
    for work, unit, ours, theirs in (
        ("broker: spawn to the ready line", "s", klog.ready, None),
        ("broker: spawn to the first answered ApiVersions", "s", klog.answer, kafka.answer),
        ("broker: resident memory, idle", "MB", klog.idle, kafka.idle),
        (f"broker: resident memory after {records} in and out", "MB", klog.loaded, kafka.loaded),
    ):
        yield Result(work, unit, ours, theirs, bench.command, higher_is_better=False)


def _measure(bench: Bench, figures: Figures, work_dir: Path, make: Callable[[], Broker]) -> None:
    """Start a broker again and again, and load it when it is up for the last time."""
    starts = (figures.ready, figures.answer, figures.idle)
    broker: Broker | None = None
    try:
        with recorded(*starts, figures.loaded):
            broker = make()
            for number in range(bench.repeat + 1):
                broker.stop()
                _start(broker, figures, number)
        if figures.loaded.failed is None and broker is not None:
            with recorded(figures.loaded):
                _load(bench, broker, work_dir)
                figures.loaded.samples.append(_memory(broker))
                log.info("%s: %.0f MB after the load", figures.name, figures.loaded.samples[0])
    finally:
        if broker is not None:
            broker.stop()


def _start(broker: Broker, figures: Figures, number: int) -> None:
    first = FirstAnswer(broker.bootstrap_servers)
    try:
        broker.start()
        seconds = first.seconds()
    finally:
        first.stop()
    measured = [(figures.answer, seconds), (figures.idle, _memory(broker))]
    if isinstance(broker, KlogBroker):
        measured.append((figures.ready, broker.ready_seconds))
    for side, value in measured:
        if number == 0:
            side.cold = value
        else:
            side.samples.append(value)
    log.info("%s: start %d: %.2f s, %.0f MB", figures.name, number, seconds, measured[1][1])


def _load(bench: Bench, broker: Broker, work_dir: Path) -> None:
    """Every record in by ProducerPerformance and out by the klog connector, for both brokers."""
    libs = kafka_libs("3.9.1")
    create_topic(libs, broker.bootstrap_servers, _TOPIC)
    produce(libs, broker.bootstrap_servers, _TOPIC, bench.records, "lz4", work_dir)
    with klog_side(work_dir) as side:
        try:
            side.start()
            seconds = read_all(side, topic_options(broker.bootstrap_servers, _TOPIC), bench.records)
        except SideFailed as error:
            raise SideFailed(f"the klog connector, reading from this broker: {error}") from error
        log.info("read %d records in %.1f s", bench.records, seconds)


def _memory(broker: Broker) -> float:
    time.sleep(_SETTLE_SECONDS)
    if broker.pid is None:
        raise SideFailed("the broker has ended")
    return resident_mb(broker.pid)


BROKER = Work(
    "broker",
    _broker,
    (
        "Broker starts: each from a stopped broker on the same folder without records; the cold one is the "
        "first, which makes the folder (for Kafka with StorageTool, another JVM). Memory is VmRSS of the "
        f"process {_SETTLE_SECONDS:.0f} s after it was up, and again after the records (lz4) were written "
        "by ProducerPerformance and read once by the klog connector, which reads from both brokers.",
    ),
)
