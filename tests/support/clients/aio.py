"""aiokafka."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from tests.support.clients.client import SECONDS, SESSION_MS, Client, Member, Record, Seen

_T = TypeVar("_T")


class AioKafka(Client):
    name = "aiokafka"

    def create(self, topic: str, partitions: int) -> None:
        asyncio.run(self._create(topic, partitions))

    def produce(self, topic: str, partition: int, codec: str, records: Sequence[Record]) -> list[int]:
        return asyncio.run(self._produce(topic, partition, codec, records))

    def consume(self, topic: str, starts: Mapping[int, int], count: int) -> list[Seen]:
        return asyncio.run(self._consume(topic, starts, count))

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        return asyncio.run(self._offset_at(topic, partition, timestamp))

    def member(self, topic: str, group: str, session_ms: int = SESSION_MS) -> Member:
        return _Member(self.servers, topic, group, session_ms)

    async def _create(self, topic: str, partitions: int) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.servers)
        await admin.start()
        try:
            answer = await admin.create_topics([NewTopic(topic, partitions, 1)])
        finally:
            await admin.close()
        assert [error[1] for error in answer.topic_errors] == [0], answer

    async def _produce(self, topic: str, partition: int, codec: str, records: Sequence[Record]) -> list[int]:
        async with AIOKafkaProducer(
            bootstrap_servers=self.servers,
            compression_type=None if codec == "none" else codec,
            acks="all",
            linger_ms=500,
        ) as producer:
            sent = [
                await producer.send(topic, record.value, record.key, partition, record.timestamp, list(record.headers))
                for record in records
            ]
            return [(await asyncio.wait_for(entry, SECONDS)).offset for entry in sent]

    async def _consume(self, topic: str, starts: Mapping[int, int], count: int) -> list[Seen]:
        found: list[Seen] = []
        async with AIOKafkaConsumer(bootstrap_servers=self.servers, check_crcs=True) as consumer:
            offsets = {TopicPartition(topic, partition): offset for partition, offset in starts.items()}
            consumer.assign(list(offsets))
            for key, offset in offsets.items():
                consumer.seek(key, offset)
            try:
                while len(found) < count:
                    record = await asyncio.wait_for(consumer.getone(), SECONDS)
                    line = Record(record.timestamp, record.key, record.value, tuple(record.headers))
                    found.append(Seen(record.partition, record.offset, line))
            except asyncio.TimeoutError:
                pass
        return found

    async def _offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        key = TopicPartition(topic, partition)
        async with AIOKafkaConsumer(bootstrap_servers=self.servers) as consumer:
            consumer.assign([key])
            found = (await consumer.offsets_for_times({key: timestamp}))[key]
        return -1 if found is None else found.offset


class _Member(Member):
    """A member whose event loop also runs between calls, for heartbeats."""

    def __init__(self, servers: str, topic: str, group: str, session_ms: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._consumer = self._do(self._started(servers, topic, group, session_ms))

    def _do(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)

    @staticmethod
    async def _started(servers: str, topic: str, group: str, session_ms: int) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(
            topic,
            bootstrap_servers=servers,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            heartbeat_interval_ms=200,
            session_timeout_ms=session_ms,
        )
        await consumer.start()
        return consumer

    def poll(self, seconds: float) -> tuple[set[int], list[tuple[int, int]]]:
        polled = self._do(self._consumer.getmany(timeout_ms=int(seconds * 1000)))
        found = [(record.partition, record.offset) for records in polled.values() for record in records]
        return {key.partition for key in self._consumer.assignment()}, found

    def commit(self) -> None:
        self._do(self._consumer.commit())

    def leave(self) -> None:
        self._do(self._consumer.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()
