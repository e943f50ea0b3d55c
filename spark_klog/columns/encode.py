"""Arrow record batches → records for each topic-partition."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.columns.schema import FULL
from spark_klog.errors import ConfigError
from spark_klog.records import kernels
from spark_klog.records.contract import BinaryColumn, HeadersColumn, RecordColumns

_HEADERS = FULL.field("headers").type


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
            order = pc.sort_indices(partitions)
            at = 0
            for entry in pc.value_counts(pc.take(partitions, order)):
                count = entry["counts"].as_py()
                yield topic, entry["values"].as_py(), _records(rows.take(order.slice(at, count)))
                at += count

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self._topic is not None:
            yield self._topic, batch
            return
        topics = batch.column("topic")
        if topics.null_count:
            raise ConfigError("a row has a null topic: set the option topic, or give every row one")
        for topic in pc.unique(topics):
            yield topic.as_py(), batch.filter(pc.equal(topics, topic))

    def _partitions(self, rows: pa.RecordBatch, topic: str) -> pa.Array:
        """INT32 partition of each row: its own, else its key's, else a chosen one."""
        count = self._partitions_of(topic)
        chosen = pa.scalar(self._choose(topic, count), pa.int32())
        result = pa.nulls(rows.num_rows, pa.int32())
        if "partition" in rows.schema.names:
            result = rows.column("partition").cast(pa.int32())
            wrong = pc.filter(result, pc.or_(pc.less(result, 0), pc.greater_equal(result, count)))
            if len(wrong):
                raise ConfigError(f"partition {wrong[0]} of topic {topic}: it has partitions 0 to {count - 1}")
        if "key" in rows.schema.names and result.null_count:
            keys = _binary_column(_whole(rows.column("key")))
            hashed = pa.Array.from_buffers(
                pa.int32(),
                rows.num_rows,
                [None, pa.py_buffer(self._kernel.partitions(keys, rows.num_rows, count))],
            )
            result = pc.coalesce(result, pc.if_else(pc.less(hashed, 0), None, hashed))
        return pc.fill_null(result, chosen) if result.null_count else result


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
    """The columns of rows that were taken, so that their arrays begin at 0."""
    names = rows.schema.names
    now = pa.repeat(pa.scalar(time.time_ns() // 1_000_000, pa.int64()), rows.num_rows)
    return RecordColumns(
        rows.num_rows,
        key=_binary_column(_whole(rows.column("key"))) if "key" in names else None,
        value=_binary_column(_whole(rows.column("value"))),
        timestamp=_buffer(now.buffers()[1]),
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
