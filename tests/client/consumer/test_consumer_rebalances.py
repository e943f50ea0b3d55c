"""Listeners and commits during rebalances and close, and their effect on the group."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from spark_klog.base.names import TopicPartition
from spark_klog.broker.faults import Delay, Drop, ErrorAnswer, Fault
from spark_klog.client import Admin, Consumer, RebalanceListener
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer import classic_group as group_module, group as groups_module
from spark_klog.client.consumer.classic_group import Heartbeats
from spark_klog.client.consumer.settings import consumer_config
from spark_klog.client.net.connection import Connection, Handle
from spark_klog.client.offsets import GroupMetadata
from spark_klog.client.requests import Steps, at_once
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import CommitFailed, ConsumerClosed, ErrorCode, KlogError
from spark_klog.protocol.apis import CREATE_PARTITIONS, JOIN_GROUP
from tests.support.clients.consumers import SECONDS, Heard, Ours, Server, is_shared, poll_until, short

pytestmark = pytest.mark.usefixtures("driver")


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(faults=[]) as cluster:
        yield cluster


@pytest.fixture
def server(cluster: EmbeddedCluster) -> Server:
    return Server(cluster.bootstrap_servers, None)


class _OnRevoked(RebalanceListener):
    """Call a function when partitions are revoked or lost."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def on_revoked(self, partitions: list[TopicPartition]) -> None:
        self._act()


def _fail() -> None:
    raise RuntimeError("the program's flush failed")


def test_a_long_poll_without_records_polls(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Longer than max.poll.interval.ms, of a member whose partitions are paused."""
    topic = server.topic()
    member = Ours(server, topic, "range", max_poll_interval_ms=1000)
    member.consumer.subscribe([topic])
    poll_until([member], lambda: bool(member.consumer.assignment()))
    before = member.consumer.group_metadata()
    member.consumer.pause(member.consumer.assignment())
    assert member.consumer.poll(2.5) == []
    assert "max.poll.interval.ms" not in caplog.text
    assert member.consumer.group_metadata() == before
    member.consumer.close()


def test_a_throttled_join_keeps_no_poll_waiting(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = server.topic()
    server.send(topic, short(3))
    receive = Connection.receive

    def throttled(self: Connection, handle: Handle, *rest: Any) -> Any:
        answer = receive(self, handle, *rest)
        if handle.api is JOIN_GROUP:
            self.throttled_until = time.monotonic() + 4
        return answer

    monkeypatch.setattr(Connection, "receive", throttled)
    member = Ours(server, topic, "range")
    member.consumer.subscribe([topic])
    begin, longest = time.monotonic(), 0.0
    while len(member.values) < 3:
        assert time.monotonic() - begin < 3 * SECONDS
        polled = time.monotonic()
        member.poll()
        longest = max(longest, time.monotonic() - polled)
    assert time.monotonic() - begin > 4
    assert longest < 3.5
    member.close()


def test_a_listener_commits_while_the_consumer_closes(server: Server) -> None:
    topic = server.topic()
    server.send(topic, short(10))
    first = Ours(server, topic, "range", enable_auto_commit=False)
    first.consumer.subscribe([topic], _OnRevoked(first.consumer.commit))
    poll_until([first], lambda: len(first.values) == 10)
    first.close()
    with pytest.raises(ConsumerClosed):
        first.consumer.commit()
    second = Ours(server, topic, "range")
    try:
        poll_until([second], lambda: second.owned() == {0})
        assert second.consumer.position(topic, 0) == 10
    finally:
        second.close()


def test_a_member_leaves_when_its_coordinator_has_loaded_the_group(cluster: EmbeddedCluster, server: Server) -> None:
    """Others would wait for it until its session ends."""
    topic = server.topic()
    first = Ours(server, topic, "range")
    poll_until([first], lambda: first.owned() == {0})
    second = Ours(server, topic, "range")
    try:
        cluster.inject(Fault(ErrorAnswer("COORDINATOR_LOAD_IN_PROGRESS"), api="LeaveGroup", count=2))
        first.close()
        begin = time.monotonic()
        poll_until([second], lambda: second.owned() == {0})
        assert time.monotonic() < begin + 4
    finally:
        cluster.clear_faults()
        second.close()


@pytest.mark.parametrize("how", ["close", "unsubscribe"])
def test_a_member_leaves_although_its_listener_fails(server: Server, how: str) -> None:
    topic = server.topic()
    server.send(topic, short(10))
    first = Ours(server, topic, "range")
    first.consumer.subscribe([topic], _OnRevoked(_fail))
    poll_until([first], lambda: len(first.values) == 10)
    with pytest.raises(RuntimeError, match="flush failed"):
        getattr(first.consumer, how)()
    second = Ours(server, topic, "range")
    try:
        poll_until([second], lambda: second.owned() == {0})
        assert second.consumer.position(topic, 0) == 10
        if how == "unsubscribe":
            assert first.owned() == set()
    finally:
        second.close()
        first.close()


def test_partitions_are_handed_over_although_the_listener_fails(server: Server) -> None:
    topic = server.topic(2)
    for partition in range(2):
        server.send(topic, short(10, 10 * partition), partition)
    failures: list[RuntimeError] = []

    class Polling(Ours):
        def poll(self) -> None:
            try:
                super().poll()
            except RuntimeError as error:
                failures.append(error)

    first = Polling(server, topic, "cooperative-sticky")
    first.consumer.subscribe([topic], _OnRevoked(_fail))
    second = Ours(server, topic, "cooperative-sticky")
    try:
        poll_until([first], lambda: len(first.values) == 20)
        poll_until([first, second], lambda: is_shared([first, second], 2))
        assert [str(failure) for failure in failures] == ["the program's flush failed"]
        second.poll()
        assert second.values == []
    finally:
        second.close()
        with pytest.raises(RuntimeError):
            first.close()


def test_a_member_that_was_lost_cannot_commit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = 0.0
    monkeypatch.setattr(group_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + waited))
    topic = server.topic()
    server.send(topic, short(10))
    first = Ours(server, topic, "range", enable_auto_commit=False, max_poll_interval_ms=300_000, max_poll_records=3)
    told: list[KlogError | None] = []

    def commit() -> None:
        offsets = {(topic, 0): 3}
        first.consumer.commit_async(offsets, lambda _, error: told.append(error))
        first.consumer.commit(offsets)

    first.consumer.subscribe([topic], _OnRevoked(commit))
    with pytest.raises(CommitFailed, match="not a member of group"):
        commit()
    with Ours(server, topic, "range").consumer as second, first.consumer:
        poll_until([first], lambda: len(first.values) == 3)
        waited = 1000.0
        second.subscribe([topic])
        read = 0
        deadline = time.monotonic() + SECONDS
        while read < 10 and time.monotonic() < deadline:  # until `first` has left and `second` has read all
            read += len(second.poll(0.1))
        second.unsubscribe()
        assert second.committed([(topic, 0)])[topic, 0].offset == 10
        with pytest.raises(CommitFailed, match="not a member of group"):
            poll_until([first], lambda: False)
        assert [type(error) for error in told] == [CommitFailed] * 2
        assert second.committed([(topic, 0)])[topic, 0].offset == 10
        first.consumer.subscribe([topic])  # without the listener that commits


def test_heartbeats_of_the_next_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the one before have ended, and the thread sleeps."""
    beats: Queue[int] = Queue()
    sleeps = threading.Event()
    real_wait = groups_module.wait_until_ready

    def wait(waited: Any, timeout: float) -> None:
        if timeout == math.inf:
            sleeps.set()
        real_wait(waited, timeout)

    def beat(_: object, __: object, node: int, member: GroupMetadata) -> Steps[ErrorCode]:
        beats.put(member.generation)
        return ErrorCode.NONE
        yield

    monkeypatch.setattr(groups_module, "wait_until_ready", wait)
    monkeypatch.setattr(Heartbeats, "_beat", beat)
    monkeypatch.setattr(group_module, "finding_coordinator", lambda *_: at_once(lambda: 0))
    settings = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "heartbeat.interval.ms": 1}
    heartbeats = Heartbeats(consumer_config(settings), lambda: None)
    try:
        for generation in (1, 2):
            with heartbeats._lock:
                heartbeats._work = GroupMetadata("g", generation, "m")
                heartbeats._tell_changes()
            heartbeats._start()
            while beats.get(timeout=SECONDS) != generation:
                pass
            sleeps.clear()
            heartbeats.pause(is_id_known=True)
            assert sleeps.wait(SECONDS)
    finally:
        heartbeats.stop(time.monotonic() + SECONDS)


def test_a_static_leader_that_came_back_finds_new_partitions(server: Server) -> None:
    topic = server.topic()
    settings = {"group_instance_id": "a", "metadata_max_age_ms": 300}
    first = Ours(server, topic, "range", **settings)
    poll_until([first], lambda: first.owned() == {0})
    first.close()
    first = Ours(server, topic, "range", **settings)
    try:
        poll_until([first], lambda: first.owned() == {0})
        with Cluster.connect({"bootstrap.servers": server.servers}) as cluster:
            request = {"name": topic, "count": 3, "assignments": None}
            answer = cluster.request(
                cluster.controller(),
                CREATE_PARTITIONS,
                {"topics": [request], "timeout_ms": 10_000, "validate_only": False},
            )
            assert [entry["error_code"] for entry in answer["results"]] == [0]
        poll_until([first], lambda: first.owned() == {0, 1, 2})
    finally:
        first.close()


@pytest.mark.parametrize("is_pattern", [True, False])
def test_another_subscription_while_brokers_are_away(
    cluster: EmbeddedCluster, server: Server, is_pattern: bool
) -> None:
    """If the look-up of topics fails, the consumer soon repeats it, and reads no topic of the previous subscription."""
    before, after = server.topic(), server.topic()
    for topic in (before, after):
        server.send(topic, short(1))
    settings = {"bootstrap.servers": server.servers, "group.id": before, "auto.offset.reset": "earliest"}
    with Consumer({**settings, "enable.auto.commit": "false"}) as consumer:
        found: list[str] = []

        def poll_once() -> None:
            found.extend(record.topic for record in consumer.poll(0.5))

        deadline = time.monotonic() + SECONDS
        consumer.subscribe(f"^{before}" if is_pattern else [before])
        while not found:
            assert time.monotonic() < deadline
            poll_once()
        try:
            cluster.inject(Fault(Drop(), api="Metadata", count=1_000_000))
            consumer.subscribe(f"^{after}" if is_pattern else [after])
            for _ in range(2):
                poll_once()
        finally:
            cluster.clear_faults()
        while len(found) < 2:
            assert time.monotonic() < deadline
            poll_once()
        assert found == [before, after]


def test_a_leader_that_assigns_while_its_topic_is_away(cluster: EmbeddedCluster, server: Server) -> None:
    """Its own look-up had found the topic, which is deleted meanwhile, and then created again."""
    topic = server.topic(2)
    settings = {"bootstrap.servers": server.servers}
    heard = Heard()
    try:
        with server.consumer(group_id=topic, auto_offset_reset="earliest") as consumer, Admin(settings) as admin:
            cluster.inject(Fault(Delay(500, after=True), api="JoinGroup", count=2))
            consumer.subscribe([topic], heard)
            assert not consumer.poll(0.3)
            admin.delete_topics([topic])
            deadline = time.monotonic() + SECONDS
            while not heard.calls:
                assert time.monotonic() < deadline
                consumer.poll(0.1)
            admin.create_topic(topic, 2)
            server.send(topic, short(1), 1)
            while not (records := consumer.poll(0.1)):
                assert time.monotonic() < deadline, heard.calls
            assert [record.partition for record in records] == [1]
    finally:
        cluster.clear_faults()


def test_the_commit_before_a_revocation_may_take_longer_than_a_poll(
    cluster: EmbeddedCluster, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    topic = server.topic(2)
    for partition in range(2):
        server.send(topic, short(10, 10 * partition), partition)
    first = Ours(server, topic, "range", auto_commit_interval_ms=600_000)
    listened: list[int] = []

    def ask() -> None:
        listened.append(len(first.consumer.committed([(topic, 0), (topic, 1)])))

    first.consumer.subscribe([topic], _OnRevoked(ask))
    second = Ours(server, topic, "range")
    try:
        poll_until([first], lambda: len(first.values) == 20)
        cluster.inject(Fault(Delay(2500), api="OffsetCommit", topic=topic, count=1))
        poll_until([first, second], lambda: is_shared([first, second], 2))
        assert listened == [2]
        server.send(topic, short(1, 20))
        poll_until([first, second], lambda: len(first.values + second.values) > 20)
        assert sorted(first.values + second.values) == sorted(line.value for line in short(21))
        assert "were not committed" not in caplog.text
    finally:
        second.close()
        first.close()
        cluster.clear_faults()


def test_close_waits_for_a_commit_under_way(cluster: EmbeddedCluster, server: Server) -> None:
    topic = server.topic()
    told: list[KlogError | None] = []
    try:
        with server.consumer(group_id=topic, enable_auto_commit=False) as consumer:
            cluster.inject(Fault(Delay(1500), api="OffsetCommit", topic=topic, count=1))
            consumer.commit_async({(topic, 0): 7}, lambda _, error: told.append(error))
        assert told == [None]
        with server.consumer(group_id=topic) as consumer:
            assert consumer.committed([(topic, 0)])[topic, 0].offset == 7
    finally:
        cluster.clear_faults()
