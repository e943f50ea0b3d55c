"""Connecting to a host without waiting: its addresses are tried one after the other."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections import deque

from spark_klog.errors import ConnectionFailed

_UNDER_WAY = frozenset({0, errno.EINPROGRESS, errno.EWOULDBLOCK})


class Dial:
    """A TCP connection that is being made, to the first address of the host that answers.

    The addresses share the time until `deadline`, a reading of `time.monotonic`: one whose packets vanish leaves time
    for the next one. Only the look-up of the name waits. `ConnectionFailed` from the constructor or `step` if no
    address answers.
    """

    def __init__(self, host: str, port: int, deadline: float) -> None:
        self._address = f"{host}:{port}"
        self._deadline = deadline
        self._failure: OSError = OSError("the name has no address")
        self._socket: socket.socket
        #: When the next address is tried.
        self.until = 0.0
        try:
            self._left = deque(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            raise ConnectionFailed(f"no broker answers at {self._address}: {error}") from None
        self._try_next()

    def _try_next(self) -> None:
        while self._left:
            left = self._deadline - time.monotonic()
            if left <= 0:
                self._failure = TimeoutError("timed out")
                break
            self.until = time.monotonic() + left / len(self._left)
            family, kind, protocol, _, address = self._left.popleft()
            try:
                candidate = socket.socket(family, kind, protocol)
            except OSError as error:  # a family that this machine does not have
                self._failure = error
                continue
            candidate.setblocking(False)
            try:
                code = candidate.connect_ex(address)
            except OSError as error:
                code = error.errno or errno.EINVAL
            if code in _UNDER_WAY:
                self._socket = candidate
                return
            candidate.close()
            self._failure = OSError(code, os.strerror(code))
        raise ConnectionFailed(f"no broker answers at {self._address}: {self._failure}")

    def step(self) -> socket.socket | None:
        """The connected socket; None while no address has answered. Never waits."""
        while True:
            if self.wait(0):
                code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not code:
                    return self._socket
                self._failure = OSError(code, os.strerror(code))
            elif time.monotonic() < self.until:
                return None
            else:
                self._failure = TimeoutError("timed out")
            self._socket.close()
            self._try_next()

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until the address that is tried answers or refuses; whether it does."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_WRITE)
            return bool(selector.select(timeout))

    def finish(self) -> socket.socket:
        """The connected socket, waiting for it."""
        while (connected := self.step()) is None:
            self.wait(max(0.0, self.until - time.monotonic()))
        return connected

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
