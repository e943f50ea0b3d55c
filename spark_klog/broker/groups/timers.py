"""Timers of groups: each group has at most one, which calls its coordinator when the group's state machine is due."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf


class Timers:
    """The timers of all groups of one kind, by group id. For one event loop."""

    def __init__(self) -> None:
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def set(self, group_id: str, wake_at: float, tick: Callable[[], None]) -> None:
        """Call `tick` at `wake_at`, a reading of `time.monotonic`, in place of an earlier timer; never if infinite."""
        self.cancel(group_id)
        if wake_at < inf:
            delay = max(0.0, wake_at - time.monotonic())
            self._handles[group_id] = asyncio.get_running_loop().call_later(delay, tick)

    def cancel(self, group_id: str) -> None:
        handle = self._handles.pop(group_id, None)
        if handle is not None:
            handle.cancel()

    def cancel_all(self) -> None:
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()
