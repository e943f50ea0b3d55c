"""Look up the subscribed partitions and their offsets at the brokers, for batch queries and streams."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from functools import partial

from spark_klog.base.names import TopicPartition, check_topic_name
from spark_klog.client.cluster import UNKNOWN_TOPIC, Cluster
from spark_klog.client.fetch.sampling import record_sizes, timestamp_types
from spark_klog.client.offsets import high_watermarks, list_offsets
from spark_klog.client.places import GroupSpec, Offsets, Spec
from spark_klog.errors import ConfigError, ProtocolError
from spark_klog.spark.group_progress import GroupProgress
from spark_klog.spark.options import PREFIX, SourceOptions
from spark_klog.spark.read.batch_query import QuerySource
from spark_klog.spark.read.ranges import OffsetRange, pack, split

_log = logging.getLogger(__name__)


class BrokerSource(QuerySource):
    """The partitions of a query at the brokers of a cluster; `progress` has the offsets of the options' group."""

    def __init__(self, cluster: Cluster, options: SourceOptions, progress: GroupProgress | None) -> None:
        self.cluster, self.progress = cluster, progress
        self._options = options

    @classmethod
    def connect(cls, options: SourceOptions) -> BrokerSource:
        """Connect to the options' cluster; errors as of `Cluster.connect`."""
        connect = partial(Cluster.connect, options.client, PREFIX)
        cluster, group = connect(), options.group_offsets
        # Publishing has its own connection, so that it does not wait for requests of the query.
        return cls(cluster, options, GroupProgress(group, lambda: cluster, connect) if group else None)

    def close(self) -> None:
        """Publish the last offsets of the group if that is soon done, and close the connections."""
        if self.progress is not None:
            self.progress.close()
        self.cluster.close()

    def partitions(self, *, missing_ok: bool = False) -> list[TopicPartition]:
        """The subscribed partitions; `ConfigError` if a named one does not exist, unless `missing_ok`."""
        subscription = self._options.subscription
        if subscription.pattern is not None:
            pattern, metadata = re.compile(subscription.pattern), self.cluster.metadata(None)
            topics = [name for name, topic in metadata.items() if not topic["is_internal"] and pattern.search(name)]
            missing_ok = True  # a topic may be deleted between the two requests
        else:
            topics = list(subscription.assign or subscription.topics or ())
        try:
            there = self.cluster.partitions(topics, missing_ok=missing_ok)
        except ProtocolError as error:
            if error.code not in UNKNOWN_TOPIC:
                raise
            for topic in topics:
                check_topic_name(topic)  # no topic of an illegal name can be created
            address = ",".join(f"{host}:{port}" for host, port in self.cluster.config.bootstrap_servers)
            raise ConfigError(
                f"{error.what} does not exist at {address}; create it, or set subscribePattern to read topics that are "
                "created later"
            ) from None
        # A copy of the ids at this moment: later requests may meet a new topic of the same name.
        self.topic_ids = dict(self.cluster.topic_ids)
        if subscription.assign is None:
            return [(topic, partition) for topic in sorted(there) for partition in there[topic]]
        for topic, numbers in subscription.assign.items():
            missing = sorted(set(numbers) - set(there.get(topic, ())))
            if missing and not missing_ok:
                raise ConfigError(f"topic {topic} has no partition {', '.join(map(str, missing))}")
        return [
            (topic, partition)
            for topic, numbers in sorted(subscription.assign.items())
            for partition in numbers
            if partition in there.get(topic, ())
        ]

    def list_offsets(self, times: Mapping[TopicPartition, int]) -> Offsets:
        return list_offsets(self.cluster, times)

    def timestamp_types(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        return timestamp_types(self.cluster, offsets)

    def log_ends(self, partitions: Collection[TopicPartition]) -> Offsets:
        return high_watermarks(self.cluster, partitions)

    def tasks(self, ranges: list[OffsetRange]) -> list[tuple[OffsetRange, ...]]:
        """Split and pack ranges into tasks; samples record sizes only if the limits need them."""
        limits = self._options.split
        starts = {item[:2]: item.start for item in ranges} if limits.max_bytes else {}
        return pack(split(ranges, limits, record_sizes(self.cluster, starts) if starts else {}), limits)

    def resolve(self, spec: Spec, partitions: Collection[TopicPartition], option: str) -> Offsets:
        """As `QuerySource.resolve`, also for the offsets of a group; errors of the group's store."""
        if not isinstance(spec, GroupSpec):
            return super().resolve(spec, partitions, option)
        assert self.progress is not None  # `source_options` requires a group
        committed = self.progress.fetch(partitions)
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
        return self.earliest(without) | committed
