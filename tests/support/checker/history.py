"""A history of clients for a checker: writes with their outcomes, and reads with their records.

Times are ticks of one counter, which orders events of different threads. A process is one client instance; the
instance that takes over its work is another process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum


class Outcome(Enum):
    """The outcome of a write as its client knows it."""

    OK = "acknowledged"
    FAILED = "aborted"  # it did not happen and never will
    UNKNOWN = "unknown"  # it may happen now, later or never, but only as a whole


@dataclass(frozen=True, slots=True)
class Sent:
    """A record given to a producer; `offset` is from the broker's answer, None if no answer came."""

    partition: int
    value: str
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Write:
    """One record of an idempotent producer, or all records of a transaction in the order of sending."""

    process: str
    outcome: Outcome
    sent: tuple[Sent, ...]
    is_transaction: bool
    began: int
    #: When the commit of the transaction was requested.
    commit_began: int
    ended: int


@dataclass(frozen=True, slots=True)
class Seen:
    """A record that a consumer received."""

    partition: int
    offset: int
    value: str


@dataclass(frozen=True, slots=True)
class Read:
    """The records of one poll, in order. A process reads all partitions from the first offset and never seeks."""

    process: str
    is_committed: bool  # the consumer's isolation level is read_committed
    #: From a separate reader that read all records, after all writes had ended.
    is_final: bool
    seen: tuple[Seen, ...]
    began: int
    ended: int


@dataclass
class History:
    """Writes in any order, and reads with each process's polls in order. Threads may append."""

    writes: list[Write] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    _ticks: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def tick(self) -> int:
        """The current time: greater than all returned before, in any thread."""
        return next(self._ticks)
