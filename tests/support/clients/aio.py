"""aiokafka."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from tests.support.clients.client import SECONDS, Client, Record, Seen


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
            linger_ms=50,
        ) as producer:
            sent = [
                await producer.send(topic, record.value, record.key, partition, record.timestamp, list(record.headers))
                for record in records
            ]
            return [(await asyncio.wait_for(entry, SECONDS)).offset for entry in sent]

    async def _consume(self, topic: str, starts: Mapping[int, int], count: int) -> list[Seen]:
        found: list[Seen] = []
        async with AIOKafkaConsumer(bootstrap_servers=self.servers, check_crcs=True) as consumer:
            places = {TopicPartition(topic, partition): offset for partition, offset in starts.items()}
            consumer.assign(list(places))
            for place, offset in places.items():
                consumer.seek(place, offset)
            try:
                while len(found) < count:
                    record = await asyncio.wait_for(consumer.getone(), SECONDS)
                    line = Record(record.timestamp, record.key, record.value, tuple(record.headers))
                    found.append(Seen(record.partition, record.offset, line))
            except asyncio.TimeoutError:
                pass
        return found

    async def _offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        place = TopicPartition(topic, partition)
        async with AIOKafkaConsumer(bootstrap_servers=self.servers) as consumer:
            consumer.assign([place])
            found = (await consumer.offsets_for_times({place: timestamp}))[place]
        return -1 if found is None else found.offset
