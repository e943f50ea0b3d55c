"""One connection to one broker. Several requests may be under way; each gets the response with its correlation id."""

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
#: This client names topics by name; later versions want their ids.
_LAST = {PRODUCE.key: 12, FETCH.key: 12}


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A request under way on one connection."""

    correlation_id: int
    api: Api
    version: int


class Connection:
    """A connected, negotiated socket. Not for several threads at once.

    `send` returns a handle, `receive` the response to it, whatever else is under way. Deadlines are readings of
    `time.monotonic`, by default request.timeout.ms from the call on. They are for the whole call: a response that
    arrives byte by byte does not extend them.

    Errors: `ConnectionFailed` if the broker can't be reached or closes the connection, `RequestTimedOut`, `DecodeError`
    for a response that does not decode or that nobody asked for. After any of them the connection is closed.
    """

    def __init__(self, host: str, port: int, config: ClientConfig, deadline: float | None = None) -> None:
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
        self._versions: dict[int, tuple[int, int]] = {}
        deadline = self._default_deadline() if deadline is None else deadline
        self._socket = self._connect(host, port, deadline)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
            self._negotiate(deadline)
        except BaseException:
            self.close()
            raise

    def _default_deadline(self) -> float:
        return time.monotonic() + self._config.request_timeout_ms / 1000

    def _connect(self, host: str, port: int, deadline: float) -> socket.socket:
        """A socket to the first address of the host that answers; all of them share the time."""
        deadline = min(deadline, time.monotonic() + self._config.connect_timeout_ms / 1000)
        failure: OSError = OSError("the name has no address")
        try:
            for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                candidate = socket.socket(family, kind, protocol)
                try:
                    candidate.settimeout(_left(deadline))
                    candidate.connect(address)
                    return candidate
                except OSError as error:
                    candidate.close()
                    failure = error
        except (OSError, UnicodeError) as error:  # of getaddrinfo
            raise ConnectionFailed(f"no broker answers at {self.address}: {error}") from None
        raise ConnectionFailed(f"no broker answers at {self.address}: {failure}") from None

    def _negotiate(self, deadline: float) -> None:
        answer = self.request(API_VERSIONS, {}, version=0, deadline=deadline)
        check_code(API_VERSIONS, answer["error_code"], f"ApiVersions at {self.address}")
        if not answer["api_keys"]:
            raise UnsupportedVersionError(f"broker {self.address} names no API that it knows")
        for entry in answer["api_keys"]:
            self._versions[entry["api_key"]] = entry["min_version"], entry["max_version"]

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
    ) -> Handle | None:
        """Send a request. The handle is for `receive` or `forget`; None if it is not `answered`.

        Waits if the broker has throttled this client, `RequestTimedOut` if that lasts beyond the deadline.
        """
        version = self.version_of(api) if version is None else version
        deadline = self._default_deadline() if deadline is None else deadline
        self._check_open()
        if self._throttled_until:
            self._await_quota(deadline)
        self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        writer = encode_request(api, version, self._correlation_id, self._config.client_id, message)
        begin = time.monotonic()
        try:
            self._socket.settimeout(_left(deadline))
            self._socket.sendall(SIZE.pack(len(writer)) + writer.to_bytes())
        except OSError as error:
            self._fail(error, begin)
        if not answered:
            return None
        handle = Handle(self._correlation_id, api, version)
        self._pending[handle.correlation_id] = handle
        return handle

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
            while True:
                size = frame_size(self._read(SIZE.size, deadline), self._config.response_max_bytes)
                if size < SIZE.size:
                    raise DecodeError(f"response of {size} bytes, too short for a correlation id")
                frame = self._read(size, deadline)
                correlation_id = SIZE.unpack_from(frame)[0]
                if correlation_id == handle.correlation_id:
                    return frame
                self._put_aside(correlation_id, frame)
        except OSError as error:
            self._fail(error, begin)

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

    def has_arrived(self, handle: Handle) -> bool:
        """Whether `receive` gives a response, or the reason why there is none, without reading."""
        return self.closed or handle.correlation_id in self._arrived

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

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

    def _read(self, size: int, deadline: float) -> memoryview:
        """Exactly `size` bytes in the connection's buffer, which grows only with what has arrived."""
        filled = 0
        while filled < size:
            if filled == len(self._buffer):
                grown = bytearray(min(size, 4 * len(self._buffer)))
                grown[:filled] = self._buffer
                self._buffer = grown
            self._socket.settimeout(_left(deadline))
            received = self._socket.recv_into(memoryview(self._buffer)[filled : min(size, len(self._buffer))])
            if received == 0:
                raise ConnectionResetError(f"closed by the broker after {filled} of {size} bytes")
            filled += received
        return memoryview(self._buffer)[:size]

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
        if self.closed or self._pending:
            return not self.closed
        try:
            self._socket.settimeout(0)
            if self._socket.recv(1, socket.MSG_PEEK):
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
        self._pending.clear()
        self._forgotten.clear()
        self._arrived.clear()
        self._arrived_bytes = 0

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def wait_for_responses(requests: Collection[tuple[Connection, Handle]], timeout: float) -> list[Handle]:
    """Wait up to `timeout` seconds until one of the responses begins to arrive; the handles of those that do.

    The requests are on connections of their own. A connection that breaks counts as a response.
    """
    arrived = [handle for connection, handle in requests if connection.has_arrived(handle)]
    if arrived:
        return arrived
    with selectors.DefaultSelector() as selector:
        for connection, handle in requests:
            selector.register(connection, selectors.EVENT_READ, handle)
        return [key.data for key, _ in selector.select(max(timeout, 0))]


def _left(deadline: float) -> float:
    """Seconds until a deadline, `TimeoutError` if it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds
