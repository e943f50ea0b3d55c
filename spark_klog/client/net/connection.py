"""One connection to one broker. Several requests may be in flight; correlation ids match responses to them.

Each step also works without blocking: `open_step`, `send` with `wait=False`, and `poll`; see `wait_until_ready`.

The first version of Apache Kafka that has each API, for messages about brokers that lack it.

From the KIPs that introduced them; APIs that Kafka 0.10.1 has are left out.
"""

from __future__ import annotations

import logging
import math
import os
import select
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

from spark_klog.base.interrupts import closing_if_interrupted
from spark_klog.client.answers import check_code
from spark_klog.client.net.dial import Dial
from spark_klog.client.retry import shown_seconds
from spark_klog.client.security.hints import closed_early, security_error
from spark_klog.client.security.sasl import SaslExchange
from spark_klog.client.settings import ClientConfig
from spark_klog.errors import ConnectionFailed, DecodeError, FrameTooLarge, RequestTimedOut, UnsupportedVersionError
from spark_klog.protocol.apis import ADD_PARTITIONS_TO_TXN, API_VERSIONS, FETCH, PRODUCE, SASL_AUTHENTICATE
from spark_klog.protocol.codec import Message, decode_response, encode_request
from spark_klog.protocol.schema import Api
from spark_klog.wire.primitives import SIZE, Buffer, frame_size

_SINCE = {
    **dict.fromkeys((21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33), "0.11"),
    **dict.fromkeys((34, 35, 36, 37), "1.0"),
    **dict.fromkeys((38, 39, 40, 41, 42), "1.1"),
    43: "2.2",
    44: "2.3",
    **dict.fromkeys((45, 46, 47), "2.4"),
    **dict.fromkeys((48, 49), "2.6"),
    **dict.fromkeys((50, 51), "2.7"),
    **dict.fromkeys((60, 61), "2.8"),
    **dict.fromkeys((65, 66), "3.0"),
    74: "3.7",
    75: "3.8",
}


def since(api: Api) -> str:
    """The first version of Kafka that has the API, as a clause for a message; "" if all have it."""
    return f", it needs Kafka {_SINCE[api.key]} or later" if api.key in _SINCE else ""


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


_log = logging.getLogger(__name__)


class Quota:
    """How long a broker wants no requests on a connection."""

    def __init__(self, address: str) -> None:
        self._address = address
        #: End of the throttling, a reading of `time.monotonic`.
        self.until = 0.0

    def note(self, throttle_time_ms: int) -> None:
        """Take the throttle time of a response; it does not shorten that of an earlier one, 0 changes nothing."""
        if throttle_time_ms > 0:
            self.until = max(self.until, time.monotonic() + throttle_time_ms / 1000)

    def wait(self, deadline: float) -> None:
        """Wait until the throttling ends; `RequestTimedOut` if that is after the deadline."""
        if not self.until:
            return
        pause = self.until - time.monotonic()
        if self.until > deadline:
            raise RequestTimedOut(f"broker {self._address} throttles this client (quota) for {pause:.1f} s more")
        if pause > 0:
            _log.info("broker %s throttles this client for %.3f s", self._address, pause)
            time.sleep(pause)
        self.until = 0.0


#: The last versions used: later ones need topic ids, which only some fetches have, or are for brokers only.
_LAST = {PRODUCE.key: 12, FETCH.key: 12, ADD_PARTITIONS_TO_TXN.key: 3}


class ApiVersions:
    """A broker's first and last version of each API; none before `set`. `address` is for messages."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._versions: dict[int, tuple[int, int]] = {}

    def set(self, entries: Iterable[Message]) -> None:
        """Take over the entries of an ApiVersions response; `UnsupportedVersionError` if there are none."""
        self._versions |= {entry["api_key"]: (entry["min_version"], entry["max_version"]) for entry in entries}
        if not self._versions:
            raise UnsupportedVersionError(f"broker {self._address} lists no API in its ApiVersions response")

    @property
    def are_known(self) -> bool:
        return bool(self._versions)

    def highest(self, api: Api) -> int:
        """The highest version that both sides support; `UnsupportedVersionError` if there is none."""
        if api.key not in self._versions:
            raise UnsupportedVersionError(f"broker {self._address} does not support {api.name}{since(api)}")
        first, last = self._versions[api.key]
        version = min(last, _LAST.get(api.key, api.versions.last))
        if version < max(first, api.versions.first):
            raise UnsupportedVersionError(
                f"broker {self._address} supports {api.name} {first}-{last}, "
                f"this client {api.versions.first}-{api.versions.last}"
            )
        return version

    def has(self, api: Api, version: int) -> bool:
        """Whether the broker supports this version."""
        first, last = self._versions.get(api.key, (0, -1))
        return first <= version <= last


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A request in flight on one connection."""

    correlation_id: int
    api: Api
    version: int


class Responses:
    """Handles that wait for responses, and up to `max_bytes` of responses that wait for their handles."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pending: dict[int, Handle] = {}
        self._forgotten: set[int] = set()
        self._arrived: dict[int, bytes] = {}
        self._arrived_bytes = 0
        #: The Fetch response that was read last, still in the stream's buffer, with its correlation id.
        self.at_hand: tuple[int, memoryview] | None = None

    def __len__(self) -> int:
        """The number of requests whose responses were neither received nor forgotten."""
        return len(self._pending)

    def expect(self, handle: Handle) -> Handle:
        """Note that a request is sent; returns its handle."""
        self._pending[handle.correlation_id] = handle
        return handle

    def end(self, handle: Handle) -> bool:
        """Stop expecting a response, which is received now or forgotten; False if it is not expected."""
        if self._pending.get(handle.correlation_id) is not handle:
            return False
        del self._pending[handle.correlation_id]
        return True

    def forget(self, handle: Handle) -> None:
        """Drop the response when it arrives."""
        self._forgotten.add(handle.correlation_id)

    def has(self, handle: Handle) -> bool:
        """Whether the response has arrived."""
        is_at_hand = self.at_hand is not None and self.at_hand[0] == handle.correlation_id
        return is_at_hand or handle.correlation_id in self._arrived

    def take(self, handle: Handle) -> memoryview | bytes | None:
        """The response if it has arrived."""
        if self.at_hand is not None and self.at_hand[0] == handle.correlation_id:
            (_, view), self.at_hand = self.at_hand, None
            return view
        frame = self._arrived.pop(handle.correlation_id, None)
        self._arrived_bytes -= len(frame or b"")
        return frame

    def keep_at_hand(self) -> None:
        """Copy the response at hand before the stream's buffer is read into again."""
        if self.at_hand is not None:
            (correlation_id, frame), self.at_hand = self.at_hand, None
            self.put_aside(correlation_id, frame)

    def put_aside(self, correlation_id: int, frame: memoryview) -> None:
        """Keep a copy of a response for its handle; `DecodeError` if no request expects it."""
        if correlation_id in self._forgotten:
            self._forgotten.remove(correlation_id)
            return
        if correlation_id not in self._pending or correlation_id in self._arrived:
            raise DecodeError(f"response to request {correlation_id}, which is not under way")
        if self._arrived_bytes + len(frame) > self._max_bytes:
            raise ConnectionResetError(f"more than {self._max_bytes} bytes of responses not received")
        self._arrived[correlation_id] = bytes(frame)
        self._arrived_bytes += len(frame)

    def clear(self) -> None:
        """Forget everything: the connection is closed."""
        self._pending.clear()
        self._forgotten.clear()
        self._arrived.clear()
        self._arrived_bytes = 0
        self.at_hand = None


#: Stands for the correlation id of a bare SASL token, which has none.
_BARE = -1


class Connection:
    """A connected, negotiated socket. Not thread-safe.

    With `wait=False` the constructor only begins to connect; call `open_step` or `finish_opening` to complete it.
    `send` returns a handle, `receive` the response to it, whatever else is in flight. Deadlines are readings of
    `time.monotonic`, by default request.timeout.ms after the call, and hold for the whole call.

    Errors, after which the connection is closed: `ConnectionFailed` if the broker can't be reached or closes it,
    `RequestTimedOut`, `DecodeError` for a malformed or unexpected response, `AuthenticationError` if TLS or SASL fails.
    An interrupt (Ctrl-C) in a call closes it too.
    """

    def __init__(
        self,
        host: str,
        port: int,
        config: ClientConfig,
        deadline: float | None = None,
        *,
        wait: bool = True,
        source: str = "",
    ) -> None:
        """`source`: see `Dial`."""
        self.address = f"{host}:{port}"
        self._config = config
        self._responses = Responses(config.response_max_bytes)
        self._correlation_id = 0
        self._quota = Quota(self.address)
        self._versions = ApiVersions(self.address)
        self._open_until = self._default_deadline() if deadline is None else deadline
        connect_until = time.monotonic() + config.connect_timeout_ms / 1000
        dial = Dial(host, port, min(self._open_until, connect_until), config.security.tls, source)
        self._transport: Dial | FrameStream = dial
        self._sasl = SaslExchange(config.security, self.address) if config.security.sasl is not None else None
        #: The negotiation's request in flight, see `_next_of_negotiation`.
        self._negotiation: Handle | None = None
        #: `is_proven`: a broker has answered with these settings, so that no error hints at them.
        self._is_open = self.is_proven = False
        if wait:
            self.finish_opening()

    def _default_deadline(self) -> float:
        return time.monotonic() + self._config.request_timeout_ms / 1000

    @closing_if_interrupted
    def finish_opening(self) -> None:
        """Wait until the connection is open."""
        if self._is_open:
            return
        self._check_open()
        try:
            if isinstance(self._transport, Dial):
                self._begin_negotiation(self._transport.finish())
            while self._negotiation is not None:
                self._next_of_negotiation(self._negotiation, self._open_until)
        except BaseException:
            self.close()
            raise

    @closing_if_interrupted
    def open_step(self) -> bool:
        """Do what can be done without waiting; return whether the connection is open. Raises what a request raises."""
        if self._is_open:
            return True
        self._check_open()
        try:
            if isinstance(self._transport, Dial):
                connected = self._transport.step()
                if connected is None:
                    return False
                self._begin_negotiation(connected)
            while self._negotiation is not None:
                if self.poll(self._negotiation):
                    self._next_of_negotiation(self._negotiation, self._open_until)
                elif time.monotonic() >= self._open_until:
                    raise RequestTimedOut(f"broker {self.address} did not answer in time")
                else:
                    break
        except BaseException:
            self.close()
            raise
        return self._is_open

    def _begin_negotiation(self, connected: socket.socket) -> None:
        self._transport = FrameStream(connected, self._config.response_max_bytes)
        self._negotiation = self._transmit(API_VERSIONS, {}, 0)
        self._flush(None)

    def _next_of_negotiation(self, handle: Handle, deadline: float) -> None:
        """Process the response to ApiVersions or a SASL request. The connection is open after the last one."""
        answer = self.receive(handle, deadline)
        following = None
        if handle.api is API_VERSIONS:
            check_code(API_VERSIONS, answer["error_code"], f"ApiVersions at {self.address}")
            self._versions.set(answer["api_keys"])
            if self._sasl is not None:
                following = self._sasl.begin(deadline)
        else:
            assert self._sasl is not None
            following = self._sasl.next(handle.api, answer, time.monotonic())
        if following is None:
            self._is_open, self._negotiation = True, None
        else:
            self._negotiate(*following)

    def _negotiate(self, api: Api, message: Message) -> None:
        if api is SASL_AUTHENTICATE and not self.speaks(api, 0):
            self._send_bare(message["auth_bytes"])
        else:
            self._negotiation = self._transmit(api, message, self.version_of(api))
        self._flush(None)

    def _send_bare(self, token: bytes) -> None:
        """Send a SASL token as brokers before 1.0 take it (SaslHandshake v0): a frame without any header."""
        assert self._sasl is not None
        self._stream.append([token])
        if self._sasl.has_last_word:
            self._is_open, self._negotiation = True, None
            return
        self._negotiation = self._responses.expect(Handle(_BARE, SASL_AUTHENTICATE, 0))

    @property
    def was_open(self) -> bool:
        """Whether a broker has answered here, even if the connection is closed since."""
        return self._versions.are_known

    @property
    def must_renew(self) -> bool:
        """Whether the SASL session ends soon (KIP-368): send no requests until `renew` has authenticated again."""
        return self._sasl is not None and time.monotonic() >= self._sasl.renew_at

    def renew(self, deadline: float) -> None:
        """Begin to authenticate again if that is due and nothing is in flight; continue as with a new connection."""
        if self._is_open and not self.pending and not self._stream.has_unsent and self.must_renew:
            assert self._sasl is not None
            _log.debug("authenticating again at broker %s: the session ends", self.address)
            self._is_open, self._open_until = False, deadline
            try:
                self._negotiate(*self._sasl.begin(deadline))
            except BaseException:
                self.close()
                raise

    def version_of(self, api: Api) -> int:
        """The highest version that both sides support; `UnsupportedVersionError` if there is none."""
        return self._versions.highest(api)

    def speaks(self, api: Api, version: int) -> bool:
        """Whether the broker supports this version."""
        return self._versions.has(api, version)

    @property
    def pending(self) -> int:
        """The number of requests whose responses were neither received nor forgotten."""
        return len(self._responses)

    @property
    def is_throttled(self) -> bool:
        """True while the broker throttles this client; `send` waits until that is over."""
        return self._quota.until > time.monotonic()

    @property
    def throttled_until(self) -> float:
        """When the broker's throttling ends, a reading of `time.monotonic`."""
        return self._quota.until

    @closing_if_interrupted
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
        """Send a request. Returns a handle for `receive` or `forget`, or None if the request has no response.

        Waits while the broker throttles this client; `RequestTimedOut` if that lasts beyond the deadline. Without
        `wait` part of the request may still be unsent: `poll` sends the rest.
        """
        version = self.version_of(api) if version is None else version
        deadline = self._default_deadline() if deadline is None else deadline
        self._check_open()
        self._quota.wait(deadline)
        handle = self._transmit(api, message, version, answered=answered)
        self._flush(deadline if wait else None)
        return handle if answered else None

    def _transmit(self, api: Api, message: Message, version: int, *, answered: bool = True) -> Handle:
        """Append a request to the bytes that `_flush` sends."""
        self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        writer = encode_request(api, version, self._correlation_id, self._config.client_id, message)
        handle = Handle(self._correlation_id, api, version)
        if answered:
            self._responses.expect(handle)
        self._stream.append(writer.parts)  # type: ignore[arg-type]  # a client writes no ranges of files
        return handle

    def _flush(self, deadline: float | None) -> None:
        begin = time.monotonic()
        try:
            self._stream.flush(deadline)
        except OSError as error:
            self._fail(error, begin)

    @closing_if_interrupted
    def receive(self, handle: Handle, deadline: float | None = None) -> Message:
        """The response to a request. Responses to other requests that arrive first are kept for their handles.

        Its record bytes are views of a buffer that the next `receive` overwrites.
        """
        self._check_open()
        if not self._responses.end(handle):
            raise ValueError(f"request {handle.correlation_id} is not under way at {self.address}")
        try:
            frame: memoryview | bytes | None = self._responses.take(handle)
            if frame is None:
                frame = self._await(handle, self._default_deadline() if deadline is None else deadline)
            if handle.correlation_id == _BARE:
                return {"error_code": 0, "error_message": None, "auth_bytes": frame}
            _, message = decode_response(handle.api, handle.version, frame)
        except DecodeError as error:
            self._undecodable(error)
        self.is_proven = self.is_proven or self._is_open
        self._quota.note(message.get("throttle_time_ms", 0))
        return message

    def _await(self, handle: Handle, deadline: float) -> memoryview:
        """Read responses until the one to this request."""
        begin = time.monotonic()
        try:
            if self._stream.has_unsent:
                self._stream.flush(deadline)
            self._responses.keep_at_hand()
            while True:
                frame = self._stream.read(deadline, self._least)
                assert frame is not None  # there is a deadline
                correlation_id = self._id_in(frame)
                if correlation_id == handle.correlation_id:
                    return frame
                self._responses.put_aside(correlation_id, frame)
        except OSError as error:
            self._fail(error, begin)

    @closing_if_interrupted
    def poll(self, handle: Handle | None) -> bool:
        """Send and read what can be done without waiting; return whether the response to a request has arrived.

        Without a handle: whether all requests have been sent. Raises what `receive` raises. With a handle it may
        overwrite the record bytes of the Fetch response that was received last.
        """
        self._check_open()
        begin = time.monotonic()
        try:
            if self._stream.has_unsent:
                self._stream.flush(None)
            while handle is not None and not self._responses.has(handle):
                self._responses.keep_at_hand()
                frame = self._stream.read(None, self._least)
                if frame is None:
                    return False
                correlation_id = self._id_in(frame)
                if correlation_id == handle.correlation_id and handle.api is FETCH:
                    self._responses.at_hand = correlation_id, frame  # not copied, as it is large
                else:
                    self._responses.put_aside(correlation_id, frame)
        except DecodeError as error:
            self._undecodable(error)
        except OSError as error:
            self._fail(error, begin)
        return handle is not None or not self._stream.has_unsent

    def has_arrived(self, handle: Handle) -> bool:
        """Whether the response was read already: `poll` of another handle may have done so."""
        return self._responses.has(handle)

    @property
    def _awaits_token(self) -> bool:
        """Whether the next response is a bare token; nothing else is in flight then."""
        return self._negotiation is not None and self._negotiation.correlation_id == _BARE

    @property
    def _least(self) -> int:
        """The fewest bytes of the next response: a bare token may be empty."""
        return 0 if self._awaits_token else SIZE.size

    def _id_in(self, frame: memoryview) -> int:
        return _BARE if self._awaits_token else int(SIZE.unpack_from(frame)[0])

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._transport.fileno()

    @property
    def events(self) -> int:
        """The events that `open_step` or `poll` waits for: `selectors.EVENT_READ`, `EVENT_WRITE` or both."""
        return self._transport.events

    @property
    def has_read_ahead(self) -> bool:
        """Whether TLS holds decrypted bytes that `poll` has not read: selectors do not report them."""
        return isinstance(self._transport, FrameStream) and self._transport.has_read_ahead

    @property
    def look_at(self) -> float:
        """When to call `open_step` if no event comes, a reading of `time.monotonic`."""
        return self._transport.until if isinstance(self._transport, Dial) else self._open_until

    @property
    def _stream(self) -> FrameStream:
        assert isinstance(self._transport, FrameStream)
        return self._transport

    def forget(self, handle: Handle) -> None:
        """Drop the response to a request that is no longer needed.

        Closes the connection if nothing else is in flight: connecting again costs less than reading a response that may
        be large or late.
        """
        if self._responses.end(handle) and self._responses.take(handle) is None:
            self._responses.forget(handle)
            if not self.pending:
                self.close()

    @closing_if_interrupted
    def request(
        self, api: Api, message: Message, *, version: int | None = None, deadline: float | None = None
    ) -> Message:
        """Send a request and wait for its response."""
        deadline = self._default_deadline() if deadline is None else deadline
        handle = self.send(api, message, version=version, deadline=deadline)
        assert handle is not None  # it is answered
        return self.receive(handle, deadline)

    def _undecodable(self, error: DecodeError) -> NoReturn:
        self.close()
        refused = None if self._is_open else security_error(self._stream.buffer, self.address, self._config.security)
        where = f"broker {self.address}"
        if isinstance(error, FrameTooLarge) and self._is_open:
            raise FrameTooLarge(error.size, error.limit, where) from None
        raise refused or DecodeError(f"{where}: {error}") from None

    def _fail(self, error: OSError, begin: float) -> NoReturn:
        self.close()
        if isinstance(error, TimeoutError):
            seconds = time.monotonic() - begin
            raise RequestTimedOut(f"broker {self.address} did not answer within {shown_seconds(seconds)} s") from None
        text = f"connection to broker {self.address} broke: {error}"
        if self._awaits_token and self._sasl is not None:
            raise self._sasl.cut_off() from None
        if self.is_proven:
            raise ConnectionFailed(text) from None
        raise closed_early(error, text, self.address, self._config.security, self._is_open) from None

    def _check_open(self) -> None:
        if self.closed:
            raise ConnectionFailed(f"connection to broker {self.address} is closed, requests under way are lost")

    @closing_if_interrupted
    def is_usable(self) -> bool:
        """False if the connection is closed, or if it is idle and the broker has closed it."""
        if self.closed or self.pending or not self._is_open or self._stream.has_unsent:
            return not self.closed
        try:
            self._stream.probe()  # the next `receive` rejects an unexpected response
        except OSError:
            self.close()
        return not self.closed

    @property
    def closed(self) -> bool:
        return self._transport.fileno() < 0

    def close(self) -> None:
        self._transport.close()
        self._responses.clear()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
