"""What a registry's client has learnt."""

from __future__ import annotations

import threading
import time
from typing import Generic, TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


class Cache(Generic[_K, _V]):
    """At most `capacity` values by their keys, each for `seconds`, None: for good. Threads may share it."""

    def __init__(self, capacity: int, seconds: float | None = None) -> None:
        self._capacity, self._seconds = capacity, seconds
        self._lock = threading.Lock()
        #: With the time of `time.monotonic` at which each was kept; the oldest is first.
        self._kept: dict[_K, tuple[float, _V]] = {}

    def get(self, key: _K) -> _V | None:
        kept = self._kept.get(key)
        if kept is None or (self._seconds is not None and time.monotonic() - kept[0] >= self._seconds):
            return None
        return kept[1]

    def keep(self, key: _K, value: _V) -> None:
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = time.monotonic(), value
            while len(self._kept) > self._capacity:
                del self._kept[next(iter(self._kept))]

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
