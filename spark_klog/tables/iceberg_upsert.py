"""Merge changes into an Iceberg table: files with rows that change are replaced as a whole, in one commit.

Only the columns of the key, of the place and of users are read, of files that may have one of the keys by their bounds
and partitions; then all columns of the files that change. Rows are written to the partitions of the table's spec,
whichever files had them. What is in memory at once is a slice of the changes, these columns of one file, what users
have in the rows that the slice changes, and a bit for each row of the files that change. A truncation takes away files
whose rows are all older than it, without reading those whose bounds tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.typedef import Record

from spark_klog.errors import LoadError
from spark_klog.tables.change_files import ChangeFiles
from spark_klog.tables.change_order import DELETED, Outcome, all_outlived, outlived, place_of
from spark_klog.tables.iceberg_files import DataFileWriter, Footers
from spark_klog.tables.iceberg_partitions import Bounds, Pruning, by_partition
from spark_klog.tables.iceberg_rows import REWRITE, NotProjected, Rows
from spark_klog.tables.iceberg_schema import to_arrow
from spark_klog.tables.table import field_ids, own_columns

_FILE_BYTES = 256 * 1024 * 1024
#: In the summary of a snapshot: the files that the table had, and what was read of them.
SUMMARY = "klog.table-files", "klog.read-files", "klog.read-rows", "klog.read-bytes"
#: Files that are written at a time, each of a partition of its own.
_MOST_OPEN = 16


class Upsert:
    """Writes the files that take the place of others; `table` is as it was when it was read.

    After `write` the `gone` files are to be replaced by the `added` ones; rows that others have deleted stay away.
    """

    def __init__(self, address: str, table: Table, changes: ChangeFiles) -> None:
        self._table, self._changes = table, changes
        self._schema = to_arrow(table.schema())
        own = own_columns(address, table.properties).union(changes.row.names)
        #: The columns of users, whose values stay when a row changes.
        self._others = [name for name in self._schema.names if name not in own]
        self._table_rows = Rows(table)
        self._tasks = self._table_rows.files()
        #: By the number of a task: which of the file's rows stay.
        self._kept: dict[int, NDArray[np.bool_]] = {}
        #: By the number of a task: which of the file's rows others have deleted.
        self._deleted: dict[int, NDArray[np.int64]] = {}
        self._output = _Output(table, self._schema)
        self.gone: list[DataFile] = []
        self.added: list[DataFile] = []
        #: Rows that the changes have left.
        self.inserted = 0
        #: What was read of the table: files by their numbers, rows, and bytes of the columns.
        self._files_read = set[int]()
        self._rows_read = self._bytes_read = 0

    def write(self) -> None:
        try:
            if len(self._changes.truncations):
                self._truncate()
            for changes in self._changes.whole(self._schema, self._rows):
                rows = self._inserted(changes)
                self.inserted += len(rows)
                self._output.write(rows)
            for number, kept in self._kept.items():
                self.gone.append(self._tasks[number].file)
                start = 0
                if not kept.any():
                    continue
                for batch in self._read(number, self._schema.names):
                    rows = batch.filter(pa.array(kept[start : start + len(batch)]))
                    start += len(batch)
                    self._output.write(pa.Table.from_batches([rows]), self._tasks[number].file)
            self.added = self._output.finish()
        except BaseException:
            self.remove()
            raise

    @property
    def summary(self) -> dict[str, str]:
        """What was read, for the summary of a snapshot, which has what was written anyway."""
        values = len(self._tasks), len(self._files_read), self._rows_read, self._bytes_read
        return dict(zip(SUMMARY, map(str, values), strict=True))

    def remove(self) -> None:
        """Remove what was written, as nothing of it is committed."""
        self._output.remove()

    def _truncate(self) -> None:
        """Note which rows are older than one of the truncations."""
        names = place_of(self._changes.schema)
        kinds = pa.schema([self._schema.field(name) for name in names])
        bounds = Bounds(self._table.schema(), names)
        for number, task in enumerate(self._tasks):
            known = all_outlived(bounds.of(task.file), self._changes.truncations)
            if known is not None:
                if known:
                    self._kept[number] = np.zeros(task.file.record_count, np.bool_)
                continue
            rows = pa.Table.from_batches(self._read(number, names), kinds)
            if (gone := outlived(rows, self._changes.truncations)).any():
                self._kept[number] = ~gone

    def _rows(self, names: Sequence[str], keys: pa.Table) -> Iterator[pa.RecordBatch]:
        for number in self._candidates(keys):
            yield from self._read(number, list(names))

    def _candidates(self, keys: pa.Table) -> Iterator[int]:
        """The numbers of files that may have rows with the keys and that no truncation has emptied."""
        pruning = Pruning(self._table.metadata, keys)
        for number, task in enumerate(self._tasks):
            if pruning.may_have(task.file) and (number not in self._kept or self._kept[number].any()):
                yield number

    def _inserted(self, changes: pa.Table) -> pa.Table:
        """The rows that a slice of changes leaves; notes which rows of the table they replace."""
        names = [*self._changes.key, *place_of(changes.schema), *self._others]
        wanted = pa.schema([self._schema.field(name).remove_metadata() for name in names])
        outcome = Outcome(changes, self._changes.key, wanted)
        replaced = [wanted.empty_table().select(self._others)]
        #: Of each change the number of the row in `replaced` whose place it takes.
        places = np.full(len(changes), -1)
        kinds = pa.schema([wanted.field(name) for name in self._changes.key])
        for number in self._candidates(changes.select(kinds.names).cast(kinds)):
            rows = pa.Table.from_batches(self._read(number, names), wanted)
            alive = np.flatnonzero(~outlived(rows, self._changes.truncations))
            if len(alive) != len(rows):
                of_rows, of_changes = outcome.replace(rows.take(pa.array(alive)))
                of_rows = alive[of_rows]
            else:
                of_rows, of_changes = outcome.replace(rows)
            if not len(of_rows):
                continue
            if number not in self._kept:
                self._kept[number] = np.ones(len(rows), np.bool_)
            self._kept[number][of_rows] = False
            if self._others:
                first = sum(map(len, replaced))
                replaced.append(rows.select(self._others).take(pa.array(of_rows)))
                places[of_changes] = np.arange(first, first + len(replaced[-1]))
        latest = outcome.latest
        changes = changes.take(pa.array(latest))
        if self._others:
            values = pa.concat_tables(replaced).take(pa.array(places[latest], mask=places[latest] < 0))
            for name in self._others:
                changes = changes.append_column(name, values[name])
        return changes.filter(pc.invert(changes[DELETED]))

    def _read(self, number: int, names: list[str]) -> Iterator[pa.RecordBatch]:
        """The rows of a file that are not deleted, always in the same order, with the types of the table."""
        live, columns = self._tasks[number], pa.schema([self._schema.field(name) for name in names])
        self._files_read.add(number)
        ids = field_ids(columns)
        self._bytes_read += sum(size for number, size in (live.file.column_sizes or {}).items() if number in ids)
        try:
            if number not in self._deleted:
                self._deleted[number] = self._table_rows.deleted(live)
            for batch in self._table_rows.batches(live, columns, self._deleted[number]):
                self._rows_read += len(batch)
                yield batch
        except NotProjected as error:
            raise LoadError(f"{error}, which an upsert can't move into another file: {REWRITE}") from None


class _Output:
    """Files of the table, of about `_FILE_BYTES` at most, each of one partition."""

    def __init__(self, table: Table, schema: pa.Schema) -> None:
        self._table, self._schema = table, schema
        self._footers = Footers(table.metadata)
        self._writers: list[DataFileWriter] = []
        #: By partition, the one that was written to last at the end.
        self._open: dict[Record, DataFileWriter] = {}
        self._files: list[DataFile] = []

    def write(self, rows: pa.Table, source: DataFile | None = None) -> None:
        """Write rows, which may all be of one file."""
        if not len(rows):
            return
        metadata, rows = self._table.metadata, self._fitted(rows)
        parts: Iterable[tuple[Record, pa.Table]] = by_partition(rows, metadata.spec(), metadata.schema())
        if source is not None and source.spec_id == metadata.default_spec_id:
            parts = [(source.partition, rows)]
        for partition, part in parts:
            writer = self._open.pop(partition, None)
            if writer is None:
                if len(self._open) >= _MOST_OPEN:
                    self._finish_file(next(iter(self._open)))
                writer = DataFileWriter(self._table, self._schema, "upsert")
                self._writers.append(writer)
            self._open[partition] = writer
            writer.write(part)
            if writer.written >= _FILE_BYTES:
                self._finish_file(partition)

    def finish(self) -> list[DataFile]:
        for partition in list(self._open):
            self._finish_file(partition)
        return self._files

    def remove(self) -> None:
        for writer in self._writers:
            writer.remove()

    def _fitted(self, rows: pa.Table) -> pa.Table:
        """With the table's columns, null where the rows have none."""
        columns = [
            rows[field.name].cast(field.type) if field.name in rows.column_names else pa.nulls(len(rows), field.type)
            for field in self._schema
        ]
        return pa.Table.from_arrays(columns, schema=self._schema)

    def _finish_file(self, partition: Record) -> None:
        writer = self._open.pop(partition)
        self._files.append(self._footers.data_file(writer.path, *writer.finish(), partition))
