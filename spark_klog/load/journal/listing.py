"""The files of a load, for those who read them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spark_klog.load.journal import paths
from spark_klog.load.journal.checkpoint import read_summary
from spark_klog.load.journal.history import open_load
from spark_klog.load.journal.model import FileEntry
from spark_klog.load.journal.store import Store
from spark_klog.load.journal.summary import Summary
from spark_klog.tables.table import Table


@dataclass(frozen=True)
class CommittedFile(FileEntry):
    """A committed file and the run that wrote it; `path` opens it by pyarrow.

    `first` and `last` are the offsets that it covers, `records` those that it has; times are ms since the epoch.
    A table has files that no run has written, of another writer or compacted ones: their `run` is 0, as are the times.
    `topic` is "" and `partition` -1 unless all their records are of one partition.
    """

    run: int


def files(output: str, topic: str | None = None) -> list[CommittedFile]:
    """The committed files of the load in the folder or URI `output`, by topic, partition and offset.

    Of a load into a table, whose address `output` may be, the files of the current table. `LoadError` if there is no
    load, or a file of it is damaged.
    """
    store, identity = open_load(output)
    summary = read_summary(store)
    table = identity.table_at(output)
    if table is not None:
        current = [file for file in table_files(table, summary) if topic in (None, file.topic) or not file.topic]
        return [replace(file, path=store.uri(file.path)) if is_below(file.path) else file for file in current]
    listed = [file for file in committed(summary) if topic in (None, file.topic)]
    return [replace(file, path=store.uri(stored_path(store, summary, file))) for file in sorted(listed, key=_order)]


def committed(summary: Summary) -> list[CommittedFile]:
    """The files of a load in a folder, by their final paths."""
    return [CommittedFile(**vars(entry), run=run) for entry, run in summary.files.values()]


def stored_path(store: Store, summary: Summary, file: CommittedFile) -> str:
    """Where a file of a load is: the last run may have been killed between its commit and its last rename."""
    path = paths.staged(file.run, file.path)
    is_staged = file.run == summary.run and not store.shows_whole_files_only
    return path if is_staged and store.size(path) is not None else file.path


def _order(file: CommittedFile) -> tuple[str, int, int, int]:
    incarnation = (paths.place_of(file.path) or (0, 0, 0))[2]
    return file.topic, file.partition, incarnation, file.first


def is_below(path: str) -> bool:
    """Whether the path of a table's file is relative to its location; those of a copy may be of another table."""
    return not path.startswith("/") and "://" not in path


def table_files(table: Table, summary: Summary) -> list[CommittedFile]:
    """The files of the current table, each with its run if it is of one; paths are as the table has them."""
    made = []
    for file in table.files():
        if file.path in summary.files:
            entry, run = summary.files[file.path]
            made.append(CommittedFile(**{**vars(entry), "size": file.size}, run=run))
        else:
            place, extent = next(iter(file.offsets.items())) if len(file.offsets) == 1 else (("", -1), (0, 0))
            made.append(CommittedFile(file.path, *place, *extent, file.records, file.size, 0, 0, 0))
    return sorted(made, key=_order)
