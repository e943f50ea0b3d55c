"""Partitions of rows of an Iceberg table, by any spec: each distinct value of a column is transformed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import UnknownTransform, VoidTransform
from pyiceberg.typedef import Record
from pyiceberg.types import IcebergType, StringType, UUIDType

from spark_klog.errors import LoadError

#: Of so many distinct keys the partitions are looked at: more are in most of them.
_MOST_KEYS = 100_000


def check_spec(spec: PartitionSpec) -> None:
    """`LoadError` if the spec has a transform that is not known."""
    for field in spec.fields:
        if isinstance(field.transform, UnknownTransform):
            raise LoadError(f"is partitioned by {field.name} ({field.transform}), which pyiceberg does not know")


def by_partition(rows: pa.Table, spec: PartitionSpec, schema: Schema) -> Iterator[tuple[Record, pa.Table]]:
    """The rows of each partition, with its values."""
    if not spec.fields:
        yield Record(), rows
        return
    codes = np.zeros(len(rows), np.int64)
    parts: list[tuple[list[Any], NDArray[np.int64]]] = []
    for field in spec.fields:
        name = schema.find_column_name(field.source_id)
        assert name is not None
        first, *inner = name.split(".")
        column = rows[first].combine_chunks()
        values, places = _transformed(pc.struct_field(column, inner) if inner else column, field, schema)
        parts.append((values, places))
        codes = np.unique(codes * len(values) + places, return_inverse=True)[1].astype(np.int64)
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(codes[order]) != 0)) if len(rows) else np.zeros(0, np.int64)
    for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        record = Record(*(values[places[order[start]]] for values, places in parts))
        yield record, rows if end - start == len(rows) else rows.take(pa.array(order[start:end]))


class Pruning:
    """Tells which data files may have rows with the keys of changes, by their bounds and partitions."""

    def __init__(self, metadata: TableMetadata, keys: pa.Table) -> None:
        self._schema, self._specs = metadata.schema(), metadata.specs()
        self._fields = {self._schema.find_field(name).field_id: name for name in keys.column_names}
        self._keys = keys
        self._extents = {
            number: tuple(pc.min_max(_internal(keys[name].combine_chunks())).as_py().values())
            for number, name in self._fields.items()
            if _is_plain(keys.schema.field(name).type)
        }
        #: By spec and the place of a field in it: the values of the keys.
        self._partitions: dict[tuple[int, int], set[Any]] = {}

    def may_have(self, file: DataFile) -> bool:
        lower, upper = file.lower_bounds or {}, file.upper_bounds or {}
        for number, (low, high) in self._extents.items():
            is_text = isinstance(self._schema.find_type(number), StringType)
            if number in lower and number in upper and low is not None:
                first, last = (_bound(bound[number], is_text) for bound in (lower, upper))
                if high < first or low > last:
                    return False
        spec = self._specs.get(file.spec_id)
        if spec is None or len(self._keys) > _MOST_KEYS:
            return True
        return all(
            not isinstance(value := file.partition[place], int | str) or value in self._values(spec, place)
            for place, field in enumerate(spec.fields)
            if field.source_id in self._extents and not isinstance(field.transform, VoidTransform)
        )

    def _values(self, spec: PartitionSpec, place: int) -> set[Any]:
        known = self._partitions.get((spec.spec_id, place))
        if known is None:
            field = spec.fields[place]
            values, _ = _transformed(self._keys[self._fields[field.source_id]].combine_chunks(), field, self._schema)
            known = self._partitions[spec.spec_id, place] = set(values)
        return known


def _transformed(column: pa.Array, field: PartitionField, schema: Schema) -> tuple[list[Any], NDArray[np.int64]]:
    """The partition values of the distinct values of a column, and the place of each row's in them."""
    if isinstance(field.transform, VoidTransform):
        return [None], np.zeros(len(column), np.int64)
    kind = schema.find_type(field.source_id)
    codes = _internal(column).dictionary_encode("encode")
    transform: Any = field.transform.transform(kind)
    distinct: Sequence[Any] = [_plain(value, kind) for value in codes.dictionary.to_pylist()]
    values = [None if value is None else transform(value) for value in distinct]
    return values or [None], codes.indices.to_numpy().astype(np.int64)


def _internal(column: pa.Array) -> pa.Array:
    """Dates and times as the numbers that Iceberg has of them."""
    if pa.types.is_date(column.type):
        return column.cast(pa.int32())
    return column.cast(pa.int64()) if pa.types.is_temporal(column.type) else column


def _bound(raw: bytes, is_text: bool) -> Any:
    """A bound of a data file; of a column that was an int, and is a long now, it has four bytes."""
    return raw.decode() if is_text else int.from_bytes(raw, "little", signed=True)


def _is_plain(kind: pa.DataType) -> bool:
    """Whether values of a type have an order that bounds have, too: not so NaN, signs of zeros, UUIDs."""
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(is_text or pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def _plain(value: Any, kind: IcebergType) -> Any:
    return UUID(bytes=value) if isinstance(kind, UUIDType) and isinstance(value, bytes) else value
