"""A plan of how an Arrow type is written by an Avro schema.

Fields are matched by name, else by name without case if one field alone has it, and no field of the schema exactly. A
field that Arrow lacks is written as its default, else as null. Numbers are accepted for times, in the unit of the
schema; other types only for what Avro means by them. A union takes what one of its branches takes, or a struct of
members as the decoder returns it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from spark_klog.columns.schema import is_bytes, is_list, is_text
from spark_klog.errors import SchemaError
from spark_klog.schemas.avro.columns import UNITS
from spark_klog.schemas.avro.resolution import encoded_default
from spark_klog.schemas.avro.schema import NO_DEFAULT, AvroField, AvroSchema

#: Branches whose number is one byte, which the native kernel writes.
MAX_BRANCHES: Final = 64


@dataclass(frozen=True, slots=True)
class WriteValue:
    """A value of a primitive type, enum or fixed. `unit`: fractions of a second that Arrow counts, 0 for no time."""

    schema: AvroSchema
    type: pa.DataType
    unit: int = 0


@dataclass(frozen=True, slots=True)
class WriteItems:
    """An array, or a map."""

    schema: AvroSchema
    type: pa.DataType
    item: WritePlan


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """A record: for each field the index of Arrow's field and its plan, or -1 and the bytes of its default."""

    schema: AvroSchema
    type: pa.DataType
    steps: tuple[tuple[int, WritePlan | bytes], ...]


@dataclass(frozen=True, slots=True)
class WriteBranch:
    """A union that Arrow has as a value of one branch, or as null; `null` is the number of that branch, -1: none."""

    schema: AvroSchema
    branch: int
    null: int
    plan: WritePlan

    @property
    def type(self) -> pa.DataType:
        return self.plan.type


@dataclass(frozen=True, slots=True)
class WriteMembers:
    """A union that Arrow has as a struct: the branch and the plan of each member; `null` as in `WriteBranch`."""

    schema: AvroSchema
    type: pa.DataType
    null: int
    members: tuple[tuple[int, WritePlan], ...]


WritePlan = WriteValue | WriteItems | WriteRecord | WriteBranch | WriteMembers


def plan_writing(schema: AvroSchema, kind: pa.DataType) -> WritePlan:
    """The plan for values of an Arrow type; its `type` is the Arrow type to cast to first.

    `SchemaError` names the field that does not fit.
    """
    return _plan(schema, kind, "")


def _plan(schema: AvroSchema, kind: pa.DataType, path: str) -> WritePlan:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if schema.kind == "union":
        return _union(schema, kind, path)
    if schema.kind == "record" and pa.types.is_struct(kind):
        return _record(schema, kind, path)
    if schema.kind == "array" and is_list(kind):
        assert schema.items is not None
        item = _plan(schema.items, kind.value_type, f"{path}[]")
        field = kind.value_field
        return WriteItems(schema, pa.list_(pa.field("element", item.type, field.nullable)), item)
    if schema.kind == "map" and pa.types.is_map(kind) and is_text(kind.key_type):
        assert schema.items is not None
        item = _plan(schema.items, kind.item_type, path + "{}")
        value = pa.field("value", item.type, kind.item_field.nullable)
        return WriteItems(schema, pa.map_(pa.string(), value), item)
    return _value(schema, kind, path)


def _value(schema: AvroSchema, kind: pa.DataType, path: str) -> WriteValue:
    target, unit = _stored(schema, kind)
    if target is None:
        where = f"field {path}: " if path else ""
        raise SchemaError(f"{where}{kind} can't be written as {schema}: cast it, or change the schema")
    return WriteValue(schema, target, unit)


def _stored(schema: AvroSchema, kind: pa.DataType) -> tuple[pa.DataType | None, int]:
    """The Arrow type to write the schema's values from, and its unit; None if `kind` is none of those."""
    is_integer = pa.types.is_signed_integer(kind) or pa.types.is_unsigned_integer(kind)
    logical = schema.logical or ""
    if schema.kind == "null":
        return (kind, 0) if pa.types.is_null(kind) else (None, 0)
    if schema.kind == "boolean":
        return (kind, 0) if pa.types.is_boolean(kind) else (None, 0)
    if schema.kind in ("int", "long"):
        if is_integer:
            return _stored_integer(schema.kind, kind), 0
        return _stored_time(logical, kind)
    if schema.kind == "float":
        return (kind, 0) if pa.types.is_float32(kind) else (None, 0)
    if schema.kind == "double":
        return (pa.float64(), 0) if pa.types.is_float32(kind) or pa.types.is_float64(kind) else (None, 0)
    if schema.kind in ("string", "enum"):
        return (pa.string(), 0) if is_text(kind) else (None, 0)
    if logical == "decimal":
        fits = pa.types.is_decimal(kind) and kind.scale == schema.scale and kind.precision <= schema.precision
        if not fits:
            return None, 0
        wide = kind.precision > 38
        return (pa.decimal256 if wide else pa.decimal128)(kind.precision, kind.scale), 0
    if logical == "duration" and kind == pa.month_day_nano_interval():
        return kind, 0
    if schema.kind not in ("bytes", "fixed"):
        return None, 0
    if pa.types.is_fixed_size_binary(kind):
        return (kind, 0) if schema.kind == "bytes" or kind.byte_width == schema.size else (None, 0)
    return (pa.binary(), 0) if is_bytes(kind) else (None, 0)


def _stored_integer(avro: str, kind: pa.DataType) -> pa.DataType | None:
    """INT32 or INT64, if all values fit into Avro's type."""
    bits = kind.bit_width + pa.types.is_unsigned_integer(kind)
    if bits <= 32:
        return pa.int32()
    return pa.int64() if avro == "long" and bits <= 64 else None


def _stored_time(logical: str, kind: pa.DataType) -> tuple[pa.DataType | None, int]:
    if logical == "date":
        return (kind if pa.types.is_date32(kind) else None), 0
    is_time = logical.startswith("time-") and pa.types.is_time(kind)
    is_timestamp = "timestamp-" in logical and pa.types.is_timestamp(kind)
    if not is_time and not (is_timestamp and (kind.tz is None) == logical.startswith("local-")):
        return None, 0
    if kind.unit == "s":
        kind = pa.time32("ms") if is_time else pa.timestamp("ms", kind.tz)
    return kind, UNITS[kind.unit]


def _record(schema: AvroSchema, kind: pa.StructType, path: str) -> WriteRecord:
    names = [kind.field(index).name for index in range(kind.num_fields)]
    steps: list[tuple[int, WritePlan | bytes]] = []
    types = [kind.field(index) for index in range(kind.num_fields)]
    left = set(range(kind.num_fields))
    exact = {field.name for field in schema.fields}
    for field in schema.fields:
        below = f"{path}.{field.name}" if path else field.name
        index = _index_of(field.name, names, exact)
        if index < 0:
            steps.append((-1, _absent(field, below)))
            continue
        if index not in left:
            raise SchemaError(f"field {below}: column {names[index]} fits several fields of the schema: rename it")
        plan = _plan(field.schema, types[index].type, below)
        types[index] = types[index].with_type(plan.type)
        left.discard(index)
        steps.append((index, plan))
    if left:
        extra = ", ".join(names[index] for index in sorted(left))
        where = f"field {path}: " if path else ""
        raise SchemaError(f"{where}record {schema.name} has no field {extra}: drop it, or add it to the schema")
    return WriteRecord(schema, pa.struct(types), tuple(steps))


def _index_of(name: str, names: list[str], exact: set[str]) -> int:
    """The column of a field of this name, -1 if there is none; those of `exact` belong to the field of their name."""
    if name in names:
        return names.index(name)
    alike = [index for index, other in enumerate(names) if other.lower() == name.lower() and other not in exact]
    return alike[0] if len(alike) == 1 else -1


def _absent(field: AvroField, path: str) -> bytes:
    """What is written for a field that Arrow does not have."""
    if field.default is not NO_DEFAULT:
        return encoded_default(field, path)
    null = _null_branch(field.schema)
    if field.schema.kind != "null" and null < 0:
        raise SchemaError(f"field {path}: is missing, and the schema has no default for it")
    return encoded_default(AvroField(field.name, field.schema, None), path)


def _null_branch(schema: AvroSchema) -> int:
    """The number of a union's branch that is null, -1 if there is none."""
    kinds = [branch.kind for branch in schema.branches]
    return kinds.index("null") if "null" in kinds else -1


def _union(schema: AvroSchema, kind: pa.DataType, path: str) -> WritePlan:
    if len(schema.branches) > MAX_BRANCHES:
        raise SchemaError(f"field {path}: a union of more than {MAX_BRANCHES} branches")
    null = _null_branch(schema)
    branches = [number for number in range(len(schema.branches)) if number != null]
    if pa.types.is_null(kind) and null >= 0:
        return WriteBranch(schema, null, null, WriteValue(AvroSchema("null"), kind))
    names = [f"member{number}" for number in range(len(branches))]
    if pa.types.is_struct(kind) and names == [kind.field(index).name for index in range(kind.num_fields)]:
        plans = [
            _plan(schema.branches[number], kind.field(index).type, f"{path}.{name}" if path else name)
            for index, (number, name) in enumerate(zip(branches, names, strict=True))
        ]
        types = [kind.field(index).with_type(plan.type) for index, plan in enumerate(plans)]
        return WriteMembers(schema, pa.struct(types), null, tuple(zip(branches, plans, strict=True)))
    failed: SchemaError | None = None
    for number in branches:
        try:
            return WriteBranch(schema, number, null, _plan(schema.branches[number], kind, path))
        except SchemaError as error:
            failed = failed or error
    if len(branches) == 1 and failed is not None:
        raise failed
    raise SchemaError(f"{f'field {path}: ' if path else ''}{kind} can't be written as {schema}")
