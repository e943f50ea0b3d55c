"""Bounds on the bytes of requests and of responses in memory, over all connections.

Requests (`queued.max.request.bytes`): a connection asks before its frame grows, and gives the bytes back when the
request is answered. At the limit it stops reading until others have given back. To keep partial frames from waiting for
each other, the first connection that waits gets what it needs: the limit may be exceeded by one frame, and by bytes
already received.

Responses (`queued.max.response.bytes`): a client that does not read its response keeps it in memory. At the limit the
connection whose client has read nothing for longest is closed, so that those who read never wait for those who do not.
"""

from __future__ import annotations

from typing import Protocol


class Waiter(Protocol):
    """A connection that may have to wait for memory."""

    def memory_is_there(self) -> None:
        """Continue, and ask again."""


class FrameMemory:
    """Count of the bytes in use. For one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: dict[Waiter, None] = {}
        self._preferred: Waiter | None = None

    def take(self, size: int) -> None:
        """Count bytes that are already in memory; never refused."""
        self.used += size

    def ask(self, waiter: Waiter, size: int) -> bool:
        """Return True and count `size` bytes, or return False and call `memory_is_there` when to ask again."""
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
        """End the waiter's frame, because it is complete or its connection is gone."""
        self._waiting.pop(waiter, None)
        if self._preferred is waiter:
            self._preferred = None
            self._wake_next()

    def _wake_next(self) -> None:
        """Wake one waiter; when it gives back, it wakes the next."""
        if self._waiting:
            waiter = next(iter(self._waiting))
            del self._waiting[waiter]
            waiter.memory_is_there()


class Sender(Protocol):
    """A connection that sends a response."""

    def drop_response(self, reason: str) -> None:
        """Close the connection; what is not sent is dropped."""


class ResponseMemory:
    """Count of the bytes of responses that are being sent. For one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        #: In the order in which their clients have last read.
        self._held: dict[Sender, int] = {}

    def hold(self, sender: Sender, size: int) -> None:
        """Count the bytes of a response until `release`; beyond the limit, others are dropped that do not read."""
        self._held[sender] = size
        self.used += size
        while self.used > self.limit and (oldest := next(iter(self._held))) is not sender:
            self.release(oldest)
            oldest.drop_response(f"responses that wait to be sent take more than {self.limit} bytes")

    def note_read(self, sender: Sender) -> None:
        """Note that the client has read more of its response."""
        if (size := self._held.pop(sender, None)) is not None:
            self._held[sender] = size

    def release(self, sender: Sender) -> None:
        """End the count of a response that is sent or dropped; may be called again."""
        self.used -= self._held.pop(sender, 0)
