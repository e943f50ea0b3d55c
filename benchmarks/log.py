"""The log on disk without a broker: appends and bare writes, random reads, recovery, opening many segments."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator

from benchmarks.figures import Result, Side
from benchmarks.record_batches import record_batches, take_turns
from benchmarks.work import Bench, Work
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog

_MB = 1024 * 1024
#: Records of a batch of about 16 KB, the default batch.size of Java's producer.
_RECORDS = 150
#: Records of a batch of nearly 1 MB.
_LARGE = 9_000
_SEGMENT = 1024 * _MB
_READS = 2000
_SEGMENTS = 10_000


def _batches(size: int, records: int = _RECORDS) -> bytearray:
    one = record_batches("none", 1, records)
    return bytearray(one * max(1, size // len(one)))


def _appends(bench: Bench, records: int) -> Iterator[Result]:
    """GB/s of appends to one segment of 256 MB, 1 MB per call; the peer writes the same bytes with os.write."""
    data = _batches(_MB, records)
    calls = max(1, 256 * _MB // len(data))

    def ours() -> float:
        folder = bench.work_dir / "append-0"
        log = PartitionLog(folder, LogConfig(max_message_bytes=2 * _MB))
        log.append(memoryview(data))  # the first append writes and syncs the leader epochs
        started = time.perf_counter()
        for _ in range(calls):
            log.append(memoryview(data))
        elapsed = time.perf_counter() - started
        log.close()
        shutil.rmtree(folder)
        return calls * len(data) / elapsed / 1e9

    def bare() -> float:
        path = bench.work_dir / "bare"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, data)
        started = time.perf_counter()
        for _ in range(calls):
            os.write(descriptor, data)
        elapsed = time.perf_counter() - started
        os.close(descriptor)
        path.unlink()
        return calls * len(data) / elapsed / 1e9

    sides = Side("klog"), Side("os.write of the same bytes")
    take_turns([(sides[0], ours), (sides[1], bare)], bench.repeat)
    name = f"append of 1 MB of batches of {records} records of 100 B"
    yield Result(name, "GB/s", *sides, bench.command)


def _random_reads(bench: Bench) -> Iterator[Result]:
    """Microseconds to find the range for a random offset of a log of 10 GB, as the broker passes it to sendfile."""
    folder = bench.work_dir / "large-0"
    size = 10 * 1024 * _MB if bench.records >= 1_000_000 else 100 * _MB
    data = _batches(8 * _MB)
    log = PartitionLog(folder, LogConfig(segment_bytes=min(_SEGMENT, size // 10), max_message_bytes=2 * _MB))
    while log.size < size:
        log.append(memoryview(data))
    rng = random.Random(1)

    def run() -> float:
        offsets = [rng.randrange(log.end_offset) for _ in range(_READS)]
        started = time.perf_counter()
        for offset in offsets:
            log.read(offset, 64 * 1024)
        return (time.perf_counter() - started) / _READS * 1e6

    side = Side("klog")
    take_turns([(side, run)], bench.repeat)
    yield Result(f"range at a random offset of a log of {size >> 30} GB", "µs", side, None, bench.command, False)
    log.close()
    shutil.rmtree(folder)


def _recovery(bench: Bench, records: int) -> Iterator[Result]:
    """GB/s of log that is checked and indexed after an unclean shutdown."""
    folder = bench.work_dir / "recovery-0"
    log = PartitionLog(folder, LogConfig(max_message_bytes=2 * _MB))
    data = _batches(_MB, records)
    while log.size < 512 * _MB:
        log.append(memoryview(data))
    size = log.size
    log.close()

    def run() -> float:
        started = time.perf_counter()
        PartitionLog(folder, LogConfig(), clean=False)
        return size / (time.perf_counter() - started) / 1e9

    side = Side("klog")
    take_turns([(side, run)], bench.repeat)
    yield Result(f"recovery, batches of {records} records of 100 B", "GB/s", side, None, bench.command)
    shutil.rmtree(folder)


def _many_segments(bench: Bench) -> Iterator[Result]:
    """Seconds to open a log of ten thousand segments."""
    folder = bench.work_dir / "segments-0"
    log = PartitionLog(folder, LogConfig(segment_bytes=1))
    for _ in range(_SEGMENTS):
        log.append(memoryview(bytearray(record_batches("none", 1, 1))))
    log.close()

    def run() -> float:
        started = time.perf_counter()
        PartitionLog(folder, LogConfig(segment_bytes=1), clean=True)
        return time.perf_counter() - started

    side = Side("klog")
    take_turns([(side, run)], bench.repeat)
    yield Result(f"opening {_SEGMENTS:,} segments", "s", side, None, bench.command, False)
    shutil.rmtree(folder)


def _run(bench: Bench) -> Iterator[Result]:
    for records in (_LARGE, _RECORDS, 10):
        yield from _appends(bench, records)
    yield from _random_reads(bench)
    for records in (_RECORDS, 10):
        yield from _recovery(bench, records)
    yield from _many_segments(bench)


LOG = Work(
    "log",
    _run,
    notes=(
        "Appends: a log of one segment, 1 MB a call, 256 MB in all, not flushed; os.write writes the same bytes into a "
        "file of the same file system. Random reads find the range that the broker hands to sendfile.",
        "Recovery reads 512 MB from the page cache, checks every batch and builds both indexes.",
    ),
)
