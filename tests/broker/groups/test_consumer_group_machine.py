"""The state machine of a consumer group (KIP-848), on its own clock: its answers, and members that act at random."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any
from uuid import UUID

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spark_klog.broker.event_loop import Turns
from spark_klog.broker.groups.consumer_group import ConsumerGroup, Heartbeat, preferred_assignor
from spark_klog.broker.groups.consumer_groups import ConsumerGroups
from spark_klog.broker.groups.consumer_records import decode_consumer_key, encode_changes, encode_removal, load_record
from spark_klog.broker.groups.group import Join
from spark_klog.broker.groups.membership import Membership, Partitions, partitions_of
from spark_klog.broker.groups.topic_pattern import TopicPattern
from spark_klog.broker.metadata.registry import Topic
from spark_klog.broker.settings.group_settings import GroupTimes
from spark_klog.errors import ConfigError, ErrorCode
from spark_klog.protocol.tables.groups import decode_assignment

SESSION, REBALANCE = 45.0, 10.0
TIMES = GroupTimes(5000, int(SESSION * 1000))
OK = ErrorCode.NONE
UNKNOWN, FENCED, STALE = ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.STALE_MEMBER_EPOCH
UNRELEASED, FENCED_INSTANCE = ErrorCode.UNRELEASED_INSTANCE_ID, ErrorCode.FENCED_INSTANCE_ID
GONE = ErrorCode.COORDINATOR_NOT_AVAILABLE
REBALANCES, STALE_GENERATION = ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.ILLEGAL_GENERATION


def topics_of(**counts: int) -> dict[str, Topic]:
    """Topics with these numbers of partitions; the id of a name stays."""
    return {
        name: Topic(name, UUID(int=sum(map(ord, name))), {number: [0] for number in range(count)})
        for name, count in counts.items()
    }


class Talk:
    """A group with its clock, its topics, and what a log of its records would have."""

    def __init__(self, max_size: int = 100, **counts: int) -> None:
        self.group = ConsumerGroup("g", self._store, TIMES, max_size)
        self.topics = topics_of(**counts)
        self.now = 100.0
        self.store_code = OK
        self.log: dict[bytes, bytes | None] = {}

    def _store(self, group: ConsumerGroup, before: Membership, after: Membership) -> ErrorCode:
        if not self.store_code:
            self.log.update(encode_changes("g", before, after))
        return self.store_code

    def beat(
        self,
        member_id: str,
        epoch: int,
        *topics: str,
        owned: Partitions | None = None,
        instance: str | None = None,
        regex: str | None = None,
        assignor: str | None = None,
    ) -> dict[str, Any]:
        joins = epoch == 0
        beat = Heartbeat(
            *(member_id, epoch, instance, None, "client", "/1.2.3.4"),
            int(REBALANCE * 1000) if joins else -1,
            frozenset(topics) if topics or (joins and not regex) else None,
            *(regex, assignor, frozenset() if joins else owned),
        )

        return self.group.heartbeat(beat, self.topics, self.matching, self.now)

    def matching(self, regex: str) -> frozenset[str]:
        return frozenset(filter(TopicPattern(regex).matches, self.topics))

    @property
    def names(self) -> dict[UUID, str]:
        return {topic.topic_id: name for name, topic in self.topics.items()}

    def restart(self) -> None:
        """Begin anew with what the log has."""
        max_size = self.group._max_size
        self.group = ConsumerGroup("g", self._store, TIMES, max_size)
        self.group.membership = self.group.stored = self.loaded()
        self.group.restart(self.now)

    def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        while self.group.wake_at <= until:
            before = self.group.wake_at
            self.now = max(self.now, before)
            self.group.tick(self.now)
            assert self.group.wake_at > before, "a tick that changes nothing"
        self.now = until

    def loaded(self) -> Membership:
        """The group as a restart finds it in the log."""
        membership = Membership()
        for data, value in self.log.items():
            key = decode_consumer_key(int.from_bytes(data[:2], "big"), data)
            assert key is not None
            load_record(membership, key, value)
        return membership


@dataclass
class Client:
    """A member that follows the protocol: it owns what it is assigned, and gives up what it is not."""

    talk: Talk
    member_id: str
    topics: tuple[str, ...] = ("t",)
    instance: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0
    owned: Partitions = frozenset()

    def beat(self, *, says_owned: bool = True) -> ErrorCode:
        joins = self.epoch == 0
        answer = self.talk.beat(
            *(self.member_id, self.epoch, *(self.topics if joins else ())),
            instance=self.instance if joins else None,
            owned=self.owned if says_owned else None,
            **(self.options if joins else {}),
        )
        if not answer["error_code"]:
            self.epoch = answer["member_epoch"]
            if answer["assignment"] is not None:
                self.owned = partitions_of(answer["assignment"]["topic_partitions"])
        return ErrorCode(answer["error_code"])

    def leave(self, epoch: int = -1) -> ErrorCode:
        answer = self.talk.beat(self.member_id, epoch, instance=self.instance)
        self.epoch, self.owned = 0, frozenset()
        return ErrorCode(answer["error_code"])

    @property
    def numbers(self) -> list[int]:
        return sorted(number for _, number in self.owned)


@dataclass
class Classic(Client):
    """A member of the classic protocol: told to, it joins again, having given up all (eager) or nothing at first."""

    is_eager: bool = True
    must_join: bool = True

    def beat(self, *, says_owned: bool = True) -> ErrorCode:
        group, now = self.talk.group, self.talk.now
        if not self.must_join:
            code = group.heartbeat_classic(self.member_id, self.instance, self.epoch, now)
            if code not in (REBALANCES, STALE_GENERATION):
                return code
        self.must_join = True
        if self.is_eager:
            self.owned = frozenset()
        join = Join(
            *(self.member_id if self.epoch else "", self.instance, "client", "/1.2.3.4"),
            *(int(SESSION * 1000), int(REBALANCE * 1000), "consumer", (("range", b""),), False, True),
        )
        answer = group.join_classic(join, self.owned, frozenset(self.topics), self.talk.topics, self.talk.matching, now)
        if answer["error_code"]:
            return ErrorCode(answer["error_code"])
        assert (answer["leader"], answer["members"], answer["protocol_name"]) == ("", [], "range")
        self.member_id, self.epoch = answer["member_id"], answer["generation_id"]
        protocol, names = ("consumer", "range"), self.talk.names
        answer = group.sync_classic(self.member_id, self.instance, self.epoch, protocol, names, now)
        assert answer["error_code"] == OK
        assigned = decode_assignment(answer["assignment"])
        ids = {name: topic.topic_id for name, topic in self.talk.topics.items()}
        before = self.owned
        self.owned = frozenset((ids[name], number) for name, some in assigned.items() for number in some)
        self.must_join = bool(before - self.owned)
        return OK

    def leave(self, epoch: int = -1) -> ErrorCode:
        return self.talk.group.leave_classic(self.member_id, self.instance, self.talk.now)


def settle(*clients: Client) -> None:
    """Let all send heartbeats until nothing changes."""
    for _ in range(15):
        before = [(client.epoch, client.owned) for client in clients]
        assert [client.beat() for client in clients] == [OK] * len(clients)
        if before == [(client.epoch, client.owned) for client in clients]:
            return
    raise AssertionError("the group does not settle")


def test_one_member_has_all_and_others_get_theirs_when_given_up() -> None:
    talk = Talk(t=4)
    a, b = Client(talk, "a"), Client(talk, "b")
    assert (a.beat(), a.epoch, a.numbers) == (OK, 1, [0, 1, 2, 3])
    assert talk.group.state == "Stable"
    assert (b.beat(), b.epoch, b.numbers) == (OK, 2, [])  # all are a's
    assert talk.group.state == "Reconciling"
    owned = a.owned
    assert (a.beat(), a.epoch, len(a.numbers)) == (OK, 1, 2)  # it is to give up two, in its epoch
    assert (a.beat(says_owned=False), a.epoch) == (OK, 1)  # it does not say that it has
    assert (b.beat(), b.numbers) == (OK, [])
    a.owned, kept = owned, a.owned
    assert (a.beat(), a.epoch) == (OK, 1)  # not done
    a.owned = kept
    assert (a.beat(), a.epoch) == (OK, 2)
    assert (b.beat(), b.numbers) == (OK, sorted({0, 1, 2, 3} - set(a.numbers)))
    assert talk.group.state == "Stable"


def test_commits_and_fetches_are_fenced_by_the_epoch() -> None:
    talk = Talk(t=2)
    assert talk.group.may_commit("", -1, frozenset) == OK
    a, b = Client(talk, "a"), Client(talk, "b")
    settle(a)
    b.beat()
    group = talk.group
    before = a.owned
    assert [group.may_commit("a", epoch, lambda: before) for epoch in (1, 0, 2, -1)] == [OK, STALE, STALE, STALE]
    assert (group.may_commit("x", 1, frozenset), group.may_commit("", -1, frozenset)) == (UNKNOWN, UNKNOWN)
    settle(a, b)
    assert [group.may_commit("a", epoch, frozenset) for epoch in (1, 2)] == [STALE, OK]
    # in an earlier epoch: what it has had since, not what it has got or lost in between (KIP-1251)
    (kept,), (lost,) = a.owned, before - a.owned
    assert [group.may_commit("a", epoch, lambda: frozenset({kept})) for epoch in (0, 1, 2, 3)] == [STALE, OK, OK, STALE]
    for others in ({lost}, {kept, lost}):
        assert group.may_commit("a", 1, lambda others=others: frozenset(others)) == STALE  # type: ignore[misc]
    assert group.may_commit("b", 1, lambda: b.owned) == STALE  # got in epoch 2
    assert [group.may_fetch("a", epoch) for epoch in (1, 2)] == [STALE, OK]


def test_epochs_of_the_past_and_the_future_are_fenced() -> None:
    talk = Talk(t=4)
    a, b = Client(talk, "a"), Client(talk, "b")
    settle(a)
    b.beat()
    settle(a, b)
    assert a.epoch == 2
    assert talk.beat("a", 3, owned=a.owned)["error_code"] == FENCED
    assert talk.beat("a", 2, owned=a.owned)["error_code"] == OK
    # the last answer was lost: it may repeat its heartbeat, unless it owns what is another's
    assert talk.beat("a", 1, owned=a.owned)["member_epoch"] == 2
    assert talk.beat("a", 1, owned=a.owned | b.owned)["error_code"] == FENCED
    assert talk.beat("a", 1)["error_code"] == FENCED
    assert talk.beat("x", 1)["error_code"] == UNKNOWN
    # who was fenced joins again with its id
    a.epoch, a.owned = 0, frozenset()
    assert (a.beat(), a.epoch, len(a.numbers)) == (OK, 2, 2)


def test_who_says_nothing_or_gives_up_nothing_is_removed() -> None:
    talk = Talk(t=4)
    a, b = Client(talk, "a"), Client(talk, "b")
    settle(a)
    b.beat()
    a.beat(says_owned=False)
    for _ in range(int(REBALANCE) + 1):  # heartbeats without giving up anything
        talk.sleep(1)
        talk.beat("a", a.epoch, owned=partitions_of([{"topic_id": UUID(int=116), "partitions": [0, 1, 2, 3]}]))
        b.beat()
    assert list(talk.group.membership.members) == ["b"]
    settle(b)
    assert b.numbers == [0, 1, 2, 3]
    assert talk.beat("a", 1)["error_code"] == UNKNOWN
    talk.sleep(SESSION + 1)
    assert talk.group.state == "Empty"
    assert talk.group.wake_at == inf


def test_static_members_come_back_to_what_they_had() -> None:
    talk = Talk(t=4)
    a, b = Client(talk, "a", instance="i"), Client(talk, "b", instance="j")
    a.beat()
    settle(a, b)
    had, epoch = a.owned, talk.group.membership.epoch
    other = Client(talk, "c", instance="i")
    assert other.beat() == UNRELEASED
    assert a.leave(-2) == OK
    assert (b.beat(), len(b.numbers)) == (OK, 2)
    assert (other.beat(), other.owned, talk.group.membership.epoch) == (OK, had, epoch)
    assert talk.beat("a", 1)["error_code"] == UNKNOWN
    assert talk.beat("a", 1, instance="i")["error_code"] == FENCED_INSTANCE
    # but if it does not come back in its session, the others get its partitions
    assert other.leave(-2) == OK
    for _ in range(int(SESSION) + 1):
        talk.sleep(1)
        b.beat()
    settle(b)
    assert b.numbers == [0, 1, 2, 3]


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_static_member_that_closes_while_it_gives_up_partitions(is_asked: bool) -> None:
    """It reads them no more: others get them at once, whether it has heard that they are to be others' or not."""
    talk = Talk(t=4)
    a, b = Client(talk, "a", instance="i"), Client(talk, "b")
    settle(a)
    b.beat()
    if is_asked:
        assert (a.beat(), len(a.numbers), talk.group.membership.members["a"].epoch) == (OK, 2, 1)
    assert a.leave(-2) == OK
    assert (b.beat(), len(b.numbers), talk.group.state) == (OK, 2, "Stable")
    other = Client(talk, "c", instance="i")
    settle(other, b)
    assert sorted(other.numbers + b.numbers) == [0, 1, 2, 3]
    talk.sleep(REBALANCE + 1)  # nothing waits for the one that has left
    assert set(talk.group.membership.members) == {"b", "c"}


@pytest.mark.parametrize("is_eager", [True, False])
def test_members_of_the_classic_protocol(is_eager: bool) -> None:
    talk = Talk(t=4)
    a, b = Client(talk, "a"), Classic(talk, "", is_eager=is_eager)
    settle(a)
    assert (b.beat(), b.numbers, talk.group.state) == (OK, [], "Reconciling")
    group = talk.group
    assert group.heartbeat_classic(b.member_id, None, b.epoch, talk.now) == OK  # a has given up nothing yet
    assert [a.beat(), a.beat()] == [OK, OK]
    assert group.heartbeat_classic(b.member_id, None, b.epoch, talk.now) == REBALANCES
    settle(a, b)
    assert (len(a.numbers), len(b.numbers), talk.group.state) == (2, 2, "Stable")
    assert [group.may_commit(b.member_id, epoch, lambda: b.owned) for epoch in (b.epoch, b.epoch - 1)] == [
        OK,
        STALE_GENERATION,
    ]
    assert group.heartbeat_classic(b.member_id, None, b.epoch - 1, talk.now) == STALE_GENERATION
    assert group.heartbeat_classic("x", None, b.epoch, talk.now) == UNKNOWN
    assert group.heartbeat_classic("a", None, a.epoch, talk.now) == UNKNOWN
    assert talk.beat(b.member_id, 0, "t")["error_code"] == UNKNOWN
    other = Join("", None, "c", "/1.2.3.4", 9000, 9000, "consumer", (("sticky", b""),), False, True)
    refused = group.join_classic(other, frozenset(), frozenset({"t"}), talk.topics, talk.matching, talk.now)
    assert refused["error_code"] == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert talk.loaded().members == group.membership.members
    # told to join again, b has the time of a rebalance for it
    c = Client(talk, "c")
    assert (c.beat(), group.heartbeat_classic(b.member_id, None, b.epoch, talk.now)) == (OK, REBALANCES)
    for _ in range(int(REBALANCE) + 1):
        talk.sleep(1)
        for client in (a, c):
            client.beat()
        group.heartbeat_classic(b.member_id, None, b.epoch, talk.now)
    assert list(group.membership.members) == ["a", "c"]
    assert group.classic_protocol is None


def test_a_static_member_changes_its_protocol() -> None:
    """One of the classic protocol never leaves: who comes with its instance id has its place at once."""
    talk = Talk(t=4)
    a, b = Client(talk, "a"), Classic(talk, "", instance="i")
    settle(a)
    settle(a, b)
    had = b.owned
    upgraded = Client(talk, "b", instance="i")
    assert (upgraded.beat(), upgraded.owned) == (OK, had)
    group = talk.group
    assert group.heartbeat_classic(b.member_id, "i", b.epoch, talk.now) == FENCED_INSTANCE
    assert [each.subscription.classic for each in group.membership.members.values()] == [None, None]
    assert Client(talk, "c", instance="i").beat() == UNRELEASED  # both are of the consumer protocol
    back = Classic(talk, "", instance="i")
    assert (back.beat(), back.owned) == (OK, had)
    assert talk.beat("b", upgraded.epoch, instance="i")["error_code"] == FENCED_INSTANCE


@pytest.mark.parametrize("is_eager", [True, False])
def test_a_restart_begins_no_epoch(is_eager: bool) -> None:
    """Nor does it take anything from a member of the classic protocol that asks for its assignment again."""
    talk = Talk(t=4, u=2)
    a, b = Client(talk, "a", (), options={"regex": "[tu]", "assignor": "range"}), Classic(talk, "", is_eager=is_eager)
    settle(a)
    settle(a, b)
    epochs, owned = (a.epoch, b.epoch), b.owned
    talk.restart()
    group = talk.group
    answer = group.sync_classic(b.member_id, None, b.epoch, (None, None), talk.names, talk.now)
    assert {name: len(some) for name, some in decode_assignment(answer["assignment"]).items()} == {"t": len(owned)}
    assert group.subscribed_topics() == {"t", "u"}
    assert preferred_assignor(group.membership) == "range"
    settle(a, b)
    assert ((a.epoch, b.epoch), group.membership.epoch) == (epochs, epochs[0])
    # of a log that names no topics, as those of Kafka 4.1 and later ones
    group.membership.topics.clear()
    answer = group.sync_classic(b.member_id, None, b.epoch, (None, None), talk.names, talk.now)
    assert {name: len(some) for name, some in decode_assignment(answer["assignment"]).items()} == {"t": len(owned)}


def test_ids_of_the_classic_protocol() -> None:
    talk = Talk(t=1)
    Client(talk, "a").beat()
    join = Join("", None, "c", "/1.2.3.4", 9000, 9000, "consumer", (("range", b""),), True, True)

    def joined(join: Join) -> dict[str, Any]:
        return talk.group.join_classic(join, frozenset(), frozenset({"t"}), talk.topics, talk.matching, talk.now)

    asked = joined(join)
    assert asked["error_code"] == ErrorCode.MEMBER_ID_REQUIRED
    assert joined(join._replace(member_id="x"))["error_code"] == UNKNOWN
    assert joined(join._replace(member_id=asked["member_id"]))["error_code"] == OK
    assert talk.group.leave_classic(asked["member_id"], None, talk.now) == OK
    late = joined(join)["member_id"]
    talk.sleep(10)
    assert joined(join._replace(member_id=late))["error_code"] == UNKNOWN
    static = joined(join._replace(instance_id="i"))["member_id"]
    again = joined(join._replace(instance_id="i"))["member_id"]
    assert again != static
    assert talk.group.heartbeat_classic(static, "i", 1, talk.now) == FENCED_INSTANCE
    assert talk.group.leave_classic("", "i", talk.now) == OK


def test_subscriptions_topics_and_patterns_that_change() -> None:
    talk = Talk(t=2, u=2)
    a = Client(talk, "a")
    b = Client(talk, "b", topics=(), options={"regex": "[u-z].*"})
    settle(a, b)
    assert {topic_id.int for topic_id, _ in b.owned} == {ord("u")}
    assert talk.group.subscribed_topics() == {"t", "u"}
    talk.topics = topics_of(t=2, u=3, v=1)
    settle(a, b)
    assert (len(a.owned), len(b.owned)) == (2, 4)
    talk.topics = topics_of(t=5)
    settle(a, b)
    assert (len(a.owned), len(b.owned)) == (5, 0)
    talk.beat("b", b.epoch, "t", owned=b.owned, regex="")
    settle(a, b)
    assert sorted([len(a.owned), len(b.owned)]) == [2, 3]


def test_the_assignor_that_most_prefer() -> None:
    talk = Talk(t=4, u=4)
    a = Client(talk, "a", ("t", "u"), options={"assignor": "range"})
    b = Client(talk, "b", ("t", "u"), options={"assignor": "range"})
    settle(a, b)
    assert preferred_assignor(talk.group.membership) == "range"
    assert (a.numbers, b.numbers) == ([0, 0, 1, 1], [2, 2, 3, 3])


def test_a_full_group_takes_no_more() -> None:
    talk = Talk(1, t=1)
    a, b = Client(talk, "a"), Client(talk, "b")
    assert (a.beat(), b.beat()) == (OK, ErrorCode.GROUP_MAX_SIZE_REACHED)


def test_what_can_not_be_written_has_not_happened() -> None:
    talk = Talk(t=2)
    a, b = Client(talk, "a"), Client(talk, "b")
    settle(a)
    before = talk.group.membership
    talk.store_code = GONE
    assert b.beat() == GONE
    assert (a.leave(), talk.group.membership) == (GONE, before)
    assert talk.beat("a", 1)["error_code"] == OK  # nothing to write
    talk.sleep(SESSION + 3)
    assert talk.group.membership == before
    talk.store_code = OK
    talk.sleep(2)
    assert talk.group.state == "Empty"


@pytest.mark.parametrize("reverse", [False, True])
def test_a_restart_finds_what_was_written(reverse: bool) -> None:
    talk = Talk(t=4)
    a, b = Client(talk, "a", instance="i"), Client(talk, "b", options={"regex": "t"}, topics=())
    settle(a)
    b.beat()
    a.beat(says_owned=False)
    if reverse:  # compaction may put a member's subscription behind its partitions
        talk.log = dict(sorted(talk.log.items(), reverse=True))
    loaded, known = talk.loaded(), talk.group.membership
    assert (loaded.members, loaded.targets, loaded.holders) == (known.members, known.targets, known.holders)
    assert (loaded.epoch, loaded.assignment_epoch) == (known.epoch, known.assignment_epoch)
    talk.log.update(encode_removal("g", known))
    assert talk.loaded() == Membership()


def test_groups_are_loaded_and_removed() -> None:
    talk = Talk(t=4)
    settle(Client(talk, "a"))
    stored: list[Any] = []

    def store(group_id: str, encode: Any) -> ErrorCode:
        stored.extend(encode())
        return OK

    groups = ConsumerGroups(store, lambda group: False, lambda group: TIMES, 100)
    for data, value in talk.log.items():
        key = decode_consumer_key(int.from_bytes(data[:2], "big"), data)
        assert key is not None
        groups.load(key, value, 1234)
    (group,) = groups
    assert list(group.membership.members) == ["a"]
    assert groups.delete("g") == ErrorCode.NON_EMPTY_GROUP
    assert groups.empty_since("g", 5678) == 5678
    group.membership = Membership(epoch=3)
    assert groups.empty_since("g", 5678) == 1234  # when its last record was written, however often the broker restarts
    assert (groups.delete("g"), groups.get("g")) == (OK, None)
    assert {value for _, value in stored} == {None}


def _beat(member_id: str, regex: str) -> Heartbeat:
    return Heartbeat(member_id, 0, None, None, "c", "/1.2.3.4", 9000, None, regex, None, frozenset())


def test_patterns_that_no_group_uses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of members are kept, however many; and the one of a member that waits meanwhile."""
    monkeypatch.setattr("spark_klog.broker.groups.consumer_groups._FEW_PATTERNS", 10)

    async def run() -> None:
        groups = ConsumerGroups(lambda group_id, encode: OK, lambda group: False, lambda group: TIMES, 1000)
        turns, topics = Turns(), topics_of(a=1, b=1)

        async def join(number: int) -> dict[str, Any]:
            regex = f"a|x{number}"
            await asyncio.sleep(0)
            seen = await groups.resolved("g", regex, lambda: topics, turns)
            return groups.heartbeat("g", _beat(str(number), regex), seen, lambda name: True)

        for number in range(100):
            await groups.resolved(f"other-{number}", f"b|y{number}", lambda: topics, turns)  # and never joins
        answers = await asyncio.gather(*map(join, range(50)))
        assert {answer["error_code"] for answer in answers} == {OK}
        (group,) = groups
        assert len(group.membership.members) == 50
        assert {"a|x0", "a|x49"} <= groups._matches.keys()
        assert len(groups._matches) <= 100
        assert not groups._resolving
        assert group.membership.topics.keys() == {"a"}
        groups.stop()

    asyncio.run(run())


def test_another_members_pattern_that_can_not_be_read_matches_nothing() -> None:
    async def run() -> None:
        groups = ConsumerGroups(lambda group_id, encode: OK, lambda group: False, lambda group: TIMES, 1000)
        topics = topics_of(a=1)
        seen = await groups.resolved("g", "a", lambda: topics, Turns())
        groups.heartbeat("g", _beat("m", "a"), seen, lambda name: True)
        (group,) = groups
        member = group.membership.members["m"]
        foreign = replace(member, member_id="n", subscription=replace(member.subscription, regex=r"\b"))
        group.membership.put(replace(foreign, assigned=frozenset()))
        seen = await groups.resolved("g", None, lambda: topics, Turns())
        answer = groups.heartbeat("g", _beat("m", "a")._replace(epoch=1), seen, lambda name: True)
        assert answer["error_code"] == OK
        with pytest.raises(ConfigError, match="is not supported"):
            await groups.resolved("g", r"\b", lambda: topics, Turns())
        groups.stop()

    asyncio.run(run())


def test_a_heartbeat_sees_the_newest_topics() -> None:
    """Also if they change while it resolves a pattern: it would take back what another one has assigned."""

    async def run() -> None:
        groups = ConsumerGroups(lambda group_id, encode: OK, lambda group: False, lambda group: TIMES, 1000)
        views = [topics_of(a=1), topics_of(a=1, b=1)]
        calls = iter([views[0]])
        seen = await groups.resolved("g", "[ab]", lambda: next(calls, views[1]), Turns())
        assert seen is views[1]
        groups.heartbeat("g", _beat("m", "[ab]"), seen, lambda name: True)
        (group,) = groups
        assert group.membership.topics.keys() == {"a", "b"}
        groups.stop()

    asyncio.run(run())


# ----- members that act at random


class Members(RuleBasedStateMachine):
    """Members join, leave, fall silent, lose answers; topics grow; writes fail; time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = Talk(t=3, u=2)
        self.clients: list[Client] = []
        self.last_epoch = 0
        self._ids = map(str, itertools.count())

    @rule(
        topics=st.sampled_from([("t",), ("u",), ("t", "u"), ()]),
        instance=st.sampled_from([None, None, "i0", "i1"]),
        assignor=st.sampled_from([None, "range", "uniform"]),
    )
    def comes(self, topics: tuple[str, ...], instance: str | None, assignor: str | None) -> None:
        if len(self.clients) < 6:
            # a static member that comes again has the pattern of before, unless it takes it back (as in Kafka)
            options = {"assignor": assignor, "regex": "" if topics else "[tu]"}
            client = Client(self.talk, next(self._ids), topics, instance, options)
            code = client.beat()
            others = [other for other in self.clients if instance is not None and other.instance == instance]
            is_there = any(not isinstance(other, Classic) for other in others)
            assert code in ((UNRELEASED, OK) if is_there else (OK,))
            if code == OK:
                for other in others:
                    self.clients.remove(other)  # it is fenced, or has left
                self.clients.append(client)

    @rule(
        topics=st.sampled_from([("t",), ("u",), ("t", "u")]),
        instance=st.sampled_from([None, None, "i0", "i2"]),
        is_eager=st.booleans(),
    )
    def one_of_the_classic_protocol_comes(self, topics: tuple[str, ...], instance: str | None, is_eager: bool) -> None:
        if len(self.clients) < 6:
            client = Classic(self.talk, "", topics, instance, is_eager=is_eager)
            for other in [each for each in self.clients if instance and each.instance == instance]:
                self.clients.remove(other)  # it is fenced
            assert client.beat() == OK
            self.clients.append(client)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), says_owned=st.booleans())
    def beats(self, data: st.DataObject, says_owned: bool) -> None:
        client = data.draw(st.sampled_from(self.clients))
        code = client.beat(says_owned=says_owned)
        assert code in (OK, UNKNOWN)
        if code:
            assert client.member_id not in self.talk.group.membership.members
            self.clients.remove(client)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def loses_an_answer(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.clients))
        epoch, owned = client.epoch, client.owned
        code = client.beat()
        if code == OK and not isinstance(client, Classic):
            kept = owned & client.owned  # what it was to give up, it may have
            client.epoch, client.owned = epoch, owned
            again = client.beat()
            if again == FENCED:
                assert client.epoch < self.talk.group.membership.members[client.member_id].epoch
                client.epoch, client.owned = 0, frozenset()
                assert client.beat() == OK
            assert again in (OK, FENCED)
            assert kept <= owned

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), for_a_while=st.booleans())
    def leaves(self, data: st.DataObject, for_a_while: bool) -> None:
        client = data.draw(st.sampled_from(self.clients))
        self.clients.remove(client)
        for_a_while &= client.instance is not None and not isinstance(client, Classic)
        code = client.leave(-2 if for_a_while else -1)
        assert code in (OK, UNKNOWN, FENCED_INSTANCE)
        if for_a_while and code == OK:  # it reads nothing: it keeps what will be its own again, and no more
            membership = self.talk.group.membership
            assert membership.members[client.member_id].held <= membership.targets[client.member_id]

    @rule(count=st.integers(0, 5))
    def a_topic_changes(self, count: int) -> None:
        self.talk.topics = topics_of(t=3, u=count) if count else topics_of(t=3)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def a_write_fails(self, data: st.DataObject) -> None:
        before = self.talk.group.membership
        client = data.draw(st.sampled_from(self.clients))
        epoch, owned = client.epoch, client.owned
        self.talk.store_code = GONE
        assert client.beat() in (OK, GONE, UNKNOWN)
        self.talk.store_code = OK
        assert self.talk.group.membership.members == before.members
        if client.epoch == epoch:
            client.owned = owned & client.owned

    @rule(seconds=st.sampled_from([0.5, 5, REBALANCE, SESSION]))
    def time_passes(self, seconds: float) -> None:
        self.talk.sleep(seconds)

    @rule()
    def the_coordinator_restarts(self) -> None:
        """Between any two steps: members see no difference, and the next heartbeat changes no more than it would."""
        before = self.talk.group
        self.talk.restart()
        after = self.talk.group
        assert after.membership == before.membership
        assert (after.state, after.subscribed_topics()) == (before.state, before.subscribed_topics())
        assert preferred_assignor(after.membership) == preferred_assignor(before.membership)
        assert self._commits(after, 0) == self._commits(before, 0)
        # since when a member has a partition is not in the log: commits in an earlier epoch are tried again
        for now, then in zip(self._commits(after, -1), self._commits(before, -1), strict=True):
            assert now in (then, STALE)

    def _commits(self, group: ConsumerGroup, since: int) -> list[ErrorCode]:
        """Whether members may commit what they own, in so many epochs after theirs."""
        return [
            group.may_commit(each.member_id, each.epoch + since, lambda owned=each.owned: owned)  # type: ignore[misc]
            for each in self.clients
        ]

    @invariant()
    def no_partition_has_two_owners(self) -> None:
        members = self.talk.group.membership.members
        owned = [
            partition
            for client in self.clients
            if client.member_id in members and client.epoch in (members[client.member_id].epoch,)
            for partition in client.owned
        ]
        assert len(owned) == len(set(owned))
        held = [partition for member in members.values() for partition in member.held]
        assert len(held) == len(set(held))
        assert dict.fromkeys(held) == dict.fromkeys(self.talk.group.membership.holders, None)

    @invariant()
    def epochs_grow(self) -> None:
        membership = self.talk.group.membership
        assert membership.epoch >= self.last_epoch
        self.last_epoch = membership.epoch
        assert all(member.epoch <= membership.assignment_epoch for member in membership.members.values())

    @invariant()
    def the_log_has_it_all(self) -> None:
        loaded, known = self.talk.loaded(), self.talk.group.membership
        assert loaded == known == self.talk.group.stored

    @invariant()
    def nobody_is_forgotten(self) -> None:
        assert (self.talk.group.wake_at < inf) == bool(self.talk.group.membership.members)

    def teardown(self) -> None:
        """Who is left shares all partitions, as equally as can be."""
        gone = [each for each in self.clients if each.member_id not in self.talk.group.membership.members]
        left = [each for each in self.clients if each not in gone]
        for _ in range(int(SESSION / 9) + 1):  # static members that have left are given up
            self.talk.sleep(9)
            for client in left:
                code = client.beat()
                if code in (FENCED, UNKNOWN):  # it has given up nothing for too long
                    client.epoch, client.owned = 0, frozenset()
                    if isinstance(client, Classic):
                        client.must_join = True
                    code = client.beat()
                assert code == OK
        if left:
            if self.talk.group.classic_protocol is not None:  # such a group is one of the classic protocol
                left.append(Client(self.talk, "last"))
            settle(*left)
            assert self.talk.group.state == "Stable"
            topics = self.talk.topics
            wanted = {name for client in left for name in (client.topics or ("t", "u"))} & topics.keys()
            there = {(topics[name].topic_id, number) for name in wanted for number in topics[name].assignment}
            assert {partition for client in left for partition in client.owned} == there


TestMembers = Members.TestCase
TestMembers.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
