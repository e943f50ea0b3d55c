"""State machine of one group (classic protocol; protocol guide "Group Membership", KIP-134, -345, -394, -814).

The module does no I/O. The caller passes the clock (seconds, monotonic), calls `tick` at `wake_at`, and delivers each
`Reply` to the request that its token names. `store` writes the group before members see the new state.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any, NamedTuple
from uuid import uuid4

from spark_klog.errors import DecodeError, ErrorCode
from spark_klog.protocol.codec import decode_versioned
from spark_klog.protocol.tables.groups import SUBSCRIPTION

_log = logging.getLogger(__name__)
CONSUMER = "consumer"
_NO_GENERATION = -1
#: Seconds between two looks at whether a static member has come back.
_SHORTEST_WAIT = 1.0


class State(Enum):
    """State of a group, as DescribeGroups names it."""

    #: No members; there may be committed offsets.
    EMPTY = "Empty"
    #: Rebalance: the group waits for members to join.
    PREPARING = "PreparingRebalance"
    #: All have joined: the group waits for the leader's assignment.
    COMPLETING = "CompletingRebalance"
    #: The leader has assigned.
    STABLE = "Stable"
    #: The group has been removed.
    DEAD = "Dead"


TRANSITIONS = {
    State.EMPTY: {State.PREPARING, State.DEAD},
    State.PREPARING: {State.COMPLETING, State.EMPTY, State.DEAD},
    State.COMPLETING: {State.STABLE, State.PREPARING, State.DEAD},
    State.STABLE: {State.PREPARING, State.DEAD},
    State.DEAD: set(),
}


class Join(NamedTuple):
    """A JoinGroup request. Times in ms; `protocols` are (name, metadata) in the member's order of preference.

    `requires_id`: a new member must join again with the id it gets (KIP-394, from version 4). `can_skip`: the member
    understands that it leads but need not assign (KIP-814, from version 9).
    """

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]
    requires_id: bool = True
    can_skip: bool = True


@dataclass
class Member:
    """A member that the group knows, by its latest request; it times out at `deadline` (s)."""

    member_id: str
    request: Join
    assignment: bytes = b""
    deadline: float = 0.0
    #: Whether the client knows its member id.
    is_named: bool = False
    #: Token of the waiting request: the caller's object, opaque here.
    join_token: object | None = field(default=None, repr=False)
    sync_token: object | None = field(default=None, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.request.protocols)

    @property
    def is_waiting(self) -> bool:
        """Whether the member waits for a response; it can't send heartbeats meanwhile."""
        return self.join_token is not None or self.sync_token is not None

    def metadata(self, protocol: str | None) -> bytes:
        """The member's metadata for a protocol, empty if it has none."""
        return dict(self.request.protocols).get(protocol or "", b"")


def common_protocols(members: Iterable[Member]) -> set[str]:
    """The protocols that all members support; at least one member is required."""
    return set.intersection(*(set(member.names) for member in members))


def choose_protocol(members: Collection[Member]) -> str | None:
    """The protocol that most members prefer among those that all support; None if they share none."""
    common = common_protocols(members)
    votes = Counter(next(name for name in member.names if name in common) for member in members if common)
    return max(votes, key=lambda name: votes[name], default=None)


class Reply(NamedTuple):
    """Fields of the response to the request that `token` names."""

    token: object
    message: dict[str, Any]


def refused_join(code: ErrorCode, member_id: str) -> dict[str, Any]:
    """Fields of a JoinGroup response with an error."""
    return {
        "error_code": code,
        "generation_id": _NO_GENERATION,
        "protocol_type": None,
        "protocol_name": "",
        "leader": "",
        "member_id": member_id,
        "members": [],
    }


def refused_sync(code: ErrorCode) -> dict[str, Any]:
    """Fields of a SyncGroup response with an error."""
    return {"error_code": code, "assignment": b""}


class Group:
    """One group. Methods that take a token return all replies that are due, for any member.

    An empty group's first rebalance waits `initial_delay_ms` for more members. `store` writes the group and returns
    NONE, or the error that members get.
    """

    def __init__(
        self, group_id: str, store: Callable[[Group], ErrorCode], initial_delay_ms: int = 3000, max_size: int = 1 << 31
    ) -> None:
        self.group_id = group_id
        self.state = State.EMPTY
        self.generation = 0
        #: A generation that is in the log though no member has got it; none gets it later, with another assignment.
        self.reserved_generation = 0
        self.protocol_type: str | None = None
        self.protocol: str | None = None
        self.leader: str | None = None
        self.members: dict[str, Member] = {}
        #: Static members: instance id to member id.
        self.instances: dict[str, str] = {}
        #: Members of this generation that have not sent SyncGroup.
        self._unsynced: set[str] = set()
        #: Replies that are due, in order.
        self._due: list[Reply] = []
        #: When the caller must call `tick`.
        self.wake_at = inf
        self._store = store
        self._initial_delay = initial_delay_ms / 1000
        self._max_size = max_size
        #: Member ids handed out but not yet used, with their deadlines.
        self._pending: dict[str, float] = {}
        self._rebalance_until = inf
        #: Latest end of an empty group's first rebalance, even if members keep joining.
        self._initial_until: float | None = None
        #: The deadline of the members in `_unsynced`.
        self._sync_until = inf

    # ----- requests of members

    def join(self, join: Join, token: object, now: float) -> list[Reply]:
        code = self._refusal(join)
        if code:
            self._reply(token, refused_join(code, join.member_id))
        elif join.instance_id is not None and not join.member_id:
            self._join_static(join, token, now)
        elif not join.member_id:
            self._join_new(join, token, now)
        elif join.member_id in self._pending:
            del self._pending[join.member_id]
            self._add(join.member_id, join, token, now, is_named=True)
        else:
            self._rejoin(join, token, now)
        return self._taken()

    def sync(
        self,
        member_id: str,
        instance_id: str | None,
        generation: int,
        protocol: tuple[str | None, str | None],
        assignments: dict[str, bytes],
        token: object,
        now: float,
    ) -> list[Reply]:
        """Handle SyncGroup. `protocol` is (type, name); None if the request has no such field."""
        code = self._member_code(member_id, instance_id) or self._generation_code(generation)
        if not code and (protocol[0] not in (None, self.protocol_type) or protocol[1] not in (None, self.protocol)):
            code = ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        if not code and self.state is State.PREPARING:
            code = ErrorCode.REBALANCE_IN_PROGRESS
        if code:
            self._reply(token, refused_sync(code))
            return self._taken()
        member = self.members[member_id]
        self._hear_of(member, now)
        self._unsynced.discard(member_id)
        if self.state is State.STABLE:
            self._answer_synced(token, member.assignment)
            return self._taken()
        if member.sync_token is not None:
            self._reply(member.sync_token, refused_sync(ErrorCode.REBALANCE_IN_PROGRESS))
        member.sync_token = token
        if member_id == self.leader:
            self._assign(assignments, now)
        return self._taken()

    def heartbeat(self, member_id: str, instance_id: str | None, generation: int, now: float) -> ErrorCode:
        code = self._member_code(member_id, instance_id) or self._generation_code(generation)
        if code:
            return code
        self._hear_of(self.members[member_id], now)
        return ErrorCode.REBALANCE_IN_PROGRESS if self.state is State.PREPARING else ErrorCode.NONE

    def leave(self, member_id: str, instance_id: str | None, now: float) -> tuple[ErrorCode, list[Reply]]:
        """Handle LeaveGroup of one member; a static member may be named by its instance id alone."""
        if self._pending.pop(member_id, None) is not None:
            self._complete_if_all_joined(now)
            return ErrorCode.NONE, self._taken()
        if instance_id is not None and not member_id:
            member_id = self.instances.get(instance_id, "")
        code = self._member_code(member_id, instance_id)
        if not code:
            self._remove(self.members[member_id], now, "has left")
        return code, self._taken()

    def may_commit(
        self, member_id: str, instance_id: str | None, generation: int, now: float, *, in_transaction: bool = False
    ) -> ErrorCode:
        """Return NONE if a member may commit in this generation; a client without one commits to an empty group only.

        In a transaction, commits are also allowed while the assignment is pending: producers treat
        REBALANCE_IN_PROGRESS as fatal.
        """
        if self.state is State.DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if generation < 0 and self.is_empty:
            return ErrorCode.NONE
        code = self._member_code(member_id, instance_id) or self._generation_code(generation)
        if code:
            return code
        self._hear_of(self.members[member_id], now)
        is_early = self.state is State.COMPLETING and not in_transaction
        return ErrorCode.REBALANCE_IN_PROGRESS if is_early else ErrorCode.NONE

    # ----- time

    def tick(self, now: float) -> list[Reply]:
        """Remove members that timed out, and end rebalances that have waited long enough."""
        for member_id in [member_id for member_id, until in self._pending.items() if until <= now]:
            del self._pending[member_id]
            self._complete_if_all_joined(now)
        for member in list(self.members.values()):
            if member.deadline <= now and not member.is_waiting:
                self._remove(member, now, f"sent no heartbeat for {member.request.session_timeout_ms} ms")
        if self.state is State.PREPARING and self._rebalance_until <= now:
            self._complete_join(now)
        if self._awaits_syncs and self._sync_until <= now:
            self._rebalance(now, "members did not send SyncGroup", without=self._unsynced)
        return self._taken()

    def lost(self, token: object, now: float) -> list[Reply]:
        """Handle the loss of a waiting request's connection: remove a dynamic member that never got its id."""
        for member in list(self.members.values()):
            if member.join_token is token and not member.is_named and member.request.instance_id is None:
                member.join_token = None
                self._remove(member, now, "has lost its connection")
        return self._taken()

    def release(self, code: ErrorCode) -> list[Reply]:
        """Answer all waiting requests with an error."""
        for member in self.members.values():
            self._refuse_waiting(member, code)
        return self._taken()

    @property
    def is_empty(self) -> bool:
        """Whether the group has no members."""
        return self.state is State.EMPTY

    def restart(self, now: float) -> None:
        """Start the session timeouts of members that were read from the log."""
        for member in self.members.values():
            self._hear_of(member, now)
        self._taken()

    def rebalance(self, now: float, reason: str) -> list[Reply]:
        """Let all members join again."""
        self._rebalance(now, reason)
        return self._taken()

    def kill(self) -> None:
        self._go(State.DEAD)

    # ----- joining

    def _refusal(self, join: Join) -> ErrorCode:
        if self.state is State.DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        is_known = join.member_id in self.members or join.instance_id in self.instances
        if (
            not is_known
            and len(self.members) + len(self._pending) >= self._max_size
            and (join.member_id not in self._pending)
        ):
            return ErrorCode.GROUP_MAX_SIZE_REACHED
        if not join.protocols or not join.protocol_type:
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        if self.members and (
            join.protocol_type != self.protocol_type
            or not common_protocols(self.members.values()) & {name for name, _ in join.protocols}
        ):
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        return ErrorCode.NONE

    def _join_new(self, join: Join, token: object, now: float) -> None:
        member_id = f"{join.client_id}-{uuid4()}"
        if join.requires_id:
            self._pending[member_id] = now + join.session_timeout_ms / 1000
            self._reply(token, refused_join(ErrorCode.MEMBER_ID_REQUIRED, member_id))
        else:
            self._add(member_id, join, token, now)

    def _join_static(self, join: Join, token: object, now: float) -> None:
        assert join.instance_id is not None
        member_id = f"{join.instance_id}-{uuid4()}"
        old_id = self.instances.get(join.instance_id)
        if old_id is None:
            self._add(member_id, join, token, now)
            return
        leader, before = self.leader, copy(self.members[old_id])
        member = self._replace(old_id, member_id)
        member.request = join
        if self.state is State.STABLE and choose_protocol(self.members.values()) == self.protocol:
            code = self._store(self)
            if code:  # the log still has the old member
                self._replace(member_id, old_id)
                self.members[old_id] = before
                self._reply(token, refused_join(code, join.member_id))
            else:
                self._hear_of(member, now)
                # it gets its old assignment; if it leads, it has nothing to assign
                if join.can_skip:
                    self._answer_joined(member, token, skips=leader == old_id)
                else:  # with the old leader's id, so that the member does not take itself for the leader and assign
                    self._reply(token, self._joined(member) | {"leader": leader or "", "members": []})
            return
        self._hear_of(member, now)
        self._joined_again(member, token, now, f"static member {join.instance_id} came back")

    def _joined_again(self, member: Member, token: object, now: float, reason: str) -> None:
        member.join_token = token
        if self.state is State.PREPARING:
            self._complete_if_all_joined(now)
        else:
            self._rebalance(now, reason)

    def _add(self, member_id: str, join: Join, token: object, now: float, *, is_named: bool = False) -> None:
        member = self.members[member_id] = Member(member_id, join, is_named=is_named, join_token=token)
        if join.instance_id is not None:
            self.instances[join.instance_id] = member_id
        if len(self.members) == 1:
            self.protocol_type = join.protocol_type
        self.leader = self.leader or member_id
        self._hear_of(member, now)
        if self.state is not State.PREPARING:
            self._rebalance(now, f"member {member_id} joins")
        elif self._initial_until is not None:
            self._rebalance_until = min(now + self._initial_delay, self._initial_until)
        else:
            self._complete_if_all_joined(now)

    def _rejoin(self, join: Join, token: object, now: float) -> None:
        code = self._member_code(join.member_id, join.instance_id)
        if code:
            self._reply(token, refused_join(code, join.member_id))
            return
        member = self.members[join.member_id]
        has_changed = member.request.protocols != join.protocols
        self._hear_of(member, now)
        if self.state is State.COMPLETING and not has_changed:
            self._answer_joined(member, token)  # the first response was lost
        elif self.state is State.STABLE and not has_changed and member.member_id != self.leader:
            self._answer_joined(member, token)
        else:
            if member.join_token is not None:
                self._reply(member.join_token, refused_join(ErrorCode.UNKNOWN_MEMBER_ID, member.member_id))
            member.request = join._replace(instance_id=member.request.instance_id)
            self._joined_again(member, token, now, f"member {member.member_id} joins again")

    # ----- rebalancing

    def _rebalance(self, now: float, reason: str, *, without: Iterable[str] = ()) -> None:
        _log.info("group %s rebalances after generation %d: %s", self.group_id, self.generation, reason)
        was_empty = self.is_empty
        for member in self.members.values():
            if member.sync_token is not None:
                self._reply(member.sync_token, refused_sync(ErrorCode.REBALANCE_IN_PROGRESS))
                member.sync_token = None
                self._hear_of(member, now)
        self._go(State.PREPARING)
        for member_id in list(without):
            self._forget(self.members[member_id])
        longest = max((member.request.rebalance_timeout_ms for member in self.members.values()), default=0) / 1000
        self._initial_until = now + max(longest, self._initial_delay) if was_empty and self._initial_delay else None
        self._rebalance_until = now + (longest if self._initial_until is None else self._initial_delay)
        self._complete_if_all_joined(now)

    def _complete_if_all_joined(self, now: float) -> None:
        if self.state is not State.PREPARING or self._initial_until is not None or self._pending:
            return
        if all(member.join_token is not None for member in self.members.values()):
            self._complete_join(now)

    def _complete_join(self, now: float) -> None:
        """Begin the next generation with static members and all members that have joined."""
        self._initial_until, self._rebalance_until = None, inf
        for member in list(self.members.values()):
            if member.join_token is None and member.request.instance_id is None:
                self._forget(member)
        joined = [member for member in self.members.values() if member.join_token is not None]
        if self.members and not joined:  # only static members are left: wait for them until their sessions end
            longest = max(member.request.rebalance_timeout_ms for member in self.members.values()) / 1000
            self._rebalance_until = now + max(longest, _SHORTEST_WAIT)  # clients may send a timeout of 0
            return
        self.generation = max(self.generation, self.reserved_generation) + 1
        if not joined:
            self.protocol = self.leader = None
            self._go(State.EMPTY)
            self._store(self)
            return
        if self.leader not in self.members or self.members[self.leader].join_token is None:
            self.leader = joined[0].member_id
        self.protocol = choose_protocol(self.members.values())
        self._go(State.COMPLETING)
        self._unsynced = set(self.members)
        self._sync_until = now + max(member.request.rebalance_timeout_ms for member in self.members.values()) / 1000
        _log.info(
            "group %s: generation %d of %d members, %s leads",
            *(self.group_id, self.generation, len(self.members), self.leader),
        )
        for member in joined:
            token, member.join_token = member.join_token, None
            self._hear_of(member, now)
            assert token is not None
            self._answer_joined(member, token)

    def _assign(self, assignments: dict[str, bytes], now: float) -> None:
        """Store the leader's assignment, then send it to the members."""
        for member in self.members.values():
            member.assignment = assignments.get(member.member_id, b"")
        code = self._store(self)
        if not code:
            self._go(State.STABLE)
        for member in self.members.values():
            if code:
                member.assignment = b""
            token, member.sync_token = member.sync_token, None
            if token is not None:
                self._hear_of(member, now)
                if code:
                    self._reply(token, refused_sync(code))
                else:
                    self._answer_synced(token, member.assignment)
        if code:
            self._rebalance(now, f"its assignment could not be written ({code.name})")

    def _remove(self, member: Member, now: float, reason: str) -> None:
        self._forget(member)
        if self.state is State.PREPARING:
            self._complete_if_all_joined(now)
        elif self.state in (State.STABLE, State.COMPLETING):
            self._rebalance(now, f"member {member.member_id} {reason}")

    # ----- members

    def _go(self, state: State) -> None:
        if state is not self.state:
            assert state in TRANSITIONS[self.state], f"{self.state} to {state}"
            self.state = state

    def _hear_of(self, member: Member, now: float) -> None:
        member.deadline = now + member.request.session_timeout_ms / 1000

    def _member_code(self, member_id: str, instance_id: str | None) -> ErrorCode:
        if self.state is State.DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if instance_id is not None and instance_id in self.instances and self.instances[instance_id] != member_id:
            return ErrorCode.FENCED_INSTANCE_ID
        member = self.members.get(member_id)
        if member is None or (instance_id is not None and member.request.instance_id != instance_id):
            return ErrorCode.UNKNOWN_MEMBER_ID
        return ErrorCode.NONE

    def _generation_code(self, generation: int) -> ErrorCode:
        return ErrorCode.NONE if generation == self.generation else ErrorCode.ILLEGAL_GENERATION

    def _replace(self, old_id: str, new_id: str) -> Member:
        member = self.members.pop(old_id)
        if old_id in self._unsynced:
            self._unsynced.remove(old_id)
            self._unsynced.add(new_id)
        self._refuse_waiting(member, ErrorCode.FENCED_INSTANCE_ID)
        member.member_id = new_id
        self.members[new_id] = member
        assert member.request.instance_id is not None
        self.instances[member.request.instance_id] = new_id
        if self.leader == old_id:
            self.leader = new_id
        return member

    def _forget(self, member: Member) -> None:
        del self.members[member.member_id]
        self._unsynced.discard(member.member_id)
        if member.request.instance_id is not None:
            self.instances.pop(member.request.instance_id, None)
        self._refuse_waiting(member, ErrorCode.UNKNOWN_MEMBER_ID)
        if self.leader == member.member_id:
            self.leader = next(iter(self.members), None)

    # ----- replies

    def _reply(self, token: object, message: dict[str, Any]) -> None:
        self._due.append(Reply(token, message))

    def _refuse_waiting(self, member: Member, code: ErrorCode) -> None:
        """Answer a member's waiting requests with an error."""
        if member.join_token is not None:
            self._reply(member.join_token, refused_join(code, member.member_id))
        if member.sync_token is not None:
            self._reply(member.sync_token, refused_sync(code))
        member.join_token = member.sync_token = None

    def _joined(self, member: Member) -> dict[str, Any]:
        member.is_named = True
        leads = member.member_id == self.leader
        return {
            "error_code": ErrorCode.NONE,
            "generation_id": self.generation,
            "protocol_type": self.protocol_type,
            "protocol_name": self.protocol,
            "leader": self.leader,
            "member_id": member.member_id,
            "members": [
                {
                    "member_id": member.member_id,
                    "group_instance_id": member.request.instance_id,
                    "metadata": member.metadata(self.protocol),
                }
                for member in (self.members.values() if leads else ())
            ],
        }

    def _answer_joined(self, member: Member, token: object, *, skips: bool = False) -> None:
        self._reply(token, self._joined(member) | {"skip_assignment": skips})

    def _answer_synced(self, token: object, assignment: bytes) -> None:
        protocol = {"protocol_type": self.protocol_type, "protocol_name": self.protocol}
        self._reply(token, {"error_code": ErrorCode.NONE, "assignment": assignment} | protocol)

    # ----- helpers

    @property
    def is_idle(self) -> bool:
        """Whether the group has no members and none is joining."""
        return self.is_empty and not self._pending

    @property
    def _awaits_syncs(self) -> bool:
        return bool(self._unsynced) and self.state in (State.COMPLETING, State.STABLE)

    def _taken(self) -> list[Reply]:
        """Return the replies that are due, and set `wake_at`."""
        self.wake_at = min(
            (
                *self._pending.values(),
                *(member.deadline for member in self.members.values() if not member.is_waiting),
                self._rebalance_until if self.state is State.PREPARING else inf,
                self._sync_until if self._awaits_syncs else inf,
            ),
            default=inf,
        )
        due, self._due = self._due, []
        return due


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
