"""confluent-kafka (librdkafka), with default settings, and set for old brokers with `broker.version.fallback`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic  # the stubs of .admin do not export it

from tests.support.clients.client import NO_TIMESTAMP, SECONDS, SESSION_MS, Client, Member, Record, Seen
from tests.support.clients.topics import learn_topic


class Confluent(Client):
    name = "confluent-kafka"
    has_consumer_protocol = True
    settings: ClassVar[Mapping[str, str]] = {}

    def create(self, topic: str, partitions: int) -> None:
        admin = AdminClient(self._configured())
        admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(SECONDS)

    def produce(self, topic: str, partition: int, codec: str, records: Sequence[Record]) -> list[int]:
        # One batch for all records (only `flush` ends the linger): librdkafka does not compress if that saves nothing,
        # as with one short record.
        producer = Producer(self._configured(**{"compression.type": codec, "acks": "all", "linger.ms": 60_000}))
        learn_topic(producer, topic)
        offsets: list[int] = []

        def delivered(error: object, message: Message) -> None:
            if error is not None:
                raise KafkaException(error)
            offsets.append(message.offset() or 0)

        for record in records:
            producer.produce(
                topic,
                record.value,
                record.key,
                partition,
                headers=list(record.headers) or None,
                timestamp=max(record.timestamp, 0),
                on_delivery=delivered,
            )
        producer.flush(SECONDS)
        return offsets

    def consume(self, topic: str, starts: Mapping[int, int], count: int) -> list[Seen]:
        consumer = self._consumer()
        consumer.assign([TopicPartition(topic, partition, offset) for partition, offset in starts.items()])
        messages = consumer.consume(count, SECONDS)
        consumer.close()
        return [_seen(message) for message in messages]

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        consumer = self._consumer()
        (found,) = consumer.offsets_for_times([TopicPartition(topic, partition, timestamp)], SECONDS)
        consumer.close()
        if found.error is not None:
            raise KafkaException(found.error)
        return found.offset

    def member(self, topic: str, group: str, session_ms: int = SESSION_MS) -> Member:
        times = {"heartbeat.interval.ms": 200, "session.timeout.ms": session_ms}
        return _Member(self._group_consumer(group, **times), topic)

    def consumer_member(self, topic: str, group: str) -> Member:
        return _Member(self._group_consumer(group, **{"group.protocol": "consumer"}), topic)

    def _group_consumer(self, group: str, **settings: object) -> Consumer:
        common = {"group.id": group, "enable.auto.commit": False, "auto.offset.reset": "earliest"}
        return Consumer(self._configured(**common, **settings))

    def _consumer(self) -> Consumer:
        return Consumer(self._configured(**{"group.id": "unused", "enable.auto.commit": False, "check.crcs": True}))

    def _configured(self, **more: object) -> dict[str, object]:
        return {"bootstrap.servers": self.servers, **self.settings, **more}


class _Member(Member):
    def __init__(self, consumer: Consumer, topic: str) -> None:
        self._consumer = consumer
        self._next: dict[int, TopicPartition] = {}
        consumer.subscribe([topic])

    def poll(self, seconds: float) -> tuple[set[int], list[tuple[int, int]]]:
        found = []
        for message in self._consumer.consume(1000, seconds):
            seen = _seen(message)
            found.append((seen.partition, seen.offset))
            self._next[seen.partition] = TopicPartition(message.topic() or "", seen.partition, seen.offset + 1)
        return {each.partition for each in self._consumer.assignment()}, found

    def commit(self) -> None:
        mine = {each.partition for each in self._consumer.assignment()}
        self._consumer.commit(
            offsets=[each for partition, each in self._next.items() if partition in mine], asynchronous=False
        )

    def leave(self) -> None:
        self._consumer.close()


class _Old(Confluent):
    """librdkafka without ApiVersions, which writes and reads magic 0."""

    has_consumer_protocol = False
    codecs = ("none", "gzip", "snappy")  # librdkafka's lz4 needs a newer broker
    magic = 0
    has_admin = False
    finds_times = False

    def create(self, topic: str, partitions: int) -> None:
        Producer(self._configured()).list_topics(topic, SECONDS)


class ConfluentAs082(_Old):
    name = "librdkafka as of 0.8.2"
    has_groups = False
    settings = {"api.version.request": "false", "broker.version.fallback": "0.8.2"}


class ConfluentAs090(_Old):
    name = "librdkafka as of 0.9.0"
    settings = {"api.version.request": "false", "broker.version.fallback": "0.9.0"}


def _seen(message: Message) -> Seen:
    error = message.error()
    if error is not None:
        raise KafkaException(error)
    kind, timestamp = message.timestamp()
    partition, offset = message.partition(), message.offset()
    assert partition is not None
    assert offset is not None
    record = Record(
        NO_TIMESTAMP if kind == TIMESTAMP_NOT_AVAILABLE else timestamp,
        message.key(),
        message.value(),
        tuple((name, value) for name, value in message.headers() or ()),
    )
    return Seen(partition, offset, record)
