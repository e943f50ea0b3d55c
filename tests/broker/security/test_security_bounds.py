"""Connections that are silent, slow or too many are dropped, and others are served meanwhile."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spark_klog.broker.net.connection import Activity, FrameMemory, ResponseMemory, reason_to_drop
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.protocol.apis import CREATE_TOPICS, FETCH, METADATA, PRODUCE
from spark_klog.protocol.codec import encode_request
from tests.support.brokers.batches import make_batch
from tests.support.brokers.raw_client import CLIENT_ID, RawClient
from tests.support.clients.tools import kcat
from tests.support.servers.broker import KlogBroker
from tests.support.servers.certificates import make_certificates, trusting
from tests.support.servers.kafka import HOST
from tests.support.servers.secure_broker import SecureBroker

NOW = 1_700_000_000_000
MIB = 1024 * 1024


def _set(**settings: int) -> list[str]:
    return [part for name, value in settings.items() for part in ("--set", f"{name.replace('_', '.')}={value}")]


def _port(client: RawClient | socket.socket) -> int:
    opened = client.socket if isinstance(client, RawClient) else client
    port: int = opened.getsockname()[1]
    return port


def _is_served(port: int) -> bool:
    with RawClient(port, 10) as other:
        return bool(other.request(METADATA, 4, {"topics": []})["brokers"])


def _round_trip(broker: KlogBroker, topic: str) -> None:
    kcat("-P", "-b", broker.bootstrap_servers, "-t", topic, stdin=b"served\n")
    assert kcat("-C", "-b", broker.bootstrap_servers, "-t", topic, "-e", "-q") == b"served\n"


@pytest.mark.test_all("long")
def test_a_thousand_silent_connections(tmp_path: Path, topic: str) -> None:
    """The silent ones, on all four listeners, are dropped in time; one that sends requests is not."""
    certificates = make_certificates(tmp_path / "certificates")
    settings = {"authentication.timeout.ms": "6000", "connections.max.idle.ms": "6000"}
    with SecureBroker(tmp_path, certificates, settings=settings) as broker, contextlib.ExitStack() as stack:
        _round_trip(broker, topic)
        before = broker.rss_bytes()
        silent = []
        for number in range(1000):
            port = list(broker.ports.values())[number % 4]
            silent.append(stack.enter_context(socket.create_connection((HOST, port), 10)))
        with RawClient(broker.port) as speaking:
            speaking.request(METADATA, 4, {"topics": []})
            _round_trip(broker, topic + "-2")
            assert broker.rss_bytes() - before < 30 * MIB
            deadline = time.monotonic() + 60
            left = silent
            while left and time.monotonic() < deadline:
                speaking.request(METADATA, 4, {"topics": []})
                still = []
                for opened in left:
                    opened.setblocking(False)
                    try:
                        assert opened.recv(1) == b""
                    except BlockingIOError:
                        still.append(opened)
                left = still
                time.sleep(0.2)
            assert left == []
            speaking.request(METADATA, 4, {"topics": []})
        tls = "no TLS handshake within 6 s"
        reasons = {"PLAINTEXT": "idle for 6000 ms", "SSL": tls, "SASL_PLAINTEXT": "not authenticated", "SASL_SSL": tls}
        for name, opened in zip(broker.ports, silent, strict=False):
            broker.wait_for_log(f"127.0.0.1:{_port(opened)}: ", reasons[name])


def test_a_tls_handshake_that_stops_half_way(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "certificates")
    with SecureBroker(tmp_path, certificates, settings={"authentication.timeout.ms": "500"}) as broker:
        context = trusting(certificates.ca)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        half = context.wrap_bio(incoming, outgoing, server_hostname=HOST)
        with pytest.raises(ssl.SSLWantReadError):
            half.do_handshake()
        hello = outgoing.read()
        for sent in (hello[:20], hello):
            with socket.create_connection((HOST, broker.ports["SSL"]), 10) as client:
                client.sendall(sent)
                while client.recv(4096):
                    pass
                broker.wait_for_log(f"127.0.0.1:{_port(client)}: ")
        assert _is_served(broker.port)


def test_idle_connections_are_dropped_but_not_those_that_wait(tmp_path: Path, topic: str) -> None:
    with KlogBroker(tmp_path, *_set(connections_max_idle_ms=700)) as broker:
        _round_trip(broker, topic)
        with RawClient(broker.port) as idle, RawClient(broker.port) as waiting:
            idle.request(METADATA, 4, {"topics": []})
            partition = {"partition": 0, "fetch_offset": 1, "partition_max_bytes": 1000}
            fetch = {"max_wait_ms": 1600, "min_bytes": 1, "topics": [{"topic": topic, "partitions": [partition]}]}
            begin = time.monotonic()
            assert waiting.request(FETCH, 4, fetch)["responses"]
            assert time.monotonic() - begin > 1.5
            assert idle.is_closed()
            broker.wait_for_log(f"127.0.0.1:{_port(idle)}: ", "idle for 700 ms")


def test_a_frame_that_never_ends(tmp_path: Path) -> None:
    """Sending a byte now and then does not help, whatever part of the frame has come."""
    frame = struct.pack(">i", 400_000) + bytes(400_000)
    with (
        KlogBroker(tmp_path, *_set(request_receive_timeout_ms=800)) as broker,
        contextlib.ExitStack() as stack,
    ):
        sent, begin = {}, time.monotonic()
        for begun in (1, 3, 4, 100, 300_000):
            client = stack.enter_context(RawClient(broker.port))
            client.socket.sendall(frame[:begun])
            sent[client] = begun
        left = dict(sent)
        while left:
            time.sleep(0.1)
            for client, position in [*left.items()]:
                try:
                    client.socket.sendall(frame[position : position + 1])
                    left[client] += 1
                except ConnectionError:
                    del left[client]
                    assert time.monotonic() - begin > 0.7
            assert time.monotonic() - begin < 60
        for client in sent:
            broker.wait_for_log(f"127.0.0.1:{_port(client)}: ", "a request was incomplete after 800 ms")
        assert _is_served(broker.port)


@pytest.mark.test_all("long")
def test_a_client_that_does_not_read(tmp_path: Path, topic: str) -> None:
    """The broker drops it, also over TLS, where it sends a file piece by piece; one that reads slowly gets all."""
    certificates = make_certificates(tmp_path / "certificates")
    with SecureBroker(tmp_path, certificates, settings={"response.send.timeout.ms": "3000"}) as broker:
        kcat("-P", "-b", broker.bootstrap_servers, "-t", topic, stdin=b"x\n")
        with RawClient(broker.port) as producer:
            for _ in range(20):
                assert producer.produce(topic, bytes(make_batch([(None, bytes(900_000))], [NOW])), 8)[0] == 0
        partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 50 * MIB}
        fetch = {"max_wait_ms": 0, "min_bytes": 1, "max_bytes": 50 * MIB}
        fetch |= {"topics": [{"topic": topic, "partitions": [partition]}]}
        frame = encode_request(FETCH, 11, 7, CLIENT_ID, fetch).to_bytes()
        context = trusting(certificates.ca)
        before = broker.rss_bytes()
        for protocol in ("PLAINTEXT", "SSL"):
            plain = socket.create_connection((HOST, broker.ports[protocol]), 20)
            with plain if protocol == "PLAINTEXT" else context.wrap_socket(plain, server_hostname=HOST) as client:
                client.sendall(struct.pack(">i", len(frame)) + frame)
                line = broker.wait_for_log(f"127.0.0.1:{_port(client)}")
                assert "did not read its response for 3000 ms" in line
        assert broker.rss_bytes() - before < 20 * MIB
        with RawClient(broker.port) as slow:
            slow.send_frame(frame)
            (size,) = struct.unpack(">i", slow.socket.recv(4, socket.MSG_WAITALL))
            begin, left = time.monotonic(), size
            while left:
                part = slow.socket.recv(min(left, MIB), socket.MSG_WAITALL)
                assert part, f"closed with {left} of {size} bytes to read"
                left -= len(part)
                time.sleep(0.2)
            assert size > 18 * 900_000
            assert time.monotonic() - begin > 3.4  # longer than the timeout


def test_a_long_response_that_is_sent_at_once(tmp_path: Path) -> None:
    """It has been read long before response.send.timeout.ms is over."""
    with KlogBroker(tmp_path, *_set(response_send_timeout_ms=800)) as broker, RawClient(broker.port) as client:
        names = [f"t{number}" for number in range(4)]
        topics = [{"name": name, "num_partitions": 1, "replication_factor": 1} for name in names]
        client.request(CREATE_TOPICS, 4, {"topics": topics, "timeout_ms": 5000})
        for name in names:
            assert client.produce(name, bytes(make_batch([(None, bytes(25_000))], [NOW])), 8)[0] == 0
        partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": MIB}
        fetch = {"max_wait_ms": 0, "min_bytes": 1, "max_bytes": MIB}
        fetch["topics"] = [{"topic": name, "partitions": [partition]} for name in names]
        for _ in range(3):
            answer = client.request(FETCH, 11, fetch)
            assert sum(len(topic["partitions"][0]["records"]) for topic in answer["responses"]) > 100_000
        end = time.monotonic() + 3
        while time.monotonic() < end:
            assert client.request(METADATA, 4, {"topics": []})["brokers"]
            time.sleep(0.3)


def test_more_connections_than_allowed(tmp_path: Path) -> None:
    with KlogBroker(tmp_path, *_set(max_connections_per_ip=5)) as broker:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(RawClient(broker.port)) for _ in range(5)]
            for client in clients:
                client.request(METADATA, 4, {"topics": []})
            refused = stack.enter_context(RawClient(broker.port))
            assert refused.is_closed()
            broker.wait_for_log(f"127.0.0.1:{_port(refused)}: ", "max.connections.per.ip=5")
        deadline = time.monotonic() + 60
        while True:  # closed connections make room
            with contextlib.suppress(ConnectionError):
                assert _is_served(broker.port)
                break
            assert time.monotonic() < deadline
    with KlogBroker(tmp_path, *_set(max_connections=3)) as broker, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(RawClient(broker.port)).request(METADATA, 4, {"topics": []})
        with RawClient(broker.port) as refused:
            assert refused.is_closed()
        broker.wait_for_log("max.connections=3")


def test_a_connection_replaces_only_one_at_both_bounds(tmp_path: Path) -> None:
    """That of the same address: the others of a full broker stay."""
    with (
        KlogBroker(tmp_path, *_set(max_connections=6, max_connections_per_ip=4)) as broker,
        contextlib.ExitStack() as stack,
    ):
        others = [RawClient(broker.port, source="127.0.0.2") for _ in range(2)]
        silent = [RawClient(broker.port) for _ in range(4)]
        for client in [*others, *silent]:
            stack.callback(client.socket.close)
        assert silent[3].request(METADATA, 4, {"topics": []})["brokers"]  # the broker has accepted all
        assert _is_served(broker.port)
        broker.wait_for_log("max.connections.per.ip=4", "silent")
        for client in [*others, *silent[1:]]:
            assert client.request(METADATA, 4, {"topics": []})["brokers"]
        assert silent[0].is_closed()


def test_large_requests_wait_for_memory(tmp_path: Path, topic: str) -> None:
    """20 connections send frames of 10 MiB, of which 24 MiB may be in memory; all of them are served."""
    with KlogBroker(tmp_path, *_set(queued_max_request_bytes=24 * MIB)) as broker, contextlib.ExitStack() as stack:
        _round_trip(broker, topic)
        before = broker.rss_bytes()
        batch = bytes(make_batch([(None, b"v")], [NOW]))
        clients = []
        frame = _padded_produce(topic, batch, 10 * MIB)
        for _ in range(20):
            client = stack.enter_context(RawClient(broker.port, 30))
            client.socket.setblocking(False)
            clients.append((client, bytearray(struct.pack(">i", len(frame)) + frame)))
        answered = 0
        deadline = time.monotonic() + 60
        most = 0
        while answered < len(clients) and time.monotonic() < deadline:
            for client, left in clients:
                with contextlib.suppress(BlockingIOError):
                    if left:
                        del left[: client.socket.send(left[:MIB])]
                    elif client.socket.fileno() >= 0 and client.socket.recv(4096):
                        answered += 1
                        client.socket.close()
            most = max(most, broker.rss_bytes())
        assert answered == len(clients)
        assert most - before < 90 * MIB  # 200 MiB are sent
        assert _is_served(broker.port)


def _asking(broker: KlogBroker, stack: contextlib.ExitStack, frame: bytes) -> RawClient:
    """A client that has sent the request, and does not read the answer."""
    client = RawClient.__new__(RawClient)
    client.socket = socket.socket()
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.socket.settimeout(30)
    client.socket.connect((HOST, broker.port))
    stack.enter_context(client).send_frame(frame)
    return client


def test_responses_of_many_small_parts_are_not_kept_in_memory(tmp_path: Path, topic: str) -> None:
    """Small ranges of files are read when the client reads; each response has 120 of them, 4 MB together."""
    count, batch = 120, bytes(make_batch([(None, bytes(32_000))], [NOW]))
    partitions = [{"partition": number, "fetch_offset": 0, "partition_max_bytes": MIB} for number in range(count)]
    fetch = {"max_wait_ms": 0, "min_bytes": 1, "max_bytes": 50 * MIB}
    fetch |= {"topics": [{"topic": topic, "partitions": partitions}]}
    frame = encode_request(FETCH, 11, 7, CLIENT_ID, fetch).to_bytes()
    with KlogBroker(tmp_path) as broker, contextlib.ExitStack() as stack:
        with RawClient(broker.port) as client:
            entry = {"name": topic, "num_partitions": count, "replication_factor": 1}
            client.request(CREATE_TOPICS, 2, {"topics": [entry], "timeout_ms": 10_000})
            data = [{"index": number, "records": batch} for number in range(count)]
            data = [{"name": topic, "partition_data": data}]
            answer = client.request(PRODUCE, 8, {"acks": -1, "timeout_ms": 10_000, "topic_data": data})
            assert {entry["error_code"] for entry in answer["responses"][0]["partition_responses"]} == {0}
            client.send_frame(frame)
            whole = client.receive_frame()
        before = broker.rss_bytes()
        clients = [_asking(broker, stack, frame) for _ in range(60)]
        for client in clients:
            assert client.receive_exactly(4) == struct.pack(">i", len(whole))
        assert broker.rss_bytes() - before < 40 * MIB  # 230 MB are asked for
        assert len(clients[-1].receive_exactly(MIB)) == MIB
        assert _is_served(broker.port)


def test_the_client_that_has_read_nothing_for_longest_is_dropped() -> None:
    """Not the one whose response began first: a slow one may be reading all the time."""
    dropped: list[str] = []

    class Client:
        def __init__(self, name: str) -> None:
            self.name = name

        def drop(self, reason: str) -> None:
            dropped.append(self.name)

    memory = ResponseMemory(30)
    slow, silent, late, large = Client("slow"), Client("silent"), Client("late"), Client("large")
    for client in (slow, silent):
        memory.hold(client, 10)
    memory.note_read(slow)
    memory.note_read(late)  # holds nothing
    memory.hold(late, 15)
    assert (dropped, memory.used) == (["silent"], 25)
    memory.hold(large, 40)
    assert (dropped, memory.used) == (["silent", "slow", "late"], 40)
    for client in (slow, silent, late, large):
        memory.release(client)
    assert memory.used == 0


def test_clients_that_leave_large_responses_unread_are_dropped(tmp_path: Path, topic: str) -> None:
    """Beyond queued.max.response.bytes the longest unread response is given up: others need not wait for its client."""
    settings = _set(queued_max_response_bytes=20 * MIB)
    with KlogBroker(tmp_path, *settings) as broker, contextlib.ExitStack() as stack:
        _round_trip(broker, topic)
        with RawClient(broker.port) as producer:
            for _ in range(11):
                assert producer.produce(topic, bytes(make_batch([(None, bytes(900_000))], [NOW])), 8)[0] == 0
        partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 50 * MIB}
        fetch = {"max_wait_ms": 0, "min_bytes": 1, "topics": [{"topic": topic, "partitions": [partition]}]}
        frame = encode_request(FETCH, 2, 7, CLIENT_ID, fetch).to_bytes()  # an old version: converted in memory
        before = broker.rss_bytes()
        clients = []
        for _ in range(20):
            clients.append(_asking(broker, stack, frame))
            (size,) = struct.unpack(">i", clients[-1].receive_exactly(4))
            assert size > 9 * MIB
        broker.wait_for_log(f"127.0.0.1:{_port(clients[0])}: ", "responses that wait to be sent")
        assert broker.rss_bytes() - before < 120 * MIB  # 190 MiB are asked for
        with pytest.raises(ConnectionError):
            clients[0].receive_exactly(size)
        assert len(clients[-1].receive_exactly(size)) == size  # the newest is not dropped
        assert _is_served(broker.port)


def _padded_produce(topic: str, batch: bytes, size: int) -> bytes:
    """A request padded with bytes that nobody reads."""
    data = [{"name": topic, "partition_data": [{"index": 0, "records": batch}]}]
    message = {"acks": -1, "timeout_ms": 1000, "topic_data": data}
    return encode_request(PRODUCE, 8, 7, CLIENT_ID, message).to_bytes().ljust(size, b"\0")


class _Waiter:
    def __init__(self, log: list[str], name: str) -> None:
        self.memory_is_there: Callable[[], None] = lambda: log.append(name)


def test_frame_memory() -> None:
    log: list[str] = []
    one, two, three = (_Waiter(log, name) for name in ("one", "two", "three"))
    memory = FrameMemory(100)
    memory.take(60)
    assert memory.ask(one, 40)
    assert memory.ask(one, 50)  # the first one may go over the limit
    assert not memory.ask(two, 1)
    assert not memory.ask(three, 1)
    assert (memory.used, log) == (150, [])
    memory.leave(one)
    assert log == ["two"]
    assert memory.ask(two, 1)
    memory.give_back(90)
    assert log == ["two", "three"]
    memory.give_back(61)
    assert memory.used == 0


def test_who_is_dropped() -> None:
    """Times in seconds, limits in ms; a client is not dropped while the broker itself is the cause."""
    config = BrokerConfig("h", 1, Path("unused"), receive_timeout_ms=2000, send_timeout_ms=3000, max_idle_ms=9000)

    def reason(activity: Activity, now: float, *, is_authenticated: bool = True, is_busy: bool = False) -> str | None:
        return reason_to_drop(activity, config, now, is_authenticated=is_authenticated, is_busy=is_busy)

    half = Activity(0, 0, frame_since=1)
    assert reason(half, 2.9) is None
    assert "incomplete" in (reason(half, 3.1) or "")
    assert reason(Activity(0, 0, frame_since=1, is_paused=True), 5) is None
    assert reason(Activity(0, 0, frame_since=1, sending_since=3), 5) is None
    assert "did not read" in (reason(Activity(0, 0, sending_since=3), 6.1, is_busy=True) or "")
    half.touch(3)
    assert reason(half, 4.9) is None
    assert reason(Activity(0, 0), 9.1, is_busy=True) is None
    assert "idle" in (reason(Activity(0, 0), 9.1) or "")
    assert reason(Activity(0, 29), 30.1) is None
    assert "not authenticated" in (reason(Activity(0, 29), 30.1, is_authenticated=False) or "")
