"""A group's offsets in the directories: /consumers/GROUP/offsets/TOPIC/PARTITION."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from spark_klog.directories.paths import consumer_offset_path, offset_payload, parse_offset
from spark_klog.directories.tree import Tree


class OffsetDirectory:
    """The offsets of `group` in `tree`, which stays the caller's to close.

    Methods raise ConfigError (a name or offset that cannot be stored), DirectoryError and DecodeError.
    Source: 0.10 documentation, "Consumer Offsets".
    """

    def __init__(self, tree: Tree, group: str) -> None:
        self._tree = tree
        self._group = group

    def commit(self, offsets: Mapping[tuple[str, int], int]) -> None:
        """Store (topic, partition) -> offset of the next record to read; atomic for each, not for all."""
        # All are checked before the first is written.
        nodes = [
            (consumer_offset_path(self._group, topic, partition), offset_payload(offset))
            for (topic, partition), offset in sorted(offsets.items())
        ]
        for path, payload in nodes:
            self._tree.put(path, payload)

    def fetch(self, partitions: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """The stored offsets; partitions without one are left out."""
        found = {}
        for topic, partition in partitions:
            path = consumer_offset_path(self._group, topic, partition)
            payload = self._tree.get(path)
            if payload is not None:
                found[topic, partition] = parse_offset(payload, path)
        return found
