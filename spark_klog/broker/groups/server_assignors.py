"""The assignors of consumer groups (KIP-848): who is to have which partitions.

`range` gives each member neighbouring partitions of each topic, the same numbers of topics that all subscribe to.
`uniform` keeps what members have as far as the numbers of their partitions then differ by no more than needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from itertools import islice
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


def _subscribers(topics: Topics, members: Mapping[str, AssignedMember]) -> dict[str, list[str]]:
    """The members that subscribe to each topic, in the order of their instance ids or else member ids."""
    ordered = sorted(members, key=lambda member_id: (members[member_id].instance_id or member_id, member_id))
    subscribers: dict[str, list[str]] = {topic: [] for topic in topics}
    for member_id in ordered:
        for topic in members[member_id].topics:
            if topic in subscribers:
                subscribers[topic].append(member_id)
    return subscribers


def assign_range(topics: Topics, members: Mapping[str, AssignedMember]) -> dict[str, Partitions]:
    """Each member's neighbouring partitions of each topic."""
    chosen: dict[str, list[Partition]] = {member_id: [] for member_id in members}
    for topic, subscribers in _subscribers(topics, members).items():
        topic_id, count = topics[topic]
        begin = 0
        for index, member_id in enumerate(subscribers):
            end = begin + count // len(subscribers) + (index < count % len(subscribers))
            chosen[member_id] += [(topic_id, partition) for partition in range(begin, end)]
            begin = end
    return {member_id: frozenset(partitions) for member_id, partitions in chosen.items()}


def assign_uniform(topics: Topics, members: Mapping[str, AssignedMember]) -> dict[str, Partitions]:
    """Equal shares that keep what members had.

    No member could get a partition of another one that has two more than it.
    """
    subscribed = {member.topics for member in members.values()}  # the same object for many: it is looked through once
    if len({names.intersection(topics) for names in subscribed}) == 1:
        shares = _equal_shares(topics, members)
        if shares is not None:
            return shares
    subscribers = _subscribers(topics, members)
    names = {topic_id: name for name, (topic_id, _) in topics.items()}
    counts = dict(topics.values())
    chosen: dict[str, set[Partition]] = {member_id: set() for member_id in members}
    taken: set[Partition] = set()
    for member_id, member in members.items():
        for partition in member.target:
            topic_id, number = partition
            is_there = number < counts.get(topic_id, 0) and names[topic_id] in member.topics
            if is_there and partition not in taken:
                taken.add(partition)
                chosen[member_id].add(partition)
    # the topics of few first: others have more choice
    for topic in sorted(topics, key=lambda name: (len(subscribers[name]), name)):
        topic_id, count = topics[topic]
        missing = [(topic_id, number) for number in range(count) if (topic_id, number) not in taken]
        if missing and subscribers[topic]:
            loads = [(len(chosen[member_id]), member_id) for member_id in subscribers[topic]]
            heapify(loads)
            for partition in missing:
                load, member_id = heappop(loads)
                chosen[member_id].add(partition)
                heappush(loads, (load + 1, member_id))
    _balance(chosen, {topic_id: subscribers[name] for topic_id, name in names.items()})
    return {member_id: frozenset(partitions) for member_id, partitions in chosen.items()}


def _equal_shares(topics: Topics, members: Mapping[str, AssignedMember]) -> dict[str, Partitions] | None:
    """The shares of members that subscribe to the same topics, which are all; None if two had the same partition."""
    subscribed = next(iter(members.values())).topics
    every = {(topics[name][0], number) for name in topics.keys() & subscribed for number in range(topics[name][1])}
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


def _balance(chosen: dict[str, set[Partition]], subscribers: Mapping[UUID, list[str]]) -> None:
    """Move partitions from members to others that have at least two fewer, until there is none.

    Those that have most give one each in turn, so that no partition moves twice if all subscribe to the same.
    """
    #: For topics with the same subscribers: the one of them that has least, until a partition moves.
    least: dict[tuple[str, ...], str] = {}
    among = {topic_id: tuple(some) for topic_id, some in subscribers.items()}
    moves = bool(chosen)
    while moves:
        moves = False
        fewest = min(map(len, chosen.values()))
        for member_id in sorted(chosen, key=lambda each: (-len(chosen[each]), each)):
            own = chosen[member_id]
            if len(own) < fewest + 2:
                break
            for topic_id in sorted({topic_id for topic_id, _ in own}):
                others = among[topic_id]
                other = least.get(others)
                if other is None:
                    other = least[others] = min(others, key=lambda each: (len(chosen[each]), each))
                if len(chosen[other]) + 2 <= len(own):
                    partition = max(partition for partition in own if partition[0] == topic_id)
                    own.remove(partition)
                    chosen[other].add(partition)
                    least.clear()
                    moves = True
                    fewest = min(map(len, chosen.values()))
                    break


#: By name; the first is the default.
SERVER_ASSIGNORS: dict[str, Assign] = {"uniform": assign_uniform, "range": assign_range}
