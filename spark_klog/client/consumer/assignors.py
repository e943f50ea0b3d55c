"""Assignors: pure functions that assign partitions to the members of a group, by Kafka's names.

Each takes the partition counts of the existing topics and the members by id, and returns the partitions of each member.
Members are ordered as in Kafka's assignors: static ones first, by group.instance.id, then by member id.

    range               a range of consecutive partitions of each topic to each subscribed member
    roundrobin          all partitions, by topic and number, to the subscribed members in turn
    sticky              balanced, moving as few partitions as possible (KIP-54)
    cooperative-sticky  the same; a partition that moves is left out until its owner has revoked it (KIP-429)

Also the subscriptions and assignments that members exchange through the coordinator, as Java's clients encode them.
User data: `sticky` sends its owned partitions and the generation (version 1 of StickyAssignor's format, which
librdkafka sends too); `cooperative-sticky` sends the generation as INT32 (only leaders older than KIP-792 read it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from spark_klog.base.names import TopicPartition
from spark_klog.client.offsets import topic_numbers
from spark_klog.errors import DecodeError
from spark_klog.protocol.codec import decode_versioned, encode_versioned
from spark_klog.protocol.tables.groups import MEMBER_ASSIGNMENT, MEMBER_SUBSCRIPTION, SUBSCRIPTION
from spark_klog.wire.primitives import Buffer, Reader, Writer

_SUBSCRIPTION_VERSION = 3
_ASSIGNMENT_VERSION = 0


@dataclass(frozen=True)
class Member:
    """A member's subscription: its topics, the partitions it owns, and their generation (-1: unknown)."""

    topics: frozenset[str]
    instance_id: str | None = None
    owned: tuple[TopicPartition, ...] = ()
    generation: int = -1


Members = Mapping[str, Member]
Assignments = dict[str, list[TopicPartition]]
Assignor = Callable[[Mapping[str, int], Members], Assignments]


def _in_order(members: Members) -> list[str]:
    return sorted(members, key=lambda name: (members[name].instance_id is None, members[name].instance_id or "", name))


def assign_range(counts: Mapping[str, int], members: Members) -> Assignments:
    """Assign consecutive partitions of each topic; the first members get one more if they can't be divided evenly."""
    result: Assignments = {name: [] for name in members}
    order = _in_order(members)
    for topic in sorted(counts):
        readers = [name for name in order if topic in members[name].topics]
        if not readers:
            continue
        each, more = divmod(counts[topic], len(readers))
        start = 0
        for number, name in enumerate(readers):
            end = start + each + (number < more)
            result[name] += [(topic, partition) for partition in range(start, end)]
            start = end
    return result


def assign_round_robin(counts: Mapping[str, int], members: Members) -> Assignments:
    """Assign one partition after the other to the next subscribed member."""
    result: Assignments = {name: [] for name in members}
    order = _in_order(members)
    at = 0
    for topic in sorted(counts):
        if not any(topic in member.topics for member in members.values()):
            continue
        for partition in range(counts[topic]):
            while topic not in members[order[at % len(order)]].topics:
                at += 1
            result[order[at % len(order)]].append((topic, partition))
            at += 1
    return result


def assign_sticky(counts: Mapping[str, int], members: Members) -> Assignments:
    """Let members keep what they own, unless a move makes the numbers of partitions more even.

    If two members claim a partition, the one with the later generation owns it, or neither if they are equal.
    """
    kept = _owners(counts, members)
    result: Assignments = {name: [] for name in _in_order(members)}
    for key, name in kept.items():
        result[name].append(key)
    readers = {topic: [name for name in result if topic in members[name].topics] for topic in counts}
    free = [
        (topic, partition)
        for topic in sorted(counts, key=lambda topic: (len(readers[topic]), topic))
        for partition in range(counts[topic])
        if (topic, partition) not in kept
    ]
    for key in free:
        if readers[key[0]]:
            result[min(readers[key[0]], key=lambda name: len(result[name]))].append(key)
    while _move_one(result, members):
        pass
    return {name: sorted(keys) for name, keys in result.items()}


def assign_cooperative_sticky(counts: Mapping[str, int], members: Members) -> Assignments:
    """Like `assign_sticky`, without partitions that another member still owns: it revokes them and joins again."""
    owners: dict[TopicPartition, set[str]] = {}
    for name, member in members.items():
        for key in member.owned:
            owners.setdefault(key, set()).add(name)
    return {
        name: [key for key in keys if owners.get(key, {name}) <= {name}]
        for name, keys in assign_sticky(counts, members).items()
    }


def _owners(counts: Mapping[str, int], members: Members) -> dict[TopicPartition, str]:
    """The owner of each existing partition; a member only owns partitions of topics it is subscribed to."""
    owners: dict[TopicPartition, str | None] = {}
    since: dict[TopicPartition, int] = {}
    for name in _in_order(members):
        member = members[name]
        for topic, partition in member.owned:
            key = topic, partition
            if topic not in member.topics or not 0 <= partition < counts.get(topic, 0):
                continue
            if key not in since or member.generation > since[key]:
                owners[key], since[key] = name, member.generation
            elif member.generation == since[key] and owners[key] != name:
                owners[key] = None
    return {key: name for key, name in owners.items() if name is not None}


def _move_one(result: Assignments, members: Members) -> bool:
    """Move one partition to a member that has at least two fewer than its owner; False if there is no such pair."""
    by_load = sorted(result, key=lambda name: len(result[name]))
    for giver in reversed(by_load):
        for taker in by_load:
            if len(result[giver]) < len(result[taker]) + 2:
                break
            for position in range(len(result[giver]) - 1, -1, -1):
                if result[giver][position][0] in members[taker].topics:
                    result[taker].append(result[giver].pop(position))
                    return True
    return False


ASSIGNORS: dict[str, Assignor] = {
    "range": assign_range,
    "roundrobin": assign_round_robin,
    "sticky": assign_sticky,
    "cooperative-sticky": assign_cooperative_sticky,
}


def encode_subscription(
    assignor: str, topics: Iterable[str], owned: Iterable[TopicPartition], generation: int, rack: str, is_eager: bool
) -> bytes:
    """Encode a member's metadata for one assignor; `owned` are its partitions in the last generation."""
    kept = sorted(owned)
    message = {
        "topics": sorted(topics),
        "user_data": _user_data(assignor, kept, generation),
        "owned_partitions": [] if is_eager else topic_numbers(kept, "topic"),
        "generation_id": generation,
        "rack_id": rack or None,
    }
    return encode_versioned(MEMBER_SUBSCRIPTION, _SUBSCRIPTION_VERSION, message)


def _user_data(assignor: str, owned: list[TopicPartition], generation: int) -> bytes | None:
    writer = Writer()
    if assignor == "sticky" and owned:
        rows = topic_numbers(owned, "topic")
        writer.int32(len(rows))
        for row in rows:
            writer.nullable_string(row["topic"])
            writer.int32(len(row["partitions"]))
            for partition in row["partitions"]:
                writer.int32(partition)
    elif assignor != "cooperative-sticky":
        return None
    writer.int32(generation)
    return writer.to_bytes()


def decode_subscription(assignor: str, data: Buffer, instance_id: str | None) -> Member:
    """Decode a member's metadata; `DecodeError` if not even its topics can be read.

    Some clients omit later fields of the version that they name; these fields are then empty.
    """
    try:
        message = decode_versioned(MEMBER_SUBSCRIPTION, data)
    except DecodeError:
        message = decode_versioned(SUBSCRIPTION, data) | {"user_data": None, "owned_partitions": []}
        message["generation_id"] = -1
    owned = [(row["topic"], partition) for row in message["owned_partitions"] for partition in row["partitions"]]
    generation = message["generation_id"]
    user_data = message["user_data"]
    if assignor == "sticky":
        owned, generation = _sticky_user_data(user_data or b"")
    elif assignor == "cooperative-sticky" and generation < 0 and user_data is not None and len(user_data) == 4:
        generation = Reader(user_data).int32()
    return Member(frozenset(message["topics"]), instance_id, tuple(owned), generation)


def _sticky_user_data(data: Buffer) -> tuple[list[TopicPartition], int]:
    """A sticky member's partitions and generation; ([], -1) if the data can't be decoded, as in Java."""
    reader = Reader(data)
    owned: list[TopicPartition] = []
    try:
        for _ in range(reader.int32() if len(data) else 0):
            topic = reader.nullable_string() or ""
            owned += [(topic, reader.int32()) for _ in range(reader.int32())]
        return owned, reader.int32() if reader.remaining else -1
    except DecodeError:
        return [], -1


def encode_assignment(partitions: Iterable[TopicPartition]) -> bytes:
    return encode_versioned(
        MEMBER_ASSIGNMENT, _ASSIGNMENT_VERSION, {"assigned_partitions": topic_numbers(sorted(partitions), "topic")}
    )
