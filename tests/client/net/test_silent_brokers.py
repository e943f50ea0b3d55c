"""A broker that drops packets, or stops within a request or a response, does not delay requests to other brokers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial

import pytest

from spark_klog.client import Admin
from spark_klog.client.cluster import Cluster
from spark_klog.client.net.dial import Dial
from spark_klog.client.offsets import offsets_of_led
from spark_klog.client.producer.producer import Producer
from spark_klog.client.settings import client_config
from spark_klog.errors import ConnectionFailed, RequestTimedOut
from spark_klog.protocol.tables.records import LATEST
from tests.support.brokers.faults import late, silent
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.servers.kafka import HOST
from tests.support.waiting import wait_until

DEAD, SOUND = 0, 1
#: Far longer than a test takes, so that a wait for the silent broker would show.
LONG = {"request.timeout.ms": "100000", "socket.connection.setup.timeout.ms": "100000", "delivery.timeout.ms": "100000"}
QUICK = {"retry.backoff.ms": "10", "retry.backoff.max.ms": "50"}


@contextmanager
def _vanishing(real: int) -> Iterator[int]:
    """A port that answers no SYN, as Linux does with a full backlog."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((HOST, 0), backlog=0))
        address = listener.getsockname()
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        yield address[1]


@contextmanager
def _mute(real: int) -> Iterator[int]:
    """A port that accepts connections and sends nothing."""
    with socket.create_server((HOST, 0), backlog=100) as listener:
        yield listener.getsockname()[1]


@contextmanager
def _proxy(real: int, *, takes_all: bool) -> Iterator[int]:
    """A port that answers ApiVersions, then reads nothing, or reads on and sends six bytes of the next response."""
    is_over = threading.Event()
    threads: list[threading.Thread] = []

    def serve(client: socket.socket) -> None:
        with client, socket.create_connection((HOST, real)) as server:
            server.sendall(client.recv(65536))
            client.sendall(server.recv(65536))
            for end in (client, server):
                end.settimeout(0.05)
            answer = b""
            while takes_all and not is_over.is_set() and len(answer) < 6:
                try:
                    server.sendall(client.recv(65536))
                except TimeoutError:
                    pass
                try:
                    answer = server.recv(65536)[:6]
                    client.sendall(answer)
                except TimeoutError:
                    pass
            is_over.wait(100)

    def accept(listener: socket.socket) -> None:
        while not is_over.is_set():
            try:
                client, _ = listener.accept()
            except OSError:
                continue
            threads.append(threading.Thread(target=serve, args=(client,)))
            threads[-1].start()

    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(0.05)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        thread = threading.Thread(target=accept, args=(listener,))
        thread.start()
        yield listener.getsockname()[1]
        is_over.set()
        for one in (thread, *threads):
            one.join(30)


_deaf, _half_silent = partial(_proxy, takes_all=False), partial(_proxy, takes_all=True)
Port = Callable[[int], AbstractContextManager[int]]
ALL_PORTS = pytest.mark.parametrize(
    "port", [_vanishing, _mute, _deaf, _half_silent], ids=["vanishing", "mute", "deaf", "half silent"]
)


@pytest.fixture
def brokers() -> Iterator[ScriptedCluster]:
    with ScriptedCluster({"t": 2}, nodes=2) as running:
        yield running


def _settings(brokers: ScriptedCluster, **more: str) -> dict[str, str]:
    own = {name.replace("_", "."): value for name, value in more.items()}
    return {"bootstrap.servers": f"{HOST}:{brokers.ports[SOUND]}", **LONG, **QUICK, **own}


VALUES = [b"%d" % number + bytes(3_000_000) for number in range(3)]


def _write(cluster: Cluster, failures: list[BaseException]) -> None:
    """Write three batches to each broker, in turns, too large for the socket's buffers."""
    try:
        with Producer.of_cluster(cluster) as producer:
            for value in VALUES:
                for partition in (DEAD, SOUND):
                    producer.send("t", value, partition=partition)
    except BaseException as error:
        failures.append(error)


@ALL_PORTS
@pytest.mark.parametrize("acks", ["all", "0"])
def test_a_producer_goes_on_with_the_others(brokers: ScriptedCluster, port: Port, acks: str) -> None:
    settings = _settings(brokers, acks=acks, max_request_size="4000000")
    failures: list[BaseException] = []
    with Cluster.connect(settings) as cluster:
        with port(brokers.ports[DEAD]) as number:
            real, brokers.ports[DEAD] = brokers.ports[DEAD], number
            thread = threading.Thread(target=_write, args=(cluster, failures))
            thread.start()
            wait_until(lambda: brokers.values("t", SOUND) == VALUES, seconds=30)
            assert thread.is_alive() or acks == "0"
            brokers.ports[DEAD] = real
        thread.join(60)
        assert not thread.is_alive()
    assert not failures
    if acks == "all":
        assert brokers.values("t", DEAD) == VALUES


@ALL_PORTS
def test_the_answers_of_others_are_taken(brokers: ScriptedCluster, port: Port) -> None:
    brokers.append("t", SOUND, [b"v"] * 7)
    with port(brokers.ports[DEAD]) as number:
        brokers.ports[DEAD] = number
        with Cluster.connect(_settings(brokers, request_timeout_ms="2000")) as cluster:
            cluster.metadata(["t"])
            found, failed = offsets_of_led(cluster, {("t", DEAD): LATEST, ("t", SOUND): LATEST})
    assert found == {("t", SOUND): 7}
    assert isinstance(failed["t", DEAD], RequestTimedOut | ConnectionFailed)


def test_a_broker_that_did_not_answer_is_asked_last(brokers: ScriptedCluster) -> None:
    with Cluster.connect(_settings(brokers, bootstrap_servers=brokers.bootstrap_servers)) as cluster:
        assert brokers.asked[-1].node == 0
        cluster.suspect(0)
        cluster.metadata(["t"])
        assert brokers.asked[-1].node == 1


def test_if_all_are_silent_the_one_asked_longest_ago_is_asked_first() -> None:
    """Short calls ask one or two of them each: without a turn for all, a broker that is back would not be asked."""
    with ScriptedCluster({"t": 1}, nodes=3) as brokers:
        with Cluster.connect({"bootstrap.servers": brokers.bootstrap_servers, **QUICK}) as cluster:
            brokers.always("Metadata", silent())
            asked = len(brokers.asked)
            for _ in range(6):
                with cluster.within(120), suppress(ConnectionFailed):
                    cluster.metadata(["t"])
        nodes = [each.node for each in brokers.asked[asked:] if each.name == "Metadata"]
    assert min(nodes.count(node) for node in range(3)) >= max(2, len(nodes) // 6)


def test_an_address_that_vanishes_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with _vanishing(0) as void, socket.create_server((HOST, 0)) as there:
        ports = void, there.getsockname()[1]
        addresses = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (HOST, port)) for port in ports]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
        for seconds in (1, 4, 16):  # half of the first deadline may be too short for a stalled machine
            with suppress(ConnectionFailed):
                with Dial("two-addresses", 1, time.monotonic() + seconds).finish() as connected:
                    assert connected.getpeername() == there.getsockname()
                return
    pytest.fail("the silent address took all the time")


def test_the_next_address_is_tried_though_the_steps_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a busy event loop: the time of the silent address, and of the call, is over at the next step."""
    with _vanishing(0) as void, ScriptedCluster({"t": 1}) as brokers:
        addresses = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (HOST, port)) for port in (void, *brokers.ports)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
        settings = {"bootstrap.servers": "two-addresses:1", "socket.connection.setup.timeout.ms": "200"}
        with Cluster(client_config(settings)) as cluster, cluster.within(200):
            steps = cluster.asking_metadata(["t"])
            with suppress(StopIteration):
                while True:
                    next(steps)
                    time.sleep(0.3)
            assert cluster.nodes == [0]


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers share one look-up and stop waiting at their deadlines; a later call uses its answer."""
    answers, asked, look_up = threading.Event(), list[str](), socket.getaddrinfo

    def silent(host: str, port: int, **more: int) -> object:
        asked.append(host)
        assert answers.wait(60)
        return look_up(HOST, port, **more)

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    with socket.create_server((HOST, 0)) as there:
        port = there.getsockname()[1]
        begin = time.monotonic()
        for _ in range(3):
            with pytest.raises(ConnectionFailed, match=rf"silent\.test:{port}: no name server has answered in time"):
                Dial("silent.test", port, time.monotonic() + 0.1).finish()
        assert time.monotonic() - begin < 30
        assert asked == ["silent.test"]
        answers.set()
        with Dial("silent.test", port, time.monotonic() + 60).finish() as connected:
            assert connected.getpeername() == there.getsockname()


def test_records_without_an_answer_are_sent_again() -> None:
    """The broker keeps the connection; it has the records, and drops the second batch."""
    with ScriptedCluster({"t": 1}) as brokers:
        brokers.on("Produce", late(1000))
        times = {"request.timeout.ms": "2000", "delivery.timeout.ms": "60000", "linger.ms": "0"}
        with Producer({"bootstrap.servers": brokers.bootstrap_servers, **QUICK, **times}) as producer:
            producer.send("t", b"v")
        assert brokers.values("t", 0) == [b"v"]
        assert brokers.count("Produce") >= 2  # more if an answer takes longer than request.timeout.ms


def test_the_error_of_a_silent_broker_names_the_setting_that_ended_the_call() -> None:
    with _mute(0) as port:
        settings = {"bootstrap.servers": f"{HOST}:{port}", "request.timeout.ms": "900"}
        with pytest.raises(ConnectionFailed, match=r"\(request\.timeout\.ms\)$"):
            Cluster.connect(settings | {"socket.connection.setup.timeout.ms": "300"})


def test_an_admin_with_the_callers_cluster_keeps_to_the_callers_time() -> None:
    """A task that has failed aborts its transaction so, within some seconds."""
    with _mute(0) as port, Cluster(client_config({"bootstrap.servers": f"{HOST}:{port}", **LONG})) as cluster:
        begin = time.monotonic()
        with cluster.within(500, "the caller's time"), pytest.raises(ConnectionFailed, match="the caller's time"):
            Admin(cluster).list_topics()
        assert time.monotonic() - begin < 50
