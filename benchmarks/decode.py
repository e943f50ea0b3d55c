"""Record batches to Arrow columns, without Spark and sockets, compared with other ways to read the same bytes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from kafka.record.memory_records import MemoryRecords

from benchmarks.compiler import compile_c
from benchmarks.figures import Result, Side
from benchmarks.record_batches import kernel, record_batches, speed, take_turns
from benchmarks.sides import SideFailed, recorded
from benchmarks.work import Bench, Work
from spark_klog.columns.decode import PartitionDecoder
from spark_klog.columns.schema import WITHOUT_HEADERS
from spark_klog.records import kernels
from spark_klog.records.contract import COLUMNS
from spark_klog.records.formats.batch import iter_batches
from spark_klog.records.formats.batch_v2 import HEADER_SIZE, BatchHeader

#: (codec, batches, records per batch): batches of about 64 KB, and of 16 KB (Kafka's default batch.size); 8 MB of
#: records, as in one fetch.
_SHAPES = (("none", 120, 600), ("none", 480, 150), ("lz4", 120, 600))
_SECONDS = "1"
_SOURCE = Path(__file__).with_name("walk.c")


def _decode(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("decode")
    for codec, batches, records in _SHAPES:
        data = record_batches(codec, batches, records)
        work = f"decode to all columns, values of 100 B, batches of {records} records, {codec}"
        for klog, peer in _sides(bench, folder, data, batches * records, is_plain=codec == "none"):
            yield Result(work, "M records/s", klog, peer, bench.command)


def _sides(bench: Bench, folder: Path, data: bytes, total: int, is_plain: bool) -> Iterator[tuple[Side, Side]]:
    """The native kernel's side with each of its peers."""
    runs: list[tuple[Side, Callable[[], float]]] = [
        (Side("native kernel"), lambda: _columns("native", data, total)),
        (Side("reference kernel"), lambda: _columns("reference", data, total)),
        (Side("kafka-python's MemoryRecords"), lambda: speed(lambda: _kafka_python(data, total))),
    ]
    if is_plain:
        c_loop = Side("a loop in C: no CRC, no Arrow")
        runs.append((c_loop, lambda: _c_loop(folder, total)))
        with recorded(c_loop):
            (folder / "batches").write_bytes(data)
            compile_c(_SOURCE, folder / "walk")
        # like the loop in C, without CRC and Arrow
        alone = Side("native kernel without CRC and Arrow")
        runs.append((alone, _walk_and_copy(data, total)))
    take_turns(runs, bench.repeat)
    (klog, _), *peers = runs
    if is_plain:
        peers.pop()
        yield alone, c_loop
    for peer, _ in peers:
        yield klog, peer


def _columns(name: str, data: bytes, total: int) -> float:
    with kernel(name):
        decoder = PartitionDecoder("bench", 0, WITHOUT_HEADERS)
    given = taken = 0

    def fetched() -> int:
        nonlocal given, taken
        taken += sum(batch.num_rows for batch in decoder.decode(data, 0, total))
        given += total
        return total

    figure = speed(fetched)
    _check(taken + sum(batch.num_rows for batch in decoder.finish()), given)
    return figure


def _walk_and_copy(data: bytes, total: int) -> Callable[[], float]:
    with kernel("native"):
        builder = kernels.load().builder(frozenset(WITHOUT_HEADERS.names) & frozenset(COLUMNS))
    bodies = [(header, bytes(batch[HEADER_SIZE:])) for header, batch in iter_batches(data)]

    def once() -> int:
        for header, body in bodies:
            assert isinstance(header, BatchHeader)
            builder.append(body, header.count, header.base_offset, header.base_timestamp, None, 0, total)
        _check(builder.finish().count, total)
        return total

    return lambda: speed(once)


def _kafka_python(data: bytes, total: int) -> int:
    records = size = 0
    batches = MemoryRecords(data)
    while batches.has_next():
        batch = batches.next_batch()
        if not batch.validate_crc():
            raise SideFailed("a wrong CRC")
        for record in batch:
            size += (record.offset >= 0) + (record.timestamp >= 0) + (record.key is None) + len(record.value)
            records += 1
    _check(records, total)
    return records


def _c_loop(folder: Path, total: int) -> float:
    command = [str(folder / "walk"), str(folder / "batches"), _SECONDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SideFailed(f"ended with {done.returncode}: {done.stderr}")
    records, figure = done.stdout.split()
    _check(int(records), total)
    return float(figure)


def _check(records: int, total: int) -> None:
    if records != total:
        raise SideFailed(f"read {records} of {total} records")


DECODE = Work(
    "decode",
    _decode,
    (
        "Decode: one process, one core; 8 MB of records again and again: CRC, decompression, the walk over records, "
        "Arrow batches of all columns. kafka-python checks the CRCs and makes an object of each record. The loop in C "
        "only walks the varints of uncompressed batches and copies what the same columns want; the first of its lines "
        "is the kernel at that work alone, with all its checks of lengths, the other the whole way with CRC and Arrow.",
    ),
)
