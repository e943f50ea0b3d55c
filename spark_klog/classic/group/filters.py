"""Filters of topics: regular expressions for all topics that a stream reads, or leaves out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping

from spark_klog.base.names import topic_pattern
from spark_klog.trees.consumers import BLACK_LIST, STATIC, WHITE_LIST, Registration


class ConsumerRebalanceListener:
    """A listener that a connector calls in the thread that rebalances. Keep it short; errors are logged."""

    def before_releasing_partitions(self, partitions: Mapping[str, list[int]]) -> None:
        """Called before these partitions, by topic, are committed and released. Not for those that were lost."""

    def before_starting_fetchers(self, consumer_id: str, assignment: Mapping[str, Mapping[int, str]]) -> None:
        """Called before reading begins, with all that this member owns: the stream's id by topic and partition."""


_QUOTES = "\"'"
_INTERNAL = frozenset(["__consumer_offsets", "__transaction_state"])


class TopicFilter(ABC):
    """A regular expression that a topic's whole name matches; a comma means "or", spaces and outer quotes are dropped.

    `ConfigError` as of `topic_pattern`.
    """

    pattern: str

    def __init__(self, regex: str) -> None:
        self.regex = regex.strip().replace(",", "|").replace(" ", "").strip(_QUOTES)
        self._compiled = topic_pattern(f"{type(self).__name__}: {regex!r}", self.regex)

    @abstractmethod
    def allows(self, topic: str, exclude_internal_topics: bool = True) -> bool:
        """Whether streams of this filter read the topic."""

    def _matches(self, topic: str) -> bool:
        return self._compiled.fullmatch(topic) is not None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.regex!r})"


class Whitelist(TopicFilter):
    """Topics whose names match."""

    pattern = WHITE_LIST

    def allows(self, topic: str, exclude_internal_topics: bool = True) -> bool:
        return self._matches(topic) and not (exclude_internal_topics and topic in _INTERNAL)


class Blacklist(TopicFilter):
    """Topics whose names do not match."""

    pattern = BLACK_LIST

    def allows(self, topic: str, exclude_internal_topics: bool = True) -> bool:
        return not self._matches(topic) and not (exclude_internal_topics and topic in _INTERNAL)


def streams_by_topic(
    registration: Registration, topics: Collection[str], exclude_internal_topics: bool
) -> dict[str, int]:
    """How many streams a member has for each topic that it reads; `topics` are all that exist."""
    if registration.pattern == STATIC:
        return dict(registration.subscription)
    ((regex, streams),) = registration.subscription.items()
    found = (Whitelist if registration.pattern == WHITE_LIST else Blacklist)(regex)
    return {topic: streams for topic in topics if found.allows(topic, exclude_internal_topics)}
