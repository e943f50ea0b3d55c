"""Arrow record batches → records by topic and partition, for the kernel to encode.

Computations are numpy's: pyarrow imports pandas to convert Python values, which takes a worker half a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.columns.schema import FULL
from spark_klog.records import kernels
from spark_klog.records.contract import BinaryColumn, HeadersColumn, RecordColumns
from spark_klog.records.partitioning import KAFKAS, Partitioning

_UInt32s = np.ndarray[Any, np.dtype[np.uint32]]
_Int32s = np.ndarray[Any, np.dtype[np.int32]]
_Int64s = np.ndarray[Any, np.dtype[np.int64]]
_HEADERS = FULL.field("headers").type
#: Bytes of a record beside key, value and headers: an upper limit unless timestamps are weeks apart.
_RECORD_OVERHEAD = 16
#: Bytes of an offset in a column of binary values.
_OFFSET_SIZE = 4
#: The partition of a row with neither key nor partition; also the kernel's value for null keys.
_FREE = -1


def by_topic(rows: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of each topic; `topic`, if given, replaces the column."""
    if topic is not None:
        yield topic, rows
        return
    topics = rows.column("topic")
    names = pc.unique(topics)
    for name in names:
        yield name.as_py(), rows if len(names) == 1 else rows.filter(pc.equal(topics, name))


class Placement:
    """The partitions of one topic's rows, which are as of `RecordRows`.

    A row goes to the partition that its column says, or where `partitioning` sends its key. The rest is free: its rows
    share `turns` partitions of the caller's choice, in parts of up to `batch_bytes`, or row by row.
    """

    def __init__(self, rows: pa.RecordBatch, count: int, batch_bytes: int, partitioning: Partitioning = KAFKAS) -> None:
        """`count` is the topic's number of partitions."""
        self._rows = rows
        #: None: all rows are free.
        self._partitions = _partitions(rows, count, partitioning)
        self._free = None if self._partitions is None else np.flatnonzero(self._partitions == _FREE)
        number = rows.num_rows if self._free is None else len(self._free)
        #: Where the parts of the free rows end; None: they take turns.
        self._ends: list[int] | None = None
        if partitioning.takes_turns:
            self.turns = min(number, count)
        else:
            self._ends = _ends(rows, self._free, batch_bytes) if number else []
            self.turns = len(self._ends)

    def records(self, turns: Sequence[int]) -> Iterator[tuple[int, RecordColumns]]:
        """Yield (partition, records), rows of a partition in order; a partition may come more than once.

        A record without timestamp gets the present time.
        """
        partitions, ends = self._partitions, self._ends
        if partitions is None and ends is not None:
            start = 0
            for partition, end in zip(turns, ends, strict=True):
                yield partition, _records(self._rows.slice(start, end - start))
                start = end
            return
        if self.turns:
            each = np.array(turns, np.int32)
            number = self._rows.num_rows if self._free is None else len(self._free)
            of_free = np.resize(each, number) if ends is None else np.repeat(each, np.diff(ends, prepend=0))
            if partitions is None:
                partitions = of_free
            else:
                partitions[self._free] = of_free
        if partitions is not None:
            yield from _gathered(self._rows, partitions)


def _partitions(rows: pa.RecordBatch, count: int, partitioning: Partitioning) -> _Int32s | None:
    """Partition of each row: its column's, else its key's, else `_FREE`; None if all rows are free."""
    result: _Int32s | None = None
    names = rows.schema.names
    hashes_null = partitioning.hashes_null
    if "key" in names and partitioning.hash and (hashes_null or rows.column("key").null_count < rows.num_rows):
        result = _by_key(rows.column("key"), count, partitioning)
    elif hashes_null:
        result = np.full(rows.num_rows, partitioning.of(None, count), np.int32)
    if "partition" in names and rows.column("partition").null_count < rows.num_rows:
        column = rows.column("partition").cast(pa.int32())
        own = _numbers(column, np.int32)
        is_set = _numbers(column.is_valid().cast(pa.int8()), np.bool_)
        result = np.where(is_set, own, _FREE if result is None else result).astype(np.int32, copy=False)
    return result


def _by_key(keys: pa.Array, partitions: int, partitioning: Partitioning) -> _Int32s:
    """Partition of each key, `_FREE` if it decides nothing."""
    is_null = keys.is_null()
    keys = keys.fill_null(b"") if partitioning.hashes_null else keys
    column = _binary_column(keys)
    result: _Int32s
    if partitioning.hash == "murmur2":
        result = np.frombuffer(kernels.load().partitions(column, len(keys), partitions), np.int32).copy()
    else:
        result = (_hashes(column, len(keys), partitioning.hash or "") % partitions).astype(np.int32)
    free = pc.equal(pc.binary_length(keys).fill_null(0), 0) if partitioning.frees_empty else is_null
    if not partitioning.hashes_null:
        result[free.to_numpy(zero_copy_only=False)] = _FREE
    return result


def _crc_table() -> _UInt32s:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0xEDB88320), table >> 1).astype(np.uint32)
    return table


_CRC_TABLE = _crc_table()


def _hashes(keys: BinaryColumn, count: int, kind: str) -> _UInt32s:
    """The hash ("crc32" or "fnv1a", see `records/partitioning.py`) of each of `count` keys; null keys are empty."""
    offsets = np.frombuffer(keys.offsets, np.int32)[: count + 1].astype(np.int64)
    data = np.frombuffer(keys.data, np.uint8)
    result = np.full(count, 0xFFFFFFFF if kind == "crc32" else 0x811C9DC5, np.uint32)
    lengths = np.diff(offsets)
    rows = np.flatnonzero(lengths)
    position = 0
    while len(rows):
        before, following = result[rows], data[offsets[rows] + position]
        if kind == "crc32":
            result[rows] = _CRC_TABLE[(before ^ following) & 0xFF] ^ (before >> np.uint32(8))
        else:
            result[rows] = (before ^ following) * np.uint32(0x01000193)
        position += 1
        rows = rows[lengths[rows] > position]
    if kind == "crc32":
        return ~result
    signed = result.view(np.int32)
    return np.where(signed < 0, -signed.astype(np.int64), signed).astype(np.uint32)


def _ends(rows: pa.RecordBatch, free: _Int64s | None, batch_bytes: int) -> list[int]:
    """Cut the free rows (None: all rows) into equal parts of at most a record batch: where each part ends.

    Sizes are estimates: keys and headers count with their average.
    """
    count = rows.num_rows
    values = rows.column("value")
    if free is None and rows.nbytes + count * (_RECORD_OVERHEAD + 1) <= batch_bytes:
        return [count]  # surely
    others = sum(rows.column(name).nbytes for name in ("key", "headers") if name in rows.schema.names)
    each = _RECORD_OVERHEAD + others // count
    sizes = np.diff(np.frombuffer(_binary_column(values).offsets, np.int32)[: count + 1]).astype(np.int64) + each
    ends = np.cumsum(sizes if free is None else sizes[free])
    total = int(ends[-1])
    parts = -(-total // batch_bytes)
    part = -(-ends * parts // total)  # in which each record ends
    return [*(1 + np.flatnonzero(np.diff(part))).tolist(), len(ends)]


def _gathered(rows: pa.RecordBatch, partitions: _Int32s) -> Iterator[tuple[int, RecordColumns]]:
    """Group the rows by partition."""
    counts = np.bincount(partitions)
    used = np.flatnonzero(counts)
    if len(used) == 1:
        yield int(used[0]), _records(rows)
        return
    order = pc.sort_indices(pa.Array.from_buffers(pa.int32(), len(partitions), [None, pa.py_buffer(partitions)]))
    at = 0
    for partition in used:
        yield int(partition), _records(rows.take(order.slice(at, counts[partition])))
        at += counts[partition]


def _numbers(array: pa.Array, kind: type[np.generic]) -> np.ndarray[Any, Any]:
    """The values of an array of numbers; unspecified ones for nulls."""
    return np.frombuffer(array.buffers()[1], kind)[array.offset :][: len(array)]


def _from_start(array: pa.Array) -> pa.Array:
    """The array, copied if it is a slice, so that it begins at the start of its buffers."""
    return pa.concat_arrays([array, array.slice(0, 0)]) if array.offset else array


def _binary_column(array: pa.Array) -> BinaryColumn:
    """An array of binary or string, with 32-bit offsets; only a slice with nulls is copied."""
    null_count = array.null_count
    if null_count:
        array = _from_start(array)
    validity, offsets, data = array.buffers()
    return BinaryColumn(
        bytes(4) if offsets is None else memoryview(offsets)[_OFFSET_SIZE * array.offset :],
        b"" if data is None else memoryview(data),
        memoryview(validity) if null_count else None,
        null_count,
    )


def _records(rows: pa.RecordBatch) -> RecordColumns:
    """The rows as the kernel's columns."""
    names, now = rows.schema.names, time.time_ns() // 1_000_000
    if "timestamp" in names:
        timestamps = _numbers(rows.column("timestamp").fill_null(now), np.int64)
    else:
        timestamps = np.full(rows.num_rows, now, np.int64)
    return RecordColumns(
        rows.num_rows,
        key=_binary_column(rows.column("key")) if "key" in names else None,
        value=_binary_column(rows.column("value")),
        timestamp=timestamps.data.cast("B"),
        headers=_headers(rows.column("headers")) if "headers" in names else None,
    )


def _headers(array: Any) -> HeadersColumn:
    array = _from_start(array.cast(_HEADERS))
    validity, offsets = array.buffers()[:2]
    entries = array.values
    return HeadersColumn(
        bytes(4) if offsets is None else memoryview(offsets),
        memoryview(validity) if array.null_count else None,
        array.null_count,
        _binary_column(entries.field("key")),
        _binary_column(entries.field("value")),
        len(entries),
    )
