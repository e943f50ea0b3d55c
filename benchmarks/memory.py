"""Memory growth during a long read: decode 1 GiB of fetches, each in the same buffer.

python -m benchmarks.memory CODEC    the measured process: prints peak growth and size of an Arrow batch, in bytes
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.machine import ROOT
from benchmarks.record_batches import record_batches
from benchmarks.sides import SideFailed, recorded
from spark_klog.columns.decode import PartitionDecoder
from spark_klog.columns.schema import WITHOUT_HEADERS
from tests.support.spark.pyspark_versions import child_environment

_FETCH = 8 * 1024 * 1024
_FETCHED = 1024 * 1024 * 1024
_RECORDS = 600
#: Memory may grow by the size of this many Arrow batches.
_LIMIT = 4


def measure(codec: str) -> tuple[int, int]:
    """Bytes by which this process's peak grows after the first Arrow batch, and bytes of that batch."""
    sample = record_batches(codec, 1, _RECORDS)
    template = record_batches(codec, _FETCH // len(sample), _RECORDS)
    end = _FETCH // len(sample) * _RECORDS
    buffer = bytearray(len(template))
    decoder = PartitionDecoder("bench", 0, WITHOUT_HEADERS)
    baseline = size = fetched = 0
    while fetched < _FETCHED:
        buffer[:] = template  # a connection, too, receives a fetch into the buffer of the one before
        fetched += len(buffer)
        for batch in decoder.decode(memoryview(buffer), 0, end):
            _touch(batch)
            if not baseline:
                baseline, size = _memory_of("VmRSS"), batch.nbytes
    return _memory_of("VmHWM") - baseline, size


def _touch(batch: object) -> None:
    """Read a byte of each page of each buffer, as a consumer would."""
    for column in batch.columns:  # type: ignore[attr-defined]
        for buffer in column.buffers():
            if buffer is not None:
                sum(memoryview(buffer)[::4096])


def _memory_of(name: str) -> int:
    """VmRSS (now) or VmHWM (the peak) of this process, in bytes; getrusage's peak would include the parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise SideFailed(f"/proc/self/status does not say {name}")


def _memory(bench: Bench) -> Iterator[Result]:
    for codec in ("none", "lz4"):
        side = Side("klog")
        for _ in range(bench.repeat + 1):
            with recorded(side):
                growth, size = _measured(codec)
                figure = growth / size
                if figure >= _LIMIT:
                    raise SideFailed(f"{growth:,} bytes are {figure:.1f} Arrow batches, {_LIMIT} are allowed")
                side.add(figure)
        work = f"growth of memory while 1 GiB is decoded, fetches of 8 MiB, {codec}"
        yield Result(work, "Arrow batches", side, None, bench.command, higher_is_better=False)


def _measured(codec: str) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", codec],
        cwd=ROOT,
        env=child_environment(sys.executable),
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise SideFailed(f"ended with {done.returncode}: {done.stderr[-1000:]}")
    growth, size = map(int, done.stdout.split())
    return growth, size


MEMORY = Work(
    "memory",
    _memory,
    (
        "Memory: the peak of a process of its own, less what it held after its first Arrow batch (65,536 rows of "
        "100 B); it looks at each batch and drops it.",
    ),
)

if __name__ == "__main__":
    sys.stdout.write("{} {}\n".format(*measure(sys.argv[1])))
