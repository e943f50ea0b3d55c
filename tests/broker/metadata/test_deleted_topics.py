"""Deleting a topic removes its state (offsets, metrics, transactions), but not that of a new topic of its name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from spark_klog.broker.broker import Broker
from spark_klog.broker.groups.offset_manager import OffsetManager
from spark_klog.broker.metadata.internal_topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from spark_klog.client import Admin
from spark_klog.errors import ErrorCode, LogCorrupted
from spark_klog.log.partition_files import retired_folder
from spark_klog.log.partition_log import PartitionLog
from spark_klog.protocol.apis import METADATA
from tests.support.brokers.loop_broker import (
    append,
    commit,
    commit_in_transaction,
    folders,
    new_producer,
    offsets_of,
    running,
)
from tests.support.brokers.raw_client import RawClient
from tests.support.waiting import until


def _check_offsets(broker: Broker, wanted: dict[str, int]) -> None:
    """Check the offsets in memory, and those that a restart would load."""
    log = broker.coordinator.local_log("g")
    assert log is not None
    loaded = OffsetManager(lambda group, stored: None, lambda key, value, written_ms: None)
    loaded.load(log)
    assert offsets_of(broker.offsets) == offsets_of(loaded) == wanted


@asynccontextmanager
async def _made_anew(broker: Broker, name: str) -> AsyncIterator[None]:
    """Inside, a thread has replaced the topic in the tree, and the event loop does not know yet."""
    is_made, goes_on = threading.Event(), threading.Event()

    def read() -> None:
        assert broker.registry.begin_deletions({name: None})[name]
        assert broker.registry.deletions.finish(name)
        assert broker.registry.register([((name, {0: [broker.config.broker_id]}, {}), uuid4())])
        is_made.set()
        assert goes_on.wait(60)

    reading = asyncio.create_task(broker.follower.change(read))
    await until(is_made.is_set, "the thread")
    await broker.follower.update_logs()  # as after an earlier change
    yield
    goes_on.set()
    await reading
    await broker.changes.ended()


def test_a_topic_made_anew_before_its_deletion_is_noticed_keeps_its_offsets(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.coordinator.load()
            await broker.changes.create_topic("t", 1)
            await broker.changes.create_topic("other", 1)
            assert await commit(broker, "t", "other", offset=5) == {"t": 0, "other": 0}
            async with _made_anew(broker, "t"):
                assert await commit(broker, "t", offset=7) == {"t": 0}
            _check_offsets(broker, {"t": 7, "other": 5})

    asyncio.run(run())


def test_a_topic_made_anew_before_its_deletion_is_noticed_keeps_its_metrics(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.changes.create_topic("t", 1)
            await _fetch(broker, 5)
            async with _made_anew(broker, "t"):
                log = await _fetch(broker, 7)
            assert broker.metrics.records_out["t"] == 7
            late = log.read(0, 100)
            await broker.changes.delete_topics({"t": None})
            broker.metrics.fetched("t", 0, late, broker.logs)
            assert not broker.metrics.bytes_out
            await broker.changes.create_topic("t", 1)
            append(await _log(broker), 3)
            broker.metrics.fetched("t", 0, late, broker.logs)
            assert not broker.metrics.bytes_out

    asyncio.run(run())


async def _log(broker: Broker) -> PartitionLog:
    log = await broker.partitions.leader_log("t", 0)
    assert isinstance(log, PartitionLog)
    return log


async def _fetch(broker: Broker, records: int) -> PartitionLog:
    log = await _log(broker)
    append(log, records)
    broker.metrics.fetched("t", 0, log.read(0, 1 << 20), broker.logs)
    assert broker.metrics.records_out["t"] == records
    return log


@pytest.mark.parametrize("way", ["transactions", "offsets"])
def test_the_next_internal_topic_keeps_what_it_has(tmp_path: Path, way: str) -> None:
    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.coordinator.load()
            await broker.transactions.load()
            await new_producer(broker, "before")
            await broker.changes.create_topic("t", 1)
            await commit(broker, "t", offset=5)
            name = TRANSACTIONS_TOPIC if way == "transactions" else OFFSETS_TOPIC
            async with _made_anew(broker, name):
                await new_producer(broker, "after")
                await commit(broker, "t", offset=7)
            assert broker.transactions.known("after")
            assert (broker.transactions.known("before") is None) == (way == "transactions")
            _check_offsets(broker, {"t": 7})

    asyncio.run(run())


@pytest.mark.parametrize("then", ["deleted", "made anew"])
@pytest.mark.parametrize("is_transactional", [False, True])
def test_a_commit_that_was_checked_before_the_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, then: str, is_transactional: bool
) -> None:
    """Appended after it, the offset would stay and count for the next topic of that name."""

    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.coordinator.load()
            await broker.transactions.load()
            await broker.changes.create_topic("t", 1)
            await broker.changes.create_topic("other", 1)
            await broker.coordinator.find("g")
            log_of, waits, goes_on = broker.coordinator.log_of, asyncio.Event(), asyncio.Event()

            async def late(group: str) -> PartitionLog | ErrorCode:
                waits.set()
                await goes_on.wait()
                return await log_of(group)

            monkeypatch.setattr(broker.coordinator, "log_of", late)
            way = _in_transaction if is_transactional else commit
            committed = asyncio.create_task(way(broker, "t", "other", offset=5))
            await asyncio.wait_for(waits.wait(), 20)
            await broker.changes.delete_topics({"t": None})
            if then == "made anew":
                await broker.changes.create_topic("t", 1)
            await broker.changes.ended()
            goes_on.set()
            assert await committed == {"t": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "other": ErrorCode.NONE}
            _check_offsets(broker, {"other": 5})

    asyncio.run(run())


async def _in_transaction(broker: Broker, *topics: str, offset: int) -> dict[str, int]:
    producer = await new_producer(broker, "x")
    _, number = await broker.coordinator.find("g")
    assert not await broker.transactions.add("x", producer, frozenset({(OFFSETS_TOPIC, number)}))
    codes = await commit_in_transaction(broker, "x", producer, *topics, offset=offset)
    assert not await broker.transactions.end("x", producer, commits=True)
    return codes


@pytest.mark.parametrize("again", [False, True])
def test_a_log_that_can_not_be_opened_is_of_a_topic_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, again: bool
) -> None:
    """The log is not offline, and its folder is removed; the next topic of that name gets a log."""

    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.changes.create_topic("other", 1)
            make, waits, goes_on = broker.logs.make, threading.Event(), threading.Event()

            def fail_late(*arguments: Any) -> PartitionLog:
                make(*arguments).close()
                waits.set()
                assert goes_on.wait(60)
                raise LogCorrupted("damaged")

            monkeypatch.setattr(broker.logs, "make", fail_late)
            created = asyncio.create_task(broker.changes.create_topic("t", 1))
            await until(waits.is_set, "the log")
            deleted = asyncio.create_task(broker.changes.delete_topics({"t": None}))
            await until(lambda: "t" not in broker.registry.topics, "the deletion")
            monkeypatch.setattr(broker.logs, "make", make)
            made = asyncio.create_task(broker.changes.create_topic("t", 1)) if again else None
            goes_on.set()
            await asyncio.gather(created, deleted, return_exceptions=True)
            topic_id = await made if made is not None else None
            await broker.changes.ended()
            assert not broker.logs.offline
            log = broker.logs.get("t", 0)
            assert (log and log.topic_id) == topic_id
            assert folders(tmp_path) == ["other-0", *(["t-0"] if again else [])]

    asyncio.run(run())


@pytest.mark.parametrize("length", [215, 216, 249])
def test_a_topic_with_the_longest_name(tmp_path: Path, length: int) -> None:
    """With its suffix the folder's name would be too long for the file system; Kafka cuts the topic in it."""
    name, other = "t" * (length - 1) + "a", "t" * (length - 1) + "b"

    data = tmp_path / "data"

    async def made_and_deleted() -> None:
        async with running(tmp_path) as broker:
            for _ in range(2):
                for topic in (name, other):
                    await broker.changes.create_topic(topic, 2)
                    append(broker.logs.get(topic, 0), 1)
                for topic in (name, other):
                    await broker.changes.delete_topics({topic: None})
            await until(lambda: not folders(tmp_path))
            await broker.changes.create_topic(name, 1)

    async def served() -> None:
        async with running(tmp_path) as broker:
            assert set(broker.registry.topics) == {name}
            await broker.changes.delete_topics({name: None})
            await until(lambda: folders(tmp_path) == [stray.name])

    asyncio.run(made_and_deleted())
    # a broker that was killed before it had removed a folder, and one of an earlier topic
    retired_folder(data / f"{name}-1", "delete").mkdir()
    stray = retired_folder(data / f"{name}-1", "stray")
    stray.mkdir()
    asyncio.run(served())


def test_a_deleted_topic_that_metadata_creates_is_not_answered_at_once(make_cluster: Callable[..., Any]) -> None:
    """As Kafka answers for each topic that it creates: librdkafka does not take it for the one that was deleted."""
    cluster = make_cluster()
    port = int(cluster.bootstrap_servers.split(":")[1])
    wanted = {"topics": [{"name": "t"}], "allow_auto_topic_creation": True}
    with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin, RawClient(port) as client:

        def asked() -> tuple[int, int]:
            (topic,) = client.request(METADATA, 4, wanted)["topics"]
            return topic["error_code"], len(topic["partitions"])

        assert asked() == (ErrorCode.NONE, 1)
        admin.delete_topic("t")
        assert [asked(), asked()] == [(ErrorCode.LEADER_NOT_AVAILABLE, 0), (ErrorCode.NONE, 1)]
