"""State machine of Spark, brokers and checkpoint around the protocol's programs, and a search of all its states.

The modelled Spark runs one query several times. A run may stop after any step, or continue after the next run has
begun. Each run splits rows into tasks in its own way. Copies of tasks write at any time, also after their run ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from spark_klog.spark.write import exactly_once
from spark_klog.spark.write.exactly_once import (
    Abort,
    Append,
    Begun,
    Commit,
    DecidedButAborted,
    Entry,
    ListOpen,
    Log,
    Program,
    ReadLog,
    Superseded,
    Transaction,
)

#: Ways to split the three rows of a micro-batch into tasks; the runs use them in turn.
PARTITIONINGS = (((0,), (1,), (2,)), ((0, 1), (2,)), ((0, 1, 2),))
OPEN, COMMITTED, ABORTED = "open", "committed", "aborted"


class Violation(AssertionError):
    """Rows are duplicated, missing, or reported lost without a timeout; or transactions stay open, or open again."""


@dataclass(frozen=True)
class Producer:
    """The coordinator's state of a transactional id, and the last claim that its worker used it for.

    `known` is the epoch that the worker has, `leader` the highest that the partitions' leaders have seen.
    """

    epoch: int
    state: str
    rows: tuple[int, ...]
    claim: int
    known: int
    leader: int


@dataclass(frozen=True)
class Copy:
    """Another attempt of a task; `transaction` is set once it has written, `has_more` until it has written again."""

    run: int
    begun: Begun
    batch: int
    task: int
    rows: tuple[int, ...]
    transaction: Transaction | None = None
    has_more: bool = False


_NOT_BEGUN = Begun(0, -1)


@dataclass(frozen=True)
class Run:
    """A run of the query. `results` holds the results of the actions of the phase's program so far.

    `part` holds the results of a `Commit` or `Abort` under way, one per transaction: None until it has ended.
    """

    number: int
    batch: int
    phase: str = "begin"
    results: tuple[Any, ...] = ()
    part: tuple[bool | None, ...] = ()
    begun: Begun = _NOT_BEGUN
    messages: tuple[Transaction | None, ...] = ()


@dataclass(frozen=True)
class World:
    """A state of the model. `copies_left` etc. bound the search.

    Brokers before 3.6 do not verify (KIP-890): a leader takes any record of the producer's current epoch.
    """

    log: tuple[Entry, ...] = ()
    producers: tuple[Producer, ...] = ()
    rows: frozenset[int] = frozenset()
    checkpoint: int = 0
    runs: tuple[Run, ...] = (Run(0, 0),)
    copies: tuple[Copy, ...] = ()
    restarts_left: int = 1
    twins_left: int = 0
    copies_left: int = 1
    timeouts_left: int = 0
    #: Micro-batches that Spark gives up: before all tasks have reported, or as the run was superseded.
    failures_left: int = 0
    timed_out: bool = False
    started: int = 1
    had_twins: bool = False
    verifies: bool = False


@dataclass(frozen=True)
class Design:
    """The protocol's programs, and the guarantees that they rely on; tests plant faults here."""

    begin: Callable[[], Program[Begun]] = exactly_once.begin
    finish: Callable[[Begun, int, tuple[Transaction, ...]], Program[None]] = exactly_once.finish
    give_up: Callable[[Begun, tuple[Transaction, ...]], Program[None]] = exactly_once.give_up
    is_exclusive: bool = True
    has_ids_by_task: bool = False
    #: Whether an abort gives the producer the next epoch, and whether a worker uses no id again that has another one.
    fences: bool = True
    keeps_epochs: bool = True


@dataclass
class Search:
    """Visit every reachable state. A wrong one raises `Violation` with the steps that lead to it."""

    design: Design = field(default_factory=Design)
    batches: int = 3
    seen: int = 0
    finished: int = 0
    reported: int = 0
    superseded: int = 0

    def run(self, start: World, most: int = 10_000_000) -> None:
        visited = {start}
        waiting: list[tuple[World, Any]] = [(start, None)]
        while waiting:
            world, way = waiting.pop()
            for step, following in self.steps(world, way):
                if following not in visited:
                    visited.add(following)
                    waiting.append((following, (step, way)))
            assert len(visited) <= most, "more states than the test is for"
        self.seen = len(visited)

    def steps(self, world: World, way: Any) -> Iterator[tuple[str, World]]:
        try:
            yield from self._runs(world)
            yield from self._copies(world)
        except Violation as violation:
            text = []
            while way:
                text.append(way[0])
                way = way[1]
            raise Violation(f"{violation}, after: {'; '.join(reversed(text))}") from None
        for place, producer in enumerate(world.producers):
            if world.timeouts_left and producer.state == OPEN:
                gone = replace(
                    _with(world, place, _fenced(producer)), timeouts_left=world.timeouts_left - 1, timed_out=True
                )
                yield f"id {place} times out", gone
        if world.restarts_left and world.checkpoint < self.batches:
            new = Run(world.started, world.checkpoint)
            fewer = replace(world, restarts_left=world.restarts_left - 1, started=world.started + 1)
            yield "restart", replace(fewer, runs=(new,))
            if world.twins_left and len(world.runs) == 1:
                twins = (*world.runs, new)
                yield "second run", replace(fewer, runs=twins, twins_left=world.twins_left - 1, had_twins=True)

    def _runs(self, world: World) -> Iterator[tuple[str, World]]:
        for place, run in enumerate(world.runs):

            def after(new: Run | None, world: World = world, place: int = place) -> World:
                runs = list(world.runs)
                runs[place : place + 1] = [new] if new is not None else []
                return replace(world, runs=tuple(runs))

            name = f"run {run.number} batch {run.batch}"
            tasks = PARTITIONINGS[run.number % len(PARTITIONINGS)]
            if run.phase == "tasks":
                missing = [task for task, message in enumerate(run.messages) if message is None]
                if missing:
                    task = missing[0]
                    rows = tuple(3 * run.batch + row for row in tasks[task])
                    wrote, transaction = self._write(world, run.begun, task, rows)
                    runs = list(wrote.runs)
                    runs[place] = _reported(run, task, transaction)
                    yield f"{name}: task {task} reports", replace(wrote, runs=tuple(runs))
                else:
                    yield f"{name}: all reported", after(replace(run, phase="finish", results=()))
                if world.failures_left:
                    failed = after(replace(run, phase="give up", results=()))
                    yield f"{name} fails", replace(failed, failures_left=world.failures_left - 1)
                if world.copies_left and not (run.begun.decided >= run.batch):
                    for task, part in enumerate(tasks):
                        rows = tuple(3 * run.batch + row for row in part)
                        copies = (*world.copies, Copy(run.number, run.begun, run.batch, task, rows))
                        more = replace(world, copies=copies, copies_left=world.copies_left - 1)
                        yield f"{name}: another copy of task {task}", more
                continue
            try:
                action = _replay(self._program(run), run.results)
            except StopIteration as stop:
                if run.phase == "give up":
                    yield f"{name} has given up", after(None)
                elif run.phase == "begin":
                    begun: Begun = stop.value
                    is_decided = run.batch <= begun.decided
                    messages = () if is_decided else (None,) * len(tasks)
                    yield (
                        f"{name} begins",
                        after(replace(run, phase="tasks", begun=begun, messages=messages, results=())),
                    )
                else:
                    self._check_batch(world, run.batch)
                    following = run.batch + 1
                    self.finished += following == self.batches
                    new = Run(run.number, following) if following < self.batches else None
                    done = after(new)
                    yield f"{name} is in the checkpoint", replace(done, checkpoint=max(done.checkpoint, following))
            except Superseded:
                self.superseded += 1
                yield f"{name} is superseded", after(None)
                if run.phase == "finish" and world.failures_left:
                    failed = after(replace(run, phase="give up", results=(), part=()))
                    yield f"{name} gives up", replace(failed, failures_left=world.failures_left - 1)
            except DecidedButAborted as error:
                if not world.timed_out:
                    raise Violation(f"{error}, but none timed out") from None
                self.reported += 1
            else:
                for what, done, changes in self._actions(world, run, action):
                    runs = list(done.runs)
                    runs[place] = replace(run, **changes)
                    yield f"{name}: {what}", replace(done, runs=tuple(runs))

    def _program(self, run: Run) -> Program[Any]:
        if run.phase == "begin":
            return self.design.begin()
        transactions = tuple(filter(None, run.messages))
        if run.phase == "finish":
            return self.design.finish(run.begun, run.batch, transactions)
        return self.design.give_up(run.begun, transactions)

    def _actions(
        self, world: World, run: Run, action: exactly_once.Action
    ) -> Iterator[tuple[Any, World, dict[str, Any]]]:
        """Yield (step, world after it, changes of the run): brokers may end transactions in any order."""
        if not isinstance(action, Commit | Abort):
            done, result = self._act(world, action)
            yield action, done, {"results": (*run.results, result)}
            return
        part = run.part or (None,) * len(action.transactions)
        for place, one in enumerate(action.transactions):
            if part[place] is None:
                done, is_ended = self._end(world, one, commits=isinstance(action, Commit))
                now = (*part[:place], is_ended, *part[place + 1 :])
                what = f"{type(action).__name__} of {one}"
                yield what, done, {"part": now} if None in now else {"part": (), "results": (*run.results, now)}

    def _copies(self, world: World) -> Iterator[tuple[str, World]]:
        for place, copy in enumerate(world.copies):
            others = world.copies[:place] + world.copies[place + 1 :]
            if copy.transaction is None:
                wrote, transaction = self._write(world, copy.begun, copy.task, copy.rows)
                writing = replace(copy, transaction=transaction, has_more=True)
                yield f"copy of task {copy.task} writes", replace(wrote, copies=(*others, writing))
                continue
            if copy.has_more:
                self._check_late(world, copy.transaction)
                yield (
                    f"copy of task {copy.task} writes again",
                    replace(world, copies=(*others, replace(copy, has_more=False))),
                )
                continue
            for number, run in enumerate(world.runs):
                is_its = (run.number, run.batch, run.begun) == (copy.run, copy.batch, copy.begun)
                if is_its and run.phase == "tasks" and run.messages[copy.task] is None:
                    runs = list(world.runs)
                    runs[number] = _reported(run, copy.task, copy.transaction)
                    yield f"copy of task {copy.task} reports", replace(world, copies=others, runs=tuple(runs))

    def _write(self, world: World, begun: Begun, task: int, rows: tuple[int, ...]) -> tuple[World, Transaction]:
        """Call InitProducerId and write all rows."""
        producers = list(world.producers)
        place = len(producers)
        if self.design.has_ids_by_task:
            place = task
            producers += [Producer(0, ABORTED, (), -1, 0, 0)] * (1 + task - len(producers))
        else:
            held = {copy.transaction.producer_id for copy in world.copies if copy.transaction is not None}
            # a worker asks whether its last transaction is committed
            kept = [
                n
                for n, old in enumerate(producers)
                if (old.known == old.epoch and old.state == COMMITTED) or not self.design.keeps_epochs
            ]
            free = [n for n in kept if producers[n].claim < begun.number and n not in held]
            place = free[0] if free else place
        epoch = producers[place].epoch + 1 if place < len(producers) else 0
        producers[place : place + 1] = [Producer(epoch, OPEN, rows, begun.number, epoch, epoch)]
        return replace(world, producers=tuple(producers)), Transaction(f"id-{place}", place, epoch, task)

    def _act(self, world: World, action: exactly_once.Action) -> tuple[World, Any]:
        if isinstance(action, ReadLog):
            return world, Log(world.log)
        if isinstance(action, ListOpen):
            found = [Transaction(f"id-{n}", n, old.epoch) for n, old in enumerate(world.producers) if old.state == OPEN]
            return world, tuple(found)
        assert isinstance(action, Append)
        if self.design.is_exclusive and action.number != len(world.log):
            assert action.number < len(world.log)
            return world, False
        return replace(world, log=(*world.log, action.entry)), True

    def _end(self, world: World, one: Transaction, *, commits: bool) -> tuple[World, bool]:
        """End a transaction; return for a commit whether it is committed, now or before.

        A commit is EndTxn, an abort InitProducerId: as Kafka's it does not look at the epoch of an open transaction.
        """
        place = one.producer_id
        producer = world.producers[place]
        is_same = producer.epoch == one.epoch
        if not commits:
            if self.design.fences:
                if producer.state == OPEN:
                    return _with(world, place, _fenced(producer)), True
                return (_with(world, place, replace(producer, epoch=one.epoch + 1)) if is_same else world), False
            is_open = is_same and producer.state == OPEN
            return (_with(world, place, replace(producer, state=ABORTED)) if is_open else world), is_open
        if not is_same or producer.state == ABORTED:
            return world, False
        if producer.state == COMMITTED:
            return world, True
        if twice := world.rows & set(producer.rows):
            raise Violation(f"rows {sorted(twice)} are written twice")
        ended = _with(world, place, replace(producer, state=COMMITTED))
        return replace(ended, rows=world.rows | set(producer.rows)), True

    def _check_late(self, world: World, one: Transaction) -> None:
        """A late attempt writes again: leaders look at its epoch; those that verify, at its transaction, too."""
        producer = world.producers[one.producer_id]
        is_open = producer.state == OPEN and producer.epoch == one.epoch
        if producer.leader <= one.epoch and not is_open and not world.verifies:
            raise Violation("a late record opens a transaction that no coordinator knows")

    def _check_batch(self, world: World, batch: int) -> None:
        missing = {3 * batch, 3 * batch + 1, 3 * batch + 2} - world.rows
        if missing:
            raise Violation(f"rows {sorted(missing)} are missing")
        if not (world.had_twins or world.copies) and any(old.state == OPEN for old in world.producers):
            raise Violation("transactions stay open, which holds readers up")


def _fenced(producer: Producer) -> Producer:
    """Aborted with the next epoch, which the markers tell the leaders."""
    return replace(producer, state=ABORTED, epoch=producer.epoch + 1, leader=producer.epoch + 1)


def _with(world: World, place: int, producer: Producer) -> World:
    producers = list(world.producers)
    producers[place] = producer
    return replace(world, producers=tuple(producers))


def _reported(run: Run, task: int, transaction: Transaction) -> Run:
    messages = list(run.messages)
    messages[task] = transaction
    return replace(run, messages=tuple(messages))


def _replay(program: Program[Any], results: tuple[Any, ...]) -> exactly_once.Action:
    """The program's next action; raises what the program raises, and `StopIteration` at its end."""
    action = next(program)
    for result in results:
        action = program.send(result)
    return action
