"""Wait for what a server, another process, a thread or the event loop does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_SECONDS = 60.0


def wait_until(condition: Callable[[], object], what: str = "it does not come", seconds: float = _SECONDS) -> None:
    """Wait until `condition` is true; AssertionError with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.01)


async def until(condition: Callable[[], object], what: str = "it does not come") -> None:
    """The same in the event loop."""
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {_SECONDS:g} s"
        await asyncio.sleep(0.001)
