"""The model of `model.py` with the decision log in a compacted topic.

A record is sent, lands at the end of the partition, and is read back, each in a step of its own. A driver that stops or
is overtaken leaves records on their way: they land late, in any order, twice, or never. Reads advance record by record,
as the topic changes; a leader that was replaced answers with any earlier end of the partition.

Compaction removes a record at any moment if it has a tombstone, or if a later record has its key. Any record before the
last decision may have a tombstone: drivers write fewer. Leaders are elected among replicas in sync: what is confirmed
stays.

What an entry means is decided by the real `LiveEntries`. Two things are compared with the partition as it was written,
never compacted: what reads return that must not lag, and what appends say.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from spark_klog.spark.write import exactly_once
from spark_klog.spark.write.decisions.entries import Identity, LiveEntries, encode_entry, record_key
from spark_klog.spark.write.exactly_once import Abort, Append, Commit, Decision, Entry, ListOpen, Log, ReadLog

from .model import Design, Run, Search, Violation, World

_LOG = "stream/s3a://bucket/a"
_IDENTITY = Identity(log=str(uuid.UUID(int=7)))


@dataclass(frozen=True)
class Sent:
    """A record as it was sent: `id` stands for the UUID in its key."""

    number: int
    entry: Entry
    id: int


@dataclass(frozen=True)
class Landed:
    offset: int
    sent: Sent


@dataclass(frozen=True)
class View:
    """A `LiveEntries`, frozen."""

    next_offset: int = 0
    entries: tuple[Entry, ...] = ()
    last: int = -1
    last_key: bytes = b""
    missing: int | None = None


@dataclass(frozen=True)
class Driver:
    """What a run knows of the topic, and its append under way: its record, and the offset once it has landed.

    `started` is where the run's reading began, `seen` how many records it has found since.
    """

    view: View = View()
    sent: Sent | None = None
    offset: int | None = None
    started: int = 0
    seen: int = 0


@dataclass(frozen=True)
class TopicWorld(World):
    """`flying` are the records on their way, `truth` is the view of a reader who sees all of them as they land."""

    partition: tuple[Landed, ...] = ()
    end: int = 0
    flying: tuple[Sent, ...] = ()
    truth: View = View()
    #: The offset of the last decision that counts, -1 before the first.
    decision: int = -1
    drivers: tuple[Driver, ...] = (Driver(),)
    lags_left: int = 0
    parts_left: int = 0
    doubles_left: int = 0
    compactions_left: int = 0


class LastWins(LiveEntries):
    def add(self, key: bytes | None, value: bytes | None, where: str) -> None:
        number = int((key or b"").split(b"/")[-2])
        if number == self.last and not isinstance(self.entries[-1], Decision):
            self.last -= 1
            self.entries.pop()
        super().add(key, value, where)


class NotLower(LiveEntries):
    """The rule: an entry counts if its number is not lower than those that counted before."""

    def add(self, key: bytes | None, value: bytes | None, where: str) -> None:
        number = int((key or b"").split(b"/")[-2])
        if number == self.last:
            self.last -= 1
        super().add(key, value, where)


@dataclass(frozen=True)
class TopicDesign(Design):
    """Tests plant faults here."""

    rule: type[LiveEntries] = LiveEntries
    has_unique_keys: bool = True
    is_idempotent: bool = True
    reads_back: bool = True
    reads_on: bool = True
    keeps_decision: bool = True
    keeps_claims: bool = True
    checks_lag: bool = True


@lru_cache(maxsize=100_000)
def _taken_in(rule: type[LiveEntries], view: View, landed: Landed) -> View:
    live = rule(_LOG, view.next_offset, _IDENTITY, list(view.entries), view.last, view.last_key, {}, {}, view.missing)
    sent = landed.sent
    live.add(_key(sent), encode_entry(_IDENTITY, sent.entry), "the model")
    return View(landed.offset + 1, tuple(live.entries), live.last, live.last_key, live._missing)


def _key(sent: Sent) -> bytes:
    return record_key(_LOG, sent.number, str(sent.id))


def _log(view: View) -> Log:
    return Log(view.entries, view.last + 1 - len(view.entries))


@dataclass
class TopicSearch(Search):
    """Visit every reachable state of a `TopicWorld`."""

    design: TopicDesign = field(default_factory=TopicDesign)

    def steps(self, world: World, way: Any) -> Iterator[tuple[str, World]]:
        assert isinstance(world, TopicWorld)
        for step, following in super().steps(world, way):
            assert isinstance(following, TopicWorld)
            more = following.started - len(following.drivers)
            yield step, replace(following, drivers=following.drivers + (Driver(),) * more)
        yield from self._landings(world)
        yield from self._compactions(world)

    def _landings(self, world: TopicWorld) -> Iterator[tuple[str, TopicWorld]]:
        for sent in dict.fromkeys(world.flying):
            left = list(world.flying)
            left.remove(sent)
            yield f"{sent} lands at {world.end}", self._landed(replace(world, flying=tuple(left)), sent)
            if world.doubles_left and not self.design.is_idempotent:
                yield (
                    f"{sent} lands at {world.end}, to come again",
                    self._landed(replace(world, doubles_left=world.doubles_left - 1), sent),
                )

    def _landed(self, world: TopicWorld, sent: Sent) -> TopicWorld:
        landed = Landed(world.end, sent)
        truth = _taken_in(self.design.rule, world.truth, landed)
        counts = truth.last_key == _key(sent) and isinstance(sent.entry, Decision) and truth != world.truth
        drivers = tuple(
            replace(driver, offset=world.end) if driver.sent == sent and driver.offset is None else driver
            for driver in world.drivers
        )
        return replace(
            world,
            partition=(*world.partition, landed),
            end=world.end + 1,
            truth=truth,
            decision=world.end if counts and truth.last != world.truth.last else world.decision,
            drivers=drivers,
        )

    def _compactions(self, world: TopicWorld) -> Iterator[tuple[str, TopicWorld]]:
        if not world.compactions_left:
            return
        for place, landed in enumerate(world.partition):
            before = world.decision + (0 if self.design.keeps_decision else 1)
            is_superseded = any(self._is_same_key(landed.sent, later.sent) for later in world.partition[place + 1 :])
            is_old_claim = not self.design.keeps_claims and any(
                later.sent.number > landed.sent.number and type(later.sent.entry) is type(landed.sent.entry)
                for later in world.partition[place + 1 :]
            )
            if landed.offset < before or is_superseded or is_old_claim:
                rest = world.partition[:place] + world.partition[place + 1 :]
                fewer = replace(world, partition=rest, compactions_left=world.compactions_left - 1)
                yield f"offset {landed.offset} is compacted away", fewer

    def _is_same_key(self, one: Sent, other: Sent) -> bool:
        return one.number == other.number and (one.id == other.id or not self.design.has_unique_keys)

    def _actions(
        self, world: World, run: Run, action: exactly_once.Action
    ) -> Iterator[tuple[Any, World, dict[str, Any]]]:
        assert isinstance(world, TopicWorld)
        if isinstance(action, ReadLog):
            yield from self._reads(world, run, action)
        elif isinstance(action, Append):
            yield from self._appends(world, run, action)
        else:
            assert isinstance(action, Commit | Abort | ListOpen)
            yield from super()._actions(world, run, action)

    def _reads(self, world: TopicWorld, run: Run, action: ReadLog) -> Iterator[tuple[Any, World, dict[str, Any]]]:
        driver = world.drivers[run.number]
        yield from self._parts(world, run, driver, world.end)
        ends = [world.end]
        if world.lags_left and (action.may_lag or not self.design.checks_lag):
            ends += range(driver.view.next_offset, world.end)
        for end in ends:
            view = self._read(world, driver.view, end)
            is_current = end == world.end
            if view.missing is not None:
                if is_current:
                    raise Violation(f"entry {view.missing} is missing")
                continue  # the read fails
            if is_current and (view.entries, view.last) != (world.truth.entries, world.truth.last):
                raise Violation(f"a reader sees {_log(view)}, but the partition has {_log(world.truth)}")
            less = world if is_current else replace(world, lags_left=world.lags_left - 1)
            done = _with_driver(less, run, Driver(view, started=end))
            yield f"reads up to {end}", done, {"results": (*run.results, _log(view))}

    def _parts(
        self, world: TopicWorld, run: Run, driver: Driver, end: int
    ) -> Iterator[tuple[Any, World, dict[str, Any]]]:
        """Read one record, and go on with the rest later."""
        left = [landed for landed in world.partition if driver.view.next_offset <= landed.offset < end]
        if world.parts_left and len(left) > 1:
            view = _taken_in(self.design.rule, driver.view, left[0])
            fewer = replace(world, parts_left=world.parts_left - 1)
            yield (
                f"reads offset {left[0].offset} only",
                _with_driver(fewer, run, replace(driver, view=view, seen=driver.seen + 1)),
                {},
            )

    def _read(self, world: TopicWorld, view: View, end: int) -> View:
        for landed in world.partition:
            if view.next_offset <= landed.offset < end:
                view = _taken_in(self.design.rule, view, landed)
        return replace(view, next_offset=max(view.next_offset, end))

    def _appends(self, world: TopicWorld, run: Run, action: Append) -> Iterator[tuple[Any, World, dict[str, Any]]]:
        driver = world.drivers[run.number]
        if driver.sent is None:
            if action.number <= driver.view.last:
                yield f"{action} is late", world, {"results": (*run.results, False)}
                return
            sent = Sent(action.number, action.entry, 10 * run.number + len(run.results) + 100 * run.batch)
            sending = replace(driver, sent=sent, started=driver.view.next_offset, seen=0)
            yield f"sends {sent}", _with_driver(replace(world, flying=(*world.flying, sent)), run, sending), {}
            return
        if driver.offset is None:
            return
        key = _key(driver.sent)
        if not self.design.reads_back:
            view = replace(driver.view, last=action.number, last_key=key, entries=(*driver.view.entries, action.entry))
            yield "is confirmed", _with_driver(world, run, Driver(view)), {"results": (*run.results, True)}
            return
        yield from self._parts(world, run, driver, driver.offset + 1)
        there = [one for one in world.partition if driver.view.next_offset <= one.offset <= driver.offset]
        is_dense = driver.seen + len(there) == driver.offset + 1 - driver.started
        end = driver.offset + 1 if is_dense or not self.design.reads_on else world.end
        view = self._read(world, driver.view, end)
        if view.missing is not None and end == world.end:
            raise Violation(f"entry {view.missing} is missing")
        is_mine = view.last_key == key
        if is_mine and world.truth.last < action.number:
            raise Violation(f"{driver.sent} is void, and its driver does not see it")
        done = _with_driver(world, run, Driver(view))
        yield f"reads back to {end}: {is_mine}", done, {"results": (*run.results, is_mine)}


def _with_driver(world: TopicWorld, run: Run, driver: Driver) -> TopicWorld:
    drivers = (*world.drivers[: run.number], driver, *world.drivers[run.number + 1 :])
    return replace(world, drivers=drivers)
