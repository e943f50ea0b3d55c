"""JSON values as records of a schema: `klog produce -s`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from spark_klog.base.cache import Newest
from spark_klog.cli.records.json_rows import RowReader
from spark_klog.errors import ConfigError, EncodeError, SchemaError
from spark_klog.schemas.column_format import ColumnFormat
from spark_klog.schemas.column_writing import ColumnEncoder, WriteAdvice, WriteFormat
from spark_klog.schemas.json_schema.columns import JSON_SCHEMA_ROWS, ROWS

#: Encoders that are kept, of shapes that values have.
_MOST_SHAPES = 64
_LATEST = "leave --{column}-schema out to write by the subject's latest"
_ADVICE = WriteAdvice(
    "give --{column}-schema FILE to register one",
    "give a --{column}-schema that is there",
    _LATEST,
    "name one topic",
    "give --{column}-schema FILE",
)


class BadValue(ConfigError):
    """A value that does not fit the schema: its number from 0, and why."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index, self.reason = index, reason


class ColumnValues:
    """Encodes keys or values: by the schema of the format, or the latest of its subject.

    `SchemaError`, `RegistryError` and others of the registry's client if there is no such schema.
    """

    def __init__(self, form: ColumnFormat, topic: str) -> None:
        self.column = form.column
        kind = form.reader().type
        is_latest = form.text is None and form.schema_id is None
        self._writer = WriteFormat(form, topic, uses_latest=is_latest, advice=_ADVICE).writer(kind)
        self._reader = RowReader(kind, JSON_SCHEMA_ROWS if form.format == "json-schema" else ROWS)
        self._encoders: Newest[pa.DataType, ColumnEncoder] = Newest(_MOST_SHAPES)

    def encode(self, values: Sequence[Any]) -> list[bytes | None]:
        """The bytes of JSON values, null of null. `BadValue` for the first that does not fit."""
        rows: list[Any] = []
        by_shape: dict[int, tuple[pa.DataType, list[int]]] = {}
        bad: BadValue | None = None
        for index, value in enumerate(values):
            try:
                row, shape = self._reader.read(value)
            except ConfigError as error:
                bad = BadValue(index, f"{self.column}: {error}")
                break
            rows.append(row)
            # a type's own hash is slow, and is that of all its fields
            by_shape.setdefault(id(shape), (shape, []))[1].append(index)
        encoded: list[bytes | None] = [None] * len(rows)
        for shape, indexes in by_shape.values():
            try:
                for index, data in zip(indexes, self._encoded([rows[index] for index in indexes], shape), strict=True):
                    encoded[index] = data
            except (EncodeError, SchemaError):
                failed = self._first_wrong(rows, indexes, shape)
                if bad is None or failed.index < bad.index:
                    bad = failed
        if bad is not None:
            raise bad
        return encoded

    def _encoded(self, rows: list[Any], shape: pa.DataType) -> list[bytes | None]:
        try:
            column = pa.array(rows, shape)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise EncodeError(str(error)) from None
        encoder = self._encoders.get(shape)
        if encoder is None:
            encoder = self._encoders[shape] = self._writer.encoder()
        found: list[bytes | None] = encoder.encode(column).to_pylist()
        return found

    def _first_wrong(self, rows: list[Any], indexes: list[int], shape: pa.DataType) -> BadValue:
        """The first of the rows of a shape that can't be encoded, when all together can't be."""
        low, high = 0, len(indexes)
        reason = ""
        while low < high:  # those before `low` can be encoded, those before `high` can't
            middle = (low + high) // 2
            try:
                self._encoded([rows[index] for index in indexes[low : middle + 1]], shape)
                low = middle + 1
            except (EncodeError, SchemaError) as error:
                high, reason = middle, str(error)
        return BadValue(indexes[min(low, len(indexes) - 1)], _without_row(reason, self.column))


def _without_row(reason: str, column: str) -> str:
    """The reason of one row, whose number is another one here."""
    before = f"column {column}, row "
    if reason.startswith(before):
        reason = reason[len(before) :].partition(": ")[2]
    return f"{column}: {reason}"
