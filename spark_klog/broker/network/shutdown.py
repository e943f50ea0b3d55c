"""Orderly shutdown of a broker: no acknowledged record is lost, and the next start needs no recovery.

1. the listeners are closed
2. requests already received are answered, within 5 seconds; waiting fetches return what is available
3. connections are closed
4. housekeeping and the cleaner end
5. logs are flushed and closed; checkpoints and the marker of a clean shutdown are written
6. the broker's registration is removed

`drain` does 2 and 3, its caller the rest. A second signal ends step 2 at once; during a later step it kills the
process, as signals do by default, and the next start recovers.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Collection
from typing import Protocol

from spark_klog.broker.fetches.purgatory import Purgatory

_log = logging.getLogger(__name__)
_DRAIN_SECONDS = 5.0
_LOOK_SECONDS = 0.01


class Drainable(Protocol):
    """A connection, as shutdown sees it."""

    def finish(self) -> None:
        """Close after the requests received so far are answered; may be called again."""

    def abort(self) -> None:
        """Close now."""


class StopSignals:
    """SIGTERM and SIGINT: events for the first and the second signal."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._came)

    def _came(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def drain(purgatory: Purgatory, connections: Collection[Drainable], at_once: asyncio.Event) -> None:
    """Close `connections` (a live collection) within the deadline, or as soon as `at_once` is set."""
    purgatory.close()
    deadline = asyncio.get_running_loop().time() + _DRAIN_SECONDS
    while connections and not at_once.is_set() and asyncio.get_running_loop().time() < deadline:
        for connection in list(connections):  # each round: one may have been accepted just before the listener closed
            connection.finish()
        await asyncio.sleep(_LOOK_SECONDS)
    if connections:
        _log.warning("%d connections closed with requests under way", len(connections))
        for connection in list(connections):
            connection.abort()
        await asyncio.sleep(0)
