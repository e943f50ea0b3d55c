"""How far a group is behind, by each place that keeps its offsets: in records and in time."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.next_records import next_timestamps
from spark_klog.client.offset_moves import existing
from spark_klog.client.offsets import list_offsets
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST


@dataclass(frozen=True)
class Lag:
    """An offset, and what waits there: records, and ms since the next record was written.

    None where it can't be told: the cluster has no such partition, or the record no timestamp.
    """

    offset: int
    records: int | None
    time_ms: int | None


@dataclass(frozen=True)
class PartitionLag:
    """A partition: its latest offset (None: the cluster does not have it), and the lag by each store with an offset."""

    topic: str
    partition: int
    latest: int | None
    stores: dict[str, Lag]


def partition_lags(
    cluster: Cluster, offsets: Mapping[str, Mapping[TopicPartition, int]], also: Collection[TopicPartition] = ()
) -> list[PartitionLag]:
    """The lag of all partitions that have an offset in one of the stores (by name), and of those in `also`.

    Errors as of `Cluster.attempt`.
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
    # who is before the first record reads on from there
    behind = {key: max(offset, earliest[key]) for key, offset in stored.items() if offset < latest.get(key, -1)}
    written = next_timestamps(cluster, behind)
    now = time.time_ns() // 1_000_000
    found = {}
    for key, offset in stored.items():
        if key not in latest:
            found[key] = Lag(offset, None, None)
        elif key not in behind:
            found[key] = Lag(offset, 0, 0)
        else:
            timestamp = written.get(key, now)
            found[key] = Lag(offset, latest[key] - offset, None if timestamp is None else max(0, now - timestamp))
    return found
