"""The state of a sender: unconfirmed batches by partition, requests in flight, and its clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

from spark_klog.client.cluster import TopicPartition
from spark_klog.client.net.connection import Connection, Handle
from spark_klog.client.producer.numbering import Numbering
from spark_klog.client.producer.receipts import Receipt
from spark_klog.client.settings import ClientConfig
from spark_klog.errors import RequestTimedOut, UnsupportedVersionError
from spark_klog.protocol.codec import Message
from spark_klog.records.building.conversion import down_convert
from spark_klog.records.contract import Record
from spark_klog.records.formats.batch_v2 import TRANSACTIONAL_BIT, build_batch, read_batch_header, set_producer
from spark_klog.records.kernels.reference import append_record, iter_records
from spark_klog.wire.primitives import Buffer

#: Seconds. A broker that takes longer for a request no longer delays records for other brokers.
_SLOW_SECONDS = 1.0


class Batch:
    """A finished batch; `deadline` is a reading of the sender's clock, `order` its place in the queue.

    `first` is the place of its first record among those of its receipt, None if it must not be split. `may_be_written`:
    its records were sent before in a larger batch without an answer that says what became of them.
    """

    __slots__ = (
        *("append_time", "base_offset", "count", "data", "deadline", "first", "is_in_flight", "may_be_written"),
        *("order", "receipt", "times_sent"),
    )

    def __init__(
        self,
        data: bytes | bytearray,
        count: int,
        deadline: float,
        receipt: Receipt | None,
        first: int | None = 0,
        *,
        may_be_written: bool = False,
    ) -> None:
        self.data = data
        self.count = count
        self.deadline = deadline
        self.is_in_flight = False
        self.receipt = receipt
        self.first = first
        self.may_be_written = may_be_written
        self.order = 0
        #: How often it was sent.
        self.times_sent = 0
        self.base_offset = self.append_time = -1


class Queue:
    """A partition's unconfirmed batches, oldest first. `not_before` is a reading of `time.monotonic`.

    Several batches are in flight only if they are numbered and `is_open`: the leader has confirmed the batch before
    them, so it rejects any that come out of order. After a failure the queue waits until none is in flight, and sends
    the oldest one alone.
    """

    __slots__ = (
        *("added", "attempts", "batches", "confirmed", "failure", "in_flight", "in_flight_size", "is_open", "key"),
        *("must_renumber", "node", "not_before", "numbering", "resent", "size", "splits"),
    )

    def __init__(self, key: TopicPartition, numbering: Numbering | None) -> None:
        self.key = key
        self.numbering = numbering
        self.batches: deque[Batch] = deque()
        self.added = 0
        #: Confirmed batches after one that is not.
        self.confirmed: list[Batch] = []
        #: Bytes of all batches, and the number and bytes of those in flight, at the broker `node`.
        self.size = self.in_flight = self.in_flight_size = 0
        self.node = -1
        self.is_open = False
        #: Whether the leader does not know the sequences, or the batches have none yet.
        self.must_renumber = False
        self.attempts = 0
        #: How often the oldest batch was sent in vain.
        self.resent = 0
        #: How often a batch was split.
        self.splits = 0
        self.not_before = 0.0
        self.failure: Exception | None = None

    @property
    def name(self) -> str:
        return f"{self.key[0]}-{self.key[1]}"

    def add(self, batch: Batch) -> None:
        self.added += 1
        batch.order = self.added
        self.batches.append(batch)
        self.size += len(batch.data)

    def replace_oldest(self, parts: list[Batch]) -> None:
        """Put batches in the place of the oldest one, which is not in flight; they are sent alone at first."""
        oldest = self.batches.popleft()
        self.size += sum(len(part.data) for part in parts) - len(oldest.data)
        for before, part in enumerate(reversed(parts)):
            part.order = oldest.order - before  # unique: batches before the oldest are confirmed, in order
            self.batches.appendleft(part)
        self.splits += 1
        self.is_open = False

    def next(self, now: float, most: int) -> Batch | None:
        """The batch to send next, None if it has to wait; `most` batches may be in flight, `now` is the time."""
        if self.not_before > now or len(self.batches) <= self.in_flight:
            return None
        if self.in_flight and not (self.is_open and self.numbering is not None and self.in_flight < most):
            return None
        batch = self.batches[self.in_flight]  # if `is_open`, those in flight are the oldest
        # batches between them may be confirmed, and count: the broker knows the oldest among its last ones only
        return None if self.in_flight and batch.order - self.batches[0].order >= most else batch

    def sent(self, batch: Batch, node: int) -> None:
        batch.is_in_flight = True
        batch.times_sent += 1
        self.in_flight += 1
        self.in_flight_size += len(batch.data)
        self.node = node

    def answered(self, batch: Batch) -> None:
        """Note that a batch is no longer in flight."""
        batch.is_in_flight = False
        self.in_flight -= 1
        self.in_flight_size -= len(batch.data)

    def confirm(self, batch: Batch) -> list[Batch]:
        """Remove a batch that the leader has appended; return the batches confirmed with all before them, in order."""
        is_oldest = batch is self.batches[0]
        self.batches.remove(batch)
        self.size -= len(batch.data)
        self.confirmed.append(batch)
        if not is_oldest:
            return []
        self.attempts = self.resent = 0
        self.failure = None
        self.is_open = bool(self.batches)  # a leader may forget the sequences of an idle producer
        confirmed = sorted(self.confirmed, key=lambda batch: batch.order)
        before = [one for one in confirmed if not self.batches or one.order < self.batches[0].order]
        self.confirmed = confirmed[len(before) :]
        return before

    def renumber(self, numbering: Numbering | None) -> None:
        """Give all batches sequences of this numbering; None leaves them as they are."""
        self.numbering = numbering
        self.must_renumber = False
        if numbering is None:
            return
        for batch in self.batches:
            batch.data = bytearray(batch.data)
            sequence = numbering.take(batch.count)
            set_producer(memoryview(batch.data), numbering.producer_id, numbering.epoch, sequence)


class Request:
    """A Produce request in flight; without a handle (acks=0) one that is being sent.

    From `slow_at` on it no longer delays records for other brokers. `slow_at` and `deadline` are readings of the
    sender's clock.
    """

    __slots__ = ("batches", "connection", "deadline", "handle", "slow_at")

    def __init__(
        self,
        connection: Connection,
        handle: Handle | None,
        batches: list[tuple[Queue, Batch]],
        now: float,
        timeout: float,
    ) -> None:
        self.connection = connection
        self.handle = handle
        self.batches = batches
        self.slow_at = now + _SLOW_SECONDS
        self.deadline = now + timeout


class CallClock:
    """A clock that runs only during calls, since nothing is delivered between them; after `run_on` always."""

    def __init__(self) -> None:
        self._left_at = time.monotonic()
        self._between = 0.0
        self._is_within = self._runs_on = False

    def run_on(self) -> None:
        if not self._runs_on:
            self.__enter__()
            self._runs_on = True

    def __enter__(self) -> None:
        if not self._runs_on:
            self._between += time.monotonic() - self._left_at
            self._is_within = True

    def __exit__(self, *_: object) -> None:
        if not self._runs_on:
            self._is_within = False
            self._left_at = time.monotonic()

    def now(self) -> float:
        return (time.monotonic() if self._is_within else self._left_at) - self._between


def next_batches(queues: Iterable[Queue], now: float, config: ClientConfig) -> list[tuple[Queue, Batch]]:
    """The next batch of each partition, as many as fit into max.request.size, but at least one if there is one."""
    chosen: list[tuple[Queue, Batch]] = []
    size = 0
    for queue in queues:
        batch = queue.next(now, config.max_in_flight)
        if batch is None:
            continue
        if chosen and size + len(batch.data) > config.max_request_size:
            break
        chosen.append((queue, batch))
        size += len(batch.data)
    return chosen


def expired(queue: Queue, config: ClientConfig) -> RequestTimedOut:
    """The error of a partition whose oldest batch was not confirmed within delivery.timeout.ms."""
    seconds, limit = config.delivery_timeout_ms / 1000, config.named("delivery.timeout.ms")
    reason = f": {queue.failure}" if queue.failure else ""
    return RequestTimedOut(f"records for {queue.name} were not written within {seconds:g} s ({limit}){reason}")


#: The first version of Produce with magic 2, and the one with magic 1.
_FIRST_MAGIC_2, _MAGIC_1 = 3, 2


def encode_batch(
    body: Buffer,
    count: int,
    base_timestamp: int,
    max_timestamp: int,
    config: ClientConfig,
    numbering: Numbering | None,
    is_transactional: bool,
) -> bytes:
    """A batch of `count` encoded records, compressed, with the next sequences of the numbering, if any."""
    return build_batch(
        body,
        count,
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp,
        codec=config.codec,
        level=config.compression_level,
        attributes=TRANSACTIONAL_BIT if is_transactional else 0,
        producer_id=numbering.producer_id if numbering else -1,
        producer_epoch=numbering.epoch if numbering else -1,
        base_sequence=numbering.take(count) if numbering else -1,
    )


def produce_message(
    batches: list[tuple[Queue, Batch]], version: int, config: ClientConfig, transactional_id: str | None
) -> Message:
    """The request of a batch per partition; `UnsupportedVersionError` if a broker before 0.11 can't have them."""
    topics: dict[str, list[Message]] = {}
    for queue, batch in batches:
        data = batch.data
        records = data if version >= _FIRST_MAGIC_2 else _as_message_set(bytes(data), version, queue.name)
        topics.setdefault(queue.key[0], []).append({"index": queue.key[1], "records": records})
    return {
        "transactional_id": transactional_id,
        "acks": config.acks,
        "timeout_ms": config.request_timeout_ms,
        "topic_data": [{"name": topic, "partition_data": data} for topic, data in topics.items()],
    }


def _as_message_set(batch: bytes, version: int, where: str) -> bytearray:
    """Convert a batch for a broker before 0.11; `UnsupportedVersionError` if records have headers."""
    converted = down_convert(batch, 1 if version == _MAGIC_1 else 0)
    if converted.lost_headers:
        raise UnsupportedVersionError(
            f"records for {where} have headers, but the broker supports only Produce {version}, which has none: "
            "leave them out"
        )
    return converted.data


def split(batch: Batch, config: ClientConfig) -> list[Batch]:
    """Two batches with half of the records each. They share the batch's sequences, so those of later batches stay.

    The broker refuses the first one as out of order if it has written the whole batch at an earlier attempt: it looks
    at a batch's size before it looks for duplicates.
    """
    view = memoryview(batch.data)
    header = read_batch_header(view)
    numbering = None
    if header.base_sequence >= 0:
        numbering = Numbering(header.producer_id, header.producer_epoch, header.base_sequence)
    records = list(iter_records(header, view))
    middle = len(records) // 2
    before = batch.first or 0
    may_be_written = batch.may_be_written or batch.times_sent > 1
    parts: list[Batch] = []
    for first, some in ((before, records[:middle]), (before + middle, records[middle:])):
        base = some[0].timestamp
        latest = max(record.timestamp for record in some)
        data = encode_batch(
            _body(some, base), len(some), base, latest, config, numbering, is_transactional=header.is_transactional
        )
        is_doubtful = may_be_written and not parts
        parts.append(Batch(data, len(some), batch.deadline, batch.receipt, first, may_be_written=is_doubtful))
    if batch.receipt is not None:
        batch.receipt.split()
    return parts


def _body(records: Sequence[Record], base_timestamp: int) -> bytearray:
    body = bytearray()
    for number, record in enumerate(records):
        append_record(body, record.timestamp - base_timestamp, number, record.key, record.value, record.headers)
    return body
