"""Fetches that wait for records: an append wakes the fetches that wait for its partition; nothing polls."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection

Key = tuple[str, int]


class Purgatory:
    """Waiters by topic-partition. For one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[Key, set[asyncio.Future[None]]] = defaultdict(set)
        #: Number of waiters.
        self.waiting = 0
        #: Set when the broker stops: nobody may wait any more.
        self.is_closed = False

    def close(self) -> None:
        """Wake all waiters, and let nobody wait from now on."""
        self.is_closed = True
        for key in list(self._waiting):
            self.wake(key)

    def wake(self, key: Key) -> None:
        """Wake the waiters of a partition, after an append or because it is gone."""
        for waiter in self._waiting.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, keys: Collection[Key], timeout: float) -> bool:
        """Wait until one of the partitions is woken; False after `timeout` seconds, or if the purgatory is closed."""
        if self.is_closed:
            return False
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for key in keys:
            self._waiting[key].add(waiter)
        self.waiting += 1
        try:
            await asyncio.wait_for(waiter, timeout)
        except asyncio.TimeoutError:
            return False
        finally:
            self.waiting -= 1
            for key in keys:
                waiters = self._waiting.get(key)
                if waiters is not None:
                    waiters.discard(waiter)
                    if not waiters:
                        del self._waiting[key]
        return True
