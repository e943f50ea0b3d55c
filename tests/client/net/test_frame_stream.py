"""FrameStream sends frames from the buffers of their parts, and reads frames as they arrive; with TLS and without."""

from __future__ import annotations

import random
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest

from spark_klog.client.net.connection import FrameStream
from spark_klog.security.tls import TlsSocket
from tests.support.servers.certificates import KEY_PASSWORD, make_certificates, trusting

_SECONDS = 60.0
_SIZE = struct.Struct(">i")


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS contexts of a client and a server."""
    made = make_certificates(tmp_path_factory.mktemp("certificates"))
    client, server = trusting(made.ca), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.sslsocket_class = TlsSocket
    server.load_cert_chain(made.server, password=KEY_PASSWORD)
    return client, server


@pytest.fixture(params=["plain", "TLS"])
def connect(
    request: pytest.FixtureRequest, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> Callable[[], tuple[socket.socket, socket.socket]]:
    """Connect with small send buffers; return the stream's end and the broker's."""

    def connected() -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ends = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        if request.param == "TLS":
            with ThreadPoolExecutor() as pool:
                server = pool.submit(contexts[1].wrap_socket, ends[1], server_side=True)
                client = contexts[0].wrap_socket(ends[0], server_hostname="127.0.0.1")
                ends = [client, server.result(_SECONDS)]
        ends[1].settimeout(_SECONDS)
        return ends[0], ends[1]

    return connected


@contextmanager
def _background(work: Callable[[], object]) -> Iterator[None]:
    with ThreadPoolExecutor() as pool:
        done = pool.submit(work)
        yield
        done.result(_SECONDS)


def _received(end: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = end.recv(size - len(data))
        assert part, "closed"
        data += part
    return bytes(data)


def _read(stream: FrameStream) -> memoryview:
    deadline = time.monotonic() + _SECONDS
    while (frame := stream.read()) is None:
        assert time.monotonic() < deadline
        select.select([stream], [], [], 0.1)
    return frame


def test_frames_of_many_parts(connect: Callable[[], tuple[socket.socket, socket.socket]]) -> None:
    """More parts than one socket call takes, empty parts, and parts larger than all buffers of the system."""
    rng = random.Random(7)
    frames = [
        [rng.randbytes(rng.choice((0, 1, 5, 300))) for _ in range(3000)],
        [bytearray(b"small")],
        [],
        [b"head", memoryview(rng.randbytes(3_000_000)), b"", bytearray(rng.randbytes(700_000)), b"tail"],
    ]
    expected = b"".join(_SIZE.pack(sum(map(len, parts))) + b"".join(parts) for parts in frames)
    mine, theirs = connect()
    stream = FrameStream(mine, 1 << 30)
    found: list[bytes] = []
    try:
        for parts in frames:
            stream.append(parts)
        stream.flush()  # only what the socket takes now, as nobody reads
        assert stream.unsent
        with _background(lambda: found.append(_received(theirs, len(expected)))):
            deadline = time.monotonic() + _SECONDS
            while stream.unsent:
                stream.flush()
                assert time.monotonic() < deadline
        assert found == [expected]
    finally:
        stream.close()
        theirs.close()


def test_nobody_reads(connect: Callable[[], tuple[socket.socket, socket.socket]]) -> None:
    mine, theirs = connect()
    stream = FrameStream(mine, 1 << 30)
    try:
        stream.append([bytes(20_000_000)])
        stream.flush()
        assert stream.unsent
        assert stream.read() is None
    finally:
        stream.close()
        theirs.close()


def test_frames_that_arrive_in_pieces(connect: Callable[[], tuple[socket.socket, socket.socket]]) -> None:
    rng = random.Random(3)
    frames = [rng.randbytes(size) for size in (4, 5, 100_000, 4, 2_000_000, 16_384, 33_000)]
    data = b"".join(_SIZE.pack(len(frame)) + frame for frame in frames)
    mine, theirs = connect()
    stream = FrameStream(mine, 1 << 30)

    def send() -> None:
        at = 0
        while at < len(data):
            end = at + rng.choice((1, 3, 20_000, 70_000))
            theirs.sendall(data[at:end])
            at = end

    try:
        with _background(send):
            for frame in frames:
                assert _read(stream) == frame
        theirs.close()
        with pytest.raises(ConnectionResetError, match="closed by the broker"):
            _read(stream)
    finally:
        stream.close()


def test_a_read_takes_all_tls_records_that_have_arrived(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    """A TLS record has at most 16 KiB; one call for each record would make TLS slow in Python."""
    mine, theirs = socket.socketpair()
    with ThreadPoolExecutor() as pool:
        server = pool.submit(contexts[1].wrap_socket, theirs, server_side=True)
        client = contexts[0].wrap_socket(mine, server_hostname="127.0.0.1")
        end = server.result(_SECONDS)
    data = bytes(range(250)) * 400
    with client, end:
        sender = threading.Thread(target=end.sendall, args=(data,))
        sender.start()
        sender.join(_SECONDS)
        assert not sender.is_alive(), "the system's buffers hold it all"
        client.setblocking(False)
        buffer = bytearray(len(data) + 10)
        assert client.recv_into(buffer) == len(data)
        assert buffer[: len(data)] == data
        with pytest.raises(BlockingIOError):
            client.recv_into(buffer)


def test_memory_is_used_as_bytes_arrive(connect: Callable[[], tuple[socket.socket, socket.socket]]) -> None:
    """A frame that claims 256 MB takes none of them, and no time, before they come."""
    mine, theirs = connect()
    stream, process = FrameStream(mine, 1 << 30), psutil.Process()
    try:
        before = process.memory_info().rss
        theirs.sendall(_SIZE.pack(256 << 20) + b"some")
        assert stream.read() is None
        assert process.memory_info().rss - before < 64 << 20
    finally:
        stream.close()
        theirs.close()
