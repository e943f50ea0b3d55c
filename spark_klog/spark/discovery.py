"""What a subscription means now: its partitions, and the offsets that they have."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import list_offsets
from spark_klog.errors import ConfigError, ErrorCode, ProtocolError
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST
from spark_klog.spark.offsets import Offsets, OffsetSpec, TopicPartition
from spark_klog.spark.options import Subscription
from spark_klog.spark.planning import wanted_times


def partitions_of(cluster: Cluster, subscription: Subscription) -> list[TopicPartition]:
    """The partitions that are read; `ConfigError` where a named topic or partition does not exist."""
    if subscription.pattern is not None:
        pattern = re.compile(subscription.pattern)
        topics = [
            name
            for name, topic in cluster.metadata(None).items()
            if not topic["is_internal"] and pattern.fullmatch(name)
        ]
    else:
        topics = list(subscription.assign or subscription.topics or ())
    try:
        found = cluster.partitions(topics)
    except ProtocolError as error:
        if error.code in (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_TOPIC_EXCEPTION):
            raise ConfigError(f"{error.what} does not exist at {_address(cluster)}") from None
        raise
    if subscription.assign is None:
        return [(topic, partition) for topic in sorted(found) for partition in found[topic]]
    for topic, wanted in subscription.assign.items():
        missing = sorted(set(wanted) - set(found[topic]))
        if missing:
            raise ConfigError(f"topic {topic} has no partition {', '.join(map(str, missing))}")
    return [(topic, partition) for topic, wanted in sorted(subscription.assign.items()) for partition in wanted]


def _address(cluster: Cluster) -> str:
    return ",".join(f"{host}:{port}" for host, port in cluster.config.bootstrap_servers)


def earliest(cluster: Cluster, partitions: Collection[TopicPartition]) -> Offsets:
    """The first offset of each partition."""
    return list_offsets(cluster, dict.fromkeys(partitions, EARLIEST))


def latest(cluster: Cluster, partitions: Collection[TopicPartition]) -> Offsets:
    """The offset after the last record that may be read of each partition."""
    return list_offsets(cluster, dict.fromkeys(partitions, LATEST))


def resolve(cluster: Cluster, spec: OffsetSpec, partitions: Collection[TopicPartition]) -> Offsets:
    """The offsets that a spec means now."""
    given, asked = wanted_times(spec, partitions)
    return given | (list_offsets(cluster, asked) if asked else {})


def known_start(start: Mapping[TopicPartition, int], cluster: Cluster, end: Collection[TopicPartition]) -> Offsets:
    """`start`, with the first offset of the partitions that appeared since."""
    appeared = [key for key in end if key not in start]
    return dict(start) | (earliest(cluster, appeared) if appeared else {})
