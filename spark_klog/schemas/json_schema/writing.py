"""How an Arrow type is written by a JSON Schema, decided once: which field is which property, and what is left out."""

from __future__ import annotations

import json
from typing import Final

import pyarrow as pa

from spark_klog.columns.schema import is_bytes, is_list, is_text
from spark_klog.errors import SchemaError
from spark_klog.schemas.json_schema.columns import ANY, NO_DEFAULT, Column
from spark_klog.schemas.json_schema.from_arrow import schema_of
from spark_klog.schemas.json_schema.schema import parse_schema
from spark_klog.schemas.json_schema.texts import Member, Plan

_BITS: Final = ((pa.int8(), 8), (pa.int16(), 16), (pa.int32(), 32), (pa.int64(), 64))


def plan_writing(column: Column, kind: pa.DataType, path: str = "", *, is_item: bool = False) -> Plan:
    """The plan; `SchemaError` names a field that does not fit, that is missing, or that the schema does not have.

    `is_item`: the values are in a list or a map.
    """
    form, types = column.form, pa.types
    if form == "json" and not is_text(kind):
        if types.is_null(kind):
            return Plan("null", path, nullable=True)
        own = parse_schema(schema_of(kind)).column  # its values are JSON in any case
        if column.kind == "object" and own.kind != "object":
            raise _unfit(column, kind, path)
        made = plan_writing(own, kind, path)
        return Plan(made.form, path, column.nullable, made.cast, items=made.items, members=made.members)
    if types.is_null(kind):
        if not column.nullable:
            raise _unfit(column, kind, path)
        return Plan("null", path, nullable=True)
    if form == "struct":
        return _plan_struct(column, kind, path, is_item)
    if form == "list":
        if not is_list(kind):
            raise _unfit(column, kind, path)
        assert column.items is not None
        items = plan_writing(column.items, kind.value_type, f"{path}[]", is_item=True)
        cast = None if types.is_list(kind) else pa.list_(kind.value_type)
        return Plan(form, path, column.nullable, cast, items=items)
    if form == "map":
        if not (types.is_map(kind) and is_text(kind.key_type)):
            raise _unfit(column, kind, path)
        assert column.values is not None
        items = plan_writing(column.values, kind.item_type, path + "{}", is_item=True)
        return Plan(form, path, column.nullable, items=items)
    return _plan_plain(column, kind, path)


def _plan_plain(column: Column, kind: pa.DataType, path: str) -> Plan:
    form, types = column.form, pa.types
    if form == "json" or form == "string":
        fits, cast = is_text(kind), pa.string()
        return _checked(
            fits, column, kind, Plan(form, path, column.nullable, cast, column.symbols, column.kind == "object")
        )
    if form == "null":
        raise _unfit(column, kind, path)
    if form == "boolean":
        return _checked(types.is_boolean(kind), column, kind, Plan(form, path, column.nullable))
    if form == "integer":
        bits = next((bits for one, bits in _BITS if kind == one), 99)
        return _checked(bits <= column.bits, column, kind, Plan(form, path, column.nullable))
    if form == "number":
        is_wide = types.is_float64(kind) and column.bits == 32
        if types.is_decimal(kind):
            return _checked(column.bits == 64, column, kind, Plan("decimal", path, column.nullable))
        if any(kind == one for one, _ in _BITS):
            return Plan("integer", path, column.nullable)
        fits = (types.is_float32(kind) or types.is_float64(kind)) and not is_wide
        return _checked(fits, column, kind, Plan(form, path, column.nullable))
    if form == "decimal":
        is_integer = any(kind == one for one, _ in _BITS)
        fits = is_integer or (
            types.is_decimal(kind)
            and kind.scale <= column.scale
            and kind.precision - kind.scale <= column.precision - column.scale
        )
        return _checked(fits, column, kind, Plan(form, path, column.nullable, column.type))
    if form == "binary":
        fits = is_bytes(kind, or_fixed=True)
        return _checked(fits, column, kind, Plan(form, path, column.nullable, pa.binary()))
    if is_text(kind) and form in (
        "date",
        "timestamp",
        "local-timestamp",
    ):  # as it is: jsonschema does not look, either
        return Plan("string", path, column.nullable, pa.string())
    if form in ("date", "days"):
        return _checked(types.is_date32(kind), column, kind, Plan(form, path, column.nullable))
    has_zone = types.is_timestamp(kind) and kind.tz is not None
    fits = types.is_timestamp(kind) and has_zone == (form != "local-timestamp")
    return _checked(
        fits, column, kind, Plan(form, path, column.nullable, pa.timestamp("us", "UTC" if has_zone else None))
    )


def _plan_struct(column: Column, kind: pa.DataType, path: str, is_item: bool) -> Plan:
    if not pa.types.is_struct(kind):
        raise _unfit(column, kind, path)
    fields = {one.name: number for number, one in enumerate(kind)}
    lower: dict[str, list[str]] = {}
    for name in fields:
        lower.setdefault(name.lower(), []).append(name)
    members, written = [], set()
    exact = {one.name for one in column.properties} & set(fields)
    for one in column.properties:
        below = f"{path}.{one.name}" if path else one.name
        key = f"{json.dumps(one.name, ensure_ascii=False)}:"
        alike = [name for name in lower.get(one.name.lower(), ()) if name not in exact]
        name = one.name if one.name in fields else alike[0] if len(alike) == 1 else None
        if name is not None:
            written.add(name)
            field_of = kind.field(fields[name])
            plan = plan_writing(one.column, field_of.type, below, is_item=is_item)
            writes = one.column.nullable and one.is_required
            # A null that is left out is read as the default. It is meant in the items of Python's values: there what
            # is left out is null, although their type is the schema's own, which has no null.
            is_left_out = is_item and not field_of.nullable
            omits = not one.is_required and (is_left_out or not one.fills)
            members.append(Member(key, plan, fields[name], writes_null=writes, omits_null=omits))
        elif one.is_required:
            if one.default is not NO_DEFAULT:
                members.append(Member(key, text=json.dumps(one.default, ensure_ascii=False, separators=(",", ":"))))
            elif one.column.nullable and one.column != ANY:
                members.append(Member(key, text="null"))
            else:
                raise SchemaError(f"field {below} is required, but missing: add it")
    extra = [name for name in fields if name not in written]
    if extra:
        below = f"{path}.{extra[0]}" if path else extra[0]
        raise SchemaError(f"field {below} is no property of the schema: remove it")
    return Plan("struct", path, column.nullable, members=tuple(members))


def _checked(fits: bool, column: Column, kind: pa.DataType, plan: Plan) -> Plan:
    if not fits:
        raise _unfit(column, kind, plan.path)
    return plan


def _unfit(column: Column, kind: pa.DataType, path: str) -> SchemaError:
    where = f"field {path}" if path else "the schema"
    return SchemaError(f"{where} must be {column}, which {kind} can't be written as: cast it")
