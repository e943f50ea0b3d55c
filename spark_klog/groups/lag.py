"""The lag of groups in records and in time, for each store that keeps their offsets, also as metrics for Prometheus.

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

import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from spark_klog.base.clock import system_ms
from spark_klog.base.names import TopicPartition
from spark_klog.client import Admin
from spark_klog.client.admin.groups import DEAD, GroupDescription
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.sampling import next_timestamps
from spark_klog.client.offsets import first_and_end
from spark_klog.groups.stores import CoordinatorStore, OffsetStore, existing
from spark_klog.metrics import COUNTER, GAUGE, Family, Labels, lines
from spark_klog.metrics.otel import export

_log = logging.getLogger(__name__)
_MAX_GROUPS, _MAX_SERIES = 1000, 10_000
_LABELS = ("group", "topic", "partition", "store")
_Store = TypeVar("_Store", bound=Hashable)


@dataclass(frozen=True)
class Lag:
    """A committed offset, the number of records after it, and ms since the next record was written.

    `lost` is the number of these records that are deleted already, by retention or DeleteRecords: the group has not
    read them and never will. All but the offset are None if the cluster does not have the partition; `time_ms` also if
    the record has no timestamp, can't be read, or if all unread records are deleted.
    """

    offset: int
    records: int | None
    lost: int | None
    time_ms: int | None


@dataclass(frozen=True)
class PartitionLag(Generic[_Store]):
    """A partition's latest offset (None if the cluster does not have the partition), and the lag for each store."""

    topic: str
    partition: int
    latest: int | None
    stores: dict[_Store, Lag]


def group_json(group: GroupDescription) -> dict[str, Any]:
    """A group and its members as `klog groups describe --json` prints them."""
    return {
        "group": group.group,
        "state": group.state,
        "type": group.group_type,
        "protocolType": group.protocol_type,
        "protocol": group.protocol,
        "coordinator": group.coordinator,
        "members": [
            {
                "member": member.member_id,
                "instance": member.instance_id,
                "client": member.client_id,
                "host": member.host,
                "assignment": member.assignment,
            }
            for member in group.members
        ],
    }


def lags_json(
    cluster: Cluster, group: GroupDescription, offsets: Mapping[str, Mapping[TopicPartition, int]], name: str
) -> list[dict[str, Any]]:
    """The partitions that a group has an offset of or a member reads; their lags, by store, are the field `name`."""
    owners = {
        (topic, partition): member.member_id
        for member in group.members
        for topic, partitions in (member.assignment or {}).items()
        for partition in partitions
    }
    return [
        {
            "topic": partition_lag.topic,
            "partition": partition_lag.partition,
            "latest": partition_lag.latest,
            "member": owners.get((partition_lag.topic, partition_lag.partition)),
            name: {
                store: {"offset": lag.offset, "lag": lag.records, "lost": lag.lost, "lagMs": lag.time_ms}
                for store, lag in partition_lag.stores.items()
            },
        }
        for partition_lag in partition_lags(cluster, offsets, owners)
    ]


def partition_lags(
    cluster: Cluster, offsets: Mapping[_Store, Mapping[TopicPartition, int]], also: Collection[TopicPartition] = ()
) -> list[PartitionLag[_Store]]:
    """The lag of all partitions that have an offset in a store (`offsets` is by store) or are in `also`.

    Raises what `Cluster.attempt` raises.
    """
    partitions = sorted({key for stored in offsets.values() for key in stored}.union(also))
    there = existing(cluster, partitions)
    earliest, latest = first_and_end(cluster, there)
    lags = {name: _lags(cluster, stored, earliest, latest) for name, stored in offsets.items()}
    return [
        PartitionLag(*key, latest.get(key), {name: own[key] for name, own in lags.items() if key in own})
        for key in partitions
    ]


def _lags(
    cluster: Cluster,
    stored: Mapping[TopicPartition, int],
    earliest: Mapping[TopicPartition, int],
    latest: Mapping[TopicPartition, int],
) -> dict[TopicPartition, Lag]:
    # a consumer whose offset is before the first record continues at the first record
    behind = {key: max(offset, earliest[key]) for key, offset in stored.items() if offset < latest.get(key, -1)}
    written = next_timestamps(cluster, behind)
    now = system_ms()
    lags = {}
    for key, offset in stored.items():
        if key not in latest:
            lags[key] = Lag(offset, None, None, None)
        elif key not in behind:
            lags[key] = Lag(offset, 0, 0, 0)
        else:
            lost = max(0, earliest[key] - offset)
            timestamp = written.get(key, None if lost else now)
            age = None if timestamp is None else max(0, now - timestamp)
            lags[key] = Lag(offset, latest[key] - offset, lost, age)
    return lags


class LagMetrics:
    """The lag of the given groups, or of all groups of the cluster if there are none. `page` is thread-safe.

    A given group that does not exist, and has no offset in another store, is logged, and has no series.
    `others` returns the open stores of a group besides its coordinator.
    """

    def __init__(
        self, admin: Admin, groups: Sequence[str], others: Callable[[str], Sequence[OffsetStore]] = lambda _: ()
    ) -> None:
        self._admin, self._groups, self._others = admin, list(groups), others
        self._lock = threading.Lock()
        self._families: list[Family] = []
        self._failures = 0
        self._missing: set[str] = set()
        #: A group's offset in a partition, and the time (ms) of the first unread record, by labels.
        self._unread: dict[Labels, tuple[int, float]] = {}

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
        export(self.families)

    def _read(self) -> list[Family]:
        names = self._groups or [listed.group for listed in self._admin.list_groups()]
        shown, groups_left_out = names[:_MAX_GROUPS], max(0, len(names) - _MAX_GROUPS)
        described = self._admin.describe_groups(shown).check() if shown else {}
        # One look-up of all groups' partitions: a partition that many groups read is asked about once.
        stored: dict[tuple[str, str], Mapping[TopicPartition, int]] = {}
        for group in shown:
            for store in (CoordinatorStore(self._admin, group), *self._others(group)):
                stored[group, store.kind] = store.fetch()
        missing = {group for group, known in described.items() if known.state == DEAD}
        missing -= {group for (group, _), offsets in stored.items() if offsets}
        self._log_missing(missing)
        partitions = partition_lags(self._admin.cluster, stored)
        lags = [
            ((group, part.topic, str(part.partition), kind), lag)
            for part in partitions
            for (group, kind), lag in part.stores.items()
        ]
        latest = [((part.topic, str(part.partition)), part.latest) for part in partitions if part.latest is not None]
        records = [(labels, lag.records) for labels, lag in lags if lag.records is not None]
        lost = [(labels, lag.lost) for labels, lag in lags if lag.lost is not None]
        members = [((group,), len(known.members)) for group, known in sorted(described.items()) if group not in missing]
        series_left_out = max(0, sum(len(offsets) for offsets in stored.values()) - _MAX_SERIES)
        left_out = [(("groups",), groups_left_out), (("series",), series_left_out)]
        offsets = [(labels, lag.offset) for labels, lag in lags]
        return [
            Family("klog_group_lag_records", GAUGE, "Records after the group's offset", _LABELS, records),
            Family("klog_group_lag_lost_records", GAUGE, "Unread records that are deleted", _LABELS, lost),
            Family("klog_group_lag_seconds", GAUGE, "Age of the oldest unread record", _LABELS, self._ages(lags)),
            Family("klog_group_offset", GAUGE, "The group's offset", _LABELS, offsets),
            Family("klog_topic_latest_offset", GAUGE, "Log end offset", ("topic", "partition"), latest),
            Family("klog_group_members", GAUGE, "Members of the group", ("group",), members),
            Family("klog_group_lag_left_out", GAUGE, "Groups and series that are not shown", ("what",), left_out),
        ]

    def _log_missing(self, missing: set[str]) -> None:
        """Log which given groups do not exist when they change: of all groups, these were deleted meanwhile."""
        before, self._missing = self._missing, missing & set(self._groups)
        if gone := self._missing - before:
            _log.warning("no such group, its lag is not known until it exists: %s", ", ".join(sorted(gone)))
        if new := before - self._missing:
            _log.warning("the group exists now: %s", ", ".join(sorted(new)))

    def _ages(self, lags: Sequence[tuple[Labels, Lag]]) -> list[tuple[Labels, float]]:
        """Seconds since the first unread record was written: of a deleted record, counted on from the look before."""
        now = system_ms()
        ages: list[tuple[Labels, float]] = []
        before, self._unread = self._unread, {}
        for labels, lag in lags:
            if lag.records and (lag.time_ms is not None or lag.lost):
                written: float = now - (lag.time_ms or 0)
                offset, known = before.get(labels, (lag.offset, written))
                if lag.lost and offset == lag.offset:
                    written = min(known, written)
                self._unread[labels] = lag.offset, written
                ages.append((labels, max(0.0, now - written) / 1000))
            elif lag.time_ms is not None:
                ages.append((labels, lag.time_ms / 1000))
        return ages

    def families(self) -> list[Family]:
        with self._lock:
            families, failures = self._families, self._failures
        text = "Refreshes that failed"
        return [*families, Family("klog_group_lag_refresh_failures_total", COUNTER, text, (), [((), failures)])]

    def page(self) -> Iterator[str]:
        """The page's lines."""
        for family in self.families():
            yield from lines(family._replace(samples=islice(family.samples, _MAX_SERIES)))


def _gauge(name: str, text: str, value: float) -> Family:
    return Family(name, GAUGE, text, (), [((), value)])
