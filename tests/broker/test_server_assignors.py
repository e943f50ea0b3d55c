"""The assignors of consumer groups: equal shares, few moves, neighbouring partitions."""

from __future__ import annotations

import time
from uuid import UUID

from hypothesis import given, settings, strategies as st

from spark_klog.broker.groups.membership import Partitions
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


@given(_TOPICS, _SUBSCRIPTIONS)
@settings(max_examples=200, deadline=None)
def test_uniform_shares_differ_by_no_more_than_needed(topics: Topics, members: dict[str, frozenset[str]]) -> None:
    targets = assign_uniform(topics, _members(members))
    names = {topic_id: topic for topic, (topic_id, _) in topics.items()}
    for target in targets.values():
        for topic_id, _ in target:
            loads = [len(targets[other]) for other in members if names[topic_id] in members[other]]
            assert len(target) - min(loads) <= 1
    assert assign_uniform(topics, _members(members, targets)) == targets


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
