"""One client's connection: frames in, responses out in the order of the requests.

Received bytes go straight into the frame they belong to; a frame's buffer grows with the bytes that have arrived, so
that a wild length allocates nothing. File ranges in a response leave by sendfile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sized
from typing import IO, TYPE_CHECKING, cast

from spark_klog.errors import DecodeError
from spark_klog.log.segment import FileRange
from spark_klog.wire.frames import SIZE, frame_size
from spark_klog.wire.primitives import Writer

if TYPE_CHECKING:
    from spark_klog.broker.server import Server

_log = logging.getLogger(__name__)
_SCRATCH_BYTES = 64 * 1024
_MAX_QUEUED = 16
#: Below this a copy costs less than setting up sendfile.
_SENDFILE_FROM = 32 * 1024


class AnswerCut(ConnectionError):
    """The connection is to be closed after these bytes, which need not be an answer."""

    def __init__(self, sent: bytes) -> None:
        super().__init__(f"closed after {len(sent)} bytes of an answer")
        self.sent = sent


class Connection(asyncio.BufferedProtocol):
    """State of one connection; see the module."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._filled = 0
        self._frame: bytearray | None = None
        self._frame_size = 0
        self._frame_filled = 0
        self._requests: deque[bytearray] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.peer = "?"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        host, port, *_ = transport.get_extra_info("peername") or ("?", 0)
        self.peer = f"{host}:{port}"
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._writable.set()
        if self._worker is not None:
            self._worker.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def close(self) -> None:
        self._transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._frame is not None:
            return memoryview(self._frame)[self._frame_filled :]
        return memoryview(self._scratch)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._frame is not None:
            self._frame_filled += nbytes
            self._continue_frame()
            return
        self._filled += nbytes
        try:
            self._split()
        except DecodeError as error:
            _log.warning("%s: %s; closing the connection", self.peer, error)
            self._transport.abort()

    def _continue_frame(self) -> None:
        assert self._frame is not None
        if self._frame_filled == self._frame_size:
            frame, self._frame = self._frame, None
            self._deliver(frame)
        elif self._frame_filled == len(self._frame):
            grown = bytearray(min(self._frame_size, 2 * len(self._frame)))
            grown[: self._frame_filled] = self._frame
            self._frame = grown

    def _split(self) -> None:
        """Take all whole frames out of the scratch buffer; a frame that is not whole gets a buffer of its own."""
        view = memoryview(self._scratch)
        position = 0
        while self._filled - position >= SIZE.size:
            size = frame_size(view[position : position + SIZE.size], self._server.broker.config.request_max_bytes)
            position += SIZE.size
            there = min(size, self._filled - position)
            frame = bytearray(view[position : position + there])
            position += there
            if there == size:
                self._deliver(frame)
                continue
            self._frame = bytearray(min(size, max(_SCRATCH_BYTES, 2 * there)))
            self._frame[:there] = frame
            self._frame_size, self._frame_filled = size, there
            break
        rest = bytes(view[position : self._filled])
        self._scratch[: len(rest)] = rest
        self._filled = len(rest)

    def _deliver(self, frame: bytearray) -> None:
        self._requests.append(frame)
        if len(self._requests) >= _MAX_QUEUED:
            self._transport.pause_reading()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        try:
            while self._requests:
                frame = self._requests.popleft()
                if not self._transport.is_reading() and len(self._requests) < _MAX_QUEUED:
                    self._transport.resume_reading()
                response = await self._server.answer(frame, self.peer)
                if response is not None:
                    await self._send(response)
        except DecodeError as error:
            _log.warning("%s: %s; closing the connection", self.peer, error)
            self._transport.close()
        except AnswerCut as cut:
            self._transport.write(cut.sent)
            self._transport.close()
        except ConnectionError as error:
            _log.debug("%s: %s", self.peer, error)
            self._transport.abort()
        except asyncio.CancelledError:
            raise
        except Exception:
            _log.exception("%s: a request failed; closing the connection", self.peer)
            self._transport.close()

    async def _send(self, response: Writer) -> None:
        pending: list[Sized] = [SIZE.pack(len(response))]
        for part in response.parts:
            if isinstance(part, FileRange) and part.size >= _SENDFILE_FROM:
                self._write(pending)
                pending = []
                await self._send_file(part)
            else:
                pending.append(part.read() if isinstance(part, FileRange) else part)
        self._write(pending)
        if not self._writable.is_set():
            await self._writable.wait()

    def _write(self, parts: list[Sized]) -> None:
        if parts:
            self._transport.write(b"".join(cast("list[bytes]", parts)))

    async def _send_file(self, part: FileRange) -> None:
        loop = asyncio.get_running_loop()
        sent = await loop.sendfile(self._transport, cast("IO[bytes]", part.file), part.position, part.size)
        if sent != part.size:
            raise ConnectionError(f"{sent} of {part.size} bytes sent from a log file that became shorter")
