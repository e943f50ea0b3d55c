"""The Avro schema of an Arrow type: what Spark's `to_avro` would write, but null comes first in unions.

| Arrow | Avro |
| --- | --- |
| null, bool, int8 to int32, int64, float, double | null, boolean, int, long, float, double |
| string, binary, fixed_size_binary | string, bytes |
| date32, timestamp[us, zone], timestamp[us] | date, timestamp-micros, local-timestamp-micros |
| decimal128 | bytes, decimal |
| list, map of string, struct | array, map, record |
| anything nullable | union of null and that type, by default null |

So a later version of the schema may leave a nullable column out, and still read these records.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any, Final

import pyarrow as pa

from spark_klog.columns.schema import is_bytes, is_list, is_text
from spark_klog.errors import SchemaError

#: As Spark calls it.
NAME: Final = "topLevelRecord"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def schema_of(kind: pa.DataType, name: str = NAME) -> str:
    """The schema's text; the record of a struct is called `name`. `SchemaError` names a field that Avro has not."""
    return json.dumps(_node(kind, name, "", ""))


def _node(kind: pa.DataType, name: str, namespace: str, path: str) -> Any:
    types = pa.types
    if types.is_struct(kind):
        inner = f"{namespace}.{name}" if namespace else name
        fields = []
        for field in kind:
            below = f"{path}.{field.name}" if path else field.name
            if not _NAME.fullmatch(field.name):
                raise SchemaError(f"field {below}: Avro's names are letters, digits and _: rename it")
            made: dict[str, Any] = {"name": field.name, "type": _nullable(field, field.name, inner, below)}
            if field.nullable:
                made["default"] = None
            fields.append(made)
        record = {"type": "record", "name": name, "fields": fields}
        return {**record, "namespace": namespace} if namespace else record
    if is_list(kind):
        return {"type": "array", "items": _nullable(kind.value_field, name, namespace, f"{path}[]")}
    if types.is_map(kind) and is_text(kind.key_type):
        return {"type": "map", "values": _nullable(kind.item_field, name, namespace, path + "{}")}
    if types.is_decimal(kind):
        return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    if types.is_timestamp(kind):
        prefix = "local-" if kind.tz is None else ""
        return {"type": "long", "logicalType": f"{prefix}timestamp-micros"}
    if types.is_date32(kind):
        return {"type": "int", "logicalType": "date"}
    for matches, primitive in (
        (types.is_null, "null"),
        (types.is_boolean, "boolean"),
        (types.is_int64, "long"),
        (lambda one: types.is_int8(one) or types.is_int16(one) or types.is_int32(one), "int"),
        (types.is_float32, "float"),
        (types.is_float64, "double"),
        (is_text, "string"),
        (partial(is_bytes, or_fixed=True), "bytes"),
    ):
        if matches(kind):
            return primitive
    where = f"field {path}: " if path else ""
    raise SchemaError(f"{where}Avro has no type for {kind}: cast it, or give the schema as a text")


def _nullable(field: pa.Field, name: str, namespace: str, path: str) -> Any:
    node = _node(field.type, name, namespace, path)
    return ["null", node] if field.nullable and node != "null" else node
