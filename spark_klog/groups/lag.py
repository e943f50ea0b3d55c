"""The lag of groups in records and in time, for each store that keeps their offsets, also as metrics for Prometheus.

| metric | kind | labels | what |
| --- | --- | --- | --- |
| klog_group_lag_records | gauge | group, topic, partition, store | records after the group's offset |
| klog_group_lag_lost_records | gauge | group, topic, partition, store | those of them that are deleted: never read |
| klog_group_lag_seconds | gauge | group, topic, partition, store | age of the first of them; 0 if there is none |
| klog_group_offset | gauge | group, topic, partition, store | the group's offset |
| klog_group_members | gauge | group | members of the group |
| klog_topic_latest_offset | gauge | topic, partition | the log end offset of partitions of these groups |
| klog_group_topic_lag_records | gauge | group, topic, store | the sum of a topic's partitions; never left out |
| klog_group_topic_lag_seconds | gauge | group, topic, store | the largest age of its partitions; never left out |
| klog_group_lag_stale_partitions | gauge | group | partitions without an answer: they keep their last figures, if any |
| klog_group_lag_unanswered | gauge | what | brokers, groups and partitions without an answer at the last look |
| klog_group_lag_refreshed_timestamp_seconds | gauge | | when the figures were read |
| klog_group_lag_refresh_seconds | gauge | | how long that took |
| klog_group_lag_refresh_failures_total | counter | | refreshes that failed; the last figures stay |
| klog_group_lag_left_out | gauge | what | groups beyond 1,000, series beyond 10,000: not shown |

A broker that does not answer within 5 s makes figures stale, not lower: its partitions keep their last ones, and so do
groups that it coordinates. Their ages count on.

`store` is kafka (the coordinator), zookeeper or files. If the first unread record is deleted, its age counts on; if it
was never seen, since the first look.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Generic, TypeVar

from spark_klog.base.clock import system_ms
from spark_klog.base.names import TopicPartition
from spark_klog.client import Admin
from spark_klog.client.admin.groups import DEAD, GroupDescription
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.sampling import next_timestamps
from spark_klog.groups.look import Look, reason_of
from spark_klog.groups.stores import CoordinatorStore, OffsetStore, existing
from spark_klog.metrics import COUNTER, GAUGE, Family, Labels, lines
from spark_klog.metrics.otel import export

_log = logging.getLogger(__name__)
_MAX_GROUPS, _MAX_SERIES = 1000, 10_000
_LABELS = ("group", "topic", "partition", "store")
_OF_TOPIC = ("group", "topic", "store")
_Store = TypeVar("_Store", bound=Hashable)


@dataclass(frozen=True)
class Lag:
    """A committed offset, the number of records after it, and ms since the next record was written.

    `lost` is the number of these records that are deleted already, by retention or DeleteRecords: the group has not
    read them and never will. All but the offset are None if the partition does not exist, or its leader does not
    answer; `time_ms` also if the record has no timestamp, can't be read, or if all unread records are deleted.
    """

    offset: int
    records: int | None
    lost: int | None
    time_ms: int | None


@dataclass(frozen=True)
class PartitionLag(Generic[_Store]):
    """A partition's latest offset (None if the cluster does not have the partition), and the lag for each store.

    `error` says why a partition that the cluster has has no figures: it has no leader, or none that answers.
    """

    topic: str
    partition: int
    latest: int | None
    stores: dict[_Store, Lag]
    error: str | None = None


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
    cluster: Cluster,
    group: GroupDescription,
    offsets: Mapping[str, Mapping[TopicPartition, int]],
    name: str,
    look: Look | None = None,
) -> list[dict[str, Any]]:
    """The partitions that a group has an offset of or a member reads; their lags, by store, are the field `name`.

    `look`, errors: see `partition_lags`.
    """
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
            "error": partition_lag.error,
            "member": owners.get((partition_lag.topic, partition_lag.partition)),
            name: {
                store: {"offset": lag.offset, "lag": lag.records, "lost": lag.lost, "lagMs": lag.time_ms}
                for store, lag in partition_lag.stores.items()
            },
        }
        for partition_lag in partition_lags(cluster, offsets, owners, look)
    ]


def partition_lags(
    cluster: Cluster,
    offsets: Mapping[_Store, Mapping[TopicPartition, int]],
    also: Collection[TopicPartition] = (),
    look: Look | None = None,
) -> list[PartitionLag[_Store]]:
    """The lag of all partitions that have an offset in a store (`offsets` is by store) or are in `also`.

    Those without an answer are noted in `look`. Raises what `Look.ends` and `Cluster.attempt` raise.
    """
    look = Look() if look is None else look
    partitions = sorted({key for stored in offsets.values() for key in stored}.union(also))
    earliest, latest = look.ends(cluster, existing(cluster, partitions, is_led=False))
    lags = {name: _lags(cluster, stored, earliest, latest) for name, stored in offsets.items()}
    return [
        PartitionLag(
            *key,
            latest.get(key),
            {name: own[key] for name, own in lags.items() if key in own},
            reason_of(look.partitions[key]) if key in look.partitions else None,
        )
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

    A given group that does not exist, and has no offset in another store, is logged, and has no series. So are
    partitions and groups without an answer, which keep their last figures.
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
        self._is_partial = False
        #: A group's offset in a partition, and the time (ms) of the first unread record, by labels.
        self._unread: dict[Labels, tuple[int, float]] = {}
        #: The figures of the last look, those that it has kept among them.
        self._lags: dict[Labels, Lag] = {}
        self._latest: dict[Labels, int] = {}
        self._members: dict[str, int] = {}

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
        look = Look()
        names = self._groups or self._listed(look)
        shown, groups_left_out = names[:_MAX_GROUPS], max(0, len(names) - _MAX_GROUPS)
        described = look.describe_groups(self._admin, shown).check() if shown else {}
        stored = self._stored(look, [group for group in shown if group in described])
        missing = {group for group, known in described.items() if known.state == DEAD}
        missing -= {group for (group, _), offsets in stored.items() if offsets}
        self._log_missing(missing)
        # One look-up of all groups' partitions: a partition that many groups read is asked about once.
        partitions = partition_lags(self._admin.cluster, stored, look=look)
        self._log_partial(look)
        stale = self._take(look, shown, partitions)
        ages = self._ages(stale)
        members = {group: len(known.members) for group, known in described.items() if group not in missing}
        self._members = {group: self._members[group] for group in look.groups if group in self._members} | members
        lags = list(self._lags.items())
        records = [(labels, lag.records) for labels, lag in lags if lag.records is not None]
        lost = [(labels, lag.lost) for labels, lag in lags if lag.lost is not None]
        offsets = [(labels, lag.offset) for labels, lag in lags]
        left_out = [(("groups",), groups_left_out), (("series",), max(0, len(lags) - _MAX_SERIES))]
        unanswered = {"brokers": len(look.brokers), "groups": len(look.groups), "partitions": len(look.partitions)}
        stale_of = Counter(group for group, *_ in stale)
        return [
            Family("klog_group_lag_records", GAUGE, "Records after the group's offset", _LABELS, records),
            Family("klog_group_lag_lost_records", GAUGE, "Unread records that are deleted", _LABELS, lost),
            Family("klog_group_lag_seconds", GAUGE, "Age of the oldest unread record", _LABELS, ages),
            Family("klog_group_topic_lag_records", GAUGE, "Sum of the partitions' lag", _OF_TOPIC, _by(sum, records)),
            Family("klog_group_topic_lag_seconds", GAUGE, "Largest age of the partitions", _OF_TOPIC, _by(max, ages)),
            Family("klog_group_offset", GAUGE, "The group's offset", _LABELS, offsets),
            Family(
                "klog_topic_latest_offset", GAUGE, "Log end offset", ("topic", "partition"), list(self._latest.items())
            ),
            Family("klog_group_members", GAUGE, "Members of the group", ("group",), _by_name(self._members)),
            Family(
                "klog_group_lag_stale_partitions",
                GAUGE,
                "Partitions without an answer",
                ("group",),
                _by_name({group: stale_of[group] for group in {*self._members, *stale_of}}),
            ),
            Family(
                "klog_group_lag_unanswered",
                GAUGE,
                "What had no answer",
                ("what",),
                _by_name(unanswered),
            ),
            Family("klog_group_lag_left_out", GAUGE, "Groups and series that are not shown", ("what",), left_out),
        ]

    def _listed(self, look: Look) -> list[str]:
        """All groups; those of the last look, too, if a broker does not say which it has."""
        names = {listed.group for listed in look.list_groups(self._admin)}
        return sorted(names | self._members.keys() if look.brokers else names)

    def _stored(self, look: Look, groups: Sequence[str]) -> dict[tuple[str, str], Mapping[TopicPartition, int]]:
        """The offsets of groups by group and kind of store."""
        stored: dict[tuple[str, str], Mapping[TopicPartition, int]] = {}
        for group in groups:
            committed = look.list_group_offsets(self._admin, group)
            if committed is None:
                continue
            stored[group, CoordinatorStore.kind] = {key: entry.offset for key, entry in committed.items()}
            for store in self._others(group):
                stored[group, store.kind] = store.fetch()
        return stored

    def _take(
        self, look: Look, groups: Sequence[str], partitions: Sequence[PartitionLag[tuple[str, str]]]
    ) -> set[Labels]:
        """Take the figures of a look, and keep those before of what has none; returns the labels without an answer."""
        before, latest_before = self._lags, self._latest
        silent = look.groups.keys() & set(groups)
        self._lags = {labels: lag for labels, lag in before.items() if labels[0] in silent}
        stale = set(self._lags)
        self._latest = {}
        for part in partitions:
            place = part.topic, str(part.partition)
            latest = latest_before.get(place) if part.error is not None else part.latest
            if latest is not None:
                self._latest[place] = latest
            for (group, kind), lag in part.stores.items():
                labels: Labels = (group, *place, kind)
                if part.error is not None:
                    stale.add(labels)
                    lag = replace(before.get(labels, lag), offset=lag.offset)
                self._lags[labels] = lag
        for labels in stale:  # the partitions of groups without an answer
            if labels[1:3] not in self._latest and labels[1:3] in latest_before:
                self._latest[labels[1:3]] = latest_before[labels[1:3]]
        return stale

    def _log_missing(self, missing: set[str]) -> None:
        """Log which given groups do not exist when they change: of all groups, these were deleted meanwhile."""
        before, self._missing = self._missing, missing & set(self._groups)
        if gone := self._missing - before:
            _log.warning("no such group, its lag is not known until it exists: %s", ", ".join(sorted(gone)))
        if new := before - self._missing:
            _log.warning("the group exists now: %s", ", ".join(sorted(new)))

    def _log_partial(self, look: Look) -> None:
        """Log what is missing when something is for the first time, and when nothing is any more."""
        missing = look.missing
        was_partial, self._is_partial = self._is_partial, bool(missing)
        if self._is_partial and not was_partial:
            _log.warning("the last figures are served of what does not answer: %s", "; ".join(missing))
        if was_partial and not self._is_partial:
            _log.warning("all groups and partitions are read again")

    def _ages(self, stale: Set[Labels]) -> list[tuple[Labels, float]]:
        """Seconds since the first unread record was written.

        That of a deleted record, and of one in a partition without an answer, counts on from the look before.
        """
        now = system_ms()
        ages: list[tuple[Labels, float]] = []
        before, self._unread = self._unread, {}
        for labels, lag in self._lags.items():
            if lag.records and (lag.time_ms is not None or lag.lost):
                written: float = now - (lag.time_ms or 0)
                offset, known = before.get(labels, (lag.offset, written))
                if (lag.lost or labels in stale) and offset == lag.offset:
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
        """The page's lines: of each figure by partition so many series, and all others."""
        for family in self.families():
            most = _MAX_SERIES if "partition" in family.labels else None
            yield from lines(family._replace(samples=islice(family.samples, most)))


def _gauge(name: str, text: str, value: float) -> Family:
    return Family(name, GAUGE, text, (), [((), value)])


def _by_name(values: Mapping[str, float]) -> list[tuple[Labels, float]]:
    return [((name,), value) for name, value in sorted(values.items())]


def _by(
    combined: Callable[[list[float]], float], samples: Sequence[tuple[Labels, float]]
) -> list[tuple[Labels, float]]:
    """The values of a topic's partitions, in one."""
    topics: dict[Labels, list[float]] = {}
    for (group, topic, _, store), value in samples:
        topics.setdefault((group, topic, store), []).append(value)
    return [(labels, combined(values)) for labels, values in topics.items()]
