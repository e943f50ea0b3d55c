"""Record batches that kafka-python encodes and decodes, without the package's code, and the rows in them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kafka.record import MemoryRecords
from kafka.record.default_records import DefaultRecordBatchBuilder

Headers = list[tuple[str, "bytes | None"]]

CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


class Row(NamedTuple):
    """A record as a reader should see it; `timestamp` in ms."""

    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: int
    headers: Headers


def make_batch(rows: Sequence[Row], codec: str = "none") -> bytes:
    """Encode rows with ascending offsets as one batch."""
    base = rows[0].offset
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=CODECS[codec],
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 30,
    )
    for row in rows:
        assert builder.append(row.offset - base, row.timestamp, row.key, row.value, row.headers) is not None
    batch = bytearray(builder.build())
    struct.pack_into(">q", batch, 0, base)
    return bytes(batch)


def read_batches(data: bytes) -> Iterator[Any]:
    """Yield the records that kafka-python finds in batches."""
    records = MemoryRecords(data)
    while records.has_next():
        batch = records.next_batch()
        assert batch.validate_crc()
        yield from batch
