"""What a table changes about a run: its columns, its commit, and the journal that follows the table.

    candidate-TOKEN.json     the manifest, written first
    the table's commit       the run's files, its number, the token, the offsets
    manifest.json            a copy of the candidate that the table has

A run that is killed before the table's commit has a plan and no commit: the next call finishes it. If it is killed
after it, the next call finds the run in the table and completes the journal from the candidate, or, without one, from
the offsets of the commit. Two calls may do a run at the same time, on stores without locks: the table takes one of
their commits, so nothing that belongs to a run is removed before the table has one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from spark_klog.errors import LoadError
from spark_klog.load.commit import attempts, point_to, shown
from spark_klog.load.journal.history import Identity, read_identity, read_manifest
from spark_klog.load.journal.model import (
    ATTEMPTS,
    LETTERS,
    LOAD,
    FileEntry,
    Manifest,
    Progress,
    RangeResult,
    attempt_of,
    attempt_path,
    candidate_path,
    changes_path,
    from_json,
    manifest_path,
    new_token,
    offsets_json,
    run_name,
    run_path,
    staging_path,
    token_of,
)
from spark_klog.load.journal.store import Store, arrow_file, read_json, to_json
from spark_klog.load.settings import WriteSettings
from spark_klog.load.table_columns import run_columns, time_column
from spark_klog.tables.change_files import change_files
from spark_klog.tables.changes import ChangeFormat
from spark_klog.tables.table import STREAMS, DataFile, Run, Stage, Table, field_ids

if TYPE_CHECKING:
    from spark_klog.base.names import TopicPartition

_log = logging.getLogger(__name__)
_CANDIDATE = re.compile(r"candidate-([0-9a-z]+)\.json")
#: Years before 1000 have fewer digits in some C libraries.
_SLOT = re.compile(r"date=(\d{1,4})-(\d\d)-(\d\d)(?:/hour=(\d\d))?/")
_EPOCH_DAY = date(1970, 1, 1)
#: Footers that are read at once.
_READS = 8


class TableCommits:
    """The commits of a load into its table, and the journal's, which follow them."""

    def __init__(self, table: Table, store: Store, load: str) -> None:
        self.table, self._store, self._load = table, store, load

    # ----- the journal follows the table

    def catch_up(self, number: int) -> int:
        """Bring the journal, whose last run is `number`, to the table's last run, and return it.

        `LoadError` if the table lacks runs that the journal has, or if nobody knows the offsets of its last one.
        """
        last = self.table.last_run(self._load)
        at = 0 if last is None else last.number
        if at < number:
            raise LoadError(
                f"{self.table.address} has {f'run {at}' if at else 'no run'} of this load last, and its journal "
                f"({self._store.address}/{manifest_path(number)}) run {number}: the table was made anew or restored; "
                "use another table, or remove the journal of a table that is to be loaded from the start"
            )
        if last is None or at == number:
            return number
        before = read_manifest(self._store, number) if number else None
        manifest = self._candidate(last) or self._rebuilt(last, before)
        if at > number + 1:
            _log.warning("%s: the journal is without runs %s to %s", self.table.address, number + 1, at - 1)
            identity = read_identity(self._store)
            assert identity is not None
            self._store.write(LOAD, to_json(replace(identity, first=at)))
        self._store.create(manifest_path(at), to_json(manifest))
        if at > number + 1:
            point_to(self._store, manifest)
        return at

    def _candidate(self, run: Run) -> Manifest | None:
        """The manifest that a run was to have; without a token, which the table may have forgotten, the only one."""
        tokens = [
            found[1] for name in self._store.names(run_path(run.number, "")) if (found := _CANDIDATE.fullmatch(name))
        ]
        token = run.token or (tokens[0] if len(tokens) == 1 else "")
        path = candidate_path(run.number, token)
        value = read_json(self._store, path) if token in tokens else None
        return None if value is None else from_json(Manifest, value, f"{self._store.address}/{path}")

    def _rebuilt(self, run: Run, before: Manifest | None) -> Manifest:
        """A manifest by the offsets of the table's commit."""
        if not run.token:
            raise LoadError(
                f"{self.table.address} has run {run.number}, of which neither the table's history nor its journal has "
                f"the offsets: restore {self._store.address}/{manifest_path(run.number)}, or use another table"
            )
        known = before.progress() if before else {}
        progress: dict[TopicPartition, Progress] = dict(known)
        for topic, each in run.offsets.items():
            topic_id = run.topic_ids.get(topic, "")
            for text, offset in each.items():
                key = topic, int(text)
                was = known.get(key, Progress(0, 0, topic_id))
                is_new = bool(was.topic_id and topic_id and was.topic_id != topic_id)
                again = max(was.incarnation + is_new, run.incarnations.get(topic, 0))
                progress[key] = Progress(offset, again, topic_id or was.topic_id)
        _log.warning(
            "%s: the journal has run %s by the table's offsets alone", self.table.address, run_name(run.number)
        )
        return Manifest(run.number, "", "", [], {}, [], [], [], offsets_json(progress))

    # ----- a run

    def prepare(self, settings: WriteSettings, topics: Sequence[str], stage: Stage) -> pa.Schema:
        """Make the table ready for a run; returns the columns of its files. As of `Table.prepare`, also errors."""
        columns = run_columns(settings, topics)
        layout = settings.layout
        assert layout in ("none", "day", "hour")
        place = time_column(settings)
        changes = settings.change_format(topics[0])
        key = () if changes is None else changes.key
        return self.table.prepare(columns, layout, place, self._load, stage, key)  # type: ignore[arg-type]

    def fits(self, results: Iterable[RangeResult], columns: pa.Schema) -> bool:
        """Whether a task's files are of columns that the table has, by their ids: it may have replaced some since."""
        entry = next((entry for item in results for entry in item.files), None)  # all have the same
        return entry is None or field_ids(self._footer(entry).schema.to_arrow_schema()) <= field_ids(columns)

    def commit(self, manifest: Manifest, changes: ChangeFormat | None) -> Manifest:
        """Commit a run to the table, then to the journal; errors as of `Table.append`. Returns what the journal has.

        The files of a run with `changes` are merged into the table, and are not its own.
        """
        token = new_token()
        entries = manifest.files
        if changes is not None:
            manifest = replace(manifest, files=[])
        self._store.write(candidate_path(manifest.run, token), to_json(manifest))
        offsets = {topic: {key: item.offset for key, item in each.items()} for topic, each in manifest.offsets.items()}
        ids = {
            topic: item.topic_id for topic, each in manifest.offsets.items() for item in each.values() if item.topic_id
        }
        again = {topic: max(item.incarnation for item in each.values()) for topic, each in manifest.offsets.items()}
        again = {topic: count for topic, count in again.items() if count}
        run = Run(self._load, manifest.run, token, offsets, ids, again)
        if changes is None:
            self.table.append(self._data_files(entries), run)
        else:
            paths = [item.path for item in entries]
            files = change_files(self.table.location, paths, changes.key) if paths else None
            self.table.upsert(files, run)
        # Another call may have seen the table's commit, and have made the same of it.
        self._store.create(manifest_path(manifest.run), to_json(manifest))
        return manifest

    def _data_files(self, entries: Sequence[FileEntry]) -> list[DataFile]:
        with ThreadPoolExecutor(_READS) as pool:
            footers = pool.map(self._footer, entries)
            return [
                DataFile(entry.path, entry.size, footer, _hour(entry.path))
                for entry, footer in zip(entries, footers, strict=True)
            ]

    def _footer(self, entry: FileEntry) -> pq.FileMetaData:
        try:
            with arrow_file(self._store, entry.path) as file:
                return pq.read_metadata(file)
        except (OSError, pa.ArrowException) as error:
            where = f"{self._store.address}/{entry.path}"
            raise LoadError(f"{where} can't be read, and the run is not committed ({error}): run again") from None

    def publish(self, manifest: Manifest, *, has_leftovers: bool = True) -> None:
        """Point to a run that the table has; remove what attempts have left. Does the rest after a kill.

        `has_leftovers` is whether attempts that count may have written files that the run does not have.
        """
        topics = [item.topic for item in manifest.partitions]
        self.remove_orphans(manifest.run, topics, has_leftovers=has_leftovers)
        try:
            self._store.remove(changes_path(manifest.run, ""))
            self._store.remove(staging_path(manifest.run))  # of attempts that were killed
        except LoadError as error:  # an attempt that Spark is about to stop writes there
            _log.warning("files of run %s that are of no use are left: %s", run_name(manifest.run), error)
        point_to(self._store, manifest)
        for name in self._store.names(run_path(manifest.run, "")):
            if _CANDIDATE.fullmatch(name):
                self._store.remove(run_path(manifest.run, name))

    def end_attempts(self, run: int) -> None:
        """Let attempts of a run that go on write nothing more. Their files go when the table has the run."""
        for name in self._store.names(ATTEMPTS):
            if (known := attempt_of(name)) is not None and known[0] == run:
                self._store.write(attempt_path(*known), b"ended")

    def remove_orphans(
        self, last: int, topics: Iterable[str], *, is_last_time: bool = False, has_leftovers: bool = True
    ) -> None:
        """Remove the files of attempts of runs up to `last`, which the table has, that neither it nor the runs have.

        The marker of an attempt that does not count stays until the next run has looked again (`is_last_time`), as it
        may go on meanwhile; without its marker it writes nothing more.
        """
        for run, of_run in attempts(self._store, last).items():
            manifest = read_manifest(self._store, run)
            counted: set[str] = set()
            # nobody knows the files of a run whose manifest was lost
            if manifest is not None and manifest.partitions:
                known = {item.path for item in manifest.files} | {f"{LETTERS}/{name}" for name in manifest.dead_letters}
                counted = {found for path in known if (found := token_of(path)) is not None}
                if has_leftovers or of_run - counted:
                    self._remove_unknown(known, of_run, {*topics, *(item.topic for item in manifest.partitions)})
            for token in of_run if is_last_time or not counted else of_run & counted:
                self._store.remove(attempt_path(run, token))

    def _remove_unknown(self, known: Collection[str], tokens: Collection[str], topics: Collection[str]) -> None:
        unknown = [path for path in shown(self._store, topics) if token_of(path) in tokens and path not in known]
        if unknown:
            known = {item.path for item in self.table.files()}
        for path in unknown:
            if path not in known:
                _log.info("removing %s/%s, which no run has", self._store.address, path)
                self._store.remove(path)


def identity_of_lost_journal(table: Table, fresh: Identity) -> Identity:
    """The load that a table without a journal belongs to: the one that it names, or the new one.

    `LoadError` if it belongs to streams, or names a load and has files, but none of its runs: then it is a copy.
    """
    owner = table.load_id()
    if owner is None:
        return fresh
    if owner == STREAMS:
        raise LoadError(f"{table.address} belongs to streams, by spark_klog.tables.upsert: use another table")
    if table.last_run(owner) is None and next(iter(table.files()), None) is not None:
        raise LoadError(
            f"{table.address} names the load {owner} and has no run of it: it is a copy of that load's table. Remove "
            "its property klog.load to load the topics into it from the start, or use another table"
        )
    return replace(fresh, load=owner)


def _hour(path: str) -> int | None:
    """The first hour of a file's partition, since the epoch, by its folder; None without one."""
    found = _SLOT.search(path)
    if found is None:
        return None
    year, month, day = (int(part) for part in found.groups()[:3])
    return (date(year, month, day) - _EPOCH_DAY).days * 24 + int(found[4] or 0)
