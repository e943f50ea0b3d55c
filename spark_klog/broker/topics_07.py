"""The nodes by which brokers of Kafka 0.7 told consumers what they have (0.7 design, "Broker Topic Registry").

    /brokers/topics/T/N    how many partitions of T broker N has, in ASCII decimal; ephemeral

/brokers/ids/N is that of newer Kafka, JSON and not `creator:host:port`: a node has one value, and tools of since 0.8
read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from spark_klog.broker.registry import Topic
from spark_klog.directories import paths
from spark_klog.directories.tree import NodeExists, Tree


class Topics07:
    """This broker's nodes. The methods block, as those of the tree do."""

    def __init__(self, tree: Tree, broker_id: int) -> None:
        self._tree = tree
        self._broker_id = broker_id
        self._told: dict[str, tuple[UUID, int]] = {}

    def follow(self, topics: Mapping[str, Topic]) -> None:
        """Have a node for each topic of which this broker leads partitions."""
        wanted = {}
        for name, topic in topics.items():
            count = sum(replicas[:1] == [self._broker_id] for replicas in topic.assignment.values())
            if count:
                wanted[name] = topic.topic_id, count
        for name in [name for name in self._told if name not in wanted]:
            del self._told[name]
            self._tree.delete(paths.topic_broker_path(name, self._broker_id))
        for name, value in wanted.items():
            if self._told.get(name) != value and self._tell(name, *value):
                self._told[name] = value

    def _tell(self, name: str, topic_id: UUID, count: int) -> bool:
        """Whether there is a node of ours now; not where another broker has taken this id."""
        path, content = paths.topic_broker_path(name, self._broker_id), b"%d" % count
        before = self._told.get(name)
        if before is not None and before[0] == topic_id and self._tree.get(path) is not None:
            self._tree.put(path, content)
            return True
        # what is there is of an earlier topic of this name, or of this broker's life before
        self._tree.delete(path)
        try:
            self._tree.create(path, content, ephemeral=True)
        except NodeExists:
            return False
        return True
