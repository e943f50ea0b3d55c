"""One client's connection: frames in, responses out in the order of the requests.

Bytes are received straight into the buffer of their frame, which grows as they arrive: a huge length prefix allocates
nothing. Bytes outside a partial frame are received into one buffer that all connections share. File ranges in a
response are sent by sendfile, over TLS in pieces; what is sent from memory is given to the socket in pieces, too, so
that a client that does not read its response keeps it in memory once.

Records that a client has sent before it hung up are appended, as it may wait for no response (acks=0).

Bounds on the bytes of requests and of responses in memory, over all connections.

Requests (`queued.max.request.bytes`): a connection asks before its frame grows, and gives the bytes back when the
request is answered. At the limit it stops reading until others have given back. To keep partial frames from waiting for
each other, the first connection that waits gets what it needs: the limit may be exceeded by one frame, and by bytes
already received.

Responses (`queued.max.response.bytes`): a client that does not read its response keeps it in memory. At the limit the
connection whose client has read nothing for longest is closed, so that those who read never wait for those who do not.

Closes connections that are idle, slow, or not authenticated in time.

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
from collections.abc import Callable, Collection, Sized
from dataclasses import dataclass
from typing import IO, Protocol, cast

from spark_klog.broker.broker import Broker
from spark_klog.broker.security.refusals import Refused
from spark_klog.broker.security.session import Session
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.errors import DecodeError, FrameTooLarge
from spark_klog.log.segments.segment import FileRange
from spark_klog.protocol.apis import PRODUCE
from spark_klog.wire.primitives import SIZE, Buffer, Writer, frame_size

_log = logging.getLogger(__name__)
_LONGEST_PAUSE = 1.0


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


class Watched(Protocol):
    """A connection, as the watchdog sees it."""

    activity: Activity
    session: Session

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""

    def log_dropped(self, reason: object) -> None:
        """Log and count a connection that is closed because of the client's behaviour."""

    def abort(self) -> None:
        """Close now."""


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


async def watch(connections: Collection[Watched], config: BrokerConfig) -> None:
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
                _look_at(connection, config, now)
            except Exception:
                _log.exception("%s: the watchdog failed at this connection", connection.session.peer)


def _look_at(connection: Watched, config: BrokerConfig, now: float) -> None:
    reason = reason_to_drop(
        connection.activity,
        config,
        now,
        is_authenticated=connection.session.is_open,
        is_busy=connection.is_busy,
    )
    if reason is not None:
        connection.log_dropped(reason)
        connection.abort()


class Waiter(Protocol):
    """A connection that may have to wait for memory."""

    def memory_is_there(self) -> None:
        """Continue, and ask again."""


class FrameMemory:
    """Count of the bytes in use. For one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: dict[Waiter, None] = {}
        self._preferred: Waiter | None = None

    def take(self, size: int) -> None:
        """Count bytes that are already in memory; never refused."""
        self.used += size

    def ask(self, waiter: Waiter, size: int) -> bool:
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
        if self.used < self.limit:
            self._wake_next()

    def leave(self, waiter: Waiter) -> None:
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


class Sender(Protocol):
    """A connection that sends a response."""

    def drop_response(self, reason: str) -> None:
        """Close the connection; what is not sent is dropped."""


class ResponseMemory:
    """Count of the bytes of responses that are being sent. For one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        #: In the order in which their clients have last read.
        self._held: dict[Sender, int] = {}

    def hold(self, sender: Sender, size: int) -> None:
        """Count the bytes of a response until `release`; beyond the limit, others are dropped that do not read."""
        self._held[sender] = size
        self.used += size
        while self.used > self.limit and (oldest := next(iter(self._held))) is not sender:
            self.release(oldest)
            oldest.drop_response(f"responses that wait to be sent take more than {self.limit} bytes")

    def note_read(self, sender: Sender) -> None:
        """Note that the client has read more of its response."""
        if (size := self._held.pop(sender, None)) is not None:
            self._held[sender] = size

    def release(self, sender: Sender) -> None:
        """End the count of a response that is sent or dropped; may be called again."""
        self.used -= self._held.pop(sender, 0)


#: Size of the shared buffer, and minimum of a large frame's first buffer.
SCRATCH_BYTES = 64 * 1024
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
_PRODUCE_KEY = PRODUCE.key.to_bytes(2, "big")


class AnswerCut(ConnectionError):
    """Send these bytes, which may be part of a response, then close the connection."""

    def __init__(self, sent: bytes) -> None:
        super().__init__(f"closed after {len(sent)} bytes of a response")
        self.sent = sent


class Service(Protocol):
    """The parts of the server that a connection uses."""

    broker: Broker
    connections: set[Connection]
    frame_memory: FrameMemory
    response_memory: ResponseMemory
    #: Shared receive buffer of `SCRATCH_BYTES`.
    scratch: bytearray

    def frame_limit(self, session: Session) -> int:
        """The largest frame, in bytes, that the client may send now."""

    async def answer(self, frame: bytearray, session: Session) -> Writer | None:
        """The response to a request, or None; `DecodeError` and `Refused` close the connection."""


class Connection(asyncio.BufferedProtocol):
    """State of one connection; see the module. `gone` is called once, when the connection is lost."""

    def __init__(self, server: Service, session: Session, gone: Callable[[], None]) -> None:
        self._server, self.session, self._gone = server, session, gone
        self._memory = server.frame_memory
        self._response_memory = server.response_memory
        self._rest = b""  # first bytes of an incomplete size prefix
        self._frame: bytearray | None = None
        self._frame_size = 0
        self._frame_filled = 0
        self._requests: deque[bytearray] = deque()
        self._unsent: list[Buffer] = []
        self._unsent_bytes = 0
        self._is_flush_due = False
        self._worker: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._waits_for_memory = False
        self.was_made = False
        self._is_finishing = False
        #: Whether the request that is being answered is a Produce.
        self._is_producing = False
        self._has_client_ended = self._is_lost = False
        self._closed_at: float | None = None
        now = time.monotonic()
        self.activity = Activity(now, now)

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self._worker is not None and not self._worker.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.was_made = True
        if self.session.is_tls:
            self.session.take_certificate(transport.get_extra_info("peercert"))
        self._server.connections.add(self)
        self._server.broker.metrics.connections += 1

    def eof_received(self) -> None:
        self._has_client_ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = self._is_finishing = True
        self._gone()
        self._writable.set()
        self._unsent, self._unsent_bytes = [], 0
        frame, self._frame = self._frame, None
        self.activity.frame_since = None
        self._memory.leave(self)
        if frame is not None:
            self._memory.give_back(len(frame))
        has_client_ended = self._has_client_ended or isinstance(exc, ConnectionError)
        if has_client_ended and self._worker is not None and self._has_only_records():
            timer = asyncio.get_running_loop().call_later(_LAST_SECONDS, self._worker.cancel)
            self._worker.add_done_callback(lambda _: timer.cancel())
            return  # the server waits for them if it stops
        self._server.connections.discard(self)
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
        if self._is_lost:
            return
        self._is_finishing = True
        if self._closed_at is None:
            self._transport.pause_reading()
            if not self.is_busy:
                self._close()
        elif self.session.is_tls and time.monotonic() - self._closed_at > _TLS_CLOSE_SECONDS:
            self.abort()

    def log_dropped(self, reason: object) -> None:
        """Log and count a connection that is closed because of the client's behaviour."""
        _log.warning("%s: %s; closing the connection", self.session.peer, reason)
        self._server.broker.metrics.connections_dropped += 1

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
        return memoryview(self._server.scratch)[len(self._rest) :]

    def buffer_updated(self, nbytes: int) -> None:
        self.activity.active_at = time.monotonic()
        if self._frame is not None:
            self._frame_filled += nbytes
            self._continue_frame()
            return
        try:
            self._split(nbytes)
        except FrameTooLarge as error:
            setting = "socket.request.max.bytes" if self.session.is_open else "before authentication"
            self.log_dropped(
                f"frame of {error.size} bytes, the limit is {error.limit} ({setting}): "
                "a larger request than that, not the Kafka protocol, or a wrong port?"
            )
            self._transport.abort()
        except DecodeError as error:
            self.log_dropped(error)
            self._transport.abort()

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
                more = min(more, SCRATCH_BYTES)  # room for bytes that TLS has already read
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
        if self.activity.is_paused and not (self._waits_for_memory or is_enough or self._is_finishing):
            self.activity.is_paused = False
            self.activity.touch(time.monotonic())
            self._transport.resume_reading()

    def _split(self, received: int) -> None:
        """Take all complete frames from the shared buffer; a partial frame gets its own buffer."""
        filled = len(self._rest) + received
        view = memoryview(self._server.scratch)
        view[: len(self._rest)] = self._rest
        position = 0
        limit = self._server.frame_limit(self.session)
        since = self.activity.frame_since
        while filled - position >= SIZE.size:
            size = frame_size(view[position : position + SIZE.size], limit)
            position += SIZE.size
            there = min(size, filled - position)
            frame = bytearray(view[position : position + there])
            position += there
            if there == size:
                self._memory.take(size)
                self._deliver(frame)
                since = None
                continue
            self._frame = bytearray(min(size, max(SCRATCH_BYTES, 2 * there)))
            self._memory.take(len(self._frame))
            self._frame[:there] = frame
            self._frame_size, self._frame_filled = size, there
            break
        self._rest = bytes(view[position:filled])
        has_begun = self._rest or self._frame is not None
        self.activity.frame_since = (since or self.activity.active_at) if has_begun else None

    def _deliver(self, frame: bytearray) -> None:
        self._requests.append(frame)
        if len(self._requests) >= _MAX_QUEUED or self._memory.used > self._memory.limit:
            self._pause_reading()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._serve())
            self._worker.add_done_callback(self._served)

    def _served(self, worker: asyncio.Task[None]) -> None:
        """Drop the worker: a cancelled one keeps the response that it was sending."""
        if self._worker is worker:
            self._worker = None
        if self._is_lost:
            self._server.connections.discard(self)
            self._drop_requests()

    async def _serve(self) -> None:
        try:
            while self._requests:
                frame = self._requests.popleft()
                self._is_producing = frame.startswith(_PRODUCE_KEY)
                self._resume_reading()
                try:
                    response = await self._server.answer(frame, self.session)
                finally:
                    self._memory.give_back(len(frame))
                if response is not None and not self._is_lost:
                    await self._send(response)
                if self.session.has_failed:
                    self._close()
                    return
            if self._is_finishing:
                self._close()
        except (DecodeError, Refused) as error:
            self.log_dropped(error)
            self._close()
        except AnswerCut as cut:
            self._leave_unsent(cut.sent)
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

    def drop_response(self, reason: str) -> None:
        self.log_dropped(reason)
        self.abort()

    async def _send(self, response: Writer) -> None:
        self.activity.sending_since = time.monotonic()
        parts = response.parts
        in_memory = sum(len(part) for part in parts if not isinstance(part, FileRange))
        if in_memory > SCRATCH_BYTES:
            self._response_memory.hold(self, in_memory)
        try:
            await self._send_parts(SIZE.pack(len(response)), parts)
        finally:
            self._response_memory.release(self)
        self.activity.touch(time.monotonic())
        self.activity.sending_since = None

    async def _send_parts(self, size: bytes, parts: list[Sized]) -> None:
        self._leave_unsent(size)
        for part in parts:
            if isinstance(part, FileRange) and part.size >= _SENDFILE_FROM:
                self._flush()
                await self._send_file(part)
                continue
            data = memoryview(part.read() if isinstance(part, FileRange) else cast(Buffer, part))
            for start in range(0, len(data), _MEMORY_STEP):
                self._leave_unsent(data[start : start + _MEMORY_STEP])
                if self._unsent_bytes >= SCRATCH_BYTES:
                    self._flush()
                    await self._server.broker.turns.take()
                    await self._writable.wait()
                    self._response_memory.note_read(self)
                    self.activity.sending_since = time.monotonic()
        if not self._requests or self._unsent_bytes >= SCRATCH_BYTES:
            self._flush()
        elif not self._is_flush_due:
            # responses to requests already received are sent together, unless the next request has to wait
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)
        await self._writable.wait()

    def _leave_unsent(self, part: Buffer) -> None:
        self._unsent.append(part)
        self._unsent_bytes += len(part)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._unsent:
            if not self._is_lost:
                self._transport.write(b"".join(self._unsent))
            self._unsent, self._unsent_bytes = [], 0

    def _close(self) -> None:
        """Close after everything has been sent; may be called again.

        A TLS transport is closed when the client has agreed. A second `close` would leave it without its protocol, and
        then `abort` does nothing and `pause_reading` raises.
        """
        if self._closed_at is None and not self._is_lost:
            self._closed_at = time.monotonic()
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
