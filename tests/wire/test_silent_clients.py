"""Silent and slow clients at every server: each server answers others meanwhile, and ends the silent ones in time."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as AppRequest
from starlette.responses import Response as AppResponse
from starlette.routing import Route

from spark_klog.broker.faults.control import serve_control
from spark_klog.broker.faults.script import FaultScript
from spark_klog.embedded import EmbeddedCluster
from spark_klog.protocol.apis import METADATA
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.ui import guard
from spark_klog.wire import http as wire_http
from spark_klog.wire.http import TEXT, HttpThread, Request, Response
from tests.support.brokers.raw_client import RawClient
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import HOST, free_port
from tests.support.waiting import wait_until
from tests.ui.support import serving

#: More than sockets keep of an answer that is not read.
_LARGE = bytes(8 << 20)
_SECONDS = 30


class Slow:
    """A client that begins a request, and goes on with the same few bytes for ever. It never reads."""

    def __init__(self, port: int, begin: bytes, more: bytes = b"") -> None:
        self.more, self.socket = more, socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(_SECONDS)
        self.socket.connect((HOST, port))
        self.socket.setblocking(False)
        self.is_open = True
        self._send(begin)

    def trickle(self) -> None:
        self._send(self.more)

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                if data:
                    self.socket.send(data)
            except ConnectionError:
                self.is_open = False

    def is_ended(self) -> bool:
        """Whether the server has closed the connection: sending says so, since nothing is read."""
        self._send(self.more or b" ")
        return not self.is_open


def http_kinds(path: str, headers: str = "", post: str = "") -> list[tuple[bytes, bytes]]:
    """What slow clients of HTTP begin with, and what they go on with."""
    host = "Host: 127.0.0.1\r\n"
    posted = f"POST {post or path} HTTP/1.1\r\n{host}{headers}Content-Type: application/json\r\n"
    return [
        (b"", b""),
        (b"", b"\r\n"),
        (f"GET {path}".encode(), b"x"),
        (f"GET {path} HTTP/1.1\r\n{host}".encode(), b"A: b\r\n"),
        (f"{posted}Content-Length: 100000\r\n\r\n".encode(), b" "),
        (f"{posted}Transfer-Encoding: chunked\r\n\r\n".encode(), b"1\r\n \r\n"),
        (100 * f"GET {path} HTTP/1.1\r\n{host}{headers}\r\n".encode(), b""),
    ]


def answered(port: int, path: str, headers: dict[str, str] | None = None) -> None:
    """Assert that a client with its only try gets an answer."""
    connection = http.client.HTTPConnection(HOST, port, timeout=_SECONDS)
    try:
        connection.request("GET", path, headers=headers or {})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read()
    finally:
        connection.close()


def beset(port: int, kinds: Sequence[tuple[bytes, bytes]], count: int, ask: Callable[[], None]) -> None:
    """Ask again and again while there are `count` slow clients."""
    with ExitStack() as stack:
        clients = []
        for number in range(count):
            client = Slow(port, *kinds[number % len(kinds)])
            stack.callback(client.socket.close)
            clients.append(client)
        for _ in range(3):
            ask()
            for client in clients:
                client.trickle()
        for begin, more in kinds:  # one kind alone
            for _ in range(count // len(kinds)):
                client = Slow(port, begin, more)
                stack.callback(client.socket.close)
            ask()


async def _large(request: Request) -> Response:
    body = await request.whole_body(1 << 20) if request.method == "POST" else b"small"
    return Response(200, TEXT, _LARGE if request.path == "/large" else body)


@contextmanager
def _application() -> Iterator[int]:
    """The port of an application behind the connections of `klog ui`."""

    async def page(request: AppRequest) -> AppResponse:
        body = await request.body() if request.method == "POST" else b"small"
        return AppResponse(_LARGE if request.url.path == "/large" else body)

    app = Starlette(routes=[Route(path, page, methods=["GET", "POST"]) for path in ("/large", "/small")])
    with socket.create_server((HOST, 0)) as listener:
        config = uvicorn.Config(app, http=guard.GuardedConnection, log_config=None, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(_SECONDS)


@contextmanager
def _thread(**arguments: Any) -> Iterator[int]:
    """The port of the pages of metrics of `klog groups lag`, `klog load`, `klog mirror` and the listener."""
    server = HttpThread("0", _large, **arguments)
    try:
        yield int(server.address.rpartition(":")[2])
    finally:
        server.close()


def test_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the small server, and at the page's."""
    monkeypatch.setattr(guard, "_MAX_CONNECTIONS", 16)
    for server in (_thread(most=16), _application()):
        with server as port:
            beset(port, http_kinds("/large"), 140, partial(answered, port, "/small"))


def test_slow_clients_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there is room for them, and though bytes arrive."""
    monkeypatch.setattr(wire_http, "_RECEIVE_SECONDS", 0.4)
    monkeypatch.setattr(wire_http, "_SEND_SECONDS", 0.4)
    for name in ("_REQUEST_SECONDS", "_READ_SECONDS", "_LOOK_SECONDS"):
        monkeypatch.setattr(guard, name, 0.2)
    for server in (_thread(), _application()):
        with server as port, ExitStack() as stack:
            clients = [Slow(port, *kind) for kind in http_kinds("/large")]
            for client in clients:
                stack.callback(client.socket.close)

            def left(clients: Sequence[Slow] = clients) -> list[Slow]:
                time.sleep(0.05)
                return [client for client in clients if not client.is_ended()]

            wait_until(lambda left=left: not left(), "a slow client keeps its connection", _SECONDS)


def test_who_reads_slowly_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that takes several times as long as the bound of silence, at the page."""
    monkeypatch.setattr(guard, "_READ_SECONDS", 0.5)
    monkeypatch.setattr(guard, "_LOOK_SECONDS", 0.05)
    with _application() as port, socket.create_connection((HOST, port), _SECONDS) as client:
        client.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        size = 0
        while data := client.recv(1 << 20, socket.MSG_WAITALL):
            size += len(data)
            time.sleep(0.15)
        assert size > len(_LARGE)


def test_the_broker_and_its_metrics(tmp_path: Path) -> None:
    metrics = free_port()
    limits = ("--set", "max.connections=100", "--set", "max.connections.per.ip=60")
    with KlogBroker(tmp_path, "--metrics", f"{HOST}:{metrics}", *limits) as broker, RawClient(broker.port) as old:

        def ask() -> None:
            with RawClient(broker.port, _SECONDS) as client:
                assert client.request(METADATA, 4, {"topics": []})["brokers"]
            assert old.request(METADATA, 4, {"topics": []})["brokers"]  # who has spoken stays

        ask()
        frame = [(b"", b""), (b"\0\0", b""), (b"\0\0\x10\0\0\x03\0\x04", b"x"), (b"\0\0\0", b"\x08")]
        beset(broker.port, frame, 150, ask)
        broker.wait_for_log("max.connections.per.ip=60", "silent")
        beset(metrics, http_kinds("/metrics"), 130, partial(answered, metrics, "/metrics"))


def test_a_broker_without_free_descriptors(tmp_path: Path) -> None:
    """Silent clients leave it descriptors for its logs."""
    import resource

    bounds = resource.getrlimit(resource.RLIMIT_NOFILE)
    broker = KlogBroker(tmp_path)
    with ExitStack() as stack:
        broker.start()
        stack.callback(broker.stop)
        resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, (120, 120))
        for _ in range(150):
            stack.callback(socket.create_connection((HOST, broker.port), _SECONDS).close)
        with RawClient(broker.port, _SECONDS) as client:
            assert client.request(METADATA, 4, {"topics": []})["brokers"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == bounds


def test_the_registry(cluster: EmbeddedCluster) -> None:
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0") as registry:
        port = int(registry.url.rpartition(":")[2])
        kinds = http_kinds("/subjects", post="/subjects/s/versions")
        beset(port, kinds, 200, partial(answered, port, "/subjects"))


def test_the_control_of_faults() -> None:
    server = serve_control(FaultScript(), "0")
    try:
        port = int(server.address.rpartition(":")[2])
        beset(port, http_kinds("/faults"), 130, partial(answered, port, "/faults"))
    finally:
        server.close()


def test_the_page(cluster: EmbeddedCluster) -> None:
    """The command's own process, where most have no token; it has nothing to log of them."""
    with serving("-b", cluster.bootstrap_servers, "--allow-changes") as page:
        port = int(page.host.rpartition(":")[2])
        headers = f"Authorization: Bearer {page.token}\r\nX-Klog-Token: {page.get('session')['token']}\r\n"
        kinds = [*http_kinds("/"), *http_kinds("/static/style.css", headers, "/api/produce")]
        beset(port, kinds, 210, partial(answered, port, "/", page.authorization))


def test_answers_that_nobody_reads_have_a_bound_in_all() -> None:
    """A client of a large one gets 503 then; short ones are given to everybody."""

    async def pages(request: Request) -> Response:
        return Response(200, TEXT, _LARGE if request.path == "/large" else b"short")

    def status(path: str) -> int:
        connection = http.client.HTTPConnection(server.address, timeout=_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().status

    server = HttpThread("0", pages)
    port = int(server.address.rpartition(":")[2])
    slow: list[Slow] = []
    try:
        while len(slow) < 20 and status("/large") == 200:
            slow.append(Slow(port, b"GET /large HTTP/1.1\r\n\r\n"))
            time.sleep(0.02)
        wait_until(lambda: status("/large") == 503)
        assert status("/short") == 200
        for client in slow:
            client.socket.close()
        wait_until(lambda: status("/large") == 200)
    finally:
        server.close()
        for client in slow:
            client.socket.close()
