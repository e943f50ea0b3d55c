"""Helpers for the Spark tests: Kafka's schema, data in and out with confluent-kafka, error texts, deadlines."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.cimpl import NewTopic  # the stubs of .admin do not export it
from kafka import KafkaAdminClient, TopicPartition as KafkaPythonPartition
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_klog.spark.versions import HAS_ADMISSION_CONTROL
from tests.support.clients.topics import learn_topic

from .impatient import ImpatientDataSource

#: Before pyspark 4.2 Spark ends Trigger.AvailableNow and Trigger.Once after one micro-batch, whatever the limits.
needs_admission_control = pytest.mark.skipif(not HAS_ADMISSION_CONTROL, reason="needs pyspark 4.2")

#: The schema of Spark's KafkaRecordToRowConverter, copied from its documentation.
KAFKA_SCHEMA = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
    ]
)
HEADERS_TYPE = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
KAFKA_SCHEMA_WITH_HEADERS = StructType([*KAFKA_SCHEMA.fields, StructField("headers", HEADERS_TYPE)])

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_SECONDS = 60.0


class Sent(NamedTuple):
    """A record to produce; `timestamp` in ms."""

    value: bytes | None
    key: bytes | None = None
    partition: int = 0
    timestamp: int = 1_700_000_000_000
    headers: tuple[tuple[str, bytes | None], ...] = ()


class Seen(NamedTuple):
    """A record read by confluent-kafka."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_type: int
    timestamp: int


def create_topic(servers: str, name: str, partitions: int = 1, replicas: int = 1, **configs: str) -> None:
    """Create a topic with confluent-kafka and wait for its leaders."""
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    topic = NewTopic(name, num_partitions=partitions, replication_factor=replicas, config=configs)
    admin.create_topics([topic])[name].result(timeout=30)

    def has_leaders() -> bool:
        found = admin.list_topics(name, timeout=10).topics[name].partitions
        return len(found) == partitions and all(entry.leader >= 0 for entry in found.values())

    wait_for(has_leaders, f"leaders of {name}")


def delete_topic(servers: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    admin.delete_topics([topic])[topic].result(timeout=30)


def delete_records(servers: str, topic: str, before: Mapping[int, int]) -> None:
    """Delete the records before each partition's offset."""
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    wanted = [TopicPartition(topic, partition, offset) for partition, offset in before.items()]
    for future in admin.delete_records(wanted).values():
        future.result(timeout=30)


def set_topic(servers: str, topic: str, name: str, value: str) -> None:
    """Change a setting of a topic."""
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    change = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[change])
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(timeout=30)


def produce(servers: str, topic: str, records: Iterable[Sent], **settings: Any) -> None:
    """Produce with confluent-kafka, in the given order within each partition; all records are acknowledged.

    With a long `linger_ms` each partition gets one record batch: the final flush does not wait for the linger time.
    """
    failures: list[Any] = []
    config = {"bootstrap.servers": servers, "linger.ms": 5, "log_level": 0}
    producer = Producer(config | {name.replace("_", "."): value for name, value in settings.items()})
    if "linger_ms" in settings:
        learn_topic(producer, topic)
    for record in records:
        while True:
            try:
                producer.produce(
                    topic,
                    record.value,
                    record.key,
                    record.partition,
                    on_delivery=lambda error, _: failures.append(error) if error else None,
                    timestamp=record.timestamp,
                    headers=list(record.headers) or None,
                )
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(_SECONDS) == 0
    assert failures == []


def consume(servers: str, topic: str, **settings: str) -> list[Seen]:
    """The topic's records up to its current end, read by confluent-kafka, by partition and offset."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "not-used",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "log_level": 0,
        }
        | {name.replace("_", "."): value for name, value in settings.items()}
    )
    seen: list[Seen] = []
    try:
        partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        unfinished = set(partitions)
        deadline = time.monotonic() + _SECONDS
        while unfinished:
            assert time.monotonic() < deadline, f"partitions {unfinished} of {topic} came to no end"
            message = consumer.poll(1)
            if message is None:
                continue
            error = message.error()
            if error is not None:
                assert error.name() == "_PARTITION_EOF", error
                unfinished.discard(message.partition())
                continue
            headers = tuple(message.headers() or ())
            kind, timestamp = message.timestamp()
            seen.append(
                Seen(
                    topic,
                    message.partition(),
                    message.offset(),
                    message.key(),
                    message.value(),
                    headers,
                    kind - TIMESTAMP_CREATE_TIME,
                    timestamp,
                )
            )
    finally:
        consumer.close()
    return sorted(seen, key=lambda record: (record.partition, record.offset))


def expected_rows(topic: str, records: Iterable[Sent]) -> list[tuple[Any, ...]]:
    """The rows, with headers, that a read of the topic must return, by partition and offset."""
    offsets: Counter[int] = Counter()
    rows = []
    for record in records:
        headers = [*record.headers] or None
        moment = _EPOCH + timedelta(milliseconds=record.timestamp)
        offset = offsets[record.partition]
        offsets[record.partition] += 1
        rows.append((record.key, record.value, topic, record.partition, offset, moment, 0, headers))
    return sorted(rows, key=lambda row: (row[2], row[3], row[4]))


def read(spark: SparkSession, servers: str, **options: Any) -> DataFrame:
    """A batch DataFrame of format klog; no test registers the format."""
    reader = spark.read.format("klog").option("kafka.bootstrap.servers", servers)
    return reader.options(**{name: str(value) for name, value in options.items()}).load()


def offsets_of(frame: DataFrame) -> list[tuple[str, int, int]]:
    """(topic, partition, offset) of all rows, sorted."""
    return sorted(
        (row.topic, row.partition, row.offset) for row in frame.select("topic", "partition", "offset").collect()
    )


def error_of(action: Callable[[], Any]) -> str:
    """Run `action`, which must fail; return the error's text. Spark wraps our error in several of its own."""
    with pytest.raises((PySparkException, Py4JJavaError)) as caught:
        action()
    return str(caught.value)


def producer_ids(servers: str, topic: str, partitions: int) -> set[int]:
    """The producer ids that the brokers know, requested by kafka-python."""
    admin = KafkaAdminClient(bootstrap_servers=servers)
    try:
        found = admin.describe_producers([KafkaPythonPartition(topic, number) for number in range(partitions)])
    finally:
        admin.close()
    return {producer.producer_id for partition in found.values() for producer in partition.active_producers}


def wait_for(
    condition: Callable[[], bool], what: str, seconds: float = _SECONDS, query: StreamingQuery | None = None
) -> None:
    """Wait until `condition` holds. Raise the query's error as soon as it fails; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        failure = query.exception() if query is not None else None
        if failure is not None:
            raise failure
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


def values(count: int, start: int = 0, partitions: int = 1) -> Sequence[Sent]:
    """Distinct records, spread over the partitions."""
    return [Sent(b"v%d" % number, partition=number % partitions) for number in range(start, start + count)]


def mixed_values(
    count: int,
    partition: int = 0,
    first_time: int = 1_700_000_000_000,
    *,
    start: int = 0,
    step: int = 1,
    with_headers: bool = True,
) -> list[Sent]:
    """Records of a partition, `step` ms apart: some without a key or value, keys that repeat, up to three headers."""
    return [
        Sent(
            None if number % 7 == 0 else b"value-%d " % number * (number % 20),
            None if number % 3 == 0 else b"key-%d" % (number % 10),
            partition,
            first_time + number * step,
            (("h", b"x"), ("ü", None), ("h", b""))[: number % 4] if with_headers else (),
        )
        for number in range(start, start + count)
    ]


def committed_offsets(checkpoint: Path) -> dict[tuple[str, int], int]:
    """The end offsets of the last micro-batch that a checkpoint has committed."""
    done = [int(path.name) for path in (checkpoint / "commits").glob("[0-9]*") if path.name.isdecimal()]
    if not done:
        return {}
    text = (checkpoint / "offsets" / str(max(done))).read_text().splitlines()[-1]
    return {
        (topic, int(partition)): offset
        for topic, partitions in json.loads(text).items()
        if not topic.startswith("start of ")
        for partition, offset in partitions.items()
    }


class Group:
    """A group's committed offsets at its coordinator, read by confluent-kafka; omits partitions without one."""

    def __init__(self, servers: str, name: str, topic: str, partitions: int) -> None:
        self._consumer = Consumer({"bootstrap.servers": servers, "group.id": name, "log_level": 0})
        self._wanted = [TopicPartition(topic, number) for number in range(partitions)]

    def offsets(self) -> dict[tuple[str, int], int]:
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                found = self._consumer.committed(self._wanted, timeout=10)
                break
            except KafkaException:  # the machine is overloaded, or the coordinator is not ready yet
                assert time.monotonic() < deadline
        return {(item.topic, item.partition): item.offset for item in found if item.offset >= 0}

    def close(self) -> None:
        self._consumer.close()


class Job:
    """A query from topics to Parquet files, which may run several times with one checkpoint."""

    format = "klog"

    def __init__(self, spark: SparkSession, servers: str, folder: Path, **options: Any) -> None:
        self.spark = spark
        self.output, self.checkpoint = folder / "output", folder / "checkpoint"
        self.options = {"kafka.bootstrap.servers": servers, "startingOffsets": "earliest"} | options

    def frame(self) -> DataFrame:
        return self.spark.readStream.format(self.format).options(**self.options).load()

    def start(self, **trigger: Any) -> StreamingQuery:
        writer = self.frame().writeStream.format("parquet").option("path", str(self.output))
        return writer.option("checkpointLocation", str(self.checkpoint)).trigger(**trigger).start()

    def run(self) -> list[int]:
        """Read up to the current end; return the row counts of the micro-batches that are not empty."""
        query = self.start(availableNow=True)
        assert query.awaitTermination(_SECONDS)
        return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]

    @property
    def result(self) -> DataFrame:
        return self.spark.read.schema(KAFKA_SCHEMA).parquet(str(self.output))

    def committed(self) -> dict[tuple[str, int], int]:
        """The offsets that the checkpoint has committed."""
        return committed_offsets(self.checkpoint)


class ImpatientJob(Job):
    """A job whose source looks for missing partitions for only 1 s."""

    format = ImpatientDataSource.name()

    def frame(self) -> DataFrame:
        self.spark.dataSource.register(ImpatientDataSource)
        return super().frame()
