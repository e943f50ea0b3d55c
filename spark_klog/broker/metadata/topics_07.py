"""Nodes by which Kafka 0.7 brokers tell consumers their partitions (0.7 design, "Broker Topic Registry").

    /brokers/topics/T/N    number of T's partitions on broker N, ASCII decimal; ephemeral

/brokers/ids/N has the JSON of newer Kafka, not the `creator:host:port` of 0.7: a node has only one value, and tools of
0.8 and later read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from spark_klog.broker.metadata.nodes import create_node
from spark_klog.broker.metadata.registry import Topic
from spark_klog.trees import paths
from spark_klog.trees.tree import Tree


class Topics07:
    """This broker's nodes. The methods block."""

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
