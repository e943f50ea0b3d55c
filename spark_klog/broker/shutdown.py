"""How a broker stops: in order, so that no acknowledged record is lost and the next start need not recover.

1. nobody is accepted any more
2. requests that have arrived are answered, for 5 seconds at most; fetches that wait are answered with what there is
3. connections are closed
4. housekeeping and the cleaner end
5. logs are flushed and closed; checkpoints and the marker of a clean stop are written
6. the registration is removed

`drain` does 2 and 3, the others are the caller's. A second signal ends 2 at once; one that comes later kills the
process, as signals do, and then the next start recovers.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Collection
from typing import Protocol

from spark_klog.broker.purgatory import Purgatory

_log = logging.getLogger(__name__)
_DRAIN_SECONDS = 5.0
_LOOK_SECONDS = 0.01


class Drainable(Protocol):
    """A connection, as far as stopping goes."""

    def finish(self) -> None:
        """Close when the requests that are here have been answered; may be called again."""

    def abort(self) -> None:
        """Close now."""


class StopSignals:
    """SIGTERM and SIGINT: whether one has come, or two."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._came)

    def _came(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def drain(purgatory: Purgatory, connections: Collection[Drainable], at_once: asyncio.Event) -> None:
    """Let `connections` (which lose those that are closed) end, in the time there is, or until `at_once`."""
    purgatory.close()
    deadline = asyncio.get_running_loop().time() + _DRAIN_SECONDS
    while connections and not at_once.is_set() and asyncio.get_running_loop().time() < deadline:
        for connection in list(connections):  # each time: one may have been accepted just before the listener closed
            connection.finish()
        await asyncio.sleep(_LOOK_SECONDS)
    if connections:
        _log.warning("%d connections closed with requests under way", len(connections))
        for connection in list(connections):
            connection.abort()
        await asyncio.sleep(0)
