"""Merge changes into an Iceberg table: files with rows that change are replaced as a whole, in one commit.

Only the columns of the key, of the place and of users are read, of files that may have one of the keys by their bounds
and partitions. Rows are written to the partitions of the table's spec, whichever files had them. What is in memory at
once is a slice of the changes, these columns of one file, what users have in the rows that the slice changes, and a bit
for each row of the files that change. A truncation takes away files whose rows are all older than it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.typedef import Record

from spark_klog.errors import LoadError
from spark_klog.tables.change_files import ChangeFiles
from spark_klog.tables.change_order import DELETED, Outcome, outlived, place_of
from spark_klog.tables.iceberg_files import DataFileWriter, Footers
from spark_klog.tables.iceberg_partitions import Pruning, by_partition
from spark_klog.tables.iceberg_rows import REWRITE, NotProjected, Rows
from spark_klog.tables.iceberg_schema import to_arrow
from spark_klog.tables.table import own_columns

_FILE_BYTES = 256 * 1024 * 1024
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
                    self._output.write(pa.Table.from_batches([rows]))
            self.added = self._output.finish()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove what was written, as nothing of it is committed."""
        self._output.remove()

    def _truncate(self) -> None:
        """Note which rows are older than one of the truncations."""
        names = place_of(self._changes.schema)
        kinds = pa.schema([self._schema.field(name) for name in names])
        for number in range(len(self._tasks)):
            rows = pa.Table.from_batches(self._read(number, names), kinds)
            if (gone := outlived(rows, self._changes.truncations)).any():
                self._kept[number] = ~gone

    def _rows(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for number in range(len(self._tasks)):
            yield from self._read(number, list(names))

    def _inserted(self, changes: pa.Table) -> pa.Table:
        """The rows that a slice of changes leaves; notes which rows of the table they replace."""
        names = [*self._changes.key, *place_of(changes.schema), *self._others]
        wanted = pa.schema([self._schema.field(name).remove_metadata() for name in names])
        outcome = Outcome(changes, self._changes.key, wanted)
        replaced = [wanted.empty_table().select(self._others)]
        #: Of each change the number of the row in `replaced` whose place it takes.
        places = np.full(len(changes), -1)
        kinds = pa.schema([wanted.field(name) for name in self._changes.key])
        pruning = Pruning(self._table.metadata, changes.select(kinds.names).cast(kinds))
        for number, task in enumerate(self._tasks):
            if not pruning.may_have(task.file):
                continue
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
        try:
            if number not in self._deleted:
                self._deleted[number] = self._table_rows.deleted(live)
            yield from self._table_rows.batches(live, columns, self._deleted[number])
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

    def write(self, rows: pa.Table) -> None:
        if not len(rows):
            return
        metadata = self._table.metadata
        for partition, part in by_partition(self._fitted(rows), metadata.spec(), metadata.schema()):
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
