"""Offset assignment: what a broker does to produced batches before it appends them, without compressing them again.

magic 2  base offset and leader epoch are written in place; nothing else is touched
magic 1  a message's offset is written in place; a wrapper, whose messages count from 0, gets the last message's
magic 0  a message's offset is written in place; a wrapper is made anew, since the offsets inside it are absolute

With log append time (KIP-32) timestamp, its type and the checksum are written in place, too; magic 0 has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spark_klog.errors import DecodeError
from spark_klog.records.batch import Header, check_crc, read_header, whole_batches
from spark_klog.records.batch_v2 import BatchHeader, set_append_time, set_base_offset
from spark_klog.records.message_set import (
    MessageHeader,
    build_message_set,
    inner_offsets,
    message_records,
    set_message_append_time,
    set_message_offset,
)
from spark_klog.wire.codecs import MAX_DECOMPRESSED, codec_by_id


class Assigned(NamedTuple):
    """Batches with their offsets: `data` is what was given, changed in place, unless a wrapper had to be made anew."""

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

    `append_time` (ms) makes it every record's timestamp. `CorruptBatchError` for a wrong CRC, `DecodeError` for what is
    not whole batches or says another number of records than it has; nothing has been changed then.
    """
    batches = whole_batches(records)
    written = []
    for header, batch in batches:
        check_crc(header, batch)
        written.append(_written_offsets(header, batch, limit))
    data, headers = [], []
    offset = first_offset
    for (header, batch), inside in zip(batches, written, strict=True):
        if isinstance(header, BatchHeader):
            set_base_offset(batch, offset, leader_epoch)
            if append_time is not None:
                set_append_time(batch, append_time)
        else:
            batch = _assign_message(header, batch, offset, inside, append_time, limit)
        data.append(batch)
        headers.append(read_header(batch))
        offset += len(inside)
    in_place = all(new is batch for new, (_, batch) in zip(data, batches, strict=True))
    return Assigned(records if in_place else memoryview(bytearray().join(data)), headers, offset)


def _written_offsets(header: Header, batch: memoryview, limit: int) -> Sequence[int]:
    """The offsets inside a batch as its producer wrote them: one a record."""
    if isinstance(header, MessageHeader):
        return inner_offsets(header, batch, limit) if header.codec_id else [header.offset]
    if header.count != header.last_offset_delta + 1 or header.count == 0:
        raise DecodeError(f"batch of {header.count} records has last offset delta {header.last_offset_delta}")
    return range(header.count)


def _assign_message(
    header: MessageHeader, message: memoryview, first: int, written: Sequence[int], append_time: int | None, limit: int
) -> memoryview:
    if header.codec_id and (header.magic == 0 or list(written) != list(range(len(written)))):
        message = _renumbered(header, message, first, limit)
    set_message_offset(message, first + len(written) - 1)
    if append_time is not None and header.magic:
        set_message_append_time(message, append_time)
    return message


def _renumbered(header: MessageHeader, message: memoryview, first: int, limit: int) -> memoryview:
    """The wrapper with its messages numbered from `first` on."""
    records = [
        record._replace(offset=first + number) for number, record in enumerate(message_records(header, message, limit))
    ]
    return memoryview(bytearray(build_message_set(records, header.magic, codec_by_id(header.codec_id))))
