"""Reading a range of offsets of one partition.

The next request leaves before the last answer is decoded, so that the broker and the socket work meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spark_klog.client.cluster import Cluster
from spark_klog.client.connection import Connection
from spark_klog.client.offsets import offset_range
from spark_klog.errors import (
    ConnectionFailed,
    DecodeError,
    ErrorCode,
    OffsetOutOfRange,
    ProtocolError,
    RecordTooLarge,
    RequestTimedOut,
)
from spark_klog.protocol.apis import FETCH
from spark_klog.records.batch import first_batch_size, next_offset_after, whole_batch_size
from spark_klog.records.offset_order import NO_END, NOTHING, End, OffsetOrder

_log = logging.getLogger(__name__)
_MAX_WAIT_MS = 500


@dataclass(frozen=True, slots=True)
class Fetched:
    """Record batches from `offset` on, perhaps with a partial one at the end, and the list of aborted transactions.

    `data` is a view of a buffer that is used again: it is valid until the next one is asked for.
    """

    offset: int
    next_offset: int
    data: memoryview
    aborted: list[tuple[int, int]]
    damaged: Mapping[int, DecodeError]
    """The errors of batches that are not where they say, by their positions in `data`."""


def fetch_range(cluster: Cluster, topic: str, partition: int, start: int, end: int) -> Iterator[Fetched]:
    """Fetch [start, end) of a partition, batch by batch; batches may reach beyond both ends.

    `OffsetOutOfRange` where the log does not have the wanted offsets (any more), `ProtocolError`, `ConnectionFailed`
    or `RequestTimedOut` where the leader can't be had within `request.timeout.ms`, `RecordTooLarge`, `DecodeError`.
    """
    return _RangeFetch(cluster, topic, partition, start, end).run()


class _RangeFetch:
    def __init__(self, cluster: Cluster, topic: str, partition: int, start: int, end: int) -> None:
        self._cluster = cluster
        self._topic, self._partition = topic, partition
        self._offset, self._end = start, end
        self._max_bytes = cluster.config.partition_fetch_bytes
        #: Whether the last batches fetched were all corrupt.
        self._is_past_corrupt = False

    @property
    def _name(self) -> str:
        return f"{self._topic}-{self._partition}"

    def run(self) -> Iterator[Fetched]:
        connection: Connection | None = None
        idle_since = time.monotonic()
        try:
            while self._offset < self._end:
                if connection is None or connection.closed or not connection.pending:
                    connection = self._cluster.attempt(self._ask)
                try:
                    answer = self._answer(connection)
                except (ConnectionFailed, RequestTimedOut) as error:
                    _log.info("fetching %s again: %s", self._name, error)
                    self._cluster.forget_leaders()
                    connection = None
                    continue
                if answer is None:
                    self._check_idle(idle_since)
                    connection = None
                    continue
                idle_since = time.monotonic()
                self._offset = answer.next_offset
                if self._offset < self._end:
                    self._send(connection)
                yield answer
        finally:
            if connection is not None and connection.pending:
                connection.close()

    def _ask(self) -> Connection:
        connection = self._cluster.connection(self._cluster.leader(self._topic, self._partition))
        if not connection.pending:
            self._send(connection)
        return connection

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
        connection.send(FETCH, request)

    def _answer(self, connection: Connection) -> Fetched | None:
        """The next answer; None where it had no records, or an error that passes."""
        answer = connection.receive()
        code = answer["error_code"]
        if not code:
            entry = answer["responses"][0]["partitions"][0]
            code = entry["error_code"]
        if code == ErrorCode.OFFSET_OUT_OF_RANGE:
            self._out_of_range()
        if code:
            error = ProtocolError(code, f"fetch of {self._name} at offset {self._offset}")
            if not error.retriable:
                raise error
            _log.info("fetching again: %s", error)
            self._cluster.forget_leaders()
            return None
        return self._fetched(entry)

    def _fetched(self, entry: dict[str, Any]) -> Fetched | None:
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

    def _out_of_range(self) -> None:
        available = offset_range(self._cluster, self._topic, self._partition)
        raise OffsetOutOfRange(self._topic, self._partition, (self._offset, self._end), available)

    def _check_idle(self, since: float) -> None:
        """Nothing came: the log may end before the wanted end."""
        available = offset_range(self._cluster, self._topic, self._partition)
        if self._end > available[1] or self._offset < available[0]:
            raise OffsetOutOfRange(self._topic, self._partition, (self._offset, self._end), available)
        seconds = self._cluster.config.request_timeout_ms / 1000
        if time.monotonic() - since > seconds:
            raise RequestTimedOut(f"{self._name} gave no record at offset {self._offset} for {seconds:g} s")
