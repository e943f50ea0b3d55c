"""A topic's nodes stay until no live broker serves it: an acknowledged record is in the topic of that moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from spark_klog.broker import handlers
from spark_klog.broker.broker import Broker
from spark_klog.broker.housekeeping import keep_house
from spark_klog.broker.metadata.internal_topics import OFFSETS_TOPIC
from spark_klog.broker.metadata.nodes import TopicExists
from spark_klog.errors import DirectoryError, ErrorCode
from spark_klog.log.partition_log import PartitionLog
from spark_klog.trees import paths
from spark_klog.trees.opening import open_tree
from tests.support.brokers.loop_broker import append_value, client_request, commit, offsets_of, running_as
from tests.support.waiting import until

REQUEST = client_request(5)
NODE, REQUESTED = "/brokers/topics/t", "/admin/delete_topics/t"


@asynccontextmanager
async def _heard_late(tmp_path: Path, assignment: dict[int, list[int]]) -> AsyncIterator[tuple[Broker, Broker, UUID]]:
    """Two brokers that know the topic, and its id; from now on broker 1 sees changes only if it is refreshed."""
    async with (
        running_as(tmp_path, 0, shared=True) as first,
        running_as(tmp_path, 1, shared=True, watches=False) as second,
    ):
        await first.follower.refresh()
        topic_id = await first.changes.create_topic("t", len(assignment), None, assignment)
        await second.follower.refresh()
        yield first, second, topic_id


async def _delete(broker: Broker, timeout_ms: int) -> tuple[int, str | None]:
    """Send DeleteTopics; return the error code and the message."""
    message = {"topic_names": ["t"], "timeout_ms": timeout_ms}
    (answer,) = (await handlers.topics.delete_topics(broker, REQUEST, message))["responses"]
    return answer["error_code"], answer.get("error_message")


def test_the_leader_hears_late_of_the_deletion(tmp_path: Path) -> None:
    async def run() -> None:
        async with _heard_late(tmp_path, {0: [0], 1: [1]}) as (first, second, old):
            code, text = await _delete(first, 100)
            assert (code, text) == (
                ErrorCode.REQUEST_TIMED_OUT,
                "topic t is being deleted, but broker 1 may still know it",
            )
            assert await first.partitions.leader_log("t", 0) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            assert isinstance(await second.partitions.leader_log("t", 1), PartitionLog), "it has not heard of it"
            with pytest.raises(TopicExists, match="topic t is being deleted"):
                await first.changes.create_topic("t", 2, None, {0: [0], 1: [1]})
            # as a client that retries
            again = asyncio.create_task(_delete(first, 20_000))
            await asyncio.sleep(0.2)
            assert not again.done()
            await second.follower.refresh()
            assert await again == (ErrorCode.NONE, None)
            assert tree.children("/admin/delete_topics") == []
            new = await first.changes.create_topic("t", 2, None, {0: [0], 1: [1]})
            assert new != old
            log = await second.partitions.leader_log("t", 1)
            assert isinstance(log, PartitionLog)
            assert (log.topic_id, log.end_offset) == (new, 0)

    tree = open_tree(str(tmp_path / "directories"))
    asyncio.run(run())
    tree.close()


def test_a_leader_that_leaves_is_not_waited_for(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_as(tmp_path, 0, shared=True) as first:
            async with running_as(tmp_path, 1, shared=True, watches=False):
                await first.follower.refresh()
                await first.changes.create_topic("t", 1, None, {0: [1]})
                waiting = asyncio.create_task(_delete(first, 20_000))
                await asyncio.sleep(0.2)
                assert not waiting.done()
            assert await waiting == (ErrorCode.NONE, None)

    asyncio.run(run())


def test_a_tool_asks_while_the_leader_hears_late(tmp_path: Path) -> None:
    async def run() -> None:
        async with _heard_late(tmp_path, {0: [1]}) as (first, second, topic_id):
            tree.put(REQUESTED, b"")
            await until(lambda: "t" in first.registry.deletions.pending)
            request = paths.parse_deletion(tree.get(REQUESTED) or b"")
            assert (request.topic_id, request.dropped - {0}) == (topic_id, frozenset())
            await asyncio.sleep(0.2)
            assert tree.get(NODE)
            await second.follower.refresh()
            await until(lambda: not tree.children("/admin/delete_topics"))
            assert (tree.get(NODE), tree.get("/config/topics/t")) == (None, None)

    tree = open_tree(str(tmp_path / "directories"))
    asyncio.run(run())
    tree.close()


@pytest.mark.parametrize("request_", ["earlier topic", "not JSON"])
def test_requests_that_name_no_topic_of_today(tmp_path: Path, request_: str) -> None:
    """A request for an earlier topic is dropped; one that does not decode means the name, as a tool's does."""

    async def run() -> None:
        async with running_as(tmp_path, 0, shared=True) as broker:
            await broker.changes.create_topic("t", 1, {"retention.ms": "5"})
            value = paths.deletion_payload(uuid4(), [7]) if request_ == "earlier topic" else b"{"
            tree.put(REQUESTED, value)
            await until(lambda: not tree.children("/admin/delete_topics"))
            await broker.follower.refresh()
            assert ("t" in broker.registry.topics) == (request_ == "earlier topic")
            assert (tree.get("/config/topics/t") is not None) == (request_ == "earlier topic")

    tree = open_tree(str(tmp_path / "directories"))
    asyncio.run(run())
    tree.close()


def test_a_broker_that_starts_while_a_topic_is_being_deleted(tmp_path: Path) -> None:
    """It never serves the topic, and the deletion does not wait for it."""

    async def run() -> None:
        async with running_as(tmp_path, 0, shared=True, watches=False) as first:
            async with running_as(tmp_path, 1, shared=True, watches=False):
                await first.follower.refresh()
                topic_id = await first.changes.create_topic("t", 1, None, {0: [1]})
            tree.put(REQUESTED, paths.deletion_payload(topic_id, ()))
            async with running_as(tmp_path, 1, shared=True, watches=False) as second:
                assert await second.partitions.leader_log("t", 0) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                assert paths.parse_deletion(tree.get(REQUESTED) or b"").dropped == {1}
                await first.follower.refresh()
                assert tree.get(NODE) is None

    tree = open_tree(str(tmp_path / "directories"))
    asyncio.run(run())
    tree.close()


@pytest.mark.parametrize("seed", range(12))
def test_acknowledged_records_in_any_order_of_changes(tmp_path: Path, seed: int) -> None:
    """Two brokers see changes late, and one leads: acknowledged records are there until a deletion."""
    choice = random.Random(seed)

    async def hear(brokers: list[Broker], acknowledged: list[int]) -> None:
        await brokers[choice.random() < 0.5].follower.refresh()
        if acknowledged:
            await brokers[1].follower.refresh()
            log = await brokers[1].partitions.leader_log("t", 0)
            assert isinstance(log, PartitionLog)
            assert log.end_offset == acknowledged[0]

    async def step(brokers: list[Broker], acknowledged: list[int]) -> None:
        broker = brokers[choice.random() < 0.2]
        what = choice.choice(["create", "delete", "produce", "produce", "hear"])
        if what == "create":
            try:
                await broker.changes.create_topic("t", 1, None, {0: [1]})
            except TopicExists:
                return
            acknowledged[:] = [0]
        elif what == "delete":
            if await broker.partitions.topic("t") is not None:
                acknowledged.clear()
                await broker.changes.delete_topics({"t": None})
        elif what == "hear":
            await hear(brokers, acknowledged)
        elif acknowledged:
            log = await brokers[1].partitions.leader_log("t", 0)
            if isinstance(log, PartitionLog):
                append_value(log, 1)
                acknowledged[0] += 1

    async def run() -> None:
        async with (
            running_as(tmp_path, 0, shared=True, watches=False) as first,
            running_as(tmp_path, 1, shared=True, watches=False) as second,
        ):
            await first.follower.refresh()
            acknowledged: list[int] = []
            for _ in range(60):
                await step([first, second], acknowledged)
                if choice.random() < 0.1:
                    await asyncio.sleep(0.06)  # the broker may look for an unknown name again
            await hear([first, second], acknowledged)

    asyncio.run(run())


def test_a_coordinator_that_hears_late_keeps_offsets_of_the_next_topic(tmp_path: Path) -> None:
    """It leads no partition of the topic, and could take commits for the next topic as ones for the deleted topic."""

    async def run() -> None:
        async with _heard_late(tmp_path, {0: [0]}) as (first, second, _):
            await first.changes.create_topic(OFFSETS_TOPIC, 1, None, {0: [1]})
            await second.follower.refresh()
            await second.coordinator.load()
            assert await commit(second, "t", offset=5) == {"t": 0}
            deleting = asyncio.create_task(_delete(first, 20_000))
            await asyncio.sleep(0.2)
            with pytest.raises(TopicExists, match="topic t is being deleted"):
                await first.changes.create_topic("t", 1, None, {0: [0]})
            await second.follower.refresh()
            assert await deleting == (ErrorCode.NONE, None)
            await first.changes.create_topic("t", 1, None, {0: [0]})
            await second.follower.refresh()
            assert await commit(second, "t", offset=7) == {"t": 0}
            await second.follower.refresh()
            await second.changes.ended()
            assert offsets_of(second.offsets) == {"t": 7}

    asyncio.run(run())


def test_the_controller_stands_still_when_all_have_dropped_the_topic(tmp_path: Path) -> None:
    """A client that got a success now could not create the topic again."""

    async def by_id(broker: Broker, topic_id: UUID) -> int:
        message = {"topics": [{"name": None, "topic_id": topic_id}], "timeout_ms": 100}
        (answer,) = (await handlers.topics.delete_topics(broker, client_request(6), message))["responses"]
        code: int = answer["error_code"]
        return code

    async def run() -> None:
        async with (
            running_as(tmp_path, 1, shared=True, watches=False) as controller,
            running_as(tmp_path, 0, shared=True) as other,
        ):
            topic_id = await other.changes.create_topic("t", 1, None, {0: [0]})
            assert (await _delete(other, 100))[0] == ErrorCode.REQUEST_TIMED_OUT
            controller.registry.refresh()
            controller.registry.deletions.acknowledge()
            text = "topic t is being deleted, but the controller has not ended that"
            assert await _delete(other, 100) == (ErrorCode.REQUEST_TIMED_OUT, text)
            assert await by_id(other, topic_id) == ErrorCode.REQUEST_TIMED_OUT
            await controller.follower.refresh()
            await other.follower.refresh()
            assert await by_id(other, topic_id) == ErrorCode.UNKNOWN_TOPIC_ID
            await other.changes.create_topic("t", 1, None, {0: [0]})

    asyncio.run(run())


def test_a_broker_that_could_not_acknowledge_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing changes in the tree when the disk has space again, so housekeeping has to retry."""

    async def run() -> None:
        async with running_as(tmp_path, 0, shared=True) as first, running_as(tmp_path, 1, shared=True) as second:
            await second.follower.refresh()
            await first.changes.create_topic("t", 1, None, {0: [1]})
            await second.follower.refresh()
            acknowledge, count = second.registry.deletions.acknowledge, 0

            def fail() -> None:
                nonlocal count
                count += 1
                raise DirectoryError("no space")

            monkeypatch.setattr(second.registry.deletions, "acknowledge", fail)
            deleting = asyncio.create_task(_delete(first, 20_000))
            await until(lambda: count)
            await asyncio.sleep(0.6)  # the watches have seen all changes
            monkeypatch.setattr(second.registry.deletions, "acknowledge", acknowledge)
            house = asyncio.create_task(keep_house(second))
            assert await deleting == (ErrorCode.NONE, None)
            house.cancel()
            await second.changes.ended()

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records if "no space" in record.getMessage()] == [
        "following the directories failed; answering from the last view of them, trying again: no space"
    ]
