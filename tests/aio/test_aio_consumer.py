"""What only the asyncio consumer promises: cancellation, tasks, listeners, loops; the rest by the fixture `driver`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from itertools import count
from typing import Any

import pytest

from spark_klog.aio import Consumer
from spark_klog.base.names import TopicPartition
from spark_klog.broker.faults import Delay, Fault
from spark_klog.client import Admin, Producer, RebalanceListener
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConcurrentUse, ConfigError, ConsumerClosed, KlogError, WokenUp
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.clients.on_loop import Rounds, run

#: Seconds in which anything ends that should not wait.
_PATIENCE = 60.0
A = ("t", 0)
VALUES = [b"%d" % number for number in range(12)]


@asynccontextmanager
async def reading(servers: str, **more: str) -> AsyncIterator[Consumer]:
    settings = {name.replace("_", "."): value for name, value in more.items()}
    base = {"bootstrap.servers": servers, "auto.offset.reset": "earliest", "fetch.max.wait.ms": "10"}
    async with Consumer({**base, **settings}) as consumer:
        yield consumer


@pytest.fixture
def brokers() -> Iterator[ScriptedCluster]:
    with ScriptedCluster({"t": 1}) as cluster:
        cluster.append("t", 0, VALUES, size=6)
        yield cluster


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    settings = {"group.min.session.timeout.ms": "100", "group.initial.rebalance.delay.ms": "0"}
    with EmbeddedCluster(settings=settings) as cluster:
        yield cluster.bootstrap_servers


def _topic(servers: str, name: str, values: list[bytes] = VALUES) -> str:
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topic(name, 1)
    with Producer({"bootstrap.servers": servers}) as producer:
        for value in values:
            producer.send(name, value)
    return name


async def _until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < until
        await asyncio.sleep(0.005)


def test_a_position_moves_with_each_record(brokers: ScriptedCluster) -> None:
    async def main() -> None:
        async with reading(brokers.bootstrap_servers, max_poll_records="5") as consumer:
            consumer.assign([A])
            async for record in consumer:
                assert await consumer.position(*A) == record.offset + 1
                if record.offset == 2:
                    break
            assert [record.value for record in await consumer.poll()] == VALUES[3:5]
            assert (await anext(consumer)).value == VALUES[5]
            batch = await consumer.poll_arrow()
            assert batch is not None
            assert batch.column("value").to_pylist() == VALUES[6:]
            consumer.seek(*A, 1)
            assert [record.value for record in await consumer.poll()] == VALUES[1:6]
            consumer.seek(*A, 7)
            assert (await anext(consumer)).value == VALUES[7]
            consumer.pause([A])
            assert await consumer.poll(0.05) == []
            consumer.resume([A])
            assert (await anext(consumer)).value == VALUES[8]

    run(main())


@pytest.mark.parametrize("is_arrow", [False, True])
def test_a_seek_or_pause_before_the_reader_has_its_turn(is_arrow: bool, brokers: ScriptedCluster) -> None:
    """What has come is not returned any more, and the position stays where the other task has put it."""

    async def main() -> None:
        async with reading(brokers.bootstrap_servers, max_poll_records="5") as consumer:

            async def read(timeout: float = _PATIENCE) -> list[bytes | None]:
                if not is_arrow:
                    return [record.value for record in await consumer.poll(timeout)]
                batch = await consumer.poll_arrow(timeout)
                return [] if batch is None else batch.column("value").to_pylist()

            async def begun(timeout: float = _PATIENCE) -> asyncio.Task[list[bytes | None]]:
                """A read that has records, and not yet its turn."""
                task = asyncio.create_task(read(timeout))
                await _until_at_once(lambda: consumer._held is not None)
                return task

            consumer.assign([A])
            task = await begun()
            consumer.seek(*A, 3)
            assert (await task)[0] == VALUES[3]
            consumer.seek(*A, 1)
            task = await begun(0.1)
            consumer.pause([A])
            assert await task == []
            assert await consumer.position(*A) == 1
            consumer.resume([A])
            assert (await read())[0] == VALUES[1]

    run(main())


async def _until_at_once(condition: Callable[[], bool]) -> None:
    """The same, in the next turn."""
    until = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < until
        await asyncio.sleep(0)


def test_other_tasks_go_on_while_slow_functions_deserialize(servers: str) -> None:
    topic, turns, seen = _topic(servers, "slow", [b"%d" % number for number in range(100)]), count(), list[int]()

    def slow(data: bytes, context: object) -> int:
        seen.append(turn)
        time.sleep(0.001)
        return int(data)

    async def main() -> None:
        nonlocal turn

        async def count_turns() -> None:
            nonlocal turn
            while True:
                turn = next(turns)
                await asyncio.sleep(0)

        other = asyncio.create_task(count_turns())
        async with Consumer({"bootstrap.servers": servers, "value.deserializer": slow}) as consumer:
            consumer.assign([(topic, 0, 0)])
            assert [(await anext(consumer)).value for _ in range(100)] == list(range(100))
        other.cancel()
        with suppress(asyncio.CancelledError):
            await other

    turn = next(turns)
    run(main())
    assert len(set(seen)) > 25


@pytest.mark.parametrize("kind", ["each", "poll", "poll_arrow"])
def test_a_read_that_is_cancelled_at_any_round(
    kind: str, brokers: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever wait of the calls a cancellation ends: each record is returned once, and the next call goes on."""
    rounds = Rounds(monkeypatch)
    monkeypatch.setattr("spark_klog.aio.consumer._QUICKLY_DECODED", 0)  # by threads, too

    async def read(consumer: Consumer, values: list[bytes | None]) -> None:
        while len(values) < len(VALUES):
            if kind == "each":
                values.append((await anext(consumer)).value)
            elif kind == "poll":
                values += [record.value for record in await consumer.poll()]
            elif (batch := await consumer.poll_arrow()) is not None:
                values += batch.column("value").to_pylist()

    async def main() -> None:
        for number in count(1):
            more = {"max_poll_records": "5", "max_partition_fetch_bytes": "100"}
            async with reading(brokers.bootstrap_servers, **more) as consumer:
                consumer.assign([A])
                values: list[bytes | None] = []
                is_cancelled = await rounds.cancelled(read(consumer, values), number)
                await read(consumer, values)
                assert values == VALUES, number
                if not is_cancelled:
                    break
        assert number > 5

    run(main())


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_member_whose_calls_are_cancelled_at_any_round(
    protocol: str, servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joining, reading, committing: the member goes on, and no record is lost or read twice."""
    rounds = Rounds(monkeypatch)
    topic = _topic(servers, f"members-{protocol}")

    async def work(consumer: Consumer, values: list[bytes | None]) -> None:
        async for record in consumer:
            values.append(record.value)
            if len(values) % 4 == 0:
                await consumer.commit()
            if len(values) == len(VALUES):
                return

    async def main() -> None:
        for number in count(1, 5 if protocol == "classic" else 7):
            group = f"g-{protocol}-{number}"
            more = {"group_id": group, "group_protocol": protocol, "enable_auto_commit": "false"}
            async with reading(servers, max_poll_records="5", **more) as consumer:
                consumer.subscribe([topic])
                values: list[bytes | None] = []
                is_cancelled = await rounds.cancelled(work(consumer, values), number)
                if len(values) < len(VALUES):
                    await work(consumer, values)
                assert values == VALUES, number
                await consumer.commit()
                assert (await consumer.committed([(topic, 0)]))[topic, 0].offset == len(VALUES)
            if not is_cancelled:
                break

    run(main(), 2 * _PATIENCE)


def test_a_listener_goes_on_when_its_poll_is_cancelled(servers: str) -> None:
    topic = _topic(servers, "listened")
    heard: list[tuple[str, list[TopicPartition]]] = []

    async def main() -> None:
        may_go_on = asyncio.Event()

        class Listener(RebalanceListener):
            async def on_assigned(self, partitions: list[TopicPartition]) -> None:
                with pytest.raises(ConcurrentUse, match="listener"):
                    await consumer.poll()
                await may_go_on.wait()
                consumer.seek(topic, 0, 3)
                await asyncio.gather(consumer.commit({(topic, 0): 1}), consumer.committed([(topic, 0)]))
                heard.append(("assigned", partitions))

            async def on_revoked(self, partitions: list[TopicPartition]) -> None:
                await consumer.commit()
                heard.append(("revoked", partitions))

        async with reading(servers, group_id="listened", auto_commit_interval_ms="600000") as consumer:
            consumer.subscribe([topic], Listener())
            polls = [asyncio.create_task(consumer.poll(_PATIENCE))]
            await _until(lambda: consumer.assignment() == [(topic, 0)])
            polls[0].cancel()
            await asyncio.wait(polls)
            assert await consumer.poll(0.01) == []  # the rebalance is not over
            assert heard == []
            may_go_on.set()
            assert (await anext(consumer)).value == VALUES[3]
            assert heard == [("assigned", [(topic, 0)])]
        assert heard[1:] == [("revoked", [(topic, 0)])]
        async with reading(servers, group_id="listened") as consumer:
            assert (await consumer.committed([(topic, 0)]))[topic, 0].offset == 4

    run(main())


def test_a_call_has_the_context_of_its_task(servers: str) -> None:
    """Not that of another task that uses the consumer meanwhile: its spans would have foreign parents."""
    topic = _topic(servers, "contexts")
    whose, heard = ContextVar("whose", default="none"), list[str]()

    class Listener(RebalanceListener):
        def on_assigned(self, partitions: list[TopicPartition]) -> None:
            heard.append(whose.get())

    async def main() -> None:
        async with reading(servers, group_id="contexts") as consumer:
            consumer.subscribe([topic], Listener())

            async def read() -> None:
                whose.set("reader")
                while not await consumer.poll(0.2):
                    pass

            reader = asyncio.create_task(read())
            whose.set("another")
            while not reader.done():
                await consumer.committed([(topic, 0)])
            await reader
        assert heard == ["reader"]

    run(main())


def test_a_close_while_letters_wait_for_a_broker_that_is_gone() -> None:
    async def main(cluster: EmbeddedCluster) -> None:
        letters = {"dead_letter_topic": "letters", "enable_auto_commit": "false"}
        async with reading(cluster.bootstrap_servers, group_id="gone", **letters) as consumer:
            consumer.subscribe(["t"])
            record = await anext(consumer)
            consumer.dead_letter(record, "no")
            cluster.kill(0)
            commit = asyncio.create_task(consumer.commit())
            await asyncio.sleep(0.3)
            begin = time.monotonic()
            await consumer.close()
            assert time.monotonic() - begin < 10
            with pytest.raises(KlogError):
                await commit

    with EmbeddedCluster() as cluster:
        for topic in ("t", "letters"):
            _topic(cluster.bootstrap_servers, topic)
        run(main(cluster))


@pytest.mark.parametrize("api", ["InitProducerId", "Produce"])
def test_a_seek_during_a_commit_with_letters(api: str) -> None:
    async def main(cluster: EmbeddedCluster) -> None:
        letters = {"dead_letter_topic": "letters", "enable_auto_commit": "false"}
        async with reading(cluster.bootstrap_servers, group_id="sought", **letters) as consumer:
            consumer.subscribe(["t"])
            consumer.dead_letter(await anext(consumer), "no")
            cluster.inject(Fault(Delay(300), api=api, count=1))
            commit = asyncio.create_task(consumer.commit())
            await asyncio.sleep(0.1)
            consumer.seek("t", 0, 0)
            await commit
            consumer.dead_letter(await anext(consumer), "no")
            await consumer.commit()

    with EmbeddedCluster(faults=[]) as cluster:
        for topic in ("t", "letters"):
            _topic(cluster.bootstrap_servers, topic, VALUES[:1] if topic == "t" else [])
        run(main(cluster))


def test_a_listener_waits_for_a_task_that_commits(servers: str) -> None:
    """As programs do that process records in tasks of their own: within `poll`, `unsubscribe` and `close`."""
    topic = _topic(servers, "drained")

    async def main() -> None:
        may_commit, committed = asyncio.Event(), list[int]()

        async def worker(offset: int) -> None:
            await may_commit.wait()
            await consumer.commit({(topic, 0): offset})
            committed.append(offset)

        class Listener(RebalanceListener):
            async def on_assigned(self, partitions: list[TopicPartition]) -> None:
                may_commit.set()
                await workers[-1]
                may_commit.clear()
                workers.append(asyncio.create_task(worker(2)))

            async def on_revoked(self, partitions: list[TopicPartition]) -> None:
                may_commit.set()
                await workers[-1]
                may_commit.clear()
                workers.append(asyncio.create_task(worker(1)))

        async with reading(servers, group_id="drained", enable_auto_commit="false") as consumer:
            workers = [asyncio.create_task(worker(1))]
            consumer.subscribe([topic], Listener())
            await anext(consumer)
            assert committed == [1]
            consumer.subscribe([topic, "drained-too"], Listener())
            await _until_read(consumer, lambda: committed == [1, 2, 1])
            await consumer.unsubscribe()
            assert committed == [1, 2, 1, 2]
            consumer.subscribe([topic], Listener())
            await anext(consumer)
        assert committed == [1, 2] * 3
        workers[-1].cancel()
        await asyncio.wait(workers)

    run(main())


async def _until_read(consumer: Consumer, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < until
        await consumer.poll(0.01)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_an_unsubscribe_that_is_cancelled_leaves_the_group(protocol: str, servers: str) -> None:
    """Else a member that nobody polls keeps the partitions for max.poll.interval.ms."""
    topic = _topic(servers, f"left-{protocol}")

    class Listener(RebalanceListener):
        async def on_revoked(self, partitions: list[TopicPartition]) -> None:
            await asyncio.Event().wait()

    async def main() -> None:
        async with reading(servers, group_id=f"left-{protocol}", group_protocol=protocol) as consumer:
            consumer.subscribe([topic], Listener())
            assert (await anext(consumer)).value == VALUES[0]
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(consumer.unsubscribe(), 0.1)
            consumer.subscribe([topic])
            assert (await anext(consumer)).value == VALUES[1]

    run(main())


def test_a_task_that_a_listener_has_begun_after_the_close(servers: str) -> None:
    topic = _topic(servers, "begun")

    async def main() -> None:
        tasks: list[asyncio.Task[None]] = []
        is_closed = asyncio.Event()

        async def work() -> None:
            await is_closed.wait()
            await consumer.commit({(topic, 0): 3})

        class Listener(RebalanceListener):
            async def on_assigned(self, partitions: list[TopicPartition]) -> None:
                tasks.append(asyncio.create_task(work()))
                with pytest.raises(ConcurrentUse, match="listener"):
                    await consumer.unsubscribe()

        async with reading(servers, group_id="begun", group_instance_id="one") as consumer:
            consumer.subscribe([topic], Listener())
            await anext(consumer)
        is_closed.set()
        with pytest.raises(ConsumerClosed):
            await tasks[0]

    run(main())


def test_a_commit_that_the_end_overtakes_is_told(servers: str) -> None:
    topic = _topic(servers, "overtaken")

    async def main() -> None:
        told: list[tuple[int, KlogError | None]] = []
        consumer = Consumer({"bootstrap.servers": servers, "group.id": "overtaken"})
        consumer.assign([(topic, 0)])
        for offset in range(3):
            consumer.commit_async(
                {(topic, 0): offset}, lambda offsets, error: told.append((offsets[topic, 0].offset, error))
            )
        closing = asyncio.create_task(consumer.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        await _until(lambda: len(told) == 3)
        assert [offset for offset, _ in told] == [0, 1, 2]
        assert {type(error) for _, error in told} <= {type(None), ConsumerClosed}

    run(main())


@pytest.mark.test_all("long")
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_close_while_a_read_asks_brokers_that_are_away(is_cancelled: bool) -> None:
    """It waits a moment for them, whatever time the read has."""

    async def main() -> None:
        with EmbeddedCluster() as cluster:
            topic = _topic(cluster.bootstrap_servers, "away")
            more = {"group_id": "away", "auto_commit_interval_ms": "10", "metadata_max_age_ms": "1000"}
            more |= dict.fromkeys(("request_timeout_ms", "default_api_timeout_ms"), "600000")
            async with reading(cluster.bootstrap_servers, **more) as consumer:
                consumer.subscribe([topic])
                for _ in VALUES:
                    await anext(consumer)
                reader = asyncio.create_task(consumer.poll(3600.0))
                await asyncio.to_thread(cluster.stop)
                await _until(lambda: consumer._preparing is not None)
                if is_cancelled:
                    reader.cancel()
            with pytest.raises(asyncio.CancelledError if is_cancelled else ConsumerClosed):
                await reader

    run(main())


def test_tasks_that_share_a_consumer(servers: str) -> None:
    """One reads; calls of the others are made meanwhile."""
    topic = _topic(servers, "shared", [])

    async def main() -> None:
        done: list[KlogError | None] = []
        async with reading(servers, group_id="shared") as consumer:
            consumer.assign([(topic, 0)])
            reader = asyncio.create_task(consumer.poll(_PATIENCE))
            await asyncio.sleep(0)
            with pytest.raises(ConcurrentUse, match="another task reads"):
                await consumer.poll()
            with pytest.raises(ConcurrentUse, match="another task reads"):
                await anext(consumer)
            await consumer.commit({(topic, 0): 7})
            assert (await consumer.committed([(topic, 0)]))[topic, 0].offset == 7
            consumer.commit_async({(topic, 0): 8}, lambda _, error: done.append(error))
            consumer.wakeup()
            with pytest.raises(WokenUp):
                await reader
            while not done:
                await consumer.poll(0.01)
            assert done == [None]
            reader = asyncio.create_task(consumer.poll(_PATIENCE))
            await asyncio.sleep(0)
            await consumer.close()
            with pytest.raises(ConsumerClosed):
                await reader
            with pytest.raises(ConsumerClosed):
                consumer.seek(topic, 0, 0)
            with pytest.raises(ConsumerClosed):
                await anext(consumer)

    run(main())


def test_a_consumer_that_is_not_read_fetches_no_further() -> None:
    with ScriptedCluster({"t": 1}) as brokers:
        brokers.append("t", 0, [bytes(1000)] * 200, size=1)

        async def main() -> None:
            more = {"max_partition_fetch_bytes": "2000", "max_poll_records": "1"}
            async with reading(brokers.bootstrap_servers, **more) as consumer:
                consumer.assign([A])
                for _ in range(5):
                    await anext(consumer)
                await asyncio.sleep(0.1)
                assert brokers.count("Fetch") < 12

        run(main())


@pytest.mark.test_all("long")
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_heartbeats_go_on_between_calls(protocol: str) -> None:
    settings = {"group.min.session.timeout.ms": "100", "group.consumer.min.session.timeout.ms": "100"}
    settings |= {"group.consumer.session.timeout.ms": "6000", "group.consumer.heartbeat.interval.ms": "50"}
    with EmbeddedCluster(settings={**settings, "group.consumer.min.heartbeat.interval.ms": "10"}) as cluster:
        topic = _topic(cluster.bootstrap_servers, "beating")

        async def main() -> None:
            more = {"group_id": "beating", "group_protocol": protocol}
            if protocol == "classic":
                more |= {"session_timeout_ms": "6000", "heartbeat_interval_ms": "50"}
            async with reading(cluster.bootstrap_servers, **more) as consumer:
                consumer.subscribe([topic])
                await anext(consumer)
                member = consumer.group_metadata()
                await asyncio.sleep(7)
                await consumer.commit()
                assert consumer.group_metadata() == member

        run(main())


def test_loops(brokers: ScriptedCluster) -> None:
    consumers: list[Consumer] = []

    async def open_one() -> None:
        consumers.append(Consumer({"bootstrap.servers": brokers.bootstrap_servers, "auto.offset.reset": "earliest"}))
        consumers[-1].assign([A])
        assert (await anext(consumers[-1])).value == VALUES[0]

    async def use_another(consumer: Consumer) -> None:
        with pytest.raises(ConcurrentUse, match="another event loop"):
            await consumer.poll()

    async def fork() -> int:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                await consumers[0].poll()
            except ConsumerClosed:
                await consumers[0].__aexit__(SystemExit, None, None)
                code = 0
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    loop = asyncio.new_event_loop()
    loop.run_until_complete(open_one())
    assert loop.run_until_complete(fork()) == 0
    assert loop.run_until_complete(anext(consumers[0])).value == VALUES[1]
    with pytest.raises(ConfigError, match=r"use spark_klog\.client"):
        consumers[0].poll().send(None)
    run(use_another(consumers[0]))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    run(consumers[0].close())  # its loop is closed: any may do that
    with pytest.raises(ConsumerClosed):
        consumers[0].assignment()


def test_a_timeout_that_is_always_too_short(servers: str) -> None:
    """What a poll has begun goes on: a program that waits a moment only, again and again, has its records."""
    topic = _topic(servers, "hurried")

    async def main() -> None:
        values: list[Any] = []
        async with reading(servers, group_id="hurried") as consumer:
            consumer.subscribe([topic])
            until = time.monotonic() + _PATIENCE
            while len(values) < len(VALUES):
                assert time.monotonic() < until
                with suppress(asyncio.TimeoutError):
                    values.append((await asyncio.wait_for(anext(consumer), 0.002)).value)
        assert values == VALUES

    run(main())


_KINDS = "async for", "poll", "poll_arrow"
_OUTCOMES = "works", "fails", "is cancelled", "ends"
_COMMITS = "close", "unsubscribe", "commit", "commit_async"


@pytest.mark.parametrize(
    ("kind", "outcome", "call"),
    [
        (_KINDS[(first + second) % len(_KINDS)], outcome, call)
        for first, outcome in enumerate(_OUTCOMES)
        for second, call in enumerate(_COMMITS)
    ],
)
def test_another_task_commits_no_record_that_is_not_processed(servers: str, kind: str, outcome: str, call: str) -> None:
    name = f"unprocessed-{kind.replace(' ', '')}-{outcome.replace(' ', '')}-{call}"

    async def main() -> None:
        handling, settings = asyncio.Event(), {"group_id": name, "auto_commit_interval_ms": "600000"}

        async def work(consumer: Consumer) -> None:
            while True:
                count = len(await consumer.poll_arrow() or ()) if kind == "poll_arrow" else 0
                if kind == "poll":
                    count = len(await consumer.poll())
                elif kind == "async for":
                    count = (await anext(consumer)).offset - 1  # of offset 2, which is the third one
                if count > 0:
                    break
            handling.set()
            if outcome == "fails":
                raise ValueError("of the handler")
            if outcome != "ends":
                await asyncio.Event().wait()

        async with reading(servers, **settings) as consumer:
            consumer.subscribe([_topic(servers, name)])
            task = asyncio.create_task(work(consumer))
            await handling.wait()
            if outcome == "is cancelled":
                task.cancel()
            if outcome != "works":
                await asyncio.wait([task])
            if call == "commit_async":
                consumer.commit_async()
            else:
                await getattr(consumer, call)()
            if call.startswith("commit"):
                assert await consumer.position(name, 0) == (3 if kind == "async for" else len(VALUES))
            task.cancel()
            await asyncio.wait([task])
            if call.startswith("commit"):
                await consumer.close()  # the position of a commit stays, and is committed again
        async with reading(servers, group_id=name) as consumer:
            there = (await consumer.committed([(name, 0)]))[name, 0].offset
        processed, all_of_it = (2, 3) if kind == "async for" else (0, len(VALUES))
        assert there == (all_of_it if outcome == "ends" else processed)

    run(main())


def test_the_task_that_got_a_record_commits_it(servers: str) -> None:
    async def main() -> None:
        async def there() -> int:
            return (await consumer.committed([(name, 0)]))[name, 0].offset

        name = _topic(servers, "processed")
        async with reading(servers, group_id=name, auto_commit_interval_ms="600000") as consumer:
            consumer.subscribe([name])
            async for record in consumer:
                if record.offset == 0:
                    await consumer.commit()
                    assert await there() == 1
                elif record.offset == 1:
                    await asyncio.shield(consumer.commit())
                    assert await there() == 2
                elif record.offset == 2:
                    consumer.commit_async()
                elif record.offset == 3:
                    assert await there() == 3
                else:
                    break
            await asyncio.wait_for(anext(consumer), _PATIENCE)  # in a task of its own before Python 3.12
            await asyncio.create_task(anext(consumer))  # type: ignore[arg-type]
            await consumer.commit()
            assert await there() == 7
            assert (await anext(consumer)).offset == 7
        async with reading(servers, group_id=name) as consumer:
            assert await there() == 8

    run(main())


def test_a_poll_that_is_cancelled_during_a_rebalance() -> None:
    """The next one does not return what the first one had at hand: the partition is given up."""

    async def main(cluster: EmbeddedCluster, topic: str) -> None:
        more = {"group_id": topic, "heartbeat_interval_ms": "50", "partition_assignment_strategy": "range"}
        found: list[bytes | None] = []
        async with (
            reading(cluster.bootstrap_servers, **more) as first,
            reading(cluster.bootstrap_servers, **more) as second,
        ):
            first.subscribe([topic])
            async for record in first:
                found.append(record.value)
                break
            second.subscribe([topic])
            cluster.inject(Fault(Delay(1000), api="OffsetCommit", count=1))
            until = time.monotonic() + _PATIENCE
            while not first._group._heartbeats._news:  # type: ignore[union-attr]
                assert time.monotonic() < until
                assert not await second.poll(0.05)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(first.poll(_PATIENCE), 0.3)
            assert await first.poll(0) == []
            while len(found) < len(VALUES):
                assert time.monotonic() < until
                for consumer in (first, second):
                    found += [record.value for record in await consumer.poll(0.05)]
            assert sorted(found, key=VALUES.index) == VALUES

    with EmbeddedCluster(faults=[], settings={"group.initial.rebalance.delay.ms": "0"}) as cluster:
        run(main(cluster, _topic(cluster.bootstrap_servers, "rebalanced")))
