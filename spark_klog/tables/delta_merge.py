"""Merge changes into a Delta table, in one commit, by deltalake's `merge`.

It holds the changes in memory, and reads the table as a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Set as AbstractSet

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, WriterProperties

from spark_klog.tables.change_files import ChangeFiles
from spark_klog.tables.changes import DELETED, INCARNATION, OFFSET, PARTITION, TIMESTAMP

_CHANGE, _ROW = "change", "row"


def merge(table: DeltaTable, changes: ChangeFiles, own: AbstractSet[str], properties: CommitProperties) -> None:
    """Commit the changes, unless they change no row: then there is no commit. Errors as of deltalake.

    Of the table's columns that the changes lack those of `own` become null.
    """
    gone = own - set(changes.schema.names)
    schema = pa.schema([*changes.schema, *(one for one in pa.schema(table.schema().to_arrow()) if one.name in gone)])
    columns = [name for name in schema.names if name != DELETED]
    values = {quoted(name): _of(_CHANGE, name) for name in columns}
    (
        table.merge(
            pa.RecordBatchReader.from_batches(schema, _batches(changes, schema)),
            " AND ".join(f"{_of(_ROW, name)} = {_of(_CHANGE, name)}" for name in changes.key),
            source_alias=_CHANGE,
            target_alias=_ROW,
            writer_properties=WriterProperties(compression="ZSTD"),
            commit_properties=properties,
        )
        .when_matched_delete(f"{_of(_CHANGE, DELETED)} AND ({_NEWER})")
        .when_matched_update(values, f"NOT {_of(_CHANGE, DELETED)} AND ({_NEWER})")
        .when_not_matched_insert(values, f"NOT {_of(_CHANGE, DELETED)}")
        .execute()
    )


def _batches(changes: ChangeFiles, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for each in changes.slices():
        for one in list(schema)[each.num_columns :]:
            each = each.append_column(one, pa.nulls(len(each), one.type))
        yield from each.to_batches()


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
