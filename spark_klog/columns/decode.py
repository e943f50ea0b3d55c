"""Kafka record batches of one partition → Arrow record batches.

Computations are numpy's: pyarrow imports pandas to convert Python values, which takes a worker half a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from spark_klog.columns.schema import FULL
from spark_klog.errors import CorruptBatchError, DecodeError
from spark_klog.records import kernels
from spark_klog.records.contract import COLUMNS, BinaryColumn, HeadersColumn, RecordColumns
from spark_klog.records.reading.offset_order import NOTHING
from spark_klog.records.reading.reader import AbortedTransactions, BadBatch, append_visible, refuse
from spark_klog.wire.codecs import MAX_DECOMPRESSED
from spark_klog.wire.primitives import Buffer

_HEADERS = FULL.field("headers").type
#: Rows of an Arrow batch: Spark is half as fast again with these as with batches of 8,192 rows.
ROWS = 65_536
#: Bytes of keys and values at which an Arrow batch is full: with records of 1 KB and more Spark is a third faster than
#: with 32 MiB.
BYTES = 8 * 1024 * 1024
_MAX_INT32 = 0x7FFFFFFF
#: The last time that fits into 64 bits as microseconds.
MAX_MILLISECONDS = 0x7FFFFFFF_FFFFFFFF // 1000
_Int64s = np.ndarray[Any, np.dtype[np.int64]]
_NO_ROWS: _Int64s = np.empty(0, np.int64)


class PartitionDecoder:
    """Decoder of records into Arrow batches of `schema` (see schema.py): of one topic-partition, or of several in turn.

    With `move_to`, short ranges of many partitions share an Arrow batch: a batch costs Spark and Arrow as much as
    thousands of rows. A compressed record batch may grow to `limit` bytes; `checks` as of `append_visible`.
    `DecodeError` and `CorruptBatchError` name the topic and partition.

    A record whose timestamp (ms) does not fit into microseconds goes to `on_bad` with its offset and value, and is
    left out unless that raises. With the column `timestamp` in ms instead all records are in the batches.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        schema: pa.Schema,
        limit: int = MAX_DECOMPRESSED,
        on_bad: Callable[[BadBatch], None] = refuse,
        *,
        checks: bool = True,
    ) -> None:
        self._topic, self._partition = topic, partition
        self._limit = limit
        self._on_bad = on_bad
        self._checks = checks
        self._schema = schema
        self._kernel = kernels.load()
        names = frozenset(schema.names)
        self._is_exact = "timestamp" not in names or schema.field("timestamp").type.unit == "ms"
        self._builder = self._kernel.builder((names if self._is_exact else names | {"offset"}) & frozenset(COLUMNS))
        self._constants: dict[str, pa.Array] = {}
        self._taken = 0
        #: Partitions before the current one with rows in the builder, their `on_bad`, and how many of its rows were
        #: before their end.
        self._moved: list[tuple[str, int, Callable[[BadBatch], None], int]] = []

    def move_to(self, topic: str, partition: int, on_bad: Callable[[BadBatch], None] = refuse) -> None:
        """Continue with the records of another partition; they fill up an Arrow batch that is not full yet."""
        if (topic, partition) == (self._topic, self._partition):
            self._on_bad = on_bad
            return
        if self._builder.rows:
            self._moved.append((self._topic, self._partition, self._on_bad, self._builder.rows))
        self._topic, self._partition, self._on_bad = topic, partition, on_bad
        self._constants.clear()

    @property
    def rows(self) -> int:
        """The visible records added so far, in Arrow batches or not yet."""
        return self._taken + self._builder.rows

    def add(
        self,
        data: Buffer,
        first: int,
        end: int,
        aborted: AbortedTransactions | None = None,
        damaged: Mapping[int, DecodeError] = NOTHING,
    ) -> Iterator[pa.RecordBatch]:
        """Add the visible records of `data` with offsets in [first, end); yield the Arrow batches that are full.

        `damaged` maps positions of record batches with wrong offsets to their errors.
        """
        visible = append_visible(
            self._kernel,
            self._builder,
            data,
            first,
            end,
            aborted,
            self._limit,
            self._on_bad,
            ROWS,
            BYTES,
            damaged,
            self._checks,
        )
        for _ in self._named(visible):
            if self._builder.rows >= ROWS or self._builder.size >= BYTES:
                yield self._take()

    def finish(self) -> Iterator[pa.RecordBatch]:
        """The last Arrow batch, if records are left."""
        if self._builder.rows:
            yield self._take()

    def _named(self, steps: Iterator[None]) -> Iterator[None]:
        """The steps of reading a partition, with its name in their errors."""
        with _named(self._topic, self._partition):
            yield from steps

    def _take(self) -> pa.RecordBatch:
        columns = self._builder.finish()
        self._taken += columns.count
        self._moved.append((self._topic, self._partition, self._on_bad, columns.count))
        unfit = _NO_ROWS if self._is_exact else _unfit(columns.timestamp)
        for row in unfit.tolist():
            self._refuse(row, columns)
        arrays = [self._column(name, columns) for name in self._schema.names]
        self._moved.clear()
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        return batch.filter(pa.array(np.isin(np.arange(columns.count), unfit, invert=True))) if len(unfit) else batch

    def _refuse(self, row: int, columns: RecordColumns) -> None:
        """Give a record whose timestamp does not fit into microseconds to the `on_bad` of its partition."""
        topic, partition, on_bad, _ = next(each for each in self._moved if row < each[-1])
        assert columns.offset is not None
        assert columns.timestamp is not None
        offset, time = (int(np.frombuffer(data, np.int64)[row]) for data in (columns.offset, columns.timestamp))
        value: Buffer = b""
        if columns.value is not None:
            start, end = np.frombuffer(columns.value.offsets, np.int32)[row : row + 2]
            value = memoryview(columns.value.data)[start:end]
        reason = f"the record at offset {offset} has the timestamp {time} ms, which does not fit into microseconds"
        with _named(topic, partition):
            on_bad(BadBatch(offset, memoryview(value), DecodeError(reason)))

    def _column(self, name: str, columns: RecordColumns) -> pa.Array:
        count = columns.count
        if name in ("topic", "partition"):
            return self._constant(name, count) if len(self._moved) == 1 else self._varying(name)
        if name == "timestamp":
            times = columns.timestamp if self._is_exact else _microseconds(columns.timestamp)
            return _fixed(self._schema.field(name).type, count, times)
        if name == "offset":
            return _fixed(pa.int64(), count, columns.offset)
        if name == "timestampType":
            return _fixed(pa.int32(), count, columns.timestamp_type)
        if name == "headers":
            return _headers(columns.headers, count)
        return _binary(columns.key if name == "key" else columns.value, count, pa.binary())

    def _constant(self, name: str, count: int) -> pa.Array:
        """The column `topic` or `partition`, built once and sliced."""
        if name not in self._constants or len(self._constants[name]) < count:
            size = max(count, min(ROWS, 8 * count))  # a small batch is often the only one
            self._constants[name] = (
                _repeated(self._topic, size)
                if name == "topic"
                else _fixed(pa.int32(), size, np.full(size, self._partition, np.int32))
            )
        return self._constants[name].slice(0, count)

    def _varying(self, name: str) -> pa.Array:
        """The column `topic` or `partition` of several partitions."""
        ends = np.array([end for *_, end in self._moved])
        counts = np.diff(ends, prepend=0)
        if name == "partition":
            partitions = np.array([partition for _, partition, *_ in self._moved], np.int32)
            return _fixed(pa.int32(), int(ends[-1]), np.repeat(partitions, counts))
        runs: list[tuple[str, int]] = []
        for (topic, *_), count in zip(self._moved, counts.tolist(), strict=True):
            before = runs.pop()[1] if runs and runs[-1][0] == topic else 0
            runs.append((topic, before + count))
        return pa.concat_arrays([_repeated(topic, count) for topic, count in runs])


def _repeated(text: str, count: int) -> pa.Array:
    """A column that repeats a string; `DecodeError` if 32-bit offsets overflow."""
    data = text.encode()
    if len(data) * count > _MAX_INT32:
        raise DecodeError(f"{count} records are too many for one Arrow batch with the column topic")
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(len(data))
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data * count)])


@contextmanager
def _named(topic: str, partition: int) -> Iterator[None]:
    """Add the topic and partition to errors."""
    try:
        yield
    except CorruptBatchError as error:
        raise CorruptBatchError(f"{topic}-{partition}: {error}") from None
    except DecodeError as error:
        raise DecodeError(f"{topic}-{partition}: {error}") from None


def has_microseconds(milliseconds: _Int64s) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether times fit into 64 bits as microseconds: those from about 292,000 years before 1970 to as many after."""
    return (milliseconds >= -MAX_MILLISECONDS) & (milliseconds <= MAX_MILLISECONDS)


def _unfit(milliseconds: Buffer | None) -> _Int64s:
    """The rows whose timestamps do not fit into 64 bits as microseconds."""
    assert milliseconds is not None
    return np.flatnonzero(~has_microseconds(np.frombuffer(milliseconds, np.int64)))


def _microseconds(milliseconds: Buffer | None) -> _Int64s:
    """Convert a kernel's timestamps, in place if its buffer is writable."""
    assert milliseconds is not None
    values = np.frombuffer(milliseconds, np.int64)
    return np.multiply(values, 1000, out=values if values.flags.writeable else None)


def _fixed(kind: pa.DataType, count: int, data: Buffer | np.ndarray[Any, Any] | None) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(data)])


def _optional(data: Buffer | None) -> pa.Buffer | None:
    return None if data is None else pa.py_buffer(data)


def _binary(column: BinaryColumn | None, count: int, kind: pa.DataType) -> pa.Array:
    assert column is not None
    buffers = [_optional(column.validity), pa.py_buffer(column.offsets), pa.py_buffer(column.data)]
    return pa.Array.from_buffers(kind, count, buffers, column.null_count)


def _headers(column: HeadersColumn | None, count: int) -> pa.Array:
    assert column is not None
    kind = _HEADERS.value_type
    entries = pa.StructArray.from_arrays(
        [_binary(column.keys, column.total, pa.string()), _binary(column.values, column.total, pa.binary())],
        fields=list(kind),
    )
    buffers = [_optional(column.validity), pa.py_buffer(column.offsets)]
    return pa.Array.from_buffers(_HEADERS, count, buffers, column.null_count, children=[entries])
