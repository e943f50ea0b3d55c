"""Our consumers with group.protocol=consumer (KIP-848), alone and with librdkafka's, at our broker and at Kafka 4.4."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from spark_klog.broker.faults import ErrorAnswer, Fault
from spark_klog.client import Admin, Producer
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer.consumer_protocol_group import ConsumerProtocolGroup
from spark_klog.client.coordinator import find_coordinator
from spark_klog.client.offsets import GroupOffsets
from spark_klog.client.requests import run
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import CommitFailed, ErrorCode, ProtocolError
from spark_klog.protocol.apis import CONSUMER_GROUP_DESCRIBE
from tests.support.clients.consumer_protocol import Member, Theirs, evict, is_shared, poll_until
from tests.support.clients.consumers import SECONDS, Server, short
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import NEWEST
from tests.support.servers.shared_kafka import SharedKafkas

pytestmark = pytest.mark.usefixtures("driver")


@pytest.fixture(scope="module", params=["klog", pytest.param(NEWEST, marks=pytest.mark.peer)])
def server(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[Server]:
    if request.param != "klog":
        yield Server(shared_kafkas.get(request.param).bootstrap_servers, request.param)
        return
    with KlogBroker(module_server_dir, "--set", "group.consumer.heartbeat.interval.ms=300") as broker:
        yield Server(broker.bootstrap_servers, None)


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
        (listed,) = (one for one in admin.list_groups() if one.group == f"g-{topic}")
        assert listed.group_type == described.group_type == "consumer"
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


def test_text_with_a_caret_is_resolved_by_the_coordinator(server: Server) -> None:
    """With the meaning that it has in the classic protocol: the beginning of names."""
    topic = server.topic(2)
    with Admin({"bootstrap.servers": server.servers}) as admin:
        admin.create_topic(f"{topic}-a", 1)
        other = server.topic(1)
        member = Member(server, f"^{topic}", topic)
        member.consumer.subscribe([f"^{topic}", other], member.heard)
        theirs = {(topic, 0), (topic, 1), (f"{topic}-a", 0), (other, 0)}
        poll_until([member], lambda: set(member.consumer.assignment()) == theirs)
        assert _subscription(server, f"g-{topic}") == ([other], f"(?:^{topic}).*")
        if server.version is None:  # Kafka looks for new topics at most every 10 s
            admin.create_topic(f"{topic}-b", 1)
            server.send(f"{topic}-b", short(1))
            poll_until([member], lambda: member.values == [b"0"])
        member.consumer.subscribe([topic], member.heard)
        poll_until([member], lambda: set(member.consumer.assignment()) == {(topic, 0), (topic, 1)})
        assert _subscription(server, f"g-{topic}") == ([topic], "")
        member.consumer.close()


def _subscription(server: Server, group: str) -> tuple[list[str], str]:
    with Cluster.connect({"bootstrap.servers": server.servers}) as cluster:
        request = {"group_ids": [group], "include_authorized_operations": False}
        answer = cluster.request(find_coordinator(cluster, group), CONSUMER_GROUP_DESCRIBE, request)
        (member,) = answer["groups"][0]["members"]
        return member["subscribed_topic_names"], member["subscribed_topic_regex"] or ""


def test_a_regular_expression_that_is_not_re2s(server: Server) -> None:
    topic = server.topic(2)
    member = Member(server, f"^{topic}(?=-)", topic)
    for _ in range(2):
        with pytest.raises(
            ProtocolError, match=r"INVALID_REGULAR_EXPRESSION.*RE2's syntax; for Python's subscribe with a"
        ):
            poll_until([member], lambda: False)
    member.consumer.subscribe(re.compile(f"{topic}(?!-).*"), member.heard)
    poll_until([member], lambda: len(member.owned()) == 2)
    member.consumer.subscribe([f"^{topic}(?=-)"], member.heard)  # while it is a member
    with pytest.raises(ProtocolError, match="INVALID_REGULAR_EXPRESSION"):
        poll_until([member], lambda: False)
    assert member.consumer.assignment() == []
    member.consumer.subscribe([topic], member.heard)
    poll_until([member], lambda: len(member.owned()) == 2)
    member.consumer.close()


def test_offsets_are_read_in_the_members_epoch(server: Server) -> None:
    topic = server.topic(1)
    member = Member(server, topic, enable_auto_commit=False)
    poll_until([member], lambda: len(member.owned()) == 1)
    member.consumer.commit({(topic, 0): 7})
    known = member.consumer.group_metadata()
    with Cluster.connect({"bootstrap.servers": server.servers}) as cluster:
        stored = GroupOffsets(cluster, known.group, reader=lambda: known)
        assert stored.committed([(topic, 0)])[topic, 0].offset == 7
        for other, code in (
            (replace(known, generation=known.generation + 1), ErrorCode.STALE_MEMBER_EPOCH),
            (replace(known, member="another"), ErrorCode.UNKNOWN_MEMBER_ID),
        ):
            stored = GroupOffsets(cluster, known.group, reader=partial(copy, other))
            with pytest.raises(ProtocolError) as raised:
                run(stored.asking_committed_now([(topic, 0)]))
            assert (raised.value.code, raised.value.retriable) == (code, True)
    member.consumer.close()


def test_a_member_that_was_removed_learns_of_it_by_a_commit(server: Server) -> None:
    topic = server.topic(1)
    member = Member(server, topic, enable_auto_commit=False)
    poll_until([member], lambda: len(member.owned()) == 1)
    evict(server, member.consumer.group_metadata())
    with pytest.raises(CommitFailed, match=r"UNKNOWN_MEMBER_ID|not a member of group"):
        member.consumer.commit({(topic, 0): 1})
    poll_until([member], lambda: [call for call, _ in member.heard.calls] == ["assigned", "lost", "assigned"])
    member.consumer.commit({(topic, 0): 1})
    evict(server, member.consumer.group_metadata())
    with Admin({"bootstrap.servers": server.servers}) as admin:
        admin.delete_group(f"g-{topic}")
    with pytest.raises(CommitFailed):
        member.consumer.commit({(topic, 0): 1})
    poll_until([member], lambda: len(member.heard.calls) == 5 and len(member.owned()) == 1)
    member.consumer.close()


def test_a_partition_that_was_assigned_and_taken_back_before_a_poll(server: Server) -> None:
    """The member owns what it did before, and has to say so: the coordinator waits for it."""
    topic = server.topic(2)
    members = [Member(server, topic), Member(server, topic)]
    poll_until(members, lambda: is_shared(members, 1, 1))
    busy = members[0].consumer._group
    assert isinstance(busy, ConsumerProtocolGroup)

    def await_assignment(count: int) -> None:
        poll_until(members[1:], lambda: len(busy._heartbeats._news.assigned or ()) == count)

    members.pop().consumer.close()
    await_assignment(2)
    members.append(Member(server, topic))
    await_assignment(1)
    poll_until(members, lambda: is_shared(members, 1, 1))
    for member in members:
        member.consumer.close()


@pytest.mark.parametrize("driver", ["thread"], indirect=True)
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


def _commits(member: Member) -> bool:
    """Whether a commit goes through: while the group rebalances, who polls again may commit again."""
    try:
        member.consumer.commit()
    except CommitFailed:
        return False
    return True


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
            poll_until(members, partial(_commits, member))
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
    ["UNKNOWN_MEMBER_ID", "NOT_COORDINATOR"],
)
def test_errors_of_heartbeats(code: str) -> None:
    """Who is lost or fenced tells its listener and joins again; other errors are tried again."""
    fault = Fault(ErrorAnswer(code), api="ConsumerGroupHeartbeat", skip=3, count=1)
    with EmbeddedCluster(faults=[fault], settings={"group.consumer.heartbeat.interval.ms": "200"}) as cluster:
        server = Server(cluster.bootstrap_servers, None)
        topic = server.topic(2)
        member = Member(server, topic)
        calls = ["assigned"] if code == "NOT_COORDINATOR" else ["assigned", "lost", "assigned"]
        poll_until([member], lambda: cluster.faults_fired()[fault] == 1 and len(member.heard.calls) >= len(calls))
        until = time.monotonic() + 0.5  # some more heartbeats, which must change nothing
        poll_until([member], lambda: time.monotonic() > until)
        assert [call for call, _ in member.heard.calls] == calls
        member.consumer.commit({(topic, 0): 0})
        member.consumer.close()


def test_a_leave_is_sent_again() -> None:
    """A coordinator that is loading must not keep the member, and its partitions, until its session has timed out."""
    with EmbeddedCluster(faults=[]) as cluster:
        server = Server(cluster.bootstrap_servers, None)
        topic = server.topic(2)
        member = Member(server, topic)
        poll_until([member], lambda: len(member.owned()) == 2)
        cast("ConsumerProtocolGroup", member.consumer._group)._heartbeats.stop(time.monotonic() + SECONDS)
        fault = Fault(ErrorAnswer("COORDINATOR_LOAD_IN_PROGRESS"), api="ConsumerGroupHeartbeat", count=2)
        cluster.inject(fault)
        member.consumer.close()
        assert cluster.faults_fired()[fault] == 2
        with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
            assert admin.describe_groups([f"g-{topic}"])[f"g-{topic}"].members == ()
