"""kcat and Kafka's ConsumerPerformance, reading a whole topic from our broker and from Kafka."""

from __future__ import annotations

import itertools
import logging
import subprocess
import time
from collections.abc import Iterator

from benchmarks.broker_pair import broker_pair, check_count, compare, create_topic
from benchmarks.broker_process import Broker
from benchmarks.data import produce, run_java
from benchmarks.figures import Result
from benchmarks.machine import processor_time
from benchmarks.sides import SideFailed
from benchmarks.work import Bench, Work
from tests.support.kafka import kafka_libs
from tests.support.tools import kcat_path

log = logging.getLogger(__name__)

_TOPIC = "bench"
_SECONDS = 600.0
_TOOL = "org.apache.kafka.tools.ConsumerPerformance"


def _consume(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("consume")
    libs = kafka_libs("3.9.1")
    groups = (f"bench-{number}" for number in itertools.count())

    def java(broker: Broker) -> float:
        arguments = ["--bootstrap-server", broker.bootstrap_servers, "--topic", _TOPIC, "--hide-header"]
        arguments += ["--messages", str(bench.records), "--group", next(groups), "--timeout", "60000"]
        rate = float(run_java(f"{libs}/*", _TOOL, *arguments).strip().splitlines()[-1].split(",")[-1]) / 1e6
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
