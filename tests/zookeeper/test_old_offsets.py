"""Offsets in ZooKeeper, with requests and consumers older than Kafka 0.9, and the migration of such a group to Kafka.

The requests also go to Apache Kafka 0.10.2.2, which checks the test itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from kazoo.client import KazooClient

from tests.support.brokers.raw_client import RawClient
from tests.support.clients.klog import klog, klog_lines, klog_refusal
from tests.support.servers.broker import KlogBroker
from tests.support.servers.shared_kafka import SharedKafkas
from tests.support.servers.shared_tree import create_topic, known_brokers, old_tool
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore:No chroot path exists")]

MakeBroker = Callable[..., KlogBroker]
OFFSET_COMMIT, OFFSET_FETCH = 8, 9
UNKNOWN_TOPIC_OR_PARTITION = 3


def _string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def _request(client: RawClient, key: int, group: str, topic: str, partitions: bytes) -> bytes:
    """Send a request of version 0 for one partition; return the partition's part of the response."""
    header = struct.pack(">hhi", key, 0, 5) + _string("old")
    client.send_frame(header + _string(group) + struct.pack(">i", 1) + _string(topic) + partitions)
    answer = client.receive_frame()
    start = struct.pack(">ii", 5, 1) + _string(topic) + struct.pack(">i", 1)
    assert answer.startswith(start)
    return answer[len(start) :]


def commit(client: RawClient, group: str, topic: str, partition: int, offset: int) -> int:
    body = struct.pack(">iiq", 1, partition, offset) + _string("metadata")
    number, code = struct.unpack(">ih", _request(client, OFFSET_COMMIT, group, topic, body))
    assert number == partition
    return int(code)


def fetch(client: RawClient, group: str, topic: str, partition: int) -> tuple[int, int]:
    """Return (offset, error code)."""
    answer = _request(client, OFFSET_FETCH, group, topic, struct.pack(">ii", 1, partition))
    number, offset, metadata, code = struct.unpack(">iqhh", answer)
    assert (number, metadata) == (partition, 0)
    return offset, code


@pytest.fixture(params=["ours", pytest.param("0.10.2.2", marks=pytest.mark.test_all("version"))])
def place(
    request: pytest.FixtureRequest, tree: KazooClient, make_broker: MakeBroker, shared_kafkas: SharedKafkas
) -> Iterator[tuple[str, KazooClient]]:
    """A broker's address and a client of its ZooKeeper."""
    if request.param == "ours":
        yield make_broker(0).bootstrap_servers, tree
        return
    kafka = shared_kafkas.get("0.10.2.2")
    client = KazooClient(kafka.zookeeper_connect)
    client.start()
    yield kafka.bootstrap_servers, client
    client.stop()
    client.close()


def test_requests_of_version_0(place: tuple[str, KazooClient], topic: str) -> None:
    servers, tree = place
    group = f"{topic}-group"
    create_topic(servers, topic, 2)
    with RawClient(int(servers.split(":")[1])) as client:
        assert fetch(client, group, topic, 0) == (-1, UNKNOWN_TOPIC_OR_PARTITION)
        assert commit(client, group, topic, 0, 42) == 0
        assert fetch(client, group, topic, 0) == (42, 0)
        assert tree.get(f"/consumers/{group}/offsets/{topic}/0")[0] == b"42"
        assert commit(client, group, topic, 0, 7) == 0
        tree.create(f"/consumers/{group}/offsets/{topic}/1", b"9")
        assert (fetch(client, group, topic, 0), fetch(client, group, topic, 1)) == ((7, 0), (9, 0))
        assert commit(client, group, "missing", 0, 1) == UNKNOWN_TOPIC_OR_PARTITION
        assert sorted(tree.get_children(f"/consumers/{group}/offsets")) == [topic]
        assert fetch(client, "other", topic, 0) == (-1, UNKNOWN_TOPIC_OR_PARTITION)


@pytest.mark.test_all("version")
def test_a_group_of_old_consumers_moves_to_kafka(tree: KazooClient, chroot: str, make_broker: MakeBroker) -> None:
    """Follow the steps of Kafka 1.0's documentation, with the consumer of Kafka 0.10.2.2, which has these settings."""
    servers = make_broker(0).bootstrap_servers
    wait_until(lambda: known_brokers(servers) == 1)
    create_topic(servers, "t", 1)
    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    for number in range(20):
        producer.produce("t", str(number))
    assert producer.flush(20) == 0
    zookeeper, coordinator = f"zookeeper://{chroot}", f"kafka://{servers}"

    def consume(count: int, **settings: str) -> list[int]:
        given = {"group.id": "old", **{name.replace("_", "."): value for name, value in settings.items()}}
        properties = [word for name, value in given.items() for word in ("--consumer-property", f"{name}={value}")]
        arguments = ["--topic", "t", "--max-messages", str(count), *properties]
        return [int(line) for line in old_tool("kafka.tools.ConsoleConsumer", chroot, *arguments).splitlines()]

    def stored(store: str) -> list[int]:
        return [line["offset"] for line in klog_lines("offsets", "show", "--group", "old", "--from", store)]

    to = ("offsets", "set", "--group", "old", "--to", zookeeper, "--bootstrap-server", servers, "--topic", "t")
    assert [line["written"] for line in klog_lines(*to, "--to-offset", "3")] == [True]
    assert consume(4, offsets_storage="zookeeper") == [3, 4, 5, 6]
    assert stored(zookeeper) == [7]
    assert "has no offsets" in klog_refusal("offsets", "show", "--group", "old", "--from", coordinator)
    assert consume(3, offsets_storage="kafka", dual_commit_enabled="true") == [7, 8, 9]
    assert stored(zookeeper) == stored(coordinator) == [10]
    assert consume(2, offsets_storage="kafka", dual_commit_enabled="false") == [10, 11]
    assert (stored(zookeeper), stored(coordinator)) == ([10], [12])
    # Kafka's tool shows the result; a copy moves the offsets back
    told = old_tool("kafka.tools.ConsumerOffsetChecker", chroot, "--group", "old", "--topic", "t")
    assert told.splitlines()[-1].split()[:6] == ["old", "t", "0", "12", "20", "8"]
    copied = klog_lines("offsets", "copy", "--group", "old", "--from", coordinator, "--to", zookeeper)
    assert [(line["old"], line["new"]) for line in copied] == [(10, 12)]
    assert consume(1, offsets_storage="zookeeper") == [12]


@pytest.mark.test_all("version")
def test_files_of_kafkas_export_and_import(
    tree: KazooClient, chroot: str, make_broker: MakeBroker, tmp_path: Path
) -> None:
    servers = make_broker(0).bootstrap_servers
    wait_until(lambda: known_brokers(servers) == 1)
    create_topic(servers, "t", 2)
    for number, offset in enumerate((b"0", b"17")):
        tree.create(f"/consumers/theirs/offsets/t/{number}", offset, makepath=True)
    exported, ours = tmp_path / "theirs", tmp_path / "ours"
    arguments = ("--group", "theirs", "--output-file", str(exported))
    old_tool("kafka.tools.ExportZkOffsets", chroot, *arguments, option="--zkconnect")
    zookeeper = ("--from", f"zookeeper://{chroot}")
    shown = klog("offsets", "show", "--group", "theirs", *zookeeper, "--export")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert sorted(exported.read_text().splitlines()) == shown.stdout.splitlines()

    store = str(tmp_path / "store")
    to = ("--to", store, "--bootstrap-server", servers)
    told = klog_lines("offsets", "set", "--group", "theirs", *to, "--from-file", str(exported))
    assert [(line["partition"], line["note"]) for line in told] == [(0, ""), (1, "17 is after the last offset")]

    ours.write_text(shown.stdout.replace("/theirs/", "/ours/").replace(":17", ":18"))
    tree.create("/consumers/ours/offsets/t/1", b"1", makepath=True)
    old_tool("kafka.tools.ImportZkOffsets", chroot, "--input-file", str(ours), option="--zkconnect")
    assert [tree.get(f"/consumers/ours/offsets/t/{number}")[0] for number in range(2)] == [b"0", b"18"]
