"""Decode fetched record batches: into records, one object each, or into Arrow batches.

Arrow is imported for the first Arrow batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from spark_klog.base.names import TopicPartition
from spark_klog.client.consumer.fetches import Chunk
from spark_klog.client.consumer.settings import ConsumerConfig
from spark_klog.errors import DecodeError
from spark_klog.records.contract import COLUMNS, Headers, RecordColumns
from spark_klog.records.reading.reader import RecordReader

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_klog.columns.decode import PartitionDecoder

#: Rows decoded at once: few enough that a seek wastes little work.
_ROWS = 10_000


class ConsumerRecord(NamedTuple):
    """One record. `timestamp` is in ms, `timestamp_type` 0 create time, 1 log append time, -1 none (magic 0)."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class RecordDecoder:
    """Decode chunks into lists of at most `most` records; `limit` and `checks_crcs` as of `RecordReader`."""

    def __init__(self, limit: int, most: int, checks_crcs: bool = True) -> None:
        self._limit, self._most, self._checks_crcs = limit, most, checks_crcs
        self._reader: RecordReader | None = None

    def parts(self, chunk: Chunk) -> Iterator[tuple[list[ConsumerRecord], int]]:
        """Yield lists of records, each with the offset after it; for the last one that is the chunk's end.

        Raises `DecodeError` for a corrupt batch, after yielding the records before it.
        """
        # a reader abandoned in the middle of a chunk still holds its records, so keep it only at the end
        reader, self._reader = self._reader, None
        if reader is None:
            reader = RecordReader(frozenset(COLUMNS), rows=_ROWS, limit=self._limit, checks=self._checks_crcs)
        failure = None
        try:
            for columns in reader.read(chunk.data, chunk.offset, chunk.following, chunk.aborted, chunk.damaged):
                assert isinstance(columns, RecordColumns)  # the reader raises errors of corrupt batches
                for part in self._lists(chunk, columns):
                    yield part, part[-1].offset + 1
        except DecodeError as error:
            failure = chunk.named(error)
        lists = list(self._lists(chunk, reader.finish()))
        self._reader = reader
        for number, part in enumerate(lists, 1):
            is_last = number == len(lists) and failure is None
            yield part, chunk.following if is_last else part[-1].offset + 1
        if failure is not None:
            raise failure

    def _lists(self, chunk: Chunk, columns: RecordColumns) -> Iterator[list[ConsumerRecord]]:
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
        for start in range(0, count, self._most):
            yield records[start : start + self._most]


class ArrowDecoder:
    """Decode chunks into Arrow batches with the columns of the Spark source (see columns/schema.py).

    `limit` and `checks_crcs` as of `RecordReader`.
    """

    def __init__(self, limit: int, include_headers: bool, checks_crcs: bool = True) -> None:
        from spark_klog.columns.decode import PartitionDecoder
        from spark_klog.columns.schema import FULL, WITHOUT_HEADERS

        self._limit, self._checks_crcs = limit, checks_crcs
        self._schema = FULL if include_headers else WITHOUT_HEADERS
        self._new_decoder = PartitionDecoder
        self._decoders: dict[TopicPartition, PartitionDecoder] = {}

    def parts(self, chunk: Chunk) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield Arrow batches, each with the offset after it; for the last one that is the chunk's end.

        Raises `DecodeError` for a corrupt batch, after yielding the records before it.
        """
        key = chunk.topic, chunk.partition
        # a decoder abandoned in the middle of a chunk still holds its records, so keep it only at the end
        decoder = self._decoders.pop(key, None)
        if decoder is None:
            decoder = self._new_decoder(*key, self._schema, self._limit, checks=self._checks_crcs)
        held: pa.RecordBatch | None = None
        failure = None
        try:
            for batch in decoder.decode(chunk.data, chunk.offset, chunk.following, chunk.aborted, chunk.damaged):
                if held is not None:
                    yield held, _end(held)
                held = batch
        except DecodeError as error:
            failure = error
        for batch in decoder.finish():
            if held is not None:
                yield held, _end(held)
            held = batch
        if failure is None:
            self._decoders[key] = decoder
        if held is not None:
            yield held, chunk.following if failure is None else _end(held)
        if failure is not None:
            raise failure

    def forget(self, key: TopicPartition) -> None:
        """Drop the decoder of a partition that is no longer assigned."""
        self._decoders.pop(key, None)


def _end(batch: pa.RecordBatch) -> int:
    return int(batch.column("offset")[-1].as_py()) + 1


class Decoders:
    """A consumer's decoders, each made when it is first used. With `include_headers`, Arrow batches have headers."""

    def __init__(self, config: ConsumerConfig, *, include_headers: bool) -> None:
        self._config, self._include_headers = config, include_headers

    @cached_property
    def arrow(self) -> ArrowDecoder:
        """Fetched batches to Arrow record batches."""
        return ArrowDecoder(self._config.client.decompressed_max_bytes, self._include_headers, self._config.check_crcs)

    @cached_property
    def records(self) -> RecordDecoder:
        """Fetched batches to records."""
        config = self._config
        return RecordDecoder(config.client.decompressed_max_bytes, config.max_poll_records, config.check_crcs)

    def forget(self, key: TopicPartition) -> None:
        """Drop what is kept for a partition that is no longer assigned."""
        if "arrow" in vars(self):
            self.arrow.forget(key)
