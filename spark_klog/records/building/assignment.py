"""Offset assignment: the broker gives produced batches their offsets before it appends them.

magic 2  write base offset and leader epoch in place
magic 1  write a message's offset in place; a wrapper, whose messages count from 0, gets the last message's offset
magic 0  write a message's offset in place; rebuild a wrapper, since the offsets inside it are absolute

With log append time (KIP-32) it also writes the timestamp, its type and the checksum in place (not in magic 0, which
has no timestamps). Only wrappers of magic 0, and of magic 1 with wrong inner offsets, are compressed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spark_klog.errors import DecodeError
from spark_klog.records.contract import LOG_APPEND_TIME
from spark_klog.records.formats.batch import Header, check_crc, read_header, whole_batches
from spark_klog.records.formats.batch_v2 import BatchHeader, build_batch, set_append_time, set_base_offset
from spark_klog.records.formats.message_set import (
    build_message_set,
    inner_set,
    plain_records,
    set_message_append_time,
    set_message_offset,
)
from spark_klog.records.kernels.reference import append_record
from spark_klog.wire.codecs import MAX_DECOMPRESSED, codec_by_id

_NO_PRODUCER = (-1, -1)


def own_batch(
    rows: Sequence[tuple[bytes, bytes | None]],
    now_ms: int,
    *,
    attributes: int = 0,
    producer: tuple[int, int] = _NO_PRODUCER,
) -> bytearray:
    """Build a batch of (key, value) rows, at least one; `producer` is (id, epoch), `attributes` as in `build_batch`."""
    body = bytearray()
    for delta, (key, value) in enumerate(rows):
        append_record(body, 0, delta, key, value)
    producer_id, epoch = producer
    return bytearray(
        build_batch(
            body,
            len(rows),
            base_timestamp=now_ms,
            max_timestamp=now_ms,
            attributes=attributes,
            producer_id=producer_id,
            producer_epoch=epoch,
        )
    )


class Assigned(NamedTuple):
    """Batches with their offsets: `data` is the given buffer, changed in place, unless a wrapper had to be rebuilt."""

    data: memoryview
    headers: list[Header]
    next_offset: int


def assign_offsets(
    records: memoryview,
    first_offset: int,
    *,
    leader_epoch: int = -1,
    append_time: int | None = None,
    limit: int = MAX_DECOMPRESSED,
) -> Assigned:
    """Give the records of whole batches dense offsets from `first_offset` on; `records` must be writable.

    `append_time` (ms), if given, becomes every record's timestamp. `CorruptBatchError` for a wrong CRC, `DecodeError`
    for anything but whole batches or a record count that does not match; `records` is unchanged then.
    """
    batches = whole_batches(records)
    planned: list[tuple[Header, memoryview, int]] = []
    offset = first_offset
    for header, batch in batches:
        check_crc(header, batch)
        data, count = _planned(header, batch, offset, limit)
        planned.append((header, data, offset))
        offset += count
    ends = [first for _, _, first in planned[1:]] + [offset]
    for (header, data, first), end in zip(planned, ends, strict=True):
        _assign(header, data, first, end - 1, leader_epoch, append_time)
    in_place = all(data is batch for (_, data, _), (_, batch) in zip(planned, batches, strict=True))
    return Assigned(
        records if in_place else memoryview(bytearray().join(data for _, data, _ in planned)),
        [read_header(data) for _, data, _ in planned],
        offset,
    )


def _planned(header: Header, batch: memoryview, first: int, limit: int) -> tuple[memoryview, int]:
    """The batch, or the rebuilt wrapper that replaces it, and its number of records."""
    if isinstance(header, BatchHeader):
        if header.count != header.last_offset_delta + 1:
            raise DecodeError(f"batch of {header.count} records has last offset delta {header.last_offset_delta}")
        return batch, header.count
    if not header.codec_id:
        return batch, 1
    append_time = header.timestamp if header.timestamp_type == LOG_APPEND_TIME else None
    records = list(plain_records(inner_set(header, batch, limit), header.magic, None, append_time))
    if header.magic and [record.offset for record in records] == list(range(len(records))):
        return batch, len(records)
    records = [record._replace(offset=first + number) for number, record in enumerate(records)]
    wrapper = build_message_set(records, header.magic, codec_by_id(header.codec_id))
    return memoryview(bytearray(wrapper)), len(records)


def _assign(
    header: Header, batch: memoryview, first: int, last: int, leader_epoch: int, append_time: int | None
) -> None:
    if isinstance(header, BatchHeader):
        set_base_offset(batch, first, leader_epoch)
        if append_time is not None:
            set_append_time(batch, append_time)
        return
    set_message_offset(batch, last)
    if append_time is not None and header.magic:
        set_message_append_time(batch, append_time)
