"""Our clients and commands beside those of others."""

from __future__ import annotations

import itertools
import logging
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pyarrow as pa
from confluent_kafka import (
    Consumer as ConfluentConsumer,
    Producer as ConfluentProducer,
    TopicPartition as ConfluentPartition,
)
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from benchmarks.beside_kafka import read_by_kcat
from benchmarks.data import PARTITIONS, RECORD_SIZE, payload_file, produce, producer_performance
from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.record_batches import take_turns
from benchmarks.sides import SideFailed, recorded
from spark_klog.classic import ConsumerConnector
from spark_klog.client import Admin, Consumer, Producer
from spark_klog.client.admin.topics import NewTopic
from spark_klog.trees.zookeeper import ZooKeeperTree
from tests.support.clients.klog import klog_command
from tests.support.clients.tools import kcat_path
from tests.support.servers.broker import KlogBroker
from tests.support.servers.certificates import make_certificates
from tests.support.servers.kafka import HOST, Kafka
from tests.support.servers.secure_kafka import tls_properties
from tests.ui.browser import Browser, chromium
from tests.ui.support import Page, serving

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
                side.add(rate)
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


#: Producers that send record by record get 1/_PART of the run's records.
_PART = 4
_TUNED = {"batch.size": "262144", "linger.ms": "20", "buffer.memory": "134217728"}


class _Writers:
    """Each method writes the values to a topic, and returns when they are acknowledged."""

    def __init__(self, servers: str, codec: str) -> None:
        self._settings = {"bootstrap.servers": servers, "compression.type": codec}

    def send_arrow(self, topic: str, rows: pa.Table) -> None:
        with Producer(self._settings) as producer:
            producer.send_arrow(rows, topic)

    def send(self, topic: str, values: list[bytes]) -> None:
        with Producer(self._settings) as producer:
            for value in values:
                producer.send(topic, value)

    def confluent(self, topic: str, values: list[bytes]) -> None:
        producer = ConfluentProducer(self._settings)
        for value in values:
            while True:
                try:
                    producer.produce(topic, value)
                    break
                except BufferError:
                    producer.poll(0.1)
        if producer.flush(_SECONDS):
            raise SideFailed("confluent_kafka could not write all records")

    def kafka_python(self, topic: str, values: list[bytes]) -> None:
        servers, codec = self._settings["bootstrap.servers"], self._settings["compression.type"]
        producer = KafkaProducer(bootstrap_servers=servers, compression_type=None if codec == "none" else codec)
        for value in values:
            producer.send(topic, value)
        producer.flush(_SECONDS)
        producer.close()


def _produce(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("producer")
    lines = payload_file(folder).read_bytes().splitlines()
    values = list(itertools.islice(itertools.cycle(lines), bench.records))
    rows = pa.table({"value": pa.array(values, pa.binary())})
    few = values[: max(1, bench.records // _PART)]
    names = (f"bench-{number}" for number in itertools.count())
    with Kafka("3.9.1", folder / "broker", full_speed=True) as kafka, Admin(_servers(kafka)) as admin:

        def written(write: Callable[[str], None], count: int) -> float:
            topic = next(names)
            admin.create_topic(topic, PARTITIONS, replication_factor=1)

            def run() -> int:
                write(topic)
                return _count(admin, topic)

            rate = rate_of(run, count)
            admin.delete_topics([topic]).check()
            return rate

        def java(codec: str, settings: dict[str, str]) -> float:
            topic = next(names)
            admin.create_topic(topic, PARTITIONS, replication_factor=1)
            given = {"compression.type": codec, **settings}
            servers = kafka.bootstrap_servers
            rate = producer_performance(kafka.libs, servers, topic, bench.records, folder, RECORD_SIZE, given)
            if _count(admin, topic) != bench.records:
                raise SideFailed("ProducerPerformance has not written all records")
            admin.delete_topics([topic]).check()
            return rate / 1e6

        for codec in ("none", "lz4"):
            by = _Writers(kafka.bootstrap_servers, codec)
            runs: dict[str, Callable[[], float]] = {
                "send_arrow": lambda by=by: written(lambda topic: by.send_arrow(topic, rows), len(values)),
                "confluent_kafka": lambda by=by: written(lambda topic: by.confluent(topic, few), len(few)),
                "ProducerPerformance": lambda codec=codec: java(codec, {}),
                "ProducerPerformance, tuned": lambda codec=codec: java(codec, _TUNED),
                "send": lambda by=by: written(lambda topic: by.send(topic, few), len(few)),
                "kafka-python": lambda by=by: written(lambda topic: by.kafka_python(topic, few), len(few)),
            }
            sides = in_turn(bench, runs)
            for ours, theirs in (
                ("send_arrow", "confluent_kafka"),
                ("send_arrow", "ProducerPerformance"),
                ("send_arrow", "ProducerPerformance, tuned"),
                ("send", "confluent_kafka"),
                ("send", "kafka-python"),
            ):
                name = f"Producer: {ours}, and {theirs}, records of {RECORD_SIZE} B, {codec}"
                yield Result(name, "M records/s", sides[ours], sides[theirs], bench.command)


def _servers(kafka: Kafka) -> dict[str, str]:
    return {"bootstrap.servers": kafka.bootstrap_servers}


def _count(admin: Admin, topic: str) -> int:
    found = admin.list_offsets({(topic, partition): "latest" for partition in range(PARTITIONS)}).check()
    return sum(one.offset or 0 for one in found.values())


PRODUCER = Work(
    "producer",
    _produce,
    (
        "Producer: into a new topic of 4 partitions of Kafka 3.9.1, from the making of a producer until all records "
        "are confirmed and counted; the sides take turns, each with its defaults (idempotent, acks=all). "
        "ProducerPerformance's figure is the tool's own; 'tuned' has batch.size=262144, linger.ms=20 and "
        f"buffer.memory=128 MB. Sides of a record at a time write 1/{_PART} of the records. Wanted: send_arrow 3 times "
        "as fast as confluent_kafka and 1.5 times as ProducerPerformance, send 3 times as kafka-python.",
    ),
)

_MEMBERS, _MANY = 20, 200
_groups = (f"bench-{number}" for number in itertools.count())


def _run_connector(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("connector")
    with Kafka("3.9.1", folder / "broker", full_speed=True) as kafka:
        kafka.create_topic(_TOPIC, partitions=PARTITIONS)
        produce(kafka.libs, kafka.bootstrap_servers, _TOPIC, bench.records, "lz4", folder)
        ours, theirs = Side("ConsumerConnector"), Side("kafka-python")
        sides = [
            (ours, lambda: _stream(kafka, bench.records)),
            (theirs, lambda: _kafka_python_stream(kafka, bench.records)),
        ]
        take_turns(sides, bench.repeat)
        work = f"{bench.records:,} records of {RECORD_SIZE} B, lz4, one by one"
        yield Result(
            f"A stream of ConsumerConnector, and kafka-python, {work}", "M records/s", ours, theirs, bench.command
        )
        kafka.create_topic("many", partitions=_MANY)
        group = Side("ConsumerConnector")
        take_turns([(group, lambda: _settles(kafka))], bench.repeat)
        work = f"A group of {_MEMBERS} members in ZooKeeper over {_MANY} partitions, from the last join on"
        yield Result(work, "s", group, None, bench.command, False)


def _rate(records: int, read: Callable[[], int]) -> float:
    started = time.perf_counter()
    count = read()
    rate = count / (time.perf_counter() - started) / 1e6
    log.info("%.3f M records/s", rate)
    if count != records:
        raise SideFailed(f"read {count} records; there are {records}")
    return rate


def _connector(kafka: Kafka, group: str) -> ConsumerConnector:
    settings = {"zookeeper.connect": kafka.zookeeper_connect, "group.id": group, "auto.offset.reset": "smallest"}
    return ConsumerConnector(settings)


def _stream(kafka: Kafka, records: int) -> float:
    def read() -> int:
        with _connector(kafka, next(_groups)) as connector:
            count = size = 0
            for message in connector.create_message_streams({_TOPIC: 1})[_TOPIC][0]:
                size += len(message.value or b"")
                count += 1
                if count == records:
                    break
            return count

    return _rate(records, read)


def _kafka_python_stream(kafka: Kafka, records: int) -> float:
    def read() -> int:
        consumer = KafkaConsumer(bootstrap_servers=kafka.bootstrap_servers)
        try:
            partitions = [TopicPartition(_TOPIC, number) for number in range(PARTITIONS)]
            consumer.assign(partitions)
            consumer.seek_to_beginning(*partitions)
            count = size = 0
            for message in consumer:
                size += len(message.value or b"")
                count += 1
                if count == records:
                    break
            return count
        finally:
            consumer.close()

    return _rate(records, read)


def _settles(kafka: Kafka) -> float:
    """Seconds from the last member's call until the owner nodes show the final assignment."""
    group = next(_groups)
    assert kafka.zookeeper_connect is not None
    tree = ZooKeeperTree(kafka.zookeeper_connect)
    top = f"/consumers/{group}/owners/many"

    def shares() -> list[int]:
        payloads = tree.get_many([f"{top}/{number}" for number in range(_MANY)])
        return sorted(Counter(payload for payload in payloads if payload is not None).values())

    def wait() -> None:
        deadline = time.monotonic() + _SECONDS
        while shares() != [_MANY // _MEMBERS] * _MEMBERS:
            if time.monotonic() > deadline:
                raise SideFailed(f"{shares()} partitions a member after {_SECONDS:.0f} s")
            time.sleep(0.01)

    with ExitStack() as stack:
        members = [_connector(kafka, group) for _ in range(_MEMBERS)]
        for member in members:
            stack.callback(member.shutdown)
        for member in members[:-1]:
            member.create_message_streams({"many": 1})
        started = time.perf_counter()
        joining = threading.Thread(target=members[-1].create_message_streams, args=({"many": 1},))
        joining.start()
        wait()
        seconds = time.perf_counter() - started
        joining.join()
        log.info("settled in %.3f s", seconds)
    tree.close()
    return seconds


CONNECTOR = Work(
    "connector",
    _run_connector,
    (
        "ConsumerConnector: a topic of 4 partitions at Kafka 3.9.1 with ZooKeeper, read from the page cache, from the "
        "making of the consumer to the last record, each record taken by a loop that adds up the values' lengths. "
        "Defaults of both sides. Wanted: 3 times kafka-python.",
        "The group: members of one process, with a ZooKeeper session and threads of their own each. Wanted: 2 s.",
    ),
)


_TOPICS = 1000


def _run_commands(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("commands")
    with Kafka("3.9.1", folder / "kafka", full_speed=True) as kafka:
        servers = kafka.bootstrap_servers
        for codec in ("lz4", "none"):
            topic = f"{_TOPIC}-{codec}"
            kafka.create_topic(topic, partitions=PARTITIONS)
            produce(kafka.libs, servers, topic, bench.records, codec, folder)
            for form, ours, theirs in (("", (), ()), (" as JSON", ("--json",), ("-J",))):
                commands = {
                    "klog": klog_command("consume", "-b", servers, topic, "-q", *ours),
                    "kcat": [kcat_path(), "-C", "-q", "-b", servers, "-t", topic, "-o", "beginning", "-e", *theirs],
                }
                runs: dict[str, Callable[[], float]] = {
                    name: lambda command=command: rate_of(lambda: _lines(command), bench.records)
                    for name, command in commands.items()
                }
                sides = in_turn(bench, runs)
                work = f"klog consume{form} to a pipe, {bench.records:,} records of {RECORD_SIZE} B, {codec}"
                yield Result(work, "M records/s", sides["klog"], sides["kcat"], bench.command)
        yield from _overview(bench, servers, "Kafka 3.9.1")
    with KlogBroker(folder / "klog") as broker:
        yield from _overview(bench, broker.bootstrap_servers, "a broker of klog's")


def _lines(command: Sequence[str]) -> int:
    """The number of lines that a command writes to a pipe."""
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as process:
            counted = subprocess.run(["wc", "-l"], stdin=process.stdout, capture_output=True, timeout=_SECONDS)
        if process.returncode:
            errors.seek(0)
            raise SideFailed(f"{command[0]} ended with {process.returncode}: {errors.read()[-1000:]!r}")
    return int(counted.stdout)


def _overview(bench: Bench, servers: str, where: str) -> Iterator[Result]:
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topics([NewTopic(f"topic-{number}", 1, 1) for number in range(_TOPICS)]).check()
    with serving("-b", servers) as page, chromium() as driver:
        browser = Browser(driver, page)
        for name, look in (
            ("answered", lambda: _answered(page)),
            ("shown in Chromium", lambda: _shown(browser)),
        ):
            side = Side("klog")
            with recorded(side):
                for _ in range(bench.repeat + 1):
                    seconds = look()
                    side.add(seconds)
            work = f"the page's overview of {_TOPICS:,} topics at {where}, {name}"
            yield Result(work, "s", side, None, bench.command, higher_is_better=False)


def _answered(page: Page) -> float:
    started = time.perf_counter()
    found = page.get("overview")
    seconds = time.perf_counter() - started
    if len(found["topics"]) < _TOPICS:
        raise SideFailed(f"{len(found['topics'])} topics, not {_TOPICS}")
    return seconds


def _shown(browser: Browser) -> float:
    started = time.perf_counter()
    browser.open("overview")
    seconds = time.perf_counter() - started
    rows = browser.js("return document.querySelectorAll('#main tbody a[aria-label]').length")
    if rows < _TOPICS:
        raise SideFailed(f"{rows} topics, not {_TOPICS}")
    return seconds


COMMANDS = Work(
    "commands",
    _run_commands,
    (
        f"Commands: a topic of {PARTITIONS} partitions at Kafka 3.9.1, read from the page cache; from the start of the "
        "command, Python's included, to the end of its output, which `wc -l` reads from a pipe and counts. The sides "
        "take turns. Wanted: 1.0 of kcat.",
        f"The page: from a request to its answer, and from the opening of the page's address to the table of "
        f"{_TOPICS:,} topics; the cold figure is the first since the start of the server. Wanted: 1 s.",
    ),
)
