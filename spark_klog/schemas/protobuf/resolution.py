"""Whether records of one message can be read by another: fields meet by their numbers, as Protobuf's parsers do it.

Those that the reader lacks are skipped, those that the writer lacks are absent. Types that Protobuf's documentation
calls compatible are read; for others the bytes would mean something else, so they are refused.
"""

from __future__ import annotations

from typing import Any

from spark_klog.errors import SchemaError
from spark_klog.schemas.protobuf.columns import (
    BOOL,
    BYTES,
    DOUBLE,
    ENUM,
    FIXED32,
    FIXED64,
    FLOAT,
    GROUP,
    INT32,
    INT64,
    MESSAGE,
    SFIXED32,
    SFIXED64,
    SINT32,
    SINT64,
    STRING,
    TYPE_NAMES,
    UINT32,
    UINT64,
)
from spark_klog.schemas.protobuf.schema import Indexes, ProtobufSchema

#: Types of which the bytes of one are the bytes of another, by a type that stands for them.
_SAME = {
    **dict.fromkeys((INT32, INT64, UINT32, UINT64, BOOL, ENUM), INT64),
    **dict.fromkeys((SINT32, SINT64), SINT64),
    **dict.fromkeys((FIXED32, SFIXED32), FIXED32),
    **dict.fromkeys((FIXED64, SFIXED64), FIXED64),
    **{kind: kind for kind in (FLOAT, DOUBLE, STRING, BYTES, GROUP, MESSAGE)},
}
_SIZED = frozenset({STRING, BYTES, MESSAGE})


def check_readable(writer: ProtobufSchema, reader: ProtobufSchema, indexes: Indexes | None) -> None:
    """Raise `SchemaError` if records of the writer can't be read by the reader; `indexes` name their message."""
    message = writer.message if indexes is None else writer.message_of(indexes)
    if message is reader.message:
        return
    wanted = reader.message.full_name
    has_wanted = any(one.full_name == wanted for one in writer.numbered.values())
    # a package may have moved; another name is another message, whatever the numbers of its fields
    if message.full_name != wanted and (has_wanted or message.name != reader.message.name):
        raise SchemaError(f"it is message {message.full_name}, another one than {wanted}")
    _check(message, reader.message, "", set())


def _check(writer: Any, reader: Any, path: str, seen: set[tuple[str, str]]) -> None:
    if (writer.full_name, reader.full_name) in seen:
        return
    seen.add((writer.full_name, reader.full_name))
    for field in reader.fields:
        written = writer.fields_by_number.get(field.number)
        if written is None:
            continue
        below = f"{path}.{field.name}" if path else field.name
        kinds = _SAME[written.type], _SAME[field.type]
        if kinds[0] != kinds[1] and not (set(kinds) <= _SIZED and BYTES in kinds):
            raise SchemaError(f"field {below} is {_type(field)}, but was written as {_type(written)}")
        if written.is_packed and not field.is_repeated:
            raise SchemaError(f"field {below} is one {_type(field)}, but was written as a list of them")
        if field.message_type is not None and written.message_type is not None:
            _check(written.message_type, field.message_type, below, seen)


def _type(field: Any) -> str:
    if field.message_type is not None:
        return str(field.message_type.full_name)
    return str(field.enum_type.full_name) if field.enum_type is not None else TYPE_NAMES[field.type]
