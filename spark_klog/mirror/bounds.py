"""The first offsets and the ends of partitions at the source."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from spark_klog.client.cluster import UNKNOWN_TOPIC, Cluster, TopicPartition
from spark_klog.client.offsets import list_offsets, offsets_of_led
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST

#: The most milliseconds that an answer of a leader may take which others do not wait for.
_LOOK_MS = 5000


class Bounds(NamedTuple):
    """A partition's offsets: its first one, and that after its last one."""

    start: int
    end: int


def find_bounds(cluster: Cluster, keys: Collection[TopicPartition], *, waits: bool) -> dict[TopicPartition, Bounds]:
    """The bounds of partitions, whose leaders are those in the last metadata.

    Without `waits`, a partition whose leader is missing or does not answer now is left out; else the call retries until
    default.api.timeout.ms, and raises what `list_offsets` raises.
    """
    if waits:
        starts = list_offsets(cluster, dict.fromkeys(keys, EARLIEST))
        ends = list_offsets(cluster, dict.fromkeys(keys, LATEST))
    else:
        with cluster.within(_LOOK_MS):
            starts, _ = offsets_of_led(cluster, dict.fromkeys(keys, EARLIEST))
            ends, _ = offsets_of_led(cluster, dict.fromkeys(starts, LATEST))
    return {key: Bounds(starts[key], end) for key, end in ends.items()}


def ends_now(cluster: Cluster, keys: Collection[TopicPartition]) -> tuple[dict[TopicPartition, int], bool]:
    """The ends of the partitions whose leaders answer now, and whether the cluster does not know a topic any more.

    Each leader is asked once: a topic that is deleted just now must not hold up the others.
    """
    with cluster.within(_LOOK_MS):
        found, failed = offsets_of_led(cluster, dict.fromkeys(keys, LATEST))
    names = {topic for topic, _ in failed}
    told = cluster.metadata(names) if names else {}  # with the leaders to ask the next time
    return found, any(name not in told or told[name]["error_code"] in UNKNOWN_TOPIC for name in names)
