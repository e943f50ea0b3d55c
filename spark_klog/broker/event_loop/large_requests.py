"""Protection from large requests: turns of the event loop, one answer for repeated elements, a limit for ids.

`protocol/codec.py` bounds the memory that decoding such a request takes, and the length of its strings.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from time import perf_counter
from typing import Any, TypeVar

#: Characters of the longest id that a client may choose: of a group, member, client or transaction. Kafka's only limit
#: is that of a string, 32,767 bytes, but ids are kept, and are parts of other ids, records and answers.
MAX_ID_LENGTH = 1024
_TURN_SECONDS = 0.005
#: Elements of a response above which encoding takes longer than a turn.
_MANY = 1000

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Turns:
    """Shares the event loop's time: handlers call `take` once for each element of a request."""

    def __init__(self) -> None:
        self._ends = 0.0

    async def take(self) -> None:
        """Let others run if this turn has lasted long enough."""
        if perf_counter() >= self._ends:
            await asyncio.sleep(0)
            self._ends = perf_counter() + _TURN_SECONDS


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
