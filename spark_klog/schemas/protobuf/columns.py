"""The Arrow columns of a Protobuf message: the types that Spark's own `from_protobuf` has.

| Protobuf | Arrow |
| --- | --- |
| bool, float, double, string, bytes | bool, float, double, string, binary |
| int32, sint32, sfixed32; uint32, fixed32 | int32; the unsigned ones with the same bits |
| int64, sint64, sfixed64; uint64, fixed64 | int64; the unsigned ones with the same bits |
| enum | string |
| google.protobuf.Timestamp, google.protobuf.Duration | timestamp[us, UTC], duration[us] |
| any other message, group | struct |
| repeated, map | list, map |

A field that may be absent is nullable: one with presence, no default of its own, and that is not required. Fields whose
message has no fields are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field as dataclass_field
from functools import cached_property
from typing import Any, Final, Literal

import pyarrow as pa

from spark_klog.columns.room import empty_bytes
from spark_klog.errors import SchemaError

#: google.protobuf's numbers of types, in FieldDescriptor.
DOUBLE, FLOAT, INT64, UINT64, INT32, FIXED64, FIXED32, BOOL, STRING, GROUP, MESSAGE = range(1, 12)
BYTES, UINT32, ENUM, SFIXED32, SFIXED64, SINT32, SINT64 = range(12, 19)
TYPE_NAMES: Final = (
    *("", "double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "group", "message"),
    *("bytes", "uint32", "enum", "sfixed32", "sfixed64", "sint32", "sint64"),
)
_PLAIN: Final = {
    DOUBLE: pa.float64(),
    FLOAT: pa.float32(),
    **dict.fromkeys((INT64, UINT64, FIXED64, SFIXED64, SINT64), pa.int64()),
    **dict.fromkeys((INT32, UINT32, FIXED32, SFIXED32, SINT32), pa.int32()),
    BOOL: pa.bool_(),
    STRING: pa.string(),
    BYTES: pa.binary(),
    ENUM: pa.string(),
}
TIMESTAMP: Final = "google.protobuf.Timestamp"
DURATION: Final = "google.protobuf.Duration"
_TIMES: Final = {TIMESTAMP: pa.timestamp("us", "UTC"), DURATION: pa.duration("us")}
MAX_DEPTH: Final = 64

Shape = Literal["single", "list", "map"]


@dataclass
class FieldColumn:
    """A field: `field` is google.protobuf's FieldDescriptor; `type` the Arrow type of its column.

    `message` has the columns of its message, or of the entries of a map; None for other types and for times.
    """

    field: Any
    shape: Shape
    type: pa.DataType
    nullable: bool
    path: str
    message: MessageColumns | None = None

    @property
    def is_time(self) -> bool:
        return self.message is None and self.field.type == MESSAGE


@dataclass
class MessageColumns:
    """The columns of a message, in the order of its fields."""

    message: Any
    type: pa.DataType = dataclass_field(default_factory=pa.null)
    fields: list[FieldColumn] = dataclass_field(default_factory=list)

    @cached_property
    def empty_bytes(self) -> int:
        """Bytes in columns of a message without fields, with its defaults; see columns/room.py."""
        return 1 + sum(
            column.message.empty_bytes
            if column.message is not None and column.shape == "single"
            else empty_bytes(column.type) + _default_bytes(column)
            for column in self.fields
        )


def _default_bytes(column: FieldColumn) -> int:
    if column.shape != "single" or column.field.type not in (STRING, BYTES, ENUM):
        return 0
    default = column.field.default_value
    return len(enum_names(column.field.enum_type)[default] if column.field.type == ENUM else default)


def columns_of(message: Any) -> MessageColumns:
    """The columns of a message; `SchemaError` names a field whose message contains itself."""
    return _columns(message, "", (message.full_name,))


def _columns(message: Any, path: str, above: tuple[str, ...]) -> MessageColumns:
    result = MessageColumns(message)
    for field in message.fields:
        below = f"{path}.{field.name}" if path else field.name
        column = _column(field, below, above)
        if column is not None:
            result.fields.append(column)
    result.type = pa.struct([pa.field(column.field.name, column.type, column.nullable) for column in result.fields])
    return result


def _column(field: Any, path: str, above: tuple[str, ...]) -> FieldColumn | None:
    inner = None
    if field.message_type is None:
        kind = _PLAIN[field.type]
    elif field.message_type.full_name in _TIMES:
        kind = _TIMES[field.message_type.full_name]
    else:
        name = field.message_type.full_name
        if name in above:
            raise SchemaError(
                f"field {path}: message {name} contains itself, which no column can: read by a schema without the "
                "field, or with bytes for it"
            )
        if len(above) > MAX_DEPTH:
            raise SchemaError(f"field {path}: more than {MAX_DEPTH} messages in one another")
        inner = _columns(field.message_type, path, (*above, name))
        kind = inner.type
        if is_map(field):
            if len(inner.fields) < 2:  # its values have no columns
                return None
            key, value = inner.fields
            key.nullable = value.nullable = False
            kind = pa.map_(key.type, pa.field("value", value.type, False))
            return FieldColumn(field, "map", kind, False, path, inner)
        if not inner.fields:
            return None
    if field.is_repeated:
        return FieldColumn(field, "list", pa.list_(pa.field("element", kind, False)), False, path, inner)
    return FieldColumn(field, "single", kind, is_nullable(field), path, inner)


def is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def is_nullable(field: Any) -> bool:
    """Whether a field may be absent, and has nothing to stand for it then."""
    return field.has_presence and not field.is_required and not field.has_default_value


def unknown_name(enum: Any, number: int) -> str:
    """What a number that an enum does not have is called, as by Protobuf for Java and so by Spark."""
    return f"UNKNOWN_ENUM_VALUE_{enum.name}_{number}"


def enum_names(enum: Any) -> dict[int, str]:
    """The names of an enum by number, the first of several."""
    names: dict[int, str] = {}
    for value in enum.values:
        names.setdefault(value.number, value.name)
    return names
