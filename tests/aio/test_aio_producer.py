"""What only the asyncio producer promises: futures, room, loops, exits; the rest is tested by the fixture `driver`."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import Any

import pyarrow as pa
import pytest

from spark_klog.aio import Producer
from spark_klog.aio.driver import LoopDriver
from spark_klog.broker.faults import Delay, Fault
from spark_klog.client import Admin, Consumer
from spark_klog.client.producer.sender import Sender
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import (
    BufferExhausted,
    ConcurrentUse,
    ConfigError,
    ConnectionFailed,
    ErrorCode,
    InvalidTransactionState,
    ProducerClosed,
    ProtocolError,
    RecordTooLargeToSend,
)
from tests.support.brokers.model_cluster import Fate, ModelCluster
from tests.support.clients.on_loop import Rounds, run
from tests.support.waiting import wait_until

#: Seconds in which anything ends that should not wait.
_PATIENCE = 60.0
A = ("t", 0)


@asynccontextmanager
async def producing(brokers: ModelCluster, **more: str) -> AsyncIterator[Producer]:
    settings = {name.replace("_", "."): value for name, value in more.items()}
    async with Producer({"bootstrap.servers": brokers.servers, "retry.backoff.ms": "1", **settings}) as producer:
        yield producer


def test_places_and_order() -> None:
    async def main() -> None:
        with ModelCluster(2, {"t": 2}) as brokers:
            async with producing(brokers, compression_type="gzip", batch_size="200") as producer:
                first = await producer.send("t", b"0", partition=0, timestamp=7)
                assert first == ("t", 0, 0, 7)
                futures = [producer.send_nowait("t", b"%d" % n, partition=n % 2) for n in range(1, 300)]
                places = await asyncio.gather(*futures)
            assert [place.offset for place in places if place.partition == 0] == list(range(1, 150))
            assert brokers.log[A] == [b"%d" % n for n in range(0, 300, 2)]

    run(main())


def test_long_compressions_keep_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that threads compress, and smaller ones behind them."""
    compressed: list[str] = []
    original = Sender.compressed

    def compress(self: Sender, body: bytes) -> Any:
        compressed.append(threading.current_thread().name)
        return original(self, body)

    monkeypatch.setattr(Sender, "compressed", compress)
    values = [os.urandom(60_000) if n % 7 == 0 else b"%d" % n for n in range(40)]

    async def main() -> None:
        with ModelCluster(1, {"t": 1}) as brokers:
            async with producing(brokers, compression_type="gzip", batch_size="30000") as producer:
                for value in values:
                    producer.send_nowait("t", value)
                    await asyncio.sleep(0)
            assert brokers.log[A] == values

    run(main())
    assert len(compressed) >= 6
    assert threading.main_thread().name not in compressed


def test_a_topic_that_is_not_known() -> None:
    async def main() -> None:
        with ModelCluster(1, {"t": 1}) as brokers:
            async with producing(brokers, request_timeout_ms="3000") as producer:
                many = [producer.send_nowait("t", b"%d" % n) for n in range(50)]  # before its metadata have come
                bad = producer.send_nowait("no topic", b"")
                with pytest.raises(ProtocolError, match="no topic"):
                    await producer.flush()
                with pytest.raises(ProtocolError, match="no topic"):
                    await bad
                with pytest.raises(ProtocolError, match="no topic"):
                    await producer.send("no topic", b"")
                await asyncio.gather(*many)
                with pytest.raises(ConfigError, match="only partition 0"):
                    producer.send_nowait("t", b"", partition=1)
                with pytest.raises(UnicodeEncodeError):
                    producer.send_nowait("t", b"", headers=[("\ud800", b"")])
                await producer.flush()
                with pytest.raises(TypeError, match="value must be bytes"):
                    producer.send_nowait("t", "text")
                with pytest.raises(RecordTooLargeToSend):
                    await producer.send("t", bytes(2_000_000))
            assert brokers.log[A] == [b"%d" % n for n in range(50)]

    run(main())


def test_room() -> None:
    """`send` waits for room in turn, `send_nowait` does not; what is cancelled leaves its room to the next."""

    async def main() -> None:
        with ModelCluster(1, {"t": 1}) as brokers:
            async with producing(brokers, batch_size="1000", buffer_memory="10000") as producer:
                assert await producer.partitions("t") == 1
                brokers.leaders[A] = -1
                sends = [asyncio.create_task(producer.send("t", b"%02d" % n + bytes(1000))) for n in range(30)]
                while not producer._waiting:
                    await asyncio.sleep(0.001)
                with pytest.raises(BufferExhausted, match="await send"):
                    producer.send_nowait("t", b"")
                assert producer._used < 12_000
                for task in sends[25:28]:
                    task.cancel()
                brokers.leaders[A] = 0
                await asyncio.gather(*sends, return_exceptions=True)
                assert producer._used == 0
            assert [value[:2] for value in brokers.log[A]] == [b"%02d" % n for n in range(30) if not 25 <= n < 28]

    run(main())


def test_futures_take_room() -> None:
    """Small records count for what their futures take, too."""

    async def main() -> None:
        with ModelCluster(1, {"t": 1}) as brokers:
            async with producing(brokers, buffer_memory="100000", linger_ms="60000") as producer:
                assert await producer.partitions("t") == 1
                sent = 0
                with suppress(BufferExhausted):
                    while sent < 1000:
                        producer.send_nowait("t", b"")
                        sent += 1
                assert 100 < sent < 500
                waits = asyncio.create_task(producer.send("t", b""))
                while A not in producer._gathering or producer._gathering[A].whole[0] > 1:
                    await asyncio.sleep(0.001)  # what gathers makes room, long before linger.ms
                await producer.flush()
                await waits
                assert producer._used == 0
            assert len(brokers.log[A]) == sent + 1

    run(main())


def test_a_flush_leaves_others_their_batches() -> None:
    """What is sent while a task flushes gathers as before."""

    async def main() -> None:
        with ModelCluster(1, {"t": 1}) as brokers:
            async with producing(brokers, linger_ms="60000") as producer:
                assert await producer.partitions("t") == 1
                brokers.leaders[A] = -1  # the flush waits
                first = producer.send_nowait("t", b"first")
                flush = asyncio.create_task(producer.flush())
                while A in producer._gathering or not producer._sender.size:
                    await asyncio.sleep(0)
                for n in range(50):
                    producer.send_nowait("t", b"%d" % n)
                    await asyncio.sleep(0)
                assert producer._gathering[A].whole[0] == 50
                brokers.leaders[A] = 0
                await flush
                assert first.done()
                assert producer._gathering[A].whole[0] == 50

    run(main())


def test_a_flush_of_nothing_gives_others_a_turn() -> None:
    async def main() -> None:
        with ModelCluster(1, {"t": 1}) as brokers:
            async with producing(brokers) as producer:
                await producer.send("t", b"")
                asyncio.get_running_loop().call_soon(turns.append, 1)
                await producer.flush()
                assert turns == [1]

    turns: list[int] = []
    run(main())


def test_the_loops_threads_may_all_wait_for_records() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        with ModelCluster(1, {"t": 1}) as brokers:
            async with producing(brokers, compression_type="gzip", batch_size="30000") as producer:
                waits = partial(asyncio.run_coroutine_threadsafe, producer.send("t", os.urandom(60_000)), loop)
                await loop.run_in_executor(None, lambda: waits().result(_PATIENCE))
                assert any(thread.name.startswith("klog-producer") for thread in threading.enumerate())
        wait_until(lambda: not any(thread.name.startswith("klog-producer") for thread in threading.enumerate()))

    run(main())


def test_an_interrupt_while_records_are_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the producer: nothing waits for ever."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        with ModelCluster(1, {"t": 1}) as brokers:
            producer = Producer({"bootstrap.servers": brokers.servers})
            futures.extend(producer.send_nowait("t", b"%d" % n) for n in range(3))
            monkeypatch.setattr(producer, "_add", interrupt)
            await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), _PATIENCE)

    futures: list[asyncio.Future[Any]] = []
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert all(future.done() for future in futures)


def test_room_that_does_not_come() -> None:
    async def main() -> None:
        with ModelCluster(1, {"t": 1}) as brokers:
            more = {"batch_size": "1000", "buffer_memory": "5000", "max_block_ms": "300"}
            async with producing(brokers, **more) as producer:
                await producer.partitions("t")
                brokers.leaders[A] = -1
                outcomes = await asyncio.gather(
                    *(asyncio.wait_for(producer.send("t", bytes(1000)), 5) for _ in range(9)), return_exceptions=True
                )
                kinds = {type(outcome) for outcome in outcomes}
                assert kinds == {BufferExhausted, asyncio.TimeoutError}
                assert not producer._waiting
                assert producer._admitted_bytes == 0
                brokers.leaders[A] = 0

    run(main())


def test_calls_where_no_loop_of_it_runs() -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        producer = Producer({"bootstrap.servers": brokers.servers})
        with pytest.raises(ConfigError, match=r"where asyncio's loop runs.*Trio"):
            producer.send_nowait("t", b"")

        async def main() -> None:
            await producer.send("t", b"1")

        async def other() -> None:
            for call in (producer.send("t", b""), producer.flush()):
                with pytest.raises(ConcurrentUse, match="another event loop"):
                    await call

        asyncio.run(main())
        asyncio.run(other())
        asyncio.run(producer.close())
        assert brokers.log[A] == [b"1"]


def test_closed_where_its_loop_is_closed() -> None:
    """Any loop may close it then, and what is left is written."""
    with ModelCluster(1, {"t": 1}) as brokers:
        producer = Producer({"bootstrap.servers": brokers.servers, "linger.ms": "60000"})

        async def main() -> None:
            await producer.partitions("t")
            for number in range(10):
                producer.send_nowait("t", b"%d" % number)

        asyncio.run(main())
        asyncio.run(producer.close())
        assert brokers.log[A] == [b"%d" % number for number in range(10)]
        with pytest.raises(ProducerClosed):
            asyncio.run(producer.flush())


def test_another_loop_changes_nothing() -> None:
    async def other(producer: Producer) -> None:
        with pytest.raises(ConcurrentUse, match="another event loop"):
            await producer.close()
        with pytest.raises(ConcurrentUse, match="another event loop"):
            await producer.__aenter__()

    async def main() -> None:
        with ModelCluster(1, {"t": 1}) as brokers:
            async with producing(brokers, linger_ms="60000") as producer:
                await producer.partitions("t")
                sent = producer.send_nowait("t", b"1")
                await asyncio.to_thread(asyncio.run, other(producer))
                assert not sent.done()
                await producer.flush()
                assert (await sent).offset == 0

    run(main())


def test_an_error_while_a_topic_is_looked_up() -> None:
    """Records that are added after an error have it, too."""

    async def main() -> None:
        refused = Fate(errors={A: int(ErrorCode.TOPIC_AUTHORIZATION_FAILED)})
        with ModelCluster(1, {"t": 1, "u": 1}, lambda *_: refused) as brokers:
            producer = Producer({"bootstrap.servers": brokers.servers, "retry.backoff.ms": "1", "linger.ms": "0"})
            brokers.topics["u"] = 0
            late = producer.send_nowait("u", b"")
            with pytest.raises(ProtocolError, match="TOPIC_AUTHORIZATION_FAILED"):
                await producer.send("t", b"")
            brokers.topics["u"] = 1
            with pytest.raises(ProtocolError, match="TOPIC_AUTHORIZATION_FAILED"):
                await late
            with pytest.raises(ProtocolError):
                await producer.close()

    run(main())


def test_records_that_gather_make_room() -> None:
    """What waits for room does not wait for linger.ms besides."""

    async def main() -> None:
        with ModelCluster(1, {"t": 4}) as brokers:
            more = {"linger_ms": "3600000", "buffer_memory": "10000", "batch_size": "100000"}
            async with producing(brokers, **more) as producer:
                sends = [asyncio.create_task(producer.send("t", bytes(1000), partition=n % 4)) for n in range(40)]
                while not any(brokers.log.values()):
                    await asyncio.sleep(0.001)
                while not all(task.done() for task in sends):
                    await producer.flush()
                    await asyncio.sleep(0)  # a flush with nothing to wait for does not leave its turn
                assert len(await asyncio.gather(*sends)) == 40

    run(main())


def test_callbacks_that_fail() -> None:
    """Also those of records that are not added: records after them are."""

    def fails(*_: object) -> None:
        raise KeyError

    async def main() -> None:
        with ModelCluster(1, {"t": 1}) as brokers:
            async with producing(brokers) as producer:
                bad = producer.send_nowait("t", "text", on_delivery=fails)
                good = producer.send_nowait("t", b"1", on_delivery=fails)
                assert (await good).offset == 0
                with pytest.raises(TypeError, match="value must be bytes"):
                    await bad
                assert (await producer.send("t", b"2")).offset == 1

    run(main())


def test_an_interrupt_in_a_callback() -> None:
    """A loop that goes on after it can close the producer."""

    def stop(*_: object) -> None:
        raise SystemExit

    async def begin(servers: str) -> Producer:
        producer = Producer({"bootstrap.servers": servers})
        await producer.partitions("t")
        return producer

    async def send(producer: Producer) -> tuple[asyncio.Future[Any], ...]:
        return producer.send_nowait("t", b"1", on_delivery=stop), producer.send_nowait("t", b"2")

    with ModelCluster(1, {"t": 1}) as brokers:
        loop = asyncio.new_event_loop()
        producer = loop.run_until_complete(begin(brokers.servers))
        sent = loop.run_until_complete(send(producer))
        with pytest.raises(SystemExit):
            loop.run_forever()
        loop.run_until_complete(asyncio.wait_for(producer.close(), _PATIENCE))
        assert [future.result().offset for future in sent] == [0, 1]
        with pytest.raises(ProducerClosed):
            loop.run_until_complete(producer.send("t", b"3"))
        loop.close()


def test_what_a_thread_raises_when_nobody_waits_for_it() -> None:
    told: list[object] = []
    goes_on = threading.Event()

    def fails() -> None:
        goes_on.wait(_PATIENCE)
        raise KeyError

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context))
        driver = LoopDriver("client", ProducerClosed)
        task = asyncio.create_task(driver.run(driver.in_thread(fails)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        goes_on.set()
        await loop.shutdown_default_executor()
        assert await driver.run(driver.in_thread(lambda: 1)) == 1  # without a thread, then
        gc.collect()

    asyncio.run(main())
    assert told == []


def test_brokers_that_are_not_there() -> None:
    async def main() -> None:
        producer = Producer({"bootstrap.servers": "127.0.0.1:1", "request.timeout.ms": "500"})
        with pytest.raises(ConnectionFailed):
            await producer.__aenter__()
        with pytest.raises(ProducerClosed):
            await producer.send("t", b"")

    run(main())


def test_closed_with_records_under_way() -> None:
    async def main() -> None:
        with ModelCluster(1, {"t": 1}) as brokers:
            told: list[object] = []
            producer = Producer({"bootstrap.servers": brokers.servers, "linger.ms": "60000"})
            await producer.partitions("t")
            taken = producer.send_nowait("t", b"1", on_delivery=lambda error, _: told.append(error))
            waiting = producer.send_nowait("u", b"2")
            await producer.__aexit__(KeyError, KeyError(), None)
            for future in (taken, waiting):
                assert isinstance(future.exception(), ProducerClosed)
            assert [type(error) for error in told] == [ProducerClosed]
            for call in (producer.flush(), producer.partitions("t"), producer.send("t", b"")):
                with pytest.raises(ProducerClosed):
                    await call
            await producer.close()

    run(main())


AT_EXIT = """
import asyncio, gc, sys
from spark_klog.aio import Producer

async def main():
    settings = {"bootstrap.servers": sys.argv[1], "linger.ms": "60000", "batch.size": "100", "compression.type": "gzip"}
    producer = Producer(settings)
    await producer.partitions("t")
    for number in range(20):
        producer.send_nowait("t", b"%d " % number + bytes(int(sys.argv[2])))
    producer.send_nowait("u", "text")
    producer.send_nowait("u", b"waits for its topic")

asyncio.run(main())
gc.collect()
"""


@pytest.mark.parametrize("size", [0, 50_000], ids=["small", "compressed in threads"])
def test_what_is_left_at_the_programs_exit(size: int) -> None:
    """Of a producer that nothing refers to any more; a record that can't be written does not keep others from it."""
    with ModelCluster(1, {"t": 1, "u": 1}) as brokers:
        command = [sys.executable, "-c", AT_EXIT, brokers.servers, str(size)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
        assert done.returncode == 0
        assert done.stderr in ("", "a record for u is not written: value must be bytes or None, not str\n")
        assert brokers.log[A] == [b"%d " % n + bytes(size) for n in range(20)]
        assert brokers.log["u", 0] == [b"waits for its topic"]


def test_a_process_forked_since() -> None:
    with ModelCluster(1, {"t": 1}) as brokers:

        async def main() -> int:
            async with producing(brokers) as producer:
                await producer.send("t", b"1")
                child = os.fork()
                if not child:
                    code = 1
                    try:
                        producer.send_nowait("t", b"2")
                    except ProducerClosed:
                        code = 0
                    finally:
                        os._exit(code)
                status = os.waitpid(child, 0)[1]
                await producer.send("t", b"3")
                return os.waitstatus_to_exitcode(status)

        assert asyncio.run(main()) == 0
        assert brokers.log[A] == [b"1", b"3"]


def test_an_exit_of_a_forked_process_leaves_the_transaction_alone() -> None:
    async def main(servers: str) -> None:
        async with Producer({"bootstrap.servers": servers, "transactional.id": "x"}) as producer:
            await producer.init_transactions()
            await producer.begin_transaction()
            await producer.send("t", b"1")
            child = os.fork()
            if not child:
                code = 1
                try:
                    await producer.__aexit__(SystemExit, None, None)
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            await producer.commit_transaction()

    with EmbeddedCluster() as cluster:
        run(main(cluster.bootstrap_servers))


def _cancelled(seed: int) -> None:
    """Tasks that send are cancelled at any time, at brokers in trouble: each is written at most once, in order."""
    choose = random.Random(seed)

    def fate(node: int, keys: list[Any]) -> Fate:
        return choose.choice([Fate(), Fate(), Fate(answers=0), Fate(drop_before=True), Fate(delay_after=0.005)])

    confirmed: list[bytes] = []

    async def write(producer: Producer, number: int) -> None:
        value = b"%d" % number
        await producer.send("t", value)
        confirmed.append(value)

    async def main(brokers: ModelCluster) -> None:
        more = {"batch_size": "50", "buffer_memory": "400", "linger_ms": "0", "request_timeout_ms": "1500"}
        async with producing(brokers, **more) as producer:
            tasks = []
            for number in range(120):
                tasks.append(asyncio.create_task(write(producer, number)))
                if choose.random() < 0.3:
                    await asyncio.sleep(choose.choice([0, 0, 0.001]))
                if choose.random() < 0.3:
                    choose.choice(tasks).cancel()
                if choose.random() < 0.05:
                    flush = asyncio.create_task(producer.flush())
                    await asyncio.sleep(0)
                    flush.cancel()
                    await asyncio.wait([flush])
            await asyncio.wait(tasks)
            await producer.flush()
            assert producer._used == 0
            assert not producer._waiting

    with ModelCluster(2, {"t": 1}, fate) as brokers:
        run(main(brokers))
        log = [int(value) for value in brokers.log[A]]
        assert log == sorted(set(log))
        assert set(confirmed) <= set(brokers.log[A])


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 30), marks=pytest.mark.test_all("long"))], ids=["two", "more"]
)
def test_sends_that_are_cancelled(seeds: range) -> None:
    for seed in seeds:
        try:
            _cancelled(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


async def _end_of(producer: Producer) -> None:
    """End the transaction as a program does after a cancellation: it aborts, unless the commit has begun."""
    for end in (producer.abort_transaction, producer.commit_transaction):
        try:
            await end()
            return
        except InvalidTransactionState:
            pass  # committing, or it has ended


def test_on_delivery_has_the_context_of_its_send() -> None:
    whose, heard = ContextVar("whose", default=-1), list[tuple[int, int]]()

    async def main(servers: str) -> None:
        async with Producer({"bootstrap.servers": servers}) as producer:

            async def send(number: int) -> None:
                whose.set(number)
                await producer.send("t", b"", on_delivery=lambda _error, _place: heard.append((number, whose.get())))

            await asyncio.gather(*map(send, range(4)))

    with EmbeddedCluster() as cluster:
        run(main(cluster.bootstrap_servers))
    assert sorted(heard) == [(number, number) for number in range(4)]


@pytest.mark.parametrize("api", ["FindCoordinator", "TxnOffsetCommit"])
def test_a_commit_after_offsets_that_were_cancelled(api: str) -> None:
    """A transaction without the offsets that belong to it is not committed; nor is one with a part of the rows.

    Nor if they were cancelled while they waited for another call.
    """

    async def main(cluster: EmbeddedCluster) -> None:
        settings = {"bootstrap.servers": cluster.bootstrap_servers, "transactional.id": "x", "linger.ms": "0"}
        few = {"buffer.memory": "40000", "batch.size": "16000", "max.request.size": "30000"}
        async with Producer({**settings, **few}) as producer:
            await producer.init_transactions()
            rows = pa.table({"value": [bytes(10_000)] * 10})
            for slow, call in (
                (api, lambda: producer.send_offsets_to_transaction({("t", 0): 7}, "g")),
                ("Produce", lambda: producer.send_arrow(rows, "t")),
            ):
                await producer.begin_transaction()
                await producer.send("t", b"out")
                cluster.inject(Fault(Delay(500), api=slow, count=1))
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(call(), 0.2)
                with pytest.raises(InvalidTransactionState, match="abort_transaction"):
                    await producer.commit_transaction()
                await producer.abort_transaction()
            for second in (
                lambda: producer.send_offsets_to_transaction({("t", 0): 7}, "h"),
                lambda: producer.send_arrow(rows, "t"),
            ):
                await producer.begin_transaction()
                cluster.inject(Fault(Delay(500), api="TxnOffsetCommit", count=1))
                first = asyncio.ensure_future(producer.send_offsets_to_transaction({("t", 0): 7}, "g"))
                await asyncio.sleep(0)
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(second(), 0.1)
                await first
                with pytest.raises(InvalidTransactionState, match="abort_transaction"):
                    await producer.commit_transaction()
                await producer.abort_transaction()

    with EmbeddedCluster(faults=[]) as cluster:
        with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
            admin.create_topic("t", 1)
        run(main(cluster))


def test_transactions_that_are_cancelled_at_any_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction is cancelled at each round of the driver: the log has all of it or nothing."""
    rounds = Rounds(monkeypatch)

    async def transaction(producer: Producer, number: int) -> None:
        await producer.begin_transaction()
        for part in range(3):
            producer.send_nowait("t", b"%d %d" % (number, part), partition=part)
        await producer.send_offsets_to_transaction({("t", 0): number}, "g")
        await producer.send("t", b"%d 3" % number, partition=0)
        await producer.commit_transaction()

    async def main(servers: str) -> None:
        settings = {"bootstrap.servers": servers, "transactional.id": "x", "linger.ms": "0"}
        async with Producer(settings) as producer:
            await producer.init_transactions()
            for number in count():
                if not await rounds.cancelled(transaction(producer, number), number + 1):
                    return
                await _end_of(producer)
                await transaction(producer, 1000 + number)

    with EmbeddedCluster() as cluster:
        with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
            admin.create_topic("t", 3)
        run(main(cluster.bootstrap_servers))
        values: list[bytes] = []
        settings = {"bootstrap.servers": cluster.bootstrap_servers, "isolation.level": "read_committed"}
        with Consumer(settings) as consumer:
            consumer.assign([("t", partition, -2) for partition in range(3)])
            until = time.monotonic() + _PATIENCE
            with Admin(settings) as admin:
                ends = admin.list_offsets({("t", partition): "latest" for partition in range(3)}).check()
            while any(consumer.position(*key) < (end.offset or 0) for key, end in ends.items()):
                assert time.monotonic() < until
                values += [record.value or b"" for record in consumer.poll(0.2)]
        numbers = [int(value.split()[0]) for value in values]
        assert len(values) == len(set(values))
        assert all(numbers.count(number) == 4 for number in numbers)
        assert {number for number in numbers if number >= 1000}


@pytest.mark.parametrize("fails", [False, True], ids=["the block ends", "the block fails"])
@pytest.mark.parametrize("api", ["Produce", "EndTxn"])
def test_a_commit_goes_on_while_another_task_closes(api: str, fails: bool) -> None:
    async def transaction(producer: Producer) -> None:
        await producer.begin_transaction()
        producer.send_nowait("t", b"x")
        await producer.commit_transaction()

    async def transactions(producer: Producer) -> None:
        while True:
            await transaction(producer)

    async def main(cluster: EmbeddedCluster) -> None:
        settings = {"bootstrap.servers": cluster.bootstrap_servers, "transactional.id": "x", "linger.ms": "0"}
        with suppress(KeyError):
            async with Producer(settings) as producer:
                await producer.init_transactions()
                await transaction(producer)
                cluster.inject(Fault(Delay(500), api=api, count=1))
                committing = asyncio.create_task(transactions(producer))
                await asyncio.sleep(0.2)
                if fails:
                    raise KeyError
        with pytest.raises(ProducerClosed):  # begins none that would stay open
            await committing

    with EmbeddedCluster(faults=[]) as cluster:
        run(main(cluster))
        settings = {"bootstrap.servers": cluster.bootstrap_servers, "isolation.level": "read_committed"}
        with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin, Consumer(settings) as consumer:
            assert "Ongoing" not in {listed.state for listed in admin.list_transactions()}
            consumer.assign([("t", 0, -2)])
            wait_until(lambda: consumer.poll(0.2) and consumer.position("t", 0) >= 3)


def test_tasks_that_close_one_behind_the_other() -> None:
    async def main(servers: str) -> None:
        producer = Producer({"bootstrap.servers": servers, "transactional.id": "x"})
        await producer.init_transactions()
        await producer.begin_transaction()
        await producer.send("t", b"x")
        closing = asyncio.create_task(producer.close())
        with suppress(ProducerClosed):
            while True:
                await asyncio.sleep(0)
                with suppress(InvalidTransactionState):
                    producer.send_nowait("t", b"")
        await producer.close()
        await closing

    with EmbeddedCluster() as cluster:
        run(main(cluster.bootstrap_servers))
