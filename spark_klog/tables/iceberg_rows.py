"""Rows of a file of an Iceberg table as the file has them, by the ids of its fields.

pyiceberg's own scan reads a null list as an empty one: rows that only move from a file to another would change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyiceberg.io.pyarrow import _read_deletes
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.delete_file_index import DeleteFileIndex
from pyiceberg.table.name_mapping import MappedField
from pyiceberg.transforms import IdentityTransform, VoidTransform
from pyiceberg.utils.concurrent import ExecutorFactory

from spark_klog.columns.schema import is_list
from spark_klog.tables.change_files import slots
from spark_klog.tables.change_order import OWN
from spark_klog.tables.iceberg_schema import to_arrow
from spark_klog.tables.table import FIELD_ID, field_id, without_rows

_BATCH_ROWS = 65_536
#: What delete files by values have, in memory between two data files.
_KEPT_BYTES = 256 * 1024 * 1024
#: The column of rows' hashes; no other one of a table is called so. How many there are.
_HASH, _HASHES = f"{OWN}hash", (1 << 31) - 1
#: Of columns to which a table's mapping of names gives no id.
_UNKNOWN = -1


#: What mends it.
REWRITE = "rewrite the table's files with Spark (CALL system.rewrite_data_files), then run again"


class NotProjected(Exception):
    """A file whose columns differ from the table's in more than is projected here."""


@dataclass(frozen=True)
class LiveFile:
    """A data file, with the delete files that may name rows of it: by their positions, and by values of columns."""

    file: DataFile
    positions: Collection[DataFile]
    values: Sequence[DataFile]

    @property
    def is_disturbed(self) -> bool:
        return bool(self.positions or self.values)


class Rows:
    """The rows of a table's data files that are not deleted. pyiceberg plans no table with deletes by values, as Flink
    writes them (equality deletes).

    What delete files name is kept from one data file to the next, up to a bound.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._fields = {field.field_id: field for each in table.metadata.schemas for field in each.fields}
        self._fields |= {field.field_id: field for field in table.schema().fields}
        #: By the path of a delete file and the ids of its columns: their values, with hashes.
        self._values: dict[tuple[str, tuple[int, ...]], pa.Table] = {}
        #: By the ids: all that the delete files of an older data file of the partition delete.
        self._gone: dict[tuple[int, ...], _Gone] = {}
        self._room = _KEPT_BYTES

    def files(self) -> list[LiveFile]:
        """Each partition's from the oldest on, which has the delete files of all newer ones and more.

        Delete files by values apply to older files: of their partition, or to all if they have none (Iceberg's Table
        Spec, "Scan Planning").
        """
        io, snapshot = self._table.io, self._table.current_snapshot()
        index, data, by_values = DeleteFileIndex(), [], defaultdict(list)
        manifests = [] if snapshot is None else snapshot.manifests(io)
        read = ExecutorFactory.get_or_create().map(lambda manifest: manifest.fetch_manifest_entry(io), manifests)
        for entry in chain.from_iterable(read):
            file = entry.data_file
            if file.content == DataFileContent.DATA:
                data.append(entry)
            elif file.content == DataFileContent.POSITION_DELETES:
                index.add_delete_file(entry, file.partition)
            else:
                is_global = is_unpartitioned(self._table.specs()[file.spec_id])
                by_values[None if is_global else (file.spec_id, file.partition)].append(entry)
        made = []
        data.sort(key=lambda entry: (repr(entry.data_file.partition), entry.sequence_number or 0))
        for entry in data:
            file, number = entry.data_file, entry.sequence_number or 0
            others = [*by_values.get(None, ()), *by_values.get((file.spec_id, file.partition), ())]
            values = [other.data_file for other in others if (other.sequence_number or 0) > number]
            made.append(LiveFile(file, index.for_data_file(number, file, file.partition), values))
        return made

    def deleted(self, live: LiveFile) -> NDArray[np.int64]:
        """The numbers of a file's rows that its delete files name, in their order; `NotProjected`."""
        io, path = self._table.io, live.file.file_path
        numbers = [np.zeros(0, np.int64)]
        for delete in live.positions:
            if delete.file_format == FileFormat.PARQUET:
                with io.new_input(delete.file_path).open() as stream:
                    rows = pq.read_table(stream, columns=["pos"], filters=pc.field("file_path") == path)
                numbers.append(rows["pos"].to_numpy())
            elif path in (rows_of := _read_deletes(io, delete)):
                numbers.append(rows_of[path].to_numpy())
        by_ids = defaultdict(list)
        for delete in live.values:
            by_ids[tuple(sorted(delete.equality_ids or ()))].append(delete)
        for ids, deletes in by_ids.items():
            paths = [delete.file_path for delete in deletes]
            gone = self._gone.get(ids)
            if gone is None or not gone.numbers.keys() >= set(paths):
                gone = self._gone[ids] = _Gone(paths, [self._of_columns(delete, ids) for delete in deletes])
            numbers.append(np.flatnonzero(gone.has(self._of_columns(live.file, ids, keep=False), paths)))
        return np.unique(np.concatenate(numbers))

    def batches(self, live: LiveFile, schema: pa.Schema, deleted: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        """The rows as of `file_rows`, without the `deleted` ones."""
        start = 0
        for batch in file_rows(self._table, live.file, schema):
            yield without_rows(batch, start, deleted)
            start += len(batch)

    def _of_columns(self, file: DataFile, ids: tuple[int, ...], *, keep: bool = True) -> pa.Table:
        """The columns of a file by which rows are deleted, which the table may have no longer, and each row's hash."""
        if (known := self._values.get((file.file_path, ids))) is not None:
            return known
        if not ids or not self._fields.keys() >= set(ids):
            raise NotProjected(f"{file.file_path} deletes rows by fields within others")
        schema = to_arrow(Schema(*(self._fields[number] for number in ids)))
        columns = pa.Table.from_batches(file_rows(self._table, file, schema), schema)
        columns = columns.append_column(_HASH, pa.array(slots(columns, columns.column_names, _HASHES)))
        if keep and columns.nbytes <= self._room:
            self._values[file.file_path, ids] = columns
            self._room -= columns.nbytes
        return columns


def is_unpartitioned(spec: PartitionSpec) -> bool:
    """Whether no field partitions: in format version 1, and after an upgrade, those that were dropped are still there.

    pyiceberg's own takes a spec with such fields for a partitioned one.
    """
    return all(isinstance(field.transform, VoidTransform) for field in spec.fields)


class _Gone:
    """Values by which delete files delete rows, by their hashes: what a file's rows do not have is not looked at."""

    def __init__(self, paths: Sequence[str], parts: Sequence[pa.Table]) -> None:
        self.numbers = {path: number for number, path in enumerate(paths)}
        values = pa.concat_tables(parts)
        hashes = values[_HASH].to_numpy()
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._values = hashes[order], values.drop_columns([_HASH]).take(pa.array(order))
        self._of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])[order]

    def has(self, rows: pa.Table, paths: Sequence[str]) -> NDArray[np.bool_]:
        """Whether each row has values that these delete files delete."""
        hashes, made = rows[_HASH].to_numpy(), np.zeros(len(rows), np.bool_)
        end = np.searchsorted(self._hashes, hashes, "right")
        may_be = np.flatnonzero((end > 0) & (self._hashes[end - 1] == hashes)) if len(self._hashes) else ()
        if len(may_be):
            wanted = np.unique(hashes[may_be])
            first, end = (np.searchsorted(self._hashes, wanted, side) for side in ("left", "right"))
            places = np.repeat(end - np.cumsum(end - first), end - first) + np.arange(int((end - first).sum()))
            places = places[np.isin(self._of[places], [self.numbers[path] for path in paths])]
            some = rows.drop_columns([_HASH]).take(pa.array(may_be))
            made[may_be] = _are_among(some, self._values.take(pa.array(places)))
        return made


def _are_among(rows: pa.Table, gone: pa.Table) -> NDArray[np.bool_]:
    """Whether each row has the values of one that is gone; a null is a value."""
    codes = np.zeros(len(gone) + len(rows), np.int64)
    for left, right in zip(gone.columns, rows.columns, strict=True):
        values = pa.chunked_array([*left.chunks, *right.chunks], left.type).combine_chunks()
        of_column = values.dictionary_encode("encode").indices.to_numpy(zero_copy_only=False)
        codes = np.unique(codes * len(codes) + of_column, return_inverse=True)[1].astype(np.int64)
    return np.isin(codes[len(gone) :], codes[: len(gone)])


def file_rows(table: Table, file: DataFile, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file with the columns of `schema`, some of the table's; rows that are deleted, too.

    A row group is in memory. `NotProjected`, before the first rows unless a value does not fit into the table's type.
    """
    if file.file_format != FileFormat.PARQUET:
        raise NotProjected(f"{file.file_path} is a file of {file.file_format.value}")
    constant = {
        part.source_id for part in table.specs()[file.spec_id].fields if isinstance(part.transform, IdentityTransform)
    }
    ids = {field_id(field) for field in schema}
    with table.io.new_input(file.file_path).open() as stream:
        parquet = pq.ParquetFile(stream)
        own = list(parquet.schema_arrow)
        mapping = table.name_mapping()
        if mapping is not None and not any(field_id(field) is not None for field in own):
            own = [_identified(field, mapping.root) for field in own]
        _by_id(own, file.file_path)
        own = [field for field in own if field_id(field) in ids]
        names = [field.name for field in own]
        _projected([pa.nulls(0, field.type) for field in own], own, schema, file.file_path, constant)
        for group in range(parquet.num_row_groups):
            for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group], columns=names):
                columns = [batch[name] for name in names]
                arrays = _projected(columns, own, schema, file.file_path, constant, len(batch))
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _identified(field: pa.Field, mapped: Iterable[MappedField], name: str = "") -> pa.Field:
    """A field of a file without ids, with those that the table's mapping of names has for it and for those in it."""
    known = next((each for each in mapped if (name or field.name) in each.names), MappedField(names=[]))
    number = _UNKNOWN if known.field_id is None else known.field_id
    kind, inner = field.type, known.fields
    if pa.types.is_struct(kind):
        kind = pa.struct([_identified(child, inner) for child in kind])
    elif pa.types.is_map(kind):
        kind = pa.map_(_identified(kind.key_field, inner, "key"), _identified(kind.item_field, inner, "value"))
    elif is_list(kind):
        kind = pa.list_(_identified(kind.value_field, inner, "element"))
    return pa.field(field.name, kind, field.nullable, {FIELD_ID: str(number).encode()})


def _by_id(fields: Iterable[pa.Field], path: str) -> dict[int, int]:
    """The places of fields by their ids; files that others have added may have none, and a mapping of names."""
    places = {}
    for index, field in enumerate(fields):
        number = field_id(field)
        if number is None:
            raise NotProjected(f"{path} has a field {field.name} without an id")
        places[number] = index
    return places


def _projected(
    arrays: Sequence[pa.Array],
    has: Sequence[pa.Field],
    wanted: Iterable[pa.Field],
    path: str,
    constant: Collection[int] = (),
    length: int = 0,
) -> list[pa.Array]:
    """The columns or fields that are `wanted`, by their ids; null if there are none in the file."""
    places = _by_id(has, path)
    made = []
    for field in wanted:
        index = places.get(field_id(field) or 0)
        if index is not None:
            made.append(_cast(arrays[index], has[index], field, path))
        elif field.nullable and field_id(field) not in constant:
            made.append(pa.nulls(length, field.type))
        else:
            raise NotProjected(f"{path} has no {field.name}")
    return made


def _cast(array: pa.Array, has: pa.Field, wanted: pa.Field, path: str) -> pa.Array:
    kind = wanted.type
    if array.type.equals(kind, check_metadata=True):
        return array
    if pa.types.is_struct(has.type) and pa.types.is_struct(kind):
        children = [array.field(index) for index in range(len(has.type))]
        children = _projected(children, list(has.type), kind, path, length=len(array))
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null())
    if pa.types.is_map(has.type) and pa.types.is_map(kind):
        fields = zip((array.keys, array.items), _pair(has.type), _pair(kind), strict=True)
        entries = pa.StructArray.from_arrays([_cast(*each, path) for each in fields], fields=list(_pair(kind)))
        return _with_values(array, kind, entries)
    if is_list(has.type) and pa.types.is_list(kind):
        if not pa.types.is_list(array.type):  # of large offsets, or none
            array = array.cast(pa.list_(array.type.value_field))
        return _with_values(array, kind, _cast(array.values, has.type.value_field, kind.value_field, path))
    if pa.types.is_nested(has.type):
        raise NotProjected(f"{path} has {wanted.name} as {has.type}")
    try:
        return array.cast(kind)
    except pa.ArrowException as error:
        raise NotProjected(f"{path} has {wanted.name} as {has.type}: {error}") from None


def _with_values(array: pa.Array, kind: pa.DataType, values: pa.Array) -> pa.Array:
    """The lists or maps with other values at the same places; what is null stays null."""
    return pa.Array.from_buffers(kind, len(array), array.buffers()[:2], array.null_count, array.offset, [values])


def _pair(kind: pa.MapType) -> tuple[pa.Field, pa.Field]:
    return kind.key_field, kind.item_field
