"""States of a group, and the changes between them that may happen."""

from __future__ import annotations

from enum import Enum


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
