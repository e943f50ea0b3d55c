"""Make batches of any magic, sound and damaged, and read them with a kernel."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from spark_klog.records.contract import Kernel, Record
from spark_klog.records.formats.batch_v2 import build_batch
from spark_klog.records.formats.message_set import build_message_set
from spark_klog.records.reading.offset_order import NO_END, OffsetOrder
from spark_klog.records.reading.reader import AbortedTransactions, BadBatch, RecordReader
from spark_klog.wire.codecs import codec_by_name
from tests.support.checker.record_model import Row, encode_rows, to_lists

TIME = 1_700_000_000_000


class Batch(NamedTuple):
    """A batch of `records` records from `offset` on; `claim` is the number in its first eight bytes."""

    offset: int
    records: int
    data: bytes
    claim: int
    is_bad: bool = False

    @property
    def offsets(self) -> range:
        return range(self.offset, self.offset + self.records)


def batch(offset: int, count: int, magic: int = 2, codec: str = "none") -> Batch:
    """A sound batch of `count` records (magic 2), or a message set."""
    if magic == 2:
        rows = [Row(offset + index, TIME, b"k", b"value %d" % (offset + index)) for index in range(count)]
        body = encode_rows(rows, offset, TIME)
        data = build_batch(
            body, count, base_timestamp=TIME, max_timestamp=TIME, base_offset=offset, codec=codec_by_name(codec)
        )
        return Batch(offset, count, data, offset)
    records = [Record(offset + index, TIME, 0, b"k", b"value %d" % (offset + index), ()) for index in range(count)]
    data = build_message_set(records, magic, codec_by_name(codec))
    return Batch(offset, count, data, offset + count - 1)


def damaged(good: Batch, position: int = -1, flip: int = 0x55) -> Batch:
    data = bytearray(good.data)
    data[position] ^= flip
    return good._replace(data=bytes(data), is_bad=True)


def with_field(good: Batch, form: str, position: int, value: int) -> Batch:
    data = bytearray(good.data)
    struct.pack_into(form, data, position, value)
    return good._replace(data=bytes(data), is_bad=True, claim=value if position == 0 else good.claim)


def read(
    kernel: Kernel,
    batches: Sequence[Batch],
    first: int = 0,
    end: int = 1 << 40,
    aborted: AbortedTransactions | None = None,
    log_end: int = NO_END,
    **options: Any,
) -> tuple[list[int], list[BadBatch]]:
    """Read batches; return the records' offsets and the bad batches. Checks keys and values."""
    reader = RecordReader(frozenset(["key", "value", "offset"]), kernel=kernel, yields_bad=True, **options)
    data = b"".join(item.data for item in batches)
    order = OffsetOrder(data, first, log_end)
    bad = [part for part in reader.read(data, first, end, aborted, order.damaged) if isinstance(part, BadBatch)]
    lists = to_lists(reader.finish())
    assert lists["value"] == [b"value %d" % offset for offset in lists["offset"]]
    assert set(lists["key"]) <= {b"k"}
    return lists["offset"], bad
