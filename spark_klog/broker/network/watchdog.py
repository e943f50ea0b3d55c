"""Closes connections that are idle, slow, or not authenticated in time.

connections.max.idle.ms       no request in progress, and no byte received
request.receive.timeout.ms    a request that has begun is not complete
response.send.timeout.ms      no progress in sending the response (in steps of 1 MiB)
authentication.timeout.ms     the TLS handshake, or SASL, is not complete
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from spark_klog.broker.security.session import Session
from spark_klog.broker.settings.config import BrokerConfig

_log = logging.getLogger(__name__)
_LONGEST_PAUSE = 1.0


@dataclass
class Activity:
    """Times of events on a connection, in seconds of the monotonic clock; None if not in progress."""

    opened_at: float
    active_at: float
    frame_since: float | None = None
    sending_since: float | None = None
    #: The broker itself has paused reading.
    is_paused: bool = False

    def touch(self, now: float) -> None:
        """Restart the client's time limits."""
        self.active_at = now
        if self.frame_since is not None:
            self.frame_since = now


class Watched(Protocol):
    """A connection, as the watchdog sees it."""

    activity: Activity
    session: Session

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""

    def log_dropped(self, reason: object) -> None:
        """Log and count a connection that is closed because of the client's behaviour."""

    def abort(self) -> None:
        """Close now."""


def reason_to_drop(
    activity: Activity, config: BrokerConfig, now: float, *, is_authenticated: bool, is_busy: bool
) -> str | None:
    """Why the connection must be closed, None if it may stay."""

    def overdue(since: float | None, limit_ms: int) -> bool:
        return since is not None and now - since > limit_ms / 1000

    if not is_authenticated and overdue(activity.opened_at, config.authentication_timeout_ms):
        return f"not authenticated within {config.authentication_timeout_ms} ms"
    if overdue(activity.sending_since, config.send_timeout_ms):
        return f"did not read its response for {config.send_timeout_ms} ms"
    is_awaited = not activity.is_paused and activity.sending_since is None
    if is_awaited and overdue(activity.frame_since, config.receive_timeout_ms):
        return f"a request was incomplete after {config.receive_timeout_ms} ms"
    if not is_busy and overdue(activity.active_at, config.max_idle_ms):
        return f"idle for {config.max_idle_ms} ms"
    return None


async def watch(connections: Collection[Watched], config: BrokerConfig) -> None:
    """Watch until cancelled. A failure at one connection does not affect the others."""
    shortest = min(
        config.max_idle_ms, config.receive_timeout_ms, config.send_timeout_ms, config.authentication_timeout_ms
    )
    pause = min(_LONGEST_PAUSE, shortest / 4000)
    while True:
        await asyncio.sleep(pause)
        now = time.monotonic()
        for connection in list(connections):
            try:
                _look_at(connection, config, now)
            except Exception:
                _log.exception("%s: the watchdog failed at this connection", connection.session.peer)


def _look_at(connection: Watched, config: BrokerConfig, now: float) -> None:
    reason = reason_to_drop(
        connection.activity,
        config,
        now,
        is_authenticated=connection.session.is_open,
        is_busy=connection.is_busy,
    )
    if reason is not None:
        connection.log_dropped(reason)
        connection.abort()
