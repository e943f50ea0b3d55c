"""Decode fetched record batches into records, one object each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from spark_klog.client.cluster import TopicPartition
from spark_klog.client.consumer.fetches import Chunk
from spark_klog.client.consumer.settings import ConsumerConfig
from spark_klog.errors import DecodeError
from spark_klog.records import kernels
from spark_klog.records.contract import COLUMNS, BinaryColumn, Headers, HeadersColumn, RecordColumns
from spark_klog.records.reading.reader import append_visible

if TYPE_CHECKING:
    from spark_klog.client.consumer.decoding_arrow import ArrowDecoder


#: Rows decoded at once: few enough that a seek wastes little work.
_ROWS = 10_000
_Part = tuple[list["ConsumerRecord"], int]


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
    """Decode chunks into lists of at most `most` records. `limit` bounds a batch's decompressed size, in bytes.

    `checks_crcs`: see `append_visible`.
    """

    def __init__(self, limit: int, most: int, checks_crcs: bool = True) -> None:
        self._limit, self._most, self._checks_crcs = limit, most, checks_crcs
        self._kernel = kernels.load()

    def parts(self, chunk: Chunk) -> Iterator[_Part]:
        """Yield lists of records, each with the offset after it; for the last one that is the chunk's end.

        Raises `DecodeError` for a corrupt batch, after yielding the records before it.
        """
        builder = self._kernel.builder(frozenset(COLUMNS))
        visible = append_visible(
            self._kernel,
            builder,
            chunk.data,
            chunk.offset,
            chunk.following,
            chunk.aborted,
            self._limit,
            rows=_ROWS,
            damaged=chunk.damaged,
            checks=self._checks_crcs,
        )
        try:
            for _ in visible:
                if builder.rows >= _ROWS:
                    yield from self._split(_records(chunk, builder.finish()), None)
        except DecodeError as error:
            yield from self._split(_records(chunk, builder.finish()), None)
            raise chunk.named(error) from None
        yield from self._split(_records(chunk, builder.finish()), chunk.following)

    def _split(self, records: list[ConsumerRecord], end: int | None) -> Iterator[_Part]:
        """Split the records into parts; the last part ends at `end`, if given."""
        for start in range(0, len(records), self._most):
            part = records[start : start + self._most]
            is_last = end is not None and start + self._most >= len(records)
            yield part, end if is_last and end is not None else part[-1].offset + 1


def _records(chunk: Chunk, columns: RecordColumns) -> list[ConsumerRecord]:
    count = columns.count
    assert columns.offset is not None
    assert columns.timestamp is not None
    assert columns.timestamp_type is not None
    rows = zip(
        repeat(chunk.topic, count),
        repeat(chunk.partition),
        memoryview(columns.offset).cast("B").cast("q"),
        memoryview(columns.timestamp).cast("B").cast("q"),
        memoryview(columns.timestamp_type).cast("B").cast("i"),
        _values(columns.key, count),
        _values(columns.value, count),
        _headers(columns.headers, count),
        strict=False,  # repeat() has no end
    )
    return list(map(ConsumerRecord._make, rows))


def _values(column: BinaryColumn | None, count: int) -> list[bytes | None]:
    assert column is not None
    ends = memoryview(column.offsets).cast("B").cast("i").tolist()
    data = bytes(column.data)
    values: list[bytes | None] = [data[ends[row] : ends[row + 1]] for row in range(count)]
    if column.null_count and column.validity is not None:
        valid = memoryview(column.validity).cast("B")
        for row in range(count):
            if not valid[row >> 3] >> (row & 7) & 1:
                values[row] = None
    return values


def _headers(column: HeadersColumn | None, count: int) -> list[Headers]:
    assert column is not None
    if not column.total:
        return [()] * count
    ends = memoryview(column.offsets).cast("B").cast("i").tolist()
    names = [(name or b"").decode() for name in _values(column.keys, column.total)]
    pairs = list(zip(names, _values(column.values, column.total), strict=True))
    return [tuple(pairs[ends[row] : ends[row + 1]]) for row in range(count)]


class Decoders:
    """See the module. With `include_headers`, Arrow batches have the column headers."""

    def __init__(self, config: ConsumerConfig, *, include_headers: bool) -> None:
        self._config, self._include_headers = config, include_headers
        self._arrow: ArrowDecoder | None = None
        self._records: RecordDecoder | None = None

    @property
    def arrow(self) -> ArrowDecoder:
        """Fetched batches to Arrow record batches."""
        if self._arrow is None:
            from spark_klog.client.consumer.decoding_arrow import ArrowDecoder

            limit, checks = self._config.client.decompressed_max_bytes, self._config.check_crcs
            self._arrow = ArrowDecoder(limit, self._include_headers, checks)
        return self._arrow

    @property
    def records(self) -> RecordDecoder:
        """Fetched batches to records."""
        if self._records is None:
            limit, config = self._config.client.decompressed_max_bytes, self._config
            self._records = RecordDecoder(limit, config.max_poll_records, config.check_crcs)
        return self._records

    def forget(self, key: TopicPartition) -> None:
        """Drop what is kept for a partition that is no longer assigned."""
        if self._arrow is not None:
            self._arrow.forget(key)
