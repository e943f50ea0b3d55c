"""Topic deletions that race with other changes of the tree: two brokers' registries in one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import UUID, uuid4

import pytest

from spark_klog.broker.metadata.controller import Controller
from spark_klog.broker.metadata.registry import Registry
from spark_klog.errors import DirectoryError
from spark_klog.trees import paths
from spark_klog.trees.memory import MemoryTree

NODE, CONFIG, REQUESTED = "/brokers/topics/t", "/config/topics/t", "/admin/delete_topics/t"
SETTINGS = {"retention.ms": "5"}


class HookedTree(MemoryTree):
    """Calls `after` with the paths that were read, and `before` ahead of a conditional deletion."""

    after: Callable[[Sequence[str]], None] | None = None
    before: Callable[[], None] | None = None

    def get(self, path: str) -> bytes | None:
        value = super().get(path)
        self._read([path])
        return value

    def get_many(self, paths: Sequence[str]) -> list[bytes | None]:
        values = [MemoryTree.get(self, path) for path in paths]
        self._read(paths)
        return values

    def delete_if(self, path: str, value: bytes) -> bool:
        if self.before is not None:
            self.before()
        return super().delete_if(path, value)

    def _read(self, paths: Sequence[str]) -> None:
        if self.after is not None:
            self.after(paths)


def _member(tree: MemoryTree, broker_id: int) -> Registry:
    registry = Registry(tree, broker_id)
    registry.cluster_id("cluster")
    registry.registration.register([paths.Endpoint("PLAINTEXT", "PLAINTEXT", "h", 1000 + broker_id)])
    registry.refresh()
    return registry


def _sessions() -> tuple[HookedTree, MemoryTree]:
    """Two sessions of one tree."""
    hooked, other = HookedTree(), MemoryTree()
    hooked._store = other._store
    return hooked, other


def _controller(tree: MemoryTree, registry: Registry) -> Controller:
    return Controller(tree, registry, lambda name, assignment: None)


def _create(registry: Registry, assignment: dict[int, list[int]]) -> UUID:
    assert registry.register([(("t", assignment, SETTINGS), uuid4())])
    return registry.topics["t"].topic_id


def test_a_broker_that_registers_just_before_the_nodes_are_removed() -> None:
    """The deletion did not wait for it; it must see the request, which is gone right after it has read the topic."""
    hooked, tree = _sessions()
    first = _member(tree, 0)
    _create(first, {0: [1]})
    assert first.begin_deletions({"t": None})["t"]

    def remove(read: Sequence[str]) -> None:
        if NODE in read:
            hooked.after = None
            assert first.deletions.remove("t", tree.get(NODE), tree.get(REQUESTED))

    hooked.after = remove
    second = _member(hooked, 1)
    assert (hooked.after, tree.get(NODE), tree.get(REQUESTED)) == (None, None, None)
    assert not second.topics


def test_a_topic_created_again_with_the_same_settings_keeps_them() -> None:
    """The broker that removes the nodes has seen that the topic is gone; it must leave the new topic's settings."""
    hooked, tree = _sessions()
    first, second = _member(hooked, 0), _member(tree, 1)
    _create(first, {0: [0]})
    assert first.begin_deletions({"t": None})["t"]

    def create(read: Sequence[str]) -> None:
        if NODE in read and tree.get(NODE) is None:
            hooked.after = None
            second.refresh()
            _create(second, {0: [0]})

    hooked.after = create
    assert first.deletions.remove("t", tree.get(NODE), tree.get(REQUESTED))
    assert hooked.after is None
    assert paths.parse_topic_config(tree.get(CONFIG) or b"") == SETTINGS


def test_what_is_left_of_a_topic_is_removed_in_one_step() -> None:
    """A controller that ends between two steps would leave a node that nobody can remove or create."""
    hooked, tree = _sessions()
    registry = _member(hooked, 0)
    tree.put(f"{NODE}/partitions/0/state", b"")

    def fail() -> None:
        raise DirectoryError("the controller ends")

    hooked.before = fail
    registry.refresh()
    with pytest.raises(DirectoryError):
        _controller(hooked, registry).work()
    other = _member(tree, 1)
    hooked.close()
    other.refresh()
    _controller(tree, other).work()
    assert tree.get(NODE) is None
    _create(other, {0: [1]})


def test_a_request_for_an_earlier_topic_does_not_delete_the_one_that_a_tool_has_created() -> None:
    """The new topic has no id yet."""
    tree = MemoryTree()
    registry = _member(tree, 0)
    controller = _controller(tree, registry)
    tree.put(REQUESTED, paths.deletion_payload(uuid4(), ()))
    registry.refresh()
    tree.put(CONFIG, paths.topic_config_payload(SETTINGS))
    tree.create(NODE, b'{"version":1,"partitions":{"0":[0]}}')
    for _ in range(3):
        controller.work()
        registry.refresh()
    assert "t" in registry.topics
    assert tree.children("/admin/delete_topics") == []
    assert registry.topics["t"].settings == SETTINGS


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_tool_that_alters_a_topic_while_it_is_deleted_removes_its_id(when: str) -> None:
    """The deletion still waits for a broker that may know the topic."""
    tree = MemoryTree()
    first, second = _member(tree, 0), _member(tree.session(), 1)
    controller = _controller(tree, first)
    topic_id = _create(first, {0: [1]})
    second.refresh()
    altered = b'{"version":1,"partitions":{"0":[1],"1":[1]}}'
    if when == "before":
        tree.put(NODE, altered)
    assert first.begin_deletions({"t": None})["t"]
    if when == "after":
        tree.put(NODE, altered)
    for _ in range(3):
        first.refresh()
        controller.work()
    assert first.deletions.pending == {"t": topic_id}
    assert first.deletions.waits_for("t") == [1]
    assert paths.parse_topic(tree.get(NODE) or b"") == ({0: [1], 1: [1]}, topic_id)
    second.refresh()
    assert not second.topics
    second.deletions.acknowledge()
    first.refresh()
    controller.work()
    assert tree.get(NODE) is None
    assert tree.children("/admin/delete_topics") == []
