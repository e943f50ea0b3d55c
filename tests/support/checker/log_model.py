"""A model of a log: the appended batches, and the state derived from them."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.support.brokers.batches import make_batch, walk

ABORT, COMMIT = 0, 1
TRANSACTIONAL, CONTROL = 0x10, 0x20
#: How many of a producer's last batches are recognized as duplicates.
KNOWN = 5


class Record(NamedTuple):
    offset: int
    timestamp: int
    key: bytes
    value: bytes | None


class Batch(NamedTuple):
    """An appended batch; `marker` is set for a control batch, `sequence` is -1 if it has none."""

    base: int
    data: bytes
    records: tuple[Record, ...]
    producer: int = -1
    epoch: int = -1
    sequence: int = -1
    is_transactional: bool = False
    marker: int | None = None

    @property
    def last(self) -> int:
        return self.base + max(1, len(self.records)) - 1

    @property
    def max_timestamp(self) -> int:
        return max(record.timestamp for record in self.records)


def encoded(
    pairs: Sequence[tuple[bytes | None, bytes | None]],
    timestamps: Sequence[int],
    *,
    codec: str = "none",
    producer: int = -1,
    epoch: int = -1,
    sequence: int = -1,
    attributes: int = 0,
) -> bytes:
    """Encode a batch as a producer sends it, or with CONTROL as a broker writes it."""
    fields = {"producer_id": producer, "producer_epoch": epoch, "base_sequence": sequence, "attributes": attributes}
    return bytes(make_batch(pairs, timestamps, codec, **fields))


def marker_pair(kind: int) -> tuple[bytes, bytes]:
    return struct.pack(">hh", 0, kind), struct.pack(">hi", 0, 4)


def stored(data: bytes, offset: int) -> bytes:
    """The batch as the log should store it: the broker sets base offset and leader epoch."""
    return struct.pack(">q", offset) + data[8:12] + struct.pack(">i", 0) + data[16:]


@dataclass
class Derived:
    """State derived from batches: known producers, starts of open transactions, aborted and ended records."""

    producers: dict[int, tuple[int, list[Batch]]] = field(default_factory=dict)
    open: dict[int, int] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)  # offsets of records
    ended: set[int] = field(default_factory=set)  # offsets of records outside of transactions, or in ended ones


def derive(batches: Iterable[Batch]) -> Derived:
    found = Derived()
    pending: dict[int, list[int]] = {}
    for batch in batches:
        offsets = [record.offset for record in batch.records]
        if batch.marker is not None:
            found.open.pop(batch.producer, None)
            ended = pending.pop(batch.producer, [])
            found.ended.update(ended)
            if batch.marker == ABORT:
                found.aborted.update(ended)
            _, known = found.producers.get(batch.producer, (batch.epoch, []))
            found.producers[batch.producer] = batch.epoch, known
            continue
        if batch.is_transactional:
            found.open.setdefault(batch.producer, batch.base)
            pending.setdefault(batch.producer, []).extend(offsets)
        else:
            found.ended.update(offsets)
        if batch.producer >= 0:
            epoch, known = found.producers.get(batch.producer, (batch.epoch, []))
            known = [*(known if epoch == batch.epoch else []), batch][-KNOWN:]
            found.producers[batch.producer] = batch.epoch, known
    return found


def committed_in(data: bytes, aborted: Iterable[tuple[int, int]]) -> set[int]:
    """Base offsets of the batches in a broker's answer that a read_committed consumer accepts.

    Works like Kafka's consumer: `aborted` are (producer id, first offset); an abort marker ends its producer's entry.
    """
    waiting = deque(sorted(aborted, key=lambda item: item[1]))
    now: set[int] = set()
    taken = set()
    for batch in walk(data):
        attributes, producer = (
            struct.unpack_from(">h", data, batch.position + 21)[0],
            *struct.unpack_from(">q", data, batch.position + 43),
        )
        while waiting and waiting[0][1] <= batch.last_offset:
            now.add(waiting.popleft()[0])
        if attributes & CONTROL:
            count, at = struct.unpack_from(">i", data, batch.position + 57)[0], batch.position + 61
            if count and _marker_type(data[at : batch.position + batch.size]) == ABORT:
                now.discard(producer)
        elif not (attributes & TRANSACTIONAL and producer in now):
            taken.add(batch.base_offset)
    return taken


def _marker_type(record: bytes) -> int:
    # length, attributes, two deltas and the key's length have one byte each; then the key: version, type
    return int(struct.unpack_from(">h", record, 7)[0])


class Model:
    """One log: the batches appended since it was created, and failed appends, which a crash may reveal."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.unsure: list[list[Batch]] = []  # appends that failed
        self.start = self.largest_start = 0
        self.clean_offset = 0  # compaction may have removed records below it
        self.derived = derive([])

    @property
    def end(self) -> int:
        end = self.batches[-1].last + 1 if self.batches else 0
        return max(end, self.largest_start)  # a recorded start offset survives a crash, unflushed records may not

    def add(self, batches: list[Batch]) -> None:
        self.batches += batches
        self.derived = derive(self.batches)

    def cut(self, batches: list[Batch]) -> None:
        self.batches = batches
        self.derived = derive(batches)
