"""Protobuf rows for the fuzzer: schemas that have all kinds of fields between them, and what is checked of any rows.

An input is a byte that chooses the schema, a byte with the length of what stands before each record, and rows: a byte
with the row's length (255: null), and its bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

from google.protobuf.message_factory import GetMessageClass

from spark_klog.schemas.protobuf.decoder import ProtobufDecoder
from spark_klog.schemas.protobuf.encoder import ProtobufEncoder
from spark_klog.schemas.protobuf.schema import ProtobufSchema, parse_schema
from spark_klog.schemas.rows import Decoded
from tests.schemas.protobuf.google_rows import GoogleDecoder
from tests.schemas.protobuf.random_messages import fill
from tests.schemas.protobuf.support import plain

from .avro_rows import column_of, rows_of

_NULL = 255
_SCALARS = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32"),
    *("sfixed64", "bool", "string", "bytes", "E"),
)
_IMPORTS = 'import "google/protobuf/timestamp.proto"; import "google/protobuf/duration.proto";'
_ENUM = "enum E { Z = 0; A = 1; B = -2; C = 9; }"


def _fields(label: str) -> str:
    return " ".join(f"{label} {kind} f{number} = {number};" for number, kind in enumerate(_SCALARS, 1))


SCHEMAS = (
    f'syntax = "proto3"; {_IMPORTS} {_ENUM} message M {{ {_fields("")} }}',
    f'syntax = "proto3"; {_IMPORTS} {_ENUM} message M {{ {_fields("repeated")} }}',
    f'syntax = "proto2"; {_IMPORTS} {_ENUM} message M {{ {_fields("optional")} required int32 r = 2000; }}',
    f"""syntax = "proto2"; {_IMPORTS} {_ENUM}
    message M {{
        message I {{ optional int32 x = 1 [default = 7]; repeated E e = 2; optional I2 i = 3; }}
        message I2 {{ required string s = 1; optional bytes b = 5 [default = "d"]; }}
        optional I one = 1; repeated I many = 2; optional group G = 3 {{ optional I i = 1; repeated string s = 2; }}
        repeated group H = 4 {{ optional int32 x = 1; }} optional E e = 5 [default = C];
        optional google.protobuf.Timestamp at = 6; repeated google.protobuf.Duration took = 7;
        oneof o {{ int32 a = 8; string b = 9; I c = 10; E d = 11; }}
        map<string, I> by = 12; map<int32, E> kinds = 13; map<bool, google.protobuf.Timestamp> times = 14;
    }}""",
    f"""syntax = "proto3"; {_IMPORTS} {_ENUM}
    message M {{
        message I {{ string s = 1; map<uint64, J> j = 2; optional E e = 3; }} message J {{ repeated I2 i = 1; }}
        message I2 {{ repeated sint64 z = 1; oneof o {{ double d = 2; bytes b = 3; }} }}
        I i = 1; map<sfixed32, bytes> b = 2; map<string, E> e = 3; repeated J js = 1023; J last = 1024;
        google.protobuf.Duration took = 5000;
    }}""",
)


@cache
def _schema(number: int) -> ProtobufSchema:
    return parse_schema(SCHEMAS[number], {})


@cache
def _decoder(kernel: str, number: int) -> ProtobufDecoder:
    return (ProtobufDecoder if kernel == "native" else GoogleDecoder)(_schema(number))


@cache
def _encoder(number: int) -> ProtobufEncoder:
    kind = _decoder("native", number).type
    return ProtobufEncoder(_schema(number), kind)


def _decoded(kernel: str, number: int, start: int, rows: list[bytes | None]) -> Decoded:
    decoder = _decoder(kernel, number)
    decoded = decoder.decode(column_of(rows), [_schema(number)], starts=start)
    decoded.values.validate(full=True)
    assert len(decoded.values) == len(rows)
    assert decoded.values.type == decoder.type
    return decoded


def check_protobuf(data: bytes, kernels: tuple[str, ...]) -> None:
    """Decode an input: rows as google.protobuf's, whatever rows stand beside; and what is decoded is encoded.

    The native kernel may read what google.protobuf refuses: it does not look at values that do not count.
    """
    number, start, rows = rows_of(data, len(SCHEMAS))
    first, *others = kernels
    decoded = _decoded(first, number, start, rows)
    bad = dict(decoded.bad)
    kept = [row for index, row in enumerate(rows) if index not in bad]
    alone = _decoded(first, number, start, kept)
    assert not alone.bad
    for kernel in others:
        other = _decoded(kernel, number, start, rows)
        refused = dict(other.bad)
        assert bad.keys() <= refused.keys() or first != "native"
        for index, (one, two) in enumerate(zip(plain(decoded.values), plain(other.values), strict=True)):
            assert index in bad or index in refused or one == two, (one, two)
    if first == "native":
        encoded = _encoder(number).encode(decoded.values, b"prefix")
        again = _decoded("native", number, 7, encoded.to_pylist())
        assert not again.bad
        assert plain(again.values) == plain(decoded.values)
        assert _encoder(number).encode(again.values, b"prefix").equals(encoded)


def protobuf_seeds() -> Iterator[bytes]:
    """Rows that google.protobuf makes of random values, whole, cut off and with a prefix."""
    rng = random.Random(7)
    for number in range(len(SCHEMAS)):
        for start in (0, 5):
            rows = []
            for _ in range(4):
                message = GetMessageClass(_schema(number).message)()
                fill(rng, message)
                rows.append((bytes(start) + message.SerializePartialToString())[: _NULL - 1])
            rows.append(rows[0][:-2])
            whole = b"".join(bytes((len(row),)) + row for row in rows)
            yield bytes((number, start)) + whole + bytes((_NULL,))
            yield bytes((number, start)) + bytes((len(rows[1]),)) + rows[1]
        yield bytes((number, 0)) + b"\x00\x0b" + bytes.fromhex("ffffffffffffffffff01") + b"\x00"
