"""Groups that change their protocol while they have members (KIP-848): from the classic one to the consumer protocol,
when the first member of that comes, and back when its last one goes. Members of the classic protocol stay members.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from spark_klog.broker.groups.consumer_group import ConsumerGroup
from spark_klog.broker.groups.group import CONSUMER, Group
from spark_klog.broker.groups.membership import (
    ClassicProtocols,
    ConsumerMember,
    Membership,
    Partitions,
    Subscription,
    encode_assignment,
)
from spark_klog.broker.metadata.registry import Topic
from spark_klog.errors import DecodeError
from spark_klog.protocol.codec import Message, decode_versioned
from spark_klog.protocol.tables.groups import MEMBER_SUBSCRIPTION, decode_assignment


def read_subscription(metadata: bytes, topics: Mapping[str, Topic]) -> tuple[frozenset[str], Partitions]:
    """(topics, owned partitions) of a member's metadata in the classic protocol. Raises `DecodeError`."""
    message = decode_versioned(MEMBER_SUBSCRIPTION, metadata)
    owned = {row["topic"]: row["partitions"] for row in message["owned_partitions"]}
    return frozenset(message["topics"]), _partitions(owned, topics)


def _partitions(numbers: Mapping[str, list[int]], topics: Mapping[str, Topic]) -> Partitions:
    return frozenset(
        (topics[topic].topic_id, number) for topic, some in numbers.items() if topic in topics for number in some
    )


def membership_of(group: Group, topics: Mapping[str, Topic]) -> Membership | None:
    """A stable group of the classic protocol as one of the consumer protocol; None if its members are no consumers."""
    if group.protocol_type != CONSUMER:
        return None
    membership = Membership(epoch=group.generation, assignment_epoch=group.generation)
    for member in group.members.values():
        join = member.request
        try:
            names, _ = read_subscription(member.metadata(group.protocol), topics)
            assigned = _partitions(decode_assignment(member.assignment), topics)
        except DecodeError:
            return None
        assigned -= membership.holders.keys()  # a wrong assignor may have given a partition to two
        subscription = Subscription(
            *(join.instance_id, None, join.client_id, join.client_host, names, None),
            *(join.rebalance_timeout_ms, None, ClassicProtocols(join.session_timeout_ms, join.protocols)),
        )
        epoch = group.generation
        membership.put(ConsumerMember(member.member_id, subscription, epoch, epoch, assigned=assigned))
        membership.targets[member.member_id] = assigned
    return membership


def classic_message(group: ConsumerGroup, names: Mapping[UUID, str], now_ms: int) -> Message:
    """The fields of the record of a consumer group, all of whose members are of the classic protocol, as a classic one.

    Its generation is the members' epoch, so that they do not take themselves for lost. `names` are the topics' by id.
    """
    members, protocol = group.membership.members, group.classic_protocol
    stored = []
    for member in members.values():
        subscription = member.subscription
        assert subscription.classic is not None
        stored.append(
            {
                "member_id": member.member_id,
                "group_instance_id": subscription.instance_id,
                "client_id": subscription.client_id,
                "client_host": subscription.client_host,
                "rebalance_timeout": subscription.rebalance_timeout_ms,
                "session_timeout": subscription.classic.session_timeout_ms,
                "subscription": dict(subscription.classic.protocols)[protocol or ""],
                "assignment": encode_assignment(member.assigned, names),
            }
        )
    return {
        "protocol_type": CONSUMER,
        "generation": max(member.epoch for member in members.values()),
        "protocol": protocol,
        "leader": next(iter(members)),
        "current_state_timestamp": now_ms,
        "members": stored,
    }


def protocols_of(membership: Membership) -> dict[str, tuple[tuple[str, bytes], ...]]:
    """All protocols that each member of the classic protocol supports, of which the group's record has one."""
    classic = {member_id: member.subscription.classic for member_id, member in membership.members.items()}
    return {member_id: each.protocols for member_id, each in classic.items() if each is not None}
