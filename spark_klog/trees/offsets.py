"""Offsets of a consumer group in the directories: /consumers/GROUP/offsets/TOPIC/PARTITION."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from spark_klog.errors import DecodeError
from spark_klog.trees.paths import (
    consumer_ids_path,
    consumer_offset_path,
    consumer_offsets_path,
    offset_payload,
    parse_offset,
)
from spark_klog.trees.tree import Tree


class OffsetDirectory:
    """The offsets of `group` in `tree`, which the caller closes.

    Methods raise `ConfigError` (a name or offset that cannot be stored), `DirectoryError` and `DecodeError`.
    Source: 0.10 documentation, "Consumer Offsets".
    """

    def __init__(self, tree: Tree, group: str) -> None:
        self._tree = tree
        self._group = group

    def commit(self, offsets: Mapping[tuple[str, int], int]) -> None:
        """Store (topic, partition) -> offset of the next record to read; atomic for each offset, not for all."""
        # check all before the first is written
        nodes = {
            consumer_offset_path(self._group, topic, partition): offset_payload(offset)
            for (topic, partition), offset in sorted(offsets.items())
        }
        self._tree.put_many(nodes)

    def fetch(self, partitions: Iterable[tuple[str, int]] | None = None) -> dict[tuple[str, int], int]:
        """The stored offsets of the given partitions (None: of all); partitions without one are left out."""
        keys = list(self._stored() if partitions is None else partitions)
        nodes = [consumer_offset_path(self._group, topic, partition) for topic, partition in keys]
        found = zip(keys, nodes, self._tree.get_many(nodes), strict=True)
        return {key: parse_offset(payload, path) for key, path, payload in found if payload is not None}

    def _stored(self) -> Iterator[tuple[str, int]]:
        top = consumer_offsets_path(self._group)
        for topic in self._tree.children(top):
            for name in self._tree.children(f"{top}/{topic}"):
                if not (name.isascii() and name.isdecimal()) or int(name[:11]) >= 1 << 31:
                    raise DecodeError(f"{top}/{topic}/{name}: {name!r} is not a partition number")
                yield topic, int(name)

    def consumers(self) -> list[str]:
        """The ids of the group's running consumers that registered here, as consumers before Kafka 0.9 do."""
        return self._tree.children(consumer_ids_path(self._group))
