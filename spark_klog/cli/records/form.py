"""The form of printed records: kcat's format strings, by Arrow, without a Python object per record.

%s  value             %k  key               %t  topic         %T  timestamp in ms, -1 if there is none
%S  its length        %K  its length        %p  partition     %h  headers: a=1,b=2
%%  a percent sign    (lengths of null: -1) %o  offset        \\n \\r \\t \\\\ \\0 \\x1b  bytes

Scalars are made by `literal` and `number`: pyarrow imports pandas, if it is installed, to make one of a Python object,
and that takes longer than all else of a short command.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.errors import ConfigError

_ESCAPES = {"n": b"\n", "r": b"\r", "t": b"\t", "0": b"\0", "\\": b"\\"}
_TOKEN = re.compile(r"%(.)|%$|\\x([0-9a-fA-F]{2})|\\(.)|\\$", re.DOTALL)
#: What may move the cursor, change colours or the direction of text on a terminal; newlines and tabs do no harm.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_FIELDS = frozenset("sSkKtpoTh")

_Piece = bytes | str
"""Bytes to print as they are, or the letter of a field."""


def unescape(option: str, text: str) -> bytes:
    """The bytes that a text with escapes means; `ConfigError` for a wrong escape."""
    pieces = [piece for piece in _pieces(option, text.replace("%", "%%")) if isinstance(piece, bytes)]
    return b"".join(pieces)


def _pieces(option: str, text: str) -> list[_Piece]:
    pieces: list[_Piece] = []
    at = 0
    for found in _TOKEN.finditer(text):
        pieces.append(text[at : found.start()].encode())
        at = found.end()
        field, byte, escape = found.groups()
        if byte is not None:
            pieces.append(bytes.fromhex(byte))
        elif field == "%":
            pieces.append(b"%")
        elif field is not None and field in _FIELDS:
            pieces.append(field)
        elif escape is not None and escape in _ESCAPES:
            pieces.append(_ESCAPES[escape])
        else:
            raise ConfigError(
                f"{option}: {found[0]} is not known; fields are %s %S %k %K %t %p %o %T %h %%, "
                r"escapes are \n \r \t \0 \\ \x00"
            )
    pieces.append(text[at:].encode())
    return pieces


def safe(data: bytes) -> bytes:
    """The bytes as text that is safe on a terminal: control characters and bytes that are not UTF-8 become \\xNN."""
    text = data.decode("utf-8", "backslashreplace")
    escaped = _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return escaped.encode()


def literal(data: bytes) -> pa.Scalar:
    """A scalar of large_binary."""
    ends = struct.pack("=qq", 0, len(data))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, pa.py_buffer(ends), pa.py_buffer(data)])[0]


def number(value: int) -> pa.Scalar:
    """A scalar of int64."""
    return pa.Array.from_buffers(pa.int64(), 1, [None, pa.py_buffer(struct.pack("=q", value))])[0]


_EMPTY, _THOUSAND, _NONE = literal(b""), number(1000), number(-1)


def join(columns: list[pa.Array | pa.Scalar]) -> memoryview:
    """The bytes of large_binary columns without nulls, row after row; at least one must be an array."""
    joined = pc.binary_join_element_wise(*columns, _EMPTY)
    ends = memoryview(joined.buffers()[1]).cast("q")
    return memoryview(joined.buffers()[2])[ends[joined.offset] : ends[joined.offset + len(joined)]]


class Form:
    """A format string, applied to Arrow batches of records. `null` stands for a null key or value."""

    def __init__(self, text: str, *, option: str = "--format", null: bytes = b"", is_terminal: bool = False) -> None:
        self._pieces = [piece for piece in _pieces(option, text) if piece]
        self._null = literal(null)
        self._is_terminal = is_terminal

    @property
    def has_headers(self) -> bool:
        """Whether the batches must have the column headers."""
        return "h" in self._pieces

    def render(self, batch: pa.RecordBatch) -> memoryview:
        """The records of a batch as they are printed, one after the other."""
        if not batch.num_rows or not self._pieces:
            return memoryview(b"")
        columns = [self._column(piece, batch) for piece in self._pieces]
        if not any(isinstance(column, pa.Array) for column in columns):
            columns.append(pa.array([b""] * batch.num_rows, pa.large_binary()))
        return join(columns)

    def _column(self, piece: _Piece, batch: pa.RecordBatch) -> pa.Array | pa.Scalar:
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
    return pc.divide(batch.column("timestamp").cast(pa.int64()), _THOUSAND).fill_null(_NONE)


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
