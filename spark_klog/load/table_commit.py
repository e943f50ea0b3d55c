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
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from spark_klog.errors import LoadError
from spark_klog.load.journal import paths
from spark_klog.load.journal.history import read_identity, read_manifest
from spark_klog.load.journal.model import FileEntry, Manifest, Progress, Range, RangeResult, from_json, offsets_json
from spark_klog.load.journal.store import arrow_file, open_store, read_json, to_json
from spark_klog.load.rows import has_place
from spark_klog.load.settings import WriteSettings
from spark_klog.load.table_columns import layout_now, run_columns, time_column
from spark_klog.load.target import Target, point_to
from spark_klog.load.tasks.task import UNPARSED
from spark_klog.tables.change_files import ChangeFiles, change_files
from spark_klog.tables.change_order import LACKING, OFFSET, PARTITION
from spark_klog.tables.changes import ChangeFormat
from spark_klog.tables.deleted_keys import forget, remember, with_memory
from spark_klog.tables.table import LETTERS, STREAMS, DataFile, Run, Stage, Table, field_ids

if TYPE_CHECKING:
    from spark_klog.base.names import TopicPartition

_log = logging.getLogger(__name__)
_CANDIDATE = re.compile(r"candidate-([0-9a-z]+)\.json")
#: Years before 1000 have fewer digits in some C libraries.
_SLOT = re.compile(r"date=(\d{1,4})-(\d\d)-(\d\d)(?:/hour=(\d\d))?/")
_EPOCH_DAY = date(1970, 1, 1)
#: Footers that are read at once.
_READS = 8
#: What the names of dead letters have that need a row that is not there, where others have the token of an attempt.
_LOST = "needrow"


class TableTarget(Target):
    """A table. It has the commits of a load, and the load's journal in its folder follows them."""

    widens = True
    loads_again = False

    def __init__(self, table: Table) -> None:
        super().__init__(open_store(table.location, of_table=True), table.address, table.location)
        self._table = table
        self.renames, self.journal_name = table.renames, table.journal_name
        #: By `settle`: the changes of the run that is about to be committed, and how long it remembers deleted keys.
        self._changes: ChangeFiles | None = None
        self._keep_deletes: float | None = None

    def exists(self) -> bool:
        return self._table.schema() is not None

    def owner(self) -> str | None:
        """As of `Target`. `LoadError` if the table belongs to streams, has dead letters, or is a copy: it has files and
        none of the runs of the load that it names."""
        owner = self._table.load_id()
        if owner == STREAMS:
            raise LoadError(f"{self.address} belongs to streams, by spark_klog.tables.upsert: use another table")
        if owner is not None and owner.endswith(LETTERS):
            raise LoadError(f"{self.address} has the dead letters of another load: use another table")
        if owner is not None and not self.last_run(owner) and next(iter(self._table.files()), None) is not None:
            raise LoadError(
                f"{self.address} names the load {owner} and has no run of it: it is a copy of that load's table. "
                "Remove its property klog.load to load the topics into it from the start, or use another table"
            )
        return owner

    def last_run(self, load: str) -> int:
        last = self._table.last_run(load)
        return 0 if last is None else last.number

    # ----- the journal follows the table

    def catch_up(self, load: str, number: int) -> int:
        """As of `Target`. `LoadError` if the table lacks runs that the journal has, or if nobody knows the offsets of
        its last one."""
        last = self._table.last_run(load)
        at = 0 if last is None else last.number
        if at < number:
            raise LoadError(
                f"{self.address} has {f'run {at}' if at else 'no run'} of this load last, and its journal "
                f"({self.store.address}/{paths.manifest(number)}) run {number}: the table was made anew or restored; "
                "use another table, or remove the journal of a table that is to be loaded from the start"
            )
        if last is None or at == number:
            return number
        before = read_manifest(self.store, number) if number else None
        manifest = self._candidate(last) or self._rebuilt(last, before)
        if at > number + 1:
            _log.warning("%s: the journal is without runs %s to %s", self.address, number + 1, at - 1)
            identity = read_identity(self.store)
            assert identity is not None
            self.store.write(paths.LOAD, to_json(replace(identity, first=at)))
        self.store.create(paths.manifest(at), to_json(manifest))
        if at > number + 1:
            point_to(self.store, manifest)
        return at

    def _candidate(self, run: Run) -> Manifest | None:
        """The manifest that a run was to have; without a token, which the table may have forgotten, the only one."""
        tokens = [
            match[1] for name in self.store.names(paths.in_run(run.number, "")) if (match := _CANDIDATE.fullmatch(name))
        ]
        token = run.token or (tokens[0] if len(tokens) == 1 else "")
        path = paths.candidate(run.number, token)
        value = read_json(self.store, path) if token in tokens else None
        return None if value is None else from_json(Manifest, value, f"{self.store.address}/{path}")

    def _rebuilt(self, run: Run, before: Manifest | None) -> Manifest:
        """A manifest by the offsets of the table's commit."""
        if not run.token:
            raise LoadError(
                f"{self.address} has run {run.number}, of which neither the table's history nor its journal has "
                f"the offsets: restore {self.store.address}/{paths.manifest(run.number)}, or use another table"
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
            "%s: the journal has run %s by the table's offsets alone", self.address, paths.run_name(run.number)
        )
        return Manifest(run.number, "", "", [], {}, [], [], [], offsets_json(progress))

    # ----- a run

    def prepare(self, load: str, settings: WriteSettings, topics: Sequence[str], stage: Stage) -> pa.Schema:
        """As of `Target` and of `Table.prepare`, also errors."""
        columns = run_columns(settings, topics)
        layout, place = layout_now(settings, columns), time_column(settings)
        changes = settings.change_format(topics[0])
        key = () if changes is None else changes.key
        return self._table.prepare(columns, layout, place, load, stage, key)

    def keeps(self, results: Sequence[RangeResult], columns: pa.Schema | None) -> bool:
        """As of `Target`: others may have vacuumed the files, or the table may have replaced a column of theirs."""
        entries = [entry for part in results for entry in part.files]
        if not all(self.store.size(entry.path) == entry.size for entry in entries):
            return False
        if columns is None or not entries:
            return True
        schema = self._footer(entries[0]).schema.to_arrow_schema()  # all have the same
        return field_ids(schema) <= field_ids(columns)

    def fits(self, settings: WriteSettings, old: WriteSettings, topics: Sequence[str]) -> bool:
        """As of `Target`: all files of the table have its columns. The changes of a key are of one type."""
        return not settings.upsert_key and has_place(
            *(pa.struct(run_columns(each, topics)) for each in (settings, old))
        )

    def settle(self, load: str, manifest: Manifest, changes: ChangeFormat, keep_deletes: float | None) -> Manifest:
        """As of `Target`. Of a run that is settled again letters have the same names."""
        self._changes, self._keep_deletes = None, keep_deletes
        columns = self._table.schema()
        if not manifest.files or columns is None:
            return manifest
        files = change_files(self._table.location, [entry.path for entry in manifest.files], changes.key)
        if keep_deletes is not None:
            files = with_memory(files, self.store, self._table.last_run(load))
        lost = sorted(
            files.without_row(columns, self._table.rows), key=lambda change: (change[PARTITION], change[OFFSET])
        )
        self._changes = replace(files, letters=frozenset((change[PARTITION], change[OFFSET]) for change in lost))
        parts, names = [], list(manifest.dead_letters)
        for part in manifest.partitions:
            texts = [each[LACKING]["letter"] for each in lost if each[PARTITION] == part.partition]
            if lines := [f"{line}\n" for text in texts for line in text.split("\n")]:
                names.append(paths.letters(Range(part.topic, part.partition, part.start, part.until), _LOST))
                self.store.write(paths.dead_letter(names[-1]), "".join(lines).encode())
                gaps = dict(sorted({**part.gaps, UNPARSED: part.gaps.get(UNPARSED, 0) + len(lines)}.items()))
                part = replace(part, records=part.records - len(lines), bad=part.bad + len(lines), gaps=gaps)
            parts.append(part)
        return replace(manifest, partitions=parts, dead_letters=names)

    def commit(self, load: str, manifest: Manifest, changes: ChangeFormat | None) -> Manifest:
        """Commit a run to the table, then to the journal; errors as of `Table.append`.

        The files of a run with `changes` are merged into the table, and are not its own.
        """
        token = paths.new_token()
        entries = manifest.files
        if changes is not None:
            manifest = replace(manifest, files=[])
        self.store.write(paths.candidate(manifest.run, token), to_json(manifest))
        offsets = {topic: {key: at.offset for key, at in each.items()} for topic, each in manifest.offsets.items()}
        ids = {topic: at.topic_id for topic, each in manifest.offsets.items() for at in each.values() if at.topic_id}
        again = {topic: max(at.incarnation for at in each.values()) for topic, each in manifest.offsets.items()}
        again = {topic: count for topic, count in again.items() if count}
        run = Run(load, manifest.run, token, offsets, ids, again)
        if changes is None:
            self._table.append(self._data_files(entries), run)
        else:
            if self._keep_deletes is not None:
                remember(self._changes, self.store, self._table.last_run(load), run, self._keep_deletes)
            self._table.upsert(self._changes, run)
        # Another call may have seen the table's commit, and have made the same of it.
        self.store.create(paths.manifest(manifest.run), to_json(manifest))
        return manifest

    def _data_files(self, entries: Sequence[FileEntry]) -> list[DataFile]:
        with ThreadPoolExecutor(_READS) as pool:
            # to start a thread takes longer than to read one
            footers = (pool.map if len(entries) > 1 else map)(self._footer, entries)
            return [
                DataFile(entry.path, entry.size, footer, _hour(entry.path))
                for entry, footer in zip(entries, footers, strict=True)
            ]

    def _footer(self, entry: FileEntry) -> pq.FileMetaData:
        try:
            with arrow_file(self.store, entry.path) as file:
                return pq.read_metadata(file)
        except (OSError, pa.ArrowException) as error:
            where = f"{self.store.address}/{entry.path}"
            raise LoadError(f"{where} can't be read, and the run is not committed ({error}): run again") from None

    def publish(self, manifest: Manifest, *, has_leftovers: bool = True) -> None:
        super().publish(manifest, has_leftovers=has_leftovers)
        for name in self.store.names(paths.in_run(manifest.run, "")):
            if _CANDIDATE.fullmatch(name):
                self.store.remove(paths.in_run(manifest.run, name))
        forget(self.store, manifest.run)

    def _show(self, manifest: Manifest, has_leftovers: bool) -> None:
        """Remove what attempts have left: readers see the run by the table."""
        self.remove_orphans(manifest.run, [part.topic for part in manifest.partitions], has_leftovers=has_leftovers)
        self._remove_waiting(manifest.run)

    def _knows_files(self, manifest: Manifest | None) -> bool:
        return manifest is not None and bool(manifest.partitions)  # else it was lost, or another call may have one

    def _files(self) -> Collection[str]:
        return {file.path for file in self._table.files()}


def _hour(path: str) -> int | None:
    """The first hour of a file's partition, since the epoch, by its folder; None without one."""
    match = _SLOT.search(path)
    if match is None:
        return None
    year, month, day = (int(part) for part in match.groups()[:3])
    return (date(year, month, day) - _EPOCH_DAY).days * 24 + int(match[4] or 0)
