"""Unconfirmed batches of a partition, and the split of one that is too large for its topic."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from spark_klog.base.names import TopicPartition
from spark_klog.client.producer.numbering import Numbering
from spark_klog.client.producer.receipts import Receipt
from spark_klog.client.settings import ClientConfig
from spark_klog.records.formats.batch_v2 import TRANSACTIONAL_BIT, build_batch, read_batch_header, set_producer
from spark_klog.records.kernels.reference import append_record, iter_records


@dataclass(slots=True, eq=False)
class Batch:
    """A finished batch; `deadline` is a reading of the sender's clock, `order` its place in the queue.

    `first` is the place of its first record among those of its receipt, None if it must not be split. `may_be_written`:
    its records were sent before in a larger batch without an answer that says what became of them.
    """

    data: bytes | bytearray
    count: int
    deadline: float
    receipt: Receipt | None
    first: int | None = 0
    may_be_written: bool = False
    order: int = 0
    is_in_flight: bool = False
    #: How often it was sent.
    times_sent: int = 0
    base_offset: int = -1
    append_time: int = -1


@dataclass(slots=True, eq=False)
class Queue:
    """A partition's unconfirmed batches, oldest first. `not_before` is a reading of `time.monotonic`.

    Several batches are in flight only if they are numbered and `is_open`: the leader has confirmed the batch before
    them, so it rejects any that come out of order. After a failure the queue waits until none is in flight, and sends
    the oldest one alone.
    """

    key: TopicPartition
    numbering: Numbering | None
    batches: deque[Batch] = field(default_factory=deque)
    added: int = 0
    #: Confirmed batches after one that is not.
    confirmed: list[Batch] = field(default_factory=list)
    #: Bytes of all batches.
    size: int = 0
    #: The number and bytes of batches in flight, at the broker `node`.
    in_flight: int = 0
    in_flight_size: int = 0
    node: int = -1
    is_open: bool = False
    #: Whether the leader does not know the sequences, or the batches have none yet.
    must_renumber: bool = False
    attempts: int = 0
    #: How often the oldest batch was sent in vain.
    resent: int = 0
    #: How often a batch was split.
    splits: int = 0
    not_before: float = 0.0
    failure: Exception | None = None

    @property
    def name(self) -> str:
        return f"{self.key[0]}-{self.key[1]}"

    def append(self, batch: Batch) -> None:
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
        before = [batch for batch in confirmed if not self.batches or batch.order < self.batches[0].order]
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
            sequence = numbering.take_sequences(batch.count)
            set_producer(memoryview(batch.data), numbering.producer_id, numbering.epoch, sequence)


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
        body = bytearray()
        for number, record in enumerate(some):
            append_record(body, record.timestamp - base, number, record.key, record.value, record.headers)
        data = build_batch(
            body,
            len(some),
            base_timestamp=base,
            max_timestamp=latest,
            codec=config.codec,
            level=config.compression_level,
            attributes=TRANSACTIONAL_BIT if header.is_transactional else 0,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=numbering.take_sequences(len(some)) if numbering else -1,
        )
        is_doubtful = may_be_written and not parts
        parts.append(Batch(data, len(some), batch.deadline, batch.receipt, first, may_be_written=is_doubtful))
    if batch.receipt is not None:
        batch.receipt.split()
    return parts
