"""The page's server without a browser: its responses, what it rejects and changes, side by side with other clients."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

import spark_klog.client as klog_client
from spark_klog.client.dead_letters import DeadLetter
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import RequestTimedOut
from spark_klog.ui import messages
from spark_klog.ui.messages import View, export
from tests.support.brokers.batches import make_batch
from tests.support.brokers.raw_client import RawClient
from tests.support.clients.klog import klog_command, klog_lines, klog_refusal
from tests.support.clients.topics import make_topic
from tests.support.servers.kafka import free_port
from tests.ui.support import Page, serving


@pytest.fixture(scope="module")
def page(cluster: EmbeddedCluster) -> Iterator[Page]:
    with serving("-b", cluster.bootstrap_servers) as running:
        yield running


@pytest.fixture(scope="module")
def changing(cluster: EmbeddedCluster) -> Iterator[Page]:
    with serving("-b", cluster.bootstrap_servers, "--allow-changes") as running:
        yield running


def produce(servers: str, topic: str, records: list[dict[str, Any]]) -> None:
    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    for record in records:
        producer.produce(topic, **record)
    assert producer.flush(30) == 0


def test_pages_of_messages_are_all_messages(page: Page, cluster: EmbeddedCluster, topic: str) -> None:
    make_topic(cluster.bootstrap_servers, topic, 3)
    start = 1_700_000_000_000
    records = [
        {"value": b"%d" % number, "partition": number * number % 3, "timestamp": start + number * 1000}
        for number in range(170)
    ]
    produce(cluster.bootstrap_servers, topic, records)
    seen: list[dict[str, Any]] = []
    before = ""
    while True:
        found = page.get("messages", name=topic, count=25, before=before)
        times = [row["timestamp"] for row in found["messages"]]
        assert times == sorted(times, reverse=True)
        seen += found["messages"]
        if found["before"] is None:
            break
        before = ",".join(f"{number}:{place}" for number, place in found["before"].items())
    # every message once, by partition and offset, and by value
    assert len({(row["partition"], row["offset"]) for row in seen}) == len(seen) == 170
    assert sorted(int(row["value"]["text"]) for row in seen) == list(range(170))
    assert [int(row["value"]["text"]) for row in seen[:20]] == list(range(169, 149, -1))

    (at,) = page.get("messages", name=topic, partition=1, offset=7, count=1)["messages"]
    assert (at["partition"], at["offset"]) == (1, 7)
    jumped = page.get("messages", name=topic, time=start + 100_000, count=10)["messages"]
    assert jumped[0]["timestamp"] >= start + 100_000 > jumped[5]["timestamp"]


def test_the_oldest_first(page: Page, cluster: EmbeddedCluster, topic: str) -> None:
    make_topic(cluster.bootstrap_servers, topic, 4)
    start = 1_700_000_000_000
    records = [
        {"value": b"%d" % number, "partition": number * number % 3, "timestamp": start + number * 1000}
        for number in range(170)
    ]
    produce(cluster.bootstrap_servers, topic, records)
    seen: list[dict[str, Any]] = []
    after = ""
    while True:
        found = page.get("messages", name=topic, count=25, order="oldest", after=after)
        times = [row["timestamp"] for row in found["messages"]]
        assert times == sorted(times)
        assert found["before"] is None
        seen += found["messages"]
        if found["after"] is None:
            break
        after = ",".join(f"{number}:{place}" for number, place in found["after"].items())
    assert len({(row["partition"], row["offset"]) for row in seen}) == len(seen) == 170
    assert sorted(int(row["value"]["text"]) for row in seen) == list(range(170))
    assert [int(row["value"]["text"]) for row in seen[:20]] == list(range(20))

    way = {"name": topic, "order": "oldest", "count": 3}
    at = page.get("messages", partition=1, offset=7, **way)
    assert [row["offset"] for row in at["messages"]] == [7, 8, 9]
    (first, *_) = page.get("messages", time=start + 100_000, **way)["messages"]
    assert int(first["value"]["text"]) == 100
    beyond = page.get("messages", partition=1, offset=1000, **way)
    assert (beyond["messages"], beyond["note"]) == (
        [],
        "offset 1000 is beyond the end of partition 1, whose last offset is 112: there are no messages from there on",
    )
    empty = page.get("messages", partition=2, offset=1000, **way)
    assert (empty["messages"], empty["note"]) == ([], "partition 2 has no messages: its next offset is 0")


@pytest.mark.parametrize("order", ["newest", "oldest"])
def test_a_page_of_large_records(page: Page, cluster: EmbeddedCluster, topic: str, order: str) -> None:
    """More bytes than a page reads: what is shown still begins with the newest, or the oldest."""
    make_topic(cluster.bootstrap_servers, topic, 1)
    values = [b"%d " % number + b"x" * 900_000 for number in range(100)]
    produce(cluster.bootstrap_servers, topic, [{"value": value} for value in values])
    offsets = [row["offset"] for row in page.get("messages", name=topic, order=order, count=100)["messages"]]
    assert offsets[0] == (99 if order == "newest" else 0)
    assert offsets == sorted(offsets, reverse=order == "newest")


def test_export(page: Page, cluster: EmbeddedCluster, topic: str) -> None:
    """The lines are those of `klog consume --json`; the CSV has the same bytes."""
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 2)
    long = b"x" * 100_000  # longer than what the page shows
    records: list[dict[str, Any]] = [
        {"value": b"%d" % number, "key": b'k,"\n', "partition": number % 2, "timestamp": 1000 + number}
        for number in range(20)
    ]
    records += [
        {
            "value": b"\xff\x00",
            "key": None,
            "partition": 0,
            "headers": [("h", b"\xfe"), ("h", None)],
            "timestamp": 5000,
        },
        {"value": None, "key": b"", "partition": 1, "timestamp": 5001},
        {"value": long, "partition": 1, "timestamp": 5002},
    ]
    produce(servers, topic, records)

    def lines(**parameters: object) -> list[dict[str, Any]]:
        text, headers = page.download("export", name=topic, **parameters)
        assert headers["Content-Disposition"] == f"attachment; filename*=UTF-8''{topic}.jsonl"
        return sorted(map(json.loads, text.splitlines()), key=lambda one: (one["partition"], one["offset"]))

    said = klog_lines("consume", topic, "--from", "earliest", "-e", "-b", servers)
    said.sort(key=lambda one: (one["partition"], one["offset"]))
    assert len(said) == 23
    assert lines() == lines(format="jsonl", order="oldest") == said
    assert [one["offset"] for one in lines(partition=1, records=3)] == [9, 10, 11]
    assert [one["offset"] for one in lines(partition=1, offset=4, order="oldest", records=3)] == [4, 5, 6]
    assert [one["offset"] for one in lines(partition=1, offset=4, records=3)] == [2, 3, 4]
    assert lines(partition=1, offset=99, order="oldest") == []

    def cell(encoding: str, text: str) -> object:
        return {"base64": text} if encoding == "base64" else text if encoding else None

    table = list(csv.DictReader(io.StringIO(page.download("export", name=topic, format="csv")[0], newline="")))
    made = [
        {
            "topic": row["topic"],
            **{name: int(row[name]) for name in ("partition", "offset", "timestamp")},
            "key": cell(row["keyEncoding"], row["key"]),
            "value": cell(row["valueEncoding"], row["value"]),
            "headers": json.loads(row["headers"]),
        }
        for row in table
    ]
    assert sorted(made, key=lambda one: (one["partition"], one["offset"])) == said
    assert page.ask("export", name=topic, format="xml")[0] == 400
    assert page.ask("export", name=topic, records=2_000_000)[0] == 400


def test_any_timestamp(page: Page, cluster: EmbeddedCluster, topic: str) -> None:
    """Beyond the year 9999, nanoseconds by mistake, the largest INT64, and none: as klog consume has them."""
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    times = [253_402_300_799_999, 253_402_300_800_000, 1_763_719_200_000_000_000, 2**63 - 1, 0, -1]
    with RawClient(int(servers.rpartition(":")[2])) as client:
        for number, time_ms in enumerate(times):
            batch = make_batch([(b"k", b"found %d" % number)], [time_ms])
            assert client.produce(topic, bytes(batch), 8)[0] == 0
    lines = klog_lines("consume", topic, "-b", servers, "--json")
    assert [line["timestamp"] for line in lines] == times
    for order in ("newest", "oldest"):
        answer = page.get("messages", name=topic, order=order)
        assert {row["offset"]: row["timestamp"] for row in answer["messages"]} == dict(enumerate(times))
    status, answer = page.ask("search", name=topic, text="found")
    matches = [data for name, data in answer if name == "match"]
    assert (status, {row["offset"]: row["timestamp"] for row in matches}) == (200, dict(enumerate(times)))
    text, _ = page.download("export", name=topic, format="csv")
    assert [int(row["timestamp"]) for row in csv.DictReader(io.StringIO(text))] == times
    assert [json.loads(line) for line in page.download("export", name=topic)[0].splitlines()] == lines


def test_what_is_not_read_in_time_is_an_error(cluster: EmbeddedCluster, topic: str) -> None:
    """Else a file that lacks records would look whole, and a page would go on beyond them."""
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    produce(servers, topic, [{"value": b"%d" % number} for number in range(10)])
    late = f"10 offsets of {topic}-0 could not be read within 0 s"
    with klog_client.Admin({"bootstrap.servers": servers}) as admin:

        def new_consumer() -> klog_client.Consumer:
            return klog_client.Consumer({"bootstrap.servers": servers})

        with mock.patch("spark_klog.ui.messages._EXPORT_SECONDS", 0.0):
            pieces = list(export(admin, new_consumer, View(topic), "jsonl", 100, lambda _: b""))
        assert f"the export ended early: {late}" in json.loads(pieces[-1])["error"]
        with mock.patch("spark_klog.ui.messages._PAGE_SECONDS", 0.0), pytest.raises(RequestTimedOut, match=late):
            messages.page(admin, new_consumer, View(topic), 10)


@pytest.mark.parametrize("is_oldest_first", [False, True])
def test_pages_of_messages_that_are_large(cluster: EmbeddedCluster, topic: str, is_oldest_first: bool) -> None:
    """A page has what is read within its bytes, here of one partition, and the next ones have the rest."""
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 3)
    produce(servers, topic, [{"value": b"%d" % number, "partition": number % 3} for number in range(9)])
    seen: list[tuple[int, int]] = []
    reached: dict[int, int] | None = None

    def new_consumer() -> klog_client.Consumer:
        return klog_client.Consumer({"bootstrap.servers": servers}, include_headers=True)

    with klog_client.Admin({"bootstrap.servers": servers}) as admin, mock.patch("spark_klog.ui.messages._MAX_BYTES", 1):
        while len(seen) < 9:
            view = View(topic, is_oldest_first=is_oldest_first, reached=reached)
            answer = messages.page(admin, new_consumer, view, 10)
            seen += [(row["partition"], row["offset"]) for row in answer["messages"]]
            onward = answer["after" if is_oldest_first else "before"]
            reached = {int(number): offset for number, offset in onward.items()} if onward else None
            assert answer["messages"]
            assert reached is not None or len(seen) == 9
    assert sorted(seen) == [(partition, offset) for partition in range(3) for offset in range(3)]
    for partition in range(3):
        assert [offset for number, offset in seen if number == partition] == (
            [0, 1, 2] if is_oldest_first else [2, 1, 0]
        )


def test_a_window_that_has_grown_too_large() -> None:
    """The page is that of the window before, which was read to its end; nothing that was not read is passed by."""
    windows: list[int] = []

    def read(_: object, ranges: Mapping[tuple[str, int], tuple[int, int]]) -> tuple[list[dict[str, int]], bool]:
        start, stop = ranges["t", 0]
        windows.append(stop - start)
        return [{"partition": 0, "offset": start}], stop - start <= 10

    with mock.patch("spark_klog.ui.messages._read", read):
        rows, far = messages._read_onward(mock.Mock(), {("t", 0): 1000}, {("t", 0): 0}, 10)
    assert (windows, rows, far) == ([10, 80], [{"partition": 0, "offset": 990}], {("t", 0): 990})


def test_groups_of_a_topic(page: Page, cluster: EmbeddedCluster, topic: str) -> None:
    servers = cluster.bootstrap_servers
    for name in (topic, f"{topic}-other"):
        make_topic(servers, name, 2)
        produce(servers, name, [{"value": b"x", "partition": number % 2} for number in range(10)])
    settings = {"bootstrap.servers": servers, "log_level": 0, "enable.auto.commit": False}
    committing = Consumer({**settings, "group.id": f"{topic}-offline"})
    places = [TopicPartition(topic, 0, 2), TopicPartition(f"{topic}-other", 0, 4)]
    committing.commit(offsets=places, asynchronous=False)
    committing.close()
    member = Consumer({**settings, "group.id": f"{topic}-online", "auto.offset.reset": "earliest"})
    member.subscribe([topic])
    try:
        assert member.poll(30)
        groups = {one["group"]: (one["members"], one["lag"]) for one in page.get("groups")["groups"]}
        assert (groups[f"{topic}-offline"], groups[f"{topic}-online"]) == ((0, 4), (1, None))
        rows = {one["group"]: (one["state"], one["members"], one["lag"]) for one in page.get("readers", name=topic)}
        assert rows == {f"{topic}-offline": ("Empty", 0, 3), f"{topic}-online": ("Stable", 1, None)}
        (other,) = page.get("readers", name=f"{topic}-other")
        assert (other["group"], other["members"], other["lag"]) == (f"{topic}-offline", 0, 1)
    finally:
        member.close()


def test_deletion_of_a_topic(page: Page, changing: Page, cluster: EmbeddedCluster, topic: str) -> None:
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    body = {"name": topic, "confirm": topic}
    assert page.ask("topics/delete", body)[0] == 403
    assert changing.ask("topics/delete", body)[0] == 403  # without the token
    for confirm in ({}, {"confirm": ""}, {"confirm": f"{topic}x"}, {"confirm": True}):
        assert changing.post("topics/delete", {"name": topic, **confirm})[0] == 400
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    assert topic in admin.list_topics(timeout=30).topics
    assert changing.post("topics/delete", body) == (200, {"deleted": topic})
    assert topic not in admin.list_topics(timeout=30).topics
    assert changing.post("topics/delete", body)[0] == 502


def test_a_jump_to_nowhere_says_so(page: Page, cluster: EmbeddedCluster, topic: str) -> None:
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 2)
    produce(servers, topic, [{"value": b"%d" % number, "partition": 0, "timestamp": 1000} for number in range(10)])
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    for future in admin.delete_records([TopicPartition(topic, 0, 4)]).values():
        future.result(timeout=30)

    def jump(**place: object) -> tuple[str | None, list[int]]:
        found = page.get("messages", name=topic, count=3, **place)
        return found["note"], [row["offset"] for row in found["messages"]]

    beyond = "offset 10 is beyond the end of partition 0, whose last offset is 9: the newest messages are shown"
    before = "offset 3 is before the start of partition 0, whose first offset is 4: the oldest message is shown"
    assert jump(offset=10) == (beyond, [9, 8, 7])
    assert jump(offset=9, partition=0) == (None, [9, 8, 7])
    assert jump(offset=4) == (None, [4])
    assert jump(offset=3) == (before, [4])
    none = "offset 3 is before the start of partition 0, whose first offset is 4: there are no messages before that"
    assert jump(offset=3, order="oldest") == (none, [4, 5, 6]), "true of a record's own address, too"
    assert jump(time=1000) == (None, [4])
    assert jump(time=1001) == ("no message has this time or a later one: the newest are shown", [9, 8, 7])
    assert jump(offset=0, partition=1) == (None, [])
    produce(servers, topic, [{"value": b"x", "partition": 1}])
    both = "offset 12 is beyond the end of 2 partitions, whose last offset is at most 9: the newest messages are shown"
    assert jump(offset=12)[0] == both


def test_keys_values_and_headers(page: Page, cluster: EmbeddedCluster, topic: str) -> None:
    make_topic(cluster.bootstrap_servers, topic, 1)
    long = "ä" * 40_000
    produce(
        cluster.bootstrap_servers,
        topic,
        [
            {"value": b"\xff\x00\x01", "key": None, "headers": [("a", b"1"), ("a", None), ("b", b"\xfe")]},
            {"value": None, "key": "schlüssel".encode()},
            {"value": long.encode()},
        ],
    )
    last, second, first = page.get("messages", name=topic)["messages"]
    assert first["value"] == {"size": 3, "base64": "/wAB"}
    assert first["headers"] == [
        {"key": "a", "value": {"size": 1, "text": "1"}},
        {"key": "a", "value": None},
        {"key": "b", "value": {"size": 1, "base64": "/g=="}},
    ]
    assert (second["key"], second["value"]) == ({"size": 10, "text": "schlüssel"}, None)
    assert last["value"]["size"] == 80_000
    assert len(last["value"]["text"].encode()) == 65_536
    assert long.startswith(last["value"]["text"])


def test_search_finds_what_python_finds(page: Page, cluster: EmbeddedCluster, topic: str) -> None:
    make_topic(cluster.bootstrap_servers, topic, 2)
    records: list[dict[str, Any]] = [
        {
            "value": [b"plain %d" % number, None, b"Needle %d" % number, b"\xff\xfeneedle"][number % 4],
            "key": None if number % 3 else b"key-%d" % number,
            "headers": [("trace", b"abc%d" % number), ("needle" if number % 50 == 0 else "x", None)],
            "partition": number % 2,
        }
        for number in range(400)
    ]
    produce(cluster.bootstrap_servers, topic, records)

    def places(of: Any) -> set[tuple[int, int]]:
        return {(number % 2, number // 2) for number, record in enumerate(records) if of(record)}

    def in_headers(record: dict[str, Any], text: bytes) -> bool:
        return any(text in name.encode() or (value and text in value) for name, value in record["headers"])

    for text, fields, case, expected in (
        (b"needle", "value", False, places(lambda one: one["value"] and b"needle" in one["value"])),
        (b"needle", "value", True, places(lambda one: one["value"] and b"needle" in one["value"].lower())),
        (b"key-3", "key", False, places(lambda one: one["key"] and b"key-3" in one["key"])),
        (b"needle", "headers", False, places(lambda one: in_headers(one, b"needle"))),
        (b"abc39", "headers,key", False, places(lambda one: in_headers(one, b"abc39"))),
        (b"(.*", "key,value,headers", False, set()),
    ):
        found = page.get(
            "search", name=topic, text=text.decode(), matches=1000, ignoreCase=str(case).lower(), **{"in": fields}
        )
        assert {(row["partition"], row["offset"]) for name, row in found if name == "match"} == expected
        name, done = found[-1]
        assert (name, done["reason"], done["scanned"], done["total"]) == ("done", "end", 400, 400)
        assert done["found"] == len(expected)
    few = page.get("search", name=topic, text="abc", matches=7)
    assert sum(name == "match" for name, _ in few) == 7
    assert few[-1][1]["reason"] == "matches"
    newest = page.get("search", name=topic, text="abc", records=20)
    assert {row["offset"] for name, row in newest if name == "match"} == set(range(190, 200))
    assert page.get("search", name=topic, text="")[0][0] == "trouble"


def test_foreign_requests_are_refused(page: Page, changing: Page) -> None:
    for headers in ({"Host": "evil.example"}, {"Host": "evil.example:80"}, {"Sec-Fetch-Site": "cross-site"}):
        assert page.ask("overview", headers=headers)[0] == 403
    port = page.address.rstrip("/").rpartition(":")[2]
    assert page.ask("overview", headers={"Host": f"localhost:{port}"})[0] == 200
    body = {"topic": "t", "value": {"text": "x"}}
    assert "--allow-changes" in page.ask("produce", body)[1]["error"]
    assert changing.ask("produce", body)[0] == 403
    assert changing.ask("produce", body, {"X-Klog-Token": "wrong"})[0] == 403
    token = {"X-Klog-Token": changing.get("session")["token"]}
    assert changing.ask("produce", body, {**token, "Origin": "http://evil.example"})[0] == 403
    assert changing.ask("produce", body, {**token, "Content-Type": "text/plain"})[0] == 415
    assert changing.ask("produce", b"x" * 3_000_000, token)[0] == 413
    assert changing.ask("produce", b"[1]", token)[0] == 400
    assert changing.ask("produce", b"[" * 100_000, token)[0] == 400
    for path, place in (("produce", "topic"), ("topics/create", "name"), ("groups/move", "group")):
        status, answer = changing.ask(path, {**body, place: "\ud800"}, token)
        assert (status, "surrogate" in answer["error"]) == (400, True), path


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("messages", {}),
        ("messages", {"name": "t", "count": 501}),
        ("messages", {"name": "t", "offset": "-1"}),
        ("messages", {"name": "t", "before": "1:x"}),
        ("messages", {"name": "t", "order": "up"}),
        ("messages", {"name": "t", "time": "99999999999999999999"}),
        ("topic", {"name": "../etc"}),
    ],
)
def test_wrong_parameters_are_named(page: Page, path: str, parameters: dict[str, Any]) -> None:
    status, answer = page.ask(path, **parameters)
    assert (status, bool(answer["error"])) == (400, True)


def test_changes(changing: Page, cluster: EmbeddedCluster, topic: str) -> None:
    servers = cluster.bootstrap_servers
    assert (
        changing.post("topics/create", {"name": topic, "partitions": 2, "settings": {"retention.ms": "1000000"}})[0]
        == 200
    )
    assert changing.post("topics/create", {"name": topic})[0] == 502
    assert changing.post("topics/alter", {"name": topic, "partitions": 3, "settings": {"retention.ms": None}})[0] == 200
    described = changing.get("topic", name=topic)
    assert len(described["partitions"]) == 3
    assert {one["name"]: one["default"] or one["source"] != "topic" for one in described["settings"]}["retention.ms"]
    body = {
        "topic": topic,
        "partition": 1,
        "key": {"base64": "/wA="},
        "value": {"text": "größer"},
        "headers": [{"key": "h", "value": None}],
    }
    assert changing.post("produce", body) == (200, {"topic": topic, "partition": 1, "offset": 0})
    consumer = Consumer({"bootstrap.servers": servers, "group.id": topic, "log_level": 0, "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 1, 0)])
    message = consumer.poll(30)
    assert (message.key(), message.value(), message.headers()) == (b"\xff\x00", "größer".encode(), [("h", None)])
    consumer.close()

    produce(servers, topic, [{"value": b"x", "partition": 1} for _ in range(9)])
    move = {"group": topic, "topic": topic, "to": "offset", "value": 4}
    status, dry = changing.post("groups/move", move)
    assert (status, dry["dryRun"]) == (200, True)
    assert {one["partition"]: one["new"] for one in dry["changes"]} == {0: 0, 1: 4, 2: 0}
    assert changing.get("group", name=topic)["partitions"] == []
    assert changing.post("groups/move", {**move, "dryRun": False})[0] == 200
    assert changing.post("groups/move", {**move, "to": "shift", "value": -1, "dryRun": False})[0] == 200
    checking = Consumer({"bootstrap.servers": servers, "group.id": topic, "log_level": 0})
    (committed,) = checking.committed([TopicPartition(topic, 1)], timeout=30)
    assert committed.offset == 3
    checking.close()
    (row,) = [one for one in changing.get("group", name=topic)["partitions"] if one["partition"] == 1]
    assert row["offsets"]["kafka"] | {"lagMs": 0} == {"offset": 3, "lag": 7, "lost": 0, "lagMs": 0}
    for wrong in ({"to": "nowhere"}, {"value": "4"}, {"topic": 3}, {"dryRun": "no"}, {"to": "time", "value": 2**60}):
        assert changing.post("groups/move", {**move, **wrong})[0] == 400


def test_dead_letters_are_replayed(cluster: EmbeddedCluster, changing: Page, topic: str) -> None:
    servers = cluster.bootstrap_servers
    for name in (topic, f"{topic}-dlq"):
        make_topic(servers, name, 1)
    letters: list[dict[str, Any]] = [
        {"value": b"%d" % number, "headers": list(DeadLetter(topic, 0, number, error=error, reason="why").headers)}
        for number, error in enumerate(("KeyError", "ValueError", "KeyError"))
    ]
    produce(servers, f"{topic}-dlq", letters)
    done = {"topic": f"{topic}-dlq", "others": 0}
    chosen = {"topic": f"{topic}-dlq", "reason": "^Key"}
    assert changing.post("dead-letters/replay", chosen) == (200, {**done, "records": 2})
    assert changing.post("dead-letters/replay", {"topic": f"{topic}-dlq"}) == (200, {**done, "records": 1})
    rows = changing.get("messages", name=topic)["messages"]
    assert sorted((row["value"]["text"], row["headers"]) for row in rows) == [("0", []), ("1", []), ("2", [])]
    assert changing.post("dead-letters/replay", {"topic": f"{topic}-dlq", "reason": "("})[0] == 400
    assert changing.post("dead-letters/replay", {"topic": ""})[0] == 400


def test_produce_makes_no_topic_and_fences_nobody(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    file = tmp_path / "of-a-program.properties"
    file.write_text(f"transactional.id={topic}\n")
    program = Producer({"bootstrap.servers": servers, "transactional.id": topic, "log_level": 0})
    program.init_transactions(30)
    with serving("-b", servers, "--allow-changes", "--command-config", str(file)) as page:
        status, answer = page.post("produce", {"topic": topic, "value": {"text": "x"}})
        assert (status, "UNKNOWN_TOPIC_OR_PARTITION" in answer["error"]) == (502, True)
        assert topic not in AdminClient({"bootstrap.servers": servers, "log_level": 0}).list_topics(timeout=30).topics
        make_topic(servers, topic, 1)
        assert page.post("produce", {"topic": topic, "value": {"text": "x"}})[0] == 200
    program.begin_transaction()
    program.produce(topic, b"y")
    program.commit_transaction(30)


def test_many_readers_at_once(changing: Page, cluster: EmbeddedCluster, topic: str) -> None:
    make_topic(cluster.bootstrap_servers, topic, 3)
    produce(cluster.bootstrap_servers, topic, [{"value": b"%d" % number, "partition": 1} for number in range(7)])

    def read(number: int) -> Any:
        kind = number % 4
        if kind == 0:
            (row,) = (row for row in changing.get("overview")["topics"] if row["name"] == topic)
            return row["records"]
        if kind == 1:
            return sum(row["latest"] - row["earliest"] for row in changing.get("topic", name=topic)["partitions"])
        if kind == 2:
            return len(changing.get("messages", name=topic)["messages"])
        body = {"group": topic, "topic": topic, "to": "latest", "dryRun": True}
        status, answer = changing.post("groups/move", body)
        assert status == 200, answer
        return sum(row["new"] for row in answer["changes"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(160))) == [7] * 160


def test_places_of_a_group_side_by_side(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    produce(servers, topic, [{"value": b"x"} for _ in range(10)])
    committing = Consumer({"bootstrap.servers": servers, "group.id": topic, "log_level": 0})
    committing.commit(offsets=[TopicPartition(topic, 0, 6)], asynchronous=False)
    committing.close()
    folder = tmp_path / "consumers" / topic / "offsets" / topic
    folder.mkdir(parents=True)
    (folder / "0").write_bytes(b"4")
    checkpoint = tmp_path / "checkpoint"
    for name in ("offsets", "commits"):
        (checkpoint / name).mkdir(parents=True)
    (checkpoint / "metadata").write_text('{"id":"a-query"}')
    (checkpoint / "offsets" / "3").write_text("v1\n{}\n" + json.dumps({topic: {"0": 8}}))
    (checkpoint / "commits" / "3").write_text("v1\n{}")
    places = ("--offsets-path", str(tmp_path), "--checkpoint", str(checkpoint), "--checkpoint", str(tmp_path / "none"))
    with serving("-b", servers, *places) as page:
        found = page.get("group", name=topic)
        (row,) = found["partitions"]
        assert {place: (one["offset"], one["lag"]) for place, one in row["offsets"].items()} == {
            "kafka": (6, 4),
            str(tmp_path): (4, 6),
            str(checkpoint): (8, 2),
        }
        assert list(found["errors"]) == [str(tmp_path / "none")]
        good, bad = page.get("queries")
        assert (good["query"], good["planned"], good["done"]) == ("a-query", 3, 3)
        assert [(one["offset"], one["latest"]) for one in good["partitions"]] == [(8, 10)]
        assert "not a checkpoint" in bad["error"]


def test_streams_are_bounded_and_end_with_their_reader(page: Page) -> None:
    host, port = page.host.split(":")
    request = page.get_request("/api/live/groups")
    opened = []
    for _ in range(32):
        client = socket.create_connection((host, int(port)), 30)
        client.sendall(request)
        opened.append(client)
    for client in opened:
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    assert page.ask("live/groups")[0] == 503
    for client in opened:
        client.close()
    deadline = time.monotonic() + 60
    while True:  # closed streams make room for others
        with socket.create_connection((host, int(port)), 30) as client:
            client.sendall(request)
            if client.recv(100).startswith(b"HTTP/1.1 200"):
                break
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.test_all("long")
def test_it_ends_while_no_broker_answers(make_cluster: Callable[..., EmbeddedCluster]) -> None:
    cluster = make_cluster()
    command = klog_command("ui", "--listen", "0", "-b", cluster.bootstrap_servers)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            page = Page.of(process)
            cluster.kill(0)
            host, _, port = page.host.rpartition(":")
            with socket.create_connection((host, int(port)), 30) as client:
                client.sendall(page.get_request("/api/overview"))
                assert process.stderr is not None
                assert any("still trying" in line for line in process.stderr)
                process.terminate()
                _, errors = process.communicate(timeout=30)  # without a stop, the request would retry for a minute
        finally:
            process.kill()
    assert process.returncode == 0
    assert "Traceback" not in errors


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def ask_without_log_in(address: str, **headers: str) -> tuple[int, Message, str]:
    """(status, headers, body) of a GET request; redirects are not followed."""
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(urllib.request.Request(address, headers=headers), timeout=60) as response:
            return response.status, response.headers, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def test_the_log_in(page: Page, changing: Page) -> None:
    status, headers, body = ask_without_log_in(page.address)
    assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
    assert f"http://{page.host}/?token=TOKEN" in body
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    for path in ("static/app.js", "api/overview", "api/live/overview", "api/session", "elsewhere"):
        assert ask_without_log_in(page.address + path)[0] == 401, path
        assert page.token not in ask_without_log_in(page.address + path)[2]
    assert (
        "open the address that klog ui has printed"
        in json.loads(ask_without_log_in(page.address + "api/overview")[2])["error"]
    )
    status, headers, body = ask_without_log_in(f"{page.address}?token={changing.token}")
    assert (status, headers["Set-Cookie"], "This is not the token of this page" in body) == (401, None, True)

    status, headers, _ = ask_without_log_in(f"{page.address}?token={page.token}")
    assert (status, headers["Location"]) == (303, "/")
    cookie, *attributes = headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(attributes)
    assert page.token not in cookie
    assert ask_without_log_in(page.address, Cookie=cookie)[0] == 200
    assert ask_without_log_in(f"{page.address}api/session", Cookie=f"other=1; {cookie}")[0] == 200
    # neither another page's nor a changed one, and the token is in no other place
    name, _, value = cookie.partition("=")
    other = changing.host.rpartition(":")[2]
    assert name == f"klog-{page.host.rpartition(':')[2]}"
    assert ask_without_log_in(changing.address, Cookie=f"klog-{other}={value}")[0] == 401
    assert ask_without_log_in(page.address, Cookie=f"{cookie}x")[0] == 401
    assert ask_without_log_in(page.address, Cookie=f"{name}={page.token}")[0] == 401
    assert ask_without_log_in(f"{page.address}api/session?token={page.token}")[0] == 401
    assert ask_without_log_in(page.address, Authorization=f"Bearer {page.token}x")[0] == 401
    assert ask_without_log_in(page.address, Authorization=f"bearer {page.token}")[0] == 200
    assert ask_without_log_in(page.address, Authorization="Bearer \xff")[0] == 401
    assert page.ask("overview", headers={"Sec-Fetch-Site": "cross-site"})[0] == 403


def test_a_token_of_ones_own_is_not_shown(cluster: EmbeddedCluster) -> None:
    given = "my-own-token-of-2026"
    command = klog_command("--log-level", "DEBUG", "ui", "--listen", str(free_port()), "-b", cluster.bootstrap_servers)
    environment = {**os.environ, "KLOG_UI_TOKEN": given}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = line.split()[4].partition("?")[0]
            assert line == f"the page is at {address}?token=TOKEN, with your token\n"
            assert ask_without_log_in(f"{address}?token={given}")[0] == 303
            assert ask_without_log_in(f"{address}?token={given}-no")[0] == 401
            assert ask_without_log_in(address, Authorization=f"Bearer {given}")[0] == 200
            process.terminate()
            out, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert given not in out + errors


def test_without_a_log_in(cluster: EmbeddedCluster) -> None:
    command = klog_command("ui", "--listen", str(free_port()), "--token", "off", "-b", cluster.bootstrap_servers)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            match = re.fullmatch(r"the page is at (http://127\.0\.0\.1:\d+/)\n", process.stdout.readline())
            assert match
            assert ask_without_log_in(match[1] + "api/session")[0] == 200
        finally:
            process.kill()


def test_what_the_command_refuses(cluster: EmbeddedCluster) -> None:
    line = klog_refusal("ui", "--listen", "0.0.0.0:0", "--allow-remote", "--token", "off", code=2)
    assert line.startswith("klog: --token off is for loopback addresses")
    assert "must be 16 to 200 of a-z" in klog_refusal("ui", "--listen", "0", "--token", "short-secret", code=2)
    assert "short-secret" not in klog_refusal("ui", "--listen", "0", "--token", "short-secret", code=2)
    line = klog_refusal("ui", "--listen", "0.0.0.0:0", "-b", cluster.bootstrap_servers, code=2)
    assert "--allow-remote" in line
    line = klog_refusal("ui", "--listen", "nowhere", "-b", cluster.bootstrap_servers, code=2)
    assert line == "klog: --listen: 'nowhere' is not HOST:PORT"
