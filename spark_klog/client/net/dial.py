"""Connect to a host without blocking: look its name up, try its addresses one after the other, do the TLS handshake."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from spark_klog.base.in_a_thread import NO_ANSWER, LookUp, look_up
from spark_klog.client.net.waiting import LEAST_ANSWER, Waker, wait_until_ready
from spark_klog.errors import ConnectionFailed
from spark_klog.security.config import TlsConfig

if TYPE_CHECKING:
    from spark_klog.security.tls import Handshake

_UNDER_WAY = frozenset({0, errno.EINPROGRESS, errno.EWOULDBLOCK})


class Dial:
    """A connection being made to the first address of the host that answers; with `tls` over TLS.

    The addresses share the time until `deadline`, a reading of `time.monotonic`, so that a silent one leaves time for
    the next one. The look-up of the name and the TLS handshake have as much time each. The constructor and `step` raise
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
        #: When it last got further, a reading of `time.monotonic`.
        self.further_at = time.monotonic()
        self._seconds = max(deadline - self.further_at, LEAST_ANSWER)
        self._deadline = self.further_at + self._seconds
        self._failure: OSError = OSError("the name has no address")
        self._socket: socket.socket
        #: When the next address is tried.
        self.until = self._deadline
        #: Addresses that were not tried yet, and the number of all.
        self._left: deque[Any] = deque()
        self._number = 0
        #: The look-up that is not done, and what it wakes then.
        self._look_up: LookUp | None = None
        self._waker: Waker | None = None
        try:
            begun = look_up(host, port)
            if isinstance(begun, LookUp):
                self._look_up, self._waker = begun, Waker()
                begun.tell(self._waker.wake)
            else:
                self._left.extend(begun)
        except OSError as error:
            raise ConnectionFailed(f"no broker answers at {self._place}: {error}") from None
        if self._look_up is None:
            self._try_next()

    def _look_up_step(self, begun: LookUp) -> None:
        """Begin with the first address, if the look-up is done."""
        try:
            if begun.is_done.is_set():
                self._left.extend(begun.result())
                self._look_up = None
            elif time.monotonic() >= self._deadline:
                raise TimeoutError(NO_ANSWER)
        except (OSError, UnicodeError) as error:
            raise ConnectionFailed(f"no broker answers at {self._place}: {error}") from None
        if self._look_up is None:
            self._close_waker()
            self._get_further()
            self._try_next()

    def _get_further(self) -> None:
        self.further_at = time.monotonic()
        self.until = self._deadline = self.further_at + self._seconds

    def late(self) -> ConnectionFailed:
        """The error if it takes too long."""
        if self._handshake is not None:
            return ConnectionFailed(f"broker {self._address} did not finish the TLS handshake in time")
        reason = "timed out" if self._look_up is None else NO_ANSWER
        return ConnectionFailed(f"no broker answers at {self._place}: {reason}")

    def _close_waker(self) -> None:
        if self._waker is not None:
            self._waker.close()
            self._waker = None

    def _try_next(self) -> None:
        self._number = self._number or len(self._left)
        while self._left:
            self.further_at = time.monotonic()
            left = self._deadline - self.further_at  # none, if the steps come late
            self.until = self.further_at + max(left / len(self._left), self._seconds / self._number)
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
        if self._look_up is not None:
            self._look_up_step(self._look_up)
            if self._look_up is not None:
                return None
        if self._handshake is None:
            connected = self._connect_step()
            if connected is None or self._begin_handshake is None:
                return connected
            self._handshake = self._begin_handshake(connected, self._host, self._address)
            self._socket = self._handshake.socket
            self._get_further()
        if self._handshake.step():
            return self._socket
        if time.monotonic() >= self._deadline:
            self.close()
            raise self.late()
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
        if self._waker is not None:
            return self._waker.awaited_events
        return select.POLLOUT if self._handshake is None else self._handshake.awaited_events

    def finish(self) -> socket.socket:
        while (connected := self.step()) is None:
            wait_until_ready((self,), self.until - time.monotonic())
        return connected

    def fileno(self) -> int:
        return self._socket.fileno() if self._waker is None else self._waker.fileno()

    def close(self) -> None:
        self._close_waker()
        if hasattr(self, "_socket"):  # no address may have been tried
            self._socket.close()
