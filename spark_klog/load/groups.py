"""Publish where a load is as the offsets of a group, after the commit of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import GroupOffsets
from spark_klog.directories.offsets import OffsetDirectory
from spark_klog.directories.trees.opening import open_tree


@dataclass(frozen=True)
class GroupPlace:
    """A group, and where its offsets are kept: ZooKeeper, a tree of files, or else the coordinator."""

    group: str
    zookeeper: str | None = None
    offsets_path: str | None = None


def publish_offsets(settings: Mapping[str, str], place: GroupPlace, offsets: Mapping[tuple[str, int], int]) -> None:
    """Write where each partition's next run begins; errors as of the store."""
    if place.zookeeper is None and place.offsets_path is None:
        with Cluster.connect(settings) as cluster:
            GroupOffsets(cluster, place.group).commit(offsets)
        return
    tree = open_tree(place.offsets_path or f"zookeeper://{place.zookeeper}")
    try:
        OffsetDirectory(tree, place.group).commit(offsets)
    finally:
        tree.close()
