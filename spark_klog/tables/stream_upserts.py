"""Changes of a streaming query, merged into a table by its function of `foreachBatch`, each micro-batch once.

Executors write the changes into files in LOCATION/_klog/changes, the last one of each key that a task has; the driver
merges them in one commit. All queries share a row of commits, `STREAMS`, each of which names the last micro-batch of
every query and where it begins and ends: one that Spark runs again is found there. If Spark plans one of this number
anew, as its checkpoint was restored from a backup, the offsets are others, and it is merged.

A stream does not see that a topic was created again, with offsets from 0. So changes whose partition is met for the
first time, that go back, or that begin before the last offset that the table has of the partition, are compared with
its rows: `_compared`.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pyarrow as pa

from spark_klog.base.cache import Newest
from spark_klog.base.extras import require
from spark_klog.base.settings import any_of
from spark_klog.errors import ConfigError, LoadError
from spark_klog.files import open_folder
from spark_klog.tables.change_files import ChangeFiles, ChangeWriter, change_files
from spark_klog.tables.change_order import (
    INCARNATION,
    LACKING,
    OFFSET,
    PARTITION,
    TIMESTAMP,
    matching,
    newer,
    numbers,
    place_of,
)
from spark_klog.tables.changes import RECORD_KEY, UNAVAILABLES, ChangeFormat, Envelope, Unavailable, no_value
from spark_klog.tables.deleted_keys import forget, remember, with_memory
from spark_klog.tables.opening import open_table
from spark_klog.tables.table import STREAMS, Run, RunConflict, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger(__name__)
_FOLDER = "_klog/changes"
#: Of a query in the commits: the number of its last micro-batch, the run that has it, and after a partition its start.
_BATCH, _RUN, _START = "batch", "run", ":start"
_WRITTEN = "path string, partition string, start bigint, end bigint"
_PLACE = ["topic", "partition", "offset"]
_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp")
#: How long a commit is tried again that other queries come before, in seconds.
_RETRY_S = 300.0
#: The local properties in which Spark has the id of a query, and of its run since it was started.
_QUERY_ID, _RUN_ID = "sql.streaming.queryId", "spark.jobGroup.id"
#: Queries of which the commits keep the last micro-batch, and those that this process keeps something of.
_MOST_QUERIES = 100
#: How many changes of a micro-batch are compared with the table's rows.
_MOST_COMPARED = 100_000
_merging = threading.Lock()
#: By run of a query, table and name: the function that was called last, and its micro-batch.
_merged: Newest[tuple[str, str, str], tuple[_Upsert, int]] = Newest(_MOST_QUERIES)
#: By table, query and incarnation: of partitions that this process has compared, the end of what it has merged or the
#: one of the table's rows, whichever is larger. Changes that begin there are later than all rows.
_merged_ends: Newest[tuple[str, str, int], dict[str, int]] = Newest(_MOST_QUERIES)


def upsert(
    table: str,
    *,
    key: str | Sequence[str] = RECORD_KEY,
    envelope: Envelope = "none",
    name: str = "",
    stream: str | None = None,
    incarnation: int | None = None,
    order_by: str | Sequence[str] = (),
    unavailable: Unavailable = "keep",
    keep_deletes: float | None = None,
) -> Callable[[DataFrame, int], None]:
    """A function for `foreachBatch` that merges a micro-batch of changes into a table, in one commit.

    `table` is `delta:URI` or `iceberg:CATALOG.NAMESPACE.TABLE`; it is created if it does not exist, and gets columns
    that are new. Frames have the connector's columns key, value, topic, partition, offset and timestamp, the value as
    a struct (option valueFormat, or `from_json`) or bytes; a null value deletes its row. `key` are the fields of the
    row that are its key, "key" is the record's key. `envelope="debezium"`: values are Debezium's envelopes.

    A micro-batch that Spark runs again changes nothing. A query with two of these functions into one table gives them
    a `name` each. `stream` stands for the query, by default by its id, which the checkpoint has; Spark Connect needs
    one. `order_by` are fields of the value or the envelope, such as "source.lsn", by which changes are ordered instead
    of by their offsets. `unavailable="keep"`: a row keeps its own value where Debezium does not have it; with
    "dead-letter" such a record is a `LoadError`. Deleted keys are remembered for `keep_deletes` seconds, so that older
    changes that come later do not bring their rows back.

    `incarnation` is how often the topic was created again: changes of a larger one are later than all of a smaller one.
    None is 0, and `LoadError` if most changes that are older than the table's rows by their offsets are later by
    their timestamps; if it is given, this is a warning. `LoadError` also if the table has rows of a larger one. The
    function raises `ConfigError`, `LoadError` and `MissingPackage`.
    """
    fields = tuple(key) if isinstance(key, Collection) and not isinstance(key, str) else (key,)
    if not fields:
        raise ConfigError("the upsert key is empty: name fields, or leave it out for the record's key")
    if wrong := [field for field in fields if not isinstance(field, str)]:
        raise ConfigError(f"upsert key {wrong[0]!r} must be a string, the name of a field")
    if incarnation is not None and not (type(incarnation) is int and 0 <= incarnation < 1 << 31):
        raise ConfigError(
            f"incarnation {incarnation!r} must be an int of 0 or more: how often the topic was created again"
        )
    order = (order_by,) if isinstance(order_by, str) else tuple(order_by)
    if not all(isinstance(name, str) and name for name in order):
        raise ConfigError(f"order_by {order_by!r} must be the name of a field, or a list of names")
    if unavailable not in UNAVAILABLES:
        raise ConfigError(f"unavailable {unavailable!r} must be {any_of(UNAVAILABLES)}")
    if keep_deletes is not None and not (isinstance(keep_deletes, int | float) and keep_deletes > 0):
        raise ConfigError(f"keep_deletes {keep_deletes!r} must be a number of seconds above 0, such as 7 * 86400")
    open_table(table)
    names = () if key == RECORD_KEY else tuple(field.removeprefix("value.") for field in fields)
    return _Upsert(table, names, envelope, name, stream, incarnation, order, unavailable, keep_deletes)


@dataclass(frozen=True, eq=False)
class _Upsert:
    address: str
    fields: tuple[str, ...]
    envelope: Envelope
    name: str
    stream: str | None
    incarnation: int | None
    order: tuple[str, ...]
    unavailable: Unavailable
    keep_deletes: float | None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        require("An upsert", "pyarrow", "pyspark")
        table = open_table(self.address)
        table.check("merge")
        query = f"{self.stream or self._query_id(frame, batch_id)} {self.name}".rstrip()
        wanted, change_format = self._format(frame)
        store = open_folder(table.location, LoadError)
        mine = hashlib.sha256(query.encode()).hexdigest()[:16]
        place = self.address, query, self.incarnation or 0
        with _merging:
            ends_before = _merged_ends.get(place)
        if ends_before is None:  # a driver that was killed may have left some
            for name in store.names(_FOLDER):
                if name.startswith(f"{mine}-"):
                    store.remove(f"{_FOLDER}/{name}")
        folder = f"{_FOLDER}/{mine}-{uuid4().hex}"
        work = partial(_write_changes, wanted, change_format, self.incarnation or 0, table.location, folder)
        try:
            rows = frame.select(*wanted.names).mapInArrow(work, _WRITTEN).collect()
            starts: dict[str, int] = {}
            ends: dict[str, int] = {}
            for row in rows:
                starts[row.partition] = min(row.start, starts.get(row.partition, row.start))
                ends[row.partition] = max(row.end, ends.get(row.partition, 0))
            batch = {_BATCH: batch_id, **ends, **{f"{name}{_START}": start for name, start in starts.items()}}
            known = ends_before or {}
            if rows and not _has(table.last_run(STREAMS), query, batch):
                files = change_files(table.location, sorted({row.path for row in rows}), change_format.key)
                of_rows: dict[int, int] = {}
                # first: changes are compared by its types
                table.prepare(change_format.row, "none", "", STREAMS, key=change_format.key)
                if any(known.get(name, start + 1) > start for name, start in starts.items()):
                    of_rows = self._check_incarnation(table, files)
                self._commit(table, files, query, batch)
                merged = {name: max(end, of_rows.get(int(name.rpartition("-")[2]), 0)) for name, end in ends.items()}
                known = {**known, **merged}
            with _merging:
                _merged_ends[place] = known
        finally:
            store.remove(folder)

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
        kinds = wanted.field("key").type, wanted.field("value").type
        return wanted, ChangeFormat(*kinds, self.fields, self.envelope, self.order, self.unavailable)

    def _check_incarnation(self, table: Table, files: ChangeFiles) -> dict[int, int]:
        """By partition the end of the rows' offsets; `LoadError` if the topic seems to have been created again."""
        mine = self.incarnation or 0
        of_rows, later = _compared(table, files)
        if (newest := max((incarnation for incarnation, _ in of_rows), default=0)) > mine:
            raise LoadError(
                f"{table.address} has rows of incarnation {newest}, which are later than all changes of incarnation "
                f"{mine}: the topic was created again. Give upsert(incarnation={newest}), or a larger one if it was "
                "created again since; nothing of the micro-batch is in the table"
            )
        if later:
            text = (
                f"{table.address} has rows of later offsets and earlier timestamps than {later} of the changes, which "
                "it ignores as older ones: the topic seems to have been created again. Give "
                f"upsert(incarnation={mine + 1})"
            )
            if self.incarnation is None:
                raise LoadError(
                    f"{text}, or incarnation=0 if it is the same, and its timestamps are in no order: nothing of the "
                    "micro-batch is in the table"
                )
            _log.warning("%s", text)
        return {partition: end for (incarnation, partition), end in of_rows.items() if incarnation == mine}

    def _check_values(self, table: Table, files: ChangeFiles) -> None:
        """`LoadError` if a change lacks values that no row has."""
        columns = table.schema()
        assert columns is not None
        for lost in files.without_row(columns, table.rows):
            raise LoadError(
                f"the record of partition {lost[PARTITION]}, offset {lost[OFFSET]}, "
                f"{no_value(lost[LACKING]['columns'][0])}. Nothing of the micro-batch is in the table"
            )

    def _commit(self, table: Table, files: ChangeFiles, query: str, batch: Mapping[str, int]) -> None:
        token, end = uuid4().hex, time.monotonic() + _RETRY_S
        store = open_folder(table.location, LoadError)
        while True:
            last = table.last_run(STREAMS)
            if _has(last, query, batch):  # the query runs twice
                return
            number = last.number + 1 if last else 1
            others = sorted((last.offsets if last else {}).items(), key=lambda run: run[1].get(_RUN, 0))
            offsets = {**dict(others[1 - _MOST_QUERIES :]), query: {**batch, _RUN: number}}
            run = Run(STREAMS, number, token, offsets)
            known = files if self.keep_deletes is None else with_memory(files, store, last)
            self._check_values(table, known)
            # what another query remembers is kept for it
            remember(None if self.keep_deletes is None else known, store, last, run, self.keep_deletes or 0.0)
            try:
                table.upsert(known, run)
            except RunConflict:  # of another query
                if time.monotonic() > end:
                    raise
            else:
                forget(store, number)
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
    known = {} if last is None else last.offsets.get(query, {})
    return {name: value for name, value in known.items() if name != _RUN} == batch


def _compared(table: Table, files: ChangeFiles) -> tuple[dict[tuple[int, int], int], int]:
    """By incarnation and partition the end of the rows' offsets, and how many changes say that the topic is another.

    These are older than their rows by the log and later by the clock, and count if they are most of the older ones. A
    range that is read again has the rows' own timestamps, or earlier ones, but for the clocks of producers.
    """
    has = table.schema()
    names = [*files.key, *place_of(files.schema)]
    if has is None or not set(names) <= set(has.names):
        return {}, 0
    wanted = pa.schema([pa.field(name, has.field(name).type) for name in names])
    changes = next(files.slices(), files.schema.empty_table()).select(names).cast(wanted)
    changes = changes.take(pa.array(np.arange(0, len(changes), -(-len(changes) // _MOST_COMPARED))))
    ends: dict[tuple[int, int], int] = {}
    older = later = 0
    for batch in table.rows(names):
        rows = pa.Table.from_batches([batch]).cast(wanted)
        rows = rows.filter(rows[OFFSET].is_valid())
        for last in rows.group_by([INCARNATION, PARTITION]).aggregate([(OFFSET, "max")]).to_pylist():
            place = last[INCARNATION] or 0, last[PARTITION]
            ends[place] = max(ends.get(place, 0), last[f"{OFFSET}_max"] + 1)
        in_rows, in_changes = matching(rows, changes, files.key)
        of_changes, of_rows = changes.take(pa.array(in_changes)), rows.take(pa.array(in_rows))
        at, at_of_row = (numbers(each[OFFSET]) for each in (of_changes, of_rows))
        time, time_of_row = (numbers(each[TIMESTAMP]) for each in (of_changes, of_rows))
        is_one = numbers(of_changes[PARTITION]) == numbers(of_rows[PARTITION])
        is_older = is_one & ((at != at_of_row) | (time != time_of_row)) & ~newer(of_changes, of_rows)
        older += int(is_older.sum())
        later += int((is_older & ((time > time_of_row) | (at == at_of_row))).sum())
    return ends, later if later * 2 > older else 0


def _write_changes(
    wanted: pa.Schema,
    change_format: ChangeFormat,
    incarnation: int,
    location: str,
    folder: str,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """The work of a task: its changes become files; its rows have a file's path, a partition, its start and end."""
    store = open_folder(location, LoadError)
    paths: list[str] = []
    ranges: dict[str, tuple[int, int]] = {}

    def put(source: Path, _changes: int) -> None:
        paths.append(f"{folder}/{source.name}.parquet")
        store.put(source, paths[-1])

    with store.scratch(folder) as scratch:
        writer = ChangeWriter(change_format.key, scratch, put)
        for batch in batches:
            for records in pa.Table.from_batches([batch]).cast(wanted).to_batches():
                writer.add(change_format.changes(records, incarnation))
                of_batch = pa.table([records[name] for name in _PLACE], names=_PLACE)
                for each in of_batch.group_by(_PLACE[:2]).aggregate([("offset", "min_max")]).to_pylist():
                    name = f"{each['topic']}-{each['partition']}"
                    first, last = each["offset_min_max"]["min"], each["offset_min_max"]["max"]
                    start, end = ranges.get(name, (first, 0))
                    ranges[name] = min(first, start), max(last + 1, end)
        writer.finish()
        store.settle()
    places = [(path, name, *each) for path, (name, each) in product(paths, ranges.items())]
    kinds = pa.string(), pa.string(), pa.int64(), pa.int64()
    arrays = [pa.array([row[place] for row in places], kind) for place, kind in enumerate(kinds)]
    yield pa.RecordBatch.from_arrays(arrays, names=["path", "partition", "start", "end"])
