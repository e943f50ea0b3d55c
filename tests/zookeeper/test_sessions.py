"""Brokers whose session with ZooKeeper expires, or whose ZooKeeper is unavailable."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.cimpl import NewTopic
from kazoo.client import KazooClient

from spark_klog.broker.metadata.registry import Registry
from spark_klog.errors import ErrorCode
from spark_klog.protocol import apis
from spark_klog.trees.opening import open_tree
from tests.support.brokers.batches import make_batch
from tests.support.brokers.raw_client import RawClient, error_codes
from tests.support.servers.broker import KlogBroker, broker_command, refusal
from tests.support.servers.kafka import HOST, ZooKeeperServer, free_port
from tests.support.servers.shared_tree import (
    admin,
    controller_of,
    create_topic,
    delete_topic,
    expire_session,
    known_brokers,
    leaders,
    node,
)
from tests.support.waiting import wait_until

# kazoo warns if the chroot does not exist yet; the broker creates it
pytestmark = pytest.mark.filterwarnings("ignore:No chroot path exists")

#: `make soak` sets this.
_ROUNDS = int(os.environ.get("SPARK_KLOG_KILLS", "1"))
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


@pytest.fixture
def two_brokers(tree: KazooClient, make_broker: MakeBroker) -> tuple[KlogBroker, KlogBroker]:
    """Two brokers with sessions of 2 s; partition 0 of the topic t, and of __consumer_offsets, is led by broker 0."""
    settings = "zookeeper.session.timeout.ms=2000", "offsets.topic.num.partitions=1"
    brokers = make_broker(0, *settings), make_broker(1, *settings)
    wait_until(lambda: known_brokers(brokers[0].bootstrap_servers) == 2)
    for topic in ("t", "__consumer_offsets"):
        create_led_by_0(brokers[1], topic)
        wait_until(lambda: leaders(brokers[0].bootstrap_servers, topic) == {0: 0})  # noqa: B023
    return brokers


def create_led_by_0(broker: KlogBroker, topic: str) -> None:
    """Create a topic with one partition, which broker 0 leads."""
    client = admin(broker.bootstrap_servers)
    client.create_topics([NewTopic(topic, 1, replica_assignment=[[0]])])[topic].result(20)


def freeze_past_its_session(tree: KazooClient, broker: KlogBroker, other: KlogBroker) -> None:
    """Stop the process of broker 0 until its session with ZooKeeper has ended, and the other one is the controller."""
    os.kill(broker.pid, signal.SIGSTOP)
    wait_until(lambda: tree.exists("/brokers/ids/0") is None)
    # clients of the other one would wait for the controller that stands still
    wait_until(lambda: controller_of(other.bootstrap_servers) != 0)


_COMMIT = {"partition_index": 0, "committed_offset": 7, "committed_metadata": ""}
_COMMITS = {"group_id": "g", "generation_id_or_member_epoch": -1, "topics": [{"name": "t", "partitions": [_COMMIT]}]}


def test_what_a_frozen_broker_acknowledges_is_there(
    tree: KazooClient, two_brokers: tuple[KlogBroker, KlogBroker]
) -> None:
    """Its session ends, the topic is deleted, and made again when the broker goes on: it must know that first."""
    first, second = two_brokers
    batch = bytes(make_batch([(None, b"v")], [1]))
    with RawClient(first.port) as client, RawClient(first.port) as committing, RawClient(first.port) as reading:
        assert client.produce("t", batch, 7) == (0, 0)
        assert reading.fetch("t", 0, 4)[0] == ErrorCode.NONE
        assert error_codes(committing.request(apis.OFFSET_COMMIT, 7, _COMMITS)) == [0]
        freeze_past_its_session(tree, first, second)
        try:
            delete_topic(second.bootstrap_servers, "t")
            create_topic(second.bootstrap_servers, "t", 1)
            # the requests wait in the sockets; the broker reads them before it can know that its session has ended
            answers: list[tuple[int, int]] = []
            codes: list[int] = []
            fetched: list[tuple[int, bytes]] = []

            def produce() -> None:
                answers.append(client.produce("t", batch, 7))

            def commit() -> None:
                codes.extend(error_codes(committing.request(apis.OFFSET_COMMIT, 7, _COMMITS)))

            def fetch() -> None:
                fetched.append(reading.fetch("t", 0, 4))

            threads = [threading.Thread(target=one) for one in (produce, commit, fetch)]
            for thread in threads:
                thread.start()
            time.sleep(0.2)
        finally:
            os.kill(first.pid, signal.SIGCONT)
        for thread in threads:
            thread.join()
        refusals = ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert answers[0][0] in refusals
        assert fetched[0][0] in refusals  # a consumer would go on after records that the topic does not have
        assert len(codes) == 1
        wait_until(lambda: offset_of(first) == (7 if codes == [ErrorCode.NONE] else -1))
    first.wait_for_log("the session with ZooKeeper may have ended: no records are taken")
    first.wait_for_log("records are taken again")


def offset_of(broker: KlogBroker) -> int | None:
    """The offset of partition 0 of t that group g has committed, -1 if none; None if the broker does not answer yet."""
    request = {"group_id": "g", "topics": [{"name": "t", "partition_indexes": [0]}]}
    with RawClient(broker.port) as client:
        answer = client.request(apis.OFFSET_FETCH, 5, request)
        offset: int = answer["topics"][0]["partitions"][0]["committed_offset"]
        return None if any(error_codes(answer)) else offset


def test_a_frozen_broker_leads_the_next_topic_of_the_name(
    tree: KazooClient, two_brokers: tuple[KlogBroker, KlogBroker]
) -> None:
    """The topic is made again as soon as the broker is registered, which may be before it has read the topics."""
    first, second = two_brokers
    done = threading.Event()
    acknowledged: list[bytes] = []

    def produce(client: RawClient) -> None:
        number = 0
        while not done.is_set():
            number += 1
            value = b"%d" % number
            if client.produce("t", bytes(make_batch([(None, value)], [1])), 7)[0] == 0 and is_new.is_set():
                acknowledged.append(value)

    for _ in range(_ROUNDS):
        is_new = threading.Event()
        acknowledged.clear()
        done.clear()
        with RawClient(first.port, timeout=60) as client:
            producing = threading.Thread(target=produce, args=(client,))
            producing.start()
            try:
                freeze_past_its_session(tree, first, second)
                try:
                    delete_topic(second.bootstrap_servers, "t")
                    is_new.set()  # what is acknowledged from now on, one request aside, belongs to the next topic
                finally:
                    os.kill(first.pid, signal.SIGCONT)
                wait_until(lambda: tree.exists("/brokers/ids/0"))
                create_led_by_0(second, "t")
                wait_until(lambda: len(acknowledged) > 10)
            finally:
                done.set()
                producing.join()
        values = set(consumed(first.bootstrap_servers, "t", len(acknowledged)))
        # the request under way when the broker was stopped may have been for the topic before
        assert set(acknowledged[1:]) - values == set()


@pytest.mark.parametrize(
    ("holds", "is_cut_off", "brokers", "may_read", "may_write"),
    [
        (True, False, {0, 1}, True, True),
        (False, False, {0}, False, False),
        (False, True, {0}, True, True),
        (False, True, set(), True, True),
        (False, True, {0, 1}, True, False),
    ],
)
def test_who_may_go_on_without_zookeeper(
    tmp_path: Path, holds: bool, is_cut_off: bool, brokers: set[int], may_read: bool, may_write: bool
) -> None:
    """A broker that is alone; one of several may only read. None if its session has ended, or is another one."""
    tree = open_tree(str(tmp_path))
    registry = Registry(tree, 0)
    registry._lease = Standing(7, holds, is_cut_off)
    registry.brokers = {number: [] for number in brokers}
    for session, is_same in ((7, True), (6, False), (None, False)):
        registry._session = session
        assert registry.holds(for_reading=True) == (may_read and is_same)
        assert registry.holds() == (may_write and is_same)
    tree.close()


class Standing(NamedTuple):
    """A lease that does not change."""

    session: int
    holds: bool
    is_cut_off: bool


@pytest.mark.test_all("long")
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
                assert json.loads(path.read_text()) == {"version": 1, "config": {"retention.ms": 77}}
                producing.more()
                tree.stop()
                tree.close()
                create_topic(servers, "other", 1)
            assert "Traceback" not in broker.log.read_text()


def test_several_brokers_without_zookeeper_are_read_only(server_dir: Path) -> None:
    """One that ZooKeeper does not reach can't know whether another one has deleted a topic meanwhile."""
    batch = bytes(make_batch([(None, b"v")], [1]))
    with ZooKeeperServer(server_dir / "zookeeper", tick_ms=500) as zookeeper:
        arguments = ["--zookeeper", zookeeper.connect, "--set", "zookeeper.session.timeout.ms=1000"]
        with (
            KlogBroker(server_dir, "--broker-id", "0", *arguments, name="first") as first,
            KlogBroker(server_dir, "--broker-id", "1", *arguments, name="second") as second,
            RawClient(first.port) as client,
        ):
            wait_until(lambda: known_brokers(first.bootstrap_servers) == 2)
            create_led_by_0(second, "t")
            wait_until(lambda: client.produce("t", batch, 7)[0] == ErrorCode.NONE)
            zookeeper.kill()
            wait_until(lambda: client.produce("t", batch, 7)[0] == ErrorCode.NOT_LEADER_OR_FOLLOWER)
            assert client.fetch("t", 0, 4)[0] == ErrorCode.NONE
            zookeeper.start()
            wait_until(lambda: client.produce("t", batch, 7)[0] == ErrorCode.NONE)
            assert "records are taken again" in first.log.read_text()


@pytest.mark.test_all("long")
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
    assert refusal(broker_command(server_dir / "data", free_port(), *arguments), code=1) == (
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
