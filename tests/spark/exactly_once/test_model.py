"""All interleavings write each row once or report the lost ones; and the model finds planted faults.

`SPARK_KLOG_EXACTLY_ONCE=full` (make soak) searches with more restarts, copies and timeouts.
"""

from __future__ import annotations

import os

import pytest

from spark_klog.spark.write.exactly_once import (
    Abort,
    Begun,
    Claim,
    Commit,
    DecidedButAborted,
    Decision,
    Ended,
    ListOpen,
    Log,
    Program,
    ReadLog,
    Transaction,
    _append,
    _commit,
    finish,
)
from tests.support.runs.figures import count

from .model import Design, Search, Violation, World

full = pytest.mark.skipif(os.environ.get("SPARK_KLOG_EXACTLY_ONCE") != "full", reason="part of make soak")


def no_decision(begun: Begun, batch: int, transactions: tuple[Transaction, ...]) -> Program[None]:
    yield Commit(transactions)


def decision_after_ends(begun: Begun, batch: int, transactions: tuple[Transaction, ...]) -> Program[None]:
    yield Commit(transactions)
    yield from _append(begun.number, Decision(batch, transactions))
    yield from _append(begun.number + 1, Ended())


def no_ended(begun: Begun, batch: int, transactions: tuple[Transaction, ...]) -> Program[None]:
    if batch > begun.decided:
        yield from _append(begun.number, Decision(batch, transactions))
        if not all((yield Commit(transactions))):
            raise DecidedButAborted(batch, transactions)


def no_sweep(begun: Begun, batch: int, transactions: tuple[Transaction, ...]) -> Program[None]:
    if batch > begun.decided:
        decision = Decision(batch, transactions)
        yield from _append(begun.number, decision)
        yield from _commit(decision, begun.number + 1)


def careless_begin(*, sweeps: bool = True, ends_first: bool = True, marks: bool = True) -> Program[Begun]:
    """`begin` with one of its precautions left out."""
    entries = (yield ReadLog()).entries
    number = len(entries)
    yield from _append(number, Claim())
    decisions = [place for place, entry in enumerate(entries) if isinstance(entry, Decision)]
    if decisions and ends_first and Ended() not in entries[decisions[-1] :]:
        if marks:
            number += 1
            yield from _commit(entries[decisions[-1]], number)
        else:
            last = entries[decisions[-1]]
            if not all((yield Commit(last.transactions))):
                raise DecidedButAborted(last.batch, last.transactions)
    if sweeps and (found := (yield ListOpen())):
        yield Abort(found)
    return Begun(number + 1, entries[decisions[-1]].batch if decisions else -1)


def abort(transactions: tuple[Transaction, ...]) -> Program[None]:
    yield Abort(transactions)


@pytest.mark.parametrize(
    ("world", "batches"),
    [
        pytest.param(World(restarts_left=2, copies_left=0), 3, id="restarts"),
        pytest.param(World(restarts_left=1, copies_left=1), 2, id="restart-and-copy"),
        pytest.param(World(restarts_left=1, twins_left=1, copies_left=0), 2, id="two-runs"),
        pytest.param(
            World(restarts_left=2, twins_left=1, copies_left=0),
            1,
            id="two-runs-and-a-restart",
            marks=pytest.mark.test_all("long"),
        ),
        pytest.param(World(restarts_left=1, copies_left=0, timeouts_left=1), 3, id="timeout"),
        pytest.param(
            World(restarts_left=1, copies_left=1, verifies=True),
            2,
            id="brokers-that-verify",
            marks=pytest.mark.test_all("long"),
        ),
        pytest.param(World(restarts_left=1, copies_left=0, failures_left=1), 2, id="failure"),
        pytest.param(
            World(twins_left=1, copies_left=0, failures_left=1),
            1,
            id="failure-of-two-runs",
            marks=pytest.mark.test_all("long"),
        ),
        pytest.param(World(restarts_left=1, copies_left=1, failures_left=1), 2, id="failure-and-copy", marks=full),
        pytest.param(World(restarts_left=2, copies_left=1), 3, id="restarts-and-copy", marks=full),
        pytest.param(World(restarts_left=1, twins_left=1, copies_left=1), 1, id="two-runs-and-copy", marks=full),
        pytest.param(World(restarts_left=1, twins_left=1, copies_left=0), 3, id="two-runs-of-three", marks=full),
        pytest.param(World(restarts_left=1, copies_left=1, timeouts_left=1), 2, id="copy-and-timeout", marks=full),
    ],
)
def test_every_row_is_there_once_or_reported(world: World, batches: int) -> None:
    search = Search(batches=batches)
    search.run(world)
    count("states", search.seen)
    assert search.finished
    assert bool(search.reported) == bool(world.timeouts_left)
    assert bool(search.superseded) == bool(world.twins_left)


@pytest.mark.parametrize(
    ("design", "world", "message"),
    [
        pytest.param(Design(finish=no_decision), World(), "twice", id="no decision"),
        pytest.param(Design(finish=decision_after_ends), World(), "twice", id="decision after the ends"),
        pytest.param(Design(is_exclusive=False), World(twins_left=1), "none timed out", id="no fencing of drivers"),
        pytest.param(Design(has_ids_by_task=True), World(), "none timed out", id="ids by task"),
        pytest.param(
            Design(careless_begin),
            World(restarts_left=1, twins_left=1),
            "none timed out",
            id="aborts what a later run wrote",
        ),
        pytest.param(
            Design(lambda: careless_begin(sweeps=False), no_sweep),
            World(),
            "stay open",
            id="undecided transactions are not aborted",
        ),
        pytest.param(
            Design(lambda: careless_begin(ends_first=False)),
            World(),
            "missing",
            id="decided transactions are not ended after a restart",
        ),
        pytest.param(
            Design(lambda: careless_begin(marks=False), no_ended),
            World(restarts_left=2),
            "none timed out",
            id="ends are not marked",
        ),
        pytest.param(
            Design(give_up=lambda _begun, transactions: abort(transactions)),
            World(twins_left=1, copies_left=0, failures_left=1),
            "none timed out",
            id="a run that was overtaken aborts what it has decided",
        ),
        pytest.param(Design(fences=False), World(), "no coordinator knows", id="aborts without another epoch"),
        pytest.param(
            Design(keeps_epochs=False),
            World(restarts_left=2, twins_left=1, copies_left=0),
            "none timed out",
            id="ids that a driver has fenced are used again",
            marks=pytest.mark.test_all("long"),
        ),
    ],
)
def test_planted_faults_are_found(design: Design, world: World, message: str) -> None:
    with pytest.raises(Violation, match=message):
        Search(design, batches=2).run(world)


def test_errors_name_what_is_lost() -> None:
    program = finish(Begun(1, 4), 5, (Transaction("a", 7, 0, 0), Transaction("b", 8, 0, 1)))
    next(program)
    program.send(True)
    program.send((True, False))
    with pytest.raises(DecidedButAborted, match=r"micro-batch 5: the rows of task 1 are not written") as caught:
        program.send(Log((Claim(), Decision(5, ()))))
    assert caught.value.lost == (Transaction("b", 8, 0, 1),)
