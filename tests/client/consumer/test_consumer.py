"""The consumer, with assigned partitions and in groups, at our broker and Kafka's, reads what confluent-kafka sends."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import (
    Consumer as ConfluentConsumer,
    Producer as ConfluentProducer,
    TopicPartition as ConfluentPartition,
)

from spark_klog.base.names import TopicPartition
from spark_klog.classic.member import OffsetStorages
from spark_klog.client import Admin, Committed, Consumer, ConsumerRecord
from spark_klog.client.cluster import Cluster
from spark_klog.errors import (
    CommitFailed,
    ConcurrentUse,
    ConfigError,
    ConsumerClosed,
    KlogError,
    MemberFenced,
    NoOffsetForPartition,
    OffsetOutOfRange,
    ProtocolError,
    WokenUp,
)
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from spark_klog.trees.memory import MemoryTree
from tests.support.clients.consumers import (
    MEMBER_PROGRAM,
    NOW,
    SECONDS,
    SERVERS,
    Line,
    Member,
    Ours,
    Server,
    Theirs,
    is_shared,
    poll_until,
    produce,
    running,
    short,
)
from tests.support.clients.topics import create_topic
from tests.support.servers.shared_kafka import SharedKafkas

pytestmark = pytest.mark.usefixtures("driver")

our_broker = pytest.mark.parametrize("server", ["klog"], indirect=True)


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[Server]:
    with running(request.param, module_server_dir / request.param, shared_kafkas) as there:
        yield there


def _lines(count: int, *, has_headers: bool = True) -> list[Line]:
    keys = [None, b"", b"key", bytes(range(256))]
    values = [None, b"", b"value", b"\x00\xff" * 400, b"text " * 3000]
    headers: list[tuple[tuple[str, bytes | None], ...]] = [(), (("a", b"1"),), (("a", b"1"), ("a", None), ("ü", b""))]
    return [
        Line(NOW + 7 * (number ^ 3), keys[number % 4], values[number % 5], headers[number % 3] if has_headers else ())
        for number in range(count)
    ]


def _poll(consumer: Consumer, count: int) -> list[ConsumerRecord]:
    """Poll until there are `count` records; there must not be more."""
    found: list[ConsumerRecord] = []
    deadline = time.monotonic() + SECONDS
    while len(found) < count and time.monotonic() < deadline:
        found += consumer.poll(1.0)
    assert len(found) == count
    return found


def _poll_arrow(consumer: Consumer, count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + SECONDS
    while len(rows) < count and time.monotonic() < deadline:
        batch = consumer.poll_arrow(1.0)
        rows += [] if batch is None else batch.to_pylist()
    assert len(rows) == count
    return rows


def _line(record: ConsumerRecord) -> Line:
    assert record.timestamp_type == 0
    return Line(record.timestamp, record.key, record.value, record.headers)


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_records_and_columns_are_those_that_were_sent(server: Server, codec: str) -> None:
    if codec == "zstd" and server.is_old:
        pytest.skip("Kafka has zstd since 2.1")
    topic, lines = server.topic(), _lines(200, has_headers=not server.is_old)
    server.send(topic, lines, compression_type=codec)
    with server.consumer(include_headers=True) as consumer:
        consumer.assign([(topic, 0, 0)])
        records = _poll(consumer, 200)
        assert [_line(record) for record in records] == lines
        assert [record[:3] for record in records] == [(topic, 0, offset) for offset in range(200)]
        consumer.seek(topic, 0, EARLIEST)
        rows = _poll_arrow(consumer, 200)
        assert consumer.position(topic, 0) == 200
    for record, row in zip(records, rows, strict=True):
        assert (row["topic"], row["partition"], row["offset"], row["timestampType"]) == (topic, 0, record.offset, 0)
        assert row["timestamp"].timestamp() * 1000 == pytest.approx(record.timestamp)
        headers = row["headers"] and tuple((header["key"], header["value"]) for header in row["headers"])
        assert (row["key"], row["value"], headers or ()) == (record.key, record.value, record.headers)


def test_columns_are_those_of_the_spark_source(server: Server) -> None:
    topic = server.topic()
    server.send(topic, short(1))
    with server.consumer() as consumer:
        consumer.assign([(topic, 0, 0)])
        names = ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
        assert list(_poll_arrow(consumer, 1)[0]) == names


def test_many_partitions_seek_pause_and_resume(server: Server) -> None:
    topic = server.topic(5)
    for partition in range(5):
        server.send(topic, short(100), partition)
    with server.consumer(auto_offset_reset="earliest", max_poll_records=7) as consumer:
        consumer.assign([(topic, 0), (topic, 1, 0), (topic, 2, 40), (topic, 3, LATEST), (topic, 4, EARLIEST)])
        consumer.pause([(topic, 1)])
        assert consumer.paused() == [(topic, 1)]
        found = _poll(consumer, 260)
        assert not consumer.poll(0.2)
        for partition, start in ((0, 0), (2, 40), (4, 0)):
            offsets = [record.offset for record in found if record.partition == partition]
            assert offsets == list(range(start, 100))
        assert [consumer.position(topic, number) for number in range(5)] == [100, 0, 100, 100, 100]
        consumer.resume([(topic, 1)])
        first = consumer.poll(SECONDS)
        assert [record.offset for record in first] == list(range(7))
        consumer.seek(topic, 1, 90)  # drops what was fetched
        consumer.seek(topic, 0, 98)
        assert {(item.partition, item.offset) for item in _poll(consumer, 12)} == {
            *((1, offset) for offset in range(90, 100)),
            (0, 98),
            (0, 99),
        }
        consumer.seek(topic, 4, 50)
        assert len(consumer.poll(SECONDS)) == 7
        assert [row["offset"] for row in _poll_arrow(consumer, 43)] == list(range(57, 100))
        consumer.assign([(topic, 2), (topic, 3)])
        assert consumer.assignment() == [(topic, 2), (topic, 3)]
        server.send(topic, short(10), 3)
        server.send(topic, short(10), 4)
        assert {record.partition for record in _poll(consumer, 10)} == {3}
        with pytest.raises(ConfigError, match=f"{topic}-4 is not assigned"):
            consumer.seek(topic, 4, 0)


def test_records_that_come_while_it_waits(server: Server) -> None:
    topic = server.topic()
    with server.consumer() as consumer:
        consumer.assign([(topic, 0, 0)])
        assert consumer.poll(0.1) == []
        assert consumer.poll_arrow(0.1) is None
        for number in range(3):
            server.send(topic, short(5))
            assert len(_poll(consumer, 5)) == 5
            assert consumer.position(topic, 0) == 5 * (number + 1)


@pytest.mark.parametrize(
    ("policy", "expected"), [("earliest", 0), ("latest", 20), ("by_duration:P10000D", 0), ("by_duration:PT1S", 20)]
)
def test_an_offset_out_of_range_is_reset_by_policy(server: Server, policy: str, expected: int) -> None:
    topic = server.topic()
    server.send(topic, short(20))
    with server.consumer(auto_offset_reset=policy) as consumer:
        consumer.assign([(topic, 0, 1000)])
        assert len(_poll(consumer, 20 - expected)) == 20 - expected
        deadline = time.monotonic() + SECONDS
        while consumer.position(topic, 0) != 20 and time.monotonic() < deadline:
            assert consumer.poll(0.2) == []
        assert consumer.position(topic, 0) == 20
        consumer.assign([])
        consumer.assign([(topic, 0)])
        assert consumer.position(topic, 0) == expected


def test_an_offset_out_of_range_is_an_error_without_a_policy(server: Server) -> None:
    topic = server.topic()
    server.send(topic, short(20))
    with server.consumer(auto_offset_reset="none") as consumer:
        consumer.assign([(topic, 0, 1000)])
        for _ in range(2):
            with pytest.raises(OffsetOutOfRange) as failed:
                consumer.poll(SECONDS)
            assert (failed.value.requested, failed.value.available) == ((1000, 1001), (0, 20))
        consumer.seek(topic, 0, 19)
        assert len(_poll(consumer, 1)) == 1
        consumer.assign([])
        consumer.assign([(topic, 0)])
        with pytest.raises(NoOffsetForPartition, match=f"{topic}-0"):
            consumer.poll(SECONDS)


def test_a_message_larger_than_the_fetch(server: Server) -> None:
    topic = server.topic(2)
    large = [Line(NOW, None, bytes([number]) * 300_000, ()) for number in range(3)]
    for partition in range(2):
        server.send(topic, [*short(3), *large, *short(3)], partition, batch_size=1)
    with server.consumer(max_partition_fetch_bytes=1000, fetch_max_bytes=1000) as consumer:
        consumer.assign([(topic, 0, 0), (topic, 1, 0)])
        found = _poll(consumer, 18)
    for partition in range(2):
        values = [record.value for record in found if record.partition == partition]
        assert values == [line.value for line in (*short(3), *large, *short(3))]


def test_read_committed(server: Server) -> None:
    if server.is_old:
        pytest.skip("Kafka has transactions since 0.11")
    topic = server.topic()
    producer = ConfluentProducer({"bootstrap.servers": server.servers, "transactional.id": topic})
    producer.init_transactions(SECONDS)
    expected = []
    for number in range(6):
        producer.begin_transaction()
        lines = short(20, 100 * number)
        produce(producer, topic, lines, 0)
        producer.flush(SECONDS)
        if number % 2:
            producer.abort_transaction(SECONDS)
        else:
            producer.commit_transaction(SECONDS)
            expected += [line.value for line in lines]
    with server.consumer(isolation_level="read_committed") as consumer:
        consumer.assign([(topic, 0, 0)])
        assert [record.value for record in _poll(consumer, 60)] == expected
        deadline = time.monotonic() + SECONDS
        while consumer.position(topic, 0) < 126 and time.monotonic() < deadline:
            assert consumer.poll(0.2) == []
        assert consumer.position(topic, 0) == 126  # after the last transaction's marker
        consumer.seek(topic, 0, 0)
        assert [row["value"] for row in _poll_arrow(consumer, 60)] == expected
    with server.consumer() as consumer:
        consumer.assign([(topic, 0, 0)])
        assert len(_poll(consumer, 120)) == 120


def _in_thread(action: Callable[[], object]) -> tuple[threading.Thread, list[KlogError]]:
    raised: list[KlogError] = []

    def run() -> None:
        try:
            action()
        except KlogError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def _use_while(consumer: Consumer, thread: threading.Thread, driver: str) -> None:
    while thread.is_alive():
        if driver == "thread":
            consumer.assignment()
        elif consumer._is_polling:  # type: ignore[attr-defined]  # other calls are admitted on a loop
            consumer.poll(0)


def test_wakeup_and_close_from_another_thread(server: Server, driver: str) -> None:
    topic = server.topic()
    with server.consumer() as consumer:
        consumer.assign([(topic, 0, 0)])
        consumer.poll(0.1)
        thread, raised = _in_thread(lambda: consumer.poll(SECONDS))
        consumer.wakeup()
        thread.join(SECONDS)
        assert isinstance(raised[0], WokenUp)
        server.send(topic, short(5))
        assert len(_poll(consumer, 5)) == 5
        thread, raised = _in_thread(lambda: consumer.poll(SECONDS))
        with pytest.raises(ConcurrentUse):  # once the poll of the other thread has begun
            _use_while(consumer, thread, driver)
        consumer.close()
        thread.join(SECONDS)
        assert isinstance(raised[0], ConsumerClosed)
        consumer.close()
        with pytest.raises(ConsumerClosed):
            consumer.poll()


def test_no_broker_answers() -> None:
    settings = {"bootstrap.servers": "127.0.0.1:1", "default.api.timeout.ms": 300}
    with Consumer(settings) as consumer:
        consumer.assign([("t", 0, 0)])
        with pytest.raises(KlogError, match=r"127\.0\.0\.1:1"):
            consumer.poll(SECONDS)


def test_members_of_a_group_share_and_hand_over(server: Server) -> None:
    # brokers behave the same with every assignor
    for strategy in ("range", "roundrobin", "sticky", "cooperative-sticky") if server.version is None else ("sticky",):
        _share_and_hand_over(server, strategy)


def _share_and_hand_over(server: Server, strategy: str) -> None:
    topic = server.topic(5)
    for partition in range(5):
        server.send(topic, [Line(NOW, None, b"%d" % number, ()) for number in range(partition, 500, 5)], partition)
    first = Ours(server, topic, strategy)
    try:
        poll_until([first], lambda: len(first.values) == 500)
        assert first.heard.calls == [("assigned", [(topic, partition) for partition in range(5)])]
        second = Ours(server, topic, strategy)
        try:
            poll_until([first, second], lambda: is_shared([first, second], 5))
            kept = first.owned()
            gone = [call for call in first.heard.calls if call[0] == "revoked"]
            assert len(gone) == 1
            assert len(gone[0][1]) == (5 - len(kept) if strategy == "cooperative-sticky" else 5)
            for partition in range(5):
                server.send(topic, [Line(NOW, None, b"more-%d" % partition, ())], partition)
            poll_until([first, second], lambda: len(first.values) + len(second.values) == 505)
        finally:
            second.close()
        poll_until([first], lambda: len(first.owned()) == 5)
        if "sticky" in strategy:
            assert kept <= first.owned()
        first.consumer.commit()
        committed = first.consumer.committed([(topic, partition) for partition in range(5)])
        assert second.heard.calls[-1][0] == "revoked"
        assert sum(item.offset for item in committed.values()) == 505
        first.poll()
        assert len(first.values) + len(second.values) == 505
        assert len(set(first.values + second.values)) == 505
    finally:
        first.close()


@our_broker
@pytest.mark.parametrize(
    ("strategy", "leads"),
    [
        ("range", "ours"),
        ("cooperative-sticky", "theirs"),
    ],
)
def test_members_of_librdkafka_in_one_group(server: Server, strategy: str, leads: str) -> None:
    topic = server.topic(6)
    kinds: list[type[Ours] | type[Theirs]] = [Ours, Theirs] if leads == "ours" else [Theirs, Ours]
    members: list[Member] = []
    try:
        for kind in (kinds[0], kinds[1], kinds[1]):
            members.append(kind(server, topic, strategy))
            poll_until(members, lambda: is_shared(members, 6))
        for partition in range(6):
            server.send(topic, short(50, 50 * partition), partition)
        poll_until(members, lambda: sum(len(item.values) for item in members) >= 300)
        members.pop(0).close()  # the leader
        poll_until(members, lambda: is_shared(members, 6))
    finally:
        for member in members:
            member.close()


@our_broker
@pytest.mark.test_all("kill")
def test_a_member_that_is_killed_while_it_rebalances(server: Server) -> None:
    topic = server.topic(4)
    arguments = [server.servers, f"g-{topic}", topic]
    killed = subprocess.Popen([sys.executable, "-c", MEMBER_PROGRAM, *arguments], stdout=subprocess.PIPE, text=True)
    members: list[Member] = []
    try:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "assigned\n"
        members += [Ours(server, topic, "range"), Theirs(server, topic, "range")]
        reader = threading.Thread(target=killed.stdout.readline)
        reader.start()
        poll_until(members, lambda: not reader.is_alive())  # it has revoked its partitions and is joining again
        killed.kill()
        poll_until(members, lambda: is_shared(members, 4))
        for partition in range(4):
            server.send(topic, short(10, 10 * partition), partition)
        poll_until(members, lambda: sum(len(member.values) for member in members) >= 40)
        values = [value for member in members for value in member.values]
        assert sorted(values) == sorted(line.value for line in short(40))
    finally:
        killed.kill()
        killed.wait()
        killed.stdout.close()
        for member in members:
            member.close()


def _offsets_of(committed: dict[TopicPartition, Committed]) -> dict[TopicPartition, int]:
    return {key: item.offset for key, item in committed.items()}


def test_commits(server: Server) -> None:
    topic = server.topic(2)
    server.send(topic, short(30))
    keys = [(topic, 0), (topic, 1)]
    done: list[tuple[dict[TopicPartition, int], KlogError | None]] = []
    with server.consumer(group_id=topic, enable_auto_commit=False) as consumer:
        assert consumer.committed(keys) == {}
        consumer.assign([(topic, 0, 0)])
        _poll(consumer, 30)
        consumer.commit()
        assert _offsets_of(consumer.committed(keys)) == {(topic, 0): 30}
        consumer.commit({(topic, 0): 7, (topic, 1): Committed(0, metadata="m")})
        found = consumer.committed(keys)
        assert _offsets_of(found) == {(topic, 0): 7, (topic, 1): 0}
        assert found[topic, 1].metadata == "m"
        for offset in (8, 9):
            consumer.commit_async(
                {(topic, 0): offset},
                lambda offsets, error: done.append(({key: item.offset for key, item in offsets.items()}, error)),
            )
        deadline = time.monotonic() + SECONDS
        while len(done) < 2 and time.monotonic() < deadline:
            consumer.poll(0.05)
        assert done == [({(topic, 0): 8}, None), ({(topic, 0): 9}, None)]
        with pytest.raises(
            ConfigError, match=r"offset -1 of .*-0 must be from 0 to 2\^63 - 1: commit the offset of the next record"
        ):
            consumer.commit({(topic, 0): -1})
    with server.consumer(group_id=topic) as consumer:
        consumer.assign(keys)
        assert consumer.position(topic, 0) == 9
        _poll(consumer, 21)
    theirs = ConfluentConsumer({"bootstrap.servers": server.servers, "group.id": topic})
    assert [item.offset for item in theirs.committed([ConfluentPartition(topic, 0)], SECONDS)] == [30]
    theirs.close()


@our_broker
def test_a_member_that_does_not_poll_leaves_the_group(server: Server) -> None:
    topic = server.topic()
    server.send(topic, short(10))
    member = Ours(server, topic, "range", max_poll_interval_ms=3000, enable_auto_commit=False, max_poll_records=4)
    with member.consumer as consumer:
        poll_until([member], lambda: len(member.values) == 4)
        other = Ours(server, topic, "range")
        try:
            poll_until([other], lambda: len(other.values) == 10)
            with pytest.raises(CommitFailed, match="the group has rebalanced"):
                consumer.commit()
        finally:
            other.close()
        poll_until([member], lambda: member.owned() == {0} and len(member.heard.calls) == 3)
        assert [kind for kind, _ in member.heard.calls] == ["assigned", "lost", "assigned"]


def test_a_static_member_comes_back(server: Server) -> None:
    if server.is_old:
        pytest.skip("Kafka has static members since 2.3")
    topic = server.topic(4)
    other = Ours(server, topic, "range", group_instance_id="a")
    first = Ours(server, topic, "range", group_instance_id="b")
    try:
        poll_until([other, first], lambda: is_shared([other, first], 4))
        calls, owned = list(other.heard.calls), first.owned()
        first.close()
        first = Ours(server, topic, "range", group_instance_id="b")
        poll_until([other, first], lambda: first.owned() == owned)
        assert other.heard.calls == calls
        usurper = Ours(server, topic, "range", group_instance_id="b")
        try:
            poll_until([other, usurper], lambda: usurper.owned() == owned)
            with pytest.raises(MemberFenced, match=r"group\.instance\.id=b"):
                poll_until([first], lambda: False)
        finally:
            usurper.close()
    finally:
        first.close()
        other.close()


def test_a_pattern_finds_topics_that_come_later(server: Server) -> None:
    prefix = f"p-{uuid.uuid4().hex[:8]}"
    first, second = server.topic(), server.topic()
    with server.consumer(group_id=prefix, auto_offset_reset="earliest", metadata_max_age_ms=300) as consumer:
        consumer.subscribe(re.compile(f"({first}|{second}|{prefix}.*)"))
        deadline = time.monotonic() + SECONDS
        while len(consumer.assignment()) < 2 and time.monotonic() < deadline:
            consumer.poll(0.1)
        assert {topic for topic, _ in consumer.assignment()} == {first, second}
        with Cluster.connect({"bootstrap.servers": server.servers}) as cluster:
            create_topic(cluster, f"{prefix}-new", 2)
        server.send(f"{prefix}-new", short(5))
        assert [record.topic for record in _poll(consumer, 5)] == [f"{prefix}-new"] * 5
        assert len(consumer.assignment()) == 4
        consumer.unsubscribe()
        assert consumer.assignment() == []
        assert _offsets_of(consumer.committed([(f"{prefix}-new", 0)])) == {(f"{prefix}-new", 0): 5}


def test_auto_commit_of_a_topic_that_was_deleted(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """The offsets of the other topics are committed, and neither a rebalance nor close wait for the deleted one."""
    kept, deleted = server.topic(), server.topic()
    for topic in (kept, deleted):
        server.send(topic, short(5))
    settings = {"group_id": kept, "auto_offset_reset": "earliest", "metadata_max_age_ms": 500}
    waits = 20.0  # seconds: below default.api.timeout.ms, and the timeout of close
    with server.consumer(**settings) as consumer, Admin({"bootstrap.servers": server.servers}) as admin:
        consumer.subscribe([kept, deleted])
        _poll(consumer, 10)
        admin.delete_topic(deleted)
        poll_until([], lambda: deleted not in [one.name for one in admin.list_topics()])
        deadline = time.monotonic() + SECONDS
        while consumer.assignment() != [(kept, 0)]:  # after a commit, and a rebalance
            begin = time.monotonic()
            consumer.poll(0.2)
            assert time.monotonic() - begin < waits
            assert time.monotonic() < deadline
        assert consumer.committed([(kept, 0)])[kept, 0].offset == 5
        assert f"{deleted}-0" in caplog.text

        again = server.topic()
        server.send(again, short(5))
        consumer.subscribe([kept, again])
        _poll(consumer, 5)
        server.send(kept, short(1))
        _poll(consumer, 1)
        admin.delete_topic(again)
        poll_until([], lambda: again not in [one.name for one in admin.list_topics()])
        begin = time.monotonic()
        consumer.close()
        assert time.monotonic() - begin < waits
    with server.consumer(group_id=kept) as consumer:
        assert consumer.committed([(kept, 0)])[kept, 0].offset == 6


def test_a_commit_of_a_topic_that_was_deleted(server: Server) -> None:
    """The error comes soon, as the topic does not; the other offsets are committed."""
    topic = server.topic()
    with server.consumer(group_id=topic) as consumer:
        begin = time.monotonic()
        with pytest.raises(ProtocolError, match=f"commit of {topic}-none-0 .*UNKNOWN_TOPIC_OR_PARTITION"):
            consumer.commit({(topic, 0): 3, (f"{topic}-none", 0): 4})
        assert time.monotonic() - begin < 20.0  # default.api.timeout.ms is 60 s
        assert consumer.committed([(topic, 0)])[topic, 0].offset == 3


def test_a_connector_commits_what_is_left(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """A group of ZooKeeper whose offsets are at the coordinator."""
    topic = server.topic()
    with Cluster.connect({"bootstrap.servers": server.servers}) as cluster:
        storages = OffsetStorages(MemoryTree(), topic, ("kafka",))
        gone = f"{topic}-none", 0
        begin = time.monotonic()
        storages.commit(cluster, {(topic, 0): 3, gone: 4})
        assert time.monotonic() - begin < 20.0  # request.timeout.ms is 30 s
        assert storages.fetch(cluster, [(topic, 0), gone]) == {(topic, 0): 3}
    assert f"commit of {topic}-none-0 for group {topic}" in caplog.text


def test_a_unit_of_timestamps_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="timestamp_unit is 'ns': set one of us, ms"):
        Consumer({"bootstrap.servers": "127.0.0.1:1"}, timestamp_unit="ns")  # type: ignore[arg-type]
