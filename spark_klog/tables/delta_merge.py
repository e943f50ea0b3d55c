"""Merge changes into a Delta table, in one commit, by deltalake's `merge`.

It holds the changes in memory, and reads the table as a stream: without files that by their statistics and partitions
can't have the keys of the changes, which deltalake tells by ranges of them in the condition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set as AbstractSet
from datetime import date
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, WriterProperties, write_deltalake

from spark_klog.columns.schema import is_text
from spark_klog.errors import LoadError
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
    all_outlived,
    outlived,
    place_of,
)
from spark_klog.tables.delta_statistics import cut
from spark_klog.tables.partitions import MOST_NAME, as_numbers, hive_folder

_CHANGE, _ROW = "change", "row"
#: Ranges of keys in a condition, at most.
_RANGES = 64
#: What deltalake tells of what it has written, and is right.
_WRITTEN = "output_rows", "target_files_added", "target_files_removed"
#: The largest numbers, and days since the epoch, that a literal may have.
_MOST = (1 << 63) - 1, 719_162


def merge(
    table: DeltaTable,
    changes: ChangeFiles,
    own: AbstractSet[str],
    properties: Callable[[Mapping[str, int]], CommitProperties],
    rows: Rows,
) -> dict[str, Any]:
    """Commit the changes, unless they change no row: then there is no commit. Returns figures of what was read, which
    `properties` get for the commit, and written. Errors as of deltalake, and `LoadError` as of `ChangeFiles.whole`, and
    for a text in a partition column that is an empty key, or too long for a folder.

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
    actions = pa.table(table.get_add_actions(flatten=True))
    if is_gone and all(all_outlived(each, changes.truncations) for each in _bounds(actions)):
        figures = _figures(actions.slice(0, 0), {}) | {"table_files": len(actions)}
        return figures | _replace(table, [each for each, _ in slices], mine, properties(figures))
    kinds = pa.schema([mine.field(name).remove_metadata() for name in changes.key])
    keys = pa.concat_tables([kinds.empty_table(), *(each.select(kinds.names).cast(kinds) for each, _ in slices)])
    ranges = _key_ranges(keys)
    figures = _figures(actions, {} if is_gone else ranges)
    condition = _condition(ranges, partial(_of, _ROW))
    for name in set(table.metadata().partition_columns).intersection(keys.column_names):
        if pa.types.is_string(keys[name].type) and pc.any(pc.equal(keys[name], "")).as_py():
            raise LoadError(
                f"the key's column {name} is empty in a change, and a partition column, in which Delta takes an empty "
                "text for none: the row would not be found again. Partition the table by another column"
            )
    _check_folders(table, [each for each, _ in slices])
    matches = [f"{_of(_ROW, name)} = {_of(_CHANGE, name)}" for name in changes.key]
    merger = table.merge(
        pa.RecordBatchReader.from_batches(schema, _batches(slices, schema)),
        " AND ".join(filter(None, [*matches, condition])),
        source_alias=_CHANGE,
        target_alias=_ROW,
        writer_properties=WriterProperties(compression="ZSTD"),
        commit_properties=properties(figures),
    )
    merger = merger.when_matched_delete(f"{_of(_CHANGE, DELETED)} AND ({newer})")
    merger = merger.when_matched_update(values, f"NOT {_of(_CHANGE, DELETED)} AND ({newer})")
    merger = merger.when_not_matched_insert(values, f"NOT {_of(_CHANGE, DELETED)}")
    if is_gone:
        merger = merger.when_not_matched_by_source_delete(is_gone)
    written = merger.execute()
    return figures | {name: written[f"num_{name}"] for name in _WRITTEN}


def _check_folders(table: DeltaTable, slices: Sequence[pa.Table]) -> None:
    """`LoadError` for a text that can't be the name of its partition's folder: deltalake finds none to write into."""
    if "://" in table.table_uri and not table.table_uri.startswith("file:"):
        return  # objects have longer names
    for name in table.metadata().partition_columns:
        for rows in slices:
            if name not in rows.column_names or not pa.types.is_string(rows[name].type):
                continue
            is_long = pc.greater(pc.binary_length(rows[name]), (MOST_NAME - len(name) - 1) // 3)
            for text in pc.unique(rows[name].filter(is_long)).to_pylist():
                if len(hive_folder(name, text)) > MOST_NAME:
                    raise LoadError(
                        f"the partition column {name} of a row begins with {text[:20]!r} and has {len(text)} letters: "
                        "deltalake can't name its folder. Partition the table by another column"
                    )


def _bounds(actions: pa.Table) -> list[dict[str, tuple[Any, Any]]]:
    """Between which values the places of each file's rows are, as of `all_outlived`."""
    made: list[dict[str, tuple[Any, Any]]] = [{} for _ in range(len(actions))]
    for name in PLACE.names:
        sides = [f"{side}.{name}" for side in ("min", "max", "null_count")]
        if set(sides) <= set(actions.column_names):
            low, high, nulls = (_integers(actions[side]) for side in sides)
            # milliseconds are cut off, and rounded up by some writers
            spare = 1000 if name == TIMESTAMP else 0
            for each, first, last, none in zip(made, low, high, nulls, strict=True):
                if first is not None and last is not None and none == 0:
                    each[name] = first, last + spare
    return made


def _integers(column: pa.ChunkedArray) -> list[int | None]:
    """Times as microseconds."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", column.type.tz))
    values: list[int | None] = column.cast(pa.int64()).to_pylist()
    return values


def _replace(
    table: DeltaTable, slices: Sequence[pa.Table], columns: pa.Schema, properties: CommitProperties
) -> dict[str, Any]:
    """Commit the rows that the changes leave as all rows of the table, without reading the others."""
    parts = [columns.empty_table()]
    for each in slices:
        rows = each.filter(pc.invert(each[DELETED].fill_null(False)))
        arrays = [
            rows[column.name].cast(column.type)
            if column.name in rows.column_names
            else pa.nulls(len(rows), column.type)
            for column in columns
        ]
        parts.append(pa.Table.from_arrays(arrays, schema=columns))
    rows = pa.concat_tables(parts)
    writer = WriterProperties(compression="ZSTD")
    write_deltalake(table, rows, mode="overwrite", commit_properties=properties, writer_properties=writer)
    table.update_incremental()
    return {"output_rows": len(rows)}


#: Of columns of keys: the first and the last value of each range that has some.
_Ranges = dict[str, list[tuple[Any, Any]]]


def within(keys: pa.Table) -> str:
    """A condition in SQL, which rows with the keys fulfil; "" if there is none that statistics tell of."""
    return _condition(_key_ranges(keys), quoted)


def _key_ranges(keys: pa.Table) -> _Ranges:
    made: _Ranges = {}
    for name in keys.column_names:
        kind = keys[name].type
        has_text, is_date = is_text(kind), pa.types.is_date32(kind)
        if not (has_text or pa.types.is_signed_integer(kind) or is_date) or not len(keys):
            continue
        values = pc.unique(keys[name]).sort()
        known = as_numbers(values)
        if not has_text and max(-known[0].as_py(), known[-1].as_py()) > _MOST[is_date]:
            continue
        made[name] = [(values[low].as_py(), values[high].as_py()) for low, high in _ranges(values)]
        if has_text:  # the condition is in the commit
            made[name] = [(cut(low, is_max=False), cut(high, is_max=True)) for low, high in made[name]]
    return made


def _condition(ranges: _Ranges, column: Callable[[str], str]) -> str:
    """That each column is in one of its ranges."""
    conditions = []
    for name, each in ranges.items():
        at, texts = column(name), [(_literal(low), _literal(high)) for low, high in each]
        parts = [f"{at} = {low}" if low == high else f"({at} >= {low} AND {at} <= {high})" for low, high in texts]
        conditions.append(f"({' OR '.join(parts)})")
    return " AND ".join(conditions)


def _figures(actions: pa.Table, ranges: _Ranges) -> dict[str, int]:
    """How many files a table has, and the files, rows and bytes of those that may have the keys."""
    may_have = np.ones(len(actions), np.bool_)
    for name, each in ranges.items():
        partition = f"partition.{name}"
        sides = [partition, partition] if partition in actions.column_names else [f"min.{name}", f"max.{name}"]
        if set(sides) <= set(actions.column_names):
            for number, (low, high) in enumerate(zip(*(actions[side].to_pylist() for side in sides), strict=True)):
                if low is not None and high is not None:
                    may_have[number] &= any(low <= last and high >= first for first, last in each)
    read = actions.select(["num_records", "size_bytes"]).filter(pa.array(may_have))
    rows, size = (pc.sum(read[name]).as_py() or 0 for name in read.column_names)
    return {"table_files": len(actions), "read_files": len(read), "read_rows": rows, "read_bytes": size}


def _ranges(values: pa.Array) -> Iterator[tuple[int, int]]:
    """The first and the last place of the values of each range: between numbers, the widest gaps are left out."""
    count = min(_RANGES, len(values))
    if is_text(values.type):
        starts = np.linspace(0, len(values), count + 1).astype(int)[:-1]
    else:
        gaps = np.diff(as_numbers(values).to_numpy().astype(np.float64))
        starts = np.append(0, np.sort(np.argsort(gaps, kind="stable")[len(gaps) - count + 1 :]) + 1)
    yield from zip(starts.tolist(), [*(starts[1:] - 1).tolist(), len(values) - 1], strict=True)


def _literal(value: Any) -> str:
    if isinstance(value, date):
        return f"DATE '{value.isoformat()}'"
    return str(value) if isinstance(value, int) else "'{}'".format(value.replace("'", "''"))


def _settled(changes: pa.Table, files: ChangeFiles, table: pa.Schema, rows: Rows) -> tuple[pa.Table, bool]:
    """Of each key the latest change, and whether all of them are known to be newer than their rows.

    They are if a key has several ones, in several partitions: then the rows are looked at first.
    """
    outcome = Outcome(changes, files.key, table)
    if len(outcome.latest) == len(changes):
        return changes, False
    kinds = pa.schema([table.field(name) for name in (*files.key, *place_of(changes.schema))])
    keys = changes.select(list(files.key))
    for batch in rows(kinds.names, keys.cast(pa.schema([kinds.field(name) for name in keys.column_names]))):
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
