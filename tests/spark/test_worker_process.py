"""How a Spark worker avoids delays: TCP options of its connections, found among its open files, and frozen objects."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from spark_klog.spark import worker_process
from spark_klog.spark.worker_process import prepare_worker, set_on_connections
from tests.support.servers.kafka import HOST


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def listener(stack: ExitStack) -> socket.socket:
    return stack.enter_context(socket.create_server((HOST, 0)))


def connection(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    listening = listener(stack)
    client = stack.enter_context(socket.socket())
    client.connect(listening.getsockname())
    return client, stack.enter_context(listening.accept()[0])


def no_delay(found: socket.socket) -> bool:
    return found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_both_ends_of_a_connection_answer_at_once(stack: ExitStack) -> None:
    client, server = connection(stack)
    assert not no_delay(client)
    assert not no_delay(server)
    set_on_connections(socket.TCP_NODELAY)
    assert no_delay(client)
    assert no_delay(server)
    client.sendall(b"as before")
    assert server.recv(100) == b"as before"


def test_a_socket_of_which_only_the_file_is_left(stack: ExitStack) -> None:
    client, server = connection(stack)
    with os.fdopen(os.dup(client.fileno()), "wb") as outfile:  # as pyspark.daemon does
        stack.callback(os.close, client.detach())
        set_on_connections(socket.TCP_NODELAY)
        with socket.socket(fileno=os.dup(outfile.fileno())) as seen:
            assert no_delay(seen)
        outfile.write(b"as before")
    assert server.recv(100) == b"as before"


def test_other_files_are_left_alone(stack: ExitStack, tmp_path: Path) -> None:
    listening = listener(stack)
    idle = stack.enter_context(socket.socket())
    datagrams = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    datagrams.connect(listening.getsockname())
    left, right = socket.socketpair()
    stack.enter_context(left)
    stack.enter_context(right)
    read_end, write_end = os.pipe()
    with (tmp_path / "file").open("wb") as file, os.fdopen(read_end, "rb"), os.fdopen(write_end, "wb") as pipe:
        before = set(os.listdir("/dev/fd"))
        set_on_connections(socket.TCP_NODELAY)
        assert set(os.listdir("/dev/fd")) == before
        file.write(b"1")
        pipe.write(b"1")
    assert not no_delay(listening)
    assert not no_delay(idle)
    left.sendall(b"1")
    assert right.recv(1) == b"1"


@pytest.mark.parametrize("blocking", [True, False])
def test_sockets_stay_as_blocking_as_they_are_under_a_default_timeout(stack: ExitStack, blocking: bool) -> None:
    client, _ = connection(stack)
    os.set_blocking(client.fileno(), blocking)
    stack.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
    socket.setdefaulttimeout(5)
    set_on_connections(socket.TCP_NODELAY)
    assert os.get_blocking(client.fileno()) == blocking
    assert no_delay(client)


def test_nothing_happens_where_open_files_are_not_listed(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = connection(stack)
    monkeypatch.setattr(worker_process, "_OPEN_FILES", "/nowhere")
    set_on_connections(socket.TCP_NODELAY)
    assert not no_delay(client)


def test_a_file_closed_meanwhile_is_no_error(stack: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    client, _ = connection(stack)
    closed = os.open(tmp_path, os.O_RDONLY)
    os.close(closed)
    for name in (closed, client.fileno()):
        (tmp_path / str(name)).touch()
    monkeypatch.setattr(worker_process, "_OPEN_FILES", str(tmp_path))
    set_on_connections(socket.TCP_NODELAY)
    assert no_delay(client)


def test_other_processes_are_left_alone(stack: ExitStack) -> None:
    client, _ = connection(stack)
    frozen, callbacks = gc.get_freeze_count(), list(gc.callbacks)
    prepare_worker()
    assert gc.get_freeze_count() <= frozen  # other threads may drop what is frozen
    assert gc.callbacks == callbacks
    assert not no_delay(client)


_WORKER = """
import gc, socket, sys, types
sys.modules["__main__"].__spec__ = types.SimpleNamespace(name="pyspark.daemon")
from spark_klog.spark.worker_process import prepare_worker
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
server = listener.accept()[0]
tcp, asked = socket.IPPROTO_TCP, []
prepare_worker()
assert client.getsockopt(tcp, socket.TCP_NODELAY)
first = gc.get_freeze_count()
assert first > 1000, first
kept = [[] for _ in range(1000)]
prepare_worker()
assert gc.get_freeze_count() <= first, "nothing was imported since"
import xml.dom.minidom
prepare_worker()
assert gc.get_freeze_count() >= first + 1000
assert len(gc.callbacks) == 1
for option in (0, 1):
    client.setsockopt(tcp, socket.TCP_QUICKACK, 0)
    gc.collect(option * 2)
    asked.append(client.getsockopt(tcp, socket.TCP_QUICKACK))
assert asked == [0, 1], asked
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="TCP_QUICKACK is Linux's")
def test_a_worker_is_prepared_at_its_first_task_and_after_imports() -> None:
    subprocess.run([sys.executable, "-c", _WORKER], check=True, timeout=60)
