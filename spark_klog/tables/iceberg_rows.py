"""Rows of a file of an Iceberg table as the file has them, by the ids of its fields.

pyiceberg's own scan reads a null list as an empty one: rows that only move from a file to another would change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform

from spark_klog.tables.iceberg_schema import field_id

_BATCH_ROWS = 65_536


class NotProjected(Exception):
    """A file whose columns differ from the table's in more than is projected here."""


def file_rows(table: Table, file: DataFile, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file with the columns of `schema`, some of the table's; rows that are deleted, too.

    A row group is in memory. `NotProjected`, before the first rows unless a value does not fit into the table's type.
    """
    constant = {one.source_id for one in table.spec().fields if isinstance(one.transform, IdentityTransform)}
    ids = {field_id(one) for one in schema}
    with table.io.new_input(file.file_path).open() as stream:
        parquet = pq.ParquetFile(stream)
        own = parquet.schema_arrow
        _by_id(own, file.file_path)
        names = [one.name for one in own if field_id(one) in ids]
        nothing = pa.RecordBatch.from_arrays([pa.array([], one.type) for one in own], schema=own)
        _projected(nothing.select(names), schema, file.file_path, constant)
        for group in range(parquet.num_row_groups):
            for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group], columns=names):
                yield _projected(batch, schema, file.file_path, constant)


def _by_id(fields: Iterable[pa.Field], path: str) -> dict[int, int]:
    """The places of fields by their ids; files that others have added may have none, and a mapping of names."""
    found = {}
    for index, one in enumerate(fields):
        number = field_id(one)
        if number is None:
            raise NotProjected(f"{path} has a field {one.name} without an id")
        found[number] = index
    return found


def _projected(batch: pa.RecordBatch, schema: pa.Schema, path: str, constant: set[int]) -> pa.RecordBatch:
    """The batch with the columns of `schema`, by the ids of fields."""
    fields = _by_id(batch.schema, path)
    arrays = []
    for wanted in schema:
        index = fields.get(field_id(wanted) or 0)
        if index is None:
            if not wanted.nullable or field_id(wanted) in constant:
                raise NotProjected(f"{path} has no column {wanted.name}")
            arrays.append(pa.nulls(len(batch), wanted.type))
        else:
            arrays.append(_cast(batch.column(index), batch.schema.field(index), wanted, path))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(array: pa.Array, has: pa.Field, wanted: pa.Field, path: str) -> pa.Array:
    if has.type.equals(wanted.type, check_metadata=True):
        return array
    if pa.types.is_struct(has.type) and pa.types.is_struct(wanted.type):
        children = _by_id(has.type, path)
        arrays = []
        for child in wanted.type:
            index = children.get(field_id(child) or 0)
            if index is None:
                if not child.nullable:
                    raise NotProjected(f"{path} has no field {wanted.name}.{child.name}")
                arrays.append(pa.nulls(len(array), child.type))
            else:
                arrays.append(_cast(array.field(index), has.type.field(index), child, path))
        return pa.StructArray.from_arrays(arrays, fields=list(wanted.type), mask=array.is_null())
    if pa.types.is_nested(has.type) and _shape(has) != _shape(wanted):
        raise NotProjected(f"{path} has another {wanted.name}")
    try:
        return array.cast(wanted.type)
    except pa.ArrowException as error:
        raise NotProjected(f"{path} has {wanted.name} as {has.type}: {error}") from None


def _shape(one: pa.Field) -> list[Any]:
    """The ids of a field and of those in it, in their order."""
    kind = one.type
    if pa.types.is_map(kind):
        children = [kind.key_field, kind.item_field]
    elif pa.types.is_struct(kind):
        children = list(kind)
    else:
        children = [kind.value_field] if pa.types.is_nested(kind) else []
    return [field_id(one), *map(_shape, children)]
