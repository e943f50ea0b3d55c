"""The plan of an Arrow type, and its JSON Schema. Kafka Connect's hints (schema.py) say what JSON's types do not.

| Arrow | JSON Schema |
| --- | --- |
| null, bool, string | null, boolean, string |
| int64, double | integer, number |
| int8, int16, int32, float | the same with connect.type int8, int16, int32, float32 |
| decimal128 | number, Connect's Decimal |
| binary | string, contentEncoding base64 |
| date32, timestamp[us, zone], timestamp[us] | string, format date, date-time, date-time-local |
| list, map of string | array; object with additionalProperties |
| struct | object without other properties, so that later versions may add some |

A column that is not nullable is required. One that is may be left out; null items of lists and maps are null.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pyarrow as pa

from spark_klog.columns.schema import is_bytes, is_list, is_text
from spark_klog.errors import SchemaError
from spark_klog.schemas.json_schema.columns import JSON_TEXT, Column, Dialect, Form, Property, stored_type
from spark_klog.schemas.json_schema.schema import CONNECT, MOST_DIGITS

#: The title of a record, as Avro's of a type is.
NAME: Final = "topLevelRecord"
_DIALECT: Final = "http://json-schema.org/draft-07/schema#"


#: Forms of strings, by what tells their types; of the others `column_of` has more to say.
_STRINGS: Final[tuple[tuple[Callable[[pa.DataType], bool], Form | None], ...]] = (
    (is_text, None),
    (partial(is_bytes, or_fixed=True), "binary"),
    (pa.types.is_date32, "date"),
    (pa.types.is_time, "time"),
    (pa.types.is_duration, "duration"),
)


def column_of(kind: pa.DataType, dialect: Dialect, *, nullable: bool = True) -> Column:
    """The plan of a type's values in JSON of a dialect; `SchemaError` for a type that has no form in JSON."""
    types = pa.types
    plan = partial(Column, nullable=nullable, dialect=dialect, arrow=stored_type(kind))

    def below(field: pa.Field) -> Column:
        return column_of(field.type, dialect, nullable=field.nullable)

    if kind == JSON_TEXT:
        return plan("any")
    if types.is_struct(kind):
        properties = tuple(Property(field.name, below(field), not field.nullable) for field in kind)
        return plan("object", refined="struct", properties=properties)
    if types.is_list(kind):
        return plan("array", items=below(kind.value_field))
    if types.is_map(kind):
        return plan("object", refined="map", keys=below(kind.key_field), values=below(kind.item_field))
    if types.is_null(kind) or types.is_boolean(kind):
        return plan("null" if types.is_null(kind) else "boolean")
    if types.is_integer(kind) or types.is_floating(kind):
        return plan("integer" if types.is_integer(kind) else "number", bits=kind.bit_width)
    if types.is_decimal(kind):
        return plan("number", refined="decimal", precision=kind.precision, scale=kind.scale)
    if types.is_timestamp(kind):
        return plan("string", refined="local-timestamp" if kind.tz is None else "timestamp")
    for matches, form in _STRINGS:
        if matches(kind):
            return plan("string", refined=form)
    raise SchemaError(f"JSON has no form for {kind}")


def schema_of(kind: pa.DataType, name: str = NAME) -> str:
    """The schema's text; `name` is the title of a struct. `SchemaError` names a field that JSON Schema has not."""
    node = _node(kind, "")
    title = {"title": name} if pa.types.is_struct(kind) else {}
    return json.dumps({"$schema": _DIALECT, **title, **node}, ensure_ascii=False)


def _node(kind: pa.DataType, path: str) -> dict[str, Any]:
    types = pa.types
    if types.is_struct(kind):
        properties: dict[str, Any] = {}
        for field in kind:
            below = f"{path}.{field.name}" if path else field.name
            if field.name in properties:
                raise SchemaError(f"field {below}: there are two of this name")
            properties[field.name] = _node(field.type, below)
        required = [field.name for field in kind if not field.nullable]
        more = {"required": required} if required else {}
        return {"type": "object", "properties": properties, **more, "additionalProperties": False}
    if is_list(kind):
        return {"type": "array", "items": _nullable(kind.value_field, f"{path}[]")}
    if types.is_map(kind) and is_text(kind.key_type):
        return {"type": "object", "additionalProperties": _nullable(kind.item_field, path + "{}")}
    if types.is_decimal(kind) and 0 <= kind.scale <= kind.precision <= MOST_DIGITS:
        parameters = {"scale": str(kind.scale), "connect.decimal.precision": str(kind.precision)}
        return {
            "type": "number",
            "title": f"{CONNECT}Decimal",
            "connect.type": "bytes",
            "connect.parameters": parameters,
        }
    if types.is_timestamp(kind):
        return {"type": "string", "format": "date-time-local" if kind.tz is None else "date-time"}
    if types.is_date32(kind):
        return {"type": "string", "format": "date"}
    if is_bytes(kind, or_fixed=True):
        return {"type": "string", "contentEncoding": "base64"}
    if types.is_int8(kind) or types.is_int16(kind) or types.is_int32(kind):
        return {"type": "integer", "connect.type": str(kind)}
    if types.is_float32(kind):
        return {"type": "number", "connect.type": "float32"}
    for matches, name in (
        (types.is_null, "null"),
        (types.is_boolean, "boolean"),
        (types.is_int64, "integer"),
        (types.is_float64, "number"),
        (is_text, "string"),
    ):
        if matches(kind):
            return {"type": name}
    where = f"field {path}: " if path else ""
    raise SchemaError(f"{where}JSON Schema has no type for {kind}: cast it, or give the schema as a text")


def _nullable(field: pa.Field, path: str) -> dict[str, Any]:
    node = _node(field.type, path)
    return {**node, "type": [node["type"], "null"]} if field.nullable and node["type"] != "null" else node
