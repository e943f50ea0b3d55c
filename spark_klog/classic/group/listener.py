"""Callbacks of users for rebalances of a group in ZooKeeper."""

from __future__ import annotations

from collections.abc import Mapping


class ConsumerRebalanceListener:
    """A listener that a connector calls in the thread that rebalances. Keep it short; errors are logged."""

    def before_releasing_partitions(self, partitions: Mapping[str, list[int]]) -> None:
        """Called before these partitions, by topic, are committed and released. Not for those that were lost."""

    def before_starting_fetchers(self, consumer_id: str, assignment: Mapping[str, Mapping[int, str]]) -> None:
        """Called before reading begins, with all that this member owns: the stream's id by topic and partition."""
