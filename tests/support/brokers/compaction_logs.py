"""Make logs to compact, and read compacted logs with kafka-python and with the package."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from kafka.record.memory_records import MemoryRecords

from spark_klog.log.compaction.cleaner import SegmentBatches
from spark_klog.log.compaction.passes import Cleaner, CleaningRound, LastRecord, OffsetMap, ReadBatches, build_map
from spark_klog.log.segments.transaction_index import AbortedTransaction
from spark_klog.records.contract import CREATE_TIME, NO_TIMESTAMP, NO_TIMESTAMP_TYPE, Record
from spark_klog.records.formats.batch import iter_batches
from spark_klog.records.formats.batch_v2 import BatchHeader, build_batch
from spark_klog.records.formats.message_set import build_message_set
from spark_klog.wire.codecs import codec_by_name
from tests.support.brokers.batches import read_records
from tests.support.checker.record_model import Row, encode_rows
from tests.support.clients.dump import DumpComplaint, DumpedRecord, dump_log, dumped_records
from tests.support.servers.kafka import Version

NOW = 1_700_000_000_000
RETENTION = 86_400_000
ABORT, COMMIT = 0, 1
# DumpLogSegments' messages about gaps that compaction leaves, and about real damage.
_HOLE = re.compile(r"^(Non-consecutive offsets in .*|  \d+ is followed by \d+)$", re.MULTILINE)
_WRONG = re.compile(r"Mismatches|not found|corrupt|Exception|Error|Ignoring|is[vV]alid: false|WARN|ERROR")
TRANSACTIONAL, CONTROL, HORIZON = 0x10, 0x20, 0x40


class Survivor(NamedTuple):
    """The compared fields of a record; magic 0 has no timestamp."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None


def batch_of_rows(
    rows: Sequence[Row],
    *,
    codec: str = "none",
    base_offset: int | None = None,
    last_offset: int | None = None,
    producer: tuple[int, int, int] = (-1, -1, -1),
    attributes: int = 0,
    max_timestamp: int | None = None,
) -> bytes:
    """A batch of magic 2; `producer` is id, epoch and base sequence."""
    base = rows[0].offset if base_offset is None else base_offset
    return build_batch(
        encode_rows(rows, base, rows[0].timestamp),
        len(rows),
        base_timestamp=rows[0].timestamp,
        max_timestamp=max(row.timestamp for row in rows) if max_timestamp is None else max_timestamp,
        codec=codec_by_name(codec),
        base_offset=base,
        last_offset_delta=(rows[-1].offset if last_offset is None else last_offset) - base,
        attributes=attributes,
        producer_id=producer[0],
        producer_epoch=producer[1],
        base_sequence=producer[2],
        leader_epoch=3,
    )


def marker(kind: int, offset: int, producer_id: int, epoch: int = 0) -> bytes:
    """A transaction marker."""
    row = Row(offset, NOW, struct.pack(">hh", 0, kind), struct.pack(">hi", 0, 7))
    return batch_of_rows([row], producer=(producer_id, epoch, -1), attributes=TRANSACTIONAL | CONTROL)


def any_magic(rows: Sequence[Row], magic: int, codec: str) -> bytes:
    """The rows as one batch (magic 2), or as a message set."""
    if magic == 2:
        return batch_of_rows(rows, codec=codec)
    kind = CREATE_TIME if magic else NO_TIMESTAMP_TYPE
    return build_message_set(
        [Record(row.offset, row.timestamp, kind, row.key, row.value, ()) for row in rows],
        magic,
        codec_by_name(codec),
    )


def survivors(data: bytes) -> list[Survivor]:
    """The data records of a log; asserts that the package's reader and kafka-python agree."""
    ours = [Survivor(record.offset, record.timestamp, record.key, record.value) for record in read_records(data)]
    theirs = []
    for batch in MemoryRecords(data):
        assert batch.validate_crc()
        if getattr(batch, "is_control_batch", False):
            continue
        for record in batch:
            timestamp = NO_TIMESTAMP if record.timestamp is None else record.timestamp
            theirs.append(Survivor(record.offset, timestamp, record.key, record.value))
    assert ours == theirs
    return ours


def headers(data: bytes) -> list[BatchHeader]:
    """The batch headers of a log of magic 2."""
    return [header for header, _ in iter_batches(data) if isinstance(header, BatchHeader)]


class Compacted(NamedTuple):
    """The result of a compaction round: the log's bytes, the end of the offset map, and the transaction index."""

    data: bytes
    end: int
    aborted: list[AbortedTransaction]


class _InMemory(NamedTuple):
    data: bytes

    def read_at(self, position: int, size: int) -> bytes:
        return self.data[position : position + size]


def reading(data: bytes) -> ReadBatches:
    """A segment of these bytes."""
    return SegmentBatches(_InMemory(data), Path("segment.log"), len(data), lambda: None)


def compact(
    data: bytes,
    *,
    start: int = 0,
    end: int,
    aborted: Iterable[AbortedTransaction] = (),
    producers: dict[int, LastRecord] | None = None,
    now: int = NOW,
    retention: int = RETENTION,
    offsets: OffsetMap | None = None,
    retain_legacy_tombstones: bool = True,
) -> Compacted:
    """Run one compaction round on a log of one segment."""
    aborted = list(aborted)
    offsets = OffsetMap(1 << 14) if offsets is None else offsets
    offsets.clear()
    reached = build_map([reading(data)], offsets, start, end, aborted)
    cleaner = Cleaner(offsets, CleaningRound(reached, end, now, retention, producers or {}), aborted)
    left = b"".join(cleaner.clean(reading(data), retain_legacy_tombstones))
    return Compacted(left, reached, cleaner.take_aborted())


def dumped_with_holes(version: Version, *paths: Path) -> list[DumpedRecord]:
    """The data records of .log files by DumpLogSegments; asserts that it reports no problems except gaps."""
    try:
        output = dump_log(version, *paths)
    except DumpComplaint as complaint:
        output = _HOLE.sub("", str(complaint))
        if _WRONG.search(output):
            raise
    return dumped_records(output)
