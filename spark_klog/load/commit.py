"""Commit a run: check what its tasks have written, write the manifest, and show the files."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from spark_klog.base.names import TopicPartition
from spark_klog.errors import LoadError
from spark_klog.load.journal.checkpoint import read_summary, write_checkpoint
from spark_klog.load.journal.history import read_manifest
from spark_klog.load.journal.model import (
    ATTEMPTS,
    LATEST,
    LETTERS,
    Manifest,
    PartitionAudit,
    Plan,
    Progress,
    Range,
    RangeResult,
    attempt_of,
    attempt_path,
    by_partition,
    is_of_values,
    manifest_path,
    offsets_json,
    place_of,
    progress_of,
    run_name,
    staged_path,
    staging_path,
    task_path,
    token_of,
    topic_folder,
)
from spark_klog.load.journal.store import Store, to_json
from spark_klog.load.tasks.task import unread
from spark_klog.spark.read.ranges import DELETED, RECREATED, RETENTION, TRUNCATED

_log = logging.getLogger(__name__)
#: Causes of gaps: the offsets are no longer in the log.
_LOST = {DELETED, RECREATED, RETENTION, TRUNCATED}


def check_results(store: Store, run: int, task: int, ranges: Sequence[Range], results: Sequence[RangeResult]) -> None:
    """`LoadError` if a task's results do not fit its plan, or its files are not there: someone has edited them."""
    where = f"{store.address}/{task_path(run, task)}"
    if len(ranges) != len(results):
        raise LoadError(f"{where} has {len(results)} ranges, the plan {len(ranges)}: restore it, or delete it")
    for asked, found in zip(ranges, results, strict=True):
        loaded = found.records + sum(found.gaps.values())
        in_files = sum(item.records for item in found.files)
        wrong = ""
        if (asked.topic, asked.partition, asked.start) != (found.topic, found.partition, found.start):
            wrong = f"from {found.start}, the plan has {asked.topic}-{asked.partition} from {asked.start}"
        elif not asked.start <= found.until <= asked.end or loaded != found.until - found.start:
            wrong = f"until {found.until} with {loaded} of {found.until - found.start} offsets can't be"
        elif in_files != found.records:
            wrong = f"has {found.records} records, its files {in_files}"
        if wrong:
            raise LoadError(
                f"{where}: {found.topic}-{found.partition} {wrong}: restore it, or delete it to load the range again"
            )
        for item in found.files:
            path = item.path if store.shows_whole_files_only else staged_path(run, item.path)
            if store.size(path) != item.size:
                raise LoadError(
                    f"{store.address}/{path} is missing or not as it was written: delete {where} to load it again"
                )


def has_files(store: Store, results: Iterable[RangeResult]) -> bool:
    """Whether the files of a task are there as it has written them to their final names."""
    return all(store.size(item.path) == item.size for found in results for item in found.files)


def contiguous(results: Sequence[RangeResult]) -> list[RangeResult]:
    """A partition's results in the order of offsets, without what comes after a range that ended early."""
    kept: list[RangeResult] = []
    for item in sorted(results, key=lambda item: item.start):
        kept.append(item if not kept or kept[-1].until == item.start else unread(item, kept[-1].until, item.error))
    return kept


def make_manifest(
    plan: Plan,
    results: Sequence[RangeResult],
    before: Mapping[TopicPartition, Progress],
    log_end: Mapping[TopicPartition, int],
    now: str,
) -> Manifest:
    """The manifest of a run; results are left out of it if an earlier range of their partition failed.

    Of what the run loads again, ranges of earlier runs are replaced as a whole or stay.
    """
    asked = by_partition(item for ranges in plan.tasks for item in ranges)
    audits, files, letters = [], [], []
    hours: dict[str, Counter[str]] = defaultdict(Counter)
    progress = {**before, **progress_of(plan.starts)}
    replaces = by_partition(plan.replaces)
    replaced: list[RangeResult] = []
    for key, found in sorted(by_partition(results).items()):
        kept = _whole(contiguous(found), replaces[key])
        until = kept[-1].until
        replaced += [old for old in replaces[key] if old.until <= until]
        files += [file for item in kept for file in item.files]
        letters += [name for item in kept for name in item.dead_letters]
        first = asked[key][0]
        known = before.get(key)  # a run that loads earlier offsets moves nothing back: later ones have files
        last = known.offset if known is not None and known.incarnation == first.incarnation else until
        progress[key] = Progress(max(until, last), first.incarnation, first.topic_id)
        audits.append(_audit(key, kept, max(item.end for item in asked[key]), log_end.get(key, until)))
        for part in kept:
            hours[key[0]].update(part.hours)
    return Manifest(
        plan.run,
        plan.started,
        now,
        audits,
        {topic: dict(sorted(each.items())) for topic, each in sorted(hours.items()) if each},
        files,
        sorted(set(letters)),
        plan.lost,
        offsets_json(progress),
        replaced,
    )


def _whole(kept: list[RangeResult], replaces: Sequence[RangeResult]) -> list[RangeResult]:
    """Results up to the first range to be replaced that they do not have as a whole.

    They end inside it, or the log has lost some of it since the plan was made: only the old files have these records.
    """
    until = kept[-1].until
    for old in replaces:
        has_lost = any(item.gaps.keys() & _LOST for item in kept if old.start <= item.start < old.until)
        if old.start < until and (until < old.until or has_lost):
            until = old.start
    return [item if item.until <= until else unread(item, until, item.error) for item in kept]


def _audit(key: TopicPartition, kept: Sequence[RangeResult], planned: int, log_end: int) -> PartitionAudit:
    gaps: Counter[str] = Counter()
    for item in kept:
        gaps.update(item.gaps)
    low = [item.min_time for item in kept if item.min_time is not None]
    high = [item.max_time for item in kept if item.max_time is not None]
    return PartitionAudit(
        *key,
        kept[0].start,
        kept[-1].until,
        planned,
        sum(item.records for item in kept),
        sum(item.bytes for item in kept),
        min(low, default=None),
        max(high, default=None),
        dict(gaps),
        sum(item.bad for item in kept),
        log_end,
        next((item.error for item in kept if item.error), ""),
    )


def write_manifest(store: Store, manifest: Manifest) -> None:
    """Commit the run. `LoadError` if another run has committed it meanwhile."""
    if not store.create(manifest_path(manifest.run), to_json(manifest)):
        raise LoadError(
            f"{store.address}: another run of this load has committed run {run_name(manifest.run)}; its records are "
            "there once. Run again for what has come since"
        )


def publish(store: Store, manifest: Manifest, *, has_leftovers: bool = True) -> None:
    """Show the files of a committed run to plain readers, and point to the run. Does the rest after a kill.

    `has_leftovers` is whether attempts of its tasks may have written files that the run does not have.
    """
    _remove_replaced(store, manifest)
    if not store.shows_whole_files_only:
        for item in manifest.files:
            store.move(staged_path(manifest.run, item.path), item.path)
        show_letters(store, manifest)
        try:
            store.remove(staging_path(manifest.run))
        except LoadError as error:  # an attempt that Spark is about to stop writes there
            _log.warning("files of run %s that are of no use are left: %s", run_name(manifest.run), error)
    else:
        if has_leftovers:
            remove_leftovers(store, manifest)
        # those of a compaction that was killed before this commit, too
        remove_orphans(store, manifest.run + 1, {item.topic for item in manifest.partitions})
    point_to(store, manifest)


def point_to(store: Store, manifest: Manifest) -> None:
    """The last step: `latest.json` names the run."""
    pointer = {"run": run_name(manifest.run), "manifest": manifest_path(manifest.run), "finished": manifest.finished}
    store.write(LATEST, to_json(pointer))
    write_checkpoint(store)
    _log.debug("committed run %s of %s", run_name(manifest.run), store.address)


def show_letters(store: Store, manifest: Manifest) -> None:
    """Show the dead letters of a run whose tasks are complete."""
    for name in manifest.dead_letters if not store.shows_whole_files_only else ():
        path = f"{LETTERS}/{name}"
        store.move(staged_path(manifest.run, path), path)


def _remove_replaced(store: Store, manifest: Manifest) -> None:
    """Remove the files that a run has replaced by others; earlier versions wrote others of the same names."""
    known = {item.path for item in manifest.files} | set(manifest.dead_letters)
    for result in manifest.replaced:
        for item in result.files:
            if item.path not in known:
                store.remove(item.path)
        for name in result.dead_letters:
            if is_of_values(name) and name not in known:  # two ranges may have one corrupt batch
                store.remove(f"{LETTERS}/{name}")


def remove_leftovers(store: Store, manifest: Manifest) -> None:
    """Remove files that attempts of the run's tasks have written to their final names and that no run has.

    An attempt that was killed, failed or ran out of time may have other files than the one that counts.
    """
    progress = manifest.progress()
    first: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
    for item in manifest.partitions:
        first[item.topic][item.partition, progress[item.topic, item.partition].incarnation] = item.start
    known = {item.path for item in manifest.files}
    known |= read_summary(store).files.keys()
    for topic, starts in first.items():
        for path in store.paths_below(topic_folder(topic)):
            place = place_of(path)
            if place is None or path in known:
                continue
            partition, start, incarnation = place
            if start >= starts.get((partition, incarnation), start + 1):
                _log.info("removing %s/%s, which no run has", store.address, path)
                store.remove(path)


def remove_orphans(store: Store, last: int, topics: Iterable[str], *, is_last_time: bool = False) -> None:
    """Remove the files in an object store that attempts of runs up to `last` have written, and that no run has.

    An attempt that was late or killed has left its marker. The marker stays after the commit until the next run looks
    again (`is_last_time`), as the attempt may go on meanwhile; without its marker it writes nothing more.
    """
    for run, of_run in attempts(store, last).items():
        manifest = read_manifest(store, run)
        files = [] if manifest is None else [*(item.path for item in manifest.files), *manifest.dead_letters]
        counted = {token_of(path) for path in files}
        late = of_run - counted
        if late:
            late -= {token_of(path) for path in read_summary(store).files}
        if late:
            for path in shown(store, {*topics, *(item.topic for item in (manifest.partitions if manifest else ()))}):
                if token_of(path) in late:
                    _log.info("removing %s/%s, which no run has", store.address, path)
                    store.remove(path)
        for token in of_run if is_last_time else of_run & counted:
            store.remove(attempt_path(run, token))


def attempts(store: Store, last: int) -> dict[int, set[str]]:
    """The tokens of attempts that have left a marker, by run, of runs up to `last`."""
    tokens: dict[int, set[str]] = defaultdict(set)
    for name in store.names(ATTEMPTS):
        run, token = attempt_of(name) or (last + 1, "")
        if run <= last:
            tokens[run].add(token)
    return tokens


def shown(store: Store, topics: Iterable[str]) -> list[str]:
    """The paths of what readers see: all dead letters, and the files of topics."""
    paths = [f"{LETTERS}/{name}" for name in store.names(LETTERS)]
    return paths + [path for topic in topics for path in store.paths_below(topic_folder(topic))]
