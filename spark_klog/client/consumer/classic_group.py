"""A consumer in its group by the classic protocol: rebalances and heartbeats.

    out       the polling thread revokes partitions if the protocol is eager
    joining   JoinGroup: the coordinator waits for all members; then the leader assigns and all send SyncGroup
    stable    heartbeats, until a response says that the group rebalances; the polling thread applies the assignment

With an eager protocol a member revokes all partitions before it joins again. With the cooperative one (KIP-429) it
keeps them, then revokes those it is no longer assigned, and if there were any joins again.

Requests are sent beside the polls, so that a member that is busy with its records stays in the group; partitions and
positions change in a poll.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

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
from spark_klog.client.consumer.group import PATIENCE, Beside, ConsumerGroup, Heartbeating, RebalanceListener, counted
from spark_klog.client.consumer.settings import ConsumerConfig
from spark_klog.client.coordinator import finding_coordinator
from spark_klog.client.offsets import GroupMetadata
from spark_klog.client.requests import Steps, Wait
from spark_klog.client.retry import pause_seconds
from spark_klog.errors import DecodeError, ErrorCode, KlogError
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


def leave(cluster: Cluster, member: GroupMetadata, reason: str) -> Steps[None]:
    """Send LeaveGroup for a member; raises what `Cluster.request` raises, and `ProtocolError` if it is still there."""
    node = yield from finding_coordinator(cluster, member.group)
    entry = {"member_id": member.member, "group_instance_id": member.instance, "reason": reason}
    is_old = (yield from cluster.asking_version(node, LEAVE_GROUP)) < 3
    request: Message = {"group_id": member.group}
    request |= {"member_id": member.member} if is_old else {"members": [entry]}
    answer = yield from cluster.asking(node, LEAVE_GROUP, request)
    error = answer_error(LEAVE_GROUP, answer["error_code"], f"leaving group {member.group}")
    if error.retriable:
        raise error


class Joined(NamedTuple):
    """How JoinGroup and SyncGroup have ended: the last request, and its answer, or why there is none."""

    api: Api
    answer: Message | Exception
    #: The partition counts that this member has assigned as the group's leader; None if it is not the leader.
    assigned_for: dict[str, int] | None


class Heartbeats(Heartbeating):
    """JoinGroup, SyncGroup and heartbeats of one member, from `join` until `pause`; a slow program delays none of them.

    Calls `on_news` when `take_joined` has the end of a JoinGroup, or `take_news` an error code.
    """

    def __init__(self, config: ConsumerConfig, on_news: Callable[[], None], beside: Beside | None = None) -> None:
        super().__init__(config, on_news, beside)
        self.cluster.patience = PATIENCE  # polls log failures, and begin again
        #: As the coordinator has named it last; of generation -1 outside of the group.
        self.member = GroupMetadata(self._group, -1, "", config.group_instance_id)
        #: The protocols of the JoinGroup to send, or the member whose heartbeats are due.
        self._work: list[Message] | GroupMetadata | None = None
        self._joined: Joined | None = None
        self._news: ErrorCode | None = None

    def join(self, protocols: list[Message]) -> None:
        with self._lock:
            self._work, self._joined, self._news = protocols, None, None
            self._tell_changes()
        self._start()

    def pause(self, *, is_id_known: bool) -> None:
        """Be outside of the group until `join`, and then join with the same id if `is_id_known`."""
        with self._lock:
            self._work = self._joined = self._news = None
            self.member = replace(self.member, generation=-1, member=self.member.member if is_id_known else "")
            self._tell_changes()

    @property
    def is_joining(self) -> bool:
        """Whether there was a `join`, and `take_joined` has not had its end."""
        with self._lock:
            return self._joined is not None or isinstance(self._work, list)

    def take_joined(self) -> Joined | None:
        with self._lock:
            joined, self._joined = self._joined, None
            return joined

    def take_news(self) -> ErrorCode | None:
        """Take the error code that the coordinator has answered to a heartbeat since the last call, if any."""
        with self._lock:
            news, self._news = self._news, None
            return news

    def _beating(self) -> Steps[None]:
        with self.cluster as cluster:
            while not self._is_stopping:
                work = self._work
                if work is None:
                    yield Wait(None, math.inf)
                elif isinstance(work, GroupMetadata):
                    yield from self._keep(cluster, work)
                else:
                    yield from self._while_wanted(self._join(cluster, work), work)

    def _while_wanted(self, steps: Steps[None], work: list[Message]) -> Steps[None]:
        try:
            while self._work is work and not self._is_stopping and (wait := next(steps, None)) is not None:
                yield wait
        finally:
            steps.close()

    def _join(self, cluster: Cluster, protocols: list[Message]) -> Steps[None]:
        """Send JoinGroup, which waits for all members, and SyncGroup, which waits for the leader."""
        config, member, api = self._config, self.member, JOIN_GROUP
        assigned_for: dict[str, int] | None = None
        answer: Message | Exception
        try:
            node = yield from finding_coordinator(cluster, self._group)
            # in version 0 the session timeout is also the rebalance timeout
            longest_ms = config.client.request_timeout_ms + max(config.session_timeout_ms, config.max_poll_interval_ms)
            request = {
                "group_id": self._group,
                "session_timeout_ms": config.session_timeout_ms,
                "rebalance_timeout_ms": config.max_poll_interval_ms,
                "group_instance_id": config.group_instance_id,
                "protocol_type": _CONSUMER,
                "protocols": protocols,
            }
            while True:
                request["member_id"] = member.member
                answer = yield from cluster.asking(node, api, request, time.monotonic() + longest_ms / 1000)
                if answer["error_code"] != ErrorCode.MEMBER_ID_REQUIRED:
                    break
                member = self._named(protocols, replace(member, member=answer["member_id"]))
            if not answer["error_code"]:
                generation, protocol = answer["generation_id"], answer["protocol_name"] or ""
                member = self._named(protocols, replace(member, member=answer["member_id"], generation=generation))
                _log.info(
                    "group %s: member %s is in generation %d, by %s",
                    *(self._group, member.member, generation, protocol),
                )
                request = {
                    "group_id": self._group,
                    "generation_id": generation,
                    "member_id": member.member,
                    "group_instance_id": config.group_instance_id,
                    "protocol_type": _CONSUMER,
                    "protocol_name": protocol,
                    "assignments": [],
                }
                if answer["leader"] == member.member:
                    assigned_for, request["assignments"] = yield from self._assignments(cluster, protocol, answer)
                api = SYNC_GROUP
                answer = yield from cluster.asking(node, api, request, time.monotonic() + longest_ms / 1000)
        except Exception as error:  # for the poll to raise
            answer = error
        with self._lock:
            if self._work is protocols:
                # one that SyncGroup tells of the next rebalance is in the group until that has ended without it
                codes = (ErrorCode.NONE, ErrorCode.REBALANCE_IN_PROGRESS) if api is SYNC_GROUP else ()
                is_member = not isinstance(answer, Exception) and answer["error_code"] in codes
                self._work, self._joined = member if is_member else None, Joined(api, answer, assigned_for)
        self._on_news()

    def _named(self, protocols: list[Message], member: GroupMetadata) -> GroupMetadata:
        """Take over how the coordinator names the member, unless a poll has given up this JoinGroup."""
        with self._lock:
            if self._work is protocols:
                self.member = member
        return member

    def _assignments(
        self, cluster: Cluster, protocol: str, joined: Message
    ) -> Steps[tuple[dict[str, int], list[Message]]]:
        """Assign partitions to the members, as the group's leader, with the assignor that the group has chosen.

        Also returns the partition counts of the topics.
        """
        if protocol not in ASSIGNORS:
            raise DecodeError(f"group {self._group} has chosen assignor {protocol!r}, which was not offered")
        members = {
            entry["member_id"]: decode_subscription(protocol, entry["metadata"], entry["group_instance_id"])
            for entry in joined["members"]
        }
        # a leader that keeps the last assignment (KIP-814) still has to look for new partitions
        wanted = {topic for member in members.values() for topic in member.topics}
        counts = (yield from counted(cluster, self._config, wanted)) if wanted else {}
        if joined["skip_assignment"]:
            return counts, []
        there = {topic: count for topic, count in counts.items() if count}
        return counts, [
            {"member_id": name, "assignment": encode_assignment(partitions)}
            for name, partitions in ASSIGNORS[protocol](there, members).items()
        ]

    def _keep(self, cluster: Cluster, member: GroupMetadata) -> Steps[None]:
        config = self._config
        node: int | None = None
        attempts = 0
        heard_at = time.monotonic()
        next_at = heard_at + config.heartbeat_interval_ms / 1000
        while True:
            poll_until = self.polled_at + config.max_poll_interval_ms / 1000
            if self._work is not member or self._is_stopping:
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
            if self._work is not member:
                return
            self._news = code
            if code != ErrorCode.REBALANCE_IN_PROGRESS:
                self._work = None
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
    """A consumer's work in its group by the classic protocol."""

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
        #: As of the last poll: one that joins beside the polls may be in the next generation.
        self._member = self._heartbeats.member
        self._kept: list[TopicPartition] = []
        self._is_stable = False
        self._wants_rejoin = False
        self._has_prepared = False

    def subscribe(
        self, topics: Collection[str], pattern: re.Pattern[str] | str | None, listener: RebalanceListener
    ) -> None:
        """Read these topics, and those whose full names match; joins again with the next step."""
        self._listener = listener
        self._topics.subscribe(topics, pattern)
        self._wants_rejoin = True

    def _take_part(self) -> Steps[None]:
        now = self._heartbeats.polled_at = time.monotonic()
        yield from self._take_news()
        if (joined := self._heartbeats.take_joined()) is not None:
            yield from self._end_joining(joined)
        if (yield from self._topics.look(now)):
            self._wants_rejoin = True
        must_join = self._wants_rejoin or not self._is_stable
        if must_join and now >= self._retry_at and not self._heartbeats.is_joining:
            yield from self._join()
        if self._is_stable and not self._wants_rejoin:
            self._failing_since = math.inf

    def look_at(self) -> float:
        """When to call `step` if nothing arrives, a reading of `time.monotonic`."""
        if not self.is_subscribed or self._heartbeats.is_joining:
            return self._commit_at
        at = self._topics.look_at if self._is_stable and not self._wants_rejoin else self._retry_at
        return min(at, self._commit_at)

    def _give_up_membership(self) -> Steps[None]:
        self._retry_at, self._has_prepared = 0.0, False
        yield from self._lose(is_id_known=True)

    def _take_news(self) -> Steps[None]:
        code = self._heartbeats.take_news()
        if code is None:
            return
        if code == ErrorCode.REBALANCE_IN_PROGRESS:
            self._wants_rejoin = True
            return
        _log.info("member %s of group %s: %s", self._heartbeats.member.member, self.name, code.name)
        yield from self._lose(is_id_known=code == ErrorCode.ILLEGAL_GENERATION)
        if code == ErrorCode.FENCED_INSTANCE_ID:
            raise self._fenced()
        if code not in (*_NEW_ID, *_NEW_GENERATION):
            raise answer_error(SYNC_GROUP, code, f"heartbeat of group {self.name}")

    def _lose(self, *, is_id_known: bool = False) -> Steps[None]:
        """Handle the loss of membership: other members may already read the partitions."""
        self._heartbeats.pause(is_id_known=is_id_known)
        self._member = self._heartbeats.member
        self._is_stable = False
        owned = list(self._assignment.partitions)
        self._kept = []
        if owned:
            yield from self._revoke(owned, is_lost=True)

    def _join(self) -> Steps[None]:
        """Prepare to join if that is not done, and begin: an eager member revokes all its partitions."""
        config = self._config
        if not self._has_prepared:
            self._has_prepared = True
            owned = list(self._assignment.partitions)
            if config.is_cooperative:
                self._kept = owned
            elif owned:
                self._kept = owned
                yield from self._revoke(owned, is_lost=False)
        self._wants_rejoin = self._is_stable = False
        subscription = self._topics.names, self._kept, self._heartbeats.member.generation, config.client_rack
        self._heartbeats.join(
            [
                {"name": name, "metadata": encode_subscription(name, *subscription, not config.is_cooperative)}
                for name in config.assignors
            ]
        )

    def _end_joining(self, joined: Joined) -> Steps[None]:
        """Take over the assignment, or what has failed."""
        self._member = self._heartbeats.member
        if isinstance(joined.answer, Exception):
            raise joined.answer
        if not (code := joined.answer["error_code"]):
            self._note_success()
            yield from self._synced(joined.answer, joined.assigned_for)
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
            raise answer_error(joined.api, code, f"{joined.api.name} of group {self.name}")

    def _synced(self, answer: Message, assigned_for: dict[str, int] | None) -> Steps[None]:
        assigned = decode_assignment(answer["assignment"])
        wanted = [(topic, partition) for topic, partitions in assigned.items() for partition in partitions]
        owned = set(self._assignment.partitions)
        revoked = sorted(owned.difference(wanted))
        self._topics.assigned(assigned_for)
        self._is_stable, self._has_prepared = True, False
        self._retry_at = 0.0
        if revoked:
            self._wants_rejoin = True
            yield from self._revoke(revoked, is_lost=False)
        self._kept = wanted
        self._assignment.set(wanted)
        yield from self._tell(self._listener.on_assigned, sorted(set(wanted) - owned))

    def _as_member(self) -> GroupMetadata | None:
        # a cooperative member has its partitions while it joins; others may read those that an eager one had
        member = self._heartbeats.member if self._config.is_cooperative else self._member
        return None if member.generation < 0 else member

    def _leave(self) -> Steps[None]:
        """Stop heartbeats, and leave the group unless the member is static (KIP-345)."""
        self._heartbeats.stop(self.cluster.deadline())
        member = self._heartbeats.member
        if not member.member or member.instance is not None:
            return
        try:
            leaving = self.cluster.attempting(
                lambda: leave(self.cluster, member, "the consumer is closed"),
                *(self._config.default_api_timeout_ms, "default.api.timeout.ms"),
            )
            yield from leaving
        except KlogError as error:
            _log.info("leaving group %s: %s", self.name, error)
        self._heartbeats.pause(is_id_known=False)
        self._is_stable = False
