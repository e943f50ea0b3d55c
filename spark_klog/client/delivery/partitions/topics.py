"""Partition counts of a producer's topics, from metadata that are at most metadata.max.age.ms old."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping

from spark_klog.client.any_broker import MetadataRequest
from spark_klog.client.cluster import Cluster, numbers_of
from spark_klog.errors import KlogError
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)
#: The most that a call waits for newer metadata while it can go on with what is known.
_RENEWAL_MS = 2_000
#: Seconds until the next attempt after one that failed.
_PAUSE = 20.0


class PartitionCounts:
    """Numbers of partitions by topic. Not thread-safe."""

    def __init__(self, cluster: Cluster, creates_topics: bool) -> None:
        self._cluster = cluster
        #: Whether brokers with auto.create.topics.enable may create missing topics.
        self.creates_topics = creates_topics
        self._max_age = cluster.config.metadata_max_age_ms / 1000
        #: Of the topics used since `refresh`, and of those that it asked for.
        self._known: dict[str, int] = {}
        self._refreshed: dict[str, int] = {}
        #: A reading of `time.monotonic`.
        self._old_at = math.inf
        self._renewal: MetadataRequest | None = None

    def of(self, topic: str) -> int:
        """The number of partitions of a topic; `ProtocolError` if it is missing and the broker does not create it."""
        if topic not in self._known:
            count = self._refreshed.pop(topic, None)
            if count is None:
                found = self._cluster.attempt(lambda: self._cluster.partitions([topic], create=self.creates_topics))
                count = len(found[topic])
            self._know(topic, count)
        return self._known[topic]

    def knows(self, topic: str) -> bool:
        """Whether `of` needs no broker. Any thread may ask."""
        return topic in self._known or topic in self._refreshed

    def learn(self, topic: str, found: Mapping[str, Message]) -> None:
        """Take over metadata of a topic; `ProtocolError` if they have an error."""
        self._know(topic, len(numbers_of(found, [topic])[topic]))

    def _know(self, topic: str, count: int) -> None:
        self._known[topic] = count
        self._old_at = min(self._old_at, time.monotonic() + self._max_age)

    def with_leader(self, topic: str) -> list[int]:
        """Partitions with a leader in the last metadata; all if none has one."""
        numbers = range(self.of(topic))
        return [number for number in numbers if self._cluster.last_leader(topic, number) is not None] or list(numbers)

    def renew(self, *, wait: bool = True) -> bool:
        """Fetch the numbers if they are old; return whether one has changed. Without errors: the known ones stay.

        Without `wait` the first call only asks, and a later one sees the answer.
        """
        if self._renewal is None and time.monotonic() < self._old_at:
            return False
        self._refreshed.clear()
        if wait:
            self._drop_renewal()
        try:
            with self._cluster.within(_RENEWAL_MS):
                found = self._cluster.metadata(self._known) if wait else self._renewal_step()
        except KlogError as error:
            self._old_at = time.monotonic() + min(self._max_age, _PAUSE)
            _log.warning("a producer's topics may have new partitions that it does not know: %s", error)
            return False
        if found is None:
            return False
        before = dict(self._known)
        self._old_at = time.monotonic() + self._max_age
        for name, topic in found.items():
            if topic["partitions"]:  # else it has an error, which the brokers answer to its records, too
                self._known[name] = len(topic["partitions"])
        return self._known != before

    def _renewal_step(self) -> dict[str, Message] | None:
        request = self._renewal or MetadataRequest(self._cluster, self._known)
        self._renewal = None
        found = request.step()
        if found is None:
            self._renewal = request
        return found

    def _drop_renewal(self) -> None:
        """Forget a request in flight: its answer may be older than one that is asked for now."""
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    def refresh(self) -> bool:
        """As `Producer.refresh`."""
        self._drop_renewal()
        cluster_id = self._cluster.cluster_id
        topics = list(self._known)
        self._known.clear()
        found = self._cluster.partitions(topics, missing_ok=True)
        self._refreshed = {topic: len(numbers) for topic, numbers in found.items()}
        self._old_at = time.monotonic() + self._max_age
        return self._cluster.cluster_id == cluster_id
