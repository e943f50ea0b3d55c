"""Compact a load: small Parquet files of adjacent ranges become larger ones, with the same records in the same order.

A compaction is a run of the load that replaces ranges by one that covers them, as a run does that loads them again: it
commits by its manifest, and readers of the list of files see the old files or the new ones. It goes in steps, each a
run of its own. A plan of a compaction has no tasks: a run of the load that finds one, of a compaction that was killed
before its commit, finishes it by removing it.

The lock or the lease of the load keeps runs away for the time of a step. In an object store a process that stood still
may lose its lease, and its commit be on its way all the same. So what it has written has the marker of an attempt of
the run after the one that it would be: its files are removed when another run has that number, and never before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.base.names import TopicPartition
from spark_klog.errors import LoadError
from spark_klog.load.commit import assembled, settings_of
from spark_klog.load.journal import history, paths
from spark_klog.load.journal.checkpoint import read_summary
from spark_klog.load.journal.model import FileEntry, Manifest, Plan, Range, RangeResult, TaskResults, now_text
from spark_klog.load.journal.store import Store, arrow_file, locked, to_json
from spark_klog.load.journal.summary import Summary
from spark_klog.load.rows import fitted
from spark_klog.load.settings import PARQUET, WriteSettings
from spark_klog.load.target import FolderTarget, write_manifest
from spark_klog.load.tasks.writers import MOST_OPEN, OpenFile

_log = logging.getLogger(__name__)
TARGET_BYTES = 256 * 1024 * 1024
#: The bounds of a step: ranges that it replaces, and the bytes of their files in targets.
_MOST_RANGES, _MOST_TARGETS = 1000, 4


@dataclass(frozen=True)
class Compacted:
    """What a call has done: its runs, and the files that it has replaced by others, with their bytes."""

    runs: list[int] = field(default_factory=list)
    files_before: int = 0
    files_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0

    def plus(self, manifest: Manifest) -> Compacted:
        old = [file for gone in manifest.replaced for file in gone.files]
        return Compacted(
            [*self.runs, manifest.run],
            self.files_before + len(old),
            self.files_after + len(manifest.files),
            self.bytes_before + sum(file.size for file in old),
            self.bytes_after + sum(file.size for file in manifest.files),
        )


def compact(output: str, target_bytes: int = TARGET_BYTES) -> Compacted:
    """Compact the files of the load in `output`, up to about `target_bytes` each.

    Files that are not half as large are merged with the next ones of their partition, if that halves their number.
    With folders by time, those of a folder are, and a new range has at most 24 folders. `LoadError` if the load has no
    Parquet files, a run is under way or was killed, or a file is damaged: then nothing is changed, except by the steps
    that are committed.
    """
    store, identity = history.open_load(output)
    if identity.table:
        raise LoadError(f"{store.address} has the files of a table: name the table, delta:URI or iceberg:NAME")
    if identity.format != PARQUET:
        raise LoadError(f"{store.address} has {identity.format} files: only Parquet files are compacted")
    target, done = FolderTarget(store, output), Compacted()
    after: dict[TopicPartition, int] = {}
    while True:
        with locked(store):
            step = _next_step(target, target_bytes, after)
            if step is None:
                return done
            done = done.plus(step.run())
        after |= {key: groups[-1][-1].until for key, groups in step.groups.items()}


def _next_step(target: FolderTarget, target_bytes: int, after: Mapping[TopicPartition, int]) -> _Step | None:
    """What to compact next, of each partition the first ranges from `after` on; None if there is nothing."""
    store = target.store
    number = history.settled_run(store)
    manifest = history.read_manifest(store, number) if number else None
    if manifest is None:
        return None
    if history.read_plan(store, number + 1) is not None:
        raise LoadError(
            f"{store.address}: run {paths.run_name(number + 1)} failed or was killed: compact after the next run, "
            "which finishes it"
        )
    if not history.is_pointed_to(store, number):
        target.publish(manifest)
    if not store.shows_whole_files_only:
        history.discard_run(store, number + 1)  # files of a compaction that was killed
    summary = read_summary(store, with_ranges=True)
    settings = _settings(store, number)
    groups: dict[TopicPartition, list[list[RangeResult]]] = {}
    ranges = size = 0
    for key, line in sorted(summary.totals.items()):
        known = summary.known_ranges((*key, line["incarnation"]))
        for group in _groups([result for result in known if result.start >= after.get(key, 0)], target_bytes):
            is_next = key not in groups or groups[key][-1][-1].until == group[0].start
            if not is_next or (groups and (ranges + len(group) > _MOST_RANGES or size > _MOST_TARGETS * target_bytes)):
                break
            if not _is_worth_it(group, settings.layout, target_bytes):
                if key in groups:
                    break
                continue
            groups.setdefault(key, []).append(group)
            ranges += len(group)
            size += _size(group)
    return _Step(target, summary, settings, target_bytes, groups) if groups else None


def _settings(store: Store, number: int) -> WriteSettings:
    """How the last run has written its files."""
    plan = next((plan for run in range(number, 0, -1) if (plan := history.read_plan(store, run)) is not None), None)
    if plan is None:
        raise LoadError(f"{store.address}/{paths.plan(number)} is missing: restore it")
    return settings_of(store, plan)


def _size(ranges: Sequence[RangeResult]) -> int:
    return sum(file.size for result in ranges for file in result.files)


def _folder(path: str) -> str:
    """The folder of the layout: the path without the topic's folder and the name."""
    return "/".join(path.split("/")[1:-1])


def _folders(ranges: Sequence[RangeResult]) -> set[str]:
    return {_folder(file.path) for result in ranges for file in result.files}


def _groups(ranges: Sequence[RangeResult], target_bytes: int) -> Iterator[list[RangeResult]]:
    """Adjacent ranges that make about one file, or one for each of a few folders; large ranges stay alone."""
    group: list[RangeResult] = []
    folders: set[str] = set()
    size = 0
    for result in ranges:
        more, folders_of = _size([result]), _folders([result])
        if group and (
            group[-1].until != result.start
            or max(more, size if len(group) == 1 else 0) >= target_bytes // 2
            or size + more > target_bytes
            or len(group) == _MOST_RANGES
            or len(folders | folders_of) > MOST_OPEN
        ):
            yield group
            group, folders, size = [], set(), 0
        group.append(result)
        folders |= folders_of
        size += more
    if group:
        yield group


def _is_worth_it(group: Sequence[RangeResult], layout: str, target_bytes: int) -> bool:
    """Whether there would be half as many files at most. What was compacted once is left as it is."""
    files = [file for result in group for file in result.files]
    folders = len(_folders(group))
    if folders > MOST_OPEN:  # who restores a range holds files of so many folders open
        return False
    expected = folders if layout != "none" else -(-_size(group) // target_bytes)
    return len(files) >= 2 * max(1, expected)


class _Step:
    """A run that replaces groups of adjacent ranges by a range each."""

    def __init__(
        self,
        target: FolderTarget,
        summary: Summary,
        settings: WriteSettings,
        target_bytes: int,
        groups: dict[TopicPartition, list[list[RangeResult]]],
    ) -> None:
        self.groups = groups
        self._target, self._store, self._summary, self._settings = target, target.store, summary, settings
        self._bytes = target_bytes
        self._started = now_text()
        self._paths: list[str] = []

    def run(self) -> Manifest:
        """Write the files and commit; if that fails, nothing is changed. `LoadError`."""
        store, number, token = self._store, self._summary.run + 1, paths.new_token()
        marker = paths.attempt(number + 1, token)
        if store.shows_whole_files_only:
            store.create(marker, b"")
        try:
            with store.scratch(paths.staging(number)) as folder:
                results = {
                    key: [self._write(key, group, folder, number, token) for group in groups]
                    for key, groups in self.groups.items()
                }
                store.settle()
        except LoadError:
            with suppress(LoadError):  # else they go as if this was killed
                for path in self._paths:
                    store.remove(path)
                store.remove(marker)
            raise
        manifest = self._commit(number, results)
        self._target.publish(manifest, has_leftovers=False)
        store.remove(marker)
        return manifest

    # ----- files

    def _write(
        self, key: TopicPartition, group: Sequence[RangeResult], scratch: Path, number: int, token: str
    ) -> RangeResult:
        """The range of a group, whose files are written."""
        incarnation = self._summary.totals[key]["incarnation"]
        span = Range(*key, group[0].start, group[-1].until, incarnation)
        by_folder: dict[str, list[FileEntry]] = {}
        for file in sorted((file for each in group for file in each.files), key=lambda file: file.first):
            by_folder.setdefault(_folder(file.path), []).append(file)
        writer = _Merger(self._store, span, self._settings, self._bytes, scratch, token)
        files = []
        for layout, old in sorted(by_folder.items()):
            for scratched, entry in writer.merged(layout, old):
                path = entry.path if self._store.shows_whole_files_only else paths.staged(number, entry.path)
                self._paths.append(path)
                self._store.put(scratched, path)
                files.append(entry)
        return replace(RangeResult.joined(group, files), error="")

    def _commit(self, number: int, results: Mapping[TopicPartition, Sequence[RangeResult]]) -> Manifest:
        """Commit the step. After an error the files stay until another run is there: only the answer may be lost."""
        store, last = self._store, history.read_manifest(self._store, number - 1)
        assert last is not None
        topics = sorted({topic for topic, _ in self.groups})
        plan = Plan(number, self._started, topics, [], self._settings.to_json(), asked=history.COMPACTED)
        if not store.create(paths.plan(number), to_json(plan)):
            raise LoadError(f"{store.address}: another run has begun run {paths.run_name(number)}: nothing is changed")
        ranges = [each for of_partition in results.values() for each in of_partition]
        store.write(paths.task(number, 0), to_json(TaskResults(ranges)))
        plan = replace(plan, replaces=[old for groups in self.groups.values() for group in groups for old in group])
        lines = {key: self._summary.totals[key] for key in results}
        log_end = {key: line["until"] + line["lag"] for key, line in lines.items()}
        manifest = assembled(plan, results, {}, log_end, last.offsets)
        write_manifest(store, manifest)
        return manifest


class _Merger:
    """Merges the files of a range. A row group is in memory, and one that waits to be written."""

    def __init__(
        self, store: Store, span: Range, settings: WriteSettings, target_bytes: int, scratch: Path, token: str
    ) -> None:
        self._store, self._range, self._settings, self._target = store, span, settings, target_bytes
        self._scratch, self._token = scratch, token
        self._columns = settings.columns(span.topic)
        self._count = 0

    def merged(self, layout: str, old: Sequence[FileEntry]) -> Iterator[tuple[Path, FileEntry]]:
        """New files, in the scratch folder, and what is known of them; `LoadError` if an old one is damaged.

        Files of folders by time cover all of the range, as who restores it reads them side by side.
        """
        first, last, file = self._range.start, self._range.start - 1, self._open()
        for entry in old:
            for batch in self._batches(entry):
                settings = self._settings
                is_full = file.rows + len(batch) > settings.row_group_rows
                if is_full or file.bytes + batch.nbytes > settings.row_group_bytes:
                    file.flush()
                    if not layout and file.path.stat().st_size >= self._target:
                        yield self._complete(file, layout, first, last)
                        first, file = last + 1, self._open()
                file.add(batch, _times(batch))
                last = pc.max(batch["offset"]).as_py()
        yield self._complete(file, layout, first, self._range.end - 1)

    def _open(self) -> OpenFile:
        self._count += 1
        name = f"{self._range.topic}+{self._range.partition}+{self._range.start}+{self._count}"
        return OpenFile(self._scratch / name, self._columns, self._settings, None)

    def _complete(self, file: OpenFile, layout: str, first: int, last: int) -> tuple[Path, FileEntry]:
        path = paths.file(self._range, first, last, layout, self._token, self._settings.extension)
        return file.path, file.complete(path, self._range, first, last)

    def _batches(self, entry: FileEntry) -> Iterator[pa.RecordBatch]:
        """A row group of a file at a time, with the columns of the last run."""
        import pyarrow.parquet as pq

        where = f"{self._store.address}/{entry.path}"
        records = 0
        try:
            with arrow_file(self._store, entry.path) as opened:
                reader = pq.ParquetFile(opened, pre_buffer=False)
                for number in range(reader.num_row_groups):
                    table = reader.read_row_group(number, self._columns.names, use_threads=False)
                    if reader.metadata.row_group(number).sorting_columns:
                        table = table.sort_by("offset")
                    for batch in table.combine_chunks().to_batches():
                        records += len(batch)
                        yield self._as_now(batch, entry)
        except (OSError, pa.ArrowException, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise LoadError(f"{where} can't be read ({reason}): `klog load status` shows what is missing") from None
        if records != entry.records:
            raise LoadError(f"{where} has {records} records, and {entry.records} by the run that wrote it: restore it")

    def _as_now(self, batch: pa.RecordBatch, entry: FileEntry) -> pa.RecordBatch:
        for column in self._columns:
            if batch[column.name].type != column.type and not pa.types.is_nested(column.type):
                raise pa.ArrowInvalid(f"column {column.name} is {batch[column.name].type}, not {column.type}")
        columns = [fitted(batch[column.name], column.type) for column in self._columns]
        made = pa.RecordBatch.from_arrays(columns, schema=self._columns)
        low, high = pc.min_max(made["offset"]).as_py().values()
        if not entry.first <= low <= high <= entry.last:
            raise pa.ArrowInvalid(f"it has offsets {low} to {high}")
        return made


def _times(batch: pa.RecordBatch) -> Any:
    return np.asarray(batch["timestamp"].cast(pa.int64()))
