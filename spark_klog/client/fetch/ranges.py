"""Fetch ranges of offsets: one range of any length, or many short ones with one request to each leader.

The next request for a range is sent before the caller decodes the last response, so that the broker works meanwhile.

An answer that does not hold a whole short range is not used: the caller reads that range by `fetch_range`, which knows
what to do about errors, corrupt batches and leaders that move.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import median_high
from typing import NamedTuple
from uuid import UUID

from spark_klog.base.names import TopicPartition
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.entries import (
    LEAST_BYTES,
    Fetched,
    FetchInFlight,
    FetchParameters,
    Larger,
    Limits,
    read_entry,
    too_large,
)
from spark_klog.client.net.connection import Connection
from spark_klog.client.offsets import list_offsets, offset_range
from spark_klog.client.retry import Retry
from spark_klog.errors import (
    ConnectionFailed,
    ErrorCode,
    FrameTooLarge,
    KlogError,
    OffsetOutOfRange,
    ProtocolError,
    RequestTimedOut,
)
from spark_klog.protocol.tables.records import LATEST
from spark_klog.records.reading.offset_order import NOTHING

_log = logging.getLogger(__name__)
#: A range of at most so many records is short.
MOST_RECORDS = 1000
#: How much of a partition is fetched of a short range: at first, and at most. And how much a request may bring.
_PARTITION_BYTES, _LARGEST_BYTES, _REQUEST_BYTES = 64 * 1024, 1024 * 1024, 16 * 1024 * 1024
#: Short ranges of a request.
MOST_RANGES = _REQUEST_BYTES // _PARTITION_BYTES
#: Part of the time for a request, and the most ms, that may be lost before the ranges are read one by one.
_PART, _LONGEST_MS = 4, 5_000


def fetch_range(
    cluster: Cluster,
    topic: str,
    partition: int,
    start: int,
    end: int,
    poll_timeout_ms: int | None = None,
    topic_id: UUID | None = None,
) -> Iterator[Fetched]:
    """Yield the record batches of [start, end) of a partition; the first and last batch may reach beyond the range.

    Each step ends within `poll_timeout_ms` (None: `request.timeout.ms`), with the last error if no records have come:
    `ProtocolError`, `ConnectionFailed`, `RequestTimedOut`. `OffsetOutOfRange` if the log does not have the offsets,
    `RecordTooLarge`, `DecodeError`.

    With `topic_id` a topic of the same name created later is not read: the `ProtocolError` is then UNKNOWN_TOPIC_ID.
    Brokers before 3.1 can't tell the two apart.
    """
    timeout_ms = poll_timeout_ms or cluster.config.request_timeout_ms
    return _RangeFetch(cluster, (topic, partition), start, end, timeout_ms, topic_id).run()


class _RangeFetch:
    """The fetches of one range, see `fetch_range`."""

    def __init__(
        self, cluster: Cluster, key: TopicPartition, start: int, end: int, timeout_ms: int, topic_id: UUID | None
    ) -> None:
        self._cluster, self._timeout_ms = cluster, timeout_ms
        self._key, self._name, self._topic_id = key, f"{key[0]}-{key[1]}", topic_id
        self._offset, self._end = start, end
        self._max_bytes = max(cluster.config.partition_fetch_bytes, LEAST_BYTES)
        #: The connection of the last fetch, and the one in flight.
        self._connection: Connection | None = None
        self._fetch: FetchInFlight | None = None
        #: Whether the last fetch had only corrupt batches: where they end is a guess.
        self._is_past_corrupt = False

    def run(self) -> Iterator[Fetched]:
        try:
            while self._offset < self._end:
                yield self._next()
        finally:
            self._forget()

    def _next(self) -> Fetched:
        """Wait for the next records. All requests and pauses share one timeout."""
        with self._cluster.within(self._timeout_ms) as deadline:
            retry = Retry(self._cluster.config, deadline)
            while True:
                asked_for = self._max_bytes
                try:
                    fetched = self._receive()
                    if fetched is not None:
                        self._offset = fetched.next_offset
                        self._send_ahead()
                        return fetched
                    if self._max_bytes > asked_for:
                        continue
                    self._check_range()
                    failure: KlogError = self._no_record()
                except (ConnectionFailed, RequestTimedOut) as error:
                    if (leader := self._cluster.last_leader(*self._key)) is not None:
                        self._cluster.suspect(leader)
                    failure = error
                except ProtocolError as error:
                    if not error.retriable:
                        raise
                    if error.code == ErrorCode.OFFSET_OUT_OF_RANGE:
                        # ask the leader: a broker that has just lost or gained the partition may be wrong
                        with suppress(ConnectionFailed, RequestTimedOut):
                            self._check_range()
                    failure = error
                self._forget()
                self._cluster.refresh_after(failure)  # first: if no time is left, the next call must ask another leader
                retry.pause(failure)
                _log.info("fetching %s again: %s", self._name, failure)

    def _forget(self) -> None:
        if self._fetch is not None:
            self._fetch.forget()
        self._fetch = None

    def _send_ahead(self) -> None:
        """Request the next records ahead, unless the broker throttles this client or the SASL session ends."""
        connection = self._connection
        assert connection is not None
        if self._offset < self._end and not connection.is_throttled and not connection.must_renew:
            try:
                self._fetch = self._send(connection)
            except (ConnectionFailed, RequestTimedOut) as error:
                _log.info("fetching %s again: %s", self._name, error)

    def _receive(self) -> Fetched | None:
        """Receive the response to the fetch in flight, or to a new one; None if it has no complete batch."""
        fetch, self._fetch = self._fetch, None
        if fetch is None:
            fetch = self._send(self._cluster.connection(self._cluster.leader(*self._key)))
        self._connection = fetch.connection
        try:
            entry = fetch.entries()[self._key]
        except FrameTooLarge as error:
            raise too_large(self._key, self._offset, error) from None
        limits = Limits(self._max_bytes, self._cluster.config.response_max_bytes)
        fetched = read_entry(self._key, entry, self._offset, limits, self._end)
        if fetched is None and self._is_past_corrupt and entry["high_watermark"] >= self._end:
            # the rest of the range lies in the corrupt batch: the broker finds no such offsets
            return Fetched(*self._key, self._offset, self._end, memoryview(b""), [], NOTHING)
        if isinstance(fetched, Larger):
            _log.info("%s at offset %d: a message of %d bytes, fetching again", self._name, self._offset, fetched.size)
            self._max_bytes = fetched.size
        if not isinstance(fetched, Fetched):
            return None
        if fetched.is_corrupt and len(fetched.data) >= self._max_bytes and 2 * self._max_bytes <= limits.most:
            self._max_bytes *= 2  # an intact batch after it tells where it ends
            return None
        self._is_past_corrupt = fetched.is_corrupt
        return fetched

    def _send(self, connection: Connection) -> FetchInFlight:
        wanted = {self._key: FetchParameters(self._offset, self._max_bytes, topic_id=self._topic_id)}
        return FetchInFlight(self._cluster, connection, wanted)

    def _check_range(self) -> None:
        """Raise `OffsetOutOfRange` if the log does not have the offsets."""
        available = offset_range(self._cluster, *self._key)
        if self._end > available[1] or self._offset < available[0]:
            raise OffsetOutOfRange(*self._key, (self._offset, self._end), available)

    def _no_record(self) -> RequestTimedOut:
        """The error for an offset that the log has and the broker does not give."""
        text = f"{self._name} gave no record at offset {self._offset} for {self._timeout_ms / 1000:g} s"
        if self._cluster.config.isolation_level:
            stable = list_offsets(self._cluster, {self._key: LATEST})[self._key]
            if stable <= self._offset:
                text += f": a transaction that began at offset {stable} is open, and isolation.level is read_committed"
        return RequestTimedOut(text)


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
                if answer.fetched:
                    yield answer.fetched
                cut = {key: needed for key, needed in answer.cut.items() if needed <= self._most}
                if cut and size < self._most:
                    again |= cut
                    cut_at = size
                    if len(cut) > len(answer.fetched):  # other ranges will need more, too
                        size = self._bytes = self._more(size, cut)
            left = list(again)
            if again:
                size = max(size, self._more(cut_at, again))

    def _more(self, size: int, cut: Mapping[TopicPartition, int]) -> int:
        """How much to ask for instead of `size`, which has cut off these ranges."""
        return min(self._most, max(2 * size, median_high(cut.values())))


class ShortAnswer(NamedTuple):
    """Partitions whose range is there as a whole, and those cut off, each with the bytes it may need (0: unknown)."""

    fetched: dict[TopicPartition, Fetched]
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
            wanted = {
                key: FetchParameters(start, most_bytes, topic_id=topic_ids.get(key[0]))
                for key, (start, _) in starts.items()
            }
            entries = FetchInFlight(cluster, cluster.connection(node), wanted).entries()
    except KlogError as error:
        _log.info("fetching %d partitions of broker %d one by one: %s", len(starts), node, error)
        cluster.refresh_after(error)
        return None
    result = ShortAnswer({}, {})
    for key, entry in entries.items():
        start, end = starts[key]
        try:
            found = read_entry(key, entry, start, Limits(most_bytes, cluster.config.response_max_bytes), end)
        except KlogError:
            found = None
        fetched = found if isinstance(found, Fetched) and not (found.damaged or found.is_corrupt) else None
        if fetched is not None and fetched.next_offset >= end:
            result.fetched[key] = fetched
        elif not entry["error_code"] and entry["high_watermark"] >= end:
            # brokers leave out a first batch that is larger than what was asked for
            size = 0 if fetched is None else len(entry["records"])
            fetched_offsets = 1 if fetched is None else fetched.next_offset - start
            result.cut[key] = size * (end - start) // fetched_offsets + size // 8
    return result


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
    return leaders
