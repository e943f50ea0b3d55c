"""Record batches of log-like records for work without a broker, and functions to time such work."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks.figures import Side
from benchmarks.sides import recorded
from spark_klog.records.formats.batch_v2 import build_batch
from spark_klog.records.kernels.reference import append_record
from spark_klog.wire.codecs import codec_by_name

VALUE_SIZE = 100
#: Timestamp (ms) of a batch's first record; each record is a millisecond later.
TIME = 1_700_000_000_000
_LINE = b'{"user":%d,"page":"/products/%d","agent":"Mozilla/5.0 (X11; Linux x86_64)","ok":true}'
_SECONDS = 1.0


def value(batch: int, index: int) -> bytes:
    """A line of VALUE_SIZE bytes."""
    return (_LINE % (batch * 7919 % 10_000, index)).ljust(VALUE_SIZE)


def record_batches(codec: str, batches: int, records: int) -> bytes:
    """Build `batches` batches of `records` records, one after the other; no keys, no headers, offsets from 0."""
    parts = []
    for batch in range(batches):
        body = bytearray()
        for index in range(records):
            append_record(body, index, index, None, value(batch, index))
        parts.append(
            build_batch(
                body,
                records,
                base_timestamp=TIME,
                max_timestamp=TIME + records - 1,
                codec=codec_by_name(codec),
                base_offset=batch * records,
            )
        )
    return b"".join(parts)


def speed(work: Callable[[], int], clock: Callable[[], float] = time.perf_counter) -> float:
    """Call `work`, which returns its number of records, for a second; return M records a second of the clock."""
    records = 0
    started = clock()
    while (elapsed := clock() - started) < _SECONDS:
        records += work()
    return records / elapsed / 1e6


def take_turns(sides: Sequence[tuple[Side, Callable[[], float]]], repeat: int) -> None:
    """Run each side in turn, a warm-up and then `repeat` runs; skip sides that have failed."""
    for _ in range(repeat + 1):
        for side, run in sides:
            if side.failed is not None:
                continue
            with recorded(side):
                figure = run()
                side.add(figure)


@contextmanager
def kernel(name: str) -> Iterator[None]:
    """Use the kernel of that name for everything created in the block."""
    before = os.environ.get("SPARK_KLOG_KERNEL")
    os.environ["SPARK_KLOG_KERNEL"] = name
    try:
        yield
    finally:
        os.environ.pop("SPARK_KLOG_KERNEL")
        if before is not None:
            os.environ["SPARK_KLOG_KERNEL"] = before
