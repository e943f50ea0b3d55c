"""Connect to a host without blocking: try its addresses one after the other, then do the TLS handshake."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections import deque
from typing import TYPE_CHECKING

from spark_klog.base.in_a_thread import addresses_of
from spark_klog.client.net.waiting import wait_until_ready
from spark_klog.errors import ConnectionFailed
from spark_klog.security.config import TlsConfig

if TYPE_CHECKING:
    from spark_klog.security.tls import Handshake

_UNDER_WAY = frozenset({0, errno.EINPROGRESS, errno.EWOULDBLOCK})


class Dial:
    """A connection being made to the first address of the host that answers; with `tls` over TLS.

    The addresses share the time until `deadline`, a reading of `time.monotonic`, so that a silent one leaves time for
    the next one. Only the name look-up blocks, at most until the deadline. The constructor and `step` raise
    `ConnectionFailed` if no address answers; with TLS also `TlsError` and `HandshakeInterrupted`, and the constructor
    `ConfigError`. `source` says in errors where the address comes from, if not from the user.
    """

    def __init__(self, host: str, port: int, deadline: float, tls: TlsConfig | None = None, source: str = "") -> None:
        self._host = host
        self._begin_handshake = None
        if tls is not None:
            from spark_klog.security.tls import handshakes  # the ssl module takes long to import

            self._begin_handshake = handshakes(tls)
        self._handshake: Handshake | None = None
        self._address = f"{host}:{port}"
        self._place = f"{self._address} ({source})" if source else self._address
        self._deadline = deadline
        self._failure: OSError = OSError("the name has no address")
        self._socket: socket.socket
        #: When the next address is tried.
        self.until = 0.0
        try:
            self._left = deque(addresses_of(host, port, deadline))
        except (OSError, UnicodeError) as error:
            raise ConnectionFailed(f"no broker answers at {self._place}: {error}") from None
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
            except OSError as error:  # an address family that this machine does not support
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
        raise ConnectionFailed(f"no broker answers at {self._place}: {self._failure}")

    def step(self) -> socket.socket | None:
        """The connected socket; None while no address has answered or the handshake is not done. Never blocks."""
        if self._handshake is None:
            connected = self._connect_step()
            if connected is None or self._begin_handshake is None:
                return connected
            self._handshake = self._begin_handshake(connected, self._host, self._address)
            self._socket, self.until = self._handshake.socket, self._deadline
        if self._handshake.step():
            return self._socket
        if time.monotonic() >= self._deadline:
            self.close()
            raise ConnectionFailed(f"broker {self._address} did not finish the TLS handshake in time")
        return None

    def _connect_step(self) -> socket.socket | None:
        while True:
            poller = select.poll()
            poller.register(self._socket, select.POLLOUT)
            if poller.poll(0):
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

    @property
    def awaited_events(self) -> int:
        """The event of `select.poll` that `step` waits for."""
        return select.POLLOUT if self._handshake is None else self._handshake.awaited_events

    def finish(self) -> socket.socket:
        while (connected := self.step()) is None:
            wait_until_ready((self,), self.until - time.monotonic())
        return connected

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
