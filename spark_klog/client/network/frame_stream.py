"""Frames on a connected socket: requests that are sent in parts, responses that arrive in parts."""

from __future__ import annotations

import math
import os
import select
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice

from spark_klog.errors import DecodeError
from spark_klog.wire.frames import SIZE, frame_size
from spark_klog.wire.primitives import Buffer

_FIRST_BUFFER = 64 * 1024
_RECEIVE_BUFFER = 4 * 1024 * 1024
#: Buffers that one call of the socket takes.
_MOST_BUFFERS = min(1024, os.sysconf("SC_IOV_MAX"))


class FrameStream:
    """Sends and receives whole frames; a frame that is not complete yet stays here.

    Deadlines are readings of `time.monotonic`; without one a method does what the socket allows now. Methods raise
    `OSError` as the socket does (`TimeoutError` at the deadline), and `DecodeError` for a frame of more than
    `max_bytes` or fewer than the `least` bytes that a caller expects: by default a correlation id.
    """

    def __init__(self, connected: socket.socket, max_bytes: int) -> None:
        self._socket = connected
        self._max_bytes = max_bytes
        #: TLS sockets take one buffer a call.
        self._is_plain = not hasattr(connected, "pending")
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        #: The bytes read last, from the beginning of a frame or of its size.
        self.buffer = bytearray(_FIRST_BUFFER)
        #: The frame being read: its size if known, and the bytes in the buffer.
        self._size: int | None = None
        self._filled = 0
        self._unsent: deque[memoryview] = deque()

    @property
    def has_unsent(self) -> bool:
        """Whether the socket has not accepted all bytes yet."""
        return bool(self._unsent)

    @property
    def events(self) -> int:
        """The events to wait for: `selectors.EVENT_READ`, or that and `EVENT_WRITE`."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    @property
    def has_read_ahead(self) -> bool:
        """Whether TLS holds decrypted bytes that were not read: selectors do not report them."""
        return bool(getattr(self._socket, "pending", int)())  # plain sockets have no such method

    def append(self, parts: Iterable[Buffer]) -> None:
        """Append the parts of a frame to what `flush` sends. They must not change until they are sent."""
        views = [memoryview(part) for part in parts if len(part)]
        views.insert(0, memoryview(SIZE.pack(sum(map(len, views)))))
        self._unsent += views if self._is_plain else [memoryview(b"".join(views))]

    def flush(self, deadline: float | None) -> None:
        """Send the unsent bytes; without a deadline only what the socket accepts now."""
        while self._unsent:
            left = None if deadline is None else _left(deadline)
            try:
                if self._is_plain:
                    self._sent(self._socket.sendmsg(islice(self._unsent, _MOST_BUFFERS)))
                else:
                    self._sent(self._socket.send(self._unsent[0]))
            except BlockingIOError:
                if left is None:
                    return
                self._wait(select.POLLOUT, left)

    def _sent(self, count: int) -> None:
        """Drop the first `count` bytes of the unsent ones."""
        while count:
            first = self._unsent.popleft()
            if count < len(first):
                self._unsent.appendleft(first[count:])
                return
            count -= len(first)

    def _wait(self, event: int, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        if not poll.poll(math.ceil(1000 * seconds)):
            raise TimeoutError("timed out")

    def read(self, deadline: float | None, least: int = SIZE.size) -> memoryview | None:
        """The next frame, valid until the next call; None if there is no deadline and it has not arrived."""
        if self._size is None:
            if not self._fill(SIZE.size, deadline):
                return None
            size = frame_size(self.buffer[: SIZE.size], self._max_bytes)
            if size < least:
                raise DecodeError(f"response of {size} bytes, too short for a correlation id")
            self._size, self._filled = size, 0
        size = self._size
        if not self._fill(size, deadline):
            return None
        self._size, self._filled = None, 0
        return memoryview(self.buffer)[:size]

    def probe(self) -> None:
        """Raise `OSError` if the broker has closed the connection; keep bytes that have arrived for `read`."""
        self._fill(self._size or SIZE.size, None)

    def _fill(self, size: int, deadline: float | None) -> bool:
        """Read until the buffer has `size` bytes. It grows only as bytes arrive, whatever size a broker claims.

        False if there is no deadline and they have not arrived.
        """
        while self._filled < size:
            if self._filled == len(self.buffer):
                grown = bytearray(min(size, 4 * len(self.buffer)))
                grown[: self._filled] = self.buffer
                self.buffer = grown
            left = None if deadline is None else _left(deadline)
            view = memoryview(self.buffer)[self._filled : min(size, len(self.buffer))]
            try:
                received = self._socket.recv_into(view)
            except BlockingIOError:
                if left is None:
                    return False
                self._wait(select.POLLIN, left)
                continue
            if received == 0:
                raise ConnectionResetError(f"closed by the broker after {self._filled} of {size} bytes")
            self._filled += received
        return True

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
        self._unsent.clear()


def _left(deadline: float) -> float:
    """Seconds until a deadline; `TimeoutError` if it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds
