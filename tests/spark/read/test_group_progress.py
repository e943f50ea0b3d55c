"""A query's progress as a group's offsets: the stores to write to, retries after errors, and the store to read from."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from confluent_kafka import OFFSET_INVALID, Consumer, TopicPartition as KafkaPartition
from hypothesis import given, settings, strategies as st

from spark_klog.base.names import TopicPartition
from spark_klog.client.cluster import Cluster
from spark_klog.client.places import Offsets
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConnectionFailed, DirectoryError, KlogError, ProtocolError
from spark_klog.groups import stores as stores_module
from spark_klog.spark.options import GroupOffsetsOptions
from spark_klog.spark.read import broker_source
from spark_klog.spark.read.broker_source import GroupProgress
from spark_klog.trees.memory import MemoryTree
from spark_klog.trees.tree import Tree
from tests.spark.support import create_topic, wait_for

A, B, C = ("a", 0), ("a", 1), ("b", 0)
COORDINATOR, ONE, OTHER = "the coordinator", "zookeeper://one", "zookeeper://other"


class Stores:
    """Fake stores by name: a coordinator and trees in memory. Each may fail or hang."""

    def __init__(self) -> None:
        self.kept: Offsets = {}
        self.trees: dict[str, MemoryTree] = {}
        self.failing: dict[str, KlogError] = {}
        self.hanging: dict[str, threading.Event] = {}
        self.commits: list[tuple[str, Offsets]] = []
        self.opened: list[str] = []
        self.sessions: list[_Session] = []

    def open_tree(self, uri: str) -> Tree:
        self.opened.append(uri)
        self._check(uri)
        session = _Session(self, uri, self.trees.setdefault(uri, MemoryTree()).session())
        self.sessions.append(session)
        return session

    def cluster(self) -> Stores:
        self.opened.append(COORDINATOR)
        self._check(COORDINATOR)
        return self

    def partitions(self, topics: Collection[str], *, missing_ok: bool) -> dict[str, Collection[int]]:
        """The partitions in the coordinator's cluster, where every topic exists."""
        self._check(COORDINATOR)
        return {topic: range(12) for topic in topics}

    def close(self) -> None:
        """Close the coordinator's connection: nothing to do."""

    def _check(self, name: str) -> None:
        if name in self.hanging:
            assert self.hanging[name].wait(60)
        if name in self.failing:
            raise self.failing[name]

    def offsets(self, name: str, group: str = "g") -> Offsets:
        """The group's offsets in a store."""
        if name == COORDINATOR:
            return dict(self.kept)
        tree, top = self.trees.get(name, MemoryTree()), f"/consumers/{group}/offsets"
        return {
            (topic, int(partition)): int(tree.get(f"{top}/{topic}/{partition}") or b"")
            for topic in tree.children(top)
            for partition in tree.children(f"{top}/{topic}")
        }


class _Session:
    """A session of a tree that may fail."""

    def __init__(self, stores: Stores, name: str, tree: MemoryTree) -> None:
        self._stores, self._name, self._tree = stores, name, tree
        self.closed = False

    def put_many(self, values: Mapping[str, bytes], *, lasting: bool = True) -> None:
        self._stores._check(self._name)
        self._tree.put_many(values)

    def close(self) -> None:
        self.closed = True
        self._tree.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tree, name)


class FakeGroupOffsets:
    """Fake of `client.offsets.GroupOffsets`; its cluster is `Stores`."""

    def __init__(self, cluster: Stores, group: str) -> None:
        assert group == "g"
        self._stores = cluster

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        self._stores._check(COORDINATOR)
        self._stores.commits.append((COORDINATOR, dict(offsets)))
        self._stores.kept |= offsets

    def fetch(self, partitions: Collection[TopicPartition]) -> Offsets:
        self._stores._check(COORDINATOR)
        return {key: self._stores.kept[key] for key in partitions if key in self._stores.kept}


def in_place(stores: Stores) -> Any:
    return mock.patch.multiple(stores_module, GroupOffsets=FakeGroupOffsets, open_tree=stores.open_tree)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long for stores that work, and retry soon after a failure."""
    monkeypatch.setattr(broker_source, "_PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(broker_source, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(broker_source, "_LONGEST_PAUSE_SECONDS", 0.02)


@pytest.fixture
def stores() -> Iterator[Stores]:
    there = Stores()
    with in_place(there):
        yield there


def progress(stores: Stores, coordinator: bool, *trees: str) -> GroupProgress:
    cluster: Any = stores.cluster
    return GroupProgress(GroupOffsetsOptions("g", coordinator, trees), cluster)


def test_all_stores_are_written(stores: Stores) -> None:
    shown = progress(stores, True, ONE, OTHER)
    shown.publish({A: 5, C: 0})
    assert stores.offsets(COORDINATOR) == stores.offsets(ONE) == stores.offsets(OTHER) == {A: 5, C: 0}
    assert stores.trees[ONE].get("/consumers/g/offsets/a/0") == b"5"


def test_offsets_of_deleted_topics_hold_up_nobody(
    cluster: EmbeddedCluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A restarted query first publishes its last micro-batch's offsets; some of the topics may be deleted by then."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    settings = {"bootstrap.servers": servers, "request.timeout.ms": "2000"}
    shown = GroupProgress(GroupOffsetsOptions(topic, True, ()), lambda: Cluster.connect(settings))
    shown.publish({(f"{topic}-gone", 0): 7})
    shown.publish({(f"{topic}-gone", 0): 7, (topic, 0): 5, (topic, 1): 3})
    shown.close()
    assert not caplog.messages
    consumer = Consumer({"bootstrap.servers": servers, "group.id": topic})
    asked = [KafkaPartition(topic, 0), KafkaPartition(topic, 1), KafkaPartition(f"{topic}-gone", 0)]
    assert [found.offset for found in consumer.committed(asked, timeout=30)] == [5, OFFSET_INVALID, OFFSET_INVALID]
    consumer.close()


def test_without_a_coordinator_no_cluster_is_asked_for(stores: Stores) -> None:
    progress(stores, False, ONE).publish({A: 5})
    assert stores.opened == [ONE]
    assert stores.offsets(COORDINATOR) == {}


def test_nothing_is_opened_before_there_is_something_to_write(stores: Stores) -> None:
    shown = progress(stores, True, ONE)
    shown.publish({})
    shown.close()
    assert stores.opened == []


def test_only_what_changed_is_written(stores: Stores) -> None:
    shown = progress(stores, True)
    for offsets in ({A: 1, B: 1}, {A: 1, B: 2}, {A: 1, B: 2}, {A: 1, B: 2, C: 0}, {A: 0}):
        shown.publish(offsets)
    assert [offsets for _, offsets in stores.commits] == [{A: 1, B: 1}, {B: 2}, {C: 0}, {A: 0}]
    assert stores.opened == [COORDINATOR], "connected once"
    assert stores.offsets(COORDINATOR) == {A: 0, B: 2, C: 0}


@pytest.mark.parametrize(
    "error",
    [
        DirectoryError("it broke"),
        ConnectionFailed("it broke"),
        ProtocolError(16, "it broke"),
    ],
)
@pytest.mark.parametrize("name", [COORDINATOR, ONE, OTHER])
def test_what_could_not_be_written_is_written_with_the_next(
    stores: Stores, name: str, error: KlogError, caplog: pytest.LogCaptureFixture
) -> None:
    shown = progress(stores, True, ONE, OTHER)
    shown.publish({A: 1, B: 1})
    stores.failing[name] = error
    with caplog.at_level(logging.ERROR, "spark_klog"):
        for _ in range(5):
            shown.publish({A: 2, B: 1})
    told = [message for message in caplog.messages if " again after " not in message]  # which may be the test's before
    assert told == [f"can't write offsets of group g to {name}, retrying until it succeeds: {error}"]
    names = [COORDINATOR, ONE, OTHER]
    assert {where: stores.offsets(where) for where in names} == {
        where: {A: 1, B: 1} if where == name else {A: 2, B: 1} for where in names
    }
    stores.failing.clear()
    shown.publish({A: 2, B: 3})
    wait_for(lambda: all(stores.offsets(where) == {A: 2, B: 3} for where in names), "the end of the outage")
    shown.close()


@pytest.mark.parametrize("name", [COORDINATOR, ONE])
def test_a_store_that_is_not_there_at_first(stores: Stores, name: str, caplog: pytest.LogCaptureFixture) -> None:
    shown = progress(stores, True, ONE)
    stores.failing[name] = ConnectionFailed("nobody there")
    shown.publish({A: 1})
    shown.publish({A: 1})
    assert len(caplog.messages) == 1, "once an outage"
    wait_for(lambda: stores.opened.count(name) > 3, "more attempts")
    assert len(caplog.messages) == 1
    stores.failing.clear()
    # the retry needs no further call of `publish`
    wait_for(lambda: stores.offsets(name) == {A: 1}, "the end of the outage")
    wait_for(lambda: len(caplog.messages) == 2, "a line about it")
    assert caplog.messages[1].startswith(f"offsets of group g are written to {name} again after ")


def test_a_store_that_hangs_holds_up_nobody(stores: Stores, caplog: pytest.LogCaptureFixture) -> None:
    """While a store hangs, as a silent ZooKeeper, others are written; it gets the newest offsets when it answers."""
    with mock.patch.object(broker_source, "_PATIENCE_SECONDS", 0.05):
        shown = progress(stores, True, ONE)
        hanging = stores.hanging[ONE] = threading.Event()
        for offset in range(1, 20):
            shown.publish({A: offset})
            wait_for(lambda offset=offset: stores.offsets(COORDINATOR) == {A: offset}, "the other store")
        assert stores.opened.count(ONE) == 1, "one attempt is under way"
        hanging.set()
        wait_for(lambda: stores.offsets(ONE) == {A: 19}, "the newest offsets")
        shown.close()
        assert not caplog.messages


def test_what_is_not_written_at_the_end_is_named(
    stores: Stores, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_source, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(broker_source, "_CLOSE_SECONDS", 0.05)
    shown = progress(stores, True, ONE)
    hanging = stores.hanging[ONE] = threading.Event()
    shown.publish({A: 3, **{("many", number): 1 for number in range(12)}})
    wait_for(lambda: len(stores.offsets(COORDINATOR)) == 13, "the other store")
    shown.close()
    hanging.set()
    (told,) = caplog.messages
    assert told.startswith(f"the query ended before the offsets of group g were written to {ONE}: ")
    assert "many-0 at 1, many-1 at 1" in told
    assert " and 3 more; " in told


def test_a_name_that_can_not_be_stored_does_not_end_the_query(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    no_cluster: Any = None
    shown = GroupProgress(GroupOffsetsOptions("a/b", False, (str(tmp_path),)), no_cluster)
    shown.publish({A: 1})
    shown.close()
    assert "can't write offsets of group a/b" in caplog.text


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 5)),
            st.sets(st.sampled_from([COORDINATOR, ONE, OTHER])),
        )
    )
)
def test_every_store_catches_up(steps: list[tuple[Offsets, set[str]]]) -> None:
    """After each step every working store holds the newest offsets, whatever failed before."""
    stores = Stores()
    with in_place(stores):
        shown = progress(stores, True, ONE, OTHER)
        now: Offsets = {}
        for moved, failing in [*steps, ({}, set())]:
            stores.failing = {name: DirectoryError("no") for name in failing}
            now |= moved
            shown.publish(dict(now))
            for name in {COORDINATOR, ONE, OTHER} - failing:
                wait_for(lambda name=name, now=dict(now): stores.offsets(name) == now, name)
        shown.close()


def test_fetch_asks_the_first_store(stores: Stores) -> None:
    stores.kept = {A: 7}
    progress(stores, False, ONE).publish({A: 1, B: 2})
    assert progress(stores, True, ONE).fetch([A, B]) == {A: 7}
    assert progress(stores, False, ONE, OTHER).fetch([A, B, C]) == {A: 1, B: 2}
    assert progress(stores, False, OTHER, ONE).fetch([A, B, C]) == {}
    assert progress(stores, False, ONE).fetch([B]) == {B: 2}
    assert progress(stores, False, ONE).fetch([]) == {}


def test_fetch_while_a_group_moves(stores: Stores) -> None:
    """With dual commit the larger offset of coordinator and ZooKeeper counts, as in Kafka's consumer."""
    stores.kept = {A: 7, C: 3}
    progress(stores, False, OTHER).publish({A: 1, B: 2, C: 4})
    progress(stores, False, ONE).publish({A: 100})
    cluster: Any = stores.cluster
    for trees in ((OTHER,), (ONE, OTHER)):
        moving = GroupProgress(GroupOffsetsOptions("g", True, trees, dual=True), cluster)
        assert moving.fetch([A, B, C]) == {A: 7, B: 2, C: 4}
        assert moving.fetch([B]) == {B: 2}


@pytest.mark.parametrize("name", [COORDINATOR, ONE])
def test_fetch_fails_where_the_store_does(stores: Stores, name: str) -> None:
    """A query that fails is better than one that continues at a wrong offset."""
    stores.failing[name] = ConnectionFailed("nobody there")
    with pytest.raises(ConnectionFailed, match="nobody there"):
        progress(stores, name == COORDINATOR, ONE).fetch([A])


def test_what_was_fetched_is_written_all_the_same(stores: Stores) -> None:
    """Another client may have changed the offset since the fetch."""
    stores.kept = {A: 7}
    shown = progress(stores, True)
    assert shown.fetch([A]) == {A: 7}
    shown.publish({A: 7})
    assert stores.commits == [(COORDINATOR, {A: 7})]


def test_close_closes_the_trees(stores: Stores) -> None:
    shown = progress(stores, True, ONE, OTHER)
    shown.publish({A: 1})
    shown.close()
    shown.close()
    assert len(stores.sessions) == 2
    assert all(session.closed for session in stores.sessions)
    shown.publish({A: 2})
    assert stores.offsets(ONE) == {A: 2}, "and they are opened again where they are needed"
    shown.close()
    assert all(session.closed for session in stores.sessions)


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_plain_files(tmp_path: Path, form: str) -> None:
    """The documented format: a file per partition with its offset as text."""
    no_cluster: Any = None
    options = GroupOffsetsOptions("g", False, (form.format(tmp_path / "tree"),))
    shown = GroupProgress(options, no_cluster)
    shown.publish({A: 5, ("b.c", 10): (1 << 63) - 1})
    shown.close()
    top = tmp_path / "tree" / "consumers" / "g" / "offsets"
    assert (top / "a" / "0").read_bytes() == b"5"
    assert (top / "b.c" / "10").read_bytes() == b"9223372036854775807"
    again = GroupProgress(options, no_cluster)
    assert again.fetch([A, B, ("b.c", 10)]) == {A: 5, ("b.c", 10): (1 << 63) - 1}
    again.close()


def test_a_folder_that_can_not_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    no_cluster: Any = None
    shown = GroupProgress(GroupOffsetsOptions("g", False, (str(tmp_path / "file" / "tree"),)), no_cluster)
    shown.publish({A: 5})
    shown.close()
    assert "can't write offsets" in caplog.text
