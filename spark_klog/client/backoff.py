"""Pauses between attempts: exponential, with jitter (KIP-580), until a deadline."""

from __future__ import annotations

import logging
import random
import time

from spark_klog.client.config import ClientConfig
from spark_klog.errors import ConnectionFailed, RequestTimedOut

_log = logging.getLogger(__name__)

_JITTER = 0.2
#: Seconds. With less than this left another attempt could not succeed.
_LEAST = 0.01
#: An attempt with less than this part of the time is too short for its failure to tell anything.
_SHORT = 0.1
_MOST_DOUBLINGS = 30
#: With retry.backoff.ms=0, too, a broker that refuses is not asked in a busy loop.
_LEAST_PAUSE_MS = 1
#: Seconds. Failures that pass sooner, as when a leader moves, are not logged.
_QUIET = 1.0


def pause_seconds(config: ClientConfig, attempts: int) -> float:
    """The pause after so many attempts that have failed: from retry.backoff.ms, doubled up to retry.backoff.max.ms."""
    first = max(config.retry_backoff_ms, _LEAST_PAUSE_MS)
    longest = max(first, config.retry_backoff_max_ms)
    pause: float = min(first * 2 ** min(attempts - 1, _MOST_DOUBLINGS), longest)
    return pause / 1000 * random.uniform(1 - _JITTER, 1 + _JITTER)


class Backoff:
    """The pauses of one call, each as of `pause_seconds`."""

    def __init__(self, config: ClientConfig, deadline: float, limit: str = "request.timeout.ms") -> None:
        """`limit` is the name of the setting that the deadline comes from."""
        self._begin = self._resumed = time.monotonic()
        self._config = config
        self._deadline = deadline
        self._attempts = 0
        self._failure: Exception | None = None
        self._limit = limit
        self._say_at = _QUIET

    def pause(self, failure: Exception) -> None:
        """Sleep before the next attempt; raise `failure` if the deadline, a reading of `time.monotonic`, has come.

        The failure before is raised instead if the last attempt had hardly any time.
        """
        left = self._deadline - time.monotonic()
        if left < _LEAST:
            is_short = self._deadline - self._resumed < _SHORT * (self._deadline - self._begin)
            raise self._named(self._failure if self._failure is not None and is_short else failure)
        self._failure = failure
        self._attempts += 1
        self._say(failure, left)
        # the last attempts come closer to each other, so that the one before the deadline has time to succeed
        time.sleep(min(pause_seconds(self._config, self._attempts), left / 2))
        self._resumed = time.monotonic()

    def _say(self, failure: Exception, left: float) -> None:
        """Log a failure that lasts, at intervals that double."""
        waited = time.monotonic() - self._begin
        if waited >= self._say_at:
            self._say_at = 2 * waited
            _log.warning(
                "still trying after %.0f s, giving up in %.0f s (%s): %s",
                *(waited, left, self._config.named(self._limit), failure),
            )

    def _named(self, failure: Exception) -> Exception:
        """The last failure with how long it was tried, and by which setting."""
        if type(failure) not in (ConnectionFailed, RequestTimedOut) or "; tried for " in str(failure):
            return failure
        waited = time.monotonic() - self._begin
        return type(failure)(f"{failure}; tried for {waited:.1f} s ({self._config.named(self._limit)})")
