"""Data files of an Iceberg table that are written by us, and not by a load's tasks."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.table import Table, TableProperties

#: Of a row group, in memory.
_GROUP_ROWS, _GROUP_BYTES = 1_000_000, 32 * 1024 * 1024


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
