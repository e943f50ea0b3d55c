"""The assignors of consumer groups: equal shares, few moves, neighbouring partitions."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Collection, Mapping
from uuid import UUID

from hypothesis import given, settings, strategies as st

from spark_klog.broker.groups.membership import Partition, Partitions
from spark_klog.broker.groups.server_assignors import (
    SERVER_ASSIGNORS,
    AssignedMember,
    assign_range,
    assign_uniform,
)

_NAMES = "tuvw"
_TOPICS = st.dictionaries(st.sampled_from(_NAMES), st.integers(0, 7)).map(
    lambda counts: {name: (UUID(int=ord(name)), count) for name, count in counts.items()}
)
_SUBSCRIPTIONS = st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.frozensets(st.sampled_from(_NAMES)))
Topics = dict[str, tuple[UUID, int]]


def _members(
    subscriptions: dict[str, frozenset[str]], targets: dict[str, Partitions] | None = None
) -> dict[str, AssignedMember]:
    return {
        name: AssignedMember(None, topics, (targets or {}).get(name, frozenset()))
        for name, topics in subscriptions.items()
    }


@given(st.sampled_from(list(SERVER_ASSIGNORS)), _TOPICS, _TOPICS, _SUBSCRIPTIONS, _SUBSCRIPTIONS)
@settings(max_examples=200, deadline=None)
def test_each_partition_has_one_subscriber(
    name: str, topics: Topics, others: Topics, members: dict[str, frozenset[str]], later: dict[str, frozenset[str]]
) -> None:
    """Also if the members and topics were others before."""
    targets = SERVER_ASSIGNORS[name](topics, _members(members))
    for there, subscriptions in ((topics, members), (others, later)):
        targets = SERVER_ASSIGNORS[name](there, _members(subscriptions, targets))
        assert targets.keys() == subscriptions.keys()
        wanted = frozenset().union(*subscriptions.values()) & there.keys()
        assigned = [partition for target in targets.values() for partition in target]
        assert sorted(assigned) == sorted(
            (there[topic][0], number) for topic in wanted for number in range(there[topic][1])
        )
        names = {topic_id: topic for topic, (topic_id, _) in there.items()}
        for member, target in targets.items():
            assert {names[topic_id] for topic_id, _ in target} <= subscriptions[member]


def _is_balanced(topics: Topics, members: dict[str, AssignedMember], targets: dict[str, Partitions]) -> bool:
    """No member could get a partition of another one that has two more."""
    names = {topic_id: topic for topic, (topic_id, _) in topics.items()}
    return all(
        len(target) - min(len(targets[other]) for other in members if names[topic_id] in members[other].topics) <= 1
        for target in targets.values()
        for topic_id in {topic_id for topic_id, _ in target}
    )


def _moves(members: dict[str, AssignedMember], targets: dict[str, Partitions]) -> int:
    """How many partitions members get that they had not."""
    return sum(len(target - members[name].target) for name, target in targets.items())


@given(_TOPICS, _TOPICS, _SUBSCRIPTIONS, _SUBSCRIPTIONS)
@settings(max_examples=200, deadline=None)
def test_uniform_shares_differ_by_no_more_than_needed(
    topics: Topics, others: Topics, members: dict[str, frozenset[str]], later: dict[str, frozenset[str]]
) -> None:
    """Also if the members and topics were others before; and nothing moves then."""
    targets: dict[str, Partitions] = {}
    for there, subscriptions in ((topics, members), (others, later)):
        targets = assign_uniform(there, _members(subscriptions, targets))
        settled = _members(subscriptions, targets)
        assert _is_balanced(there, settled, targets)
        assert assign_uniform(there, settled) == targets


def _squares(targets: Mapping[str, Collection[Partition]]) -> int:
    """The less, the more equal."""
    return sum(len(target) ** 2 for target in targets.values())


def _least_moves(topics: Topics, members: dict[str, AssignedMember], squares: int) -> int:
    """Of all assignments whose shares are at least as equal, by trying each."""
    partitions = [(topic, number) for topic, (_, count) in topics.items() for number in range(count)]
    choices = [[name for name in members if topic in members[name].topics] for topic, _ in partitions]
    least = len(partitions)
    for owners in itertools.product(*choices):
        targets: dict[str, set[Partition]] = {name: set() for name in members}
        for (topic, number), owner in zip(partitions, owners, strict=True):
            targets[owner].add((topics[topic][0], number))
        if _squares(targets) <= squares:
            least = min(least, sum(len(target - members[name].target) for name, target in targets.items()))
    return least


def test_uniform_moves_as_few_as_any_assignment_as_equal() -> None:
    """Of three members' few partitions, whoever had them."""
    chance = random.Random(7)
    for _ in range(200):
        topics = {name: (UUID(int=ord(name)), chance.randint(1, 2)) for name in "tuv"}
        subscriptions = {name: frozenset(chance.sample("tuv", chance.randint(1, 3))) for name in "ab"}
        subscriptions["c"] = frozenset("tuv")
        had: dict[str, set[Partition]] = {name: set() for name in subscriptions}
        for topic, (topic_id, count) in topics.items():
            for number in range(count):
                if chance.random() < 0.8:
                    owner = chance.choice([name for name in subscriptions if topic in subscriptions[name]])
                    had[owner].add((topic_id, number))
        members = _members(subscriptions, {name: frozenset(each) for name, each in had.items()})
        targets = assign_uniform(topics, members)
        assert _moves(members, targets) == _least_moves(topics, members, _squares(targets))


def test_uniform_moves_few() -> None:
    topics = {"t": (UUID(int=1), 12)}
    all_t = {name: frozenset("t") for name in "abcd"}
    before = assign_uniform(topics, _members({name: all_t[name] for name in "abc"}))
    after = assign_uniform(topics, _members(all_t, before))
    assert [len(after[name]) for name in "abcd"] == [3] * 4
    assert all(after[name] <= before[name] for name in "abc")


def test_range_gives_neighbours_and_the_same_numbers_of_each_topic() -> None:
    topics = {"t": (UUID(int=1), 5), "u": (UUID(int=2), 5)}
    members = {
        "x": AssignedMember("2", frozenset("tu"), frozenset()),
        "y": AssignedMember("1", frozenset("tu"), frozenset()),
    }
    targets = assign_range(topics, members)
    assert {name: sorted(number for _, number in target) for name, target in targets.items()} == {
        "y": [0, 0, 1, 1, 2, 2],
        "x": [3, 3, 4, 4],
    }


def test_many_who_have_no_more_to_give_are_looked_through_once() -> None:
    """Members of two applications in a group: a light topic's members get no more, however often that is asked."""
    heavy = {f"t{number:03}": (UUID(int=number + 1), 50) for number in range(100)}
    topics = heavy | {"light": (UUID(int=999), 2)}
    names = frozenset(heavy)
    members = _members({f"m{number:03}": names if number < 190 else frozenset({"light"}) for number in range(200)})
    begin = time.process_time()
    targets = assign_uniform(topics, members)
    assert time.process_time() - begin < 0.3
    assert sorted(len(target) for target in targets.values()) == [0] * 8 + [1] * 2 + [26] * 130 + [27] * 60


def test_a_rolling_deploy_that_subscribes_to_more_takes_milliseconds() -> None:
    """10,000 partitions of members with three subscriptions: the second and the 201st member get their shares alone."""
    topics = {f"t{number:03}": (UUID(int=number + 1), 20) for number in range(500)}
    old = frozenset(topics)
    topics |= {"new": (UUID(int=501), 1), "newer": (UUID(int=502), 40)}
    versions = [old, old | {"new"}, old | {"new", "newer"}]

    def join(members: dict[str, AssignedMember], **joining: frozenset[str]) -> dict[str, AssignedMember]:
        members = members | _members(joining)
        begin = time.thread_time()
        targets = assign_uniform(topics, members)
        times.append(time.thread_time() - begin)
        moves.append(_moves(members, targets))
        return {name: member._replace(target=targets[name]) for name, member in members.items()}

    times: list[float] = []
    moves: list[int] = []
    one = join({}, m000=old)
    two = join(one, m001=versions[1])
    assert sorted(len(member.target) for member in two.values()) == [5000, 5001]
    many = join(two, **{f"m{number:03}": versions[number % 3] for number in range(2, 200)})
    assert {len(member.target) for member in many.values()} == {50, 51}
    more = join(many, m200=versions[2])
    assert {len(member.target) for member in more.values()} == {49, 50}
    assert moves[1] == len(two["m001"].target)
    assert moves[3] == len(more["m200"].target)
    assert max(times) < 0.3  # 0.04 s when nothing else runs
