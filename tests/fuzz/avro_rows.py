"""Avro rows for the fuzzer: schemas that have every opcode between them, and what is checked of any rows.

An input is a byte that chooses the schemas, a byte with the length of what stands before each record, and rows: a byte
with the row's length (255: null), and its bytes.
"""

from __future__ import annotations

import ctypes
import io
import random
import struct
from array import array
from collections.abc import Iterator
from functools import cache
from typing import Any

import fastavro
import pyarrow as pa

from spark_klog.records.contract import BinaryColumn
from spark_klog.schemas.avro.columns import Types
from spark_klog.schemas.avro.decoder import AvroDecoder
from spark_klog.schemas.avro.encoder import AvroEncoder
from spark_klog.schemas.avro.opcodes import TEXTS, Reason
from spark_klog.schemas.avro.program import Program
from spark_klog.schemas.avro.schema import parse_schema
from spark_klog.schemas.rows import Decoded
from tests.schemas.oracles import of_kernel

Json = Any
_NULL = 255


def _record(name: str, **fields: Json) -> Json:
    made = []
    for field, kind in fields.items():
        entry = {"name": field, "type": kind}
        if isinstance(kind, tuple):
            entry = {"name": field, "type": kind[0], "default": kind[1]}
        made.append(entry)
    return {"type": "record", "name": name, "fields": made}


def _logical(kind: str, logical: str, **more: Json) -> Json:
    return {"type": kind, "logicalType": logical, **more}


def _fixed(name: str, size: int, **more: Json) -> Json:
    return {"type": "fixed", "name": name, "size": size, **more}


def _array(items: Json) -> Json:
    return {"type": "array", "items": items}


def _map(values: Json) -> Json:
    return {"type": "map", "values": values}


_ENUM = {"type": "enum", "name": "E", "symbols": ["A", "B", "C"]}
_INNER = _record("Inner", x="int", y=["null", "string"])
_PLAIN = _record(
    "R", i="int", l="long", f="float", d="double", b="boolean", s="string", y="bytes", e=_ENUM, q=_fixed("Q", 3)
)
_NESTED = _record(
    "R",
    before=["null", "string"],
    inner=["null", _INNER],
    many=_array(["null", _record("Deep", k=_map(_array("boolean")), z="long")]),
    either=["null", "string", "int", "boolean", _array("Inner"), _map("bytes")],
    after="int",
)
_TIMES = _record(
    "R",
    date=_logical("int", "date"),
    tm=_logical("int", "time-millis"),
    tu=_logical("long", "time-micros"),
    m=_logical("long", "timestamp-millis"),
    u=["null", _logical("long", "timestamp-micros")],
    n=_logical("long", "timestamp-nanos"),
    du=_fixed("D", 12, logicalType="duration"),
    bytes=_logical("bytes", "decimal", precision=20, scale=3),
    fixed=_fixed("X", 5, logicalType="decimal", precision=11, scale=0),
    wide=_fixed("W", 20, logicalType="decimal", precision=38, scale=5),
)
_EMPTY = _record("R", a=_array("null"), b=_array(_record("Nothing")), c=_array(_fixed("Z", 0)), d="int")

#: Writer, reader, types. A plain schema is both.
SCHEMAS: tuple[tuple[Json, Json, Types], ...] = (
    (_PLAIN, _PLAIN, "spark"),
    (_NESTED, _NESTED, "spark"),
    (_TIMES, _TIMES, "spark"),
    (_TIMES, _TIMES, "arrow"),
    (_EMPTY, _EMPTY, "arrow"),
    (_PLAIN, _record("R", s="bytes", y="string", i="double", l="float", f="double"), "spark"),
    (_PLAIN, _record("R", e={**_ENUM, "symbols": ["C", "A"]}, i="long", new=(_array("string"), ["a", "bc"])), "arrow"),
    (
        _NESTED,
        _record("R", after="long", many=_array(["null", _record("Deep", z="double", k=(_map(_array("boolean")), {}))])),
        "spark",
    ),
    (_NESTED, _record("R", either=["int", "string", "null"], new=(_INNER, {"x": 1, "y": None})), "spark"),
    (["null", "int", "string", _ENUM], ["string", "long", "null"], "spark"),
    (_map(_map("int")), _map(_map("float")), "spark"),
    ("string", "string", "spark"),
    (
        _record(
            "R",
            a=_logical("long", "timestamp-nanos"),
            b=_logical("long", "timestamp-millis"),
            c=_logical("int", "time-millis"),
        ),
        _record(
            "R",
            a=_logical("long", "timestamp-micros"),
            b=_logical("long", "timestamp-nanos"),
            c=_logical("long", "time-micros"),
        ),
        "arrow",
    ),
    (
        _record("R", l=_array(_record("I", n="int"))),
        _record("R", l=_array(_record("I", n="int", big=("string", "x" * 300), small=("int", 1)))),
        "spark",
    ),
)

#: Reasons that the rows by fastavro may not have, or that make it read for long.
_NOT_SHARED = (Reason.NUMBER_TOO_LONG, Reason.NEGATIVE_LENGTH, Reason.NO_SUCH_BRANCH, Reason.TOO_MANY_EMPTY_ITEMS)


@cache
def _decoder(kernel: str, number: int) -> tuple[AvroDecoder, Program]:
    writer, reader, types = SCHEMAS[number]
    with of_kernel(kernel):
        decoder = AvroDecoder(parse_schema(reader), types)
        return decoder, decoder.program(parse_schema(writer))


@cache
def _encoder(number: int) -> AvroEncoder:
    decoder, _ = _decoder("native", number)
    return AvroEncoder(decoder.reader, decoder.type)


def rows_of(data: bytes, schemas: int = len(SCHEMAS)) -> tuple[int, int, list[bytes | None]]:
    """The schemas' number, the length before each record, and the rows of an input."""
    number, start = data[:1].ljust(1, b"\x00")[0] % schemas, data[1:2].ljust(1, b"\x00")[0] & 7
    rows: list[bytes | None] = []
    position = 2
    while position < len(data):
        size = data[position]
        position += 1
        rows.append(None if size == _NULL else data[position : position + size])
        position += 0 if size == _NULL else size
    return number, start, rows


def column_of(rows: list[bytes | None]) -> BinaryColumn:
    """The rows, in blocks of memory of exactly their size, so that a sanitizer sees a read beyond."""
    content = b"".join(row or b"" for row in rows)
    ends = array("i", [0])
    valid = bytearray((len(rows) + 7) // 8)
    for index, row in enumerate(rows):
        ends.append(ends[-1] + len(row or b""))
        valid[index >> 3] |= (row is not None) << (index & 7)
    return BinaryColumn(_exact(ends.tobytes()), _exact(content), _exact(bytes(valid)), rows.count(None))


def _exact(data: bytes) -> Any:
    return memoryview((ctypes.c_char * len(data)).from_buffer_copy(data)).cast("B")


def _decoded(kernel: str, number: int, start: int, rows: list[bytes | None]) -> Decoded:
    decoder, program = _decoder(kernel, number)
    decoded = decoder.decode(column_of(rows), [program], starts=start)
    decoded.values.validate(full=True)
    assert len(decoded.values) == len(rows)
    assert decoded.values.type == decoder.type
    return decoded


def check(data: bytes, kernels: tuple[str, ...]) -> None:
    """Decode an input: rows or reasons, as fastavro's, whatever rows stand beside; and what is decoded is encoded."""
    number, start, rows = rows_of(data)
    first, *others = kernels
    decoded = _decoded(first, number, start, rows)
    reasons = dict(decoded.bad)
    assert all(
        row is None or (value.is_valid or index in reasons or _may_be_null(number))
        for index, (row, value) in enumerate(zip(rows, decoded.values, strict=True))
    )
    unsure = {row for row, reason in reasons.items() if any(TEXTS[other] in reason for other in _NOT_SHARED)}
    kept = [row for index, row in enumerate(rows) if index not in unsure]
    indexes = [index for index in range(len(rows)) if index not in unsure]
    alone = _decoded(first, number, start, kept)
    assert [indexes[row] for row, _ in alone.bad] == [row for row in reasons if row not in unsure]
    for kernel in others:
        other = _decoded(kernel, number, start, kept)
        assert _same(other.values, alone.values), (other.values, alone.values)
        assert [row for row, _ in other.bad] == [row for row, _ in alone.bad]
    if first == "native":
        _check_encoded(number, decoded)


def _same(one: pa.Array, other: pa.Array) -> bool:
    """Equal, where NaN is NaN."""
    return bool(one.equals(other)) or one.to_string(window=1 << 20) == other.to_string(window=1 << 20)


def _may_be_null(number: int) -> bool:
    return isinstance(SCHEMAS[number][1], list)


def _check_encoded(number: int, decoded: Decoded) -> None:
    encoded = _encoder(number).encode(decoded.values, b"prefix")
    decoder, _ = _decoder("native", number)
    again = decoder.decode(encoded, [decoder.program(decoder.reader)], starts=6)
    assert not again.bad
    assert _encoder(number).encode(again.values, b"prefix").equals(encoded)


def avro_seeds() -> Iterator[bytes]:
    """Rows that fastavro makes of random values, whole, cut off and with a prefix."""
    rng = random.Random(7)
    for number, (writer, _, _) in enumerate(SCHEMAS):
        parsed = fastavro.parse_schema(writer)
        for start in (0, 5):
            rows = []
            for _ in range(3):
                stream = io.BytesIO()
                stream.write(bytes(start))
                fastavro.schemaless_writer(stream, parsed, _value(rng, writer, {}))
                rows.append(stream.getvalue()[: _NULL - 1])
            rows.append(rows[0][:-2])
            whole = b"".join(bytes((len(row),)) + row for row in rows)
            yield bytes((number, start)) + whole + bytes((_NULL,))
        yield bytes((number, 0)) + b"\x00\x0b" + bytes.fromhex("ffffffffffffffffff01") + b"\x00"


def _value(rng: random.Random, schema: Json, names: dict[str, Json]) -> Any:
    if isinstance(schema, list):
        return _value(rng, rng.choice(schema), names)
    kind = schema if isinstance(schema, str) else schema["type"]
    if kind in names:
        return _value(rng, names[kind], names)
    if isinstance(schema, dict) and "name" in schema:
        names[schema["name"]] = schema
    if kind == "record":
        return {field["name"]: _value(rng, field["type"], names) for field in schema["fields"]}
    if kind in ("array", "map"):
        count = rng.choice((0, 1, 1, 3))
        if kind == "array":
            return [_value(rng, schema["items"], names) for _ in range(count)]
        return {f"k{index}": _value(rng, schema["values"], names) for index in range(count)}
    if kind in ("bytes", "fixed") and isinstance(schema, dict) and schema.get("logicalType") == "decimal":
        return rng.randrange(-(10**9), 10**9).to_bytes(schema.get("size", 6), "big", signed=True)
    values = {
        "null": None,
        "boolean": rng.random() < 0.5,
        "int": rng.choice((0, -1, 63, -65, 2**31 - 1)),
        "long": rng.choice((0, -1, 10**12, 2**62, -(2**63))),
        "float": struct.unpack("<f", rng.randbytes(3) + b"\x3f")[0],
        "double": rng.random(),
        "string": rng.choice(("", "a", "\u20ac" * 3, "long enough for sixteen")),
        "bytes": rng.randbytes(rng.choice((0, 1, 20))),
    }
    if kind == "enum":
        return rng.choice(schema["symbols"])
    return rng.randbytes(schema["size"]) if kind == "fixed" else values[kind]
