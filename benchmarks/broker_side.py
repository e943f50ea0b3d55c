"""The embedded broker and Kafka 3.9.1: time to start, and resident memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.broker_pair import KAFKA, create_topic
from benchmarks.broker_process import Broker, FirstAnswer, KlogBroker, resident_mb
from benchmarks.consuming import read_by_kcat
from benchmarks.data import producer_performance
from benchmarks.figures import Result, Side
from benchmarks.sides import SideFailed, recorded
from benchmarks.work import Bench, Work
from tests.support.kafka import Kafka, kafka_libs

log = logging.getLogger(__name__)

_TOPIC = "bench"
_SIZE = 1024
#: The brokers delete old segments during the load, so that 10 GB of records need less disk.
_SETTINGS = {
    "log.retention.ms": "-1",
    "log.retention.bytes": str(2 << 30),
    "log.segment.bytes": str(256 << 20),
    "log.retention.check.interval.ms": "1000",
    "log.segment.delete.delay.ms": "1000",
}
_SETTLE_SECONDS = 2.0


@dataclass
class Figures:
    """The figures of one broker: a side for each line of the report."""

    name: str
    ready: Side = field(init=False)
    answer: Side = field(init=False)
    idle: Side = field(init=False)
    loaded: Side = field(init=False)

    def __post_init__(self) -> None:
        self.ready, self.answer, self.idle, self.loaded = (Side(self.name) for _ in range(4))


def _broker(bench: Bench) -> Iterator[Result]:
    work_dir = bench.folder("broker")
    klog, kafka = Figures("klog"), Figures(KAFKA)
    _measure(bench, klog, work_dir, lambda: KlogBroker(work_dir / "klog", _SETTINGS))
    with ExitStack() as stack:

        def make_kafka() -> Kafka:
            made = Kafka("3.9.1", work_dir / "kafka", _SETTINGS, full_speed=True)
            stack.callback(made.close)
            return made

        _measure(bench, kafka, work_dir, make_kafka)
    rounds, records = _rounds(bench)
    through = f"{rounds * records * _SIZE / 1e9:.2g} GB in and out"
    for work, unit, ours, theirs in (
        ("broker: spawn to the ready line", "s", klog.ready, None),
        ("broker: spawn to the first answered ApiVersions", "s", klog.answer, kafka.answer),
        ("broker: resident memory, idle", "MB", klog.idle, kafka.idle),
        (f"broker: resident memory after {through}", "MB", klog.loaded, kafka.loaded),
    ):
        yield Result(work, unit, ours, theirs, bench.command, higher_is_better=False)


def _measure(bench: Bench, figures: Figures, work_dir: Path, make: Callable[[], Broker]) -> None:
    """Start a broker repeatedly, then load it after its last start."""
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
    """Write with ProducerPerformance and read with kcat in rounds; one partition makes a round's offsets known."""
    libs = kafka_libs("3.9.1")
    create_topic(broker.bootstrap_servers, _TOPIC, 1)
    # the same for both sides; producing.py measures idempotence with acks=all
    properties = {"enable.idempotence": "false"}
    rounds, records = _rounds(bench)
    for number in range(rounds):
        producer_performance(libs, broker.bootstrap_servers, _TOPIC, records, work_dir, _SIZE, properties)
        read_by_kcat(broker.bootstrap_servers, _TOPIC, records, "-p", "0", "-o", str(number * records))
        log.info("round %d of %d: %.0f MB", number + 1, rounds, _resident(broker))


def _rounds(bench: Bench) -> tuple[int, int]:
    """The number of rounds, and of records in each: 10 GB in total, less for a quick run."""
    return (10, 1_000_000) if bench.records >= 1_000_000 else (2, bench.records // 10)


def _memory(broker: Broker) -> float:
    time.sleep(_SETTLE_SECONDS)
    return _resident(broker)


def _resident(broker: Broker) -> float:
    if broker.pid is None:
        raise SideFailed("the broker has ended")
    return resident_mb(broker.pid)


BROKER = Work(
    "broker",
    _broker,
    (
        "Broker starts: each from a stopped broker on the same folder without records; the cold one is the "
        "first, which makes the folder (and starts Kafka's ZooKeeper, which then runs on). Our directories are files. "
        f"Memory is VmRSS of the process {_SETTLE_SECONDS:.0f} s after it was up, and again after records of 1 KB were "
        "written by ProducerPerformance and read by kcat, GB by GB, while retention (2 GB) deleted old segments. "
        "Wanted of ours: 0.4 s, 90 MB idle, 150 MB after 10 GB.",
    ),
)
