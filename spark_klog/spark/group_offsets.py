"""A query's progress as the offsets of a group: at its coordinator and in ZooKeeper-style directories.

They follow Spark's commit, and never fail a query, nor hold it up for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import GroupOffsets
from spark_klog.directories.offsets import OffsetDirectory
from spark_klog.directories.opening import open_tree
from spark_klog.spark.offsets import Offsets, TopicPartition
from spark_klog.spark.options import GroupOffsetsOptions
from spark_klog.spark.publisher import Publisher, Store

#: How long a micro-batch waits at most until its offsets are written. Only the first one of an outage waits so long, so
#: this may be what a busy machine takes to connect: a query that ends meanwhile would leave its last offsets unwritten.
_PATIENCE_SECONDS = 15.0


class GroupProgress:
    """Shows offsets in every store of the options.

    `cluster` gives the connected cluster of the query, and `connect` one of our own: a thread writes to it.
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
        return GroupOffsets(cluster, self._options.group), cluster.close

    def publish(self, offsets: Offsets) -> None:
        """Have the offsets that changed written; in an outage the newest are when it ends."""
        for name in self._names():
            if name not in self._publishers:
                self._publishers[name] = Publisher(name, self._options.group, partial(self._open, name))
            self._publishers[name].offer(offsets)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for publisher in self._publishers.values():
            publisher.wait(deadline)

    def fetch(self, partitions: Collection[TopicPartition]) -> Offsets:
        """The group's offsets of those partitions that have one, from the first store; errors as of the store.

        With dual commit the larger one of coordinator and ZooKeeper: others of the group may still commit, or have
        committed, to one of them only.
        """
        names = self._names()
        found = self._fetch(names[0], partitions)
        if self._options.dual:  # the first one is the coordinator then
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
        """Write what can be written soon, and close the stores."""
        for publisher in self._publishers.values():
            publisher.close()
        self._publishers.clear()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_publishers": {}, "_cluster": None, "_connect": None}
