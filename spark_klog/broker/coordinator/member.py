"""A member of a group, and the requests that it waits for an answer to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Join(NamedTuple):
    """A JoinGroup request. Times in ms; `protocols` are (name, metadata) in the member's order of preference.

    `requires_id`: a new member is told its id first, and joins with it (KIP-394, from version 4 on). `can_skip`: the
    member understands that it leads, but need not assign anything (KIP-814, from version 9 on).
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
    """A member that the group knows. `deadline` (s) is when it is taken for dead unless it is heard of."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]
    assignment: bytes = b""
    deadline: float = 0.0
    #: Whether it has been told its id.
    is_named: bool = False
    #: Whose answer is due: the caller's, opaque here.
    join_token: object | None = field(default=None, repr=False)
    sync_token: object | None = field(default=None, repr=False)

    @classmethod
    def joining(cls, member_id: str, join: Join) -> Member:
        """A new member of that id."""
        return cls(
            member_id,
            join.instance_id,
            join.client_id,
            join.client_host,
            join.session_timeout_ms,
            join.rebalance_timeout_ms,
            join.protocols,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its protocols."""
        return tuple(name for name, _ in self.protocols)

    @property
    def is_waiting(self) -> bool:
        """Whether an answer of ours is due: a member that waits can't send heartbeats."""
        return self.join_token is not None or self.sync_token is not None

    def metadata(self, protocol: str | None) -> bytes:
        """What it says for a protocol."""
        return dict(self.protocols).get(protocol or "", b"")

    def described_to_leader(self, protocol: str | None) -> dict[str, Any]:
        """Its entry in the answer to the leader's JoinGroup."""
        return {
            "member_id": self.member_id,
            "group_instance_id": self.instance_id,
            "metadata": self.metadata(protocol),
        }

    def update(self, join: Join) -> None:
        """Take in what it says anew."""
        self.protocols = join.protocols
        self.session_timeout_ms, self.rebalance_timeout_ms = join.session_timeout_ms, join.rebalance_timeout_ms
        self.client_id, self.client_host = join.client_id, join.client_host


def common_protocols(members: Iterable[Member]) -> set[str]:
    """The protocols that all members have; there is at least one member."""
    return set.intersection(*(set(member.names) for member in members))


def choose_protocol(members: Collection[Member]) -> str | None:
    """Of the protocols that all members have, the one that most of them prefer; None if there is none."""
    common = common_protocols(members)
    votes = Counter(next(name for name in member.names if name in common) for member in members if common)
    return max(votes, key=lambda name: votes[name], default=None)
