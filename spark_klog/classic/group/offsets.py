"""Where a ConsumerConnector keeps its group's offsets: ZooKeeper, the group's coordinator, or both while a group moves.

Source: 0.10 documentation, "Consumer Offset Tracking" and "Migrating offsets from ZooKeeper to Kafka".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.offsets import GroupOffsets
from spark_klog.directories.offsets import OffsetDirectory
from spark_klog.directories.trees.tree import Tree


class OffsetStorages:
    """The offsets of a group in the `storages` "kafka" and "zookeeper"; raises what these raise."""

    def __init__(self, tree: Tree, group: str, storages: Sequence[str]) -> None:
        self._group = group
        self._in_kafka = "kafka" in storages
        self._directory = OffsetDirectory(tree, group) if "zookeeper" in storages else None

    def commit(self, cluster: Cluster, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit in each storage; the coordinator's leaves out topics that do not exist any more."""
        if self._in_kafka:
            GroupOffsets(cluster, self._group).commit(offsets, skips_deleted=True)
        if self._directory is not None:
            self._directory.commit(offsets)

    def fetch(self, cluster: Cluster, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """The committed offsets; with both storages the larger one, as in Kafka."""
        if not partitions:
            return {}
        found = GroupOffsets(cluster, self._group).fetch(partitions) if self._in_kafka else {}
        if self._directory is not None:
            for key, offset in self._directory.fetch(partitions).items():
                found[key] = max(offset, found.get(key, offset))
        return found
