"""Changes of a streaming query, merged into a table by its function of `foreachBatch`, each micro-batch once.

Executors write the changes into files in LOCATION/_klog/changes, the last one of each key that a task has; the driver
merges them in one commit. All queries share a row of commits, `STREAMS`, each of which names the last micro-batch of
every query and its offsets: one that Spark runs again is found there. If Spark plans one of this number anew, as its
checkpoint was restored from a backup, the offsets are others, and it is merged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa

from spark_klog.base.extras import require
from spark_klog.errors import ConfigError, LoadError
from spark_klog.files import open_folder
from spark_klog.tables.change_files import ChangeFiles, ChangeWriter, change_files
from spark_klog.tables.changes import RECORD_KEY, ChangeFormat, Envelope
from spark_klog.tables.opening import open_table
from spark_klog.tables.table import STREAMS, Run, RunConflict, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger(__name__)
_FOLDER = "_klog/changes"
_BATCH = "batch"
_WRITTEN = "path string, partition string, end bigint"
_PLACE = ["topic", "partition", "offset"]
_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp")
#: How long a commit is tried again that other queries come before, in seconds.
_RETRY_S = 300.0
#: The local properties in which Spark has the id of a query, and of its run since it was started.
_QUERY_ID, _RUN_ID = "sql.streaming.queryId", "spark.jobGroup.id"
_merging = threading.Lock()
#: By run of a query, table and name: the function that was called last, and its micro-batch.
_merged: dict[tuple[str, str, str], tuple[_Upsert, int]] = {}


def upsert(
    table: str,
    *,
    key: str | Sequence[str] = RECORD_KEY,
    envelope: Envelope = "none",
    name: str = "",
    stream: str | None = None,
) -> Callable[[DataFrame, int], None]:
    """A function for `foreachBatch` that merges a micro-batch of changes into a table, in one commit.

    `table` is `delta:URI` or `iceberg:CATALOG.NAMESPACE.TABLE`; it is created if it does not exist, and gets columns
    that are new. Frames have the connector's columns key, value, topic, partition, offset and timestamp, the value as
    a struct (option valueFormat, or `from_json`) or bytes; a null value deletes its row. `key` are the fields of the
    row that are its key, "key" is the record's key. `envelope="debezium"`: values are Debezium's envelopes.

    A micro-batch that Spark runs again changes nothing. A query with two of these functions into one table gives them
    a `name` each. `stream` stands for the query, by default by its id, which the checkpoint has; Spark Connect needs
    one. The function raises `ConfigError`, `LoadError` and `MissingPackage`.
    """
    if not isinstance(key, str) and not key:
        raise ConfigError("the upsert key is empty: name fields, or leave it out for the record's key")
    fields = () if key == RECORD_KEY else (key,) if isinstance(key, str) else tuple(key)
    open_table(table)
    return _Upsert(table, tuple(field.removeprefix("value.") for field in fields), envelope, name, stream)


@dataclass(frozen=True, eq=False)
class _Upsert:
    address: str
    fields: tuple[str, ...]
    envelope: Envelope
    name: str
    stream: str | None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        require("An upsert", "pyarrow", "pyspark")
        table = open_table(self.address)
        stream = self.stream or self._query_id(frame, batch_id)
        wanted, change_format = self._format(frame)
        folder = f"{_FOLDER}/{uuid4().hex}"
        work = partial(_write_changes, wanted, change_format, table.location, folder)
        try:
            rows = frame.select(*wanted.names).mapInArrow(work, _WRITTEN).collect()
            ends: dict[str, int] = {}
            for row in rows:
                ends[row.partition] = max(row.end, ends.get(row.partition, 0))
            batch = f"{stream} {self.name}".rstrip(), {_BATCH: batch_id, **ends}
            if rows and not _has(table.last_run(STREAMS), *batch):
                table.prepare(change_format.row, "none", "", STREAMS)
                paths = sorted({row.path for row in rows})
                self._commit(table, change_files(table.location, paths, change_format.key), *batch)
        finally:
            open_folder(table.location, LoadError).remove(folder)

    def _format(self, frame: DataFrame) -> tuple[pa.Schema, ChangeFormat]:
        """The columns of a frame that are read, and what its records say."""
        from spark_klog.spark.versions import arrow_schema

        schema = arrow_schema(frame.schema)
        if missing := [name for name in _COLUMNS if name not in schema.names]:
            raise ConfigError(
                f"the frame has no column {missing[0]}: an upsert needs {', '.join(_COLUMNS)}, as the source has them. "
                "Change rows by a struct as the column value"
            )
        wanted = pa.schema([pa.field(name, schema.field(name).type) for name in _COLUMNS])
        return wanted, ChangeFormat(wanted.field("key").type, wanted.field("value").type, self.fields, self.envelope)

    def _commit(self, table: Table, files: ChangeFiles, query: str, batch: Mapping[str, int]) -> None:
        token, end = uuid4().hex, time.monotonic() + _RETRY_S
        while True:
            last = table.last_run(STREAMS)
            if _has(last, query, batch):  # the query runs twice
                return
            offsets = {**(last.offsets if last else {}), query: batch}
            try:
                table.upsert(files, Run(STREAMS, last.number + 1 if last else 1, token, offsets))
            except RunConflict:  # of another query
                if time.monotonic() > end:
                    raise
            else:
                return

    def _query_id(self, frame: DataFrame, batch_id: int) -> str:
        try:
            context: Any = frame.sparkSession.sparkContext
            query, run = (context.getLocalProperty(name) for name in (_QUERY_ID, _RUN_ID))
        except Exception:  # Spark Connect has none, and says so by errors of its own
            query = run = None
        if not query:
            raise ConfigError(
                "the frame's query is not known: give the function to foreachBatch of a streaming query, or a stream="
                " that stands for it (Spark Connect)"
            )
        with _merging:
            place = str(run), self.address, self.name
            known, last = _merged.get(place, (self, -1))
            if known is not self and last == batch_id:
                raise ConfigError(
                    f"the query has two upserts into {self.address}: give each a name=, or the second one would seem "
                    "to be the first one run again"
                )
            _merged[place] = self, batch_id
        return str(query)


def _has(last: Run | None, query: str, batch: Mapping[str, int]) -> bool:
    return last is not None and last.offsets.get(query) == batch


def _write_changes(
    wanted: pa.Schema, change_format: ChangeFormat, location: str, folder: str, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The work of a task: its changes become files; its rows have a file's path, a partition, and where that ends."""
    store = open_folder(location, LoadError)
    paths: list[str] = []
    ends: dict[str, int] = {}

    def put(source: Path, _changes: int) -> None:
        paths.append(f"{folder}/{source.name}.parquet")
        store.put(source, paths[-1])

    with store.scratch(folder) as scratch:
        writer = ChangeWriter(change_format.key, scratch, put)
        for batch in batches:
            for records in pa.Table.from_batches([batch]).cast(wanted).to_batches():
                writer.add(change_format.changes(records))
                of_batch = pa.table([records[name] for name in _PLACE], names=_PLACE)
                for each in of_batch.group_by(_PLACE[:2]).aggregate([("offset", "max")]).to_pylist():
                    name = f"{each['topic']}-{each['partition']}"
                    ends[name] = max(each["offset_max"] + 1, ends.get(name, 0))
        writer.finish()
        store.settle()
    found = list(product(paths, ends.items()))
    columns = [path for path, _ in found], [name for _, (name, _) in found], [end for _, (_, end) in found]
    kinds = pa.string(), pa.string(), pa.int64()
    arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
    yield pa.RecordBatch.from_arrays(arrays, names=["path", "partition", "end"])
