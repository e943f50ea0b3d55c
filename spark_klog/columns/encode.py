"""Arrow record batches → records for each topic-partition.

numpy computes what there is to compute: given a value of Python's, Arrow imports pandas, half a second of a worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.columns.schema import FULL
from spark_klog.errors import ConfigError
from spark_klog.records import kernels
from spark_klog.records.contract import BinaryColumn, HeadersColumn, RecordColumns

_HEADERS = FULL.field("headers").type
_Int32s = np.ndarray[Any, np.dtype[np.int32]]


class PartitionEncoder:
    """Splits Arrow batches by topic and partition.

    Columns: value (binary or string); key (the same), topic, partition, headers where they are there; others are not
    read. `topic` replaces the column. `partitions_of(topic)` says how many partitions a topic has, and
    `choose(topic, count)` the partition of records without a key. Records are timestamped with the time of the split.
    """

    def __init__(
        self, topic: str | None, partitions_of: Callable[[str], int], choose: Callable[[str, int], int]
    ) -> None:
        self._topic = topic
        self._partitions_of = partitions_of
        self._choose = choose
        self._kernel = kernels.load()

    def split(self, batch: pa.RecordBatch) -> Iterator[tuple[str, int, RecordColumns]]:
        """(topic, partition, records), in the batch's order within a partition; `ConfigError` for a null topic."""
        for topic, rows in self._by_topic(batch):
            partitions = self._partitions(rows, topic)
            counts = np.bincount(partitions)
            found = np.flatnonzero(counts)
            if len(found) == 1 and not any(column.offset for column in rows.columns):
                # all rows, in arrays that begin at 0: there is nothing to gather
                yield topic, int(found[0]), _records(rows)
                continue
            order = pc.sort_indices(
                pa.Array.from_buffers(pa.int32(), len(partitions), [None, pa.py_buffer(partitions)])
            )
            at = 0
            for partition in found:
                yield topic, int(partition), _records(rows.take(order.slice(at, counts[partition])))
                at += counts[partition]

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self._topic is not None:
            yield self._topic, batch
            return
        topics = batch.column("topic")
        if topics.null_count:
            raise ConfigError("a row has a null topic: set the option topic, or give every row one")
        for topic in pc.unique(topics):
            yield topic.as_py(), batch.filter(pc.equal(topics, topic))

    def _partitions(self, rows: pa.RecordBatch, topic: str) -> _Int32s:
        """Partition of each row: its own, else its key's, else a chosen one."""
        count = self._partitions_of(topic)
        result = np.full(rows.num_rows, self._choose(topic, count), np.int32)
        names = rows.schema.names
        if "key" in names and rows.column("key").null_count < rows.num_rows:
            keys = _binary_column(_whole(rows.column("key")))
            hashed = np.frombuffer(self._kernel.partitions(keys, rows.num_rows, count), np.int32)
            result = np.where(hashed < 0, result, hashed)
        if "partition" in names and rows.column("partition").null_count < rows.num_rows:
            column = rows.column("partition").cast(pa.int32())
            own = _numbers(column, np.int32)
            is_set = _numbers(column.is_valid().cast(pa.int8()), np.bool_)
            wrong = own[is_set & ((own < 0) | (own >= count))]
            if len(wrong):
                raise ConfigError(f"partition {wrong[0]} of topic {topic}: it has partitions 0 to {count - 1}")
            result = np.where(is_set, own, result)
        return result


def _numbers(array: pa.Array, kind: type[np.generic]) -> np.ndarray[Any, Any]:
    """The values of an array of numbers; any for nulls."""
    return np.frombuffer(array.buffers()[1], kind)[array.offset :][: len(array)]


def _whole(array: pa.Array) -> pa.Array:
    """As binary with 32-bit offsets, beginning at the start of its buffers."""
    array = array.cast(pa.binary())
    return pa.concat_arrays([array, array.slice(0, 0)]) if array.offset else array


def _buffer(buffer: pa.Buffer | None) -> memoryview | None:
    return None if buffer is None else memoryview(buffer)


def _binary_column(array: pa.Array) -> BinaryColumn:
    validity, offsets, data = array.buffers()
    null_count = array.null_count
    return BinaryColumn(
        _buffer(offsets) or bytes(4),
        _buffer(data) or b"",
        _buffer(validity) if null_count else None,
        null_count,
    )


def _records(rows: pa.RecordBatch) -> RecordColumns:
    """The columns of rows whose arrays begin at 0 of their buffers."""
    names = rows.schema.names
    return RecordColumns(
        rows.num_rows,
        key=_binary_column(_whole(rows.column("key"))) if "key" in names else None,
        value=_binary_column(_whole(rows.column("value"))),
        timestamp=np.full(rows.num_rows, time.time_ns() // 1_000_000, np.int64).data.cast("B"),
        headers=_headers(rows.column("headers")) if "headers" in names else None,
    )


def _headers(array: Any) -> HeadersColumn:
    array = array.cast(_HEADERS)
    entries = array.values
    return HeadersColumn(
        _buffer(array.buffers()[1]) or bytes(4),
        _buffer(array.buffers()[0]) if array.null_count else None,
        array.null_count,
        _binary_column(_whole(entries.field("key"))),
        _binary_column(_whole(entries.field("value"))),
        len(entries),
    )
