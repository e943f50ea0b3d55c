"""The places where a group's offsets are kept, by one interface.

kafka://HOST:PORT,HOST:PORT              the group's coordinator
zookeeper://HOST:PORT,HOST:PORT/CHROOT   /consumers/GROUP/offsets/TOPIC/PARTITION
PATH, file:///PATH, s3://..., ...        the same as plain files, see `directories.opening.open_tree`
checkpoint:///PATH, checkpoint:URI       the checkpoint of a Spark query, to be read only
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.groups import describe_group
from spark_klog.client.offsets import GroupOffsets
from spark_klog.directories.addresses import local_path
from spark_klog.directories.checkpoint import checkpoint_offsets
from spark_klog.directories.offsets import OffsetDirectory
from spark_klog.directories.opening import open_tree
from spark_klog.directories.tree import Tree
from spark_klog.errors import ConfigError

_KAFKA, _ZOOKEEPER, _CHECKPOINT = "kafka://", "zookeeper:", "checkpoint:"
_READ_ONLY = (
    "a checkpoint can't be written: Spark keeps more of a query there. Start a new query with startingOffsets=group, "
    "or with the offsets as JSON"
)


class OffsetStore(Protocol):
    """The offsets of one group in one place; errors are `KlogError`s."""

    #: What kind of place: kafka, zookeeper, files or checkpoint.
    kind: str

    @property
    def cluster(self) -> Cluster | None:
        """The cluster of a coordinator, None elsewhere."""

    def fetch(self) -> dict[TopicPartition, int]:
        """All offsets (of the next record to read) there are."""

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Write offsets; partitions that are not named keep theirs."""

    def members(self) -> list[str]:
        """The consumers of the group that are known to run, as far as the place tells."""


@contextmanager
def open_store(address: str, group: str, settings: Mapping[str, str], writing: bool = False) -> Iterator[OffsetStore]:
    """The offsets of `group` at an address; `settings` are those of the client where it is a cluster's.

    `ConfigError` for an address that is none, or where `writing` is meant and can't be; `ConnectionFailed`,
    `DirectoryError`.
    """
    if address.startswith(_KAFKA):
        servers = address[len(_KAFKA) :].rstrip("/")
        with Cluster.connect({**settings, "bootstrap.servers": servers}) as cluster:
            yield CoordinatorStore(cluster, group)
    elif address.startswith(_CHECKPOINT):
        if writing:
            raise ConfigError(_READ_ONLY)
        rest = address[len(_CHECKPOINT) :]
        yield _CheckpointStore(rest[2:] if rest.startswith("//") else rest)
    else:
        store = _TreeStore(address, group)
        try:
            yield store
        finally:
            store.close()


class CoordinatorStore:
    """In __consumer_offsets, by the group's coordinator."""

    kind = "kafka"

    def __init__(self, cluster: Cluster, group: str) -> None:
        self.cluster = cluster
        self._offsets = GroupOffsets(cluster, group)

    def fetch(self) -> dict[TopicPartition, int]:
        return self._offsets.fetch()

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        self._offsets.commit(offsets)

    def members(self) -> list[str]:
        return [member.member_id for member in describe_group(self.cluster, self._offsets.group).members]


class _TreeStore:
    """In ZooKeeper or as plain files. A local folder comes into being by a commit, not by a look."""

    cluster = None

    def __init__(self, address: str, group: str) -> None:
        self.kind = "zookeeper" if address.startswith(_ZOOKEEPER) else "files"
        self._address, self._group = address, group
        self._tree: Tree | None = None

    def _open(self) -> OffsetDirectory:
        if self._tree is None:
            self._tree = open_tree(self._address)
        return OffsetDirectory(self._tree, self._group)

    def _is_missing(self) -> bool:
        if self._tree is not None or self.kind == "zookeeper":
            return False
        path = local_path(self._address)
        return path is not None and not Path(path).exists()

    def fetch(self) -> dict[TopicPartition, int]:
        return {} if self._is_missing() else self._open().fetch()

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        self._open().commit(offsets)

    def members(self) -> list[str]:
        return [] if self._is_missing() else self._open().consumers()

    def close(self) -> None:
        if self._tree is not None:
            self._tree.close()


class _CheckpointStore:
    kind = "checkpoint"
    cluster = None

    def __init__(self, address: str) -> None:
        self._address = address

    def fetch(self) -> dict[TopicPartition, int]:
        return checkpoint_offsets(self._address)

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        raise ConfigError(_READ_ONLY)

    def members(self) -> list[str]:
        return []
