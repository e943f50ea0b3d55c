"""The lag of a group in records and in time, for each store that keeps its offsets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from spark_klog.base.clock import system_ms
from spark_klog.client.admin.groups import GroupDescription
from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.fetch.sampling import next_timestamps
from spark_klog.client.offsets import list_offsets
from spark_klog.groups.moves import existing
from spark_klog.protocol.tables.records import EARLIEST, LATEST


@dataclass(frozen=True)
class Lag:
    """A committed offset, the number of records after it, and ms since the next record was written.

    `lost` is the number of these records that are deleted already, by retention or DeleteRecords: the group has not
    read them and never will. All but the offset are None if the cluster does not have the partition; `time_ms` also if
    the record has no timestamp, can't be read, or if all unread records are deleted.
    """

    offset: int
    records: int | None
    lost: int | None
    time_ms: int | None


@dataclass(frozen=True)
class PartitionLag:
    """A partition's latest offset (None if the cluster does not have the partition), and the lag for each store."""

    topic: str
    partition: int
    latest: int | None
    stores: dict[str, Lag]


def owners_of(group: GroupDescription) -> dict[TopicPartition, str]:
    """The id of the member that reads each assigned partition."""
    return {
        (topic, partition): member.member_id
        for member in group.members
        for topic, partitions in (member.assignment or {}).items()
        for partition in partitions
    }


def partition_lags(
    cluster: Cluster, offsets: Mapping[str, Mapping[TopicPartition, int]], also: Collection[TopicPartition] = ()
) -> list[PartitionLag]:
    """The lag of all partitions that have an offset in a store (`offsets` is by the store's name) or are in `also`.

    Raises what `Cluster.attempt` raises.
    """
    partitions = sorted({key for stored in offsets.values() for key in stored}.union(also))
    there = existing(cluster, partitions)
    earliest = list_offsets(cluster, dict.fromkeys(there, EARLIEST))
    latest = list_offsets(cluster, dict.fromkeys(there, LATEST))
    lags = {name: _lags(cluster, stored, earliest, latest) for name, stored in offsets.items()}
    return [
        PartitionLag(*key, latest.get(key), {name: found[key] for name, found in lags.items() if key in found})
        for key in partitions
    ]


def _lags(
    cluster: Cluster,
    stored: Mapping[TopicPartition, int],
    earliest: Mapping[TopicPartition, int],
    latest: Mapping[TopicPartition, int],
) -> dict[TopicPartition, Lag]:
    # a consumer whose offset is before the first record continues at the first record
    behind = {key: max(offset, earliest[key]) for key, offset in stored.items() if offset < latest.get(key, -1)}
    written = next_timestamps(cluster, behind)
    now = system_ms()
    found = {}
    for key, offset in stored.items():
        if key not in latest:
            found[key] = Lag(offset, None, None, None)
        elif key not in behind:
            found[key] = Lag(offset, 0, 0, 0)
        else:
            lost = max(0, earliest[key] - offset)
            timestamp = written.get(key, None if lost else now)
            age = None if timestamp is None else max(0, now - timestamp)
            found[key] = Lag(offset, latest[key] - offset, lost, age)
    return found
