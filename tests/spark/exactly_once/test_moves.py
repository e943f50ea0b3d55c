"""Moves of decisions between a checkpoint and a topic: all short sequences of starts, kills and moves write rows once.

The driver's steps and the log of hard links are real. The topic is a list of records, whose rules are those of
`LiveEntries`; the brokers are a set of open transactions.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_klog.spark import decisions
from spark_klog.spark.decisions import continue_at
from spark_klog.spark.write import exactly_once_driver
from spark_klog.spark.write.decisions import decision_place as places
from spark_klog.spark.write.decisions.decision_log import Identity, encode_entry
from spark_klog.spark.write.decisions.decision_place import decision_place
from spark_klog.spark.write.decisions.hard_link_log import HardLinkLog
from spark_klog.spark.write.decisions.live_entries import LiveEntries, record_key
from spark_klog.spark.write.exactly_once import DecidedButAborted, Decision, Entry, Log, Superseded, Transaction
from spark_klog.spark.write.exactly_once_driver import CheckpointMismatch, Claimed, claim, decide

#: How a start of the query sets decisionLog; `emptied` is `checkpoint` with a klog_sink that the user has emptied.
STARTS = ("auto", "topic", "emptied")
#: `unnoted`: Spark has not noted the micro-batch as complete. `decided`: the driver dies behind its decision.
ENDS = ("complete", "unnoted", "decided", "claimed", "moved")

SETTINGS = {"bootstrap.servers": "x:1"}


class Killed(Exception):
    pass


class World:
    """A query, its checkpoint and its brokers; each task writes one row."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows = folder, Counter[int]()
        self.records: list[tuple[bytes, bytes]] = []
        self.open: set[str] = set()
        #: Micro-batches that were under way when the user emptied klog_sink: they may be written again.
        self.unsure: set[int] = set()
        self.batch, self.is_unnoted = 0, False
        self._written: dict[str, int] = {}
        (folder / "commits").mkdir(parents=True)
        (folder / "metadata").write_text('{"id":"6ba7b810-9dad-11d1-80b4-00c04fd430c8"}')

    def commit(self, _: Any, transactions: Sequence[Transaction]) -> tuple[bool, ...]:
        results = []
        for one in transactions:
            if one.transactional_id in self.open:
                self.open.remove(one.transactional_id)
                self.rows[self._written[one.transactional_id]] += 1
            results.append(self.is_committed(one))
        return tuple(results)

    def is_committed(self, one: Transaction) -> bool:
        return one.transactional_id not in self.open and bool(self.rows[self._written[one.transactional_id]])

    def listed(self, _: Any, prefix: str) -> tuple[Transaction, ...]:
        return tuple(Transaction(name, 0, 0) for name in sorted(self.open) if name.startswith(prefix))

    def fence_transactions(self, transactions: Sequence[Transaction]) -> SimpleNamespace:
        self.open -= {one.transactional_id for one in transactions}
        return SimpleNamespace(failures={})

    def write(self, claimed: Claimed, batch: int) -> Transaction:
        name = f"{claimed.identity.id_prefix}{uuid.uuid4()}"
        self.open.add(name)
        self._written[name] = batch
        return Transaction(name, 0, 0, 0)

    def run(self, start: str, end: str, patch: pytest.MonkeyPatch) -> None:
        """One start of the query, with a micro-batch."""
        if start == "emptied":
            if self.is_unnoted:
                self.unsure.add(self.batch)
            shutil.rmtree(self.folder / "klog_sink", ignore_errors=True)
            (self.folder / "klog_sink").mkdir()
        place = decision_place(str(self.folder), "checkpoint" if start == "emptied" else start, None)
        with patch.context() as killing:
            if end == "moved":
                real = HardLinkLog.move

                def move(*arguments: Any) -> bool:
                    real(*arguments)
                    raise Killed

                killing.setattr(HardLinkLog, "move", move)
            try:
                claimed = claim(SETTINGS, place, "klog-")
            except Killed:
                return
        decided = claimed.begun.decided
        if self.batch not in (decided, decided + 1) and (decided >= 0 or place.topic):
            raise CheckpointMismatch(self.batch, decided, place.told)
        transactions = [] if self.batch == decided else [self.write(claimed, self.batch)]
        self.is_unnoted = True
        if end in ("claimed", "moved"):
            return
        if end == "decided" and transactions:
            log = place.open(SETTINGS, claimed.identity, is_claimed=True)
            assert log.append(claimed.begun.number, Decision(self.batch, tuple(transactions)))
            return
        decide(SETTINGS, claimed, self.batch, transactions)
        if end == "complete":
            (self.folder / "commits" / str(self.batch)).touch()
            self.batch, self.is_unnoted = self.batch + 1, False


class MemoryLog:
    """A `DecisionLog` in a list of records."""

    def __init__(self, records: list[tuple[bytes, bytes]], key: str, identity: Identity, is_claimed: bool) -> None:
        self._records, self._key, self.identity, self._is_claimed = records, key, identity, is_claimed

    def _live(self) -> LiveEntries:
        live = LiveEntries(self._key)
        for key, value in self._records:
            live.add(key, value, "the list")
        if live.identity is not None:
            self.identity.check(live.identity, "a test", "the list", is_claimed=self._is_claimed)
            self.identity = live.identity
        return live

    def read(self, *, may_lag: bool = False) -> Log:
        return self._live().log("of the test")

    def end(self) -> int:
        return self._live().last + 1

    def append(self, number: int, entry: Entry) -> bool:
        key = record_key(self._key, number, str(uuid.uuid4()))
        self._records.append((key, encode_entry(self.identity, entry)))
        return self._live().last_key == key


@pytest.fixture
def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """As many worlds as a test takes; the driver acts in the last one."""
    world: World

    def log(
        _: Mapping[str, str],
        topic: str,
        key: str,
        identity: Identity,
        *,
        is_claimed: bool = False,
        decide_by: float = math.inf,
    ) -> MemoryLog:
        return MemoryLog(world.records, key, identity, is_claimed)

    @contextmanager
    def admin(_: Mapping[str, str]) -> Iterator[World]:
        yield world

    def made() -> Iterator[World]:
        nonlocal world
        for number in itertools.count():
            world = World(tmp_path / str(number))
            yield world
            shutil.rmtree(world.folder)

    for module, name, instead in [
        (places, "TopicDecisionLog", log),
        (exactly_once_driver, "TopicDecisionLog", log),
        (exactly_once_driver, "step_admin", admin),
        (exactly_once_driver, "check_still_open", lambda *_: None),
        (exactly_once_driver, "_commit", lambda _, transactions: world.commit(_, transactions)),
        (exactly_once_driver, "_open_transactions", lambda _, prefix: world.listed(_, prefix)),
        (decisions, "cluster_of", lambda _: None),
        (os, "fsync", lambda _: None),
    ]:
        monkeypatch.setattr(module, name, instead)
    return made()


@pytest.mark.parametrize("length", [1, pytest.param(2, marks=pytest.mark.test_all("again"))])
def test_every_row_is_there_once(worlds: Iterator[World], monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """Behind a query that has moved once; but those twice at most that no log knows because the user has emptied it."""
    steps = list(itertools.product(STARTS, ENDS))
    for way in itertools.product(steps, repeat=length):
        world, emptied = next(worlds), 0
        for start, end in (("auto", "complete"), ("topic", "complete"), *way, ("topic", "complete")):
            emptied += start == "emptied"
            try:
                world.run(start, end, monkeypatch)
            except CheckpointMismatch:  # the last decision was in the log that the user has emptied
                assert emptied > 1, way
                break
        else:
            assert not world.open or world.unsure, way
        assert sorted(world.rows) == list(range(world.batch)), way
        assert all(count == 1 or batch in world.unsure for batch, count in world.rows.items()), way


@pytest.mark.parametrize("moves", [1, 2])
def test_a_decision_that_can_not_be_committed(
    worlds: Iterator[World], monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    """`continue_at` with the new options ends the log that has it."""
    world = next(worlds)
    for _ in range(moves - 1):
        world.run("topic", "complete", monkeypatch)
    world.run("emptied", "complete", monkeypatch)
    world.run("auto", "decided", monkeypatch)
    world.open.clear()  # they time out
    for _ in range(2):
        with pytest.raises(DecidedButAborted):
            world.run("topic", "complete", monkeypatch)
    options = {"kafka.bootstrap.servers": "x:1", "deliveryGuarantee": "exactly-once", "decisionLog": "topic"}
    continue_at({**options, "checkpointLocation": str(world.folder)}, world.batch)
    for _ in range(2):
        world.run("auto", "complete", monkeypatch)
    assert world.rows == Counter(range(moves + 2))


def test_micro_batches_that_are_written_again(worlds: Iterator[World], monkeypatch: pytest.MonkeyPatch) -> None:
    """A start does not bring a moved decision back that `continue_at` has gone behind."""
    world = next(worlds)
    for start in ("auto", "auto", "auto", "topic"):
        world.run(start, "complete", monkeypatch)
    options = {"kafka.bootstrap.servers": "x:1", "deliveryGuarantee": "exactly-once"}
    continue_at({**options, "checkpointLocation": str(world.folder)}, 1)
    world.batch = 1
    for _ in range(4):
        world.run("auto", "complete", monkeypatch)
    assert world.rows == Counter({0: 1, 1: 2, 2: 2, 3: 2, 4: 1})


def test_a_run_of_the_topic_during_a_move(worlds: Iterator[World], monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision that the topic did not take is an error, not a move."""
    world = next(worlds)
    world.run("auto", "complete", monkeypatch)
    monkeypatch.setattr(MemoryLog, "append", lambda *_: False)
    with pytest.raises(Superseded):
        world.run("topic", "complete", monkeypatch)


def test_a_run_of_the_checkpoint_during_a_move(worlds: Iterator[World], monkeypatch: pytest.MonkeyPatch) -> None:
    """It claims and decides behind the run that moves: that one stops, and the next one moves its decision, too."""
    world, move = next(worlds), HardLinkLog.move
    world.run("auto", "complete", monkeypatch)

    def overtaken(*arguments: Any) -> bool:
        monkeypatch.setattr(HardLinkLog, "move", move)
        world.run("auto", "decided", monkeypatch)
        return move(*arguments)

    monkeypatch.setattr(HardLinkLog, "move", overtaken)
    with pytest.raises(Superseded):
        world.run("topic", "complete", monkeypatch)
    assert world.rows == Counter([0])
    for _ in range(2):
        world.run("topic", "complete", monkeypatch)
    assert world.rows == Counter(range(3))
