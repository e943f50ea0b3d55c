"""Merge changes into a Delta table, in one commit, by deltalake's `merge`.

It holds the changes in memory, and reads the table as a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set as AbstractSet

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, WriterProperties

from spark_klog.tables.change_files import ChangeFiles
from spark_klog.tables.changes import DELETED, INCARNATION, OFFSET, PARTITION, PLACE, TIMESTAMP, Outcome

_CHANGE, _ROW = "change", "row"
#: The rows of a table, with some of its columns.
_Rows = Callable[[Sequence[str]], Iterable[pa.RecordBatch]]


def merge(
    table: DeltaTable, changes: ChangeFiles, own: AbstractSet[str], properties: CommitProperties, rows: _Rows
) -> None:
    """Commit the changes, unless they change no row: then there is no commit. Errors as of deltalake.

    Of the table's columns that the changes lack those of `own` become null. `rows` are those of `table`, as it is.
    """
    mine = pa.schema(table.schema().to_arrow())
    gone = own - set(changes.schema.names)
    schema = pa.schema([*changes.schema, *(column for column in mine if column.name in gone)])
    columns = [name for name in schema.names if name != DELETED]
    values = {quoted(name): _of(_CHANGE, name) for name in columns}
    wins = "_wins"
    while wins in schema.names:
        wins += "_"
    schema = schema.append(pa.field(wins, pa.bool_()))
    # before the merge, which reads what it is given where deltalake can read no table
    slices = [_settled(each, changes.key, mine, rows) for each in changes.slices()]
    newer = f"({_of(_CHANGE, wins)} OR {_NEWER})"
    (
        table.merge(
            pa.RecordBatchReader.from_batches(schema, _batches(slices, schema)),
            " AND ".join(f"{_of(_ROW, name)} = {_of(_CHANGE, name)}" for name in changes.key),
            source_alias=_CHANGE,
            target_alias=_ROW,
            writer_properties=WriterProperties(compression="ZSTD"),
            commit_properties=properties,
        )
        .when_matched_delete(f"{_of(_CHANGE, DELETED)} AND {newer}")
        .when_matched_update(values, f"NOT {_of(_CHANGE, DELETED)} AND {newer}")
        .when_not_matched_insert(values, f"NOT {_of(_CHANGE, DELETED)}")
        .execute()
    )


def _settled(changes: pa.Table, key: Sequence[str], table: pa.Schema, rows: _Rows) -> tuple[pa.Table, bool]:
    """Of each key the latest change, and whether all of them are known to be newer than their rows.

    They are if a key has several ones, in several partitions: then the rows are looked at first.
    """
    outcome = Outcome(changes, key, table)
    if len(outcome.latest) == len(changes):
        return changes, False
    for batch in rows([*key, *PLACE.names]):
        outcome.replace(pa.Table.from_batches([batch]))
    return changes.take(pa.array(outcome.latest)), True


def _batches(slices: list[tuple[pa.Table, bool]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    while slices:
        each, wins = slices.pop()
        for column in list(schema)[each.num_columns : -1]:
            each = each.append_column(column, pa.nulls(len(each), column.type))
        yield from each.append_column(schema[-1], pa.array(np.full(len(each), wins))).to_batches()


def _of(table: str, name: str) -> str:
    return f"{table}.{quoted(name)}"


def quoted(name: str) -> str:
    """A name in DataFusion's SQL."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def _newer() -> str:
    """`changes.newer` in SQL."""

    def compared(*names: str) -> str:
        *equal, last = names
        texts = [f"{_of(_CHANGE, name)} = {_of(_ROW, name)}" for name in equal]
        return " AND ".join([*texts, f"{_of(_CHANGE, last)} > {_of(_ROW, last)}"])

    is_one = f"{_of(_CHANGE, PARTITION)} = {_of(_ROW, PARTITION)}"
    within = f"{compared(INCARNATION)} OR ({compared(INCARNATION, OFFSET)})"
    across = f"{compared(TIMESTAMP)} OR ({compared(TIMESTAMP, PARTITION)})"
    return f"{_of(_ROW, OFFSET)} IS NULL OR ({is_one} AND ({within})) OR (NOT ({is_one}) AND ({across}))"


_NEWER = _newer()
