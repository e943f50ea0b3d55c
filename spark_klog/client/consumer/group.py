"""A consumer's membership in its group (classic protocol): JoinGroup, SyncGroup and rebalances.

    out       find the coordinator, revoke partitions if the protocol is eager, send JoinGroup
    joining   the coordinator waits for all members; then the leader assigns and all send SyncGroup
    syncing   receive the assignment and apply it
    stable    send heartbeats, until a response says that the group rebalances

With an eager protocol a member revokes all partitions before it joins again. With the cooperative one (KIP-429) it
keeps them, then revokes those it is no longer assigned, and if there were any joins again.

Subscriptions and assignments that group members exchange through the coordinator, as Java's clients encode them.

User data: `sticky` sends its owned partitions and the generation (version 1 of StickyAssignor's format, which
librdkafka sends too); `cooperative-sticky` sends the generation as INT32 (only leaders older than KIP-792 read it).
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from spark_klog.client.answers import answer_error
from spark_klog.client.cluster import UNKNOWN_TOPIC, Cluster, TopicPartition
from spark_klog.client.consumer.assignors import ASSIGNORS, Member
from spark_klog.client.consumer.heartbeat import Heartbeats, Membership, leave
from spark_klog.client.consumer.settings import ConsumerConfig
from spark_klog.client.consumer.troubles import Troubles
from spark_klog.client.coordinator import find_coordinator
from spark_klog.client.net.connection import Connection, Handle
from spark_klog.client.retry import pause_seconds
from spark_klog.errors import (
    ConnectionFailed,
    DecodeError,
    ErrorCode,
    KlogError,
    MemberFenced,
    ProtocolError,
    RequestTimedOut,
    is_retriable,
)
from spark_klog.protocol.apis import JOIN_GROUP, METADATA, SYNC_GROUP
from spark_klog.protocol.codec import Message, decode_versioned, encode_versioned
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.groups import MEMBER_ASSIGNMENT, MEMBER_SUBSCRIPTION, SUBSCRIPTION, decode_assignment
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


_log = logging.getLogger(__name__)
#: Seconds until the next lookup if subscribed topics do not exist, or if no broker answered.
_MISSING_SECONDS = 1.0


class SubscribedTopics:
    """The subscription of one group member: topics, a pattern, or both. It is false if there is neither.

    `look` raises what `Cluster.metadata` raises, and `ProtocolError` for a topic that the member may not read.
    """

    def __init__(self, cluster: Cluster, config: ConsumerConfig) -> None:
        self._cluster, self._config = cluster, config
        self._topics: frozenset[str] = frozenset()
        self._pattern: re.Pattern[str] | None = None
        #: When `look` does its next lookup, a reading of `time.monotonic`.
        self.look_at = -math.inf
        #: Partition counts of the topics in the last lookup; 0: the topic does not exist.
        self._counts: dict[str, int] = {}
        #: The partition counts that this member assigned as the group's leader; None if it is not the leader.
        self.assigned_for: dict[str, int] | None = None
        #: The missing topics of the last warning.
        self._missing: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._topics) or self._pattern is not None

    @property
    def names(self) -> frozenset[str]:
        """The names that the member subscribes to at the coordinator."""
        return self._topics if self._pattern is None else frozenset(self._counts)

    def subscribe(self, topics: Collection[str], pattern: re.Pattern[str] | None) -> None:
        """Replace the subscription; the next `look` looks the topics up."""
        self._topics, self._pattern = frozenset(topics), pattern
        self._counts = {}
        self.look_at = -math.inf
        self._missing = []

    def look(self, now: float) -> bool:
        """Look the topics up if it is time; return whether the member must join again.

        The leader joins again if a topic has new partitions, a member with a pattern if other topics match.
        """
        if now < self.look_at:
            return False
        age = self._config.client.metadata_max_age_ms / 1000
        self.look_at = now + min(age, _MISSING_SECONDS)  # unless all is found
        must_rejoin = False
        counts = self.count(None if self._pattern is not None else self._topics)
        if self._pattern is not None:
            matching = {topic for topic, count in counts.items() if count and self._pattern.fullmatch(topic)}
            counts = {topic: counts.get(topic, 0) for topic in matching | self._topics}
            must_rejoin = _existing(counts) != _existing(self._counts)
        self._counts = counts
        has_no_match = not self._topics and not counts and self._pattern is not None
        if not has_no_match and 0 not in counts.values():
            self.look_at = now + age
        self._warn_of_missing()
        if self.assigned_for is not None:
            shared = self.assigned_for.keys() & counts.keys()
            must_rejoin |= any(self.assigned_for[topic] != counts[topic] for topic in shared)
        return must_rejoin

    def _warn_of_missing(self) -> None:
        """Log the subscribed topics that do not exist, unless they are those of the last warning."""
        existing = _existing(self._counts)
        missing = sorted(self._topics - existing)
        if self._pattern is not None and not existing - self._topics:
            missing.append(f"any that match {self._pattern.pattern!r}")
        if missing and missing != self._missing:
            group = self._config.group_id
            _log.warning("group %s: no records from topics that do not exist: %s", group, ", ".join(missing))
        self._missing = missing

    def count(self, topics: Collection[str] | None) -> dict[str, int]:
        """Partition counts by topic, 0 for a missing one. None: all topics, by default without internal ones."""
        counts = {}
        create = topics is not None and self._config.allow_auto_create_topics
        for name, topic in self._cluster.metadata(topics, create=create).items():
            code = topic["error_code"]
            if code and code not in (*UNKNOWN_TOPIC, ErrorCode.LEADER_NOT_AVAILABLE):
                raise answer_error(METADATA, code, f"topic {name}")
            if topics is not None or not (topic["is_internal"] and self._config.exclude_internal_topics):
                counts[name] = len(topic["partitions"])
        return counts


def _existing(counts: dict[str, int]) -> set[str]:
    return {topic for topic, count in counts.items() if count}


_CONSUMER = "consumer"
#: Errors after which a member joins again with a new id, or in the next generation.
_NEW_ID = (ErrorCode.UNKNOWN_MEMBER_ID,)
_NEW_GENERATION = (ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.ILLEGAL_GENERATION)


class Owner(Protocol):
    """The interface of the consumer that its membership uses; no method raises what a listener raises."""

    def owned(self) -> list[TopicPartition]:
        """The currently assigned partitions."""

    def assigned(self, partitions: list[TopicPartition], added: list[TopicPartition]) -> None:
        """Take over the assignment `partitions`; `added` are the new ones."""

    def revoked(self, partitions: list[TopicPartition], *, is_lost: bool) -> None:
        """Give up these partitions; `is_lost` if another member may already read them."""


class GroupMember:
    """The membership of one consumer. The consumer calls `step` at each poll; it does not wait for rebalances.

    A JoinGroup waits at the coordinator, and so do later requests on its connection. It therefore uses the record
    connection of `cluster`, which has no other use.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: ConsumerConfig,
        owner: Owner,
        on_news: Callable[[], None],
        troubles: Troubles,
    ) -> None:
        self.cluster = cluster
        self._config = config
        self.group = config.group_id or ""
        self._owner = owner
        self._troubles = troubles
        self._heartbeats = Heartbeats(config, on_news)
        self._topics = SubscribedTopics(cluster, config)
        self._member_id = ""
        self._generation = -1
        self._kept: list[TopicPartition] = []
        self._is_stable = False
        self._wants_rejoin = False
        self._has_prepared = False
        self._connection: Connection | None = None
        self._handle: Handle | None = None
        self._until = math.inf
        self._protocol = ""
        self._attempts = 0
        #: When the failures began that are retried, a reading of `time.monotonic`; infinite if there are none.
        self._failing_since = math.inf
        self._retry_at = 0.0

    @property
    def is_subscribed(self) -> bool:
        return bool(self._topics)

    @property
    def connection(self) -> Connection | None:
        """The connection with a JoinGroup or SyncGroup in flight, if any."""
        return self._connection if self._handle is not None else None

    @property
    def membership(self) -> Membership | None:
        """This member in the current generation, for commits; None outside of a generation."""
        if self._generation < 0:
            return None
        return Membership(self._member_id, self._generation, self._config.group_instance_id)

    def subscribe(self, topics: Collection[str], pattern: re.Pattern[str] | None) -> None:
        """Read these topics, or those whose full names match; joins again with the next step."""
        self._topics.subscribe(topics, pattern)
        self._wants_rejoin = True

    def step(self) -> None:
        """Do what can be done now; raises errors that can't be retried, and others after default.api.timeout.ms."""
        self._heartbeats.polled()
        now = time.monotonic()
        try:
            if self._handle is not None:
                self._receive()
            self._take_news()
            self._wants_rejoin |= self._topics.look(now)
            if (self._wants_rejoin or not self._is_stable) and self._handle is None and now >= self._retry_at:
                self._join()
            if self._is_stable and not self._wants_rejoin:
                self._failing_since = math.inf
        except (ConnectionFailed, RequestTimedOut, ProtocolError) as error:
            if not is_retriable(error):
                raise
            self._try_again(error)

    def rejoin(self) -> None:
        """Join again as after a lost session, when an interrupt has left this object halfway; its requests are lost."""
        self._handle = self._connection = None
        self._retry_at, self._has_prepared = 0.0, False
        self._lose(is_id_known=True)

    def look_at(self) -> float:
        """When to call `step` if nothing arrives, a reading of `time.monotonic`."""
        at = self._until if self._handle is not None else self._topics.look_at
        return at if self._handle is not None or (self._is_stable and not self._wants_rejoin) else self._retry_at

    def _try_again(self, error: KlogError) -> None:
        self._troubles.note(f"group {self.group}", error)
        self._drop_request()
        self._connection = None
        self._attempts += 1
        now = time.monotonic()
        self._retry_at = now + pause_seconds(self._config.client, self._attempts)
        self._failing_since = min(self._failing_since, now)
        if now > self._failing_since + self._config.default_api_timeout_ms / 1000:
            self._failing_since = math.inf
            raise error

    def _drop_request(self) -> None:
        if self._connection is not None and self._handle is not None:
            self._connection.forget(self._handle)
        self._handle = None

    def _take_news(self) -> None:
        code = self._heartbeats.take_news()
        if code is None:
            return
        if code == ErrorCode.REBALANCE_IN_PROGRESS:
            self._wants_rejoin = True
            return
        _log.info("member %s of group %s: %s", self._member_id, self.group, code.name)
        self._lose(is_id_known=code == ErrorCode.ILLEGAL_GENERATION)
        if code == ErrorCode.FENCED_INSTANCE_ID:
            raise MemberFenced(_fenced(self._config))
        if code not in (*_NEW_ID, *_NEW_GENERATION):
            raise answer_error(SYNC_GROUP, code, f"heartbeat of group {self.group}")

    def _lose(self, *, is_id_known: bool = False) -> None:
        """Handle the loss of membership: other members may already read the partitions."""
        self._heartbeats.pause()
        self._generation, self._is_stable = -1, False
        if not is_id_known:
            self._member_id = ""
        owned = self._owner.owned()
        self._kept = []
        if owned:
            self._owner.revoked(owned, is_lost=True)

    def _join(self) -> None:
        if not self._has_prepared:
            self._prepare()
        connection = self._open()
        if connection is None:
            return
        config = self._config
        is_eager = not config.is_cooperative
        request = {
            "group_id": self.group,
            "session_timeout_ms": config.session_timeout_ms,
            "rebalance_timeout_ms": config.max_poll_interval_ms,
            "member_id": self._member_id,
            "group_instance_id": config.group_instance_id,
            "protocol_type": _CONSUMER,
            "protocols": [
                {
                    "name": name,
                    "metadata": encode_subscription(
                        *(name, self._topics.names, self._kept, self._generation, config.client_rack, is_eager)
                    ),
                }
                for name in config.assignors
            ],
        }
        # in version 0 the session timeout is also the rebalance timeout
        longest = max(config.session_timeout_ms, config.max_poll_interval_ms)
        self._send(connection, JOIN_GROUP, request, longest)
        # no heartbeats are needed while a JoinGroup is in flight
        self._heartbeats.pause()
        self._wants_rejoin = self._is_stable = False

    def _prepare(self) -> None:
        """Prepare to join: an eager member revokes all its partitions."""
        self._has_prepared = True
        owned = self._owner.owned()
        if not self._config.is_cooperative:
            self._kept = owned or self._kept
            if owned:
                self._owner.revoked(owned, is_lost=False)
        else:
            self._kept = owned

    def _open(self) -> Connection | None:
        """The connection to the coordinator, or None while it is not open."""
        if self._connection is None or self._connection.closed:
            self._connection = self.cluster.begin_connection(find_coordinator(self.cluster, self.group))
        connection = self._connection
        connection.renew(self.cluster.deadline())
        self._retry_at = time.monotonic() + 0.01
        return connection if connection.open_step() and not connection.is_throttled else None

    def _send(self, connection: Connection, api: Api, request: Message, wait_ms: int) -> None:
        self._handle = connection.send(api, request, wait=False)
        self._until = time.monotonic() + (self._config.client.request_timeout_ms + wait_ms) / 1000

    def _receive(self) -> None:
        connection, handle = self._connection, self._handle
        assert connection is not None
        assert handle is not None
        if not connection.poll(handle):
            if time.monotonic() < self._until:
                return
            connection.close()
            raise RequestTimedOut(f"coordinator {connection.address} did not answer in time")
        self._handle = None
        answer = connection.receive(handle)
        if code := answer["error_code"]:
            self._refused(handle.api, code, answer)
            return
        self._attempts, self._failing_since = 0, math.inf
        if handle.api is JOIN_GROUP:
            self._joined(connection, answer)
        else:
            self._synced(answer)

    def _refused(self, api: Api, code: int, answer: Message) -> None:
        if code == ErrorCode.MEMBER_ID_REQUIRED:
            self._member_id = answer["member_id"]
            self._retry_at = 0.0
        elif code in _NEW_ID:
            self._lose()
            self._retry_at = 0.0
        elif code in _NEW_GENERATION:
            self._wants_rejoin = True
            self._retry_at = time.monotonic() + pause_seconds(self._config.client, 1)
        elif code == ErrorCode.FENCED_INSTANCE_ID:
            self._lose()
            raise MemberFenced(_fenced(self._config))
        else:
            self._retry_at = time.monotonic() + pause_seconds(self._config.client, 1)
            raise answer_error(api, code, f"{api.name} of group {self.group}")

    def _joined(self, connection: Connection, answer: Message) -> None:
        self._member_id, self._generation = answer["member_id"], answer["generation_id"]
        self._protocol = answer["protocol_name"] or ""
        self._topics.assigned_for = None
        assignments: list[Message] = []
        if answer["leader"] == self._member_id:
            members = self._members(answer["members"])
            # a leader that keeps the last assignment (KIP-814) still has to look for new partitions
            wanted = {topic for member in members.values() for topic in member.topics}
            counts = self._topics.count(wanted) if wanted else {}
            self._topics.assigned_for = counts
            if not answer["skip_assignment"]:
                assignments = self._assignments(members, counts)
        _log.info(
            "group %s: member %s is in generation %d, by %s",
            *(self.group, self._member_id, self._generation, self._protocol),
        )
        request = {
            "group_id": self.group,
            "generation_id": self._generation,
            "member_id": self._member_id,
            "group_instance_id": self._config.group_instance_id,
            "protocol_type": _CONSUMER,
            "protocol_name": self._protocol,
            "assignments": assignments,
        }
        self._send(connection, SYNC_GROUP, request, self._config.max_poll_interval_ms)

    def _members(self, entries: Iterable[Message]) -> dict[str, Member]:
        """The group's members with their subscriptions, by id."""
        if self._protocol not in ASSIGNORS:
            raise DecodeError(f"group {self.group} has chosen assignor {self._protocol!r}, which was not offered")
        return {
            entry["member_id"]: decode_subscription(self._protocol, entry["metadata"], entry["group_instance_id"])
            for entry in entries
        }

    def _assignments(self, members: dict[str, Member], counts: Mapping[str, int]) -> list[Message]:
        """Assign partitions to the members, with the assignor that the group has chosen."""
        there = {topic: count for topic, count in counts.items() if count}
        return [
            {"member_id": name, "assignment": encode_assignment(partitions)}
            for name, partitions in ASSIGNORS[self._protocol](there, members).items()
        ]

    def _synced(self, answer: Message) -> None:
        found = decode_assignment(answer["assignment"])
        wanted = [(topic, partition) for topic, partitions in found.items() for partition in partitions]
        owned = set(self._owner.owned())
        revoked = sorted(owned.difference(wanted))
        self._is_stable, self._has_prepared = True, False
        self._retry_at = 0.0
        membership = self.membership
        assert membership is not None
        self._heartbeats.begin(membership)
        if revoked:
            self._wants_rejoin = True
            self._owner.revoked(revoked, is_lost=False)
        self._kept = wanted
        self._owner.assigned(wanted, sorted(set(wanted) - owned))

    def close_sockets(self) -> None:
        """See `Heartbeats.close_sockets`; the connections of `cluster` are the caller's."""
        self._heartbeats.close_sockets()

    def leave(self) -> None:
        """Stop heartbeats, and leave the group unless the member is static (KIP-345)."""
        self._heartbeats.stop(self.cluster.deadline())
        self._drop_request()
        if not self._member_id or self._config.group_instance_id is not None:
            return
        member = Membership(self._member_id, self._generation, None)
        try:
            leave(self.cluster, self.group, member, "the consumer is closed")
        except KlogError as error:
            _log.info("leaving group %s: %s", self.group, error)
        self._member_id, self._generation, self._is_stable = "", -1, False


def _fenced(config: ConsumerConfig) -> str:
    return (
        f"another member of group {config.group_id} has group.instance.id={config.group_instance_id}: "
        f"close one of the two"
    )
