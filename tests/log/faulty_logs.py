"""Open, fill and read logs on the file system of faulty_files.py."""

from __future__ import annotations

import random
import struct
from pathlib import Path

from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.records.formats.batch import read_header
from tests.log.faulty_files import FaultyFiles
from tests.support.brokers.batches import make_batch, walk

FOLDER = Path("/data/t-0")
NOW = 1_700_000_000_000
SMALL = LogConfig(segment_bytes=700, index_interval_bytes=150, file_delete_delay_ms=0, retention_ms=-1)


class Clock:
    """A clock that a test sets, in ms."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> int:
        return self.now


def open_log(
    files: FaultyFiles, config: LogConfig = SMALL, clock: Clock | None = None, *, clean: bool = False, point: int = 0
) -> PartitionLog:
    return PartitionLog(FOLDER, config, clean=clean, recovery_point=point, files=files, now_ms=clock or Clock())


def batch_of(number: int, records: int, size: int = 20) -> bytes:
    pairs = [(b"%d" % number, random.Random(number).randbytes(size)) for _ in range(records)]
    return bytes(make_batch(pairs, [NOW + number] * records))


def content(log: PartitionLog) -> list[tuple[int, bytes]]:
    """(base offset, bytes) of every batch, read from the log's start to its end."""
    found = []
    offset = log.start_offset
    while (part := log.read(offset, 1)) is not None:
        data = part.read()
        header = read_header(data)
        assert header.base_offset <= offset <= header.last_offset
        assert len(data) == header.size
        found.append((header.base_offset, data))
        offset = header.next_offset
    assert offset == log.end_offset
    return found


def check_indexes(files: FaultyFiles, log: PartitionLog) -> None:
    """Check that each index entry matches the batch that it points to."""
    for segment in log.segments:
        if not segment.is_made:
            continue
        there = {item.position: item for item in walk(files.read(segment.path))}
        entries = struct.iter_unpack(">ii", files.read(segment.path.with_suffix(".index")))
        positions = []
        for relative, position in entries:
            assert there[position].last_offset == segment.base_offset + relative
            positions.append(position)
        assert positions == sorted(set(positions))
        largest = -1
        for timestamp, relative in struct.iter_unpack(">qi", files.read(segment.path.with_suffix(".timeindex"))):
            assert timestamp > largest
            largest = timestamp
            [batch] = [
                item
                for item in there.values()
                if item.base_offset <= segment.base_offset + relative <= item.last_offset
            ]
            assert batch.max_timestamp == timestamp
