"""Members of groups in ZooKeeper, as consumers with zookeeper.connect register there.

    /consumers/G/ids/C          {"version":1,"subscription":{"TOPIC":STREAMS},"pattern":"static","timestamp":"MS"}
    /consumers/G/owners/T/P     the id of the thread that reads the partition: MEMBER-NUMBER

Both are ephemeral. With pattern white_list or black_list the one key of `subscription` is a regular expression.
Source: 0.10 documentation, "Consumer Id Registry" and "Partition Owner registry".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from spark_klog.errors import ConfigError, DecodeError
from spark_klog.trees.paths import consumer_ids_path, consumer_offset_path

STATIC, WHITE_LIST, BLACK_LIST = "static", "white_list", "black_list"


class Registration(NamedTuple):
    """What a member reads: streams by topic, or (for a filter) by the one regular expression; `pattern` says which."""

    pattern: str
    subscription: Mapping[str, int]


def consumer_id_path(group: str, consumer: str) -> str:
    """The ephemeral node of a member; ConfigError."""
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
    """A member's registration; DecodeError."""
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
