"""Groups and their offsets between Apache Kafka and us: the records in the log, and Kafka's tool for groups."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from spark_klog.broker.groups.offset_manager import OffsetManager
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from tests.support.clients.commits import commit_offsets
from tests.support.clients.dump import dump_files
from tests.support.runs.soak import in_soak
from tests.support.servers.broker import KlogBroker
from tests.support.servers.java_tools import JavaTools
from tests.support.servers.kafka import NEWEST, Kafka, Version
from tests.support.waiting import wait_until

pytestmark = pytest.mark.peer

_TOOL = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
PARTITIONS = 3
each = pytest.mark.parametrize(
    "version",
    [
        NEWEST,
        pytest.param("4.1.0", marks=[pytest.mark.test_all("version"), in_soak]),
        pytest.param("3.9.1", marks=pytest.mark.test_all("version")),
    ],
)


def _member(servers: str, group: str, **more: object) -> Consumer:
    settings = {"bootstrap.servers": servers, "group.id": group, "enable.auto.commit": False, "log_level": 0}
    times = {"session.timeout.ms": 30_000, "heartbeat.interval.ms": 200, "reconnect.backoff.max.ms": 200}
    return Consumer({**settings, **times, "auto.offset.reset": "earliest", **more})


def _produce(servers: str, topic: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": servers})
    for number in range(count):
        producer.produce(topic, f"{number}", partition=number % PARTITIONS)
    assert producer.flush(30) == 0


def _consume(member: Consumer, count: int) -> list[tuple[int, int]]:
    """Consume that many records; return (partition, offset) of each."""
    found: list[tuple[int, int]] = []
    deadline = time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        message = member.poll(0.2)
        if message is not None and message.error() is None:
            found.append((message.partition() or 0, message.offset() or 0))
    return found


def _offsets(servers: str, group: str, topic: str = "t") -> list[int]:
    """The committed offset of each partition."""
    with closing(_member(servers, group)) as reader:
        places = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
        return [place.offset for place in reader.committed(places, 30)]


def _create(servers: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(30)


class Tool:
    """ConsumerGroupCommand of a version, at a broker."""

    def __init__(self, tools: JavaTools, servers: str) -> None:
        self._tools, self._servers = tools, servers

    def __call__(self, *arguments: str) -> str:
        return self._tools.run(_TOOL, "--bootstrap-server", self._servers, *arguments)[1]

    def table(self, *arguments: str) -> list[dict[str, str]]:
        """The rows that it prints, by their headings."""
        output = self(*arguments)
        lines = [line.split() for line in output.splitlines() if line.strip()]
        head = next((number for number, words in enumerate(lines) if words[0] == "GROUP"), None)
        assert head is not None, output
        return [dict(zip(lines[head], words, strict=True)) for words in lines[head + 1 :]]


@pytest.fixture
def broker(server_dir: Path) -> Iterator[KlogBroker]:
    with KlogBroker(server_dir, "--set", "group.initial.rebalance.delay.ms=0") as running:
        yield running


def test_kafka_reads_an_expiry_time(tmp_path: Path) -> None:
    """Kafka's offsets decoder reads what OffsetCommit 2-4 with a retention time writes to the log."""
    log = PartitionLog(tmp_path / "__consumer_offsets-0", LogConfig())
    offsets = OffsetManager(lambda group, stored: None, lambda key, value, written_ms: None)
    commit_offsets(offsets, log, "g", {("t", 3): (7, -1, "kept")}, retention_ms=60_000)
    (committed,) = offsets.all("g").values()
    log.flush()
    log.close()
    output = dump_files(NEWEST, list(log.directory.glob("*.log")), "--offsets-decoder")
    value = json.loads(re.search(r"payload: (\{.*\})", output)[1])  # type: ignore[index]
    assert value == {
        "version": "1",
        "data": {
            "offset": 7,
            "metadata": "kept",
            "commitTimestamp": committed.timestamp,
            "expireTimestamp": committed.timestamp + 60_000,
        },
    }


@each
def test_the_tool_lists_describes_resets_and_deletes(broker: KlogBroker, version: Version) -> None:
    with JavaTools(version) as tools:
        _check_tool(broker, Tool(tools, broker.bootstrap_servers))


def _check_tool(broker: KlogBroker, tool: Tool) -> None:
    servers = broker.bootstrap_servers
    _create(servers, "t")
    _produce(servers, "t", 30)
    member = _member(servers, "g", **{"client.id": "worker"})
    member.subscribe(["t"])
    assert len(_consume(member, 30)) == 30
    member.commit(offsets=[TopicPartition("t", 0, 4), TopicPartition("t", 1, 10)], asynchronous=False)
    _member(servers, "simple").commit(offsets=[TopicPartition("t", 2, 1)], asynchronous=False)

    states = {row["GROUP"]: row["STATE"] for row in tool.table("--list", "--state")}
    assert states == {"g": "Stable", "simple": "Empty"}
    rows = tool.table("--describe", "--group", "g")
    figures = {
        int(row["PARTITION"]): (row["CURRENT-OFFSET"], row["LOG-END-OFFSET"], row["LAG"], row["CLIENT-ID"])
        for row in rows
    }
    assert figures == {
        0: ("4", "10", "6", "worker"),
        1: ("10", "10", "0", "worker"),
        2: ("-", "10", "-", "worker"),
    }
    (described,) = tool.table("--describe", "--members", "--verbose", "--group", "g")
    assert (described["CLIENT-ID"], described["HOST"], described["#PARTITIONS"]) == ("worker", "/127.0.0.1", "3")
    assert re.search(r"\(0,1,2\)|t:0,1,2", " ".join(described.values()))
    assert "Stable" in tool("--describe", "--state", "--group", "g")
    refused = tool("--reset-offsets", "--to-earliest", "--topic", "t", "--execute", "--group", "g")
    assert "can only be reset if the group" in refused
    assert "NON_EMPTY_GROUP" in (deleted := tool("--delete", "--group", "g")) or "not empty" in deleted
    assert _offsets(servers, "g") == [4, 10, -1001]

    member.close()
    tool("--reset-offsets", "--shift-by", "-1", "--topic", "t:0", "--execute", "--group", "g")
    assert _offsets(servers, "g") == [3, 10, -1001]
    tool("--reset-offsets", "--to-latest", "--topic", "t", "--execute", "--group", "g")
    assert _offsets(servers, "g") == [10, 10, 10]
    tool("--delete-offsets", "--topic", "t:1", "--group", "g")
    assert _offsets(servers, "g") == [10, -1001, 10]
    assert "successful" in tool("--delete", "--group", "g")
    assert _offsets(servers, "g") == [-1001] * 3
    assert tool("--list").split() == ["simple"]
    # the same after a kill
    broker.kill()
    broker.start()
    assert _offsets(servers, "g") == [-1001] * 3
    assert _offsets(servers, "simple") == [-1001, -1001, 1]


def _killed_with_a_group(broker: KlogBroker) -> tuple[Consumer, str]:
    """Kill the broker while a group has a static member and offsets; return the member and its id."""
    servers = broker.bootstrap_servers
    _create(servers, "t")
    _produce(servers, "t", 30)
    member = _member(servers, "g", **{"client.id": "worker", "group.instance.id": "w-1"})
    member.subscribe(["t"])
    assert len(_consume(member, 30)) == 30
    place = TopicPartition("t", 0, 4, "where it is: ü")
    member.commit(offsets=[place, TopicPartition("t", 1, 10)], asynchronous=False)
    _member(servers, "simple").commit(offsets=[TopicPartition("t", 2, 1)], asynchronous=False)
    _member(servers, "deleted").commit(offsets=[TopicPartition("t", 2, 1)], asynchronous=False)
    admin = AdminClient({"bootstrap.servers": servers})
    admin.delete_consumer_groups(["deleted"])["deleted"].result(30)
    member_id = member.memberid()
    broker.kill()
    return member, member_id


def test_kafkas_tool_reads_our_records(broker: KlogBroker) -> None:
    member, member_id = _killed_with_a_group(broker)
    member.close()
    folder = broker.data_dir / "__consumer_offsets-0"
    output = dump_files(NEWEST, sorted(folder.glob("*.log")), "--offsets-decoder")
    found = re.findall(r"key: (\{.*?\}\}) payload: (.*)$", output, re.MULTILINE)
    records = [(json.loads(key), None if value == "<DELETE>" else json.loads(value)["data"]) for key, value in found]
    (group,) = (value for key, value in records if key == {"type": "2", "data": {"group": "g"}})
    assert (group["protocolType"], group["generation"], group["leader"]) == ("consumer", 1, member_id)
    (stored,) = group["members"]
    assert (stored["memberId"], stored["groupInstanceId"], stored["clientId"]) == (member_id, "w-1", "worker")
    assert (stored["rebalanceTimeout"], stored["sessionTimeout"]) == (300_000, 30_000)
    assert stored["subscription"]["topics"] == ["t"]
    offsets = [
        (key["data"]["group"], key["data"]["partition"], value and (value["offset"], value["metadata"][:11]))
        for key, value in records
        if key["type"] == "1"
    ]
    assert offsets == [
        ("g", 0, (4, "where it is")),
        ("g", 1, (10, "")),
        ("simple", 2, (1, "")),
        ("deleted", 2, (1, "")),
        ("deleted", 2, None),
    ]


@pytest.mark.test_all("version")
def test_a_kafka_with_our_folders_finds_the_group_and_its_offsets(broker: KlogBroker, server_dir: Path) -> None:
    member, member_id = _killed_with_a_group(broker)
    kafka = Kafka("3.9.1", server_dir / "kafka", {"group.min.session.timeout.ms": 1000})
    kafka.log_dir.mkdir(parents=True)
    for path in broker.data_dir.glob("*-?"):
        copy = kafka.log_dir / path.name
        shutil.copytree(path, copy)
        (copy / "partition.metadata").unlink()  # Kafka gives the topic an id of its own
    with kafka:
        kafka.create_topic("t", PARTITIONS)
        wait_until(lambda: _offsets(kafka.bootstrap_servers, "g") == [4, 10, -1001], "Kafka's offsets", seconds=30)
        assert _offsets(kafka.bootstrap_servers, "simple") == [-1001, -1001, 1]
        assert _offsets(kafka.bootstrap_servers, "deleted") == [-1001] * 3
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        group = admin.describe_consumer_groups(["g"])["g"].result(30)
        (found,) = group.members
        assert (group.state.name, found.member_id, found.group_instance_id) == ("STABLE", member_id, "w-1")
        assert found.client_id == "worker"
        assigned = found.assignment.topic_partitions
        assert sorted((place.topic, place.partition) for place in assigned) == [("t", number) for number in range(3)]
    member.close()


@pytest.mark.test_all("long")
@each
def test_we_go_on_with_a_group_of_kafka(server_dir: Path, version: Version) -> None:
    """Kafka dies, and we serve its folders at its address: a member does not notice."""
    with Kafka(version, server_dir / "kafka") as kafka:
        servers = kafka.bootstrap_servers
        kafka.create_topic("t", PARTITIONS)
        _produce(servers, "t", 30)
        _member(servers, "simple").commit(offsets=[TopicPartition("t", 2, 1)], asynchronous=False)
        assigned: list[int] = []
        member = _member(servers, "g", **{"client.id": "worker"})
        member.subscribe(["t"], on_assign=lambda _, places: assigned.append(len(places)))
        first = _consume(member, 30)
        place = TopicPartition("t", 0, 4, "where it is: ü")
        member.commit(offsets=[place, TopicPartition("t", 1, 10)], asynchronous=False)
        member_id = member.memberid()
        kafka.kill()
        broker = KlogBroker(server_dir, "--set", "group.initial.rebalance.delay.ms=0")
        broker.port = int(servers.rpartition(":")[2])
        for path in kafka.log_dir.glob("*-?"):
            shutil.copytree(path, broker.data_dir / path.name)
        with broker:
            admin = AdminClient({"bootstrap.servers": servers})
            group = admin.describe_consumer_groups(["g"])["g"].result(30)
            assert [(found.member_id, found.client_id) for found in group.members] == [(member_id, "worker")]
            assert group.state.name == "STABLE"
            _produce(servers, "t", 30)
            assert sorted(first + _consume(member, 30)) == [(p, o) for p in range(PARTITIONS) for o in range(20)]
            assert (assigned, member.memberid()) == ([PARTITIONS], member_id)
            (committed,) = member.committed([TopicPartition("t", 0)], 30)
            assert (committed.offset, committed.metadata) == (4, "where it is: ü")
            member.commit(offsets=[TopicPartition("t", 2, 20)], asynchronous=False)
            assert _offsets(servers, "g") == [4, 10, 20]
            assert _offsets(servers, "simple") == [-1001, -1001, 1]
            member.close()
