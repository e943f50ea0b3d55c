"""Let a stream continue, for a limited time, while some of its partitions have no leader that answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from spark_klog.client.backoff import pause_seconds
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import list_offsets, offsets_of_led
from spark_klog.errors import KlogError, RequestTimedOut
from spark_klog.spark.offsets import Offsets, TopicPartition

_log = logging.getLogger(__name__)
#: How long to wait for leaders that are moving before a micro-batch leaves their partitions out.
_MOVING_SECONDS = 1.0
_NAMED = 10


class Leaderless:
    """Tracks partitions without a leader that answers: since when, and when to log them next."""

    def __init__(self) -> None:
        self._since: dict[TopicPartition, float] = {}
        self._asked_at = 0.0
        self._log_at = 0.0
        self._pause = 1.0

    def keep(self, partitions: Collection[TopicPartition]) -> None:
        """Forget all other partitions: they no longer exist."""
        for key in self._since.keys() - set(partitions):
            del self._since[key]

    def ask(
        self, cluster: Cluster, partitions: Collection[TopicPartition], timestamp: int, required: set[str]
    ) -> Offsets:
        """The offsets at `timestamp` (EARLIEST or LATEST) of the partitions whose leaders answer.

        Waits for all partitions of `required` topics, and for every partition if no leader answers. Raises
        `RequestTimedOut` for a partition without a leader for longer than `request.timeout.ms`; other errors as of
        `list_offsets`.
        """
        times = dict.fromkeys(partitions, timestamp)
        begin, limit = time.monotonic(), cluster.config.request_timeout_ms / 1000
        found, failed = offsets_of_led(cluster, times)
        moving_until = time.monotonic() + _MOVING_SECONDS
        while failed and not failed.keys() <= self._since.keys() and time.monotonic() < moving_until:
            time.sleep(pause_seconds(cluster.config, 1))
            cluster.metadata(sorted({topic for topic, _ in failed}))
            again, failed = offsets_of_led(cluster, dict.fromkeys(failed, timestamp))
            found |= again
        if failed and (not found or any(topic in required for topic, _ in failed)):
            found |= list_offsets(cluster, dict.fromkeys(failed, timestamp))
            failed = {}
        is_overdue = any(begin - self._since.get(key, begin) > limit for key in failed)
        if is_overdue and begin - self._asked_at > limit / 2:
            # The last call was long ago: this may be a new, short outage.
            try:
                found |= list_offsets(cluster, dict.fromkeys(failed, timestamp))
                failed = {}
            except KlogError as error:
                failed = dict.fromkeys(failed, error)
        self._asked_at = time.monotonic()
        self._note(found, failed, limit)
        return found

    def _note(self, found: Offsets, failed: dict[TopicPartition, KlogError], limit: float) -> None:
        now = time.monotonic()
        back = found.keys() & self._since.keys()
        for key in back:
            del self._since[key]
        if back and not self._since:
            _log.warning("all partitions have leaders that answer again")
        if not failed:
            return
        if not self._since:
            self._log_at, self._pause = now, 1.0
        for key in failed:
            self._since.setdefault(key, now)
        key = min(self._since, key=lambda one: self._since[one])
        waited = now - self._since[key]
        names = ", ".join(f"{topic}-{partition}" for topic, partition in sorted(self._since)[:_NAMED])
        more = f" and {len(self._since) - _NAMED} more" if len(self._since) > _NAMED else ""
        if waited > limit:
            raise RequestTimedOut(
                f"no leader of {names}{more} has answered for {waited:.0f} s (kafka.request.timeout.ms is "
                f"{limit:g} s): {failed.get(key, 'its last error is unknown')}"
            )
        if now >= self._log_at:
            _log.warning(
                "no leader of %s%s has answered for %.0f s; the query continues with the other partitions: %s",
                *(names, more, waited, failed.get(key, next(iter(failed.values())))),
            )
            self._log_at = now + self._pause
            self._pause *= 2
