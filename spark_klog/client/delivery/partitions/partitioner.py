"""Choose partitions for records without a key: one until a batch is full, then the next (KIP-480, KIP-794).

The first partition is random, so that many small producers spread evenly; then the partitions take turns. Partitions
without a leader are skipped while others have one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence


class StickyPartitioner:
    """Choose a partition per topic. `available(topic)` returns the partitions to choose from, at least one."""

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
        """Count bytes added to the current partition; a full batch ends its turn."""
        self._filled[topic] = self._filled.get(topic, 0) + size
        if self._filled[topic] >= self._batch_bytes:
            self.next(topic)

    def end_turns(self) -> None:
        """Choose again at each topic's next record: the partitions may have changed."""
        self._filled.clear()

    def next(self, topic: str) -> int:
        """Go to the next partition in turn and return it."""
        available = self._available(topic)
        before = self._current.get(topic)
        if before is None:
            chosen = random.choice(available)
        else:
            chosen = min((number for number in available if number > before), default=min(available))
        self._current[topic] = chosen
        self._filled[topic] = 0
        return chosen
