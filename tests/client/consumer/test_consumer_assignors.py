"""Properties of the assignors, range and round-robin compared with kafka-python's; subscriptions of members."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor

from spark_klog.client.consumer.assignors import (
    ASSIGNORS,
    Member,
    assign_sticky,
    decode_subscription,
    encode_subscription,
)

_TOPICS = ("a", "b", "c")
_NAMES = st.text("xyz", min_size=1, max_size=3)
_COUNTS = st.dictionaries(st.sampled_from(_TOPICS), st.integers(1, 7), min_size=1)
_COUNTS_OF_ALL = st.fixed_dictionaries({topic: st.integers(1, 7) for topic in _TOPICS})
_KEYS = st.tuples(st.sampled_from(_TOPICS), st.integers(0, 8))
_MEMBERS = st.dictionaries(
    _NAMES,
    st.builds(
        Member,
        st.frozensets(st.sampled_from(_TOPICS), min_size=1),
        st.none(),
        st.lists(_KEYS, unique=True).map(tuple),
        st.integers(-1, 3),
    ),
    min_size=1,
    max_size=5,
)
_ALL = frozenset(_TOPICS)


def _wanted(counts: dict[str, int], members: dict[str, Member]) -> set[tuple[str, int]]:
    return {
        (topic, partition)
        for topic, count in counts.items()
        if any(topic in member.topics for member in members.values())
        for partition in range(count)
    }


@pytest.mark.parametrize("name", ASSIGNORS)
@given(counts=_COUNTS, members=_MEMBERS)
def test_each_partition_has_one_owner_who_wants_it(
    name: str, counts: dict[str, int], members: dict[str, Member]
) -> None:
    found = ASSIGNORS[name](counts, members)
    assert found.keys() == members.keys()
    owners = Counter(key for keys in found.values() for key in keys)
    assert set(owners.values()) <= {1}
    assert all(topic in members[member].topics for member, keys in found.items() for topic, _ in keys)
    left_out = _wanted(counts, members) - owners.keys()
    claimed = {key for member in members.values() for key in member.owned}
    assert owners.keys() <= _wanted(counts, members)
    assert left_out <= (claimed if name == "cooperative-sticky" else set())


@given(counts=_COUNTS, members=_MEMBERS)
def test_sticky_is_balanced_and_moves_nothing_again(counts: dict[str, int], members: dict[str, Member]) -> None:
    found = assign_sticky(counts, members)
    for keys in found.values():
        for taker in found:
            if len(keys) > len(found[taker]) + 1:
                assert not any(topic in members[taker].topics for topic, _ in keys)
    again = {name: Member(member.topics, None, tuple(found[name]), 9) for name, member in members.items()}
    assert assign_sticky(counts, again) == found


@given(counts=_COUNTS, names=st.lists(_NAMES, min_size=2, max_size=6, unique=True))
def test_sticky_moves_no_more_than_it_has_to(counts: dict[str, int], names: list[str]) -> None:
    before = assign_sticky(counts, {name: Member(_ALL) for name in names})
    owned = {name: Member(_ALL, None, tuple(keys), 1) for name, keys in before.items()}
    left = names[1:]
    after = assign_sticky(counts, {name: owned[name] for name in left})
    assert all(set(after[name]) >= set(before[name]) for name in left)
    joined = assign_sticky(counts, owned | {"new": Member(_ALL)})
    assert all(set(joined[name]) <= set(before[name]) for name in names)


@given(counts=_COUNTS, members=_MEMBERS)
def test_cooperative_members_agree_after_two_rounds(counts: dict[str, int], members: dict[str, Member]) -> None:
    assign = ASSIGNORS["cooperative-sticky"]
    wanted = _wanted(counts, members)
    generation = 3
    for _ in range(3):
        found = assign(counts, members)
        for name, keys in found.items():
            others = {key for other, member in members.items() if other != name for key in member.owned}
            assert not others & set(keys)
        if {key for keys in found.values() for key in keys} == wanted:
            break
        generation += 1
        members = {
            name: Member(member.topics, None, tuple(found[name]), generation) for name, member in members.items()
        }
    assert {key for keys in found.values() for key in keys} == wanted


def _rows(item: Any) -> list[tuple[str, list[int]]]:
    return [(topic, partitions) for topic, partitions in item.assigned_partitions]


@pytest.mark.parametrize(
    ("name", "oracle"), [("range", RangePartitionAssignor), ("roundrobin", RoundRobinPartitionAssignor)]
)
@given(
    counts=_COUNTS_OF_ALL,
    topics=st.dictionaries(_NAMES, st.frozensets(st.sampled_from(_TOPICS), min_size=1), min_size=1),
)
def test_as_kafka_python_assigns(name: str, oracle: Any, counts: dict[str, int], topics: dict[str, Any]) -> None:
    if name == "roundrobin":  # kafka-python 3 fails if members have subscribed to different topics
        topics = dict.fromkeys(topics, _ALL)
    cluster = SimpleNamespace(partitions_for_topic=lambda topic: set(range(counts[topic])) if topic in counts else None)
    group = [
        SimpleNamespace(member_id=member, group_instance_id=None, metadata=SimpleNamespace(topics=sorted(names)))
        for member, names in topics.items()
    ]
    expected = {
        member: sorted((topic, partition) for topic, partitions in _rows(item) for partition in partitions)
        for member, item in oracle.assign(cluster, group).items()
    }
    found = ASSIGNORS[name](counts, {member: Member(names) for member, names in topics.items()})
    assert {member: sorted(keys) for member, keys in found.items()} == expected


@pytest.mark.parametrize("owned", [[], [("t", 0), ("t", 2), ("u", 1)]])
@pytest.mark.parametrize("name", ASSIGNORS)
def test_what_members_send_is_what_leaders_read(name: str, owned: list[tuple[str, int]]) -> None:
    data = encode_subscription(name, ["t", "u"], owned, 7, "", name != "cooperative-sticky")
    found = decode_subscription(name, data, "i")
    assert (found.topics, found.instance_id) == ({"t", "u"}, "i")
    if "sticky" in name:
        assert sorted(found.owned) == owned
        assert found.generation == 7 or (not owned and found.generation == -1)


def test_the_bytes_of_a_sticky_member() -> None:
    """The bytes that Java's StickyAssignor and ConsumerProtocol 4.1.0 define, field by field."""
    found = encode_subscription("sticky", ["t"], [("t", 1), ("t", 0)], 7, "", True)
    user_data = "00000001 0001 74 00000002 00000000 00000001 00000007"
    expected = f"0003 00000001 0001 74 0000001b {user_data} 00000000 00000007 ffff"
    assert found == bytes.fromhex(expected.replace("0000001b", f"{len(bytes.fromhex(user_data)):08x}"))


def test_a_subscription_without_the_fields_of_its_version() -> None:
    data = bytes.fromhex("0001 00000001 0001 74 ffffffff")
    assert decode_subscription("range", data, None) == Member(frozenset(["t"]))
