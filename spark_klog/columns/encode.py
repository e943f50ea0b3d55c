"""Arrow record batches → records by topic and partition, for the kernel to encode.

Computations are numpy's: pyarrow imports pandas to convert Python values, which takes a worker half a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.base.clock import system_ms
from spark_klog.columns.schema import FULL
from spark_klog.records import kernels
from spark_klog.records.contract import BinaryColumn, HeadersColumn, RecordColumns
from spark_klog.records.partitioning import KAFKAS, Partitioning

_UInt32s = np.ndarray[Any, np.dtype[np.uint32]]


def _crc_table() -> _UInt32s:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0xEDB88320), table >> 1).astype(np.uint32)
    return table


_CRC_TABLE = _crc_table()


def hashes(keys: BinaryColumn, count: int, kind: str) -> _UInt32s:
    """The hash ("crc32" or "fnv1a", see `records/partitioning.py`) of each of `count` keys; null keys are empty."""
    offsets = np.frombuffer(keys.offsets, np.int32)[: count + 1].astype(np.int64)
    data = np.frombuffer(keys.data, np.uint8)
    result = np.full(count, 0xFFFFFFFF if kind == "crc32" else 0x811C9DC5, np.uint32)
    lengths = np.diff(offsets)
    rows = np.flatnonzero(lengths)
    position = 0
    while len(rows):
        found, bytes_ = result[rows], data[offsets[rows] + position]
        if kind == "crc32":
            result[rows] = _CRC_TABLE[(found ^ bytes_) & 0xFF] ^ (found >> np.uint32(8))
        else:
            result[rows] = (found ^ bytes_) * np.uint32(0x01000193)
        position += 1
        rows = rows[lengths[rows] > position]
    if kind == "crc32":
        return ~result
    signed = result.view(np.int32)
    return np.where(signed < 0, -signed.astype(np.int64), signed).astype(np.uint32)


_HEADERS = FULL.field("headers").type
_Int32s = np.ndarray[Any, np.dtype[np.int32]]
_Int64s = np.ndarray[Any, np.dtype[np.int64]]
#: Bytes of a record beside key, value and headers: an upper limit unless timestamps are weeks apart.
_RECORD_OVERHEAD = 16
#: Bytes of an offset in a column of binary values.
_OFFSET_SIZE = 4
#: The partition of a row with neither key nor partition; also the kernel's value for null keys.
_FREE = -1


class PartitionEncoder:
    """Splits Arrow batches by topic and partition.

    Reads the columns value (binary or string) and, if present, key (the same), topic, partition, timestamp (int64, ms)
    and headers. `topic`, if given, replaces the column. `partitions_of(topic)` returns a topic's number of partitions.
    A row without partition goes where `partitioning` sends its key. The free rows among them are spread: every
    `batch_bytes` of them go to another partition, `choose(topic)`. A record without timestamp gets the time of the
    split. The rows have the types to which `record_rows` casts, and were checked by `check_rows`.
    """

    def __init__(
        self,
        topic: str | None,
        partitions_of: Callable[[str], int],
        choose: Callable[[str], int],
        batch_bytes: int,
        partitioning: Partitioning = KAFKAS,
    ) -> None:
        self._topic = topic
        self._partitions_of = partitions_of
        self._choose = choose
        self._batch_bytes = batch_bytes
        self._partitioning = partitioning
        self._kernel = kernels.load()

    def split(self, batch: pa.RecordBatch) -> Iterator[tuple[str, int, RecordColumns]]:
        """Yield (topic, partition, records), rows of a partition in order; a partition may come more than once."""
        for topic, rows in self._by_topic(batch):
            partitions = self._partitions(rows, topic)
            if self._partitioning.takes_turns and rows.num_rows:
                partitions = self._in_turn(rows.num_rows, topic, partitions)
            elif partitions is None:
                start = 0
                for partition, end in self._turns(topic, _record_sizes(rows)):
                    yield topic, partition, _records(rows.slice(start, end - start))
                    start = end
                continue
            free = np.flatnonzero(partitions == _FREE)
            start = 0
            for partition, end in self._turns(topic, _record_sizes(rows)[free]) if len(free) else ():
                partitions[free[start:end]] = partition
                start = end
            yield from _gathered(topic, rows, partitions)

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self._topic is not None:
            yield self._topic, batch
            return
        topics = batch.column("topic")
        for topic in pc.unique(topics):
            yield topic.as_py(), batch.filter(pc.equal(topics, topic))

    def _partitions(self, rows: pa.RecordBatch, topic: str) -> _Int32s | None:
        """Partition of each row: its column's, else its key's, else `_FREE`; None if all rows are free."""
        count = self._partitions_of(topic)
        result: _Int32s | None = None
        names = rows.schema.names
        way = self._partitioning
        if "key" in names and way.hash is not None and (way.hashes_null or rows.column("key").null_count < len(rows)):
            result = self._by_key(rows.column("key"), count)
        elif way.hashes_null:
            result = np.full(rows.num_rows, way.of(None, count), np.int32)
        if "partition" in names and rows.column("partition").null_count < rows.num_rows:
            column = rows.column("partition").cast(pa.int32())
            own = _numbers(column, np.int32)
            is_set = _numbers(column.is_valid().cast(pa.int8()), np.bool_)
            result = np.where(is_set, own, _FREE if result is None else result).astype(np.int32, copy=False)
        return result

    def _by_key(self, keys: pa.Array, partitions: int) -> _Int32s:
        """Partition of each key, `_FREE` if it decides nothing."""
        way = self._partitioning
        is_null = keys.is_null()
        keys = keys.fill_null(b"") if way.hashes_null else keys
        column = _binary_column(keys)
        result: _Int32s
        if way.hash == "murmur2":
            result = np.frombuffer(self._kernel.partitions(column, len(keys), partitions), np.int32).copy()
        else:
            result = (hashes(column, len(keys), way.hash or "") % partitions).astype(np.int32)
        free = pc.equal(pc.binary_length(keys).fill_null(0), 0) if way.frees_empty else is_null
        if not way.hashes_null:
            result[free.to_numpy(zero_copy_only=False)] = _FREE
        return result

    def _in_turn(self, count: int, topic: str, partitions: _Int32s | None) -> _Int32s:
        """The partitions, with another one for each free row."""
        free = np.arange(count) if partitions is None else np.flatnonzero(partitions == _FREE)
        result: _Int32s = np.full(count, _FREE, np.int32) if partitions is None else partitions
        turn = [self._choose(topic) for _ in range(min(len(free), self._partitions_of(topic)))]
        result[free] = np.resize(np.array(turn, np.int32), len(free))
        return result

    def _turns(self, topic: str, sizes: _Int64s) -> Iterator[tuple[int, int]]:
        """Cut records of these sizes into equal parts of at most a record batch: (partition, end) of each part."""
        if not len(sizes):
            return
        ends = np.cumsum(sizes)
        total = int(ends[-1])
        parts = -(-total // self._batch_bytes)
        part = -(-ends * parts // total)  # in which each record ends
        cuts = 1 + np.flatnonzero(np.diff(part))
        for end in [*cuts.tolist(), len(sizes)]:
            yield self._choose(topic), end


def _gathered(topic: str, rows: pa.RecordBatch, partitions: _Int32s) -> Iterator[tuple[str, int, RecordColumns]]:
    """Group the rows by partition."""
    counts = np.bincount(partitions)
    found = np.flatnonzero(counts)
    if len(found) == 1:
        yield topic, int(found[0]), _records(rows)
        return
    order = pc.sort_indices(pa.Array.from_buffers(pa.int32(), len(partitions), [None, pa.py_buffer(partitions)]))
    at = 0
    for partition in found:
        yield topic, int(partition), _records(rows.take(order.slice(at, counts[partition])))
        at += counts[partition]


def _numbers(array: pa.Array, kind: type[np.generic]) -> np.ndarray[Any, Any]:
    """The values of an array of numbers; unspecified ones for nulls."""
    return np.frombuffer(array.buffers()[1], kind)[array.offset :][: len(array)]


def _from_start(array: pa.Array) -> pa.Array:
    """The array, copied if it is a slice, so that it begins at the start of its buffers."""
    return pa.concat_arrays([array, array.slice(0, 0)]) if array.offset else array


def _record_sizes(rows: pa.RecordBatch) -> _Int64s:
    """Estimated bytes of each row's record: keys and headers count with their average."""
    count = rows.num_rows
    offsets = np.frombuffer(_binary_column(rows.column("value")).offsets, np.int32)[: count + 1]
    others = sum(rows.column(name).nbytes for name in ("key", "headers") if name in rows.schema.names)
    sizes: _Int64s = np.diff(offsets).astype(np.int64)
    sizes += _RECORD_OVERHEAD + others // max(count, 1)
    return sizes


def _buffer(buffer: pa.Buffer | None) -> memoryview | None:
    return None if buffer is None else memoryview(buffer)


def _binary_column(array: pa.Array) -> BinaryColumn:
    """An array of binary or string, with 32-bit offsets; only a slice with nulls is copied."""
    null_count = array.null_count
    if null_count:
        array = _from_start(array)
    validity, offsets, data = array.buffers()
    return BinaryColumn(
        bytes(4) if offsets is None else memoryview(offsets)[_OFFSET_SIZE * array.offset :],
        _buffer(data) or b"",
        _buffer(validity) if null_count else None,
        null_count,
    )


def _records(rows: pa.RecordBatch) -> RecordColumns:
    """The rows as the kernel's columns."""
    names = rows.schema.names
    return RecordColumns(
        rows.num_rows,
        key=_binary_column(rows.column("key")) if "key" in names else None,
        value=_binary_column(rows.column("value")),
        timestamp=_timestamps(rows).data.cast("B"),
        headers=_headers(rows.column("headers")) if "headers" in names else None,
    )


def _timestamps(rows: pa.RecordBatch) -> _Int64s:
    now = system_ms()
    if "timestamp" not in rows.schema.names:
        return np.full(rows.num_rows, now, np.int64)
    result: _Int64s = _numbers(rows.column("timestamp").fill_null(now), np.int64)
    return result


def _headers(array: Any) -> HeadersColumn:
    array = _from_start(array.cast(_HEADERS))
    entries = array.values
    return HeadersColumn(
        _buffer(array.buffers()[1]) or bytes(4),
        _buffer(array.buffers()[0]) if array.null_count else None,
        array.null_count,
        _binary_column(entries.field("key")),
        _binary_column(entries.field("value")),
        len(entries),
    )
