"""Topics that the members of a consumer group subscribe to, from their protocol metadata."""

from __future__ import annotations

from spark_klog.broker.groups.group import Group
from spark_klog.errors import DecodeError
from spark_klog.protocol.codec import decode_versioned
from spark_klog.protocol.tables.consumer_protocol import SUBSCRIPTION

CONSUMER = "consumer"


def subscribed_topics(group: Group) -> set[str] | None:
    """The topics of all members; None for another type of group, or if a member's metadata can't be decoded."""
    topics: set[str] = set()
    for member in group.members.values():
        if group.protocol_type != CONSUMER:
            return None
        try:
            topics.update(decode_versioned(SUBSCRIPTION, member.metadata(group.protocol))["topics"])
        except DecodeError:
            return None
    return topics
