"""Batches between the two sides: fetched, and not yet queued for the target. No I/O."""

from __future__ import annotations

from collections import deque

from spark_klog.client.cluster import TopicPartition
from spark_klog.mirror.batches import OutBatch


class Waiting:
    """Batches by partition, in order. Partitions take turns, so that a Produce request carries batches of many."""

    def __init__(self) -> None:
        self._items: dict[TopicPartition, deque[OutBatch | int]] = {}
        #: Bytes of all batches.
        self.size = 0

    def __bool__(self) -> bool:
        return bool(self._items)

    def add(self, key: TopicPartition, item: OutBatch | int) -> None:
        """Add a batch, or the source's offset before which nothing more is to be copied."""
        self._items.setdefault(key, deque()).append(item)
        self.size += _size(item)

    @property
    def next_size(self) -> int:
        """Bytes of what `take` returns."""
        return next((_size(items[0]) for items in self._items.values()), 0)

    def take(self) -> tuple[TopicPartition, OutBatch | int] | None:
        """The next item of the partition whose turn it is; None if nothing waits."""
        for key, items in self._items.items():
            item = items.popleft()
            self.size -= _size(item)
            del self._items[key]
            if items:
                self._items[key] = items
            return key, item
        return None


def _size(item: OutBatch | int) -> int:
    return 0 if isinstance(item, int) else len(item.data)
