"""The columns of a load beside those of a table that exists: what the table lacks, and what does not fit.

Also the leaves of columns, as a Parquet file has them, and which of them have NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set as AbstractSet
from dataclasses import dataclass
from itertools import count

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.tables.table import field_id

#: In a file's metadata: `nan_columns` as JSON. A footer's bounds leave out NaN, to Spark the largest of all numbers.
NAN_COLUMNS = "klog.nan"
_NUMBERS = {pa.int8(): 8, pa.int16(): 16, pa.int32(): 32, pa.int64(): 64}


def differences(table: pa.Schema, columns: pa.Schema, others: AbstractSet[str]) -> tuple[list[pa.Field], list[str]]:
    """The columns that a table lacks, or that lack fields in it (then with all fields of both), and what does not fit.

    What does not fit: a column of another type, unless the table's holds all its values, and a column that the table
    requires. `others` are columns of the table that files do not have.
    """
    known = {column.name: column.type for column in table}
    missing: list[pa.Field] = []
    complaints: list[str] = []
    for column in columns:
        merged, misfits = _merged_column(column, known, "")
        complaints += misfits
        if merged is not None and merged != known.get(column.name):
            missing.append(pa.field(column.name, merged))
    required = sorted(column.name for column in table if not column.nullable and column.name not in others)
    complaints += [f"{name} is required, and the load may have nulls" for name in required]
    return missing, complaints


def _merged_column(
    column: pa.Field, known: Mapping[str, pa.DataType], path: str
) -> tuple[pa.DataType | None, list[str]]:
    """The type that a load's column gets beside the table's `known` ones, and what does not fit.

    None if a known name differs from the column's by case only.
    """
    if column.name in known:
        return _merged(known[column.name], column.type, f"{path}{column.name}")
    other = next((name for name in known if name.lower() == column.name.lower()), None)
    if other is None:
        return column.type, []
    return None, [f"{path}{column.name} differs from {path}{other} by case only, which Spark takes for one"]


def _merged(mine: pa.DataType, theirs: pa.DataType, path: str) -> tuple[pa.DataType, list[str]]:
    """The table's type with the fields that are new in `theirs`, and what does not fit."""
    if pa.types.is_struct(mine) and pa.types.is_struct(theirs):
        return _merged_struct(mine, theirs, path)
    if pa.types.is_map(mine) and pa.types.is_map(theirs):
        keys, misfits = _merged(mine.key_type, theirs.key_type, f"{path}{{key}}")
        values, misfits_of_values = _merged(mine.item_type, theirs.item_type, f"{path}{{}}")
        is_same = (keys, values) == (mine.key_type, mine.item_type)
        merged = mine if is_same else pa.map_(mine.key_field.with_type(keys), mine.item_field.with_type(values))
        return merged, misfits + misfits_of_values
    if pa.types.is_list(mine) and pa.types.is_list(theirs):
        element, misfits = _merged(mine.value_type, theirs.value_type, f"{path}[]")
        return mine if element == mine.value_type else pa.list_(mine.value_field.with_type(element)), misfits
    return mine, [] if holds(mine, theirs) else [f"{path} is {mine} in the table and {theirs} in the load"]


def _merged_struct(mine: pa.StructType, theirs: pa.StructType, path: str) -> tuple[pa.DataType, list[str]]:
    known = {field.name: field.type for field in mine}
    fields = {field.name: field for field in mine}
    complaints: list[str] = []
    for field in theirs:
        merged, misfits = _merged_column(field, known, f"{path}.")
        complaints += misfits
        if merged is not None:
            fields[field.name] = fields.get(field.name, pa.field(field.name, merged)).with_type(merged)
    given = {field.name for field in theirs}
    for field in mine:
        if not field.nullable:
            what = "and the load may have nulls" if field.name in given else "which the load has not"
            complaints.append(f"{path}.{field.name} is required, {what}")
    return pa.struct(fields.values()), complaints


def holds(mine: pa.DataType, theirs: pa.DataType) -> bool:
    """Whether a column of the type `mine` holds all values of `theirs`."""
    if mine == theirs:
        return True
    if mine in _NUMBERS and theirs in _NUMBERS:
        return _NUMBERS[mine] >= _NUMBERS[theirs]
    if mine == pa.float64():
        return theirs == pa.float32() or _NUMBERS.get(theirs, 64) <= 32
    if pa.types.is_decimal(mine) and pa.types.is_decimal(theirs):
        return bool(mine.scale >= theirs.scale and mine.precision - mine.scale >= theirs.precision - theirs.scale)
    return False


@dataclass(frozen=True)
class Leaf:
    """A column of a Parquet file: its field, and how many columns with statistics are before it.

    `path` is None for a leaf of lists and maps, which count as one column each, without bounds: a row may have many
    values of it.
    """

    path: tuple[str, ...] | None
    field: pa.Field
    before: int

    @property
    def type(self) -> pa.DataType:
        return self.field.type

    @property
    def id(self) -> int | None:
        return field_id(self.field)


def leaves(schema: pa.Schema) -> Iterator[Leaf]:
    """The columns of a Parquet file with this schema, in their order."""
    places = count()
    for field in schema:
        yield from _leaves((field.name,), field, places)


def _leaves(path: tuple[str, ...], field: pa.Field, places: Iterator[int]) -> Iterator[Leaf]:
    if pa.types.is_struct(field.type):
        for child in field.type:
            yield from _leaves((*path, child.name), child, places)
    elif pa.types.is_nested(field.type):
        before = next(places)
        yield from (Leaf(None, each, before) for each in _primitives(field))
    else:
        yield Leaf(path, field, next(places))


def _primitives(field: pa.Field) -> Iterator[pa.Field]:
    kind = field.type
    if not pa.types.is_nested(kind):
        yield field
    elif pa.types.is_map(kind):
        yield from _primitives(kind.key_field)
        yield from _primitives(kind.item_field)
    else:
        for child in kind if pa.types.is_struct(kind) else [kind.value_field]:
            yield from _primitives(child)


def nan_columns(table: pa.Table) -> dict[int, bool]:
    """Of the columns of floating numbers that a file of these rows has, by their numbers: whether they have NaN."""
    made = {}
    for number, leaf in enumerate(leaves(table.schema)):
        if leaf.path is not None and pa.types.is_floating(leaf.type):
            column = table[leaf.path[0]]
            if leaf.path[1:]:
                column = pc.struct_field(column, list(leaf.path[1:]))
            made[number] = bool(pc.any(pc.is_nan(column)).as_py())
    return made
