"""`klog topics` with our broker and Apache Kafka, compared with Kafka's own TopicCommand."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from tests.support.clients.klog import klog
from tests.support.servers.broker import KlogBroker
from tests.support.servers.java_tools import JavaTools


@pytest.fixture(scope="module")
def servers(module_server_dir: Path) -> Iterator[str]:
    with KlogBroker(module_server_dir) as broker:
        yield broker.bootstrap_servers


def run(servers: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command, *rest = arguments
    return klog("topics", command, "--bootstrap-server", servers, *rest, stdin=stdin)


def answers(servers: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a command, which must succeed; return its lines of JSON."""
    done = run(servers, *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def tool(servers: str) -> Iterator[Callable[..., str]]:
    """Run one of Kafka's own tools, which must succeed, and return its output."""
    with JavaTools("3.9.1") as tools:

        def run_one(name: str, *arguments: str) -> str:
            code, told = tools.run(f"org.apache.kafka.tools.{name}", "--bootstrap-server", servers, *arguments)
            assert code == 0, told
            return told

        yield run_one


def seen_by_kafka(tool: Callable[..., str], topic: str) -> dict[str, Any]:
    """A topic as TopicCommand describes it."""
    output = tool("TopicCommand", "--describe", "--topic", topic)
    (head,) = re.findall(
        r"^Topic: (\S+)\tTopicId: (\S+)\tPartitionCount: (\d+)\tReplicationFactor: (\d+)\tConfigs: ?(\S*)",
        output,
        re.MULTILINE,
    )
    rows = re.findall(r"^\tTopic: \S+\tPartition: (\d+)\tLeader: (\d+)\tReplicas: (\S+)\tIsr: (\S+)", output, re.M)
    assert len(rows) == int(head[2])
    return {
        "name": head[0],
        "id": head[1],
        "settings": dict(pair.split("=") for pair in head[4].split(",") if pair),
        "partitions": [(int(number), int(leader), replicas, isr) for number, leader, replicas, isr in rows],
    }


def seen_by_us(described: dict[str, Any]) -> dict[str, Any]:
    """The same from a description by `klog topics describe`."""
    partitions = [
        (
            entry["partition"],
            entry["leader"],
            ",".join(map(str, entry["replicas"])),
            ",".join(map(str, entry["inSync"])),
        )
        for entry in described["partitions"]
    ]
    return {name: described[name] for name in ("name", "id", "settings")} | {"partitions": partitions}


def _compare_offsets(servers: str, tool: Callable[..., str], now: int) -> None:
    """Compare `klog topics offsets` with Kafka's GetOffsetShell for 30 records in two partitions, N at `now` + N s."""
    for moment in (str(now + 4500), "-1"):
        told = run(servers, "offsets", "clicks:0,1", "--time", moment)
        assert (told.returncode, told.stderr) == (0, "")
        theirs = tool("GetOffsetShell", "--topic-partitions", "clicks:0,clicks:1", "--time", moment)
        assert told.stdout == theirs
    assert told.stdout.split() == ["clicks:0:15", "clicks:1:15"]
    assert run(servers, "offsets", "clicks", "--time", str(now + 4500)).stdout.split() == [
        "clicks:0:3",
        "clicks:1:2",
        "clicks:2:",
    ]
    assert [line["offset"] for line in answers(servers, "offsets", "--time", "earliest", "clicks")] == [0, 0, 0]
    everything = answers(servers, "offsets")
    assert [(line["topic"], line["offset"]) for line in everything] == [
        *[("clicks", 15), ("clicks", 15), ("clicks", 0)],
        *[("theirs", 0), ("theirs", 0)],
    ]
    assert "--time soon must be an ISO time" in run(servers, "offsets", "clicks", "--time", "soon").stderr


@pytest.mark.peer
def test_the_life_of_a_topic(servers: str, tool: Callable[..., str]) -> None:
    settings = ("--config", "retention.ms=100000000", "--config", "segment.bytes=2000000")
    assert answers(servers, "create", "clicks", "--partitions", "3", *settings) == [{"name": "clicks", "created": True}]
    again = run(servers, "create", "clicks")
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.startswith("klog: creating topic clicks (")
    assert "TOPIC_ALREADY_EXISTS" in again.stderr
    assert answers(servers, "create", "clicks", "--if-not-exists") == [{"name": "clicks", "created": False}]
    tool("TopicCommand", "--create", "--topic", "theirs", "--partitions", "2")

    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    now = round(time.time() * 1000)
    for number in range(30):
        producer.produce("clicks", b"x", None, number % 2, timestamp=now + 1000 * number)
    assert producer.flush(10) == 0
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "g", "enable.auto.commit": False})
    consumer.commit(offsets=[TopicPartition("clicks", 0, 1)], asynchronous=False)
    watermarks = [consumer.get_watermark_offsets(TopicPartition("clicks", number), 10) for number in range(3)]
    consumer.close()
    assert watermarks == [(0, 15), (0, 15), (0, 0)]

    listed = answers(servers, "list")
    assert listed == [
        {"name": "clicks", "partitions": 3, "internal": False},
        {"name": "theirs", "partitions": 2, "internal": False},
    ]
    everything = answers(servers, "list", "--all")
    assert [line for line in everything if line["internal"]] == [
        {"name": "__consumer_offsets", "partitions": 1, "internal": True}
    ]
    (described,) = answers(servers, "describe", "clicks")
    assert [(entry["earliest"], entry["latest"]) for entry in described["partitions"]] == watermarks
    _compare_offsets(servers, tool, now)
    kafka = seen_by_kafka(tool, "clicks")
    assert seen_by_us(described) == kafka
    assert kafka["settings"] == {"retention.ms": "100000000", "segment.bytes": "2000000"}

    changes = (
        "--config",
        "segment.bytes=3000000",
        "--config",
        "cleanup.policy=compact",
        "--delete-config",
        "retention.ms",
    )
    assert answers(servers, "alter", "clicks", "--partitions", "5", *changes) == [{"name": "clicks", "altered": True}]
    (described, other) = answers(servers, "describe")
    assert other["name"] == "theirs"
    kafka = seen_by_kafka(tool, "clicks")
    assert seen_by_us(described) == kafka
    assert len(kafka["partitions"]) == 5
    # the brokers' configurations have log.retention.ms=-1
    assert kafka["settings"] == {"cleanup.policy": "compact", "retention.ms": "-1", "segment.bytes": "3000000"}

    asked = run(servers, "delete", "clicks", stdin="n\n")
    assert (asked.returncode, asked.stdout) == (1, "")
    assert "Delete clicks with all records? [y/N]" in asked.stderr
    done = run(servers, "delete", "clicks", "missing", "theirs", "--yes", "--json")
    assert done.returncode == 1
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"name": "clicks", "deleted": True},
        {"name": "theirs", "deleted": True},
    ]
    assert re.fullmatch(r"klog: .*missing.*UNKNOWN_TOPIC_OR_PARTITION \(3\)\n", done.stderr)
    assert answers(servers, "delete", "missing", "--yes", "--if-exists") == [{"name": "missing", "deleted": False}]
    deadline = time.monotonic() + 60
    while answers(servers, "list") and time.monotonic() < deadline:  # Kafka answers before it has deleted the topics
        time.sleep(0.1)
    assert not {"clicks", "theirs"} & set(tool("TopicCommand", "--list").split())


def test_what_is_refused_and_what_people_see(servers: str) -> None:
    assert (
        run(servers, "create", "people", "--partitions", "2", "--config", "retention.ms=5000").stdout
        == "people created\n"
    )
    for arguments, told in (
        (("create", "a/b"), "INVALID_TOPIC_EXCEPTION"),
        (("create", "x", "--config", "no.such=1"), "INVALID_CONFIG"),
        (("create", "x", "--replication-factor", "3"), "INVALID_REPLICATION_FACTOR"),
        (("alter", "people", "--config", "retention.ms=soon"), "INVALID_CONFIG"),
        (("alter", "people", "--partitions", "1"), "INVALID_PARTITIONS"),
        *(
            (
                arguments,
                "nowhere: UNKNOWN_TOPIC_OR_PARTITION (3): the cluster has none of that name, check it or create",
            )
            for arguments in (("alter", "nowhere", "--partitions", "3"), ("describe", "nowhere"))
        ),
    ):
        refused = run(servers, *arguments)
        assert (refused.returncode, refused.stdout) == (1, ""), arguments
        assert refused.stderr.splitlines()[-1].startswith("klog: "), refused.stderr
        assert told in refused.stderr
        assert "Traceback" not in refused.stderr
    for arguments in (("alter", "people"), ("alter", "people", "--config", "a=1", "--delete-config", "a"), ("delete",)):
        assert run(servers, *arguments).returncode == 2
    internal = run(servers, "delete", "people", "__consumer_offsets", "--yes")
    assert internal.returncode == 2
    assert "__consumer_offsets: the broker keeps the offsets of all groups" in internal.stderr
    head, columns, *rows = run(servers, "describe", "people").stdout.splitlines()
    assert re.fullmatch(r"people  [A-Za-z0-9_-]{22}  retention\.ms=5000", head)
    assert columns.split() == ["partition", "leader", "replicas", "inSync", "earliest", "latest"]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert [row.split()[4:] for row in rows] == [["0", "0"], ["0", "0"]]
    assert run(servers, "list").stdout.split() == ["topic", "partitions", "people", "2"]
    assert run(servers, "delete", "people", stdin="y\n").stdout == "people deleted\n"
