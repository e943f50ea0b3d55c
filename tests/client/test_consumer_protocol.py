"""Our consumers with group.protocol=consumer (KIP-848), alone and with librdkafka's, at our broker and at Kafka 4.1."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer as ConfluentConsumer

from spark_klog.broker.faults import ErrorAnswer, Fault
from spark_klog.client import Admin, Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import CommitFailed, ProtocolError
from tests.support.broker import KlogBroker
from tests.support.consumers import SECONDS, Heard, Server, short
from tests.support.shared_kafka import SharedKafkas

_KAFKA = {
    "group.consumer.min.heartbeat.interval.ms": 300,
    "group.consumer.heartbeat.interval.ms": 300,
    "group.consumer.min.session.timeout.ms": 6000,
    "group.consumer.session.timeout.ms": 6000,
}


@pytest.fixture(scope="module", params=["klog", pytest.param("4.1.0", marks=pytest.mark.peer)])
def server(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[Server]:
    if request.param != "klog":
        yield Server(shared_kafkas.get(request.param, _KAFKA).bootstrap_servers, request.param)
        return
    settings = ("--set", "group.consumer.heartbeat.interval.ms=300", "--set", "group.consumer.session.timeout.ms=6000")
    with KlogBroker(module_server_dir, *settings) as broker:
        yield Server(broker.bootstrap_servers, None)


class Member:
    """Our consumer as a member of the topic's group, with the values it has read."""

    def __init__(self, server: Server, topic: str | re.Pattern[str], name: str = "", **settings: Any) -> None:
        given: dict[str, Any] = {"group_protocol": "consumer", "auto_offset_reset": "earliest"}
        self.consumer = server.consumer(**(given | {"group_id": f"g-{name or topic}"} | settings))
        self.heard = Heard()
        self.consumer.subscribe([topic] if isinstance(topic, str) else topic, self.heard)
        self.values: list[bytes | None] = []

    def poll(self) -> None:
        self.values += [record.value for record in self.consumer.poll(0.02)]

    def owned(self) -> set[int]:
        return {partition for _, partition in self.consumer.assignment()}


class Theirs:
    """librdkafka's."""

    def __init__(self, server: Server, topic: str) -> None:
        settings = {"bootstrap.servers": server.servers, "group.id": f"g-{topic}", "group.protocol": "consumer"}
        self.consumer = ConfluentConsumer(settings | {"auto.offset.reset": "earliest"})
        self.consumer.subscribe([topic])
        self.values: list[bytes | None] = []

    def poll(self) -> None:
        message = self.consumer.poll(0.02)
        if message is not None:
            assert message.error() is None
            self.values.append(message.value())

    def owned(self) -> set[int]:
        return {entry.partition for entry in self.consumer.assignment()}


def poll_until(members: list[Any], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, [member.owned() for member in members]
        for member in members:
            member.poll()


def is_shared(members: list[Any], *counts: int) -> bool:
    owned = [member.owned() for member in members]
    return sorted(map(len, owned)) == sorted(counts) and set().union(*owned) == set(range(sum(counts)))


def test_members_share_commit_and_leave(server: Server) -> None:
    topic = server.topic(6)
    for partition in range(6):
        server.send(topic, short(10, 10 * partition), partition)
    first = Member(server, topic, enable_auto_commit=False)
    poll_until([first], lambda: len(first.values) == 60)
    first.consumer.commit()
    second = Member(server, topic)
    poll_until([first, second], lambda: is_shared([first, second], 3, 3))
    assert [call for call, _ in first.heard.calls] == ["assigned", "revoked"]
    assert [call for call, partitions in second.heard.calls if partitions] == ["assigned"]
    for partition in range(6):
        server.send(topic, short(1, 100 + partition), partition)
    poll_until([first, second], lambda: len(first.values) + len(second.values) == 66)
    first.consumer.commit()
    second.consumer.close()  # commits, as enable.auto.commit is set
    poll_until([first], lambda: len(first.owned()) == 6)
    committed = first.consumer.committed([(topic, partition) for partition in range(6)])
    assert [item.offset for _, item in sorted(committed.items())] == [11] * 6
    first.consumer.unsubscribe()
    assert first.heard.calls[-1][0] == "revoked"
    assert first.consumer.assignment() == []
    first.consumer.close()


def test_ours_and_librdkafkas_in_one_group(server: Server) -> None:
    topic = server.topic(6)
    members: list[Any] = [Member(server, topic), Theirs(server, topic), Member(server, topic)]
    poll_until(members, lambda: is_shared(members, 2, 2, 2))
    for partition in range(6):
        server.send(topic, short(10, 10 * partition), partition)
    poll_until(members, lambda: sum(len(member.values) for member in members) == 60)
    values = [value for member in members for value in member.values]
    assert sorted(values, key=lambda value: int(value or b"")) == [b"%d" % number for number in range(60)]
    members.pop().consumer.close()
    poll_until(members, lambda: is_shared(members, 3, 3))
    members.pop().consumer.close()
    poll_until(members, lambda: is_shared(members, 6))
    members.pop().consumer.close()


def test_our_admin_describes_the_group(server: Server) -> None:
    topic = server.topic(4)
    members = [Member(server, topic, client_id=name, group_remote_assignor="range") for name in ("a", "b")]
    poll_until(members, lambda: is_shared(members, 2, 2))
    with Admin({"bootstrap.servers": server.servers}) as admin:
        described = admin.describe_group(f"g-{topic}")
        assert (described.state, described.protocol_type, described.protocol) == ("Stable", "consumer", "range")
        shown = {member.client_id: member.assignment for member in described.members}
        assert shown == {name: {topic: sorted(member.owned())} for name, member in zip("ab", members, strict=True)}
        for member in members:
            member.consumer.close()
        assert admin.describe_group(f"g-{topic}").state == "Empty"
        admin.delete_group(f"g-{topic}")
        assert admin.describe_group(f"g-{topic}").state == "Dead"


def test_a_member_that_does_not_poll_loses_its_partitions(server: Server) -> None:
    topic = server.topic(2)
    slow = Member(server, topic, max_poll_interval_ms=1500)
    poll_until([slow], lambda: len(slow.owned()) == 2)
    other = Member(server, topic)
    deadline = time.monotonic() + SECONDS
    while len(other.owned()) < 2:
        assert time.monotonic() < deadline
        other.poll()
    with pytest.raises(CommitFailed, match="not a member of group"):
        slow.consumer.commit({(topic, 0): 1})
    poll_until([slow, other], lambda: is_shared([slow, other], 1, 1))
    assert [call for call, partitions in slow.heard.calls if partitions] == ["assigned", "lost", "assigned"]
    for member in (slow, other):
        member.consumer.close()


def test_a_static_member_comes_back_to_its_partitions(server: Server) -> None:
    topic = server.topic(4)
    members = [Member(server, topic, group_instance_id=name) for name in ("a", "b")]
    poll_until(members, lambda: is_shared(members, 2, 2))
    had = members[1].owned()
    members.pop().consumer.close()
    poll_until(members, lambda: len(members[0].owned()) == 2)
    members.append(Member(server, topic, group_instance_id="b"))
    poll_until(members, lambda: is_shared(members, 2, 2))
    assert members[1].owned() == had
    for member in members:
        member.consumer.close()


def test_a_second_member_of_one_instance_id_waits(server: Server) -> None:
    topic = server.topic(2)
    first = Member(server, topic, group_instance_id="a")
    poll_until([first], lambda: len(first.owned()) == 2)
    second = Member(server, topic, group_instance_id="a", default_api_timeout_ms=500)
    with pytest.raises(ProtocolError, match=r"UNRELEASED_INSTANCE_ID.*group\.instance\.id=a has not left"):
        poll_until([second], lambda: False)
    first.consumer.close()
    poll_until([second], lambda: len(second.owned()) == 2)
    second.consumer.close()


def test_patterns_assignors_and_later_topics(server: Server) -> None:
    topic = server.topic(2)
    pattern = re.compile(f"{topic}.*")
    settings = {"group_remote_assignor": "range", "metadata_max_age_ms": 500}
    members = [Member(server, pattern, topic, **settings) for _ in range(2)]
    poll_until(members, lambda: is_shared(members, 1, 1))
    for member in members:
        member.consumer.subscribe([topic], member.heard)
    poll_until(members, lambda: is_shared(members, 1, 1))
    for member in members:
        member.consumer.close()


def test_a_member_begins_anew_after_an_interrupt(server: Server) -> None:
    """The coordinator still knows it, and Kafka fences a member that joins twice."""
    topic = server.topic(2)
    member = Member(server, topic)
    poll_until([member], lambda: len(member.owned()) == 2)
    assert member.consumer._group is not None
    member.consumer._group.mend()
    assert member.consumer.assignment() == []
    poll_until([member], lambda: len(member.owned()) == 2)
    assert [call for call, _ in member.heard.calls] == ["assigned", "lost", "assigned"]
    member.consumer.commit({(topic, 0): 0})
    member.consumer.close()


def test_offsets_in_a_transaction(server: Server) -> None:
    topic = server.topic(1)
    server.send(topic, short(5))
    member = Member(server, topic, enable_auto_commit=False)
    poll_until([member], lambda: len(member.values) == 5)
    with Producer({"bootstrap.servers": server.servers, "transactional.id": topic}) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send_offsets_to_transaction({(topic, 0): 5}, member.consumer.group_metadata())
        producer.commit_transaction()
    assert member.consumer.committed([(topic, 0)])[topic, 0].offset == 5
    member.consumer.close()


@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_members_of_both_protocols(server: Server, assignor: str) -> None:
    """A group goes to the consumer protocol and back while its members read."""
    topic = server.topic(6)
    settings = {"partition_assignment_strategy": assignor, "heartbeat_interval_ms": 300}
    classic = Member(server, topic, group_protocol="classic", **settings)
    poll_until([classic], lambda: len(classic.owned()) == 6)
    for partition in range(6):
        server.send(topic, short(10, 10 * partition), partition)
    members: list[Any] = [classic, Member(server, topic), Theirs(server, topic)]
    poll_until(members, lambda: is_shared(members, 2, 2, 2))
    poll_until(members, lambda: sum(len(member.values) for member in members) >= 60)
    for member in members:
        if isinstance(member, Member):
            member.consumer.commit()
    values = {value for member in members for value in member.values}
    assert values == {b"%d" % number for number in range(60)}
    for _ in range(2):
        members.pop().consumer.close()
    poll_until(members, lambda: is_shared(members, 6))
    classic.consumer.commit()
    classic.consumer.close()


def test_a_group_of_others_than_consumers() -> None:
    fault = Fault(ErrorAnswer("GROUP_ID_NOT_FOUND"), api="ConsumerGroupHeartbeat", count=1)
    with EmbeddedCluster(faults=[fault]) as cluster:
        server = Server(cluster.bootstrap_servers, None)
        member = Member(server, server.topic(2))
        with pytest.raises(ProtocolError, match=r"GROUP_ID_NOT_FOUND.*or group\.protocol=classic"):
            poll_until([member], lambda: False)
        poll_until([member], lambda: len(member.owned()) == 2)
        member.consumer.close()


@pytest.mark.parametrize(
    "code",
    ["UNKNOWN_MEMBER_ID", "NOT_COORDINATOR", pytest.param("FENCED_MEMBER_EPOCH", marks=pytest.mark.test_all("again"))],
)
def test_errors_of_heartbeats(code: str) -> None:
    """Who is lost or fenced tells its listener and joins again; other errors are tried again."""
    fault = Fault(ErrorAnswer(code), api="ConsumerGroupHeartbeat", skip=3, count=1)
    with EmbeddedCluster(faults=[fault], settings={"group.consumer.heartbeat.interval.ms": "200"}) as cluster:
        server = Server(cluster.bootstrap_servers, None)
        topic = server.topic(2)
        member = Member(server, topic)
        until = time.monotonic() + 1.2  # some six heartbeats
        poll_until([member], lambda: time.monotonic() > until)
        calls = ["assigned"] if code == "NOT_COORDINATOR" else ["assigned", "lost", "assigned"]
        assert [call for call, _ in member.heard.calls] == calls
        member.consumer.commit({(topic, 0): 0})
        member.consumer.close()
