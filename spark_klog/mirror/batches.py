"""Batches of one log as batches for another.

    magic 2, dense offsets, create time     copied: the header is renewed, the records' bytes stay as they are
    magic 2 with gaps (compaction), or a
    fetch that begins within it             rebuilt: brokers take only offset deltas 0, 1, 2 and so on
    log append time                         rebuilt with create time: brokers refuse append time from producers
    magic 0, 1                              converted to magic 2, wrapper by wrapper, plain messages in runs
    control batches, aborted transactions,
    batches without records                 left out

A copied batch has the base offset 0: Kafka compresses a batch again whose records do not begin there.

What is rebuilt keeps keys, values, headers, timestamps and codec. For a target before 0.11 the sender converts
batches to the older magic. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from spark_klog.client.fetch.entries import Fetched
from spark_klog.errors import DecodeError
from spark_klog.records.building.conversion import batch_of
from spark_klog.records.contract import CREATE_TIME, LOG_APPEND_TIME, Record
from spark_klog.records.formats.batch_v2 import BatchHeader
from spark_klog.records.reading.reader import AbortedTransactions, records_of, visible_batches
from spark_klog.wire.codecs import NONE, codec_by_id

#: Bytes of the plain messages of magic 0 and 1 that become one batch.
_RUN_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Span:
    """Records with consecutive offsets at the source: the first offset, their number, their place in the batch."""

    first: int
    count: int
    place: int


@dataclass(slots=True)
class OutBatch:
    """A batch of magic 2 for the target, with offset deltas 0, 1, 2 and so on.

    `following` is the source's offset after it, `is_copied` whether its records' bytes are those of the source.
    """

    data: bytearray
    count: int
    following: int
    spans: Sequence[Span]
    is_copied: bool


def out_batches(chunk: Fetched, limit: int) -> Iterator[OutBatch]:
    """The batches for the target, with the visible records of a chunk from its offset on.

    A batch may be decompressed to at most `limit` bytes. `DecodeError`, which names the partition, for corrupt data,
    after the batches before it.
    """
    waiting: list[Record] = []
    size = 0
    try:
        sound = chunk.data[: min(chunk.damaged, default=len(chunk.data))]  # before the first batch with wrong offsets
        for header, batch in visible_batches(sound, AbortedTransactions(chunk.aborted)):
            is_plain = not isinstance(header, BatchHeader) and not header.codec_id
            if waiting and (not is_plain or size >= _RUN_BYTES):
                yield _rebuilt(waiting, 0)
                waiting, size = [], 0
            if isinstance(header, BatchHeader) and _is_copyable(header, chunk.offset):
                span = Span(header.base_offset, header.count, 0)
                yield OutBatch(bytearray(batch), header.count, header.next_offset, [span], True)
                continue
            records = [record for record in records_of(header, batch, limit) if record.offset >= chunk.offset]
            if is_plain:
                waiting += records
                size += len(batch)
            elif records:
                yield _rebuilt(records, header.codec_id)
        if waiting:
            yield _rebuilt(waiting, 0)
        for damage in chunk.damaged.values():
            raise damage
    except DecodeError as error:
        raise chunk.named(error) from None


def _is_copyable(header: BatchHeader, offset: int) -> bool:
    return (
        0 < header.count == header.last_offset_delta + 1
        and header.timestamp_type != LOG_APPEND_TIME
        and header.base_offset >= offset
    )


def _rebuilt(records: Sequence[Record], codec_id: int) -> OutBatch:
    """A batch of these records with dense offsets and create time."""
    codec = codec_by_id(codec_id) if codec_id else NONE
    dense = [record._replace(offset=place, timestamp_type=CREATE_TIME) for place, record in enumerate(records)]
    data = bytearray(batch_of(dense, codec))
    return OutBatch(data, len(dense), records[-1].offset + 1, _spans(records), False)


def _spans(records: Sequence[Record]) -> list[Span]:
    spans: list[Span] = []
    for place, record in enumerate(records):
        if spans and record.offset == spans[-1].first + spans[-1].count:
            spans[-1] = replace(spans[-1], count=spans[-1].count + 1)
        else:
            spans.append(Span(record.offset, 1, place))
    return spans
