"""The failures of a consumer: warnings about those that it retries, and those that it raises."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Hashable

from spark_klog.client.retry import Lasting
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


class Troubles:
    """Log each failure that lasts as a warning: the first time at once, then at intervals that double.

    Failures that are normal when a leader or coordinator moves are logged as warnings only if they last for 2 s.
    """

    def __init__(self) -> None:
        #: When a failure was last noted, when to warn again, and the pause after that, in seconds.
        self._known: dict[Hashable, tuple[float, Lasting]] = {}
        #: Failures that can't be retried; each is raised by a poll.
        self.final: deque[KlogError] = deque()

    def note(self, where: str, error: KlogError) -> None:
        """Note a failure that is retried; `where` names what failed, for example a topic or a broker."""
        now = time.monotonic()
        code = error.code if isinstance(error, ProtocolError) else None
        key = where, type(error), code
        noted_at, lasting = self._known.get(key, (-math.inf, Lasting(now, _FIRST_PAUSE, _LAST_PAUSE)))
        if now > noted_at + _FORGET + lasting.pause:
            if len(self._known) >= _MOST:
                self._known.clear()
            lasting = Lasting(now + _PASSING_SECONDS if code in _PASSING else now, _FIRST_PAUSE, _LAST_PAUSE)
        self._known[key] = now, lasting
        if lasting.is_due(now):
            _log.warning("no records from %s, trying again: %s", where, error)
        else:
            _log.info("%s: trying again: %s", where, error)
