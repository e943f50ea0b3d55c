"""The forms of printed records: format strings, and lines of JSON. `arrow_form` prints Arrow batches in them, faster.

By kcat's format strings:

%s  value             %k  key               %t  topic         %T  timestamp in ms, -1 if there is none
%S  its length        %K  its length        %p  partition     %h  headers: a=1,b=2
%%  a percent sign    (lengths of null: -1) %o  offset        \\n \\r \\t \\\\ \\0 \\x1b  bytes

As lines of JSON, which `klog consume --json` prints and `klog produce --json` reads:

{"topic": "clicks", "partition": 0, "offset": 42, "timestamp": 1763719200000, "key": "k", "value": "v",
 "headers": [["name", "value"]]}

Bytes that are not UTF-8 text are {"base64": "..."}; null is null. `produce` needs none of the fields, ignores topic,
offset and schema ids, and takes an object, a list or a number as a value, too: its JSON is the record's value. Keys and
values that are decoded by a schema (-s) are JSON, and key_schema_id, value_schema_id follow. A later version may print
more fields: a line with a value may have any others, which a warning names once. A line without a value may not: a
mistyped `value` would be written as null, which deletes.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import uuid4

from spark_klog.base.settings import distinct
from spark_klog.client.consumer.decoding import ConsumerRecord
from spark_klog.errors import ConfigError
from spark_klog.records.contract import json_value

_log = logging.getLogger(__name__)
_ESCAPES = {"n": b"\n", "r": b"\r", "t": b"\t", "0": b"\0", "\\": b"\\"}
_TOKEN = re.compile(r"%(.)|%$|\\x([0-9a-fA-F]{2})|\\(.)|\\$", re.DOTALL)
#: What may move the cursor, change colours or the direction of text on a terminal; newlines and tabs do no harm.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_FIELDS = frozenset("sSkKtpoTh")
#: The fields of a record as JSON.
_KNOWN = frozenset(
    ["topic", "partition", "offset", "timestamp", "key", "value", "headers", "key_schema_id", "value_schema_id"]
)

#: Digits that Python reads as an int.
_MOST_DIGITS = 4_000
#: Begins a number in a string, while the text around it is written; no text of a user's has it.
_MARK = uuid4().hex
_MARKED = re.compile(f'"{_MARK}([^"]*)"')

Piece = bytes | str
"""Bytes to print as they are, or the letter of a field."""


def unescape(option: str, text: str) -> bytes:
    """The bytes that a text with escapes means; `ConfigError` for a wrong escape."""
    return b"".join(piece for piece in pieces(option, text.replace("%", "%%")) if isinstance(piece, bytes))


def pieces(option: str, text: str) -> list[Piece]:
    """The parts of a format string; `ConfigError` for what `option` does not know."""
    made: list[Piece] = []
    at = 0
    for match in _TOKEN.finditer(text):
        made.append(text[at : match.start()].encode())
        at = match.end()
        field, byte, escape = match.groups()
        if byte is not None:
            made.append(bytes.fromhex(byte))
        elif field == "%":
            made.append(b"%")
        elif field is not None and field in _FIELDS:
            made.append(field)
        elif escape is not None and escape in _ESCAPES:
            made.append(_ESCAPES[escape])
        else:
            raise ConfigError(
                f"{option}: {match[0]} is not known; fields are %s %S %k %K %t %p %o %T %h %%, "
                r"escapes are \n \r \t \0 \\ \x00"
            )
    made.append(text[at:].encode())
    return made


def safe(data: bytes) -> bytes:
    """The bytes as text that is safe on a terminal: control characters and bytes that are not UTF-8 become \\xNN."""
    text = data.decode("utf-8", "backslashreplace")
    escaped = _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
    return escaped.encode()


_FIELD: dict[str, Callable[[ConsumerRecord], bytes | None]] = {
    "s": lambda record: record.value,
    "S": lambda record: _number_text(-1 if record.value is None else len(record.value)),
    "k": lambda record: record.key,
    "K": lambda record: _number_text(-1 if record.key is None else len(record.key)),
    "t": lambda record: record.topic.encode(),
    "p": lambda record: _number_text(record.partition),
    "o": lambda record: _number_text(record.offset),
    "T": lambda record: _number_text(record.timestamp),
    "h": lambda record: b",".join(name.encode() + b"=" + (value or b"") for name, value in record.headers),
}


def _number_text(value: int) -> bytes:
    return b"%d" % value


class RecordForm:
    """A format string, applied to records. `null` stands for a null key or value."""

    def __init__(self, text: str, *, option: str = "--format", null: bytes = b"", is_terminal: bool = False) -> None:
        self._pieces = [piece for piece in pieces(option, text) if piece]
        self._null = null
        self._is_terminal = is_terminal

    def render(self, records: Iterable[ConsumerRecord]) -> bytes:
        """The records as they are printed, one after the other."""
        return b"".join(self._text(piece, record) for record in records for piece in self._pieces)

    def _text(self, piece: Piece, record: ConsumerRecord) -> bytes:
        if isinstance(piece, bytes):
            return piece
        text = _FIELD[piece](record)
        if text is None:
            text = self._null
        return safe(text) if self._is_terminal and piece in "skh" else text


def record_lines(records: Iterable[ConsumerRecord], ascii: bool = False) -> bytes:
    """The records, a line each; `ascii` escapes all other characters, for terminals."""
    return b"".join(
        json.dumps(
            {
                "topic": record.topic,
                "partition": record.partition,
                "offset": record.offset,
                "timestamp": record.timestamp,
                "key": json_value(record.key),
                "value": json_value(record.value),
                "headers": [[name, json_value(value)] for name, value in record.headers],
            },
            ensure_ascii=ascii,
        ).encode()
        + b"\n"
        for record in records
    )


class JsonRecord(NamedTuple):
    """A record to write; None in `partition` and `timestamp` leaves the choice to the producer.

    Key and value are bytes or None, or JSON if they are to be encoded.
    """

    value: Any
    key: Any
    partition: int | None
    timestamp: int | None
    headers: tuple[tuple[str, bytes | None], ...]


def whole_number(text: str) -> int | Decimal:
    """An integer of JSON: Python may refuse to read one with more digits, and has no -0."""
    return int(text) if len(text) <= _MOST_DIGITS and text != "-0" else Decimal(text)


_EXACT = json.JSONDecoder(parse_float=Decimal, parse_int=whole_number, object_pairs_hook=distinct)


def parse_json(text: bytes) -> Any:
    """Parse JSON; `ConfigError` says what is wrong. Numbers with a point, and long ones, are `Decimal`."""
    try:
        return _EXACT.decode(text.decode())
    except ConfigError as error:
        raise ConfigError(f"it {error}") from None
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"it is not JSON: {error}") from None


def parse_record(line: bytes, encoded: Collection[str] = ()) -> JsonRecord:
    """Parse a line of JSON; `ConfigError` says what is wrong. `encoded` are the columns that stay JSON."""
    record = parse_json(line)
    if not isinstance(record, dict):
        raise ConfigError("it is not a JSON object")
    if unknown := sorted(record.keys() - _KNOWN):
        if "value" not in record:
            raise ConfigError(f"{', '.join(unknown)}: no such field; the fields are {', '.join(sorted(_KNOWN))}")
        for name in unknown:
            _warn_of(name)
    return JsonRecord(
        record.get("value") if "value" in encoded else _bytes("value", record.get("value")),
        record.get("key") if "key" in encoded else _bytes("key", record.get("key")),
        _parsed_number("partition", record.get("partition"), 0, 0x7FFFFFFF),
        _parsed_number("timestamp", record.get("timestamp"), -1, (1 << 63) - 1),
        _parsed_headers(record.get("headers")),
    )


@lru_cache(100)
def _warn_of(name: str) -> None:
    _log.warning("the field %s is passed over: a record has %s", name[:100], ", ".join(sorted(_KNOWN)))


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
    return _encoded(name, json_text(value, (",", ":")))


def json_text(value: Any, separators: tuple[str, str] = (", ", ": ")) -> str:
    """A value as JSON, each `Decimal` with the digits that it has."""
    text = json.dumps(value, ensure_ascii=False, separators=separators, default=lambda number: f"{_MARK}{number}")
    return _MARKED.sub(r"\1", text)


def _encoded(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise ConfigError(f"{name}: {text!r} has no form in UTF-8") from None


def _parsed_number(name: str, value: Any, smallest: int, largest: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, Decimal) and str(value) == "-0":
        value = 0
    if type(value) is not int or not smallest <= value <= largest:
        shown = str(value) if isinstance(value, Decimal) else repr(value)
        raise ConfigError(f"{name}: {shown} is not a number from {smallest} to {largest}")
    return value


def _parsed_headers(value: Any) -> tuple[tuple[str, bytes | None], ...]:
    pairs = list(value.items()) if isinstance(value, dict) else value or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs
    ):
        raise ConfigError('headers must be an object, or a list of pairs: [["name", "value"]]')
    return tuple((name, _bytes(f"header {name}", content)) for name, content in pairs)
