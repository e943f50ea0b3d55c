"""One connection to one broker. Several requests may be in flight; correlation ids match responses to them.

Each step also works without blocking: `open_step`, `send` with `wait=False`, and `poll`; see `wait_until_ready`.
"""

from __future__ import annotations

import logging
import socket
import time
from typing import Any, NoReturn

from spark_klog.client.answers import check_code
from spark_klog.client.backoff import shown_seconds
from spark_klog.client.config import ClientConfig
from spark_klog.client.interrupts import closing_if_interrupted
from spark_klog.client.network.api_versions import ApiVersions
from spark_klog.client.network.dial import Dial
from spark_klog.client.network.frame_stream import FrameStream
from spark_klog.client.network.quota import Quota
from spark_klog.client.network.responses import Handle, Responses
from spark_klog.client.security.hints import closed_early, security_error
from spark_klog.client.security.sasl.exchange import SaslExchange
from spark_klog.errors import ConnectionFailed, DecodeError, FrameTooLarge, RequestTimedOut
from spark_klog.protocol.apis import API_VERSIONS, FETCH, SASL_AUTHENTICATE
from spark_klog.protocol.codec import Message, decode_response, encode_request
from spark_klog.protocol.schema import Api
from spark_klog.wire.frames import SIZE

_log = logging.getLogger(__name__)
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
