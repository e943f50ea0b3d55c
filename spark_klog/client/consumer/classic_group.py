"""A consumer in its group by the classic protocol: rebalances and heartbeats.

    out       find the coordinator, revoke partitions if the protocol is eager, send JoinGroup
    joining   the coordinator waits for all members; then the leader assigns and all send SyncGroup
    syncing   receive the assignment and apply it
    stable    send heartbeats, until a response says that the group rebalances

With an eager protocol a member revokes all partitions before it joins again. With the cooperative one (KIP-429) it
keeps them, then revokes those it is no longer assigned, and if there were any joins again.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Collection, Generator
from contextlib import suppress
from typing import Any

from spark_klog.base.names import TopicPartition
from spark_klog.client.answers import answer_error
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer.assignment import Assignment, Troubles
from spark_klog.client.consumer.assignors import (
    ASSIGNORS,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from spark_klog.client.consumer.group import Beside, ConsumerGroup, Heartbeating, RebalanceListener
from spark_klog.client.consumer.settings import ConsumerConfig
from spark_klog.client.coordinator import finding_coordinator
from spark_klog.client.net.connection import Connection
from spark_klog.client.offsets import GroupMetadata
from spark_klog.client.requests import Steps, Wait, answered, opened, paused
from spark_klog.client.retry import pause_seconds
from spark_klog.errors import (
    DecodeError,
    ErrorCode,
    KlogError,
)
from spark_klog.protocol.apis import HEARTBEAT, JOIN_GROUP, LEAVE_GROUP, SYNC_GROUP
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.groups import decode_assignment

_log = logging.getLogger(__name__)
_CONSUMER = "consumer"
#: Errors after which a member joins again with a new id, or in the next generation.
_NEW_ID = (ErrorCode.UNKNOWN_MEMBER_ID,)
_NEW_GENERATION = (ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.ILLEGAL_GENERATION)
#: The coordinator has moved or loads its groups: the heartbeat is sent again.
_AGAIN = (
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.REQUEST_TIMED_OUT,
)
#: Steps that yield a `Wait` where they wait for other members, and steps to be made before the call goes on.
_Joining = Generator[Wait | Steps[Any], Any, None]


def leave(cluster: Cluster, member: GroupMetadata, reason: str) -> Steps[None]:
    """Send LeaveGroup for a member; raises what `Cluster.request` raises."""
    node = yield from finding_coordinator(cluster, member.group)
    entry = {"member_id": member.member, "group_instance_id": member.instance, "reason": reason}
    is_old = (yield from cluster.asking_version(node, LEAVE_GROUP)) < 3
    request: Message = {"group_id": member.group}
    request |= {"member_id": member.member} if is_old else {"members": [entry]}
    yield from cluster.asking(node, LEAVE_GROUP, request)


class Heartbeats(Heartbeating):
    """Heartbeats of one member, from `begin` until `pause`. Calls `on_news` when `take_news` has an error code."""

    def __init__(self, config: ConsumerConfig, on_news: Callable[[], None], beside: Beside | None = None) -> None:
        super().__init__(config, on_news, beside)
        self._member: GroupMetadata | None = None
        self._news: ErrorCode | None = None

    def begin(self, member: GroupMetadata) -> None:
        with self._lock:
            self._member, self._news = member, None
            self.polled_at = time.monotonic()
            self._tell_changes()
        self._start()

    def pause(self) -> None:
        """Send no heartbeats until `begin`."""
        with self._lock:
            self._member = self._news = None
            self._tell_changes()

    def take_news(self) -> ErrorCode | None:
        """Take the error code that the coordinator has answered since the last call, if any."""
        with self._lock:
            news, self._news = self._news, None
            return news

    def _beating(self) -> Steps[None]:
        with self.cluster as cluster:
            while not self._is_stopping:
                if (member := self._member) is None:
                    yield Wait(None, math.inf)
                else:
                    yield from self._keep(cluster, member)

    def _keep(self, cluster: Cluster, member: GroupMetadata) -> Steps[None]:
        config = self._config
        node: int | None = None
        attempts = 0
        heard_at = time.monotonic()
        next_at = heard_at + config.heartbeat_interval_ms / 1000
        while True:
            poll_until = self.polled_at + config.max_poll_interval_ms / 1000
            if self._member is not member or self._is_stopping:
                return
            now = time.monotonic()
            if now < min(next_at, poll_until):
                yield Wait(None, min(next_at, poll_until))
                continue
            if now >= poll_until:
                yield from self._give_up(cluster, member)
                return
            try:
                with cluster.within(config.session_timeout_ms, "session.timeout.ms"):
                    node = (yield from finding_coordinator(cluster, self._group)) if node is None else node
                    code = yield from self._beat(cluster, node, member)
            except KlogError as error:
                node, attempts = None, attempts + 1
                _log.info("heartbeat of group %s: %s", self._group, error)
                if time.monotonic() > heard_at + config.session_timeout_ms / 1000:
                    self._tell(member, ErrorCode.UNKNOWN_MEMBER_ID)
                    return
                next_at = time.monotonic() + pause_seconds(config.client, attempts)
                continue
            attempts, heard_at = 0, time.monotonic()
            next_at = heard_at + config.heartbeat_interval_ms / 1000
            if code == ErrorCode.NONE:
                continue
            self._tell(member, code)
            if code != ErrorCode.REBALANCE_IN_PROGRESS:
                return

    def _beat(self, cluster: Cluster, node: int, member: GroupMetadata) -> Steps[ErrorCode]:
        """Send one heartbeat; raises if it must be repeated."""
        request = {
            "group_id": self._group,
            "generation_id": member.generation,
            "member_id": member.member,
            "group_instance_id": member.instance,
        }
        answer = yield from cluster.asking(node, HEARTBEAT, request)
        error = answer_error(HEARTBEAT, answer["error_code"], f"heartbeat of group {self._group}")
        if error.code in _AGAIN:
            raise error
        return error.code

    def _tell(self, member: GroupMetadata, code: ErrorCode) -> None:
        with self._lock:
            if self._member is not member:
                return
            self._news = code
            if code != ErrorCode.REBALANCE_IN_PROGRESS:
                self._member = None
        self._on_news()

    def _give_up(self, cluster: Cluster, member: GroupMetadata) -> Steps[None]:
        _log.warning(
            "no poll for max.poll.interval.ms=%d: the consumer leaves group %s",
            *(self._config.max_poll_interval_ms, self._group),
        )
        if member.instance is None:
            try:
                yield from leave(cluster, member, "max.poll.interval.ms has passed")
            except KlogError as error:
                _log.info("leaving group %s: %s", self._group, error)
        self._tell(member, ErrorCode.UNKNOWN_MEMBER_ID)


class ClassicGroup(ConsumerGroup):
    """A consumer's work in its group by the classic protocol.

    A JoinGroup waits at the coordinator, and so do later requests on its connection. It therefore uses the record
    connection of `cluster`, which has no other use.
    """

    def __init__(
        self,
        config: ConsumerConfig,
        assignment: Assignment,
        on_news: Callable[[], None],
        troubles: Troubles,
        beside: Beside | None = None,
    ) -> None:
        super().__init__(config, assignment, on_news, troubles, beside)
        self._heartbeats: Heartbeats = Heartbeats(config, on_news, beside)
        self._member_id = ""
        self._generation = -1
        self._kept: list[TopicPartition] = []
        self._is_stable = False
        self._wants_rejoin = False
        self._has_prepared = False
        self._connection: Connection | None = None
        #: The JoinGroup and SyncGroup under way, and what they wait for. They are no `PendingRequest`, which interrupts
        #: leave in order: these steps also change the membership, and call the listener.
        self._joining: _Joining | None = None
        self._wait = Wait(None, math.inf)
        self._protocol = ""

    @property
    def connection(self) -> Connection | None:
        """The connection whose events let a JoinGroup or SyncGroup go on, if any."""
        return self._wait.connection if self._joining is not None else None

    def subscribe(
        self, topics: Collection[str], pattern: re.Pattern[str] | str | None, listener: RebalanceListener
    ) -> None:
        """Read these topics, and those whose full names match; joins again with the next step."""
        self._listener = listener
        self._topics.subscribe(topics, pattern)
        self._wants_rejoin = True

    def _take_part(self) -> Steps[None]:
        now = self._heartbeats.polled_at = time.monotonic()
        if self._joining is not None:
            yield from self._advance()
        yield from self._take_news()
        if (yield from self._topics.look(now)):
            self._wants_rejoin = True
        if (self._wants_rejoin or not self._is_stable) and self._joining is None and now >= self._retry_at:
            yield from self._join()
        if self._is_stable and not self._wants_rejoin:
            self._failing_since = math.inf

    def look_at(self) -> float:
        """When to call `step` if nothing arrives, a reading of `time.monotonic`."""
        if not self.is_subscribed:
            return self._commit_at
        if self._joining is not None:
            return min(self._wait.until, self._commit_at)
        at = self._topics.look_at if self._is_stable and not self._wants_rejoin else self._retry_at
        return min(at, self._commit_at)

    def _give_up_membership(self) -> Steps[None]:
        self._joining = self._connection = None
        self._retry_at, self._has_prepared = 0.0, False
        yield from self._lose(is_id_known=True)

    def _try_again(self, error: KlogError) -> None:
        self._end_joining()
        self._connection = None
        super()._try_again(error)

    def _end_joining(self) -> None:
        if self._joining is not None:
            self._joining.close()
        self._joining = None

    def _take_news(self) -> Steps[None]:
        code = self._heartbeats.take_news()
        if code is None:
            return
        if code == ErrorCode.REBALANCE_IN_PROGRESS:
            self._wants_rejoin = True
            return
        _log.info("member %s of group %s: %s", self._member_id, self.name, code.name)
        yield from self._lose(is_id_known=code == ErrorCode.ILLEGAL_GENERATION)
        if code == ErrorCode.FENCED_INSTANCE_ID:
            raise self._fenced()
        if code not in (*_NEW_ID, *_NEW_GENERATION):
            raise answer_error(SYNC_GROUP, code, f"heartbeat of group {self.name}")

    def _lose(self, *, is_id_known: bool = False) -> Steps[None]:
        """Handle the loss of membership: other members may already read the partitions."""
        self._heartbeats.pause()
        self._generation, self._is_stable = -1, False
        if not is_id_known:
            self._member_id = ""
        owned = list(self._assignment.partitions)
        self._kept = []
        if owned:
            yield from self._revoke(owned, is_lost=True)

    def _join(self) -> Steps[None]:
        """Prepare to join if that is not done, and begin: an eager member revokes all its partitions."""
        if not self._has_prepared:
            self._has_prepared = True
            owned = list(self._assignment.partitions)
            if self._config.is_cooperative:
                self._kept = owned
            elif owned:
                self._kept = owned
                yield from self._revoke(owned, is_lost=False)
        self._joining = self._steps_to_join()
        yield from self._advance()

    def _advance(self) -> Steps[None]:
        """Do what JoinGroup and SyncGroup can do without waiting for other members; an error ends them."""
        steps, self._joining = self._joining, None
        assert steps is not None
        result: Any = None
        with suppress(StopIteration):
            while not isinstance(following := steps.send(result), Wait):
                result = yield from following
            self._wait, self._joining = following, steps

    def _steps_to_join(self) -> _Joining:
        """The steps of JoinGroup and SyncGroup, which end early if the coordinator refuses one."""
        config = self._config
        if self._connection is None or self._connection.closed:
            node = yield finding_coordinator(self.cluster, self.name)
            self._connection = self.cluster.begin_connection(node)
        connection = self._connection
        connection.renew()
        yield from opened(connection, math.inf)
        is_eager = not config.is_cooperative
        request = {
            "group_id": self.name,
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
        asking = self._asking(connection, JOIN_GROUP, request, longest)
        sent = next(asking)
        # no heartbeats are needed while a JoinGroup is in flight
        self._heartbeats.pause()
        self._wants_rejoin = self._is_stable = False
        yield sent
        answer = yield from asking
        if (yield self._is_refused(JOIN_GROUP, answer)):
            return
        self._member_id, self._generation = answer["member_id"], answer["generation_id"]
        self._protocol = answer["protocol_name"] or ""
        self._topics.assigned_for = None
        assignments = (yield self._assignments(answer)) if answer["leader"] == self._member_id else []
        _log.info(
            "group %s: member %s is in generation %d, by %s",
            *(self.name, self._member_id, self._generation, self._protocol),
        )
        request = {
            "group_id": self.name,
            "generation_id": self._generation,
            "member_id": self._member_id,
            "group_instance_id": config.group_instance_id,
            "protocol_type": _CONSUMER,
            "protocol_name": self._protocol,
            "assignments": assignments,
        }
        yield from paused(connection.throttled_until)  # `send` would sleep
        answer = yield from self._asking(connection, SYNC_GROUP, request, config.max_poll_interval_ms)
        if not (yield self._is_refused(SYNC_GROUP, answer)):
            yield self._synced(answer)

    def _asking(self, connection: Connection, api: Api, request: Message, wait_ms: int) -> Steps[Message]:
        until = time.monotonic() + (self._config.client.request_timeout_ms + wait_ms) / 1000
        return answered(connection, api, request, until)

    def _is_refused(self, api: Api, answer: Message) -> Steps[bool]:
        """Whether the coordinator refuses a request, and the member is to join again."""
        code = answer["error_code"]
        if not code:
            self._note_success()
            return False
        if code == ErrorCode.MEMBER_ID_REQUIRED:
            self._member_id = answer["member_id"]
            self._retry_at = 0.0
        elif code in _NEW_ID:
            yield from self._lose()
            self._retry_at = 0.0
        elif code in _NEW_GENERATION:
            self._wants_rejoin = True
            self._retry_at = time.monotonic() + pause_seconds(self._config.client, 1)
        elif code == ErrorCode.FENCED_INSTANCE_ID:
            yield from self._lose()
            raise self._fenced()
        else:
            self._retry_at = time.monotonic() + pause_seconds(self._config.client, 1)
            raise answer_error(api, code, f"{api.name} of group {self.name}")
        return True

    def _assignments(self, joined: Message) -> Steps[list[Message]]:
        """Assign partitions to the members, as the group's leader, with the assignor that the group has chosen."""
        if self._protocol not in ASSIGNORS:
            raise DecodeError(f"group {self.name} has chosen assignor {self._protocol!r}, which was not offered")
        members = {
            entry["member_id"]: decode_subscription(self._protocol, entry["metadata"], entry["group_instance_id"])
            for entry in joined["members"]
        }
        # a leader that keeps the last assignment (KIP-814) still has to look for new partitions
        wanted = {topic for member in members.values() for topic in member.topics}
        counts = (yield from self._topics.count(wanted)) if wanted else {}
        self._topics.assigned_for = counts
        if joined["skip_assignment"]:
            return []
        there = {topic: count for topic, count in counts.items() if count}
        return [
            {"member_id": name, "assignment": encode_assignment(partitions)}
            for name, partitions in ASSIGNORS[self._protocol](there, members).items()
        ]

    def _synced(self, answer: Message) -> Steps[None]:
        assigned = decode_assignment(answer["assignment"])
        wanted = [(topic, partition) for topic, partitions in assigned.items() for partition in partitions]
        owned = set(self._assignment.partitions)
        revoked = sorted(owned.difference(wanted))
        self._is_stable, self._has_prepared = True, False
        self._retry_at = 0.0
        self._heartbeats.begin(self._member())
        if revoked:
            self._wants_rejoin = True
            yield from self._revoke(revoked, is_lost=False)
        self._kept = wanted
        self._assignment.set(wanted)
        yield from self._tell(self._listener.on_assigned, sorted(set(wanted) - owned))

    def _as_member(self) -> GroupMetadata | None:
        return None if self._generation < 0 else self._member()

    def _member(self) -> GroupMetadata:
        return GroupMetadata(self.name, self._generation, self._member_id, self._config.group_instance_id)

    def _leave(self) -> Steps[None]:
        """Stop heartbeats, and leave the group unless the member is static (KIP-345)."""
        self._heartbeats.stop(self.cluster.deadline())
        self._end_joining()
        if not self._member_id or self._config.group_instance_id is not None:
            return
        try:
            yield from leave(self.cluster, self._member(), "the consumer is closed")
        except KlogError as error:
            _log.info("leaving group %s: %s", self.name, error)
        self._member_id, self._generation, self._is_stable = "", -1, False
