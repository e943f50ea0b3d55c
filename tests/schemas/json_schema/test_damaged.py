"""Damaged records: Arrow's parser, where it reads, has what Python's has, and nothing ends the batch."""

from __future__ import annotations

import json
import random
from typing import Any, Final

import pyarrow as pa
import pytest

from spark_klog.schemas.json_schema.decoder import JsonDecoder
from spark_klog.schemas.json_schema.schema import CONNECT, parse_schema
from tests.support.runs.soak import SOAK

from .support import record

_DECIMAL: Final = {"connect.parameters": {"scale": "2", "connect.decimal.precision": "9"}}
_SCHEMA = record(
    a={"type": "integer"},
    b={"type": ["string", "null"]},
    n={"type": "number"},
    f={"type": "number", "connect.type": "float32"},
    t={"type": "boolean"},
    at={"type": "string", "format": "date-time"},
    local={"type": "string", "format": "date-time-local"},
    day={"type": "string", "format": "date"},
    x={"type": "string", "contentEncoding": "base64"},
    p={"type": "number", "title": f"{CONNECT}Decimal", **_DECIMAL},
    ms={"type": "integer", "title": f"{CONNECT}Timestamp"},
    days={"type": "integer", "title": f"{CONNECT}Date"},
    many={"type": "array", "items": record(z={"type": "integer", "connect.type": "int8"}, required=("z",))},
    none={"type": "null"},
    filled={"type": "integer", "default": 3},
    required=("a",),
)
_ROW: dict[str, Any] = {
    "a": 1,
    "b": "x\u20ac\\",
    "n": 1.5e3,
    "f": 0.25,
    "t": True,
    "at": "2024-01-02T03:04:05.123456Z",
    "local": "2024-01-02T03:04:05",
    "day": "2024-02-29",
    "x": "AAH/",
    "p": 12.34,
    "ms": 1000,
    "days": -5,
    "many": [{"z": 1}, {"z": -128}],
    "none": None,
    "other": {"q": [1, "2", None]},
}
_VALUES = (1, "", None, [], {}, 1.5, "12", True, 10**30, "2024-01-01", 2**63, 1.0, 1e300)
_TOKENS = (
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\u", b"d800", b" ", b"\n", b"\t", b"\x00", b"\x1f"),
    *(b"1", b"-", b".", b"e", b"E+", b"0", b"00000000", b"1e400", b"18446744073709551616", b"null", b"true", b"NaN"),
    *(b"Inf", b"\xff", b"\xc3\xa9", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"Z", b"T", b"+02:00", b":60", b"9999", b"0000"),
    *(b"=", b"/*", b"//", b'"a":', b'"v":', b'}{"v":', b"a", b""),
)


def _damaged(source: random.Random) -> bytes:
    row = {name: value for name, value in _ROW.items() if source.random() < 0.6}
    row["a"] = source.choice((1, 2**63 - 1, -(2**63)))
    if source.random() < 0.2:
        row[source.choice(list(row))] = source.choice(_VALUES)
    indent = source.choice((None, None, 1))
    data = bytearray(json.dumps(row, ensure_ascii=source.random() < 0.5, indent=indent).encode())
    for _ in range(source.choice((0, 1, 1, 2))):
        place, way = source.randrange(len(data) + 1), source.random()
        if way < 0.4:
            data[place:place] = source.choice(_TOKENS)
        elif way < 0.7:
            data[place : place + source.choice((1, 1, 2, 5))] = source.choice(_TOKENS)
        elif way < 0.9:
            del data[place : place + source.choice((1, 1, 2, 8))]
        else:
            del data[place:]
    return bytes(data)


@pytest.mark.parametrize("rounds", [500, pytest.param(20_000 if SOAK else 3000, marks=pytest.mark.test_all("long"))])
def test_damaged_records(rounds: int) -> None:
    schema = parse_schema(json.dumps(_SCHEMA))
    decoder, by_python = JsonDecoder(schema.column), JsonDecoder(schema.column)
    by_python._read = None
    source, read = random.Random(rounds), 0
    for number in range(rounds):
        rows = pa.array([_damaged(source) for _ in range(1 + number % 2)], pa.binary())
        expected = by_python.decode(rows, [None])
        expected.values.validate(full=True)
        block = decoder._read_block(rows)
        if block is not None:
            read += 1
            assert not expected.bad, rows.to_pylist()
            assert block.equals(expected.values), rows.to_pylist()
        elif number % 4 == 0:
            decoded = decoder.decode(rows, [None])
            assert (decoded.bad, decoded.values.equals(expected.values)) == (expected.bad, True)
    assert read > rounds / 20


_MANY = [f"field{number}" for number in range(200)]
_CROWDED = [
    b'{"a": 1, "many": [' + b"{}," * 20_000 + b"{}]}",
    b'{"a": 1, "many": [' + b"null," * 20_000 + b"null]}",
    b'{"a": 1, "by": {' + b",".join(b'"%d":{}' % number for number in range(20_000)) + b"}}",
]


@pytest.mark.parametrize("row", _CROWDED, ids=["objects", "nulls", "map"])
def test_lists_that_are_much_larger_in_columns(row: bytes) -> None:
    """They are refused; who has as many braces in a text, or elements that are not empty, is not."""
    sparse = {"type": ["object", "null"], "properties": {name: {"type": ["string", "null"]} for name in _MANY}}
    many = {"type": "array", "items": sparse}
    by = {"type": "object", "additionalProperties": sparse}
    schema = parse_schema(json.dumps(record(a={"type": "integer"}, s={"type": "string"}, many=many, by=by)))
    good = json.dumps({"a": 1, "s": "{}" * 100_000, "many": [dict.fromkeys(_MANY, "text")] * 50}).encode()
    decoded = JsonDecoder(schema.column).decode(pa.array([good, row, good, None, row[:-1]], pa.binary()), [None])
    assert [bad.row for bad in decoded.bad] == [1, 4]
    assert "more than 4 MiB, and 64 bytes for each byte of the record" in decoded.bad[0].reason
    assert "no JSON" in decoded.bad[1].reason
    rows = decoded.values.to_pylist()
    assert rows[0] == rows[2]
    assert (rows[1], len(rows[0]["many"])) == (None, 50)


def test_a_default_of_another_property_takes_nothing_from_lists() -> None:
    texts = {"type": "array", "items": record(t={"type": "string"})}
    schema = parse_schema(json.dumps(record(long={"type": "string", "default": "d" * 50_000}, texts=texts)))
    row = b'{"texts": [' + b'{"t": "x"},' * 999 + b'{"t": "x"}]}'
    decoded = JsonDecoder(schema.column).decode(pa.array([row], pa.binary()), [None])
    assert not decoded.bad
    assert len(decoded.values[0]["texts"]) == 1000
