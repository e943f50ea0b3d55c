"""HTTP/1.1 server of small pages, in an event loop or in a thread of its own: one request per connection.

A request's head has at most 8 KiB; it must arrive within 5 seconds, and its body within another 5. At most 64
connections are open at a time (or as many as the server is made for). A further one closes the connection that has kept
the server waiting for longest, for a request or for an answer to be read; if there is none, it gets status 503. So does
one for whose answer there is no room, as clients have not read others.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

from spark_klog.wire.listening import RequestRefused, bind, parse_listen

_log = logging.getLogger(__name__)
#: The host of an address that is a port alone.
LOOPBACK = "127.0.0.1"
TEXT = "text/plain; charset=utf-8"
_MAX_HEAD = 8 * 1024
_RECEIVE_SECONDS, _SEND_SECONDS, _CLOSE_SECONDS = 5.0, 30.0, 5.0
_MAX_CONNECTIONS = 64
#: Steps of the event loop after which a client that is answered is awaited again.
_STEPS = 3
_MAX_DIGITS = 15
#: The most bytes of answers that are being sent, and of one that is sent nevertheless.
_MOST_UNSENT, _SHORT = 64 << 20, 64 << 10
_MAX_TRAILERS = 32
_CHUNK_SIZE = re.compile(b"[0-9A-Fa-f]{1,8}")
T = TypeVar("T")


class Client:
    """A client's connection. It is in `awaited`, last, while the server waits for the client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, awaited: dict[Client, None]) -> None:
        self.reader, self.writer, self._awaited = reader, writer, awaited

    async def within(self, seconds: float, step: Awaitable[T]) -> T:
        """Wait for what only the client can end; `asyncio.TimeoutError` after `seconds`."""
        self._awaited[self] = None
        try:
            return await asyncio.wait_for(step, seconds)
        finally:
            self._awaited.pop(self, None)


class Request(NamedTuple):
    """A request's head: the path without its query, and headers by their names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    client: Client
    query: str = ""

    async def body(self, size: int) -> bytes:
        return await self.client.within(_RECEIVE_SECONDS, self.client.reader.readexactly(size))

    async def whole_body(self, most: int) -> bytes:
        """The body, see `Body`, if it arrives in time."""
        body = Body(self, most)
        await body.receive(most + 1)
        return bytes(body.data)


class Body:
    """A request's body as it arrives, of the size in Content-Length or in chunks (RFC 9112).

    `RequestRefused` if it has more than `most` bytes, does not arrive in time, or is malformed.
    """

    def __init__(self, request: Request, most: int) -> None:
        self.client, self._most = request.client, most
        self.data = bytearray()
        coding = request.headers.get("transfer-encoding", "").lower()
        size = request.headers.get("content-length", "0")
        if coding not in ("", "chunked"):
            raise RequestRefused(HTTPStatus.NOT_IMPLEMENTED, "only the Transfer-Encoding chunked is known")
        if coding and "content-length" in request.headers:
            raise RequestRefused(HTTPStatus.BAD_REQUEST, "there are Content-Length and Transfer-Encoding")
        if not size.isascii() or not size.isdecimal():
            raise RequestRefused(HTTPStatus.BAD_REQUEST, "Content-Length is not a number")
        if len(size) > _MAX_DIGITS or int(size) > most:
            raise _too_large(most)
        self._is_chunked = bool(coding)
        #: Bytes to come, of the body or of the chunk.
        self._left = int(size)
        self.is_whole = not coding and not self._left

    async def receive(self, size: int, seconds: float = _RECEIVE_SECONDS) -> None:
        """Wait until `data` has `size` bytes or all."""
        try:
            await self.client.within(seconds, self._receive(size))
        except asyncio.TimeoutError:
            raise RequestRefused(HTTPStatus.REQUEST_TIMEOUT, "the body did not arrive in time") from None

    async def _receive(self, size: int) -> None:
        while not self.is_whole and len(self.data) < size:
            if not self._left:
                await self._begin_chunk()
                continue
            part = await self.client.reader.readexactly(min(self._left, size - len(self.data)))
            self.data += part
            self._left -= len(part)
            if self._left:
                continue
            self.is_whole = not self._is_chunked
            if self._is_chunked and await self.client.reader.readexactly(2) != b"\r\n":
                raise RequestRefused(HTTPStatus.BAD_REQUEST, "a chunk has another size than it says")

    async def _begin_chunk(self) -> None:
        self._left = await self._chunk_size()
        if len(self.data) + self._left > self._most:
            raise _too_large(self._most)
        if self._left:
            return
        for _ in range(_MAX_TRAILERS):
            if await self._line() == b"\r\n":
                self.is_whole = True
                return
        raise RequestRefused(HTTPStatus.BAD_REQUEST, f"more than {_MAX_TRAILERS} lines are behind the last chunk")

    async def _chunk_size(self) -> int:
        text = (await self._line()).partition(b";")[0].strip()
        if not _CHUNK_SIZE.fullmatch(text):
            raise RequestRefused(HTTPStatus.BAD_REQUEST, "a chunk begins without its size")
        return int(text, 16)

    async def _line(self) -> bytes:
        try:
            return await self.client.reader.readuntil(b"\r\n")
        except asyncio.LimitOverrunError:
            raise RequestRefused(HTTPStatus.BAD_REQUEST, "a line of a chunk is too long") from None


def _too_large(most: int) -> RequestRefused:
    return RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {most:,} bytes")


class Response(NamedTuple):
    """A response; `allow` has the methods that a 405 names."""

    status: int
    content_type: str
    body: bytes
    allow: str = ""


Pages = Callable[[Request], Awaitable[Response]]


def refusal(status: int, advice: str = "", allow: str = "") -> Response:
    """A refusal in plain text."""
    return Response(status, TEXT, f"{status} {HTTPStatus(status).phrase}{advice}\n".encode(), allow)


def parse_head(head: bytes, client: Client) -> Request | None:
    """The request that a head begins, which ends with an empty line; None if it is malformed."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    named = (line.partition(":") for line in lines if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in named}
    path, _, query = words[1].partition("?")
    return Request(words[0], path, headers, client, query)


async def _head(reader: asyncio.StreamReader) -> bytes:
    """A request's head, or the first byte of another protocol: its client learns at once that this is HTTP."""
    first = await reader.readexactly(1)
    return first + await reader.readuntil(b"\r\n\r\n") if first.isalpha() else first


class HttpServer:
    """Serves what `pages` answers, to at most `most` connections at a time; those that are silent go first."""

    def __init__(self, pages: Pages, most: int = _MAX_CONNECTIONS) -> None:
        self._pages = pages
        self._most = most
        self._clients: set[Client] = set()
        #: Those that keep the server waiting, the longest first.
        self._awaited: dict[Client, None] = {}
        #: Bytes of answers that are being sent.
        self._unsent = 0

    async def listen(self, listener: socket.socket) -> asyncio.Server:
        return await asyncio.start_server(self._connected, sock=listener, limit=_MAX_HEAD)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = Client(reader, writer, self._awaited)
        self._clients.add(client)
        steps = 0
        while len(self._clients) > self._most and steps < _STEPS:
            if not self._awaited:
                steps += 1
                await asyncio.sleep(0)  # those whose bytes have just come are awaited again, or answered
                continue
            silent = next(iter(self._awaited))
            del self._awaited[silent]
            self._clients.discard(silent)
            silent.writer.transport.abort()
        size = 0
        try:
            method, response = await self._answer(client)
            if self._unsent + len(response.body) > _MOST_UNSENT and len(response.body) > _SHORT:
                response = refusal(503)
            size = len(response.body)
            self._unsent += size
            allow = f"Allow: {response.allow}\r\n" if response.allow else ""
            allow += "Retry-After: 1\r\n" if response.status == HTTPStatus.SERVICE_UNAVAILABLE else ""
            head = (
                f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}\r\n"
                f"Content-Type: {response.content_type}\r\nContent-Length: {len(response.body)}\r\n"
                f"Cache-Control: no-store\r\n{allow}Connection: close\r\n\r\n"
            )
            writer.write(head.encode("ascii") + (b"" if method == "HEAD" else response.body))
            writer.transport.set_write_buffer_limits(0)
            await client.within(_SEND_SECONDS, writer.drain())
        except (OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError) as error:
            _log.debug("an HTTP client's connection ends: %r", error)  # cancelled: the server closes
        finally:
            self._clients.discard(client)
            self._unsent -= size
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _answer(self, client: Client) -> tuple[str, Response]:
        if len(self._clients) > self._most:
            return "", refusal(503)
        try:
            head = await client.within(_RECEIVE_SECONDS, _head(client.reader))
        except asyncio.LimitOverrunError:
            return "", refusal(431)
        request = parse_head(head, client)
        return ("", refusal(400)) if request is None else (request.method, await self._pages(request))


class HttpThread:
    """Serves pages at http://ADDRESS in a thread until `close`. The thread calls `pages`.

    `address` is HOST:PORT, or a port of 127.0.0.1; port 0 picks a free one. Raises `ConfigError`, which names `option`,
    if the address is malformed or in use. At most `most` connections are served at a time.
    """

    def __init__(self, address: str, pages: Pages, option: str = "--metrics", most: int = _MAX_CONNECTIONS) -> None:
        host, port = parse_listen(address, option, LOOPBACK)
        self._listener = bind(host, port, option)
        host, port = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._pages, self._most = pages, most
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"klog-{option.lstrip('-')}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await HttpServer(self._pages, self._most).listen(self._listener)
        try:
            await self._stop.wait()
        finally:
            server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()  # their clients still wait for a page
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Stop listening. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_CLOSE_SECONDS)


class Workers:
    """Threads that make calls for an event loop: at most `count`; up to `most` calls wait for one.

    Nobody waits for them when the process ends. Python joins the threads of `concurrent.futures` at exit: a call that
    takes for ever would keep the process.
    """

    def __init__(self, name: str, count: int, most: int) -> None:
        self._name, self._count = name, count
        self._calls: queue.Queue[tuple[Future[Any], Callable[[], None]]] = queue.Queue(most)
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self._is_closed = False

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """The result of a call to come. From one thread only; `queue.Full` if too many calls wait."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                self._idle.release()
                return
            try:
                tell = partial(future.set_result, call(*arguments))
            except BaseException as error:
                tell = partial(future.set_exception, error)
            self._idle.release()  # before it is told, as the next call may come at once
            tell()

        self._calls.put_nowait((future, run))
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def _work(self) -> None:
        while not self._is_closed:
            _, run = self._calls.get()
            run()

    def close(self) -> None:
        """Begin no more calls, and cancel those that wait; those that run go on. May be called twice."""
        self._is_closed = True
        waiting = True
        while waiting:
            try:
                self._calls.get_nowait()[0].cancel()
            except queue.Empty:
                waiting = False
        for _ in self._threads:  # wake them
            self._calls.put((Future(), lambda: None))
