"""How many bytes of requests the broker holds at once, over all connections (`queued.max.request.bytes`).

A connection asks before its frame grows, and gives back when the request is answered. Where the limit is reached it
stops reading until others have given back. So that frames which are all half there do not wait for each other, the
first that waits gets what it needs: the limit may be exceeded by one frame, and by what has arrived already.
"""

from __future__ import annotations

from typing import Protocol


class Waiter(Protocol):
    """Who waits for memory."""

    def memory_is_there(self) -> None:
        """Go on, and ask again."""


class FrameMemory:
    """Bytes in use. For one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: dict[Waiter, None] = {}
        self._preferred: Waiter | None = None

    def take(self, size: int) -> None:
        """Bytes that are there already; never refused."""
        self.used += size

    def ask(self, waiter: Waiter, size: int) -> bool:
        """True where `size` bytes are granted; else `memory_is_there` is called when to go on."""
        if self.used + size > self.limit and self._preferred is not waiter:
            if self._preferred is not None:
                self._waiting[waiter] = None
                return False
            self._preferred = waiter
        self.used += size
        return True

    def give_back(self, size: int) -> None:
        self.used -= size
        if self.used < self.limit:
            self._wake_next()

    def leave(self, waiter: Waiter) -> None:
        """The waiter's frame is whole, or it will never be."""
        self._waiting.pop(waiter, None)
        if self._preferred is waiter:
            self._preferred = None
            self._wake_next()

    def _wake_next(self) -> None:
        """One only: it gives back in its turn, which wakes another."""
        if self._waiting:
            waiter = next(iter(self._waiting))
            del self._waiting[waiter]
            waiter.memory_is_there()
