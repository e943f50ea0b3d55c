"""The two-phase commit of a stream's micro-batches, as programs that yield actions and receive their results.

Each attempt of a task writes in a transaction of its own and does not end it; its commit message has the transaction.
The driver keeps a decision log in a topic. Entries are numbered, and an entry can be appended only at a
number that is free, so a driver that another one has overtaken can append nothing more:

* `Claim`: a micro-batch begins. Drivers of earlier claims can't decide any more.
* `Decision`: these transactions are the micro-batch; all others of the query are aborted.
* `Ended`: all transactions of the decision are committed.

Spark calls the sink before the tasks of each micro-batch (`begin`) and after them (`finish`). `begin` ends what an
earlier driver decided and did not end, and aborts what no driver decided. It ends nothing that is followed by `Ended`:
those producers may be in other transactions already.

A transactional id belongs to the Python worker that drew it, and not to a task's number: Kafka lets the last
InitProducerId win, and a late copy of a task, with the same id, would abort a transaction that the driver has decided.
A worker may use an id again for a later claim, as `begin` has ended all transactions of the claims before; but only
with the epoch that it had (KIP-360), not one that a driver has fenced: Kafka's InitProducerId aborts whatever is open,
and that of a driver which was overtaken may come late.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from spark_klog.client.producer.transactions import PreparedTransaction
from spark_klog.errors import ErrorWithFields

_T = TypeVar("_T")


@dataclass(frozen=True)
class Transaction(PreparedTransaction):
    """A transaction, and the number of the task that wrote in it."""

    task: int = -1


@dataclass(frozen=True)
class Claim:
    """A driver begins a micro-batch."""


#: How `planned` begins in the decision of a batch write that has a plan; that of others has their topic.
PLAN = "plan "


@dataclass(frozen=True)
class Decision:
    """The transactions that make up a micro-batch; `planned` tells others of its number apart."""

    batch: int
    transactions: tuple[Transaction, ...]
    planned: str = ""


@dataclass(frozen=True)
class Ended:
    """All transactions of the decision before are committed."""


Entry: TypeAlias = Claim | Decision | Ended


@dataclass(frozen=True)
class Log:
    """The entries of a decision log from number `first` on. The last decision and all that follows it are there."""

    entries: tuple[Entry, ...] = ()
    first: int = 0

    @property
    def end(self) -> int:
        """The next free number."""
        return self.first + len(self.entries)

    @property
    def decided(self) -> int:
        """The last decided micro-batch, -1 before the first."""
        return max((entry.batch for entry in self.entries if isinstance(entry, Decision)), default=-1)


@dataclass(frozen=True)
class ReadLog:
    """Read the decision log. Result: a `Log` of all entries that were appended before.

    With `may_lag` the last ones may be missing: an append to what was read tells, see `DecisionLog.read`.
    """

    may_lag: bool = False


@dataclass(frozen=True)
class Append:
    """Make an entry durable at a number. Result: False, and no change, if the number is taken."""

    number: int
    entry: Entry


@dataclass(frozen=True)
class Commit:
    """EndTxn of transactions, in any order.

    Result: for each in turn, True if it is committed, now or before; False if the broker has aborted it.
    """

    transactions: tuple[Transaction, ...]


@dataclass(frozen=True)
class Abort:
    """InitProducerId of transactions in any order, by producer id and epoch.

    It aborts with the next epoch, so that leaders refuse what a late attempt still writes: after EndTxn, brokers from
    3.0 to 3.5 would take it, and open a transaction that no coordinator ends. No result that counts; a transaction that
    has ended already stays as it is.
    """

    transactions: tuple[Transaction, ...]


@dataclass(frozen=True)
class ListOpen:
    """ListTransactions. Result: tuple of the open transactions of the query."""


Action: TypeAlias = ReadLog | Append | Commit | Abort | ListOpen
Program: TypeAlias = Generator[Action, Any, _T]


class Superseded(ErrorWithFields):
    """Another run of the query uses the checkpoint. It ends what this one has decided, and aborts the rest."""

    def __init__(self) -> None:
        super().__init__("another run of this query uses the checkpoint: stop one of the two")


class DecidedButAborted(ErrorWithFields):
    """The broker aborted transactions of a micro-batch that was decided: they timed out before they were committed."""

    def __init__(self, batch: int, lost: tuple[Transaction, ...]) -> None:
        self.batch, self.lost = batch, lost
        tasks = ", ".join(str(transaction.task) for transaction in lost)
        super().__init__(
            f"micro-batch {batch}: the rows of task {tasks} are not written: the broker aborted their transactions "
            "after kafka.transaction.timeout.ms. The rows of its other tasks are written. To write the whole "
            "micro-batch again, those rows for the second time, stop the query and call "
            f"spark_klog.spark.decisions.continue_at(OPTIONS, {batch}) with the options of its writer"
        )


@dataclass(frozen=True)
class Begun:
    """A micro-batch that may run: `number` is the next free one of the log, `decided` the last decided batch or -1.

    Tasks of batches up to `decided` write nothing. Workers compare `number` to tell later claims from earlier ones.
    `planned` is that of the last decision.
    """

    number: int
    decided: int
    planned: str = ""


def begin() -> Program[Begun]:
    """Claim the log and settle earlier micro-batches; run it before the tasks of each micro-batch.

    Raises `Superseded` if another driver claims at the same time, `DecidedButAborted` if a decided one can't be ended.
    """
    log: Log = yield ReadLog(may_lag=True)
    entries, number = log.entries, log.end
    yield from _append(number, Claim())
    decisions = [place for place, entry in enumerate(entries) if isinstance(entry, Decision)]
    last = entries[decisions[-1]] if decisions else None
    if isinstance(last, Decision) and Ended() not in entries[decisions[-1] :]:
        yield from _commit(last, number + 1)
        number += 1
    number += 1
    yield from _sweep(number)
    return Begun(number, last.batch, last.planned) if isinstance(last, Decision) else Begun(number, -1)


def finish(begun: Begun, batch: int, transactions: tuple[Transaction, ...], planned: str = "") -> Program[None]:
    """Decide a micro-batch, then commit its transactions; run it when all of its tasks have reported.

    Raises `Superseded` if another driver has claimed, `DecidedButAborted` if a transaction has timed out.
    """
    if batch <= begun.decided:
        return
    decision = Decision(batch, transactions, planned)
    yield from _append(begun.number, decision)
    yield from _commit(decision, begun.number + 1)
    yield from _sweep(begun.number + 2)


def give_up(begun: Begun, transactions: tuple[Transaction, ...] = ()) -> Program[None]:
    """Settle a micro-batch that Spark has given up; raises as `begin`. `transactions` are those that its tasks told.

    If another driver has claimed at the number of this one's decision, nobody decides these transactions, and no worker
    uses their ids again: they are aborted here, as that driver may have ended before they were opened. All others are
    left to it.
    """
    log: Log = yield ReadLog()
    later = log.entries[max(0, begun.number - log.first) :]
    if log.first <= begun.number and Claim() not in later:
        yield from begin()
    elif log.first <= begun.number and later[0] == Claim() and transactions:
        yield Abort(transactions)


def _append(number: int, entry: Entry) -> Program[None]:
    if not (yield Append(number, entry)):
        raise Superseded


def _commit(decision: Decision, number: int) -> Program[None]:
    """Commit the transactions of a decision and append `Ended` at `number`."""
    are_committed: Sequence[bool] = (yield Commit(decision.transactions)) if decision.transactions else ()
    lost = [task for task, is_committed in zip(decision.transactions, are_committed, strict=True) if not is_committed]
    if lost:
        log: Log = yield ReadLog()
        if log.end > number:  # a later driver may have committed them and used their producers again
            raise Superseded
        raise DecidedButAborted(decision.batch, tuple(lost))
    yield from _append(number, Ended())


def _sweep(number: int) -> Program[None]:
    """Abort open transactions, all undecided; `number` is the next free one of the log.

    If the log is not longer after they were listed, none of them belongs to a later claim. A later claim fences them
    itself before its tasks begin, so that no producer uses their ids again.
    """
    undecided: tuple[Transaction, ...] = yield ListOpen()
    if not undecided:
        return
    log: Log = yield ReadLog()
    if log.end > number:
        raise Superseded
    yield Abort(undecided)
