"""Which column is written as which field of a message, and what fits.

| field | column |
| --- | --- |
| bool, float, string, bytes | bool, float, string, binary (or fixed_size_binary) |
| double | double, float |
| int32, sint32, sfixed32 | int8, int16, int32, uint8, uint16, date32 |
| int64, sint64, sfixed64 | the same, int64, uint32 |
| uint32, fixed32; uint64, fixed64 | integers of up to as many bits: those of signed ones as they are |
| enum | string |
| google.protobuf.Timestamp, google.protobuf.Duration | timestamp, duration |
| any other message, repeated, map | struct, list, map |

Columns meet fields by name, if need be without case. A field without a column is absent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from spark_klog.columns.schema import is_bytes, is_list, is_text
from spark_klog.errors import SchemaError
from spark_klog.schemas.protobuf.columns import (
    BOOL,
    BYTES,
    DOUBLE,
    DURATION,
    ENUM,
    FLOAT,
    INT32,
    INT64,
    MAX_DEPTH,
    SFIXED32,
    SFIXED64,
    SINT32,
    SINT64,
    STRING,
    TIMESTAMP,
    TYPE_NAMES,
    Shape,
    is_map,
)

_32, _64 = frozenset({INT32, SINT32, SFIXED32}), frozenset({INT64, SINT64, SFIXED64})
_TIMES = {TIMESTAMP: pa.timestamp("us", "UTC"), DURATION: pa.duration("us")}


@dataclass
class WriteField:
    """How column `index` is written as `field`: its values, cast to `type`."""

    field: Any
    index: int
    shape: Shape
    type: pa.DataType
    path: str
    #: Of a message, and of the entries of a map: key and value.
    message: WriteMessage | None = None


@dataclass
class WriteMessage:
    message: Any
    #: In the order of the fields' numbers, in which messages are written.
    fields: list[WriteField]
    type: pa.DataType


def plan_writing(message: Any, kind: pa.DataType) -> WriteMessage:
    """How columns of an Arrow type are written as a message; `SchemaError` names the field that does not fit."""
    if not pa.types.is_struct(kind):
        raise SchemaError(f"message {message.full_name} is written of structs, not of {kind}")
    return _message(message, kind, "", 0)


def _message(message: Any, kind: pa.DataType, path: str, depth: int) -> WriteMessage:
    if depth > MAX_DEPTH:
        raise SchemaError(f"field {path}: more than {MAX_DEPTH} messages in one another")
    by_name = {field.name: field for field in message.fields}
    by_lower: dict[str, list[Any]] = {}
    for field in message.fields:
        by_lower.setdefault(field.name.lower(), []).append(field)
    fields: dict[int, WriteField] = {}
    types = []
    for index, column in enumerate(kind):
        below = f"{path}.{column.name}" if path else column.name
        alike = by_lower.get(column.name.lower(), [])
        field = by_name.get(column.name) or (alike[0] if len(alike) == 1 else None)
        if field is None:
            raise SchemaError(f"field {below}: message {message.full_name} has no such field: drop or rename it")
        if field.number in fields:
            raise SchemaError(f"field {below}: two columns are to be written as it")
        fields[field.number] = _field(field, index, column.type, below, depth)
        types.append(pa.field(column.name, fields[field.number].type, column.nullable))
    for field in message.fields:
        if field.is_required and field.number not in fields:
            below = f"{path}.{field.name}" if path else field.name
            raise SchemaError(f"field {below}: is required, but there is no such column: add it")
    return WriteMessage(message, [fields[number] for number in sorted(fields)], pa.struct(types))


def _field(field: Any, index: int, kind: pa.DataType, path: str, depth: int) -> WriteField:
    if is_map(field):
        if not pa.types.is_map(kind):
            raise _misfit(path, kind, "a map")
        entry = pa.struct([pa.field("key", kind.key_type, False), pa.field("value", kind.item_type)])
        inner = _message(field.message_type, entry, path, depth + 1)
        key, value = inner.type
        return WriteField(field, index, "map", pa.map_(key.type, value.type), path, inner)
    if field.is_repeated:
        if not is_list(kind):
            raise _misfit(path, kind, "repeated")
        single = _single(field, index, kind.value_type, f"{path}[]", depth)
        return WriteField(field, index, "list", pa.list_(pa.field("element", single.type)), path, single.message)
    return _single(field, index, kind, path, depth)


def _single(field: Any, index: int, kind: pa.DataType, path: str, depth: int) -> WriteField:
    if field.message_type is None:
        return WriteField(field, index, "single", _leaf(field, kind, path), path)
    name = field.message_type.full_name
    if name in _TIMES:
        wanted = _TIMES[name]
        if not (pa.types.is_timestamp(kind) if name == TIMESTAMP else pa.types.is_duration(kind)):
            raise _misfit(path, kind, name)
        return WriteField(field, index, "single", wanted, path)
    if not pa.types.is_struct(kind):
        raise _misfit(path, kind, name)
    inner = _message(field.message_type, kind, path, depth + 1)
    return WriteField(field, index, "single", inner.type, path, inner)


def _leaf(field: Any, kind: pa.DataType, path: str) -> pa.DataType:
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    wanted = None
    if field.type == BOOL and types.is_boolean(kind):
        wanted = pa.bool_()
    elif field.type == FLOAT and types.is_float32(kind):
        wanted = pa.float32()
    elif field.type == DOUBLE and (types.is_float64(kind) or types.is_float32(kind)):
        wanted = pa.float64()
    elif field.type in (STRING, ENUM) and is_text(kind):
        wanted = pa.string()
    elif field.type == BYTES and is_bytes(kind, or_fixed=True):
        wanted = pa.binary()
    elif types.is_integer(kind) or types.is_date32(kind):
        wanted = _integer(field.type, kind)
    if wanted is None:
        raise _misfit(path, kind, TYPE_NAMES[field.type])
    return wanted


def _integer(number_type: int, kind: pa.DataType) -> pa.DataType | None:
    """The integers that a column is cast to: of the field's bits, and signed unless the column is unsigned."""
    if number_type in (BOOL, FLOAT, DOUBLE, STRING, BYTES, ENUM):
        return None
    bits = 64 if number_type in _64 or TYPE_NAMES[number_type] in ("uint64", "fixed64") else 32
    is_unsigned = pa.types.is_unsigned_integer(kind)
    width = kind.bit_width + (is_unsigned and (number_type in _32 or number_type in _64))
    if width > bits:
        return None
    if bits == 32:
        return pa.uint32() if is_unsigned else pa.int32()
    return pa.uint64() if is_unsigned else pa.int64()


def _misfit(path: str, kind: pa.DataType, wanted: str) -> SchemaError:
    return SchemaError(f"field {path}: a column of {kind} can't be written as {wanted}: cast it")
