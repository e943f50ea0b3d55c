"""Dictionaries with a bound."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Generic, TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


class Newest(dict[_K, _V]):
    """A dictionary that keeps the values of the `capacity` keys that were set last; the oldest is first.

    `newest[key] = value` makes a key the newest and removes the oldest ones; the other methods are those of `dict`.
    Threads may share it: there may be one more for each of them that sets a key.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def __setitem__(self, key: _K, value: _V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        while len(self) > self._capacity:
            with suppress(KeyError, RuntimeError, StopIteration):  # another thread was faster
                del self[next(iter(self))]


class Cache(Generic[_K, _V]):
    """At most `capacity` values by their keys, each for `seconds`, None: for good. Threads may share it."""

    def __init__(self, capacity: int, seconds: float | None = None) -> None:
        self._seconds = seconds
        #: With the time of `time.monotonic` at which each was kept.
        self._kept: Newest[_K, tuple[float, _V]] = Newest(capacity)

    def get(self, key: _K) -> _V | None:
        kept = self._kept.get(key)
        if kept is None or (self._seconds is not None and time.monotonic() - kept[0] >= self._seconds):
            return None
        return kept[1]

    def keep(self, key: _K, value: _V) -> None:
        self._kept[key] = time.monotonic(), value

    def clear(self) -> None:
        self._kept.clear()
