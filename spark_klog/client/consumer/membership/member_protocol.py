"""Subscriptions and assignments that group members exchange through the coordinator, as Java's clients encode them.

User data: `sticky` sends its owned partitions and the generation (version 1 of StickyAssignor's format, which
librdkafka sends too); `cooperative-sticky` sends the generation as INT32 (only leaders older than KIP-792 read it).
"""

from __future__ import annotations

from collections.abc import Iterable

from spark_klog.client.cluster import TopicPartition
from spark_klog.client.consumer.assignors import Member
from spark_klog.errors import DecodeError
from spark_klog.protocol.codec import Message, decode_versioned, encode_versioned
from spark_klog.protocol.tables.consumer_protocol import MEMBER_ASSIGNMENT, MEMBER_SUBSCRIPTION, SUBSCRIPTION
from spark_klog.wire.primitives import Buffer, Reader, Writer

_SUBSCRIPTION_VERSION = 3
_ASSIGNMENT_VERSION = 0


def _by_topic(partitions: Iterable[TopicPartition]) -> list[Message]:
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(partitions):
        topics.setdefault(topic, []).append(partition)
    return [{"topic": topic, "partitions": numbers} for topic, numbers in topics.items()]


def encode_subscription(
    assignor: str, topics: Iterable[str], owned: Iterable[TopicPartition], generation: int, rack: str, is_eager: bool
) -> bytes:
    """Encode a member's metadata for one assignor; `owned` are its partitions in the last generation."""
    kept = sorted(owned)
    message = {
        "topics": sorted(topics),
        "user_data": _user_data(assignor, kept, generation),
        "owned_partitions": [] if is_eager else _by_topic(kept),
        "generation_id": generation,
        "rack_id": rack or None,
    }
    return encode_versioned(MEMBER_SUBSCRIPTION, _SUBSCRIPTION_VERSION, message)


def _user_data(assignor: str, owned: list[TopicPartition], generation: int) -> bytes | None:
    writer = Writer()
    if assignor == "sticky" and owned:
        rows = _by_topic(owned)
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
    """Encode one member's assignment."""
    return encode_versioned(MEMBER_ASSIGNMENT, _ASSIGNMENT_VERSION, {"assigned_partitions": _by_topic(partitions)})
