"""Our producer, confluent-kafka's, kafka-python's and Kafka's ProducerPerformance, writing to Kafka."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pyarrow as pa
from confluent_kafka import Producer as ConfluentProducer
from kafka import KafkaProducer

from benchmarks.consumer import in_turn, rate_of
from benchmarks.data import PARTITIONS, RECORD_SIZE, payload_file, producer_performance
from benchmarks.figures import Result
from benchmarks.sides import SideFailed
from benchmarks.work import Bench, Work
from spark_klog.client import Admin, Producer
from tests.support.kafka import Kafka

_SECONDS = 600.0
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
