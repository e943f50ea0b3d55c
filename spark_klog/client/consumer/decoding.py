"""Decode fetched record batches: into records, one object each, or into Arrow batches.

Arrow is imported for the first Arrow batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from spark_klog.base.names import TopicPartition
from spark_klog.client.consumer.deserializers import Deserializers
from spark_klog.client.fetch.entries import Fetched
from spark_klog.errors import DecodeError, KlogError, RecordDeserializationError
from spark_klog.records.contract import COLUMNS, Headers, RecordColumns
from spark_klog.records.reading.reader import AbortedTransactions, RecordReader

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_klog.columns.decode import PartitionDecoder

#: Rows decoded at once: few enough that a seek wastes little work.
_ROWS = 10_000
_Part = TypeVar("_Part")


class ConsumerRecord(NamedTuple):
    """One record. `timestamp` is in ms, `timestamp_type` 0 create time, 1 log append time, -1 none (magic 0).

    `key` and `value` are bytes, or what a deserializer makes of them; None for null.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: int
    key: Any
    value: Any
    headers: Headers


class RecordDecoder:
    """Decode chunks into lists of at most `most` records; `limit` and `checks_crcs` as of `RecordReader`.

    Without `deserializers` keys and values are bytes.
    """

    def __init__(
        self, limit: int, most: int, checks_crcs: bool = True, deserializers: Deserializers | None = None
    ) -> None:
        self._limit, self._most, self._checks_crcs = limit, most, checks_crcs
        self._deserializers = deserializers
        self._reader: RecordReader | None = None

    def parts(self, chunk: Fetched) -> Iterator[tuple[list[ConsumerRecord], int]]:
        """Yield lists of records, each with the offset after it, see `_with_ends`."""
        return _with_ends(chunk, self._lists(chunk), lambda part: part[-1].offset + 1)

    def _lists(self, chunk: Fetched) -> Iterator[list[ConsumerRecord]]:
        # a reader abandoned in the middle of a chunk still holds its records, so keep it only at the end
        reader, self._reader = self._reader, None
        if reader is None:
            reader = RecordReader(frozenset(COLUMNS), rows=_ROWS, limit=self._limit, checks=self._checks_crcs)
        aborted = AbortedTransactions(chunk.aborted)
        failure = None
        try:
            for columns in reader.read(chunk.data, chunk.offset, chunk.next_offset, aborted, chunk.damaged):
                assert isinstance(columns, RecordColumns)  # the reader raises errors of corrupt batches
                yield from self._records(chunk, columns)
        except RecordDeserializationError:
            raise
        except DecodeError as error:
            failure = chunk.named(error)
        yield from self._records(chunk, reader.finish())
        self._reader = reader
        if failure is not None:
            raise failure

    def _records(self, chunk: Fetched, columns: RecordColumns) -> Iterator[list[ConsumerRecord]]:
        assert columns.offset is not None
        assert columns.timestamp is not None
        assert columns.timestamp_type is not None
        assert columns.key is not None
        assert columns.value is not None
        assert columns.headers is not None
        count = columns.count
        rows = zip(
            repeat(chunk.topic, count),
            repeat(chunk.partition),
            memoryview(columns.offset).cast("B").cast("q"),
            memoryview(columns.timestamp).cast("B").cast("q"),
            memoryview(columns.timestamp_type).cast("B").cast("i"),
            columns.key.values(),
            columns.value.values(),
            columns.headers.rows(count),
            strict=False,  # repeat() has no end
        )
        records = list(map(ConsumerRecord._make, rows))
        if self._deserializers is not None:
            yield from self._deserializers.lists(chunk.topic, records, columns, self._most)
            return
        for start in range(0, count, self._most):
            yield records[start : start + self._most]


class ArrowDecoder:
    """Decode chunks into Arrow batches with the columns of the Spark source (see columns/schema.py).

    `limit` and `checks_crcs` as of `RecordReader`. Without `deserializers` keys and values are binary.
    """

    def __init__(
        self,
        limit: int,
        include_headers: bool,
        checks_crcs: bool = True,
        timestamp_unit: str = "us",
        deserializers: Deserializers | None = None,
    ) -> None:
        self._limit, self._include_headers, self._checks_crcs = limit, include_headers, checks_crcs
        self._timestamp_unit = timestamp_unit
        self._deserializers = deserializers
        self._decoders: dict[TopicPartition, PartitionDecoder] = {}

    def parts(self, chunk: Fetched) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield Arrow batches, each with the offset after it, see `_with_ends`."""
        return _with_ends(chunk, self._batches(chunk), lambda batch: int(batch.column("offset")[-1].as_py()) + 1)

    def _batches(self, chunk: Fetched) -> Iterator[pa.RecordBatch]:
        key = chunk.topic, chunk.partition
        # a decoder abandoned in the middle of a chunk still holds its records, so keep it only at the end
        decoder = self._decoders.pop(key, None)
        if decoder is None:
            from spark_klog.columns.decode import PartitionDecoder
            from spark_klog.columns.schema import FULL, WITHOUT_HEADERS, in_milliseconds, with_types

            schema = FULL if self._include_headers else WITHOUT_HEADERS
            if self._timestamp_unit == "ms":
                schema = in_milliseconds(schema)
            decoders = {} if self._deserializers is None else self._deserializers.decoders(chunk.topic)
            schema = with_types(schema, {column: decoder.type for column, decoder in decoders.items()})
            decoder = PartitionDecoder(*key, schema, self._limit, checks=self._checks_crcs, decoders=decoders)
        aborted = AbortedTransactions(chunk.aborted)
        try:
            yield from decoder.decode(chunk.data, chunk.offset, chunk.next_offset, aborted, chunk.damaged)
        except DecodeError:
            yield from decoder.finish()
            raise
        yield from decoder.finish()
        self._decoders[key] = decoder

    def forget(self, key: TopicPartition) -> None:
        """Drop the decoder of a partition that is no longer assigned."""
        self._decoders.pop(key, None)


def _with_ends(chunk: Fetched, parts: Iterator[_Part], end_of: Callable[[_Part], int]) -> Iterator[tuple[_Part, int]]:
    """Yield each part with the offset after it; for the last one that is the chunk's end.

    Raises an error, such as `DecodeError` for a corrupt batch, after yielding the records before it.
    """
    held: _Part | None = None
    try:
        for part in parts:
            if held is not None:
                yield held, end_of(held)
            held = part
    except KlogError:
        if held is not None:
            yield held, end_of(held)
        raise
    if held is not None:
        yield held, chunk.next_offset
