"""Fetch many short ranges of offsets at once: one request to each leader instead of one for each partition.

An answer that does not hold a whole range is not used: the caller reads that range by `fetch_range`, which knows what
to do about errors, corrupt batches and leaders that move.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_high
from typing import NamedTuple
from uuid import UUID

from spark_klog.client.answers import by_key, check_code
from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.fetcher import FETCH_WITH_TOPIC_IDS, MAX_WAIT_MS, Fetched, RangeFetch, entries_of
from spark_klog.errors import KlogError
from spark_klog.protocol.apis import FETCH
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)
#: A range of at most so many records is short.
MOST_RECORDS = 1000
#: How much of a partition is fetched: at first, and at most. And how much a request may bring.
_PARTITION_BYTES, _LARGEST_BYTES, _REQUEST_BYTES = 64 * 1024, 1024 * 1024, 16 * 1024 * 1024
#: Ranges of a request.
MOST_RANGES = _REQUEST_BYTES // _PARTITION_BYTES
#: Part of the time for a request, and the most ms, that may be lost before the ranges are read one by one.
_PART, _LONGEST_MS = 4, 5_000


class ShortRanges:
    """Fetches short ranges of topics with these ids, and learns how many bytes of a partition they need."""

    def __init__(self, cluster: Cluster, topic_ids: Mapping[str, UUID]) -> None:
        self._cluster, self._topic_ids = cluster, topic_ids
        self._most = max(1, min(_LARGEST_BYTES, cluster.config.partition_fetch_bytes))
        self._bytes = min(_PARTITION_BYTES, self._most)

    def fetch(
        self, node: int, ranges: Mapping[TopicPartition, tuple[int, int]]
    ) -> Iterator[dict[TopicPartition, Fetched]]:
        """The record batches of [start, end) of each partition of which `node` is the leader, in views of one buffer.

        They are valid until the next fetch of any reader of the same cluster. Ranges that fail, or that are larger than
        what one answer may hold, are left out.
        """
        left, size, cut_at = list(ranges), self._bytes, self._bytes
        most = min(_REQUEST_BYTES, self._cluster.config.fetch_max_bytes)
        while left:
            again: dict[TopicPartition, int] = {}
            while left:
                count = max(1, most // size)
                asked, left = {key: ranges[key] for key in left[:count]}, left[count:]
                answer = fetch_short(self._cluster, node, asked, self._topic_ids, size)
                if answer is None:
                    return
                if answer.found:
                    yield answer.found
                cut = {key: needed for key, needed in answer.cut.items() if needed <= self._most}
                if cut and size < self._most:
                    again |= cut
                    cut_at = size
                    if len(cut) > len(answer.found):  # other ranges will need more, too
                        size = self._bytes = self._more(size, cut)
            left = list(again)
            if again:
                size = max(size, self._more(cut_at, again))

    def _more(self, size: int, cut: Mapping[TopicPartition, int]) -> int:
        """How much to ask for instead of `size`, which has cut off these ranges."""
        return min(self._most, max(2 * size, median_high(cut.values())))


class ShortAnswer(NamedTuple):
    """Partitions whose range is there as a whole, and those cut off, each with an estimate of the bytes it needs."""

    found: dict[TopicPartition, Fetched]
    cut: dict[TopicPartition, int]


def fetch_short(
    cluster: Cluster,
    node: int,
    starts: Mapping[TopicPartition, tuple[int, int]],
    topic_ids: Mapping[str, UUID],
    most_bytes: int,
) -> ShortAnswer | None:
    """Fetch those [start, end) from their leader `node`, so many bytes of each; None if there is no sound answer."""
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
                "topics": _topics(starts, topic_ids, most_bytes),
            }
            version = FETCH_WITH_TOPIC_IDS if by_id else None
            answer = connection.request(FETCH, request, version=version, deadline=cluster.deadline())
        check_code(FETCH, answer["error_code"], f"fetch of {len(starts)} partitions")
        keys = {(topic_ids[topic] if by_id else topic, partition): (topic, partition) for topic, partition in starts}
        entries = by_key(FETCH, answer, entries_of(answer, "topic_id" if by_id else "topic"), keys)
    except KlogError as error:
        _log.info("fetching %d partitions of broker %d one by one: %s", len(starts), node, error)
        return None
    result = ShortAnswer({}, {})
    for name, entry in entries.items():
        key = keys[name]
        start, end = starts[key]
        if entry["error_code"]:
            continue
        fetched = _fetched(cluster, key, start, end, entry)
        if fetched is not None and fetched.next_offset >= end:
            result.found[key] = fetched
        elif entry["high_watermark"] >= end:
            offsets = 0 if fetched is None else fetched.next_offset - start
            result.cut[key] = _needed(entry["records"], offsets, end - start)
    return result


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


def _fetched(cluster: Cluster, key: TopicPartition, start: int, end: int, entry: Message) -> Fetched | None:
    """The record batches of an entry that are whole; None if there is none, or one is corrupt."""
    if not entry["records"]:
        return None
    fetch = RangeFetch(cluster, *key, start, end)
    try:
        fetched = fetch.fetched(entry)
    except KlogError:
        return None
    return None if fetched is None or fetched.damaged or fetch.is_past_corrupt else fetched


def _needed(records: memoryview | None, offsets: int, wanted: int) -> int:
    """Estimate the bytes of `wanted` offsets from an answer with `offsets` of them; 0 if it tells nothing.

    Brokers leave out a first batch that is larger than what was asked for.
    """
    if not records or not offsets:
        return 0
    return len(records) * wanted // offsets + len(records) // 8


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
