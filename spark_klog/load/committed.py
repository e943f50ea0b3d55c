"""The committed files of a load, for readers: of one output, exactly what its runs have published."""

from __future__ import annotations

from dataclasses import dataclass

from spark_klog.errors import LoadError
from spark_klog.load.history import manifests, read_identity
from spark_klog.load.model import FileEntry, staged_path
from spark_klog.load.store import open_store


@dataclass(frozen=True)
class CommittedFile:
    """A file of a load. `first` and `last` are the offsets that it covers, `records` those that it has, times are ms
    since the epoch, `path` opens it by pyarrow."""

    path: str
    topic: str
    partition: int
    first: int
    last: int
    records: int
    size: int
    min_time: int
    max_time: int
    run: int


def files(output: str, topic: str | None = None) -> list[CommittedFile]:
    """The committed files of the load in the folder or URI `output`, by topic, partition and offset.

    `LoadError` if there is no load, or a file of it is damaged.
    """
    store = open_store(output)
    if read_identity(store) is None:
        raise LoadError(f"{store.address} has no load: name the --output of jobs/batch_load.py")
    found: list[tuple[FileEntry, int]] = []
    last = None
    for last in manifests(store):
        found += [(item, last.run) for item in last.files if topic in (None, item.topic)]

    def place(item: FileEntry, run: int) -> str:
        # The last run may have been killed between its commit and its last rename.
        is_staged = last is not None and run == last.run and not store.shows_whole_files_only
        if is_staged and store.size(item.path) is None:
            return store.uri(staged_path(run, item.path))
        return store.uri(item.path)

    made = [CommittedFile(**{**item.__dict__, "path": place(item, run)}, run=run) for item, run in found]
    return sorted(made, key=lambda item: (item.topic, item.partition, item.run, item.first))
