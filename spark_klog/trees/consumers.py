"""Consumer groups in a tree, as consumers with zookeeper.connect keep them in ZooKeeper.

    /consumers/G/offsets/T/P    the offset of the next record to read
    /consumers/G/ids/C          {"version":1,"subscription":{"TOPIC":STREAMS},"pattern":"static","timestamp":"MS"}
    /consumers/G/owners/T/P     the id of the thread that reads the partition: MEMBER-NUMBER

Ids and owners are ephemeral. With pattern white_list or black_list the one key of `subscription` is a regular
expression. Source: 0.10 documentation, "Consumer Offsets", "Consumer Id Registry", "Partition Owner registry".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from spark_klog.errors import ConfigError, DecodeError
from spark_klog.trees.paths import (
    consumer_ids_path,
    consumer_offset_path,
    consumer_offsets_path,
    offset_payload,
    parse_offset,
)
from spark_klog.trees.tree import Tree

STATIC, WHITE_LIST, BLACK_LIST = "static", "white_list", "black_list"


class Registration(NamedTuple):
    """What a member reads: streams by topic, or (for a filter) by the one regular expression; `pattern` says which."""

    pattern: str
    subscription: Mapping[str, int]


def consumer_id_path(group: str, consumer: str) -> str:
    if not consumer or "/" in consumer or consumer in (".", ".."):
        raise ConfigError(f"consumer.id {consumer!r} cannot be part of a path: give one without '/', not empty")
    return f"{consumer_ids_path(group)}/{consumer}"


def owner_path(group: str, topic: str, partition: int) -> str:
    """The ephemeral node with the owner of a partition; ConfigError."""
    return consumer_offset_path(group, topic, partition).replace("/offsets/", "/owners/", 1)


def registration_payload(registration: Registration, timestamp_ms: int) -> bytes:
    """A member's node, version 1."""
    fields = {
        "version": 1,
        "subscription": dict(registration.subscription),
        "pattern": registration.pattern,
        "timestamp": str(timestamp_ms),
    }
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


def parse_registration(payload: bytes, path: str = "/consumers/[group]/ids/[consumer]") -> Registration:
    try:
        fields = json.loads(payload)
        pattern, subscription = fields["pattern"], fields["subscription"]
        is_sound = isinstance(subscription, dict) and all(
            type(streams) is int and streams > 0 for streams in subscription.values()
        )
    except (ValueError, RecursionError, KeyError, TypeError):
        is_sound = False
    if not is_sound:
        raise DecodeError(f"{path}: no registration of a consumer: {payload[:200]!r}")
    if pattern not in (WHITE_LIST, BLACK_LIST):
        return Registration(STATIC, subscription)  # as Kafka does
    if len(subscription) != 1:
        raise DecodeError(f"{path}: a filter is one regular expression: {payload[:200]!r}")
    return Registration(pattern, subscription)


class OffsetDirectory:
    """The offsets of `group` in `tree`, which the caller closes.

    Methods raise `ConfigError` (a name or offset that cannot be stored), `DirectoryError` and `DecodeError`.
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
        payloads = zip(keys, nodes, self._tree.get_many(nodes), strict=True)
        return {key: parse_offset(payload, path) for key, path, payload in payloads if payload is not None}

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
