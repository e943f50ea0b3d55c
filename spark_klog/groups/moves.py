"""Resolve an offset target (a time, a shift, an offset) to one offset per partition, within the partition's range."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.offsets import list_offsets
from spark_klog.client.places import OffsetSpec, TimeSpec, offsets_at
from spark_klog.errors import ConfigError, ErrorCode
from spark_klog.protocol.tables.records import EARLIEST, LATEST


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
    first = list_offsets(cluster, dict.fromkeys(there, EARLIEST))
    end = list_offsets(cluster, dict.fromkeys(there, LATEST))
    changes = []
    for key, offset in sorted(targets.items()):
        if key not in first:
            changes.append(Change(*key, current.get(key), None, "the cluster has no such partition: left as it is"))
            continue
        new = min(max(offset, first[key]), end[key])
        note = f"{offset} is {'before the first' if offset < new else 'after the last'} offset" if offset != new else ""
        changes.append(Change(*key, current.get(key), new, note))
    return changes


def existing(cluster: Cluster, partitions: Collection[TopicPartition]) -> list[TopicPartition]:
    """The given partitions that exist in the cluster and have a leader."""
    topics = {topic for topic, _ in partitions}
    led = {
        (name, entry["partition_index"])
        for name, topic in (cluster.metadata(topics) if topics else {}).items()
        if topic["error_code"] in (ErrorCode.NONE, ErrorCode.LEADER_NOT_AVAILABLE)
        for entry in topic["partitions"]
        if entry["leader_id"] >= 0
    }
    return [key for key in partitions if key in led]
