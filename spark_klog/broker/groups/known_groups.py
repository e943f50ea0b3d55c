"""What keeps the groups of either protocol: by id, each with a timer that calls its state machine when it is due."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import inf
from typing import Generic, Protocol, TypeVar

from spark_klog.errors import ErrorCode


class _StateMachine(Protocol):
    """`Group` and `ConsumerGroup`, without I/O and clock; times are readings of `time.monotonic`."""

    group_id: str

    @property
    def wake_at(self) -> float:
        """When `tick` is due; infinite if nothing is."""

    @property
    def is_empty(self) -> bool:
        """Whether the group has no members."""

    def restart(self, now: float) -> None:
        """Start the session timeouts of a group that has been loaded."""

    def kill(self) -> None:
        """End the group: it is no longer kept."""


_G = TypeVar("_G", bound=_StateMachine)


class KnownGroups(ABC, Generic[_G]):
    """All groups of one protocol that have, or have had, members. For one event loop."""

    def __init__(self) -> None:
        self._groups: dict[str, _G] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        #: When each group was last written (ms): for an empty group, when it lost its last member.
        self._emptied: dict[str, int] = {}
        self._is_stopped = False

    @abstractmethod
    def _tick(self, group: _G) -> None:
        """Let a group do what is due, and set its timer again."""

    @abstractmethod
    def _remove(self, group: _G) -> ErrorCode:
        """Remove an empty group's records; NONE or the error."""

    def __iter__(self) -> Iterator[_G]:
        return iter(list(self._groups.values()))

    def get(self, group_id: str) -> _G | None:
        return self._groups.get(group_id)

    def start(self) -> None:
        """Start the session timeouts, after all groups have been loaded."""
        now = time.monotonic()
        for group in self._groups.values():
            group.restart(now)
            self._set_timer(group)

    def stop(self) -> None:
        """Accept no more requests of members."""
        self._is_stopped = True
        self._cancel_timers()

    def empty_since(self, group_id: str, now_ms: int) -> int:
        """When the group lost its last member (ms): `now_ms` if it has members, 0 if it never had any."""
        group = self._groups.get(group_id)
        return now_ms if group is not None and not group.is_empty else self._emptied.get(group_id, 0)

    def delete(self, group_id: str) -> ErrorCode:
        """Remove an empty group; NON_EMPTY_GROUP if it has members, GROUP_ID_NOT_FOUND if nobody has joined it."""
        group = self._groups.get(group_id)
        if group is None:
            return ErrorCode.GROUP_ID_NOT_FOUND
        if not group.is_empty:
            return ErrorCode.NON_EMPTY_GROUP
        code = self._remove(group)
        if not code:
            self.forget(group_id)
        return code

    def forget(self, group_id: str) -> None:
        """Forget a group whose records have been removed; waiting clients join again."""
        group = self._groups.pop(group_id)
        self._emptied.pop(group_id, None)
        if (timer := self._timers.pop(group_id, None)) is not None:
            timer.cancel()
        self._end(group, ErrorCode.REBALANCE_IN_PROGRESS)

    def forget_all(self) -> None:
        """Forget all groups, because their log is gone; waiting clients look for the coordinator again."""
        groups, self._groups = self._groups, {}
        self._cancel_timers()
        self._emptied.clear()
        for group in groups.values():
            self._end(group, ErrorCode.NOT_COORDINATOR)

    def _end(self, group: _G, code: ErrorCode) -> None:
        """End a group; requests that wait get the error."""
        group.kill()

    def _set_timer(self, group: _G) -> None:
        if (timer := self._timers.pop(group.group_id, None)) is not None:
            timer.cancel()
        if not self._is_stopped and group.wake_at < inf:
            delay = max(0.0, group.wake_at - time.monotonic())
            self._timers[group.group_id] = asyncio.get_running_loop().call_later(delay, self._tick, group)

    def _cancel_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
