"""The rebalance of groups in ZooKeeper, as pure functions.

Every member computes the same assignment from what all see: the members' registrations, and the topics' partitions. For
each topic the partitions, in order of their numbers, are divided into ranges for the threads (streams) that read it, in
order of their ids; the first ones get one more if that leaves a remainder.

A member keeps the partitions that stay its own, where Kafka's consumers release everything first: each partition has
an owner's node, so members that see another state of the group only wait for each other.

Source: 0.10 documentation, "Consumer rebalancing algorithm", steps 1 to 7; the order of ids is that of Java's strings,
as in Kafka's range assignor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from spark_klog.classic.group.filters import streams_by_topic
from spark_klog.client.cluster import TopicPartition
from spark_klog.directories.consumers import Registration


def thread_id(consumer: str, number: int) -> str:
    """The id of a member's stream, which the owner's node holds."""
    return f"{consumer}-{number}"


def _java_order(text: str) -> bytes:
    return text.encode("utf-16-be", "surrogatepass")


def threads_by_topic(
    members: Mapping[str, Registration], topics: Collection[str], exclude_internal_topics: bool = True
) -> dict[str, list[str]]:
    """The ids of the threads that read each topic, in order; `topics` are all that exist."""
    found: dict[str, list[str]] = {}
    for consumer, registration in members.items():
        for topic, streams in streams_by_topic(registration, topics, exclude_internal_topics).items():
            found.setdefault(topic, []).extend(thread_id(consumer, number) for number in range(streams))
    return {topic: sorted(threads, key=_java_order) for topic, threads in found.items()}


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
