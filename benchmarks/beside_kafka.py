"""Our broker beside Kafka: start and memory, producing, consuming, latency from end to end."""

from __future__ import annotations

import itertools
import logging
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.brokers import (
    KAFKA,
    Broker,
    FirstAnswer,
    KlogBroker,
    broker_pair,
    check_count,
    compare,
    create_topic,
    resident_mb,
    topic,
)
from benchmarks.data import produce, producer_performance, run_java
from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.machine import processor_time
from benchmarks.sides import SideFailed, compile_java, recorded
from tests.support.clients.tools import kcat_path
from tests.support.servers.kafka import Kafka, kafka_libs

log = logging.getLogger(__name__)

_TOPIC = "bench"
_SECONDS = 600.0
_CONSUMER_TOOL = "org.apache.kafka.tools.ConsumerPerformance"


def _consume(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("consume")
    libs = kafka_libs("3.9.1")
    groups = (f"bench-{number}" for number in itertools.count())

    def java(broker: Broker) -> float:
        arguments = ["--bootstrap-server", broker.bootstrap_servers, "--topic", _TOPIC, "--hide-header"]
        arguments += ["--messages", str(bench.records), "--group", next(groups), "--timeout", "60000"]
        rate = float(run_java(f"{libs}/*", _CONSUMER_TOOL, *arguments).strip().splitlines()[-1].split(",")[-1]) / 1e6
        log.info("ConsumerPerformance: %.3f M records/s from %s", rate, broker.bootstrap_servers)
        return rate

    with broker_pair(folder) as brokers:
        for broker in brokers:
            create_topic(broker.bootstrap_servers, _TOPIC)
            more = bench.records + bench.records // 4  # readers must stop before the ends of partitions
            produce(libs, broker.bootstrap_servers, _TOPIC, more, "none", folder)
            check_count(broker, _TOPIC, more)
        records = f"{bench.records:,} records of 100 B"
        sides = compare(brokers, bench.repeat, lambda broker: _kcat(broker, bench.records))
        yield Result(f"kcat -C from the beginning, {records}", "M records/s", *sides, bench.command)
        sides = compare(brokers, bench.repeat, java)
        yield Result(f"ConsumerPerformance, {records}", "M records/s", *sides, bench.command)
        sides = compare(brokers, bench.repeat, lambda broker: _cpu_of_broker(broker, bench.records))
        yield Result(f"CPU time of the broker while kcat reads {records}", "s", *sides, bench.command, False)


def _kcat(broker: Broker, records: int) -> float:
    started = time.perf_counter()
    read_by_kcat(broker.bootstrap_servers, _TOPIC, records, "-o", "beginning")
    rate = records / (time.perf_counter() - started) / 1e6
    log.info("kcat: %.3f M records/s from %s", rate, broker.bootstrap_servers)
    return rate


def _cpu_of_broker(broker: Broker, records: int) -> float:
    before = processor_time(broker.pid)
    _kcat(broker, records)
    return processor_time(broker.pid) - before


def read_by_kcat(servers: str, topic: str, records: int, *more: str) -> int:
    """Read `records` records to /dev/null with kcat; raise `SideFailed` if it gets fewer."""
    command = [kcat_path(), "-C", "-q", "-b", servers, "-t", topic, "-c", str(records), *more]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise SideFailed(f"kcat did not get {records} records in {_SECONDS:.0f} s") from None
    if done.returncode:
        raise SideFailed(f"kcat ended with {done.returncode}: {done.stderr.decode(errors='replace')[-1000:]}")
    return records


CONSUME = Work(
    "consume",
    _consume,
    (
        "Consume: a topic of 4 partitions, written once by ProducerPerformance (none, batches of up to 64 KB) and read "
        "from the page cache. The topic holds a quarter more than is read: partitions are of unequal length, and a "
        "consumer at the end of one waits out fetch.max.wait.ms, 0.5 s, before it asks for more of the others, of both "
        "brokers. kcat writes to /dev/null and is timed from its start to its end.",
        "ConsumerPerformance of Kafka 3.9.1 in a group of its own: records a second of fetching, without the group's "
        "rebalance. Wanted of both: a ratio of 1.2. Both clients are the bound: each decodes on one thread, which is "
        "busy all the time; what the broker takes of the machine meanwhile is the last figure.",
    ),
)

#: Bytes of a record, and the divisor of the run's number of records.
_SHAPES = ((100, 1), (1024, 4))
_ACKS = ("1", "all")


def _produce(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("produce")
    libs = kafka_libs("3.9.1")
    names = (f"produce-{number}" for number in itertools.count())
    with broker_pair(folder) as brokers:
        for size, part in _SHAPES:
            records = bench.records // part
            for acks in _ACKS:

                def run(broker: Broker, size: int = size, acks: str = acks, records: int = records) -> float:
                    with topic(broker.bootstrap_servers, next(names)) as name:
                        properties = {"acks": acks}
                        server = broker.bootstrap_servers
                        rate = producer_performance(libs, server, name, records, folder, size, properties)
                        check_count(broker, name, records)
                    return rate / 1000

                sides = compare(brokers, bench.repeat, run)
                work = f"ProducerPerformance, {records:,} records of {size:,} B, acks={acks}"
                yield Result(work, "k records/s", *sides, bench.command)


PRODUCE = Work(
    "produce",
    _produce,
    (
        "Produce: ProducerPerformance of Kafka 3.9.1 with the producer's defaults (batch.size 16,384, linger.ms 0, "
        "with acks=all idempotence), into a new topic of 4 partitions; the figure is the tool's own. The end offsets "
        "are counted after each run. Both brokers are up, one of them works. Wanted: a ratio of 1.0.",
    ),
)

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
        side.add(value)
    log.info("%s: start %d: %.2f s, %.0f MB", figures.name, number, seconds, measured[1][1])


def _load(bench: Bench, broker: Broker, work_dir: Path) -> None:
    """Write with ProducerPerformance and read with kcat in rounds; one partition makes a round's offsets known."""
    libs = kafka_libs("3.9.1")
    create_topic(broker.bootstrap_servers, _TOPIC, 1)
    # the same for both sides; clients.py measures idempotence with acks=all
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

_PROGRAM = Path(__file__).with_name("EndToEnd.java")
_LATENCY_TOOL = "org.apache.kafka.tools.EndToEndLatency"
_TOOL_FIGURES = re.compile(r"Avg latency: ([\d.]+) ms\s+Percentiles: 50th = \d+, 99th = (\d+)")
_RATE = 1000
_MESSAGE_SIZE = 100


def _end_to_end(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("end-to-end")
    class_path = compile_java(kafka_libs("3.9.1"), _PROGRAM, folder)
    is_full = bench.records >= 1_000_000
    warm_up, messages, one_by_one = (5_000, 20_000, 10_000) if is_full else (1_000, 2_000, 1_000)
    properties = folder / "client.properties"
    properties.write_text("")

    def at_rate(broker: Broker, name: str) -> list[float]:
        arguments = map(str, (broker.bootstrap_servers, name, _RATE, warm_up, messages))
        return [float(word) for word in run_java(class_path, _PROGRAM.stem, *arguments).split()[-2:]]

    def by_tool(broker: Broker, name: str) -> list[float]:
        arguments = map(str, (broker.bootstrap_servers, name, one_by_one, 1, _MESSAGE_SIZE, properties))
        output = run_java(class_path, _LATENCY_TOOL, *arguments)
        found = _TOOL_FIGURES.search(output)
        if found is None:
            raise SideFailed(f"{_LATENCY_TOOL} printed no figures: {output[-1000:]}")
        return [float(found[1]), float(found[2])]

    with broker_pair(folder) as brokers:
        for work, run, figures in (
            (f"{messages:,} messages at {_RATE:,}/s, acks=1, to a consumer", at_rate, ("p50", "p99")),
            (f"EndToEndLatency, {one_by_one:,} messages one by one, acks=1", by_tool, ("average", "p99, whole ms")),
        ):
            for figure, sides in zip(figures, _pairs(brokers, bench.repeat, run), strict=True):
                yield Result(f"{work}, {figure}", "ms", *sides, bench.command, higher_is_better=False)


def _pairs(
    brokers: tuple[Broker, Broker], repeat: int, run: Callable[[Broker, str], list[float]]
) -> list[tuple[Side, Side]]:
    """Run both brokers in turn, a warm-up and `repeat` runs; return both sides of each of the two figures of `run`."""
    pairs = [(Side("klog"), Side(KAFKA)) for _ in range(2)]
    for number, place in itertools.product(range(repeat + 1), range(2)):
        sides = [pair[place] for pair in pairs]
        if sides[0].failed is not None:
            continue
        with recorded(*sides):
            with topic(brokers[place].bootstrap_servers, f"{run.__name__}-{number}", 1) as name:
                figures = run(brokers[place], name)
            log.info("%s: %s: %s ms", sides[0].name, run.__name__, figures)
            for side, figure in zip(sides, figures, strict=True):
                side.add(figure)
    return pairs


END_TO_END = Work(
    "end-to-end",
    _end_to_end,
    (
        "End to end: one topic of one partition, messages of 100 B, one JVM that produces and consumes with an "
        "assigned partition, the clients' defaults. At the fixed rate latency is from the time at "
        "which a message was to be sent to the return of the poll that brings it; the first messages warm the JVM and "
        "do not count. Kafka's EndToEndLatency sends a message when the one before has come, polls with "
        "fetch.max.wait.ms 0 and counts from its first message on. Wanted: a 99th percentile not above Kafka's.",
    ),
)
