"""The committed files of a load, for readers: of one output, exactly what its runs have published."""

from __future__ import annotations

from dataclasses import dataclass

from spark_klog.load.journal.history import committed_files, manifests, open_load
from spark_klog.load.journal.model import STAGED, FileEntry, place_of, staged_path


@dataclass(frozen=True)
class CommittedFile(FileEntry):
    """A committed file and the run that wrote it; `path` opens it by pyarrow.

    `first` and `last` are the offsets that it covers, `records` those that it has; times are ms since the epoch.
    """

    run: int


def files(output: str, topic: str | None = None) -> list[CommittedFile]:
    """The committed files of the load in the folder or URI `output`, by topic, partition and offset.

    `LoadError` if there is no load, or a file of it is damaged.
    """
    store, _ = open_load(output)
    runs = list(manifests(store))
    last = runs[-1].run if runs else 0
    found = [each for each in committed_files(runs).values() if topic in (None, each[0].topic)]

    def place(item: FileEntry, run: int) -> str:
        # The last run may have been killed between its commit and its last rename.
        is_staged = run == last and not store.shows_whole_files_only
        if is_staged and store.size(staged_path(run, item.path)) is not None:
            return store.uri(staged_path(run, item.path))
        return store.uri(item.path)

    made = [CommittedFile(**{**item.__dict__, "path": place(item, run)}, run=run) for item, run in found]
    return sorted(made, key=lambda item: (item.topic, item.partition, _incarnation(item.path), item.first))


def _incarnation(path: str) -> int:
    place = place_of(path.removesuffix(STAGED))
    return 0 if place is None else place[2]
