"""Groups that change between the classic protocol and KIP-848's, seen by raw members of both, with kills between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from spark_klog.errors import ErrorCode
from spark_klog.protocol import apis
from spark_klog.protocol.codec import encode_versioned
from spark_klog.protocol.tables.groups import MEMBER_ASSIGNMENT, MEMBER_SUBSCRIPTION, decode_assignment
from tests.support.brokers.raw_client import RawClient
from tests.support.servers.broker import KlogBroker

_OK, _AGAIN = ErrorCode.NONE, ErrorCode.REBALANCE_IN_PROGRESS
_ALL = {"t": [0, 1, 2, 3, 4, 5]}
_SECONDS = 60


@pytest.fixture(scope="module")
def shared(module_server_dir: Path) -> Iterator[KlogBroker]:
    """A broker that takes groups of two members of the consumer protocol, with a topic t of six partitions."""
    with KlogBroker(module_server_dir, "--set", "group.consumer.max.size=2") as broker:
        _create(broker)
        yield broker


def _create(broker: KlogBroker) -> None:
    with RawClient(broker.port) as raw:
        topic = {"name": "t", "num_partitions": 6, "replication_factor": 1}
        raw.request(apis.CREATE_TOPICS, 5, {"topics": [topic], "timeout_ms": 5000})


class Members:
    """Raw requests of the members of one group."""

    def __init__(self, broker: KlogBroker, group: str) -> None:
        self._broker, self._group = broker, group

    def _request(self, api: Any, version: int, **fields: Any) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while True:
            with RawClient(self._broker.port) as raw:
                answer: dict[str, Any] = raw.request(api, version, fields)
            loads = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.COORDINATOR_NOT_AVAILABLE
            if answer.get("error_code") not in loads or time.monotonic() > deadline:
                return answer
            time.sleep(0.05)

    def beat(self, member_id: str, epoch: int = 0, **fields: Any) -> dict[str, Any]:
        if epoch == 0:
            fields = {"rebalance_timeout_ms": 60_000, "topic_partitions": []} | fields
            fields.setdefault("subscribed_topic_names", ["t"])
        given = {"group_id": self._group, "member_id": member_id, "member_epoch": epoch} | fields
        return self._request(apis.CONSUMER_GROUP_HEARTBEAT, 1, **given)

    def join(self, member_id: str = "", instance: str | None = None, names: Sequence[str] = ("range",)) -> Any:
        subscription = {"topics": ["t"], "user_data": None, "owned_partitions": []}
        metadata = encode_versioned(MEMBER_SUBSCRIPTION, 1, subscription)
        fields = {
            "group_id": self._group,
            "session_timeout_ms": 30_000,
            "rebalance_timeout_ms": 60_000,
            "group_instance_id": instance,
            "protocol_type": "consumer",
            "protocols": [{"name": name, "metadata": metadata} for name in names],
        }
        answer = self._request(apis.JOIN_GROUP, 5, member_id=member_id, **fields)
        if answer["error_code"] == ErrorCode.MEMBER_ID_REQUIRED:
            answer = self._request(apis.JOIN_GROUP, 5, member_id=answer["member_id"], **fields)
        return answer

    def sync(self, joined: dict[str, Any], instance: str | None = None, **shares: dict[str, list[int]]) -> Any:
        """(error code, assignment); `shares` by member id, `own` is the member's."""
        assignments = [
            {
                "member_id": joined["member_id"] if name == "own" else name,
                "assignment": encode_versioned(
                    MEMBER_ASSIGNMENT,
                    0,
                    {"assigned_partitions": [{"topic": topic, "partitions": some} for topic, some in share.items()]},
                ),
            }
            for name, share in shares.items()
        ]
        fields = {"group_instance_id": instance, "assignments": assignments}
        member = {"member_id": joined["member_id"], "generation_id": joined["generation_id"]}
        answer = self._request(apis.SYNC_GROUP, 3, group_id=self._group, **member, **fields)
        return answer["error_code"], decode_assignment(answer["assignment"]) if answer["assignment"] else {}

    def heartbeat(self, joined: dict[str, Any], instance: str | None = None) -> ErrorCode:
        member = {"member_id": joined["member_id"], "generation_id": joined["generation_id"]}
        answer = self._request(apis.HEARTBEAT, 3, group_id=self._group, group_instance_id=instance, **member)
        return ErrorCode(answer["error_code"])

    def kind(self) -> tuple[str, str]:
        """(protocol, state) of the group."""
        groups = self._request(apis.LIST_GROUPS, 5)["groups"]
        return next((each["group_type"], each["group_state"]) for each in groups if each["group_id"] == self._group)


@pytest.fixture
def members(shared: KlogBroker, request: pytest.FixtureRequest) -> Members:
    return Members(shared, request.node.name)


def test_a_kill_after_a_migration_back_leaves_no_partition_unread(server_dir: Path) -> None:
    """The generation that is in the log is none that a member has: it would get the old assignment by SyncGroup."""
    with KlogBroker(server_dir) as broker:
        _create(broker)
        members = Members(broker, "g")
        first = members.join()
        assert members.sync(first, own=_ALL) == (_OK, _ALL)
        consumer = members.beat("m")
        assert members.heartbeat(first) == _AGAIN
        again = members.join(first["member_id"])
        _, kept = members.sync(again)
        assert len(kept["t"]) == 3
        assert members.beat("m", -1)["error_code"] == _OK
        assert (consumer["error_code"], members.kind()[0]) == (_OK, "classic")
        assert members.heartbeat(again) == _AGAIN  # its generation is still its own
        alone = members.join(first["member_id"])
        assert alone["leader"] == alone["member_id"]
        broker.kill()
        broker.start()
        assert members.sync(alone, own=_ALL)[0] == ErrorCode.ILLEGAL_GENERATION
        joined = members.join(first["member_id"])
        assert members.sync(joined, own=_ALL) == (_OK, _ALL)
        assert (members.heartbeat(joined), members.kind()) == (_OK, ("classic", "Stable"))


def test_a_static_member_is_upgraded(members: Members) -> None:
    first = members.join(instance="i")
    assert members.sync(first, "i", own=_ALL) == (_OK, _ALL)
    upgraded = members.beat("new", instance_id="i")
    assert upgraded["error_code"] == _OK
    assert [len(row["partitions"]) for row in upgraded["assignment"]["topic_partitions"]] == [6]
    assert members.kind() == ("consumer", "Stable")
    assert members.heartbeat(first, "i") == ErrorCode.FENCED_INSTANCE_ID


def _two_classic(members: Members) -> list[dict[str, Any]]:
    """Two members of the classic protocol with three partitions each."""
    first = members.join()
    members.sync(first, own=_ALL)
    second: list[dict[str, Any]] = []
    joining = threading.Thread(target=lambda: second.append(members.join()))
    joining.start()
    _until(lambda: members.heartbeat(first) == _AGAIN)
    first = members.join(first["member_id"])
    joining.join()
    leader, other = (first, *second) if first["leader"] == first["member_id"] else (*second, first)
    shares = {leader["member_id"]: {"t": [0, 1, 2]}, other["member_id"]: {"t": [3, 4, 5]}}
    assert members.sync(leader, **shares)[0] == members.sync(other)[0] == _OK
    return [leader, other]


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_refused_member_converts_nothing(members: Members) -> None:
    both = _two_classic(members)
    for _ in range(2):
        assert members.beat("third")["error_code"] == ErrorCode.GROUP_MAX_SIZE_REACHED
        assert members.beat(both[0]["member_id"])["error_code"] == ErrorCode.UNKNOWN_MEMBER_ID
        assert members.kind() == ("classic", "Stable")
        assert [members.heartbeat(each) for each in both] == [_OK, _OK]


def test_a_migrated_group_takes_members_with_another_common_protocol(members: Members) -> None:
    first = members.join(names=("range", "roundrobin"))
    assert members.sync(first, own=_ALL) == (_OK, _ALL)
    assert members.beat("m")["error_code"] == members.beat("m", -1)["error_code"] == _OK
    assert members.kind()[0] == "classic"
    second: list[dict[str, Any]] = []
    joining = threading.Thread(target=lambda: second.append(members.join(names=("roundrobin",))))
    joining.start()
    _until(lambda: members.heartbeat(first) == _AGAIN)
    time.sleep(0.2)  # until the other one waits
    again = members.join(first["member_id"], names=("range", "roundrobin"))
    joining.join()
    assert (again["error_code"], second[0]["error_code"]) == (_OK, _OK)
    assert again["protocol_name"] == second[0]["protocol_name"] == "roundrobin"


def test_offsets_of_topics_that_a_pattern_matches_are_kept_after_a_restart(server_dir: Path) -> None:
    with KlogBroker(server_dir) as broker:
        _create(broker)
        members = Members(broker, "g")
        joined = members.beat("m", subscribed_topic_names=[], subscribed_topic_regex="t.*")
        partition = {"partition_index": 0, "committed_offset": 5}
        commit = {"generation_id_or_member_epoch": joined["member_epoch"], "member_id": "m"}
        deletion = {"group_id": "g", "topics": [{"name": "t", "partitions": [{"partition_index": 0}]}]}
        with RawClient(broker.port) as raw:
            topics = [{"name": "t", "partitions": [partition]}]
            raw.request(apis.OFFSET_COMMIT, 8, {"group_id": "g", "topics": topics} | commit)
        broker.kill()
        broker.start()
        (topic,) = members._request(apis.OFFSET_DELETE, 0, **deletion)["topics"]
        assert topic["partitions"][0]["error_code"] == ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
        assert members.beat("m", joined["member_epoch"])["member_epoch"] == joined["member_epoch"]


def test_an_empty_group_keeps_its_protocol_if_a_member_is_refused(members: Members) -> None:
    members.beat("m")
    members.beat("m", -1)
    assert members.kind() == ("consumer", "Empty")
    assert members.join("unknown")["error_code"] == ErrorCode.UNKNOWN_MEMBER_ID
    assert members.kind() == ("consumer", "Empty")
    assert members.join()["error_code"] == _OK
    assert members.kind()[0] == "classic"


class _ClassicClient:
    """A member of the classic protocol that does what it is told, one request or two at a time."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._joined: dict[str, Any] | None = None
        self.owned: list[int] = []

    def step(self) -> None:
        joined = self._joined
        if joined is not None and joined["error_code"] == _OK:
            if (code := self._members.heartbeat(joined)) == _OK:
                return
            if code == ErrorCode.UNKNOWN_MEMBER_ID:
                joined = None
        self._joined = joined = self._members.join(joined["member_id"] if joined else "")
        if joined["error_code"] == ErrorCode.UNKNOWN_MEMBER_ID:
            self._joined = None
        elif joined["error_code"] == _OK:
            shares = {"own": _ALL} if joined["leader"] == joined["member_id"] else {}
            code, assigned = self._members.sync(joined, **shares)
            self.owned = assigned.get("t", [])
            if code:
                joined["error_code"] = code


class _ConsumerClient:
    """A member of the consumer protocol, as `_ClassicClient`."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._epoch = 0
        self.owned: list[int] = []

    def step(self) -> None:
        owned: dict[str, Any] = {} if self._epoch == 0 else {"topic_partitions": self._rows}
        answer = self._members.beat("m", self._epoch, **owned)
        self._epoch = answer["member_epoch"] if answer["error_code"] == _OK else 0
        if answer["error_code"] != _OK:
            self.owned = []
        if answer["assignment"] is not None:
            self._rows = answer["assignment"]["topic_partitions"]
            self.owned = [number for row in self._rows for number in row["partitions"]]

    def leave(self) -> None:
        self._members.beat("m", -1)
        self.owned = []


def test_a_kill_between_any_two_steps_of_a_migration_and_back(server_dir: Path) -> None:
    """In the end each partition has one reader."""
    with KlogBroker(server_dir) as broker:
        _create(broker)
        for killed_before in range(9):
            members = Members(broker, f"g{killed_before}")
            classic, consumer = _ClassicClient(members), _ConsumerClient(members)
            steps = [classic.step, consumer.step, classic.step, consumer.step, classic.step]
            steps += [consumer.leave, classic.step, classic.step, classic.step]
            for number, step in enumerate(steps):
                if number == killed_before:
                    broker.kill()
                    broker.start()
                step()
                if number == 4:
                    for client in (classic, consumer) * 3:
                        client.step()
                    assert sorted(classic.owned + consumer.owned) == _ALL["t"], killed_before
                    assert len(classic.owned) == 3
            classic.step()
            assert (classic.owned, members.kind()) == (_ALL["t"], ("classic", "Stable")), killed_before
