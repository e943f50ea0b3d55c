"""What clients did and saw, as a checker reads it: writes with their outcome, reads with what came.

Times are ticks of one counter, so that of two moments in different threads it is known which was first. A process is
one client from its making to its end; another one that takes over its work has another name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum


class Outcome(Enum):
    """How a write ended, as far as its client can know."""

    OK = "acknowledged"
    FAILED = "aborted"  # it has not happened, and never will
    UNKNOWN = "unknown"  # it has happened, or will, or never: but as a whole


@dataclass(frozen=True, slots=True)
class Sent:
    """A record given to a producer; `offset` is what the broker answered, None where no answer came."""

    partition: int
    value: str
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Write:
    """One record of an idempotent producer, or all records of a transaction, in the order in which they were sent."""

    process: str
    outcome: Outcome
    sent: tuple[Sent, ...]
    is_transaction: bool
    began: int
    #: When the commit of a transaction was asked for.
    commit_began: int
    ended: int


@dataclass(frozen=True, slots=True)
class Seen:
    """A record that a consumer was given."""

    partition: int
    offset: int
    value: str


@dataclass(frozen=True, slots=True)
class Read:
    """What one poll gave, in its order. A process reads all partitions from their first offset on, and never seeks."""

    process: str
    is_committed: bool  # its isolation level is read_committed
    #: Everything, read in one by a reader of its own, after all writes have ended.
    is_final: bool
    seen: tuple[Seen, ...]
    began: int
    ended: int


@dataclass
class History:
    """`writes` in any order, `reads` of a process in the order of its polls. Threads may append."""

    writes: list[Write] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    _ticks: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def tick(self) -> int:
        """The time: greater than any that was told before, in whatever thread."""
        return next(self._ticks)
