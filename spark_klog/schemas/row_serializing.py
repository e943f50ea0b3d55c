"""Rows → keys or values of records of a topic: one at a time, of Python values, or a column at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.errors import EncodeError, SchemaError
from spark_klog.schemas.column_format import Column
from spark_klog.schemas.column_writing import ColumnEncoder, WriteFormat
from spark_klog.schemas.prefix import without_ids
from spark_klog.schemas.values import ValueColumn

#: Arrow types of a topic's rows for which encoders are kept.
_MOST_TYPES = 16
#: Makes a binary column of a topic's rows, whose first one has this number.
_EncodeColumn = Callable[[str, pa.Array, int], pa.Array]
_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)


class RowSerializer:
    """Serializes rows of one column of a topic. Threads may share it: they wait for each other."""

    def __init__(self, write_format: WriteFormat) -> None:
        self._format = write_format
        self._lock = threading.RLock()
        self._write: Callable[[Any], bytes] | None = None
        self._encoders: dict[pa.DataType, ColumnEncoder] = {}

    def serialize(self, value: Any) -> bytes:
        """The record of a Python value, see `values.ValueColumn`, and avro/value_writer.py.

        `EncodeError` names the field that does not fit, `SchemaError` that there is no schema; errors of the registry.
        """
        with self._lock:
            return self._writer()(value)

    @property
    def is_ready(self) -> bool:
        """Whether `serialize` needs no registry."""
        return self._write is not None

    def prepare(self) -> None:
        """Look the schema up, or register it; errors as of `serialize`."""
        with self._lock:
            self._writer()

    def _writer(self) -> Callable[[Any], bytes]:
        if self._write is None:
            kind = self._type()
            encoder = self._encoder(kind)
            self._write = encoder.value_writer() or partial(_written, ValueColumn(kind), encoder)
        return self._write

    def encode(self, column: pa.Array, first: int = 0) -> pa.Array:
        """The records of a column of rows; errors as of `serialize`, a row's number is counted from `first`."""
        with self._lock:
            return self._encoder(column.type).encode(column, first)

    def _type(self) -> pa.DataType:
        """The Arrow type of the schema that Python values are written by."""
        source = self._format.source
        is_latest = self._format.uses_latest and source.subject is not None
        if source.text is None and source.schema_id is None and not is_latest:
            name = source.column
            raise SchemaError(
                f"which schema the {name}s of {self._format.topic} have is not said: set {name}.schema, "
                f"{name}.schema.id, or use.latest.version=true"
            )
        return source.reader().type

    def _encoder(self, kind: pa.DataType) -> ColumnEncoder:
        encoder = self._encoders.get(kind)
        if encoder is None:
            if len(self._encoders) >= _MOST_TYPES:
                self._encoders.clear()
            encoder = self._encoders[kind] = self._format.writer(kind).encoder()
        return encoder


def _written(values: ValueColumn, encoder: ColumnEncoder, value: Any) -> bytes:
    row = values.of(value)
    try:
        data: bytes = encoder.encode(row)[0].as_py()
    except (EncodeError, SchemaError) as error:  # a field is left out that has no default
        raise EncodeError(str(error).removeprefix(f"column {encoder.column}, row 0: ")) from None
    return data


def serialized_column(
    rows: pa.Table | pa.RecordBatch, column: Column, topic: str | None, encode: _EncodeColumn
) -> pa.Table | pa.RecordBatch:
    """The rows with a binary column in place of one of rows. Without `topic` a column `topic` names that of each row.

    Columns that can't be records are left as they are: who takes the rows says so.
    """
    place = rows.schema.get_field_index(column)  # -1 if there is none, or more than one
    if place < 0 or (topic is None and rows.schema.get_field_index("topic") < 0):
        return rows
    parts: list[pa.Array] = []
    first = 0
    for batch in rows.to_batches() if isinstance(rows, pa.Table) else [rows]:
        values = batch.column(place)
        if topic is not None:
            parts.append(encode(topic, values, first) if len(values) else pa.nulls(0, pa.binary()))
        else:
            names = batch.column(batch.schema.get_field_index("topic"))
            parts.append(_by_topic(values, names, encode, first))
        first += len(values)
    serialized = parts[0] if isinstance(rows, pa.RecordBatch) else pa.chunked_array(parts, pa.binary())
    return with_new_ids(rows.set_column(place, column, serialized), column)


def with_new_ids(rows: _Rows, column: Column) -> _Rows:
    """The rows, of which a column was encoded, without headers that name another schema of that column."""
    place = rows.schema.get_field_index("headers")
    if place < 0:
        return rows
    return rows.set_column(place, "headers", without_ids(rows.column(place), column))


def _by_topic(values: pa.Array, names: pa.Array, encode: _EncodeColumn, first: int) -> pa.Array:
    serialized = pa.nulls(len(values), pa.binary())
    for name in pc.unique(names).to_pylist():
        if name is not None:  # else it is an error later
            is_of_topic = pc.fill_null(pc.equal(names, name), False)
            of_topic = pc.if_else(is_of_topic, values, pa.scalar(None, values.type))  # so that rows keep their numbers
            serialized = pc.coalesce(serialized, encode(str(name), of_topic, first))
    return serialized


def plain_column(values: pa.Array, arrow: str, write: Callable[[Any], bytes], first: int = 0) -> pa.Array:
    """The binary column of values without a schema; `EncodeError` names the row that `write` refuses."""
    if arrow == "string" and pa.types.is_string(values.type):
        return values.cast(pa.binary())
    data: list[bytes | None] = []
    for row, value in enumerate(values.to_pylist(), first):
        try:
            data.append(None if value is None else write(value))
        except Exception as error:
            raise EncodeError(f"row {row}: {type(error).__name__}: {error}") from error
    return pa.array(data, pa.binary())
