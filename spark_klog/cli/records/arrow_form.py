"""Records as they are printed, made by Arrow, without a Python object per record. `form` has the forms.

Scalars are made by `literal` and `_number_scalar`: pyarrow imports pandas, if it is installed, to make one of a Python
object, and that takes longer than all else of a short command.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.cli.records.form import Piece, pieces, safe
from spark_klog.records.contract import json_value

#: What JSON escapes by two characters; the backslash first.
_JSON_ESCAPES = (("\\", r"\\"), ('"', r"\""), ("\n", r"\n"), ("\r", r"\r"), ("\t", r"\t"))


def literal(data: bytes) -> pa.Scalar:
    ends = struct.pack("=qq", 0, len(data))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, pa.py_buffer(ends), pa.py_buffer(data)])[0]


def _number_scalar(value: int) -> pa.Scalar:
    return pa.Array.from_buffers(pa.int64(), 1, [None, pa.py_buffer(struct.pack("=q", value))])[0]


_QUOTE, _NULL = literal(b'"'), literal(b"null")
_EMPTY, _THOUSAND, _NONE = literal(b""), _number_scalar(1000), _number_scalar(-1)


def _join(columns: list[pa.Array | pa.Scalar]) -> memoryview:
    """The bytes of large_binary columns without nulls, row after row; at least one must be an array."""
    joined = pc.binary_join_element_wise(*columns, _EMPTY)
    ends = memoryview(joined.buffers()[1]).cast("q")
    return memoryview(joined.buffers()[2])[ends[joined.offset] : ends[joined.offset + len(joined)]]


class Form:
    """A format string, applied to Arrow batches of records. `null` stands for a null key or value."""

    def __init__(self, text: str, *, option: str = "--format", null: bytes = b"", is_terminal: bool = False) -> None:
        self._pieces = [piece for piece in pieces(option, text) if piece]
        self._null = literal(null)
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
        if piece in "sk":
            made = made.fill_null(self._null)
        if self._is_terminal and piece in "skh":
            made = pa.array([safe(value) for value in made.to_pylist()], pa.large_binary())
        return made


def _text(name: str) -> Callable[[pa.RecordBatch], pa.Array]:
    return lambda batch: batch.column(name).cast(pa.string())


def _length(name: str) -> Callable[[pa.RecordBatch], pa.Array]:
    return lambda batch: pc.binary_length(batch.column(name)).cast(pa.int64()).fill_null(_NONE).cast(pa.string())


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
    for name, column in (
        ("partition", batch.column("topic")),
        ("offset", batch.column("partition")),
        ("timestamp", batch.column("offset")),
        ("key", milliseconds(batch)),
        ("value", batch.column("key")),
        ("headers", batch.column("value")),
    ):
        parts += [_json(column, ascii), _literal_text(f', "{name}": ')]
    column = batch.column("headers")
    if column.null_count == len(column):
        return _join([*parts, _literal_text("[]}\n")])
    rows = ([[each["key"], json_value(each["value"])] for each in headers or ()] for headers in column.to_pylist())
    texts = pa.array([json.dumps(pairs, ensure_ascii=ascii).encode() for pairs in rows], pa.large_binary())
    return _join([*parts, texts, _literal_text("}\n")])


def _literal_text(text: str) -> pa.Scalar:
    return literal(text.encode())


def _json(column: pa.Array, ascii: bool) -> pa.Array:
    """The JSON of each value of a column of numbers, text or bytes."""
    if pa.types.is_integer(column.type):
        return column.cast(pa.string()).cast(pa.large_binary())
    quoted = None if ascii else _quoted(column)
    if quoted is None:
        texts = (json.dumps(json_value(value), ensure_ascii=ascii) for value in column.cast(pa.binary()).to_pylist())
        quoted = pa.array([text.encode() for text in texts], pa.large_binary())
    return quoted


def _quoted(column: pa.Array) -> pa.Array | None:
    """The same for text, much faster; None if there is something in it that needs more than a backslash."""
    try:
        text = column.cast(pa.large_string())
    except pa.ArrowInvalid:  # no UTF-8
        return None
    for plain, escaped in _JSON_ESCAPES:
        text = pc.replace_substring(text, plain, escaped)
    if pc.any(pc.match_substring_regex(text, "[\\x00-\\x1f]")).as_py():
        return None
    joined = pc.binary_join_element_wise(_QUOTE, text.cast(pa.large_binary()), _QUOTE, _EMPTY)
    return joined.fill_null(_NULL)
