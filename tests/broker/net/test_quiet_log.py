"""The broker's log tells what an administrator can use: no error for what a client does, no warning about the usual."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from spark_klog.base.names import PLAINTEXT
from spark_klog.broker.broker import Broker
from spark_klog.broker.event_loop import BackgroundTasks
from spark_klog.broker.housekeeping import keep_house
from spark_klog.broker.metadata.nodes import UnknownTopic
from spark_klog.broker.net.acceptor import Acceptor, ConnectionLimits
from spark_klog.broker.net.connection import watch
from spark_klog.broker.net.server import Server
from spark_klog.broker.security.config import Listener
from spark_klog.errors import ErrorCode, LogRetired
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.protocol.apis import FETCH
from spark_klog.protocol.codec import encode_request
from tests.support.brokers.batches import make_batch
from tests.support.brokers.loop_broker import append_value, running
from tests.support.servers.certificates import make_certificates
from tests.support.waiting import until

_HOST = "127.0.0.1"
_AT_ONCE_RESET = struct.pack("ii", 1, 0)
_INDEXED = LogConfig(index_interval_bytes=1)


@asynccontextmanager
async def listening(broker: Broker, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[Server, int]]:
    """Accept connections; yield the server and its port."""
    server = Server(broker)
    with socket.create_server((_HOST, 0)) as opened:
        port = opened.getsockname()[1]
        limits = ConnectionLimits(10, 10, broker.metrics)
        acceptor = Acceptor(
            broker, server.connections, limits, Listener("L", "SSL" if tls else PLAINTEXT, _HOST, port), opened, tls
        )
        yield server, port
        acceptor.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def append(log: PartitionLog, size: int) -> None:
    log.append(memoryview(bytearray(make_batch([(None, b"v" * size)], [1]))))


def fetch_request(min_bytes: int, max_wait_ms: int, version: int = 4) -> bytes:
    partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 30}
    topics = [{"topic": "t", "partitions": [partition]}]
    message = {
        "replica_id": -1,
        "max_wait_ms": max_wait_ms,
        "min_bytes": min_bytes,
        "max_bytes": 1 << 30,
        "isolation_level": 0,
        "topics": topics,
    }
    return b"".join(bytes(part) for part in encode_request(FETCH, version, 1, "client", message).parts)


def test_a_client_that_hangs_up_before_a_sendfile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only the first write notices its reset: the connection takes no more requests, and reads nothing."""

    async def run() -> None:
        async with running(tmp_path) as broker, listening(broker) as (server, port):
            await broker.changes.create_topic("t", 1)
            append(broker.logs.logs["t", 0], 100_000)
            loop = asyncio.get_running_loop()
            with socket.create_connection((_HOST, port)) as client:
                client.setblocking(False)
                request = fetch_request(1 << 30, 500)
                await loop.sock_sendall(client, struct.pack(">i", len(request)) + request)
                await until(lambda: [one for one in server.connections.opened if one.is_busy], "the request")
                (connection,) = server.connections.opened
                connection.finish()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE_RESET)
            await until(lambda: not server.connections.opened, "the end of the connection")
            await until(lambda: not connection.is_busy, "the end of its request")

    asyncio.run(run())
    assert not warnings(caplog)


@pytest.mark.parametrize("size", [1000, 50_000, 500_000])
def test_a_log_file_that_became_shorter_ends_the_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    """The size of the response is sent by then: bytes of the next one must not be taken for the missing ones."""
    caplog.set_level(logging.DEBUG)

    async def run() -> None:
        async with running(tmp_path) as broker, listening(broker) as (_, port):
            await broker.changes.create_topic("t", 1)
            log = broker.logs.logs["t", 0]
            append_value(log, size)
            (path,) = log.directory.glob("*.log")
            os.truncate(path, path.stat().st_size - 500)
            loop = asyncio.get_running_loop()
            with socket.create_connection((_HOST, port)) as client:
                client.setblocking(False)
                request = fetch_request(1, 500)
                await loop.sock_sendall(client, 2 * (struct.pack(">i", len(request)) + request))
                received = b""
                while data := await asyncio.wait_for(loop.sock_recv(client, 1 << 20), 20):
                    received += data
                assert len(received) < 4 + struct.unpack_from(">i", received)[0]

    asyncio.run(run())
    assert "500 of" in caplog.text


def test_a_log_file_that_became_shorter_is_an_error_of_an_old_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its batches are converted before the response begins, and there is none to convert."""

    async def run() -> None:
        async with running(tmp_path) as broker, listening(broker) as (_, port):
            await broker.changes.create_topic("t", 1)
            log = broker.logs.logs["t", 0]
            append_value(log, 1000)
            (path,) = log.directory.glob("*.log")
            os.truncate(path, path.stat().st_size - 500)
            loop = asyncio.get_running_loop()
            with socket.create_connection((_HOST, port)) as client:
                client.setblocking(False)
                request = fetch_request(1, 500, 2)
                await loop.sock_sendall(client, struct.pack(">i", len(request)) + request)
                received = await asyncio.wait_for(loop.sock_recv(client, 1 << 20), 60)
            assert received.endswith(struct.pack(">hqi", ErrorCode.CORRUPT_MESSAGE, 1, 0))

    asyncio.run(run())
    assert "t-0 can't be read at offset 0: the file ends before position" in caplog.text


def test_a_failed_tls_handshake_has_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One client speaks another protocol, the other one hangs up."""
    certificates = make_certificates(tmp_path / "certificates")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server, password="key-secret")

    async def run() -> None:
        async with running(tmp_path) as broker, listening(broker, context) as (_, port):
            for sent in (b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01"):
                caplog.clear()
                with socket.create_connection((_HOST, port)) as client:
                    peer = f"{_HOST}:{client.getsockname()[1]}"
                    client.sendall(sent)
                await until(lambda: warnings(caplog), "a line")
                (line,) = warnings(caplog)
                assert re.fullmatch(rf"{re.escape(peer)}: connection to L failed: \S.+", line), line

    asyncio.run(run())


def test_topics_that_are_deleted_while_they_are_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At that time index entries are not written, segments expire, and logs are flushed by time."""

    async def run() -> None:
        config = LogConfig(segment_bytes=1000, index_interval_bytes=1, retention_bytes=2000, flush_ms=1)
        async with running(tmp_path, log=config, housekeeping_ms=50) as broker:
            house = asyncio.create_task(keep_house(broker))
            for number in range(9):
                await broker.changes.create_topic("t", 3)
                for partition in range(3):
                    for _ in range(10 + number):
                        append(broker.logs.logs["t", partition], 200)
                await asyncio.sleep(0.01 * (number % 3))
                await broker.changes.delete_topics({"t": None})
            house.cancel()
            await asyncio.gather(house, return_exceptions=True)

    asyncio.run(run())
    assert not warnings(caplog)


@pytest.mark.parametrize("is_set_aside", [False, True])
def test_a_deleted_topic_whose_index_entries_are_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_set_aside: bool
) -> None:
    """A log opened at the start opens its index files at the first write; by then they are gone."""

    async def first_life() -> None:
        async with running(tmp_path, log=_INDEXED) as broker:
            await broker.changes.create_topic("t", 1)
            append(broker.logs.logs["t", 0], 200)

    async def second_life() -> None:
        async with running(tmp_path, log=_INDEXED) as broker:
            log = broker.logs.logs["t", 0]
            for _ in range(10):
                append(log, 200)
            if is_set_aside:
                del broker.logs.logs["t", 0]
                log.retire("stray")
            else:
                await broker.changes.delete_topics({"t": None})

    asyncio.run(first_life())
    asyncio.run(second_life())
    assert not warnings(caplog)


def test_housekeeping_of_a_topic_that_goes_meanwhile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing files of a deleted log are no error; missing files of another log are one."""

    async def run() -> None:
        async with running(tmp_path, housekeeping_ms=50) as broker:
            await broker.changes.create_topic("gone", 1)
            await broker.changes.create_topic("there", 1)
            gone, there = broker.logs.logs["gone", 0], broker.logs.logs["there", 0]
            looked_at: set[str] = set()

            def fail(log: PartitionLog) -> int:
                looked_at.add(log.topic)
                raise FileNotFoundError(2, "No such file or directory", str(log.directory / "0.log"))

            monkeypatch.setattr(gone, "delete_expired", lambda _: fail(gone))
            monkeypatch.setattr(there, "delete_expired", lambda _: fail(there))
            # as if housekeeping had taken its list of logs before the deletion
            gone.is_open = False
            house = asyncio.create_task(keep_house(broker))
            await until(lambda: looked_at == {"gone", "there"}, "housekeeping")
            await until(lambda: warnings(caplog), "a line")
            gone.is_open = True
            house.cancel()
            await asyncio.gather(house, return_exceptions=True)

    asyncio.run(run())
    assert all("there-0" in line for line in warnings(caplog))


def test_a_refused_change_whose_client_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    """A client's mistake is no error of the broker, nor is a deleted log; a disk failure is one."""

    async def run() -> None:
        deleted = LogRetired(errno.ESTALE, "the log was deleted or closed", "t-0")
        for error in (UnknownTopic("there is no topic known"), deleted, OSError("disk")):
            tasks, failed = BackgroundTasks(), asyncio.Event()

            async def change(error: Exception = error, failed: asyncio.Event = failed) -> None:
                await failed.wait()
                raise error

            task = tasks.start(change())
            waiting = [asyncio.create_task(tasks.outcome(task)) for _ in range(2)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for waiter in waiting:
                waiter.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiter
            failed.set()
            await tasks.ended()
            await asyncio.sleep(0)

    caplog.set_level(logging.INFO)
    asyncio.run(run())
    assert "had disconnected: there is no topic known" in caplog.text
    assert warnings(caplog) == ["a change failed after its client had disconnected: disk"]


def test_a_new_data_directory_and_what_kafka_leaves_in_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Kafka 4.1's cleaner leaves an empty checkpoint, and KRaft the log of the cluster's own records."""

    async def run() -> None:
        async with running(tmp_path) as broker:
            assert not broker.registry.topics
            assert not broker.logs.logs

    caplog.set_level(logging.INFO)
    asyncio.run(run())
    assert "stop before" not in caplog.text
    assert "0 partitions, new" in caplog.text
    caplog.clear()
    (tmp_path / "data" / "cleaner-offset-checkpoint").write_text("")
    metadata = tmp_path / "data" / "__cluster_metadata-0"
    metadata.mkdir()
    (metadata / "00000000000000000000.log").touch()
    asyncio.run(run())
    assert "0 partitions, clean stop before" in caplog.text
    assert not warnings(caplog)


def test_the_watchdog_goes_on_after_a_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with running(tmp_path, max_idle_ms=100) as broker, listening(broker) as (server, port):
            with socket.create_connection((_HOST, port)), socket.create_connection((_HOST, port)):
                await until(lambda: len(server.connections.opened) == 2, "the connections")
                first = next(iter(server.connections.opened))
                activity = first.activity
                del first.activity
                watching = asyncio.create_task(watch(server.connections.opened, broker.config))
                await until(lambda: server.connections.opened == {first}, "the other one is dropped")
                first.activity = activity
                await until(lambda: not server.connections.opened, "the next round")
                watching.cancel()

    asyncio.run(run())
    assert "the watchdog failed at this connection" in caplog.text
