"""HTTP/1.1 listener for Prometheus: GET and HEAD of /metrics, one request per connection, in an event loop.

A request has at most 8 KiB and must arrive within 5 seconds; at most 16 connections are served at a time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterable

from spark_klog.metrics.exposition import CONTENT_TYPE
from spark_klog.wire.listening import bind, parse_listen

_log = logging.getLogger(__name__)
_MAX_HEAD = 8 * 1024
_HEAD_SECONDS, _SEND_SECONDS = 5.0, 30.0
_MAX_CONNECTIONS = 16
#: Lines of the page made before other work of the event loop gets its turn.
_LINES_AT_ONCE = 500
_HEAD_END = b"\r\n\r\n"
_PLAIN = "text/plain; charset=utf-8"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def status_of(head: bytes) -> tuple[int, bool]:
    """(status, whether to send the body) for the head of a request, up to the empty line."""
    words = head.partition(b"\r\n")[0].split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return 400, True
    method, target, _ = words
    if method not in (b"GET", b"HEAD"):
        return 405, True
    return 200 if target.partition(b"?")[0] == b"/metrics" else 404, method == b"GET"


def response_head(status: int, content_type: str, size: int) -> bytes:
    """The head of a response with a body of `size` bytes."""
    allow = "Allow: GET, HEAD\r\n" if status == 405 else ""
    return (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\nContent-Length: {size}\r\n"
        f"{allow}Connection: close\r\n\r\n"
    ).encode("ascii")


class MetricsServer:
    """Serves the lines that `page` returns."""

    def __init__(self, page: Callable[[], Iterable[str]]) -> None:
        self._page = page
        self._open = 0

    async def listen(self, listener: socket.socket) -> asyncio.Server:
        return await asyncio.start_server(self._connected, sock=listener, limit=_MAX_HEAD)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            await self._serve(reader, writer)
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            _log.debug("a client disconnected while reading metrics: %r", error)
        finally:
            self._open -= 1
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._open > _MAX_CONNECTIONS:
            status, has_body = 503, True
        else:
            try:
                status, has_body = status_of(await asyncio.wait_for(reader.readuntil(_HEAD_END), _HEAD_SECONDS))
            except asyncio.LimitOverrunError:
                status, has_body = 431, True
        if status == 200:
            body, content_type = await self._body(), CONTENT_TYPE
        else:
            body, content_type = f"{status} {_REASONS[status]}; the metrics are at /metrics\n".encode(), _PLAIN
        writer.write(response_head(status, content_type, len(body)))
        if has_body:
            writer.write(body)
        writer.transport.set_write_buffer_limits(0)
        await asyncio.wait_for(writer.drain(), _SEND_SECONDS)

    async def _body(self) -> bytes:
        parts = []
        for number, text in enumerate(self._page(), 1):
            parts.append(text)
            if number % _LINES_AT_ONCE == 0:
                await asyncio.sleep(0)
        return "".join(parts).encode()


#: The host of an address that is a port alone.
LOOPBACK = "127.0.0.1"
_CLOSE_SECONDS = 5.0


class MetricsThread:
    """Serves http://ADDRESS/metrics until `close`.

    `address` is HOST:PORT, or a port of 127.0.0.1; port 0 picks a free one. The thread calls `page` for each request,
    which returns the lines. Raises `ConfigError`, which names `option`, if the address is malformed or in use.
    """

    def __init__(self, address: str, page: Callable[[], Iterable[str]], option: str = "--metrics") -> None:
        host, port = parse_listen(address, option, LOOPBACK)
        self._listener = bind(host, port, option)
        found = self._listener.getsockname()
        self.address = f"[{found[0]}]:{found[1]}" if ":" in found[0] else f"{found[0]}:{found[1]}"
        self._page = page
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="klog-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await MetricsServer(self._page).listen(self._listener)
        try:
            await self._stop.wait()
        finally:
            server.close()

    def close(self) -> None:
        """Stop listening. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_CLOSE_SECONDS)
