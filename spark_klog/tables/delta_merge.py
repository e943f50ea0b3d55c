"""Merge changes into a Delta table, in one commit, by deltalake's `merge`.

It holds the changes in memory, and reads the table as a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set as AbstractSet
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, WriterProperties

from spark_klog.tables.change_files import ChangeFiles
from spark_klog.tables.change_order import (
    DELETED,
    INCARNATION,
    OFFSET,
    ORDER,
    PARTITION,
    PLACE,
    TIMESTAMP,
    Outcome,
    Rows,
    outlived,
    place_of,
)

_CHANGE, _ROW = "change", "row"


def merge(
    table: DeltaTable, changes: ChangeFiles, own: AbstractSet[str], properties: CommitProperties, rows: Rows
) -> None:
    """Commit the changes, unless they change no row: then there is no commit. Errors as of deltalake, and `LoadError`
    as of `ChangeFiles.whole`.

    Of the table's columns that the changes lack those of `own` become null. `rows` are those of `table`, as it is.
    """
    mine = pa.schema(table.schema().to_arrow())
    columns = changes.row
    gone = own - set(columns.names)
    columns = pa.schema([*columns, *(column for column in mine if column.name in gone)])
    values = {quoted(name): _of(_CHANGE, name) for name in columns.names}
    wins = "_wins"
    while wins in columns.names:
        wins += "_"
    schema = pa.schema([*changes.row, pa.field(DELETED, pa.bool_()), *list(columns)[len(changes.row) :]])
    schema = schema.append(pa.field(wins, pa.bool_()))
    # before the merge, which reads what it is given where deltalake can read no table
    slices = [_settled(each, changes, mine, rows) for each in changes.whole(mine, rows)]
    has_order = ORDER in columns.names
    is_gone = _any([_newer(_literals(place), has_order) for place in changes.truncations.to_pylist()])
    newer = _any([_of(_CHANGE, wins), _newer({name: _of(_CHANGE, name) for name in columns.names}, has_order), is_gone])
    merger = table.merge(
        pa.RecordBatchReader.from_batches(schema, _batches(slices, schema)),
        " AND ".join(f"{_of(_ROW, name)} = {_of(_CHANGE, name)}" for name in changes.key),
        source_alias=_CHANGE,
        target_alias=_ROW,
        writer_properties=WriterProperties(compression="ZSTD"),
        commit_properties=properties,
    )
    merger = merger.when_matched_delete(f"{_of(_CHANGE, DELETED)} AND ({newer})")
    merger = merger.when_matched_update(values, f"NOT {_of(_CHANGE, DELETED)} AND ({newer})")
    merger = merger.when_not_matched_insert(values, f"NOT {_of(_CHANGE, DELETED)}")
    if is_gone:
        merger = merger.when_not_matched_by_source_delete(is_gone)
    merger.execute()


def _settled(changes: pa.Table, files: ChangeFiles, table: pa.Schema, rows: Rows) -> tuple[pa.Table, bool]:
    """Of each key the latest change, and whether all of them are known to be newer than their rows.

    They are if a key has several ones, in several partitions: then the rows are looked at first.
    """
    outcome = Outcome(changes, files.key, table)
    if len(outcome.latest) == len(changes):
        return changes, False
    kinds = pa.schema([table.field(name) for name in (*files.key, *place_of(changes.schema))])
    for batch in rows(kinds.names):
        part = pa.Table.from_batches([batch]).cast(kinds)  # deltalake's views of texts can't be filtered
        outcome.replace(part.filter(pa.array(~outlived(part, files.truncations))))
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


def _newer(place: Mapping[str, str], has_order: bool) -> str:
    """`change_order.newer` in SQL, of a place in SQL and the row."""

    def compared(*names: str) -> str:
        *equal, last = names
        texts = [f"{place[name]} = {_of(_ROW, name)}" for name in equal]
        return " AND ".join([*texts, f"{place[last]} > {_of(_ROW, last)}"])

    is_one = f"{place[PARTITION]} = {_of(_ROW, PARTITION)}"
    within = f"{compared(INCARNATION)} OR ({compared(INCARNATION, OFFSET)})"
    across = f"{compared(TIMESTAMP)} OR ({compared(TIMESTAMP, PARTITION)})"
    text = f"{_of(_ROW, OFFSET)} IS NULL OR ({is_one} AND ({within})) OR (NOT ({is_one}) AND ({across}))"
    if has_order:
        text = f"{compared(ORDER)} OR ((({place[ORDER]} < {_of(_ROW, ORDER)}) IS NOT TRUE) AND ({text}))"
    return text


def _literals(place: Mapping[str, Any]) -> dict[str, str]:
    """A place in SQL."""
    order = place.get(ORDER)
    microseconds = pa.scalar(place[TIMESTAMP], PLACE.field(TIMESTAMP).type).cast(pa.int64()).as_py()
    return {
        **{name: str(place[name]) for name in (INCARNATION, PARTITION, OFFSET)},
        TIMESTAMP: f"arrow_cast({microseconds}, 'Timestamp(Microsecond, Some(\"UTC\"))')",
        ORDER: "NULL" if order is None else "'{}'".format(order.replace("'", "''")),
    }


def _any(conditions: Sequence[str]) -> str:
    return " OR ".join(f"({each})" for each in conditions if each)
