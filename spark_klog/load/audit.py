"""The audit of a run, and of all runs: what was expected, what was loaded, and what is missing by cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from spark_klog.base.addresses import without_user
from spark_klog.base.clock import system_ms
from spark_klog.base.extras import require
from spark_klog.base.names import TopicPartition
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import first_and_end
from spark_klog.client.places import TimeSpec, offsets_at
from spark_klog.errors import ConfigError
from spark_klog.load.journal import paths
from spark_klog.load.journal.checkpoint import read_summary
from spark_klog.load.journal.history import open_load, read_idle, read_plan
from spark_klog.load.journal.listing import committed, is_below, stored_path, table_files
from spark_klog.load.journal.model import PartitionAudit
from spark_klog.load.journal.store import Store
from spark_klog.load.journal.summary import HOLE, LOAD, Finding, Summary, nothing_of
from spark_klog.load.run import Loaded
from spark_klog.tables.table import Table

_BAR = 40
_MOST_HOURS = 24 * 366
_HOUR = "%Y-%m-%dT%H"
_HOUR_MS = 3_600_000
COLUMNS = ("topic", "partition", "from", "until", "records", "bytes", "gaps", "bad", "lag")


@dataclass(frozen=True)
class HourOfTopic:
    """Offsets of a topic's partitions between the first record of an hour and that of the next one, in the log and in
    the load. `hour` is as "2026-11-23T10", in UTC."""

    topic: str
    hour: str
    in_log: int
    loaded: int


@dataclass(frozen=True)
class Completeness:
    """`lag` has the offsets of each partition that the log has and the load has not; `gone` the partitions that the
    cluster has no more."""

    hours: list[HourOfTopic]
    lag: dict[TopicPartition, int]
    gone: list[TopicPartition]


def compare(cluster: Cluster, partitions: Sequence[Mapping[str, Any]], hours: int) -> Completeness:
    """Compare the last `hours` with the log; `partitions` are those of a `Status`. Errors as of `list_offsets`.

    An hour begins at the first record that is not before it, by the log's time index. Partitions that the load does
    not know, of topics that it does, count as well. Of a topic that was created again since, nothing is loaded.
    """
    lines = {(line["topic"], line["partition"]): line for line in partitions}
    there = cluster.partitions(sorted({topic for topic, _ in lines}), missing_ok=True)
    keys = [(topic, number) for topic in sorted(there) for number in there[topic]]
    gone = sorted(lines.keys() - set(keys))
    if not keys:
        return Completeness([], {}, gone)
    ids = {topic: str(cluster.topic_ids.get(topic, "")) for topic in there}
    same = {
        key: line for key, line in lines.items() if not line["topic_id"] or ids.get(key[0]) in ("", line["topic_id"])
    }
    known = {key: (line["from"], line["until"]) for key, line in same.items()}
    holes = {key: line.get("holes", ()) for key, line in same.items()}
    low, high = first_and_end(cluster, keys)
    last = system_ms() // _HOUR_MS
    compared = []
    start = offsets_at(cluster, TimeSpec((last - hours + 1) * _HOUR_MS), high)
    for hour in range(last - hours + 1, last + 1):
        end = offsets_at(cluster, TimeSpec((hour + 1) * _HOUR_MS), high) if hour < last else high
        for topic in sorted(there):
            in_log = loaded = 0
            for key in [key for key in keys if key[0] == topic]:
                first, after = max(start[key], low[key]), max(end[key], low[key])
                begin, until = known.get(key, (0, 0))
                in_log += max(0, after - first)
                loaded += max(0, min(after, until) - max(first, begin))
                loaded -= sum(max(0, min(after, end) - max(first, at)) for at, end in holes.get(key, ()))
            if in_log:
                name = datetime.fromtimestamp(hour * 3600, timezone.utc).strftime(_HOUR)
                compared.append(HourOfTopic(topic, name, in_log, loaded))
        start = end
    lag = {key: max(0, high[key] - max(low[key], known.get(key, (0, 0))[1])) for key in keys}
    return Completeness(compared, lag, gone)


def loaded_json(loaded: Loaded, output: str) -> dict[str, Any]:
    """What a call of `load` has done; a line of each partition has its offsets [from, until) of those to `planned`."""
    return {
        "partitions": [
            {"from" if name == "start" else name: value for name, value in vars(part).items() if name != "log_end"}
            | {"unexplained": part.unexplained, "lag": part.lag}
            for part in loaded.partitions
        ],
        "runs": [paths.run_name(number) for number in loaded.runs],
        "files": loaded.files,
        "bad": loaded.bad,
        "dead_letters": loaded.dead_letters,
        "lost": loaded.lost,
        "output": without_user(output),
    }


def table_rows(partitions: Sequence[PartitionAudit]) -> list[tuple[str, ...]]:
    """Lines of `COLUMNS`, and one with the sums."""
    rows = [
        (
            part.topic,
            str(part.partition),
            *(f"{count:,}" for count in (part.start, part.until, part.records, part.bytes)),
            _gaps_text(part.gaps),
            *(f"{count:,}" for count in (part.bad, part.lag)),
        )
        for part in partitions
    ]
    gaps = sum((Counter(part.gaps) for part in partitions), Counter())
    records, size, bad, lag = (
        f"{sum(getattr(part, name) for part in partitions):,}" for name in ("records", "bytes", "bad", "lag")
    )
    return [*rows, ("all", "", "", "", records, size, _gaps_text(gaps), bad, lag)]


def _gaps_text(gaps: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{count:,} {cause}" for cause, count in sorted(gaps.items())) or "-"


@dataclass(frozen=True)
class Status:
    """All runs of a load. `hours` has the records by topic and hour, `unfinished` names a killed run, or is "".

    The `files` of runs that merge are None: the journal does not have those that the table writes. `idle` is when a run
    had nothing to load since the last one, or "". `schemas` are those by which the last run has written keys and values
    as rows: {"topic", "column", "format", "subject", "version", "id"}.
    """

    output: str
    runs: list[dict[str, Any]]
    partitions: list[dict[str, Any]]
    hours: dict[str, dict[str, int]]
    findings: list[Finding]
    unfinished: str
    idle: str = ""
    schemas: list[dict[str, Any]] = field(default_factory=list)


def status(output: str) -> Status:
    """Look through the runs of the load in `output`; `LoadError` if there is none, or its files are damaged.

    It finds offsets between others that no run has, offsets without a record or a cause, offsets that were lost, and
    files that are missing or have another size.
    """
    store, identity = open_load(output)
    summary = read_summary(store)
    number, totals, findings = summary.run, summary.totals, list(summary.findings)
    for (topic, partition, incarnation), of_partition in sorted(summary.holes().items()):
        findings += [Finding(topic, partition, HOLE.format(*hole)) for hole in of_partition]
        if totals[topic, partition]["incarnation"] == incarnation:
            totals[topic, partition]["holes"] = of_partition
    findings = _missing_files(store, identity.table_at(output), summary) + findings
    unfinished = paths.run_name(number + 1) if read_plan(store, number + 1) is not None else ""
    hours = {topic: dict(sorted((+each).items())) for topic, each in sorted(summary.hours.items())}
    last_load = next((int(line["run"]) for line in reversed(summary.runs) if line["kind"] == LOAD), 0)
    idle = read_idle(store, last_load)
    for part in idle.partitions if idle else ():  # they may have partitions without records, and have the lag
        new = {**nothing_of(part), "until": part.until, "incarnation": 0, "topic_id": ""}
        totals.setdefault((part.topic, part.partition), new)["lag"] = part.lag
    partitions = [totals[key] for key in sorted(totals)]
    plan = read_plan(store, number) if number else None
    settings = {} if plan is None else plan.settings
    # whether a load merges binds all its runs
    runs = [line | {"files": None} for line in summary.runs] if settings.get("upsert_key") else summary.runs
    names = ("topic", "column", "format", "subject", "version", "id")
    return Status(
        without_user(output),
        runs,
        partitions,
        hours,
        findings,
        unfinished,
        idle.finished if idle else "",
        [{name: row.get(name) for name in names} for row in settings.get("rows", [])],
    )


def _missing_files(store: Store, table: Table | None, summary: Summary) -> list[Finding]:
    """Files that are not there as they were written. Of a table the current ones: others may have replaced them."""
    sizes: dict[str, int] = {}
    if table is None:  # a listing of each topic, where a load may have thousands of files
        listed = committed(summary)
        for topic in {file.topic for file in listed}:
            sizes |= store.sizes_below(paths.topic_folder(topic))
    else:
        listed = table_files(table, summary)
    missing = []
    for file in listed:
        path = stored_path(store, summary, file) if table is None else file.path
        size = sizes[path] if path in sizes else store.size(path) if is_below(path) else file.size
        if size != file.size:
            state = "is missing" if size is None else f"has {size} bytes, not {file.size}"
            missing.append(Finding(file.topic, file.partition, f"file {file.path} {state}"))
    return missing


def status_json(shown: Status) -> dict[str, Any]:
    """The fields of a status, with `findings` as `missing`."""
    line = dict(vars(shown))
    return line | {"missing": [vars(finding) for finding in line.pop("findings")]}


def statuses_json(shown: Iterable[tuple[str, Status | str]]) -> list[dict[str, Any]]:
    """The fields of the statuses of outputs, or their errors."""
    return [
        {"output": without_user(output), "error": state} if isinstance(state, str) else status_json(state)
        for output, state in shown
    ]


def bars(hours: dict[str, dict[str, int]]) -> Iterator[str]:
    """A line for each hour of each topic; the longest bar is the topic's largest hour."""
    for topic, each in hours.items():
        yield topic
        most = max(each.values(), default=1)
        for hour, count in _every_hour(each):
            yield f"  {hour:{_HOUR}}  {'#' * -(-count * _BAR // most):<{_BAR}}  {count:,}"


def plot_hours(hours: dict[str, dict[str, int]], path: Path) -> None:
    """Draw the records of each topic by hour as a PNG; `MissingPackage`, or `ConfigError` without records."""
    require("A plot", "matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if not hours:
        raise ConfigError("there is nothing to plot: the load has no records")
    figure, axes = pyplot.subplots(figsize=(10, 4), layout="constrained")
    for topic, each in hours.items():
        axes.step(*zip(*_every_hour(each), strict=True), where="post", label=topic)
    axes.set_ylabel("records an hour")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.autofmt_xdate()
    figure.savefig(path, format="png")
    pyplot.close(figure)


def _every_hour(counts: Mapping[str, int]) -> list[tuple[datetime, int]]:
    """Records by hour from the first to the last, also hours without any, unless there are too many to draw."""
    hours = [datetime.strptime(name, _HOUR).replace(tzinfo=timezone.utc) for name in sorted(counts)]
    span = (hours[-1] - hours[0]) // timedelta(hours=1) if hours else 0
    if hours and span < _MOST_HOURS:
        hours = [hours[0] + timedelta(hours=index) for index in range(span + 1)]
    return [(hour, counts.get(hour.strftime(_HOUR), 0)) for hour in hours]
