"""The checker of histories: correct ones have no anomaly, and it names each planted fault and its place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from tests.support.checker.history import History, Outcome, Read, Seen, Sent, Write
from tests.support.checker.log_checker import Anomaly, Kind, anomalies
from tests.support.checker.log_mutations import MUTATIONS, Planted

_PARTITIONS = 2


@dataclass(eq=False)
class _Transaction:
    process: str
    began: int
    sent: list[Sent] = field(default_factory=list)


class Model:
    """A correct log in memory, with clients that act in turns; `number` decides what a step does."""

    def __init__(self) -> None:
        self.history = History()
        #: By partition: values with their transaction, None for markers.
        self._log: list[list[tuple[str, _Transaction | None] | None]] = [[] for _ in range(_PARTITIONS)]
        self._open: dict[str, _Transaction] = {}
        self._aborted: list[_Transaction] = []
        self._positions: dict[str, list[int]] = defaultdict(lambda: [0] * _PARTITIONS)
        self._count = 0

    def _append(self, partition: int, transaction: _Transaction | None) -> Sent:
        self._count += 1
        self._log[partition].append((f"v{self._count}", transaction))
        return Sent(partition, f"v{self._count}", len(self._log[partition]) - 1)

    def send(self, number: int) -> None:
        """An idempotent producer: up to three records in flight; some get no answer, some are not written."""
        began = [self.history.tick() for _ in range(1 + number % 3)]
        for index, time in enumerate(began):
            fate = (number >> (3 * index)) % 8
            if fate == 7:
                self._count += 1
                sent = Sent(number % _PARTITIONS, f"v{self._count}")
            else:
                sent = self._append((number >> index) % _PARTITIONS, None)
            if fate == 6:
                sent = Sent(sent.partition, sent.value)
            outcome = Outcome.OK if fate < 6 else Outcome.UNKNOWN
            process = f"idempotent-{number % 2}"
            self.history.writes.append(Write(process, outcome, (sent,), False, time, time, self.history.tick()))

    def write(self, number: int) -> None:
        """A transactional producer: write records, in a new transaction if none is open."""
        process = f"transactional-{number % 2}"
        if process not in self._open:
            self._open[process] = _Transaction(process, self.history.tick())
        transaction = self._open[process]
        for index in range(1 + number % 3):
            transaction.sent.append(self._append((number >> index) % _PARTITIONS, transaction))

    def end(self, number: int) -> None:
        """Commit or abort the transaction; the client may get no answer, or not learn its offsets."""
        process = f"transactional-{number % 2}"
        if process in self._open:
            fates = [(True, Outcome.OK), (True, Outcome.UNKNOWN), (False, Outcome.UNKNOWN), (False, Outcome.FAILED)]
            self._end(self._open.pop(process), *fates[number % 4], knows_offsets=number % 5 > 0)

    def _end(self, transaction: _Transaction, commits: bool, outcome: Outcome, *, knows_offsets: bool) -> None:
        commit_began = self.history.tick()
        if not commits:
            self._aborted.append(transaction)
        for partition in {sent.partition for sent in transaction.sent}:
            self._log[partition].append(None)
        sent = [sent if knows_offsets else Sent(sent.partition, sent.value) for sent in transaction.sent]
        ended = self.history.tick()
        write = Write(transaction.process, outcome, tuple(sent), True, transaction.began, commit_began, ended)
        self.history.writes.append(write)

    def poll(self, number: int) -> None:
        """Let one of three consumers read some records of each partition."""
        kind = number % 3
        self._read(f"consumer-{kind}", kind > 0, count=1 + number % 7)

    def _read(self, process: str, is_committed: bool, count: int | None = None) -> None:
        began = self.history.tick()
        seen: list[Seen] = []
        for partition, log in enumerate(self._log):
            start = self._positions[process][partition]
            end = len(log) if count is None else min(len(log), start + count)
            for offset, record in enumerate(log[start:end], start):
                if record is not None:
                    value, transaction = record
                    if is_committed and transaction is not None and transaction in self._open.values():
                        end = offset
                        break
                    if not is_committed or transaction not in self._aborted:
                        seen.append(Seen(partition, offset, value))
            self._positions[process][partition] = end
        is_final = count is None
        self.history.reads.append(Read(process, is_committed, is_final, tuple(seen), began, self.history.tick()))

    def finish(self) -> History:
        """Abort the open transactions and read everything."""
        for transaction in self._open.values():
            self._end(transaction, False, Outcome.FAILED, knows_offsets=True)
        self._open.clear()
        self._read("final-1", True)
        self._read("final-2", True)
        self._read("final-3", False)
        return self.history


def _history(steps: list[tuple[str, int]]) -> History:
    model = Model()
    for name, number in steps:
        getattr(model, name)(number)
    return model.finish()


_STEPS = st.tuples(st.sampled_from(["send", "write", "end", "poll"]), st.integers(0, 1 << 12))
histories = st.lists(_STEPS, max_size=60).map(_history)
#: Most of them have a place for each fault.
long_histories = st.lists(_STEPS, min_size=20, max_size=60).map(_history)


@settings(deadline=None)
@given(histories)
def test_a_correct_log_has_no_anomaly(history: History) -> None:
    assert anomalies(history) == []


@pytest.mark.parametrize(("plant", "kind"), MUTATIONS.items(), ids=[plant.__name__ for plant in MUTATIONS])
def test_each_planted_fault_is_named(plant: Callable[[History, Random], Planted | None], kind: Kind) -> None:
    """The checker names it wherever it is planted, and nothing else."""
    planted_at = set()

    @settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
    @given(long_histories, st.integers(0, 1 << 16))
    def check(history: History, seed: int) -> None:
        planted = plant(history, Random(seed))
        assume(planted is not None)
        assert planted is not None
        mutated, items = planted
        found = anomalies(mutated)
        assert {anomaly.kind for anomaly in found} == {kind}
        named = {(anomaly.partition, anomaly.value) for anomaly in found}
        assert items
        assert items <= named
        planted_at.update(anomaly.offset for anomaly in found)

    check()
    assert len(planted_at) > 5


def test_all_kinds_are_planted() -> None:
    assert set(MUTATIONS.values()) == set(Kind)


def test_an_anomaly_tells_its_place() -> None:
    """A small hand-made history with one reader of each kind."""
    history = History()
    history.writes.append(Write("writer", Outcome.OK, (Sent(0, "a", 0),), False, 0, 0, 1))
    history.writes.append(Write("writer", Outcome.OK, (Sent(0, "b", 1),), False, 2, 2, 3))
    history.reads.append(Read("consumer", True, False, (Seen(0, 0, "a"), Seen(0, 1, "b")), 4, 5))
    history.reads.append(Read("committed", True, True, (Seen(0, 0, "a"),), 6, 7))
    history.reads.append(Read("all", False, True, (Seen(0, 0, "a"), Seen(0, 1, "b")), 8, 9))
    (found,) = anomalies(history)
    assert found == Anomaly(Kind.LOST_WRITE, 0, 1, "b", "committed")
    assert str(found) == "lost write: 'b' in partition 0 at 1, committed"


def test_order_across_producers() -> None:
    """A record acknowledged before another producer's send began precedes it; sends that overlap have no order."""
    seen = (Seen(0, 0, "late"), Seen(0, 1, "early"))
    reads = [Read(f"final-{level}", level, True, seen, 20, 21) for level in (True, False)]
    for began, expected in ((4, []), (6, [Anomaly(Kind.NONMONOTONIC_SEND, 0, 0, "late", "two")])):
        writes = [
            Write("one", Outcome.OK, (Sent(0, "early", 1),), False, 1, 1, 5),
            Write("two", Outcome.OK, (Sent(0, "late", 0),), False, began, began, 8),
        ]
        assert anomalies(History(writes, reads)) == expected


@pytest.mark.parametrize("isolation", [True, False])
def test_without_final_reads_nothing_can_be_said(isolation: bool) -> None:
    history = _history([("send", 1)])
    history.reads = [read for read in history.reads if read.is_committed == isolation]
    with pytest.raises(ValueError, match="no final read of each isolation level"):
        anomalies(history)
