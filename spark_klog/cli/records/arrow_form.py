"""Records as they are printed, made by Arrow, without a Python object per record. `form` has the forms.

Scalars are made by `texts.literal` and `_number_scalar`, which do not import pandas.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.cli.records.form import Piece, pieces, safe
from spark_klog.records.contract import json_value
from spark_klog.schemas.json_schema.texts import EMPTY, NULL, json_texts, literal


def _number_scalar(value: int) -> pa.Scalar:
    return pa.Array.from_buffers(pa.int64(), 1, [None, pa.py_buffer(struct.pack("=q", value))])[0]


#: Columns with the schemas' ids of decoded keys and values, as JSON.
SCHEMA_IDS = ("key_schema_id", "value_schema_id")
#: A field's metadata.
_JSON = {b"klog": b"json"}
NO_NULLS: Mapping[str, bytes] = {}
_THOUSAND, _NONE = _number_scalar(1000), _number_scalar(-1)


def _join(columns: list[pa.Array | pa.Scalar]) -> memoryview:
    """The bytes of large_binary columns without nulls, row after row; at least one must be an array."""
    joined = pc.binary_join_element_wise(*columns, EMPTY)
    ends = memoryview(joined.buffers()[1]).cast("q")
    return memoryview(joined.buffers()[2])[ends[joined.offset] : ends[joined.offset + len(joined)]]


class Form:
    """A format string, applied to Arrow batches of records.

    `null` stands for a null key or value; `nulls` are others, by the letter of the field.
    """

    def __init__(
        self,
        text: str,
        *,
        option: str = "--format",
        null: bytes = b"",
        nulls: Mapping[str, bytes] = NO_NULLS,
        is_terminal: bool = False,
    ) -> None:
        self._pieces = [piece for piece in pieces(option, text) if piece]
        self._nulls = {piece: literal(nulls.get(piece, null)) for piece in "sk"}
        self._is_terminal = is_terminal

    @property
    def has_headers(self) -> bool:
        return "h" in self._pieces

    def render(self, batch: pa.RecordBatch) -> memoryview:
        """The records of a batch as they are printed, one after the other."""
        if not batch.num_rows or not self._pieces:
            return memoryview(b"")
        columns = [self._column(piece, batch) for piece in self._pieces]
        if not any(isinstance(column, pa.Array) for column in columns):
            columns.append(pa.array([b""] * batch.num_rows, pa.large_binary()))
        return _join(columns)

    def _column(self, piece: Piece, batch: pa.RecordBatch) -> pa.Array | pa.Scalar:
        if isinstance(piece, bytes):
            return literal(piece)
        made: pa.Array = _COLUMNS[piece](batch).cast(pa.large_binary())
        if piece in self._nulls:
            made = made.fill_null(self._nulls[piece])
        if self._is_terminal and piece in "skh":
            made = pa.array([safe(value) for value in made.to_pylist()], pa.large_binary())
        return made


def _text(name: str) -> Callable[[pa.RecordBatch], pa.Array]:
    return lambda batch: batch.column(name).cast(pa.string())


def _length(name: str) -> Callable[[pa.RecordBatch], pa.Array]:
    return lambda batch: lengths(batch, name).cast(pa.int64()).fill_null(_NONE).cast(pa.string())


def lengths(batch: pa.RecordBatch, name: str) -> pa.Array:
    """The lengths in bytes of keys or values as they are in the records, though they may be decoded here."""
    size = f"{name}_size"
    return batch.column(size) if size in batch.schema.names else pc.binary_length(batch.column(name))


def milliseconds(batch: pa.RecordBatch) -> pa.Array:
    """The timestamps in ms; -1 for records of the oldest format, which have none."""
    column = batch.column("timestamp")
    times = column.cast(pa.int64())
    return (times if column.type.unit == "ms" else pc.divide(times, _THOUSAND)).fill_null(_NONE)


def _headers(batch: pa.RecordBatch) -> pa.Array:
    rows = []
    for headers in batch.column("headers").to_pylist():
        pairs = (each["key"].encode() + b"=" + (each["value"] or b"") for each in headers or ())
        rows.append(b",".join(pairs))
    return pa.array(rows, pa.binary())


_COLUMNS: dict[str, Callable[[pa.RecordBatch], pa.Array]] = {
    "s": lambda batch: batch.column("value"),
    "S": _length("value"),
    "k": lambda batch: batch.column("key"),
    "K": _length("key"),
    "t": lambda batch: batch.column("topic"),
    "p": _text("partition"),
    "o": _text("offset"),
    "T": lambda batch: milliseconds(batch).cast(pa.string()),
    "h": _headers,
}


def json_lines(batch: pa.RecordBatch, ascii: bool = False) -> memoryview:
    """The records of a batch with all columns, a line each; `ascii` escapes all other characters, for terminals."""
    parts: list[pa.Array | pa.Scalar] = [_literal_text('{"topic": ')]
    for name, texts in (
        ("partition", json_texts(batch.column("topic"), ascii)),
        ("offset", json_texts(batch.column("partition"))),
        ("timestamp", json_texts(batch.column("offset"))),
        ("key", json_texts(milliseconds(batch))),
        ("value", _column_texts(batch, "key", ascii)),
        ("headers", _column_texts(batch, "value", ascii)),
    ):
        parts += [texts, _literal_text(f', "{name}": ')]
    column = batch.column("headers")
    if column.null_count == len(column):
        parts.append(_literal_text("[]"))
    else:
        rows = ([[each["key"], json_value(each["value"])] for each in headers or ()] for headers in column.to_pylist())
        parts.append(pa.array([json.dumps(pairs, ensure_ascii=ascii).encode() for pairs in rows], pa.large_binary()))
    for name in SCHEMA_IDS:
        if name in batch.schema.names:
            ids = pc.binary_join_element_wise(_literal_text(f', "{name}": '), batch.column(name), EMPTY)
            parts.append(ids.fill_null(EMPTY))
    return _join([*parts, _literal_text("}\n")])


def json_field(name: str) -> pa.Field:
    """The field of a column of JSON texts, which are no text of a record."""
    return pa.field(name, pa.large_binary(), metadata=_JSON)


def _column_texts(batch: pa.RecordBatch, name: str, ascii: bool) -> pa.Array:
    column = batch.column(name)
    if batch.schema.field(name).metadata == _JSON:
        return column.fill_null(NULL)
    return json_texts(column, ascii)


def _literal_text(text: str) -> pa.Scalar:
    return literal(text.encode())
