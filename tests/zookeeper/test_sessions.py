"""Brokers whose session with ZooKeeper expires, or whose ZooKeeper is unavailable."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from kazoo.client import KazooClient

from tests.support.broker import KlogBroker, broker_command, refusal
from tests.support.kafka import HOST, ZooKeeperServer, free_port
from tests.support.shared_tree import create_topic, expire_session, known_brokers, leaders, node
from tests.support.waiting import wait_until

# kazoo warns if the chroot does not exist yet; the broker creates it
pytestmark = pytest.mark.filterwarnings("ignore:No chroot path exists")

MakeBroker = Callable[..., KlogBroker]


class Producing:
    """Produces records one by one to one partition, in a thread, until the block ends."""

    def __init__(self, servers: str, topic: str) -> None:
        self._servers, self._topic = servers, topic
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.acknowledged = 0
        self.errors: list[str] = []

    def _run(self) -> None:
        producer = Producer({"bootstrap.servers": self._servers, "acks": "all", "retries": 0, "log_level": 0})
        while not self._done.is_set():
            producer.produce(self._topic, str(self.acknowledged), partition=0, on_delivery=self._delivered)
            producer.flush(10)

    def _delivered(self, error: object, _: object) -> None:
        if error is None:
            self.acknowledged += 1
        else:
            self.errors.append(str(error))

    def more(self) -> None:
        """Wait until ten more records are acknowledged."""
        goal = self.acknowledged + 10
        wait_until(lambda: self.acknowledged >= goal)

    def __enter__(self) -> Producing:
        self._thread.start()
        self.more()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        assert self.errors == []


def consumed(servers: str, topic: str, count: int) -> list[bytes | None]:
    config = {"bootstrap.servers": servers, "group.id": "g", "enable.auto.commit": False, "log_level": 0}
    consumer = Consumer(config)
    consumer.assign([TopicPartition(topic, 0, 0)])
    messages = consumer.consume(count, 20)
    consumer.close()
    return [message.value() for message in messages]


def test_a_broker_registers_again_and_serves_on(tree: KazooClient, make_broker: MakeBroker) -> None:
    first, second = make_broker(0), make_broker(1)
    wait_until(lambda: known_brokers(first.bootstrap_servers) == 2)
    create_topic(first.bootstrap_servers, "t", 2)
    wait_until(lambda: len(leaders(second.bootstrap_servers, "t")) == 2)
    servers = f"{first.bootstrap_servers},{second.bootstrap_servers}"
    with Producing(servers, "t") as producing:
        for broker_id, broker in enumerate((first, second)):
            before, stat = tree.get(f"/brokers/ids/{broker_id}")
            expire_session(tree, f"/brokers/ids/{broker_id}")
            broker.wait_for_log("session with ZooKeeper")
            wait_until(lambda: tree.exists(f"/brokers/ids/{broker_id}"))  # noqa: B023
            again, now = tree.get(f"/brokers/ids/{broker_id}")
            assert again == before
            assert now.ephemeralOwner not in (0, stat.ephemeralOwner)
            wait_until(lambda: tree.exists(f"/brokers/topics/t/{broker_id}"))  # noqa: B023
            producing.more()
        # there is a controller and watches are set: both brokers serve a topic that a tool registers
        wait_until(lambda: tree.exists("/controller"))
        assignment = b'{"version":1,"partitions":{"0":[0],"1":[1]}}'
        tree.create("/brokers/topics/late", assignment)
        for broker in (first, second):
            wait_until(lambda: leaders(broker.bootstrap_servers, "late") == {0: 0, 1: 1})  # noqa: B023
        wait_until((first.data_dir / "late-0").exists)
        wait_until((second.data_dir / "late-1").exists)
        producing.more()
    assert consumed(servers, "t", producing.acknowledged) == [b"%d" % n for n in range(producing.acknowledged)]


def test_zookeeper_is_away_for_longer_than_the_session_timeout(server_dir: Path) -> None:
    with ZooKeeperServer(server_dir / "zookeeper", tick_ms=500) as zookeeper:
        arguments = ["--zookeeper", zookeeper.connect, "--set", "zookeeper.session.timeout.ms=1000"]
        with KlogBroker(server_dir, *arguments) as broker:
            servers = broker.bootstrap_servers
            create_topic(servers, "t", 1)
            with Producing(servers, "t") as producing:
                zookeeper.kill()
                broker.wait_for_log("the connection to ZooKeeper")
                ends = time.monotonic() + 3
                while time.monotonic() < ends:
                    producing.more()
                assert leaders(servers, "t") == {0: 0}
                with pytest.raises(KafkaException, match="no answer from ZooKeeper"):
                    create_topic(servers, "other", 1)
                producing.more()
                zookeeper.start()
                tree = KazooClient(zookeeper.connect)
                tree.start(20)
                wait_until(lambda: tree.exists("/brokers/ids/0"))
                tree.create("/config/topics/late", b'{"version":1,"config":{"retention.ms":"77"}}')
                tree.create("/brokers/topics/late", b'{"version":1,"partitions":{"0":[0]}}')
                wait_until(lambda: leaders(servers, "late") == {0: 0})
                path = broker.data_dir / "late-0" / "klog.json"
                wait_until(path.exists)
                assert json.loads(path.read_text()) == {"retention_ms": 77}
                producing.more()
                tree.stop()
                tree.close()
                create_topic(servers, "other", 1)
            assert "Traceback" not in broker.log.read_text()


def test_the_id_of_a_killed_broker_is_free_when_its_session_ends(
    tree: KazooClient, make_broker: MakeBroker, chroot: str
) -> None:
    """A broker at another address waits for that end; a restart at the same address does not wait."""
    seconds = "zookeeper.session.timeout.ms=8000"  # longer than the other broker takes to start on a busy machine
    broker = make_broker(0, seconds)
    broker.kill()
    assert tree.exists("/brokers/ids/0")
    other = make_broker(0, seconds)
    other.wait_for_log(f"broker id 0 is registered by a broker at {HOST}:{broker.port}, which does not answer: waiting")
    assert node(tree, "/brokers/ids/0")["port"] == other.port


def test_the_id_of_a_broker_that_lives_and_cannot_be_reached(tree: KazooClient, chroot: str, server_dir: Path) -> None:
    port = free_port()
    payload = {"version": 4, "host": HOST, "port": port, "endpoints": [f"PLAINTEXT://{HOST}:{port}"], "timestamp": "1"}
    tree.create("/brokers/ids/0", json.dumps(payload).encode(), ephemeral=True, makepath=True)
    arguments = ["--zookeeper", chroot, "--set", "zookeeper.session.timeout.ms=1000"]
    assert refusal(broker_command(server_dir / "data", free_port(), *arguments)) == (
        f"klog: broker id 0 is registered by a broker at {HOST}:{port}, which does not answer, but its session has "
        "not ended in 2 s; choose another --broker-id, or stop that broker"
    )


def test_the_nodes_of_0_7(tree: KazooClient, make_broker: MakeBroker) -> None:
    first, second = make_broker(0), make_broker(1, "klog.zookeeper.paths.0.7=false")
    wait_until(lambda: known_brokers(first.bootstrap_servers) == 2)
    create_topic(first.bootstrap_servers, "t", 4)
    wait_until(lambda: tree.exists("/brokers/topics/t/0"))
    value, stat = tree.get("/brokers/topics/t/0")
    assert value == b"2"
    assert stat.ephemeralOwner == tree.get("/brokers/ids/0")[1].ephemeralOwner != 0
    assert sorted(tree.get_children("/brokers/topics/t")) == ["0", "partitions"]
    # a tool adds partitions
    tree.set("/brokers/topics/t", json.dumps({"version": 1, "partitions": {str(n): [0] for n in range(7)}}).encode())
    wait_until(lambda: tree.get("/brokers/topics/t/0")[0] == b"7")
    first.stop()
    assert tree.get_children("/brokers/topics/t") == ["partitions"]
    assert second.stop() == 0


def test_nodes_that_are_not_as_they_should_be(tree: KazooClient, make_broker: MakeBroker) -> None:
    """The broker logs bad nodes, ignores them, and serves everything else."""
    broker = make_broker(0)
    servers = broker.bootstrap_servers
    create_topic(servers, "t", 1)
    with Producing(servers, "t") as producing:
        for path, value in {
            "/brokers/topics/no name": b'{"version":1,"partitions":{"0":[0]}}',
            "/brokers/topics/garbage": b"\xff{",
            "/brokers/topics/future": b'{"version":9,"partitions":{"0":[0]}}',
            "/brokers/topics/empty": b"",
            "/brokers/ids/x": b"{}",
            "/brokers/ids/7": b"{}",
            "/config/topics/t": b"]",
            "/config/changes/config_change_0000000000": b"]",
            "/admin/delete_topics/unknown": b"",
            "/isr_change_notification/x": b"",
        }.items():
            if tree.exists(path):
                tree.set(path, value)
            else:
                tree.create(path, value, makepath=True)
        for path in ("/brokers/topics/no name", "/brokers/ids/7", "/config/topics/t"):
            broker.wait_for_log(path if "no name" not in path else "illegal topic name 'no name'")
        tree.set("/brokers/topics/t", b"]")  # a bad node is no reason to delete the topic's log
        broker.wait_for_log("/brokers/topics/t:")
        tree.create("/brokers/topics/good", b'{"version":1,"partitions":{"0":[0],"1":[7],"2":[]}}')
        wait_until(lambda: leaders(servers, "good") == {0: 0, 1: -1, 2: -1})
        wait_until(lambda: tree.exists("/admin/delete_topics/unknown") is None)
        wait_until(lambda: tree.exists("/brokers/topics/empty") is None)
        producing.more()
    assert len(consumed(servers, "t", producing.acknowledged)) == producing.acknowledged
    assert "Traceback" not in broker.log.read_text()
