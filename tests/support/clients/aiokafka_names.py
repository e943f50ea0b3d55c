"""The clients of `spark_klog.aio` under the names that aiokafka's have, for aiokafka's own tests.

Only names, units and shapes are changed. `start` joins the group; what aiokafka does between the calls (rebalances,
looks at metadata) is done by the calls here, as by our clients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from aiokafka import errors as theirs
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.errors import for_code
from aiokafka.structs import ConsumerRecord, OffsetAndTimestamp, RecordMetadata, TopicPartition

from spark_klog import errors as ours
from spark_klog.aio import Admin, Consumer, Producer
from spark_klog.client import Committed, RebalanceListener

#: Seconds of a join.
_LONGEST = 60.0
#: Seconds of a step of a join.
_MOMENT = 0.1
_NAMES = {
    ours.ConsumerClosed: theirs.ConsumerStoppedError,
    ours.ProducerClosed: theirs.ProducerClosed,
    ours.InvalidTransactionState: theirs.IllegalOperation,
    ours.NoOffsetForPartition: theirs.NoOffsetForPartitionError,
    ours.OffsetOutOfRange: theirs.OffsetOutOfRangeError,
    ours.RecordTooLargeToSend: theirs.MessageSizeTooLargeError,
    ours.RequestTimedOut: theirs.KafkaTimeoutError,
    ours.ProducerFenced: theirs.ProducerFenced,
    ours.CommitFailed: theirs.CommitFailedError,
    ours.CorruptBatchError: theirs.CorruptRecordException,
}
_SETTINGS = {"max_batch_size": "batch.size", "exclude_internal_topics": "exclude.internal.topics"}


@contextmanager
def _named(wrong: type[Exception] = ValueError) -> Iterator[None]:
    """Raise errors under aiokafka's names; `wrong` is that of a call that is not to be made."""
    try:
        yield
    except ours.KlogError as error:
        name = next((name for kind, name in _NAMES.items() if isinstance(error, kind)), None)
        if isinstance(error, ours.ProtocolError):
            name = for_code(int(error.code))
        elif isinstance(error, ours.ConfigError):
            name = wrong
        raise (name or theirs.KafkaError)(str(error)) from error


def _settings(named: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in named.items():
        if name != "loop" and value is not None:
            value = ",".join(value) if name == "bootstrap_servers" and not isinstance(value, str) else value
            value = value.lower() if name == "isolation_level" else value
            given[_SETTINGS.get(name, name.replace("_", "."))] = value
    return {"bootstrap.servers": "localhost:9092", **given}


def _partitions(partitions: Collection[Any]) -> list[TopicPartition]:
    if not all(isinstance(each, TopicPartition) for each in partitions):
        raise TypeError(f"{partitions}: partitions must be of TopicPartition")
    return list(partitions)


class _Metadata:
    """What aiokafka's tests use of a producer's client, to have a topic made."""

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer, self._topics = producer, set[str]()
        self.cluster = self

    def add_topic(self, topic: str) -> None:
        self._topics.add(topic)

    async def force_metadata_update(self) -> bool:
        for topic in self._topics:
            await self._producer.partitions_for(topic)
        return True

    def topics(self) -> set[str]:
        return self._topics


class AIOKafkaProducer:
    def __init__(self, **named: Any) -> None:
        with _named():
            self._producer = Producer(_settings(named))
        self._is_transactional = named.get("transactional_id") is not None
        self.client = _Metadata(self)

    @property
    def _closed(self) -> bool:
        return self._producer._is_closed

    async def start(self) -> None:
        with _named():
            await self._producer.__aenter__()
            if self._is_transactional:
                await self._producer.init_transactions()

    async def stop(self) -> None:
        with _named():
            await self._producer.close()

    async def __aenter__(self) -> AIOKafkaProducer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def partitions_for(self, topic: str) -> set[int]:
        with _named():
            return set(range(await self._producer.partitions(topic)))

    async def flush(self) -> None:
        with _named():
            await self._producer.flush()

    async def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Any = None,
    ) -> asyncio.Future[RecordMetadata | None]:
        with _named():
            self._producer._check("send")
            if not self._producer._choice.knows(topic):  # aiokafka waits for it as well: the call has its errors
                await self._producer.partitions(topic)
            sent = self._producer.send_nowait(topic, value, key, partition, timestamp_ms, headers or ())
        told: asyncio.Future[RecordMetadata | None] = asyncio.get_running_loop().create_future()

        def done(future: asyncio.Future[Any]) -> None:
            if told.done():  # cancelled
                return
            try:
                with _named():
                    place = future.result()
            except BaseException as error:
                told.set_exception(error)
                return
            where = TopicPartition(topic, place.partition)
            is_known = place.offset >= 0  # with acks=0 nobody says it
            told.set_result(RecordMetadata(*where, where, place.offset, place.timestamp, 0, 0) if is_known else None)

        sent.add_done_callback(done)
        return told

    async def send_and_wait(self, topic: str, *arguments: Any, **named: Any) -> RecordMetadata | None:
        return await (await self.send(topic, *arguments, **named))

    async def begin_transaction(self) -> None:
        with _named(theirs.IllegalOperation):
            await self._producer.begin_transaction()

    async def commit_transaction(self) -> None:
        with _named(theirs.IllegalOperation):
            await self._producer.commit_transaction()

    async def abort_transaction(self) -> None:
        with _named(theirs.IllegalOperation):
            await self._producer.abort_transaction()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        await self.begin_transaction()
        try:
            yield
        except BaseException:
            await self.abort_transaction()
            raise
        await self.commit_transaction()

    async def send_offsets_to_transaction(self, offsets: Mapping[TopicPartition, Any], group_id: str) -> None:
        with _named(theirs.IllegalOperation):
            self._producer._transactional("send_offsets_to_transaction").check_open("send_offsets_to_transaction")
            if not isinstance(group_id, str):
                raise ValueError(group_id)
            await self._producer.send_offsets_to_transaction(_offsets(offsets), group_id)


def _offsets(offsets: Mapping[TopicPartition, Any]) -> dict[tuple[str, int], Committed]:
    return {
        (key.topic, key.partition): Committed(each) if isinstance(each, int) else Committed(each[0], metadata=each[1])
        for key, each in offsets.items()
    }


class _Listener(RebalanceListener):
    def __init__(self, listener: ConsumerRebalanceListener) -> None:
        self._listener = listener

    async def _call(self, name: str, partitions: list[tuple[str, int]]) -> None:
        done = getattr(self._listener, name)({TopicPartition(*key) for key in partitions})
        if asyncio.iscoroutine(done):
            await done

    async def on_revoked(self, partitions: list[tuple[str, int]]) -> None:
        await self._call("on_partitions_revoked", partitions)

    async def on_assigned(self, partitions: list[tuple[str, int]]) -> None:
        await self._call("on_partitions_assigned", partitions)


class AIOKafkaConsumer:
    def __init__(self, *topics: str, **named: Any) -> None:
        settings = _settings(named)
        settings.setdefault("isolation.level", "read_uncommitted")
        settings.setdefault("allow.auto.create.topics", "true")
        with _named():
            self._consumer = Consumer(settings)
        self._servers = settings["bootstrap.servers"]
        self._admin = Admin({"bootstrap.servers": self._servers})
        self._has_group = "group.id" in settings
        self._topics, self._pattern = set(topics), None
        self._reading = asyncio.Lock()
        if topics and self._has_group:
            self._consumer.subscribe(topics)

    @property
    def _closed(self) -> bool:
        return self._consumer._is_closed

    async def start(self) -> None:
        with _named():
            await self._admin.__aenter__()
            await self._consumer.__aenter__()
            async with Producer({"bootstrap.servers": self._servers}) as known:  # the broker creates what is missing
                counts = {topic: await known.partitions(topic) for topic in self._topics}
            if self._topics and not self._has_group:  # a consumer without a group takes all partitions
                keys = [(topic, number) for topic, count in counts.items() for number in range(count)]
                self._consumer.assign(keys)
            elif self._consumer._group is not None and self._consumer._group.is_subscribed:
                await self._join()

    async def _join(self) -> None:
        consumer, deadline = self._consumer, time.monotonic() + _LONGEST
        while not consumer.assignment():
            with suppress(ours.NoOffsetForPartition):  # the call that reads raises it
                await consumer._driver.run(consumer._prepare(time.monotonic() + _MOMENT))
            if time.monotonic() > deadline:
                raise theirs.KafkaTimeoutError("the consumer has got no partitions")

    async def stop(self) -> None:
        with _named():
            await self._consumer.close()
            await self._admin.close()
        async with self._reading:  # calls that read end first
            pass

    async def __aenter__(self) -> AIOKafkaConsumer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def subscribe(self, topics: Any = (), pattern: str | None = None, listener: Any = None) -> None:
        if isinstance(topics, str) or bool(topics) == (pattern is not None):
            raise TypeError("subscribe to topics or to a pattern")
        if listener is not None and not isinstance(listener, ConsumerRebalanceListener):
            raise TypeError("the listener is none")
        self._topics, self._pattern = set(topics), pattern
        with _named():
            if self._has_group:
                told = None if listener is None else _Listener(listener)
                self._consumer.subscribe(list(topics) or f"^{(pattern or '').removeprefix('^')}", told)

    def assign(self, partitions: Collection[TopicPartition]) -> None:
        with _named(theirs.IllegalStateError):
            self._consumer.assign([(each.topic, each.partition) for each in partitions])

    def assignment(self) -> set[TopicPartition]:
        return {TopicPartition(*key) for key in self._consumer.assignment()}

    def subscription(self) -> set[str]:
        return self._topics

    async def topics(self) -> set[str]:
        return {topic.name for topic in await self._admin.list_topics()}

    # Reading

    async def getone(self, *partitions: TopicPartition) -> ConsumerRecord:
        if self._closed:
            raise theirs.ConsumerStoppedError
        async with self._of(partitions):
            with _named():
                record = await self._consumer.__anext__()
        return _record(record)

    async def getmany(
        self, *partitions: TopicPartition, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        if max_records is not None and max_records < 1:
            raise ValueError(max_records)
        most = max_records or self._consumer._config.max_poll_records
        if self._closed:
            raise theirs.ConsumerStoppedError
        async with self._of(partitions):
            try:
                with _named():
                    records = await self._consumer.poll(timeout_ms / 1000)
            except theirs.ConsumerStoppedError:
                return {}
            if not records:
                return {}
            topic, number = records[0][:2]
            if len(records) > most:
                self._consumer.seek(topic, number, records[most].offset)
        return {TopicPartition(topic, number): [_record(record) for record in records[:most]]}

    @asynccontextmanager
    async def _of(self, partitions: Collection[TopicPartition]) -> AsyncIterator[None]:
        """A block that reads these partitions alone."""
        async with self._reading:
            others = [
                key for key in self._consumer.assignment() if partitions and TopicPartition(*key) not in partitions
            ]
            others = [key for key in others if key not in self._consumer.paused()]
            self._consumer.pause(others)
            try:
                yield
            finally:
                with suppress(ours.ConsumerClosed):
                    self._consumer.resume(others)

    def __aiter__(self) -> AIOKafkaConsumer:
        if self._closed:
            raise theirs.ConsumerStoppedError
        return self

    async def __anext__(self) -> ConsumerRecord:
        try:
            return await self.getone()
        except theirs.ConsumerStoppedError:
            raise StopAsyncIteration from None

    def pause(self, *partitions: TopicPartition) -> None:
        self._consumer.pause([(each.topic, each.partition) for each in partitions])

    def resume(self, *partitions: TopicPartition) -> None:
        self._consumer.resume([(each.topic, each.partition) for each in partitions])

    def paused(self) -> set[TopicPartition]:
        return {TopicPartition(*key) for key in self._consumer.paused()}

    # Positions

    async def position(self, partition: TopicPartition) -> int:
        with _named(theirs.IllegalStateError):
            return await self._consumer.position(*partition)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        if not isinstance(offset, int) or offset < 0:
            raise ValueError(offset)
        with _named(theirs.IllegalStateError):
            self._consumer.seek(*partition, offset)

    async def _seek_all(self, partitions: Collection[TopicPartition], offset: int) -> None:
        for each in _partitions(partitions) or self.assignment():
            with _named(theirs.IllegalStateError):
                self._consumer.seek(*each, offset)
                await self._consumer.position(*each)

    async def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        await self._seek_all(partitions, -2)

    async def seek_to_end(self, *partitions: TopicPartition) -> None:
        await self._seek_all(partitions, -1)

    async def seek_to_committed(self, *partitions: TopicPartition) -> None:
        keys = _partitions(partitions) or list(self.assignment())
        with _named(theirs.IllegalStateError):
            for each in keys:
                self._consumer._assignment.assigned(*each)
            committed = await self._consumer.committed([(each.topic, each.partition) for each in keys])
            for key, each in committed.items():
                self._consumer.seek(*key, each.offset)

    async def commit(self, offsets: Mapping[TopicPartition, Any] | None = None) -> None:
        with _named(theirs.IllegalOperation):
            await self._consumer.commit(None if offsets is None else _offsets(offsets))

    async def committed(self, partition: TopicPartition) -> int | None:
        with _named(theirs.IllegalOperation):
            known = await self._consumer.committed([(partition.topic, partition.partition)])
        return None if not known else next(iter(known.values())).offset

    async def beginning_offsets(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return {key: each.offset for key, each in (await self._at(dict.fromkeys(partitions, "earliest"))).items()}

    async def end_offsets(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return {key: each.offset for key, each in (await self._at(dict.fromkeys(partitions, "latest"))).items()}

    async def offsets_for_times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, Any]:
        if any(each < 0 for each in times.values()):
            raise ValueError(times)
        offsets = await self._at(times)
        return {
            key: None if each.offset is None else OffsetAndTimestamp(each.offset, each.timestamp)
            for key, each in offsets.items()
        }

    async def _at(self, times: Mapping[TopicPartition, Any]) -> dict[TopicPartition, Any]:
        with _named():
            outcomes = await self._admin.list_offsets({(key.topic, key.partition): time for key, time in times.items()})
        return {TopicPartition(*key): each for key, each in outcomes.check().items()}


def _record(record: Any) -> ConsumerRecord:
    raw = getattr(record, "raw", record)
    sizes = (-1 if each is None else len(each) for each in (raw.key, raw.value))
    return ConsumerRecord(*record[:7], None, *sizes, record.headers)
