"""Read a partition up to its end with consumers of several clients."""

from __future__ import annotations

import contextlib
import time

import kafka as kafka_python
from confluent_kafka import Consumer, KafkaError, TopicPartition

_SECONDS = 20.0


def by_confluent(servers: str, topic: str, partition: int, *, committed: bool = True) -> list[str]:
    """Read all values with confluent-kafka; `committed` sets read_committed."""
    return [value for _, value in places_by_confluent(servers, topic, partition, committed=committed)]


def places_by_confluent(servers: str, topic: str, partition: int, *, committed: bool) -> list[tuple[int, str]]:
    """(offset, value) of all records."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "none",
            "isolation.level": "read_committed" if committed else "read_uncommitted",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # the last fetch, at the end of the partition, waits this long
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition(topic, partition, 0)])
    found: list[tuple[int, str]] = []
    deadline = time.monotonic() + _SECONDS
    try:
        while time.monotonic() < deadline:
            message = consumer.poll(0.2)
            if message is None:
                continue
            error = message.error()
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    return found
                continue  # librdkafka retries
            found.append((message.offset() or 0, (message.value() or b"").decode()))
    finally:
        consumer.close()
    raise TimeoutError(f"no end of {topic}-{partition} in {_SECONDS} s, but {found}")


def by_kafka_python(servers: str, topic: str, partition: int, *, committed: bool = True) -> list[str]:
    """Read all values with kafka-python; `committed` sets read_committed."""
    return [value for _, value in places_by_kafka_python(servers, topic, partition, committed=committed)]


def places_by_kafka_python(servers: str, topic: str, partition: int, *, committed: bool) -> list[tuple[int, str]]:
    """(offset, value) of all records."""
    consumer = kafka_python.KafkaConsumer(
        bootstrap_servers=servers,
        isolation_level="read_committed" if committed else "read_uncommitted",
    )
    key = kafka_python.TopicPartition(topic, partition)
    found: list[tuple[int, str]] = []
    with contextlib.closing(consumer):
        consumer.assign([key])
        consumer.seek_to_beginning(key)
        end = consumer.end_offsets([key])[key]
        deadline = time.monotonic() + _SECONDS
        while consumer.position(key) < end:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no end of {topic}-{partition} in {_SECONDS} s, but {found}")
            for records in consumer.poll(timeout_ms=200).values():
                found += [(record.offset, (record.value or b"").decode()) for record in records]
    return found
