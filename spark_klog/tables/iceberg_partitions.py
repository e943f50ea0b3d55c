"""Partitions of rows of an Iceberg table, by any spec: each distinct value of a column is transformed once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import Transform, UnknownTransform, VoidTransform, parse_transform
from pyiceberg.typedef import Record
from pyiceberg.types import BinaryType, IcebergType, ListType, MapType, StringType, StructType, UUIDType

from spark_klog.columns.schema import is_bytes, is_text
from spark_klog.errors import LoadError
from spark_klog.tables.iceberg_schema import to_iceberg
from spark_klog.tables.partitions import Term, as_numbers, column_at, distinct, grouped, no_column

#: Of so many distinct keys the partitions are looked at: more are in most of them.
_MOST_KEYS = 100_000
#: How Iceberg's own builder names fields, beside those that are named by their transform.
_SUFFIXES = {"identity": "", "truncate": "_trunc"}
#: What transforms of times are for, in errors.
_TAKES = {
    "hour": ": Iceberg does so by timestamps",
    **dict.fromkeys(("year", "month", "day"), ": Iceberg does so by timestamps and dates"),
}


def check_spec(spec: PartitionSpec) -> None:
    """`LoadError` if the spec has a transform that is not known."""
    for field in spec.fields:
        if isinstance(field.transform, UnknownTransform):
            raise LoadError(f"is partitioned by {field.name} ({field.transform}), which pyiceberg does not know")


def spec_of(schema: Schema, terms: Sequence[Term]) -> PartitionSpec:
    """The spec of a new table; `LoadError` if it lacks a column, or if a transform is not for the column's type."""
    fields: list[PartitionField] = []
    names = {column.name for column in schema.fields}
    for term in terms:
        source, transform = source_of(schema, term)
        name = term.column.replace(".", "_") + _SUFFIXES.get(term.transform, f"_{term.transform}")
        while any(name == field.name for field in fields) or (name in names and name != term.column):
            name += "_"
        fields.append(PartitionField(source, PARTITION_FIELD_ID_START + len(fields), transform, name))
    return PartitionSpec(*fields)


def source_of(schema: Schema, term: Term) -> tuple[int, Transform[Any, Any]]:
    """The id of a term's column, and the transform; `LoadError` as of `spec_of`."""
    try:
        field = schema.find_field(term.column)
    except ValueError:
        raise LoadError(no_column(term.column, [each.name for each in schema.fields])) from None
    transform: Transform[Any, Any] = parse_transform(
        f"{term.transform}[{term.width}]" if term.width else term.transform
    )
    kind = field.field_type
    if isinstance(kind, StructType | ListType | MapType) or not transform.can_transform(kind):
        of = f"the {term.transform} of {term.column}" if term.transform != "identity" else term.column
        raise LoadError(f"can't be partitioned by {of}, which is {kind}{_TAKES.get(term.transform, '')}")
    return field.field_id, transform


def terms_in(spec: PartitionSpec) -> list[tuple[int, str]]:
    """The columns' ids and transforms of a spec that partition."""
    return [
        (field.source_id, str(field.transform))
        for field in spec.fields
        if not isinstance(field.transform, VoidTransform)
    ]


def by_partition(rows: pa.Table, spec: PartitionSpec, schema: Schema) -> Iterator[tuple[Record, pa.Table]]:
    """The rows of each partition, with its values."""
    if not spec.fields:
        yield Record(), rows
        return
    parts = []
    for field in spec.fields:
        name = schema.find_column_name(field.source_id)
        assert name is not None
        parts.append(_transformed(column_at(rows, name), field.transform, schema.find_type(field.source_id)))
    for values, numbers in grouped(parts, len(rows)):
        yield Record(*values), rows if len(numbers) == len(rows) else rows.take(pa.array(numbers))


class TermValues:
    """The partition values of rows by terms; `schema` has the columns that these are of."""

    def __init__(self, terms: Sequence[Term], schema: pa.Schema) -> None:
        table = to_iceberg(schema)
        sources = [source_of(table, term) for term in terms]
        self._transforms = [(transform, table.find_type(number)) for number, transform in sources]

    def of(self, columns: Sequence[pa.Array]) -> list[tuple[Sequence[Any], NDArray[np.int64]]]:
        """Those of each term's column, as of `grouped`."""
        return [_transformed(column, *each) for column, each in zip(columns, self._transforms, strict=True)]


class Pruning:
    """Tells which data files may have rows with the keys of changes, by their bounds and partitions."""

    def __init__(self, metadata: TableMetadata, keys: pa.Table) -> None:
        self._schema, self._specs = metadata.schema(), metadata.specs()
        self._fields = {self._schema.find_field(name).field_id: name for name in keys.column_names}
        self._keys = keys
        #: The values of each column that has bounds, in their order.
        self._values = {
            number: pc.unique(as_numbers(keys[name].combine_chunks())).drop_null().sort().to_pylist()
            for number, name in self._fields.items()
            if _is_plain(keys.schema.field(name).type)
        }
        #: By spec and the place of a field in it: the values of the keys.
        self._partitions: dict[tuple[int, int], set[Any]] = {}

    def may_have(self, file: DataFile) -> bool:
        lower, upper = file.lower_bounds or {}, file.upper_bounds or {}
        for number, values in self._values.items():
            if number in lower and number in upper and values:
                first, last = (bound_value(bound[number], self._schema.find_type(number)) for bound in (lower, upper))
                at = bisect_left(values, first)
                if at == len(values) or values[at] > last:
                    return False
        spec = self._specs.get(file.spec_id)
        if spec is None or len(self._keys) > _MOST_KEYS:
            return True
        return all(
            not isinstance(value := file.partition[place], int | str) or value in self._partition_values(spec, place)
            for place, field in enumerate(spec.fields)
            if field.source_id in self._values and not isinstance(field.transform, VoidTransform)
        )

    def _partition_values(self, spec: PartitionSpec, place: int) -> set[Any]:
        known = self._partitions.get((spec.spec_id, place))
        if known is None:
            field = spec.fields[place]
            column = self._keys[self._fields[field.source_id]].combine_chunks()
            values, _ = _transformed(column, field.transform, self._schema.find_type(field.source_id))
            known = self._partitions[spec.spec_id, place] = set(values)
        return known


class Bounds:
    """Tells between which values some columns of a data file are."""

    def __init__(self, schema: Schema, names: Sequence[str]) -> None:
        self._columns = [(name, schema.find_field(name)) for name in names]

    def of(self, file: DataFile) -> dict[str, tuple[Any, Any]]:
        """The least and the largest value by column; without those that have nulls, or whose bounds are not known."""
        lower, upper, nulls = file.lower_bounds or {}, file.upper_bounds or {}, file.null_value_counts or {}
        return {
            name: (bound_value(lower[at.field_id], at.field_type), bound_value(upper[at.field_id], at.field_type))
            for name, at in self._columns
            if {at.field_id} <= lower.keys() & upper.keys() and nulls.get(at.field_id) == 0
        }


def _transformed(
    column: pa.Array, transform: Transform[Any, Any], kind: IcebergType
) -> tuple[Sequence[Any], NDArray[np.int64]]:
    """The partition values of the distinct values of a column, and the place of each row's in them."""
    if isinstance(transform, VoidTransform):
        return [None], np.zeros(len(column), np.int64)
    values, places = distinct(column)
    made = transform.transform(kind)
    numbers: dict[Any, int] = {}  # several values have one partition
    of_values = [
        numbers.setdefault(None if value is None else made(_plain(value, kind)), len(numbers)) for value in values
    ]
    return list(numbers), np.array(of_values, np.int64)[places]


def bound_value(raw: bytes, kind: IcebergType) -> Any:
    """A bound of a data file; of a column that was an int, and is a long now, it has four bytes."""
    if isinstance(kind, BinaryType):
        return raw
    return raw.decode() if isinstance(kind, StringType) else int.from_bytes(raw, "little", signed=True)


def _is_plain(kind: pa.DataType) -> bool:
    """Whether values of a type have an order that bounds have, too: not so NaN, signs of zeros, UUIDs."""
    is_time = pa.types.is_date(kind) or pa.types.is_timestamp(kind)
    return bool(is_text(kind) or is_bytes(kind) or pa.types.is_integer(kind) or is_time)


def _plain(value: Any, kind: IcebergType) -> Any:
    return UUID(bytes=value) if isinstance(kind, UUIDType) and isinstance(value, bytes) else value
