"""What members of a consumer group subscribe to, as they say it in the metadata of their protocols.

INT16 version, ARRAY of STRING topics, ... (what follows is not needed here)
"""

from __future__ import annotations

from spark_klog.broker.coordinator.group import Group
from spark_klog.errors import DecodeError
from spark_klog.wire.primitives import Reader

CONSUMER = "consumer"


def subscribed_topics(group: Group) -> set[str] | None:
    """The topics of all members; None where that can't be told: another type of group, or metadata that is none."""
    topics: set[str] = set()
    for member in group.members.values():
        if group.protocol_type != CONSUMER:
            return None
        reader = Reader(member.metadata(group.protocol))
        try:
            reader.int16()
            topics |= {reader.nullable_string() or "" for _ in range(max(0, reader.count(False)))}
        except DecodeError:
            return None
    return topics
