"""Fill and compact logs, and read what a consumer sees."""

from __future__ import annotations

import random

from spark_klog.log.compaction.cleaner import compact, plan
from spark_klog.log.compaction.passes import OffsetMap
from spark_klog.log.config import COMPACT, LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.records.formats.batch import read_header
from tests.log.faulty_logs import NOW
from tests.support.brokers.batches import make_batch, read_records

CONFIG = LogConfig(
    segment_bytes=1500,
    index_interval_bytes=200,
    cleanup_policy=COMPACT,
    min_cleanable_dirty_ratio=0,
    file_delete_delay_ms=0,
)
Survivors = dict[bytes, tuple[int, bytes | None]]


def fill(log: PartitionLog, rng: random.Random, batches: int) -> Survivors:
    """Append batches over ten keys; return the last (offset, value) of each key."""
    last: Survivors = {}
    for number in range(batches):
        pairs = [
            (b"key %d" % rng.randrange(10), rng.choice([None, rng.randbytes(15).hex().encode()]))
            for _ in range(rng.randrange(1, 6))
        ]
        batch = make_batch(pairs, [NOW + number] * len(pairs), rng.choice(["none", "lz4", "gzip"]))
        first = log.append(memoryview(batch)).base_offset
        last |= {key: (first + delta, value) for delta, (key, value) in enumerate(pairs) if key is not None}
    return last


def records(log: PartitionLog) -> list[tuple[int, bytes, bytes | None]]:
    """(offset, key, value) of all records that a consumer sees."""
    found, offset = [], log.start_offset
    while (part := log.read(offset, 1 << 20)) is not None:
        data = part.read()
        found += [(item.offset, item.key or b"", item.value) for item in read_records(data)]
        at = 0
        while at < len(data):
            header = read_header(data, at)
            at, offset = at + header.size, header.next_offset
    return [item for item in found if item[0] >= log.start_offset]


def clean(log: PartitionLog, checkpoint: int | None, now: int = NOW) -> int:
    found = plan(log, checkpoint, now)
    assert found.is_due
    return compact(log, found, OffsetMap(1 << 16), now)
