"""Waiting for several connections at once."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Collection

from spark_klog.base.interrupts import WAIT
from spark_klog.client.net.connection import Connection


class Waker:
    """A socket to wait for besides connections (see `readiness.wait_until_ready`); `wake` ends the wait.

    Any thread may call `wake`; only the waiting thread calls the rest.
    """

    events = selectors.EVENT_READ

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        return self._receiver.fileno()

    @property
    def closed(self) -> bool:
        return self._receiver.fileno() < 0

    def wake(self) -> None:
        try:
            self._sender.send(b"\0")
        except OSError:  # the buffer is full of wakes, or it is closed
            pass

    def clear(self) -> None:
        """Discard all wakes so far."""
        try:
            while self._receiver.recv(1024):
                pass
        except OSError:
            pass

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


def wait_until_ready(connections: Collection[Connection], timeout: float) -> None:
    """Wait up to `timeout` seconds until `open_step` or `poll` of one of the connections can continue."""
    if any(connection.closed or connection.has_read_ahead for connection in connections):
        return
    with selectors.DefaultSelector() as selector:
        for connection in dict.fromkeys(connections):  # one may have several requests under way
            selector.register(connection, connection.events)
        with WAIT:
            selector.select(max(timeout, 0))
