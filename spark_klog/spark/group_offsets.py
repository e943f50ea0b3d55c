"""A query's progress as the offsets of a group: at its coordinator and in ZooKeeper-style directories.

They follow Spark's commit, and never fail a query.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import GroupOffsets
from spark_klog.directories.offsets import OffsetDirectory
from spark_klog.directories.tree import Tree, open_tree, without_user
from spark_klog.errors import KlogError
from spark_klog.spark.offsets import Offsets, TopicPartition
from spark_klog.spark.options import GroupOffsetsOptions

_log = logging.getLogger(__name__)


class _Store(Protocol):
    def commit(self, offsets: Mapping[TopicPartition, int]) -> None: ...

    def fetch(self, partitions: Collection[TopicPartition]) -> Offsets: ...


class GroupProgress:
    """Shows offsets in every store of the options. `cluster` gives the connected cluster of the query."""

    def __init__(self, options: GroupOffsetsOptions, cluster: Callable[[], Cluster]) -> None:
        self._options = options
        self._cluster = cluster
        self._trees: list[Tree] = []
        self._published: dict[str, Offsets] = {}
        self._stores: dict[str, _Store] = {}

    def _names(self) -> list[str]:
        return [*(["the coordinator"] if self._options.coordinator else []), *self._options.trees]

    def _store(self, name: str) -> _Store:
        if name not in self._stores:
            if name in self._options.trees:
                tree = open_tree(name)
                self._trees.append(tree)
                self._stores[name] = OffsetDirectory(tree, self._options.group)
            else:
                self._stores[name] = GroupOffsets(self._cluster(), self._options.group)
        return self._stores[name]

    def publish(self, offsets: Offsets) -> None:
        """Write the offsets that changed; what could not be written is written with the next ones."""
        for name in self._names():
            published = self._published.setdefault(name, {})
            changed = {key: offset for key, offset in offsets.items() if published.get(key) != offset}
            if not changed:
                continue
            try:
                self._store(name).commit(changed)
            except KlogError as error:
                _log.error(
                    "offsets of group %s were not written to %s, trying again next time: %s",
                    *(self._options.group, without_user(name), error),
                )
                continue
            published |= changed

    def fetch(self, partitions: Collection[TopicPartition]) -> Offsets:
        """The group's offsets of those partitions that have one, from the first store; errors as of the store.

        With dual commit the larger one of coordinator and ZooKeeper: others of the group may still commit, or have
        committed, to one of them only.
        """
        names = self._names()
        found = self._store(names[0]).fetch(partitions)
        if self._options.dual:  # the first one is the coordinator then
            for key, offset in self._store(names[-1]).fetch(partitions).items():
                found[key] = max(offset, found.get(key, offset))
        return found

    def close(self) -> None:
        for tree in self._trees:
            tree.close()
        self._trees.clear()
        self._stores.clear()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_trees": [], "_stores": {}, "_cluster": None}
