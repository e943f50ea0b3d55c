"""One client's connection: frames in, responses out in the order of the requests; its limits of memory and time.

Bytes are received straight into the buffer of their frame, which grows as they arrive: a huge length prefix allocates
nothing. Bytes outside a partial frame are received into one buffer that all connections share. File ranges in a
response are sent by sendfile, over TLS in pieces; what is sent from memory is given to the socket in pieces, too, so
that a client that does not read its response keeps it in memory once.

A request is answered in the callback that received it, as far as nothing has to wait; from the first wait on its
coroutine is a task's. Most requests never wait, and a task for each would cost as much as what they do.

Records that a client has sent before it hung up are appended, as it may wait for no response (acks=0).

The watchdog closes connections that are idle, slow, or not authenticated in time:

    connections.max.idle.ms       no request in progress, and no byte received
    request.receive.timeout.ms    a request that has begun is not complete
    response.send.timeout.ms      no progress in sending the response (in steps of 1 MiB)
    authentication.timeout.ms     the TLS handshake, or SASL, is not complete
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Sized
from dataclasses import dataclass
from enum import Enum
from typing import IO, Any, cast

from spark_klog.broker.event_loop import Turns
from spark_klog.broker.metrics import Metrics
from spark_klog.broker.security.mechanisms import Refused
from spark_klog.broker.security.session import Session
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.errors import DecodeError, FrameTooLarge
from spark_klog.log.segments.segment import FileRange
from spark_klog.protocol.apis import PRODUCE
from spark_klog.wire.primitives import SIZE, Buffer, Writer, frame_size

_log = logging.getLogger(__name__)
_LONGEST_PAUSE = 1.0
#: Size of the shared buffer, and minimum of a large frame's first buffer.
_SCRATCH_BYTES = 64 * 1024
_MAX_QUEUED = 100
#: For less, a copy is cheaper than setting up sendfile.
_SENDFILE_FROM = 32 * 1024
#: Bytes sent by one sendfile; after each the watchdog sees that the client reads.
_SENDFILE_STEP = 1024 * 1024
_TLS_STEP = 256 * 1024
#: Bytes given to the socket at once, which copies what it can't send.
_MEMORY_STEP = 256 * 1024
#: When the broker stops: how long a client has to agree that TLS is closed. Idle ones may never read that.
_TLS_CLOSE_SECONDS = 2.0
#: How long the records of a client that has hung up may take.
_LAST_SECONDS = 30.0
#: The largest frame before authentication (Kafka: sasl.server.max.receive.size).
_UNAUTHENTICATED_MAX = 512 * 1024
_PREFIX = SIZE.size
_PRODUCE_KEY = PRODUCE.key.to_bytes(2, "big")


@dataclass
class Activity:
    """Times of events on a connection, in seconds of the monotonic clock; None if not in progress."""

    opened_at: float
    active_at: float
    frame_since: float | None = None
    sending_since: float | None = None
    #: The broker itself has paused reading.
    is_paused: bool = False

    def touch(self, now: float) -> None:
        """Restart the client's time limits."""
        self.active_at = now
        if self.frame_since is not None:
            self.frame_since = now


def reason_to_drop(
    activity: Activity, config: BrokerConfig, now: float, *, is_authenticated: bool, is_busy: bool
) -> str | None:
    """Why the connection must be closed, None if it may stay."""

    def overdue(since: float | None, limit_ms: int) -> bool:
        return since is not None and now - since > limit_ms / 1000

    if not is_authenticated and overdue(activity.opened_at, config.authentication_timeout_ms):
        return f"not authenticated within {config.authentication_timeout_ms} ms"
    if overdue(activity.sending_since, config.send_timeout_ms):
        return f"did not read its response for {config.send_timeout_ms} ms"
    is_awaited = not activity.is_paused and activity.sending_since is None
    if is_awaited and overdue(activity.frame_since, config.receive_timeout_ms):
        return f"a request was incomplete after {config.receive_timeout_ms} ms"
    if not is_busy and overdue(activity.active_at, config.max_idle_ms):
        return f"idle for {config.max_idle_ms} ms"
    return None


async def watch(connections: Collection[Connection], config: BrokerConfig) -> None:
    """Watch until cancelled. A failure at one connection does not affect the others."""
    shortest = min(
        config.max_idle_ms, config.receive_timeout_ms, config.send_timeout_ms, config.authentication_timeout_ms
    )
    pause = min(_LONGEST_PAUSE, shortest / 4000)
    while True:
        await asyncio.sleep(pause)
        now = time.monotonic()
        for connection in list(connections):
            try:
                reason = reason_to_drop(
                    connection.activity,
                    config,
                    now,
                    is_authenticated=connection.session.is_open,
                    is_busy=connection.is_busy,
                )
                if reason is not None:
                    connection.drop(reason)
            except Exception:
                _log.exception("%s: the watchdog failed at this connection", connection.session.peer)


class FrameMemory:
    """Count of the bytes of requests in memory, over all connections (`queued.max.request.bytes`).

    A connection asks before its frame grows, and gives the bytes back when the request is answered. At the limit it
    stops reading until others have given back. To keep partial frames from waiting for each other, the first connection
    that waits gets what it needs: the limit may be exceeded by one frame, and by bytes already received.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: dict[Connection, None] = {}
        self._preferred: Connection | None = None

    def take(self, size: int) -> None:
        """Count bytes that are already in memory; never refused."""
        self.used += size

    def ask(self, waiter: Connection, size: int) -> bool:
        """Return True and count `size` bytes, or return False and call `memory_is_there` when to ask again."""
        if self.used + size > self.limit and self._preferred is not waiter:
            if self._preferred is not None:
                self._waiting[waiter] = None
                return False
            self._preferred = waiter
        self.used += size
        return True

    def give_back(self, size: int) -> None:
        self.used -= size
        if self._waiting and self.used < self.limit:
            self._wake_next()

    def leave(self, waiter: Connection) -> None:
        """End the waiter's frame, because it is complete or its connection is gone."""
        self._waiting.pop(waiter, None)
        if self._preferred is waiter:
            self._preferred = None
            self._wake_next()

    def _wake_next(self) -> None:
        """Wake one waiter; when it gives back, it wakes the next."""
        if self._waiting:
            waiter = next(iter(self._waiting))
            del self._waiting[waiter]
            waiter.memory_is_there()


class ResponseMemory:
    """Count of the bytes of responses that are being sent, over all connections (`queued.max.response.bytes`).

    A client that does not read its response keeps it in memory. At the limit the connection whose client has read
    nothing for longest is closed, so that those who read never wait for those who do not.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        #: In the order in which their clients have last read.
        self._held: dict[Connection, int] = {}

    def hold(self, sender: Connection, size: int) -> None:
        """Count the bytes of a response until `release`; beyond the limit, others are dropped that do not read."""
        self._held[sender] = size
        self.used += size
        while self.used > self.limit and (oldest := next(iter(self._held))) is not sender:
            self.release(oldest)
            oldest.drop(f"responses that wait to be sent take more than {self.limit} bytes")

    def note_read(self, sender: Connection) -> None:
        """Note that the client has read more of its response."""
        if (size := self._held.pop(sender, None)) is not None:
            self._held[sender] = size

    def release(self, sender: Connection) -> None:
        """End the count of a response that is sent or dropped; may be called again."""
        self.used -= self._held.pop(sender, 0)


class AnswerCut(ConnectionError):
    """Send these bytes, which may be part of a response, then close the connection."""

    def __init__(self, sent: bytes) -> None:
        super().__init__(f"closed after {len(sent)} bytes of a response")
        self.sent = sent


class _Stage(Enum):
    """How far a connection is on the way to its end; no stage leads back."""

    OPENING = "not made yet"
    OPEN = "requests are received and answered"
    FINISHING = "requests received so far are answered, then it is closed"
    HUNG_UP = "the client has closed its side"
    CLOSING = "closed here, as soon as everything is sent"
    LOST = "gone"


def _bytes_of(part: Sized) -> Buffer:
    """A part of a response; `ConnectionError` if its file has become shorter: the response's size is fixed by now."""
    if not isinstance(part, FileRange):
        return cast(Buffer, part)
    data = part.read()
    if len(data) < part.size:
        raise ConnectionError(f"{part.size - len(data)} of {part.size} bytes are missing: a log file became shorter")
    return data


class _Begun(Coroutine[Any, Any, None]):
    """A coroutine that has begun outside of a task, and waits for `waited`: for a task to go on with."""

    def __init__(self, begun: Coroutine[Any, Any, None], waited: Any) -> None:
        self._begun, self._waited, self._is_first = begun, waited, True

    def send(self, value: Any) -> Any:
        if self._is_first:
            self._is_first, waited, self._waited = False, self._waited, None
            return waited
        return self._begun.send(value)

    def throw(self, *error: Any) -> Any:
        self._is_first = False
        try:
            return self._begun.throw(*error)
        finally:
            del error  # else it would keep itself, and the response that was being sent, by its traceback

    def close(self) -> None:
        self._begun.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise NotImplementedError("for a task")


class Connections:
    """The open connections of a broker, and what they share.

    `answer` returns the response to a frame, None for no response; it raises `DecodeError`, `Refused` or `AnswerCut`.
    """

    def __init__(
        self,
        config: BrokerConfig,
        metrics: Metrics,
        turns: Turns,
        answer: Callable[[bytearray, Session], Awaitable[Writer | None]],
    ) -> None:
        self.metrics, self.turns, self.answer = metrics, turns, answer
        self.opened: set[Connection] = set()
        self.frame_memory = FrameMemory(config.queued_max_bytes)
        self.response_memory = ResponseMemory(config.queued_max_response_bytes)
        self.scratch = bytearray(_SCRATCH_BYTES)
        self.scratch_view = memoryview(self.scratch)
        #: The largest frame of a client, and of one that is not authenticated yet.
        self.open_limit = config.request_max_bytes
        self.unauthenticated_limit = min(_UNAUTHENTICATED_MAX, config.request_max_bytes)


class Connection(asyncio.BufferedProtocol):
    """State of one connection; see the module. `gone` gets it once, when the connection is lost."""

    def __init__(self, shared: Connections, session: Session, gone: Callable[[Connection], None]) -> None:
        self._shared, self.session, self._gone = shared, session, gone
        self._memory = shared.frame_memory
        self._response_memory = shared.response_memory
        self._rest = b""  # first bytes of an incomplete size prefix
        self._frame: bytearray | None = None
        self._frame_size = 0
        self._frame_filled = 0
        self._requests: deque[bytearray] = deque()
        self._unsent = bytearray()
        self._is_flush_due = False
        #: Goes on with requests that have to wait.
        self._worker: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._waits_for_memory = False
        self._stage = _Stage.OPENING
        self._closed_at = 0.0
        #: Whether the request that is being answered is a Produce.
        self._is_producing = False
        self._has_sent_request = False
        now = time.monotonic()
        self.activity = Activity(now, now)

    @property
    def was_made(self) -> bool:
        return self._stage is not _Stage.OPENING

    @property
    def is_silent(self) -> bool:
        """Whether the client has sent no request yet, or has not logged in."""
        return not (self._has_sent_request and self.session.is_open)

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self._worker is not None and not self._worker.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._stage = _Stage.OPEN
        if self.session.is_tls:
            self.session.take_certificate(transport.get_extra_info("peercert"))
        self._shared.opened.add(self)
        self._shared.metrics.connections += 1

    def eof_received(self) -> None:
        """Let the transport close itself."""
        if self._stage not in (_Stage.CLOSING, _Stage.LOST):
            self._stage = _Stage.HUNG_UP

    def connection_lost(self, exc: Exception | None) -> None:
        has_client_ended = self._stage is _Stage.HUNG_UP or isinstance(exc, ConnectionError)
        self._stage = _Stage.LOST
        self._gone(self)
        self._writable.set()
        self._unsent = bytearray()
        frame, self._frame = self._frame, None
        self.activity.frame_since = None
        self._memory.leave(self)
        if frame is not None:
            self._memory.give_back(len(frame))
        if has_client_ended and self._worker is not None and self._has_only_records():
            timer = asyncio.get_running_loop().call_later(_LAST_SECONDS, self._worker.cancel)
            self._worker.add_done_callback(lambda _: timer.cancel())
            return  # the server waits for them if it stops
        self._shared.opened.discard(self)
        if self._worker is not None:
            self._worker.cancel()
        self._drop_requests()

    def _has_only_records(self) -> bool:
        are_produced = all(frame.startswith(_PRODUCE_KEY) for frame in self._requests)
        return self.is_busy and self._is_producing and self.session.is_open and are_produced

    def _drop_requests(self) -> None:
        self._memory.give_back(sum(map(len, self._requests)))
        self._requests.clear()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def finish(self) -> None:
        """Stop reading; close after the requests received so far are answered. May be called again."""
        if self._stage is _Stage.CLOSING:
            if self.session.is_tls and time.monotonic() - self._closed_at > _TLS_CLOSE_SECONDS:
                self.abort()
        elif self._stage is not _Stage.LOST:
            if self._stage is _Stage.OPEN:
                self._stage = _Stage.FINISHING
            self._transport.pause_reading()
            if not self.is_busy:
                self._close()

    def drop(self, reason: str) -> None:
        """Close the connection because of the client's behaviour; what is not sent is dropped."""
        self._log_dropped(reason)
        self.abort()

    def _log_dropped(self, reason: object) -> None:
        _log.warning("%s: %s; closing the connection", self.session.peer, reason)
        self._shared.metrics.connections_dropped += 1

    def abort(self) -> None:
        """Close the connection and drop unsent bytes.

        The worker ends first. If the socket were closed during a sendfile, the loop would still watch its descriptor,
        and the next connection with that descriptor would receive nothing.
        """
        if self._worker is None or self._worker.done():
            self._transport.abort()
        else:
            self._worker.add_done_callback(lambda _: self._transport.abort())
            self._worker.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._frame is not None:
            return memoryview(self._frame)[self._frame_filled :]
        return self._shared.scratch_view[len(self._rest) :] if self._rest else self._shared.scratch_view

    def buffer_updated(self, nbytes: int) -> None:
        self.activity.active_at = time.monotonic()
        if self._frame is not None:
            self._frame_filled += nbytes
            self._continue_frame()
        else:
            try:
                self._split(nbytes)
            except FrameTooLarge as error:
                setting = "socket.request.max.bytes" if self.session.is_open else "before authentication"
                self._log_dropped(
                    f"frame of {error.size} bytes, the limit is {error.limit} ({setting}): "
                    "a larger request than that, not the Kafka protocol, or a wrong port?"
                )
                self._transport.abort()
        if self._requests and not self.is_busy and self._stage is not _Stage.CLOSING:
            self._begin_to_serve()

    def _continue_frame(self) -> None:
        assert self._frame is not None
        if self._frame_filled == self._frame_size:
            frame, self._frame = self._frame, None
            self.activity.frame_since = None
            self._memory.leave(self)
            self._deliver(frame)
        elif self._frame_filled == len(self._frame):
            more = min(self._frame_size - self._frame_filled, self._frame_filled)
            if not self._memory.ask(self, more):
                self._waits_for_memory = True
                self._pause_reading()
                more = min(more, _SCRATCH_BYTES)  # room for bytes that TLS has already read
                self._memory.take(more)
            grown = bytearray(self._frame_filled + more)
            grown[: self._frame_filled] = self._frame
            self._frame = grown

    def memory_is_there(self) -> None:
        self._waits_for_memory = False
        self._resume_reading()

    def _pause_reading(self) -> None:
        self.activity.is_paused = True
        self._transport.pause_reading()

    def _resume_reading(self) -> None:
        """Resume reading, unless memory is short, enough requests wait, or the connection is finishing."""
        is_enough = len(self._requests) >= (_MAX_QUEUED if self._memory.used <= self._memory.limit else 1)
        if self.activity.is_paused and self._stage is _Stage.OPEN and not (self._waits_for_memory or is_enough):
            self.activity.is_paused = False
            self.activity.touch(time.monotonic())
            self._transport.resume_reading()

    def _split(self, received: int) -> None:
        """Take all complete frames from the shared buffer; a partial frame gets its own buffer."""
        scratch, filled, position = self._shared.scratch, received, 0
        if self._rest:
            filled += len(self._rest)
            scratch[: len(self._rest)] = self._rest
        limit = self._shared.open_limit if self.session.is_open else self._shared.unauthenticated_limit
        since = self.activity.frame_since
        while filled - position >= _PREFIX:
            size = frame_size(scratch, limit, position)
            position += _PREFIX
            if size > filled - position:
                there = filled - position
                self._frame = bytearray(min(size, max(_SCRATCH_BYTES, 2 * there)))
                self._memory.take(len(self._frame))
                self._frame[:there] = scratch[position:filled]
                self._frame_size, self._frame_filled = size, there
                position = filled
                break
            self._memory.take(size)
            self._deliver(scratch[position : position + size])
            position += size
            since = None
        self._rest = bytes(scratch[position:filled]) if position < filled else b""
        has_begun = self._rest or self._frame is not None
        self.activity.frame_since = (since or self.activity.active_at) if has_begun else None

    def _deliver(self, frame: bytearray) -> None:
        self._requests.append(frame)
        self._has_sent_request = True
        if len(self._requests) >= _MAX_QUEUED or self._memory.used > self._memory.limit:
            self._pause_reading()

    def _begin_to_serve(self) -> None:
        """Answer the requests received; from the first one on that has to wait, as a task."""
        self._shared.turns.begin()
        serving = self._serve()
        try:
            waited = serving.send(None)
        except StopIteration:
            return
        self._worker = asyncio.get_running_loop().create_task(_Begun(serving, waited))
        self._worker.add_done_callback(self._served)

    def _served(self, worker: asyncio.Task[None]) -> None:
        """Drop the worker: a cancelled one keeps the response that it was sending."""
        if self._worker is worker:
            self._worker = None
        if self._stage is _Stage.LOST:
            self._shared.opened.discard(self)
            self._drop_requests()

    async def _serve(self) -> None:
        try:
            while self._requests:
                frame = self._requests.popleft()
                self._is_producing = frame.startswith(_PRODUCE_KEY)
                if self.activity.is_paused:
                    self._resume_reading()
                try:
                    response = await self._shared.answer(frame, self.session)
                finally:
                    self._memory.give_back(len(frame))
                if response is not None and self._stage is not _Stage.LOST:
                    await self._send(response)
                if self.session.has_failed:
                    self._close()
                    return
            if self._stage is _Stage.FINISHING:
                self._close()
        except (DecodeError, Refused) as error:
            self._log_dropped(error)
            self._close()
        except AnswerCut as cut:
            self._unsent += cut.sent
            self._close()
        except ConnectionError as error:
            _log.debug("%s: %s", self.session.peer, error)
            self._flush()
            self._transport.abort()
        except asyncio.CancelledError:
            raise
        except Exception:
            _log.exception("%s: a request failed; closing the connection", self.session.peer)
            self._close()

    async def _send(self, response: Writer) -> None:
        activity, parts = self.activity, response.parts
        size = sum(map(len, parts))
        self._unsent += SIZE.pack(size)
        is_long = size > _SCRATCH_BYTES
        try:
            if is_long:
                activity.sending_since = time.monotonic()
                await self._send_long(parts)
            else:
                for part in parts:
                    self._unsent += _bytes_of(part)
            if not self._requests or len(self._unsent) >= _SCRATCH_BYTES:
                self._flush()
            elif not self._is_flush_due:
                # responses to requests already received are sent together, unless the next request has to wait
                self._is_flush_due = True
                asyncio.get_running_loop().call_soon(self._flush)
            if not self._writable.is_set():
                activity.sending_since = time.monotonic()
                await self._writable.wait()
        finally:
            if is_long:
                self._response_memory.release(self)
        activity.sending_since = None
        if self._worker is not None:  # else the request has only just been received
            activity.touch(time.monotonic())

    async def _send_long(self, parts: list[Sized]) -> None:
        in_memory = sum(len(part) for part in parts if not isinstance(part, FileRange))
        if in_memory > _SCRATCH_BYTES:
            self._response_memory.hold(self, in_memory)
        for part in parts:
            if isinstance(part, FileRange) and part.size >= _SENDFILE_FROM:
                self._flush()
                await self._send_file(part)
                continue
            data = memoryview(_bytes_of(part))
            for start in range(0, len(data), _MEMORY_STEP):
                self._unsent += data[start : start + _MEMORY_STEP]
                if len(self._unsent) >= _SCRATCH_BYTES:
                    self._flush()
                    await self._shared.turns.take()
                    await self._writable.wait()
                    self._response_memory.note_read(self)
                    self.activity.sending_since = time.monotonic()

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._unsent:
            if self._stage is not _Stage.LOST:
                self._transport.write(self._unsent)
            self._unsent = bytearray()

    def _close(self) -> None:
        """Close after everything has been sent; may be called again.

        A TLS transport is closed when the client has agreed. A second `close` would leave it without its protocol, and
        then `abort` does nothing and `pause_reading` raises.
        """
        if self._stage not in (_Stage.CLOSING, _Stage.LOST):
            self._stage, self._closed_at = _Stage.CLOSING, time.monotonic()
            self._flush()
            self._transport.close()

    async def _send_file(self, part: FileRange) -> None:
        send = self._copy_file if self.session.is_tls else self._sendfile
        left = part
        while left.size:
            sent = await send(left)
            if not sent:
                raise ConnectionError(f"{left.size} of {part.size} bytes are missing: a log file became shorter")
            self.activity.sending_since = time.monotonic()
            left = FileRange(left.file, left.position + sent, left.size - sent)

    async def _sendfile(self, part: FileRange) -> int:
        size = min(part.size, _SENDFILE_STEP)
        loop = asyncio.get_running_loop()
        try:
            return await loop.sendfile(self._transport, cast("IO[bytes]", part.file), part.position, size)
        except RuntimeError as error:
            if self._transport.is_closing():  # asyncio raises no more specific error
                raise ConnectionResetError("the client disconnected while its response was being sent") from error
            raise

    async def _copy_file(self, part: FileRange) -> int:
        """Send a piece of a file over TLS, which has no sendfile."""
        data = part.file.read_at(part.position, min(part.size, _TLS_STEP))
        self._transport.write(data)
        await self._writable.wait()
        return len(data)
