"""The schema of JSON values, given again with each call: a load takes one that has more fields, or room for more."""

from __future__ import annotations

import pyarrow as pa

from spark_klog.load.values import parse_schema, schema_text, type_text
from spark_klog.tables.changes import debezium_type
from spark_klog.tables.columns import holds


def evolved_schema(before: str, asked: str, *, widens: bool) -> tuple[str, list[str]]:
    """The schema of a load that had `before` and is to have `asked`, both as `schema_text` has them, and in words what
    hinders that: fields that went, and other types.

    The fields of `before` come first, in their order. With `widens` a type may become one that holds all its values.
    """
    old, new = parse_schema(before), parse_schema(asked)
    if is_enveloped := all(_is_envelope(kind) for kind in (old, new)):
        old, new = (kind.field("after").type for kind in (old, new))
    hindrances: list[str] = []
    kind = _grown(old, new, "", widens, hindrances)
    return schema_text(debezium_type(kind) if is_enveloped else kind), hindrances


def _is_envelope(kind: pa.DataType) -> bool:
    """Whether the job has made the schema of a row's."""
    return kind.get_field_index("after") >= 0 and bool(kind == debezium_type(kind.field("after").type))


def _grown(old: pa.DataType, new: pa.DataType, path: str, widens: bool, hindrances: list[str]) -> pa.DataType:
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        asked = {field.name: field.type for field in new}
        fields = []
        for field in old:
            where = f"{path}.{field.name}" if path else field.name
            kind = asked.pop(field.name, None)
            if kind is None:
                hindrances.append(f"{where} is missing")
            else:
                fields.append(pa.field(field.name, _grown(field.type, kind, where, widens, hindrances)))
        return pa.struct([*fields, *(pa.field(name, kind) for name, kind in asked.items())])
    if pa.types.is_list(old) and pa.types.is_list(new):
        return pa.list_(_grown(old.value_type, new.value_type, f"{path}[]", widens, hindrances))
    if old != new and not (widens and holds(new, old)):
        hindrances.append(f"{path} is {type_text(new)}, and was {type_text(old)}")
    return new
