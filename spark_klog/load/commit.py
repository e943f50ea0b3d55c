"""What a run has come to: the results of its tasks, checked, and the manifest that they make."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from spark_klog.base.names import TopicPartition
from spark_klog.errors import ConfigError, LoadError
from spark_klog.load.journal import paths
from spark_klog.load.journal.model import (
    Manifest,
    PartitionAudit,
    Plan,
    Progress,
    Range,
    RangeResult,
    by_partition,
    now_text,
    offsets_json,
    progress_of,
)
from spark_klog.load.journal.store import Store
from spark_klog.load.settings import WriteSettings
from spark_klog.load.tasks.task import unread
from spark_klog.spark.read.ranges import DELETED, RECREATED, RETENTION, TRUNCATED

#: Causes of gaps: the offsets are no longer in the log.
_LOST = {DELETED, RECREATED, RETENTION, TRUNCATED}


def check_results(store: Store, run: int, task: int, ranges: Sequence[Range], results: Sequence[RangeResult]) -> None:
    """`LoadError` if a task's results do not fit its plan, or its files are not there: someone has edited them."""
    where = f"{store.address}/{paths.task(run, task)}"
    if len(ranges) != len(results):
        raise LoadError(f"{where} has {len(results)} ranges, the plan {len(ranges)}: restore it, or delete it")
    for asked, result in zip(ranges, results, strict=True):
        loaded = result.records + sum(result.gaps.values())
        in_files = sum(file.records for file in result.files)
        wrong = ""
        if (asked.topic, asked.partition, asked.start) != (result.topic, result.partition, result.start):
            wrong = f"from {result.start}, the plan has {asked.topic}-{asked.partition} from {asked.start}"
        elif not asked.start <= result.until <= asked.end or loaded != result.until - result.start:
            wrong = f"until {result.until} with {loaded} of {result.until - result.start} offsets can't be"
        elif in_files != result.records:
            wrong = f"has {result.records} records, its files {in_files}"
        if wrong:
            raise LoadError(
                f"{where}: {result.topic}-{result.partition} {wrong}: restore it, or delete it to load the range again"
            )
        for file in result.files:
            path = file.path if store.shows_whole_files_only else paths.staged(run, file.path)
            if store.size(path) != file.size:
                raise LoadError(
                    f"{store.address}/{path} is missing or not as it was written: delete {where} to load it again"
                )


def contiguous(results: Sequence[RangeResult]) -> list[RangeResult]:
    """A partition's results in the order of offsets, without what comes after a range that ended early."""
    kept: list[RangeResult] = []
    for result in sorted(results, key=lambda result: result.start):
        is_next = not kept or kept[-1].until == result.start
        kept.append(result if is_next else unread(result, kept[-1].until, result.error))
    return kept


def make_manifest(
    plan: Plan,
    results: Sequence[RangeResult],
    before: Mapping[TopicPartition, Progress],
    log_end: Mapping[TopicPartition, int],
) -> Manifest:
    """The manifest of a run; results are left out of it if an earlier range of their partition failed.

    Of what the run loads again, ranges of earlier runs are replaced as a whole or stay.
    """
    asked = by_partition(each for ranges in plan.tasks for each in ranges)
    replaces = by_partition(plan.replaces)
    kept = {key: _whole(contiguous(each), replaces[key]) for key, each in by_partition(results).items()}
    progress = {**before, **progress_of(plan.starts)}
    for key, ranges in kept.items():
        until, first = ranges[-1].until, asked[key][0]
        known = before.get(key)  # a run that loads earlier offsets moves nothing back: later ones have files
        last = known.offset if known is not None and known.incarnation == first.incarnation else until
        progress[key] = Progress(max(until, last), first.incarnation, first.topic_id)
    planned = {key: max(each.end for each in ranges) for key, ranges in asked.items()}
    return assembled(plan, kept, planned, log_end, offsets_json(progress))


def assembled(
    plan: Plan,
    kept: Mapping[TopicPartition, Sequence[RangeResult]],
    planned: Mapping[TopicPartition, int],
    log_end: Mapping[TopicPartition, int],
    offsets: dict[str, dict[str, Progress]],
) -> Manifest:
    """The manifest of what a run has: of each partition the results that count, one after the other.

    Partitions that are not `planned` were to be loaded up to the end of their results.
    """
    hours: dict[str, Counter[str]] = defaultdict(Counter)
    audits: list[PartitionAudit] = []
    replaced = by_partition(plan.replaces)
    for key, ranges in sorted(kept.items()):
        total = RangeResult.joined(ranges, [])
        audits.append(
            PartitionAudit(
                *key,
                total.start,
                total.until,
                planned.get(key, total.until),
                total.records,
                total.bytes,
                total.min_time,
                total.max_time,
                total.gaps,
                total.bad,
                log_end.get(key, total.until),
                total.error,
            )
        )
        hours[key[0]].update(total.hours)
        replaced[key] = [old for old in replaced[key] if old.until <= total.until]
    parts = [part for _, ranges in sorted(kept.items()) for part in ranges]
    return Manifest(
        plan.run,
        plan.started,
        now_text(),
        audits,
        {topic: dict(sorted(each.items())) for topic, each in sorted(hours.items()) if each},
        [file for part in parts for file in part.files],
        sorted({name for part in parts for name in part.dead_letters}),
        plan.lost,
        offsets,
        [old for key in sorted(kept) for old in replaced[key]],
    )


def _whole(kept: list[RangeResult], replaces: Sequence[RangeResult]) -> list[RangeResult]:
    """Results up to the first range to be replaced that they do not have as a whole.

    They end inside it, or the log has lost some of it since the plan was made: only the old files have these records.
    """
    until = kept[-1].until
    for old in replaces:
        has_lost = any(result.gaps.keys() & _LOST for result in kept if old.start <= result.start < old.until)
        if old.start < until and (until < old.until or has_lost):
            until = old.start
    return [result if result.until <= until else unread(result, until, result.error) for result in kept]


def settings_of(store: Store, plan: Plan) -> WriteSettings:
    """The settings of a plan; `LoadError` if they are not what a run has written."""
    try:
        return WriteSettings.of(plan.settings)
    except (TypeError, ValueError, ConfigError) as error:
        raise LoadError(f"{store.address}/{paths.plan(plan.run)} can't be used ({error}): restore it") from None
