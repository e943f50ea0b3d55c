"""Reading a range of offsets of one partition.

The next request leaves before the last answer is decoded, so that the broker and the socket work meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from spark_klog.client.answers import by_key, check_code
from spark_klog.client.backoff import Backoff
from spark_klog.client.cluster import Cluster
from spark_klog.client.connection import Connection, Handle
from spark_klog.client.offsets import offset_range
from spark_klog.errors import (
    ConnectionFailed,
    DecodeError,
    ErrorCode,
    KlogError,
    OffsetOutOfRange,
    ProtocolError,
    RecordTooLarge,
    RequestTimedOut,
)
from spark_klog.protocol.apis import FETCH
from spark_klog.protocol.codec import Message
from spark_klog.records.batch import first_batch_size, next_offset_after, whole_batch_size
from spark_klog.records.offset_order import NO_END, NOTHING, End, OffsetOrder

_log = logging.getLogger(__name__)
_MAX_WAIT_MS = 500
#: Brokers before 0.10.1 give no more than they are asked for; so much tells a message's size.
_LEAST_BYTES = 12
#: The first version of Fetch with topic ids, which names no topic any more (KIP-516).
_WITH_TOPIC_IDS = 13


@dataclass(frozen=True, slots=True)
class Fetched:
    """Record batches from `offset` on, perhaps with a partial one at the end, and the list of aborted transactions.

    `data` is a view of a buffer that is used again: it is valid until the next one is asked for, by any read of the
    same cluster.
    """

    offset: int
    next_offset: int
    data: memoryview
    aborted: list[tuple[int, int]]
    damaged: Mapping[int, DecodeError]
    """The errors of batches that are not where they say, by their positions in `data`."""


def fetch_range(
    cluster: Cluster,
    topic: str,
    partition: int,
    start: int,
    end: int,
    poll_timeout_ms: int | None = None,
    topic_id: UUID | None = None,
) -> Iterator[Fetched]:
    """Fetch [start, end) of a partition, batch by batch; batches may reach beyond both ends.

    Each step ends within `poll_timeout_ms` (None: `request.timeout.ms`), with the last error if no records have come:
    `ProtocolError`, `ConnectionFailed`, `RequestTimedOut`. `OffsetOutOfRange` if the log does not have the wanted
    offsets (any more), `RecordTooLarge`, `DecodeError`.

    With `topic_id` no other topic of that name is read: the `ProtocolError` is then UNKNOWN_TOPIC_ID. Brokers before
    3.1 can't tell them apart.
    """
    return _RangeFetch(cluster, topic, partition, start, end, poll_timeout_ms, topic_id).run()


def entries_of(answer: Message, by: str = "topic") -> Iterator[tuple[tuple[Any, int], Message]]:
    """What a Fetch response says of each partition, `by` its "topic" or "topic_id"."""
    for topic in answer["responses"]:
        for entry in topic["partitions"]:
            yield (topic[by], entry["partition_index"]), entry


class _RangeFetch:
    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        partition: int,
        start: int,
        end: int,
        poll_timeout_ms: int | None,
        topic_id: UUID | None,
    ) -> None:
        self._cluster = cluster
        self._timeout_ms = poll_timeout_ms or cluster.config.request_timeout_ms
        self._topic, self._partition = topic, partition
        self._topic_id = topic_id
        self._offset, self._end = start, end
        self._max_bytes = max(cluster.config.partition_fetch_bytes, _LEAST_BYTES)
        self._connection: Connection | None = None
        self._handle: Handle | None = None
        #: Whether the last batches fetched were all corrupt.
        self._is_past_corrupt = False

    @property
    def _name(self) -> str:
        return f"{self._topic}-{self._partition}"

    def run(self) -> Iterator[Fetched]:
        try:
            while self._offset < self._end:
                yield self._next()
        finally:
            self._forget()

    def _next(self) -> Fetched:
        """The next records. All requests and pauses until they are here share one timeout."""
        with self._cluster.within(self._timeout_ms) as deadline:
            backoff = Backoff(self._cluster.config, deadline)
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
                except (ConnectionFailed, RequestTimedOut) as error:
                    failure: KlogError = error
                except ProtocolError as error:
                    if not error.retriable:
                        raise
                    if error.code == ErrorCode.OFFSET_OUT_OF_RANGE:
                        # a broker that has just lost or got the partition may be wrong
                        with suppress(ConnectionFailed, RequestTimedOut):
                            self._check_range()
                    failure = error
                else:
                    seconds = self._timeout_ms / 1000
                    failure = RequestTimedOut(f"{self._name} gave no record at offset {self._offset} for {seconds:g} s")
                self._forget()
                backoff.pause(failure)
                _log.info("fetching %s again: %s", self._name, failure)
                self._cluster.refresh_after(failure)

    def _forget(self) -> None:
        """Give up the fetch that is under way."""
        if self._connection is not None and self._handle is not None:
            self._connection.forget(self._handle)
        self._handle = None

    def _send_ahead(self) -> None:
        """Ask for the next records already, unless the broker wants to hear nothing for a while."""
        connection = self._connection
        if self._offset < self._end and connection is not None and not connection.is_throttled:
            try:
                self._send(connection)
            except (ConnectionFailed, RequestTimedOut) as error:
                _log.info("fetching %s again: %s", self._name, error)

    def _receive(self) -> Fetched | None:
        """The answer to the fetch that is under way, or else to a new one; None if it has no whole batch."""
        if self._connection is None or self._handle is None:
            self._connection = self._cluster.connection(self._cluster.leader(self._topic, self._partition))
            self._send(self._connection)
        assert self._handle is not None  # a fetch is answered
        handle, self._handle = self._handle, None
        answer = self._connection.receive(handle, self._cluster.deadline())
        return self._fetched(self._entry(answer, handle.version))

    def _send(self, connection: Connection) -> None:
        config = self._cluster.config
        request = {
            "max_wait_ms": _MAX_WAIT_MS,
            "min_bytes": 1,
            "max_bytes": max(config.fetch_max_bytes, self._max_bytes),
            "isolation_level": config.isolation_level,
            "topics": [
                {
                    "topic": self._topic,
                    "topic_id": self._topic_id,
                    "partitions": [
                        {
                            "partition": self._partition,
                            "fetch_offset": self._offset,
                            "partition_max_bytes": self._max_bytes,
                        }
                    ],
                }
            ],
        }
        is_by_id = self._topic_id is not None and connection.speaks(FETCH, _WITH_TOPIC_IDS)
        version = _WITH_TOPIC_IDS if is_by_id else None
        self._handle = connection.send(FETCH, request, version=version, deadline=self._cluster.deadline())

    def _entry(self, answer: Message, version: int) -> Message:
        """What an answer says of the partition; `ProtocolError` for its error."""
        what = f"fetch of {self._name} at offset {self._offset}"
        check_code(FETCH, answer["error_code"], what)
        by, topic = ("topic_id", self._topic_id) if version >= _WITH_TOPIC_IDS else ("topic", self._topic)
        key = topic, self._partition
        entry = by_key(FETCH, answer, entries_of(answer, by), [key])[key]
        check_code(FETCH, entry["error_code"], what)
        return entry

    def _fetched(self, entry: Message) -> Fetched | None:
        records, high_watermark = entry["records"], entry["high_watermark"]
        if records is None or not len(records):
            if self._is_past_corrupt and high_watermark >= self._end:
                # a broker finds none of the offsets that the corrupt batch should have had
                return Fetched(self._offset, self._end, memoryview(b""), [], NOTHING)
            return None
        # that of a new leader may lag behind
        log_end = NO_END if high_watermark <= self._offset else max(high_watermark, self._end)
        order = OffsetOrder(records, self._offset, log_end)
        try:
            end = self._sound_end(records, order, log_end)
            if end is None:
                return None
        except DecodeError as error:
            raise DecodeError(f"{self._name} at offset {self._offset}: {error}") from None
        aborted = [(item["producer_id"], item["first_offset"]) for item in entry["aborted_transactions"] or ()]
        return Fetched(self._offset, end.offset, records[: end.position], aborted, order.damaged)

    def _sound_end(self, records: memoryview, order: OffsetOrder, log_end: int) -> End | None:
        """Where to go on; None where the fetch must be larger.

        A corrupt batch is not to say where the next one begins, where it can be helped: it may lie.
        """
        end = order.end()
        if end is None and whole_batch_size(records) is not None:
            larger = 2 * self._max_bytes
            if len(records) >= self._max_bytes and larger <= self._cluster.config.response_max_bytes:
                self._max_bytes = larger
                return None
            self._is_past_corrupt = True
            claims = [self._claimed_end(records), log_end]
            if not order.has_messages:
                claims.append(self._offset + order.length)
            return End(max(self._offset + 1, min(claims)), len(records))
        if end is None or end.offset <= self._offset:
            self._ask_for_more(records)
            return None
        self._is_past_corrupt = False
        return end

    def _claimed_end(self, records: memoryview) -> int:
        try:
            return next_offset_after(records, self._offset)
        except DecodeError:
            return self._offset

    def _ask_for_more(self, records: memoryview) -> None:
        """Fetches before version 3 end within the first message where it is larger than what was asked for."""
        size = first_batch_size(records) or 0
        if 0 < size <= len(records):
            raise DecodeError(f"{len(records)} bytes fetched hold only records before it")
        if not size or size <= self._max_bytes or size > self._cluster.config.response_max_bytes:
            raise RecordTooLarge(self._topic, self._partition, self._offset, size, len(records))
        _log.info("%s at offset %d: a message of %d bytes, fetching again", self._name, self._offset, size)
        self._max_bytes = size

    def _check_range(self) -> None:
        """`OffsetOutOfRange` if the log does not have the offsets (any more, or yet)."""
        available = offset_range(self._cluster, self._topic, self._partition)
        if self._end > available[1] or self._offset < available[0]:
            raise OffsetOutOfRange(self._topic, self._partition, (self._offset, self._end), available)
