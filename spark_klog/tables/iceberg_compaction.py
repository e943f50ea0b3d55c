"""Compaction of an Iceberg table: small files of a partition become larger ones, in commits that change no rows.

A commit is a snapshot of the operation `replace`, which readers of changes skip. It is for the very snapshot in which
its files were looked up: a file that someone has deleted, rewritten, or deleted rows of meanwhile is left as it is.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pyarrow as pa
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.manifest import DataFile, FileFormat, ManifestContent, ManifestEntry
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.typedef import Record

from spark_klog.errors import LoadError
from spark_klog.tables.iceberg_files import DataFileWriter, Footers, data_entries, offsets_of, place_columns
from spark_klog.tables.iceberg_rows import NotProjected, file_rows, is_unpartitioned
from spark_klog.tables.iceberg_schema import to_arrow
from spark_klog.tables.iceberg_transaction import OneAttempt, named_files

_log = logging.getLogger(__name__)
#: A file is small below this share of the target.
_SMALL = 0.75
#: Rewritten bytes of a commit.
_COMMIT_BYTES = 1 << 30


@dataclass(frozen=True)
class Rewritten:
    """Files of a partition, and the one that has their rows."""

    sources: list[DataFile]
    file: DataFile


@dataclass(frozen=True)
class Batch:
    """What one commit replaces. `bases` has the snapshots, or None, that attempts to commit it have followed."""

    files: list[Rewritten]
    bases: set[int | None] = field(default_factory=set)


class Compaction:
    """Rewrites the small files that a table had when this was made.

    Of format version 2 at most: pyiceberg writes no later one, and rows have no ids there.
    """

    def __init__(self, address: str, table: Table, target_bytes: int) -> None:
        self._address, self._table, self._target = address, table, target_bytes
        self._schema = to_arrow(table.schema())
        self._footers = Footers(table.metadata)

    def batches(self) -> Iterator[Batch]:
        """Write the larger files, those of a commit at a time. A row group is in memory."""
        batch: list[Rewritten] = []
        size = 0
        for sources in self._bins():
            written = self._rewrite(sources)
            if written is not None:
                batch.append(written)
                size += written.file.file_size_in_bytes
            if size >= _COMMIT_BYTES:
                yield Batch(batch)
                batch, size = [], 0
        if batch:
            yield Batch(batch)

    def commit(self, batch: Batch, table: Table, texts: Mapping[str, str], commit: Callable[[OneAttempt], None]) -> int:
        """Replace the files that `table` still has, whose rows are as they were; returns how many went.

        `texts` are for the snapshot's summary. To be called again after an attempt that failed, also if it is not known
        whether it did.
        """
        there = named_files(table, self._table.metadata) if batch.bases else set()
        live = {entry.data_file.file_path: entry.data_file for entry in _undisturbed(table)}
        is_as_planned = (table.spec().spec_id, table.schema().schema_id) == (
            self._table.spec().spec_id,
            self._table.schema().schema_id,
        )
        good = [new for new in batch.files if is_as_planned and all(source.file_path in live for source in new.sources)]
        done = [new for new in batch.files if new not in good and new.file.file_path in there]
        head = table.metadata.current_snapshot_id
        may_come = head in batch.bases  # an earlier attempt may be on its way
        if good:
            transaction = OneAttempt(table)
            overwrite = transaction.update_snapshot(snapshot_properties=dict(texts)).overwrite()
            # The files to delete are given one by one; this lets pyiceberg look for them in all manifests.
            overwrite.delete_by_predicate(AlwaysTrue())
            for new in good:
                overwrite.append_data_file(new.file)
                for source in new.sources:
                    overwrite.delete_data_file(live[source.file_path])
            overwrite.commit()
            transaction.set_operation(Operation.REPLACE)
            batch.bases.add(head)
            commit(transaction)
        for new in batch.files:
            if new not in good and new not in done:
                _log.info("%s: files that %s replaces have changed meanwhile", self._address, new.file.file_path)
                if not may_come:
                    self._remove(new.file.file_path)
        return sum(len(new.sources) for new in (*good, *done))

    def _bins(self) -> Iterator[list[DataFile]]:
        """Small files that one of the target's size has room for, in the order of topics, partitions and offsets."""
        columns = place_columns(self._table.schema())
        spec = self._table.spec().spec_id
        groups: dict[Record, list[DataFile]] = defaultdict(list)
        for entry in _undisturbed(self._table):
            file = entry.data_file
            is_small = file.file_size_in_bytes < self._target * _SMALL
            if is_small and file.spec_id == spec and file.file_format == FileFormat.PARQUET:
                groups[file.partition].append(file)
        for files in groups.values():
            files.sort(key=lambda file: (sorted(offsets_of(file, columns).items()), file.file_path))
            packed: list[DataFile] = []
            for file in files:
                if packed and sum(other.file_size_in_bytes for other in (*packed, file)) > self._target:
                    if len(packed) > 1:
                        yield packed
                    packed = []
                packed.append(file)
            if len(packed) > 1:
                yield packed

    def _rewrite(self, sources: list[DataFile]) -> Rewritten | None:
        """None if a file can't be read as the table's schema has it, by what is known here."""
        with DataFileWriter(self._table, self._schema, "compacted") as writer:
            try:
                for batch in chain.from_iterable(file_rows(self._table, file, self._schema) for file in sources):
                    writer.write(pa.Table.from_batches([batch], self._schema))
            except NotProjected as error:
                _log.info("%s: %s: its group of files stays as it is", self._address, error)
                writer.remove()
                return None
            size, footer = writer.finish()
        records = sum(source.record_count for source in sources)
        if footer.num_rows != records:
            writer.remove()
            raise LoadError(f"{self._address}: files of {records} records have {footer.num_rows}: nothing was replaced")
        return Rewritten(sources, self._footers.data_file(writer.path, size, footer, sources[0].partition))

    def _remove(self, path: str) -> None:
        with suppress(OSError):
            self._table.io.delete(path)


def _undisturbed(table: Table) -> Iterator[ManifestEntry]:
    """The entries of data files to whose rows no delete file of the current snapshot applies.

    Delete files of a partition apply to data files that are not newer; those of an unpartitioned spec, to all of the
    table that are not newer (Iceberg's Table Spec, "Scan Planning"): also to those of their own commit, as of Flink.
    """
    snapshot = table.current_snapshot()
    newest: dict[Any, int] = defaultdict(int)
    for manifest in [] if snapshot is None else snapshot.manifests(table.io):
        if manifest.content == ManifestContent.DELETES:
            is_global = is_unpartitioned(table.specs()[manifest.partition_spec_id])
            for entry in manifest.fetch_manifest_entry(table.io):
                file = entry.data_file
                key = None if is_global else (file.spec_id, file.partition)
                newest[key] = max(newest[key], entry.sequence_number or 0)
    for entry in data_entries(table):
        file = entry.data_file
        if (entry.sequence_number or 0) > max(newest.get(None, -1), newest.get((file.spec_id, file.partition), -1)):
            yield entry
