"""Addresses that lead to another broker (KIP-1242): the client says which one it wants, and looks brokers up again."""

from __future__ import annotations

import logging
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from spark_klog.client.cluster import Cluster
from spark_klog.client.net.connection import BrokerIdentity, Connection
from spark_klog.client.offsets import LATEST, list_offsets
from spark_klog.client.settings import client_config
from spark_klog.errors import ConnectionFailed, ErrorCode
from spark_klog.protocol.apis import API_VERSIONS, LIST_OFFSETS, METADATA
from spark_klog.protocol.codec import Message, decode_request, decode_request_header, encode_response
from spark_klog.wire.primitives import Reader
from tests.support.servers.kafka import HOST, NEWEST
from tests.support.servers.shared_kafka import SharedKafkas

KEY = ("t", 0)


@dataclass
class Broker:
    """What a stub is, and what it says: `brokers` has the port of each node of its cluster, the last leads `t`."""

    cluster: str
    node: int
    offset: int = 0
    brokers: dict[int, int] = field(default_factory=dict)
    #: The last version of ApiVersions; Kafka before 4.4 has 4.
    last: int = 5
    metadata_error: int = 0
    #: (API, version) of the requests, and the messages of ApiVersions.
    asked: list[tuple[str, int]] = field(default_factory=list)
    identified: list[tuple[str | None, int]] = field(default_factory=list)

    def answer(self, api: int, version: int, message: Message) -> tuple[Any, int, Message]:
        if api == API_VERSIONS.key:
            self.asked.append((API_VERSIONS.name, version))
            served = [(METADATA, 13), (LIST_OFFSETS, 7), (API_VERSIONS, self.last)]
            keys = [{"api_key": one.key, "min_version": 0, "max_version": last} for one, last in served]
            if version > self.last:
                answered = {"error_code": ErrorCode.UNSUPPORTED_VERSION, "api_keys": keys[-1:]}
                return API_VERSIONS, 0, answered
            named = message["cluster_id"], message["node_id"]
            if version >= 5:
                self.identified.append(named)
                assert (named[0] is None) == (named[1] == -1)
                if named[0] is not None and named != (self.cluster, self.node):
                    return API_VERSIONS, version, {"error_code": ErrorCode.REBOOTSTRAP_REQUIRED}
            return API_VERSIONS, version, {"error_code": 0, "api_keys": keys}
        if api == METADATA.key:
            self.asked.append((METADATA.name, version))
            if self.metadata_error:
                return METADATA, version, {"error_code": self.metadata_error}
            nodes = [{"node_id": node, "host": HOST, "port": port} for node, port in self.brokers.items()]
            entry = {"error_code": 0, "partition_index": 0, "leader_id": max(self.brokers), "leader_epoch": 1}
            topics = [
                {
                    "error_code": 0,
                    "name": topic["name"],
                    "partitions": [{**entry, "replica_nodes": [], "isr_nodes": []}],
                }
                for topic in message["topics"] or ()
            ]
            answered = {"brokers": nodes, "cluster_id": self.cluster, "controller_id": self.node, "topics": topics}
            return METADATA, version, answered
        self.asked.append((LIST_OFFSETS.name, version))
        partition = {"partition_index": 0, "error_code": 0, "timestamp": -1, "offset": self.offset, "leader_epoch": 1}
        return LIST_OFFSETS, version, {"topics": [{"name": "t", "partitions": [partition]}]}


class Stub(socketserver.ThreadingTCPServer):
    """A port; the broker behind it can be changed."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, broker: Broker) -> None:
        super().__init__((HOST, 0), _Connection)
        self.broker = broker
        self.port = int(self.server_address[1])
        self._connected: list[Any] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connected.append(request)
        super().process_request(request, client_address)

    def lead_to(self, broker: Broker) -> None:
        """Let new connections reach this broker; the others end."""
        self.broker = broker
        for connection in self._connected:
            with ExitStack() as stack:
                stack.callback(connection.close)
                stack.push(lambda *_: True)
                connection.shutdown(2)
        self._connected.clear()


class _Connection(socketserver.StreamRequestHandler):
    server: Stub

    def handle(self) -> None:
        broker = self.server.broker
        try:
            while len(prefix := self.rfile.read(4)) == 4:
                reader = Reader(self.rfile.read(struct.unpack(">i", prefix)[0]))
                key, version, number = decode_request_header(reader)
                api = {one.key: one for one in (API_VERSIONS, METADATA, LIST_OFFSETS)}[key]
                message = {} if version > broker.last and key == 18 else decode_request(api, version, reader)[1]
                answered, version, answer = broker.answer(key, version, message)
                data = encode_response(answered, version, number, answer).to_bytes()
                self.wfile.write(struct.pack(">i", len(data)) + data)
        except (OSError, ValueError):
            pass  # the other end is gone


@pytest.fixture
def start() -> Iterator[Callable[[Broker], Stub]]:
    with ExitStack() as stack:

        def started(broker: Broker) -> Stub:
            stub = stack.enter_context(Stub(broker))
            threading.Thread(target=stub.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(stub.shutdown)
            return stub

        yield started


@contextmanager
def _client(stub: Stub, **settings: str) -> Iterator[Cluster]:
    given = {name.replace("_", "."): value for name, value in settings.items()}
    with Cluster.connect({"bootstrap.servers": f"{HOST}:{stub.port}", "request.timeout.ms": "20000", **given}) as made:
        yield made


def _pair(start: Callable[[Broker], Stub], last: int = 5) -> tuple[Stub, Stub]:
    """A cluster A of two brokers; the second leads."""
    one, two = start(Broker("A", 0)), start(Broker("A", 1, 10, last=last))
    one.broker.brokers = two.broker.brokers = {0: one.port, 1: two.port}
    return one, two


def test_connections_name_the_broker_that_they_are_for(start: Callable[[Broker], Stub]) -> None:
    one, two = _pair(start)
    with _client(one) as cluster:
        assert list_offsets(cluster, {KEY: LATEST}) == {KEY: 10}
    assert one.broker.identified == []  # nothing was known of it yet
    assert two.broker.identified == [("A", 1)]
    assert two.broker.asked == [("ApiVersions", 5), ("ListOffsets", 7)]


@pytest.mark.parametrize("other", [Broker("B", 1), Broker("A", 2)], ids=["another cluster", "another node"])
def test_an_address_that_leads_to_another_broker(
    start: Callable[[Broker], Stub], other: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = _pair(start)
    with _client(one) as cluster, caplog.at_level(logging.WARNING):
        assert list_offsets(cluster, {KEY: LATEST}) == {KEY: 10}
        moved = start(Broker("A", 1, 11))
        one.broker.brokers = moved.broker.brokers = {0: one.port, 1: moved.port}
        other.asked.clear()
        other.offset, other.brokers = 99, {other.node: two.port}
        two.lead_to(other)
        assert list_offsets(cluster, {KEY: LATEST}) == {KEY: 11}
    assert {api for api, _ in other.asked} == {"ApiVersions"}
    assert f"{HOST}:{two.port} leads to another broker" in caplog.text


def test_another_cluster_at_all_addresses_is_not_asked_for_metadata(start: Callable[[Broker], Stub]) -> None:
    """Only bootstrap.servers may say that there is another cluster; as all of Java's clients, this one then uses it."""
    one, two = _pair(start)
    seed = start(Broker("A", 7))
    seed.broker.brokers = one.broker.brokers
    with _client(seed) as cluster:
        assert list_offsets(cluster, {KEY: LATEST}) == {KEY: 10}
        new = start(Broker("A", 1, 12))
        new.broker.brokers = seed.broker.brokers = {1: new.port}
        for stub in (one, two):
            stub.lead_to(Broker("B", stub.broker.node, 99, {1: two.port}))
        cluster.forget_leaders()
        assert list_offsets(cluster, {KEY: LATEST}) == {KEY: 12}
    assert {api for stub in (one, two) for api, _ in stub.broker.asked} <= {"ApiVersions"}


def test_connections_that_were_all_closed_do_not_end_the_check(start: Callable[[Broker], Stub]) -> None:
    """As after an outage of all brokers, or an interrupt: who is at the addresses then may be another cluster."""
    one, two = _pair(start)
    with _client(one) as cluster:
        assert list_offsets(cluster, {KEY: LATEST}) == {KEY: 10}
        other = Broker("B", 1, 99, {1: two.port})
        two.lead_to(other)
        cluster.close()
        with pytest.raises(ConnectionFailed, match="leads to another broker"):
            cluster.connection(1)
    assert (other.asked, other.identified) == ([("ApiVersions", 5)], [("A", 1)])


def test_brokers_before_4_4_are_asked_again_in_version_0(start: Callable[[Broker], Stub]) -> None:
    """A cluster amid its upgrade."""
    one, two = _pair(start, last=4)
    with _client(one) as cluster:
        assert list_offsets(cluster, {KEY: LATEST}) == {KEY: 10}
    assert two.broker.asked == [("ApiVersions", 5), ("ApiVersions", 0), ("ListOffsets", 7)]


def test_without_a_broker_that_checks_nothing_is_said(start: Callable[[Broker], Stub]) -> None:
    one, two = _pair(start, last=4)
    one.broker.last = 4
    with _client(one) as cluster:
        assert list_offsets(cluster, {KEY: LATEST}) == {KEY: 10}
    assert two.broker.asked == [("ApiVersions", 0), ("ListOffsets", 7)]


def test_the_check_can_be_switched_off(start: Callable[[Broker], Stub]) -> None:
    one, two = _pair(start)
    with _client(one, metadata_cluster_check_enable="false") as cluster:
        two.lead_to(Broker("B", 1, 99))
        assert list_offsets(cluster, {KEY: LATEST}) == {KEY: 99}
    assert two.broker.identified == []


def test_brokers_at_one_address_are_not_checked(start: Callable[[Broker], Stub]) -> None:
    """As behind a port forward."""
    one = start(Broker("A", 0, 10))
    one.broker.brokers = {0: one.port, 1: one.port}
    with _client(one) as cluster:
        assert list_offsets(cluster, {KEY: LATEST}) == {KEY: 10}
    assert one.broker.identified == []


def test_a_broker_that_wants_bootstrap_servers_to_be_asked(start: Callable[[Broker], Stub]) -> None:
    """REBOOTSTRAP_REQUIRED in metadata (KIP-1102)."""
    one, two = _pair(start)
    seed = start(Broker("A", 7))
    seed.broker.brokers = one.broker.brokers
    with _client(seed) as cluster:
        assert list_offsets(cluster, {KEY: LATEST}) == {KEY: 10}
        seed.lead_to(Broker("A", 7, metadata_error=ErrorCode.REBOOTSTRAP_REQUIRED))
        two.broker.metadata_error = one.broker.metadata_error = ErrorCode.REBOOTSTRAP_REQUIRED
        cluster.forget_leaders()
        asked = len(one.broker.asked)
        threading.Timer(0.5, lambda: seed.lead_to(Broker("A", 7, brokers=one.broker.brokers))).start()
        assert list_offsets(cluster, {KEY: LATEST}) == {KEY: 10}
        assert len(one.broker.asked) <= asked + 2  # of the brokers it was told about, at most one was asked once more


@pytest.mark.peer
def test_kafka_checks_it(shared_kafkas: SharedKafkas) -> None:
    kafka = shared_kafkas.get(NEWEST)
    host, port = kafka.bootstrap_servers.split(":")
    config = client_config({"bootstrap.servers": kafka.bootstrap_servers})
    with Cluster.connect({"bootstrap.servers": kafka.bootstrap_servers}) as cluster:
        assert cluster.cluster_id is not None
        right = BrokerIdentity(cluster.cluster_id, kafka.broker_id)
        cluster.connection(kafka.broker_id)
    with Connection(host, int(port), config, expected=right) as connection:
        assert not connection.is_misrouted
        assert connection.request(METADATA, {"topics": []})["cluster_id"] == cluster.cluster_id
    for wrong in (right._replace(cluster_id="another"), right._replace(node_id=9)):
        with pytest.raises(ConnectionFailed, match=f"leads to another broker than {wrong.node_id} of cluster"):
            Connection(host, int(port), config, expected=wrong)
