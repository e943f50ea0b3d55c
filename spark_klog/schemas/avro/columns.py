"""The Arrow columns of an Avro schema, numbered as the native kernel's builders are.

`spark` types are those that Spark's own `from_avro` has (spark-avro's SchemaConverters), so Spark can hold them all:

| Avro | `spark` | `arrow`, if it differs |
| --- | --- | --- |
| null, boolean, int, long, float, double | null, bool, int32, int64, float, double | |
| bytes, fixed, duration | binary | fixed_size_binary, month_day_nano_interval |
| string, uuid, enum | string | an enum is a dictionary |
| decimal (bytes or fixed) | decimal128(precision, scale), at most 38 digits | decimal256 for up to 76 digits |
| date | date32 | |
| time-millis, time-micros | int32, int64 | time32[ms], time64[us] |
| timestamp-millis, timestamp-micros | timestamp[us, UTC] | timestamp-millis: timestamp[ms, UTC] |
| local-timestamp-millis, local-timestamp-micros | timestamp[us] | local-timestamp-millis: timestamp[ms] |
| timestamp-nanos, local-timestamp-nanos | int64 | timestamp[ns, UTC], timestamp[ns] |
| record, array, map | struct, list, map of string | |
| union of null and one type | that type, nullable | |
| union of int and long, of float and double | int64, double | |
| any other union | a struct of member0, member1, ..., one for each branch but null; all but one are null | |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from spark_klog.errors import SchemaError
from spark_klog.schemas.arrow_columns import Column, Kind, arrow_field
from spark_klog.schemas.avro.schema import AvroField, AvroSchema

Types = Literal["spark", "arrow"]
#: What becomes of the Arrow field of a record's field, or of the union's member that is a branch.
Label = Callable[[pa.Field, AvroField | AvroSchema], pa.Field]
#: Fractions of a second that a unit has.
UNITS = {"ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_SPARK_DIGITS, _ARROW_DIGITS = 38, 76
_PLAIN = {
    "boolean": (Kind.BOOLEAN, 1, pa.bool_()),
    "int": (Kind.FIXED, 4, pa.int32()),
    "long": (Kind.FIXED, 8, pa.int64()),
    "float": (Kind.FIXED, 4, pa.float32()),
    "double": (Kind.FIXED, 8, pa.float64()),
    "bytes": (Kind.VARIABLE, 0, pa.binary()),
    "string": (Kind.VARIABLE, 0, pa.string()),
}


def columns_of(schema: AvroSchema, types: Types = "spark", label: Label = lambda field, _: field) -> Column:
    """The column of a schema, nullable whatever the schema is: a row that does not decode is null.

    `label` may give the fields of its type metadata. `SchemaError` for a decimal with more digits than the types have.
    """
    return _Numbering(types, label).column(schema, "", nullable=True)


@dataclass
class _Numbering:
    types: Types
    label: Label
    next_slot: int = 0

    def column(self, schema: AvroSchema, path: str, nullable: bool = False) -> Column:
        if schema.kind == "union":
            return self._union(schema, path, nullable)
        column = Column(self.next_slot, Kind.NOTHING, pa.null(), nullable=nullable)
        self.next_slot += 1
        if schema.kind == "record":
            column.kind = Kind.STRUCT
            column.children = [self.column(entry.schema, _below(path, entry.name)) for entry in schema.fields]
            named = zip(schema.fields, column.children, strict=True)
            column.type = pa.struct([self.label(arrow_field(entry.name, child), entry) for entry, child in named])
        elif schema.kind == "array":
            assert schema.items is not None
            column.kind = Kind.LIST
            column.children = [self.column(schema.items, f"{path}[]")]
            column.type = pa.list_(arrow_field("element", *column.children))
        elif schema.kind == "map":
            column.kind = Kind.LIST
            column.children = [self._entries(schema, path)]
            _, value = column.children[0].children
            column.type = pa.map_(pa.string(), arrow_field("value", value))
        elif schema.kind == "null":
            column.nullable = True
        else:
            column.kind, column.width, column.type = self._leaf(schema, path)
            if pa.types.is_dictionary(column.type):
                column.symbols = schema.symbols
        column.end = self.next_slot
        return column

    def _entries(self, schema: AvroSchema, path: str) -> Column:
        assert schema.items is not None
        entries = Column(self.next_slot, Kind.STRUCT, pa.null())
        key = Column(self.next_slot + 1, Kind.VARIABLE, pa.string(), end=self.next_slot + 2)
        self.next_slot += 2
        entries.children = [key, self.column(schema.items, path + "{}")]
        entries.type = pa.struct([arrow_field("key", key), arrow_field("value", entries.children[1])])
        entries.end = self.next_slot
        return entries

    def _union(self, schema: AvroSchema, path: str, nullable: bool) -> Column:
        branches = [branch for branch in schema.branches if branch.kind != "null"]
        nullable = nullable or len(branches) < len(schema.branches)
        if not branches:
            return self.column(schema.branches[0], path)
        if len(branches) == 1:
            return self.column(branches[0], path, nullable)
        kinds = {branch.kind for branch in branches}
        if kinds in ({"int", "long"}, {"float", "double"}):
            return self.column(AvroSchema("long" if "long" in kinds else "double"), path, nullable)
        column = Column(self.next_slot, Kind.STRUCT, pa.null(), nullable=nullable)
        self.next_slot += 1
        names = [f"member{number}" for number in range(len(branches))]
        column.children = [
            self.column(branch, _below(path, name), nullable=True) for branch, name in zip(branches, names, strict=True)
        ]
        fields = map(arrow_field, names, column.children)
        column.type = pa.struct(list(map(self.label, fields, branches)))
        numbers = iter(range(len(branches)))
        column.members = tuple(-1 if branch.kind == "null" else next(numbers) for branch in schema.branches)
        column.end = self.next_slot
        return column

    def _leaf(self, schema: AvroSchema, path: str) -> tuple[Kind, int, pa.DataType]:
        logical = schema.logical or ""
        is_plain_arrow = self.types == "arrow"
        if logical == "decimal":
            return self._decimal(schema, path)
        if logical == "date":
            return Kind.FIXED, 4, pa.date32()
        if "timestamp-" in logical and (is_plain_arrow or not logical.endswith("nanos")):
            zone = None if logical.startswith("local-") else "UTC"
            return Kind.FIXED, 8, pa.timestamp(unit_of(logical) if is_plain_arrow else "us", zone)
        if is_plain_arrow:
            if logical == "time-millis":
                return Kind.FIXED, 4, pa.time32("ms")
            if logical == "time-micros":
                return Kind.FIXED, 8, pa.time64("us")
            if logical == "duration":
                return Kind.FIXED, 16, pa.month_day_nano_interval()
            if schema.kind == "enum":
                return Kind.FIXED, 4, pa.dictionary(pa.int32(), pa.string())
            if schema.kind == "fixed":
                return Kind.FIXED, schema.size, pa.binary(schema.size)
        return _PLAIN[{"enum": "string", "fixed": "bytes"}.get(schema.kind, schema.kind)]

    def _decimal(self, schema: AvroSchema, path: str) -> tuple[Kind, int, pa.DataType]:
        digits = _SPARK_DIGITS if self.types == "spark" else _ARROW_DIGITS
        if schema.precision > digits:
            where = f"field {path}" if path else "the schema"
            raise SchemaError(
                f"{where}: {schema} has more than {digits} digits, the most that a column can have: have it written as "
                "a string or a double (Debezium: decimal.handling.mode=string or double)"
            )
        if schema.precision > _SPARK_DIGITS:
            return Kind.FIXED, 32, pa.decimal256(schema.precision, schema.scale)
        return Kind.FIXED, 16, pa.decimal128(schema.precision, schema.scale)


def unit_of(logical: str) -> str:
    """The Arrow unit of a logical type that is a time: "ms", "us" or "ns"."""
    return {"millis": "ms", "micros": "us", "nanos": "ns"}[logical.rpartition("-")[2]]


def column_unit(schema: AvroSchema, kind: pa.DataType) -> int:
    """Fractions of a second that a column of a time counts: by its type, or if that is a number, as the schema's."""
    return UNITS[getattr(kind, "unit", None) or unit_of(schema.logical or "")]


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
