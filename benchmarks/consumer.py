"""Our consumer, confluent-kafka's, kafka-python's and kcat, reading a whole topic from Kafka."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from confluent_kafka import Consumer as ConfluentConsumer, TopicPartition as ConfluentPartition
from kafka import KafkaConsumer, TopicPartition

from benchmarks.consuming import read_by_kcat
from benchmarks.data import PARTITIONS, RECORD_SIZE, produce
from benchmarks.figures import Result, Side
from benchmarks.sides import SideFailed, recorded
from benchmarks.work import Bench, Work
from spark_klog.client import Consumer
from tests.support.certificates import make_certificates
from tests.support.kafka import HOST, Kafka
from tests.support.secure_kafka import tls_properties

log = logging.getLogger(__name__)

_TOPIC = "bench"
_SECONDS = 600.0
_AT_ONCE = 10_000
#: By default librdkafka pauses a partition for a second whenever 100,000 of its messages are queued.
_WITHOUT_PAUSES = {"fetch.queue.backoff.ms": 1, "queued.min.messages": 1_000_000}
_TLS = "TLS"


def _consume(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("consumer")
    with Kafka("3.9.1", folder / "broker", full_speed=True) as kafka:
        servers = kafka.bootstrap_servers
        for codec in ("lz4", "none"):
            topic = f"{_TOPIC}-{codec}"
            kafka.create_topic(topic, partitions=PARTITIONS)
            produce(kafka.libs, servers, topic, bench.records, codec, folder)
            readers: dict[str, Callable[[], int]] = {
                "poll_arrow": lambda topic=topic: _poll_arrow(servers, topic, bench.records),
                "poll": lambda topic=topic: _poll(servers, topic, bench.records),
                "confluent_kafka": lambda topic=topic: _confluent(servers, topic, bench.records, {}),
                "confluent_kafka, tuned": lambda topic=topic: _confluent(
                    servers, topic, bench.records, _WITHOUT_PAUSES
                ),
                "kcat": lambda topic=topic: read_by_kcat(servers, topic, bench.records, "-o", "beginning"),
                "kafka-python": lambda topic=topic: _kafka_python(servers, topic, bench.records),
            }
            sides = in_turn(bench, {name: lambda run=run: rate_of(run, bench.records) for name, run in readers.items()})
            work = f"{bench.records:,} records of {RECORD_SIZE} B, {codec}"
            for ours, theirs in (
                ("poll_arrow", "confluent_kafka"),
                ("poll_arrow", "confluent_kafka, tuned"),
                ("poll_arrow", "kcat"),
                ("poll", "confluent_kafka, tuned"),
                ("poll", "kafka-python"),
            ):
                name = f"Consumer: {ours}, and {theirs}, {work}"
                yield Result(name, "M records/s", sides[ours], sides[theirs], bench.command)


def in_turn(bench: Bench, runs: dict[str, Callable[[], float]]) -> dict[str, Side]:
    """Run each side in turn: a warm-up, then the repeats; a run returns its rate in millions of records per second."""
    sides = {name: Side(name) for name in runs}
    for number in range(bench.repeat + 1):
        for name, run in runs.items():
            side = sides[name]
            if side.failed is not None:
                continue
            with recorded(side):
                rate = run()
                log.info("%s: run %d of %d: %.3f", name, number, bench.repeat, rate)
                if number:
                    side.samples.append(rate)
                else:
                    side.cold = rate
    return sides


def rate_of(run: Callable[[], int], records: int) -> float:
    """The rate of `run` in millions of records per second; `run` returns the number of records that it handled."""
    started = time.perf_counter()
    count = run()
    seconds = time.perf_counter() - started
    if count != records:
        raise SideFailed(f"{count} records, not {records}")
    return records / seconds / 1e6


def _ours(servers: str, topic: str, more: dict[str, str] | None = None) -> Consumer:
    consumer = Consumer({"bootstrap.servers": servers, "max.poll.records": _AT_ONCE, **(more or {})})
    consumer.assign([(topic, partition, 0) for partition in range(PARTITIONS)])
    return consumer


def _poll_arrow(servers: str, topic: str, records: int, more: dict[str, str] | None = None) -> int:
    with _ours(servers, topic, more) as consumer:
        count, deadline = 0, time.monotonic() + _SECONDS
        while count < records and time.monotonic() < deadline:
            batch = consumer.poll_arrow(1.0)
            count += 0 if batch is None else batch.num_rows
        return count


def _poll(servers: str, topic: str, records: int) -> int:
    with _ours(servers, topic) as consumer:
        count, deadline = 0, time.monotonic() + _SECONDS
        while count < records and time.monotonic() < deadline:
            count += len(consumer.poll(1.0))
        return count


def _confluent(servers: str, topic: str, records: int, more: dict[str, int]) -> int:
    consumer = ConfluentConsumer({"bootstrap.servers": servers, "group.id": "bench", **more})
    consumer.assign([ConfluentPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    try:
        count, deadline = 0, time.monotonic() + _SECONDS
        while count < records and time.monotonic() < deadline:
            count += len(consumer.consume(_AT_ONCE, 1.0))
        return count
    finally:
        consumer.close()


def _kafka_python(servers: str, topic: str, records: int) -> int:
    consumer = KafkaConsumer(bootstrap_servers=servers, max_poll_records=_AT_ONCE, auto_offset_reset="earliest")
    consumer.assign([TopicPartition(topic, partition) for partition in range(PARTITIONS)])
    try:
        count, deadline = 0, time.monotonic() + _SECONDS
        while count < records and time.monotonic() < deadline:
            count += sum(map(len, consumer.poll(1000).values()))
        return count
    finally:
        consumer.close()


def _consume_by_tls(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("tls")
    certificates = make_certificates(folder / "certificates")
    properties = tls_properties(certificates, folder)
    with Kafka("3.9.1", folder / "broker", properties, full_speed=True, listeners={_TLS: "SSL"}) as kafka:
        tls = {"security.protocol": "SSL", "ssl.truststore.location": str(certificates.ca)}
        secure, plain = f"{HOST}:{kafka.ports[_TLS]}", kafka.bootstrap_servers
        for codec in ("lz4", "none"):
            topic = f"{_TOPIC}-{codec}"
            kafka.create_topic(topic, partitions=PARTITIONS)
            produce(kafka.libs, plain, topic, bench.records, codec, folder)
            sides = in_turn(
                bench,
                {
                    "TLS": lambda topic=topic: rate_of(
                        lambda: _poll_arrow(secure, topic, bench.records, tls), bench.records
                    ),
                    "plain": lambda topic=topic: rate_of(
                        lambda: _poll_arrow(plain, topic, bench.records), bench.records
                    ),
                },
            )
            name = f"Consumer: poll_arrow by TLS, and without, {bench.records:,} records of {RECORD_SIZE} B, {codec}"
            yield Result(name, "M records/s", sides["TLS"], sides["plain"], bench.command)


CONSUMER = Work(
    "consumer",
    _consume,
    (
        "Consumer: a topic of 4 partitions, written once by ProducerPerformance (batches of up to 64 KB) and read from "
        "the page cache, from the making of a consumer to the last record, one process and thread of Python for each "
        "side, which take turns. poll_arrow gives all columns but headers; poll gives records, confluent_kafka its "
        f"messages by consume({_AT_ONCE}), and nobody looks at them; kcat writes to /dev/null and is timed from its "
        "start to its end. Defaults of all sides; librdkafka's make it pause a partition for a second whenever 100,000 "
        "of its messages wait, so 'tuned' has fetch.queue.backoff.ms=1 and queued.min.messages=1000000. Wanted: lz4 by "
        "poll_arrow 8 times as fast as confluent_kafka and 2.5 times as kcat, poll 3 times as kafka-python.",
    ),
)
TLS = Work(
    "tls",
    _consume_by_tls,
    (
        "TLS: poll_arrow as in the section consumer, by a listener with TLS 1.3 (OpenSSL at the client; Java at the "
        "broker, which can't use sendfile then) and by one without. Wanted: 0.7. TLS costs more CPU time at the "
        "broker, in one thread for a connection, than at the client.",
    ),
)
