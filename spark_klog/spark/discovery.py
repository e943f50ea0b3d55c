"""What a subscription means now: its partitions, and the offsets that they have."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from uuid import UUID

from spark_klog.client.cluster import UNKNOWN_TOPIC, Cluster
from spark_klog.client.offsets import list_offsets
from spark_klog.client.sampling import record_sizes, timestamp_types
from spark_klog.errors import ConfigError, ProtocolError
from spark_klog.log.names import check_topic_name
from spark_klog.protocol.tables.list_offsets import LATEST, READ_UNCOMMITTED
from spark_klog.spark import places
from spark_klog.spark.group_offsets import GroupProgress
from spark_klog.spark.offsets import GroupSpec, Offsets, Spec, TopicPartition
from spark_klog.spark.options import PREFIX, SourceOptions, SplitLimits, Subscription
from spark_klog.spark.planning import OffsetRange, pack, split

_log = logging.getLogger(__name__)


def partitions_of(cluster: Cluster, subscription: Subscription, *, missing_ok: bool = False) -> list[TopicPartition]:
    """The partitions that are read; `ConfigError` where a named topic or partition does not exist.

    With `missing_ok` those that are there.
    """
    if subscription.pattern is not None:
        pattern = re.compile(subscription.pattern)
        topics = [
            name for name, topic in cluster.metadata(None).items() if not topic["is_internal"] and pattern.search(name)
        ]
        missing_ok = True  # one may just have been deleted
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
    for topic, wanted in subscription.assign.items():
        missing = sorted(set(wanted) - set(found.get(topic, ())))
        if missing and not missing_ok:
            raise ConfigError(f"topic {topic} has no partition {', '.join(map(str, missing))}")
    return [
        (topic, partition)
        for topic, wanted in sorted(subscription.assign.items())
        for partition in wanted
        if partition in found.get(topic, ())
    ]


def _address(cluster: Cluster) -> str:
    return ",".join(f"{host}:{port}" for host, port in cluster.config.bootstrap_servers)


class BrokerOffsets:
    """The offsets of a cluster's partitions, see `places.LogOffsets`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def list_offsets(self, times: Mapping[TopicPartition, int]) -> Offsets:
        return list_offsets(self._cluster, times)

    def timestamp_types(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        return timestamp_types(self._cluster, offsets)


def earliest(cluster: Cluster, partitions: Collection[TopicPartition]) -> Offsets:
    """The first offset of each partition."""
    return places.earliest(BrokerOffsets(cluster), partitions)


def latest(cluster: Cluster, partitions: Collection[TopicPartition]) -> Offsets:
    """The offset after the last record that may be read of each partition."""
    return places.latest(BrokerOffsets(cluster), partitions)


def high_watermarks(cluster: Cluster, partitions: Collection[TopicPartition]) -> Offsets:
    """The offset after the last replicated record of each partition, whatever transactions are open."""
    return list_offsets(cluster, dict.fromkeys(partitions, LATEST), isolation_level=READ_UNCOMMITTED)


def resolve(
    cluster: Cluster,
    spec: Spec,
    partitions: Collection[TopicPartition],
    option: str,
    progress: GroupProgress | None = None,
) -> Offsets:
    """The offsets that a spec means now; `ConfigError` where a strict one finds no record that late."""
    if isinstance(spec, GroupSpec):
        assert progress is not None  # options without a group are refused
        committed = progress.fetch(partitions)
        without = sorted(set(partitions) - committed.keys())
        if partitions and not committed:
            _log.warning(
                "option %s=group: group %s has committed no offset of the partitions that are read (is its name "
                "right?); all of them begin at their first record",
                *(option, spec.group),
            )
        elif without:
            names = ", ".join(f"{topic}-{partition}" for topic, partition in without)
            _log.warning(
                "option %s=group: group %s has no offset of %s; these begin at their first record",
                *(option, spec.group, names),
            )
        return earliest(cluster, [key for key in partitions if key not in committed]) | committed
    return places.resolve(BrokerOffsets(cluster), spec, partitions, option)


def tasks(cluster: Cluster, wanted: list[OffsetRange], limits: SplitLimits) -> list[tuple[OffsetRange, ...]]:
    """The ranges of each task, as the options ask for; sizes are only asked for where they count."""
    sizes = record_sizes(cluster, {item[:2]: item.start for item in wanted}) if wanted and limits.max_bytes else {}
    return pack(split(wanted, limits, sizes), limits)


class BrokerLog(BrokerOffsets):
    """What a batch query reads of brokers, see `places.BatchLog`."""

    def __init__(self, cluster: Cluster, options: SourceOptions, progress: GroupProgress | None) -> None:
        super().__init__(cluster)
        self._options, self._progress = options, progress
        self.topic_ids: Mapping[str, UUID] = {}

    def partitions(self) -> list[TopicPartition]:
        found = partitions_of(self._cluster, self._options.subscription)
        # those of now: the offsets that are asked for next may be those of another topic of the same name
        self.topic_ids = dict(self._cluster.topic_ids)
        return found

    def resolve(self, spec: Spec, partitions: Collection[TopicPartition], option: str) -> Offsets:
        return resolve(self._cluster, spec, partitions, option, self._progress)

    def tasks(self, wanted: list[OffsetRange]) -> list[tuple[OffsetRange, ...]]:
        return tasks(self._cluster, wanted, self._options.split)


@contextmanager
def broker_log(options: SourceOptions) -> Iterator[BrokerLog]:
    """Connected while it is used; errors as of `Cluster.connect`."""
    with Cluster.connect(options.client, PREFIX) as cluster:
        group = options.group_offsets
        progress = GroupProgress(group, lambda: cluster) if group else None
        try:
            yield BrokerLog(cluster, options, progress)
        finally:
            if progress is not None:
                progress.close()
