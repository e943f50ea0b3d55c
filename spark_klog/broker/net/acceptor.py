"""Accepts connections of a listener, with bounds on their number in total and by address, and on the TLS handshake.

A refused connection is closed at once. At a bound, and without a free file descriptor, a new connection is not refused
but replaces the oldest one that has sent no request, or is not authenticated: silent clients keep nobody out. Nothing
is allocated for a client of a TLS listener before its first byte: TLS buffers are large, and a thousand silent clients
should cost little.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
import sys
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import cast

from spark_klog.broker.broker import Broker
from spark_klog.broker.metrics import Metrics
from spark_klog.broker.net.connection import Connection, Connections
from spark_klog.broker.security.config import Listener
from spark_klog.broker.security.session import Session
from spark_klog.trees.paths import host_and_port

_log = logging.getLogger(__name__)
#: Connections accepted before other work gets its turn.
_BURST = 64
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS = 1.0
#: The type of TLS records with which a client begins, and a fatal alert, internal_error, as Kafka sends it.
_HANDSHAKE, _ALERT = b"\x16", b"\x15\x03\x03\x00\x02\x02\x50"
_MOST_DROPPED = 1 << 16


class ConnectionLimits:
    """Counts connections (`max.connections`, `max.connections.per.ip`). For one event loop."""

    def __init__(self, most: int, most_per_ip: int, metrics: Metrics) -> None:
        descriptors = _descriptors()
        self._most, self._most_per_ip = min(most, descriptors // 2), most_per_ip
        self._per_ip = f"max.connections.per.ip={most_per_ip}"
        self._bound = (
            f"max.connections={most}" if most == self._most else f"half of the {descriptors} open files (ulimit)"
        )
        self._by_ip: Counter[str] = Counter()
        self._all = 0
        #: IP addresses and opening tasks of connections that may be silent, the oldest first.
        self._silent: dict[Connection, tuple[str, asyncio.Task[None]]] = {}
        #: Connections that made room for others.
        self.evicted = 0
        self._metrics = metrics
        self._logged_at = float("-inf")

    def refusal(self, ip: str) -> str | None:
        """Return why one more connection is refused, or None and count it."""
        if self._by_ip[ip] >= self._most_per_ip:  # one of this address makes room in total, too
            if not self.close_silent(self._per_ip, ip):
                return f"{self._per_ip} is reached"
        elif self._all >= self._most and not self.close_silent(self._bound):
            return f"{self._bound} is reached"
        self._by_ip[ip] += 1
        self._all += 1
        return None

    def watch(self, connection: Connection, ip: str, opening: asyncio.Task[None]) -> None:
        """Let a connection be closed for another one, until its client has sent a request."""
        self._silent[connection] = ip, opening

    def close_silent(self, bound: str, ip: str | None = None) -> bool:
        """Close the oldest silent connection, of all or of an IP address, as `bound` is reached; False if none is."""
        have_spoken, silent = [], None
        for connection, (its_ip, _) in self._silent.items():
            if not connection.is_silent:
                have_spoken.append(connection)
            elif ip in (None, its_ip):
                silent = connection
                break
        for connection in have_spoken:
            del self._silent[connection]
        if silent is None:
            return False
        _, opening = self._silent.pop(silent)
        silent.abort() if silent.was_made else opening.cancel()
        self.evicted += 1
        self._metrics.connections_dropped += 1
        if time.monotonic() - self._logged_at >= _PAUSE_SECONDS:
            _log.warning("%s: silent, and closed to make room for others (%s)", silent.session.peer, bound)
            self._logged_at = time.monotonic()
        return True

    def release(self, connection: Connection, ip: str) -> None:
        """Uncount a connection that is gone."""
        self._silent.pop(connection, None)
        self._all -= 1
        self._by_ip[ip] -= 1
        if not self._by_ip[ip]:
            del self._by_ip[ip]


def _descriptors() -> int:
    """Raise the bound of this process's file descriptors as far as is allowed, as the JVM does, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


class Acceptor:
    """One listening socket."""

    def __init__(
        self,
        broker: Broker,
        connections: Connections,
        limits: ConnectionLimits,
        listener: Listener,
        listening: socket.socket,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._broker, self._connections, self._limits = broker, connections, limits
        self._listener = listener
        self._listening = listening
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._refused, self._logged_at = 0, float("-inf")
        listening.setblocking(False)
        self._resume()

    def _resume(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening, self._accept)

    def close(self) -> None:
        """Stop accepting, and cancel handshakes under way."""
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for task in self._opening:
            task.cancel()

    def _accept(self) -> None:
        limits = self._limits
        evicted = limits.evicted
        for _ in range(_BURST):
            try:
                client, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES and limits.close_silent(str(error.strerror)):
                    return  # its descriptor is free when the loop calls again
                _log.error("%s takes no connections for %g s: %s", self._listener, _PAUSE_SECONDS, error.strerror)
                if error.errno in _OUT_OF_RESOURCES:
                    self._loop.remove_reader(self._listening)
                    self._loop.call_later(_PAUSE_SECONDS, self._resume)
                return
            ip, port = address[:2]
            reason = limits.refusal(ip)
            if reason is not None:
                client.close()
                self._log_refused(host_and_port(ip, port), reason)
                continue
            client.setblocking(False)
            task = self._loop.create_task(self._open(client, ip, port))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
            if limits.evicted != evicted:
                return  # the tasks have to begin before one of these connections can make room, too

    def _log_refused(self, peer: str, reason: str) -> None:
        """Log at most one line a second, so that a flood of connections does not flood the log."""
        self._refused += 1
        self._broker.metrics.connections_refused += 1
        now = time.monotonic()
        if now - self._logged_at >= _PAUSE_SECONDS:
            _log.warning("%s: refused: %s (%d refused by %s)", peer, reason, self._refused, self._listener.name)
            self._logged_at = now

    async def _open(self, client: socket.socket, ip: str, port: int) -> None:
        broker, limits, peer = self._broker, self._limits, host_and_port(ip, port)
        session = Session(self._listener, peer, broker.config.security.mechanisms, broker.users.credential)
        connection = Connection(self._connections, session, partial(limits.release, ip=ip))
        limits.watch(connection, ip, cast("asyncio.Task[None]", asyncio.current_task()))
        try:
            # asyncio sets it only on sockets that it accepts itself; without it the last part of a response waits
            # 40 ms for the client's delayed acknowledgement
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                await self._loop.connect_accepted_socket(lambda: connection, client)
            else:
                await asyncio.wait_for(self._open_tls(client, connection, self._tls), self._seconds)
        except asyncio.TimeoutError:
            _log.warning("%s: no TLS handshake within %g s; closing the connection", peer, self._seconds)
        except OSError as error:
            reason = (isinstance(error, ssl.SSLError) and error.reason) or str(error) or type(error).__name__
            _log.warning("%s: connection to %s failed: %s", peer, self._listener.name, reason)
        finally:
            if not connection.was_made:
                limits.release(connection, ip)

    @property
    def _seconds(self) -> float:
        return self._broker.config.authentication_timeout_ms / 1000

    async def _open_tls(self, client: socket.socket, connection: Connection, tls: ssl.SSLContext) -> None:
        await _readable(self._loop, client)
        try:
            _refuse_plain_text(client)
        except OSError:
            client.close()
            raise
        await self._loop.connect_accepted_socket(
            lambda: connection, client, ssl=tls, ssl_handshake_timeout=self._seconds
        )


def _refuse_plain_text(client: socket.socket) -> None:
    """Send a client that does not begin a TLS handshake an alert, by which it can tell what is wrong.

    `ConnectionError` then. asyncio closes the connection without one.
    """
    if client.recv(1, socket.MSG_PEEK) in (b"", _HANDSHAKE):
        return
    client.recv(_MOST_DROPPED)  # closing with unread bytes would reset the connection before the alert is read
    client.send(_ALERT)
    raise ConnectionError("the client does not use TLS")


async def _readable(loop: asyncio.AbstractEventLoop, client: socket.socket) -> None:
    there: asyncio.Future[None] = loop.create_future()

    def is_readable() -> None:
        loop.remove_reader(client)
        if not there.done():
            there.set_result(None)

    loop.add_reader(client, is_readable)
    try:
        await there
    except asyncio.CancelledError:
        loop.remove_reader(client)
        client.close()
        raise
