"""Background work: its failures are logged, and it yields the event loop to requests."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from spark_klog.errors import ConfigError, LogRetired

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
#: How long work may run in the event loop before others get their turn.
_SLICE_SECONDS = 0.002
#: A pause is this many times as long as the round before it.
_REST_FACTOR = 3
_LONGEST_REST_SECONDS = 1.0


class BackgroundTasks:
    """Tasks that nobody awaits, or whose waiter may be cancelled; they still finish before the broker stops."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Start a task; asyncio logs its error if nobody awaits it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run to the end even if the caller is cancelled, as when its connection is lost."""
        return await self.outcome(self.start(work))

    async def outcome(self, task: asyncio.Task[_T]) -> _T:
        """Wait for a task that goes on if the caller is cancelled."""
        try:
            # from Python 3.14 on asyncio.shield logs a later failure itself, as an error with a traceback
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.remove_done_callback(_log_failure)  # that of another caller
            task.add_done_callback(_log_failure)
            raise
        return task.result()

    async def ended(self) -> None:
        """Wait for all tasks."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))


def _log_failure(task: asyncio.Task[Any]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    if isinstance(error, ConfigError):
        _log.info("a change was refused after its client had disconnected: %s", error)
    elif isinstance(error, LogRetired):
        _log.debug("work that nobody waits for ended with its log: %s", error)
    else:
        _log.error("a change failed after its client had disconnected: %s", error)


class Pace:
    """Yields the event loop after every few milliseconds of work."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def rest(self) -> None:
        if time.perf_counter() - self._since >= _SLICE_SECONDS:
            await asyncio.sleep(0)
            self._since = time.perf_counter()


class ThreadPace:
    """Lets the event loop run after every few milliseconds of Python code in a thread.

    Without it the thread has the interpreter for 5 ms each time the loop needs it (`sys.getswitchinterval`), which is
    several times in a request, and for longer if the thread makes short system calls: each wakes the loop too late, and
    its wait begins again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._since = time.perf_counter()

    def rest(self) -> None:
        """Wait for a round of the loop if this slice has lasted long enough; not if the loop is closed."""
        if time.perf_counter() - self._since < _SLICE_SECONDS:
            return
        has_run = threading.Event()
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(has_run.set)
            has_run.wait(_LONGEST_REST_SECONDS)
        self._since = time.perf_counter()


class Rounds:
    """Pauses between rounds of work, in proportion to the duration of the last round."""

    def __init__(self) -> None:
        self._next_at = 0.0

    async def rest(self) -> None:
        """Wait until the next round may begin."""
        await asyncio.sleep(self._next_at - time.monotonic())

    @contextmanager
    def measured(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self._next_at = ended + min(_LONGEST_REST_SECONDS, _REST_FACTOR * (ended - started))
