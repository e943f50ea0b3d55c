"""Warnings about failures that a consumer retries: they tell a program why it gets no records."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable

from spark_klog.errors import ErrorCode, KlogError, ProtocolError

_log = logging.getLogger(__name__)
#: Seconds between two warnings about the same thing: doubled from the first to the last.
_FIRST_PAUSE, _LAST_PAUSE = 5.0, 300.0
#: Seconds without the failure after which the next one is a new one.
_FORGET = 30.0
#: Errors that pass within moments when a leader or coordinator moves.
_PASSING = frozenset(
    {
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.OFFSET_NOT_AVAILABLE,
        ErrorCode.UNSTABLE_OFFSET_COMMIT,
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,
        ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
        ErrorCode.INVALID_FETCH_SESSION_EPOCH,
        ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.INCONSISTENT_TOPIC_ID,
    }
)
#: Seconds that these last before there is a warning.
_PASSING_SECONDS = 2.0
#: The most failures that are remembered.
_MOST = 1000


class _Trouble:
    __slots__ = ("noted_at", "pause", "say_at")

    def __init__(self, now: float, say_at: float) -> None:
        self.noted_at, self.say_at, self.pause = now, say_at, _FIRST_PAUSE


class Troubles:
    """Log each failure that lasts as a warning: the first time at once, then at intervals that double.

    Failures that are normal when a leader or coordinator moves are logged as warnings only if they last for 2 s.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Trouble] = {}

    def note(self, where: str, error: KlogError) -> None:
        """Note a failure that is retried; `where` names what failed, for example a topic or a broker."""
        now = time.monotonic()
        code = error.code if isinstance(error, ProtocolError) else None
        key = where, type(error), code
        trouble = self._known.get(key)
        if trouble is None or now > trouble.noted_at + _FORGET + trouble.pause:
            if len(self._known) >= _MOST:
                self._known.clear()
            trouble = self._known[key] = _Trouble(now, now + _PASSING_SECONDS if code in _PASSING else now)
        trouble.noted_at = now
        if now < trouble.say_at:
            _log.info("%s: trying again: %s", where, error)
            return
        trouble.say_at = now + trouble.pause
        trouble.pause = min(2 * trouble.pause, _LAST_PAUSE)
        _log.warning("no records from %s, trying again: %s", where, error)
