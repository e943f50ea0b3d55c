"""Pauses between attempts: exponential, with jitter (KIP-580), until a deadline."""

from __future__ import annotations

import logging
import math
import random
import time

from spark_klog.base.clock import doubled
from spark_klog.base.interrupts import WAIT
from spark_klog.client.settings import ClientConfig
from spark_klog.errors import ConnectionFailed, RequestTimedOut

_log = logging.getLogger(__name__)

_JITTER = 0.2
#: Seconds. If less is left, another attempt could not succeed.
_LEAST = 0.01
#: If the last attempt had less than this part of the time, the failure before it is raised: it says more.
_SHORT = 0.25
#: Prevents a busy loop with retry.backoff.ms=0.
_LEAST_PAUSE_MS = 1
#: Seconds. Failures that pass sooner, as when a leader moves, are not logged.
_QUIET = 1.0
#: What limits the requests of a call with a timeout of its own, for messages. Its caller calls it again and again, and
#: logs the failure itself: only long calls log before.
CALL_TIMEOUT = "the timeout of the call, at least 1 s"
_QUIET_CALL = 5.0


def pause_seconds(config: ClientConfig, attempts: int) -> float:
    """The pause after this many failed attempts: from retry.backoff.ms, doubled up to retry.backoff.max.ms."""
    first = max(config.retry_backoff_ms, _LEAST_PAUSE_MS)
    longest = max(first, config.retry_backoff_max_ms)
    return doubled(first, longest, attempts) / 1000 * random.uniform(1 - _JITTER, 1 + _JITTER)


def shown_seconds(seconds: float) -> str:
    """Format seconds for a message; short times are not shown as 0."""
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.1g}"


class Lasting:
    """When to tell of something that lasts: at `at`, a reading of `time.monotonic`, then at intervals that double."""

    __slots__ = ("_at", "_longest", "pause")

    def __init__(self, at: float, pause: float, longest: float = math.inf) -> None:
        """`pause`: the first interval in seconds; it doubles up to `longest`."""
        self._at, self.pause, self._longest = at, pause, longest

    def is_due(self, now: float) -> bool:
        """Whether to tell of it now; True begins the next interval."""
        if now < self._at:
            return False
        self._at, self.pause = now + self.pause, min(2 * self.pause, self._longest)
        return True


class Retry:
    """The attempts of one call, with pauses between them; `pause_seconds` gives their lengths."""

    def __init__(
        self, config: ClientConfig, deadline: float, limit: str = "request.timeout.ms", connect_until: float = math.inf
    ) -> None:
        """`deadline` is a reading of `time.monotonic`, `limit` the name of the setting that it comes from.

        After `connect_until`, which comes from socket.connection.setup.timeout.ms, no attempt begins.
        """
        self._begin = self._resumed = time.monotonic()
        self._config = config
        self._end, self._deadline = deadline, min(deadline, connect_until)
        self._attempts = 0
        self._failure: Exception | None = None
        self._limit = limit
        quiet = _QUIET_CALL if limit == CALL_TIMEOUT else _QUIET
        self._lasting = Lasting(self._begin + quiet, quiet)

    def pause(self, failure: Exception) -> None:
        """Sleep before the next attempt; raise `failure` if the deadline has come.

        If the last attempt had hardly any time, raise the failure before it instead.
        """
        seconds = self.seconds(failure)
        with WAIT:
            time.sleep(seconds)
        self.resume()

    def resume(self) -> None:
        """Note that the next attempt begins: on a busy machine later than it was to."""
        self._resumed = time.monotonic()

    def seconds(self, failure: Exception) -> float:
        """Like `pause`, but leave the sleep to the caller, who calls `resume` after it."""
        now = time.monotonic()
        left = self._deadline - now
        if left < _LEAST:
            is_short = self._deadline - self._resumed < _SHORT * (self._deadline - self._begin)
            raise self._named(self._failure if self._failure is not None and is_short else failure)
        self._failure = failure
        self._attempts += 1
        if self._lasting.is_due(now):
            if self._limit == CALL_TIMEOUT:
                _log.warning("still trying after %.0f s: %s", now - self._begin, failure)
            else:
                shown = (now - self._begin, left, self._limit_reached(), failure)
                _log.warning("still trying after %.0f s, giving up in %.0f s (%s): %s", *shown)
        # shorter pauses near the deadline, so that the last attempt has time to succeed
        return min(pause_seconds(self._config, self._attempts), left / 2)

    def _limit_reached(self) -> str:
        """Name the setting that limits the call now: an attempt that began in time may last beyond `connect_until`."""
        is_connecting = self._deadline < self._end and time.monotonic() < self._end - _LEAST
        return self._config.named("socket.connection.setup.timeout.ms" if is_connecting else self._limit)

    def _named(self, failure: Exception) -> Exception:
        """The failure, with the time tried and the setting that limits it."""
        if type(failure) not in (ConnectionFailed, RequestTimedOut) or "; tried for " in str(failure):
            return failure
        waited = time.monotonic() - self._begin
        named = type(failure)(f"{failure}; tried for {shown_seconds(waited)} s ({self._limit_reached()})")
        named.__dict__.update(failure.__dict__)
        return named
