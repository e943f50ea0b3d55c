"""The forms of printed records, made by Arrow, without a Python object per record.

By kcat's format strings:

%s  value             %k  key               %t  topic         %T  timestamp in ms, -1 if there is none
%S  its length        %K  its length        %p  partition     %h  headers: a=1,b=2
%%  a percent sign    (lengths of null: -1) %o  offset        \\n \\r \\t \\\\ \\0 \\x1b  bytes

As lines of JSON, which `klog consume --json` prints and `klog produce --json` reads:

{"topic": "clicks", "partition": 0, "offset": 42, "timestamp": 1763719200000, "key": "k", "value": "v",
 "headers": [["name", "value"]]}

Bytes that are not UTF-8 text are {"base64": "..."}; null is null. `produce` needs none of the fields, ignores topic and
offset, and takes an object, a list or a number as a value, too: its JSON is the record's value.

Scalars are made by `literal` and `_number_scalar`: pyarrow imports pandas, if it is installed, to make one of a Python
object, and that takes longer than all else of a short command.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.columns.schema import json_value
from spark_klog.errors import ConfigError

_ESCAPES = {"n": b"\n", "r": b"\r", "t": b"\t", "0": b"\0", "\\": b"\\"}
_TOKEN = re.compile(r"%(.)|%$|\\x([0-9a-fA-F]{2})|\\(.)|\\$", re.DOTALL)
#: What may move the cursor, change colours or the direction of text on a terminal; newlines and tabs do no harm.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_FIELDS = frozenset("sSkKtpoTh")
#: What JSON escapes by two characters; the backslash first.
_JSON_ESCAPES = (("\\", r"\\"), ('"', r"\""), ("\n", r"\n"), ("\r", r"\r"), ("\t", r"\t"))
#: The fields of a record as JSON.
_KNOWN = frozenset(["topic", "partition", "offset", "timestamp", "key", "value", "headers"])

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
        self._pieces = [piece for piece in _pieces(option, text) if piece]
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


class JsonRecord(NamedTuple):
    """A record to write; None in `partition` and `timestamp` leaves the choice to the producer."""

    value: bytes | None
    key: bytes | None
    partition: int | None
    timestamp: int | None
    headers: tuple[tuple[str, bytes | None], ...]


def json_lines(batch: pa.RecordBatch, ascii: bool = False) -> memoryview:
    """The records of a batch with all columns, a line each; `ascii` escapes all other characters, for terminals."""
    pieces: list[pa.Array | pa.Scalar] = [_literal_text('{"topic": ')]
    for name, column in (
        ("partition", batch.column("topic")),
        ("offset", batch.column("partition")),
        ("timestamp", batch.column("offset")),
        ("key", milliseconds(batch)),
        ("value", batch.column("key")),
        ("headers", batch.column("value")),
    ):
        pieces += [_json(column, ascii), _literal_text(f', "{name}": ')]
    column = batch.column("headers")
    if column.null_count == len(column):
        return _join([*pieces, _literal_text("[]}\n")])
    rows = ([[each["key"], json_value(each["value"])] for each in headers or ()] for headers in column.to_pylist())
    texts = pa.array([json.dumps(pairs, ensure_ascii=ascii).encode() for pairs in rows], pa.large_binary())
    return _join([*pieces, texts, _literal_text("}\n")])


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


def parse_record(line: bytes) -> JsonRecord:
    """Parse a line of JSON; `ConfigError` says what is wrong."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"it is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError("it is not a JSON object")
    if unknown := sorted(set(record) - _KNOWN):
        raise ConfigError(f"{', '.join(unknown)}: no such field; the fields are {', '.join(sorted(_KNOWN))}")
    return JsonRecord(
        _bytes("value", record.get("value")),
        _bytes("key", record.get("key")),
        _parsed_number("partition", record.get("partition"), 0, 0x7FFFFFFF),
        _parsed_number("timestamp", record.get("timestamp"), -1, (1 << 63) - 1),
        _parsed_headers(record.get("headers")),
    )


def _bytes(name: str, value: Any) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return _encoded(name, value)
    if isinstance(value, dict) and list(value) == ["base64"]:
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise ConfigError(f"{name}: {value['base64']!r} is not base64") from None
    return _encoded(name, json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _encoded(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise ConfigError(f"{name}: {text!r} has no form in UTF-8") from None


def _parsed_number(name: str, value: Any, smallest: int, largest: int) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not smallest <= value <= largest:
        raise ConfigError(f"{name}: {value!r} is not a number from {smallest} to {largest}")
    return value


def _parsed_headers(value: Any) -> tuple[tuple[str, bytes | None], ...]:
    pairs = list(value.items()) if isinstance(value, dict) else value or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs
    ):
        raise ConfigError('headers must be an object, or a list of pairs: [["name", "value"]]')
    return tuple((name, _bytes(f"header {name}", content)) for name, content in pairs)
