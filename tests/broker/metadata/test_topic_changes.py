"""Partitions and settings of topics that change while their logs are in use, on brokers in this process."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from spark_klog.base.names import PLAINTEXT
from spark_klog.broker import handlers, registry_follower
from spark_klog.broker.broker import Request
from spark_klog.broker.metadata.controller import Controller
from spark_klog.broker.metadata.nodes import (
    InvalidAssignment,
    InvalidPartitions,
    TopicCollides,
    TopicExists,
    UnknownTopic,
)
from spark_klog.broker.metadata.registry import Registry
from spark_klog.broker.security.config import Listener
from spark_klog.broker.security.session import Session
from spark_klog.broker.settings.log_settings import check_of_client, topic_settings
from spark_klog.broker.transactions.markers import MarkerEntry
from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch, Transaction
from spark_klog.errors import ConfigError, DirectoryError, ErrorCode
from spark_klog.log.file_system import FileSystem
from spark_klog.log.partition_log import BatchTooLarge, PartitionLog
from spark_klog.trees.opening import open_tree
from spark_klog.trees.tree import Tree
from tests.support.brokers.loop_broker import append_value, running_as
from tests.support.waiting import until


def _with(name: str, value: str, before: Mapping[str, str]) -> dict[str, str]:
    return {**before, name: value}


def test_a_broker_that_is_alone(tmp_path: Path) -> None:
    async def first_life() -> None:
        async with running_as(tmp_path) as broker:
            topic_id = await broker.changes.create_topic("t", 2, {"max.message.bytes": "1000"})
            append_value(broker.logs.get("t", 0), 500)
            await broker.changes.create_partitions("t", 4)
            assert sorted(broker.logs.logs) == [("t", number) for number in range(4)]
            assert {log.topic_id for log in broker.logs.logs.values()} == {topic_id}
            new = broker.logs.get("t", 3)
            with pytest.raises(BatchTooLarge):
                append_value(new, 1000)
            await broker.changes.alter_topic_settings(
                "t", lambda _: {"retention.ms": "5", "min.cleanable.dirty.ratio": "0.25"}
            )
            for log in broker.logs.logs.values():
                assert (log.config.retention_ms, log.config.min_cleanable_dirty_ratio) == (5, 0.25)
            append_value(new, 1000)
            end = broker.logs.logs["t", 0].end_offset
            assert end == 1

    async def second_life() -> None:
        async with running_as(tmp_path) as broker:
            assert broker.registry.settings("t") == {"retention.ms": "5", "min.cleanable.dirty.ratio": "0.25"}
            assert broker.logs.logs["t", 3].config.retention_ms == 5
            assert len(broker.registry.topics["t"].assignment) == 4

    asyncio.run(first_life())
    asyncio.run(second_life())


def test_names_that_collide_but_were_there_before(tmp_path: Path) -> None:
    """Colliding topics that earlier versions created are served; new ones are refused, even if created at once."""

    async def scenario() -> None:
        async with running_as(tmp_path) as broker:
            assert set(broker.registry.topics) == {"a_b", "a.b"}
            with pytest.raises(TopicExists):
                await broker.changes.create_topic("a.b", 1)
            with pytest.raises(TopicCollides, match=r"topic 'a\.b_c' collides with existing topics: a_b\.c"):
                await asyncio.gather(broker.changes.create_topic("a_b.c", 1), broker.changes.create_topic("a.b_c", 1))

    (tmp_path / "0" / "a.b-0").mkdir(parents=True)
    (tmp_path / "0" / "a_b-0").mkdir()
    (tmp_path / "0" / "recovery-point-offset-checkpoint").write_text("0\n0\n")
    asyncio.run(scenario())


def test_what_cannot_be(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_as(tmp_path) as broker:
            await broker.changes.create_topic("t", 2, {"retention.ms": "5"})
            with pytest.raises(UnknownTopic, match="no topic x"):
                await broker.changes.create_partitions("x", 3)
            for count in (-1, 0, 1, 2, 10_001, 2**31 - 1):
                with pytest.raises(InvalidPartitions, match="topic t has 2 partitions"):
                    await broker.changes.create_partitions("t", count)
            for assignment in ([], [[0]], [[0], [1]], [[0], []], [[0], [0, 0]], [[0], [0], [0]]):
                with pytest.raises(InvalidAssignment):
                    await broker.changes.create_partitions("t", 4, assignment)
            await broker.changes.create_partitions("t", 4, [[0], [0]], validate_only=True)
            with pytest.raises(UnknownTopic, match="no topic x"):
                await broker.changes.alter_topic_settings("x", lambda _: {})
            for name, value, words in (
                ("retention.ms", "x", "must be an integer"),
                ("no.such", "1", "it is not known to this version, which acts on cleanup.policy"),
                ("retension.ms", "1", r"did you mean retention\.ms"),
                ("cleanup.policy", "delete,x", "delete"),
                ("compression.gzip.level", "12", "compression.gzip.level=12: must be 1 to 9, or -1$"),
            ):
                with pytest.raises(ConfigError, match=words):
                    await broker.changes.alter_topic_settings("t", partial(_with, name, value))
            await broker.changes.alter_topic_settings("t", lambda _: {"retention.ms": "6"}, validate_only=True)
            assert sorted(broker.logs.logs) == [("t", 0), ("t", 1)]
            assert broker.registry.settings("t") == {"retention.ms": "5"}
            assert broker.logs.logs["t", 0].config.retention_ms == 5

    asyncio.run(scenario())


def test_brokers_that_share_a_folder(tmp_path: Path) -> None:
    """Each broker follows the other's changes, and those that a tool writes to the tree."""

    async def scenario(tree: Tree) -> None:
        async with running_as(tmp_path, 1, shared=True) as second:
            async with running_as(tmp_path, 0, shared=True) as first:
                await until(lambda: sorted(first.registry.brokers) == sorted(second.registry.brokers) == [0, 1])
                assert first.registry.controller_id == second.registry.controller_id == 1
                topic_id = await first.changes.create_topic("t", 2)
                await until(lambda: len(second.logs.logs) == 1)
                await second.changes.create_partitions("t", 4, [[0], [0]])
                await second.changes.alter_topic_settings("t", lambda _: {"segment.bytes": "777"})
                await until(lambda: len(first.logs.logs) == 3)
                await until(lambda: {log.config.segment_bytes for log in first.logs.logs.values()} == {777})
                assert {log.config.segment_bytes for log in second.logs.logs.values()} == {777}
                ids = {log.topic_id for broker in (first, second) for log in broker.logs.logs.values()}
                assert ids == {topic_id}
                led = [
                    (broker.config.broker_id, number) for broker in (first, second) for _, number in broker.logs.logs
                ]
                assert sorted(number for _, number in led) == [0, 1, 2, 3]
                assert isinstance(await first.partitions.leader_log("t", 2), PartitionLog)
                assert await second.partitions.leader_log("t", 2) == ErrorCode.NOT_LEADER_OR_FOLLOWER

                # by hand, as Kafka's old tools write it
                tree.put("/config/topics/u", b'{"version":1,"config":{"segment.bytes":"888","max.compaction":"1"}}')
                tree.create("/brokers/topics/u", b'{"version":1,"partitions":{"0":[1],"1":[0]}}')
                await until(lambda: first.logs.get("u", 1) and second.logs.get("u", 0))
                assert first.logs.logs["u", 1].config.segment_bytes == 888
                assert first.logs.logs["u", 1].topic_id == second.logs.logs["u", 0].topic_id
                append_value(first.logs.get("u", 1), 10)
                tree.put("/brokers/topics/u", b'{"version":1,"partitions":{"0":[1],"1":[0],"2":[1]}}')
                tree.put("/config/topics/u", b'{"version":1,"config":{"max.compaction":"1"}}')
                await until(lambda: second.logs.get("u", 2))
                await until(lambda: first.logs.logs["u", 1].overrides == {})
                assert first.logs.logs["u", 1].end_offset == 1
                # an unknown setting may stay, but can't be set
                await first.changes.alter_topic_settings("u", lambda _: {"max.compaction": "1", "segment.bytes": "999"})
                with pytest.raises(ConfigError, match=r"max\.compaction"):
                    await first.changes.alter_topic_settings("u", lambda _: {"max.compaction": "2"})
                await until(lambda: second.logs.logs["u", 2].config.segment_bytes == 999)

                # deleted and created again before a broker looks: another topic, without the old records
                before = first.registry.topics["u"].topic_id
                tree.delete("/brokers/topics/u")
                tree.create("/brokers/topics/u", b'{"version":1,"partitions":{"0":[1],"1":[0]}}')
                await until(lambda: "u" in first.registry.topics and first.registry.topics["u"].topic_id != before)
                await until(lambda: first.logs.get("u", 1) and first.logs.logs["u", 1].end_offset == 0)

                tree.put("/admin/delete_topics/u", b"")
                await until(lambda: all("u" not in {name for name, _ in b.logs.logs} for b in (first, second)))
                await until(lambda: not tree.children("/admin/delete_topics"))
                assert (tree.get("/brokers/topics/u"), tree.get("/config/topics/u")) == (None, None)

            # one broker leaves
            await until(lambda: b'"leader":-1' in (tree.get("/brokers/topics/t/partitions/2/state") or b""))
            assert json.loads(tree.get("/controller") or b"")["brokerid"] == 1
            assert tree.get("/controller_epoch") == b"1"
        async with running_as(tmp_path, 0, shared=True) as first:
            await until(lambda: b'"leader":0' in (tree.get("/brokers/topics/t/partitions/2/state") or b""))
            assert (first.registry.controller_id, tree.get("/controller_epoch")) == (0, b"2")

    tree = open_tree(str(tmp_path / "directories"))
    asyncio.run(scenario(tree))
    tree.close()


def test_ids_of_altered_topics_are_found_in_the_logs(tmp_path: Path) -> None:
    """A tool altered the topic while all brokers were down, and dropped its id from the tree."""
    tree = open_tree(str(tmp_path / "directories"))

    async def first_life() -> None:
        async with running_as(tmp_path, shared=True) as broker:
            await broker.changes.create_topic("t", 1)
            append_value(broker.logs.get("t", 0), 10)

    async def second_life() -> None:
        async with running_as(tmp_path, shared=True) as broker:
            await until(lambda: broker.logs.get("t", 1))
            assert broker.logs.logs["t", 0].end_offset == 1

    asyncio.run(first_life())
    tree.put("/brokers/topics/t", b'{"version":1,"partitions":{"0":[0],"1":[0]}}')
    asyncio.run(second_life())
    tree.close()


def test_a_flood_of_unknown_names_reads_the_tree_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CreateTopics and DeleteTopics do not read the tree for each name, and still find another broker's new topic."""
    session = Session(Listener(PLAINTEXT, PLAINTEXT, "h", 1), "h:2", [], lambda mechanism, name: None)
    names = [f"unknown{number}" for number in range(500)]
    entry = {"num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}

    async def scenario() -> None:
        async with running_as(tmp_path, 0, shared=True) as broker, running_as(tmp_path, 1, shared=True) as other:
            reads = 0
            refresh = broker.registry.refresh

            def counted() -> None:
                nonlocal reads
                reads += 1
                refresh()

            monkeypatch.setattr(broker.registry, "refresh", counted)
            request = Request(4, None, session)
            deleted = await handlers.topics.delete_topics(broker, request, {"topic_names": names, "timeout_ms": 1000})
            assert {answer["error_code"] for answer in deleted["responses"]} == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
            topics = [entry | {"name": name} for name in names]
            created = await handlers.topics.create_topics(broker, request, {"topics": topics, "validate_only": True})
            assert {answer["error_code"] for answer in created["topics"]} == {0}
            assert 1 <= reads < 100
            await other.changes.create_topic("there", 1)
            await asyncio.sleep(0.1)  # so that the broker reads the tree again
            deleted = await handlers.topics.delete_topics(
                broker, request, {"topic_names": ["there"], "timeout_ms": 1000}
            )
            assert [answer["error_code"] for answer in deleted["responses"]] == [0]

    asyncio.run(scenario())


class _Interrupted:
    """A tree in which `other` acts once: just before a topic's settings are written, or just after it is deleted."""

    def __init__(self, tree: Tree, other: Callable[[], object]) -> None:
        self._tree, self._other = tree, other
        self._has_acted = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._tree, name)

    def _act(self, path: str) -> None:
        if not self._has_acted and path.startswith("/config/topics/"):
            self._has_acted = True
            self._other()

    def put(self, path: str, value: bytes) -> None:
        self._act(path)
        self._tree.put(path, value)

    def create(self, path: str, value: bytes, ephemeral: bool = False) -> None:
        self._act(path)
        self._tree.create(path, value, ephemeral)

    def swap(self, path: str, old: bytes, value: bytes) -> bool:
        self._act(path)
        return self._tree.swap(path, old, value)

    def delete_if(self, path: str, value: bytes) -> bool:
        is_deleted = self._tree.delete_if(path, value)
        self._act(path.replace("/brokers/topics/", "/config/topics/"))
        return is_deleted


class _LateDeletion(_Interrupted):
    """A tree in which `other` acts once, just before a topic's node is deleted."""

    def _act(self, path: str) -> None:
        pass

    def delete(self, path: str) -> None:
        self._act_before(path)
        self._tree.delete(path)

    def delete_if(self, path: str, value: bytes) -> bool:
        self._act_before(path)
        return self._tree.delete_if(path, value)

    def _act_before(self, path: str) -> None:
        if not self._has_acted and path.startswith("/brokers/topics/"):
            self._has_acted = True
            self._other()


def _registries(
    tmp_path: Path, interrupted: Callable[[Registry], object], kind: type[_Interrupted] = _Interrupted
) -> tuple[Registry, Registry]:
    """Registries of two brokers on one tree; the second calls `interrupted` within the first one's next change."""
    directories = str(tmp_path / "tree")
    second = Registry(open_tree(directories), 1)
    second.cluster_id(None)
    second.refresh()
    first = Registry(kind(open_tree(directories), lambda: interrupted(second)), 0)  # type: ignore[arg-type]
    first.cluster_id(None)
    return first, second


def _delete(registry: Registry, name: str, topic_id: UUID | None = None) -> None:
    if registry.begin_deletions({name: topic_id})[name]:
        assert registry.deletions.finish(name)


def test_settings_that_two_brokers_alter_at_once_are_both_kept(tmp_path: Path) -> None:
    first, second = _registries(tmp_path, lambda one: one.alter_settings("t", partial(_with, "retention.ms", "5")))
    assert second.register([(("t", {0: [0]}, {"segment.bytes": "1"}), uuid4())])
    first.refresh()
    first.alter_settings("t", partial(_with, "max.message.bytes", "7"))
    second.refresh()
    wanted = {"segment.bytes": "1", "retention.ms": "5", "max.message.bytes": "7"}
    assert first.settings("t") == second.settings("t") == wanted


@pytest.mark.parametrize("has_left", [False, True])
def test_a_topic_that_two_brokers_create_at_once_has_the_settings_of_its_creator(
    tmp_path: Path, has_left: bool
) -> None:
    """A client's Metadata request creates it without settings, while an admin creates it with some."""
    new = ("t", {0: [1]}, {"cleanup.policy": "compact"}), uuid4()
    first, second = _registries(tmp_path, lambda one: one.register([new]))
    if has_left:  # of a creator that was killed
        second._tree.put("/config/topics/t", b'{"version":1,"config":{"retention.ms":"9"}}')
    assert not first.register([(("t", {0: [0]}, {}), uuid4())])
    second.refresh()
    assert second.settings("t") == {"cleanup.policy": "compact"}
    assert second.topics["t"].assignment == {0: [1]}


def test_a_topic_that_one_broker_creates_while_another_deletes_it_keeps_its_settings(tmp_path: Path) -> None:
    def create(other: Registry) -> None:
        assert other.register([(("t", {0: [1]}, {"cleanup.policy": "compact"}), uuid4())])

    first, second = _registries(tmp_path, create)
    assert second.register([(("t", {0: [0]}, {"retention.ms": "5"}), uuid4())])
    _delete(second, "t")
    assert second.register([(("t", {0: [0]}, {"retention.ms": "5"}), uuid4())])
    first.refresh()
    _delete(first, "t")
    second.refresh()
    assert second.settings("t") == {"cleanup.policy": "compact"}


@pytest.mark.parametrize("by", ["id", "name"])
def test_a_deletion_leaves_a_topic_that_another_broker_has_created_again_meanwhile(tmp_path: Path, by: str) -> None:
    """The deletion found the earlier topic of that name; the new one is another topic."""

    def create_again(other: Registry) -> None:
        _delete(other, "t")
        assert other.register([(("t", {0: [1]}, {"cleanup.policy": "compact"}), uuid4())])

    first, second = _registries(tmp_path, create_again, _LateDeletion)
    assert second.register([(("t", {0: [0]}, {}), uuid4())])
    first.refresh()
    topic_id = first.topics["t"].topic_id
    _delete(first, "t", topic_id if by == "id" else None)  # no error: the earlier topic is gone
    for registry in (first, second):
        registry.refresh()
        assert (registry.topics["t"].assignment, registry.settings("t")) == ({0: [1]}, {"cleanup.policy": "compact"})


@pytest.mark.parametrize("by", ["id", "name"])
def test_a_deletion_while_another_broker_changes_the_topic(tmp_path: Path, by: str) -> None:
    """The topic's node has another value, but it is the same topic: it is deleted."""
    first, second = _registries(tmp_path, lambda other: other.add_partitions("t", 3), _LateDeletion)
    assert second.register([(("t", {0: [0]}, {}), uuid4())])
    first.refresh()
    _delete(first, "t", first.topics["t"].topic_id if by == "id" else None)
    for registry in (first, second):
        registry.refresh()
        assert not registry.topics


@pytest.mark.parametrize("finds", ["the first topic", "the next one"])
def test_a_request_for_deletion_that_two_controllers_see_deletes_one_topic(tmp_path: Path, finds: str) -> None:
    """One of them does not know yet that it is no longer the controller; then the topic is created again."""

    def work_and_create(other: Registry) -> None:
        _work_as_controller(other)
        _work_as_controller(other)
        assert other.register([(("t", {0: [1]}, {}), uuid4())])

    first, second = _registries(tmp_path, work_and_create, _LateDeletion)
    assert second.register([(("t", {0: [0]}, {}), uuid4())])
    first._tree.put("/admin/delete_topics/t", b"")
    late = _work_as_controller(first)
    first.refresh()
    assert list(first.deletions.pending) == ["t"]
    first.controller = first.broker_id
    if finds == "the next one":
        work_and_create(second)
    late.work()
    assert not first._tree.children("/admin/delete_topics")
    second.refresh()
    assert second.topics["t"].assignment == {0: [1]}


def _work_as_controller(registry: Registry) -> Controller:
    registry.refresh()
    registry.controller = registry.broker_id
    controller = Controller(registry._tree, registry, lambda name, assignment: None)
    controller.work()
    return controller


def test_a_creation_that_fails_leaves_a_topic_of_its_name_that_was_created_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic that failed was removed from the tree, and another broker has created one of that name."""

    async def run() -> None:
        async with (
            running_as(tmp_path, 0, shared=True, watches=False) as first,
            running_as(tmp_path, 1, shared=True, watches=False) as second,
        ):
            await first.follower.refresh()
            follow, is_late = first.follower.update_logs, True

            async def late() -> None:
                nonlocal is_late
                if is_late:
                    is_late = False
                    second.registry._tree.delete("/brokers/topics/t")
                    await second.follower.refresh()
                    await second.changes.create_topic("t", 1, None, {0: [1]})
                await follow()

            monkeypatch.setattr(first.follower, "update_logs", late)
            monkeypatch.setattr(first.logs, "make", _fail_to_make)
            with pytest.raises(DirectoryError, match="No space left"):
                await first.changes.create_topic("t", 1, None, {0: [0]})
            await second.follower.refresh()
            assert second.registry.topics["t"].assignment == {0: [1]}

    asyncio.run(run())


def _fail_to_make(*_: object) -> PartitionLog:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_that_can_not_be_made_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A group's client asks for its coordinator each second; each time the broker tries to create the offsets topic."""

    def logged() -> list[str]:
        found = [
            record.getMessage()
            for record in caplog.records
            if "t-0" in record.getMessage() or "topic t" in record.getMessage()
        ]
        caplog.clear()
        return found

    async def run() -> None:
        async with running_as(tmp_path, 0) as broker:
            with monkeypatch.context() as full:
                full.setattr(broker.logs, "make", _fail_to_make)
                for _ in range(3):
                    with pytest.raises(DirectoryError, match="No space left"):
                        await broker.changes.create_topic("t", 1)
                (line,) = logged()  # no line says that a topic was deleted
                assert "t-0 can't be created" in line
                assert "No space left" in line
            await broker.changes.create_topic("t", 1)
            assert logged() == ["created topic t with 1 partitions"]
            await broker.changes.delete_topics({"t": None})
            assert logged() == ["deleted topic t"]
            monkeypatch.setattr(broker.logs, "make", _fail_to_make)
            with pytest.raises(DirectoryError, match="No space left"):
                await broker.changes.create_topic("t", 1)
            assert len(logged()) == 1  # logged again after a success

    caplog.set_level("INFO", "spark_klog.broker")
    asyncio.run(run())


def test_settings_that_two_brokers_alter_one_after_the_other_are_both_kept(tmp_path: Path) -> None:
    """The second broker has not seen the first one's change yet."""

    async def run() -> None:
        async with running_as(tmp_path, 0, shared=True) as first, running_as(tmp_path, 1, shared=True) as second:
            await first.changes.create_topic("t", 1)
            await second.follower.refresh()
            await first.changes.alter_topic_settings("t", partial(_with, "retention.ms", "5"))
            await second.changes.alter_topic_settings("t", partial(_with, "max.message.bytes", "7"))
            assert second.registry.settings("t") == {"retention.ms": "5", "max.message.bytes": "7"}

    asyncio.run(run())


def test_a_topic_is_deleted_by_the_id_that_was_named(tmp_path: Path) -> None:
    """The topic was created again since the client saw it: a deletion by the old id leaves the new topic."""

    def by_id(topic_id: UUID) -> dict[str, Any]:
        return {"topics": [{"name": None, "topic_id": topic_id}], "timeout_ms": 20_000}

    async def run() -> None:
        async with (
            running_as(tmp_path, 0, shared=True) as first,
            running_as(tmp_path, 1, shared=True, watches=False) as second,
        ):
            topic_id = await first.changes.create_topic("t", 1)
            await second.follower.refresh()
            tree.delete("/brokers/topics/t")  # by hand: a broker would wait until the other one has seen the deletion
            await first.follower.refresh()
            new_id = await first.changes.create_topic("t", 1)
            session = Session(Listener(PLAINTEXT, PLAINTEXT, "h", 1), "h:2", [], lambda mechanism, name: None)
            request = Request(6, "client", session)
            answer = await handlers.topics.delete_topics(second, request, by_id(topic_id))
            assert answer["responses"][0]["error_code"] == ErrorCode.UNKNOWN_TOPIC_ID
            await first.follower.refresh()
            assert first.registry.topics["t"].topic_id == new_id
            second.follower.watch()
            await second.follower.refresh()
            answer = await handlers.topics.delete_topics(second, request, by_id(new_id))
            assert answer["responses"][0]["error_code"] == ErrorCode.NONE

    tree = open_tree(str(tmp_path / "directories"))
    asyncio.run(run())
    tree.close()


@pytest.mark.parametrize(("when", "at_once"), [("a", 1), ("c", 1), ("a", 64), ("c", 64)])
def test_a_topic_created_again_before_its_deletion_is_noticed_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, at_once: int
) -> None:
    """A thread reads the registry: new topics are known a little before the old ones are dropped.

    The drop comes before or after the new topic gets its folder, while another topic gets its own. The new topic may
    be served, and have a record, if it is not made in one call of a thread with the other one.
    """
    monkeypatch.setattr(registry_follower, "_AT_ONCE", at_once)
    is_served = (when, at_once) == ("c", 1)

    async def run() -> None:
        async with running_as(tmp_path, watches=False) as broker:
            await broker.changes.create_topic("b", 1)
            append_value(broker.logs.get("b", 0), 1)
            loop, make, registry = asyncio.get_running_loop(), broker.logs.make, broker.registry
            old = registry.topics["b"]

            def drop(done: threading.Event) -> None:
                if is_served:
                    append_value(broker.logs.get("b", 0), 3)
                broker.follower._drop(old)
                done.set()

            def make_late(name: str, *arguments: Any) -> PartitionLog:
                if name == when:
                    dropped = threading.Event()
                    loop.call_soon_threadsafe(drop, dropped)
                    assert dropped.wait(60)
                return make(name, *arguments)

            monkeypatch.setattr(broker.logs, "make", make_late)
            _delete(registry, "b")
            for name in ("a", "b", "c"):
                assert registry.register([((name, {0: [registry.broker_id]}, {}), uuid4())])
            assert list(registry.topics) == ["a", "b", "c"]
            await broker.follower.update_logs()
            log = broker.logs.get("b", 0)
            assert log is not None
            assert (log.topic_id, log.end_offset) == (registry.topics["b"].topic_id, int(is_served))
            append_value(log, 2)
            log.flush()
            assert log.segments[0].path.stat().st_size == log.size
            await broker.changes.ended()
            left = [path.name for path in (tmp_path / "0").glob("b-0.*")]
            assert all(name.endswith("-stray") for name in left)

    asyncio.run(run())


@pytest.mark.parametrize("retried_by", ["housekeeping", "stop", "next start", "a new topic", "a new topic later"])
def test_the_folder_of_a_deleted_topic_that_could_not_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, retried_by: str
) -> None:
    """If the folder stayed, a broker without a shared tree would take it for a topic."""
    rename, fails, slow = FileSystem.rename, True, 0.0

    def failing(files: FileSystem, old: Path, new: Path) -> None:
        if fails and new.name.endswith("-delete"):
            raise OSError(errno.EIO, "Input/output error", str(old))
        time.sleep(slow)
        rename(files, old, new)

    async def first() -> None:
        nonlocal fails, slow
        async with running_as(tmp_path) as broker:
            await broker.changes.create_topic("t", 2)
            append_value(broker.logs.get("t", 1), 10)
            monkeypatch.setattr(FileSystem, "rename", failing)
            await broker.changes.delete_topics({"t": None})
            assert "t-1 can't be renamed" in caplog.text
            fails = retried_by in ("next start", "a new topic later")
            if retried_by == "housekeeping":
                slow = 0.2
                retry = asyncio.ensure_future(broker.follower.refresh())  # as a watch does; the care waits for it
                await until(lambda: broker.follower.is_busy)
                await broker.follower.retry_logs()
                assert not list((tmp_path / "0").glob("t-?"))
                await retry
            elif retried_by.startswith("a new topic"):
                await broker.changes.create_topic("t", 2)  # moves the old folder out of the way
                append_value(broker.logs.get("t", 1), 5)
                fails = False
                await broker.follower.retry_logs()
            await broker.changes.ended()

    async def second() -> None:
        nonlocal fails
        fails = False
        async with running_as(tmp_path) as broker:
            if not retried_by.startswith("a new topic"):
                assert not broker.registry.topics
                assert not list((tmp_path / "0").glob("t-*"))
                return
            log = broker.logs.get("t", 1)
            assert log is not None
            assert log.end_offset == 1
            found = log.read(0, 1000)
            assert found is not None
            assert len(found.read()) < 80

    asyncio.run(first())
    asyncio.run(second())


def test_no_broker_is_asked_for_markers_of_a_transaction_that_another_has_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry of a commit's markers sends none for the next transaction, which is aborted meanwhile."""

    async def scenario() -> None:
        async with running_as(tmp_path, 0, shared=True) as first, running_as(tmp_path, 1, shared=True) as second:
            await first.follower.refresh()
            await first.changes.create_topic("t", 2)
            await second.follower.refresh()
            for each in (first, second):
                await each.coordinator.load()
                await each.transactions.load()
            node, _ = await first.transactions.find("x")
            await second.follower.refresh()
            broker = (first, second)[node]
            own = next(("t", number) for number in range(2) if broker.registry.leads("t", number))
            other = "t", 1 - own[1]
            transactions = broker.transactions
            producer = await transactions.init("x", 60_000, None)
            assert isinstance(producer, ProducerIdAndEpoch)
            assert await transactions.add("x", producer, frozenset([own])) is ErrorCode.NONE
            log = broker.logs.logs[own]
            log.failure = OSError(errno.EIO, "Input/output error")
            assert await transactions.end("x", producer, commits=True) is ErrorCode.NONE
            log.failure = None
            write_markers, asked = transactions._write_markers, list[MarkerEntry]()

            async def followed(state: PartitionLog, transaction: Transaction) -> None:
                monkeypatch.setattr(transactions, "_write_markers", write_markers)
                await write_markers(state, transaction)
                assert await transactions.add("x", producer, frozenset([other])) is ErrorCode.NONE
                assert await transactions.end("x", producer, commits=False) is ErrorCode.NONE

            async def send(node: int, markers: Mapping[MarkerEntry, object]) -> set[object]:
                asked.extend(markers)
                return set()

            monkeypatch.setattr(transactions, "_write_markers", followed)
            monkeypatch.setattr(transactions._markers, "send", send)
            await transactions._write_missing()
            await transactions._write_missing()
            assert [marker.commits for marker in asked] == [False]

    asyncio.run(scenario())


def test_a_topic_that_has_small_segments_keeps_them() -> None:
    """It was made by an earlier version; a client that sends all settings again changes another one."""
    before = {"segment.bytes": "1000", "retention.ms": "5"}
    check_of_client({**before, "retention.ms": "6"}, before)
    for settings in ({"segment.bytes": "1001"}, {"segment.bytes": "1048575"}):
        with pytest.raises(ConfigError, match="must be at least 1048576"):
            check_of_client(settings, before)
    assert topic_settings({"internal.segment.bytes": "10"}) == topic_settings({"segment.bytes": "10"})
