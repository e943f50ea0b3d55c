"""Write Arrow batches into files that each cover a range of offsets, in folders by time if asked.

A task holds one row group at most in memory, over all its open files.
"""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from spark_klog.columns.plain_json import plain_json
from spark_klog.load.journal import paths
from spark_klog.load.journal.model import FileEntry, Range
from spark_klog.load.settings import ARROW, JSON_LINES, PARQUET, VALUES, WriteSettings
from spark_klog.load.table_columns import as_columns, layout_now, table_columns
from spark_klog.load.values import microseconds
from spark_klog.tables.change_files import ChangeWriter
from spark_klog.tables.change_order import OWN
from spark_klog.tables.columns import NAN_COLUMNS, nan_columns
from spark_klog.tables.partitions import BY_TIME, file_metadata, parse_terms
from spark_klog.tables.splitting import Splitter
from spark_klog.tables.table import has_field_ids

HOUR_US = 3_600_000_000
#: Files that are open at a time in one task; records of more hours begin new files.
MOST_OPEN = 24
#: The same of partitions by columns: each batch may have records of all of them.
MOST_PARTITIONS = 200
_STRFTIME = {"hour": "date=%Y-%m-%d/hour=%H", "day": "date=%Y-%m-%d"}
_HOURS = {"hour": 1, "day": 24}
#: Of records without an event time.
_NO_SLOT = -(1 << 63)


class FileWriter(ABC):
    """Writes tables to a file in one of the formats."""

    _file: pa.OSFile
    _writer: Any
    #: Of Parquet files, for their metadata.
    metadata: dict[str, str]

    @abstractmethod
    def write(self, table: pa.Table) -> None: ...

    def close(self) -> None:
        self._writer.close()
        self._file.close()


class _ParquetWriter(FileWriter):
    def __init__(self, path: Path, schema: pa.Schema, settings: WriteSettings) -> None:
        import pyarrow.parquet as pq

        ordering = settings.ordering
        self._file = pa.OSFile(str(path), "wb")
        self._writer = pq.ParquetWriter(
            self._file,
            schema,
            compression=settings.compression,
            compression_level=settings.compression_level,
            use_dictionary=[name if name in schema.names else f"{OWN}{name}" for name in settings.dictionary] or False,
            sorting_columns=pq.SortingColumn.from_ordering(schema, ordering) if ordering else None,
        )
        self.metadata, self._has_nan = {}, dict[int, bool]()

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table, row_group_size=len(table))
        for column, has_nan in nan_columns(table).items():
            self._has_nan[column] = has_nan or self._has_nan.get(column, False)

    def close(self) -> None:
        if self._has_nan:
            self.metadata[NAN_COLUMNS] = json.dumps(self._has_nan)
        self._writer.add_key_value_metadata(self.metadata)
        super().close()


class _ArrowWriter(FileWriter):
    def __init__(self, path: Path, schema: pa.Schema, settings: WriteSettings) -> None:
        codec = None if settings.compression == "none" else pa.Codec(settings.compression, settings.compression_level)
        self._file = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._file, schema, options=pa.ipc.IpcWriteOptions(compression=codec))

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table)


class _JsonWriter(FileWriter):
    """A line a record. Bytes are text if they are UTF-8, else {"base64": ...}; timestamps are ms.

    Numbers that JSON does not have are "NaN", "Infinity" and "-Infinity", which Spark writes and reads.
    """

    def __init__(self, path: Path, schema: pa.Schema, settings: WriteSettings) -> None:
        compression = None if settings.compression == "none" else settings.compression
        self._file = pa.OSFile(str(path), "wb")
        self._writer = pa.CompressedOutputStream(self._file, compression) if compression else self._file

    def write(self, table: pa.Table) -> None:
        names = table.schema.names
        times = table["timestamp"].cast(pa.int64()).to_pylist()
        columns = [times if name == "timestamp" else table[name].to_pylist() for name in names]
        kinds = table.schema.types
        lines = []
        for row in zip(*columns, strict=True):
            record = {name: plain_json(value, kind) for name, value, kind in zip(names, row, kinds, strict=True)}
            record["timestamp"] = record["timestamp"] // 1000
            lines.append(json.dumps(record, ensure_ascii=False, separators=(",", ":")))
        self._writer.write(("\n".join(lines) + "\n").encode())


class OpenFile:
    """A file that takes records, and those that wait for its next row group. `partition` is as of `Splitter.parts`."""

    def __init__(
        self, path: Path, schema: pa.Schema, settings: WriteSettings, columns: pa.Schema | None, partition: str = ""
    ) -> None:
        self.path = path
        self._columns, schema = columns, columns or schema
        self._is_of_values = settings.table_columns == VALUES
        self._schema = schema
        kinds: dict[str, Callable[..., FileWriter]] = {
            PARQUET: _ParquetWriter,
            ARROW: _ArrowWriter,
            JSON_LINES: _JsonWriter,
        }
        self._writer = kinds[settings.format](path, schema, settings)
        if partition:
            self._writer.metadata |= file_metadata(partition)
        self._ordering = settings.ordering
        self._waiting: list[pa.RecordBatch] = []
        self.rows = self.bytes = 0
        self.records = 0
        self.min_us, self.max_us = (1 << 63) - 1, -(1 << 63)

    def add(self, batch: pa.RecordBatch, times: NDArray[np.int64]) -> None:
        self._waiting.append(batch if self._columns is None else as_columns(batch, self._columns, self._is_of_values))
        self.rows += len(batch)
        self.bytes += batch.nbytes
        self.records += len(batch)
        self.min_us, self.max_us = min(self.min_us, int(times.min())), max(self.max_us, int(times.max()))

    def flush(self) -> None:
        if self._waiting:
            table = pa.Table.from_batches(self._waiting, self._schema)
            self._writer.write(table.sort_by(self._ordering) if self._ordering else table)
            self._waiting = []
            self.rows = self.bytes = 0

    def complete(self, path: str, of: Range, first: int, last: int) -> FileEntry:
        """Close the file, which covers the offsets from `first` to `last`; returns its entry at its final path."""
        self.flush()
        self._writer.close()
        size, times = self.path.stat().st_size, (self.min_us // 1000, self.max_us // 1000)
        return FileEntry(path, of.topic, of.partition, first, last, self.records, size, *times)


class RangeWriter:
    """Writes the records of one range to files that cover it one after the other.

    `put` gets each file of the scratch folder when it is complete. The files' names end with the attempt's `token`;
    their content depends on the records and the settings alone. `columns` are those of the table that they are for.
    """

    def __init__(
        self,
        span: Range,
        settings: WriteSettings,
        scratch: Path,
        put: Callable[[Path, FileEntry], None],
        token: str,
        columns: pa.Schema | None = None,
    ) -> None:
        self._columns, self._splitter = columns, None
        #: By folder: of a partition, as of `Splitter.parts`.
        self._partitions: dict[str, str] = {}
        if columns is not None and settings.layout not in BY_TIME:
            terms = parse_terms(layout_now(settings, table_columns(settings, [span.topic])))
            self._splitter = Splitter(terms, columns)
            if not has_field_ids(columns):  # else files have what their partitions have
                names = {term.column for term in terms}
                self._columns = pa.schema([column for column in columns if column.name not in names])
        self._most_open = MOST_OPEN if self._splitter is None else MOST_PARTITIONS
        self._range, self._schema, self._settings = span, settings.columns(span.topic), settings
        self._scratch, self._put, self._token = scratch, put, token
        self._files: dict[str, OpenFile] = {}
        self._first = span.start
        self._last = span.start - 1

    def add(self, batch: pa.RecordBatch, times: NDArray[np.int64], layout_times: NDArray[np.int64]) -> None:
        """Add records in the order of offsets; `times` are their timestamps in microseconds, `layout_times` those that
        decide on their folders; these have a date, so that no two slots have one folder."""
        parts = list(self._by_layout(batch, times, layout_times))
        last = batch["offset"][len(batch) - 1].as_py()
        if self._files and len(self._files.keys() | {folder for folder, _, _ in parts}) > self._most_open:
            self._roll(self._last)
        if len(parts) > self._most_open:  # of one Arrow batch: one file after the other
            for folder, part, part_times in parts:
                self._file(folder).add(part, part_times)
                self._complete(folder, self._files.pop(folder), last)
            self._first, self._last = last + 1, last
            return
        for folder, part, part_times in parts:
            self._file(folder).add(part, part_times)
        self._last = last
        self._flush_full()
        if sum(file.path.stat().st_size for file in self._files.values()) >= self._settings.file_bytes:
            self._roll(self._last)

    def finish(self, until: int) -> None:
        """Complete the last files; the range has been read up to `until`."""
        self._roll(until - 1)

    def _by_layout(
        self, batch: pa.RecordBatch, times: NDArray[np.int64], layout_times: NDArray[np.int64]
    ) -> Iterator[tuple[str, pa.RecordBatch, NDArray[np.int64]]]:
        if self._settings.layout == "none":
            yield "", batch, times
            return
        if self._splitter is not None:
            rows = as_columns(batch, self._splitter.columns, self._settings.table_columns == VALUES)
            for folder, numbers, row in self._splitter.parts(rows):
                self._partitions[folder] = row
                yield folder, batch.take(pa.array(numbers)), times[numbers]
            return
        slot_us = HOUR_US * _HOURS[self._settings.layout]
        if self._columns is not None and has_field_ids(self._columns):
            slots = _exact_slots(batch, times, self._settings.event_time, slot_us)
        else:
            slots = layout_times // slot_us
        distinct, counts = np.unique(slots, return_counts=True)
        if len(distinct) == 1:
            yield self._folder(int(distinct[0])), batch, times
            return
        order = np.argsort(slots, kind="stable")
        ends = np.cumsum(counts)
        for slot, end, count in zip(distinct.tolist(), ends.tolist(), counts.tolist(), strict=True):
            rows = order[end - count : end]
            # not a slice, which would keep the whole batch in memory until the few records of a rare hour are written
            yield self._folder(slot), batch.take(pa.array(rows)), times[rows]

    def _folder(self, slot: int) -> str:
        start_us = slot * HOUR_US * _HOURS[self._settings.layout]
        if slot == _NO_SLOT:
            return "date=null"
        return time_text(start_us, _STRFTIME[self._settings.layout])

    def _file(self, folder: str) -> OpenFile:
        if folder not in self._files:
            self._files[folder] = OpenFile(
                *(self._scratch / uuid.uuid4().hex, self._schema, self._settings, self._columns),
                self._partitions.pop(folder, ""),
            )
        return self._files[folder]

    def _flush_full(self) -> None:
        settings = self._settings
        for file in self._files.values():
            if file.rows >= settings.row_group_rows or file.bytes >= settings.row_group_bytes:
                file.flush()
        while sum(file.bytes for file in self._files.values()) >= settings.row_group_bytes:
            max(self._files.values(), key=lambda file: file.bytes).flush()

    def _roll(self, last: int) -> None:
        """Complete the open files, which cover the offsets up to `last`; later records begin new ones."""
        for folder, file in sorted(self._files.items()):
            self._complete(folder, file, last)
        self._files = {}
        self._first = last + 1

    def _complete(self, folder: str, file: OpenFile, last: int) -> None:
        path = paths.file(self._range, self._first, last, folder, self._token, self._settings.extension)
        self._put(file.path, file.complete(path, self._range, self._first, last))


class ChangeRangeWriter:
    """As `RangeWriter`, for changes of rows, in files that wait for the run's commit in its folder `changes`.

    A file has the last change of each key among its records. The `records` of its entry are those of the log, also the
    ones that it has no changes of.
    """

    def __init__(
        self,
        span: Range,
        key: Sequence[str],
        scratch: Path,
        put: Callable[[Path, FileEntry], None],
        token: str,
        run: int,
    ) -> None:
        self._range, self._put, self._token, self._run = span, put, token, run
        self._writer = ChangeWriter(key, scratch, self._complete)
        self._first, self._last = span.start, span.start - 1
        self._records = 0
        self._times: list[int] = []

    def add(self, changes: pa.RecordBatch, times: NDArray[np.int64], last: int) -> None:
        """Add the changes of records up to offset `last`, whose `times` are their timestamps in microseconds."""
        self._records += len(times)
        self._last = last
        self._times += [int(times.min()) // 1000, int(times.max()) // 1000]
        self._writer.add(changes)

    def finish(self, until: int) -> None:
        """Complete the last file; the range has been read up to `until`."""
        self._last = until - 1
        self._writer.finish()

    def _complete(self, source: Path, _changes: int) -> None:
        span = self._range
        name = paths.file(span, self._first, self._last, "", self._token, "parquet").rpartition("/")[2]
        low, high = min(self._times), max(self._times)
        place = span.topic, span.partition, self._first, self._last
        size = source.stat().st_size
        self._put(source, FileEntry(paths.changes(self._run, name), *place, self._records, size, low, high))
        self._first, self._records, self._times = self._last + 1, 0, []


def _exact_slots(batch: pa.RecordBatch, times: NDArray[np.int64], event_time: str, slot_us: int) -> NDArray[np.int64]:
    """The slots as a table computes them that goes by its columns: of the values themselves, and null for null."""
    if not event_time:
        return times // slot_us
    column = pc.struct_field(batch["value"], event_time.split("."))
    exact = microseconds(column)
    slots = np.asarray(exact.fill_null(0).to_numpy(zero_copy_only=False), np.int64) // slot_us
    return np.where(exact.is_null().to_numpy(zero_copy_only=False), _NO_SLOT, slots)


def time_text(microseconds: int, form: str) -> str:
    """A time in UTC, which has a date, by `strftime`."""
    return datetime.fromtimestamp(microseconds // 1_000_000, timezone.utc).strftime(form)
