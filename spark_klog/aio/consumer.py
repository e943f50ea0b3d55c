"""The consumer on asyncio's loop.

Calls are the steps of the synchronous consumer, made by a `LoopDriver`. What a poll does for the group and for
positions goes on if the poll is cancelled, and the next one waits for it. Records that are decoded, and of which no
call has returned yet, are held: a position moves when a record is returned, without a wait in between.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from spark_klog.aio.driver import SLICE, LoopDriver
from spark_klog.base.extras import require
from spark_klog.base.names import TopicPartition
from spark_klog.client.arguments import offsets_of
from spark_klog.client.calls import OnLoop, steps_of
from spark_klog.client.consumer.assignment import Assigned
from spark_klog.client.consumer.commits import Offsets
from spark_klog.client.consumer.core import ConsumerCore, Decoding
from spark_klog.client.consumer.decoding import AHEAD, ConsumerRecord
from spark_klog.client.consumer.group import CLOSE_SECONDS, PATIENCE
from spark_klog.client.fetch.entries import Fetched
from spark_klog.client.forks import Maker
from spark_klog.client.offsets import Committed
from spark_klog.client.requests import Steps, Wait
from spark_klog.errors import ConcurrentUse, ConsumerClosed, KlogError, WokenUp

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
#: Seconds that `async for` waits for records before it waits again.
_LONGEST = 3600.0
#: Bytes of a chunk that is decoded on the loop.
_QUICKLY_DECODED = 16 * 1024
_END = None, -1


class _Turn:
    """Lets one call after the other use a consumer's group and cluster.

    While a listener runs, calls are made that it may wait for, of its own and of other tasks; the rebalance goes on
    when none of them is under way.
    """

    def __init__(self) -> None:
        #: Marks the call that has the turn.
        self.holder: object | None = None
        #: Marks the listener that runs.
        self.listener: object | None = None

    @property
    def is_taken(self) -> bool:
        return self.holder is not None or self.listener is not None

    @property
    def is_of_listener(self) -> bool:
        """Whether the code that runs is that of the listener, or of a task that it has begun."""
        return self.listener is not None and _listening.get() is self.listener

    def held(self, steps: Steps[_T], *, is_apart: bool = False) -> Steps[_T]:
        """Make the steps when no others are made; with `is_apart` not while a listener runs."""
        own = object()
        try:
            while self.is_taken if is_apart else self.holder is not None:
                yield Wait(None, math.inf)
            self.holder = own
            try:
                return (yield from steps)
            finally:
                if self.holder is own:
                    self.holder = None
        finally:
            steps.close()


#: The mark of the listener in which the code runs, and the tasks that it has begun.
_listening: ContextVar[object | None] = ContextVar("_listening", default=None)


class _Guard:
    """Admits the calls of the loop's thread until the consumer is closed; later ones while a listener runs, too."""

    def __init__(self, driver: LoopDriver, turn: _Turn) -> None:
        self.maker = Maker("consumer", ConsumerClosed)
        self._driver, self._turn = driver, turn
        self.is_closing = self.is_woken = False

    def used(self) -> AbstractContextManager[object]:
        self.maker.check()
        self._driver.check_loop()
        if self.is_closing and self._turn.listener is None:
            raise ConsumerClosed("the consumer is closed")
        return nullcontext()

    def check(self) -> None:
        if self.is_closing:
            raise ConsumerClosed("the consumer is closed")
        if self.is_woken:
            self.is_woken = False
            raise WokenUp("the consumer was woken up")

    waited = check


class _Beside:
    """See `client.consumer.group.Beside`."""

    def __init__(self, turn: _Turn, driver: LoopDriver) -> None:
        self._turn, self._driver = turn, driver
        self.wake = driver.wake

    def start(self, steps: Steps[None]) -> Callable[[], None]:
        if self._driver.is_closed:
            return steps.close
        self._driver.start(steps).add_done_callback(_log_failure)
        return partial(self._driver.end, steps)

    def called(
        self, call: Callable[[list[TopicPartition]], Awaitable[None] | None], partitions: list[TopicPartition]
    ) -> Steps[None]:
        turn, task, failure = self._turn, None, None
        own, turn.holder, turn.listener = turn.holder, None, object()
        former = _listening.set(turn.listener)
        try:
            awaitable = call(partitions)
            if inspect.isawaitable(awaitable):
                task = self._driver.loop.create_task(_awaited(awaitable))
                task.add_done_callback(lambda _: self._driver.wake())
        except Exception as error:
            failure = error
        finally:
            _listening.reset(former)
        try:
            while (task is not None and not task.done()) or turn.holder is not None:
                yield Wait(None, math.inf)
        except GeneratorExit:
            own = turn.holder  # a call that is under way goes on
            raise
        finally:
            turn.holder, turn.listener = own, None
            if task is not None:
                task.cancel()  # if the consumer is closed meanwhile
        if failure is not None:
            raise failure
        if task is not None and task.cancelled():
            raise KlogError("the rebalance listener was cancelled")
        if task is not None:
            task.result()


def _import_arrow() -> None:
    require("Consumer.poll_arrow", "pyarrow")
    importlib.import_module("spark_klog.columns.decode")


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs here yet, or it is a forked process
        return None


async def _awaited(awaitable: Awaitable[None]) -> None:
    await awaitable


def _log_failure(future: asyncio.Future[None]) -> None:
    if not future.cancelled() and not isinstance(error := future.exception(), KlogError | None):
        _log.error("what a consumer does between its calls has failed", exc_info=error)


class _Parts(Iterator[tuple[Any, int]]):
    """The parts of a chunk. A thread decodes those that `is_quick` does not promise to take a moment."""

    def __init__(self, parts: Iterator[tuple[Any, int]], is_quick: Callable[[], bool]) -> None:
        self._parts, self._is_quick = parts, is_quick
        self._under_way: asyncio.Future[tuple[Any, int]] | None = None
        self._is_slice_over = False

    def decoded(self, driver: LoopDriver, *, begins: bool) -> Steps[None]:
        """Wait for the thread; with `begins` have it decode the next part. It goes on if nobody waits."""
        if self._under_way is None and begins and not self._is_quick():
            try:
                self._under_way = driver.begun_in_thread(next, self._parts, _END)
            except RuntimeError:  # the program ends, and the executor has been shut down
                return
        if self._is_slice_over:
            self._is_slice_over = False
            yield Wait(None, 0.0)
        while self._under_way is not None and not self._under_way.done():
            yield Wait(None, math.inf)

    def __next__(self) -> tuple[Any, int]:
        if self._under_way is None:
            until = time.monotonic() + SLICE / 2
            part = next(self._parts)
            self._is_slice_over = part[0] is AHEAD and time.monotonic() >= until
            return part
        done, self._under_way = self._under_way, None
        if (part := done.result()) is _END:
            raise StopIteration
        return part


@dataclass(slots=True, eq=False)
class _Held:
    """Records, or an Arrow batch, to be returned: those from `begin` on. `end` is the position after the last one.

    `before` is the position before those of a poll, which are returned at once.
    """

    state: Assigned
    run: int
    records: Any
    end: int
    epoch: int
    begin: int = 0
    before: int | None = None

    def taken(self) -> Any:
        begin, self.begin, self.before = self.begin, len(self.records), self.state.position
        self.state.position, self.state.epoch = self.end, self.epoch
        return self.records[begin:] if begin else self.records

    @property
    def returned(self) -> tuple[int, int]:
        """The positions before and after what was returned last."""
        last = self.begin - 1
        before = self.records[last].offset if self.before is None else self.before
        return before, self.end if self.begin == len(self.records) else self.records[last].offset + 1


class Consumer(ConsumerCore, OnLoop):
    """Read topics on asyncio's loop: records one by one, in lists (`poll`), or as Arrow batches (`poll_arrow`).

        async with Consumer({"bootstrap.servers": "127.0.0.1:9092", "group.id": "g"}) as consumer:
            consumer.subscribe(["clicks"])
            async for record in consumer:
                print(record.value)

    Settings, deserializers, errors and promises are those of `spark_klog.client.Consumer`. Calls that wait for brokers
    are to be awaited; the others are functions. Heartbeats go on between the calls; rebalances, their listener (whose
    methods may be coroutine functions), and commits by enable.auto.commit belong to the calls that return records.
    `async for` counts a record as processed when the next one is asked for, and so does a poll with its records. Until
    then they count for commits of the task that got them, or if it has ended without an exception: not if another task
    commits, unsubscribes or closes.

    A consumer that is not read stops fetching: it has at most one response of each broker, of fetch.max.bytes.

    A task that is cancelled in a call ends it there. No record is lost or returned twice, and a rebalance goes on:
    `asyncio.timeout` may end any call. A cancelled `commit` may have committed or not. A cancelled `close` closes the
    connections without more.

    One task at a time reads (`ConcurrentUse`); calls of other tasks, for example `commit`, are made in between.
    A consumer belongs to the loop of its first call: `ConcurrentUse` in another one, `ConfigError` without one (in a
    thread, or with Trio), `ConsumerClosed` in a process forked since.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        include_headers: bool = False,
        timestamp_unit: Literal["us", "ms"] = "us",
    ) -> None:
        self._driver = LoopDriver("consumer", ConsumerClosed)
        self._turn = _Turn()
        self._guard: _Guard = _Guard(self._driver, self._turn)
        self._begin(settings, include_headers, timestamp_unit, self._driver.wake, _Beside(self._turn, self._driver))
        self._held: _Held | None = None
        #: The same for `async for`, until something else may change what it returns next, and the partitions then.
        self._at_hand: _Held | None = None
        self._assigned: Mapping[TopicPartition, Assigned] = {}
        #: What has the records that were returned last, until they are processed, and the task that got them.
        self._handed: _Held | None = None
        self._reader: asyncio.Task[Any] | None = None
        #: The task of the call that got the turn last.
        self._caller: asyncio.Task[Any] | None = None
        #: What a poll has begun for the group and for positions: its steps, and the future of their end.
        self._preparing: tuple[Steps[bool], asyncio.Future[bool]] | None = None
        self._is_polling = self._is_closed = False
        #: Until when `async for` returns records without a look at the group, and other tasks wait: a reading of
        #: `time.monotonic`.
        self._fresh_until = -math.inf
        deserializers = self._deserializers
        self._in_threads = deserializers is not None and deserializers.has_schemas

    async def __aenter__(self) -> Consumer:
        self._guard.used()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._close(CLOSE_SECONDS, _current_task(), commits=kind is None)

    def make(self, steps: Steps[_T]) -> Coroutine[Any, Any, _T]:
        return self._make(self._called_by(_current_task(), steps))  # not the task that e.g. `asyncio.shield` makes

    async def _make(self, steps: Steps[_T], *, is_apart: bool = False) -> _T:
        with self._guard.used():
            return await self._driver.run(self._turn.held(steps, is_apart=is_apart))

    def _called_by(self, task: asyncio.Task[Any] | None, steps: Steps[_T]) -> Steps[_T]:
        self._caller = task
        return (yield from steps)

    def _consumed(self) -> dict[TopicPartition, Committed]:
        offsets = super()._consumed()
        if (held := self._unprocessed(self._caller)) is not None and held.state.key in offsets:
            offsets[held.state.key] = Committed(held.returned[0], held.epoch)
        return offsets

    def _unprocessed(self, caller: asyncio.Task[Any] | None) -> _Held | None:
        """What has the records that were returned last, if they are not processed yet for a commit of this task."""
        held, reader = self._handed, self._reader
        if held is None or reader is None:
            return None
        # `exception()` would keep asyncio from logging one that nobody looks at
        is_over = reader.done() and not reader.cancelled() and reader._exception is None
        if is_over or reader is caller:
            self._handed = None
            return None
        is_assigned = self._assignment.partitions.get(held.state.key) is held.state
        return held if is_assigned and held.state.position == held.returned[1] else None  # else it was sought

    def _step_back(self, caller: asyncio.Task[Any] | None) -> None:
        """Have records read again that are not processed yet, after the partitions are given up by this task."""
        if (held := self._unprocessed(caller)) is not None:
            held.state.position, held.state.epoch = held.returned[0], held.epoch

    def unsubscribe(self) -> Coroutine[Any, Any, None]:
        """Leave the group and drop all partitions; with enable.auto.commit commit the positions first."""
        return self._unsubscribe(_current_task())

    async def _unsubscribe(self, task: asyncio.Task[Any] | None) -> None:
        self._check_listener()
        leaving: Callable[[], Steps[Any]] = steps_of(super().unsubscribe)

        def steps() -> Steps[None]:
            self._step_back(task)
            yield from leaving()

        await self._make(steps(), is_apart=True)

    def _check_listener(self) -> None:
        if self._turn.is_of_listener:
            raise ConcurrentUse("a rebalance listener can't read from its consumer, unsubscribe it, or close it")

    def commit_async(
        self,
        offsets: Mapping[TopicPartition, int | Committed] | None = None,
        on_done: Callable[[Offsets, KlogError | None], None] | None = None,
    ) -> None:
        """Like `commit`, without waiting or retries: a later poll or commit calls `on_done(offsets, error)`."""
        with self._guard.used():
            _ = self._driver.loop
            self._caller = asyncio.current_task()
            wanted = self._consumed() if offsets is None else offsets_of("commit_async", offsets)

            def ended(future: asyncio.Future[None]) -> None:
                error = None if future.cancelled() else future.exception()
                if isinstance(error, ConsumerClosed):  # before it was sent
                    self._in_group().commits.tell(wanted, error, on_done)
                _log_failure(future)

            steps = self._turn.held(self._committing_async(wanted, on_done))
            if next(steps, None) is not None:
                self._driver.start(steps).add_done_callback(ended)

    # Reading

    async def poll(self, timeout: float = 1.0) -> list[ConsumerRecord]:
        """The next records of one partition, at most max.poll.records; [] if there are none within `timeout` s."""
        held = self._handed = await self._next(self._lists, timeout, is_arrow=False)
        return [] if held is None else held.taken()

    async def poll_arrow(self, timeout: float = 1.0) -> pa.RecordBatch | None:
        """The next records of one partition as an Arrow record batch, or None, as of `client.Consumer.poll_arrow`."""
        self._check_arrow()
        if not self._decodes_arrow:
            self._guard.used()
            await self._driver.run(self._driver.in_thread(_import_arrow))
        held = self._handed = await self._next(self._batches, timeout, is_arrow=True)
        return None if held is None else held.taken()

    def __aiter__(self) -> Consumer:
        return self

    async def __anext__(self) -> ConsumerRecord:
        held = self._at_hand
        if (
            held is None
            or time.monotonic() >= self._fresh_until
            or held.state.run != held.run
            or self._assigned is not self._assignment.partitions
        ):
            held = None
            while held is None:
                held = await self._next(self._lists, _LONGEST, is_arrow=False)
            self._held = self._at_hand = self._handed = held
            self._assigned = self._assignment.partitions
            held.state.epoch = held.epoch
        begin = held.begin
        record: ConsumerRecord = held.records[begin]
        held.begin = begin = begin + 1
        if begin == len(held.records):
            held.state.position, self._held, self._at_hand = held.end, None, None
        else:
            held.state.position = record[2] + 1  # the offset: by its name it takes twice as long
        return record

    def _lists(self, chunk: Fetched) -> _Parts:
        return _Parts(
            self._parts(chunk),
            lambda: not self._in_threads and (self._records.is_ahead or len(chunk) <= _QUICKLY_DECODED),
        )

    def _batches(self, chunk: Fetched) -> _Parts:
        return _Parts(self._arrow.parts(chunk), lambda: len(chunk) <= _QUICKLY_DECODED and not self._in_threads)

    async def _next(
        self, decode: Callable[[Fetched], Iterator[tuple[Any, int]]], timeout: float, *, is_arrow: bool
    ) -> _Held | None:
        """What is to be returned next. The caller has to take it at once."""
        self._guard.used()
        self._check_listener()
        if self._is_polling:
            raise ConcurrentUse("another task reads from this consumer: let one task read, or give each its own")
        self._is_polling, self._at_hand, self._handed = True, None, None
        self._reader = asyncio.current_task()
        try:
            if time.monotonic() >= self._fresh_until:
                await asyncio.sleep(0)
                self._fresh_until = time.monotonic() + SLICE
            deadline = time.monotonic() + timeout
            while True:
                if not await self._driver.run(self._reading(decode, is_arrow, deadline)):
                    return None
                held, self._held = self._held, None
                # another task may have had its turn before this one, and e.g. sought
                if held is None or self._is_current(held.state, held.run):
                    return held
        finally:
            self._is_polling = False

    def _reading(
        self, decode: Callable[[Fetched], Iterator[tuple[Any, int]]], is_arrow: bool, deadline: float
    ) -> Steps[bool]:
        """Hold the next part, if it is there by the deadline; False if what is held may not be returned by then."""
        self._guard.check()
        if is_arrow is self._decodes_arrow and self._held is not None:
            if not (yield from self._prepare(deadline)):
                return False  # a rebalance that a cancelled call has begun may give up its partition
            self._fetches.step()
            if self._is_current(self._held.state, self._held.run):
                return True
        elif is_arrow is not self._decodes_arrow and self._decoding is not None:
            yield from self._decoded(self._decoding)
        self._held = None
        self._begin_reading(is_arrow)
        part = yield from self._read(decode, deadline)
        if part is not None:
            assert self._returned is not None
            state, run, position, epoch = self._returned
            assert state.position is not None
            self._held = _Held(state, run, part, state.position, state.epoch)
            state.position, state.epoch = position, epoch
        return True

    def _decoded(self, decoding: Decoding) -> Steps[None]:
        assert isinstance(decoding.parts, _Parts)
        begins = self._is_current(decoding.state, decoding.chunk.run)
        return decoding.parts.decoded(self._driver, begins=begins)

    def _prepare(self, deadline: float) -> Steps[bool]:
        is_own = self._preparing is None
        if self._preparing is None:
            while self._turn.is_taken:  # by another task's call
                if time.monotonic() >= deadline:
                    return False
                yield Wait(None, deadline)
                self._guard.check()
            steps = self._turn.held(super()._prepare(deadline), is_apart=True)
            if next(steps, None) is None:
                return True
            self._preparing = steps, self._driver.start(steps)
        _, done = self._preparing
        while not done.done():
            if not is_own and time.monotonic() >= deadline:
                return False
            yield Wait(None, math.inf if is_own else deadline)
            self._guard.check()
        self._preparing = None
        return done.result()

    def wakeup(self) -> None:
        """Make the call that waits for records, or else the next one, raise `WokenUp`."""
        self._guard.used()
        self._guard.is_woken = True
        self._driver.wake()

    # The end

    def close(self, timeout: float = CLOSE_SECONDS) -> Coroutine[Any, Any, None]:
        """Commit if enable.auto.commit is set, leave the group unless the member is static, close all connections.

        As of `client.Consumer.close`. Calls of other tasks that wait raise `ConsumerClosed`.
        """
        return self._close(timeout, _current_task(), commits=True)

    async def _close(self, timeout: float, task: asyncio.Task[Any] | None, *, commits: bool) -> None:
        if self._is_closed:
            return
        self._driver.check_loop()
        self._check_listener()
        if self._guard.maker.is_forked or self._driver.has_lost_its_loop:
            self._end()
            return
        is_first, self._guard.is_closing, self._at_hand = not self._guard.is_closing, True, None
        self._driver.wake()
        if not is_first:  # another task closes it
            while not self._is_closed:
                await asyncio.sleep(SLICE)
            return
        try:
            if self._group is not None:
                await self._driver.run(self._leaving(time.monotonic() + timeout, task, commits=commits))
        finally:
            self._end()

    def _leaving(self, until: float, task: asyncio.Task[Any] | None, *, commits: bool) -> Steps[None]:
        assert self._group is not None
        self._cluster.patience = PATIENCE
        self._group.hurry()
        while self._turn.is_taken and time.monotonic() < until:
            yield Wait(None, until)
        if self._preparing is not None:
            self._driver.end(self._preparing[0])
        self._step_back(task if commits else None)
        yield from self._group.close(max(0.0, until - time.monotonic()), commits=commits)

    def _end(self) -> None:
        """Close the connections."""
        self._is_closed = self._guard.is_closing = True
        self._at_hand = self._handed = self._reader = self._caller = None
        if not self._driver.is_forked:
            closed = ConsumerClosed("the consumer was closed")
            self._driver.close(closed)
            self._fetches.close()
            if self._group is not None:
                self._group.commits.give_up(closed)
        if self._letters is not None and not self._driver.is_forked:
            self._letters.close()
        if self._group is not None:
            self._group.close_sockets()
        self._cluster.close()
