"""Brokers that share a real ZooKeeper; kazoo checks its nodes."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from kazoo.client import KazooClient

from spark_klog.client.net.connection import Connection
from spark_klog.client.settings import client_config
from spark_klog.errors import ErrorCode
from spark_klog.protocol.apis import DELETE_TOPICS, FETCH, METADATA, PRODUCE
from tests.support.brokers.batches import make_batch
from tests.support.brokers.raw_client import RawClient
from tests.support.servers.broker import KlogBroker, broker_command, refusal
from tests.support.servers.kafka import HOST, free_port
from tests.support.servers.shared_tree import admin, create_topic, delete_topic, known_brokers, leaders, node
from tests.support.waiting import wait_until

# kazoo warns if the chroot does not exist yet; the broker creates it
pytestmark = pytest.mark.filterwarnings("ignore:No chroot path exists")


def _consumer(servers: str) -> Consumer:
    return Consumer({"bootstrap.servers": servers, "group.id": "g", "enable.auto.commit": False, "log_level": 0})


def test_the_nodes_of_a_broker_and_its_topics(tree: KazooClient, make_broker: Callable[[int], KlogBroker]) -> None:
    before = time.time() * 1000
    broker = make_broker(0)
    payload, stat = tree.get("/brokers/ids/0")
    registered = json.loads(payload)
    assert before - 1000 < int(registered.pop("timestamp")) < time.time() * 1000 + 1000
    assert registered == {
        "version": 5,
        "features": {"transaction.version": {"min_version": 1, "max_version": 2}},
        "host": HOST,
        "port": broker.port,
        "endpoints": [f"PLAINTEXT://{HOST}:{broker.port}"],
        "listener_security_protocol_map": {"PLAINTEXT": "PLAINTEXT"},
        "jmx_port": -1,
    }
    assert stat.ephemeralOwner != 0
    cluster_id = node(tree, "/cluster/id")
    assert cluster_id["version"] == "1"
    assert len(cluster_id["id"]) == 22
    assert f"cluster.id={cluster_id['id']}\n" in (broker.data_dir / "meta.properties").read_text()
    assert admin(broker.bootstrap_servers).list_topics().cluster_id == cluster_id["id"]

    create_topic(broker.bootstrap_servers, "t", 3)
    payload, stat = tree.get("/brokers/topics/t")
    assert stat.ephemeralOwner == 0
    topic = json.loads(payload)
    topic_id = topic.pop("topic_id")
    assert topic == {
        "version": 3,
        "partitions": {"0": [0], "1": [0], "2": [0]},
        "adding_replicas": {},
        "removing_replicas": {},
    }
    assert len(base64.urlsafe_b64decode(topic_id + "==")) == 16
    assert f"topic_id: {topic_id}\n" in (broker.data_dir / "t-1" / "partition.metadata").read_text()
    assert sorted(tree.get_children("/brokers/topics/t/partitions")) == ["0", "1", "2"]
    state = node(tree, "/brokers/topics/t/partitions/0/state")
    assert (state["leader"], state["isr"], state["leader_epoch"], state["version"]) == (0, [0], 0, 1)

    delete_topic(broker.bootstrap_servers, "t")
    assert tree.exists("/brokers/topics/t") is None
    assert broker.stop() == 0
    assert tree.exists("/brokers/ids/0") is None


def test_a_killed_broker_can_start_again_at_once(tree: KazooClient, make_broker: Callable[[int], KlogBroker]) -> None:
    broker = make_broker(0)
    create_topic(broker.bootstrap_servers, "t", 1)
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "acks": "all", "log_level": 0})
    cluster_id = node(tree, "/cluster/id")
    for number in range(2):
        producer.produce("t", str(number))
        assert producer.flush(20) == 0
        owner = tree.get("/brokers/ids/0")[1].ephemeralOwner
        broker.kill()
        assert tree.exists("/brokers/ids/0") is not None, "the session ended too soon: this tests nothing"
        broker.start()
        assert "waiting for the end of its session" not in broker.log.read_text()
        assert tree.get("/brokers/ids/0")[1].ephemeralOwner not in (0, owner)
    assert node(tree, "/cluster/id") == cluster_id
    consumer = _consumer(broker.bootstrap_servers)
    consumer.assign([TopicPartition("t", 0, 0)])
    assert [message.value() for message in consumer.consume(2, 20)] == [b"0", b"1"]
    consumer.close()
    # the entry belongs to the new session: the end of the killed brokers' sessions does not remove it
    assert node(tree, "/brokers/ids/0")["port"] == broker.port


def test_what_a_tool_writes_takes_effect(tree: KazooClient, make_broker: Callable[[int], KlogBroker]) -> None:
    """The nodes are those that Kafka 0.10.2.2's tools write to change a topic's settings, and to delete it."""
    broker = make_broker(0)
    create_topic(broker.bootstrap_servers, "t", 1)
    settings = broker.data_dir / "t-0" / "klog.json"
    tree.set("/config/topics/t", b'{"version":1,"config":{"max.message.bytes":"300","retention.ms":"-1"}}')
    change = b'{"version":2,"entity_path":"topics/t"}'
    tree.create("/config/changes/config_change_", change, sequence=True, makepath=True)
    told = {"version": 1, "config": {"max.message.bytes": 300, "retention.ms": -1}}
    wait_until(lambda: settings.exists() and json.loads(settings.read_text()) == told)
    with RawClient(broker.port) as client:
        batch = bytes(make_batch([(None, b"v" * 1000)], [1]))
        # the setting applies to the open log, a moment after the file is there
        wait_until(lambda: client.produce("t", batch, 7)[0] == ErrorCode.MESSAGE_TOO_LARGE)
    wait_until(lambda: tree.get_children("/config/changes") == [])
    tree.create("/admin/delete_topics/t", b"", makepath=True)
    wait_until(lambda: not list(broker.data_dir.glob("t-*")))
    for path in ("/brokers/topics/t", "/config/topics/t", "/admin/delete_topics/t"):
        wait_until(lambda: tree.exists(path) is None)  # noqa: B023


def test_two_brokers_share_the_partitions(make_broker: Callable[[int], KlogBroker]) -> None:
    first, second = make_broker(0), make_broker(1)
    for broker in (first, second):
        wait_until(lambda: known_brokers(broker.bootstrap_servers) == 2)  # noqa: B023
    create_topic(first.bootstrap_servers, "t", 4)
    for broker in (first, second):
        wait_until(lambda: len(leaders(broker.bootstrap_servers, "t")) == 4)  # noqa: B023
        led = leaders(broker.bootstrap_servers, "t")
        assert sorted(led.values()) == [0, 0, 1, 1]
    for broker, number in ((first, 0), (second, 1)):
        mine = {f"t-{partition}" for partition, leader in led.items() if leader == number}
        wait_until(lambda: {path.name for path in broker.data_dir.glob("t-*")} == mine)  # noqa: B023

    producer = Producer({"bootstrap.servers": second.bootstrap_servers, "acks": "all", "log_level": 0})
    for number in range(400):
        producer.produce("t", str(number), partition=number % 4)
    assert producer.flush(20) == 0
    consumer = _consumer(first.bootstrap_servers)
    consumer.assign([TopicPartition("t", partition, 0) for partition in range(4)])
    messages = consumer.consume(400, 30)
    assert sorted(int(message.value()) for message in messages) == list(range(400))
    assert all(message.partition() == int(message.value()) % 4 for message in messages)
    (done,) = consumer.commit(offsets=[TopicPartition("t", 0, 7)], asynchronous=False)
    assert done.error is None
    consumer.close()
    consumer = _consumer(second.bootstrap_servers)
    assert consumer.committed([TopicPartition("t", 0)], 20)[0].offset == 7
    consumer.close()

    # a partition's requests to the wrong broker
    partition = next(number for number, leader in led.items() if leader == 1)
    config = client_config({"bootstrap.servers": first.bootstrap_servers})
    with Connection(HOST, first.port, config) as connection:
        wanted = {"partition": partition, "fetch_offset": 0, "partition_max_bytes": 1000}
        request = {"max_wait_ms": 100, "min_bytes": 1, "max_bytes": 1000}
        request["topics"] = [{"topic": "t", "partitions": [wanted]}]  # type: ignore[assignment]
        answer = connection.request(FETCH, request)
        assert answer["responses"][0]["partitions"][0]["error_code"] == ErrorCode.NOT_LEADER_OR_FOLLOWER == 6
        data = [{"index": partition, "records": bytes(make_batch([(None, b"v")], [1]))}]
        answer = connection.request(
            PRODUCE, {"acks": -1, "timeout_ms": 1000, "topic_data": [{"name": "t", "partition_data": data}]}
        )
        assert answer["responses"][0]["partition_responses"][0]["error_code"] == 6

    # if one broker stops, its partitions have no leader, and the others are still served
    second.stop()
    wait_until(lambda: sorted(leaders(first.bootstrap_servers, "t").values()) == [-1, -1, 0, 0])
    second.start()
    wait_until(lambda: sorted(leaders(first.bootstrap_servers, "t").values()) == [0, 0, 1, 1])

    # a topic deleted at one broker is deleted at the other too
    delete_topic(first.bootstrap_servers, "t")
    for broker in (first, second):
        wait_until(lambda: not list(broker.data_dir.glob("t-*")))  # noqa: B023


def test_a_topic_that_was_made_again_has_no_old_records(make_broker: Callable[[int], KlogBroker]) -> None:
    """Also on the broker that does not handle the requests but learns of them from ZooKeeper."""
    first, second = make_broker(0), make_broker(1)
    wait_until(lambda: known_brokers(first.bootstrap_servers) == 2)
    servers = f"{first.bootstrap_servers},{second.bootstrap_servers}"
    for round_ in range(2):
        create_topic(first.bootstrap_servers, "t", 2)
        producer = Producer({"bootstrap.servers": servers, "acks": "all", "log_level": 0})
        consumer = _consumer(servers)
        for partition in range(2):
            producer.produce("t", f"{round_}-{partition}", partition=partition)
        assert producer.flush(20) == 0
        consumer.assign([TopicPartition("t", partition, 0) for partition in range(2)])
        messages = consumer.consume(2, 20)
        assert sorted(message.value() for message in messages) == [b"%d-0" % round_, b"%d-1" % round_]
        consumer.close()
        delete_topic(first.bootstrap_servers, "t")


def test_a_broker_id_is_taken_once(
    tree: KazooClient, chroot: str, server_dir: Path, make_broker: Callable[[int], KlogBroker]
) -> None:
    broker = make_broker(0)
    command = broker_command(server_dir / "other", free_port(), "--broker-id", "0", "--zookeeper", chroot)
    assert refusal(command, code=1) == (
        f"klog: broker id 0 is registered by a broker at {HOST}:{broker.port}; choose another --broker-id"
    )
    # the registered broker is not affected
    assert node(tree, "/brokers/ids/0")["port"] == broker.port
    with Connection(HOST, broker.port, client_config({"bootstrap.servers": broker.bootstrap_servers})) as connection:
        answer = connection.request(METADATA, {"topics": []})
    assert [entry["port"] for entry in answer["brokers"]] == [broker.port]


def test_no_zookeeper_is_a_clear_error(server_dir: Path) -> None:
    nowhere = f"{HOST}:{free_port()}"
    arguments = ["--zookeeper", nowhere, "--set", "zookeeper.session.timeout.ms=500"]
    command = broker_command(server_dir / "data", free_port(), *arguments)
    assert refusal(command, code=1).startswith(f"klog: no ZooKeeper answers at {nowhere} within 1 s")


@pytest.mark.test_all("long")
def test_a_deletion_waits_for_a_leader_that_stands_still(make_broker: Callable[[int], KlogBroker]) -> None:
    """It waits until that broker's session ends; a broker that waits can be stopped."""
    brokers = first, second = make_broker(0), make_broker(1)
    wait_until(lambda: known_brokers(first.bootstrap_servers) == 2)
    create_topic(first.bootstrap_servers, "t", 2)
    wait_until(lambda: set(leaders(second.bootstrap_servers, "t").values()) == {0, 1})
    os.kill(second.pid, signal.SIGSTOP)
    try:
        with Connection(HOST, first.port, client_config({"bootstrap.servers": first.bootstrap_servers})) as connection:
            answer = connection.request(DELETE_TOPICS, {"topics": [{"name": "t"}], "timeout_ms": 500})
            (deleted,) = answer["responses"]
            assert deleted["error_code"] == ErrorCode.REQUEST_TIMED_OUT
            assert deleted["error_message"] == "topic t is being deleted, but broker 1 may still know it"
            connection.send(DELETE_TOPICS, {"topics": [{"name": "t"}], "timeout_ms": 2**31 - 1})
            time.sleep(0.5)
            begun = time.monotonic()
            assert first.stop() == 0
            assert time.monotonic() - begun < 10
    finally:
        os.kill(second.pid, signal.SIGCONT)
    brokers[0].start()
    wait_until(lambda: not (brokers[0].data_dir / "t-0").exists() and not (brokers[1].data_dir / "t-1").exists())
    create_topic(first.bootstrap_servers, "t", 2)
