"""What the committed runs of a load come to, added up one after the other: files, ranges, totals, what is missing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from spark_klog.base.names import TopicPartition
from spark_klog.load.journal import paths
from spark_klog.load.journal.model import FileEntry, Manifest, PartitionAudit, RangeResult, by_partition

#: A topic, a partition, and how often the topic has been created again.
Incarnation = tuple[str, int, int]
Extents = list[tuple[int, int]]
LOAD, COMPACTION = "load", "compaction"
#: What is missing between a load's ranges, by the first offset and that after the last one.
HOLE = "[{}, {}) is in no run, and offsets after it are: --from-offsets loads it"
#: The cause of a loss, as of `spark.read.ranges`.
_RETENTION = "retention"


@dataclass(frozen=True)
class Finding:
    """Something that is missing. `partition` is -1 for a file of several."""

    topic: str
    partition: int
    what: str


@dataclass
class Summary:
    """The committed runs up to `run`.

    `runs` has a line for each, `totals` one for each partition, `hours` the records by topic and hour, `findings` what
    runs have lost. `extents` are the offsets [start, until) of all runs, of which those that meet are one, and `taken`
    those that retention took before a run. `files` and `letters` (of dead letters) are those that no later run has
    replaced, in the order of commits: files with their run, letters with their run and their place in it.
    `ranges` are those that can be loaded again, by their offsets; before the run in `unranged` nobody knows them.
    """

    run: int = 0
    runs: list[dict[str, Any]] = field(default_factory=list)
    totals: dict[TopicPartition, dict[str, Any]] = field(default_factory=dict)
    hours: dict[str, Counter[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    extents: dict[Incarnation, Extents] = field(default_factory=dict)
    taken: dict[TopicPartition, Extents] = field(default_factory=dict)
    files: dict[str, tuple[FileEntry, int]] = field(default_factory=dict)
    letters: dict[str, tuple[int, int]] = field(default_factory=dict)
    ranges: dict[Incarnation, dict[tuple[int, int], RangeResult]] = field(default_factory=dict)
    unranged: dict[Incarnation, tuple[int, int]] = field(default_factory=dict)
    """The first offset from which on ranges are known, and the last run of which they are not."""

    def add(self, manifest: Manifest, kind: str, results: Sequence[RangeResult] | None) -> None:
        """Add the next run; `results` are those of its tasks, None if nobody is going to ask for ranges."""
        self.run = manifest.run
        self.runs.append(_run_line(manifest, kind))
        self._add_totals(manifest)
        self._add_extents(manifest)
        for gone in manifest.replaced:
            for file in gone.files:
                self.files.pop(file.path, None)
        self.files.update((file.path, (file, manifest.run)) for file in manifest.files)
        if kind == LOAD:  # a compaction leaves the letters: a replay that goes on counts them by run and place
            self._add_letters(manifest)
        if results is not None:
            self._add_ranges(manifest, results)

    def known_ranges(self, key: Incarnation) -> list[RangeResult]:
        """The ranges of a partition that can be loaded again, in the order of offsets."""
        return [result for _, result in sorted(self.ranges.get(key, {}).items())]

    def holes(self) -> dict[Incarnation, Extents]:
        """The offsets [start, end) between loaded ones that no run has, without those that retention took."""
        holes: dict[Incarnation, Extents] = defaultdict(list)
        for (topic, partition, incarnation), extents in self.extents.items():
            for (_, at), (end, _) in pairwise(extents):
                for first, after in sorted(self.taken.get((topic, partition), ())):
                    if first <= at < after:
                        at = after
                if at < end:
                    holes[topic, partition, incarnation].append((at, end))
        return holes

    # ----- adding

    def _add_totals(self, manifest: Manifest) -> None:
        progress = manifest.progress()
        for topic, each in manifest.hours.items():
            self.hours.setdefault(topic, Counter()).update(each)
        for gone in manifest.replaced:
            self.hours.setdefault(gone.topic, Counter()).subtract(gone.hours)
            line = self.totals[gone.topic, gone.partition]
            line |= {name: line[name] - getattr(gone, name) for name in ("records", "bytes", "bad")}
            line["gaps"] = dict(Counter(line["gaps"]) - Counter(gone.gaps))
        for part in manifest.partitions:
            self._count_in(part, manifest)
        read = {(part.topic, part.partition) for part in manifest.partitions}
        for loss in manifest.lost:
            key = loss["topic"], loss["partition"]
            what = f"[{loss['start']}, {loss['end']}) lost before run {paths.run_name(manifest.run)}: {loss['cause']}"
            self.findings.append(Finding(*key, what))
            if loss["cause"] == _RETENTION:
                self.taken.setdefault(key, []).append((loss["start"], loss["end"]))
            if key in self.totals and key not in read:  # it goes on where the run, without records of it, moved it to
                line, now = self.totals[key], progress[key]
                first = line["from"] if now.incarnation == line["incarnation"] else now.offset
                new = {"from": first, "until": now.offset, "incarnation": now.incarnation, "topic_id": now.topic_id}
                self.totals[key] = line | new

    def _count_in(self, part: PartitionAudit, manifest: Manifest) -> None:
        """Add a run's partition to the totals; find what is missing between it and the run before, and in it."""
        key = part.topic, part.partition
        before = self.totals.get(key)
        progress = manifest.progress()[key]
        line = before or nothing_of(part)
        is_same_log = before is not None and before["incarnation"] == progress.incarnation
        # a run of offsets before those that the load has may replace nothing, and stop before them
        is_again = progress.offset > part.until or any(
            (gone.topic, gone.partition) == key for gone in manifest.replaced
        )
        if before is not None and is_same_log and part.start < min(before["until"], part.until) and not is_again:
            what = f"[{part.start}, {before['until']}) is in run {paths.run_name(manifest.run)}, and in one before it"
            self.findings.append(Finding(*key, what))
        if part.unexplained:
            what = f"{part.unexplained} offsets of run {paths.run_name(manifest.run)} have neither record nor cause"
            self.findings.append(Finding(*key, what))
        until = max(part.until, before["until"]) if before is not None and is_again else part.until
        self.totals[key] = {
            **line,
            "from": min(line["from"], part.start) if is_same_log else part.start,
            "until": until,
            "records": line["records"] + part.records,
            "bytes": line["bytes"] + part.bytes,
            "bad": line["bad"] + part.bad,
            "gaps": dict(Counter(line["gaps"]) + Counter(part.gaps)),
            "lag": max(0, part.log_end - until),
            "incarnation": progress.incarnation,
            "topic_id": progress.topic_id,
        }

    def _add_extents(self, manifest: Manifest) -> None:
        progress = manifest.progress()
        for part in manifest.partitions:
            if part.until > part.start:
                key = part.topic, part.partition, progress[part.topic, part.partition].incarnation
                self.extents[key] = joined([*self.extents.get(key, ()), (part.start, part.until)])

    def _add_letters(self, manifest: Manifest) -> None:
        for gone in manifest.replaced:
            for name in gone.dead_letters:
                self.letters.pop(name, None)
        for place, name in enumerate(sorted(manifest.dead_letters)):
            self.letters.pop(name, None)
            self.letters[name] = manifest.run, place

    def _add_ranges(self, manifest: Manifest, results: Sequence[RangeResult]) -> None:
        progress = manifest.progress()
        for gone in manifest.replaced:
            key = gone.topic, gone.partition, progress[gone.topic, gone.partition].incarnation
            self.ranges.get(key, {}).pop((gone.start, gone.until), None)
        files = by_partition(manifest.files)
        # In an object store two attempts may have ended at once: each has written a file of offsets, of which the last
        # one stays.
        of_tasks = by_partition(results)
        for part in manifest.partitions:
            if part.until == part.start:
                continue
            place = part.topic, part.partition
            key = *place, progress[place].incarnation
            known = {
                (result.start, result.until): replace(
                    result, files=[file for file in files[place] if result.start <= file.first < result.until]
                )
                for result in of_tasks[place]
                if part.start <= result.start < result.until <= part.until
            }
            if joined(known) == [(part.start, part.until)]:
                self.ranges.setdefault(key, {}).update(known)
            else:  # files of tasks are gone: what this run has can't be told apart any more
                self.unranged[key] = max(part.until, self.unranged.get(key, (0, 0))[0]), manifest.run


def nothing_of(part: PartitionAudit) -> dict[str, Any]:
    """The line of a partition of which no run has loaded anything yet."""
    return {
        "topic": part.topic,
        "partition": part.partition,
        "from": part.start,
        "records": 0,
        "bytes": 0,
        "bad": 0,
        "gaps": {},
    }


def _run_line(manifest: Manifest, kind: str) -> dict[str, Any]:
    return {
        "run": paths.run_name(manifest.run),
        "kind": kind,
        "started": manifest.started,
        "finished": manifest.finished,
        "records": sum(part.records for part in manifest.partitions),
        "bytes": sum(part.bytes for part in manifest.partitions),
        "files": len(manifest.files),
        "bad": sum(part.bad for part in manifest.partitions),
        "failed": [f"{part.topic}-{part.partition}" for part in manifest.partitions if part.error],
        "lag": sum(part.lag for part in manifest.partitions) if kind == LOAD else 0,
    }


def joined(extents: Iterable[tuple[int, int]]) -> Extents:
    """Extents in their order, with those as one that overlap or meet."""
    made: Extents = []
    for start, until in sorted(extents):
        if made and start <= made[-1][1]:
            made[-1] = made[-1][0], max(made[-1][1], until)
        else:
            made.append((start, until))
    return made
