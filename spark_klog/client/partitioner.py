"""Partitions of records without a key: one until a batch is full, then the next (KIP-480, KIP-794).

The first one is drawn at random, so that many small producers spread evenly, too; then they take turns. Partitions
without a leader are passed over while others have one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence


class StickyPartitioner:
    """Chooses per topic. `available(topic)` gives the partitions to choose from, never none of them."""

    def __init__(self, available: Callable[[str], Sequence[int]], batch_bytes: int) -> None:
        self._available = available
        self._batch_bytes = batch_bytes
        self._current: dict[str, int] = {}
        self._filled: dict[str, int] = {}

    def current(self, topic: str) -> int:
        """The partition of the next record."""
        if topic not in self._filled:
            return self.next(topic)
        return self._current[topic]

    def filled(self, topic: str, size: int) -> None:
        """Count bytes that went to the current partition; a batch of them ends its turn."""
        self._filled[topic] = self._filled.get(topic, 0) + size
        if self._filled[topic] >= self._batch_bytes:
            self.next(topic)

    def end_turns(self) -> None:
        """Choose anew for each topic's next record: the partitions may have changed."""
        self._filled.clear()

    def next(self, topic: str) -> int:
        """The partition whose turn is next, which becomes the current one."""
        available = self._available(topic)
        before = self._current.get(topic)
        if before is None:
            chosen = random.choice(available)
        else:
            chosen = min((number for number in available if number > before), default=min(available))
        self._current[topic] = chosen
        self._filled[topic] = 0
        return chosen
