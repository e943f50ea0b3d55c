"""Fetch many short ranges of offsets at once: one request to each leader instead of one for each partition.

An answer that does not hold a whole range is not used: the caller reads that range by `fetch_range`, which knows what
to do about errors, corrupt batches and leaders that move.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from uuid import UUID

from spark_klog.client.answers import by_key, check_code
from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.fetcher import FETCH_WITH_TOPIC_IDS, MAX_WAIT_MS, Fetched, RangeFetch, entries_of
from spark_klog.errors import KlogError
from spark_klog.protocol.apis import FETCH
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)
#: A range of at most so many records is short, and this is how much of its partition is fetched.
MOST_RECORDS = 1000
_PARTITION_BYTES = 64 * 1024
#: Ranges of a request; together their bytes are no more than those of two usual fetches.
MOST_RANGES = 256
#: Part of the time for a request, and the most ms, that may be lost before the ranges are read one by one.
_PART, _LONGEST_MS = 4, 5_000


def fetch_short(
    cluster: Cluster, node: int, starts: Mapping[TopicPartition, tuple[int, int]], topic_ids: Mapping[str, UUID]
) -> dict[TopicPartition, Fetched]:
    """The record batches of those [start, end) that one answer of the leader `node` holds, in views of one buffer.

    They are valid until the next fetch of any reader of the same cluster. Without errors: what fails is left out.
    """
    timeout_ms = min(cluster.config.request_timeout_ms / _PART, _LONGEST_MS)
    try:
        with cluster.within(timeout_ms):
            connection = cluster.connection(node)
            by_id = all(topic in topic_ids for topic, _ in starts) and connection.speaks(FETCH, FETCH_WITH_TOPIC_IDS)
            request = {
                "max_wait_ms": MAX_WAIT_MS,
                "min_bytes": 1,
                "max_bytes": cluster.config.fetch_max_bytes,
                "isolation_level": cluster.config.isolation_level,
                "topics": _topics(starts, topic_ids, min(_PARTITION_BYTES, cluster.config.partition_fetch_bytes)),
            }
            version = FETCH_WITH_TOPIC_IDS if by_id else None
            answer = connection.request(FETCH, request, version=version, deadline=cluster.deadline())
        check_code(FETCH, answer["error_code"], f"fetch of {len(starts)} partitions")
        keys = {(topic_ids[topic] if by_id else topic, partition): (topic, partition) for topic, partition in starts}
        entries = by_key(FETCH, answer, entries_of(answer, "topic_id" if by_id else "topic"), keys)
    except KlogError as error:
        _log.info("fetching %d partitions of broker %d one by one: %s", len(starts), node, error)
        return {}
    found = {}
    for name, entry in entries.items():
        key = keys[name]
        fetched = _whole(cluster, key, *starts[key], entry)
        if fetched is not None:
            found[key] = fetched
    return found


def _topics(
    starts: Mapping[TopicPartition, tuple[int, int]], topic_ids: Mapping[str, UUID], most_bytes: int
) -> list[Message]:
    topics: dict[str, list[Message]] = {}
    for (topic, partition), (start, _) in starts.items():
        entry = {"partition": partition, "fetch_offset": start, "partition_max_bytes": most_bytes}
        topics.setdefault(topic, []).append(entry)
    return [
        {"topic": topic, "topic_id": topic_ids.get(topic), "partitions": partitions}
        for topic, partitions in topics.items()
    ]


def _whole(cluster: Cluster, key: TopicPartition, start: int, end: int, entry: Message) -> Fetched | None:
    if entry["error_code"] or not entry["records"]:
        return None
    fetch = RangeFetch(cluster, *key, start, end)
    try:
        fetched = fetch.fetched(entry)
    except KlogError:
        return None
    if fetched is None or fetched.damaged or fetch.is_past_corrupt:
        return None
    return fetched if fetched.next_offset >= end else None


def is_short(start: int, end: int) -> bool:
    """Whether a range may be fetched together with others."""
    return 0 < end - start <= MOST_RECORDS


def by_leader(cluster: Cluster, partitions: Sequence[TopicPartition]) -> dict[int, list[TopicPartition]]:
    """The partitions by their leaders; without those that have none now, and empty if no broker answers."""
    try:
        with cluster.within(min(cluster.config.request_timeout_ms / _PART, _LONGEST_MS)):
            leaders, _ = cluster.by_leader(partitions)
    except KlogError as error:
        _log.info("the leaders of %d partitions are looked up one by one: %s", len(partitions), error)
        return {}
    return {node: [(topic, one) for topic in topics for one in topics[topic]] for node, topics in leaders.items()}
