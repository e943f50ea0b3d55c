"""Kafka's ProducerPerformance, writing to our broker and to Kafka."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

from benchmarks.broker_pair import broker_pair, check_count, compare, topic
from benchmarks.broker_process import Broker
from benchmarks.data import producer_performance
from benchmarks.figures import Result
from benchmarks.work import Bench, Work
from tests.support.kafka import kafka_libs

log = logging.getLogger(__name__)

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
