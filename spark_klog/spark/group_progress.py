"""Publish a query's progress as the offsets of a group: at its coordinator and in ZooKeeper-style directories.

The offsets follow Spark's commit. A store that is down neither fails a query nor delays it for long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import closing
from functools import partial

from spark_klog.base.addresses import without_user
from spark_klog.base.names import TopicPartition
from spark_klog.client.cluster import Cluster
from spark_klog.client.places import Offsets
from spark_klog.groups.stores import ClusterStore, TreeStore
from spark_klog.spark.options import GroupOffsetsOptions

_log = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
#: How long `close` waits for the thread to finish writing.
_CLOSE_SECONDS = 2.0
_NAMED = 10
#: How long a micro-batch waits for its offsets to be written. Only the first one of an outage waits so long, so the
#: time is generous: it includes connecting from a busy machine, and a query that ends earlier loses its last offsets.
_PATIENCE_SECONDS = 15.0


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
        self._pause = _FIRST_PAUSE_SECONDS
        self._failed_at: float | None = None
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
            names = ", ".join(f"{topic}-{partition} at {offset}" for (topic, partition), offset in rest[:_NAMED])
            more = f" and {len(rest) - _NAMED} more" if len(rest) > _NAMED else ""
            _log.warning(
                "the query ended before the offsets of group %s were written to %s: %s%s; its next run writes them",
                *(self._group, self._name, names, more),
            )

    def _rest(self) -> Offsets:
        return {key: offset for key, offset in self._wanted.items() if self._published.get(key) != offset}

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._failed_at is not None:
                    self._changed.wait_for(lambda: self._is_closing, self._pause)
                self._changed.wait_for(lambda: self._is_closing or self._rest())
                rest = self._rest()
                if self._is_closing and (not rest or self._failed_at is not None):
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
            if self._failed_at is None:
                self._failed_at, self._pause = time.monotonic(), _FIRST_PAUSE_SECONDS
                _log.error(
                    "can't write offsets of group %s to %s, retrying until it succeeds: %s",
                    *(self._group, self._name, error),
                )
            else:
                self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
            self._is_slow = True
            self._changed.notify_all()

    def _succeed(self, written: Offsets) -> None:
        with self._changed:
            self._published |= written
            if self._failed_at is not None:
                seconds = time.monotonic() - self._failed_at
                _log.warning(
                    "offsets of group %s are written to %s again after %.0f s", self._group, self._name, seconds
                )
                self._failed_at = None
            self._is_slow = False
            self._changed.notify_all()


class GroupProgress:
    """Writes and reads the group's offsets in every store of the options.

    `cluster` returns the query's own connected cluster; `connect` a new one, which the writing thread uses.
    """

    def __init__(
        self, options: GroupOffsetsOptions, cluster: Callable[[], Cluster], connect: Callable[[], Cluster] | None = None
    ) -> None:
        self._options = options
        self._cluster = cluster
        self._connect = connect or cluster
        self._publishers: dict[str, Publisher] = {}

    def _names(self) -> list[str]:
        return [*(["the coordinator"] if self._options.coordinator else []), *self._options.trees]

    def _open(self, name: str) -> TreeStore | ClusterStore:
        group = self._options.group
        return TreeStore(name, group) if name in self._options.trees else ClusterStore(self._connect(), group)

    def publish(self, offsets: Offsets) -> None:
        """Write the offsets that changed, if the options say so; after an outage the newest ones are written."""
        if not self._options.commits:
            return
        for name in self._names():
            if name not in self._publishers:
                self._publishers[name] = Publisher(name, self._options.group, partial(self._open, name))
            self._publishers[name].offer(offsets)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for publisher in self._publishers.values():
            publisher.wait(deadline)

    def fetch(self, partitions: Collection[TopicPartition]) -> Offsets:
        """The group's committed offsets, from the first store; omits partitions without one; errors as of the store.

        With dual commit the larger offset of coordinator and ZooKeeper: other members of the group may commit to only
        one of them.
        """
        names = self._names()
        found = self._fetch(names[0], partitions)
        if self._options.dual:  # then the first store is the coordinator, the last one ZooKeeper
            for key, offset in self._fetch(names[-1], partitions).items():
                found[key] = max(offset, found.get(key, offset))
        return found

    def _fetch(self, name: str, partitions: Collection[TopicPartition]) -> Offsets:
        if name not in self._options.trees:
            return ClusterStore(self._cluster(), self._options.group).fetch(partitions)
        with closing(TreeStore(name, self._options.group)) as store:
            return store.fetch(partitions)

    def close(self) -> None:
        """Write the last offsets, if the stores answer soon, and close the stores."""
        for publisher in self._publishers.values():
            publisher.close()
        self._publishers.clear()
