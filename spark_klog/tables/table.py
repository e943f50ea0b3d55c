"""What a load needs of a table, whatever its format.

The commit is the truth about a run: it has the load's id, the run's number, the token of the attempt to commit, and
the offsets at which the next run begins. A run's journal follows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from spark_klog.base.durable import check_version
from spark_klog.errors import LoadError
from spark_klog.tables.change_order import PLACE
from spark_klog.tables.upkeep import Expired, Kept

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

    from spark_klog.tables.change_files import ChangeFiles

#: When a table is made ready: before a run has a plan, before its tasks write files, or before its commit.
Stage = Literal["plan", "tasks", "commit"]
#: What is done to a table: it gets the files of a load, changes are merged into it, or its own files are rewritten.
Use = Literal["append", "merge", "compact"]
#: {topic: {partition: offset}}, the first offset that the run does not have.
Offsets = Mapping[str, Mapping[str, int]]


class RunConflict(LoadError):
    """Another run of the load has committed meanwhile. Nothing of this one is in the table, and nothing is lost."""


@dataclass(frozen=True)
class Run:
    """A run of a load, as a commit of its table names it. `topic_ids` has those that the brokers have.

    `incarnations` has how often a topic was created again, if it was: by that its changes are ordered before offsets.
    `columns` are those of its changes, if nothing else of the commit can have them. `before` is the number of the run
    that it follows, None: the one before its own.
    """

    load: str
    number: int
    token: str
    offsets: Offsets
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    incarnations: Mapping[str, int] = field(default_factory=dict)
    columns: Sequence[str] = field(default=(), compare=False)
    before: int | None = field(default=None, compare=False)

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Run:
        """Of the JSON in a commit, which has the fields; TypeError or KeyError if it is not what `append` has put.

        `LoadError`, which names `where` it is, for another version.
        """
        check_run_version(values.get("version"), where)
        offsets = {topic: dict(each) for topic, each in values["offsets"].items()}
        ids = dict(values.get("topic_ids", {}))
        again = {topic: int(count) for topic, count in values.get("incarnations", {}).items()}
        columns = tuple(map(str, values.get("columns", ())))
        return cls(str(values["load"]), int(values["number"]), str(values["token"]), offsets, ids, again, columns)


#: Of a run in a table: an entry of Delta's commits, properties of Iceberg's.
RUN_VERSION = 1


def check_run_version(version: object, where: str) -> None:
    """`LoadError` if the run that is `where` has another version than those that are read."""
    check_version(version, RUN_VERSION, where, "load into another table", LoadError)


def is_committed(address: str, last: Run | None, run: Run) -> bool:
    """Whether a table whose last run is `last` has the run, of an attempt whose answer was lost.

    `RunConflict` if the run can't follow the last one.
    """
    if last is not None and (last.number, last.token) == (run.number, run.token):
        return True
    number = 0 if last is None else last.number
    if number != (run.number - 1 if run.before is None else run.before):
        raise RunConflict(
            f"{address} has run {number} of load {run.load}, so that run {run.number} can't follow: another run has "
            f"committed run {number}; nothing of this one is in the table, and what it has read is there once. Run "
            "again for what has come since"
        )
    return False


@dataclass(frozen=True)
class DataFile:
    """A Parquet file to append. `path` is relative to the table's location, `size` in bytes.

    `hour` is the hour since the epoch of its partition (its first hour, by day); None if the table has none.
    """

    path: str
    size: int
    metadata: FileMetaData
    hour: int | None = None


@dataclass(frozen=True)
class TableFile:
    """A file of the current table. `offsets` has {(topic, partition): (first, last)} if its statistics tell them."""

    path: str
    size: int
    records: int
    offsets: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict)


def without_rows(batch: pa.RecordBatch, start: int, deleted: NDArray[np.int64] | None) -> pa.RecordBatch:
    """The rows of a batch that begins at row `start` of its file, without those of these numbers, which are sorted."""
    if deleted is None or not len(deleted):
        return batch
    first, last = np.searchsorted(deleted, (start, start + len(batch)))
    if first == last:
        return batch
    return batch.take(pa.array(np.delete(np.arange(len(batch)), deleted[first:last] - start)))


#: The property of a table that has the id of its load, and the entry of a commit that has a `Run` as JSON.
LOAD_PROPERTY, COMMIT_ENTRY = "klog.load", "klog"
#: The property that has the names of the load's own columns, as JSON; all others are the users'. All tables of changes
#: and all of Iceberg's have it.
COLUMNS_PROPERTY = "klog.columns"
#: The id of a load that stands for all streams, of `spark_klog.tables.upsert`.
STREAMS = "spark_klog.tables.upsert"
#: What follows the id of a load as the owner of its table of dead letters.
LETTERS = "+letters"


def layout_advice(asked: str) -> str:
    """What to do about a table with other partitions than the load's, which would be as `asked`."""
    return f"the load's would be {asked}: give --partition-by as the table is, or load into another table"


def json_property(
    address: str, properties: Mapping[str, Any], name: str, is_valid: Callable[[Any], bool], form: str, default: Any
) -> Any:
    """The value of a property that is JSON, `default` if the table at `address` lacks it.

    `LoadError`, which says that it must be `form`, if somebody has changed it to something else.
    """
    text = properties.get(name)
    if text is None:
        return default
    try:
        value = json.loads(text)
        if is_valid(value):
            return value
    except (ValueError, RecursionError):
        pass
    raise LoadError(f"{address}: its property {name} is {str(text)[:_MOST_SHOWN]!r}, but must be {form}")


#: Characters of a broken property that its error has.
_MOST_SHOWN = 100


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def own_columns(address: str, properties: Mapping[str, str]) -> set[str]:
    """The columns of the table at `address` that runs have had, by its property; none if it has no such property.

    `LoadError` as of `json_property`.
    """
    form = """a JSON array of the columns that loads have written, as '["id", "name"]': set it to that"""
    return set(json_property(address, properties, COLUMNS_PROPERTY, _is_names, form, []))


def own_columns_property(
    address: str, properties: Mapping[str, str], names: Iterable[str], gone: Collection[str] = ()
) -> dict[str, str]:
    """The property of a table whose load has these columns from now on, `gone` no longer; empty if it stays.

    They are those that the load adds, and from the commit of a run on all that the run has: one of a user's that no
    committed run had stays the user's. `LoadError` as of `json_property`.
    """
    value = json.dumps(sorted(own_columns(address, properties).difference(gone).union(names)))
    return {} if value == properties.get(COLUMNS_PROPERTY) else {COLUMNS_PROPERTY: value}


#: The property that has the columns by which changes find their rows, those of the key and of the place, as JSON:
#: {name: id}. Ids are those of Iceberg's fields; a Delta table knows its columns by their names.
KEY_PROPERTY = "klog.key"


def _is_ids(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(number, (int, str)) for number in value.values())


def _known_key(address: str, properties: Mapping[str, str]) -> dict[str, int | str]:
    form = "a JSON object of the key's columns and their ids: set it as it was, or remove it if the key never changed"
    known: dict[str, int | str] = json_property(address, properties, KEY_PROPERTY, _is_ids, form, {})
    return known


def key_property(
    address: str, properties: Mapping[str, str], key: Sequence[str], ids: Mapping[str, int | str]
) -> dict[str, str]:
    """The property of a table of changes by `key` whose columns have these ids; empty if it stays, or without a key.

    `LoadError` as of `json_property`.
    """
    value = {name: ids[name] for name in (*key, *PLACE.names)} if key else {}
    return {} if value == _known_key(address, properties) else {KEY_PROPERTY: json.dumps(value)}


def key_mismatch(address: str, properties: Mapping[str, str], key: Sequence[str], ids: Mapping[str, int | str]) -> str:
    """Why changes by `key` would not find the rows of a table whose columns have these ids; "" if they would.

    `LoadError` as of `json_property`.
    """
    known = _known_key(address, properties)
    if not known:  # of an earlier version of the program, or of somebody else
        missing = [name for name in key if name not in ids]
        what = f"has rows without {', '.join(missing)}, which is in the key of the changes"
        return f"{what}: {_OTHER_KEY}" if missing else ""
    if set(known.values()) == {ids.get(name) for name in (*key, *PLACE.names)}:
        return ""
    if was := [name for name in known if name not in PLACE.names] if {*key, *PLACE.names} != set(known) else []:
        return f"has rows by the key {', '.join(was)}, and the changes are by {', '.join(key)}: {_OTHER_KEY}"
    name = next(name for name, number in known.items() if ids.get(name) != number)
    now = next((other for other, number in ids.items() if number == known[name]), None)
    how = f"was renamed to {now}: rename it back" if now else "was dropped: restore the table from before"
    return (
        f"has rows by its column {name}, which {how}, or load into another table. If the rows have the same values in "
        f"a column {name} now, remove the property {KEY_PROPERTY}"
    )


_OTHER_KEY = (
    "they would not find those rows. Keep the key that the table has (--schema-evolution keep, if its schema has "
    "changed), or load into another table"
)


#: Metadata of Arrow fields, at all levels, that a Parquet file of Iceberg has.
FIELD_ID = b"PARQUET:field_id"
#: Metadata of a load's columns and their fields: a JSON array of the names that one had before, as Avro's aliases.
_ALIASES = b"klog.aliases"


def with_aliases(column: pa.Field, names: Sequence[str]) -> pa.Field:
    """The column, which was called by the `names` before: a table that can does not add it, but renames its own."""
    return column.with_metadata({**(column.metadata or {}), _ALIASES: json.dumps(names)}) if names else column


def aliases_of(column: pa.Field) -> list[str]:
    """The names that the column had before, by `with_aliases`."""
    return [str(name) for name in json.loads((column.metadata or {}).get(_ALIASES, b"[]"))]


def field_id(column: pa.Field) -> int | None:
    """The id of an Arrow field; None if it has none."""
    text = (column.metadata or {}).get(FIELD_ID)
    return None if text is None else int(text)


def has_field_ids(columns: pa.Schema) -> bool:
    """Whether a table knows its columns by ids: an Iceberg table, whose partitions are computed of its columns."""
    return any(field_id(column) is not None for column in columns)


def field_ids(columns: Iterable[pa.Field]) -> set[int]:
    """The ids of fields at all levels; none of a table, or a file of one, that knows its columns by their names."""
    ids = set[int]()
    for column in columns:
        kind = column.type
        if (number := field_id(column)) is not None:
            ids.add(number)
        if pa.types.is_struct(kind):
            ids |= field_ids(kind)
        elif pa.types.is_map(kind):
            ids |= field_ids((kind.key_field, kind.item_field))
        elif pa.types.is_list(kind):
            ids |= field_ids([kind.value_field])
    return ids


class Table(Protocol):
    """A table, which may not exist yet. Methods raise `LoadError`, which names the table and what to do.

    Other writers may append, compact and vacuum at any time: a commit is tried again on what they have made of it, for
    a bounded time.
    """

    #: Whether a column may get another name, by `with_aliases`.
    renames: ClassVar[bool]
    #: Why it has no columns of VARIANT; "" if it has.
    no_variant: ClassVar[str]
    #: The zone in whose hours and days the table has its partitions; None if files say which partition they are of.
    partition_zone: ClassVar[str | None]

    @property
    def address(self) -> str:
        """For messages, without secrets."""

    @property
    def journal_name(self) -> str:
        """What the load's journal, which is in the table's folder, says of the table: without secrets."""

    @property
    def location(self) -> str:
        """The path or URI of the folder of its files; the load's journal is in it, too."""

    def schema(self) -> pa.Schema | None:
        """The columns; None if there is no table."""

    def check(self, use: Use) -> None:
        """`LoadError` if others have made of the table what this can't be done to; it says what they may do. Nothing if
        there is no table. The other methods check it, too: this is for who is about to write what they commit."""

    def load_id(self) -> str | None:
        """The id of the load that the table belongs to (its property `klog.load`); None if there is none."""

    def prepare(
        self,
        columns: pa.Schema,
        layout: str,
        time_column: str,
        load: str,
        at: Stage = "commit",
        key: Sequence[str] = (),
    ) -> pa.Schema:
        """Create the table, or add to it the nullable columns and fields that it lacks, and give it to the load.

        What no commit has binds nobody: a run may never commit. So a table that can adds columns before the commit
        (`append` and `upsert` do so after "tasks"), and else another type replaces that of a column of the load's which
        no commit has had.

        Returns the schema that files are to be written by: the table's own, with the ids of its fields if it has some.
        The `layout` is none, day, hour, or as of `parse_terms`; it says nothing of a table of changes that the load has
        already. `time_column` is the path of the column that a day or hour is of. `LoadError` names the difference if
        the table has a column of another type or that is required, another layout, belongs to another load, or has rows
        that changes by the columns `key` would not find.

        At "plan" a table that would rename columns is compared only: if the call dies, the next one may have the former
        schema, and would add the former names again.
        """

    def last_run(self, load: str) -> Run | None:
        """The last run of the load that is in the table; None before the first."""

    def append(self, files: Sequence[DataFile], run: Run) -> None:
        """Commit a run with its files, which may be none; `RunConflict` if `last_run` is not the one before it."""

    def upsert(self, changes: ChangeFiles | None, run: Run) -> None:
        """Commit a run with changes of rows: of each key the last one, unless the row in the table is of a later one.

        Rows that are older than a truncation are deleted.

        The table has the columns of `ChangeFiles.row`, by `prepare`; it may be partitioned by any. Of a row that
        changes the load's other columns (`own_columns`) become null, and the users' keep their values. None: the run
        changes nothing. `RunConflict` as of `append`.
        """

    def files(self) -> Iterator[TableFile]:
        """The files of the current table."""

    def deleted_rows(self) -> Mapping[str, NDArray[np.int64]]:
        """The rows that others have deleted, whose files still have them: by path, as `files` has it, their numbers."""

    def rows(self, columns: Sequence[str], keys: pa.Table | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of the current table, with some of its columns; none if there is no table.

        Files are left out that, by their statistics and partitions, can't have rows with one of the `keys`, which are
        values of some of its columns.
        """

    def compact(self, target_bytes: int) -> int:
        """Rewrite small files as larger ones, in commits of their own that change no rows; how many files went.

        A run that commits meanwhile is not disturbed.
        """

    def expire(self, kept: Kept, is_needed: Callable[[str], bool], *, is_dry: bool) -> Expired:
        """Forget old states, and return them and the files to `remove` then; if it `is_dry`, tell of them only.

        What the load needs to find its last run in the table stays, as do files that no commit has had if they are
        young, or if `is_needed` says so of their paths below the location.
        """

    def remove(self, path: str) -> None:
        """Remove a file of `Expired`; nothing if it does not exist."""
