"""What a consumer group (KIP-848) consists of: its epochs, its members, what each has and what each is to have.

A member moves towards its target in steps, one a heartbeat. It first gives up what it is no longer to have, and gets
what others have given up:

    STABLE      it has its target of its epoch
    UNREVOKED   it must give up partitions before its next epoch; it says so by no longer listing them as its own
    UNRELEASED  it is in the target's epoch, and waits for partitions that other members have not given up
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple
from uuid import UUID

from spark_klog.protocol.codec import encode_versioned
from spark_klog.protocol.tables.groups import MEMBER_ASSIGNMENT, STATIC_LEAVE_EPOCH

#: A partition: the id of its topic, and its number.
Partition = tuple[UUID, int]
Partitions = frozenset[Partition]
NO_PARTITIONS: Partitions = frozenset()


class MemberState(IntEnum):
    """State of a member, as its record has it."""

    STABLE = 0
    UNREVOKED = 1
    UNRELEASED = 2


class ClassicProtocols(NamedTuple):
    """What a member of the classic protocol has told beside its subscription; `protocols` are (name, metadata)."""

    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a member has told of itself; times in ms. Without a preference `assignor` is None.

    `classic` is None for a member of the consumer protocol.
    """

    instance_id: str | None
    rack_id: str | None
    client_id: str
    client_host: str
    topics: frozenset[str]
    regex: str | None
    rebalance_timeout_ms: int
    assignor: str | None
    classic: ClassicProtocols | None = None

    @property
    def choice(self) -> tuple[object, ...]:
        """What the assignment depends on."""
        return self.topics, self.regex, self.assignor


@dataclass(frozen=True, slots=True)
class ConsumerMember:
    """A member in its epoch: `assigned` is what it has or may take, `revoking` what it has yet to give up."""

    member_id: str
    subscription: Subscription
    epoch: int = 0
    previous_epoch: int = 0
    state: MemberState = MemberState.STABLE
    assigned: Partitions = NO_PARTITIONS
    revoking: Partitions = NO_PARTITIONS
    #: The member's epochs in which it got partitions that it holds, so far as they are known (KIP-1251).
    since: Mapping[Partition, int] = field(default_factory=dict, compare=False)

    @property
    def held(self) -> Partitions:
        """Partitions that no other member may get."""
        return self.assigned | self.revoking

    def had(self, partitions: Partitions, epoch: int) -> bool:
        """Whether the member has had these partitions since an earlier epoch of its, without a break."""
        held = self.held
        return bool(partitions) and all(
            each in held and self.since.get(each, self.epoch) <= epoch for each in partitions
        )

    @property
    def has_left(self) -> bool:
        """Whether a static member has left for a while; its partitions wait for it."""
        return self.epoch == STATIC_LEAVE_EPOCH

    def left_for_a_while(self, target: Partitions) -> ConsumerMember:
        """The static member after it has closed: what it has yet to give up is free, as it reads nothing any more."""
        return replace(
            self,
            epoch=STATIC_LEAVE_EPOCH,
            previous_epoch=self.epoch,
            state=MemberState.STABLE,
            assigned=self.assigned & target,
            revoking=NO_PARTITIONS,
        )

    def reconciled(
        self, target: Partitions, epoch: int, owned: Partitions | None, is_free: Callable[[Partition], bool]
    ) -> ConsumerMember:
        """The member after its next step to the target of this epoch.

        `owned` is what the member says it owns, None if it does not say. `is_free` tells whether no other member holds
        a partition.
        """
        if self.state is MemberState.UNREVOKED:
            if owned is None or owned & self.revoking:
                return self
            return self._next(self.epoch + 1, target, epoch, owned, is_free)
        if self.state is MemberState.STABLE and self.epoch == epoch:
            return self
        return self._next(self.epoch, target, epoch, owned, is_free)

    def _next(
        self,
        own_epoch: int,
        target: Partitions,
        epoch: int,
        owned: Partitions | None,
        is_free: Callable[[Partition], bool],
    ) -> ConsumerMember:
        kept = self.assigned & target
        surplus = self.assigned - kept
        if surplus and (owned is None or owned & surplus):
            return self._moved(own_epoch, MemberState.UNREVOKED, kept, surplus)
        missing = target - kept
        released = frozenset(filter(is_free, missing))
        state = MemberState.STABLE if released == missing else MemberState.UNRELEASED
        return self._moved(epoch, state, kept | released, NO_PARTITIONS)

    def _moved(self, epoch: int, state: MemberState, assigned: Partitions, revoking: Partitions) -> ConsumerMember:
        previous = self.previous_epoch if epoch == self.epoch else self.epoch
        if (epoch, state, assigned, revoking) == (self.epoch, self.state, self.assigned, self.revoking):
            return self
        held = self.held
        since = {
            partition: self.since.get(partition, self.epoch) if partition in held else epoch
            for parts in (assigned, revoking)
            for partition in parts
        }
        return replace(
            self, epoch=epoch, previous_epoch=previous, state=state, assigned=assigned, revoking=revoking, since=since
        )


@dataclass(slots=True)
class Membership:
    """A consumer group at one moment. Copies share the members, which do not change: a copy costs little."""

    #: Grows with each change of members, subscriptions or subscribed topics.
    epoch: int = 0
    #: The group's epoch for which the targets were computed.
    assignment_epoch: int = 0
    members: dict[str, ConsumerMember] = field(default_factory=dict)
    #: The partitions that each member is to have.
    targets: dict[str, Partitions] = field(default_factory=dict)
    #: The member that holds each partition.
    holders: dict[Partition, str] = field(default_factory=dict)
    #: Id and number of partitions of each subscribed topic that exists.
    topics: dict[str, tuple[UUID, int]] = field(default_factory=dict)

    def copy(self) -> Membership:
        return replace(
            self,
            members=dict(self.members),
            targets=dict(self.targets),
            holders=dict(self.holders),
        )

    def put(self, member: ConsumerMember) -> None:
        """Add or replace a member."""
        before = self.members.get(member.member_id)
        if before is member:
            return
        if before is not None:
            self._release(before)
        self.members[member.member_id] = member
        for partition in member.held:
            self.holders[partition] = member.member_id

    def remove(self, member_id: str) -> None:
        self._release(self.members.pop(member_id))
        self.targets.pop(member_id, None)

    def _release(self, member: ConsumerMember) -> None:
        for partition in member.held:
            if self.holders.get(partition) == member.member_id:
                del self.holders[partition]

    def static_member(self, instance_id: str) -> ConsumerMember | None:
        """The member with that group.instance.id."""
        each = (member for member in self.members.values() if member.subscription.instance_id == instance_id)
        return next(each, None)

    def reconcile(self, member_id: str, owned: Partitions | None) -> None:
        """Take a member's next step to its target."""
        member = self.members[member_id]
        target = self.targets.get(member_id, NO_PARTITIONS)

        def is_free(partition: Partition) -> bool:
            return self.holders.get(partition, member_id) == member_id

        self.put(member.reconciled(target, self.assignment_epoch, owned, is_free))


def topic_partitions(partitions: Partitions) -> list[dict[str, Any]]:
    """Partitions as a field of a response or record, by topic id."""
    numbers: dict[UUID, list[int]] = {}
    for topic_id, number in sorted(partitions):
        numbers.setdefault(topic_id, []).append(number)
    return [{"topic_id": key, "partitions": some} for key, some in numbers.items()]


def partitions_of(rows: list[dict[str, Any]]) -> Partitions:
    """The reverse of `topic_partitions`."""
    return frozenset((row["topic_id"], number) for row in rows for number in row["partitions"])


def encode_assignment(partitions: Partitions, names: Mapping[UUID, str]) -> bytes:
    """Partitions as a member of the classic protocol gets them; `names` are the topics' by id."""
    rows = [
        {"topic": names[row["topic_id"]], "partitions": row["partitions"]}
        for row in topic_partitions(partitions)
        if row["topic_id"] in names
    ]
    return encode_versioned(MEMBER_ASSIGNMENT, 0, {"assigned_partitions": rows})
