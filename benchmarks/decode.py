"""Record batches to all Arrow columns, without Spark and socket: the native kernel beside the reference."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from benchmarks.report import Result, Side
from benchmarks.work import Bench, Work
from spark_klog.columns.decode import PartitionDecoder
from spark_klog.columns.schema import WITHOUT_HEADERS
from spark_klog.records.batch_v2 import build_batch
from spark_klog.records.reference import append_record
from spark_klog.wire.codecs import codec_by_name

_BATCHES, _RECORDS, _TIME = 300, 600, 1_700_000_000_000
_LINE = b'{"user":%d,"page":"/products/%d","agent":"Mozilla/5.0 (X11; Linux x86_64)","ok":true}'
_SECONDS = 1.0


def _batches(codec: str) -> bytes:
    """Batches of some 60 KB with values of 100 bytes."""
    parts = []
    for batch in range(_BATCHES):
        body = bytearray()
        for index in range(_RECORDS):
            value = (_LINE % (batch * 7919 % 10_000, index)).ljust(100)
            append_record(body, index, index, None, value)
        parts.append(
            build_batch(
                body,
                _RECORDS,
                base_timestamp=_TIME,
                max_timestamp=_TIME + _RECORDS - 1,
                codec=codec_by_name(codec),
                base_offset=batch * _RECORDS,
            )
        )
    return b"".join(parts)


def _speed(data: bytes) -> float:
    """Million records a second."""
    records = 0
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < _SECONDS:
        decoder = PartitionDecoder("bench", 0, WITHOUT_HEADERS)
        records += sum(batch.num_rows for batch in decoder.add(data, 0, _BATCHES * _RECORDS))
        records += sum(batch.num_rows for batch in decoder.finish())
    return records / elapsed / 1e6


def _decode(bench: Bench) -> Iterator[Result]:
    chosen = os.environ.get("SPARK_KLOG_KERNEL")
    try:
        for codec in ("none", "lz4"):
            data = _batches(codec)
            sides = {"native": Side("native kernel"), "reference": Side("reference kernel")}
            for attempt in range(bench.repeat + 1):
                for name, side in sides.items():
                    os.environ["SPARK_KLOG_KERNEL"] = name
                    speed = _speed(data)
                    if attempt:
                        side.samples.append(speed)
                    else:
                        side.cold = speed
            work = f"decode to all columns, values of 100 B, {codec}"
            yield Result(work, "M records/s", sides["native"], sides["reference"], bench.command)
    finally:
        os.environ.pop("SPARK_KLOG_KERNEL")
        if chosen is not None:
            os.environ["SPARK_KLOG_KERNEL"] = chosen


DECODE = Work(
    "decode",
    _decode,
    ("Decode: one process, one core; CRC, decompression and the walk over the records, into Arrow batches.",),
)
