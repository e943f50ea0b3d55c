"""Lag of groups as metrics for Prometheus.

| metric | kind | labels | what |
| --- | --- | --- | --- |
| klog_group_lag_records | gauge | group, topic, partition, store | records after the group's offset |
| klog_group_lag_lost_records | gauge | group, topic, partition, store | those of them that are deleted: never read |
| klog_group_lag_seconds | gauge | group, topic, partition, store | age of the first of them; 0 if there is none |
| klog_group_offset | gauge | group, topic, partition, store | the group's offset |
| klog_group_members | gauge | group | members of the group |
| klog_topic_latest_offset | gauge | topic, partition | the log end offset of partitions of these groups |
| klog_group_lag_refreshed_timestamp_seconds | gauge | | when the figures were read |
| klog_group_lag_refresh_seconds | gauge | | how long that took |
| klog_group_lag_refresh_failures_total | counter | | refreshes that failed; the last figures stay |
| klog_group_lag_left_out | gauge | what | groups beyond 1,000, series beyond 10,000: not shown |

`store` is kafka (the coordinator), zookeeper or files. If the first unread record is deleted, its age counts on; if it
was never seen, since the first look.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from spark_klog.base.clock import system_ms
from spark_klog.client import Admin
from spark_klog.client.cluster import TopicPartition
from spark_klog.groups.lag import PartitionLag, partition_lags
from spark_klog.groups.stores import CoordinatorStore, OffsetStore
from spark_klog.metrics.exposition import COUNTER, GAUGE, Family, Labels, lines

_MAX_GROUPS, _MAX_SERIES = 1000, 10_000
_LAG = ("group", "topic", "partition", "store")
Samples = list[tuple[Labels, float]]
#: A group's offset in a partition, and the time (ms) of the first unread record, by labels.
_Unread = dict[Labels, tuple[int, float]]
#: Opens the stores of a group besides its coordinator.
OtherStores = Callable[[str], Sequence[OffsetStore]]


class LagMetrics:
    """The lag of the given groups, or of all groups of the cluster if there are none. `page` is thread-safe."""

    def __init__(self, admin: Admin, groups: Sequence[str], others: OtherStores = lambda _: ()) -> None:
        self._admin, self._groups, self._others = admin, list(groups), others
        self._lock = threading.Lock()
        self._families: list[Family] = []
        self._failures = 0
        self._unread: _Unread = {}

    def refresh(self) -> None:
        """Read the lag; raises what `Admin` and the stores raise, and then keeps the last figures."""
        began = time.monotonic()
        try:
            families = self._read()
        except Exception:
            with self._lock:
                self._failures += 1
            raise
        took = time.monotonic() - began
        families.append(_gauge("klog_group_lag_refreshed_timestamp_seconds", "Time of the figures", time.time()))
        families.append(_gauge("klog_group_lag_refresh_seconds", "Duration of the last refresh", took))
        with self._lock:
            self._families = families

    def _read(self) -> list[Family]:
        names = self._groups or [found.group for found in self._admin.list_groups()]
        shown, groups_left_out = names[:_MAX_GROUPS], max(0, len(names) - _MAX_GROUPS)
        described = self._admin.describe_groups(shown).check() if shown else {}
        # One look-up of all groups' partitions: a partition that many groups read is asked about once.
        stored: dict[tuple[str, str], Mapping[TopicPartition, int]] = {}
        for group in shown:
            for store in (CoordinatorStore(self._admin, group), *self._others(group)):
                stored[group, store.kind] = store.fetch()
        keys = {f"{number}": key for number, key in enumerate(stored)}
        found = partition_lags(self._admin.cluster, {number: stored[key] for number, key in keys.items()})
        self._unread = _unread(found, keys, self._unread)
        members: Samples = [((group,), len(one.members)) for group, one in sorted(described.items())]
        return [
            *_lag_families(found, keys, self._unread),
            Family("klog_group_members", GAUGE, "Members of the group", ("group",), members),
            _left_out(groups_left_out, sum(len(offsets) for offsets in stored.values())),
        ]

    def page(self) -> Iterator[str]:
        """The page's lines."""
        with self._lock:
            families, failures = self._families, self._failures
        text = "Refreshes that failed"
        for family in (*families, Family("klog_group_lag_refresh_failures_total", COUNTER, text, (), [((), failures)])):
            yield from lines(family._replace(samples=islice(family.samples, _MAX_SERIES)))


def _labels(partition: PartitionLag, key: tuple[str, str]) -> Labels:
    group, store = key
    return (group, partition.topic, str(partition.partition), store)


def _unread(found: Sequence[PartitionLag], keys: Mapping[str, tuple[str, str]], before: _Unread) -> _Unread:
    """The time of the first unread record of each partition with lag: as before, if that record is deleted by now."""
    now = system_ms()
    unread: _Unread = {}
    for partition in found:
        for number, lag in partition.stores.items():
            labels = _labels(partition, keys[number])
            if not lag.records or (lag.time_ms is None and not lag.lost):
                continue
            time_ms = now - (lag.time_ms or 0)
            offset, known = before.get(labels, (lag.offset, time_ms))
            unread[labels] = lag.offset, min(known, time_ms) if lag.lost and offset == lag.offset else time_ms
    return unread


def _lag_families(found: Sequence[PartitionLag], keys: Mapping[str, tuple[str, str]], unread: _Unread) -> list[Family]:
    now = system_ms()
    records: Samples = []
    lost: Samples = []
    seconds: Samples = []
    offsets: Samples = []
    latest: Samples = []
    for partition in found:
        place = partition.topic, str(partition.partition)
        if partition.latest is not None:
            latest.append((place, partition.latest))
        for number, lag in partition.stores.items():
            labels = _labels(partition, keys[number])
            offsets.append((labels, lag.offset))
            if lag.records is not None and lag.lost is not None:
                records.append((labels, lag.records))
                lost.append((labels, lag.lost))
            if labels in unread:
                seconds.append((labels, max(0.0, now - unread[labels][1]) / 1000))
            elif lag.time_ms is not None:
                seconds.append((labels, lag.time_ms / 1000))
    return [
        Family("klog_group_lag_records", GAUGE, "Records after the group's offset", _LAG, records),
        Family("klog_group_lag_lost_records", GAUGE, "Unread records that are deleted", _LAG, lost),
        Family("klog_group_lag_seconds", GAUGE, "Age of the oldest unread record", _LAG, seconds),
        Family("klog_group_offset", GAUGE, "The group's offset", _LAG, offsets),
        Family("klog_topic_latest_offset", GAUGE, "Log end offset", ("topic", "partition"), latest),
    ]


def _left_out(groups: int, series: int) -> Family:
    samples: Samples = [(("groups",), groups), (("series",), max(0, series - _MAX_SERIES))]
    return Family("klog_group_lag_left_out", GAUGE, "Groups and series that are not shown", ("what",), samples)


def _gauge(name: str, text: str, value: float) -> Family:
    return Family(name, GAUGE, text, (), [((), value)])
