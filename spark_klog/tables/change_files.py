"""Files of changes, which wait for the commit that merges them: written by tasks, read by the driver in slices of keys.

A file is Parquet, sorted by the slot of the key, a hash of it, which is its last column `_slot`. The statistics of its
row groups tell their slots, so that all changes of some keys are read from all files without the others: what is in
memory at once is bounded by the slice, not by the run. Truncations, which have no key, have a slot of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow.fs import LocalFileSystem

from spark_klog.base.addresses import local_path
from spark_klog.columns.schema import is_bytes, is_text
from spark_klog.errors import LoadError
from spark_klog.files import open_filesystem
from spark_klog.files.keys import KeyedUri
from spark_klog.records import kernels
from spark_klog.records.contract import BinaryColumn
from spark_klog.tables.change_order import (
    DELETED,
    LACKING,
    OFFSET,
    PARTITION,
    Rows,
    last_changes,
    last_rows,
    mask,
    matching,
    newer,
    numbers,
    of_rows,
    ordered,
    place_of,
    truncated,
    truncations_of,
)

_SLOT = "_slot"
_SLOTS = 4096
_TRUNCATIONS = -1
_GROUP_ROWS = 64 * 1024
#: What a writer holds before it writes a file, and what a slice has, about: bytes of Arrow data.
_MOST_HELD = 64 * 1024 * 1024
_SLICE = 128 * 1024 * 1024


def slots(rows: pa.Table, key: Sequence[str], count: int = _SLOTS) -> NDArray[np.int32]:
    """The slot of each row's key among `count` ones, that of truncations where it is null."""
    texts = [_text(rows[name]) for name in key]
    joined = texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, b"\x00")
    column = joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined
    column = pa.concat_arrays([column, column.slice(0, 0)]) if column.offset or not len(column) else column
    _, offsets, data = column.buffers()
    keys = BinaryColumn(memoryview(offsets), b"" if data is None else memoryview(data), None, 0)
    made = np.frombuffer(kernels.load().partitions(keys, len(column), count), np.int32)
    return np.where(column.is_null().to_numpy(zero_copy_only=False), _TRUNCATIONS, made) if column.null_count else made


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    is_plain = is_text(column.type) or is_bytes(column.type, or_fixed=True)
    return (column if is_plain else column.cast(pa.string())).cast(pa.binary())


class ChangeWriter:
    """Writes the `last_changes` of each key into files, as far as memory goes: a key may be in several files.

    `put` gets each complete file of the folder `scratch`, with the number of its changes.
    """

    def __init__(self, key: Sequence[str], scratch: Path, put: Callable[[Path, int], None]) -> None:
        self._key, self._scratch, self._put = key, scratch, put
        self._held: list[pa.RecordBatch] = []
        self._bytes = 0

    def add(self, changes: pa.RecordBatch) -> None:
        self._held.append(changes)
        self._bytes += changes.nbytes
        if self._bytes >= _MOST_HELD:
            last = last_changes(pa.Table.from_batches(self._held), self._key)
            if last.nbytes >= _MOST_HELD // 2:
                self._write(last)
                self._held, self._bytes = [], 0
            else:
                self._held, self._bytes = last.to_batches(), last.nbytes

    def finish(self) -> None:
        """Write what is held, be it a file without changes, of batches that had none."""
        if self._held:
            self._write(last_changes(pa.Table.from_batches(self._held), self._key))
        self._held, self._bytes = [], 0

    def _write(self, changes: pa.Table) -> None:
        import pyarrow.parquet as pq

        if LACKING in changes.schema.names and changes[LACKING].null_count == len(changes):
            changes = changes.drop_columns([LACKING])  # its absence tells that none lacks values
        of_keys = slots(changes, self._key)
        order = np.argsort(of_keys, kind="stable")
        sorted_changes = changes.take(pa.array(order)).append_column(_SLOT, pa.array(of_keys[order]))
        path = self._scratch / uuid4().hex
        pq.write_table(
            sorted_changes,
            path,
            row_group_size=_GROUP_ROWS,
            compression="lz4",
            use_dictionary=False,
            write_statistics=[_SLOT],
        )
        self._put(path, len(changes))


def change_files(location: str, paths: Sequence[str], key: tuple[str, ...]) -> ChangeFiles:
    """Files below a path or URI."""
    if (base := local_path(location)) is not None:
        return ChangeFiles(LocalFileSystem(), [f"{base}/{path}" for path in paths], key)
    filesystem, base = open_filesystem(location, LoadError)
    return ChangeFiles(
        location if isinstance(location, KeyedUri) else filesystem,
        [f"{base.rstrip('/')}/{path}" for path in paths],
        key,
    )


@dataclass(frozen=True)
class ChangeFiles:
    """Files of `ChangeWriter` on a pyarrow file system; there is at least one. `key` has the columns of a row's key.

    Of a `KeyedUri` the file system has keys that are good when a file is opened.
    """

    opened: Any
    paths: Sequence[str]
    key: tuple[str, ...]
    slice_bytes: int = field(default=_SLICE, repr=False)
    #: (partition, offset) of changes that are dead letters, as no row has the values that they lack.
    letters: frozenset[tuple[int, int]] = frozenset()
    #: Deletions of earlier runs, with the columns of the key and the place; those without a key are truncations.
    memory: pa.Table | None = None

    @property
    def filesystem(self) -> Any:
        return self.opened.filesystem() if isinstance(self.opened, KeyedUri) else self.opened

    @cached_property
    def _footers(self) -> list[Any]:
        import pyarrow.parquet as pq

        return [pq.read_metadata(path, filesystem=self.filesystem) for path in self.paths]

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of `slices`: those of all files, which a newer schema may have given more fields."""
        schemas = [footer.schema.to_arrow_schema().remove_metadata() for footer in self._footers]
        return pa.unify_schemas([pa.schema(list(written)[:-1]) for written in schemas], promote_options="permissive")

    @cached_property
    def size(self) -> int:
        """The bytes of all changes, about as they are in memory."""
        groups = ((footer, number) for footer in self._footers for number in range(footer.num_row_groups))
        return sum(footer.row_group(number).total_byte_size for footer, number in groups)

    @property
    def row(self) -> pa.Schema:
        """The columns of the rows: those that the table has."""
        return pa.schema([column for column in self.schema if column.name not in (DELETED, LACKING)])

    @cached_property
    def truncations(self) -> pa.Table:
        """The places of the last truncation of each partition."""
        parts = [part for number in range(len(self.paths)) for part in self._read(number, _TRUNCATIONS, 0)]
        places = place_of(self.schema)
        columns = [*self.key, *places, DELETED]
        return last_changes(self._together(parts).select(columns), self.key).select(places)

    @cached_property
    def all_truncations(self) -> pa.Table:
        """Those of these changes and of earlier runs."""
        if self.memory is None:
            return self.truncations
        known = truncations_of(self.memory, self.key).select(self.truncations.column_names)
        return pa.concat_tables([self.truncations, known])

    def slices(self) -> Iterator[pa.Table]:
        """The `last_changes` of each key, `ordered`, each slice with other keys.

        Those are deletions that are older than a truncation. Those are left out that are older than a deletion of an
        earlier run.
        """
        count = min(_SLOTS, -(-self.size // self.slice_bytes) or 1)
        bounds = np.linspace(0, _SLOTS, count + 1).astype(int).tolist()
        for first, end in pairwise(bounds):
            parts = [part for number in range(len(self.paths)) for part in self._read(number, first, end)]
            if parts:
                changes = last_changes(truncated(self._together(parts), self.all_truncations), self.key)
                if len(changes := self._without_past(changes)):
                    yield ordered(changes, self.key)

    def _without_past(self, changes: pa.Table) -> pa.Table:
        if self.memory is None:
            return changes
        of_memory, of_changes = matching(self.memory, changes, self.key)
        rows = changes.take(pa.array(of_changes)), self.memory.take(pa.array(of_memory))
        is_left = np.ones(len(changes), np.bool_)
        is_left[of_changes[~newer(*rows)]] = False
        return changes.filter(pa.array(is_left))

    def whole(self, kinds: pa.Schema, rows: Rows) -> Iterator[pa.Table]:
        """`slices` with the columns of the rows and `DELETED`, whose changes have the values of their rows that they
        lack. `rows` are those of the table, whose columns have the types of `kinds`.

        `LoadError` if another writer has taken away a row that had them.
        """
        for changes in self.slices():
            changes, lost = of_rows(changes, self.key, self.truncations, kinds, rows)
            if lost.any():
                places = list(
                    zip(*(numbers(changes[name])[lost].tolist() for name in (PARTITION, OFFSET)), strict=True)
                )
                if missing := [place for place in places if place not in self.letters]:
                    raise LoadError(
                        "the record of partition {}, offset {} lacks values of its row, and another writer has deleted "
                        "the row meanwhile: run again".format(*missing[0])
                    )
                changes = changes.filter(pa.array(~lost | mask(changes[DELETED])))
            changes = changes.take(pa.array(last_rows(changes, [*self.key, PARTITION])))
            yield changes.select([*self.row.names, DELETED])

    def without_letters(self, changes: pa.Table) -> pa.Table:
        """Changes of a slice without dead letters; one after the deletion of its row stays, which deletes it, too."""
        if not self.letters or LACKING not in changes.schema.names:
            return changes
        rows = np.flatnonzero(changes[LACKING].is_valid().to_numpy() & ~mask(changes[DELETED]))
        places = changes.select([PARTITION, OFFSET]).take(pa.array(rows))
        known = zip(rows.tolist(), *(numbers(column).tolist() for column in places.columns), strict=True)
        letters = [row for row, *place in known if tuple(place) in self.letters]
        return changes.filter(pa.array(~np.isin(np.arange(len(changes)), letters)))

    def without_row(self, kinds: pa.Schema, rows: Rows) -> Iterator[dict[str, Any]]:
        """Of each change that lacks values, and that has no row with them: its partition, offset and `LACKING`."""
        names = [PARTITION, OFFSET, LACKING]
        for changes in self.slices() if LACKING in self.schema.names else ():
            changes, lost = of_rows(changes, self.key, self.truncations, kinds, rows, has_values=False)
            yield from changes.select(names).filter(pa.array(lost)).to_pylist()

    def _together(self, parts: Sequence[pa.Table]) -> pa.Table:
        like = self.schema.empty_table()
        changes = pa.concat_tables([like, *parts], promote_options="permissive").select(like.column_names)
        return changes.cast(self.schema)

    def _read(self, number: int, first: int, end: int) -> Iterator[pa.Table]:
        """The changes of a file with slots from `first` to before `end`."""
        import pyarrow.parquet as pq

        footer = self._footers[number]
        column = footer.num_columns - 1
        groups, is_whole = [], True
        for group in range(footer.num_row_groups):
            known = footer.row_group(group).column(column).statistics
            if known is not None and known.has_min_max and known.min < end and known.max >= first:
                groups.append(group)
                is_whole &= first <= known.min and known.max < end
        if not groups:
            return
        with pq.ParquetFile(self.paths[number], metadata=footer, filesystem=self.filesystem) as file:
            table = file.read_row_groups(groups)
        of_keys = table[-1]  # the rows may have a column of that name, too
        if not is_whole:
            table = table.filter(pc.and_(pc.greater_equal(of_keys, first), pc.less(of_keys, end)))
        if len(table):
            yield table.remove_column(table.num_columns - 1)
