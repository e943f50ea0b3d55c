"""The Protobuf schema of an Arrow type: proto3, nullable columns are `optional`.

| Arrow | Protobuf |
| --- | --- |
| bool, float, double, string, binary | bool, float, double, string, bytes |
| int8 to int32, uint8, uint16; int64; uint32; uint64 | int32; int64; uint32; uint64 |
| timestamp with a zone, duration | google.protobuf.Timestamp, google.protobuf.Duration |
| struct, list, map | a message in the message, repeated, map |
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Final

import pyarrow as pa

from spark_klog.columns.schema import is_bytes, is_list, is_text
from spark_klog.errors import SchemaError

NAME: Final = "topLevelRecord"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
#: Numbers that Protobuf keeps for itself.
_RESERVED_FROM, _RESERVED_TO = 19_000, 19_999
_TIMES: Final = {"google.protobuf.Timestamp": "timestamp", "google.protobuf.Duration": "duration"}
_INDENT: Final = "  "


def schema_of(kind: pa.DataType, name: str = NAME) -> str:
    """The schema's text; the message of a struct is called `name`, which may be in a package.

    `SchemaError` names a field that Protobuf has not.
    """
    if not pa.types.is_struct(kind):
        raise SchemaError(f"Protobuf records are messages, and so columns structs, not {kind}")
    package, _, name = name.rpartition(".")
    body = list(_message(kind, name, ""))
    head = ['syntax = "proto3";', *([f"package {package};"] if package else [])]
    imports = [
        f'import "google/protobuf/{file}.proto";'
        for full_name, file in _TIMES.items()
        if any(f" {full_name} " in line for line in body)
    ]
    return "\n".join([*head, *imports, *body]) + "\n"


def _message(kind: pa.DataType, name: str, path: str) -> Iterator[str]:
    if not kind.num_fields and path:
        raise SchemaError(f"field {path}: a struct without fields")
    yield f"message {name} {{"
    taken: set[str] = set()
    number = 0
    for field in kind:
        below = f"{path}.{field.name}" if path else field.name
        if not _NAME.fullmatch(field.name):
            raise SchemaError(f"field {below}: Protobuf's names are letters, digits and _: rename it")
        number = _RESERVED_TO + 1 if number + 1 == _RESERVED_FROM else number + 1
        inner = _inner_name(field.name, taken)
        what, lines = _field(field, inner, below)
        yield from (_INDENT + line for line in lines)
        yield f"{_INDENT}{what} {field.name} = {number};"
    yield "}"


def _inner_name(name: str, taken: set[str]) -> str:
    """The name of the message of a field, which no other in that message has."""
    base = "".join(part[:1].upper() + part[1:] for part in name.split("_")) or "Message"
    base = base if base[0].isalpha() else f"Message{base}"
    made, number = base, 2
    while made in taken:
        made, number = f"{base}{number}", number + 1
    taken.add(made)
    return made


def _field(field: pa.Field, inner: str, path: str) -> tuple[str, list[str]]:
    """A field's label and type, and the lines of its message."""
    kind = field.type
    if is_list(kind):
        what, lines = _type(kind.value_type, inner, f"{path}[]")
        return f"repeated {what}", lines
    if pa.types.is_map(kind):
        key, _ = _type(kind.key_type, inner, path + "{}")
        if key in ("float", "double", "bytes", inner) or "." in key:
            raise SchemaError(f"field {path}: Protobuf's maps have keys of strings, integers or booleans, not {key}")
        what, lines = _type(kind.item_type, inner, path + "{}")
        return f"map<{key}, {what}>", lines
    what, lines = _type(kind, inner, path)
    return (f"optional {what}" if field.nullable else what), lines


def _type(kind: pa.DataType, inner: str, path: str) -> tuple[str, list[str]]:
    types = pa.types
    if types.is_struct(kind):
        return inner, list(_message(kind, inner, path))
    if is_list(kind) or types.is_map(kind):
        raise SchemaError(f"field {path}: Protobuf has no lists or maps directly in others: put a struct between them")
    if types.is_timestamp(kind) and kind.tz is not None:
        return "google.protobuf.Timestamp", []
    if types.is_duration(kind):
        return "google.protobuf.Duration", []
    for matches, name in (
        (types.is_boolean, "bool"),
        (types.is_int64, "int64"),
        (types.is_uint64, "uint64"),
        (types.is_uint32, "uint32"),
        (types.is_integer, "int32"),
        (types.is_float32, "float"),
        (types.is_float64, "double"),
        (is_text, "string"),
        (partial(is_bytes, or_fixed=True), "bytes"),
    ):
        if matches(kind):
            return name, []
    raise SchemaError(f"field {path}: Protobuf has no type for {kind}: cast it, or give the schema as a text")
