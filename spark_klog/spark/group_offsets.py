"""Publish a query's progress as the offsets of a group: at its coordinator and in ZooKeeper-style directories.

The offsets follow Spark's commit. A store that is down neither fails a query nor delays it for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import GroupOffsets
from spark_klog.directories.offsets import OffsetDirectory
from spark_klog.directories.trees.opening import open_tree
from spark_klog.spark.offsets import Offsets, TopicPartition
from spark_klog.spark.options.reads import GroupOffsetsOptions
from spark_klog.spark.publisher import Publisher, Store

#: How long a micro-batch waits for its offsets to be written. Only the first one of an outage waits so long, so the
#: time is generous: it includes connecting from a busy machine, and a query that ends earlier loses its last offsets.
_PATIENCE_SECONDS = 15.0


class _Coordinator:
    """The group's offsets at its coordinator, which refuses those of deleted topics as if they might appear soon.

    A query's last offsets may name some: of topics that were deleted since, and also while the query was down.
    """

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._cluster = cluster
        self._offsets = GroupOffsets(cluster, group)

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        there = self._cluster.partitions({topic for topic, _ in offsets}, missing_ok=True)
        left = {key: offset for key, offset in offsets.items() if key[1] in there.get(key[0], ())}
        if left:
            self._offsets.commit(left)


class GroupProgress:
    """Writes and reads the group's offsets in every store of the options.

    `cluster` returns the query's own connected cluster; `connect` a new one, which the writing thread uses.
    """

    def __init__(
        self, options: GroupOffsetsOptions, cluster: Callable[[], Cluster], connect: Callable[[], Cluster] | None = None
    ) -> None:
        self._options = options
        self._cluster = cluster
        self._connect = connect or cluster
        self._publishers: dict[str, Publisher] = {}

    def _names(self) -> list[str]:
        return [*(["the coordinator"] if self._options.coordinator else []), *self._options.trees]

    def _open(self, name: str) -> tuple[Store, Callable[[], None]]:
        if name in self._options.trees:
            tree = open_tree(name)
            return OffsetDirectory(tree, self._options.group), tree.close
        cluster = self._connect()
        return _Coordinator(cluster, self._options.group), cluster.close

    def publish(self, offsets: Offsets) -> None:
        """Write the offsets that changed, if the options say so; after an outage the newest ones are written."""
        if not self._options.commits:
            return
        for name in self._names():
            if name not in self._publishers:
                self._publishers[name] = Publisher(name, self._options.group, partial(self._open, name))
            self._publishers[name].offer(offsets)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for publisher in self._publishers.values():
            publisher.wait(deadline)

    def fetch(self, partitions: Collection[TopicPartition]) -> Offsets:
        """The group's committed offsets, from the first store; omits partitions without one; errors as of the store.

        With dual commit the larger offset of coordinator and ZooKeeper: other members of the group may commit to only
        one of them.
        """
        names = self._names()
        found = self._fetch(names[0], partitions)
        if self._options.dual:  # then the first store is the coordinator, the last one ZooKeeper
            for key, offset in self._fetch(names[-1], partitions).items():
                found[key] = max(offset, found.get(key, offset))
        return found

    def _fetch(self, name: str, partitions: Collection[TopicPartition]) -> Offsets:
        if name not in self._options.trees:
            return GroupOffsets(self._cluster(), self._options.group).fetch(partitions)
        tree = open_tree(name)
        try:
            return OffsetDirectory(tree, self._options.group).fetch(partitions)
        finally:
            tree.close()

    def close(self) -> None:
        """Write the last offsets, if the stores answer soon, and close the stores."""
        for publisher in self._publishers.values():
            publisher.close()
        self._publishers.clear()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_publishers": {}, "_cluster": None, "_connect": None}
