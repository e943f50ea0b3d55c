"""Sharing the event loop: turns, tasks that nobody awaits, paced work, threads that decompress, short collections.

Nothing here bounds what a request allocates: `protocol/codec.py` bounds the memory that decoding takes, and strings.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from time import perf_counter
from typing import Any, TypeVar

from spark_klog.errors import ConfigError, LogRetired
from spark_klog.wire.codecs import DecompressedTooLarge

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)
#: Processor time of a full collection above which its survivors are frozen.
_LONG_SECONDS = 0.005
_FULL = 2
#: Characters of the longest id that a client may choose: of a group, member, client or transaction. Kafka's only limit
#: is that of a string, 32,767 bytes, but ids are kept, and are parts of other ids, records and answers.
MAX_ID_LENGTH = 1024
#: A round of the loop takes some 0.03 ms; who waits behind fifty others waits for as many turns.
_TURN_SECONDS = 0.001
#: A task that has not taken turns for so long begins one at once, unless it has worked all the time.
_REST_SECONDS = 0.02
#: Of the long requests that are answered in one round of the loop without a turn of their own.
_LONG_BYTES = 256 * 1024
#: Elements of a response above which encoding takes longer than a turn.
_MANY = 1000
#: How long work may run in the event loop before others get their turn.
_SLICE_SECONDS = 0.002
_LONGEST_REST_SECONDS = 1.0
#: Bytes, compressed or not, that are compressed in some 10 ms; in half a second by zstd's slowest level.
_SMALL_BYTES = 256 * 1024


@contextmanager
def short_collections() -> Iterator[None]:
    """Freeze what there is, the logs, and the survivors of slow full collections while the context is open.

    A collection stops all threads while it scans; a full one scans all objects: 50 ms for 2,000 topics, a second for a
    million offsets. Later collections skip what is frozen (`gc.freeze`). Frozen objects are still freed when their last
    reference goes, but frozen cycles never are: logs, topics, groups and connections must not leave cycles behind.
    """
    started = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal started
        if info["generation"] != _FULL:
            return
        if phase == "start":
            started = time.thread_time()
        elif time.thread_time() - started >= _LONG_SECONDS:
            gc.freeze()

    gc.collect()
    gc.freeze()
    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)


class Turns:
    """Shares the event loop's time: handlers call `take` once for each element of a request.

    A task that has used up its turn waits in a queue, from which one goes on in each round of the loop. A task that has
    rested begins one at once: the loop has run since its last turn began. So whoever has little to do hardly waits,
    however many have much to do.
    """

    def __init__(self) -> None:
        #: When the turn of the current task ends, and the round in which it began; each task has its own value.
        self._turn: ContextVar[tuple[float, int]] = ContextVar("turn", default=(0.0, -1))
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False
        #: Rounds of the loop in which turns have begun.
        self._rounds = 0
        self._counts_round = False
        #: Bytes of the long requests that this round of the loop has answered.
        self._long_bytes = 0

    def begin(self) -> None:
        """Begin a turn: of work that is no task, or not yet."""
        self._turn.set((perf_counter() + _TURN_SECONDS, self._rounds))
        if not self._counts_round:
            self._counts_round = True
            asyncio.get_running_loop().call_soon(self._count_round)

    def _count_round(self) -> None:
        self._counts_round = False
        self._rounds += 1

    def has_room(self, size: int) -> bool:
        """Whether this round may answer a long request of so many bytes at once, too; counts it then."""
        if self._long_bytes + size > _LONG_BYTES:
            return False
        if not self._long_bytes:
            asyncio.get_running_loop().call_soon(self._end_round)
        self._long_bytes += size
        return True

    def _end_round(self) -> None:
        self._long_bytes = 0

    def is_over(self) -> bool:
        """Whether `take` has something to do: asking costs less than a coroutine."""
        return perf_counter() > self._turn.get()[0]

    async def take(self, *, before_long_step: bool = False) -> None:
        """Let others run if this task's turn has lasted long enough, or the next step takes a turn by itself."""
        now, (ends, began) = perf_counter(), self._turn.get()
        if now <= ends and not before_long_step:
            return
        has_rested = now > ends + _REST_SECONDS and began != self._rounds
        if before_long_step or not has_rested:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            self._call_soon()
            await waiter
        self.begin()

    async def each(self, elements: Iterable[_T]) -> AsyncIterator[_T]:
        """Take a turn for each element: of a list that may be long, while what is in an element may be nothing."""
        for element in elements:
            await self.take()
            yield element

    def _call_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._wake_next)

    def _wake_next(self) -> None:
        self._is_due = False
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():  # else its task was cancelled
                waiter.set_result(None)
                break
        if self._waiting:
            self._call_soon()


def distinct(entries: Iterable[_T], key: Callable[[_T], Hashable]) -> Iterator[_T]:
    """Skip entries whose key came before, so that a large answer is given only once."""
    seen = set()
    for entry in entries:
        name = key(entry)
        if name not in seen:
            seen.add(name)
            yield entry


def repeated(keys: Iterable[_K]) -> dict[_K, None]:
    """The keys that come more than once, in order."""
    return {key: None for key, count in Counter(keys).items() if count > 1}


def has_many_elements(message: dict[str, Any]) -> bool:
    """Whether a response takes long to encode, judged by the lists in its first two levels."""
    count = 0
    for value in message.values():
        if type(value) is list:
            count += len(value)
            for entry in value:
                if count > _MANY:
                    return True
                if type(entry) is dict:
                    for inner in entry.values():
                        if type(inner) is list:
                            count += len(inner)
    return count > _MANY


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


async def within(seconds: float, work: Coroutine[Any, Any, _T]) -> _T:
    """Wait for `work` at most so long; `asyncio.TimeoutError`.

    For handlers: `asyncio.wait_for` needs a task around it from Python 3.12 on, and a request begins without one.
    """
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()


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


class Decompression:
    """Threads that decompress record batches for requests: one each for small batches, large ones, those of the log.

    Small batches of producers wait neither for large ones nor for old consumers, whose batches the log has accepted
    with up to decompressed.max.bytes. One thread each bounds the memory, and the processor time that the event loop has
    to share. A cancelled request, whose client has gone, leaves its thread only when its batch is done.
    """

    def __init__(self) -> None:
        self._small, self._large, self._of_log = (
            ThreadPoolExecutor(1, f"klog-{batches}") for batches in ("small-batches", "large-batches", "log-batches")
        )

    async def produced(self, work: Callable[[memoryview, int], _T], records: memoryview, limit: int) -> _T:
        """Call `work` with produced batches and the bytes that they may decompress to; `DecompressedTooLarge`.

        Nobody knows how large they become, so those with few bytes begin as small ones.
        """
        loop, small = asyncio.get_running_loop(), min(limit, _SMALL_BYTES)
        if len(records) <= small:
            try:
                return await loop.run_in_executor(self._small, work, records, small)
            except DecompressedTooLarge:
                if small == limit:
                    raise
        return await loop.run_in_executor(self._large, work, records, limit)

    async def of_log(self, work: Callable[[], _T]) -> _T:
        """Call `work`, which decompresses batches of a log."""
        return await asyncio.get_running_loop().run_in_executor(self._of_log, work)

    def close(self) -> None:
        """Let the threads end, after what they do now."""
        for threads in (self._small, self._large, self._of_log):
            threads.shutdown(wait=False, cancel_futures=True)
