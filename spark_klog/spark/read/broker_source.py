"""Look up the subscribed partitions and their offsets at the brokers, for batch queries and streams."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from spark_klog.base.names import check_topic_name
from spark_klog.client.cluster import UNKNOWN_TOPIC, Cluster
from spark_klog.client.fetch.sampling import record_sizes, timestamp_types
from spark_klog.client.offsets import high_watermarks, list_offsets
from spark_klog.client.places import GroupSpec, Offsets, Spec, TopicPartition
from spark_klog.errors import ConfigError, KlogError, ProtocolError
from spark_klog.spark.options.names import PREFIX
from spark_klog.spark.options.reads import SourceOptions, SplitLimits, Subscription
from spark_klog.spark.progress.group_offsets import GroupProgress
from spark_klog.spark.read import batch_query as resolution
from spark_klog.spark.read.ranges import OffsetRange, pack, split

_log = logging.getLogger(__name__)
#: A sample costs a fetch, so each partition is sampled only once in this time.
_KEPT_SECONDS = 60.0


class RecordBytes:
    """Average bytes of a record in the log (compressed), by partition."""

    def __init__(self) -> None:
        self._known: dict[TopicPartition, tuple[float, float]] = {}

    def sample(self, cluster: Cluster, starts: Offsets) -> None:
        """Sample the partitions whose last sample is old; each has records from its offset on. Logs errors."""
        now = time.monotonic()
        due = {
            key: offset for key, offset in starts.items() if now - self._known.get(key, (-1e9, 0))[0] > _KEPT_SECONDS
        }
        if not due:
            return
        try:
            sizes = record_sizes(cluster, due)
        except (KlogError, OSError) as error:
            _log.info("can't sample record sizes: %s", error)
            return
        self._known |= {key: (now, size) for key, size in sizes.items()}

    def to_json(self) -> list[dict[str, Any]]:
        """[{"topic": ..., "partition": ..., "bytes": ...}]"""
        return [
            {"topic": topic, "partition": partition, "bytes": round(size, 1)}
            for (topic, partition), (_, size) in sorted(self._known.items())
        ]


def partitions_of(cluster: Cluster, subscription: Subscription, *, missing_ok: bool = False) -> list[TopicPartition]:
    """The subscribed partitions; `ConfigError` if a named topic or partition does not exist, unless `missing_ok`."""
    if subscription.pattern is not None:
        pattern = re.compile(subscription.pattern)
        topics = [
            name for name, topic in cluster.metadata(None).items() if not topic["is_internal"] and pattern.search(name)
        ]
        missing_ok = True  # a topic may be deleted between the two requests
    else:
        topics = list(subscription.assign or subscription.topics or ())
    try:
        found = cluster.partitions(topics, missing_ok=missing_ok)
    except ProtocolError as error:
        if error.code in UNKNOWN_TOPIC:
            for topic in topics:
                check_topic_name(topic)  # no topic of an illegal name can be created
            raise ConfigError(
                f"{error.what} does not exist at {_address(cluster)}; create it, or set subscribePattern to read "
                "topics that are created later"
            ) from None
        raise
    if subscription.assign is None:
        return [(topic, partition) for topic in sorted(found) for partition in found[topic]]
    for topic, numbers in subscription.assign.items():
        missing = sorted(set(numbers) - set(found.get(topic, ())))
        if missing and not missing_ok:
            raise ConfigError(f"topic {topic} has no partition {', '.join(map(str, missing))}")
    return [
        (topic, partition)
        for topic, numbers in sorted(subscription.assign.items())
        for partition in numbers
        if partition in found.get(topic, ())
    ]


def _address(cluster: Cluster) -> str:
    return ",".join(f"{host}:{port}" for host, port in cluster.config.bootstrap_servers)


class BrokerOffsets:
    """Offsets of a cluster's partitions, see `resolution.OffsetSource`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def list_offsets(self, times: Mapping[TopicPartition, int]) -> Offsets:
        return list_offsets(self._cluster, times)

    def timestamp_types(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        return timestamp_types(self._cluster, offsets)


def earliest(cluster: Cluster, partitions: Collection[TopicPartition]) -> Offsets:
    """The first offset of each partition."""
    return resolution.earliest(BrokerOffsets(cluster), partitions)


def latest(cluster: Cluster, partitions: Collection[TopicPartition]) -> Offsets:
    """The end of each partition; with read_committed its last stable offset."""
    return resolution.latest(BrokerOffsets(cluster), partitions)


def resolve(
    cluster: Cluster,
    spec: Spec,
    partitions: Collection[TopicPartition],
    option: str,
    progress: GroupProgress | None = None,
) -> Offsets:
    """One offset per partition for any spec; errors as of `resolution.resolve` and of the group's store."""
    if isinstance(spec, GroupSpec):
        assert progress is not None  # `source_options` requires a group
        committed = progress.fetch(partitions)
        without = sorted(set(partitions) - committed.keys())
        if partitions and not committed:
            _log.warning(
                "option %s=group: group %s has no committed offset of the partitions that are read; check its name. "
                "All of them start at their first record",
                *(option, spec.group),
            )
        elif without:
            names = ", ".join(f"{topic}-{partition}" for topic, partition in without)
            _log.warning(
                "option %s=group: group %s has no committed offset of %s; these start at their first record",
                *(option, spec.group, names),
            )
        return earliest(cluster, [key for key in partitions if key not in committed]) | committed
    return resolution.resolve(BrokerOffsets(cluster), spec, partitions, option)


def tasks(cluster: Cluster, ranges: list[OffsetRange], limits: SplitLimits) -> list[tuple[OffsetRange, ...]]:
    """Split and pack ranges into tasks; samples record sizes only if the limits need them."""
    sizes = record_sizes(cluster, {item[:2]: item.start for item in ranges}) if ranges and limits.max_bytes else {}
    return pack(split(ranges, limits, sizes), limits)


class BrokerSource(BrokerOffsets):
    """The source of a batch query that reads brokers, see `batch_query.BatchQuerySource`."""

    def __init__(self, cluster: Cluster, options: SourceOptions, progress: GroupProgress | None) -> None:
        super().__init__(cluster)
        self._options, self._progress = options, progress
        self.topic_ids: Mapping[str, UUID] = {}

    def partitions(self) -> list[TopicPartition]:
        found = partitions_of(self._cluster, self._options.subscription)
        # A copy of the ids at this moment: later requests may meet a new topic of the same name.
        self.topic_ids = dict(self._cluster.topic_ids)
        return found

    def resolve(self, spec: Spec, partitions: Collection[TopicPartition], option: str) -> Offsets:
        return resolve(self._cluster, spec, partitions, option, self._progress)

    def log_ends(self, partitions: Collection[TopicPartition]) -> Offsets:
        return high_watermarks(self._cluster, partitions)

    def tasks(self, ranges: list[OffsetRange]) -> list[tuple[OffsetRange, ...]]:
        return tasks(self._cluster, ranges, self._options.split)


@contextmanager
def open_broker_source(options: SourceOptions) -> Iterator[BrokerSource]:
    """Connect for the duration of the block; errors as of `Cluster.connect`."""
    with Cluster.connect(options.client, PREFIX) as cluster:
        group = options.group_offsets
        progress = GroupProgress(group, lambda: cluster) if group else None
        try:
            yield BrokerSource(cluster, options, progress)
        finally:
            if progress is not None:
                progress.close()
