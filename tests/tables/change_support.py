"""A model of keyed changes: plain Python, one change after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow.fs import LocalFileSystem

from spark_klog.tables.change_files import ChangeFiles, ChangeWriter
from spark_klog.tables.changes import ChangeFormat

KEY = pa.struct([pa.field("id", pa.int64())])
VALUE = pa.struct([pa.field("name", pa.string()), pa.field("amount", pa.float64())])
FORMAT = ChangeFormat(KEY, VALUE)
_EPOCH = datetime(2026, 1, 1, tzinfo=timezone.utc)


class Change(NamedTuple):
    """A record: `name` None is a tombstone; `time` in seconds."""

    id: int
    name: str | None
    partition: int
    offset: int
    time: int = 0
    incarnation: int = 0


def records(changes: Sequence[Change]) -> pa.RecordBatch:
    """The records of changes, as the connector has them, with rows as keys and values."""
    values = [None if one.name is None else {"name": one.name, "amount": one.offset / 2} for one in changes]
    columns = {
        "key": pa.array([{"id": one.id} for one in changes], KEY),
        "value": pa.array(values, VALUE),
        "topic": pa.array(["rows"] * len(changes)),
        "partition": pa.array([one.partition for one in changes], pa.int32()),
        "offset": pa.array([one.offset for one in changes], pa.int64()),
        "timestamp": pa.array([_EPOCH + timedelta(seconds=one.time) for one in changes], pa.timestamp("us", tz="UTC")),
    }
    return pa.RecordBatch.from_pydict(columns)


def change_batch(changes: Sequence[Change]) -> pa.RecordBatch:
    batch = FORMAT.changes(records(changes))
    incarnations = pa.array([one.incarnation for one in changes], pa.int32())
    return batch.set_column(batch.schema.get_field_index("_klog_incarnation"), "_klog_incarnation", incarnations)


def written(
    folder: Path,
    batches: Iterable[pa.RecordBatch],
    slice_bytes: int = 1 << 27,
    key: tuple[str, ...] = FORMAT.key,
    letters: Iterable[tuple[int, int]] = (),
) -> ChangeFiles:
    """Files with the changes, one for each batch; of those at some places are letters."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[str] = []
    for batch in batches:
        writer = ChangeWriter(key, folder, lambda path, _changes: paths.append(str(path)))
        writer.add(batch)
        writer.finish()
    return ChangeFiles(LocalFileSystem(), paths, key, slice_bytes, frozenset(letters))


def is_later(one: Change, other: Change) -> bool:
    if one.partition == other.partition:
        return (one.incarnation, one.offset) > (other.incarnation, other.offset)
    return (one.time, one.partition) > (other.time, other.partition)


def applied(rows: dict[int, Change], changes: Iterable[Change]) -> dict[int, Change]:
    """The rows of a table after a run: of each partition the last change of a key counts, be it that of the row."""
    left = dict(rows)
    runs: dict[int, dict[int, Change]] = {}
    for one in changes:
        last = runs.setdefault(one.id, {})
        if one.partition not in last or is_later(one, last[one.partition]):
            last[one.partition] = one
    for key, last in runs.items():
        row = rows.get(key)
        if row is not None and (row.partition not in last or not is_later(last[row.partition], row)):
            last[row.partition] = row
        winner = max(last.values(), key=lambda one: (one.time, one.partition))
        left.pop(key, None)
        if winner.name is not None:
            left[key] = winner
    return left


def last_of(changes: Iterable[Change]) -> dict[int, Change]:
    """The last change of each key."""
    last: dict[int, Change] = {}
    for one in changes:
        if one.id not in last or is_later(one, last[one.id]):
            last[one.id] = one
    return last


def rows_of(changes: Iterable[Change]) -> list[tuple[Any, ...]]:
    """The rows that the changes leave, sorted."""
    kept = (one for one in last_of(changes).values() if one.name is not None)
    return sorted((one.id, one.name, one.offset / 2, one.partition, one.offset) for one in kept)


def rows_in(table: pa.Table) -> list[tuple[Any, ...]]:
    """The same of a table."""
    columns = [table[name].to_pylist() for name in ("id", "name", "amount", "_klog_partition", "_klog_offset")]
    return sorted(zip(*columns, strict=True))
