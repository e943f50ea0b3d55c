"""The topics that one member of a group subscribes to."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection

from spark_klog.client.answers import answer_error
from spark_klog.client.cluster import UNKNOWN_TOPIC, Cluster
from spark_klog.client.consumer.settings import ConsumerConfig
from spark_klog.errors import ErrorCode
from spark_klog.protocol.apis import METADATA

_log = logging.getLogger(__name__)
#: Seconds until the next lookup if subscribed topics do not exist, or if no broker answered.
_MISSING_SECONDS = 1.0


class SubscribedTopics:
    """The subscription of one group member: topics, a pattern, or both. It is false if there is neither.

    A pattern is compiled, and resolved here, or the text of a regular expression, which the coordinator resolves.

    `look` raises what `Cluster.metadata` raises, and `ProtocolError` for a topic that the member may not read.
    """

    def __init__(self, cluster: Cluster, config: ConsumerConfig) -> None:
        self._cluster, self._config = cluster, config
        self._topics: frozenset[str] = frozenset()
        self._pattern: re.Pattern[str] | None = None
        #: The regular expression that the coordinator resolves; "" if there is none.
        self.regex = ""
        #: When `look` does its next lookup, a reading of `time.monotonic`.
        self.look_at = -math.inf
        #: Partition counts of the topics in the last lookup; 0: the topic does not exist.
        self._counts: dict[str, int] = {}
        #: The partition counts that this member assigned as the group's leader; None if it is not the leader.
        self.assigned_for: dict[str, int] | None = None
        #: The missing topics of the last warning.
        self._missing: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._topics) or self._pattern is not None or bool(self.regex)

    @property
    def names(self) -> frozenset[str]:
        """The names that the member subscribes to at the coordinator."""
        return self._topics if self._pattern is None else frozenset(self._counts)

    def subscribe(self, topics: Collection[str], pattern: re.Pattern[str] | str | None) -> None:
        """Replace the subscription; the next `look` looks the topics up."""
        self._topics = frozenset(topics)
        self._pattern, self.regex = (None, pattern) if isinstance(pattern, str) else (pattern, "")
        self._counts = {}
        self.look_at = -math.inf
        self._missing = []

    def look(self, now: float) -> bool:
        """Look the topics up if it is time; return whether the member must join again.

        The leader joins again if a topic has new partitions, a member with a pattern if other topics match.
        """
        if now < self.look_at:
            return False
        if not self._topics and self._pattern is None:
            self.look_at = math.inf
            return False
        age = self._config.client.metadata_max_age_ms / 1000
        self.look_at = now + min(age, _MISSING_SECONDS)  # unless all is found
        must_rejoin = False
        counts = self.count(None if self._pattern is not None else self._topics)
        if self._pattern is not None:
            matching = {topic for topic, count in counts.items() if count and self._pattern.fullmatch(topic)}
            counts = {topic: counts.get(topic, 0) for topic in matching | self._topics}
            must_rejoin = _existing(counts) != _existing(self._counts)
        self._counts = counts
        has_no_match = not self._topics and not counts and self._pattern is not None
        if not has_no_match and 0 not in counts.values():
            self.look_at = now + age
        self._warn_of_missing()
        if self.assigned_for is not None:
            shared = self.assigned_for.keys() & counts.keys()
            must_rejoin |= any(self.assigned_for[topic] != counts[topic] for topic in shared)
        return must_rejoin

    def _warn_of_missing(self) -> None:
        """Log the subscribed topics that do not exist, unless they are those of the last warning."""
        existing = _existing(self._counts)
        missing = sorted(self._topics - existing)
        if self._pattern is not None and not existing - self._topics:
            missing.append(f"any that match {self._pattern.pattern!r}")
        if missing and missing != self._missing:
            group = self._config.group_id
            _log.warning("group %s: no records from topics that do not exist: %s", group, ", ".join(missing))
        self._missing = missing

    def count(self, topics: Collection[str] | None) -> dict[str, int]:
        """Partition counts by topic, 0 for a missing one. None: all topics, by default without internal ones."""
        counts = {}
        create = topics is not None and self._config.allow_auto_create_topics
        for name, topic in self._cluster.metadata(topics, create=create).items():
            code = topic["error_code"]
            if code and code not in (*UNKNOWN_TOPIC, ErrorCode.LEADER_NOT_AVAILABLE):
                raise answer_error(METADATA, code, f"topic {name}")
            if topics is not None or not (topic["is_internal"] and self._config.exclude_internal_topics):
                counts[name] = len(topic["partitions"])
        return counts


def _existing(counts: dict[str, int]) -> set[str]:
    return {topic for topic, count in counts.items() if count}
