"""Connections that reach another broker than the client meant (KIP-1242): ApiVersions 5 names cluster and node.

REBOOTSTRAP_REQUIRED makes clients of Kafka 4.4 begin again with their bootstrap servers.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ErrorCode
from spark_klog.protocol import apis
from spark_klog.protocol.codec import decode_request, decode_request_header
from spark_klog.wire.primitives import Reader
from tests.support.brokers.raw_client import RawClient, error_codes
from tests.support.clients import Record
from tests.support.clients.java import Java44
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import HOST, free_port


@pytest.fixture(scope="module")
def raw(cluster: EmbeddedCluster) -> Iterator[RawClient]:
    with RawClient(int(cluster.bootstrap_servers.rsplit(":", 1)[1])) as connected:
        yield connected


def test_whom_the_client_wants(raw: RawClient) -> None:
    described = raw.request(apis.DESCRIBE_CLUSTER, 0, {})
    cluster_id, node_id = described["cluster_id"], described["controller_id"]
    for wanted, code in (
        ((cluster_id, node_id), ErrorCode.NONE),
        ((None, -1), ErrorCode.NONE),
        ((None, node_id + 1), ErrorCode.NONE),  # as in Kafka: without a cluster nothing is checked
        ((cluster_id, node_id + 1), ErrorCode.REBOOTSTRAP_REQUIRED),
        ((cluster_id, -1), ErrorCode.REBOOTSTRAP_REQUIRED),
        (("another", node_id), ErrorCode.REBOOTSTRAP_REQUIRED),
        (("", -1), ErrorCode.REBOOTSTRAP_REQUIRED),
    ):
        request = {"client_software_name": "x", "client_software_version": "1"}
        request |= dict(zip(("cluster_id", "node_id"), wanted, strict=True))
        answer = raw.request(apis.API_VERSIONS, 5, request)
        assert (answer["error_code"], bool(answer["api_keys"])) == (code, code == ErrorCode.NONE), wanted
    assert raw.request(apis.API_VERSIONS, 3, {})["error_code"] == ErrorCode.NONE  # the connection goes on


class Router:
    """The address of a broker, which another one can get: forwards whole requests, and notes whom clients want."""

    def __init__(self, port: int) -> None:
        self.target = 0
        #: Cluster and node of each ApiVersions request of version 5.
        self.wanted: list[tuple[str | None, int]] = []
        self._open: list[socket.socket] = []
        self._listening = socket.create_server((HOST, port))
        threading.Thread(target=self._accept, daemon=True).start()

    def reroute(self, target: int) -> None:
        """Forward new connections to another port; cut those that are there."""
        self.target = target
        opened, self._open = self._open, []
        for each in opened:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.close()
        self.reroute(0)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                try:
                    broker = socket.create_connection((HOST, self.target))
                except OSError:
                    client.close()
                    continue
                self._open += [client, broker]
                threading.Thread(target=self._requests, args=(client, broker), daemon=True).start()
                threading.Thread(target=_copy, args=(broker, client), daemon=True).start()

    def _requests(self, client: socket.socket, broker: socket.socket) -> None:
        with contextlib.suppress(OSError), client.makefile("rb") as stream:
            while head := stream.read(4):
                frame = stream.read(int.from_bytes(head, "big"))
                reader = Reader(frame)
                key, version, _ = decode_request_header(reader)
                if key == apis.API_VERSIONS.key and version >= 5:
                    request = decode_request(apis.API_VERSIONS, version, reader)[1]
                    self.wanted.append((request["cluster_id"], request["node_id"]))
                broker.sendall(head + frame)
        with contextlib.suppress(OSError):
            broker.shutdown(socket.SHUT_RDWR)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_RDWR)


def _broker(folder: Path, router: int, name: str) -> KlogBroker:
    """A broker of a cluster of its own that advertises the router's address."""
    listeners = {"listeners": free_port(), "advertised.listeners": router}
    words = [f"{setting}=PLAINTEXT://{HOST}:{port}" for setting, port in listeners.items()]
    return KlogBroker(folder, *(word for text in words for word in ("--set", text)), name=name)


def _port(broker: KlogBroker) -> int:
    return int(broker.ready_line.rsplit(":", 1)[1])


@pytest.mark.test_all("client")
@pytest.mark.peer
def test_a_java_consumer_comes_to_another_cluster(server_dir: Path, topic: str) -> None:
    """The address of its broker becomes that of another cluster: it is told, and goes on there."""
    port = free_port()
    router = Router(port)
    with _broker(server_dir, port, "first") as first, _broker(server_dir, port, "second") as second:
        ids = []
        for broker in (first, second):
            with RawClient(_port(broker)) as raw:
                entry = {"name": topic, "num_partitions": 1, "replication_factor": 1}
                made = raw.request(apis.CREATE_TOPICS, 4, {"topics": [entry], "timeout_ms": 5000})
                assert set(error_codes(made)) == {0}
                ids.append(raw.request(apis.DESCRIBE_CLUSTER, 0, {})["cluster_id"])
        router.reroute(_port(first))
        client = Java44(f"{HOST}:{port}")
        try:
            assert client.produce(topic, 0, "none", [Record(1, None, b"a")]) == [0]
            assert [seen.record.value for seen in client.consume(topic, {0: 0}, 1)] == [b"a"]
            assert (ids[0], 0) in router.wanted
            assert (None, -1) in router.wanted  # its first connection
            router.reroute(_port(second))
            assert client.produce(topic, 0, "none", [Record(1, None, b"b"), Record(1, None, b"c")]) == [0, 1]
            assert [seen.record.value for seen in client.consume(topic, {0: 0}, 2)] == [b"b", b"c"]
            after = router.wanted[router.wanted.index((ids[0], 0)) :]
            assert (ids[1], 0) in after
        finally:
            client.close()
            router.close()
