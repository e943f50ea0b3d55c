"""Concurrent drivers of one decision log: all orders of their file operations with few switches between drivers.

`SPARK_KLOG_EXACTLY_ONCE=full` (make soak) adds a third driver and more switches.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spark_klog.errors import DecodeError
from spark_klog.spark.write.decisions import hard_link_log
from spark_klog.spark.write.decisions.decision_log import Identity
from spark_klog.spark.write.decisions.hard_link_log import HardLinkLog
from spark_klog.spark.write.exactly_once import Claim, Decision, Ended, Entry

FULL = os.environ.get("SPARK_KLOG_EXACTLY_ONCE") == "full"
IDENTITY = Identity(log="6ba7b810-9dad-11d1-80b4-00c04fd430c8")
#: The log's entries before the drivers start.
BEFORE: tuple[Entry, ...] = (Claim(), Decision(0, ()), Ended(), Claim())
_SECONDS = 60


class Violation(AssertionError):
    """A result that no order of atomic reads and appends explains."""


@dataclass
class Driver:
    """A program of reads and appends. `appended` holds the entries it won, `seen` those it continued from."""

    run: Callable[[Driver, HardLinkLog], None]
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    appended: dict[int, Entry] = field(default_factory=dict)
    seen: dict[int, Entry] = field(default_factory=dict)
    ended: bool = False
    error: BaseException | None = None

    def append(self, log: HardLinkLog, number: int, entry: Entry) -> bool:
        is_appended = log.append(number, entry)
        if is_appended:
            self.appended[number] = entry
        return is_appended


def micro_batches(count: int, first: int) -> Callable[[Driver, HardLinkLog], None]:
    """A run of the query: claims, decides and ends micro-batches from `first` on, until another run claims."""

    def run(driver: Driver, log: HardLinkLog) -> None:
        for batch in range(first, first + count):
            found = log.read()
            if not driver.append(log, found.end, Claim()):
                return
            driver.seen |= dict(enumerate(found.entries, found.first))
            if not driver.append(log, found.end + 1, Decision(batch, ())):
                return
            if not driver.append(log, found.end + 2, Ended()):
                return

    return run


def late_decision(driver: Driver, log: HardLinkLog) -> None:
    """Decide as a driver that claimed before the others started."""
    os.listdir(log._folder)  # a step: another driver may run here
    driver.append(log, len(BEFORE), Decision(99, ()))


class Turns:
    """Runs drivers one at a time, and switches to another driver at the operations numbered in `switches`."""

    def __init__(self, drivers: list[Driver], logs: list[HardLinkLog], switches: dict[int, int]) -> None:
        self._drivers, self._logs, self._switches = drivers, logs, switches
        #: The driver of each operation.
        self.order: list[int] = []
        self._current = 0
        self._done = threading.Semaphore(0)

    def run(self) -> None:
        pairs = zip(self._drivers, self._logs, strict=True)
        threads = [threading.Thread(target=self._work, args=pair, daemon=True) for pair in pairs]
        for thread in threads:
            thread.start()
        self._drivers[0].turn.release()
        assert self._done.acquire(timeout=_SECONDS)
        for thread in threads:
            thread.join(_SECONDS)

    def _work(self, driver: Driver, log: HardLinkLog) -> None:
        driver.turn.acquire()
        try:
            driver.run(driver, log)
        except DecodeError:
            pass  # the driver stops; `check` examines the log that it leaves
        except BaseException as error:  # `check` raises it in the main thread
            driver.error = error
        driver.ended = True
        left = [other for other in self._drivers if not other.ended]
        if left:
            self._current = self._drivers.index(left[0])
            left[0].turn.release()
        else:
            self._done.release()

    def step(self) -> None:
        """Note a file operation of the current driver; run another driver before it if `switches` says so."""
        target = self._switches.get(len(self.order))
        self.order.append(self._current)
        if target is None or self._drivers[target].ended:
            return
        before, self._current = self._current, target
        self._drivers[target].turn.release()
        self._drivers[before].turn.acquire()


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[Turns]:
    """Stack of `Turns`. Every file operation of a log takes a step of the last one, if there is one."""
    running: list[Turns] = []

    def stepping(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def operation(*arguments: Any, **more: Any) -> Any:
            if running:
                running[-1].step()
            return original(*arguments, **more)

        monkeypatch.setattr(owner, name, operation)

    for owner, name in ((os, "link"), (os, "listdir"), (Path, "unlink"), (Path, "replace")):
        stepping(owner, name)
    if FULL:
        stepping(Path, "read_bytes")
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return running


class Exploration:
    """Runs all orders of the drivers' operations with at most `most` switches."""

    def __init__(
        self,
        folder: Path,
        turns: list[Turns],
        *programs: Callable[[Driver, HardLinkLog], None],
        kind: type[HardLinkLog] = HardLinkLog,
    ) -> None:
        self._folder, self._turns, self._programs, self._kind = folder, turns, programs, kind
        self.orders = 0
        self.winners: set[tuple[int, ...]] = set()

    def run(self, most: int) -> None:
        self._explore({}, -1, most)

    def _explore(self, switches: dict[int, int], last: int, left: int) -> None:
        order = self._run_once(switches)
        if left:
            for number, driver in enumerate(order):
                for target in range(len(self._programs)):
                    if number > last and target != driver:
                        self._explore({**switches, number: target}, number, left - 1)

    def _run_once(self, switches: dict[int, int]) -> list[int]:
        folder = self._folder / str(self.orders)
        self.orders += 1
        folder.mkdir()
        log = HardLinkLog(folder, IDENTITY)
        for number, entry in enumerate(BEFORE):
            assert log.append(number, entry)
        drivers = [Driver(program) for program in self._programs]
        made = Turns(drivers, [self._kind(folder, IDENTITY) for _ in drivers], switches)
        self._turns.append(made)
        try:
            made.run()
        finally:
            self._turns.pop()
        try:
            check(drivers, HardLinkLog(folder, IDENTITY))
        except (Violation, DecodeError) as error:
            raise Violation(f"turns {switches}: {error}") from error
        self.winners.add(tuple(len(driver.appended) for driver in drivers))
        shutil.rmtree(folder)
        return made.order


def check(drivers: list[Driver], log: HardLinkLog) -> None:
    """Each number has one entry, the same for all drivers that saw it; the log is readable and has all won entries."""
    entries: dict[int, Entry] = dict(enumerate(BEFORE))
    for driver in drivers:
        if driver.error is not None:
            raise driver.error
        for number, entry in driver.appended.items():
            if entries.setdefault(number, entry) is not entry:
                raise Violation(f"{number} is {entries[number]} and {entry}")
    found = log.read()
    read = dict(enumerate(found.entries, found.first))
    for known in (read, *(driver.seen for driver in drivers)):
        for number, entry in known.items():
            # an append that returned False after its link has left an entry
            if entries.setdefault(number, entry) != entry:
                raise Violation(f"{number} is {entries[number]} and {entry}")
    if missing := [number for number in entries if number >= found.end]:
        raise Violation(f"{missing} are missing in {found}")


@pytest.mark.parametrize(
    "programs",
    [
        pytest.param((late_decision, micro_batches(2, 1)), id="late-decision"),
        pytest.param((micro_batches(2, 1), micro_batches(1, 10)), id="two-runs"),
    ],
)
def test_two_drivers(tmp_path: Path, turns: list[Turns], programs: tuple[Any, ...]) -> None:
    exploration = Exploration(tmp_path, turns, *programs)
    exploration.run(2)
    assert len(exploration.winners) > 2  # the drivers interfere with each other


def test_two_drivers_that_replace_the_shared_file(
    tmp_path: Path, turns: list[Turns], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hard_link_log, "_MOST_LINKS", 2)  # each claim starts a new shared file
    exploration = Exploration(tmp_path, turns, micro_batches(1, 1), micro_batches(1, 10))
    exploration.run(2 if FULL else 1)
    assert len(exploration.winners) > 1


@pytest.mark.skipif(not FULL, reason="part of make soak")
def test_three_drivers(tmp_path: Path, turns: list[Turns]) -> None:
    Exploration(tmp_path, turns, late_decision, micro_batches(2, 1), micro_batches(1, 10)).run(2)


class TakingBack(HardLinkLog):
    """Removes its link again if a higher number exists."""

    def _link(self, file: Path, number: int) -> bool:
        is_linked = super()._link(file, number)
        if is_linked and self._last() > number:
            (self._folder / str(number)).unlink()
            return False
        return is_linked


class NotLooking(HardLinkLog):
    """Does not check for other drivers' entries after its link."""

    _is_appending = False

    def append(self, number: int, entry: Entry) -> bool:
        self._is_appending = True
        try:
            return super().append(number, entry)
        finally:
            self._is_appending = False

    def _last(self) -> int:
        return -1 if self._is_appending else super()._last()

    def _is_mine(self, number: int) -> bool:
        return self._is_appending or super()._is_mine(number)


class LookingBefore(NotLooking):
    """Checks for other drivers' entries before its link instead of after it."""

    def append(self, number: int, entry: Entry) -> bool:
        is_free = self._last() < number and self._is_mine(number - 1)
        os.listdir(self._folder)  # a step between check and link
        return is_free and super().append(number, entry)


@pytest.mark.parametrize(
    ("kind", "programs"),
    [
        pytest.param(TakingBack, (micro_batches(1, 1), micro_batches(1, 10)), id="taking-back"),
        pytest.param(NotLooking, (late_decision, micro_batches(2, 1)), id="not-looking"),
        pytest.param(LookingBefore, (late_decision, micro_batches(2, 1)), id="looking-before"),
    ],
)
def test_planted_faults_are_found(
    tmp_path: Path, turns: list[Turns], kind: type[HardLinkLog], programs: tuple[Any, ...]
) -> None:
    with pytest.raises(Violation):
        Exploration(tmp_path, turns, *programs, kind=kind).run(2)
