"""Compare a load with the log as it is now, hour by hour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import NO_OFFSET, list_offsets
from spark_klog.clock import system_ms
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST

_HOUR_MS = 3_600_000
Key = tuple[str, int]


@dataclass(frozen=True)
class HourOfTopic:
    """Offsets of a topic's partitions between the first record of an hour and that of the next one, in the log and in
    the load. `hour` is as "2026-11-23T10", in UTC."""

    topic: str
    hour: str
    in_log: int
    loaded: int


@dataclass(frozen=True)
class Completeness:
    """`lag` has the offsets of each partition that the log has and the load has not; `gone` the partitions that the
    cluster has no more."""

    hours: list[HourOfTopic]
    lag: dict[Key, int]
    gone: list[Key]


def compare(cluster: Cluster, partitions: Sequence[Mapping[str, Any]], hours: int) -> Completeness:
    """Compare the last `hours` with the log; `partitions` are those of a `Status`. Errors as of `list_offsets`.

    An hour begins at the first record that is not before it, by the log's time index. Partitions that the load does
    not know, of topics that it does, count as well. Of a topic that was created again since, nothing is loaded.
    """
    lines = {(item["topic"], item["partition"]): item for item in partitions}
    there = cluster.partitions(sorted({topic for topic, _ in lines}), missing_ok=True)
    keys = [(topic, number) for topic in sorted(there) for number in there[topic]]
    gone = sorted(lines.keys() - set(keys))
    if not keys:
        return Completeness([], {}, gone)
    ids = {topic: str(cluster.topic_ids.get(topic, "")) for topic in there}
    same = {
        key: item for key, item in lines.items() if not item["topic_id"] or ids.get(key[0]) in ("", item["topic_id"])
    }
    known = {key: (item["from"], item["until"]) for key, item in same.items()}
    holes = {key: item.get("holes", ()) for key, item in same.items()}
    low = list_offsets(cluster, dict.fromkeys(keys, EARLIEST))
    high = list_offsets(cluster, dict.fromkeys(keys, LATEST))
    last = system_ms() // _HOUR_MS
    found = []
    start = _at(cluster, keys, (last - hours + 1) * _HOUR_MS, high)
    for hour in range(last - hours + 1, last + 1):
        end = _at(cluster, keys, (hour + 1) * _HOUR_MS, high) if hour < last else high
        for topic in sorted(there):
            in_log = loaded = 0
            for key in [key for key in keys if key[0] == topic]:
                first, after = max(start[key], low[key]), max(end[key], low[key])
                begin, until = known.get(key, (0, 0))
                in_log += max(0, after - first)
                loaded += max(0, min(after, until) - max(first, begin))
                loaded -= sum(max(0, min(after, end) - max(first, at)) for at, end in holes.get(key, ()))
            if in_log:
                name = datetime.fromtimestamp(hour * 3600, timezone.utc).strftime("%Y-%m-%dT%H")
                found.append(HourOfTopic(topic, name, in_log, loaded))
        start = end
    lag = {key: max(0, high[key] - max(low[key], known.get(key, (0, 0))[1])) for key in keys}
    return Completeness(found, lag, gone)


def _at(cluster: Cluster, keys: Sequence[Key], time: int, high: Mapping[Key, int]) -> dict[Key, int]:
    found = list_offsets(cluster, dict.fromkeys(keys, time))
    return {key: high[key] if found[key] == NO_OFFSET else found[key] for key in keys}
