"""Groups of KIP-848 from outside: librdkafka's consumers and raw requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka import Consumer, ConsumerGroupState, ConsumerGroupType, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from spark_klog.errors import ErrorCode
from spark_klog.protocol import apis
from tests.support.brokers.raw_client import RawClient
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import NEWEST
from tests.support.servers.shared_kafka import SharedKafkas

_SECONDS = 30


@pytest.fixture(scope="module")
def broker(module_server_dir: Path) -> Iterator[KlogBroker]:
    with KlogBroker(module_server_dir) as broker:
        yield broker


@pytest.fixture(scope="module")
def admin(broker: KlogBroker) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap_servers})


@pytest.fixture
def topic(admin: AdminClient, request: pytest.FixtureRequest) -> str:
    """A topic with six partitions."""
    name: str = request.node.name.replace("[", "-").replace("]", "")
    _create(admin, name, 6)
    return name


def _create(admin: AdminClient, name: str, partitions: int) -> None:
    for done in admin.create_topics([NewTopic(name, partitions, 1)]).values():
        done.result(_SECONDS)


class Group:
    """Consumers of one group."""

    def __init__(self, broker: KlogBroker, group: str) -> None:
        self._broker, self.name = broker, group
        self.members: list[Consumer] = []
        self.values: list[bytes] = []

    def add(self, *topics: str, **settings: Any) -> Consumer:
        given = {name.replace("_", "."): value for name, value in settings.items()}
        member = Consumer(
            {
                "bootstrap.servers": self._broker.bootstrap_servers,
                "group.id": self.name,
                "group.protocol": "consumer",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
            | given
        )
        member.subscribe(list(topics))
        self.members.append(member)
        return member

    def poll_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.shares()
            for member in self.members:
                message = member.poll(0.01)
                if message is not None:
                    assert message.error() is None
                    self.values.append(message.value() or b"")

    def shares(self) -> list[list[int]]:
        return [sorted(entry.partition for entry in member.assignment()) for member in self.members]

    def is_shared(self, *counts: int, partitions: int = 6) -> bool:
        shares = self.shares()
        every = sorted(partition for share in shares for partition in share)
        return sorted(map(len, shares)) == sorted(counts) and every == list(range(partitions))

    def close(self) -> None:
        while self.members:
            self.members.pop().close()


@pytest.fixture
def group(broker: KlogBroker, topic: str) -> Iterator[Group]:
    group = Group(broker, f"group-of-{topic}")
    yield group
    group.close()


def _produce(broker: KlogBroker, topic: str, count: int) -> list[bytes]:
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    values = [str(number).encode() for number in range(count)]
    for number, value in enumerate(values):
        producer.produce(topic, value, partition=number % 6)
    assert producer.flush(_SECONDS) == 0
    return values


def test_members_come_share_commit_and_go(broker: KlogBroker, admin: AdminClient, topic: str, group: Group) -> None:
    values = _produce(broker, topic, 60)
    first = group.add(topic)
    group.poll_until(lambda: len(group.values) == 60)
    assert sorted(group.values) == sorted(values)
    first.commit(asynchronous=False)
    group.add(topic)
    group.add(topic)
    group.poll_until(lambda: group.is_shared(2, 2, 2))
    described = admin.describe_consumer_groups([group.name])[group.name].result(_SECONDS)
    assert (described.state, described.type) == (ConsumerGroupState.STABLE, ConsumerGroupType.CONSUMER)
    shown = [sorted(entry.partition for entry in member.assignment.topic_partitions) for member in described.members]
    assert sorted(shown) == sorted(group.shares())
    group.members.pop().close()
    group.poll_until(lambda: group.is_shared(3, 3))
    assert len(group.values) == 60  # nothing is read again
    (listed,) = (each for each in admin.list_consumer_groups().result(_SECONDS).valid if each.group_id == group.name)
    assert (listed.type, listed.state) == (ConsumerGroupType.CONSUMER, ConsumerGroupState.STABLE)
    with pytest.raises(KafkaException, match="NON_EMPTY_GROUP"):
        admin.delete_consumer_groups([group.name])[group.name].result(_SECONDS)
    group.close()
    admin.delete_consumer_groups([group.name])[group.name].result(_SECONDS)
    assert group.name not in [each.group_id for each in admin.list_consumer_groups().result(_SECONDS).valid]


@pytest.mark.parametrize("assignor", ["range", "uniform"])
def test_server_assignors(topic: str, group: Group, assignor: str) -> None:
    for _ in range(2):
        group.add(topic, group_remote_assignor=assignor)
    group.poll_until(lambda: group.is_shared(3, 3))
    assert assignor == "uniform" or sorted(group.shares()) == [[0, 1, 2], [3, 4, 5]]


def test_a_regular_expression_finds_later_topics(admin: AdminClient, topic: str, group: Group) -> None:
    member = group.add(f"^{topic}.*")
    group.poll_until(lambda: len(member.assignment()) == 6)
    _create(admin, f"{topic}-later", 2)
    group.poll_until(lambda: len(member.assignment()) == 8)


def test_a_static_member_comes_back_to_its_partitions(topic: str, group: Group) -> None:
    for name in "ab":
        group.add(topic, group_instance_id=name)
    group.poll_until(lambda: group.is_shared(3, 3))
    had = group.shares()
    group.members.pop().close()
    group.add(topic, group_instance_id="b")
    group.poll_until(lambda: group.is_shared(3, 3))
    assert group.shares() == had


@pytest.mark.test_all("kill")
def test_a_group_lives_on_after_a_kill_of_the_broker(server_dir: Path) -> None:
    with KlogBroker(server_dir) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        _create(admin, "t", 6)
        group = Group(broker, "g")
        for _ in range(2):
            group.add("t")
        group.poll_until(lambda: group.is_shared(3, 3))
        had = group.shares()
        broker.kill()
        broker.start()
        _produce(broker, "t", 60)
        group.poll_until(lambda: len(group.values) == 60)
        assert group.shares() == had
        group.members[0].commit(offsets=[TopicPartition("t", had[0][0], 7)], asynchronous=False)
        group.close()


def test_members_of_both_protocols(broker: KlogBroker, topic: str, group: Group) -> None:
    """A group changes its protocol with the first and the last member of the consumer protocol."""
    _produce(broker, topic, 60)

    def kind() -> str:
        with RawClient(broker.port) as raw:
            groups = raw.request(apis.LIST_GROUPS, 5, {})["groups"]
        return {each["group_id"]: each["group_type"] for each in groups}[group.name]

    classic = {"group_protocol": "classic", "partition_assignment_strategy": "range", "heartbeat_interval_ms": 300}
    group.add(topic, **classic)
    group.poll_until(lambda: group.is_shared(6) and len(group.values) == 60)
    group.members[0].commit(asynchronous=False)
    group.add(topic)
    group.poll_until(lambda: group.is_shared(3, 3))
    assert kind() == "consumer"
    group.add(topic, **classic)
    group.poll_until(lambda: group.is_shared(2, 2, 2))
    for member in group.members:
        offsets = [TopicPartition(topic, entry.partition, 10) for entry in member.assignment()]
        member.commit(offsets=offsets, asynchronous=False)
    group.members.pop(1).close()
    group.poll_until(lambda: group.is_shared(3, 3))
    group.poll_until(lambda: kind() == "classic")
    assert len(group.values) == 60  # nothing is read again
    group.add(topic)
    group.poll_until(lambda: group.is_shared(2, 2, 2))
    group.members.pop(0).close()
    group.members.pop(0).close()
    group.poll_until(lambda: group.is_shared(6))
    assert kind() == "consumer"


def test_a_mixed_group_lives_on_after_a_kill_of_the_broker(server_dir: Path) -> None:
    with KlogBroker(server_dir) as broker:
        _create(AdminClient({"bootstrap.servers": broker.bootstrap_servers}), "t", 6)
        group = Group(broker, "g")
        group.add("t", group_protocol="classic", heartbeat_interval_ms=300)
        group.poll_until(lambda: group.is_shared(6))
        group.add("t")
        group.poll_until(lambda: group.is_shared(3, 3))
        had = group.shares()
        broker.kill()
        broker.start()
        _produce(broker, "t", 60)
        group.poll_until(lambda: len(group.values) == 60)
        assert group.shares() == had
        group.members.pop().close()
        broker.kill()
        broker.start()
        group.poll_until(lambda: group.is_shared(6))
        group.close()


def test_groups_that_do_not_mix(broker: KlogBroker, topic: str) -> None:
    """Members that are no consumers, and those whose metadata does not decode."""
    join = _VALID | {"group_id": topic, "subscribed_topic_names": [topic]}
    classic = {
        "group_id": topic,
        "session_timeout_ms": 10_000,
        "rebalance_timeout_ms": 10_000,
        "protocol_type": "connect",
        "protocols": [{"name": "range", "metadata": b""}],
    }
    with RawClient(broker.port) as raw:
        asked = raw.request(apis.JOIN_GROUP, 5, classic)
        joined = raw.request(apis.JOIN_GROUP, 5, classic | {"member_id": asked["member_id"]})
        member = {"group_id": topic, "member_id": joined["member_id"], "generation_id": joined["generation_id"]}
        answer = raw.request(apis.CONSUMER_GROUP_HEARTBEAT, 1, join)
        assert answer["error_code"] == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS  # it rebalances
        assert raw.request(apis.SYNC_GROUP, 3, member)["error_code"] == ErrorCode.NONE
        answer = raw.request(apis.CONSUMER_GROUP_HEARTBEAT, 1, join)
        assert answer["error_code"] == ErrorCode.GROUP_ID_NOT_FOUND
        leave = {"group_id": topic, "members": [{"member_id": joined["member_id"]}]}
        assert raw.request(apis.LEAVE_GROUP, 3, leave)["error_code"] == ErrorCode.NONE
        assert raw.request(apis.CONSUMER_GROUP_HEARTBEAT, 1, join)["error_code"] == ErrorCode.NONE
        for other in ({}, {"protocol_type": "consumer"}):
            answer = raw.request(apis.JOIN_GROUP, 5, classic | other)
            assert answer["error_code"] == ErrorCode.INCONSISTENT_GROUP_PROTOCOL


_VALID = {"group_id": "bad", "member_id": "m", "member_epoch": 0, "rebalance_timeout_ms": 1000}
_VALID |= {"subscribed_topic_names": ["t"], "topic_partitions": []}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"group_id": ""}, ErrorCode.INVALID_GROUP_ID),
        ({"member_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"instance_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"member_epoch": -3}, ErrorCode.INVALID_REQUEST),
        ({"member_epoch": -2}, ErrorCode.INVALID_REQUEST),
        ({"subscribed_topic_names": [f"t{number}" for number in range(10_200)]}, ErrorCode.INVALID_REQUEST),
        (
            {"member_epoch": 1, "topic_partitions": [{"topic_id": UUID(int=1), "partitions": list(range(10_200))}]},
            ErrorCode.INVALID_REQUEST,
        ),
        ({"rebalance_timeout_ms": -1}, ErrorCode.INVALID_REQUEST),
        ({"topic_partitions": None}, ErrorCode.INVALID_REQUEST),
        ({"subscribed_topic_names": None}, ErrorCode.INVALID_REQUEST),
        ({"member_id": "m" * 2000}, ErrorCode.INVALID_REQUEST),
        ({"subscribed_topic_regex": "("}, ErrorCode.INVALID_REGULAR_EXPRESSION),
        ({"server_assignor": "mine"}, ErrorCode.UNSUPPORTED_ASSIGNOR),
        ({"member_epoch": 1}, ErrorCode.UNKNOWN_MEMBER_ID),
        ({"member_epoch": -1}, ErrorCode.UNKNOWN_MEMBER_ID),
    ],
)
def test_requests_that_are_refused(broker: KlogBroker, changes: dict[str, Any], code: ErrorCode) -> None:
    with RawClient(broker.port) as raw:
        answer = raw.request(apis.CONSUMER_GROUP_HEARTBEAT, 1, _VALID | changes)
        assert (answer["error_code"], answer["assignment"]) == (code, None)
        assert answer["error_message"]
        (described,) = raw.request(apis.CONSUMER_GROUP_DESCRIBE, 1, {"group_ids": ["bad"]})["groups"]
        assert described["error_code"] == ErrorCode.GROUP_ID_NOT_FOUND


@pytest.mark.parametrize("peer", [False, pytest.param(True, marks=pytest.mark.peer)], ids=["ours", "kafka"])
def test_a_static_member_closes_while_it_gives_up_partitions(
    broker: KlogBroker, shared_kafkas: SharedKafkas, peer: bool
) -> None:
    """Another member has them long before the static one's session or rebalance timeout ends, as with Kafka."""
    servers = shared_kafkas.get(NEWEST).bootstrap_servers if peer else broker.bootstrap_servers
    name = f"gives-up-{peer}"
    _create(AdminClient({"bootstrap.servers": servers}), name, 4)
    with RawClient(int(servers.rsplit(":", 1)[1])) as raw:

        def beat(member_id: str, epoch: int, **fields: Any) -> dict[str, Any]:
            joins = {"rebalance_timeout_ms": 60_000, "subscribed_topic_names": [name], "topic_partitions": []}
            given = {"group_id": name, "member_id": member_id, "member_epoch": epoch} | (joins if not epoch else {})
            answer = raw.request(apis.CONSUMER_GROUP_HEARTBEAT, 1, given | fields)
            assert not answer["error_code"] or not epoch, answer
            return answer

        def until_told(member_id: str, count: int, epoch: int = 0, **fields: Any) -> dict[str, Any]:
            deadline = time.monotonic() + _SECONDS
            while True:
                answer = beat(member_id, epoch, **fields)
                epoch = answer["member_epoch"] or epoch
                rows = (answer["assignment"] or {"topic_partitions": []})["topic_partitions"]
                if sum(len(row["partitions"]) for row in rows) == count:
                    return {"epoch": epoch, "topic_partitions": rows}
                assert time.monotonic() < deadline, answer
                time.sleep(0.1)

        raw.request(apis.FIND_COORDINATOR, 4, {"coordinator_keys": [name], "key_type": 0})
        had = until_told("a", 4, instance_id="i")
        joined = beat("b", 0)
        kept = until_told("a", 2, had["epoch"], topic_partitions=had["topic_partitions"], instance_id="i")
        assert kept["epoch"] == had["epoch"]
        beat("a", -2, instance_id="i")
        until_told("b", 2, joined["member_epoch"])


def test_version_0_gives_members_their_ids(broker: KlogBroker, topic: str) -> None:
    with RawClient(broker.port) as raw:
        beat = _VALID | {"group_id": topic, "member_id": "", "subscribed_topic_names": [topic]}
        joined = raw.request(apis.CONSUMER_GROUP_HEARTBEAT, 0, beat)
        assert (joined["error_code"], joined["member_epoch"]) == (ErrorCode.NONE, 1)
        (described,) = raw.request(apis.CONSUMER_GROUP_DESCRIBE, 0, {"group_ids": [topic]})["groups"]
        assert [member["member_id"] for member in described["members"]] == [joined["member_id"]]
        assert (described["group_state"], described["assignor_name"]) == ("Stable", "uniform")


def test_offsets_are_fenced_by_the_members_epoch(broker: KlogBroker, topic: str) -> None:
    with RawClient(broker.port) as raw:
        beat = _VALID | {"group_id": topic, "subscribed_topic_names": [topic]}
        joined = raw.request(apis.CONSUMER_GROUP_HEARTBEAT, 1, beat)
        assert (joined["error_code"], joined["member_epoch"]) == (ErrorCode.NONE, 1)
        assert joined["heartbeat_interval_ms"] > 0
        (row,) = joined["assignment"]["topic_partitions"]
        assert row["partitions"] == [0, 1, 2, 3, 4, 5]

        def commit(member_id: str, epoch: int) -> int:
            partitions = [{"partition_index": 0, "committed_offset": 5}]
            request = {"group_id": topic, "member_id": member_id, "generation_id_or_member_epoch": epoch}
            request["topics"] = [{"name": topic, "partitions": partitions}]
            answer = raw.request(apis.OFFSET_COMMIT, 9, request)
            code: int = answer["topics"][0]["partitions"][0]["error_code"]
            return code

        def fetch(member_id: str | None, epoch: int) -> int:
            entry = {"group_id": topic, "member_id": member_id, "member_epoch": epoch, "topics": None}
            code: int = raw.request(apis.OFFSET_FETCH, 9, {"groups": [entry]})["groups"][0]["error_code"]
            return code

        stale, unknown = ErrorCode.STALE_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID
        assert [commit("m", 1), commit("m", 0), commit("x", 1), commit("", -1)] == [0, stale, unknown, unknown]
        assert [fetch("m", 1), fetch("m", 2), fetch("x", 1), fetch(None, -1)] == [0, stale, unknown, 0]
