"""`klog offsets` with our broker, Apache Kafka and real ZooKeepers, compared with Kafka's ConsumerGroupCommand."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from kazoo.client import KazooClient

from tests.cli.place import Place, only_ours
from tests.spark.support import Group, Sent, create_topic, produce
from tests.support.clients.consumer_groups import seen_by_kafka
from tests.support.clients.klog import klog, klog_lines, klog_refusal

DAY = 86_400_000
START = 1_700_000_000_000  # 2023-11-14T22:13:20Z


def fill(place: Place, topic: str) -> None:
    """Fill two partitions with records a day apart: 10, and 20 of which the first 5 are deleted."""
    create_topic(place.servers, topic, 2)
    produce(place.servers, topic, [Sent(b"v", timestamp=START + n * DAY) for n in range(10)])
    produce(place.servers, topic, [Sent(b"v", partition=1, timestamp=START + n * DAY) for n in range(20)])
    admin, gone = AdminClient({"bootstrap.servers": place.servers, "log_level": 0}), TopicPartition(topic, 1, 5)
    admin.delete_records([gone])[gone].result(30)


def commit(place: Place, topic: str, group: str, *offsets: int) -> None:
    consumer = Consumer({"bootstrap.servers": place.servers, "group.id": group, "log_level": 0})
    wanted = [TopicPartition(topic, number, offset) for number, offset in enumerate(offsets)]
    consumer.commit(offsets=wanted, asynchronous=False)
    consumer.close()


def committed(place: Place, topic: str, group: str) -> dict[int, int]:
    seen = Group(place.servers, group, topic, 2)
    offsets = {number: offset for (_, number), offset in seen.offsets().items()}
    seen.close()
    return offsets


def changes(*arguments: str) -> list[tuple[int, int | None, int | None, str, bool]]:
    return [
        (line["partition"], line["old"], line["new"], line["note"], line["written"])
        for line in klog_lines("offsets", *arguments)
    ]


@pytest.mark.peer
def test_set(place: Place, topic: str) -> None:
    fill(place, topic)
    to = ("set", "--group", topic, "--to", place.coordinator, "--topic", topic)
    assert changes(*to, "--to-earliest", "--dry-run") == [(0, None, 0, "", False), (1, None, 5, "", False)]
    assert committed(place, topic, topic) == {}
    assert changes(*to, "--to-earliest") == [(0, None, 0, "", True), (1, None, 5, "", True)]
    assert committed(place, topic, topic) == {0: 0, 1: 5}
    # half a day after record 6; partition 0 has records up to 9
    assert changes(*to, "--to-time", "2023-11-21T10:00:00Z") == [(0, 0, 7, "", True), (1, 5, 7, "", True)]
    assert changes(*to, "--to-time", str(START + 10 * DAY)) == [(0, 7, 10, "", True), (1, 7, 10, "", True)]
    done = klog("offsets", *to, "--to-time", "2999-01-01", "--dry-run", "--json")
    assert [json.loads(line)["new"] for line in done.stdout.splitlines()] == [10, 20]
    assert "--to-time 2999-01-01 is in the future" in done.stderr
    assert changes(*to, "--shift-by", "-7") == [
        (0, 10, 3, "", True),
        (1, 10, 5, "3 is before the first offset", True),
    ]
    assert committed(place, topic, topic) == {0: 3, 1: 5}
    assert changes(*to[:-1], f"{topic}:1", "--to-offset", "99") == [(1, 5, 20, "99 is after the last offset", True)]
    assert seen_by_kafka(place.servers, topic) == {(topic, 0): (3, 10, 7), (topic, 1): (20, 20, 0)}
    assert changes(*to, "--to-latest") == [(0, 3, 10, "", True), (1, 20, 20, "", True)]
    assert klog_lines("offsets", "show", "--group", topic, "--from", place.coordinator, "--topic", topic) == [
        {"topic": topic, "partition": 0, "offset": 10},
        {"topic": topic, "partition": 1, "offset": 20},
    ]


@only_ours
def test_set_elsewhere_from_a_file(place: Place, topic: str, zookeeper: KazooClient, tmp_path: Path) -> None:
    fill(place, topic)
    file = tmp_path / "offsets.json"
    file.write_text(json.dumps({topic: {"0": 4, "1": 1, "7": 1}, "nowhere": {"0": 3}}))
    told = changes(
        *("set", "--group", topic, "--to", place.zookeeper, "--bootstrap-server", place.servers),
        *("--from-file", str(file)),
    )
    missing = "the cluster has no such partition: left as it is"
    assert told == [
        (0, None, None, missing, False),
        (0, None, 4, "", True),
        (1, None, 5, "1 is before the first offset", True),
        (7, None, None, missing, False),
    ]
    top = f"/consumers/{topic}/offsets"
    assert zookeeper.get_children(top) == [topic]
    assert {name: zookeeper.get(f"{top}/{topic}/{name}")[0] for name in zookeeper.get_children(f"{top}/{topic}")} == {
        "0": b"4",
        "1": b"5",
    }


@only_ours
def test_copy_round(place: Place, topic: str, zookeeper: KazooClient, tmp_path: Path) -> None:
    """Copy offsets from the coordinator to ZooKeeper, a folder, a URI, and back to the coordinator."""
    fill(place, topic)
    commit(place, topic, topic, 3, 11)
    folder, uri = tmp_path / "folder", f"file://{tmp_path}/other"
    group = ("--group", topic)
    route = [place.coordinator, place.zookeeper, str(folder), uri]
    for source, target in pairwise(route):
        move = ("copy", *group, "--from", source, "--to", target)
        assert changes(*move, "--dry-run") == [(0, None, 3, "", False), (1, None, 11, "", False)]
        assert changes(*move) == [(0, None, 3, "", True), (1, None, 11, "", True)]
    assert zookeeper.get(f"/consumers/{topic}/offsets/{topic}/1")[0] == b"11"
    assert (folder / "consumers" / topic / "offsets" / topic / "0").read_bytes() == b"3"
    (tmp_path / "other" / "consumers" / topic / "offsets" / topic / "0").write_bytes(b"8\n")
    assert changes("copy", *group, "--from", uri, "--to", place.coordinator, "--topic", f"{topic}:0") == [
        (0, 3, 8, "", True)
    ]
    assert committed(place, topic, topic) == {0: 8, 1: 11}
    seen = klog("offsets", "show", *group, "--from", uri)
    assert seen.stdout.split() == ["topic", "partition", "offset", topic, "0", "8", topic, "1", "11"]


@only_ours
def test_the_lines_of_export_zk_offsets(place: Place, topic: str, tmp_path: Path) -> None:
    """Kafka's own tools read and write them in tests/zookeeper/test_old_offsets.py."""
    fill(place, topic)
    commit(place, topic, "from", 3, 11)
    shown = klog("offsets", "show", "--group", "from", "--from", place.coordinator, "--topic", topic, "--export")
    lines = [f"/consumers/from/offsets/{topic}/{number}:{offset}" for number, offset in ((0, 3), (1, 11))]
    assert (shown.returncode, shown.stdout.splitlines()) == (0, lines)
    file = tmp_path / "offsets"
    file.write_text("\n".join([*lines, "", f"/consumers/{topic}/offsets/{topic}/1:7", ""]))
    to = ("set", "--group", topic, "--to", place.coordinator, "--from-file", str(file))
    assert changes(*to) == [(1, None, 7, "", True)]
    assert committed(place, topic, topic) == {1: 7}
    for text, told in (
        (lines[0], f"{file} has no offsets of group {topic}"),
        (f"{lines[0]}\n/consumers/g/offsets/t/0-0:3", f"{file}, line 2: '/consumers/g/offsets/t/0-0:3' must be"),
        (f"/consumers/{topic}/offsets/t/0:{1 << 63}", "not an offset in decimal"),
    ):
        file.write_text(text)
        assert told in klog_refusal("offsets", *to, code=2)
    show = ("offsets", "show", "--group", "from", "--from", place.coordinator)
    klog_refusal(*show, "--export", "--json", code=2)


@only_ours
def test_a_dry_run_makes_nothing(place: Place, topic: str, zookeeper: KazooClient, tmp_path: Path) -> None:
    fill(place, topic)
    commit(place, topic, topic, 3)
    for target in (str(tmp_path / "folder"), place.zookeeper):
        done = klog("offsets", "copy", "--group", topic, "--from", place.coordinator, "--to", target, "--dry-run")
        assert (done.returncode, done.stderr) == (0, "nothing was written\n")
    assert not (tmp_path / "folder").exists()
    assert zookeeper.exists(f"/consumers/{topic}") is None


def test_an_active_group_is_left_alone(place: Place, topic: str, zookeeper: KazooClient) -> None:
    fill(place, topic)
    to = ("offsets", "set", "--group", topic, "--topic", topic, "--to-latest", "--bootstrap-server", place.servers)
    consumer = Consumer(
        {"bootstrap.servers": place.servers, "group.id": topic, "client.id": "busy", "log_level": 0}
        | {"enable.auto.commit": False}
    )
    consumer.subscribe([topic])
    while not consumer.assignment():
        consumer.poll(0.1)
    told = klog_refusal(*to, "--to", place.zookeeper)
    assert told.startswith(f"klog: group {topic} is active: ")
    assert told.endswith("stop them first, or use --force")
    for force in ([], ["--force"]):  # --force does not help: the coordinator rejects commits of non-members
        told = klog_refusal(*to, "--to", place.coordinator, *force)
        assert told.startswith(f"klog: group {topic} is active: {place.coordinator} has its member busy-")
        assert told.endswith("; stop them first: a coordinator rejects offsets while a group has members")
    assert zookeeper.exists(f"/consumers/{topic}") is None
    assert len(klog_lines(*to, "--to", place.zookeeper, "--force")) == 2
    consumer.close()

    zookeeper.create(f"/consumers/{topic}/ids/{topic}_host-1", b"{}", ephemeral=True, makepath=True)
    refused = klog_refusal(*to, "--to", place.zookeeper)
    told = f"{place.zookeeper} has its member {topic}_host-1; stop them first, or use --force"
    assert refused == f"klog: group {topic} is active: {told}"
    zookeeper.delete(f"/consumers/{topic}/ids/{topic}_host-1")
    assert [line["written"] for line in klog_lines(*to, "--to", place.zookeeper)] == [True, True]


@only_ours
def test_what_is_refused(place: Place, topic: str, tmp_path: Path) -> None:
    create_topic(place.servers, topic, 1)
    group = ("offsets", "set", "--group", "nobody")
    to = (*group, "--to", place.coordinator)
    for arguments, told in (
        ((*to, "--topic", topic, "--shift-by", "1"), f"nothing to shift: the group has no offset of {topic}-0"),
        ((*to, "--topic", f"{topic}:0,3", "--to-latest"), f"topic {topic} has no partition 3"),
        ((*to, "--topic", "missing", "--to-latest"), "topic missing: UNKNOWN_TOPIC_OR_PARTITION (3)"),
        (("offsets", "show", "--group", "nobody", "--from", place.coordinator), "has no offsets for group nobody"),
        (("offsets", "show", "--group", "nobody", "--from", str(tmp_path / "x")), "has no offsets for group nobody"),
        (("offsets", "show", "--group", "nobody", "--from", f"checkpoint://{tmp_path}"), "no completed micro-batch"),
    ):
        assert told in klog_refusal(*arguments)
    for text in ("yesterday", "-1000", "9" * 20):
        told = klog_refusal(*to, "--topic", topic, f"--to-time={text}", code=2)
        assert f"klog: --to-time {text} must be an ISO time (2026-11-21T10:00:00Z)" in told
    told = klog_refusal(*group, "--to", f"checkpoint://{tmp_path}", "--topic", topic, "--to-latest", code=2)
    assert "can't be written" in told
    told = klog_refusal(*group, "--to", place.servers, "--topic", topic, "--to-latest", code=2)
    assert told.endswith(f"did you mean {place.coordinator} or zookeeper://{place.servers}?")
    for arguments in (
        (*to, "--topic", topic),
        (*to, "--topic", topic, "--to-latest", "--to-earliest"),
        (*to, "--to-latest"),
        (*to, "--topic", f"{topic}:x", "--to-latest"),
        (*group, "--to", str(tmp_path), "--topic", topic, "--to-latest"),
    ):
        klog_refusal(*arguments, code=2)
    assert not (tmp_path / "x").exists()
