"""Protection from large requests: turns of the event loop, one answer for repeated elements, a limit for ids.

`protocol/codec.py` bounds the memory that decoding such a request takes, and the length of its strings.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextvars import ContextVar
from time import perf_counter
from typing import Any, TypeVar

#: Characters of the longest id that a client may choose: of a group, member, client or transaction. Kafka's only limit
#: is that of a string, 32,767 bytes, but ids are kept, and are parts of other ids, records and answers.
MAX_ID_LENGTH = 1024
#: A round of the loop takes some 0.03 ms; who waits behind fifty others waits for as many turns.
_TURN_SECONDS = 0.001
#: A task that has not taken turns for so long begins one at once.
_REST_SECONDS = 0.02
#: Elements of a response above which encoding takes longer than a turn.
_MANY = 1000

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Turns:
    """Shares the event loop's time: handlers call `take` once for each element of a request.

    A task that has used up its turn waits in a queue, from which one goes on in each round of the loop. A task that has
    rested begins one at once. So whoever has little to do hardly waits, however many have much to do.
    """

    def __init__(self) -> None:
        #: When the turn of the current task ends; each task has its own value.
        self._ends: ContextVar[float] = ContextVar("ends", default=0.0)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    async def take(self, *, before_long_step: bool = False) -> None:
        """Let others run if this task's turn has lasted long enough, or the next step takes a turn by itself."""
        now, ends = perf_counter(), self._ends.get()
        if now > ends + _REST_SECONDS and not before_long_step:
            self._ends.set(now + _TURN_SECONDS)
        elif now > ends or before_long_step:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            self._call_soon()
            await waiter
            self._ends.set(perf_counter() + _TURN_SECONDS)

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


def distinct(entries: Iterable[T], key: Callable[[T], Hashable]) -> Iterator[T]:
    """Skip entries whose key came before, so that a large answer is given only once."""
    seen = set()
    for entry in entries:
        name = key(entry)
        if name not in seen:
            seen.add(name)
            yield entry


def repeated(keys: Iterable[K]) -> dict[K, None]:
    """The keys that come more than once, in order."""
    return {key: None for key, count in Counter(keys).items() if count > 1}


def has_many_elements(message: Any) -> bool:
    """Whether a response takes long to encode, judged by the lists in its first two levels."""
    lists = [value for value in message.values() if isinstance(value, list)]
    count = sum(map(len, lists))
    for entries in lists:
        for entry in entries:
            if count > _MANY:
                return True
            if isinstance(entry, dict):
                count += sum(len(value) for value in entry.values() if isinstance(value, list))
    return count > _MANY
