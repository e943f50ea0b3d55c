"""The controller: one broker's work in the shared tree on behalf of all, as in Kafka.

The controller is the broker that has created /controller; when it leaves, another broker creates the node. Tools older
than Kafka 2.8 (`kafka.admin.TopicCommand --zookeeper`) only write /config/topics/T and /brokers/topics/T, or
/admin/delete_topics/T. The controller does the rest: partition states, topic ids, the removal of nodes.

All this may be done twice, by a broker that has not noticed yet that it is no longer the controller: topic ids are
written by compare-and-set, and all other values do not depend on who writes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from uuid import UUID, uuid4

from spark_klog.base.clock import system_ms
from spark_klog.broker.metadata.nodes import create_node
from spark_klog.broker.metadata.registry import NO_LEADER, Nameless, Registry, Topic
from spark_klog.errors import DecodeError
from spark_klog.trees import paths
from spark_klog.trees.tree import Tree

_log = logging.getLogger(__name__)
_FIRST_EPOCH = 1

_Partition = tuple[UUID, str, int]


class Controller:
    """The controller's work on one broker. `id_in_logs` finds a topic's id in logs that this broker leads."""

    def __init__(
        self, tree: Tree, registry: Registry, id_in_logs: Callable[[str, dict[int, list[int]]], UUID | None]
    ) -> None:
        self._tree = tree
        self._registry = registry
        self._id_in_logs = id_in_logs
        self._epoch = 0
        #: Leaders as the partition states name them, while this broker is the controller.
        self._leaders: dict[_Partition, int] = {}

    def work(self) -> bool:
        """Do all work that is due; return whether topics have changed, so that the registry must refresh."""
        is_controller = self._elect()
        changed = self._name_topics(is_controller=is_controller)
        if not is_controller:
            self._leaders.clear()
            return changed
        deleted, has_deleted = self._delete_topics()
        self._write_states(without=deleted)
        for name in self._tree.children(paths.CONFIG_CHANGES_PATH):
            # a change notification of Kafka's: brokers here watch /config/topics themselves
            self._tree.delete(f"{paths.CONFIG_CHANGES_PATH}/{name}")
        return changed or has_deleted

    def _elect(self) -> bool:
        registry = self._registry
        if registry.controller is not None:
            return registry.controller == registry.broker_id
        payload = paths.controller_payload(registry.broker_id, system_ms())
        if not create_node(self._tree, paths.CONTROLLER_PATH, payload, ephemeral=True):
            return False
        before = self._tree.get(paths.CONTROLLER_EPOCH_PATH) or b""
        self._epoch = int(before) + 1 if before.isdigit() and len(before) < 10 else _FIRST_EPOCH
        self._tree.put(paths.CONTROLLER_EPOCH_PATH, b"%d" % self._epoch)
        registry.controller = registry.broker_id
        self._leaders.clear()
        _log.info("this broker is the controller, epoch %d", self._epoch)
        return True

    def _name_topics(self, *, is_controller: bool) -> bool:
        """Give ids to topics without one: a new id to a new topic, the previous id to an altered one."""
        changed = False
        for name, topic in self._registry.nameless.items():
            topic_id = self._id_of(name, topic, is_controller=is_controller)
            if topic_id is None:
                continue
            value = paths.topic_payload(topic.assignment, topic_id)
            if self._tree.swap(paths.topic_path(name), topic.value, value):
                _log.info("topic %s, of %d partitions, has the id %s", name, len(topic.assignment), topic_id)
                # write states after the id: a topic with states but no id counts as altered
                for number, replicas in topic.assignment.items() if topic.is_new else ():
                    self._put_state(name, number, (replicas or [NO_LEADER])[0], replicas[:1])
            changed = True
        return changed

    def _id_of(self, name: str, topic: Nameless, *, is_controller: bool) -> UUID | None:
        if topic.is_new:
            return uuid4() if is_controller else None
        known = topic.topic_id or self._id_in_logs(name, topic.assignment)
        if known is None and topic.assignment:
            # the id is unknown here: the leader of the first partition chooses a new one
            leads_first = topic.assignment[min(topic.assignment)][:1] == [self._registry.broker_id]
            return uuid4() if leads_first else None
        return known

    def _delete_topics(self) -> tuple[set[str], bool]:
        """Go on with requested deletions, and remove what is left of deleted topics.

        Returns the names of these topics, and whether the tree has changed.
        """
        deletions = self._registry.deletions
        changed = False
        for name in deletions.requested:
            if name not in deletions.pending:
                deletions.claim(name)
                changed = True
            elif deletions.finish(name):
                changed = True
        # A node without a value was created as the parent of another node while its topic was being deleted.
        left = [name for name in self._registry.empty if deletions.remove(name, b"", None)]
        return {*deletions.requested, *left}, changed or bool(left)

    def _write_states(self, without: set[str]) -> None:
        """Write each partition's leader into its state, -1 while the leader is down; the leader epoch is always 0.

        `without` topics that are being deleted: a state would create the topic's node again.
        """
        registry = self._registry
        states: dict[_Partition, tuple[int, list[int]]] = {}
        for topic in registry.topics.values():
            for partition, replicas in topic.assignment.items() if topic.name not in without else ():
                leader = registry.leader(topic, partition)
                states[topic.topic_id, topic.name, partition] = leader, replicas[:1]
        self._leaders = {key: leader for key, leader in self._leaders.items() if key in states}
        unknown = [key for key in states if key not in self._leaders]
        values = self._tree.get_many([paths.partition_state_path(name, number) for _, name, number in unknown])
        for key, value in zip(unknown, values, strict=True):
            try:
                if value:
                    self._leaders[key] = paths.parse_partition_state(value).leader
            except DecodeError as error:
                _log.warning("%s; rewriting it", error)
        for key, (leader, isr) in states.items():
            if self._leaders.get(key) != leader:
                _, name, number = key
                self._put_state(name, number, leader, isr)
                self._leaders[key] = leader

    def _put_state(self, name: str, number: int, leader: int, isr: list[int]) -> None:
        payload = paths.partition_state_payload(leader, isr, controller_epoch=self._epoch)
        self._tree.put(paths.partition_state_path(name, number), payload)


class Topics07:
    """This broker's nodes by which Kafka 0.7 tells consumers its partitions (0.7 design, "Broker Topic Registry").

        /brokers/topics/T/N    number of T's partitions on broker N, ASCII decimal; ephemeral

    /brokers/ids/N has the JSON of newer Kafka, not the `creator:host:port` of 0.7: a node has only one value, and tools
    of 0.8 and later read it. The methods block.
    """

    def __init__(self, tree: Tree, broker_id: int) -> None:
        self._tree = tree
        self._broker_id = broker_id
        #: By topic: the topic id and the number of partitions that the node has.
        self._written: dict[str, tuple[UUID, int]] = {}

    def follow(self, topics: Mapping[str, Topic]) -> None:
        """Keep a node for each topic of which this broker leads partitions."""
        counts = {}
        for name, topic in topics.items():
            count = sum(replicas[:1] == [self._broker_id] for replicas in topic.assignment.values())
            if count:
                counts[name] = topic.topic_id, count
        for name in [name for name in self._written if name not in counts]:
            del self._written[name]
            self._tree.delete(paths.topic_broker_path(name, self._broker_id))
        for name, value in counts.items():
            if self._written.get(name) != value and self._write(name, *value):
                self._written[name] = value

    def _write(self, name: str, topic_id: UUID, count: int) -> bool:
        """Write this broker's node of a topic; False if another broker has created it."""
        path, content = paths.topic_broker_path(name, self._broker_id), b"%d" % count
        before = self._written.get(name)
        if before is not None and before[0] == topic_id and self._tree.get(path) is not None:
            self._tree.put(path, content)
            return True
        # an existing node is of an earlier topic of this name, or of an earlier run of this broker
        self._tree.delete(path)
        return create_node(self._tree, path, content, ephemeral=True)
