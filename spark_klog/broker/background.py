"""Work beside the requests: its end is noticed, and it leaves the event loop to others."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from spark_klog.errors import ConfigError, LogRetired

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
#: Work in the event loop goes on so long before others get their turn.
_SLICE_SECONDS = 0.002
#: A rest is so many times as long as the round before it.
_REST_FACTOR = 3
_LONGEST_REST_SECONDS = 1.0


class BackgroundTasks:
    """Tasks that nobody waits for, or whose waiter may be cancelled: they end all the same, before the broker stops."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run it; what it raises is logged if nobody waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run it to its end, though the caller is cancelled: its connection may be gone."""
        task = self.start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise

    async def ended(self) -> None:
        """Wait for all of them."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))


def _log_failure(task: asyncio.Task[Any]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    if isinstance(error, ConfigError):
        _log.info("a change whose client is gone was refused: %s", error)
    elif isinstance(error, LogRetired):
        _log.debug("work that nobody waits for ended with its log: %s", error)
    else:
        _log.error("a change whose client is gone has failed: %s", error)


class Pace:
    """Gives others their turn after each few milliseconds of work."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def rest(self) -> None:
        if time.perf_counter() - self._since >= _SLICE_SECONDS:
            await asyncio.sleep(0)
            self._since = time.perf_counter()


class Rounds:
    """Leaves time for others between two rounds of work: some times as long as the last one took."""

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
