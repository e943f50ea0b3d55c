"""The partition that a record goes to."""

from __future__ import annotations

import operator

from spark_klog.client.cluster import Cluster
from spark_klog.client.delivery.partitions.partitioner import StickyPartitioner
from spark_klog.client.delivery.partitions.topics import PartitionCounts
from spark_klog.errors import ConfigError


class PartitionChoice:
    """Partition counts of the topics in use, and the partitions that records without a key or a partition get."""

    def __init__(self, cluster: Cluster, batch_size: int, creates_topics: bool) -> None:
        self.counts = PartitionCounts(cluster, creates_topics)
        self.partitioning = cluster.config.partitioning
        self.sticky = StickyPartitioner(self.counts.with_leader, batch_size)
        self._batch_size = batch_size

    def renew(self, *, wait: bool = True) -> None:
        """See new partitions after metadata.max.age.ms; a call does it first, as it relies on the same ones.

        `wait`: see `PartitionCounts.renew`.
        """
        if self.counts.renew(wait=wait):
            self.sticky.end_turns()

    def refresh(self) -> bool:
        """Fetch the topics in use again; False if the brokers belong to another cluster now."""
        self.sticky.end_turns()
        return self.counts.refresh()

    def of(self, topic: str, key: bytes | None, partition: int | None) -> tuple[int, bool]:
        """(partition of a record, whether it was free to choose); `ConfigError` if the topic has no such partition."""
        count = self.counts.of(topic)
        if partition is not None:
            if not 0 <= operator.index(partition) < count:
                there = f"partitions 0 to {count - 1}" if count > 1 else "only partition 0"
                raise ConfigError(f"topic {topic} has {there}, not {partition}")
            return partition, False
        hashed = self.partitioning.of(key, count)
        return (self.sticky.current(topic), True) if hashed is None else (hashed, False)

    def filled(self, topic: str, size: int) -> None:
        """Note the size of a record whose partition was free to choose."""
        self.sticky.filled(topic, self._batch_size if self.partitioning.takes_turns else size)
