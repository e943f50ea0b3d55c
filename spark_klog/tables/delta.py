"""A Delta table, by the package deltalake.

A run is one commit of the table's log: an add action for each file, with statistics from its footer; an app transaction
(`txn`) with the load's id and the run's number, which makes a second commit of the run fail; and `klog` in the commit's
info, with the run's token and its offsets. See Delta's PROTOCOL.md.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import date, timedelta
from functools import cached_property, partial
from itertools import islice
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, QueryBuilder, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.schema import VariantType
from deltalake.transaction import AddAction, RemoveAction
from numpy.typing import NDArray

from spark_klog.base.addresses import local_path, without_user
from spark_klog.base.clock import doubled
from spark_klog.base.memory import MemoryRoom, memory_bytes
from spark_klog.errors import ConfigError, LoadError
from spark_klog.files import open_folder
from spark_klog.files.arrow import ArrowFolder
from spark_klog.files.folder import LocalFolder, reason
from spark_klog.files.keys import KeyedUri
from spark_klog.schemas.json_schema.columns import VARIANT
from spark_klog.tables.change_files import ChangeFiles
from spark_klog.tables.change_order import INCARNATION, names_of_record
from spark_klog.tables.columns import differences, holds
from spark_klog.tables.delta_expiry import expired, shorten
from spark_klog.tables.delta_features import check_features
from spark_klog.tables.delta_merge import merge, quoted, within
from spark_klog.tables.delta_statistics import statistics_json
from spark_klog.tables.delta_stores import keyed_options, storage_options
from spark_klog.tables.partitions import (
    BY_TIME,
    column_at,
    distinct,
    no_column,
    parse_terms,
    partition_row,
    partition_text,
)
from spark_klog.tables.table import (
    COMMIT_ENTRY,
    LOAD_PROPERTY,
    RUN_VERSION,
    DataFile,
    Run,
    Stage,
    TableFile,
    Use,
    is_committed,
    key_mismatch,
    key_property,
    layout_advice,
    own_columns,
    own_columns_property,
)
from spark_klog.tables.unity import SCHEME, unity_location
from spark_klog.tables.upkeep import Expired, Kept, files_below

PREFIX = "delta:"
#: Partition columns of layouts by time.
_BY_TIME = {
    "none": pa.schema([]),
    "day": pa.schema([("date", pa.date32())]),
    "hour": pa.schema([("date", pa.date32()), ("hour", pa.int32())]),
}
#: Types that no partition column has.
_NO_PARTITIONS = pa.types.is_binary, pa.types.is_floating, pa.types.is_decimal
#: Commits that are looked through for a run before all of them are.
_RECENT = 20
#: How long a commit is tried again that others come before, and the pause before the next try, in seconds. A merge may
#: take longer than that, so it is tried some times however long that takes.
_RETRY_S, _PAUSE_S = 60.0, 0.05
_LEAST_ATTEMPTS = 5
#: Batches of deltalake's that are joined to one: they have 8192 rows each.
_PARTS = 8
#: A RESTORE goes by the times of files, which may differ by so much from those of commits.
_CLOCK_MS = 1000
_RESTORE = "RESTORE"
#: Operations that make the table anew, in the same log.
_REPLACES = re.compile(r"CREATE |(.* )?REPLACE TABLE|CLONE$")
_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}
#: Columns that deltalake's merge adds to those of both sides.
_OF_MERGE = {f"__delta_rs_{name}" for name in ("source", "target", "operation", "delete")}
#: deltalake's merge has the changes of a run in memory, and takes four times as much: those of all merges at once may
#: be such a part of it.
_SHARE = 8
_room = MemoryRoom(memory_bytes() // _SHARE)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m|\s*↳\s*")
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class DeltaLakeTable:
    """The Delta table in the folder at `uri`, a path or a URI of pyarrow's, or of that name in Unity Catalog.

    `Table` says what its methods do.
    """

    renames: ClassVar[bool] = False
    no_variant: ClassVar[str] = ""
    partition_zone: ClassVar[str | None] = None

    def __init__(self, uri: str) -> None:
        if not uri:
            raise ConfigError("the table's location is empty: give delta:FOLDER or delta:URI")
        is_named = uri.startswith(SCHEME)
        location = unity_location(f"{PREFIX}{uri}") if is_named else uri
        local = local_path(location)
        self.location = os.path.abspath(local) if local is not None else location
        self.address = f"{PREFIX}{uri if is_named else without_user(self.location)}"
        self.journal_name = self.address if is_named else PREFIX.rstrip(":")
        #: The table as it was last read: what is new is read at the next time.
        self._known: DeltaTable | None = None
        #: The columns that the next commit adds if they are missing.
        self._added: pa.Schema | None = None
        self._url, self._options = (self.location, {}) if local is not None else storage_options(location)

    def _renew(self, *, anew: bool = False) -> None:
        """Have the table opened with other keys, if those of its store were renewed."""
        if isinstance(self.location, KeyedUri):
            options = keyed_options(self.location.filesystem(anew=anew))
            if options != self._options:
                self._options, self._known = options, None

    # ----- reading

    def schema(self) -> pa.Schema | None:
        table = self._open()
        return None if table is None else pa.schema(table.schema().to_arrow())

    def check(self, use: Use) -> None:
        if (table := self._open()) is not None:
            check_features(self.address, table, use)

    def load_id(self) -> str | None:
        table = self._open()
        return None if table is None else table.metadata().configuration.get(LOAD_PROPERTY)

    def last_run(self, load: str) -> Run | None:
        table = self._open()
        return None if table is None else self._trying("read", lambda: self._last_run(table, load))

    def files(self) -> Iterator[TableFile]:
        table = self._open()
        if table is None:
            return
        actions = self._trying("read", lambda: pa.table(table.get_add_actions(flatten=True)).to_pylist())
        names = names_of_record([one.name for one in table.schema().fields])[:3]
        for action in actions:
            offsets = {}
            topics, numbers, places = ((action.get(f"min.{name}"), action.get(f"max.{name}")) for name in names)
            if None not in (*topics, *numbers, *places) and topics[0] == topics[1] and numbers[0] == numbers[1]:
                offsets[str(topics[0]), int(numbers[0])] = int(places[0]), int(places[1])
            yield TableFile(unquote(action["path"]), action["size_bytes"], action["num_records"] or 0, offsets)

    def deleted_rows(self) -> dict[str, NDArray[np.int64]]:
        table = self._open()
        if table is None:
            return {}
        vectors = self._trying("read", lambda: pa.table(table.deletion_vectors()).to_pylist())
        base = table.table_uri.rstrip("/") + "/"
        return {
            unquote(one["filepath"].removeprefix(base)): np.flatnonzero(~np.array(one["selection_vector"], bool))
            for one in vectors
        }

    def rows(self, columns: Sequence[str], keys: pa.Table | None = None) -> Iterator[pa.RecordBatch]:
        table = self._open()
        if table is not None:
            yield from self._rows(table, columns, keys)

    def _rows(
        self, table: DeltaTable, columns: Sequence[str], keys: pa.Table | None = None
    ) -> Iterator[pa.RecordBatch]:
        where = "" if keys is None else within(keys)
        # deltalake's dataset refuses a table that may have deletion vectors
        query = f"SELECT {', '.join(map(quoted, columns))} FROM t{where and f' WHERE {where}'}"
        batches = self._trying("read", lambda: iter(QueryBuilder().register("t", table).execute(query)))
        while part := self._trying("read", lambda: list(islice(batches, _PARTS))):
            yield from pa.Table.from_batches(map(pa.record_batch, part)).combine_chunks().to_batches()

    # ----- writing

    def prepare(
        self,
        columns: pa.Schema,
        layout: str,
        time_column: str,
        load: str,
        at: Stage = "commit",
        key: Sequence[str] = (),
    ) -> pa.Schema:
        self._check_case(columns.names)
        if internal := [name for name in columns.names if key and name in _OF_MERGE]:
            raise LoadError(f"{self.address}: deltalake merges by a column {internal[0]} of its own: rename the field")
        columns = pa.schema([pa.field(one.name, self._type(one.type, one.name)) for one in columns])
        fields = self._partitions(layout, columns)
        partitions = fields.names

        def attempt() -> pa.Schema:
            table = self._open() or self._create(columns, fields, load)
            check_features(self.address, table, "merge" if key else "append")
            mine, missing, wrong = _compared(table, columns)
            if (wrong or table.metadata().partition_columns != partitions) and self._is_unused(table, load):
                table = self._create(columns, fields, load, "overwrite")
                mine, missing, wrong = _compared(table, columns)
            owner = {} if LOAD_PROPERTY in table.metadata().configuration else {LOAD_PROPERTY: load}
            self._check(table, fields, load, is_any=bool(key) and not (owner and partitions))
            if key:
                self._check_key(table, key)
            if wrong:
                raise self._differs(wrong)
            if key and missing and pa.table(table.get_add_actions()).num_rows:
                self._check_maps(mine, missing)
            if at == "commit":
                self._with_columns(table, columns, key, owner)
            elif owner:
                table.alter.set_table_properties(owner, raise_if_not_exists=False)
            types = {
                column.name: VARIANT.storage_type if column.type == VARIANT else column.type
                for column in [*mine, *missing]
                if column.name in columns.names or column.name not in partitions
            }
            return pa.schema(types)

        made = self._again("changed", attempt)
        self._added = columns if at == "tasks" else None
        return made

    def _with_columns(
        self,
        table: DeltaTable,
        columns: pa.Schema | None,
        key: Sequence[str] = (),
        properties: Mapping[str, str] = MappingProxyType({}),
    ) -> DeltaTable:
        """The table with the columns of a run, with its key and properties."""
        if columns is None:
            return table
        mine, missing, wrong = _compared(table, columns)
        if wrong:
            raise self._differs(wrong)
        new = [one.name for one in missing if one.name not in mine.names]
        if missing:
            table.alter.add_columns([_field(pa.field(one.name, one.type)) for one in missing])
            table = self._existing()
            if missing := _compared(table, columns)[1]:
                names = ", ".join(one.name for one in missing)
                raise LoadError(f"{self.address}: deltalake can't add to the table what is new in {names}")
        has = table.metadata().configuration
        key_ids = key_property(self.address, has, key, {one.name: one.name for one in table.schema().fields})
        # last: what failed before it may be tried again
        return self._with_properties(table, {**properties, **_own_property(self.address, has, columns, new), **key_ids})

    def _with_properties(self, table: DeltaTable, properties: dict[str, str]) -> DeltaTable:
        if not properties:
            return table
        table.alter.set_table_properties(properties, raise_if_not_exists=False)
        return self._existing()

    def _differs(self, wrong: Sequence[str]) -> LoadError:
        return LoadError(
            f"{self.address} has other columns than the load: {'; '.join(wrong)}: use another table, or change this one"
        )

    def _check_maps(self, mine: pa.Schema, missing: Sequence[pa.Field]) -> None:
        """`LoadError` if the values of a map have got a field: deltalake can't rewrite the rows that lack it."""
        for one in missing:
            if one.name in mine.names and (path := _grown_map(mine.field(one.name).type, one.type, one.name)):
                raise LoadError(
                    f"{self.address}: the values of the map {path} have new fields, which deltalake can't add to rows "
                    "that it merges: use another table, or a schema without these fields"
                )

    def _is_unused(self, table: DeltaTable, load: str) -> bool:
        """Whether the load has made the table, and nobody has committed anything to it since."""
        is_ours = table.metadata().configuration.get(LOAD_PROPERTY) == load
        return is_ours and all(_REPLACES.match(str(one.get("operation"))) for one in table.history())

    def append(self, files: Sequence[DataFile], run: Run) -> None:
        def attempt() -> None:
            self._known = None  # a table that was dropped since has no log for a commit to follow
            table = self._existing()
            if self._has(table, run):
                return
            check_features(self.address, table, "append")
            table = self._with_columns(table, self._added)
            metadata = table.metadata()
            names = metadata.partition_columns
            variants = _variants(table)
            now = time.time_ns() // 1_000_000
            actions: list[AddAction | RemoveAction] = []
            for item in files:
                statistics = statistics_json(item.metadata, metadata.configuration, variants)
                actions.append(AddAction(item.path, item.size, self._partition(item, names), now, True, statistics))
            table.create_write_transaction(actions, "append", table.schema(), names, commit_properties=_committing(run))

        self._again("written", attempt)

    def _partition(self, file: DataFile, names: Sequence[str]) -> dict[str, str | None]:
        """The partition's values, as the log has them; `LoadError` if the table has got others than the file."""
        row = partition_row(file.metadata)
        if row is not None:
            columns = [(name, column_at(row, name)) for name in row.column_names]
            values = {name: partition_text(distinct(column)[0][0], column.type) for name, column in columns}
            if list(values) != names:
                raise LoadError(
                    f"{self.address} is partitioned by {', '.join(names) or 'nothing'} now, and the run's files by "
                    f"{', '.join(values)}: {layout_advice('as these')}"
                )
            return values
        if file.hour is None or not names:
            return {}
        day, of_day = divmod(file.hour, 24)
        text = (date(1970, 1, 1) + timedelta(days=day)).isoformat()
        return {"date": text, "hour": str(of_day)} if "hour" in names else {"date": text}

    def upsert(self, changes: ChangeFiles | None, run: Run) -> None:
        def attempt() -> None:
            self._renew(anew=True)  # deltalake merges with those that it begins with
            table = self._existing()
            last = self._last_run(table, run.load)
            own = set(last.columns) if last else set()
            if not is_committed(self.address, last, run):
                check_features(self.address, table, "append" if changes is None else "merge")
                if changes is not None:
                    self._check_key(table, changes.key)
                table = self._with_columns(table, self._added, () if changes is None else changes.key)
                own |= own_columns(self.address, table.metadata().configuration)
                names = [] if changes is None else changes.row.names
                committing = partial(_committing, replace(run, columns=names))
                if changes is not None:
                    figures = merge(table, changes, own, committing, partial(self._rows, table))
                    _log.info("%s, run %d: %s", self.address, run.number, figures)
                if table.transaction_version(run.load) != run.number:  # no row has changed, so nothing was committed
                    partitions = table.metadata().partition_columns
                    table.create_write_transaction(
                        [], "append", table.schema(), partitions, commit_properties=committing()
                    )
                own.update(names)
            table = self._existing()
            # the commit has them, too, if this one fails
            self._with_properties(table, own_columns_property(self.address, table.metadata().configuration, own))

        size = None if changes is None else self._trying("merged into", lambda: changes.size)
        # before the table is read: others commit, and keys end, while it waits
        with nullcontext() if size is None else _room.of(size):
            self._again("merged into", attempt)

    def _last_run(self, table: DeltaTable, load: str) -> Run | None:
        """The last run of the load, without its token and offsets if the log has no longer the commit.

        The app transaction may have gone by `delta.setTransactionRetentionDuration`: then the newest commit counts.

        `LoadError` if its rows are gone, or if nobody knows: the app transaction stays when a table is restored to a
        version before the run, or replaced.
        """
        known = table.transaction_version(load)
        for limit in (_RECENT, None):
            commits = table.history(limit)
            for index, commit in enumerate(commits):
                entry = commit.get(COMMIT_ENTRY)
                if not isinstance(entry, dict) or entry.get("load") != load:
                    continue
                if known in ((number := entry.get("number")), None):
                    if (by := _taken_away(commits[index::-1])) is not None:
                        version = commit["version"]
                        how = f"replaced by version {by['version']} ({by['operation']}), after version {version}"
                        if by["operation"] == _RESTORE:
                            how = f"restored to a version before {version}"
                        raise LoadError(
                            f"{self.address} was {how}, which has run {number} of load {load}: what the load has "
                            f"written since is gone, and would not come back. Restore version {version} or a later "
                            "one, or use another table"
                        )
                    return Run.of(entry, f"{self.address}: run {number} of load {load} in its history")
            if limit is not None and len(commits) < limit:
                break
        if known is None:
            return None
        run = f"run {known} of load {load}, whose commit its log has no longer"
        if (by := _taken_away(commits[::-1])) is not None:
            how = "restored to another version" if by["operation"] == _RESTORE else "replaced"
            raise LoadError(
                f"{self.address} was {how} by version {by['version']} ({by['operation']}), after {run}: nobody knows "
                "whether its rows are there. Restore a version from before that, if the log has one, or use another "
                "table"
            )
        if LOAD_PROPERTY not in table.metadata().configuration:
            raise LoadError(
                f"{self.address} has the app transaction of {run}, and not the property {LOAD_PROPERTY}: it was "
                f"replaced, or restored to a version from before the load. Set {LOAD_PROPERTY} to {load} again if the "
                "run's rows are there, or use another table"
            )
        return Run(load, known, "", {})

    def _has(self, table: DeltaTable, run: Run) -> bool:
        return is_committed(self.address, self._last_run(table, run.load), run)

    def compact(self, target_bytes: int) -> int:
        def attempt() -> int:
            self._known = None
            table = self._existing()
            check_features(self.address, table, "compact")
            return int(table.optimize.compact(target_size=target_bytes)["numFilesRemoved"])

        return self._again("compacted", attempt)

    def expire(self, kept: Kept, is_needed: Callable[[str], bool], *, is_dry: bool) -> Expired:
        """As of `Table.expire`. `LoadError` if the log does not know removed files for so long."""

        def attempt() -> Expired:
            files = files_below(self._folder)  # first: what is committed since is in the table
            table = self._existing()
            made = expired(table, self._folder, self.address, kept, files, is_needed)
            if kept.seconds is None:
                return made
            return replace(made, properties=shorten(table, self.address, kept.seconds, is_dry=is_dry))

        return self._again("expired", attempt)

    def remove(self, path: str) -> None:
        self._folder.remove(path)

    @cached_property
    def _folder(self) -> LocalFolder | ArrowFolder:
        return open_folder(self.location, LoadError)

    # ----- the table's log

    def _open(self) -> DeltaTable | None:
        def opened() -> DeltaTable | None:
            self._renew()
            if self._known is not None:
                try:
                    self._known.update_incremental()
                    return self._known
                except DeltaError:  # the log has no longer what came next
                    self._known = None
            if isinstance(self._folder, LocalFolder) and self._folder.size("_delta_log") is None:
                return None  # deltalake takes 30 times as long to tell
            try:
                self._known = DeltaTable(self._url, storage_options=self._options)
            except TableNotFoundError:
                return None
            return self._known

        return self._trying("read", opened)

    def _existing(self) -> DeltaTable:
        table = self._open()
        if table is None:
            raise LoadError(f"{self.address} is no longer there: restore it, or use another table")
        return table

    def _partitions(self, layout: str, columns: pa.Schema) -> pa.Schema:
        """The partition columns: those of the time, which the columns must not have, or some of the columns."""
        if layout in BY_TIME:
            fields = _BY_TIME[layout]
            if clash := [name for name in columns.names if name.lower() in fields.names]:
                raise LoadError(
                    f"{self.address}: the column {clash[0]} is the table's partition column: leave --partition-by out, "
                    "or load the values as one column (--table-columns records)"
                )
            return fields
        terms = parse_terms(layout)
        for term in terms:
            if term.transform != "identity":
                raise LoadError(
                    f"{self.address} can't be partitioned by {term}, as Delta's tables are by columns alone: name a "
                    "column of the rows that has these values, or load into an Iceberg table"
                )
            if term.column not in columns.names:
                raise LoadError(f"{self.address} {no_column(term.column, columns.names)}")
            kind = columns.field(term.column).type
            if term.column in names_of_record(columns.names):
                raise LoadError(
                    f"{self.address} can't be partitioned by {term.column}, which tells where a row is from: Delta's "
                    "files would not have it. Name another column, or load into an Iceberg table"
                )
            # deltalake reads a decimal -0.01 in a partition as 0.-1
            if pa.types.is_nested(kind) or any(_is(kind) for _is in _NO_PARTITIONS):
                raise LoadError(f"{self.address} can't be partitioned by {term.column}, which is {kind}")
        return pa.schema([columns.field(term.column) for term in terms])

    def _create(
        self, columns: pa.Schema, partitions: pa.Schema, load: str, mode: Literal["error", "overwrite"] = "error"
    ) -> DeltaTable:
        schema = [*columns, *(column for column in partitions if column.name not in columns.names)]
        try:
            self._known = DeltaTable.create(
                self._url,
                Schema([_field(one) for one in schema]),
                mode,
                partition_by=partitions.names,
                configuration={LOAD_PROPERTY: load, **_own_property(self.address, {}, columns, columns.names)},
                storage_options=self._options,
                raise_if_key_not_exists=False,  # a property that deltalake does not know
            )
            return self._known
        except DeltaError:
            table = self._open()
            if table is None:
                raise
            return table  # another run has created it meanwhile

    def _check(self, table: DeltaTable, partitions: pa.Schema, load: str, *, is_any: bool) -> None:
        """`LoadError` if the table belongs to another load or has other partitions, unless it may be `is_any` as a
        merge writes any."""
        metadata = table.metadata()
        owner = metadata.configuration.get(LOAD_PROPERTY, load)
        if owner != load:
            raise LoadError(f"{self.address} belongs to another load ({owner}): use another table")
        wanted = partitions.names
        if metadata.partition_columns != wanted and not is_any:
            texts = [
                f"partitioned by {', '.join(names)}" if names else "not partitioned"
                for names in (metadata.partition_columns, wanted)
            ]
            raise LoadError(f"{self.address} is {texts[0]}; {layout_advice(texts[1])}")
        schema = pa.schema(table.schema().to_arrow())
        types = dict(zip(schema.names, schema.types, strict=True))
        for column in partitions if metadata.partition_columns == wanted else ():
            if not holds(types[column.name], column.type):
                raise LoadError(
                    f"{self.address} has the partition column {column.name} as {types[column.name]}, not {column.type}"
                )

    def _check_key(self, table: DeltaTable, key: Sequence[str]) -> None:
        names = {one.name: one.name for one in table.schema().fields}
        mismatch = key_mismatch(self.address, table.metadata().configuration, key, names)
        if mismatch and pa.table(table.get_add_actions()).num_rows:
            raise LoadError(f"{self.address} {mismatch}")

    def _again(self, action: str, attempt: Callable[[], _T]) -> _T:
        """Try until no other writer comes before it, for a bounded time or number of attempts."""
        end = time.monotonic() + _RETRY_S
        attempts = 0

        def tried() -> _T | CommitFailedError:
            nonlocal attempts
            attempts += 1
            try:
                return attempt()
            except CommitFailedError as error:
                if attempts >= _LEAST_ATTEMPTS and time.monotonic() > end:
                    raise
                return error

        while isinstance(made := self._trying(action, tried), CommitFailedError):
            time.sleep(doubled(_PAUSE_S, 1.0, attempts))
        return made

    def _trying(self, action: str, attempt: Callable[[], _T]) -> _T:
        try:
            return attempt()
        except (DeltaError, OSError, ValueError) as error:
            raise LoadError(f"{self.address} can't be {action}: {_reason(error)}") from None

    def _check_case(self, paths: Sequence[str]) -> None:
        """`LoadError` if two of a level's columns or fields have names that differ by case only."""
        known: dict[str, str] = {}
        for path in paths:
            if (other := known.setdefault(path.lower(), path)) != path:
                raise LoadError(
                    f"{self.address}: a Delta table can't have both {other} and {path}, which differ by case only: "
                    "rename one of them"
                )

    def _type(self, kind: pa.DataType, path: str) -> pa.DataType:
        """The type in the table: Delta has no unsigned numbers, and timestamps of microseconds only."""
        if pa.types.is_struct(kind):
            self._check_case([f"{path}.{one.name}" for one in kind])
            return pa.struct([pa.field(one.name, self._type(one.type, f"{path}.{one.name}")) for one in kind])
        if pa.types.is_map(kind):
            return pa.map_(self._type(kind.key_type, path), self._type(kind.item_type, path))
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return pa.list_(pa.field("element", self._type(kind.value_type, path)))
        if pa.types.is_timestamp(kind):
            return pa.timestamp("us", tz="UTC" if kind.tz else None)
        if pa.types.is_null(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind):
            raise LoadError(f"{self.address}: a Delta table has no type for {path} ({kind})")
        if pa.types.is_fixed_size_binary(kind):
            return pa.binary()
        return _WIDER.get(kind, kind)


def _compared(table: DeltaTable, columns: pa.Schema) -> tuple[pa.Schema, list[pa.Field], list[str]]:
    """The table's columns, and what `differences` finds between them and those of a load."""
    variants = _variants(table)
    fields = pa.schema(table.schema().to_arrow())
    mine = pa.schema([one.with_type(VARIANT) if one.name in variants else one for one in fields])
    return mine, *differences(mine, columns, set(table.metadata().partition_columns))


def _field(column: pa.Field) -> Field:
    return Field(column.name, VariantType()) if column.type == VARIANT else Field.from_arrow(column)


def _variants(table: DeltaTable) -> set[str]:
    """The columns of VARIANT, which deltalake's Arrow has as what they are stored as."""
    return {one.name for one in table.schema().fields if isinstance(one.type, VariantType)}


def _grown_map(mine: pa.DataType, merged: pa.DataType, path: str) -> str | None:
    """The path of a map whose values have fields that they did not have; None if there is none."""
    if pa.types.is_struct(mine):
        below = ((one.type, merged.field(one.name).type, f"{path}.{one.name}") for one in mine)
        return next((name for each in below if (name := _grown_map(*each))), None)
    if pa.types.is_list(mine):
        return _grown_map(mine.value_type, merged.value_type, path)
    return path if pa.types.is_map(mine) and mine != merged else None


def _own_property(
    address: str, properties: Mapping[str, str], columns: pa.Schema, names: Iterable[str]
) -> dict[str, str]:
    """As `own_columns_property`, of tables of changes; empty of others."""
    return own_columns_property(address, properties, names) if INCARNATION in columns.names else {}


def _taken_away(commits: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Which of the commits, the oldest one first, has taken away what the table had at the first; None if it is there.

    A RESTORE to a version that is not among them has, and one by a time that is not in ms, as Spark's: nobody knows the
    version.
    """
    by: dict[int, dict[str, Any] | None] = {}
    last = None
    for commit in commits:
        operation = str(commit.get("operation"))
        if _REPLACES.match(operation):
            last = commit
        elif operation == _RESTORE:
            asked = commit.get("operationParameters") or {}
            version, at = str(asked.get("version")), str(asked.get("datetime"))
            if at.isdecimal():
                earlier = [
                    one["version"] for one in commits if one["timestamp"] < int(at) - _CLOCK_MS and one["version"] in by
                ]
                version = str(max(earlier, default=-1))
            last = by.get(int(version), commit) if version.isdecimal() else commit
        by[commit["version"]] = last
    return last


def _committing(run: Run, figures: Mapping[str, int] = MappingProxyType({})) -> CommitProperties:
    """The properties of a run's commit; of a merge with `figures` of what it reads."""
    # without a time Spark's next checkpoint drops it, if the table has delta.setTransactionRetentionDuration
    transaction = Transaction(run.load, run.number, time.time_ns() // 1_000_000)
    entry = {"version": RUN_VERSION, **vars(run), **figures}
    return CommitProperties(custom_metadata={COMMIT_ENTRY: entry}, app_transactions=[transaction])


def _reason(error: Exception) -> str:
    """An error of deltalake in one line, without the colours and causes that it has in several."""
    text = _ESCAPES.sub(" ", str(error))
    return reason(RuntimeError(" ".join(without_user(text).split())[:500]))
