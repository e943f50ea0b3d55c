"""Where a load's records go: what a run does with a target, whatever it is, and how it does so with a folder of files.

The target of a table is in `table_commit.py`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import pyarrow as pa

from spark_klog.errors import LoadError
from spark_klog.load.journal import paths
from spark_klog.load.journal.checkpoint import read_summary, write_checkpoint
from spark_klog.load.journal.history import read_manifest
from spark_klog.load.journal.model import Latest, Manifest, RangeResult
from spark_klog.load.journal.store import Store, to_json
from spark_klog.load.settings import WriteSettings
from spark_klog.tables.changes import ChangeFormat
from spark_klog.tables.table import Stage

_log = logging.getLogger(__name__)


class Target(ABC):
    """What takes the files of a load, whose journal is in `store`. `location` is where tasks open it.

    Methods raise `LoadError`, which names the `address`: the target as its user does.
    """

    #: Whether it has columns of its own, which take new fields and wider numbers; else each file has its own.
    widens = False
    #: Whether a column may get another name.
    renames = False
    #: Whether a run may load offsets again that an earlier one has, by files that replace those of that run.
    loads_again = True
    #: As of `Table.journal_name`; "" for files.
    journal_name = ""

    def __init__(self, store: Store, address: str, location: str) -> None:
        self.store, self.address, self.location = store, address, location

    def exists(self) -> bool:
        """Whether it is there without a journal, so that the files in it may be of others."""
        return False

    def owner(self) -> str | None:
        """The id of the load that it belongs to, if it says so itself: then the journal may be lost."""
        return None

    def last_run(self, load: str) -> int:
        """The last run of a load that it has itself, 0 before the first, and if the journal alone knows."""
        return 0

    def catch_up(self, load: str, number: int) -> int:
        """Bring the journal, whose last run is `number`, to the last run that the target has, and return it."""
        return number

    def prepare(self, load: str, settings: WriteSettings, topics: Sequence[str], stage: Stage) -> pa.Schema | None:
        """Make it ready for a run; returns the columns that files are to have, None if they have the run's own."""
        return None

    def keeps(self, results: Sequence[RangeResult], columns: pa.Schema | None) -> bool:
        """Whether what a task has written can still be committed, in files of these columns if they are given."""
        return True

    def fits(self, settings: WriteSettings, old: WriteSettings, topics: Sequence[str]) -> bool:
        """Whether files that tasks have written by `old` settings can be committed beside others by new ones."""
        return False  # readers take the columns of the newest file

    def settle(self, load: str, manifest: Manifest, changes: ChangeFormat, keep_deletes: float | None) -> Manifest:
        """The manifest of a run of `changes`, with dead letters of those that need a row that is not there.

        Deleted keys are remembered for so many seconds, if at all. It is called before `commit`.
        """
        return manifest

    @abstractmethod
    def commit(self, load: str, manifest: Manifest, changes: ChangeFormat | None) -> Manifest:
        """Commit a run, whose files are `changes` or are added; returns the manifest that the journal has.

        `LoadError` if another run has committed it meanwhile.
        """

    def publish(self, manifest: Manifest, *, has_leftovers: bool = True) -> None:
        """Show a committed run to readers, and point to it. Does the rest after a kill.

        `has_leftovers` is whether attempts of its tasks may have written files that the run does not have.
        """
        self._show(manifest, has_leftovers)
        point_to(self.store, manifest)

    @abstractmethod
    def _show(self, manifest: Manifest, has_leftovers: bool) -> None: ...

    def end_attempts(self, run: int, topics: Sequence[str]) -> None:
        """Let attempts of a run that begins anew write nothing more; remove their files where readers see them.

        Their markers say so, and stay: a file that is under way now goes when the run is there.
        """
        known = filter(None, map(paths.attempt_of, self.store.names(paths.ATTEMPTS)))
        tokens = {token for number, token in known if number == run}
        for token in tokens:
            self.store.write(paths.attempt(run, token), b"ended")
        if tokens:
            self._remove_ended(tokens, topics)

    def _remove_ended(self, tokens: Collection[str], topics: Sequence[str]) -> None:
        """Remove the files of attempts that have ended, if readers see them: those of a table are not among its own."""
        return

    def remove_orphans(
        self, last: int, topics: Iterable[str], *, is_last_time: bool = False, has_leftovers: bool = True
    ) -> None:
        """Remove the files of attempts of runs up to `last`, where they are among the others, that no run has.

        An attempt that was late or killed has left its marker. The marker stays after the commit until the next run
        looks again (`is_last_time`), as the attempt may go on meanwhile; without its marker it writes nothing more.
        `has_leftovers` is whether attempts that count may have written such files, too.
        """
        tokens: dict[int, set[str]] = defaultdict(set)
        for name in self.store.names(paths.ATTEMPTS) if self.store.shows_whole_files_only else ():
            run, token = paths.attempt_of(name) or (last + 1, "")
            if run <= last:
                tokens[run].add(token)
        for run, of_run in tokens.items():
            manifest = read_manifest(self.store, run)
            known: set[str] = set()
            others = set(topics)
            if manifest is not None:
                known = {file.path for file in manifest.files} | {
                    paths.dead_letter(name) for name in manifest.dead_letters
                }
                others |= {part.topic for part in manifest.partitions}
            counted = set(map(paths.token_of, known))
            is_known = self._knows_files(manifest)
            if is_known and (has_leftovers or of_run - counted):
                self._remove_unknown(known, of_run, others)
            for token in of_run if is_last_time or not is_known else of_run & counted:
                self.store.remove(paths.attempt(run, token))

    def _knows_files(self, manifest: Manifest | None) -> bool:
        """Whether a run has the files of its manifest and no others; None is that of a run that is not committed."""
        return True

    def _remove_unknown(self, known: Collection[str], tokens: Collection[str], topics: Collection[str]) -> None:
        """Remove the files and dead letters of these attempts that neither the run nor the target has."""
        there = [paths.dead_letter(name) for name in self.store.names(paths.LETTERS)]
        there += [path for topic in topics for path in self.store.paths_below(paths.topic_folder(topic))]
        unknown = [path for path in there if paths.token_of(path) in tokens and path not in known]
        files = self._files() if unknown else ()
        for path in unknown:
            if path not in files:
                self._remove(path)

    @abstractmethod
    def _files(self) -> Collection[str]:
        """The paths of the files that the target has now."""

    def _remove(self, path: str) -> None:
        _log.info("removing %s/%s, which no run has", self.store.address, path)
        self.store.remove(path)

    def _remove_waiting(self, run: int) -> None:
        """Remove what waited for the commit of a run."""
        try:
            self.store.remove(paths.changes(run, ""))
            self.store.remove(paths.staging(run))
        except LoadError as error:  # an attempt that Spark is about to stop writes there
            _log.warning("files of run %s that are of no use are left: %s", paths.run_name(run), error)


class FolderTarget(Target):
    """A folder of files. The manifest is the commit; in an object store its files are there before it."""

    def __init__(self, store: Store, output: str) -> None:
        super().__init__(store, store.address, output)

    def commit(self, load: str, manifest: Manifest, changes: ChangeFormat | None) -> Manifest:
        write_manifest(self.store, manifest)
        return manifest

    def _show(self, manifest: Manifest, has_leftovers: bool) -> None:
        self._remove_replaced(manifest)
        if not self.store.shows_whole_files_only:
            for file in manifest.files:
                self.store.move(paths.staged(manifest.run, file.path), file.path)
            show_letters(self.store, manifest)
            self._remove_waiting(manifest.run)
            return
        # those of a compaction that was killed before this commit, too
        topics = {part.topic for part in manifest.partitions}
        self.remove_orphans(manifest.run + 1, topics, has_leftovers=has_leftovers)

    def _remove_ended(self, tokens: Collection[str], topics: Sequence[str]) -> None:
        self._remove_unknown((), tokens, topics)

    def _files(self) -> Collection[str]:
        return read_summary(self.store).files

    def _remove_replaced(self, manifest: Manifest) -> None:
        """Remove the files that a run has replaced by others."""
        known = {file.path for file in manifest.files} | set(manifest.dead_letters)
        for result in manifest.replaced:
            for file in result.files:
                if file.path not in known:
                    self.store.remove(file.path)
            for name in result.dead_letters:
                if paths.is_of_values(name) and name not in known:  # two ranges may have one corrupt batch
                    self.store.remove(paths.dead_letter(name))


def write_manifest(store: Store, manifest: Manifest) -> None:
    """Commit the run. `LoadError` if another run has committed it meanwhile."""
    if not store.create(paths.manifest(manifest.run), to_json(manifest)):
        raise LoadError(
            f"{store.address}: another run of this load has committed run {paths.run_name(manifest.run)}; its records "
            "are there once. Run again for what has come since"
        )


def show_letters(store: Store, manifest: Manifest) -> None:
    """Show the dead letters of a run whose tasks are complete."""
    for name in manifest.dead_letters if not store.shows_whole_files_only else ():
        path = paths.dead_letter(name)
        store.move(paths.staged(manifest.run, path), path)


def point_to(store: Store, manifest: Manifest) -> None:
    """The last step: `latest.json` names the run."""
    pointer = Latest(paths.run_name(manifest.run), paths.manifest(manifest.run), manifest.finished)
    store.write(paths.LATEST, to_json(pointer))
    write_checkpoint(store)
    _log.debug("committed run %s of %s", paths.run_name(manifest.run), store.address)
