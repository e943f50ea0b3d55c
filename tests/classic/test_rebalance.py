"""Partition assignment of ZooKeeper groups: its properties, and the example in Kafka's own assignor."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.classic.member import Blacklist, Whitelist, assign, thread_id, threads_by_topic
from spark_klog.errors import ConfigError, DecodeError
from spark_klog.trees.consumers import (
    BLACK_LIST,
    STATIC,
    WHITE_LIST,
    Registration,
    parse_registration,
    registration_payload,
)

_TOPICS = ["a", "b", "c", "__consumer_offsets"]
_NAMES = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), min_size=1, max_size=6)
_REGISTRATIONS = st.one_of(
    st.builds(
        Registration,
        st.just(STATIC),
        st.dictionaries(st.sampled_from([*_TOPICS, "missing"]), st.integers(1, 4), min_size=1),
    ),
    st.builds(
        lambda pattern, regex, streams: Registration(pattern, {regex: streams}),
        st.sampled_from([WHITE_LIST, BLACK_LIST]),
        st.sampled_from(["a|b", "[bc]", ".*", "x"]),
        st.integers(1, 4),
    ),
)
_MEMBERS = st.dictionaries(_NAMES, _REGISTRATIONS, min_size=1, max_size=6)
_PARTITIONS = st.fixed_dictionaries(
    {topic: st.lists(st.integers(0, 40), unique=True, max_size=20) for topic in _TOPICS}
)


@settings(max_examples=100, deadline=None)
@given(_MEMBERS, _PARTITIONS, st.randoms(use_true_random=False))
def test_properties(members: dict[str, Registration], partitions: dict[str, list[int]], rng: random.Random) -> None:
    threads = threads_by_topic(members, list(partitions))
    owners = assign(threads, partitions)

    # each partition of a subscribed topic has one owner, which reads that topic
    read = {(topic, number) for topic, numbers in partitions.items() if threads.get(topic) for number in numbers}
    assert set(owners) == read
    assert all(owner in threads[topic] for (topic, _), owner in owners.items())

    for topic in partitions:
        counts = Counter(dict.fromkeys(threads.get(topic, ()), 0))
        counts.update(owner for (name, _), owner in owners.items() if name == topic)
        assert max(counts.values(), default=0) - min(counts.values(), default=0) <= 1
        # a thread's partitions are a contiguous range
        order = [owners[topic, number] for number in sorted(partitions[topic])] if topic in threads else []
        assert order == sorted(order, key=threads.get(topic, []).index)

    # all members compute the same, in whatever order ZooKeeper lists nodes
    shuffled = rng.sample(sorted(members.items()), len(members))
    again = {topic: rng.sample(numbers, len(numbers)) for topic, numbers in partitions.items()}
    assert assign(threads_by_topic(dict(shuffled), rng.sample(_TOPICS, len(_TOPICS))), again) == owners
    assert "__consumer_offsets" not in {
        topic for topic in threads if all("__consumer_offsets" not in one.subscription for one in members.values())
    }


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(0, 50))
def test_a_member_that_leaves_moves_no_more_than_ranges_must(members: int, count: int) -> None:
    """If the last member leaves, partitions stay or move to an earlier member, and no other member gets fewer.

    Nothing moves if nothing changes.
    """
    names = [f"m{number:02}" for number in range(members + 1)]
    partitions = {"t": range(count)}
    before = assign({"t": names}, partitions)
    assert assign({"t": names}, partitions) == before
    after = assign({"t": names[:-1]}, partitions)
    assert all(after[partition] <= before[partition] for partition in before)
    sizes_before, sizes_after = Counter(before.values()), Counter(after.values())
    assert all(sizes_after[name] >= sizes_before[name] for name in names[:-1])


def test_the_order_is_that_of_java() -> None:
    """Strings are ordered by UTF-16 units: stream 10 is before stream 2, and U+1F600 is before U+FFFD."""
    members = {"g_h-1-ab": Registration(STATIC, {"t": 11})}
    threads = threads_by_topic(members, ["t"])["t"]
    assert threads[:3] == ["g_h-1-ab-0", "g_h-1-ab-1", "g_h-1-ab-10"]
    members = {"\ufffd": Registration(STATIC, {"t": 1}), "\U0001f600": Registration(STATIC, {"t": 1})}
    assert threads_by_topic(members, ["t"])["t"] == [thread_id("\U0001f600", 0), thread_id("\ufffd", 0)]


def test_the_documents_example() -> None:
    """The example of Kafka's RangeAssignor: 10 partitions, consumer C1 with 2 streams and C2 with one."""
    members = {"C1": Registration(STATIC, {"t": 2}), "C2": Registration(STATIC, {"t": 1})}
    owners = assign(threads_by_topic(members, ["t"]), {"t": range(10)})
    assert [owners["t", number] for number in range(10)] == ["C1-0"] * 4 + ["C1-1"] * 3 + ["C2-0"] * 3


def test_registrations() -> None:
    found = parse_registration(b'{"version":1,"subscription":{"a|b.*":2},"pattern":"white_list","timestamp":"17"}')
    assert found == Registration(WHITE_LIST, {"a|b.*": 2})
    assert parse_registration(registration_payload(found, 17)) == found
    assert registration_payload(found, 17).endswith(b'"pattern":"white_list","timestamp":"17"}')
    for bad in (b"", b"[]", b"{}", b'{"pattern":"static","subscription":{"t":0}}', b'{"pattern":"static"}'):
        with pytest.raises(DecodeError, match=r"^/consumers/g/ids/c: no registration"):
            parse_registration(bad, "/consumers/g/ids/c")
    with pytest.raises(DecodeError, match="one regular expression"):
        parse_registration(b'{"pattern":"black_list","subscription":{"a":1,"b":1}}')


def test_filters() -> None:
    white = Whitelist(" 'clicks, views.*' ")
    assert white.regex == "clicks|views.*"
    assert [white.allows(topic) for topic in ("clicks", "views-1", "clicks2", "myviews")] == [True, True, False, False]
    black = Blacklist("clicks")
    assert [black.allows(topic) for topic in ("clicks", "views", "__consumer_offsets")] == [False, True, False]
    assert black.allows("__consumer_offsets", exclude_internal_topics=False)
    with pytest.raises(ConfigError, match=r"Whitelist: 'a\(' is not a regular expression"):
        Whitelist("a(")
