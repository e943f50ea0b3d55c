"""Decode fetched record batches: into records, one object each, or into Arrow batches.

Arrow is imported for the first Arrow batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from spark_klog.base.names import ROW_FORMATS, TopicPartition
from spark_klog.client.fetch.entries import Fetched
from spark_klog.client.serialization import Column, Context, PlainType, Serialization
from spark_klog.errors import ConfigError, DecodeError, KlogError, RecordDeserializationError
from spark_klog.records.contract import COLUMNS, Headers, RecordColumns
from spark_klog.records.reading.reader import AbortedTransactions, RecordReader

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_klog.columns.decode import PartitionDecoder, Unreadable
    from spark_klog.schemas.column_format import ColumnDecoder
    from spark_klog.schemas.values import FetchedValues

#: Rows, and bytes of keys and values, decoded at once: few enough that a seek wastes little work.
_ROWS, _BYTES = 10_000, 2 * 1024 * 1024
#: Seconds that deserializers take before the consumer may do other work, unless one value takes longer.
_SLICE = 0.0005
_Part = TypeVar("_Part")
#: A part without records: so many were left out that the caller should commit before there are more.
STOP: Any = object()
#: A part without records, which moves no position: `RecordDecoder.is_ahead` says again whether the next part is quick.
AHEAD: Any = object()


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


class DeserializedRecord(ConsumerRecord):
    """A record whose key or value was deserialized, with `raw`, the record as it was."""

    raw: ConsumerRecord


class _Stop(NamedTuple):
    """In place of records: those before `end` were too many that are left out, see `Deserializers`."""

    end: int


class Deserializers:
    """Deserializes the keys and values of a consumer. One thread at a time.

    The schema that rows are read as is looked up with the first record of a topic, and kept. With `keeps_raw` records
    are `DeserializedRecord`s. `on_bad` is called with the error of each record that does not deserialize, which is then
    left out, and tells whether the caller should do something about these before there are more.
    """

    def __init__(
        self,
        serialization: Serialization,
        on_bad: Callable[[RecordDeserializationError], bool] | None = None,
        *,
        keeps_raw: bool = False,
    ) -> None:
        self._serialization, self.on_bad, self._keeps_raw = serialization, on_bad, keeps_raw
        self._decoders: dict[tuple[Column, str | None], ColumnDecoder] = {}
        chosen = serialization.by_column.values()
        #: Whether there are schemas, for which a registry may be asked.
        self.has_schemas = any(isinstance(its, str) for its in chosen)

    def lists(
        self, topic: str, records: Iterator[ConsumerRecord], columns: RecordColumns, most: int
    ) -> Iterator[list[ConsumerRecord] | _Stop]:
        """Yield lists of at most `most` of the records, whose keys and values are bytes, with deserialized ones.

        Yields `AHEAD` between slices of the work.

        `RecordDeserializationError` for a record, after the records before it, unless there is `on_bad`; errors of a
        registry that is away.
        """
        rows: dict[Column, FetchedValues] = {}
        for column, chosen in self._serialization.by_column.items():
            if isinstance(chosen, str):
                from spark_klog.schemas.values import FetchedValues

                source = columns.key if column == "key" else columns.value
                assert source is not None
                rows[column] = FetchedValues(self.decoder(column, topic), source, columns.headers, columns.count)
        for start in range(0, columns.count, most):
            left, first = list(islice(records, most)), start
            while left:
                part, failure = left, None
                fresh: dict[Column, list[Any]] = {}
                for column in self._serialization.by_column:
                    fresh[column], failed = yield from self._values(column, part, first, rows.get(column))
                    if failed is not None:
                        part, failure = part[: len(fresh[column])], failed
                if part:
                    yield _with_values(part, fresh, keeps_raw=self._keeps_raw)
                if failure is None:
                    break
                if self.on_bad is None:
                    raise failure from failure.__cause__
                if self.on_bad(failure):
                    yield _Stop(failure.offset + 1)
                left, first = left[len(part) + 1 :], first + len(part) + 1

    def _values(
        self, column: Column, records: list[ConsumerRecord], first: int, rows: FetchedValues | None
    ) -> Generator[Any, None, tuple[list[Any], RecordDeserializationError | None]]:
        """The values of a column up to the first record that fails; `first` is the number of the first one's row."""
        if rows is not None:
            values, bad = rows.part(first, len(records))
            if not bad:
                return values, None
            row, reason = min(bad)
            return values[:row], _failure(records[row], column, reason)
        chosen = self._serialization.by_column[column]
        fresh: list[Any] = []
        until = time.monotonic() + _SLICE
        for record in records:
            if time.monotonic() >= until and not self.has_schemas:  # a thread has no other work
                yield AHEAD
                until = time.monotonic() + _SLICE
            raw = record.key if column == "key" else record.value
            try:
                if raw is None:
                    fresh.append(None)
                elif isinstance(chosen, PlainType):
                    fresh.append(chosen.read(raw))
                else:
                    assert not isinstance(chosen, str)
                    fresh.append(chosen(raw, Context(record.topic, column, list(record.headers))))
            except Exception as error:
                failure = _failure(record, column, _told(error))
                failure.__cause__ = error
                return fresh, failure
        return fresh, None

    def decoders(self, topic: str, names: Collection[str] = COLUMNS) -> dict[str, ColumnDecoder]:
        """What makes Arrow columns of a topic's keys and values, of those of these names.

        `ConfigError` for a function, whose values have no type.
        """
        return {column: self.decoder(column, topic) for column in self._serialization.by_column if column in names}

    def decoder(self, column: Column, topic: str) -> ColumnDecoder:
        key = column, None if self._serialization.has_one_schema(column) else topic
        decoder = self._decoders.get(key)
        if decoder is None:
            chosen = self._serialization.by_column[column]
            if isinstance(chosen, str):
                decoder = (
                    self._serialization.column_format(column, topic).reader().decoder(ends_at_bad=self.on_bad is None)
                )
            elif isinstance(chosen, PlainType):
                from spark_klog.schemas.plain_columns import plain_decoder

                decoder = plain_decoder(chosen.arrow, chosen.read)
            else:
                raise ConfigError(
                    f"{column}.deserializer is a function, whose values have no Arrow type: call poll, or set "
                    f"{', '.join(ROW_FORMATS)} or a plain type"
                )
            self._decoders[key] = decoder
        return decoder


def _with_values(
    records: list[ConsumerRecord], fresh: dict[Column, list[Any]], *, keeps_raw: bool
) -> list[ConsumerRecord]:
    """The records with other keys and values, of which there may be more."""
    topics, partitions, offsets, times, kinds, keys, values, headers = zip(*records, strict=True)
    rows = zip(
        *(topics, partitions, offsets, times, kinds, fresh.get("key", keys), fresh.get("value", values), headers),
        strict=False,
    )
    if not keeps_raw:
        return list(map(type(records[0])._make, rows))
    made: list[ConsumerRecord] = []
    for row, raw in zip(rows, records, strict=True):
        record = DeserializedRecord._make(row)
        record.raw = raw
        made.append(record)
    return made


def _failure(record: ConsumerRecord, column: Column, reason: str) -> RecordDeserializationError:
    place = record.topic, record.partition, record.offset
    return RecordDeserializationError(
        *place, column, reason, record.key, record.value, record.headers, record.timestamp
    )


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, KlogError) else f"{type(error).__name__}: {error}"


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
        #: Whether the next part is made of columns that are decoded already.
        self.is_ahead = False

    def parts(self, chunk: Fetched) -> Iterator[tuple[list[ConsumerRecord], int]]:
        """Yield lists of records, each with the offset after it, see `_with_ends`."""
        return (part for part in self.slices(chunk) if part[0] is not AHEAD)

    def slices(self, chunk: Fetched) -> Iterator[tuple[list[ConsumerRecord], int]]:
        """`parts`, and `AHEAD` where a loop may do other work before the next one."""
        self.is_ahead = False
        return _with_ends(chunk, self._lists(chunk), lambda part: part[-1].offset + 1)

    def _lists(self, chunk: Fetched) -> Iterator[list[ConsumerRecord] | _Stop]:
        # a reader abandoned in the middle of a chunk still holds its records, so keep it only at the end
        reader, self._reader = self._reader, None
        if reader is None:
            reader = RecordReader(
                frozenset(COLUMNS), rows=_ROWS, size=_BYTES, limit=self._limit, checks=self._checks_crcs
            )
        aborted = AbortedTransactions(chunk.aborted)
        failure = None
        try:
            for columns in reader.read(chunk.data, chunk.offset, chunk.next_offset, aborted, chunk.damaged):
                assert isinstance(columns, RecordColumns)  # the reader raises errors of corrupt batches
                yield from self._records(chunk, columns)
                yield AHEAD  # the columns' last records are returned before the next columns are decoded
        except RecordDeserializationError:
            raise
        except DecodeError as error:
            failure = chunk.named(error)
        yield from self._records(chunk, reader.finish())
        self._reader = reader
        if failure is not None:
            raise failure

    def _records(self, chunk: Fetched, columns: RecordColumns) -> Iterator[list[ConsumerRecord] | _Stop]:
        assert columns.offset is not None
        assert columns.timestamp is not None
        assert columns.timestamp_type is not None
        assert columns.key is not None
        assert columns.value is not None
        assert columns.headers is not None
        offsets, timestamps = (memoryview(each).cast("B").cast("q") for each in (columns.offset, columns.timestamp))
        types, key, value = memoryview(columns.timestamp_type).cast("B").cast("i"), columns.key, columns.value
        headers, most, count = columns.headers, self._most, columns.count
        self.is_ahead = True
        yield AHEAD

        def made(start: int) -> Iterator[ConsumerRecord]:
            stop = min(start + most, count)  # all at once would hold an event loop
            rows = zip(
                repeat(chunk.topic, stop - start),
                repeat(chunk.partition),
                offsets[start:stop],
                timestamps[start:stop],
                types[start:stop],
                key.values(start, stop),
                value.values(start, stop),
                headers.rows(start, stop),
                strict=False,  # repeat() has no end
            )
            return map(ConsumerRecord._make, rows)

        if self._deserializers is not None:
            records = chain.from_iterable(map(made, range(0, count, most)))
            yield from self._deserializers.lists(chunk.topic, records, columns, most)
        for start in range(0, count, most) if self._deserializers is None else ():
            self.is_ahead = start + most < count
            yield list(made(start))
        self.is_ahead = False


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

    def _batches(self, chunk: Fetched) -> Iterator[pa.RecordBatch | _Stop]:
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
            yields_bad = self._deserializers is not None and self._deserializers.on_bad is not None
            checks = self._checks_crcs
            decoder = PartitionDecoder(
                *key, schema, self._limit, checks=checks, yields_bad=yields_bad, decoders=decoders
            )
        aborted = AbortedTransactions(chunk.aborted)
        try:
            parts = decoder.decode(chunk.data, chunk.offset, chunk.next_offset, aborted, chunk.damaged)
            yield from self._readable(parts)
        except DecodeError:
            yield from self._readable(decoder.finish())
            raise
        yield from self._readable(decoder.finish())
        self._decoders[key] = decoder

    def _readable(self, parts: Iterator[pa.RecordBatch | Unreadable]) -> Iterator[pa.RecordBatch | _Stop]:
        """The Arrow batches; records that do not deserialize are for `Deserializers.on_bad`."""
        is_full, last = False, -1
        for part in parts:
            if not isinstance(part, tuple):  # the rows of the records that were left out, and those between them
                if len(part):
                    yield part
                if is_full:
                    rows_end = part.column("offset")[-1].as_py() if len(part) else -1
                    yield _Stop(max(last, rows_end) + 1)
                is_full = False
                continue
            topic, partition, bad = part
            if bad.record is None:
                raise type(bad.error)(f"{topic}-{partition}: {bad.error}")
            assert self._deserializers is not None
            assert self._deserializers.on_bad is not None
            reason = str(bad.error)
            column: Column = "key" if " has a key that does not decode" in reason else "value"
            failure = RecordDeserializationError(topic, partition, bad.offset, column, reason, *bad.record)
            is_full, last = self._deserializers.on_bad(failure) or is_full, bad.offset

    def forget(self, key: TopicPartition) -> None:
        """Drop the decoder of a partition that is no longer assigned."""
        self._decoders.pop(key, None)


def _with_ends(
    chunk: Fetched, parts: Iterator[_Part | _Stop], end_of: Callable[[_Part], int]
) -> Iterator[tuple[_Part, int]]:
    """Yield each part with the offset after it; for the last one that is the chunk's end. A `_Stop` becomes `STOP`.

    `AHEAD` is yielded as it is, unless it ends the wait for the next part.

    Raises an error, such as `DecodeError` for a corrupt batch, after yielding the records before it.
    """
    held: _Part | None = None
    try:
        for part in parts:
            if held is not None:
                yield held, end_of(held)
            elif part is AHEAD:
                yield part, chunk.offset
            held = None
            if part is AHEAD:
                continue
            if isinstance(part, _Stop):
                yield STOP, part.end
            else:
                held = part
    except KlogError:
        if held is not None:
            yield held, end_of(held)
        raise
    if held is not None:
        yield held, chunk.next_offset
