"""Kafka record batches of one partition → Arrow record batches.

Computations are numpy's: pyarrow imports pandas to convert Python values, which takes a worker half a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from spark_klog.base.settings import INT32_MAX
from spark_klog.columns.schema import FULL
from spark_klog.errors import (
    AuthenticationError,
    ConnectionFailed,
    CorruptBatchError,
    DecodeError,
    RecordDeserializationError,
    RegistryError,
)
from spark_klog.records.contract import COLUMNS, BinaryColumn, HeadersColumn, RecordColumns
from spark_klog.records.reading.offset_order import NOTHING
from spark_klog.records.reading.reader import AbortedTransactions, BadBatch, RecordFields, RecordReader
from spark_klog.wire.codecs import MAX_DECOMPRESSED
from spark_klog.wire.primitives import Buffer

if TYPE_CHECKING:
    from spark_klog.schemas.column_format import ColumnDecoder

_HEADERS = FULL.field("headers").type
#: Rows of an Arrow batch: Spark is half as fast again with these as with batches of 8,192 rows.
ROWS = 65_536
#: Bytes of keys and values at which an Arrow batch is full: with records of 1 KB and more Spark is a third faster than
#: with 32 MiB.
BYTES = 8 * 1024 * 1024
#: The last time that fits into 64 bits as microseconds.
MAX_MILLISECONDS = 0x7FFFFFFF_FFFFFFFF // 1000
_Int64s = np.ndarray[Any, np.dtype[np.int64]]
_NO_DECODERS: Mapping[str, ColumnDecoder] = MappingProxyType({})


class Unreadable(NamedTuple):
    """A corrupt record batch of a partition, or a record that does not decode or whose timestamp does not fit; see
    `BadBatch`."""

    topic: str
    partition: int
    bad: BadBatch


class PartitionDecoder:
    """Decoder of records into Arrow batches of `schema` (see schema.py): of one topic-partition, or of several in turn.

    With `move_to`, short ranges of many partitions share an Arrow batch: a batch costs Spark and Arrow as much as
    thousands of rows. `limit` and `checks` as of `RecordReader`.

    A corrupt record batch is an error, and so is a record whose timestamp (ms) does not fit into microseconds:
    `CorruptBatchError` or `DecodeError`, which names the topic and partition. With `yields_bad` they are yielded as
    `Unreadable` instead, and left out. With the column `timestamp` in ms all records are in the batches.

    `decoders` make rows of keys and values, by column; `schema` has their types. A record that one of them can't decode
    is as bad as one with such a timestamp, unless the decoder is permissive. Its error is a
    `RecordDeserializationError`, and the records before it come first. With `keeps_bad` each bad record comes as a
    whole, else only with `decoders`.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        schema: pa.Schema,
        limit: int = MAX_DECOMPRESSED,
        *,
        checks: bool = True,
        yields_bad: bool = False,
        decoders: Mapping[str, ColumnDecoder] = _NO_DECODERS,
        keeps_bad: bool = False,
    ) -> None:
        self._topic, self._partition = topic, partition
        self._schema, self._yields_bad, self._decoders = schema, yields_bad, decoders
        names = frozenset(schema.names)
        self._is_exact = "timestamp" not in names or schema.field("timestamp").type.unit == "ms"
        self._keeps_bad = keeps_bad or bool(decoders)
        wanted = names if self._is_exact and not decoders else names | {"offset"}
        if self._keeps_bad:  # all of records that are left out
            wanted |= {"key", "value", "headers", "timestamp"}
        columns = wanted & frozenset(COLUMNS)
        self._reader = RecordReader(columns, rows=ROWS, size=BYTES, limit=limit, checks=checks, yields_bad=yields_bad)
        #: The columns `topic` and `partition`, built once and sliced.
        self._constants: dict[str, pa.Array] = {}
        self._decoded = 0
        #: Partitions before the current one with rows in the reader, and how many of its rows end there.
        self._moved: list[tuple[str, int, int]] = []

    def move_to(self, topic: str, partition: int) -> None:
        """Continue with the records of another partition; they fill up an Arrow batch that is not full yet."""
        if (topic, partition) == (self._topic, self._partition):
            return
        if self._reader.rows:
            self._moved.append((self._topic, self._partition, self._reader.rows))
        self._topic, self._partition = topic, partition
        self._constants.clear()

    @property
    def rows(self) -> int:
        """The visible records read so far, in Arrow batches or not yet."""
        return self._decoded + self._reader.rows

    def decode(
        self,
        data: Buffer,
        first: int,
        end: int,
        aborted: AbortedTransactions | None = None,
        damaged: Mapping[int, DecodeError] = NOTHING,
    ) -> Iterator[pa.RecordBatch]:
        """Decode the visible records of `data` with offsets in [first, end); yield the Arrow batches that are full.

        `damaged` maps positions of record batches with wrong offsets to their errors.
        """
        parts = self._reader.read(data, first, end, aborted, damaged)
        while True:
            try:
                part = next(parts, None)
            except DecodeError as error:
                kind = CorruptBatchError if isinstance(error, CorruptBatchError) else DecodeError
                raise kind(f"{self._topic}-{self._partition}: {error}") from None
            if part is None:
                return
            if isinstance(part, BadBatch):
                yield Unreadable(self._topic, self._partition, part)
            else:
                yield from self._batches(part)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """The last Arrow batch, if records are left."""
        if self._reader.rows:
            yield from self._batches(self._reader.finish())

    def _batches(self, columns: RecordColumns) -> Iterator[pa.RecordBatch]:
        """Yield one Arrow batch, and before it the records that are not in it: those that do not decode, and whose
        timestamps do not fit into microseconds. Without `yields_bad` the batch ends before the first of them, whose
        error is raised."""
        count = columns.count
        self._decoded += count
        parts, self._moved = [*self._moved, (self._topic, self._partition, count)], []
        fixed: dict[str, Any] = {"offset": columns.offset, "timestampType": columns.timestamp_type}
        fits: np.ndarray[Any, np.dtype[np.bool_]] | None = None
        decoded: dict[str, pa.Array] = {}
        failures: list[tuple[int, DecodeError]] = []
        #: Of each row, what is wrong with it, and where.
        faults: dict[int, list[tuple[str, BinaryColumn | None]]] = {}
        times_of_faults: dict[int, int] = {}
        for name, decoder in self._decoders.items():
            source = columns.key if name == "key" else columns.value
            assert source is not None
            try:
                decoded[name], bad = decoder.decode(source, columns.headers)
            except RegistryError as error:
                raise RegistryError(f"{_shown(parts)}: {error}", error.status, error.code) from None
            except (ConnectionFailed, AuthenticationError) as error:
                raise type(error)(f"{_shown(parts)}: {error}") from None
            if bad and not decoder.is_permissive:
                if not self._yields_bad:
                    row, reason = min(bad)
                    failures.append((row, self._failure(row, name, reason, columns, parts)))
                    continue
                fits = np.ones(count, np.bool_) if fits is None else fits
                for row, reason in bad:
                    fits[row] = False
                    faults.setdefault(row, []).append((f"has a {name} that does not decode: {reason}", source))
        if columns.timestamp is not None:
            times = np.frombuffer(columns.timestamp, np.int64)
            if not self._is_exact:
                has_time = has_microseconds(times)
                if not has_time.all():
                    for row in np.flatnonzero(~has_time).tolist():
                        why = f"has the timestamp {times[row]} ms, which does not fit into microseconds"
                        if not self._yields_bad:
                            bad_record = self._bad_record(row, [(why, columns.value)], columns, parts)
                            named = f"{bad_record.topic}-{bad_record.partition}: {bad_record.bad.error}"
                            failures.append((row, DecodeError(named)))
                            break
                        faults.setdefault(row, []).append((why, columns.value))
                    fits = has_time if fits is None else fits & has_time
                times_of_faults = {row: int(times[row]) for row in faults}
                times = np.multiply(times, 1000, out=times if times.flags.writeable else None)
            fixed["timestamp"] = times
        for row in sorted(faults):
            yield self._bad_record(row, faults[row], columns, parts, times_of_faults.get(row))
        arrays = []
        for name, kind in zip(self._schema.names, self._schema.types, strict=True):
            if name in decoded:
                array = decoded[name]
            elif name in fixed:
                array = pa.Array.from_buffers(kind, count, [None, pa.py_buffer(fixed[name])])
            elif name == "headers":
                array = headers_array(columns.headers, count)
            elif name in ("key", "value"):
                array = binary_array(columns.key if name == "key" else columns.value, count, kind)
            elif len(parts) > 1:
                array = _place_column(name, parts)
            else:
                array = self._constants.get(name)
                if array is None or len(array) < count:
                    size = max(count, min(ROWS, 8 * count))  # a small batch is often the only one
                    array = self._constants[name] = _place_column(name, [(self._topic, self._partition, size)])
                array = array.slice(0, count)
            arrays.append(array)
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        if failures:
            row, failure = min(failures, key=itemgetter(0))
            if row:
                yield batch.slice(0, row)
            raise failure
        yield batch if fits is None else batch.filter(pa.array(fits))

    def _failure(
        self, row: int, name: str, reason: str, columns: RecordColumns, parts: Sequence[tuple[str, int, int]]
    ) -> RecordDeserializationError:
        topic, partition, offset = _place_of(row, columns, parts)
        return RecordDeserializationError(topic, partition, offset, name, reason, *self._record(row, columns))

    def _bad_record(
        self,
        row: int,
        faults: Sequence[tuple[str, BinaryColumn | None]],
        columns: RecordColumns,
        parts: Sequence[tuple[str, int, int]],
        timestamp: int | None = None,
    ) -> Unreadable:
        """A record that is left out, with what is wrong with it; its bytes are those of the first fault's column."""
        topic, partition, offset = _place_of(row, columns, parts)
        error = DecodeError(f"the record at offset {offset} {', and '.join(why for why, _ in faults)}")
        source = faults[0][1]
        data = b"" if source is None else source.value(row) or b""
        record = self._record(row, columns, timestamp) if self._keeps_bad else None
        return Unreadable(topic, partition, BadBatch(offset, memoryview(data), error, record))

    def _record(self, row: int, columns: RecordColumns, timestamp: int | None = None) -> RecordFields:
        """A record as it was; its `timestamp` is given if those of the columns are in microseconds already."""
        key, value = (None if column is None else column.value(row) for column in (columns.key, columns.value))
        if timestamp is None:
            timestamp = -1 if columns.timestamp is None else int(np.frombuffer(columns.timestamp, np.int64)[row])
        return RecordFields(key, value, () if columns.headers is None else columns.headers.row(row), timestamp)


def _place_of(row: int, columns: RecordColumns, parts: Sequence[tuple[str, int, int]]) -> tuple[str, int, int]:
    """Topic, partition and offset of a row; `parts` are as of `_place_column`."""
    topic, partition, _ = next(part for part in parts if row < part[-1])
    assert columns.offset is not None
    return topic, partition, int(np.frombuffer(columns.offset, np.int64)[row])


def _shown(parts: Sequence[tuple[str, int, int]]) -> str:
    """The partitions of an Arrow batch, in words."""
    topic, partition, _ = parts[0]
    return f"{topic}-{partition}" + (f" and {len(parts) - 1} more partitions" if len(parts) > 1 else "")


def _place_column(name: str, parts: Sequence[tuple[str, int, int]]) -> pa.Array:
    """The column `topic` or `partition` of (topic, partition, end of its rows), one after the other."""
    counts = np.diff(np.array([end for *_, end in parts]), prepend=0)
    if name == "partition":
        values = np.repeat(np.array([partition for _, partition, _ in parts], np.int32), counts)
        return pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])
    runs: list[tuple[str, int]] = []
    for (topic, *_), count in zip(parts, counts.tolist(), strict=True):
        before = runs.pop()[1] if runs and runs[-1][0] == topic else 0
        runs.append((topic, before + count))
    return pa.concat_arrays([_repeated(topic, count) for topic, count in runs])


def _repeated(text: str, count: int) -> pa.Array:
    """A column that repeats a string; `DecodeError` if 32-bit offsets overflow."""
    data = text.encode()
    if len(data) * count > INT32_MAX:
        raise DecodeError(f"{count} records are too many for one Arrow batch with the column topic")
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(len(data))
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data * count)])


def has_microseconds(milliseconds: _Int64s) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether times fit into 64 bits as microseconds: those from about 292,000 years before 1970 to as many after."""
    return (milliseconds >= -MAX_MILLISECONDS) & (milliseconds <= MAX_MILLISECONDS)


def binary_array(column: BinaryColumn | None, count: int, kind: pa.DataType) -> pa.Array:
    """A column of `count` keys or values, or of parts of headers, as Arrow, of the same memory."""
    assert column is not None
    validity = None if column.validity is None else pa.py_buffer(column.validity)
    buffers = [validity, pa.py_buffer(column.offsets), pa.py_buffer(column.data)]
    return pa.Array.from_buffers(kind, count, buffers, column.null_count)


def headers_array(column: HeadersColumn | None, count: int) -> pa.Array:
    """A column of the headers of `count` records as Arrow, of the same memory."""
    assert column is not None
    kind = _HEADERS.value_type
    entries = pa.StructArray.from_arrays(
        [binary_array(column.keys, column.total, pa.string()), binary_array(column.values, column.total, pa.binary())],
        fields=list(kind),
    )
    validity = None if column.validity is None else pa.py_buffer(column.validity)
    buffers = [validity, pa.py_buffer(column.offsets)]
    return pa.Array.from_buffers(_HEADERS, count, buffers, column.null_count, children=[entries])
