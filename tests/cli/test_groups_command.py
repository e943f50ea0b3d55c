"""`klog groups` with our broker and Apache Kafka, compared with Kafka's own ConsumerGroupCommand."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from kazoo.client import KazooClient

from spark_klog.client import Admin
from tests.cli.place import Place, only_ours
from tests.spark.support import Sent, create_topic, produce
from tests.support.clients.consumer_groups import seen_by_kafka
from tests.support.clients.klog import klog, klog_command, klog_lines, klog_refusal

MINUTE = 60_000


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def consumer(place: Place, group: str, **settings: str) -> Consumer:
    config = {"bootstrap.servers": place.servers, "group.id": group, "enable.auto.commit": "false", "log_level": "0"}
    return Consumer(config | {name.replace("_", "."): value for name, value in settings.items()})


def commit(place: Place, group: str, offsets: Sequence[TopicPartition]) -> None:
    committing = consumer(place, group)
    committing.commit(offsets=list(offsets), asynchronous=False)
    committing.close()


def lags(partition: dict[str, Any], written: dict[str, int | None]) -> dict[str, tuple[int, int, bool]]:
    """(offset, lag, whether lagMs is right) by store: the time since `written` ms, or 0 if that is None."""
    now, found = now_ms(), {}
    for name, store in partition["stores"].items():
        since = written[name]
        right = store["lagMs"] == 0 if since is None else 0 <= now - since - store["lagMs"] < 20_000
        found[name] = (store["offset"], store["lag"], right)
    return found


@pytest.mark.peer
def test_a_group(place: Place, topic: str, zookeeper: KazooClient, tmp_path: Path) -> None:
    create_topic(place.servers, topic, 2)
    start = now_ms() - 60 * MINUTE
    # one compressed batch, with the next record in the middle
    produce(
        place.servers,
        topic,
        [Sent(b"v%d" % number, timestamp=start + number * MINUTE) for number in range(10)],
        compression_type="lz4",
        linger_ms=20_000,
    )
    # larger than the first fetch: beside another partition Kafka then returns nothing of it
    produce(place.servers, topic, [Sent(bytes(100_000), partition=1, timestamp=start) for _ in range(3)])
    group = f"{topic}-readers"
    commit(place, "idle", [TopicPartition(topic, 1, 1)])
    zookeeper.create(f"/consumers/{group}/offsets/{topic}/0", b"2", makepath=True)
    folder = tmp_path / "consumers" / group / "offsets" / topic
    folder.mkdir(parents=True)
    (folder / "0").write_bytes(b"9")
    (folder / "1").write_bytes(b"0")

    reader = consumer(place, group, client_id="reader-1")
    reader.subscribe([topic])
    while len(reader.assignment()) < 2:
        reader.poll(0.1)
    reader.commit(offsets=[TopicPartition(topic, 0, 4), TopicPartition(topic, 1, 3)], asynchronous=False)

    servers = ("--bootstrap-server", place.servers)
    listed = {line["group"]: line for line in klog_lines("groups", "list", *servers)}
    node = reader.list_topics(timeout=60).orig_broker_id
    assert listed["idle"] == {
        "group": "idle",
        "state": "Empty",
        "type": "classic",
        "protocolType": "",
        "coordinator": node,
    }
    expected = {"group": group, "state": "Stable", "type": "classic", "protocolType": "consumer", "coordinator": node}
    assert listed[group] == expected

    others = ("--zookeeper", f"{place.connect}/klog", "--offsets-path", str(tmp_path))
    (described,) = klog_lines("groups", "describe", group, *servers, *others)
    (member,) = described.pop("members")
    first, second = described.pop("partitions")
    assert described == listed[group] | {"protocol": "range"}
    assert member == {
        "member": reader.memberid(),
        "instance": None,
        "client": "reader-1",
        "host": "/127.0.0.1",
        "assignment": {topic: [0, 1]},
    }
    for partition, number, latest in ((first, 0, 10), (second, 1, 3)):
        head = {name: partition[name] for name in ("topic", "partition", "latest", "member")}
        assert head == {"topic": topic, "partition": number, "latest": latest, "member": reader.memberid()}
    written: dict[str, int | None] = {
        "kafka": start + 4 * MINUTE,
        "zookeeper": start + 2 * MINUTE,
        "files": start + 9 * MINUTE,
    }
    assert lags(first, written) == {"kafka": (4, 6, True), "zookeeper": (2, 8, True), "files": (9, 1, True)}
    assert lags(second, {"kafka": None, "files": start}) == {"kafka": (3, 0, True), "files": (0, 3, True)}
    assert seen_by_kafka(place.servers, group) == {(topic, 0): (4, 10, 6), (topic, 1): (3, 3, 0)}

    shown = klog("groups", "describe", group, *servers, *others).stdout.splitlines()
    assert shown[0] == f"{group}  Stable  classic group  consumer  range  coordinator {node}"
    assert shown[2].split() == [reader.memberid(), "-", "reader-1", "/127.0.0.1", f"{topic}:0,1"]
    stores = [column for name in ("kafka", "zookeeper", "files") for column in (name, "lag", "lost", "time")]
    assert shown[3].split() == ["topic", "partition", "member", "latest", *stores]
    cells = shown[5].split()
    assert cells[:8] == [topic, "1", reader.memberid(), "3", "3", "0", "0", "0.0s"]
    assert cells[8:15] == ["-", "-", "-", "-", "0", "3", "0"]
    assert cells[15].startswith("1h0")
    reader.close()


def test_unread_records_that_are_deleted(place: Place, topic: str) -> None:
    create_topic(place.servers, topic, 2)
    written = now_ms() - 60 * MINUTE
    for partition in (0, 1):
        produce(place.servers, topic, [Sent(b"v", partition=partition, timestamp=written) for _ in range(5)])
    commit(place, topic, [TopicPartition(topic, 0, 2), TopicPartition(topic, 1, 2)])
    with Admin({"bootstrap.servers": place.servers}) as admin:
        admin.delete_records({(topic, 0): 4, (topic, 1): 5}).check()
    servers = ("--bootstrap-server", place.servers)
    (line,) = klog_lines("groups", "lag", topic, *servers)
    some, all_ = (partition["stores"]["kafka"] for partition in line["partitions"])
    assert 60 * MINUTE <= some.pop("lagMs") < 70 * MINUTE
    assert some == {"offset": 2, "lag": 3, "lost": 2}
    assert all_ == {"offset": 2, "lag": 3, "lost": 3, "lagMs": None}, "the age of records that are gone is not known"
    assert line["stores"]["kafka"]["lost"] == 5
    assert klog("groups", "lag", topic, *servers).stdout.splitlines()[2].split()[-5:] == ["5", "2", "3", "3", "-"]
    commit(place, f"{topic}-2", [TopicPartition(topic, 0, 3)])
    names = (topic, f"{topic}-2")
    both = klog_lines("groups", "lag", *names, *servers)
    assert [(line["group"], line["stores"]["kafka"]["lag"]) for line in both] == [(names[0], 6), (names[1], 2)]
    shown = klog("groups", "lag", *names, *servers).stdout.splitlines()
    assert [line for line in shown if "Empty" in line] == [f"{name}  Empty" for name in names]
    assert [line.split()[5] for line in shown if line.startswith("total")] == ["6", "2"]


def test_the_lag_is_watched(place: Place, topic: str) -> None:
    create_topic(place.servers, topic, 1)
    produce(place.servers, topic, [Sent(b"v", timestamp=now_ms()) for _ in range(5)])
    commit(place, topic, [TopicPartition(topic, 0, 5)])
    servers = ("--bootstrap-server", place.servers)
    (line,) = klog_lines("groups", "lag", topic, *servers)
    assert (line["group"], line["state"]) == (topic, "Empty")
    assert line["stores"] == {"kafka": {"lag": 0, "lost": 0, "lagMs": 0}}
    command = klog_command("groups", "lag", topic, *servers, "--watch", "--interval", "0.2", "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        try:
            assert json.loads(watching.stdout.readline())["stores"]["kafka"] == {"lag": 0, "lost": 0, "lagMs": 0}
            produce(place.servers, topic, [Sent(b"v", timestamp=now_ms() - MINUTE) for _ in range(7)])
            seen = []
            while not seen or seen[-1]["lag"] < 7:
                seen.append(json.loads(watching.stdout.readline())["stores"]["kafka"])
            assert MINUTE <= seen[-1]["lagMs"] < 2 * MINUTE
            commit(place, topic, [TopicPartition(topic, 0, 12)])
            while seen[-1]["lag"]:
                seen.append(json.loads(watching.stdout.readline())["stores"]["kafka"])
            assert seen[-1] == {"lag": 0, "lost": 0, "lagMs": 0}
            watching.send_signal(signal.SIGINT)
            assert watching.wait(20) == 0
            assert watching.stderr.read() == ""
        finally:
            watching.kill()


@only_ours
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_the_lag_on_a_terminal(place: Place, topic: str, term: str) -> None:
    """Each table replaces the one before, where the terminal can do that."""
    create_topic(place.servers, topic, 1)
    produce(place.servers, topic, [Sent(b"v", timestamp=now_ms()) for _ in range(5)])
    commit(place, topic, [TopicPartition(topic, 0, 2)])
    command = klog_command("groups", "lag", topic, "--bootstrap-server", place.servers, "--watch", "--interval", "0.1")
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": term}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as watching:
        os.close(theirs)
        shown = b""
        try:
            while shown.count(b"total") < 3:
                shown += os.read(ours, 65536)
            if term == "dumb":
                assert b"\x1b" not in shown
            else:
                heads = shown.split(b"\r\x1b[J")
                assert all(head.endswith(b"\x1b[3A") for head in heads[:-1]), "three lines up"
                assert all(head.count(b"\n") == 3 for head in heads[:2])
            watching.send_signal(signal.SIGINT)
            assert watching.wait(20) == 0
        finally:
            watching.kill()
            os.close(ours)


def test_markers_of_transactions_are_no_records(place: Place, topic: str) -> None:
    create_topic(place.servers, topic, 1)
    producer = Producer({"bootstrap.servers": place.servers, "transactional.id": topic, "log_level": 0})
    producer.init_transactions(30)
    written = [now_ms() - 10 * MINUTE, now_ms() - 5 * MINUTE]
    for timestamp in written:
        producer.begin_transaction()
        producer.produce(topic, b"v", timestamp=timestamp)
        producer.commit_transaction(30)
    for offset, since in ((0, written[0]), (1, written[1]), (2, written[1]), (3, None)):
        commit(place, topic, [TopicPartition(topic, 0, offset)])
        (line,) = klog_lines("groups", "lag", topic, "--bootstrap-server", place.servers)
        assert lags(line["partitions"][0], {"kafka": since}) == {"kafka": (offset, 4 - offset, True)}


def test_a_topic_that_is_gone_and_a_group_that_never_was(place: Place, topic: str, tmp_path: Path) -> None:
    servers = ("--bootstrap-server", place.servers)
    for command in ("describe", "lag"):
        assert klog_refusal("groups", command, "nobody", *servers) == "klog: group nobody does not exist"
    offset_file = tmp_path / "consumers" / topic / "offsets" / topic / "0"
    offset_file.parent.mkdir(parents=True)
    offset_file.write_bytes(b"3")
    (described,) = klog_lines("groups", "describe", topic, *servers, "--offsets-path", str(tmp_path))
    assert (described["state"], described["members"]) == ("Dead", [])
    (partition,) = described["partitions"]
    assert partition["latest"] is None
    assert partition["stores"] == {"files": {"offset": 3, "lag": None, "lost": None, "lagMs": None}}


def test_groups_are_deleted(place: Place, topic: str) -> None:
    create_topic(place.servers, topic, 1)
    servers = ("--bootstrap-server", place.servers)
    idle, other, busy = (f"{topic}-{name}" for name in ("idle", "other", "busy"))
    for group in (idle, other):
        commit(place, group, [TopicPartition(topic, 0, 0)])
    reader = consumer(place, busy)
    try:
        reader.subscribe([topic])
        while not reader.assignment():
            reader.poll(0.1)
        asked = klog("groups", "delete", idle, other, *servers, stdin="n\n")
        assert (asked.returncode, asked.stdout) == (1, "")
        assert f"Delete {idle}, {other} with all committed offsets?" in asked.stderr
        done = klog("groups", "delete", idle, busy, f"{topic}-none", "--yes", "--json", *servers)
        assert done.returncode == 1
        assert [json.loads(line) for line in done.stdout.splitlines()] == [{"group": idle, "deleted": True}]
        assert done.stderr.splitlines() == [
            f"klog: deleting group {busy}: NON_EMPTY_GROUP (68): the group has members, stop them first; "
            "klog groups describe names them",
            f"klog: deleting group {topic}-none: GROUP_ID_NOT_FOUND (69): there is no such group, "
            "klog groups list shows all",
        ]
    finally:
        reader.close()
    left = {line["group"] for line in klog_lines("groups", "list", *servers)}
    assert {idle, other, busy} & left == {other, busy}
    assert klog("groups", "delete", other, *servers, stdin="y\n").stdout == f"{other} deleted\n"
    again = klog("groups", "delete", other, "--yes", "--if-exists", *servers)
    assert (again.returncode, again.stdout) == (0, f"{other} does not exist\n")
    assert klog_refusal("groups", "describe", other, *servers) == f"klog: group {other} does not exist"
    assert "Missing argument 'GROUP...'" in klog_refusal("groups", "delete", code=2)
    told = klog_refusal("groups", "delete", "", "--yes", *servers)
    assert told == "klog: one of the groups is empty: give a name, or leave it out"
