"""Data files of Iceberg: what a manifest says of a Parquet file, from its footer alone; and the writer of ours.

The bounds are those of the footer's raw values. If the statistics of one row group are missing, as Parquet's writers
leave out values of more than 4 KB, the column has no bounds: those of the other row groups would hide rows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import MetricModeTypes, match_metrics_mode
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestEntry
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import DayTransform, HourTransform, VoidTransform
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    LongType,
    StringType,
)
from pyiceberg.utils.truncate import truncate_upper_bound_binary_string, truncate_upper_bound_text_string

from spark_klog.errors import LoadError
from spark_klog.tables.change_order import names_of_record
from spark_klog.tables.columns import Leaf, leaves

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

#: Of a row group of ours, in memory.
_GROUP_ROWS, _GROUP_BYTES = 1_000_000, 32 * 1024 * 1024
_HOUR_US = 3_600_000_000
#: Of a column: the smallest and the largest raw value, and how many values are null.
_Extent = tuple[Any, Any, int]


def time_field(spec: PartitionSpec) -> Any:
    """The field of a spec that partitions by hour or day; None if no field partitions. `LoadError` for others."""
    fields = [field for field in spec.fields if not isinstance(field.transform, VoidTransform)]
    if not fields:
        return None
    if len(fields) > 1 or not isinstance(fields[0].transform, HourTransform | DayTransform):
        raise LoadError(f"is partitioned by {', '.join(f'{one.name} ({one.transform})' for one in fields)}")
    return fields[0]


class Footers:
    """Makes data files of footers, for the schema, spec and properties that a table has now."""

    def __init__(self, metadata: TableMetadata) -> None:
        self._schema: Schema = metadata.schema()
        self._spec = metadata.spec()
        self._properties = metadata.properties
        self._leaves: tuple[pa.Schema, list[Leaf]] = (pa.schema([]), [])

    def data_file(self, path: str, size: int, footer: FileMetaData, partition: Record | None = None) -> DataFile:
        """The data file at `path`, which messages name; in the partition of its rows, if none is given.

        `LoadError` if the file has no ids of fields, or others than the table, or rows of several partitions.
        """
        columns = self._columns(path, footer)
        sizes: dict[int, int] = {}
        counts: dict[int, int] = {}
        nulls: dict[int, int] = {}
        lower: dict[int, bytes] = {}
        upper: dict[int, bytes] = {}
        for index, leaf in enumerate(columns):
            if leaf.id is None:
                raise LoadError(f"{path} has a column without a field id: it was not written for this table")
            name = self._schema.find_column_name(leaf.id)
            if name is None:  # its values would be null
                column = footer.schema.column(index).path
                raise LoadError(
                    f"{path} has a column {column} (field id {leaf.id}) that the table has no longer, as another "
                    "writer has dropped or replaced it: run again, which writes by the columns that there are now"
                )
            chunks = [footer.row_group(group).column(index) for group in range(footer.num_row_groups)]
            sizes[leaf.id] = sum(chunk.total_compressed_size for chunk in chunks)
            mode = self._mode(name)
            if mode.type == MetricModeTypes.NONE:
                continue
            counts[leaf.id] = sum(chunk.num_values for chunk in chunks)
            kind = self._schema.find_type(leaf.id)
            extent = _extent(chunks, kind, leaf)
            if extent is None:
                continue
            low, high, nulls[leaf.id] = extent
            if low is None or mode.type == MetricModeTypes.COUNTS or leaf.path is None:
                continue
            length = mode.length if isinstance(kind, StringType | BinaryType) else None
            lower[leaf.id] = _lower_bound(kind, low, length)
            bound = _upper_bound(kind, high, length)
            if bound is not None:
                upper[leaf.id] = bound
        result = DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=path,
            file_format=FileFormat.PARQUET,
            partition=self._partition(path, footer, columns) if partition is None else partition,
            record_count=footer.num_rows,
            file_size_in_bytes=size,
            column_sizes=sizes,
            value_counts=counts,
            null_value_counts=nulls,
            nan_value_counts={},
            lower_bounds=lower,
            upper_bounds=upper,
            key_metadata=None,
            split_offsets=sorted(_start(footer.row_group(group).column(0)) for group in range(footer.num_row_groups)),
            equality_ids=None,
            sort_order_id=None,
        )
        result.spec_id = self._spec.spec_id
        return result

    def _columns(self, path: str, footer: FileMetaData) -> list[Leaf]:
        schema = footer.schema.to_arrow_schema()
        if not self._leaves[0].equals(schema, check_metadata=True):
            self._leaves = schema, list(leaves(schema))
        if len(self._leaves[1]) != footer.num_columns:
            raise LoadError(f"{path} has {footer.num_columns} columns, and {len(self._leaves[1])} in its Arrow schema")
        return self._leaves[1]

    def _mode(self, name: str) -> Any:
        properties = self._properties
        default = properties.get(
            TableProperties.DEFAULT_WRITE_METRICS_MODE, TableProperties.DEFAULT_WRITE_METRICS_MODE_DEFAULT
        )
        return match_metrics_mode(properties.get(f"{TableProperties.METRICS_MODE_COLUMN_CONF_PREFIX}.{name}", default))

    def _partition(self, path: str, footer: FileMetaData, columns: list[Leaf]) -> Record:
        field = time_field(self._spec)
        if field is None:
            return Record(*(None for _ in self._spec.fields))
        name = self._schema.find_column_name(field.source_id)
        index = next((index for index, leaf in enumerate(columns) if leaf.id == field.source_id), None)
        if index is None:
            value = None
        else:
            chunks = [footer.row_group(group).column(index) for group in range(footer.num_row_groups)]
            extent = _extent(chunks, self._schema.find_type(field.source_id), columns[index])
            if extent is None:
                raise LoadError(f"{path} has no statistics of column {name}, by which the table is partitioned")
            low, high, nulls = extent
            if low is not None and nulls:
                raise LoadError(f"{path} has null and other values of {name}, which are of several partitions")
            value, last = (None if raw is None else _slot(field.transform, columns[index], raw) for raw in (low, high))
            if value != last:
                raise LoadError(f"{path} has {name} of several partitions: {field.transform}s {value} to {last}")
        return Record(*(value if each is field else None for each in self._spec.fields))


def _slot(transform: Any, leaf: Leaf, raw: int) -> int:
    """The hour or day since the epoch of microseconds, or of a date."""
    if pa.types.is_date(leaf.type):
        return raw
    return raw // (_HOUR_US if isinstance(transform, HourTransform) else 24 * _HOUR_US)


def _start(chunk: Any) -> int:
    has_earlier = chunk.has_dictionary_page and chunk.dictionary_page_offset < chunk.data_page_offset
    return int(chunk.dictionary_page_offset if has_earlier else chunk.data_page_offset)


def _extent(chunks: list[Any], kind: IcebergType, leaf: Leaf) -> _Extent | None:
    """None if the statistics of a row group are missing; the values are None if all are null."""
    if getattr(leaf.type, "unit", "us") != "us":  # other writers': Iceberg has microseconds
        return None
    low = high = None
    nulls = 0
    for chunk in chunks:
        statistics = chunk.statistics
        if statistics is None or not statistics.has_null_count:
            return None
        nulls += statistics.null_count
        if statistics.null_count == chunk.num_values:
            continue
        if not statistics.has_min_max:
            return None
        first, last = statistics.min_raw, statistics.max_raw
        if isinstance(kind, DecimalType) and isinstance(first, bytes):
            first, last = (int.from_bytes(raw, "big", signed=True) for raw in (first, last))
        low = first if low is None else min(low, first)
        high = last if high is None else max(high, last)
    return low, high, nulls


def _bytes(kind: IcebergType, raw: Any) -> bytes:
    """A value as Iceberg's single-value serialization has it (Table Spec, appendix D)."""
    if isinstance(raw, bytes):
        return raw
    if isinstance(kind, DecimalType):
        return int(raw).to_bytes(int(raw if raw >= 0 else ~raw).bit_length() // 8 + 1, "big", signed=True)
    if isinstance(kind, BooleanType):
        return struct.pack("?", raw)
    if isinstance(kind, FloatType | DoubleType):
        return struct.pack("<f" if isinstance(kind, FloatType) else "<d", raw)
    return struct.pack("<i" if isinstance(kind, IntegerType | DateType) else "<q", raw)


def _lower_bound(kind: IcebergType, raw: Any, length: int | None) -> bytes:
    if length is None:
        return _bytes(kind, raw)
    return raw.decode()[:length].encode() if isinstance(kind, StringType) else bytes(raw[:length])


def _upper_bound(kind: IcebergType, raw: Any, length: int | None) -> bytes | None:
    """None if there is no larger value of this length."""
    if length is None:
        return _bytes(kind, raw)
    if isinstance(kind, StringType):
        text = truncate_upper_bound_text_string(raw.decode(), length)
        return None if text is None else text.encode()
    return truncate_upper_bound_binary_string(raw, length)


def data_entries(table: Table) -> Iterator[ManifestEntry]:
    """The manifest entries of the data files of a table's current snapshot."""
    snapshot = table.current_snapshot()
    for manifest in [] if snapshot is None else snapshot.manifests(table.io):
        if manifest.content == ManifestContent.DATA:
            yield from manifest.fetch_manifest_entry(table.io)


def place_columns(schema: Schema) -> list[int]:
    """The ids of the columns of topics, partitions and offsets; empty if a table has none."""
    fields = {column.name: column for column in schema.fields}
    columns = [fields.get(name) for name in names_of_record(fields)[:3]]
    types = [type(column.field_type) if column else None for column in columns]
    return [column.field_id for column in columns if column] if types == [StringType, IntegerType, LongType] else []


def offsets_of(file: DataFile, columns: Sequence[int]) -> dict[tuple[str, int], tuple[int, int]]:
    """{(topic, partition): (first, last)} if the bounds tell; `columns` as of `place_columns`."""
    lower, upper = file.lower_bounds or {}, file.upper_bounds or {}
    if not columns or not all(column in lower and column in upper for column in columns):
        return {}
    (topic, *first), (last_topic, *last) = ([side[column] for column in columns] for side in (lower, upper))
    low, high = ([int.from_bytes(bound, "little", signed=True) for bound in side] for side in (first, last))
    if topic != last_topic or low[0] != high[0]:  # a bound that was cut short is never equal to the other one
        return {}
    return {(topic.decode(), low[0]): (low[1], high[1])}


class DataFileWriter:
    """Writes a Parquet file to a new place of the table, named by `kind`; a row group is in memory.

    `schema` has the ids of fields. As a context it closes the file; `finish` has to come before that.
    """

    def __init__(self, table: Table, schema: pa.Schema, kind: str) -> None:
        self._io, self._schema = table.io, schema
        properties = table.properties
        codec = properties.get(TableProperties.PARQUET_COMPRESSION, TableProperties.PARQUET_COMPRESSION_DEFAULT)
        self.path = table.location_provider().new_data_location(f"{kind}-{uuid4().hex}.parquet")
        self._waiting: list[pa.Table] = []
        self._rows = self._bytes = 0
        self._footers: list[Any] = []
        self._stream = self._io.new_output(self.path).create()
        self._writer = pq.ParquetWriter(self._stream, schema, compression=codec, metadata_collector=self._footers)

    def __enter__(self) -> DataFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def write(self, rows: pa.Table) -> None:
        """Add rows with the columns of the schema."""
        self._waiting.append(rows)
        self._rows += len(rows)
        self._bytes += rows.nbytes
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._flush()

    @property
    def written(self) -> int:
        """The bytes of the row groups up to now."""
        return int(self._stream.tell())

    def finish(self) -> tuple[int, pq.FileMetaData]:
        """Write the rest and close the file; returns its size in bytes, and its footer."""
        self._flush()
        self._close()
        [footer] = self._footers
        return len(self._io.new_input(self.path)), footer

    def remove(self) -> None:
        """Remove the file, which nothing refers to; if that fails, Iceberg's remove_orphan_files does it later."""
        with suppress(Exception):
            self._close()
        with suppress(Exception):
            self._io.delete(self.path)

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.concat_tables(self._waiting), row_group_size=self._rows)
            self._waiting, self._rows, self._bytes = [], 0, 0

    def _close(self) -> None:
        self._writer.close()
        self._stream.close()
