"""A child process that inherits clients is refused, and its parent's connections and membership stay as they are."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_klog.classic import KeyedMessage, Producer as ClassicProducer, SimpleConsumer
from spark_klog.client import Admin, Consumer, Producer
from spark_klog.client.cluster import Cluster
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import AdminClosed, ConsumerClosed, ForkedClient, KlogError, ProducerClosed
from tests.support.clients.topics import create_topic
from tests.support.servers.certificates import Certificates
from tests.support.servers.secure_broker import SecureBroker

SECONDS = 30.0
#: What forking does in a process with threads is the test.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def _in_child(run: Callable[[], object]) -> None:
    """Run in a forked child, which ends as children of multiprocessing do; fail if it raises or does not end."""
    failures = multiprocessing.get_context("fork").SimpleQueue()

    def body() -> None:
        try:
            run()
            gc.collect()
        except BaseException as error:
            failures.put(repr(error))
            raise

    child = multiprocessing.get_context("fork").Process(target=body)
    child.start()
    child.join(SECONDS)
    ended = child.exitcode
    child.kill()
    assert ended == 0, "a child did not end" if ended is None else failures.get()


def _refused(call: Callable[..., Any], *arguments: Any, by: type[KlogError] = ConsumerClosed) -> None:
    with pytest.raises(by, match=f"process {os.getppid()} has made this .*: make a new one after a fork"):
        call(*arguments)


def _values(consumer: Consumer, count: int) -> list[bytes | None]:
    """Poll until there are `count` records, and once more; there must not be more."""
    found: list[bytes | None] = []
    deadline = time.monotonic() + SECONDS
    while len(found) < count and time.monotonic() < deadline:
        found += [record.value for record in consumer.poll(0.5)]
    return found + [record.value for record in consumer.poll(0.1)]


def _filled(servers: dict[str, Any], topic: str, count: int) -> list[bytes]:
    values = [b"%d" % number for number in range(count)]
    with Producer(servers) as producer:
        for value in values:
            producer.send(topic, value)
    return values


def test_a_member_and_its_child(cluster: EmbeddedCluster, topic: str) -> None:
    servers = {"bootstrap.servers": cluster.bootstrap_servers}
    with Cluster.connect(servers) as direct:
        create_topic(direct, topic, 1)
    settings = {**servers, "group.id": topic, "auto.offset.reset": "earliest", "max.poll.records": 100}
    values = _filled(servers, topic, 1000)

    with Consumer(settings) as consumer:
        consumer.subscribe([topic])
        found = _values(consumer, 300)
        before = consumer.group_metadata()

        def child() -> None:
            with consumer:
                for name in ("poll", "commit", "assignment", "wakeup", "unsubscribe"):
                    _refused(getattr(consumer, name))
                _refused(consumer.subscribe, [topic])
            consumer.close()

        _in_child(child)
        # the child sent no LeaveGroup: the heartbeats that follow hear of no rebalance
        with Admin(servers) as admin:
            (member,) = admin.describe_group(topic).members
        assert member.member_id == before.member
        found += _values(consumer, 1000 - len(found))
        assert found == values
        assert consumer.group_metadata() == before


def test_a_thread_in_a_call_when_a_child_is_forked(cluster: EmbeddedCluster, topic: str) -> None:
    """Locks that a thread of the parent has do not hold the child up."""
    servers = {"bootstrap.servers": cluster.bootstrap_servers}
    with Cluster.connect(servers) as direct:
        create_topic(direct, topic, 1)
    found: list[bytes | None] = []
    with Consumer({**servers, "auto.offset.reset": "earliest"}) as consumer, Admin(servers) as admin:
        consumer.assign([(topic, 0)])
        thread = threading.Thread(target=lambda: found.extend(_values(consumer, 1)))
        thread.start()
        with admin.exclusive():

            def child() -> None:
                other = threading.Thread(target=lambda: _refused(admin.describe_cluster, by=AdminClosed))
                other.start()
                other.join(SECONDS)
                assert not other.is_alive()
                _refused(consumer.poll)
                consumer.close()
                admin.close()

            _in_child(child)
        values = _filled(servers, topic, 1)
        thread.join(SECONDS)
    assert found == values


def test_all_other_clients(cluster: EmbeddedCluster, topic: str) -> None:
    servers = {"bootstrap.servers": cluster.bootstrap_servers}
    host, _, port = cluster.bootstrap_servers.rpartition(":")
    values = _filled(servers, topic, 10)
    with (
        Admin(servers) as admin,
        Cluster.connect(servers) as direct,
        SimpleConsumer(host, int(port)) as simple,
        ClassicProducer({"metadata.broker.list": cluster.bootstrap_servers, "producer.type": "async"}) as classic,
    ):
        assert [record.value for record in simple.fetch(topic, 0, 0)] == values

        def child() -> None:
            _refused(admin.list_topics, by=AdminClosed)
            _refused(direct.metadata, [], by=ForkedClient)
            _refused(simple.fetch, topic, 0, 0)
            _refused(classic.send, KeyedMessage(topic, b"child"), by=ProducerClosed)
            for client in (admin, direct, simple, classic):
                client.close()

        _in_child(child)
        assert topic in [one.name for one in admin.list_topics()]
        assert topic in direct.metadata([topic])
        assert [record.value for record in simple.fetch(topic, 0, 0)] == values
        classic.send(KeyedMessage(topic, b"parent"))
    with SimpleConsumer(host, int(port)) as simple:
        assert [record.value for record in simple.fetch(topic, 0, 0)] == [*values, b"parent"]


def test_an_embedded_cluster(topic: str) -> None:
    with EmbeddedCluster() as running:

        def child() -> None:
            running.stop()

        _in_child(child)
        values = _filled({"bootstrap.servers": running.bootstrap_servers}, topic, 3)
        with Consumer({"bootstrap.servers": running.bootstrap_servers, "auto.offset.reset": "earliest"}) as consumer:
            consumer.assign([(topic, 0)])
            assert _values(consumer, 3) == values
        assert running.data_dir.exists()


def test_connections_over_tls(server_dir: Path, certificates: Certificates, topic: str) -> None:
    """Closing, collection and exit in a child write nothing to a TLS connection: the parent's requests go on there."""
    with SecureBroker(server_dir, certificates) as broker:
        settings = broker.client("SSL")
        _filled(settings, topic, 10)
        with Admin(settings) as admin, Consumer({**settings, "auto.offset.reset": "earliest"}) as consumer:
            consumer.assign([(topic, 0)])
            assert len(_values(consumer, 10)) == 10
            admin.list_topics()
            before = [*admin.cluster._connections.values(), *consumer._cluster._connections.values()]

            def child() -> None:
                admin.close()
                consumer.close()

            _in_child(child)
            _in_child(lambda: None)  # exit alone
            admin.list_topics()
            _filled(settings, topic, 10)
            assert len(_values(consumer, 10)) == 10
            assert [*admin.cluster._connections.values(), *consumer._cluster._connections.values()] == before
            assert not any(connection.closed for connection in before)
