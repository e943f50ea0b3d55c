"""Iceberg tables of the tests: a catalog in SQLite, data files, other writers, and what a reader sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import (
    DataFile as IcebergFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestWriterV2,
)
from pyiceberg.table import Table

from spark_klog.columns.schema import FULL
from spark_klog.files import open_folder
from spark_klog.tables.iceberg import IcebergTable
from spark_klog.tables.table import DataFile, Run

LOAD = "load-1"
TOPIC = "a-topic-of-more-than-16-letters"
_EPOCH_HOUR = 473_352  # of 2024


class Warehouse:
    """A catalog `c` with the table c.NAMESPACE.t, and its loads and strangers."""

    def __init__(self, folder: Path, name: str = "ns.t", **options: str) -> None:
        self.name = f"c.{name}"
        folder.mkdir(parents=True, exist_ok=True)
        self.options = {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/warehouse",
            **options,
        }
        self.catalog: Catalog = load_catalog("c", **self.options)

    def open(self) -> IcebergTable:
        """As a new process would."""
        return IcebergTable(self.name, self.options)

    def prepared(self, layout: str = "hour", columns: pa.Schema = FULL) -> tuple[IcebergTable, pa.Schema]:
        table = self.open()
        return table, table.prepare(columns, layout, "timestamp", LOAD)

    def stranger(self) -> Table:
        """The table as pyiceberg itself opens it."""
        return self.catalog.load_table(tuple(self.name.split(".")[1:]))

    def offsets(self, **scan: Any) -> list[int]:
        """The offsets of all rows, in their order."""
        return sorted(self.stranger().scan(**scan).to_arrow()["offset"].to_pylist())


def rows(offsets: Iterable[int], hour: int = 0, **values: Any) -> list[dict[str, Any]]:
    """Records of partition 0, in an hour of the first day of 2024."""
    at = datetime.fromtimestamp((_EPOCH_HOUR + hour) * 3600, timezone.utc)
    fixed = {"topic": TOPIC, "partition": 0, "timestamp": at, "timestampType": 0, "key": b"k", **values}
    headers = [{"key": "h", "value": b"x"}]
    return [{"offset": one, "value": b"%06d" % one, "headers": headers, **fixed} for one in offsets]


def write(table: IcebergTable, schema: pa.Schema, name: str, records: list[dict[str, Any]], **options: Any) -> DataFile:
    """Write a data file, as a task of a load does."""
    path = f"{TOPIC}/{name}.parquet"
    buffer, footers = pa.BufferOutputStream(), list[Any]()
    pq.write_table(pa.Table.from_pylist(records, schema), buffer, metadata_collector=footers, **options)
    content = buffer.getvalue().to_pybytes()
    folder = open_folder(table.location)
    folder.write(path, content)
    return DataFile(path, len(content), footers[0])


def run_of(number: int, until: int, token: str = "token") -> Run:
    return Run(LOAD, number, f"{token}-{number}", {TOPIC: {"0": until}}, {TOPIC: "id"})


def delete_by_file(
    table: Table,
    file: IcebergFile,
    position: Any,
    content: DataFileContent,
    added: Sequence[IcebergFile] = (),
    column: str = "offset",
) -> None:
    """Delete a row of a file by a delete file, as Spark does with merge on read, or, as Flink does, those of its
    partition in which a column has this value; pyiceberg writes none. Add files by the same commit."""
    field = table.schema().find_field(column if content == DataFileContent.EQUALITY_DELETES else 1)
    location = f"{table.location()}/data/delete-{uuid4().hex}.parquet"
    if content == DataFileContent.POSITION_DELETES:
        fields = [
            pa.field("file_path", pa.string(), False, {"PARQUET:field_id": "2147483546"}),
            pa.field("pos", pa.int64(), False, {"PARQUET:field_id": "2147483545"}),
        ]
        values = [{"file_path": file.file_path, "pos": position}]
    else:
        kind = schema_to_pyarrow(field.field_type)
        fields = [pa.field(column, kind, True, {"PARQUET:field_id": str(field.field_id)})]
        values = [{column: position}]
    with table.io.new_output(location).create() as stream:
        pq.write_table(pa.Table.from_pylist(values, pa.schema(fields)), stream)
    deletes = IcebergFile.from_args(
        content=content,
        file_path=location,
        file_format=FileFormat.PARQUET,
        partition=file.partition,
        record_count=1,
        file_size_in_bytes=len(table.io.new_input(location)),
        equality_ids=[field.field_id] if content == DataFileContent.EQUALITY_DELETES else None,
    )
    deletes.spec_id = file.spec_id

    class Writer(ManifestWriterV2):
        def content(self) -> ManifestContent:
            return ManifestContent.DELETES

        @property
        def _meta(self) -> dict[str, str]:
            return {**super()._meta, "content": "deletes"}

    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        data_manifests = append._manifests
        for one in added:
            append.append_data_file(one)

        def manifests() -> list[Any]:
            output = append.new_manifest_output()
            with Writer(table.spec(), table.schema(), output, append.snapshot_id, "null") as writer:
                entry = ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED, snapshot_id=append.snapshot_id, data_file=deletes
                )
                writer.add(entry)
            return [writer.to_manifest_file(), *data_manifests()]

        append._manifests = manifests  # type: ignore[method-assign]


def before_commit(table: IcebergTable, do: Callable[[], object]) -> None:
    """Let others do something between the next commit's reading of the table and the commit itself."""
    catalog = table._catalog
    real = catalog.commit_table

    def commit(*arguments: Any) -> Any:
        catalog.commit_table = real  # type: ignore[method-assign]
        do()
        return real(*arguments)

    catalog.commit_table = commit  # type: ignore[method-assign]


def lose_answer(table: IcebergTable, error: Exception, is_committed: bool) -> None:
    """Let the next commit raise, with or without having committed."""
    catalog = table._catalog
    real = catalog.commit_table

    def commit(*arguments: Any) -> Any:
        catalog.commit_table = real  # type: ignore[method-assign]
        if is_committed:
            real(*arguments)
        raise error

    catalog.commit_table = commit  # type: ignore[method-assign]
