"""Stores of a group's offsets, with one interface, and the changes that a move of the offsets makes.

kafka://HOST:PORT,HOST:PORT              the group's coordinator
zookeeper://HOST:PORT,HOST:PORT/CHROOT   /consumers/GROUP/offsets/TOPIC/PARTITION
PATH, file:///PATH, s3://..., ...        the same layout in files, see `trees.opening.open_tree`
checkpoint:///PATH, checkpoint:URI       the checkpoint of a Spark query, read-only
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from spark_klog.base.addresses import local_path
from spark_klog.base.names import TopicPartition
from spark_klog.client import Admin
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import GroupOffsets, first_and_end, list_offsets
from spark_klog.client.places import OffsetSpec, TimeSpec, offsets_at
from spark_klog.errors import ConfigError, ErrorCode
from spark_klog.groups.checkpoint import checkpoint_offsets
from spark_klog.protocol.tables.records import LATEST
from spark_klog.trees.consumers import OffsetDirectory
from spark_klog.trees.opening import open_tree
from spark_klog.trees.tree import Tree

_KAFKA, _ZOOKEEPER, _CHECKPOINT = "kafka://", "zookeeper:", "checkpoint:"
_READ_ONLY = (
    "a checkpoint can't be written: Spark keeps more of a query there. Start a new query with startingOffsets=group, "
    "or with the offsets as JSON"
)


class OffsetStore(Protocol):
    """The offsets of one group in one store; errors are `KlogError`s."""

    #: The kind of store: kafka, zookeeper, files or checkpoint.
    kind: str

    @property
    def cluster(self) -> Cluster | None:
        """The cluster, if the store is the group's coordinator; None otherwise."""

    def fetch(self) -> dict[TopicPartition, int]:
        """All offsets; each is that of the next record to read."""

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Write offsets; other partitions keep theirs."""

    def members(self) -> list[str]:
        """The running consumers of the group, if the store knows them; otherwise empty."""


def tree_addresses(zookeeper: str | None, path: str | None) -> list[str]:
    """Addresses for `open_store` of a ZooKeeper (HOST:PORT[/CHROOT]) and of files, those that are given."""
    return [*([f"zookeeper://{zookeeper}"] if zookeeper else []), *([path] if path else [])]


@contextmanager
def open_store(address: str, group: str, settings: Mapping[str, str], writing: bool = False) -> Iterator[OffsetStore]:
    """Open the offsets of `group` at an address; `settings` are client settings, used if the address is a cluster's.

    `ConfigError` for an invalid address, or if `writing` is set and the store is read-only; `ConnectionFailed`,
    `DirectoryError`.
    """
    if address.startswith(_KAFKA):
        servers = address[len(_KAFKA) :].rstrip("/")
        with Admin({**settings, "bootstrap.servers": servers}) as admin:
            yield CoordinatorStore(admin, group)
    elif address.startswith(_CHECKPOINT):
        if writing:
            raise ConfigError(_READ_ONLY)
        rest = address[len(_CHECKPOINT) :]
        yield _CheckpointStore(rest[2:] if rest.startswith("//") else rest)
    else:
        with closing(TreeStore(address, group)) as store:
            yield store


class CoordinatorStore:
    """Offsets in __consumer_offsets, through the group's coordinator."""

    kind = "kafka"

    def __init__(self, admin: Admin, group: str) -> None:
        self.cluster = admin.cluster
        self._admin, self._group = admin, group

    def fetch(self) -> dict[TopicPartition, int]:
        return {key: committed.offset for key, committed in self._admin.list_group_offsets(self._group).items()}

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        self._admin.alter_group_offsets(self._group, offsets).check()

    def members(self) -> list[str]:
        return [member.member_id for member in self._admin.describe_group(self._group).members]


class TreeStore:
    """Offsets in ZooKeeper or in files, which the first call opens. Only `commit` creates a local folder."""

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

    def fetch(self, partitions: Collection[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The offsets of these partitions, or all; partitions without one are left out."""
        return {} if self._is_missing() else self._open().fetch(partitions)

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        self._open().commit(offsets)

    def members(self) -> list[str]:
        return [] if self._is_missing() else self._open().consumers()

    def close(self) -> None:
        if self._tree is not None:
            self._tree.close()


class ClusterStore:
    """Offsets at the coordinator, over a connected cluster that the store closes. It has no list of members.

    A coordinator refuses offsets of deleted topics as if the topics might appear soon. `commit` leaves them out: a
    query's last offsets may name topics that were deleted since, or while the query was down.
    """

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._cluster = cluster
        self._offsets = GroupOffsets(cluster, group)

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        there = self._cluster.partitions({topic for topic, _ in offsets}, missing_ok=True)
        left = {key: offset for key, offset in offsets.items() if key[1] in there.get(key[0], ())}
        if left:
            self._offsets.commit(left)

    def fetch(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """The offsets of these partitions; partitions without one are left out."""
        return self._offsets.fetch(partitions)

    def close(self) -> None:
        self._cluster.close()


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


@dataclass(frozen=True)
class ShiftBy:
    """A number of records forward, or back if it is negative."""

    records: int


Target = OffsetSpec | TimeSpec | int | ShiftBy


class Change(NamedTuple):
    """A partition's old offset in a store (None: it had none), the new one (None: unchanged), and a note on why."""

    topic: str
    partition: int
    old: int | None
    new: int | None
    note: str = ""


def target_offsets(
    cluster: Cluster,
    target: Target,
    partitions: Collection[TopicPartition],
    current: Mapping[TopicPartition, int],
) -> dict[TopicPartition, int]:
    """The offset that the target means for each partition; `ConfigError` to shift partitions without an offset."""
    if not isinstance(target, ShiftBy):
        return offsets_at(cluster, target, list_offsets(cluster, dict.fromkeys(partitions, LATEST)))
    if missing := [f"{topic}-{partition}" for topic, partition in partitions if (topic, partition) not in current]:
        raise ConfigError(f"nothing to shift: the group has no offset of {', '.join(sorted(missing))}")
    return {key: current[key] + target.records for key in partitions}


def plan_changes(
    current: Mapping[TopicPartition, int], targets: Mapping[TopicPartition, int], cluster: Cluster | None
) -> list[Change]:
    """The change for each target offset.

    With a cluster, offsets are clamped to the partition's range, and the note says so; partitions that the cluster does
    not have are left unchanged.
    """
    if cluster is None:
        return [Change(*key, current.get(key), offset) for key, offset in sorted(targets.items())]
    there = existing(cluster, targets)
    first, end = first_and_end(cluster, there)
    changes = []
    for key, offset in sorted(targets.items()):
        if key not in first:
            changes.append(Change(*key, current.get(key), None, "the cluster has no such partition: left as it is"))
            continue
        new = min(max(offset, first[key]), end[key])
        note = f"{offset} is {'before the first' if offset < new else 'after the last'} offset" if offset != new else ""
        changes.append(Change(*key, current.get(key), new, note))
    return changes


def existing(cluster: Cluster, partitions: Collection[TopicPartition], *, is_led: bool = True) -> list[TopicPartition]:
    """The given partitions that exist in the cluster and, with `is_led`, have a leader."""
    topics = {topic for topic, _ in partitions}
    there = {
        (name, entry["partition_index"])
        for name, topic in (cluster.metadata(topics) if topics else {}).items()
        if topic["error_code"] in (ErrorCode.NONE, ErrorCode.LEADER_NOT_AVAILABLE)
        for entry in topic["partitions"]
        if entry["leader_id"] >= 0 or not is_led
    }
    return [key for key in partitions if key in there]
