"""The assignors of consumer groups (KIP-848): who is to have which partitions.

`range` gives each member neighbouring partitions of each topic, the same numbers of topics that all subscribe to.
`uniform` keeps what members have as far as the numbers of their partitions then differ by no more than needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import chain, islice
from typing import NamedTuple
from uuid import UUID

from spark_klog.broker.groups.membership import Partition, Partitions


class AssignedMember(NamedTuple):
    """A member as an assignor sees it: its topics by name, and its last target."""

    instance_id: str | None
    topics: frozenset[str]
    target: Partitions


#: Topics by name: (id, number of partitions).
Topics = Mapping[str, tuple[UUID, int]]
Assign = Callable[[Topics, Mapping[str, AssignedMember]], dict[str, Partitions]]
#: Owner of a partition that no member had.
_NOBODY = ""


class _SameSubscribers(NamedTuple):
    """Topics that the same members subscribe to: for balance, any partition of them is as good as another."""

    topics: list[str]
    subscribers: list[str]  # in the order of their instance ids or else member ids


def _by_subscribers(topics: Topics, members: Mapping[str, AssignedMember]) -> list[_SameSubscribers]:
    """The topics that have subscribers, those of few first."""
    ordered = sorted(members, key=lambda member_id: (members[member_id].instance_id or member_id, member_id))
    ranks = {member_id: rank for rank, member_id in enumerate(ordered)}
    subscriptions: dict[frozenset[str], list[str]] = {}
    for member_id in ordered:
        subscriptions.setdefault(members[member_id].topics, []).append(member_id)
    those_of = list(subscriptions.values())
    topics_of: dict[tuple[int, ...], list[str]] = {}
    for topic in sorted(topics):
        if indices := tuple(index for index, names in enumerate(subscriptions) if topic in names):
            topics_of.setdefault(indices, []).append(topic)
    groups = [
        _SameSubscribers(names, sorted(chain.from_iterable(those_of[i] for i in indices), key=ranks.__getitem__))
        for indices, names in topics_of.items()
    ]
    return sorted(groups, key=lambda group: len(group.subscribers))


def assign_range(topics: Topics, members: Mapping[str, AssignedMember]) -> dict[str, Partitions]:
    """Each member's neighbouring partitions of each topic."""
    chosen: dict[str, list[Partition]] = {member_id: [] for member_id in members}
    for names, subscribers in _by_subscribers(topics, members):
        for topic in names:
            topic_id, count = topics[topic]
            begin = 0
            for index, member_id in enumerate(subscribers):
                end = begin + count // len(subscribers) + (index < count % len(subscribers))
                chosen[member_id] += [(topic_id, partition) for partition in range(begin, end)]
                begin = end
    return {member_id: frozenset(partitions) for member_id, partitions in chosen.items()}


def assign_uniform(topics: Topics, members: Mapping[str, AssignedMember]) -> dict[str, Partitions]:
    """Equal shares that keep what members had.

    No member could get a partition of another one that has two more than it. Of topics with the same subscribers it is
    settled first how many partitions each gets, then which: so each keeps what it can, whatever was tried on the way.
    """
    subscribed = {member.topics for member in members.values()}  # the same object for many: it is looked through once
    if len({names.intersection(topics) for names in subscribed}) == 1:
        shares = _equal_shares(topics, members)
        if shares is not None:
            return shares
    owners = _owners(topics, members)
    groups = _by_subscribers(topics, members)
    held = [Counter(chain.from_iterable(owners[topic] for topic in group.topics)) for group in groups]
    missing = [counts.pop(_NOBODY, 0) for counts in held]
    loads = dict.fromkeys(members, 0)
    for counts in held:
        for member_id, count in counts.items():
            loads[member_id] += count
    # the topics of few first: others have more choice
    for group, counts, count in zip(groups, held, missing, strict=True):
        _give_to_least(count, group.subscribers, counts, loads)
    # The greatest differences first, by steps of one or a fiftieth: what levels some topics unlevels others, and that
    # would move more. It is over when a pass has found, and so moved, nothing.
    difference = gap = max(loads.values(), default=0)
    while difference > 1:
        difference = 0
        for group, counts in zip(groups, held, strict=True):
            difference = max(difference, _level(group.subscribers, counts, loads, gap))
        gap = max(2, min(difference, gap - 1 - gap // 50))
    chosen: dict[str, list[Partition]] = {member_id: [] for member_id in members}
    for group, counts in zip(groups, held, strict=True):
        _choose(group.topics, counts, topics, owners, chosen)
    return {member_id: frozenset(partitions) for member_id, partitions in chosen.items()}


def _owners(topics: Topics, members: Mapping[str, AssignedMember]) -> dict[str, list[str]]:
    """By topic and number: the member that had the partition, and still subscribes to it."""
    owners = {topic: [_NOBODY] * count for topic, (_, count) in topics.items()}
    by_id = {topic_id: (topic, owners[topic]) for topic, (topic_id, _) in topics.items()}
    deleted: tuple[str, list[str]] = ("", [])
    for member_id, member in members.items():
        for topic_id, number in member.target:
            topic, by_number = by_id.get(topic_id, deleted)
            if number < len(by_number) and by_number[number] == _NOBODY and topic in member.topics:
                by_number[number] = member_id
    return owners


def _give_to_least(count: int, subscribers: list[str], counts: Counter[str], loads: dict[str, int]) -> None:
    """Give so many partitions to subscribers, each to the one that then has least."""
    if not count:
        return
    least = [(loads[member_id], member_id) for member_id in subscribers]
    heapify(least)
    for _ in range(count):
        load, member_id = least[0]
        counts[member_id] += 1
        loads[member_id] = load + 1
        heapreplace(least, (load + 1, member_id))


def _level(subscribers: list[str], counts: Counter[str], loads: dict[str, int], gap: int) -> int:
    """Move partitions from members to others that have at least `gap` (two or more) fewer, until there is none.

    `counts` is what each has of the topics of these subscribers. Returns by how much two of them differed before.
    """
    load_of = loads.__getitem__
    difference = max(map(load_of, counts), default=0) - min(map(load_of, subscribers))
    if difference < gap:
        return difference
    most = [(-loads[member_id], member_id) for member_id in counts]
    least = [(loads[member_id], member_id) for member_id in subscribers]
    heapify(most)
    heapify(least)
    # who gives stays in `least` with what it had, who gets in `most` too: neither differs by two from any other now
    while most and -most[0][0] - least[0][0] >= gap:
        minus_load, giver = most[0]
        loads[giver] -= 1
        counts[giver] -= 1
        if counts[giver]:
            heapreplace(most, (minus_load + 1, giver))
        else:
            del counts[giver]
            heappop(most)
        load, getter = least[0]
        loads[getter] += 1
        counts[getter] += 1
        heapreplace(least, (load + 1, getter))
    return difference


def _choose(
    names: list[str],
    counts: Counter[str],
    topics: Topics,
    owners: Mapping[str, list[str]],
    chosen: Mapping[str, list[Partition]],
) -> None:
    """Add so many partitions of the topics to what each member has: those that it had, then others' in turn.

    `counts` says how many; it is used up.
    """
    spare: list[Partition] = []
    for topic in names:
        topic_id = topics[topic][0]
        for number, owner in enumerate(owners[topic]):
            if counts[owner]:
                counts[owner] -= 1
                chosen[owner].append((topic_id, number))
            else:
                spare.append((topic_id, number))
    rest = iter(spare)
    getters = list(counts)
    while getters := [member_id for member_id in getters if counts[member_id]]:
        for member_id, partition in zip(getters, rest, strict=False):
            counts[member_id] -= 1
            chosen[member_id].append(partition)


def _equal_shares(topics: Topics, members: Mapping[str, AssignedMember]) -> dict[str, Partitions] | None:
    """The shares of members that subscribe to the same topics, which are all; None if two had the same partition."""
    subscribed = next(iter(members.values())).topics
    every = {(topics[name][0], number) for name in subscribed.intersection(topics) for number in range(topics[name][1])}
    kept = {
        name: member.target if member.target <= every else member.target & every for name, member in members.items()
    }
    left = every.difference(*kept.values())
    if len(every) - len(left) != sum(map(len, kept.values())):
        return None
    least, extra = divmod(len(every), len(members))
    shares = {}
    for rank, name in enumerate(sorted(kept, key=lambda each: (-len(kept[each]), each))):
        shares[name] = least + (rank < extra)
        if len(kept[name]) > shares[name]:
            ordered = sorted(kept[name])
            kept[name] = frozenset(ordered[: shares[name]])
            left.update(ordered[shares[name] :])
    pool = iter(sorted(left))
    for name, share in shares.items():
        if len(kept[name]) < share:
            kept[name] |= frozenset(islice(pool, share - len(kept[name])))
    return kept


#: By name; the first is the default.
SERVER_ASSIGNORS: dict[str, Assign] = {"uniform": assign_uniform, "range": assign_range}
