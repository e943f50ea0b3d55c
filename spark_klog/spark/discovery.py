"""What a subscription means now: its partitions, and the offsets that they have."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import NO_OFFSET, list_offsets
from spark_klog.client.sampling import record_sizes, timestamp_types
from spark_klog.errors import ConfigError, ErrorCode, NoOffsetForTimestamp, ProtocolError
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST
from spark_klog.records.contract import LOG_APPEND_TIME
from spark_klog.spark.group_offsets import GroupProgress
from spark_klog.spark.offsets import BeforeEndSpec, GroupSpec, Offsets, Spec, TimeSpec, TopicPartition
from spark_klog.spark.options import SplitLimits, Subscription
from spark_klog.spark.planning import OffsetRange, split, wanted_times

_UNKNOWN = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_TOPIC_EXCEPTION)


def partitions_of(cluster: Cluster, subscription: Subscription, *, missing_ok: bool = False) -> list[TopicPartition]:
    """The partitions that are read; `ConfigError` where a named topic or partition does not exist.

    With `missing_ok` those that are there.
    """
    if subscription.pattern is not None:
        pattern = re.compile(subscription.pattern)
        topics = [
            name for name, topic in cluster.metadata(None).items() if not topic["is_internal"] and pattern.search(name)
        ]
    else:
        topics = list(subscription.assign or subscription.topics or ())
    if missing_ok:
        known = cluster.metadata(topics)
        topics = [name for name in topics if name in known and known[name]["error_code"] not in _UNKNOWN]
    try:
        found = cluster.partitions(topics)
    except ProtocolError as error:
        if error.code in _UNKNOWN:
            raise ConfigError(f"{error.what} does not exist at {_address(cluster)}") from None
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


def earliest(cluster: Cluster, partitions: Collection[TopicPartition]) -> Offsets:
    """The first offset of each partition."""
    return list_offsets(cluster, dict.fromkeys(partitions, EARLIEST))


def latest(cluster: Cluster, partitions: Collection[TopicPartition]) -> Offsets:
    """The offset after the last record that may be read of each partition."""
    return list_offsets(cluster, dict.fromkeys(partitions, LATEST))


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
        return earliest(cluster, [key for key in partitions if key not in committed]) | committed
    if isinstance(spec, BeforeEndSpec):
        first, end = earliest(cluster, partitions), latest(cluster, partitions)
        return {key: max(first[key], end[key] - spec.records) for key in partitions}
    given, asked = wanted_times(spec, partitions)
    found = given | (list_offsets(cluster, asked) if asked else {})
    late = [key for key, offset in found.items() if offset == NO_OFFSET]
    if late and isinstance(spec, TimeSpec) and spec.strict:
        names = ", ".join(f"{topic}-{partition} (at {asked[topic, partition]})" for topic, partition in late)
        raise NoOffsetForTimestamp(
            f"option {option}: no record at or after the timestamp in {names}; "
            "set startingOffsetsByTimestampStrategy=latest to start at the end of such partitions"
        )
    return found | (latest(cluster, late) if late else {})


def known_start(start: Mapping[TopicPartition, int], cluster: Cluster, end: Collection[TopicPartition]) -> Offsets:
    """`start`, with the first offset of the partitions that appeared since."""
    appeared = [key for key in end if key not in start]
    return dict(start) | (earliest(cluster, appeared) if appeared else {})


def split_ranges(cluster: Cluster, wanted: list[OffsetRange], limits: SplitLimits) -> list[OffsetRange]:
    """The ranges, split as the options ask for; sizes are only asked for where they count."""
    sizes = record_sizes(cluster, {item[:2]: item.start for item in wanted}) if wanted and limits.max_bytes else {}
    return split(wanted, limits, sizes)


def clip_times(
    cluster: Cluster, wanted: list[OffsetRange], first_time: int | None, end_time: int | None
) -> list[OffsetRange]:
    """The parts of ranges that can have timestamps in [first_time, end_time) ms; without the empty ones.

    An upper bound only counts where the range begins and ends with log append time.
    """
    wanted = [item for item in wanted if item.start < item.end]
    # ListOffsets takes times below 0 for something else; no record is that early
    if first_time is not None and first_time > 0 and wanted:
        found = list_offsets(cluster, {item[:2]: first_time for item in wanted})
        starts = {key: offset for key, offset in found.items() if offset != NO_OFFSET}
        wanted = [item._replace(start=max(item.start, starts[item[:2]])) for item in wanted if item[:2] in starts]
    wanted = [item for item in wanted if item.start < item.end]
    if end_time is not None and end_time > 0 and wanted:
        first = timestamp_types(cluster, {item[:2]: item.start for item in wanted})
        last = timestamp_types(cluster, {item[:2]: item.end - 1 for item in wanted})
        safe = [item[:2] for item in wanted if first.get(item[:2]) == last.get(item[:2]) == LOG_APPEND_TIME]
        found = list_offsets(cluster, dict.fromkeys(safe, end_time)) if safe else {}
        wanted = [item._replace(end=_end(item.end, found.get(item[:2], NO_OFFSET))) for item in wanted]
    return [item for item in wanted if item.start < item.end]


def _end(end: int, found: int) -> int:
    return end if found == NO_OFFSET else min(end, found)
