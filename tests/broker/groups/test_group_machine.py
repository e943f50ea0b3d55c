"""The state machine of a group, on its own clock: tables of its answers, and members that act at random."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import inf
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spark_klog.broker.groups.group import Group, Join, Reply, State
from spark_klog.errors import ErrorCode

SESSION, REBALANCE = 10.0, 30.0
RANGE, STICKY = ("range", b"r"), ("sticky", b"s")
OK = ErrorCode.NONE
STRANGER = ErrorCode.UNKNOWN_MEMBER_ID
STALE = ErrorCode.ILLEGAL_GENERATION
REBALANCES = ErrorCode.REBALANCE_IN_PROGRESS
INCONSISTENT = ErrorCode.INCONSISTENT_GROUP_PROTOCOL
NEEDS_ID = ErrorCode.MEMBER_ID_REQUIRED
FENCED = ErrorCode.FENCED_INSTANCE_ID
GONE = ErrorCode.COORDINATOR_NOT_AVAILABLE
WAITS = None


class Talk:
    """A group, its clock and its answers by token; it answers nothing twice."""

    def __init__(self, delay: float = 0, max_size: int = 1000) -> None:
        self.group = Group("g", self._store, int(delay * 1000), max_size)
        self.now = 100.0
        self.answers: dict[int, dict[str, Any]] = {}
        self.waiting: set[int] = set()
        self.store_code = OK
        #: (generation, members) whenever the group was written.
        self.stored: list[tuple[int, tuple[str, ...]]] = []
        self._tokens = itertools.count()

    def _store(self, group: Group) -> ErrorCode:
        if not self.store_code:
            self.stored.append((group.generation, tuple(group.members)))
        return self.store_code

    def take(self, replies: list[Reply]) -> None:
        for token, message in replies:
            assert isinstance(token, int)
            assert token in self.waiting, "answered twice"
            self.waiting.remove(token)
            self.answers[token] = message

    def token(self) -> int:
        token = next(self._tokens)
        self.waiting.add(token)
        return token

    def code(self, token: int) -> ErrorCode | None:
        return self.answers[token]["error_code"] if token in self.answers else WAITS

    def join(
        self,
        member_id: str = "",
        *protocols: tuple[str, bytes],
        instance: str | None = None,
        kind: str = "consumer",
        requires_id: bool = False,
        can_skip: bool = True,
    ) -> int:
        token = self.token()
        times = int(SESSION * 1000), int(REBALANCE * 1000)
        names = ("client", "/1.2.3.4")
        join = Join(member_id, instance, *names, *times, kind, protocols or (RANGE,), requires_id, can_skip)
        self.take(self.group.join(join, token, self.now))
        return token

    def sync(
        self,
        member_id: str,
        generation: int | None = None,
        assignments: dict[str, bytes] | None = None,
        instance: str | None = None,
        protocol: tuple[str | None, str | None] = (None, None),
    ) -> int:
        token = self.token()
        of = self.group.generation if generation is None else generation
        self.take(self.group.sync(member_id, instance, of, protocol, assignments or {}, token, self.now))
        return token

    def beat(self, member_id: str, generation: int | None = None, instance: str | None = None) -> ErrorCode:
        of = self.group.generation if generation is None else generation
        return self.group.heartbeat(member_id, instance, of, self.now)

    def leave(self, member_id: str, instance: str | None = None) -> ErrorCode:
        code, replies = self.group.leave(member_id, instance, self.now)
        self.take(replies)
        return code

    def commit(self, member_id: str, generation: int | None = None, instance: str | None = None) -> ErrorCode:
        of = self.group.generation if generation is None else generation
        return self.group.may_commit(member_id, instance, of, self.now)

    def sleep(self, seconds: float) -> None:
        """Advance the clock; call `tick` whenever it is due."""
        until = self.now + seconds
        while self.group.wake_at <= until:
            before = self.group.wake_at
            self.now = max(self.now, before)
            self.take(self.group.tick(self.now))
            assert self.group.wake_at > before, "a tick that changes nothing"
        self.now = until

    def sleep_beating(self, seconds: float, *members: str) -> None:
        for _ in range(int(seconds)):
            for member_id in members:
                self.beat(member_id)
            self.sleep(1)

    def stable(self, *instances: str | None) -> list[str]:
        """Let members join until the group is stable; return their ids, the leader's first."""
        tokens = []
        for instance in instances:
            tokens.append(self.join(instance=instance))
            for token in tokens[:-1]:
                member_id = self.answers[token]["member_id"]
                tokens[tokens.index(token)] = self.join(
                    member_id, instance=self.group.members[member_id].request.instance_id
                )
        ids = [self.answers[token]["member_id"] for token in tokens]
        for member_id in reversed(ids):
            given = {each: each.encode() for each in ids} if member_id == self.group.leader else {}
            self.sync(member_id, assignments=given)
        assert (self.group.state, self.group.leader) == (State.STABLE, ids[0])
        return ids


def _in(state: State) -> tuple[Talk, str, str]:
    """A group in that state, with its leader a and member b. PREPARING: a has joined again, b has not."""
    talk = Talk()
    a, b = talk.stable(None, None)
    if state is State.PREPARING:
        talk.join(a)
    elif state is State.COMPLETING:
        talk.join(a)
        talk.join(b)
    elif state in (State.EMPTY, State.DEAD):
        talk.leave(a)
        talk.leave(b)
        if state is State.DEAD:
            talk.group.kill()
    assert talk.group.state is state
    return talk, a, b


STATES = list(State)
#: Event, then for each state in order: the error code (or WAITS), with the next state if it changes.
TABLE: list[tuple[str, list[Any]]] = [
    ("b beats", [STRANGER, REBALANCES, OK, OK, GONE]),
    ("b beats, stale", [STRANGER, STALE, STALE, STALE, GONE]),
    ("a stranger beats", [STRANGER, STRANGER, STRANGER, STRANGER, GONE]),
    ("b syncs", [STRANGER, REBALANCES, WAITS, OK, GONE]),
    ("a syncs", [STRANGER, REBALANCES, (OK, State.STABLE), OK, GONE]),
    ("b syncs, stale", [STRANGER, STALE, STALE, STALE, GONE]),
    ("b syncs, another protocol", [STRANGER, INCONSISTENT, INCONSISTENT, INCONSISTENT, GONE]),
    ("b commits", [STRANGER, OK, REBALANCES, OK, GONE]),
    ("b commits, stale", [STRANGER, STALE, STALE, STALE, GONE]),
    ("b commits without generation", [OK, STALE, STALE, STALE, GONE]),
    ("nobody commits", [OK, STRANGER, STRANGER, STRANGER, GONE]),
    ("b leaves", [STRANGER, (OK, State.COMPLETING), (OK, State.PREPARING), (OK, State.PREPARING), GONE]),
    ("a leaves", [STRANGER, OK, (OK, State.PREPARING), (OK, State.PREPARING), GONE]),
    ("c joins", [(OK, State.COMPLETING), WAITS, (WAITS, State.PREPARING), (WAITS, State.PREPARING), GONE]),
    ("c asks for an id", [NEEDS_ID, NEEDS_ID, NEEDS_ID, NEEDS_ID, GONE]),
    ("c joins, another protocol", [(OK, State.COMPLETING), INCONSISTENT, INCONSISTENT, INCONSISTENT, GONE]),
    ("c joins, another type", [(OK, State.COMPLETING), INCONSISTENT, INCONSISTENT, INCONSISTENT, GONE]),
    ("c joins, no protocol", [INCONSISTENT, INCONSISTENT, INCONSISTENT, INCONSISTENT, GONE]),
    ("b joins again", [STRANGER, (OK, State.COMPLETING), OK, OK, GONE]),
    ("b joins, changed", [STRANGER, (OK, State.COMPLETING), (WAITS, State.PREPARING), (WAITS, State.PREPARING), GONE]),
    ("a joins again", [STRANGER, WAITS, OK, (WAITS, State.PREPARING), GONE]),
    ("the sessions end", [OK, (OK, State.COMPLETING), (OK, State.EMPTY), (OK, State.EMPTY), OK]),
]


def _happen(talk: Talk, event: str, a: str, b: str) -> ErrorCode | None:
    old = talk.group.generation - 1
    events: dict[str, Any] = {
        "b beats": lambda: talk.beat(b),
        "b beats, stale": lambda: talk.beat(b, old),
        "a stranger beats": lambda: talk.beat("x"),
        "b syncs": lambda: talk.sync(b),
        "a syncs": lambda: talk.sync(a),
        "b syncs, stale": lambda: talk.sync(b, old),
        "b syncs, another protocol": lambda: talk.sync(b, protocol=("consumer", "sticky")),
        "b commits": lambda: talk.commit(b),
        "b commits, stale": lambda: talk.commit(b, old),
        "b commits without generation": lambda: talk.commit(b, -1),
        "nobody commits": lambda: talk.commit("", -1),
        "b leaves": lambda: talk.leave(b),
        "a leaves": lambda: talk.leave(a),
        "c joins": lambda: talk.join(),
        "c asks for an id": lambda: talk.join(requires_id=True),
        "c joins, another protocol": lambda: talk.join("", STICKY),
        "c joins, another type": lambda: talk.join(kind="connect"),
        "c joins, no protocol": lambda: talk.join(kind=""),
        "b joins again": lambda: talk.join(b),
        "b joins, changed": lambda: talk.join(b, ("range", b"other")),
        "a joins again": lambda: talk.join(a),
        "the sessions end": lambda: talk.sleep(SESSION + 0.1),
    }
    done = events[event]()
    return talk.code(done) if type(done) is int else done or OK


@pytest.mark.parametrize(
    ("event", "state", "expected"),
    [
        pytest.param(event, state, expected, id=f"{event}-{state.value}")
        for event, row in TABLE
        for state, expected in zip(STATES, row, strict=True)
    ],
)
def test_what_is_answered_in_each_state(event: str, state: State, expected: Any) -> None:
    talk, a, b = _in(state)
    code, following = expected if isinstance(expected, tuple) else (expected, state)
    before = talk.group.generation
    assert (_happen(talk, event, a, b), talk.group.state) == (code, following)
    assert talk.group.generation >= before
    assert all(other in talk.group.members for other in (a, b)) or event in (
        *("b leaves", "a leaves", "the sessions end"),
        *([event] if state in (State.EMPTY, State.DEAD) else []),
    )
    talk.sleep(2 * REBALANCE + SESSION)
    assert not talk.waiting


@pytest.mark.parametrize("state", [State.PREPARING, State.COMPLETING, State.STABLE])
def test_another_leads_when_the_leader_dies(state: State) -> None:
    talk = Talk()
    a, b, c = talk.stable(None, None, None)
    token = None
    if state is not State.STABLE:
        token = talk.join(c, ("range", b"changed"))
        if state is State.COMPLETING:
            talk.join(b)
            talk.join(a)
            assert talk.group.leader == a
    assert talk.group.state is state
    begin = talk.group.generation
    talk.sleep_beating(SESSION + 1, b, c)
    assert a not in talk.group.members
    assert talk.group.state is State.PREPARING
    last = talk.join(c) if token is None or talk.code(token) == OK else token
    joined = [talk.join(b), last]
    answers = [talk.answers[each] for each in joined]
    assert {answer["leader"] for answer in answers} == {talk.group.leader} <= {b, c}
    assert {answer["generation_id"] for answer in answers} == {begin + 1}
    (leader,) = (answer for answer in answers if answer["members"])
    assert leader["member_id"] == talk.group.leader
    assert {member["member_id"] for member in leader["members"]} == {b, c}


@pytest.mark.parametrize("state", list(State))
def test_commits_within_a_transaction(state: State) -> None:
    """The same rules as outside, except in COMPLETING: a producer could not go on after REBALANCE_IN_PROGRESS."""
    talk, a, _ = _in(state)
    may_commit, generation = talk.group.may_commit, talk.group.generation
    codes = [may_commit(a, None, generation, talk.now, in_transaction=inside) for inside in (False, True)]
    if state is State.COMPLETING:
        assert codes == [ErrorCode.REBALANCE_IN_PROGRESS, OK]
    else:
        assert codes[0] == codes[1]
    assert may_commit(a, None, generation - 1, talk.now, in_transaction=True) != OK


def test_who_does_not_join_within_the_rebalance_timeout_is_left_out() -> None:
    talk = Talk()
    a, b = talk.stable(None, None)
    token = talk.join(a)
    talk.sleep_beating(REBALANCE + 1, b)
    assert talk.answers[token]["error_code"] == OK
    assert list(talk.group.members) == [a]
    assert talk.beat(b) == STRANGER


@pytest.mark.parametrize("leader_syncs", [False, True])
def test_who_does_not_sync_within_the_rebalance_timeout_is_left_out(leader_syncs: bool) -> None:
    """Heartbeats do not help (Kafka: pending sync, KAFKA-13435)."""
    talk = Talk()
    a, b = talk.stable(None, None)
    talk.join(a)
    talk.join(b)
    silent = b if leader_syncs else a
    waits = talk.sync(a if leader_syncs else b)
    assert talk.group.state is (State.STABLE if leader_syncs else State.COMPLETING)
    talk.sleep_beating(REBALANCE - 1, a, b)
    assert set(talk.group.members) == {a, b}
    talk.sleep_beating(2, a, b)
    assert set(talk.group.members) == {a, b} - {silent}
    assert talk.group.state is State.PREPARING
    assert talk.code(waits) == (OK if leader_syncs else REBALANCES)


def test_a_member_that_was_told_its_id_is_waited_for() -> None:
    talk = Talk()
    (a,) = talk.stable(None)
    asked = talk.join(requires_id=True)
    (member_id,) = (talk.answers[asked]["member_id"],)
    again = talk.join(a)
    assert talk.code(again) is WAITS
    joined = talk.join(member_id, requires_id=True)
    assert (talk.code(again), talk.code(joined)) == (OK, OK)
    # but no longer than its session
    talk.sync(a)
    asked = talk.join(requires_id=True)
    again = talk.join(a)
    talk.join(member_id)
    assert talk.code(again) is WAITS
    talk.sleep_beating(SESSION + 1)
    assert talk.code(again) == OK
    late = talk.join(talk.answers[asked]["member_id"], requires_id=True)
    assert talk.code(late) == STRANGER


def test_who_was_told_its_id_may_leave() -> None:
    talk = Talk()
    (a,) = talk.stable(None)
    asked = talk.join(requires_id=True)
    again = talk.join(a)
    assert talk.leave(talk.answers[asked]["member_id"]) == OK
    assert talk.code(again) == OK


def test_the_first_rebalance_waits_for_more_members() -> None:
    talk = Talk(delay=3)
    first = talk.join()
    talk.sleep(2)
    second = talk.join()
    talk.sleep(2.9)
    assert (talk.code(first), talk.code(second)) == (WAITS, WAITS)
    talk.sleep(0.2)
    assert (talk.code(first), talk.code(second)) == (OK, OK)
    assert {talk.answers[token]["generation_id"] for token in (first, second)} == {1}


def test_the_first_rebalance_waits_no_longer_than_a_rebalance() -> None:
    talk = Talk(delay=3)
    first = talk.join()
    for _ in range(int(REBALANCE)):
        assert talk.code(first) is WAITS
        talk.sleep(1)
        talk.join()
    talk.sleep(0.1)
    assert talk.code(first) == OK


def test_a_full_group_takes_no_more() -> None:
    talk = Talk(max_size=2)
    a, b = talk.stable(None, None)
    assert talk.code(talk.join()) == ErrorCode.GROUP_MAX_SIZE_REACHED
    assert talk.group.state is State.STABLE
    assert talk.code(talk.join(b)) == OK
    talk.leave(a)
    joined = talk.join()
    talk.join(b)
    assert talk.code(joined) == OK


def test_the_protocol_that_most_prefer_and_all_have() -> None:
    talk = Talk(delay=1)
    third = ("third", b"t")
    tokens = [talk.join("", third, RANGE, STICKY), talk.join("", STICKY, RANGE), talk.join("", STICKY, RANGE, third)]
    talk.sleep(2)
    assert {talk.answers[token]["protocol_name"] for token in tokens} == {"sticky"}
    (members,) = (answer["members"] for answer in talk.answers.values() if answer["members"])
    assert [member["metadata"] for member in members] == [b"s"] * 3


def test_a_lone_member_keeps_to_its_protocols() -> None:
    """As in Kafka its own earlier protocols count, too; after it has left it may join with any."""
    talk = Talk()
    (a,) = talk.stable(None)
    assert talk.code(talk.join(a, STICKY)) == INCONSISTENT
    assert talk.code(talk.join(a, kind="connect")) == INCONSISTENT
    talk.leave(a)
    joined = talk.join("", STICKY, kind="connect")
    assert talk.answers[joined]["protocol_type"] == "connect"


def test_an_assignment_that_can_not_be_written_is_not_told() -> None:
    talk = Talk()
    a, b = talk.stable(None, None)
    talk.join(a)
    talk.join(b)
    waits = talk.sync(b)
    talk.store_code = ErrorCode.NOT_COORDINATOR
    led = talk.sync(a, assignments={a: b"1", b: b"2"})
    assert [talk.answers[token] for token in (waits, led)] == [
        {"error_code": ErrorCode.NOT_COORDINATOR, "assignment": b""}
    ] * 2
    assert talk.group.state is State.PREPARING
    assert {member.assignment for member in talk.group.members.values()} == {b""}


def test_what_is_written() -> None:
    """The group is written when it becomes stable, and when it becomes empty."""
    talk = Talk()
    a, b = talk.stable(None, None)
    assert talk.stored[-1] == (talk.group.generation, (a, b))
    before = len(talk.stored)
    talk.leave(b)
    talk.join(a)
    assert len(talk.stored) == before
    talk.leave(a)
    assert talk.stored[before:] == [(talk.group.generation, ())]


# ----- static members


@pytest.mark.parametrize("can_skip", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_a_static_member_that_comes_back_keeps_its_assignment(number: int, can_skip: bool) -> None:
    talk = Talk()
    old = talk.stable("i0", "i1")
    generation, leader = talk.group.generation, talk.group.leader
    token = talk.join(instance=f"i{number}", can_skip=can_skip)
    answer = talk.answers[token]
    new = answer["member_id"]
    assert (answer["error_code"], answer["generation_id"], talk.group.state) == (OK, generation, State.STABLE)
    assert new not in old
    assert set(talk.stored[-1][1]) == {new, old[1 - number]}
    was_leader = number == 0
    assert talk.group.leader == (new if was_leader else leader)
    if can_skip:
        assert (answer["leader"], answer["skip_assignment"]) == (talk.group.leader, was_leader)
        assert bool(answer["members"]) == was_leader
    else:
        assert (answer["leader"], answer["members"]) == (leader, [])
    assert talk.answers[talk.sync(new, instance=f"i{number}")]["assignment"] == old[number].encode()
    # the old member with that instance id is fenced
    assert talk.beat(old[number], instance=f"i{number}") == FENCED
    assert talk.commit(old[number], instance=f"i{number}") == FENCED
    assert talk.code(talk.sync(old[number], instance=f"i{number}")) == FENCED
    assert talk.code(talk.join(old[number], instance=f"i{number}")) == FENCED
    assert talk.leave(old[number], f"i{number}") == FENCED
    assert talk.beat(new, instance=f"i{number}") == OK
    assert talk.beat(old[number]) == STRANGER


def test_a_static_member_is_replaced_after_that_was_written() -> None:
    """If the write fails (the disk is full) the old member stays: a restart would not know the new member id."""
    talk = Talk()
    old = talk.stable("i0", "i1")
    for number in (0, 1):
        talk.store_code = GONE
        leader, ends_at = talk.group.leader, talk.group.members[old[number]].deadline
        talk.now += 1
        token = talk.join("", ("range", b"changed"), instance=f"i{number}")
        assert (talk.answers[token]["error_code"], talk.answers[token]["member_id"]) == (GONE, "")
        member = talk.group.members[old[number]]
        assert talk.group.instances == {"i0": old[0], "i1": old[1]}
        assert (set(talk.group.members), talk.group.leader) == (set(old), leader)
        assert (member.member_id, member.request.protocols, member.deadline) == (old[number], (RANGE,), ends_at)
        assert talk.beat(old[number], instance=f"i{number}") == OK
        talk.store_code = OK
        assert talk.answers[talk.sync(old[number], instance=f"i{number}")]["assignment"] == old[number].encode()
    assert talk.code(talk.join(instance="i1")) == OK
    assert talk.beat(old[1], instance="i1") == FENCED


def test_a_static_member_that_comes_back_with_another_protocol_chosen_rebalances() -> None:
    talk = Talk()
    first = talk.join("", RANGE, STICKY, instance="i0")
    a = talk.answers[first]["member_id"]
    talk.sync(a)
    assert talk.group.protocol == "range"
    token = talk.join("", STICKY, RANGE, instance="i0")
    assert talk.answers[token]["protocol_name"] == "sticky"
    assert talk.answers[token]["generation_id"] == 2


def test_a_static_member_that_comes_back_while_the_leader_assigns_rebalances() -> None:
    """The leader may have got the old member id."""
    talk = Talk()
    a, b = talk.stable("i0", "i1")
    talk.join(a, instance="i0")
    talk.join(b, instance="i1")
    assert talk.group.state is State.COMPLETING
    waits = talk.sync(b, instance="i1")
    back = talk.join(instance="i1")
    assert talk.code(waits) == FENCED
    assert (talk.code(back), talk.group.state) == (WAITS, State.PREPARING)
    talk.join(a, instance="i0")
    assert talk.code(back) == OK


def test_a_join_that_waits_is_fenced_by_another_of_its_instance() -> None:
    talk = Talk()
    a, b = talk.stable("i0", None)
    waits = talk.join(a, instance="i0")
    again = talk.join(instance="i0")
    assert (talk.code(waits), talk.code(again)) == (FENCED, WAITS)
    talk.join(b)
    assert talk.code(again) == OK


def test_static_members_leave_by_their_instance_ids() -> None:
    talk = Talk()
    a, b = talk.stable("i0", "i1")
    assert talk.leave("", "i1") == OK
    assert list(talk.group.members) == [a]
    assert talk.leave("", "i1") == STRANGER
    assert talk.beat(b, instance="i1") == STRANGER
    assert talk.leave(a, "i0") == OK
    assert talk.group.state is State.EMPTY


def test_static_members_that_are_away_have_their_sessions() -> None:
    """No generation begins until somebody joins; until then they stay in the old one."""
    talk = Talk()
    a, b, c = talk.stable("i0", "i1", None)
    begin = talk.group.generation
    talk.leave(c)
    talk.sleep_beating(REBALANCE + 3, a, b)
    assert (talk.group.generation, talk.group.state) == (begin, State.PREPARING)
    assert talk.beat(a, instance="i0") == REBALANCES
    joined = talk.join(a, instance="i0")
    talk.sleep_beating(REBALANCE + 1, b)
    # the other member still belongs to the group, and may join
    assert talk.answers[joined]["generation_id"] == begin + 1
    assert [member["group_instance_id"] for member in talk.answers[joined]["members"]] == ["i0", "i1"]
    talk.sleep(SESSION + 1)
    assert "i1" not in talk.group.instances


def test_who_waits_for_static_members_without_a_rebalance_timeout_does_not_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    talk = Talk()
    with monkeypatch.context() as patch:
        patch.setattr(f"{__name__}.REBALANCE", 0)
        (a,) = talk.stable("i0")
        talk.take(talk.group.lost(talk.join(), talk.now))
    talk.sleep(SESSION / 2)
    assert (talk.group.state, list(talk.group.members)) == (State.PREPARING, [a])
    talk.sleep(SESSION)
    assert talk.group.state is State.EMPTY


# ----- connections that end


def test_who_was_not_told_its_id_goes_with_its_connection() -> None:
    """Before JoinGroup 4 each attempt that is given up would leave a member behind that no client is."""
    talk = Talk()
    (a,) = talk.stable(None)
    waits = talk.join()
    assert len(talk.group.members) == 2
    talk.waiting.discard(waits)
    talk.take(talk.group.lost(waits, talk.now))
    assert list(talk.group.members) == [a]
    again = talk.join(a)
    assert talk.code(again) == OK


@pytest.mark.parametrize("instance", [None, "i1"])
def test_who_knows_its_id_may_come_back(instance: str | None) -> None:
    talk = Talk()
    a, b = talk.stable(None, instance)
    waits = talk.join(b, ("range", b"changed"), instance=instance)
    talk.take(talk.group.lost(waits, talk.now))
    again = talk.join(b, ("range", b"changed"), instance=instance)
    talk.join(a)
    assert talk.code(again) == OK


def test_all_that_wait_are_released() -> None:
    talk = Talk()
    a, _b = talk.stable(None, None)
    tokens = [talk.join(a), talk.join()]
    talk.take(talk.group.release(GONE))
    assert [talk.code(token) for token in tokens] == [GONE, GONE]
    assert not talk.waiting


# ----- members that act at random


@dataclass
class Client:
    """A member's own view of itself; it sends one request at a time."""

    instance: str | None
    requires_id: bool
    member_id: str = ""
    generation: int = -1
    leads: bool = False
    members: tuple[str, ...] = ()
    request: tuple[str, int] | None = None
    assignment: bytes | None = None


class Members(RuleBasedStateMachine):
    """Members join, sync, leave, fall silent; time passes."""

    def __init__(self) -> None:
        super().__init__()
        #: Requests whose connections are gone: they may be answered, or not.
        self.gone: set[int] = set()
        self.talk = Talk(delay=2)
        self.clients: list[Client] = []
        self.leaders: dict[int, str] = {}
        #: By generation and member: what the leader has assigned.
        self.given: dict[tuple[int, str], bytes] = {}
        self.last_generation = 0
        self.fenced: list[Client] = []

    # ----- what clients do

    @rule(instance=st.sampled_from([None, None, "i0", "i1"]), requires_id=st.booleans())
    def comes(self, instance: str | None, requires_id: bool) -> None:
        if len(self.clients) < 6:
            for other in [each for each in self.clients if instance and each.instance == instance]:
                self.clients.remove(other)
                if other.member_id:
                    self.fenced.append(other)
            client = Client(instance, requires_id)
            self.clients.append(client)
            self._join(client, (RANGE,))

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), changed=st.booleans())
    def joins(self, data: st.DataObject, changed: bool) -> None:
        client = data.draw(st.sampled_from(self.clients))
        if client.request is None:
            self._join(client, (("range", b"changed"), STICKY) if changed else (RANGE,))

    def _join(self, client: Client, protocols: tuple[tuple[str, bytes], ...]) -> None:
        before = set(self.talk.answers)
        token = self.talk.join(client.member_id, *protocols, instance=client.instance, requires_id=client.requires_id)
        client.request = "join", token
        self._read(before)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def syncs(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.clients))
        if client.request is not None or client.generation < 0:
            return
        assignments = {}
        if client.leads and client.generation == self.talk.group.generation:
            assignments = {member: f"{client.generation} {member}".encode() for member in client.members}
            if self.talk.group.state is State.COMPLETING:
                self.given |= {(client.generation, member): value for member, value in assignments.items()}
        before = set(self.talk.answers)
        client.request = "sync", -1
        token = self.talk.sync(client.member_id, client.generation, assignments, client.instance)
        client.request = "sync", token
        self._read(before)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def beats(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.clients))
        if client.request is None and client.generation >= 0:
            stale = self.talk.commit(client.member_id, client.generation - 1, client.instance)
            code = self.talk.beat(client.member_id, client.generation, client.instance)
            assert stale == (STRANGER if code == STRANGER else STALE)
            if code in (OK, REBALANCES):
                assert client.generation == self.talk.group.generation
            elif code == STALE:
                assert client.generation != self.talk.group.generation
            else:
                assert code == STRANGER
                self._forget(client)

    @precondition(lambda self: self.fenced)
    @rule(data=st.data())
    def a_fenced_one_beats(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.fenced))
        codes = {
            self.talk.beat(client.member_id, client.generation, client.instance),
            self.talk.commit(client.member_id, client.generation, client.instance),
        }
        is_known = client.instance in self.talk.group.instances
        assert codes == {FENCED if is_known else STRANGER}

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.clients))
        before = set(self.talk.answers)
        if client.member_id:
            assert self.talk.leave(client.member_id, client.instance) in (OK, STRANGER)
            self.clients.remove(client)
            self._read(before)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def loses_its_connection(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.clients))
        if client.request is not None:
            before = set(self.talk.answers)
            _, token = client.request
            self.talk.take(self.talk.group.lost(token, self.talk.now))
            self.gone.add(token)
            client.request = None
            self.clients.remove(client)
            self._read(before)

    @rule(seconds=st.sampled_from([0.1, 1, 3, SESSION - 1, REBALANCE]))
    def time_passes(self, seconds: float) -> None:
        before = set(self.talk.answers)
        self.talk.sleep(seconds)
        self._read(before)

    # ----- their answers

    def _read(self, before: set[int]) -> None:
        fresh = {token: answer for token, answer in self.talk.answers.items() if token not in before}
        for client in self.clients:
            if client.request is not None and client.request[1] in fresh:
                kind, token = client.request
                client.request = None
                (self._joined if kind == "join" else self._synced)(client, fresh[token])

    def _joined(self, client: Client, answer: dict[str, Any]) -> None:
        code = answer["error_code"]
        if code == NEEDS_ID:
            client.member_id = answer["member_id"]
        elif code:
            assert code in (STRANGER, INCONSISTENT, FENCED)
            self._forget(client)
        else:
            generation = answer["generation_id"]
            if client.instance is None:  # a returning static member may get the leader's old id
                assert self._instance_of(self.leaders.setdefault(generation, answer["leader"])) == self._instance_of(
                    answer["leader"]
                )
            client.member_id, client.generation = answer["member_id"], generation
            client.leads = answer["leader"] == client.member_id and not answer.get("skip_assignment")
            client.members = tuple(member["member_id"] for member in answer["members"])
            assert not client.leads or client.member_id in client.members

    def _synced(self, client: Client, answer: dict[str, Any]) -> None:
        code = answer["error_code"]
        if code == OK:
            assert client.generation == self.talk.group.generation
            if client.instance is None:  # the leader may have assigned a static member's to its old id
                assert answer["assignment"] == self.given[client.generation, client.member_id]
        else:
            assert code in (STRANGER, STALE, REBALANCES, FENCED)
            if code == STRANGER:
                self._forget(client)

    def _instance_of(self, member_id: str) -> str:
        """The instance id of a static member, the member id of another."""
        return member_id[:2] if member_id[:2] in ("i0", "i1") else member_id

    @staticmethod
    def _forget(client: Client) -> None:
        client.member_id, client.generation, client.leads = "", -1, False

    # ----- what always holds

    @invariant()
    def generations_grow(self) -> None:
        assert self.talk.group.generation >= self.last_generation
        self.last_generation = self.talk.group.generation

    @invariant()
    def a_stable_group_has_what_its_leader_assigned(self) -> None:
        group = self.talk.group
        assert not group.members or group.state is not State.EMPTY
        assert group.members or group.state in (State.EMPTY, State.PREPARING)
        if group.state is State.STABLE:
            assert group.leader in group.members
            assert self.talk.stored[-1] == (group.generation, tuple(group.members))
            for member in group.members.values():
                if member.request.instance_id is None:
                    assert member.assignment == self.given[group.generation, member.member_id]

    @invariant()
    def nobody_is_forgotten(self) -> None:
        """While a request waits or a member may time out, the next tick has a time."""
        if self.talk.waiting - self.gone or self.talk.group.members:
            assert self.talk.group.wake_at < inf

    def teardown(self) -> None:
        waiting = [client for client in self.clients if client.request is not None]
        self.talk.sleep(3 * (REBALANCE + SESSION))
        assert all(client.request is not None and client.request[1] in self.talk.answers for client in waiting)
        assert self.talk.group.state is State.EMPTY
        assert self.talk.group.wake_at == inf


TestMembers = Members.TestCase
TestMembers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
