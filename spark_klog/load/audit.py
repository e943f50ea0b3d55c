"""The audit of a run, and of all runs: what was expected, what was loaded, and what is missing by cause."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from spark_klog.directories.trees.addresses import without_user
from spark_klog.load.journal.history import committed_files, loaded_extents, manifests, open_load, read_idle, read_plan
from spark_klog.load.journal.model import Manifest, PartitionAudit, RangeResult, run_name, staged_path
from spark_klog.load.journal.store import Store
from spark_klog.load.run import Loaded
from spark_klog.spark.planning.ranges import RETENTION

COLUMNS = ("topic", "partition", "from", "until", "records", "bytes", "gaps", "bad", "lag")


def partition_json(item: PartitionAudit) -> dict[str, Any]:
    """A partition's line of a run: offsets [from, until) of those to `planned`, times in ms since the epoch."""
    return {
        "topic": item.topic,
        "partition": item.partition,
        "from": item.start,
        "until": item.until,
        "planned": item.planned,
        "records": item.records,
        "bytes": item.bytes,
        "gaps": item.gaps,
        "unexplained": item.unexplained,
        "bad": item.bad,
        "min_time": item.min_time,
        "max_time": item.max_time,
        "lag": item.lag,
        "error": item.error,
    }


def loaded_json(loaded: Loaded, output: str) -> dict[str, Any]:
    """What a call of `load` has done."""
    return {
        "partitions": [partition_json(item) for item in loaded.partitions],
        "runs": [run_name(number) for number in loaded.runs],
        "files": loaded.files,
        "bad": loaded.bad,
        "dead_letters": loaded.dead_letters,
        "lost": loaded.lost,
        "output": without_user(output),
    }


def table_rows(partitions: Iterable[PartitionAudit]) -> list[tuple[str, ...]]:
    """Lines of `COLUMNS`, and one with the sums."""
    items = list(partitions)
    rows = [
        (
            item.topic,
            str(item.partition),
            f"{item.start:,}",
            f"{item.until:,}",
            f"{item.records:,}",
            f"{item.bytes:,}",
            _gaps_text(item.gaps),
            f"{item.bad:,}",
            f"{item.lag:,}",
        )
        for item in items
    ]
    gaps: Counter[str] = Counter()
    for item in items:
        gaps.update(item.gaps)
    sums = (f"{sum(getattr(item, name) for item in items):,}" for name in ("records", "bytes"))
    ends = (f"{sum(getattr(item, name) for item in items):,}" for name in ("bad", "lag"))
    return [*rows, ("all", "", "", "", *sums, _gaps_text(gaps), *ends)]


def _gaps_text(gaps: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{count:,} {cause}" for cause, count in sorted(gaps.items())) or "-"


@dataclass(frozen=True)
class Finding:
    """Something that is missing from an output."""

    topic: str
    partition: int
    what: str


@dataclass(frozen=True)
class Status:
    """All runs of a load. `hours` has the records by topic and hour, `unfinished` names a killed run, or is "".

    `idle` is when a run had nothing to load since the last one, or "".
    """

    output: str
    runs: list[dict[str, Any]]
    partitions: list[dict[str, Any]]
    hours: dict[str, dict[str, int]]
    findings: list[Finding]
    unfinished: str
    idle: str = ""


def status(output: str) -> Status:
    """Look through the runs of the load in `output`; `LoadError` if there is none, or its files are damaged.

    It finds offsets between others that no run has, offsets without a record or a cause, offsets that were lost, and
    files that are missing or have another size.
    """
    store, _ = open_load(output)
    runs, findings, all_runs = [], [], []
    hours: dict[str, Counter[str]] = defaultdict(Counter)
    totals: dict[tuple[str, int], dict[str, Any]] = {}
    number = 0
    for manifest in manifests(store):
        number = manifest.run
        runs.append(_run_json(manifest))
        all_runs.append(manifest)
        for topic, each in manifest.hours.items():
            hours[topic].update(each)
        for gone in manifest.replaced:
            hours[gone.topic].subtract(gone.hours)
            _take_back(totals[gone.topic, gone.partition], gone)
        for item in manifest.partitions:
            findings += _follow(totals, item, manifest)
        for loss in manifest.lost:
            what = f"[{loss['start']}, {loss['end']}) lost before run {run_name(number)}: {loss['cause']}"
            findings.append(Finding(loss["topic"], loss["partition"], what))
            _skip_lost(totals, (loss["topic"], loss["partition"]), manifest)
    holes = _holes(all_runs)
    for (topic, partition, incarnation), missing in sorted(holes.items()):
        what = "[{}, {}) is in no run, and offsets after it are: --from-offsets loads it"
        findings += [Finding(topic, partition, what.format(*hole)) for hole in missing]
        if totals[topic, partition]["incarnation"] == incarnation:
            totals[topic, partition]["holes"] = missing
    findings = _missing_files(store, all_runs) + findings
    unfinished = run_name(number + 1) if read_plan(store, number + 1) is not None else ""
    found = {topic: dict(sorted((+each).items())) for topic, each in sorted(hours.items())}
    idle = read_idle(store, number)
    for item in idle.partitions if idle else ():
        _add_idle(totals, item)
    partitions = [totals[key] for key in sorted(totals)]
    return Status(without_user(output), runs, partitions, found, findings, unfinished, idle.finished if idle else "")


def _holes(runs: Sequence[Manifest]) -> dict[tuple[str, int, int], list[tuple[int, int]]]:
    """The offsets [start, end) between loaded ones that no run has, without those that retention took before a run.

    By topic, partition and incarnation.
    """
    lost: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for manifest in runs:
        for loss in manifest.lost:
            if loss["cause"] == RETENTION:
                lost[loss["topic"], loss["partition"]].append((loss["start"], loss["end"]))
    found: dict[tuple[str, int, int], list[tuple[int, int]]] = defaultdict(list)
    for (topic, partition, incarnation), extents in loaded_extents(runs).items():
        for (_, at), (end, _) in pairwise(extents):
            for first, after in sorted(lost[topic, partition]):
                if first <= at < after:
                    at = after
            if at < end:
                found[topic, partition, incarnation].append((at, end))
    return found


def _add_idle(totals: dict[tuple[str, int], dict[str, Any]], item: PartitionAudit) -> None:
    """Take what a run without anything new has found: partitions without records, and the lag."""
    new = {**_nothing(item), "until": item.until, "incarnation": 0, "topic_id": ""}
    totals.setdefault((item.topic, item.partition), new)["lag"] = item.lag


def _nothing(item: PartitionAudit) -> dict[str, Any]:
    """The line of a partition of which no run has loaded anything yet."""
    return {
        "topic": item.topic,
        "partition": item.partition,
        "from": item.start,
        "records": 0,
        "bytes": 0,
        "bad": 0,
        "gaps": {},
    }


def _run_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "run": run_name(manifest.run),
        "started": manifest.started,
        "finished": manifest.finished,
        "records": sum(item.records for item in manifest.partitions),
        "bytes": sum(item.bytes for item in manifest.partitions),
        "files": len(manifest.files),
        "bad": sum(item.bad for item in manifest.partitions),
        "failed": [f"{item.topic}-{item.partition}" for item in manifest.partitions if item.error],
        "lag": sum(item.lag for item in manifest.partitions),
    }


def _follow(totals: dict[tuple[str, int], dict[str, Any]], item: PartitionAudit, manifest: Manifest) -> list[Finding]:
    """Add a run's partition to the totals; what is missing between it and the run before, and in it."""
    key = item.topic, item.partition
    before = totals.get(key)
    findings = []
    progress = manifest.progress()[key]
    line = before or _nothing(item)
    is_same_log = before is not None and before["incarnation"] == progress.incarnation
    # a run of offsets before those that the load has may replace nothing, and stop before them
    is_again = progress.offset > item.until or any((gone.topic, gone.partition) == key for gone in manifest.replaced)
    if before is not None and is_same_log and item.start < before["until"] and not is_again and item.until > item.start:
        what = f"[{item.start}, {before['until']}) is in run {run_name(manifest.run)}, and in one before it"
        findings.append(Finding(*key, what))
    if item.unexplained:
        what = f"{item.unexplained} offsets of run {run_name(manifest.run)} have neither record nor cause"
        findings.append(Finding(*key, what))
    gaps = Counter(line["gaps"]) + Counter(item.gaps)
    until = max(item.until, before["until"]) if before is not None and is_again else item.until
    totals[key] = {
        **line,
        "from": min(line["from"], item.start) if is_same_log else item.start,
        "until": until,
        "records": line["records"] + item.records,
        "bytes": line["bytes"] + item.bytes,
        "bad": line["bad"] + item.bad,
        "gaps": dict(gaps),
        "lag": max(0, item.log_end - until),
        "incarnation": progress.incarnation,
        "topic_id": progress.topic_id,
    }
    return findings


def _take_back(line: dict[str, Any], gone: RangeResult) -> None:
    """Subtract a range that was loaded again from a partition's totals."""
    line["records"] -= gone.records
    line["bytes"] -= gone.bytes
    line["bad"] -= gone.bad
    line["gaps"] = dict(Counter(line["gaps"]) - Counter(gone.gaps))


def _skip_lost(totals: dict[tuple[str, int], dict[str, Any]], key: tuple[str, int], manifest: Manifest) -> None:
    """Let a partition's totals go on where a run without records of it has moved it to."""
    if key in totals and all((item.topic, item.partition) != key for item in manifest.partitions):
        now = manifest.progress()[key]
        first = totals[key]["from"] if now.incarnation == totals[key]["incarnation"] else now.offset
        new = {"from": first, "until": now.offset, "incarnation": now.incarnation, "topic_id": now.topic_id}
        totals[key] |= new


def _missing_files(store: Store, runs: Sequence[Manifest]) -> list[Finding]:
    found = []
    for item, run in committed_files(runs).values():
        size = None
        if run == runs[-1].run and not store.shows_whole_files_only:
            size = store.size(staged_path(run, item.path))
        if size is None:
            size = store.size(item.path)
        if size != item.size:
            state = "is missing" if size is None else f"has {size} bytes, not {item.size}"
            found.append(Finding(item.topic, item.partition, f"file {item.path} {state}"))
    return found


def status_json(found: Status) -> dict[str, Any]:
    return {
        "output": found.output,
        "runs": found.runs,
        "partitions": found.partitions,
        "hours": found.hours,
        "missing": [item.__dict__ for item in found.findings],
        "unfinished": found.unfinished,
        "idle": found.idle,
    }
