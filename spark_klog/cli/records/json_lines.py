"""Records as lines of JSON, the form that `klog consume --json` prints and `klog produce --json` reads.

{"topic": "clicks", "partition": 0, "offset": 42, "timestamp": 1763719200000, "key": "k", "value": "v",
 "headers": [["name", "value"]]}

Bytes that are not UTF-8 text are {"base64": "..."}; null is null. `produce` needs none of the fields, ignores topic and
offset, and takes an object, a list or a number as a value, too: its JSON is the record's value.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.cli.records.form import join, literal, milliseconds
from spark_klog.errors import ConfigError

_KNOWN = frozenset(["topic", "partition", "offset", "timestamp", "key", "value", "headers"])
#: What JSON escapes by two characters; the backslash first.
_ESCAPES = (("\\", r"\\"), ('"', r"\""), ("\n", r"\n"), ("\r", r"\r"), ("\t", r"\t"))
_QUOTE, _EMPTY, _NULL = literal(b'"'), literal(b""), literal(b"null")


class JsonRecord(NamedTuple):
    """A record to write; None in `partition` and `timestamp` leaves the choice to the producer."""

    value: bytes | None
    key: bytes | None
    partition: int | None
    timestamp: int | None
    headers: tuple[tuple[str, bytes | None], ...]


def json_lines(batch: pa.RecordBatch, ascii: bool = False) -> memoryview:
    """The records of a batch with all columns, a line each; `ascii` escapes all other characters, for terminals."""
    pieces: list[pa.Array | pa.Scalar] = [_bytes_of('{"topic": ')]
    for name, column in (
        ("partition", batch.column("topic")),
        ("offset", batch.column("partition")),
        ("timestamp", batch.column("offset")),
        ("key", milliseconds(batch)),
        ("value", batch.column("key")),
        ("headers", batch.column("value")),
    ):
        pieces += [_json(column, ascii), _bytes_of(f', "{name}": ')]
    pieces += [_headers_json(batch.column("headers"), ascii), _bytes_of("}\n")]
    return join(pieces)


def _bytes_of(text: str) -> pa.Scalar:
    return literal(text.encode())


def _json(column: pa.Array, ascii: bool) -> pa.Array:
    """The JSON of each value of a column of numbers, text or bytes."""
    if pa.types.is_integer(column.type):
        return column.cast(pa.string()).cast(pa.large_binary())
    quoted = None if ascii else _quoted(column)
    if quoted is None:
        texts = (json.dumps(_shown(value), ensure_ascii=ascii) for value in column.cast(pa.binary()).to_pylist())
        quoted = pa.array([text.encode() for text in texts], pa.large_binary())
    return quoted


def _quoted(column: pa.Array) -> pa.Array | None:
    """The same for text, much faster; None if there is something in it that needs more than a backslash."""
    try:
        text = column.cast(pa.large_string())
    except pa.ArrowInvalid:  # no UTF-8
        return None
    for plain, escaped in _ESCAPES:
        text = pc.replace_substring(text, plain, escaped)
    if pc.any(pc.match_substring_regex(text, "[\\x00-\\x1f]")).as_py():
        return None
    joined = pc.binary_join_element_wise(_QUOTE, text.cast(pa.large_binary()), _QUOTE, _EMPTY)
    return joined.fill_null(_NULL)


def _headers_json(column: pa.Array, ascii: bool) -> pa.Array | pa.Scalar:
    if column.null_count == len(column):
        return _bytes_of("[]")
    rows = ([[each["key"], _shown(each["value"])] for each in headers or ()] for headers in column.to_pylist())
    return pa.array([json.dumps(pairs, ensure_ascii=ascii).encode() for pairs in rows], pa.large_binary())


def _shown(data: bytes | None) -> object:
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


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
        _number("partition", record.get("partition"), 0, 0x7FFFFFFF),
        _number("timestamp", record.get("timestamp"), -1, (1 << 63) - 1),
        _headers(record.get("headers")),
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


def _number(name: str, value: Any, smallest: int, largest: int) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not smallest <= value <= largest:
        raise ConfigError(f"{name}: {value!r} is not a number from {smallest} to {largest}")
    return value


def _headers(value: Any) -> tuple[tuple[str, bytes | None], ...]:
    pairs = list(value.items()) if isinstance(value, dict) else value or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs
    ):
        raise ConfigError('headers must be an object, or a list of pairs: [["name", "value"]]')
    return tuple((name, _bytes(f"header {name}", content)) for name, content in pairs)
