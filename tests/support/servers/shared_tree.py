"""Support for tests of brokers with a real ZooKeeper: inspect it from outside, run Kafka 0.10.2.2's own tools."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from kazoo.client import KazooClient

from spark_klog.protocol.apis import METADATA
from tests.support.brokers.raw_client import RawClient
from tests.support.servers.kafka import kafka_libs


def admin(servers: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": servers, "log_level": 0})


def node(tree: KazooClient, path: str) -> dict[str, Any]:
    """Parse the JSON of a ZooKeeper node."""
    value: dict[str, Any] = json.loads(tree.get(path)[0])
    return value


def create_topic(servers: str, topic: str, partitions: int, config: dict[str, str] | None = None) -> None:
    new = NewTopic(topic, partitions, 1, config=config or {})
    client = admin(servers)  # keep a reference: the client's calls end when it is deleted
    client.create_topics([new])[topic].result(20)


def delete_topic(servers: str, topic: str) -> None:
    client = admin(servers)
    client.delete_topics([topic])[topic].result(20)


def controller_of(server: str) -> int:
    """The controller that this broker knows, to which its clients send changes."""
    return int(_metadata(server)["controller_id"])


def _metadata(server: str) -> dict[str, Any]:
    """All topics, which creates none, of this broker: librdkafka may ask another broker, which learns of one later."""
    with RawClient(int(server.rpartition(":")[2])) as client:
        return client.request(METADATA, 1, {"topics": None})


def known_brokers(server: str) -> int:
    return len(_metadata(server)["brokers"])


def leaders(server: str, topic: str) -> dict[int, int]:
    """Leaders by partition in a broker's metadata; -1: no leader, {}: the topic does not exist."""
    entries = [entry for entry in _metadata(server)["topics"] if entry["name"] == topic]
    return {each["partition_index"]: each["leader_id"] for entry in entries for each in entry["partitions"]}


def expire_session(tree: KazooClient, path: str) -> None:
    """Expire the session that owns an ephemeral node: another client takes the session over and closes it.

    ZooKeeper accepts a client with the session's password: 16 bytes of java.util.Random, seeded with the session's id
    and a constant (ZooKeeperServer.generatePasswd).
    """
    session = tree.get(path)[1].ephemeralOwner
    assert session, f"{path} is not ephemeral"
    mask = (1 << 48) - 1
    seed = (session ^ 0xB3415C00 ^ 0x5DEECE66D) & mask
    password = b""
    for _ in range(4):
        seed = (seed * 0x5DEECE66D + 0xB) & mask
        password += (seed >> 16).to_bytes(4, "little")
    thief = KazooClient(f"{tree.hosts[0][0]}:{tree.hosts[0][1]}", client_id=(session, password))
    thief.start(20)
    assert thief.client_id[0] == session, "the session could not be taken over"
    thief.stop()
    thief.close()


def old_tool(name: str, connect: str, *arguments: str, option: str = "--zookeeper") -> str:
    """Run a main class of Kafka 0.10.2.2 and return its output; AssertionError if it fails.

    `option` is the option of the tool that takes ZooKeeper's address, `connect`.
    """
    command = ["java", "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
    command += ["-cp", f"{kafka_libs('0.10.2.2')}/*", name, option, connect, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Exception" not in done.stdout, done.stdout
    return done.stdout
