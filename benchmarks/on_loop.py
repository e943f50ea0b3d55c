"""`spark_klog.aio` beside aiokafka and confluent's AIO client: rates, pauses of the loop, a request and its reply."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiokafka
from confluent_kafka import TopicPartition as ConfluentPartition
from confluent_kafka.aio import AIOConsumer, AIOProducer

from benchmarks.clients import in_turn
from benchmarks.data import PARTITIONS, RECORD_SIZE, payload_file, produce
from benchmarks.figures import Bench, Result, Side, Work, latencies
from benchmarks.sides import SideFailed, recorded
from spark_klog import aio
from spark_klog.client import Admin
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import NEWEST, Kafka

_KLOG, _AIOKAFKA, _CONFLUENT = "spark_klog.aio", "aiokafka", "confluent AIO"
_UNIT = "M records/s of processor time"
_TICK = 0.001
_names = (f"loop-{number}" for number in itertools.count())


def _create(servers: str, topic: str) -> None:
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topic(topic, PARTITIONS, replication_factor=1)


async def _timing_pauses(pauses: list[float]) -> None:
    """Note how late each tick of 1 ms comes, in ms.

    Of the wall's time and the process' processor time the shorter one: other processes of a busy machine do not count,
    a thread that holds the interpreter's lock does.
    """
    while True:
        wall, processor = time.perf_counter(), time.process_time()
        await asyncio.sleep(_TICK)
        late = min(time.perf_counter() - wall - _TICK, time.process_time() - processor)
        pauses.append(1000 * late)


@asynccontextmanager
async def _timed(pauses: list[float]) -> AsyncIterator[None]:
    ticker = asyncio.create_task(_timing_pauses(pauses))
    gc.collect()
    gc.freeze()  # a collection of all the program's objects is no one's pause
    try:
        yield
    finally:
        ticker.cancel()
        gc.unfreeze()


@asynccontextmanager
async def _theirs(servers: str, topic: str) -> AsyncIterator[aiokafka.AIOKafkaConsumer]:
    consumer = aiokafka.AIOKafkaConsumer(bootstrap_servers=servers, auto_offset_reset="earliest")
    await consumer.start()
    try:
        consumer.assign([aiokafka.TopicPartition(topic, partition) for partition in range(PARTITIONS)])
        yield consumer
    finally:
        await consumer.stop()


def _text_in_python(data: bytes, context: object = None) -> str:
    return data.decode().upper()


async def _read(kind: str, servers: str, topic: str, records: int, pauses: list[float] | None = None) -> float:
    """Read a topic; the rate in millions of records per second of processor time. With `pauses` they are noted."""
    count, begin = 0, time.process_time()
    async with AsyncExitStack() as stack:
        if kind.startswith(_AIOKAFKA):
            theirs = await stack.enter_async_context(_theirs(servers, topic))
            if pauses is not None:
                await stack.enter_async_context(_timed(pauses))
            if kind == "aiokafka, getmany":
                while count < records:
                    count += sum(map(len, (await theirs.getmany(timeout_ms=1000, max_records=500)).values()))
            else:
                async for _ in theirs:
                    if (count := count + 1) == records:
                        break
        else:
            settings: dict[str, Any] = {"bootstrap.servers": servers}
            if kind == "async for, deserialized":
                settings["value.deserializer"] = _text_in_python
            consumer = await stack.enter_async_context(aio.Consumer(settings))
            consumer.assign([(topic, partition, 0) for partition in range(PARTITIONS)])
            if pauses is not None:
                await stack.enter_async_context(_timed(pauses))
            if kind.startswith("async for"):
                async for _ in consumer:
                    if (count := count + 1) == records:
                        break
            while count < records:
                batch = await (consumer.poll() if kind == "poll" else consumer.poll_arrow())
                count += 0 if batch is None else len(batch)
        return records / (time.process_time() - begin) / 1e6


_READS = (
    ("async for", "aiokafka, async for"),
    ("async for, deserialized", "aiokafka, async for"),
    ("poll", "aiokafka, getmany"),
    ("poll_arrow", "aiokafka, getmany"),
)


def _reads(bench: Bench, folder: Path, libs: Path, servers: str, broker: str) -> Iterator[Result]:
    for size in (RECORD_SIZE, 10 * RECORD_SIZE):
        records, topic = bench.records if size == RECORD_SIZE else bench.records // 2, f"bench-{size}"
        _create(servers, topic)
        produce(libs, servers, topic, records, "lz4", folder, size)
        kinds = dict.fromkeys(itertools.chain(*_READS))
        longest = {kind: Side(kind) for kind in kinds}

        def read(
            kind: str, given: tuple[str, str, int] = (servers, topic, records), longest: dict[str, Side] = longest
        ) -> float:
            gc.collect()
            if not longest[kind].samples:  # the warm-up
                pauses: list[float] = []
                rate = asyncio.run(_read(kind, *given, pauses))
                longest[kind].samples.append(max(pauses))
                return rate
            return asyncio.run(_read(kind, *given))

        sides = in_turn(bench, {kind: partial(read, kind) for kind in kinds})
        for ours, theirs in _READS:
            name = f"asyncio: {ours}, and {theirs}, {records:,} records of {size} B, lz4, {broker}"
            yield Result(name, _UNIT, sides[ours], sides[theirs], bench.command)
            name = f"longest pause of the loop of that, {ours}, {size} B, {broker}"
            yield Result(name, "ms", longest[ours], longest[theirs], bench.command, higher_is_better=False)


async def _write(kind: str, servers: str, topic: str, values: list[bytes]) -> float:
    """Write values; the rate in millions of records per second of processor time."""
    begin, number, most = time.process_time(), 0, 1000
    async with AsyncExitStack() as stack:
        if kind.startswith(_KLOG):
            producer: Any = await stack.enter_async_context(aio.Producer({"bootstrap.servers": servers}))
            await producer.send(topic, values[0])  # the topic is known
            if kind.endswith("send_nowait"):
                for number, value in enumerate(values):
                    producer.send_nowait(topic, value)
                    if not number % most:
                        await asyncio.sleep(0)
                        while producer._used > 16 << 20:
                            await asyncio.sleep(0.001)
                await producer.flush()
                return len(values) / (time.process_time() - begin) / 1e6
            send = producer.send
        elif kind.startswith(_AIOKAFKA):
            producer = aiokafka.AIOKafkaProducer(bootstrap_servers=servers, linger_ms=5, enable_idempotence=True)
            await producer.start()
            stack.push_async_callback(producer.stop)
            if kind.endswith("send"):  # which returns a future
                for value in values:
                    await producer.send(topic, value)
                await producer.flush()
                return len(values) / (time.process_time() - begin) / 1e6
            send = producer.send_and_wait
        else:
            producer = AIOProducer({"bootstrap.servers": servers, "enable.idempotence": True})
            stack.push_async_callback(producer.close)
            futures = []
            for value in values:
                futures.append(await producer.produce(topic, value))
                if len(futures) == 10 * most:
                    await asyncio.gather(*futures)
                    futures.clear()
            await producer.flush()
            await asyncio.gather(*futures)
            return len(values) / (time.process_time() - begin) / 1e6
        values = values[: len(values) // 2]
        left = iter(values)

        async def worker() -> None:
            for value in left:
                await send(topic, value)

        await asyncio.gather(*(worker() for _ in range(most)))
        return len(values) / (time.process_time() - begin) / 1e6


_WRITES = (
    (f"{_KLOG}, send_nowait", f"{_AIOKAFKA}, send"),
    (f"{_KLOG}, send_nowait", _CONFLUENT),
    (f"{_KLOG}, 1,000 tasks that await send", f"{_AIOKAFKA}, 1,000 tasks that await send_and_wait"),
)


def _writes(bench: Bench, folder: Path, _libs: Path, servers: str, broker: str) -> Iterator[Result]:
    for size in (RECORD_SIZE, 10 * RECORD_SIZE):
        lines = payload_file(folder, size).read_bytes().splitlines()
        values = list(itertools.islice(itertools.cycle(lines), bench.records // 8))

        def write(kind: str, values: list[bytes] = values) -> float:
            topic = next(_names)
            _create(servers, topic)
            gc.collect()
            return asyncio.run(_write(kind, servers, topic, values))

        kinds = dict.fromkeys(itertools.chain(*_WRITES))
        sides = in_turn(bench, {kind: partial(write, kind) for kind in kinds})
        for ours, theirs in _WRITES:
            name = f"asyncio: {ours}, and {theirs}, {len(values):,} records of {size} B, {broker}"
            yield Result(name, _UNIT, sides[ours], sides[theirs], bench.command)


#: Requests a second, and those that are timed after as many that are not.
_A_SECOND, _REQUESTS = 1000, 5000


class _Service:
    """A producer, and consumers of two topics, of one of the clients."""

    def __init__(self, kind: str, servers: str, topics: tuple[str, str]) -> None:
        self._kind, self._servers, self._topics = kind, servers, topics
        self._producer: Any = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> _Service:
        if self._kind == _KLOG:
            settings = {"bootstrap.servers": self._servers, "linger.ms": "0"}
            self._producer = await self._stack.enter_async_context(aio.Producer(settings))
        elif self._kind == _AIOKAFKA:
            self._producer = aiokafka.AIOKafkaProducer(bootstrap_servers=self._servers, enable_idempotence=True)
            await self._producer.start()
            self._stack.push_async_callback(self._producer.stop)
        else:
            given = {"bootstrap.servers": self._servers, "enable.idempotence": True, "linger.ms": 0}
            # its own buffer is sent when it is full, or after a time
            self._producer = AIOProducer(given, batch_size=1)
            self._stack.push_async_callback(self._producer.close)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def send(self, topic: str, value: bytes) -> None:
        if self._kind == _KLOG:
            self._producer.send_nowait(topic, value)
        elif self._kind == _AIOKAFKA:
            await self._producer.send(topic, value)
        else:
            await self._producer.produce(topic, value)

    async def each(self, topic: str, handle: Callable[[bytes], Awaitable[None]]) -> None:
        async with AsyncExitStack() as stack:
            if self._kind == _KLOG:
                consumer: Any = aio.Consumer({"bootstrap.servers": self._servers})
                await stack.enter_async_context(consumer)
                consumer.assign([(topic, partition, 0) for partition in range(PARTITIONS)])
            elif self._kind == _AIOKAFKA:
                consumer = await stack.enter_async_context(_theirs(self._servers, topic))
            else:
                consumer = AIOConsumer({"bootstrap.servers": self._servers, "group.id": "bench"}, max_workers=2)
                stack.push_async_callback(consumer.close)
                await consumer.assign([ConfluentPartition(topic, partition, 0) for partition in range(PARTITIONS)])
                while True:
                    message = await consumer.poll(1.0)
                    if message is not None:
                        await handle(message.value())
            async for record in consumer:
                await handle(record.value)


async def _replies(kind: str, servers: str, topics: tuple[str, str], requests: int) -> list[float]:
    """Milliseconds from when a request is due until its reply is there; a service of the same loop replies."""
    due: dict[bytes, float] = {}
    milliseconds: list[float] = []
    async with _Service(kind, servers, topics) as service:

        async def reply(value: bytes) -> None:
            await service.send(topics[1], value)

        async def note(value: bytes) -> None:
            milliseconds.append(1000 * (time.perf_counter() - due.pop(value[:8])))

        tasks = [asyncio.create_task(service.each(*each)) for each in ((topics[0], reply), (topics[1], note))]
        rest, number = bytes(92), 0
        begin = time.perf_counter() + 1.0
        while number < requests:
            await asyncio.sleep(max(0.0, begin + number / _A_SECOND - time.perf_counter()))
            while number < requests and (at := begin + number / _A_SECOND) <= time.perf_counter():
                key = number.to_bytes(8, "big")
                due[key] = at
                await service.send(topics[0], key + rest)
                number += 1
        deadline = time.monotonic() + 60
        while due and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    if due:
        raise SideFailed(f"{len(due)} of {requests} requests have no reply")
    return milliseconds[len(milliseconds) // 2 :]


def _latency(bench: Bench, _folder: Path, _libs: Path, servers: str, broker: str) -> Iterator[Result]:
    samples: dict[str, tuple[Side, list[float]]] = {kind: (Side(kind), []) for kind in (_KLOG, _AIOKAFKA, _CONFLUENT)}
    for number in range(bench.repeat + 1):
        kinds = list(samples)
        for kind in (
            kinds[number % len(kinds) :] + kinds[: number % len(kinds)]
        ):  # what follows what is not always the same
            side, milliseconds = samples[kind]
            if number == 1:  # what came before warmed the broker
                milliseconds.clear()
            topics = next(_names), next(_names)
            for topic in topics:
                _create(servers, topic)
            with recorded(side):
                gc.collect()
                milliseconds += asyncio.run(_replies(kind, servers, topics, 2 * min(_REQUESTS, bench.records)))
    for peer in (_AIOKAFKA, _CONFLUENT):
        work = f"asyncio: a reply at {_A_SECOND:,} requests a second over two topics, {broker}, beside {peer}"
        count = len(samples[_KLOG][1])
        yield from latencies(work, [samples[_KLOG], samples[peer]], count, bench.command)


def _on_loop(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("asyncio")
    with Kafka(NEWEST, folder / "kafka", full_speed=True) as kafka, KlogBroker(folder / "klog") as klog:
        for broker, servers in ((f"Kafka {NEWEST}", kafka.bootstrap_servers), ("klog", klog.bootstrap_servers)):
            for part in (_latency, _reads, _writes):
                yield from part(bench, folder, kafka.libs, servers, broker)


ON_LOOP = Work(
    "asyncio",
    _on_loop,
    (
        "asyncio: the clients of spark_klog.aio and aiokafka, and confluent's AIO client, each on a loop of its own, "
        "at a topic of 4 partitions. Rates are by processor time of the process, threads included, from the making of "
        "a client on. Topics that are read were written once by ProducerPerformance, and nobody looks at the records; "
        "'deserialized' has a value.deserializer in Python. A pause, of another run, is how late a tick of 1 ms comes: "
        "of the wall's time and the process' processor time the shorter one, so that other processes of a busy machine "
        "do not count, and threads that hold the interpreter's lock do; collections of the program's own objects are "
        "left out (gc.freeze). Producers are idempotent and write without compression. A reply: a request is sent each "
        "millisecond; a service in the same loop reads it, and answers by a second topic; timed from when the request "
        f"is due, in the second half of {2 * _REQUESTS:,}; linger.ms is 0; confluent's own buffer takes one record. "
        "Wanted: 3 times aiokafka's rate, pauses of 5 ms at most, p99 no worse than either.",
    ),
)
