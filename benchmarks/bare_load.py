"""The bound of a load: fetch, decode and write with pyarrow's Parquet writer in a bare loop, in two processes.

    python -m benchmarks.bare_load SERVERS TOPIC FOLDER PARTITION...

A process prints "ready", waits for a line on standard input, writes a file per partition, and prints the record count.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.machine import ROOT
from benchmarks.sides import Lines, SideFailed
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.client.offsets import offset_range
from spark_klog.columns.decode import PartitionDecoder
from spark_klog.columns.schema import FULL
from tests.support.spark.pyspark_versions import child_environment

NAME = "fetch, decode and pyarrow's writer in a loop, two processes"
_PROCESSES = 2
_SECONDS = 1800.0
#: The same as the load's: Arrow bytes of a row group, columns with a dictionary.
_ROW_GROUP, _DICTIONARY = 32 * 1024 * 1024, ["topic", "partition", "timestampType"]


def bare_load(servers: str, topic: str, partitions: int, records: int, folder: Path) -> float:
    """Return the seconds from the start of the loops to the end of the last one, without imports and connecting."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        processes = []
        for first in range(_PROCESSES):
            numbers = map(str, range(first, partitions, _PROCESSES))
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.bare_load", servers, topic, str(folder), *numbers],
                    cwd=ROOT,
                    env=child_environment(sys.executable),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            lines = Lines(process.stdout)
            _next(lines)
            processes.append((process, lines))
        started = time.perf_counter()
        for process, _ in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [_next(lines) for _, lines in processes]
    found = sum(int(text) for _, text in answers)
    if found != records:
        raise SideFailed(f"{found} records were written; there are {records}")
    return max(at for at, _ in answers) - started


def _next(lines: Lines) -> tuple[float, str]:
    line = lines.get(_SECONDS)
    if line is None:
        raise SideFailed("a bare loop has ended")
    return line


def _main(servers: str, topic: str, folder: str, partitions: Sequence[str]) -> None:
    records = 0
    with Cluster.connect({"bootstrap.servers": servers}) as cluster:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        for partition in map(int, partitions):
            records += _write(cluster, topic, partition, Path(folder) / f"{partition}.parquet")
    sys.stdout.write(f"{records}\n")


def _write(cluster: Cluster, topic: str, partition: int, path: Path) -> int:
    start, end = offset_range(cluster, topic, partition)
    waiting: list[pa.RecordBatch] = []
    size = records = 0
    with pq.ParquetWriter(path, FULL, compression="zstd", use_dictionary=_DICTIONARY) as writer:
        for batch in _batches(cluster, topic, partition, start, end):
            waiting.append(batch)
            records += len(batch)
            size += batch.nbytes
            if size >= _ROW_GROUP:
                writer.write_table(pa.Table.from_batches(waiting))
                waiting.clear()
                size = 0
        if waiting:
            writer.write_table(pa.Table.from_batches(waiting))
    return records


def _batches(cluster: Cluster, topic: str, partition: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
    decoder = PartitionDecoder(topic, partition, FULL)
    for fetched in fetch_range(cluster, topic, partition, start, end):
        yield from decoder.decode(fetched.data, fetched.offset, end)
    yield from decoder.finish()


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
