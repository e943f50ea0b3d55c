"""A member of a group, with its requests that wait for an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


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
    """A member that the group knows; it times out at `deadline` (s)."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]
    assignment: bytes = b""
    deadline: float = 0.0
    #: Whether the client knows its member id.
    is_named: bool = False
    #: Token of the waiting request: the caller's object, opaque here.
    join_token: object | None = field(default=None, repr=False)
    sync_token: object | None = field(default=None, repr=False)

    @classmethod
    def joining(cls, member_id: str, join: Join) -> Member:
        """Make a new member with that id."""
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
        """Whether the member waits for a response; it can't send heartbeats meanwhile."""
        return self.join_token is not None or self.sync_token is not None

    def metadata(self, protocol: str | None) -> bytes:
        """The member's metadata for a protocol, empty if it has none."""
        return dict(self.protocols).get(protocol or "", b"")

    def described_to_leader(self, protocol: str | None) -> dict[str, Any]:
        """The member's entry in the JoinGroup response to the leader."""
        return {
            "member_id": self.member_id,
            "group_instance_id": self.instance_id,
            "metadata": self.metadata(protocol),
        }

    def update(self, join: Join) -> None:
        """Take over the fields of a new JoinGroup request."""
        self.protocols = join.protocols
        self.session_timeout_ms, self.rebalance_timeout_ms = join.session_timeout_ms, join.rebalance_timeout_ms
        self.client_id, self.client_host = join.client_id, join.client_host


def common_protocols(members: Iterable[Member]) -> set[str]:
    """The protocols that all members support; at least one member is required."""
    return set.intersection(*(set(member.names) for member in members))


def choose_protocol(members: Collection[Member]) -> str | None:
    """The protocol that most members prefer among those that all support; None if they share none."""
    common = common_protocols(members)
    votes = Counter(next(name for name in member.names if name in common) for member in members if common)
    return max(votes, key=lambda name: votes[name], default=None)
