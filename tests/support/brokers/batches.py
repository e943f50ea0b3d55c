"""Make record batches for brokers and logs, read them, and walk log files without the package's code."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spark_klog.records.contract import Headers, Record
from spark_klog.records.formats.batch_v2 import build_batch
from spark_klog.records.kernels.reference import append_record
from spark_klog.records.reading.reader import AbortedTransactions, records_of, visible_batches
from spark_klog.wire.codecs import codec_by_name
from spark_klog.wire.primitives import Buffer

Pair = tuple["bytes | None", "bytes | None"]


def make_batch(
    pairs: Sequence[Pair], timestamps: Sequence[int], codec: str = "none", headers: Headers = (), **fields: int
) -> bytearray:
    """A batch of (key, value) pairs with create times in ms and offsets from 0; `fields` as of `build_batch`.

    All have the same `headers`.
    """
    body = bytearray()
    for delta, ((key, value), timestamp) in enumerate(zip(pairs, timestamps, strict=True)):
        append_record(body, timestamp - timestamps[0], delta, key, value, headers)
    batch = build_batch(
        body,
        len(pairs),
        base_timestamp=timestamps[0],
        max_timestamp=max(timestamps),
        codec=codec_by_name(codec),
        **fields,
    )
    return bytearray(batch)


class OnDisk(NamedTuple):
    """A batch in a .log file."""

    position: int
    size: int
    base_offset: int
    last_offset: int
    max_timestamp: int


def walk(data: bytes) -> Iterator[OnDisk]:
    """Yield all batches in a .log file's bytes."""
    position = 0
    while position < len(data):
        base_offset, length = struct.unpack_from(">qi", data, position)
        (delta,) = struct.unpack_from(">i", data, position + 23)
        (max_timestamp,) = struct.unpack_from(">q", data, position + 35)
        yield OnDisk(position, length + 12, base_offset, base_offset + delta, max_timestamp)
        position += length + 12


def read_records(data: Buffer, aborted: AbortedTransactions | None = None) -> Iterator[Record]:
    """Yield the records of whole batches that a consumer sees; without `aborted` includes aborted transactions."""
    for header, batch in visible_batches(data, aborted):
        yield from records_of(header, batch)
