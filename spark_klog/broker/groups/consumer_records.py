"""Records of consumer groups (KIP-848) in __consumer_offsets. Byte layout: `protocol.tables.groups`.

A group is several records, so that a member's step writes little. A null value removes a record's entry. The group's
topics are written as Kafka 4.0 does: 4.1 and later versions write a hash of them alone, so that a group from their logs
begins a new epoch once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from spark_klog.broker.groups.membership import (
    NO_PARTITIONS,
    ClassicProtocols,
    ConsumerMember,
    Membership,
    MemberState,
    Subscription,
    partitions_of,
    topic_partitions,
)
from spark_klog.errors import DecodeError
from spark_klog.protocol.codec import Message, decode_versioned, encode_versioned
from spark_klog.protocol.schema import Versioned
from spark_klog.protocol.tables.groups import (
    CONSUMER_GROUP_CURRENT_KEY,
    CONSUMER_GROUP_CURRENT_VALUE,
    CONSUMER_GROUP_MEMBER_KEY,
    CONSUMER_GROUP_MEMBER_VALUE,
    CONSUMER_GROUP_METADATA_KEY,
    CONSUMER_GROUP_METADATA_VALUE,
    CONSUMER_GROUP_TARGET_KEY,
    CONSUMER_GROUP_TARGET_MEMBER_KEY,
    CONSUMER_GROUP_TARGET_MEMBER_VALUE,
    CONSUMER_GROUP_TARGET_VALUE,
    CONSUMER_GROUP_TOPICS_KEY,
    CONSUMER_GROUP_TOPICS_VALUE,
)

_VALUES = {
    CONSUMER_GROUP_METADATA_KEY: CONSUMER_GROUP_METADATA_VALUE,
    CONSUMER_GROUP_MEMBER_KEY: CONSUMER_GROUP_MEMBER_VALUE,
    CONSUMER_GROUP_TARGET_KEY: CONSUMER_GROUP_TARGET_VALUE,
    CONSUMER_GROUP_TARGET_MEMBER_KEY: CONSUMER_GROUP_TARGET_MEMBER_VALUE,
    CONSUMER_GROUP_CURRENT_KEY: CONSUMER_GROUP_CURRENT_VALUE,
    CONSUMER_GROUP_TOPICS_KEY: CONSUMER_GROUP_TOPICS_VALUE,
}
_KEYS = {key.versions.first: key for key in _VALUES}
#: The only version of the values.
_VERSION = 0
#: A member whose subscription is not read yet: compaction may put it after the member's partitions.
_UNREAD = Subscription(None, None, "", "", frozenset(), None, -1, None)
Row = tuple[bytes, bytes | None]


class ConsumerGroupKey(NamedTuple):
    """Key of a record of a consumer group; `member` is "" if it is of the group as a whole."""

    kind: Versioned
    group: str
    member: str = ""


def decode_consumer_key(kind: int, data: bytes) -> ConsumerGroupKey | None:
    """Decode a key whose version is `kind`; None if it is none of a consumer group. Raises `DecodeError`."""
    table = _KEYS.get(kind)
    return None if table is None else ConsumerGroupKey(table, **decode_versioned(table, data))


def _row(kind: Versioned, group: str, member: str, value: Message | None) -> Row:
    key = {"group": group, "member": member} if member else {"group": group}
    encoded = None if value is None else encode_versioned(_VALUES[kind], _VERSION, value)
    return encode_versioned(kind, kind.versions.first, key), encoded


def encode_changes(group: str, before: Membership, after: Membership) -> list[Row]:
    """Encode what has changed."""
    rows = list(_removals(group, before, after))
    for member_id, member in after.members.items():
        old = before.members.get(member_id)
        if old is not member and (old is None or old.subscription != member.subscription):
            rows.append(_row(CONSUMER_GROUP_MEMBER_KEY, group, member_id, _subscription(member.subscription)))
    if before.topics != after.topics:
        rows.append(_row(CONSUMER_GROUP_TOPICS_KEY, group, "", _topics(after)))
    if before.epoch != after.epoch:
        rows.append(_row(CONSUMER_GROUP_METADATA_KEY, group, "", {"epoch": after.epoch}))
    for member_id, target in after.targets.items():
        old_target = before.targets.get(member_id)
        if old_target is not target and old_target != target:
            value = {"topic_partitions": topic_partitions(target)}
            rows.append(_row(CONSUMER_GROUP_TARGET_MEMBER_KEY, group, member_id, value))
    if before.assignment_epoch != after.assignment_epoch:
        rows.append(_row(CONSUMER_GROUP_TARGET_KEY, group, "", {"assignment_epoch": after.assignment_epoch}))
    for member_id, member in after.members.items():
        old = before.members.get(member_id)
        if old is not member and (old is None or _current(old) != _current(member)):
            rows.append(_row(CONSUMER_GROUP_CURRENT_KEY, group, member_id, _encoded_current(member)))
    return rows


def _removals(group: str, before: Membership, after: Membership) -> Iterator[Row]:
    for member_id in before.members.keys() - after.members.keys():
        yield _row(CONSUMER_GROUP_CURRENT_KEY, group, member_id, None)
        yield _row(CONSUMER_GROUP_TARGET_MEMBER_KEY, group, member_id, None)
        yield _row(CONSUMER_GROUP_MEMBER_KEY, group, member_id, None)


def encode_removal(group: str, membership: Membership) -> list[Row]:
    """Encode the removal of a group with all its members."""
    return [
        *_removals(group, membership, Membership()),
        *([_row(CONSUMER_GROUP_TOPICS_KEY, group, "", None)] if membership.topics else ()),
        _row(CONSUMER_GROUP_TARGET_KEY, group, "", None),
        _row(CONSUMER_GROUP_METADATA_KEY, group, "", None),
    ]


def _current(member: ConsumerMember) -> tuple[object, ...]:
    return member.epoch, member.previous_epoch, member.state, member.assigned, member.revoking


def _encoded_current(member: ConsumerMember) -> Message:
    return {
        "member_epoch": member.epoch,
        "previous_member_epoch": member.previous_epoch,
        "state": member.state,
        "assigned_partitions": topic_partitions(member.assigned),
        "partitions_pending_revocation": topic_partitions(member.revoking),
    }


def _topics(membership: Membership) -> Message | None:
    rows = [
        {"topic_id": topic_id, "topic_name": name, "num_partitions": count, "partition_metadata": []}
        for name, (topic_id, count) in membership.topics.items()
    ]
    return {"topics": rows} if rows else None


def _subscription(subscription: Subscription) -> Message:
    classic = subscription.classic
    return {
        "instance_id": subscription.instance_id,
        "rack_id": subscription.rack_id,
        "client_id": subscription.client_id,
        "client_host": subscription.client_host,
        "subscribed_topic_names": sorted(subscription.topics),
        "subscribed_topic_regex": subscription.regex,
        "rebalance_timeout_ms": subscription.rebalance_timeout_ms,
        "server_assignor": subscription.assignor,
        "classic_member_metadata": None
        if classic is None
        else {
            "session_timeout_ms": classic.session_timeout_ms,
            "supported_protocols": [{"name": name, "metadata": metadata} for name, metadata in classic.protocols],
        },
    }


def load_record(membership: Membership, key: ConsumerGroupKey, data: bytes | None) -> None:
    """Take a record of the group over, in the order of the log; later ones replace earlier ones. `DecodeError`."""
    value = None if data is None else decode_versioned(_VALUES[key.kind], data)
    member = membership.members.get(key.member) or ConsumerMember(key.member, _UNREAD)
    if key.kind is CONSUMER_GROUP_METADATA_KEY:
        membership.epoch = 0 if value is None else value["epoch"]
    elif key.kind is CONSUMER_GROUP_TOPICS_KEY:
        rows = [] if value is None else value["topics"]
        membership.topics = {row["topic_name"]: (row["topic_id"], row["num_partitions"]) for row in rows}
    elif key.kind is CONSUMER_GROUP_TARGET_KEY:
        membership.assignment_epoch = 0 if value is None else value["assignment_epoch"]
    elif key.kind is CONSUMER_GROUP_TARGET_MEMBER_KEY:
        if value is None:
            membership.targets.pop(key.member, None)
        else:
            membership.targets[key.member] = partitions_of(value["topic_partitions"])
    elif key.kind is CONSUMER_GROUP_MEMBER_KEY:
        if value is not None:
            membership.put(replace(member, subscription=_decoded_subscription(value)))
        elif key.member in membership.members:
            membership.remove(key.member)
    elif value is not None:
        membership.put(_decoded_current(member, value))
    elif key.member in membership.members:
        membership.put(ConsumerMember(key.member, member.subscription))


def _decoded_subscription(value: Message) -> Subscription:
    classic = value["classic_member_metadata"]
    return Subscription(
        instance_id=value["instance_id"],
        rack_id=value["rack_id"],
        client_id=value["client_id"],
        client_host=value["client_host"],
        topics=frozenset(value["subscribed_topic_names"]),
        regex=value["subscribed_topic_regex"],
        rebalance_timeout_ms=value["rebalance_timeout_ms"],
        assignor=value["server_assignor"],
        classic=None
        if classic is None
        else ClassicProtocols(
            classic["session_timeout_ms"],
            tuple((entry["name"], bytes(entry["metadata"])) for entry in classic["supported_protocols"]),
        ),
    )


def _decoded_current(member: ConsumerMember, value: Message) -> ConsumerMember:
    if value["state"] not in MemberState._value2member_map_:
        raise DecodeError(f"member {member.member_id}: unknown state {value['state']}")
    return replace(
        member,
        epoch=value["member_epoch"],
        previous_epoch=value["previous_member_epoch"],
        state=MemberState(value["state"]),
        assigned=partitions_of(value["assigned_partitions"]),
        revoking=partitions_of(value["partitions_pending_revocation"]) or NO_PARTITIONS,
    )
