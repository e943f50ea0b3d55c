"""kafka-python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import kafka

from tests.support.clients.client import NO_TIMESTAMP, SECONDS, SESSION_MS, Client, Member, Record, Seen

_LEAST_SECONDS = 3.0


class KafkaPython(Client):
    name = "kafka-python"
    has_null_headers = False

    def create(self, topic: str, partitions: int) -> None:
        admin = kafka.KafkaAdminClient(bootstrap_servers=self.servers)
        admin.create_topics({topic: {"num_partitions": partitions, "replication_factor": 1}})
        admin.close()

    def produce(self, topic: str, partition: int, codec: str, records: Sequence[Record]) -> list[int]:
        producer = kafka.KafkaProducer(
            bootstrap_servers=self.servers,
            compression_type=None if codec == "none" else codec,
            acks="all",
            linger_ms=60_000,  # only `flush` sends the batch: one with a single short record would not be compressed
        )
        sent = [
            producer.send(topic, record.value, record.key, list(record.headers), partition, record.timestamp)
            for record in records
        ]
        producer.flush(SECONDS)
        offsets = [entry.get(SECONDS).offset for entry in sent]
        producer.close(SECONDS)
        return offsets

    def consume(self, topic: str, starts: Mapping[int, int], count: int) -> list[Seen]:
        consumer = self._consumer()
        offsets = {kafka.TopicPartition(topic, partition): offset for partition, offset in starts.items()}
        consumer.assign(list(offsets))
        for key, offset in offsets.items():
            consumer.seek(key, offset)
        found: list[Seen] = []
        for record in consumer:
            timestamp = NO_TIMESTAMP if record.timestamp is None else record.timestamp
            line = Record(timestamp, record.key, record.value, tuple(record.headers))
            found.append(Seen(record.partition, record.offset, line))
            if len(found) == count:
                break
        consumer.close()
        return found

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        key = kafka.TopicPartition(topic, partition)
        consumer = self._consumer()
        found = consumer.offsets_for_times({key: timestamp})[key]
        consumer.close()
        return -1 if found is None else int(found.offset)

    def member(self, topic: str, group: str, session_ms: int = SESSION_MS) -> Member:
        return _Member(
            kafka.KafkaConsumer(
                topic,
                bootstrap_servers=self.servers,
                group_id=group,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                heartbeat_interval_ms=200,
                session_timeout_ms=session_ms,
                fetch_max_wait_ms=50,
            )
        )

    def _consumer(self) -> kafka.KafkaConsumer:
        return kafka.KafkaConsumer(
            bootstrap_servers=self.servers, consumer_timeout_ms=SECONDS * 1000, check_crcs=True, group_id=None
        )


class _Member(Member):
    def __init__(self, consumer: kafka.KafkaConsumer) -> None:
        self._consumer = consumer

    def poll(self, seconds: float) -> tuple[set[int], list[tuple[int, int]]]:
        # 3.0.12 leaves a join unfinished if its last answer comes just as a poll gives up, and then sends no heartbeats
        polled = self._consumer.poll(timeout_ms=int(max(_LEAST_SECONDS, seconds) * 1000))
        found = [(record.partition, record.offset) for records in polled.values() for record in records]
        return {key.partition for key in self._consumer.assignment()}, found

    def commit(self) -> None:
        self._consumer.commit()

    def leave(self) -> None:
        self._consumer.close(autocommit=False)
