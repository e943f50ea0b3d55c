"""Schemas of Iceberg beside those of Arrow: conversion both ways, and what a table lacks of a load's columns.

A Parquet file belongs to a table by the ids of its fields, at all levels. Arrow carries them as the metadata
`PARQUET:field_id` of fields, and its Parquet writer writes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from spark_klog.columns.schema import is_bytes, is_list, is_text
from spark_klog.errors import LoadError
from spark_klog.tables.table import FIELD_ID, aliases_of

_MOST_DIGITS = 38
_Path = tuple[str, ...]
#: Integers that Iceberg does not have become the next larger type.
_NUMBERS: dict[pa.DataType, IcebergType] = {
    pa.bool_(): BooleanType(),
    pa.int8(): IntegerType(),
    pa.int16(): IntegerType(),
    pa.int32(): IntegerType(),
    pa.int64(): LongType(),
    pa.uint8(): IntegerType(),
    pa.uint16(): IntegerType(),
    pa.uint32(): LongType(),
    pa.uint64(): DecimalType(20, 0),
    pa.float16(): FloatType(),
    pa.float32(): FloatType(),
    pa.float64(): DoubleType(),
    pa.date32(): DateType(),
    pa.date64(): DateType(),
}
_PLAIN: dict[type[IcebergType], pa.DataType] = {
    BooleanType: pa.bool_(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    FloatType: pa.float32(),
    DoubleType: pa.float64(),
    DateType: pa.date32(),
    TimeType: pa.time64("us"),
    TimestampType: pa.timestamp("us"),
    TimestamptzType: pa.timestamp("us", tz="UTC"),
    StringType: pa.string(),
    BinaryType: pa.binary(),
    UUIDType: pa.binary(16),
}


def to_iceberg(columns: Iterable[pa.Field]) -> Schema:
    """A schema with these columns, all of them optional, and ids from 1 on, which the table replaces by its own.

    `LoadError` names a column whose type Iceberg does not have.
    """
    ids = itertools.count(1)
    return Schema(*_nested_fields(columns, (), lambda: next(ids)))


def _no_id() -> int:
    """For types that are compared, or get other ids."""
    return 0


def _nested_fields(fields: Iterable[pa.Field], path: Sequence[str], next_id: Callable[[], int]) -> list[NestedField]:
    return [
        NestedField(next_id(), field.name, _iceberg_type(field.type, (*path, field.name), next_id), required=False)
        for field in fields
    ]


def _iceberg_type(kind: pa.DataType, path: Sequence[str], next_id: Callable[[], int]) -> IcebergType:
    types = pa.types
    if types.is_struct(kind):
        return StructType(*_nested_fields(kind, path, next_id))
    if is_list(kind):
        element = next_id()
        return ListType(element, _iceberg_type(kind.value_type, (*path, "element"), next_id), element_required=False)
    if types.is_map(kind):
        key, value = next_id(), next_id()
        key_type = _iceberg_type(kind.key_type, (*path, "key"), next_id)
        return MapType(key, key_type, value, _iceberg_type(kind.item_type, (*path, "value"), next_id), False)
    if kind in _NUMBERS:
        return _NUMBERS[kind]
    if is_text(kind):
        return StringType()
    if is_bytes(kind):
        return BinaryType()
    if types.is_fixed_size_binary(kind):
        return FixedType(kind.byte_width)
    if types.is_decimal(kind) and kind.precision <= _MOST_DIGITS and kind.scale >= 0:
        return DecimalType(kind.precision, kind.scale)
    if types.is_timestamp(kind) and kind.unit != "ns":
        return TimestamptzType() if kind.tz else TimestampType()
    if types.is_time(kind) and kind.unit != "ns":
        return TimeType()
    raise LoadError(
        f"column {'.'.join(path)}: Iceberg (format version 2) has no {kind}: load it as another type, or as bytes"
    )


def to_arrow(table: Schema, columns: pa.Schema | None = None) -> pa.Schema:
    """The table's schema in Arrow, with the ids of its fields; of the columns and fields that `columns` has, in its
    order, or of all. The types are the table's, and not Arrow's large ones.
    """
    fields = table.fields if columns is None else [table.find_field(name) for name in columns.names]
    kinds = [None] * len(fields) if columns is None else columns.types
    return pa.schema([_arrow_field(*pair) for pair in zip(fields, kinds, strict=True)])


def _arrow_field(field: NestedField, like: pa.DataType | None) -> pa.Field:
    metadata = {FIELD_ID: str(field.field_id).encode()}
    return pa.field(field.name, _arrow_type(field.field_type, like), not field.required, metadata)


def _arrow_type(kind: IcebergType, like: pa.DataType | None) -> pa.DataType:
    if isinstance(kind, StructType):
        if like is None:
            return pa.struct([_arrow_field(field, None) for field in kind.fields])
        known = {field.name: field for field in kind.fields}
        return pa.struct([_arrow_field(known[field.name], field.type) for field in like])
    if isinstance(kind, ListType):
        return pa.list_(_arrow_field(kind.element_field, like and like.value_type))
    if isinstance(kind, MapType):
        value = _arrow_field(kind.value_field, like and like.item_type)
        return pa.map_(_arrow_field(kind.key_field, like and like.key_type), value)
    if isinstance(kind, DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, FixedType):
        return pa.binary(len(kind))
    if type(kind) not in _PLAIN:
        raise LoadError(f"spark_klog does not read or write Iceberg's type {kind}")
    return _PLAIN[type(kind)]


@dataclass
class Changes:
    """What has to change in a table so that it has a load's columns. Paths are those of the table before."""

    added: list[tuple[_Path, IcebergType]] = field(default_factory=list)
    widened: list[tuple[_Path, IcebergType]] = field(default_factory=list)
    renamed: list[tuple[_Path, str]] = field(default_factory=list)
    #: Those that the load has no longer, or with another type in `added`; the table has no values of them.
    removed: list[_Path] = field(default_factory=list)
    #: What a change can't mend, in words.
    differences: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.added or self.widened or self.renamed or self.removed)

    def add(self, others: Changes) -> None:
        """Add changes of fields that are below the same path."""
        for name in ("added", "widened", "renamed", "removed", "differences"):
            getattr(self, name).extend(getattr(others, name))

    def path_before(self, path: str) -> str:
        """The path in the table before of a column that the load has at `path`."""
        names = {(old[:-1], new): old[-1] for old, new in self.renamed}
        before: _Path = ()
        for name in path.split("."):
            before = (*before, names.get((before, name), name))
        return _dotted(before)


def changes(
    table: Schema,
    columns: pa.Schema,
    own: Collection[str],
    unwritten: Collection[int] = frozenset(),
    *,
    drops: bool = True,
) -> Changes:
    """Compare a load's columns with a table's. Columns that only the table has stay, unless they are required.

    A column that the table does not have is one of the table's under another name, if its aliases (`aliases_of`) name
    that, and the load's `own` columns have it. Fields whose ids are `unwritten` may get another type, or go if it
    `drops` any: of `own` columns only, as others may wait for somebody else's rows.
    """
    compared = Changes()
    ids = set(unwritten)
    for column in table.fields:
        if column.name not in own:
            ids.difference_update(Schema(column).field_ids)
    _compare_fields(table.fields, list(columns), (), compared, ids, own)
    if not drops:
        again = {path for path, _ in compared.added}
        compared.removed = [path for path in compared.removed if path in again]
    return compared


def _compare_fields(
    known: Sequence[NestedField],
    wanted: Sequence[pa.Field],
    path: tuple[str, ...],
    to: Changes,
    unwritten: Collection[int],
    own: Collection[str] | None = None,
) -> None:
    """All fields can be renamed if `own` is None."""
    by_name = {column.name: column for column in known}
    names = {column.name for column in wanted}
    folded: dict[str, str] = {}
    for name in (*by_name, *names):
        other = folded.setdefault(name.casefold(), name)
        if other != name:  # Spark and DuckDB ignore case
            to.differences.append(f"{_dotted((*path, name))} and {_dotted((*path, other))} differ by case only")
    used = set[str]()
    for column in wanted:
        same = by_name.get(column.name)
        if same is None:
            others = names | used
            former = [name for name in aliases_of(column) if name in by_name and name not in others]
            alias = next((name for name in former if own is None or name in own), None)
            if alias is None:
                to.added.append(((*path, column.name), _new_type(column, path)))
                continue
            to.renamed.append(((*path, alias), column.name))
            same = by_name[alias]
        used.add(same.name)
        below = Changes()
        _compare(same, column, (*path, same.name), below, unwritten)
        if below.differences and same.name == column.name and same.field_id in unwritten:
            to.removed.append((*path, column.name))
            to.added.append(((*path, column.name), _new_type(column, path)))
        else:
            to.add(below)
    for left in known:
        if left.field_id in unwritten and left.name not in used:
            to.removed.append((*path, left.name))
            continue
        if left.required and left.name not in used:
            to.differences.append(f"{_dotted((*path, left.name))} is required in the table, and the load has none")


def _new_type(column: pa.Field, path: _Path) -> IcebergType:
    return _iceberg_type(column.type, (*path, column.name), itertools.count(1).__next__)


def _compare(known: NestedField, wanted: pa.Field, path: _Path, to: Changes, unwritten: Collection[int]) -> None:
    if known.required and wanted.nullable:
        to.differences.append(f"{_dotted(path)} is required in the table, and may be null in the load")
    kind, ours = known.field_type, _iceberg_type(wanted.type, path, _no_id)
    if isinstance(kind, StructType) and isinstance(ours, StructType):
        _compare_fields(kind.fields, list(wanted.type), path, to, unwritten)
    elif isinstance(kind, ListType) and isinstance(ours, ListType):
        element = wanted.type.value_field
        _compare(kind.element_field, element, (*path, "element"), to, unwritten)
    elif isinstance(kind, MapType) and isinstance(ours, MapType):
        if kind.key_type != ours.key_type:
            to.differences.append(
                f"{_dotted((*path, 'key'))} is {kind.key_type} in the table, {ours.key_type} in the load"
            )
        _compare(kind.value_field, wanted.type.item_field, (*path, "value"), to, unwritten)
    elif kind == ours or _widens(ours, kind):
        return
    elif _widens(kind, ours):
        to.widened.append((path, ours))
    else:
        to.differences.append(f"{_dotted(path)} is {kind} in the table, {ours} in the load")


def _widens(narrow: IcebergType, wide: IcebergType) -> bool:
    """Whether Iceberg lets a column of the first type become one of the second."""
    if isinstance(narrow, DecimalType) and isinstance(wide, DecimalType):
        return narrow.scale == wide.scale and narrow.precision < wide.precision
    return (type(narrow), type(wide)) in ((IntegerType, LongType), (FloatType, DoubleType))


def _dotted(path: Sequence[str]) -> str:
    return ".".join(path)
