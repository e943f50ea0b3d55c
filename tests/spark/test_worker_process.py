"""TCP_NODELAY of a process's connections over loopback, found among its open files."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from spark_klog.spark import worker_process
from spark_klog.spark.worker_process import answer_at_once
from tests.support.kafka import HOST


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
    answer_at_once()
    assert no_delay(client)
    assert no_delay(server)
    client.sendall(b"as before")
    assert server.recv(100) == b"as before"


def test_a_socket_of_which_only_the_file_is_left(stack: ExitStack) -> None:
    client, server = connection(stack)
    with os.fdopen(os.dup(client.fileno()), "wb") as outfile:  # pyspark.daemon's way
        stack.callback(os.close, client.detach())
        answer_at_once()
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
        answer_at_once()
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
    answer_at_once()
    assert os.get_blocking(client.fileno()) == blocking
    assert no_delay(client)


def test_nothing_happens_where_open_files_are_not_listed(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = connection(stack)
    monkeypatch.setattr(worker_process, "_OPEN_FILES", "/nowhere")
    answer_at_once()
    assert not no_delay(client)


def test_a_file_closed_meanwhile_is_no_error(stack: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    client, _ = connection(stack)
    closed = os.open(tmp_path, os.O_RDONLY)
    os.close(closed)
    for name in (closed, client.fileno()):
        (tmp_path / str(name)).touch()
    monkeypatch.setattr(worker_process, "_OPEN_FILES", str(tmp_path))
    answer_at_once()
    assert no_delay(client)
