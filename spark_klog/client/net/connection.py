"""One connection to one broker. Several requests may be in flight; correlation ids match responses to them.

Each step also works without blocking: `open_step`, `send` and `poll`; see `wait_until_ready`.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple, NoReturn

from spark_klog.base.interrupts import between_steps
from spark_klog.base.names import VERSION
from spark_klog.client.answers import check_code
from spark_klog.client.net.dial import Dial
from spark_klog.client.net.waiting import LEAST_ANSWER, Work, wait_until_ready
from spark_klog.client.retry import shown_seconds
from spark_klog.client.settings import ClientConfig
from spark_klog.errors import (
    ConnectionFailed,
    DecodeError,
    ErrorCode,
    FrameTooLarge,
    HandshakeInterrupted,
    KlogError,
    RequestTimedOut,
    TlsError,
    UnsupportedVersionError,
)
from spark_klog.protocol.apis import (
    ADD_PARTITIONS_TO_TXN,
    API_VERSIONS,
    END_TXN,
    FETCH,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    PRODUCE,
    SASL_AUTHENTICATE,
    SINCE,
    TXN_OFFSET_COMMIT,
)
from spark_klog.protocol.codec import Message, decode_response, encode_request
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.groups import OFFSETS_WITH_TOPIC_IDS
from spark_klog.protocol.tables.metadata import FIRST_WITH_FEATURES, WITH_IDENTITY
from spark_klog.protocol.tables.transactions import FIRST_END_OF_TRANSACTIONS_2, FIRST_OF_TRANSACTIONS_2
from spark_klog.security.sasl import SaslExchange
from spark_klog.wire.primitives import SIZE, Buffer, frame_size

_log = logging.getLogger(__name__)
_FIRST_BUFFER = 4 * 1024
_RECEIVE_BUFFER = 4 * 1024 * 1024
#: Bytes of a frame to read at once.
_MOST_AT_ONCE = 1024 * 1024
#: Buffers that one call of the socket takes.
_MOST_BUFFERS = min(1024, os.sysconf("SC_IOV_MAX"))
#: Seconds after which a connection that opens counts as left by all that waited for it.
_LEFT = 1.0
#: Seconds without progress after which an opening is given up with the call that waits for it, at the first attempt.
_PATIENCE = 1.0
#: Stands for the correlation id of a bare SASL token, which has none.
_BARE = -1
#: The last versions used unless a caller asks for a later one: those need topic ids, which are not always known, or are
#: for brokers, or for clients of version 2 of transactions.
LAST = {
    PRODUCE.key: 12,
    FETCH.key: 12,
    OFFSET_COMMIT.key: OFFSETS_WITH_TOPIC_IDS - 1,
    OFFSET_FETCH.key: OFFSETS_WITH_TOPIC_IDS - 1,
    ADD_PARTITIONS_TO_TXN.key: 3,
    END_TXN.key: FIRST_END_OF_TRANSACTIONS_2 - 1,
    TXN_OFFSET_COMMIT.key: FIRST_OF_TRANSACTIONS_2 - 1,
}
#: The versions of requests whose topics all have an id.
_BY_ID = {OFFSET_COMMIT.key: OFFSETS_WITH_TOPIC_IDS, OFFSET_FETCH.key: OFFSETS_WITH_TOPIC_IDS}
#: What the client calls itself (KIP-511).
SOFTWARE: Final[Message] = {"client_software_name": "spark-klog", "client_software_version": VERSION}
#: How a TLS record of type alert begins: 21, and the major version 3.
_ALERT = b"\x15\x03"
#: How HTTP servers begin the answer to a request that is none of theirs; some leave out the status line.
_HTTP = b"HTTP", b"<"


class BrokerIdentity(NamedTuple):
    """A broker by its cluster and node id, as metadata name it (KIP-1242)."""

    cluster_id: str
    node_id: int


class FrameStream:
    """Sends and receives whole frames, as far as the socket allows now; one that is not complete yet stays here.

    Methods raise `OSError` as the socket does.
    """

    def __init__(self, connected: socket.socket, max_bytes: int) -> None:
        """`max_bytes`: of a frame to read."""
        self._socket = connected
        self.fileno = connected.fileno
        self._max_bytes = max_bytes
        #: TLS sockets take one buffer a call.
        self._is_plain = not hasattr(connected, "pending")
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        #: The bytes read last, from the beginning of a frame or of its size.
        self.buffer: bytearray | mmap.mmap = bytearray(_FIRST_BUFFER)
        #: The frame being read: its size if known, and the bytes in the buffer.
        self._size: int | None = None
        self._filled = 0
        #: What the socket has not accepted yet.
        self.unsent: deque[memoryview] = deque()

    @property
    def awaited_events(self) -> int:
        """The events of `select.poll` to wait for; 0 if TLS holds bytes that were not read, which no event tells."""
        if not self._is_plain and self._socket.pending():  # type: ignore[attr-defined]  # a TLS socket
            return 0
        return select.POLLIN | select.POLLOUT if self.unsent else select.POLLIN

    def append(self, parts: Iterable[Buffer]) -> None:
        """Append the parts of a frame to what `flush` sends. They must not change until they are sent."""
        views: list[memoryview] = list(map(memoryview, filter(len, parts)))  # type: ignore[arg-type]
        views.insert(0, memoryview(SIZE.pack(sum(map(len, views)))))
        self.unsent += views if self._is_plain else [memoryview(b"".join(views))]

    def flush(self) -> None:
        """Send of the unsent bytes what the socket accepts now."""
        unsent = self.unsent
        while unsent:
            try:
                if self._is_plain:
                    count = self._socket.sendmsg(islice(unsent, _MOST_BUFFERS))
                else:
                    count = self._socket.send(unsent[0])
            except BlockingIOError:
                return
            while count:
                first = unsent.popleft()
                if count < len(first):
                    unsent.appendleft(first[count:])
                    break
                count -= len(first)

    def read(self, least: int = SIZE.size) -> memoryview | None:
        """The next frame, valid until the next call; None if it has not arrived.

        `DecodeError` if it has fewer bytes than `least`, by default those of a correlation id, or too many.
        """
        if self._size is None:
            if not self._fill(SIZE.size):
                return None
            size = frame_size(self.buffer[: SIZE.size], self._max_bytes)
            if size < least:
                raise DecodeError(f"response of {size} bytes, too short for a correlation id")
            self._size, self._filled = size, 0
        size = self._size
        if not self._fill(size):
            return None
        self._size, self._filled = None, 0
        return memoryview(self.buffer)[:size]

    def probe(self) -> None:
        """Raise `OSError` if the broker has closed the connection; keep bytes that have arrived for `read`."""
        self._fill(self._size or SIZE.size)

    def _fill(self, size: int) -> bool:
        """Read until the buffer has `size` bytes; False if they have not arrived, or not all are read yet.

        Memory is used only as bytes arrive, whatever size a broker claims.
        """
        enough = self._filled + _MOST_AT_ONCE
        if size > len(self.buffer):  # a bytearray's zeros would be written at once, for milliseconds
            self.buffer = mmap.mmap(-1, max(size, 2 * len(self.buffer)), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        while self._filled < size:
            view = memoryview(self.buffer)[self._filled : size]
            try:
                received = self._socket.recv_into(view)
            except BlockingIOError:
                return False
            if received == 0:
                raise ConnectionResetError(f"closed by the broker after {self._filled} of {size} bytes")
            self._filled += received
            if enough <= self._filled < size:  # an event comes at once; an event loop's other tasks come between
                return False
        return True

    def close(self) -> None:
        self._socket.close()
        self.unsent.clear()


@dataclass(slots=True, eq=False)
class Handle:
    """A request in flight on one connection."""

    correlation_id: int
    api: Api
    version: int


class Connection:
    """A connected, negotiated socket. Not thread-safe.

    With `wait=False` the constructor only begins to connect; call `open_step` to complete it, which fails if the broker
    does nothing for request.timeout.ms (socket.connection.setup.timeout.ms until it is connected): calls with less time
    leave it opening, and later ones go on with it.
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
        expected: BrokerIdentity | None = None,
    ) -> None:
        """`source`: see `Dial`. `expected`: the broker at the address, which brokers of Kafka 4.4 and later check."""
        self.address = f"{host}:{port}"
        #: None once it was checked, or can't be.
        self._expected = expected
        #: Whether another broker than the expected one answers here, or one of another cluster.
        self.is_misrouted = False
        self._config = config
        self.closed = False
        #: `is_proven`: a broker has answered with these settings, so that no error hints at them.
        self._is_open = self.is_proven = False
        #: See `late`; that of the next attempt.
        self.patience = self.next_patience = _PATIENCE
        #: When the broker's throttling ends, a reading of `time.monotonic`.
        self.throttled_until = 0.0
        #: The finalized level of each of the cluster's features (KIP-584), and when the broker told it, a reading of
        #: `time.monotonic`; see `Cluster.asking_features`.
        self.features: dict[str, int] = {}
        self.features_at: float | None = None
        #: The broker's first and last version of each API; none before it has answered.
        self._versions: dict[int, tuple[int, int]] = {}
        self._correlation_id = 0
        #: Requests whose responses were neither received nor forgotten, and those that were forgotten, by correlation
        #: id.
        self._pending: dict[int, Handle] = {}
        self._forgotten: set[int] = set()
        #: Responses that wait for `receive`: copies, and the one read last, which may be in the stream's buffer.
        self._arrived: dict[int, bytes | memoryview] = {}
        self._read_last: int | None = None
        self._copied_bytes, self._most_copied = 0, config.response_max_bytes
        #: When `open_step` was called last, and when that got the opening further.
        self._stepped_at = self._further_at = time.monotonic()
        deadline = self._default_deadline() if deadline is None else deadline
        connect_until = self._further_at + config.connect_timeout_ms / 1000
        dial = Dial(host, port, min(deadline, connect_until), config.security.tls, source)
        self._transport: Dial | FrameStream = dial
        self._stream: FrameStream
        self._sasl = SaslExchange(config.security, self.address) if config.security.sasl is not None else None
        #: The negotiation's request in flight, see `_next_of_negotiation`.
        self._negotiation: Handle | None = None
        #: The computation of SASL's next request: passwords are hashed, tokens and tickets fetched.
        self._sasl_work: Work[list[tuple[Api, Message]]] | None = None
        if wait:
            self.finish_opening(deadline)

    def _default_deadline(self) -> float:
        return time.monotonic() + self._config.request_timeout_ms / 1000

    @property
    def _open_until(self) -> float:
        return self._further_at + self._config.request_timeout_ms / 1000

    def finish_opening(self, deadline: float | None = None) -> None:
        begin = time.monotonic()
        deadline = self._default_deadline() if deadline is None else deadline
        try:
            while not self.open_step():
                until = self.opening_until(deadline)
                self.check_time(begin, until)
                wait_until_ready((self,), min(until, self.look_at) - time.monotonic())
        except BaseException as error:
            self._fail(error)

    def open_step(self) -> bool:
        """Do what can be done without waiting; return whether the connection is open. Raises what a request raises."""
        try:
            if self._is_open:
                return True
            if self.closed:
                raise self._lost()
            self._stepped_at = time.monotonic()
            if isinstance(self._transport, Dial):
                connected = self._transport.step()
                if connected is None:
                    return False
                self._transport = self._stream = FrameStream(connected, self._config.response_max_bytes)
                self._further_at = time.monotonic()
                # before SASL a broker answers without the check
                self._negotiation = self._ask_versions(identifies=self._sasl is None)
            while not self._is_open and self._step_of_negotiation():
                self._further_at = time.monotonic()
            if not self._is_open:
                self.check_time(self._further_at, self._open_until)
            return self._is_open
        except BaseException as error:
            self.close()
            self._fail(error)

    def _step_of_negotiation(self) -> bool:
        """Go on with the negotiation; whether that was possible."""
        if self._sasl_work is not None:
            requests = self._sasl_work.step()
            if requests is not None:
                self._sasl_work = None
                self._after_sasl(*requests)
            return requests is not None
        assert self._negotiation is not None
        is_answered = self.poll(self._negotiation)
        if is_answered:
            self._next_of_negotiation(self._negotiation)
        return is_answered

    def _ask_versions(self, *, identifies: bool) -> Handle:
        """Send ApiVersions, with the expected broker if `identifies`."""
        if self._expected is None or not identifies:
            return self._transmit(API_VERSIONS, {}, 0)
        request = {**SOFTWARE, "cluster_id": self._expected.cluster_id, "node_id": self._expected.node_id}
        return self._transmit(API_VERSIONS, request, WITH_IDENTITY)

    def _next_of_negotiation(self, handle: Handle) -> None:
        """Process the response to ApiVersions or a SASL request. The connection is open after the last one."""
        answer = self.receive(handle)
        sasl = self._sasl
        if handle.api is API_VERSIONS:
            is_first = not self._versions
            if handle.version == WITH_IDENTITY and not self._is_expected(answer["error_code"]):
                self._negotiation = self._ask_versions(identifies=False)
                return
            check_code(API_VERSIONS, answer["error_code"], f"ApiVersions at {self.address}")
            self._versions = {
                entry["api_key"]: (entry["min_version"], entry["max_version"]) for entry in answer["api_keys"]
            }
            if not self._versions:
                raise UnsupportedVersionError(f"broker {self.address} lists no API in its ApiVersions response")
            if sasl is None or not is_first:
                self._after_sasl()
            else:
                self._begin_sasl(sasl)
        else:
            assert sasl is not None
            self._do_sasl(lambda: sasl.next(handle.api, answer, time.monotonic()))

    def _begin_sasl(self, sasl: SaslExchange) -> None:
        self._further_at = time.monotonic()
        until = self._open_until
        self._do_sasl(lambda: sasl.begin(until))

    def _do_sasl(self, work: Callable[[], tuple[Api, Message] | None]) -> None:
        """Compute the next request of SASL, in a thread unless that is done at once."""

        def requests() -> list[tuple[Api, Message]]:
            following = work()
            return [] if following is None else [following]

        assert self._sasl is not None
        self._negotiation = None
        if self._sasl.is_quick:
            self._after_sasl(*requests())
        else:
            self._sasl_work = Work(requests, "SASL")

    def _after_sasl(self, *following: tuple[Api, Message]) -> None:
        """Send the next request of SASL; after the last one check whose broker this is."""
        if following:
            self._authenticate(*following[0])
        elif self._expected is not None and self.speaks(API_VERSIONS, WITH_IDENTITY):
            self._negotiation = self._ask_versions(identifies=True)
        else:
            self._is_open, self._negotiation = True, None

    def _is_expected(self, code: int) -> bool:
        """Whether the broker has checked that it is the expected one; False from brokers before Kafka 4.4.

        `ConnectionFailed` if it is another one.
        """
        expected, self._expected = self._expected, None
        if code == ErrorCode.REBOOTSTRAP_REQUIRED:
            assert expected is not None
            self.is_misrouted = True
            raise ConnectionFailed(
                f"{self.address} leads to another broker than {expected.node_id} of cluster {expected.cluster_id}: "
                "looking the brokers up again at bootstrap.servers"
            )
        return code != ErrorCode.UNSUPPORTED_VERSION

    def _authenticate(self, api: Api, message: Message) -> None:
        assert self._sasl is not None
        if api is not SASL_AUTHENTICATE or self.speaks(api, 0):
            self._negotiation = self._transmit(api, message, self.version_of(api))
            return
        # brokers before 1.0 take a token as a frame without any header (SaslHandshake v0)
        self._stream.append([message["auth_bytes"]])
        if self._sasl.has_last_word:
            self._is_open, self._negotiation = True, None
        else:
            self._negotiation = self._pending[_BARE] = Handle(_BARE, SASL_AUTHENTICATE, 0)
        self._stream.flush()

    @property
    def was_open(self) -> bool:
        """Whether a broker has answered here, even if the connection is closed since."""
        return bool(self._versions)

    @property
    def must_renew(self) -> bool:
        """Whether the SASL session ends soon (KIP-368): send no requests until `renew` has authenticated again."""
        return self._sasl is not None and time.monotonic() >= self._sasl.renew_at

    def renew(self) -> None:
        """Begin to authenticate again if that is due and nothing is in flight; continue as with a new connection."""
        if not self._is_open or self._pending or self._stream.unsent or not self.must_renew:
            return
        assert self._sasl is not None
        _log.debug("authenticating again at broker %s: the session ends", self.address)
        self._is_open = False
        try:
            self._begin_sasl(self._sasl)
        except BaseException as error:
            self.close()
            self._fail(error)

    def version_of(self, api: Api, last: int | None = None) -> int:
        """The highest version that both sides support; `UnsupportedVersionError` if there is none.

        `last` is the caller's last version, for those that are not used otherwise.
        """
        if api.key not in self._versions:
            since = f", it needs Kafka {SINCE[api.key]} or later" if api.key in SINCE else ""
            raise UnsupportedVersionError(f"broker {self.address} does not support {api.name}{since}")
        first, its_last = self._versions[api.key]
        version = min(its_last, LAST.get(api.key, api.versions.last) if last is None else last)
        if version < max(first, api.versions.first):
            raise UnsupportedVersionError(
                f"broker {self.address} supports {api.name} {first}-{its_last}, "
                f"this client {api.versions.first}-{api.versions.last}"
            )
        return version

    def speaks(self, api: Api, version: int) -> bool:
        first, last = self._versions.get(api.key, (0, -1))
        return first <= version <= last

    @property
    def pending(self) -> int:
        """The number of requests whose responses were neither received nor forgotten."""
        return len(self._pending)

    @property
    def is_throttled(self) -> bool:
        """True while the broker throttles this client; `send` waits until that is over."""
        return self.throttled_until > time.monotonic()

    def send(
        self,
        api: Api,
        message: Message,
        *,
        version: int | None = None,
        answered: bool = True,
        deadline: float | None = None,
    ) -> Handle:
        """Send of a request what the socket takes now; `poll` sends the rest. The handle is for `receive` and `forget`.

        Waits while the broker throttles this client; `RequestTimedOut` if that lasts beyond the deadline.
        """
        try:
            if self.closed:
                raise self._lost()
            if version is None:
                version = _BY_ID.get(api.key)
                if version is None or not (_has_topic_ids(message) and self.speaks(api, version)):
                    version = self.version_of(api)
            if self.throttled_until:
                self._await_quota(self._default_deadline() if deadline is None else deadline)
            return self._transmit(api, message, version, answered=answered)
        except BaseException as error:
            self._fail(error)

    def _transmit(self, api: Api, message: Message, version: int, *, answered: bool = True) -> Handle:
        """Send of a request what the socket takes now."""
        self._correlation_id = number = (self._correlation_id + 1) & 0x7FFFFFFF
        writer = encode_request(api, version, number, self._config.client_id, message)
        handle = Handle(number, api, version)
        if answered:
            self._pending[number] = handle
        self._stream.append(writer.parts)  # type: ignore[arg-type]  # a client writes no ranges of files
        self._stream.flush()
        return handle

    def _await_quota(self, deadline: float) -> None:
        pause = self.throttled_until - time.monotonic()
        if pause > 0 and self.throttled_until > deadline:
            raise RequestTimedOut(f"broker {self.address} throttles this client (quota) for {pause:.1f} s more")
        if pause > 0:
            _log.info("broker %s throttles this client for %.3f s", self.address, pause)
            time.sleep(pause)
        self.throttled_until = 0.0

    def check_under_way(self, handle: Handle) -> None:
        """`ValueError` if the response was received, or given up, before; what `receive` raises if it is closed."""
        if self.closed:
            raise self._lost()
        if self._pending.get(handle.correlation_id) is not handle:
            raise ValueError(f"request {handle.correlation_id} is not under way at {self.address}")

    def receive(self, handle: Handle, deadline: float | None = None) -> Message:
        """The response to a request. Responses to other requests that arrive first are kept for their handles.

        Its record bytes are views of a buffer that the next `receive` overwrites.
        """
        try:
            self.check_under_way(handle)
            number = handle.correlation_id
            if number not in self._arrived:
                self._await(handle, deadline)
            del self._pending[number]
            frame = self._arrived.pop(number)
            if number == self._read_last:
                self._read_last = None
            else:
                self._copied_bytes -= len(frame)
            if number == _BARE:
                return {"error_code": 0, "error_message": None, "auth_bytes": frame}
            _, message = decode_response(handle.api, handle.version, frame)
            self.is_proven = self.is_proven or self._is_open
            if handle.api is API_VERSIONS and handle.version >= FIRST_WITH_FEATURES:
                finalized = message["finalized_features"]
                self.features = {feature["name"]: feature["max_version_level"] for feature in finalized}
                self.features_at = time.monotonic()
            throttle_ms = message.get("throttle_time_ms", 0)
            if throttle_ms > 0:  # it does not shorten that of an earlier response
                self.throttled_until = max(self.throttled_until, time.monotonic() + throttle_ms / 1000)
            return message
        except BaseException as error:
            self._fail(error)

    def _await(self, handle: Handle, deadline: float | None) -> None:
        begin = time.monotonic()
        deadline = self._default_deadline() if deadline is None else deadline
        while not self.poll(handle):
            self.check_time(begin, deadline)
            wait_until_ready((self,), deadline - time.monotonic())

    def poll(self, handle: Handle | None) -> bool:
        """Send and read what can be done without waiting; return whether the response to a request has arrived.

        Without a handle: whether all requests have been sent. Raises what `receive` raises. With a handle it may
        overwrite the record bytes of the Fetch response that was received last.
        """
        try:
            if self.closed:
                raise self._lost()
            stream = self._stream
            if stream.unsent:
                stream.flush()
            if handle is None:
                return not stream.unsent
            while handle.correlation_id not in self._arrived:
                if self._read_last in self._arrived:  # its bytes are about to be overwritten
                    self._put_aside(self._read_last, self._arrived.pop(self._read_last))
                is_bare = self._negotiation is not None and self._negotiation.correlation_id == _BARE
                frame = stream.read(0 if is_bare else SIZE.size)
                if frame is None:
                    return False
                number = _BARE if is_bare else int(SIZE.unpack_from(frame)[0])
                if number == handle.correlation_id:
                    # a fetch is large: it is not copied
                    self._read_last, self._arrived[number] = number, frame if handle.api is FETCH else bytes(frame)
                else:
                    self._put_aside(number, frame)
            return True
        except BaseException as error:
            self._fail(error)

    def _put_aside(self, number: int, frame: memoryview | bytes) -> None:
        """Keep a copy of a response; `DecodeError` if no request expects it."""
        self._read_last = None
        if number in self._forgotten:
            self._forgotten.remove(number)
            return
        if number not in self._pending or number in self._arrived:
            raise DecodeError(f"response to request {number}, which is not under way")
        if self._copied_bytes + len(frame) > self._most_copied:
            raise ConnectionResetError(f"more than {self._most_copied} bytes of responses not received")
        self._arrived[number] = bytes(frame)
        self._copied_bytes += len(frame)

    def has_arrived(self, handle: Handle) -> bool:
        """Whether the response was read already: `poll` of another handle may have done so."""
        return handle.correlation_id in self._arrived

    def forget(self, handle: Handle) -> None:
        """Drop the response to a request that is no longer needed.

        Closes the connection if nothing else is in flight: connecting again costs less than reading a response that may
        be large or late.
        """
        number = handle.correlation_id
        if self._pending.get(number) is not handle:
            return
        frame = self._arrived.pop(number, None)
        del self._pending[number]
        if frame is not None:
            self._copied_bytes -= 0 if number == self._read_last else len(frame)
            return
        self._forgotten.add(number)
        if not self._pending:
            self.close()

    def request(
        self, api: Api, message: Message, *, version: int | None = None, deadline: float | None = None
    ) -> Message:
        try:
            deadline = self._default_deadline() if deadline is None else deadline
            return self.receive(self.send(api, message, version=version, deadline=deadline), deadline)
        except BaseException as error:
            self._fail(error)

    def is_usable(self) -> bool:
        """False if the connection is closed, or if it is idle, or was left opening, and the broker has closed it."""
        try:
            if not (self.closed or self._is_open) and time.monotonic() >= self._stepped_at + _LEFT:
                self.open_step()
            if not (self.closed or self._pending or not self._is_open or self._stream.unsent):
                self._stream.probe()  # the next `receive` rejects an unexpected response
        except OSError:  # also `ConnectionFailed` and `RequestTimedOut`
            self.close()
        except BaseException as error:
            self._fail(error)
        return not self.closed

    def fileno(self) -> int:
        return self._transport.fileno() if self._sasl_work is None else self._sasl_work.fileno()

    @property
    def awaited_events(self) -> int:
        """The events of `select.poll` that `open_step` or `poll` waits for; 0 if they can continue at once."""
        if self.closed:
            return 0
        return self._transport.awaited_events if self._sasl_work is None else self._sasl_work.awaited_events

    @property
    def look_at(self) -> float:
        """When to call `open_step` if no event comes, a reading of `time.monotonic`."""
        transport = self._transport
        return transport.until if isinstance(transport, Dial) else self._open_until

    def opening_until(self, deadline: float) -> float:
        """The deadline of a call for which the connection opens: later if the last step has just got further."""
        return max(deadline, self._got_further_at() + LEAST_ANSWER)

    def late(self, begin: float) -> KlogError:
        """The error of a call since `begin` that waits no longer for the connection.

        It goes on opening, unless the broker has done nothing for `patience`: another one may have more luck.
        """
        if self._sasl_work is None and time.monotonic() >= self._got_further_at() + self.patience:
            self.next_patience = 2 * self.patience  # perhaps it only takes longer
            self.close()
        return self._transport.late() if isinstance(self._transport, Dial) else self._timed_out(begin)

    def _got_further_at(self) -> float:
        return self._transport.further_at if isinstance(self._transport, Dial) else self._further_at

    def _timed_out(self, begin: float) -> RequestTimedOut:
        seconds = shown_seconds(time.monotonic() - begin)
        return RequestTimedOut(f"broker {self.address} did not answer within {seconds} s")

    def close(self) -> None:
        self.closed = True
        self._transport.close()
        if self._sasl_work is not None:
            self._sasl_work.close()
        self._pending.clear()
        self._forgotten.clear()
        self._arrived.clear()
        self._copied_bytes = 0

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _lost(self) -> ConnectionFailed:
        return ConnectionFailed(f"connection to broker {self.address} is closed, requests under way are lost")

    def check_time(self, begin: float, deadline: float) -> None:
        """Close the connection and raise `RequestTimedOut` if the deadline has come; `begin` is for the message."""
        if time.monotonic() >= deadline:
            self.close()
            raise self._timed_out(begin)

    def _fail(self, error: BaseException) -> NoReturn:
        """Close the connection and say why, unless the error is one of ours already."""
        if isinstance(error, DecodeError) and not self.closed:
            self.close()
            if isinstance(error, FrameTooLarge) and self._is_open:
                raise FrameTooLarge(error.size, error.limit, f"broker {self.address}") from None
            is_alert = not self._is_open and self._stream.buffer[: len(_ALERT)] == _ALERT
            if is_alert and self._config.security.tls is None:
                wanted = f"set {self._config.security.named('security.protocol')} to {self._protocol_with_tls}"
                raise TlsError(f"broker {self.address} uses TLS on this port: {wanted}") from None
            # with other brokers there it is one address of theirs, where the broker may be back
            kind = DecodeError if self._is_open or not self.is_proven else ConnectionFailed
            if not self._is_open and self._stream.buffer[:16].startswith(_HTTP):
                raise kind(
                    f"{self.address} answers by HTTP, as a schema registry or a page of metrics does: name the port of "
                    "a Kafka broker's listener"
                ) from None
            raise kind(f"broker {self.address}: {error}") from None
        if isinstance(error, KlogError):
            raise error
        if isinstance(error, OSError):
            self.close()
            raise self._broken(error) from None
        if not isinstance(error, TypeError | ValueError):  # an interrupt: a request or a response may be half done
            self.close()
            between_steps(error)
        raise error

    def _broken(self, error: OSError) -> KlogError:
        """The error for a connection that has broken, with a hint if that was before the first answer."""
        text = f"connection to broker {self.address} broke: {error}"
        if self._negotiation is not None and self._negotiation.correlation_id == _BARE and self._sasl is not None:
            return self._sasl.cut_off()
        if self.is_proven:
            return ConnectionFailed(text)
        security = self._config.security
        if security.tls is not None:
            from spark_klog.security.tls import refusal  # the ssl module takes long to import

            # with TLS 1.3 the broker checks the client's certificate only after the handshake
            refused = refusal(error, self.address, security.tls)
            if refused is not None:
                return refused
        name = security.named("security.protocol")
        if self._is_open and security.sasl is None:
            hint = f"if it requires SASL on this port, set {name} to {'SASL_SSL' if security.tls else 'SASL_PLAINTEXT'}"
        elif security.tls is None:
            hint = f"if it uses TLS on this port, set {name} to {self._protocol_with_tls}"
        elif security.tls.chain is None:
            hint = f"it may require a client certificate: set {security.named('ssl.keystore.location')}"
        else:
            hint = f"it may refuse the certificate in {security.tls.chain.setting}: its log says why"
        interrupted = HandshakeInterrupted(f"{text}; {hint}")
        interrupted.is_by_broker = self._is_open
        return interrupted

    @property
    def _protocol_with_tls(self) -> str:
        return "SASL_SSL" if self._config.security.sasl else "SSL, or to SASL_SSL if it requires SASL, too"


def _has_topic_ids(message: Message) -> bool:
    """Whether all topics of OffsetCommit or OffsetFetch have an id."""
    topics = [topic for part in message.get("groups", [message]) for topic in part["topics"] or ()]
    return bool(topics) and all("topic_id" in topic for topic in topics)
