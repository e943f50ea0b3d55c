"""A member of a group in ZooKeeper: what it reads there, the partitions that are its own, and its nodes.

Source: 0.10 documentation, "Consumers and Consumer Groups" and "Consumer registration algorithm".

Every member computes the same assignment from what all see: the members' registrations, and the topics' partitions. For
each topic the partitions, in order of their numbers, are divided into ranges for the threads (streams) that read it, in
order of their ids; the first ones get one more if that leaves a remainder.

A member keeps the partitions that stay its own, where Kafka's consumers release everything first: each partition has
an owner's node, so members that see another state of the group only wait for each other.

Source: 0.10 documentation, "Consumer rebalancing algorithm", steps 1 to 7; the order of ids is that of Java's strings,
as in Kafka's range assignor.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping

from spark_klog.base.names import TopicPartition, topic_pattern
from spark_klog.trees.consumers import (
    BLACK_LIST,
    STATIC,
    WHITE_LIST,
    Registration,
    consumer_id_path,
    owner_path,
    parse_registration,
    registration_payload,
)
from spark_klog.trees.paths import (
    BROKER_IDS_PATH,
    BROKER_TOPICS_PATH,
    consumer_ids_path,
    parse_broker,
    parse_topic,
    topic_path,
)
from spark_klog.trees.tree import NodeExists, Tree

_QUOTES = "\"'"
_INTERNAL = frozenset(["__consumer_offsets", "__transaction_state"])


class ConsumerRebalanceListener:
    """A listener that a connector calls in the thread that rebalances. Keep it short; errors are logged."""

    def before_releasing_partitions(self, partitions: Mapping[str, list[int]]) -> None:
        """Called before these partitions, by topic, are committed and released. Not for those that were lost."""

    def before_starting_fetchers(self, consumer_id: str, assignment: Mapping[str, Mapping[int, str]]) -> None:
        """Called before reading begins, with all that this member owns: the stream's id by topic and partition."""


class TopicFilter:
    """A regular expression that a topic's whole name matches; a comma means "or", spaces and outer quotes are dropped.

    `ConfigError` as of `topic_pattern`.
    """

    pattern: str

    def __init__(self, regex: str) -> None:
        self.regex = regex.strip().replace(",", "|").replace(" ", "").strip(_QUOTES)
        self._compiled = topic_pattern(f"{type(self).__name__}: {regex!r}", self.regex)

    def allows(self, topic: str, exclude_internal_topics: bool = True) -> bool:
        """Whether streams of this filter read the topic."""
        is_match = self._compiled.fullmatch(topic) is not None
        return is_match is (self.pattern == WHITE_LIST) and not (exclude_internal_topics and topic in _INTERNAL)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.regex!r})"


class Whitelist(TopicFilter):
    """Topics whose names match."""

    pattern = WHITE_LIST


class Blacklist(TopicFilter):
    """Topics whose names do not match."""

    pattern = BLACK_LIST


def streams_by_topic(
    registration: Registration, topics: Collection[str], exclude_internal_topics: bool
) -> dict[str, int]:
    """How many streams a member has for each topic that it reads; `topics` are all that exist."""
    if registration.pattern == STATIC:
        return dict(registration.subscription)
    ((regex, streams),) = registration.subscription.items()
    found = (Whitelist if registration.pattern == WHITE_LIST else Blacklist)(regex)
    return {topic: streams for topic in topics if found.allows(topic, exclude_internal_topics)}


def thread_id(consumer: str, number: int) -> str:
    """The id of a member's stream, which the owner's node holds."""
    return f"{consumer}-{number}"


def threads_by_topic(
    members: Mapping[str, Registration], topics: Collection[str], exclude_internal_topics: bool = True
) -> dict[str, list[str]]:
    """The ids of the threads that read each topic, in order; `topics` are all that exist."""
    found: dict[str, list[str]] = {}
    for consumer, registration in members.items():
        for topic, streams in streams_by_topic(registration, topics, exclude_internal_topics).items():
            found.setdefault(topic, []).extend(thread_id(consumer, number) for number in range(streams))
    return {
        topic: sorted(threads, key=lambda thread: thread.encode("utf-16-be", "surrogatepass"))  # Java's order
        for topic, threads in found.items()
    }


def assign(
    threads: Mapping[str, Collection[str]], partitions: Mapping[str, Collection[int]]
) -> dict[TopicPartition, str]:
    """The thread that owns each partition, from `threads_by_topic` and the partitions of the topics that exist."""
    owners: dict[TopicPartition, str] = {}
    for topic, readers in threads.items():
        numbers = sorted(partitions.get(topic, ()))
        each, more = divmod(len(numbers), len(readers))
        start = 0
        for position, reader in enumerate(readers):
            end = start + each + (position < more)
            owners.update(((topic, number), reader) for number in numbers[start:end])
            start = end
    return owners


def new_consumer_id(group: str, consumer_id: str | None) -> str:
    """The id of a member, as Kafka's consumers make it: group, host, time and a random part, or consumer.id."""
    own = consumer_id or f"{socket.gethostname()}-{time.time_ns() // 1_000_000}-{uuid.uuid4().hex[:8]}"
    return f"{group}_{own}"


def broker_addresses(tree: Tree, protocol: str) -> list[str]:
    """HOST:PORT of each registered broker's listener with this security protocol, sorted."""
    names = tree.children(BROKER_IDS_PATH)
    payloads = tree.get_many([f"{BROKER_IDS_PATH}/{name}" for name in names])
    found = set()
    for name, payload in zip(names, payloads, strict=True):
        if payload is not None:
            endpoints = parse_broker(payload, f"{BROKER_IDS_PATH}/{name}")
            found |= {f"{one.host}:{one.port}" for one in endpoints if one.security_protocol == protocol}
    return sorted(found)


class Membership:
    """Registration and ownership of one member; the caller closes the tree, which ends both.

    Methods raise `DirectoryError`, and `DecodeError` for a node of another member that can't be read.
    """

    def __init__(
        self, tree: Tree, group: str, consumer: str, registration: Registration, exclude_internal: bool
    ) -> None:
        self._tree, self._group, self.consumer = tree, group, consumer
        self._registration, self._exclude_internal = registration, exclude_internal

    def register(self) -> None:
        """Create the member's node, in place of one that a former process with the same consumer.id has left."""
        self._create(
            consumer_id_path(self._group, self.consumer),
            registration_payload(self._registration, time.time_ns() // 1_000_000),
        )

    def _create(self, path: str, value: bytes) -> None:
        try:
            self._tree.create(path, value, ephemeral=True)
        except NodeExists:
            self._tree.delete(path)
            self._tree.create(path, value, ephemeral=True)

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` when members, brokers, topics or their partitions may have changed."""
        self._tree.watch(consumer_ids_path(self._group), callback)
        self._tree.watch(BROKER_IDS_PATH, callback)
        self._tree.watch(BROKER_TOPICS_PATH, callback, values=True)

    def is_registered(self) -> bool:
        return self._tree.get(consumer_id_path(self._group, self.consumer)) is not None

    def assignment(self) -> dict[TopicPartition, str]:
        """The thread of this member that is to own each partition (steps 1 to 7 of the algorithm)."""
        top = consumer_ids_path(self._group)
        names = self._tree.children(top)
        paths = [f"{top}/{name}" for name in names]
        payloads = zip(names, paths, self._tree.get_many(paths), strict=True)
        members = {name: parse_registration(payload, path) for name, path, payload in payloads if payload is not None}
        is_static = all(one.pattern == STATIC for one in members.values())
        topics = [] if is_static else self._tree.children(BROKER_TOPICS_PATH)
        threads = threads_by_topic(members, topics, self._exclude_internal)
        own = streams_by_topic(self._registration, topics, self._exclude_internal)
        wanted = {topic: threads[topic] for topic in own if topic in threads}
        owners = assign(wanted, self._partitions(wanted))
        mine = {thread_id(self.consumer, number) for number in range(max(own.values(), default=0))}
        return {key: owner for key, owner in owners.items() if owner in mine}

    def _partitions(self, topics: Iterable[str]) -> dict[str, list[int]]:
        paths = {topic: topic_path(topic) for topic in topics}
        payloads = self._tree.get_many(list(paths.values()))
        found = zip(paths.items(), payloads, strict=True)
        return {topic: list(parse_topic(payload, path)[0]) for (topic, path), payload in found if payload}

    def lost(self, owned: Mapping[TopicPartition, str]) -> list[TopicPartition]:
        """The partitions that are another member's now, because this member's session was lost meanwhile."""
        paths = [owner_path(self._group, *key) for key in owned]
        found = zip(owned.items(), self._tree.get_many(paths), strict=True)
        return [key for (key, thread), payload in found if payload != thread.encode()]

    def claim(self, wanted: Mapping[TopicPartition, str]) -> list[TopicPartition]:
        """Become the owner of partitions (step 9); those that another member still owns are left out."""
        claimed = []
        for key, thread in wanted.items():
            path = owner_path(self._group, *key)
            try:
                self._tree.create(path, thread.encode(), ephemeral=True)
            except NodeExists:
                if self._tree.get(path) != thread.encode():
                    continue
                self._create(path, thread.encode())  # of an attempt whose answer was lost
            claimed.append(key)
        return claimed

    def release(self, keys: Collection[TopicPartition]) -> None:
        """Give up partitions that this member owns (step 8)."""
        for key in keys:
            self._tree.delete(owner_path(self._group, *key))
