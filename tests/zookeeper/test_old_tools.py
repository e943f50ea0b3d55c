"""Kafka 0.10.2.2's tools, which talk to ZooKeeper only, list, create, alter and delete topics of our brokers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from kazoo.client import KazooClient

from tests.support.servers.broker import KlogBroker
from tests.support.servers.shared_tree import (
    admin,
    create_topic,
    known_brokers,
    leaders,
    node,
    old_tool,
)
from tests.support.waiting import wait_until

# kazoo warns if the chroot does not exist yet; the broker creates it
pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore:No chroot path exists")]

MakeBroker = Callable[..., KlogBroker]


def described(text: str) -> list[tuple[int, int, list[int], list[int]]]:
    """(partition, leader, replicas, isr) from the output of TopicCommand --describe."""
    found = re.findall(r"Partition: (\d+)\tLeader: (-?\d+)\tReplicas: ([\d,]*)\tIsr: ([\d,]*)", text)
    return [
        (int(partition), int(leader), [*map(int, replicas.split(","))], [*map(int, isr.split(","))])
        for partition, leader, replicas, isr in found
    ]


def roundtrip(servers: str, topic: str, partitions: int) -> None:
    producer = Producer({"bootstrap.servers": servers, "acks": "all", "log_level": 0})
    for partition in range(partitions):
        producer.produce(topic, f"in {partition}", partition=partition)
    assert producer.flush(20) == 0
    check_records(servers, topic, partitions)


def check_records(servers: str, topic: str, partitions: int) -> None:
    config = {"bootstrap.servers": servers, "group.id": "g", "enable.auto.commit": False, "log_level": 0}
    consumer = Consumer(config)
    for partition in range(partitions):
        consumer.assign([TopicPartition(topic, partition, 0)])
        assert [message.value() for message in consumer.consume(1, 20)] == [b"in %d" % partition]
    consumer.close()


def _is_too_large(servers: str, partition: int) -> bool:
    """Whether the partition refuses a record of 1000 bytes: the setting applies a moment after its file is there."""
    errors: list[str | None] = []
    producer = Producer({"bootstrap.servers": servers, "acks": "all", "log_level": 0})
    callback = lambda error, _: errors.append(error.name() if error else None)  # noqa: E731
    producer.produce("theirs", b"v" * 1000, partition=partition, on_delivery=callback)
    producer.flush(20)
    return errors == ["MSG_SIZE_TOO_LARGE"]


@pytest.mark.test_all("version")  # test_brokers.py has the nodes
def test_they_see_topics_of_ours(chroot: str, make_broker: MakeBroker) -> None:
    first, second = make_broker(0), make_broker(1)
    wait_until(lambda: known_brokers(first.bootstrap_servers) == 2)
    create_topic(first.bootstrap_servers, "ours", 3, {"retention.ms": "1234567"})
    create_topic(first.bootstrap_servers, "other", 1)
    assert old_tool("kafka.admin.TopicCommand", chroot, "--list").split() == ["other", "ours"]
    text = old_tool("kafka.admin.TopicCommand", chroot, "--describe", "--topic", "ours")
    assert "PartitionCount:3\tReplicationFactor:1\tConfigs:retention.ms=1234567\n" in text
    led = leaders(second.bootstrap_servers, "ours")
    assert sorted(led.values()) in ([0, 0, 1], [0, 1, 1])
    assert described(text) == [(number, led[number], [led[number]], [led[number]]) for number in range(3)]

    # a stopped broker leads nothing
    second.stop()
    gone = sorted(number for number, leader in led.items() if leader == 1)

    def unavailable() -> list[int]:
        text = old_tool("kafka.admin.TopicCommand", chroot, "--describe", "--unavailable-partitions", "--topic", "ours")
        found = described(text)
        assert all((leader, replicas, isr) == (-1, [1], [1]) for _, leader, replicas, isr in found)
        return [number for number, *_ in found]

    wait_until(
        lambda: sorted(n for n, leader in leaders(first.bootstrap_servers, "ours").items() if leader < 0) == gone
    )
    wait_until(lambda: unavailable() == gone)


@pytest.mark.test_all("version")
def test_their_consumer_reads(tree: KazooClient, chroot: str, make_broker: MakeBroker) -> None:
    """Kafka's consumer finds brokers, partitions and leaders in ZooKeeper, and stores its offsets there."""
    first, second = make_broker(0), make_broker(1)
    wait_until(lambda: known_brokers(second.bootstrap_servers) == 2)
    create_topic(second.bootstrap_servers, "t", 4)
    servers = f"{first.bootstrap_servers},{second.bootstrap_servers}"
    wait_until(lambda: len(leaders(first.bootstrap_servers, "t")) == 4)
    roundtrip(servers, "t", 4)
    arguments = ["--topic", "t", "--from-beginning", "--max-messages", "4", "--consumer-property", "group.id=old"]
    said = old_tool("kafka.tools.ConsoleConsumer", chroot, *arguments)
    assert sorted(said.splitlines()) == [f"in {partition}" for partition in range(4)]
    offsets = {number: tree.get(f"/consumers/old/offsets/t/{number}")[0] for number in range(4)}
    assert offsets == dict.fromkeys(range(4), b"1")


@pytest.mark.test_all("version")
def test_topics_of_theirs_are_served(tree: KazooClient, chroot: str, make_broker: MakeBroker) -> None:
    """Two brokers serve a topic that Kafka's tools create, alter and delete."""
    first, second = make_broker(0), make_broker(1)
    brokers = {0: first, 1: second}
    servers = f"{first.bootstrap_servers},{second.bootstrap_servers}"
    wait_until(lambda: known_brokers(first.bootstrap_servers) == 2)
    settings = ["retention.ms=-1", "segment.bytes=4000", "min.insync.replicas=1", "message.format.version=0.10.2"]
    settings.append("preallocate=true")  # not supported here, and must break nothing
    configs = [word for setting in settings for word in ("--config", setting)]
    arguments = ["--partitions", "3", "--replication-factor", "1", *configs]
    said = old_tool("kafka.admin.TopicCommand", chroot, "--create", "--topic", "theirs", *arguments)
    assert 'Created topic "theirs"' in said
    for broker in brokers.values():
        wait_until(lambda: len(leaders(broker.bootstrap_servers, "theirs")) == 3)  # noqa: B023
    led = leaders(first.bootstrap_servers, "theirs")
    assert set(led.values()) == {0, 1}
    # nodes that the tools leave to the controller
    wait_until(lambda: all(tree.exists(f"/brokers/topics/theirs/partitions/{number}/state") for number in range(3)))
    for number, leader in led.items():
        state = node(tree, f"/brokers/topics/theirs/partitions/{number}/state")
        assert state == {"version": 1, "leader": leader, "isr": [leader], "leader_epoch": 0, "controller_epoch": 1}
    registered = node(tree, "/brokers/topics/theirs")
    assert (registered["version"], len(registered["topic_id"])) == (3, 22)
    for number, leader in led.items():
        folder = brokers[leader].data_dir / f"theirs-{number}"
        wait_until((folder / "partition.metadata").exists)  # written last
        told = {"retention.ms": -1, "segment.bytes": 4000}
        assert json.loads((folder / "klog.json").read_text()) == {"version": 1, "config": told}
        assert f"topic_id: {registered['topic_id']}\n" in (folder / "partition.metadata").read_text()
    first.wait_for_log("topic theirs: setting preallocate=true: only false is supported; it is ignored")
    roundtrip(servers, "theirs", 3)
    text = old_tool("kafka.admin.TopicCommand", chroot, "--describe", "--topic", "theirs")
    assert described(text) == [(number, led[number], [led[number]], [led[number]]) for number in range(3)]

    # settings apply to open logs: the new max.message.bytes takes effect at once
    with_small = ["--alter", "--entity-type", "topics", "--entity-name", "theirs"]
    said = old_tool("kafka.admin.ConfigCommand", chroot, *with_small, "--add-config", "max.message.bytes=300")
    assert "Completed" in said or "Updated" in said
    for partition in range(3):
        wait_until(lambda: _is_too_large(servers, partition))  # noqa: B023
    wait_until(lambda: tree.get_children("/config/changes") == [])

    # more partitions; the node that the tool writes has no topic id, but the topic keeps its id
    said = old_tool("kafka.admin.TopicCommand", chroot, "--alter", "--topic", "theirs", "--partitions", "5")
    assert "Adding partitions succeeded" in said
    for broker in brokers.values():
        wait_until(lambda: len(leaders(broker.bootstrap_servers, "theirs")) == 5)  # noqa: B023
    wait_until(lambda: node(tree, "/brokers/topics/theirs").get("topic_id") == registered["topic_id"])
    wait_until(lambda: tree.exists("/brokers/topics/theirs/partitions/4/state"))
    check_records(servers, "theirs", 3)

    said = old_tool("kafka.admin.TopicCommand", chroot, "--delete", "--topic", "theirs")
    assert "marked for deletion" in said
    for broker in brokers.values():
        wait_until(lambda: not list(broker.data_dir.glob("theirs-*")))  # noqa: B023
        wait_until(lambda: "theirs" not in admin(broker.bootstrap_servers).list_topics(timeout=60).topics)  # noqa: B023
    for path in ("/brokers/topics/theirs", "/config/topics/theirs", "/admin/delete_topics/theirs"):
        wait_until(lambda: tree.exists(path) is None)  # noqa: B023
    assert "theirs" not in old_tool("kafka.admin.TopicCommand", chroot, "--list")
