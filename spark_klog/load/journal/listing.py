"""The files of a load, for those who read them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spark_klog.load.journal.checkpoint import read_summary
from spark_klog.load.journal.history import open_load
from spark_klog.load.journal.model import STAGED, FileEntry, place_of, staged_path
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
        found = [one for one in table_files(table, summary) if topic in (None, one.topic) or not one.topic]
        return [replace(one, path=store.uri(one.path)) if is_below(one.path) else one for one in found]
    entries = [each for each in summary.files.values() if topic in (None, each[0].topic)]

    def place(item: FileEntry, run: int) -> str:
        # The last run may have been killed between its commit and its last rename.
        is_staged = run == summary.run and not store.shows_whole_files_only
        if is_staged and store.size(staged_path(run, item.path)) is not None:
            return store.uri(staged_path(run, item.path))
        return store.uri(item.path)

    made = [CommittedFile(**{**vars(item), "path": place(item, run)}, run=run) for item, run in entries]
    incarnations = {item.path: (place_of(item.path.removesuffix(STAGED)) or (0, 0, 0))[2] for item in made}
    return sorted(made, key=lambda item: (item.topic, item.partition, incarnations[item.path], item.first))


def is_below(path: str) -> bool:
    """Whether the path of a table's file is relative to its location; those of a copy may be of another table."""
    return not path.startswith("/") and "://" not in path


def table_files(table: Table, summary: Summary) -> list[CommittedFile]:
    """The files of the current table, each with its run if it is of one; paths are as the table has them."""
    made = []
    for one in table.files():
        if one.path in summary.files:
            entry, run = summary.files[one.path]
            made.append(CommittedFile(**{**vars(entry), "size": one.size}, run=run))
        else:
            place, extent = next(iter(one.offsets.items())) if len(one.offsets) == 1 else (("", -1), (0, 0))
            made.append(CommittedFile(one.path, *place, *extent, one.records, one.size, 0, 0, 0))
    again = {item.path: (place_of(item.path) or (0, 0, 0))[2] for item in made}
    return sorted(made, key=lambda item: (item.topic, item.partition, again[item.path], item.first))
