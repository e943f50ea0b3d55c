"""Requests on asyncio's loop: what `run` and a waiting thread are to the synchronous client.

All requests of a client go on in rounds. A round makes a step of each, then has the loop watch what they wait for. So
no socket is watched while a step may close it, and whatever one step changes, the others see: an answer that came with
that to another request, a connection that was closed, a turn that has ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import select
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from typing import Any, TypeVar

from spark_klog.client.forks import Maker
from spark_klog.client.requests import Steps, Wait
from spark_klog.errors import ConcurrentUse, ConfigError, KlogError, RequestTimedOut

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
#: Seconds that one step may take before it leaves the loop to others.
SLICE = 0.001
#: Seconds; timers of some loops take no infinity.
_LONGEST_WAIT = 3600.0
#: Of a client; a registry that does not answer may hold some of them.
_THREADS = 4


class LoopDriver:
    """Drives the requests of one client on the loop that runs at its first call. Only for that loop's thread."""

    def __init__(self, client: str, closed: type[KlogError]) -> None:
        """`client`: its name for messages; `closed`: the error of its calls in a process forked since."""
        self._client = client
        self._maker = Maker(client, closed)
        self._loop: asyncio.AbstractEventLoop | None = None
        #: The requests under way, each with the future that gets its result, and with the context of its call, in which
        #: its steps are made, whoever begins the round. In this order they make them.
        self._running: dict[Steps[Any], tuple[asyncio.Future[Any], Context]] = {}
        self._readers: list[int] = []
        self._writers: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._is_stepping = self._is_in_turn = False
        self.is_closed = False

    @property
    def is_forked(self) -> bool:
        return self._maker.is_forked

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that runs; `ConcurrentUse` if the client belongs to another one, `ConfigError` if none runs here."""
        self._maker.check()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise ConfigError(
                f"a {self._client} of spark_klog.aio is used where asyncio's loop runs, and none runs in this thread: "
                "with Trio, and in threads, use spark_klog.client"
            ) from None
        if self._loop is None:
            self._loop = loop
        elif loop is not self._loop:
            raise ConcurrentUse(f"this {self._client} belongs to another event loop: make one for each loop")
        return loop

    @property
    def has_lost_its_loop(self) -> bool:
        return self._loop is not None and self._loop.is_closed()

    def check_loop(self) -> None:
        """Raise what `loop` raises, unless the client has no loop, or a closed one: then any may close the client."""
        if self._loop is not None and not self._loop.is_closed() and not self.is_forked:
            _ = self.loop

    async def run(self, steps: Steps[_T]) -> _T:
        """Make a request. If the task is cancelled the request ends where it waits, as at an interrupt."""
        future = self.start(steps)
        try:
            result: _T = await future
            return result
        finally:
            self.end(steps)

    def start(self, steps: Steps[_T]) -> asyncio.Future[_T]:
        """Begin a request that goes on without a task; what can be done at once is done."""
        future: asyncio.Future[_T] = self.loop.create_future()
        self._running[steps] = future, copy_context()
        if self._is_stepping:
            self.wake()
        else:
            self._round()
        return future

    def end(self, steps: Steps[Any]) -> None:
        """End a request where it waits, unless it is over."""
        if self._running.pop(steps, None) is not None:
            self._unwatch()  # ending it may close a connection
            steps.close()
            self.wake()

    def wake(self) -> None:
        """Have another round soon: what a request waits for may have changed."""
        if self._soon is None and self._loop is not None and not self._loop.is_closed():
            self._soon = self._loop.call_soon(self._round)

    def begun_in_thread(self, work: Callable[..., _T], *arguments: object) -> asyncio.Future[_T]:
        """Begin blocking work in a thread of the client; `RuntimeError` if those have been shut down.

        The threads of the loop's executor may all wait for this work.
        """

        def over(done: asyncio.Future[_T]) -> None:
            if not done.cancelled():
                done.exception()  # nobody may wait for it any more: asyncio would log that
            self.wake()

        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, f"klog-{self._client}")
        done = self.loop.run_in_executor(self._threads, work, *arguments)
        done.add_done_callback(over)
        return done

    def in_thread(self, work: Callable[..., _T], *arguments: object) -> Steps[_T]:
        """Do blocking work in a thread of the client."""
        try:
            done = self.begun_in_thread(work, *arguments)
        except RuntimeError:  # the program ends, and the executor has been shut down
            return work(*arguments)
        while not done.done():
            yield Wait(None, math.inf)
        return done.result()

    def in_turn(self, steps: Steps[_T], seconds: float, late: str) -> Steps[_T]:
        """Make the steps when no others are in turn; `RequestTimedOut` with the text `late` if that takes too long."""
        until = time.monotonic() + seconds
        try:
            while self._is_in_turn:
                if time.monotonic() >= until:
                    raise RequestTimedOut(late)
                yield Wait(None, until)
            self._is_in_turn = True
            try:
                return (yield from steps)
            finally:
                self._is_in_turn = False
        finally:
            steps.close()

    def close(self, error: KlogError) -> None:
        """End all requests with this error; the client closes their connections."""
        self.is_closed = True
        self._unwatch()
        running, self._running = self._running, {}
        for steps, (future, _) in running.items():
            steps.close()
            settle(future, error)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)  # each ends after what it does now

    def _round(self) -> None:
        self._unwatch()
        self._is_stepping = True
        try:
            waits = list(self._steps())
            while None in waits:  # what one that has ended leaves may let others go on
                waits = list(self._steps())
        except BaseException:  # Ctrl-C, where the loop's runner lets it through
            self.wake()
            raise
        finally:
            self._is_stepping = False
        self._watch([wait for wait in waits if wait is not None])

    def _steps(self) -> Iterator[Wait | None]:
        """Make a step of each request: what it waits for, None if it has ended."""
        for steps, (future, context) in list(self._running.items()):
            if steps not in self._running:  # another one has closed the driver
                continue
            wait: Wait | None = None
            error: BaseException | None = None
            result: Any = None
            try:
                wait = context.run(next, steps)
            except StopIteration as end:
                result = end.value
            except BaseException as raised:
                error = raised
            if wait is None:
                self._running.pop(steps, None)
                settle(future, error, result)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise error
            yield wait

    def _watch(self, waits: list[Wait]) -> None:
        """Have the loop begin the next round at an event or a time that one of the requests waits for."""
        if self._soon is not None:
            return
        pause = min((wait.until for wait in waits), default=math.inf) - time.monotonic()
        events: dict[int, int] = {}
        is_ready = pause <= 0 or any(wait.is_over for wait in waits)
        for connection in {connection for wait in waits for connection in wait.connections}:
            awaited = connection.awaited_events
            is_ready = is_ready or not awaited
            if awaited:
                fd = connection.fileno()
                events[fd] = events.get(fd, 0) | awaited
        if is_ready:
            self.wake()
            return
        assert self._loop is not None
        for fd, awaited in events.items():
            if awaited & select.POLLIN:
                self._loop.add_reader(fd, self._round)
                self._readers.append(fd)
            if awaited & select.POLLOUT:
                self._loop.add_writer(fd, self._round)
                self._writers.append(fd)
        if pause < math.inf:
            self._timer = self._loop.call_later(min(pause, _LONGEST_WAIT), self._round)

    def _unwatch(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed() and not self.is_forked:
            for fd in self._readers:
                loop.remove_reader(fd)
            for fd in self._writers:
                loop.remove_writer(fd)
            for handle in (self._timer, self._soon):
                if handle is not None:
                    handle.cancel()
        self._readers.clear()
        self._writers.clear()
        self._timer = self._soon = None


def settle(future: asyncio.Future[Any], error: BaseException | None, result: object = None) -> None:
    """Give a future its result or its error, unless its task was cancelled or its loop is closed."""
    if future.done() or future.get_loop().is_closed():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # nobody may wait for it: asyncio would log that
