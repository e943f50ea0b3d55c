"""Drops connections that are idle, slow, or do not say who they are.

connections.max.idle.ms       no request under way, and not a byte for so long
request.receive.timeout.ms    a frame that has begun is not whole
response.send.timeout.ms      the client takes not a byte (of 1 MiB at a time) of its answer
authentication.timeout.ms     the TLS handshake, or SASL, is not done
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from spark_klog.broker.config import BrokerConfig
from spark_klog.broker.security.session import Session

_log = logging.getLogger(__name__)
_LONGEST_PAUSE = 1.0


@dataclass
class Activity:
    """When things happened on a connection, in seconds of the monotonic clock; None for what is not under way."""

    opened_at: float
    active_at: float
    frame_since: float | None = None
    sending_since: float | None = None
    #: It is we who do not read.
    is_paused: bool = False

    def touch(self, now: float) -> None:
        """From now on the client is awaited."""
        self.active_at = now
        if self.frame_since is not None:
            self.frame_since = now


class Watched(Protocol):
    """A connection, as far as the watchdog looks at it."""

    activity: Activity
    session: Session

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""

    def tell_dropped(self, reason: object) -> None:
        """Log and count that the connection is closed for what the client did."""

    def abort(self) -> None:
        """Close now."""


def reason_to_drop(
    activity: Activity, config: BrokerConfig, now: float, *, is_authenticated: bool, is_busy: bool
) -> str | None:
    """Why the connection is to be dropped, None where it is not."""

    def overdue(since: float | None, limit_ms: int) -> bool:
        return since is not None and now - since > limit_ms / 1000

    if not is_authenticated and overdue(activity.opened_at, config.authentication_timeout_ms):
        return f"not authenticated within {config.authentication_timeout_ms} ms"
    if overdue(activity.sending_since, config.send_timeout_ms):
        return f"does not read its answer for {config.send_timeout_ms} ms"
    is_awaited = not activity.is_paused and activity.sending_since is None
    if is_awaited and overdue(activity.frame_since, config.receive_timeout_ms):
        return f"a request is not whole after {config.receive_timeout_ms} ms"
    if not is_busy and overdue(activity.active_at, config.max_idle_ms):
        return f"idle for {config.max_idle_ms} ms"
    return None


async def watch(connections: Collection[Watched], config: BrokerConfig) -> None:
    """Runs until it is cancelled. A connection that it fails at ends no other's watch."""
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
        connection.tell_dropped(reason)
        connection.abort()
