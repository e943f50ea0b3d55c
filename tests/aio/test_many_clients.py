"""Many clients in one loop while brokers die: in `make soak` 1,000 consumers and 1,000 producers for a minute."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import psutil
import pytest

from spark_klog.aio import Consumer, Producer
from spark_klog.client import Admin
from spark_klog.client.admin.topics import NewTopic
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import KlogError
from tests.support.runs.soak import SOAK

_log = logging.getLogger(__name__)
#: Clients of each kind, members of a group, seconds of writing, and between two records of a producer.
CLIENTS, MEMBERS, SECONDS, PAUSE = (1000, 10, 60.0, 2.0) if SOAK else (20, 5, 4.0, 0.1)
#: Seconds in which a record comes that was confirmed.
_PATIENCE = 300.0 if SOAK else 120.0

pytestmark = [pytest.mark.test_all("kill"), pytest.mark.timeout(1800 if SOAK else 300)]


@pytest.fixture
def cluster() -> Iterator[EmbeddedCluster]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with EmbeddedCluster(brokers=3, settings={"group.initial.rebalance.delay.ms": "0"}) as brokers:
        yield brokers
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Services:
    """Producers of numbered records, and groups of consumers that note where they find them."""

    def __init__(self, servers: str) -> None:
        self._servers = servers
        self.is_over = False
        #: How many begin at once, as a loop that begins thousands is late for all; who has begun, and when all have.
        self._beginning, self._begun, self.all_begun = asyncio.Semaphore(20), 0, asyncio.Event()
        #: By topic: the values that are confirmed, and those that were read, with their places.
        self.confirmed: dict[str, set[bytes]] = defaultdict(set)
        self.read: dict[str, dict[bytes, set[tuple[int, int]]]] = defaultdict(lambda: defaultdict(set))

    @asynccontextmanager
    async def _begin(self) -> AsyncIterator[None]:
        async with self._beginning:
            yield
        self._begun += 1
        if self._begun == 2 * CLIENTS:
            self.all_begun.set()

    async def write(self, number: int) -> None:
        topic = topic_of(number)
        async with AsyncExitStack() as stack:
            async with self._begin():
                producer = await stack.enter_async_context(Producer({"bootstrap.servers": self._servers}))
            await self.all_begun.wait()
            until, sent = time.monotonic() + SECONDS, 0
            await asyncio.sleep(PAUSE * number / CLIENTS)
            while time.monotonic() < until:
                value = b"%d-%d" % (number, sent)
                await producer.send(topic, value, key=value)
                self.confirmed[topic].add(value)
                sent += 1
                await asyncio.sleep(PAUSE)

    async def consume(self, number: int) -> None:
        topic = topic_of(number)
        settings = {"group.id": topic, "auto.offset.reset": "earliest", "enable.auto.commit": "true"}
        async with Consumer({"bootstrap.servers": self._servers, **settings}) as consumer:
            async with self._begin():
                consumer.subscribe([topic])
                while not consumer.assignment():
                    await self._poll(topic, consumer, 0.2)
            while not self.is_over:
                await self._poll(topic, consumer)

    async def _poll(self, topic: str, consumer: Consumer, seconds: float = 5.0) -> None:
        try:
            for record in await consumer.poll(seconds):
                self.read[topic][record.value].add((record.partition, record.offset))
        except KlogError as error:  # what a service logs; it polls again
            _log.warning("a consumer of %s: %s", topic, error)

    def lost(self) -> int:
        return sum(len(values - self.read[topic].keys()) for topic, values in self.confirmed.items())


def topic_of(number: int) -> str:
    return f"service-{number // MEMBERS}"


async def _killing(cluster: EmbeddedCluster, seconds: float) -> int:
    """Have one broker after the other killed and started again; how many were."""
    until, kills = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        await asyncio.sleep(seconds / 8)
        await asyncio.to_thread(cluster.kill, kills % 3)
        await asyncio.sleep(seconds / 16)
        await asyncio.to_thread(cluster.restart, kills % 3)
        kills += 1
    return kills


def test_many_clients_in_one_loop(cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str]) -> None:
    with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
        topics = [NewTopic(topic_of(number), MEMBERS, 1) for number in range(0, CLIENTS, MEMBERS)]
        admin.create_topics(topics).check()
    process = psutil.Process()

    async def main() -> tuple[Services, int, int]:
        services = Services(cluster.bootstrap_servers)
        consumers = [asyncio.create_task(services.consume(number)) for number in range(CLIENTS)]
        producers = [asyncio.create_task(services.write(number)) for number in range(CLIENTS)]
        await asyncio.wait_for(services.all_begun.wait(), _PATIENCE)
        kills = await _killing(cluster, SECONDS)
        await asyncio.gather(*producers)
        until = time.monotonic() + _PATIENCE
        while services.lost() and time.monotonic() < until:
            await asyncio.sleep(0.1)
        memory = process.memory_info().rss
        services.is_over = True
        await asyncio.gather(*consumers)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return services, kills, memory

    gc.collect()
    before, begin, used = process.memory_info().rss, time.monotonic(), time.process_time()
    services, kills, memory = asyncio.run(main())
    assert not services.lost()
    assert kills
    places = [places for of_topic in services.read.values() for places in of_topic.values()]
    assert all(len(of_value) == 1 for of_value in places)  # none was written twice
    each = (memory - before) / 2 / CLIENTS / 1024
    assert each < 512
    spent = f"{time.monotonic() - begin:.0f} s, {time.process_time() - used:.0f} of the processor"
    with capsys.disabled():
        sys.stdout.write(
            f"\n{CLIENTS:,} of each: {len(places):,} records, {kills} kills, {spent}, {each:.0f} KB a client\n"
        )
