"""Keys and values of fetched records → Python values, or columns of rows; see `client.serialization`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from spark_klog.base.names import ROW_FORMATS
from spark_klog.client.serialization import COLUMNS, Column, Context, PlainType, Serialization
from spark_klog.errors import ConfigError, KlogError, RecordDeserializationError
from spark_klog.records.contract import RecordColumns

if TYPE_CHECKING:
    from spark_klog.client.consumer.decoding import ConsumerRecord
    from spark_klog.schemas.column_format import ColumnDecoder
    from spark_klog.schemas.values import FetchedValues


class Deserializers:
    """Deserializes the keys and values of a consumer. One thread at a time.

    The schema that rows are read as is looked up with the first record of a topic, and kept.
    """

    def __init__(self, serialization: Serialization) -> None:
        self._serialization = serialization
        self._decoders: dict[tuple[Column, str | None], ColumnDecoder] = {}

    def lists(
        self, topic: str, records: list[ConsumerRecord], columns: RecordColumns, most: int
    ) -> Iterator[list[ConsumerRecord]]:
        """Yield lists of at most `most` of the records, whose keys and values are bytes, with deserialized ones.

        `RecordDeserializationError` for a record, after the records before it; errors of a registry that is away.
        """
        rows: dict[Column, FetchedValues] = {}
        for column, chosen in self._serialization.by_column.items():
            if isinstance(chosen, str):
                from spark_klog.schemas.values import FetchedValues

                source = columns.key if column == "key" else columns.value
                assert source is not None
                rows[column] = FetchedValues(self.decoder(column, topic), source, columns.headers, columns.count)
        for start in range(0, len(records), most):
            part, failure = records[start : start + most], None
            fresh: dict[Column, list[Any]] = {}
            for column in self._serialization.by_column:
                fresh[column], failed = self._values(column, part, start, rows.get(column))
                if failed is not None:
                    part, failure = part[: len(fresh[column])], failed
            if part:
                yield _with_values(part, fresh)
            if failure is not None:
                raise failure from failure.__cause__

    def _values(
        self, column: Column, records: list[ConsumerRecord], first: int, rows: FetchedValues | None
    ) -> tuple[list[Any], RecordDeserializationError | None]:
        """The values of a column up to the first record that fails; `first` is the number of the first one's row."""
        if rows is not None:
            values, bad = rows.part(first, len(records))
            if not bad:
                return values, None
            row, reason = min(bad)
            return values[:row], _failure(records[row], column, reason)
        chosen = self._serialization.by_column[column]
        fresh: list[Any] = []
        for record in records:
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
                decoder = self._serialization.column_format(column, topic).reader().decoder(ends_at_bad=True)
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


def _with_values(records: list[ConsumerRecord], fresh: dict[Column, list[Any]]) -> list[ConsumerRecord]:
    """The records with other keys and values, of which there may be more."""
    topics, partitions, offsets, times, kinds, keys, values, headers = zip(*records, strict=True)
    rows = zip(
        *(topics, partitions, offsets, times, kinds, fresh.get("key", keys), fresh.get("value", values), headers),
        strict=False,
    )
    return list(map(type(records[0])._make, rows))


def _failure(record: ConsumerRecord, column: Column, reason: str) -> RecordDeserializationError:
    return RecordDeserializationError(
        record.topic, record.partition, record.offset, column, reason, record.key, record.value, record.headers
    )


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, KlogError) else f"{type(error).__name__}: {error}"
