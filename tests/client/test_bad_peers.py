"""The client's errors if no broker answers or the peer is not a broker, and for invalid settings."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from spark_klog.client import Consumer
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import list_offsets
from spark_klog.client.producer.producer import Producer
from spark_klog.errors import ConfigError, ConnectionFailed, DecodeError, KlogError, UnsupportedVersionError
from spark_klog.protocol.tables.records import LATEST
from spark_klog.wire.http import HttpThread, Request, Response, refusal
from tests.support.brokers.simulated_cluster import SimulatedCluster
from tests.support.servers.kafka import HOST, free_port

pytestmark = pytest.mark.usefixtures("driver")

#: Maps the bytes of a request's frame to those of the response; None closes the connection.
Answer = Callable[[bytes], "bytes | None"]


class FakeBroker:
    """Accept connections and answer each frame with `answer`."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self.answer: Answer = lambda _: None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                try:
                    while (frame := self._frame(connection)) and (answer := self.answer(frame)) is not None:
                        connection.sendall(answer)
                except OSError:
                    pass

    @staticmethod
    def _frame(connection: socket.socket) -> bytes:
        size = connection.recv(4, socket.MSG_WAITALL)
        return connection.recv(struct.unpack(">i", size)[0], socket.MSG_WAITALL) if len(size) == 4 else b""

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(20)


@pytest.fixture
def peer() -> Iterator[FakeBroker]:
    fake = FakeBroker()
    yield fake
    fake.close()


def _framed(request: bytes, body: bytes) -> bytes:
    """A response to `request`: size, correlation id, body."""
    return struct.pack(">i", 4 + len(body)) + request[4:8] + body


def _api_versions(*apis: tuple[int, int, int]) -> bytes:
    return struct.pack(">hi", 0, len(apis)) + b"".join(struct.pack(">hhh", *entry) for entry in apis)


_ALL = tuple((key, 0, 20) for key in (0, 1, 2, 3, 8, 9, 10, 18, 19, 20))


def _connect(address: str, connect_ms: int = 300, request_ms: int = 1000) -> None:
    settings = {
        "bootstrap.servers": address,
        "socket.connection.setup.timeout.ms": str(connect_ms),
        "request.timeout.ms": str(request_ms),
    }
    Cluster.connect(settings).close()


@pytest.mark.parametrize("milliseconds", [300, 1500])
def test_no_broker_is_told_in_time(milliseconds: int) -> None:
    addresses = [f"{HOST}:{free_port()}" for _ in range(2)]
    begin = time.monotonic()
    with pytest.raises(ConnectionFailed) as failed:
        _connect(",".join(addresses), milliseconds, 60_000)
    assert 0.9 * milliseconds / 1000 <= time.monotonic() - begin < 20  # request.timeout.ms is a minute
    for address in addresses:
        assert f"no broker answers at {address}" in str(failed.value)
    with pytest.raises(ConnectionFailed):
        Producer({"bootstrap.servers": addresses[0], "socket.connection.setup.timeout.ms": "100"})


def test_a_name_that_does_not_resolve_is_told() -> None:
    with pytest.raises(ConnectionFailed, match=r"no-such-host\.invalid:9092"):
        _connect("no-such-host.invalid:9092", 100)


_ANSWERS: dict[str, tuple[Answer, type[KlogError]]] = {
    "closes": (lambda _: None, ConnectionFailed),
    "half a size": (lambda _: b"\x00\x00", ConnectionFailed),
    "http": (lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n", DecodeError),
    "negative length": (lambda _: struct.pack(">i", -1), DecodeError),
    "wild length": (lambda _: b"\x7f\xff\xff\xff", DecodeError),
    "empty frame": (lambda _: bytes(4), DecodeError),
    "rubbish": (lambda request: _framed(request, b"\xff" * 100), DecodeError),
    "zeros left over": (lambda request: _framed(request, bytes(100)), DecodeError),
    "wrong correlation id": (lambda request: struct.pack(">ii", 10, 12345) + _api_versions(), DecodeError),
    "wild array": (lambda request: _framed(request, b"\x00\x00\x7f\xff\xff\xff"), DecodeError),
    "no api": (lambda request: _framed(request, _api_versions()), UnsupportedVersionError),
    "future versions": (lambda request: _framed(request, _api_versions((3, 90, 99))), UnsupportedVersionError),
    "rubbish as metadata": (
        lambda request: _framed(request, _api_versions(*_ALL) if request[1] == 18 else b"\x01" * 50),
        DecodeError,
    ),
    "no metadata": (
        lambda request: _framed(request, _api_versions(*_ALL)) if request[1] == 18 else None,
        ConnectionFailed,
    ),
}


@pytest.mark.parametrize("name", _ANSWERS)
def test_a_peer_that_is_no_broker_is_named(peer: FakeBroker, name: str) -> None:
    peer.answer, expected = _ANSWERS[name]
    # the client retries until its timeout only if a connection fails
    time_of_client = (300, 1000) if expected is ConnectionFailed else (60_000, 60_000)
    begin = time.monotonic()
    with pytest.raises(expected) as failed:
        _connect(peer.address, *time_of_client)
    assert peer.address in str(failed.value)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"<!DOCTYPE HTML>\n<html><head>"])
def test_an_http_server_is_named(peer: FakeBroker, answer: bytes) -> None:
    peer.answer = lambda _: answer
    with pytest.raises(DecodeError, match=f"^{peer.address} answers by HTTP, as a schema registry .* Kafka broker's"):
        _connect(peer.address, 60_000, 60_000)


def test_our_own_pages_answer_a_kafka_client_at_once() -> None:
    """The port of metrics or of a schema registry, in place of a broker's."""

    async def pages(_: Request) -> Response:
        return refusal(404)

    server = HttpThread("0", pages)
    try:
        with socket.create_connection((HOST, int(server.address.rpartition(":")[2])), 60) as connected:
            connected.sendall(struct.pack(">ihhih", 10, 18, 0, 1, -1))  # ApiVersions
            connected.settimeout(4)  # a request's head may take 5 s
            assert connected.recv(12) == b"HTTP/1.1 400"
        with pytest.raises(DecodeError, match=f"^{server.address} answers by HTTP"):
            _connect(server.address, 60_000, 60_000)
    finally:
        server.close()


def test_another_server_among_the_addresses_is_passed_over(peer: FakeBroker) -> None:
    other = FakeBroker()
    try:
        other.answer = lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n"
        brokers = struct.pack(">ii", 1, 7) + struct.pack(">h", len(HOST)) + HOST.encode() + struct.pack(">i", 9)
        metadata = brokers + struct.pack(">i", 0)
        peer.answer = lambda request: _framed(
            request, _api_versions((3, 0, 0), (18, 0, 0)) if request[1] == 18 else metadata
        )
        _connect(f"{other.address},{peer.address}", 60_000, 60_000)
    finally:
        other.close()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x7f\xff\xff\xff"])
def test_an_address_of_a_cluster_without_a_broker_is_a_broker_that_fails(
    peer: FakeBroker, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    peer.answer = lambda _: answer
    keys = [("t00000", partition) for partition in range(3)]
    with SimulatedCluster(1, 3, 3, 10) as brokers:
        brokers.tell("advertise", node=2, port=int(peer.address.rpartition(":")[2]))
        settings = {"bootstrap.servers": brokers.bootstrap_servers, "metadata.max.age.ms": "500"}
        with Cluster.connect({**settings, "request.timeout.ms": "1500"}) as cluster:
            with pytest.raises(ConnectionFailed, match=re.escape(peer.address)):
                list_offsets(cluster, dict.fromkeys(keys, LATEST))
        with Consumer({**settings, "auto.offset.reset": "earliest"}) as consumer:
            consumer.assign(keys)
            read, end = 0, time.monotonic() + 20
            while read < 20 and time.monotonic() < end:
                read += len(consumer.poll(0.5))
            assert any(
                peer.address in record.getMessage() for record in caplog.records if record.levelname == "WARNING"
            )
            brokers.tell("advertise", node=2, port=0)
            while read < 30 and time.monotonic() < end:
                read += len(consumer.poll(0.5))
            assert read == 30


def test_a_peer_that_says_nothing_is_named(peer: FakeBroker) -> None:
    peer.answer = lambda _: b""
    begin = time.monotonic()
    with pytest.raises(ConnectionFailed, match=peer.address):
        _connect(peer.address, 300, 500)
    assert 0.5 <= time.monotonic() - begin < 20


def test_an_announced_frame_that_does_not_come_costs_no_memory(peer: FakeBroker) -> None:
    import resource

    peer.answer = lambda _: struct.pack(">i", 100 * 1024 * 1024) + b"x"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConnectionFailed, match=peer.address):
        _connect(peer.address, 300, 500)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, r"bootstrap\.servers is required"),
        ({"bootstrap.servers": ""}, r"bootstrap\.servers is empty"),
        ({"bootstrap.servers": "localhost"}, "'localhost' is not HOST:PORT"),
        ({"bootstrap.servers": "a:1;b:2"}, "'a:1;b:2' is not HOST:PORT; write commas between several"),
        ({"bootstrap.servers": "a:1 b:2"}, "'a:1 b:2' is not HOST:PORT; write commas between several"),
        ({"bootstrap.servers": '"a:1,b:2"'}, "'\"a:1' is not HOST:PORT; write commas between several"),
        ({"bootstrap.servers": "a:1", "boot.servers": "b:1"}, r"unknown client setting 'boot\.servers'"),
        ({"bootstrap.servers": "a:1", "request.timeout.ms": "-1"}, r"request\.timeout\.ms=-1"),
        ({"bootstrap.servers": "a:1", "security.protocol": "TLS"}, "security.protocol=TLS: set"),
        ({"bootstrap.servers": "a:1", "sasl.mechanism": "PLAIN"}, r"sasl\.mechanism"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Cluster.connect(settings)
