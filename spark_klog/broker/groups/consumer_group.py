"""State machine of one consumer group (KIP-848).

Members send heartbeats with what they subscribe to and own; the answer has their epoch and their partitions. As of
`group.py`, the module does no I/O: the caller passes the clock, calls `tick` at `wake_at`, and `store` writes each
change before a member learns of it. A change that can't be written has not happened.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from spark_klog.broker.groups.group import Join, refused_join, refused_sync
from spark_klog.broker.groups.membership import (
    NO_PARTITIONS,
    ClassicProtocols,
    ConsumerMember,
    Membership,
    MemberState,
    Partitions,
    Subscription,
    encode_assignment,
    topic_partitions,
)
from spark_klog.broker.groups.server_assignors import SERVER_ASSIGNORS, AssignedMember
from spark_klog.broker.metadata.registry import Topic
from spark_klog.broker.settings.group_settings import GroupTimes
from spark_klog.errors import ErrorCode
from spark_klog.protocol.tables.groups import JOIN_EPOCH, LEAVE_EPOCH, STATIC_LEAVE_EPOCH

_log = logging.getLogger(__name__)
#: Seconds between heartbeats while members still have to give up or get partitions: they learn of it by these.
_BUSY_SECONDS = 0.5
#: Seconds until members that have timed out are removed again, if that could not be written.
_RETRY_SECONDS = 1.0
_UNCHANGED = -1
#: The names of topics that match a regular expression.
Matching = Callable[[str], frozenset[str]]


class Heartbeat(NamedTuple):
    """A ConsumerGroupHeartbeat request; None, and a rebalance timeout of -1 ms, are what has not changed.

    `owned` are the partitions that the member owns.
    """

    member_id: str
    epoch: int
    instance_id: str | None
    rack_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    topics: frozenset[str] | None
    regex: str | None
    assignor: str | None
    owned: Partitions | None

    @property
    def is_full(self) -> bool:
        """Whether the member has told all again, as after an error: it may not know its partitions."""
        is_subscribed = self.topics is not None or self.regex is not None
        return self.rebalance_timeout_ms != _UNCHANGED and is_subscribed and self.owned is not None


class _Refused(Exception):
    def __init__(self, code: ErrorCode, reason: str) -> None:
        self.code, self.reason = code, reason


class ConsumerGroup:
    """One group. `store(group, before, after)` writes a change and returns NONE, or the error that the member gets."""

    protocol_type = "consumer"

    def __init__(
        self,
        group_id: str,
        store: Callable[[ConsumerGroup, Membership, Membership], ErrorCode],
        times: GroupTimes,
        max_size: int,
    ) -> None:
        self.group_id = group_id
        self.membership = Membership()
        #: What the log has of the membership.
        self.stored = self.membership
        self.is_dead = False
        #: When the caller must call `tick`.
        self.wake_at = inf
        self._store = store
        #: Of members of the consumer protocol; may change.
        self.times = times
        self._max_size = max_size
        #: When each member's session ends.
        self._sessions: dict[str, float] = {}
        #: Until when members must have given up partitions, with the epoch in which they were to.
        self._revocations: dict[str, tuple[int, float]] = {}
        #: Member ids handed out to members of the classic protocol but not yet used, with their deadlines.
        self._named: dict[str, float] = {}
        #: The registry's topics for which the group's topics were looked up.
        self._seen: Mapping[str, Topic] | None = None
        #: Until when all members send heartbeats often, as the group has just changed.
        self._busy_until = -inf

    # ----- requests of members

    def heartbeat(self, beat: Heartbeat, topics: Mapping[str, Topic], matching: Matching, now: float) -> dict[str, Any]:
        """Handle ConsumerGroupHeartbeat; return the fields of the response."""
        try:
            if self.is_dead:
                raise _Refused(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"group {self.group_id} was removed")
            if beat.epoch in (LEAVE_EPOCH, STATIC_LEAVE_EPOCH):
                return self._leave(beat, now)
            return self._beat(beat, topics, matching, now)
        except _Refused as refusal:
            return refused_heartbeat(refusal.code, beat.member_id, refusal.reason)
        finally:
            self._set_wake()

    def _beat(self, beat: Heartbeat, topics: Mapping[str, Topic], matching: Matching, now: float) -> dict[str, Any]:
        draft = self.membership.copy()
        before = self._joining(beat, draft) if beat.epoch == JOIN_EPOCH else self._known(beat, draft)
        member = draft.members[beat.member_id]
        subscription = _subscription(beat, member.subscription, draft)
        if member.subscription != subscription:
            draft.put(replace(member, subscription=subscription))
        is_changed = before is None or member.subscription.choice != subscription.choice
        member = self._advance(draft, beat.member_id, beat.owned, topics, matching, now, is_changed=is_changed)
        # a member that owns something else has not got the last answer
        is_told = before is None or before.assigned != member.assigned or beat.epoch == JOIN_EPOCH or beat.is_full
        is_told |= beat.owned is not None and beat.owned != member.assigned
        return {
            "error_code": ErrorCode.NONE,
            "member_id": member.member_id,
            "member_epoch": member.epoch,
            "heartbeat_interval_ms": self._interval_ms(now),
            "assignment": {"topic_partitions": topic_partitions(member.assigned)} if is_told else None,
        }

    def _advance(
        self,
        draft: Membership,
        member_id: str,
        owned: Partitions | None,
        topics: Mapping[str, Topic],
        matching: Matching,
        now: float,
        *,
        is_changed: bool,
    ) -> ConsumerMember:
        """Assign if the group or its topics have changed, take the member's next step, and write it all."""
        names = _names_of(matching)
        if is_changed or topics is not self._seen:
            there = _subscribed(draft, topics, names)
            is_changed |= there != draft.topics
            draft.topics = there
        draft.epoch += is_changed
        if draft.epoch > draft.assignment_epoch:
            _assign(draft, names)
        draft.reconcile(member_id, owned)
        self._commit(draft)
        self._seen = topics
        if is_changed:
            self._busy_until = now + self.times.heartbeat_ms / 1000
            _log.info(
                "group %s: epoch %d of %d members, by %s",
                *(self.group_id, draft.epoch, len(draft.members), preferred_assignor(draft)),
            )
        member = draft.members[member_id]
        self._hear_of(member, now)
        return member

    def _joining(self, beat: Heartbeat, draft: Membership) -> ConsumerMember | None:
        """Put the member that joins, or begins anew, into the draft; return it if it was there before.

        It owns nothing: what it had is free, and is first of all its own again. That holds for a member that is known,
        too, which may have been fenced (as in Kafka 4.4; 4.1 fences it until its session ends). A static member
        has the place of the one before it, if that has left or is of the classic protocol, which never leaves.
        """
        if beat.instance_id is not None:
            static = draft.static_member(beat.instance_id)
            if static is not None and static.member_id != beat.member_id:
                if not static.has_left and static.subscription.classic is None:
                    raise _Refused(
                        ErrorCode.UNRELEASED_INSTANCE_ID,
                        f"static member {beat.instance_id} is in the group as {static.member_id}: close that one",
                    )
                target = draft.targets.get(static.member_id, NO_PARTITIONS)
                draft.remove(static.member_id)
                draft.put(ConsumerMember(beat.member_id, static.subscription))
                draft.targets[beat.member_id] = target
                return draft.members[beat.member_id]
        before = draft.members.get(beat.member_id)
        if before is not None and before.subscription.classic is not None:
            raise _Refused(ErrorCode.UNKNOWN_MEMBER_ID, f"member {beat.member_id} is of the classic protocol")
        if before is None:
            if len(draft.members) >= self._max_size:
                raise _Refused(ErrorCode.GROUP_MAX_SIZE_REACHED, f"group {self.group_id} has {self._max_size} members")
            nobody = Subscription(beat.instance_id, None, "", "", frozenset(), None, _UNCHANGED, None)
            draft.put(ConsumerMember(beat.member_id, nobody))
            return None
        draft.put(ConsumerMember(beat.member_id, before.subscription))
        return before

    def _known(self, beat: Heartbeat, draft: Membership) -> ConsumerMember:
        """The member that sends a heartbeat in its epoch, or in the one before if the last answer was lost."""
        member = self._member(draft, beat.member_id, beat.instance_id)
        if beat.epoch != member.epoch:
            lost_answer = beat.epoch == member.previous_epoch and (beat.owned or NO_PARTITIONS) <= member.assigned
            if beat.epoch > member.epoch or not lost_answer or beat.owned is None:
                raise _Refused(
                    ErrorCode.FENCED_MEMBER_EPOCH,
                    f"member {member.member_id} is in epoch {member.epoch}, not in {beat.epoch}: join again",
                )
        return member

    def _leave(self, beat: Heartbeat, now: float) -> dict[str, Any]:
        draft = self.membership.copy()
        member = self._member(draft, beat.member_id, beat.instance_id)
        if beat.epoch == STATIC_LEAVE_EPOCH:
            draft.put(member.left_for_a_while(draft.targets.get(member.member_id, NO_PARTITIONS)))
            self._commit(draft)
            self._hear_of(draft.members[member.member_id], now)
        else:
            self._remove(draft, [member.member_id], now)
            _log.info("member %s has left group %s", member.member_id, self.group_id)
        return {
            "error_code": ErrorCode.NONE,
            "member_id": member.member_id,
            "member_epoch": beat.epoch,
            "heartbeat_interval_ms": 0,
        }

    # ----- requests of members of the classic protocol

    def join_classic(
        self,
        join: Join,
        owned: Partitions,
        names: frozenset[str],
        topics: Mapping[str, Topic],
        matching: Matching,
        now: float,
    ) -> dict[str, Any]:
        """Handle JoinGroup, without waiting for others; `names` and `owned` are from the member's metadata."""
        try:
            return self._join_classic(join, owned, names, topics, matching, now)
        except _Refused as refusal:
            return refused_join(refusal.code, join.member_id)
        finally:
            self._set_wake()

    def _join_classic(
        self,
        join: Join,
        owned: Partitions,
        names: frozenset[str],
        topics: Mapping[str, Topic],
        matching: Matching,
        now: float,
    ) -> dict[str, Any]:
        if self.is_dead:
            raise _Refused(ErrorCode.COORDINATOR_NOT_AVAILABLE, "")
        if not common_names([join.protocols, *self._classic_protocols(join.member_id)]):
            raise _Refused(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, "")
        draft = self.membership.copy()
        member_id = join.member_id
        static = None if join.instance_id is None else draft.static_member(join.instance_id)
        if member_id:
            if member_id not in self._named:
                self._member(draft, member_id, join.instance_id)
        elif static is not None:
            member_id = f"{join.instance_id}-{uuid4()}"
            target = draft.targets.get(static.member_id, NO_PARTITIONS)
            draft.remove(static.member_id)
            draft.put(
                replace(static, member_id=member_id, epoch=JOIN_EPOCH, state=MemberState.STABLE, revoking=NO_PARTITIONS)
            )
            draft.targets[member_id] = target
        elif join.instance_id is None and join.requires_id:
            member_id = f"{join.client_id}-{uuid4()}"
            self._named[member_id] = now + join.session_timeout_ms / 1000
            return refused_join(ErrorCode.MEMBER_ID_REQUIRED, member_id)
        else:
            member_id = f"{join.instance_id or join.client_id}-{uuid4()}"
        before = draft.members.get(member_id)
        if before is None and len(draft.members) >= self._max_size:
            raise _Refused(ErrorCode.GROUP_MAX_SIZE_REACHED, "")
        subscription = Subscription(
            *(join.instance_id, None, join.client_id, join.client_host, _shared(draft, names), None),
            *(join.rebalance_timeout_ms, None, ClassicProtocols(join.session_timeout_ms, join.protocols)),
        )
        is_changed = before is None or before.subscription.choice != subscription.choice
        draft.put(replace(before or ConsumerMember(member_id, subscription), subscription=subscription))
        member = self._advance(draft, member_id, owned, topics, matching, now, is_changed=is_changed)
        self._named.pop(member_id, None)
        self._revocations.pop(member_id, None)
        return {
            "error_code": ErrorCode.NONE,
            "generation_id": member.epoch,
            "protocol_type": self.protocol_type,
            "protocol_name": self._protocol(member),
            "leader": "",
            "member_id": member_id,
            "members": [],
            "skip_assignment": False,
        }

    def sync_classic(
        self,
        member_id: str,
        instance_id: str | None,
        generation: int,
        protocol: tuple[str | None, str | None],
        names: Mapping[UUID, str],
        now: float,
    ) -> dict[str, Any]:
        """Handle SyncGroup: the answer has the member's partitions; `names` are the topics' by id."""
        try:
            member = self._classic(member_id, instance_id, generation)
            if protocol[0] not in (None, self.protocol_type) or protocol[1] not in (None, self._protocol(member)):
                raise _Refused(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, "")
            self._hear_of(member, now)
            if self.membership.epoch > member.epoch and member.state is not MemberState.UNREVOKED:
                raise _Refused(ErrorCode.REBALANCE_IN_PROGRESS, "")
            assignment = encode_assignment(member.assigned, names)
            name = {"protocol_type": self.protocol_type, "protocol_name": self._protocol(member)}
            return {"error_code": ErrorCode.NONE, "assignment": assignment} | name
        except _Refused as refusal:
            return refused_sync(refusal.code)
        finally:
            self._set_wake()

    def heartbeat_classic(self, member_id: str, instance_id: str | None, generation: int, now: float) -> ErrorCode:
        """Handle Heartbeat: REBALANCE_IN_PROGRESS if the member is to join again, for which it has its time."""
        try:
            member = self._classic(member_id, instance_id, generation)
        except _Refused as refusal:
            return refusal.code
        self._hear_of(member, now)
        target = self.membership.targets.get(member_id, NO_PARTITIONS)
        gets_more = any(partition not in self.membership.holders for partition in target - member.assigned)
        must_join = self.membership.epoch > member.epoch or member.state is MemberState.UNREVOKED or gets_more
        if must_join and member_id not in self._revocations:
            until = now + max(0, member.subscription.rebalance_timeout_ms) / 1000
            self._revocations[member_id] = member.epoch, until
        self._set_wake()
        return ErrorCode.REBALANCE_IN_PROGRESS if must_join else ErrorCode.NONE

    def leave_classic(self, member_id: str, instance_id: str | None, now: float) -> ErrorCode:
        """Handle LeaveGroup of one member; a static member may be named by its instance id alone."""
        if self._named.pop(member_id, None) is not None:
            return ErrorCode.NONE
        try:
            draft = self.membership.copy()
            static = None if instance_id is None or member_id else draft.static_member(instance_id)
            member = self._member(draft, member_id if static is None else static.member_id, instance_id)
            self._remove(draft, [member.member_id], now)
            _log.info("member %s has left group %s", member.member_id, self.group_id)
        except _Refused as refusal:
            return refusal.code
        finally:
            self._set_wake()
        return ErrorCode.NONE

    def _classic(self, member_id: str, instance_id: str | None, generation: int) -> ConsumerMember:
        if self.is_dead:
            raise _Refused(ErrorCode.COORDINATOR_NOT_AVAILABLE, "")
        member = self._member(self.membership, member_id, instance_id)
        if member.subscription.classic is None:
            raise _Refused(ErrorCode.UNKNOWN_MEMBER_ID, "")
        if member.epoch != generation:
            raise _Refused(ErrorCode.ILLEGAL_GENERATION, "")
        return member

    def _classic_protocols(self, without: str = "") -> list[tuple[tuple[str, bytes], ...]]:
        return [
            member.subscription.classic.protocols
            for member in self.membership.members.values()
            if member.subscription.classic is not None and member.member_id != without
        ]

    def _protocol(self, member: ConsumerMember) -> str:
        """The first of the member's protocols that all members of the classic protocol have."""
        assert member.subscription.classic is not None
        common = common_names(self._classic_protocols())
        return next(name for name, _ in member.subscription.classic.protocols if name in common)

    @property
    def classic_protocol(self) -> str | None:
        """The protocol that members share if all are of the classic one; None if there is another or none."""
        members = self.membership.members.values()
        if not members or any(member.subscription.classic is None for member in members):
            return None
        return self._protocol(next(iter(members)))

    # ----- offsets

    def may_commit(self, member_id: str, epoch: int, partitions: Callable[[], Partitions]) -> ErrorCode:
        """Return NONE if a member may commit in this epoch; a client without one commits to an empty group only.

        An earlier epoch of a member will do for partitions that it has had since (KIP-1251): it has not got the answer
        with its new epoch yet.
        """
        if self.is_dead:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if epoch < 0 and not self.membership.members:
            return ErrorCode.NONE
        member = self.membership.members.get(member_id)
        is_earlier = member is not None and member.subscription.classic is None and epoch < member.epoch
        if member is not None and is_earlier and member.had(partitions(), epoch):
            return ErrorCode.NONE
        return self.may_fetch(member_id, epoch)

    def may_fetch(self, member_id: str, epoch: int) -> ErrorCode:
        """Return NONE if a member is in this epoch: its offsets would else be another's by now."""
        member = self.membership.members.get(member_id)
        if member is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        stale = ErrorCode.ILLEGAL_GENERATION if member.subscription.classic else ErrorCode.STALE_MEMBER_EPOCH
        return ErrorCode.NONE if epoch == member.epoch else stale

    # ----- time

    def tick(self, now: float) -> None:
        """Remove members that sent no heartbeat, or did not give up partitions, in time."""
        gone = [member_id for member_id, until in self._sessions.items() if until <= now]
        self._named = {member_id: until for member_id, until in self._named.items() if until > now}
        slow = [member_id for member_id, (_, until) in self._revocations.items() if until <= now]
        for member_id in gone:
            _log.info("member %s of group %s sent no heartbeat in time", member_id, self.group_id)
        for member_id in slow:
            _log.info("member %s of group %s gave up no partitions in time", member_id, self.group_id)
        try:
            self._remove(self.membership.copy(), list(dict.fromkeys([*gone, *slow])), now)
        except _Refused:
            later = now + _RETRY_SECONDS
            self._sessions |= dict.fromkeys(gone, later)
            self._revocations |= {member_id: (self._revocations[member_id][0], later) for member_id in slow}
        self._set_wake()

    def restart(self, now: float) -> None:
        """Start the times of members that were read from the log."""
        for member in self.membership.members.values():
            self._hear_of(member, now)
        self._set_wake()

    def kill(self) -> None:
        self.is_dead = True
        self.wake_at = inf

    # ----- views

    @property
    def state(self) -> str:
        """The group's state, as Kafka names it."""
        now = self.membership
        if self.is_dead:
            return "Dead"
        if not now.members:
            return "Empty"
        if now.epoch > now.assignment_epoch:
            return "Assigning"
        is_there = all(
            member.state is MemberState.STABLE and member.epoch in (now.assignment_epoch, STATIC_LEAVE_EPOCH)
            for member in now.members.values()
        )
        return "Stable" if is_there else "Reconciling"

    @property
    def is_empty(self) -> bool:
        return not self.membership.members

    @property
    def is_idle(self) -> bool:
        """Whether the group has no members and none is joining."""
        return self.is_empty

    @property
    def regexes(self) -> set[str]:
        """The regular expressions to which members subscribe."""
        return {member.subscription.regex for member in self.membership.members.values() if member.subscription.regex}

    def subscribed_topics(self) -> set[str]:
        return set(self.membership.topics).union(
            *(member.subscription.topics for member in self.membership.members.values())
        )

    # ----- helpers

    def _member(self, draft: Membership, member_id: str, instance_id: str | None) -> ConsumerMember:
        if instance_id is not None:
            static = draft.static_member(instance_id)
            if static is not None and static.member_id != member_id:
                raise _Refused(
                    ErrorCode.FENCED_INSTANCE_ID,
                    f"static member {instance_id} is now {static.member_id}: close this one",
                )
        member = draft.members.get(member_id)
        if member is None:
            raise _Refused(ErrorCode.UNKNOWN_MEMBER_ID, f"group {self.group_id} has no member {member_id}: join again")
        return member

    def _commit(self, draft: Membership) -> None:
        """Write what has changed, then take it over."""
        code = self._store(self, self.stored, draft) if draft != self.stored else ErrorCode.NONE
        if code:
            raise _Refused(code, f"a change of group {self.group_id} could not be written")
        self.membership = self.stored = draft

    def _remove(self, draft: Membership, member_ids: list[str], now: float) -> None:
        """Remove members; the next heartbeat of another one assigns their partitions."""
        for member_id in member_ids:
            draft.remove(member_id)
        if member_ids:
            draft.epoch += 1
            self._commit(draft)
            self._seen = None
            self._busy_until = now + self.times.heartbeat_ms / 1000
        for member_id in member_ids:
            self._sessions.pop(member_id, None)
            self._revocations.pop(member_id, None)

    def _hear_of(self, member: ConsumerMember, now: float) -> None:
        classic = member.subscription.classic
        session_ms = self.times.session_ms if classic is None else classic.session_timeout_ms
        self._sessions[member.member_id] = now + session_ms / 1000
        if classic is not None:
            pass  # it gives up partitions when it joins again: see `heartbeat_classic`
        elif member.state is not MemberState.UNREVOKED:
            self._revocations.pop(member.member_id, None)
        elif self._revocations.get(member.member_id, (_UNCHANGED,))[0] != member.epoch:
            until = now + max(0, member.subscription.rebalance_timeout_ms) / 1000
            self._revocations[member.member_id] = member.epoch, until
        for member_id in self._sessions.keys() - self.membership.members.keys():  # replaced static members
            del self._sessions[member_id]
            self._revocations.pop(member_id, None)

    def _interval_ms(self, now: float) -> int:
        is_busy = now < self._busy_until or self.state != "Stable"
        interval_ms = self.times.heartbeat_ms
        return min(interval_ms, int(_BUSY_SECONDS * 1000)) if is_busy else interval_ms

    def _set_wake(self) -> None:
        if not self.is_dead:
            ends = (until for _, until in self._revocations.values())
            self.wake_at = min((*self._sessions.values(), *ends, *self._named.values()), default=inf)


def _subscription(beat: Heartbeat, before: Subscription, draft: Membership) -> Subscription:
    """What the member has told, with what it has told before."""
    return Subscription(
        instance_id=before.instance_id,
        rack_id=before.rack_id if beat.rack_id is None else beat.rack_id,
        client_id=beat.client_id,
        client_host=beat.client_host,
        topics=before.topics if beat.topics is None else _shared(draft, beat.topics),
        regex=before.regex if beat.regex is None else beat.regex or None,
        rebalance_timeout_ms=before.rebalance_timeout_ms
        if beat.rebalance_timeout_ms == _UNCHANGED
        else beat.rebalance_timeout_ms,
        assignor=before.assignor if beat.assignor is None else beat.assignor or None,
    )


def common_names(protocols: list[tuple[tuple[str, bytes], ...]]) -> set[str]:
    """The names of protocols that all of some members support."""
    return set.intersection(*({name for name, _ in some} for some in protocols)) if protocols else set()


def _shared(draft: Membership, names: frozenset[str]) -> frozenset[str]:
    """The names, as the same object as another member's if that subscribes to the same."""
    return next(
        (each.subscription.topics for each in draft.members.values() if each.subscription.topics == names), names
    )


def _names_of(matching: Matching) -> Callable[[Subscription], frozenset[str]]:
    """Look up the names of a subscription's topics: once for all members that have the same."""
    known: dict[tuple[frozenset[str], str], frozenset[str]] = {}  # a set has its hash: nothing is looked through again

    def names(subscription: Subscription) -> frozenset[str]:
        topics, regex = subscription.topics, subscription.regex
        if not regex:
            return topics
        if (topics, regex) not in known:
            known[topics, regex] = topics | matching(regex)
        return known[topics, regex]

    return names


def _subscribed(
    draft: Membership, topics: Mapping[str, Topic], names_of: Callable[[Subscription], frozenset[str]]
) -> dict[str, tuple[UUID, int]]:
    """The topics of all members that exist: id and number of partitions by name."""
    there: set[str] = set()
    for names in {names_of(member.subscription) for member in draft.members.values()}:
        there.update(names.intersection(topics) if len(topics) < len(names) else filter(topics.__contains__, names))
    return {name: (topics[name].topic_id, len(topics[name].assignment)) for name in sorted(there)}


def preferred_assignor(membership: Membership) -> str:
    """The assignor that most members prefer; the default one if none prefers one."""
    votes = Counter(member.subscription.assignor for member in membership.members.values())
    known = [name for name in SERVER_ASSIGNORS if votes[name]]
    return max(known, key=lambda name: (votes[name], name), default=next(iter(SERVER_ASSIGNORS)))


def _assign(draft: Membership, names_of: Callable[[Subscription], frozenset[str]]) -> None:
    """Compute all targets anew, by the assignor that most members prefer."""
    members = {
        member.member_id: AssignedMember(
            member.subscription.instance_id,
            names_of(member.subscription),
            draft.targets.get(member.member_id, NO_PARTITIONS),
        )
        for member in draft.members.values()
    }
    targets = SERVER_ASSIGNORS[preferred_assignor(draft)](draft.topics, members)
    # the same object if nothing changes, so that it is not written again
    draft.targets = {
        member_id: draft.targets[member_id] if draft.targets.get(member_id) == target else target
        for member_id, target in targets.items()
    }
    draft.assignment_epoch = draft.epoch


def refused_heartbeat(code: ErrorCode, member_id: str, reason: str) -> dict[str, Any]:
    """Fields of a ConsumerGroupHeartbeat response with an error."""
    return {
        "error_code": code,
        "error_message": reason,
        "member_id": member_id,
        "member_epoch": 0,
        "heartbeat_interval_ms": 0,
    }
