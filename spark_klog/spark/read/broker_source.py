"""The brokers of a query: its partitions and their offsets, and its progress as the offsets of a group.

The group's offsets, at its coordinator and in ZooKeeper-style directories, follow Spark's commit. A store that is down
neither fails a query nor delays it for long.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from functools import partial

from spark_klog.base.addresses import without_user
from spark_klog.base.clock import doubled
from spark_klog.base.names import TopicPartition, check_topic_name
from spark_klog.base.settings import some_of, some_partitions
from spark_klog.client.cluster import UNKNOWN_TOPIC, Cluster, numbers_of
from spark_klog.client.fetch.sampling import next_timestamps, record_sizes, timestamp_types
from spark_klog.client.offsets import high_watermarks, list_offsets
from spark_klog.client.places import GroupSpec, Offsets, Spec
from spark_klog.errors import ConfigError, ProtocolError
from spark_klog.groups.stores import ClusterStore, TreeStore
from spark_klog.spark.options import PREFIX, GroupOffsetsOptions, SourceOptions
from spark_klog.spark.read.batch_query import QuerySource, select
from spark_klog.spark.read.ranges import LeaderOf, OffsetRange, pack, split

_log = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
#: How long `close` waits for the thread to finish writing.
_CLOSE_SECONDS = 2.0
#: How long a micro-batch waits for its offsets to be written. Only the first one of an outage waits so long, so the
#: time is generous: it includes connecting from a busy machine, and a query that ends earlier loses its last offsets.
_PATIENCE_SECONDS = 15.0


def open_source(options: SourceOptions) -> QuerySource:
    """What the options read: directories, or brokers, to which it connects; errors as of `BrokerSource.connect`."""
    if options.paths:
        from spark_klog.spark.read.directory_source import DirectorySource

        return DirectorySource(options)
    return BrokerSource.connect(options)


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

    @property
    def leader_of(self) -> LeaderOf:
        return self.cluster.last_leader

    def close(self) -> None:
        """Publish the last offsets of the group if that is soon done, and close the connections."""
        if self.progress is not None:
            self.progress.close()
        self.cluster.close()

    def partitions(self, *, missing_ok: bool = False) -> list[TopicPartition]:
        """The subscribed partitions; `ConfigError` if a named one does not exist, unless `missing_ok`."""
        subscription = self._options.subscription
        topics = list(subscription.assign or subscription.topics or ())
        try:
            if subscription.pattern is not None:
                pattern, metadata = re.compile(subscription.pattern), self.cluster.metadata(None)
                topics = [name for name, topic in metadata.items() if not topic["is_internal"] and pattern.search(name)]
                there = numbers_of(metadata, topics, missing_ok=True)
            else:
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
        return select(there, subscription.assign, missing_ok=missing_ok)

    def list_offsets(self, times: Mapping[TopicPartition, int]) -> Offsets:
        return list_offsets(self.cluster, times)

    def timestamp_types(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        return timestamp_types(self.cluster, offsets)

    def timestamps(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int | None]:
        return next_timestamps(self.cluster, offsets)

    def log_ends(self, partitions: Collection[TopicPartition]) -> Offsets:
        return high_watermarks(self.cluster, partitions)

    def tasks(self, ranges: list[OffsetRange]) -> list[tuple[OffsetRange, ...]]:
        """Split and pack ranges into tasks; samples record sizes only if the limits need them."""
        limits = self._options.split
        starts = {span[:2]: span.start for span in ranges} if limits.max_bytes else {}
        sizes = record_sizes(self.cluster, starts) if starts else {}
        return pack(split(ranges, limits, sizes), limits, self.leader_of)

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
            _log.warning(
                "option %s=group: group %s has no committed offset of %s; these start at their first record",
                *(option, spec.group, some_partitions(without)),
            )
        return self.earliest(without) | committed


class Publisher:
    """Writes the newest offsets to a store, which its thread opens and closes.

    After a failure it retries, with pauses that double up to a minute, and writes only the newest of the offsets
    offered meanwhile. It logs one line when an outage starts and one when it ends.
    """

    def __init__(self, name: str, group: str, open_store: Callable[[], TreeStore | ClusterStore]) -> None:
        self._name, self._group = without_user(name), group
        self._open_store = open_store
        self._store: TreeStore | ClusterStore | None = None
        self._changed = threading.Condition()
        self._wanted: Offsets = {}
        self._published: Offsets = {}
        #: Whether the last write failed, or took longer than a caller of `wait` waited.
        self._is_slow = False
        #: In a row, and when the first one was.
        self._failures, self._failed_at = 0, 0.0
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def offer(self, offsets: Offsets) -> None:
        """Write these offsets, instead of those offered before."""
        with self._changed:
            self._wanted = dict(offsets)
            if self._thread is None and self._rest():
                self._is_closing = False
                self._thread = threading.Thread(target=self._run, name="klog-offsets", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, deadline: float) -> None:
        """Wait until all offsets are written, at most until `deadline` (`time.monotonic`); during an outage return."""
        with self._changed:
            left = deadline - time.monotonic()
            if not self._changed.wait_for(lambda: not self._rest() or self._is_slow, max(0.0, left)):
                self._is_slow = True

    def close(self) -> None:
        """Write the last offsets if the store answers within 2 s, and close it; log offsets that are not written."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._is_closing = True
            self._changed.notify_all()
        if thread is None:
            return
        thread.join(_CLOSE_SECONDS)
        with self._changed:
            rest = sorted(self._rest().items())
        if rest:
            names = some_of([f"{topic}-{partition} at {offset}" for (topic, partition), offset in rest])
            _log.warning(
                "the query ended before the offsets of group %s were written to %s: %s; its next run writes them",
                *(self._group, self._name, names),
            )

    def _rest(self) -> Offsets:
        return {key: offset for key, offset in self._wanted.items() if self._published.get(key) != offset}

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._failures:
                    pause = doubled(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, self._failures)
                    self._changed.wait_for(lambda: self._is_closing, pause)
                self._changed.wait_for(lambda: self._is_closing or self._rest())
                rest = self._rest()
                if self._is_closing and (not rest or self._failures):
                    break
            try:
                if self._store is None:
                    self._store = self._open_store()
                self._store.commit(rest)
            except Exception as error:  # no error of a store may fail the query
                self._fail(error)
            else:
                self._succeed(rest)
        if self._store is not None:
            self._store.close()
            self._store = None

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failures += 1
            if self._failures == 1:
                self._failed_at = time.monotonic()
                _log.error(
                    "can't write offsets of group %s to %s, retrying until it succeeds: %s",
                    *(self._group, self._name, error),
                )
            self._is_slow = True
            self._changed.notify_all()

    def _succeed(self, written: Offsets) -> None:
        with self._changed:
            self._published |= written
            if self._failures:
                seconds = time.monotonic() - self._failed_at
                _log.warning(
                    "offsets of group %s are written to %s again after %.0f s", self._group, self._name, seconds
                )
                self._failures = 0
            self._is_slow = False
            self._changed.notify_all()


class GroupProgress:
    """Writes and reads the group's offsets in every store of the options.

    `cluster` returns the query's own connected cluster; `connect` a new one, which the writing thread uses.
    """

    def __init__(
        self, options: GroupOffsetsOptions, cluster: Callable[[], Cluster], connect: Callable[[], Cluster] | None = None
    ) -> None:
        self._options, self._cluster = options, cluster
        group = options.group
        openers: dict[str, Callable[[], TreeStore | ClusterStore]] = {}
        if options.coordinator:
            openers["the coordinator"] = lambda: ClusterStore((connect or cluster)(), group)
        openers |= {tree: partial(TreeStore, tree, group) for tree in options.trees}
        self._publishers = [Publisher(name, group, open_store) for name, open_store in openers.items()]

    def publish(self, offsets: Offsets) -> None:
        """Write the offsets that changed, if the options say so; after an outage the newest ones are written."""
        if not self._options.commits:
            return
        for publisher in self._publishers:
            publisher.offer(offsets)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for publisher in self._publishers:
            publisher.wait(deadline)

    def fetch(self, partitions: Collection[TopicPartition]) -> Offsets:
        """The group's committed offsets, from the first store; omits partitions without one; errors as of the store.

        With dual commit the larger offset of coordinator and ZooKeeper: other members of the group may commit to only
        one of them.
        """
        options, offsets = self._options, {}
        if options.coordinator:
            offsets = ClusterStore(self._cluster(), options.group).fetch(partitions)
        if options.dual or not options.coordinator:
            with closing(TreeStore(options.trees[-1 if options.dual else 0], options.group)) as store:
                in_tree = store.fetch(partitions)
            offsets |= {key: max(offset, offsets.get(key, offset)) for key, offset in in_tree.items()}
        return offsets

    def close(self) -> None:
        """Write the last offsets, if the stores answer soon, and close the stores."""
        for publisher in self._publishers:
            publisher.close()
