"""One connection to one broker. Several requests may be under way; each gets the response with its correlation id.

Every step can be taken without waiting, too: `open_step`, `send` with `wait=False`, and `poll`. Who talks to several
brokers then waits for all of them (`wait_until_ready`), and one that is silent holds up no other.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from spark_klog.client.answers import check_code
from spark_klog.client.config import ClientConfig
from spark_klog.client.dial import Dial
from spark_klog.errors import (
    ConnectionFailed,
    DecodeError,
    RequestTimedOut,
    UnsupportedVersionError,
)
from spark_klog.protocol.apis import API_VERSIONS, FETCH, PRODUCE
from spark_klog.protocol.codec import Message, decode_response, encode_request
from spark_klog.protocol.schema import Api
from spark_klog.wire.frames import SIZE, frame_size

_log = logging.getLogger(__name__)
_FIRST_BUFFER = 64 * 1024
_RECEIVE_BUFFER = 4 * 1024 * 1024
#: Later versions want the topics' ids; only fetches of a known topic have them.
_LAST = {PRODUCE.key: 12, FETCH.key: 12}


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A request under way on one connection."""

    correlation_id: int
    api: Api
    version: int


class Connection:
    """A connected, negotiated socket. Not for several threads at once.

    With `wait=False` it is neither yet: `open_step` makes it so, and so do calls that wait, at their first use.
    `send` returns a handle, `receive` the response to it, whatever else is under way. Deadlines are readings of
    `time.monotonic`, by default request.timeout.ms from the call on. They are for the whole call: a response that
    arrives byte by byte does not extend them.

    Errors: `ConnectionFailed` if the broker can't be reached or closes the connection, `RequestTimedOut`, `DecodeError`
    for a response that does not decode or that nobody asked for. After any of them the connection is closed.
    """

    def __init__(
        self, host: str, port: int, config: ClientConfig, deadline: float | None = None, *, wait: bool = True
    ) -> None:
        self.address = f"{host}:{port}"
        self._config = config
        self._pending: dict[int, Handle] = {}
        self._forgotten: set[int] = set()
        #: Responses that arrived while another one was waited for.
        self._arrived: dict[int, bytes] = {}
        self._arrived_bytes = 0
        self._correlation_id = 0
        #: Until when the broker's quota asks for silence (KIP-219).
        self._throttled_until = 0.0
        self._buffer = bytearray(_FIRST_BUFFER)
        #: The response that is arriving: its size once that is known, and how much is in the buffer.
        self._size: int | None = None
        self._filled = 0
        #: What could not be sent yet without waiting.
        self._unsent = bytearray()
        self._versions: dict[int, tuple[int, int]] = {}
        self._open_until = self._default_deadline() if deadline is None else deadline
        connect_until = time.monotonic() + config.connect_timeout_ms / 1000
        self._socket: socket.socket | Dial = Dial(host, port, min(self._open_until, connect_until))
        self._negotiation: Handle | None = None
        self._is_open = False
        if wait:
            self.finish_opening()

    def _default_deadline(self) -> float:
        return time.monotonic() + self._config.request_timeout_ms / 1000

    def finish_opening(self) -> None:
        """Wait until the connection is open, if it is not."""
        if self._is_open:
            return
        self._check_open()
        try:
            if isinstance(self._socket, Dial):
                self._begin_negotiation(self._socket.finish())
            assert self._negotiation is not None
            self._end_negotiation(self._negotiation, self._open_until)
        except BaseException:
            self.close()
            raise

    def open_step(self) -> bool:
        """Whether the connection is open, after what can be done for it without waiting; errors as of a request."""
        if self._is_open:
            return True
        self._check_open()
        try:
            if isinstance(self._socket, Dial):
                connected = self._socket.step()
                if connected is None:
                    return False
                self._begin_negotiation(connected)
            assert self._negotiation is not None
            if self.poll(self._negotiation):
                self._end_negotiation(self._negotiation, self._open_until)
            elif time.monotonic() >= self._open_until:
                raise RequestTimedOut(f"broker {self.address} did not answer in time")
        except BaseException:
            self.close()
            raise
        return self._is_open

    def _begin_negotiation(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        self._negotiation = self._transmit(API_VERSIONS, {}, 0)
        self._send_rest(None)

    def _end_negotiation(self, handle: Handle, deadline: float) -> None:
        answer = self.receive(handle, deadline)
        check_code(API_VERSIONS, answer["error_code"], f"ApiVersions at {self.address}")
        if not answer["api_keys"]:
            raise UnsupportedVersionError(f"broker {self.address} names no API that it knows")
        for entry in answer["api_keys"]:
            self._versions[entry["api_key"]] = entry["min_version"], entry["max_version"]
        self._is_open, self._negotiation = True, None

    def version_of(self, api: Api) -> int:
        """The highest version that both sides speak; `UnsupportedVersionError` if there is none."""
        if api.key not in self._versions:
            raise UnsupportedVersionError(f"broker {self.address} does not know {api.name}")
        first, last = self._versions[api.key]
        version = min(last, _LAST.get(api.key, api.versions.last))
        if version < max(first, api.versions.first):
            raise UnsupportedVersionError(
                f"broker {self.address} speaks {api.name} {first}-{last}, "
                f"this client {api.versions.first}-{api.versions.last}"
            )
        return version

    def speaks(self, api: Api, version: int) -> bool:
        """Whether the broker speaks this version."""
        first, last = self._versions.get(api.key, (0, -1))
        return first <= version <= last

    @property
    def pending(self) -> int:
        """Requests whose responses have not been received, nor forgotten."""
        return len(self._pending)

    @property
    def is_throttled(self) -> bool:
        """True while the broker's quota asks for silence; `send` waits until that is over."""
        return time.monotonic() < self._throttled_until

    @property
    def throttled_until(self) -> float:
        """When the broker's quota lets this client send again, a reading of `time.monotonic`."""
        return self._throttled_until

    def send(
        self,
        api: Api,
        message: Message,
        *,
        version: int | None = None,
        answered: bool = True,
        deadline: float | None = None,
        wait: bool = True,
    ) -> Handle | None:
        """Send a request. The handle is for `receive` or `forget`; None if it is not `answered`.

        Waits if the broker has throttled this client, `RequestTimedOut` if that lasts beyond the deadline. Without
        `wait` the broker may not have taken all of it yet: then `poll` goes on.
        """
        version = self.version_of(api) if version is None else version
        deadline = self._default_deadline() if deadline is None else deadline
        self._check_open()
        if self._throttled_until:
            self._await_quota(deadline)
        handle = self._transmit(api, message, version, answered=answered)
        self._send_rest(deadline if wait else None)
        return handle if answered else None

    def _transmit(self, api: Api, message: Message, version: int, *, answered: bool = True) -> Handle:
        """Line up a request for `_send_rest`."""
        self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        writer = encode_request(api, version, self._correlation_id, self._config.client_id, message)
        handle = Handle(self._correlation_id, api, version)
        if answered:
            self._pending[handle.correlation_id] = handle
        self._unsent += SIZE.pack(len(writer))
        self._unsent += writer.to_bytes()
        return handle

    def _send_rest(self, deadline: float | None) -> None:
        """Send what is lined up; without a deadline as much as the socket takes now."""
        begin = time.monotonic()
        try:
            if deadline is not None:
                self._connected.settimeout(_left(deadline))
                self._connected.sendall(self._unsent)
                self._unsent = bytearray()
                return
            self._connected.settimeout(0)
            sent = 0
            with memoryview(self._unsent) as data:
                while sent < len(data):
                    sent += self._connected.send(data[sent:])
        except BlockingIOError:
            del self._unsent[:sent]
        except OSError as error:
            self._fail(error, begin)
        else:
            self._unsent.clear()

    def _await_quota(self, deadline: float) -> None:
        pause = self._throttled_until - time.monotonic()
        if self._throttled_until > deadline:
            raise RequestTimedOut(f"broker {self.address} throttles this client (quota) for {pause:.1f} s more")
        if pause > 0:
            _log.info("broker %s throttles this client for %.3f s", self.address, pause)
            time.sleep(pause)
        self._throttled_until = 0.0

    def receive(self, handle: Handle, deadline: float | None = None) -> Message:
        """The response to a request. Responses to other requests that arrive before it are kept for their handles.

        Its record bytes are views of a buffer that the next `receive` overwrites.
        """
        self._check_open()
        if self._pending.pop(handle.correlation_id, None) is not handle:
            raise ValueError(f"request {handle.correlation_id} is not under way at {self.address}")
        try:
            frame: memoryview | bytes | None = self._take_arrived(handle)
            if frame is None:
                frame = self._await(handle, self._default_deadline() if deadline is None else deadline)
            _, message = decode_response(handle.api, handle.version, frame)
        except DecodeError as error:
            self.close()
            raise DecodeError(f"broker {self.address}: {error}") from None
        if message.get("throttle_time_ms", 0) > 0:
            self._throttled_until = time.monotonic() + message["throttle_time_ms"] / 1000
        return message

    def _take_arrived(self, handle: Handle) -> bytes | None:
        frame = self._arrived.pop(handle.correlation_id, None)
        if frame is not None:
            self._arrived_bytes -= len(frame)
        return frame

    def _await(self, handle: Handle, deadline: float) -> memoryview:
        """Read responses until the one to the request."""
        begin = time.monotonic()
        try:
            if self._unsent:
                self._send_rest(deadline)
            while True:
                frame = self._frame(deadline)
                assert frame is not None  # there is a deadline
                correlation_id = SIZE.unpack_from(frame)[0]
                if correlation_id == handle.correlation_id:
                    return frame
                self._put_aside(correlation_id, frame)
        except OSError as error:
            self._fail(error, begin)

    def _frame(self, deadline: float | None) -> memoryview | None:
        """The next response; None if there is no deadline and it is not there yet."""
        if self._size is None:
            if not self._fill(SIZE.size, deadline):
                return None
            size = frame_size(self._buffer[: SIZE.size], self._config.response_max_bytes)
            if size < SIZE.size:
                raise DecodeError(f"response of {size} bytes, too short for a correlation id")
            self._size, self._filled = size, 0
        size = self._size
        if not self._fill(size, deadline):
            return None
        self._size, self._filled = None, 0
        return memoryview(self._buffer)[:size]

    def poll(self, handle: Handle | None) -> bool:
        """Whether the response to a request is here, after what can be sent and read without waiting.

        Without a handle: whether all requests have been sent. Errors as of `receive`.
        """
        self._check_open()
        begin = time.monotonic()
        try:
            if self._unsent:
                self._send_rest(None)
            while handle is not None and handle.correlation_id not in self._arrived:
                frame = self._frame(None)
                if frame is None:
                    return False
                self._put_aside(SIZE.unpack_from(frame)[0], frame)
        except DecodeError as error:
            self.close()
            raise DecodeError(f"broker {self.address}: {error}") from None
        except OSError as error:
            self._fail(error, begin)
        return handle is not None or not self._unsent

    def _put_aside(self, correlation_id: int, frame: memoryview) -> None:
        if correlation_id in self._forgotten:
            self._forgotten.remove(correlation_id)
            return
        if correlation_id not in self._pending or correlation_id in self._arrived:
            raise DecodeError(f"response to request {correlation_id}, which is not under way")
        if self._arrived_bytes + len(frame) > self._config.response_max_bytes:
            raise ConnectionResetError(f"more than {self._config.response_max_bytes} bytes of responses not received")
        self._arrived[correlation_id] = bytes(frame)
        self._arrived_bytes += len(frame)

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """What `open_step` or `poll` waits for: `selectors.EVENT_READ`, `EVENT_WRITE` or both."""
        if isinstance(self._socket, Dial):
            return selectors.EVENT_WRITE
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    @property
    def look_at(self) -> float:
        """When to call `open_step` if nothing happens, a reading of `time.monotonic`."""
        return self._socket.until if isinstance(self._socket, Dial) else self._open_until

    @property
    def _connected(self) -> socket.socket:
        assert isinstance(self._socket, socket.socket)
        return self._socket

    def forget(self, handle: Handle) -> None:
        """Drop the response to a request that nobody waits for any more.

        Closes the connection if nothing else is under way: to connect again costs less than such a response, which may
        be large or late.
        """
        if self._pending.get(handle.correlation_id) is not handle:
            return
        del self._pending[handle.correlation_id]
        if self._take_arrived(handle) is None:
            self._forgotten.add(handle.correlation_id)
            if not self._pending:
                self.close()

    def request(
        self, api: Api, message: Message, *, version: int | None = None, deadline: float | None = None
    ) -> Message:
        """Send a request and wait for its response."""
        deadline = self._default_deadline() if deadline is None else deadline
        handle = self.send(api, message, version=version, deadline=deadline)
        assert handle is not None  # it is answered
        return self.receive(handle, deadline)

    def _fill(self, size: int, deadline: float | None) -> bool:
        """Read until the connection's buffer, which grows only with what has arrived, has `size` bytes.

        False if there is no deadline and they are not there yet.
        """
        while self._filled < size:
            if self._filled == len(self._buffer):
                grown = bytearray(min(size, 4 * len(self._buffer)))
                grown[: self._filled] = self._buffer
                self._buffer = grown
            self._connected.settimeout(0 if deadline is None else _left(deadline))
            view = memoryview(self._buffer)[self._filled : min(size, len(self._buffer))]
            try:
                received = self._connected.recv_into(view)
            except BlockingIOError:
                return False
            if received == 0:
                raise ConnectionResetError(f"closed by the broker after {self._filled} of {size} bytes")
            self._filled += received
        return True

    def _fail(self, error: OSError, begin: float) -> NoReturn:
        self.close()
        if isinstance(error, TimeoutError):
            seconds = time.monotonic() - begin
            raise RequestTimedOut(f"broker {self.address} did not answer within {seconds:.1f} s") from None
        raise ConnectionFailed(f"connection to broker {self.address} broke: {error}") from None

    def _check_open(self) -> None:
        if self.closed:
            raise ConnectionFailed(f"connection to broker {self.address} is closed, requests under way are lost")

    def is_usable(self) -> bool:
        """False if the connection is closed, or nothing is under way and the broker has closed it."""
        if self.closed or self._pending or self._unsent or not self._is_open:
            return not self.closed
        try:
            self._connected.settimeout(0)
            if self._connected.recv(1, socket.MSG_PEEK):
                return True  # a response that nobody asked for; the next `receive` says so
        except BlockingIOError:
            return True
        except OSError:
            pass
        self.close()
        return False

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self) -> None:
        self._socket.close()
        self._unsent = bytearray()
        self._pending.clear()
        self._forgotten.clear()
        self._arrived.clear()
        self._arrived_bytes = 0

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def wait_until_ready(connections: Collection[Connection], timeout: float) -> None:
    """Wait up to `timeout` seconds until `open_step` or `poll` of one of the connections can go on."""
    if any(connection.closed for connection in connections):
        return
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, connection.events)
        selector.select(max(timeout, 0))


def _left(deadline: float) -> float:
    """Seconds until a deadline, `TimeoutError` if it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds
