"""Groups and offsets by hand-made requests, and the offset manager on a log of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spark_klog.broker.groups.consumer_groups import ConsumerGroups
from spark_klog.broker.groups.consumer_records import ConsumerGroupKey, encode_changes
from spark_klog.broker.groups.expiry import expire, forget_topics
from spark_klog.broker.groups.groups import Groups
from spark_klog.broker.groups.membership import Membership
from spark_klog.broker.groups.offset_manager import OffsetManager
from spark_klog.broker.groups.records import (
    Committed,
    OffsetKey,
    encode_offset,
    encode_offset_key,
)
from spark_klog.broker.settings.group_settings import GroupTimes
from spark_klog.broker.transactions.records import marker_batch
from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch
from spark_klog.errors import ErrorCode
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.protocol.apis import DESCRIBE_GROUPS, JOIN_GROUP
from spark_klog.protocol.codec import Message, decode_response
from spark_klog.protocol.tables.groups import CONSUMER_GROUP_METADATA_KEY
from spark_klog.records.building.assignment import own_batch
from tests.support.brokers.batches import make_batch
from tests.support.brokers.raw_client import CLIENT_ID, RawClient
from tests.support.clients.commits import commit_offsets
from tests.support.servers.broker import KlogBroker
from tests.support.waiting import wait_until

PLACE = ("t", 0)
NOW = 1_700_000_000_000


@pytest.fixture
def broker(server_dir: Path) -> Iterator[KlogBroker]:
    with KlogBroker(server_dir, "--set", "group.initial.rebalance.delay.ms=0") as running:
        yield running


def _join(version: int, member_id: str = "") -> dict[str, object]:
    message: dict[str, object] = {
        "group_id": "g",
        "session_timeout_ms": 10_000,
        "member_id": member_id,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b"\0\0\0\0\0\0\xff\xff\xff\xff"}],
    }
    return message | ({"rebalance_timeout_ms": 60_000} if version else {})


def test_a_member_of_an_unknown_group_is_told_so(broker: KlogBroker) -> None:
    """The client was a member before the group was deleted; each version of the request gets the error."""
    with RawClient(broker.port) as client:
        for version in range(JOIN_GROUP.versions.first, JOIN_GROUP.versions.last + 1):
            answer = client.request(JOIN_GROUP, version, _join(version, "member-of-before"))
            found = version, answer["error_code"], answer["member_id"]
            assert found == (version, ErrorCode.UNKNOWN_MEMBER_ID, "member-of-before")


def _members(broker: KlogBroker) -> list[str]:
    with RawClient(broker.port) as client:
        (group,) = client.request(DESCRIBE_GROUPS, 0, {"groups": ["g"]})["groups"]
    return [member["member_id"] for member in group["members"]]


def test_attempts_to_join_that_are_given_up_leave_nobody_behind(broker: KlogBroker) -> None:
    """Before version 4 a member learns its id only with the generation, so it never comes back with that id."""
    with RawClient(broker.port) as first:
        (leader,) = [first.request(JOIN_GROUP, 2, _join(2))["member_id"]]
        for _ in range(3):
            with RawClient(broker.port, timeout=0.3) as other, pytest.raises(TimeoutError):
                other.request(JOIN_GROUP, 2, _join(2))
        wait_until(lambda: _members(broker) == [leader])
        assert leader.startswith(CLIENT_ID)


def test_members_that_wait_are_answered_when_the_broker_stops(broker: KlogBroker) -> None:
    with RawClient(broker.port) as first, RawClient(broker.port) as second:
        first.request(JOIN_GROUP, 2, _join(2))
        second.socket.settimeout(0.3)
        with pytest.raises(TimeoutError):
            second.request(JOIN_GROUP, 2, _join(2))
        wait_until(lambda: len(_members(broker)) == 2)
        second.socket.settimeout(10)
        assert broker.stop() == 0
        assert "requests under way" not in broker.log.read_text()  # a stop waits for them for five seconds
        _, answer = decode_response(JOIN_GROUP, 2, second.receive_frame())
        assert answer["error_code"] == ErrorCode.COORDINATOR_NOT_AVAILABLE


# ----- the offset manager


@pytest.fixture
def log(tmp_path: Path) -> Iterator[PartitionLog]:
    made = PartitionLog(tmp_path / "__consumer_offsets-0", LogConfig())
    yield made
    made.close()


def _loaded(log: PartitionLog) -> OffsetManager:
    offsets = OffsetManager(lambda group, stored: None, lambda key, value, written_ms: None)
    offsets.load(log)
    return offsets


def _offset(offsets: OffsetManager) -> int | None:
    found = offsets.fetch("g", *PLACE)
    return None if found is None else found.offset


@pytest.mark.parametrize("kernel", ["native", "reference"])
def test_what_was_committed_is_loaded(log: PartitionLog, monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    monkeypatch.setenv("SPARK_KLOG_KERNEL", kernel)
    offsets = OffsetManager(lambda group, stored: None, lambda key, value, written_ms: None)
    for number in range(300):
        committed = {("t", partition): (number, 3, "meta" * (number % 2)) for partition in range(1 + number % 7)}
        commit_offsets(offsets, log, f"g{number % 10}", committed)
    offsets.remove(log, "g3", [("t", 0)])
    again = _loaded(log)
    assert sorted(again.groups) == sorted(offsets.groups)
    for group in offsets.groups:
        assert again.all(group) == offsets.all(group)
    assert again.fetch("g3", "t", 0) is None
    assert again.fetch("g3", "t", 1) is not None


def test_what_does_not_decode_is_left_out(log: PartitionLog) -> None:
    """The records after it count."""
    key = encode_offset_key(OffsetKey("g", *PLACE))
    value = encode_offset(Committed(5, -1, "", NOW))
    bad: list[tuple[bytes | None, bytes | None]] = [
        (key, b"\0\x09" + value[2:]),
        (key, value[:-1]),
        (key[:-1], value),
        (b"\0\x01\0\x01\xff\0\x01t\0\0\0\0", value),
        (b"\0\x02\0\x01g", b"\0\x03\0\x08consumer"),
        (b"\0\x63what comes later", b"?"),
        (b"", value),
        (None, value),
    ]
    for pair in bad:
        log.append(memoryview(make_batch([pair], [NOW])))
    assert _loaded(log).groups == []
    log.append(memoryview(make_batch([(key, value)], [NOW])))
    assert _offset(_loaded(log)) == 5


@pytest.mark.parametrize("commits", [False, True])
def test_offsets_of_a_transaction_count_from_its_end_on(log: PartitionLog, commits: bool) -> None:
    offsets = OffsetManager(lambda group, stored: None, lambda key, value, written_ms: None)
    commit_offsets(offsets, log, "g", {PLACE: (1, -1, "")})
    commit_offsets(offsets, log, "g", {PLACE: (2, -1, "")}, producer=(7, 0))
    assert (offsets.pending("g"), _offset(offsets)) == ({PLACE}, 1)
    loaded = _loaded(log)
    assert (loaded.pending("g"), _offset(loaded)) == ({PLACE}, 1)
    offsets.complete(0, 7, committed=commits)
    assert (offsets.pending("g"), _offset(offsets)) == (set(), 2 if commits else 1)


@pytest.mark.parametrize("commits", [False, True])
def test_a_transaction_ends_in_each_partition_by_itself(tmp_path: Path, commits: bool) -> None:
    """A marker of an earlier transaction in another partition of __consumer_offsets does not end an open one."""
    ended, open_ = (PartitionLog(tmp_path / f"__consumer_offsets-{number}", LogConfig()) for number in range(2))
    offsets = OffsetManager(lambda group, stored: None, lambda key, value, written_ms: None)
    commit_offsets(offsets, ended, "g", {PLACE: (1, -1, "")}, producer=(7, 0))
    ended.append(memoryview(marker_batch(ProducerIdAndEpoch(7, 0), commits=commits, coordinator_epoch=0, now_ms=NOW)))
    commit_offsets(offsets, open_, "other", {PLACE: (2, -1, "")}, producer=(7, 0))
    for logs in ((ended, open_), (open_, ended)):
        loaded = OffsetManager(lambda group, stored: None, lambda key, value, written_ms: None)
        for each in logs:
            loaded.load(each)
        assert _offset(loaded) == (1 if commits else None)
        assert loaded.fetch("other", *PLACE) is None
        assert loaded.pending("other") == {PLACE}
        loaded.complete(1, 7, committed=True)
        found = loaded.fetch("other", *PLACE)
        assert found is not None
        assert found.offset == 2
    for each in (ended, open_):
        each.close()


def test_a_later_commit_is_not_undone_by_the_end_of_a_transaction(log: PartitionLog) -> None:
    """As in Kafka the later record wins, whenever the transaction ends; removed offsets stay removed."""
    offsets = OffsetManager(lambda group, stored: None, lambda key, value, written_ms: None)
    commit_offsets(offsets, log, "g", {PLACE: (2, -1, "")}, producer=(7, 0))
    commit_offsets(offsets, log, "g", {PLACE: (9, -1, "")})
    loaded = _loaded(log)
    for each in (offsets, loaded):
        each.complete(0, 7, committed=True)
        assert _offset(each) == 9
    commit_offsets(offsets, log, "g", {PLACE: (12, -1, "")}, producer=(7, 0))
    offsets.remove(log, "g", [PLACE])
    offsets.complete(0, 7, committed=True)
    assert _offset(offsets) is None


def _stored(generation: int, timestamp: int, subscription: bytes | None = None) -> Message:
    """A group's record, with one member if there is a subscription."""
    member = {
        "member_id": "m",
        "group_instance_id": None,
        "client_id": "c",
        "client_host": "/h",
        "rebalance_timeout": 1000,
        "session_timeout": 1000,
        "subscription": subscription,
        "assignment": b"",
    }
    return {
        "protocol_type": "consumer",
        "generation": generation,
        "protocol": None if subscription is None else "range",
        "leader": None if subscription is None else "m",
        "current_state_timestamp": timestamp,
        "members": [] if subscription is None else [member],
    }


def test_what_expires(log: PartitionLog) -> None:
    """Offsets of groups that have been empty for long, then the groups."""
    offsets = OffsetManager(lambda group, stored: None, lambda key, value, written_ms: None)
    groups = Groups(lambda group, stored: ErrorCode.NONE, 0, 10)
    before = time.time_ns() // 1_000_000
    groups.load("emptied long ago", _stored(3, before - 10_000))
    groups.load("emptied now", _stored(3, before + 10_000))
    groups.load("without offsets", _stored(3, before + 10_000))
    for group in ("emptied long ago", "emptied now", "simple"):
        commit_offsets(offsets, log, group, {PLACE: (1, -1, "")})
    time.sleep(0.01)
    _take_all(expire([groups], offsets, lambda group: log, before + 5, before))
    assert sorted(offsets.groups) == ["emptied long ago", "emptied now", "simple"]
    assert sorted(group.group_id for group in groups) == ["emptied long ago", "emptied now"]
    later = before + 5_000
    _take_all(expire([groups], offsets, lambda group: log, later, later))
    assert offsets.groups == ["emptied now"]
    assert [group.group_id for group in groups] == ["emptied now"]
    assert _loaded(log).groups == ["emptied now"]


def test_an_empty_consumer_group_is_as_old_as_its_last_record(log: PartitionLog) -> None:
    """However often the broker has restarted since: else its offsets would never expire."""
    now = time.time_ns() // 1_000_000
    empty = Membership(epoch=2, assignment_epoch=1)
    for group, emptied_ms in (("long ago", now - 10_000), ("now", now)):
        rows = encode_changes(group, Membership(), empty)
        log.append(memoryview(own_batch(rows, emptied_ms)), flushes=False)
        commit_offsets(
            OffsetManager(lambda group, stored: None, lambda *record: None), log, group, {PLACE: (1, -1, "")}
        )
    groups = ConsumerGroups(
        lambda group_id, encode: ErrorCode.NONE, lambda group: False, lambda group: GroupTimes(5000, 45_000), 10
    )
    loaded = OffsetManager(lambda group, stored: None, groups.load)
    loaded.load(log)
    groups.start()
    assert [groups.empty_since(group, now + 1) for group in ("long ago", "now", "other")] == [now - 10_000, now, 0]
    later = now + 5_000  # after the commits
    _take_all(expire([groups], loaded, lambda group: log, later, now - 1))
    assert sorted(loaded.groups) == ["long ago", "now"]
    (_, value), *_ = encode_changes("now", empty, replace(empty, epoch=3))
    groups.load(ConsumerGroupKey(CONSUMER_GROUP_METADATA_KEY, "now"), value, later + 9)
    _take_all(expire([groups], loaded, lambda group: log, later, later))
    assert loaded.groups == ["now"]


def _expire(offsets: OffsetManager, log: PartitionLog, now_ms: int, groups: Groups | None = None) -> None:
    """Expire with a retention of seven days."""
    known = groups or Groups(lambda group, stored: ErrorCode.NONE, 0, 10)
    _take_all(expire([known], offsets, lambda group: log, now_ms, now_ms - 7 * 24 * 3600 * 1000))


def _take_all(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


def test_an_expiry_time_of_its_own(log: PartitionLog) -> None:
    """It replaces the broker's retention, also after a restart, until the next commit."""
    offsets = OffsetManager(lambda group, stored: None, lambda key, value, written_ms: None)
    now = time.time_ns() // 1_000_000
    commit_offsets(offsets, log, "g", {PLACE: (1, -1, "m"), ("t", 1): (1, -1, "")}, retention_ms=50_000)
    commit_offsets(offsets, log, "g", {("t", 2): (1, -1, "")}, retention_ms=10**12)
    commit_offsets(offsets, log, "g", {("t", 1): (2, -1, "")})
    loaded = _loaded(log)
    assert loaded.all("g") == offsets.all("g")
    for each in (offsets, loaded):
        _expire(each, log, now + 49_000)
        assert len(set(each.known("g"))) == 3
    for each in (offsets, loaded):
        _expire(each, log, now + 60_000)
        assert set(each.known("g")) == {("t", 1), ("t", 2)}
        _expire(each, log, now + 10**11)
        assert set(each.known("g")) == {("t", 2)}
    assert set(_loaded(log).known("g")) == {("t", 2)}


@pytest.mark.parametrize("topic", [b"t", b"u"])
def test_what_members_consume_does_not_expire(log: PartitionLog, topic: bytes) -> None:
    """Not even with an expiry time of its own, which does not need an empty group."""
    offsets = OffsetManager(lambda group, stored: None, lambda key, value, written_ms: None)
    groups = Groups(lambda group, stored: ErrorCode.NONE, 0, 10)
    now = time.time_ns() // 1_000_000
    subscription = b"\0\0\0\0\0\1\0\1" + topic + b"\xff\xff\xff\xff"
    commit_offsets(offsets, log, "g", {PLACE: (1, -1, "")}, retention_ms=1)
    groups.load("g", _stored(1, now, subscription))
    _expire(offsets, log, now + 1000, groups)
    assert set(offsets.known("g")) == ({PLACE} if topic == b"t" else set())
    groups.load("g", _stored(2, now))
    _expire(offsets, log, now + 1000, groups)
    assert set(offsets.known("g")) == set()


def test_what_an_open_transaction_commits_does_not_expire(log: PartitionLog) -> None:
    """A tombstone, later in the log, would win over the offset that the transaction commits."""
    offsets = OffsetManager(lambda group, stored: None, lambda key, value, written_ms: None)
    commit_offsets(offsets, log, "g", {PLACE: (1, -1, ""), ("t", 1): (1, -1, "")})
    commit_offsets(offsets, log, "g", {PLACE: (2, -1, "")}, producer=(7, 0))
    _expire(offsets, log, NOW * 2)
    loaded = _loaded(log)
    for each in (offsets, loaded):
        assert set(each.known("g")) == {PLACE}
        each.complete(0, 7, committed=True)
        assert _offset(each) == 2


def test_more_is_removed_than_a_batch_takes(tmp_path: Path) -> None:
    log = PartitionLog(tmp_path / "__consumer_offsets-0", LogConfig(max_message_bytes=1000))
    offsets = OffsetManager(lambda group, stored: None, lambda key, value, written_ms: None)
    for number in range(100):
        commit_offsets(offsets, log, "g", {("t", number): (1, -1, "")})
    commit_offsets(offsets, log, "g", {("staged", 0): (2, -1, "")}, producer=(7, 0))
    offsets.remove(log, "g", [*offsets.known("g"), ("unknown", 0)])
    loaded = _loaded(log)
    for each in (offsets, loaded):
        each.complete(0, 7, committed=True)
        assert each.groups == []
    log.close()


def test_offsets_of_deleted_topics_go(log: PartitionLog) -> None:
    offsets = OffsetManager(lambda group, stored: None, lambda key, value, written_ms: None)
    commit_offsets(offsets, log, "g", {PLACE: (1, -1, ""), ("kept", 0): (2, -1, "")})
    commit_offsets(offsets, log, "pending only", {PLACE: (1, -1, "")}, producer=(7, 0))
    since = offsets.since_now(topic="t")
    _take_all(forget_topics({"t": since}, offsets, lambda group: log))
    for each in (offsets, _loaded(log)):
        each.complete(0, 7, committed=True)
        assert list(each.all("g")) == [("kept", 0)]
        assert not set(each.known("pending only"))
    commit_offsets(offsets, log, "g", {PLACE: (3, -1, "of the topic that was created again")})
    _take_all(forget_topics({"t": since}, offsets, lambda group: log))
    assert set(offsets.known("g")) == {PLACE, ("kept", 0)}
