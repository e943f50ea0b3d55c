"""Internal topics that are deleted and created again while the broker reads their logs, or while it is down."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spark_klog.broker import handlers
from spark_klog.broker.broker import Broker
from spark_klog.broker.metadata.internal_topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from spark_klog.errors import ErrorCode
from spark_klog.log.partition_log import PartitionLog
from spark_klog.trees import paths
from spark_klog.trees.opening import open_tree
from tests.support.brokers.loop_broker import client_request, new_producer, running
from tests.support.clients.commits import commit_offsets
from tests.support.waiting import until

#: Enough records that the broker reads them in a thread.
_MANY = 600


async def fill(broker: Broker) -> None:
    """Write `_MANY` offset commits and transactional id records, each kind to one partition."""
    await broker.coordinator.load()
    await broker.transactions.load()
    await broker.changes.create_topic("t", 1)
    assert await broker.coordinator.code("g") is ErrorCode.NONE
    log = broker.coordinator.local_log("g")
    assert log is not None
    for number in range(_MANY):
        commit_offsets(broker.offsets, log, "g", {("t", number): (7, -1, "")})
        await new_producer(broker, "x")


class Reading:
    """The first read of a log: it holds its result until the test lets it go on."""

    def __init__(self) -> None:
        self.waits, self.goes_on = threading.Event(), threading.Event()
        self.fails = False


@contextmanager
def slow_read(monkeypatch: pytest.MonkeyPatch, topic: str) -> Iterator[Reading]:
    reading, read = Reading(), PartitionLog.read
    is_first = True

    def waiting(log: PartitionLog, *arguments: Any) -> Any:
        nonlocal is_first
        found = read(log, *arguments)
        if log.topic == topic and is_first:
            is_first = False
            reading.waits.set()
            assert reading.goes_on.wait(60)
            if reading.fails:
                raise FileNotFoundError(2, "No such file or directory", str(log.directory))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(PartitionLog, "read", waiting)
        yield reading
        reading.goes_on.set()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("topic", [OFFSETS_TOPIC, TRANSACTIONS_TOPIC])
def test_an_internal_topic_that_is_deleted_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, topic: str, fails: bool
) -> None:
    """What was read, and a failed read, belong to the deleted topic: the new topic is empty and served."""

    async def first_life() -> None:
        async with running(tmp_path) as broker:
            await fill(broker)

    async def second_life() -> None:
        async with running(tmp_path) as broker:
            with slow_read(monkeypatch, topic) as reading:
                loading = asyncio.create_task(broker.coordinator.load())
                caring = asyncio.create_task(broker.transactions.run(loading))
                await until(reading.waits.is_set, "the loader")
                reading.fails = fails
                await broker.changes.delete_topics({topic: None})
                await broker.changes.create_topic(topic, 1)
            await until(lambda: not broker.transactions.is_loading, "the end of the loading")
            assert await broker.coordinator.code("g") is ErrorCode.NONE
            producer = await new_producer(broker, "x")
            is_forgotten = topic == OFFSETS_TOPIC, topic == TRANSACTIONS_TOPIC
            assert (broker.offsets.fetch("g", "t", 0) is None, producer.epoch == 0) == is_forgotten
            caring.cancel()

    asyncio.run(first_life())
    caplog.clear()
    caplog.set_level(logging.WARNING)
    asyncio.run(second_life())
    assert not caplog.records


def test_an_internal_topic_that_was_deleted_while_the_broker_was_away(tmp_path: Path) -> None:
    """The logs still exist at the start; the broker sets them aside, with what it read from them."""
    directories = str(tmp_path / "tree")

    async def first_life() -> None:
        async with running(tmp_path, directories=directories) as broker:
            await fill(broker)

    async def second_life() -> None:
        async with running(tmp_path, directories=directories) as broker:
            loading = asyncio.create_task(broker.coordinator.load())
            caring = asyncio.create_task(broker.transactions.run(loading))
            await until(lambda: not broker.transactions.is_loading, "the end of the loading")
            assert await broker.coordinator.code("g") is ErrorCode.NONE
            assert broker.offsets.fetch("g", "t", 0) is None
            producer = await new_producer(broker, "x")
            assert producer.epoch == 0
            caring.cancel()

    asyncio.run(first_life())
    tree = open_tree(directories)
    for topic in (OFFSETS_TOPIC, TRANSACTIONS_TOPIC):
        tree.delete(paths.topic_path(topic))
        tree.delete(paths.topic_config_path(topic))
    tree.close()
    asyncio.run(second_life())


def test_an_internal_topic_gets_no_more_partitions(tmp_path: Path) -> None:
    """The number of partitions of an internal topic can't be changed.

    It maps groups and transactional ids to partitions: with another number they would have no state, and after a
    restart the old state could win.
    """

    async def run() -> None:
        async with running(tmp_path) as broker:
            await fill(broker)
            for topic in (OFFSETS_TOPIC, TRANSACTIONS_TOPIC):
                message = {"topics": [{"name": topic, "count": 3, "assignments": None}], "validate_only": False}
                answer = await handlers.topics.create_partitions(broker, client_request(), message)
                assert answer["results"][0]["error_code"] == ErrorCode.INVALID_PARTITIONS
                assert "can't be changed" in answer["results"][0]["error_message"]
                assert len(broker.registry.topics[topic].assignment) == 1

    asyncio.run(run())
