"""Waiting for several connections at once."""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Iterable
from typing import Protocol

from spark_klog.base.interrupts import between_steps

#: Seconds; `poll` takes no infinity.
_LONGEST_WAIT = 3600.0


class Waited(Protocol):
    """A connection, one being made, or a `Waker`."""

    @property
    def awaited_events(self) -> int:
        """The events of `select.poll` to wait for; 0 if there is no need to wait."""

    def fileno(self) -> int: ...


class Waker:
    """A socket to wait for besides connections (see `wait_until_ready`); `wake` ends the wait.

    Any thread may call `wake`; only the waiting thread calls the rest.
    """

    awaited_events: int = select.POLLIN

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
        try:
            while self._receiver.recv(1024):
                pass
        except OSError:
            pass

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


def wait_until_ready(waited: Iterable[Waited], timeout: float) -> None:
    """Wait up to `timeout` seconds until `open_step` or `poll` of one of the connections can continue, or for a wake.

    `OSError` or `ValueError` if another thread closes a connection.
    """
    poller = select.poll()
    for connection in waited:
        events = connection.awaited_events
        if not events:
            return
        poller.register(connection.fileno(), events)
    try:
        poller.poll(math.ceil(1000 * max(0.0, min(timeout, _LONGEST_WAIT))))
    except BaseException as error:  # as in a `WAIT`, but without its calls
        between_steps(error)
        raise
