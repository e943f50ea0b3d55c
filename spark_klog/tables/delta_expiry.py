"""What a Delta table no longer needs: files that it has removed, files that it never had, versions of its log.

deltalake's `vacuum` tells which files were removed, and for how long. It is not let remove anything: its full form
takes deletion vectors in use for files that the table never had, it knows no run in progress, and its retention is in
hours.
`cleanup_metadata` goes by a property of the table, and removes the commit by which a load knows its last run.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable

from spark_klog.errors import LoadError
from spark_klog.files.arrow import ArrowFolder
from spark_klog.files.folder import Entry, LocalFolder
from spark_klog.tables.table import COMMIT_ENTRY, LOAD_PROPERTY
from spark_klog.tables.upkeep import ORPHAN_SECONDS, Expired, Kept, orphans

_LOG = "_delta_log"
_RETENTION = "delta.deletedFileRetentionDuration"
_DEFAULT_RETENTION = "interval 1 week"
_INTERVAL = re.compile(r"(?:interval\s+)?(\d+)\s+(millisecond|second|minute|hour|day|week)s?", re.IGNORECASE)
_UNITS = {"millisecond": 0.001, "second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
#: Checkpoints of one file, and of several ones; those with a name of their own (v2) are left to Spark.
_OF_VERSION = re.compile(r"(\d{20})\.(json|checkpoint\.parquet|checkpoint\.(\d{10})\.(\d{10})\.parquet)?.*")
#: For how much longer than readers need them the log names removed files, so that a later call still finds them.
_NAMED_SECONDS = 6 * 3600.0
#: By how much the clocks of a store and of this machine may differ.
_CLOCK_SECONDS = 3600.0
_RECENT = 20


def expired(
    table: DeltaTable,
    store: LocalFolder | ArrowFolder,
    address: str,
    kept: Kept,
    files: Mapping[str, Entry],
    is_needed: Callable[[str], bool],
) -> Expired:
    """What a table, read after its `files` were listed, no longer needs; `is_needed` tells files of a run in progress.

    `LoadError` if the log forgets removed files sooner than `kept` says.
    """
    properties, now = table.metadata().configuration, time.time()
    retention = _seconds(address, properties.get(_RETENTION, _DEFAULT_RETENTION))
    seconds = retention if kept.seconds is None else kept.seconds
    if seconds > retention:
        raise LoadError(
            f"{address} knows the files that it has removed for {retention:g} s only: set its property {_RETENTION} to "
            "a longer time, and give --older-than once that has passed, or give a shorter time. A call with a shorter "
            "--older-than, or --expire, may have lowered the property"
        )
    log = _Log(store, now - seconds)
    count, head = kept.count or 1, table.version()
    last = [head - count + 1] if count <= head + 1 else [0]
    versions = [version for version in range(last[0], head + 1) if version in log.commits] if count > 1 else None

    def removed(hours: float) -> set[str]:
        return set(table.vacuum(int(hours), enforce_retention_duration=False, keep_versions=versions))

    current = {unquote(path) for path in pa.table(table.get_add_actions())["path"].to_pylist()}
    hours, rest = divmod(seconds, 3600)
    gone = removed(hours + (rest > 0 and log.is_young)) - current
    if rest and not log.is_young:
        gone -= log.removed(log.since_cutoff(now - hours * 3600 + _CLOCK_SECONDS))
    lost = orphans(
        {path: entry for path, entry in files.items() if path.endswith(".parquet")},
        {*current, *table.vacuum(0, enforce_retention_duration=False), *log.removed((versions or [])[1:])},
        now - max(seconds, ORPHAN_SECONDS),
        is_needed,
    )
    unneeded = {path: files[path].size for path in sorted(gone) if path in files} | lost
    old, entries = log.before(min([log.state, *last, *_last_commit(table)]))
    return Expired(old, unneeded | entries)


def shorten(table: DeltaTable, address: str, seconds: float, *, is_dry: bool) -> dict[str, tuple[str, str]]:
    """Let the log forget removed files sooner, if readers need them for so many seconds only: each of its checkpoints
    has those that it knows. It knows them for some hours more, so that a later call finds them.

    Returns the property that this sets, or would set if it `is_dry`, as of `Expired`; {} if the log forgets them sooner
    already.
    """
    named = int(seconds + max(seconds, _NAMED_SECONDS))
    before, after = table.metadata().configuration.get(_RETENTION, _DEFAULT_RETENTION), f"interval {named} seconds"
    if named >= _seconds(address, before):
        return {}
    if not is_dry:
        table.alter.set_table_properties({_RETENTION: after})
    return {_RETENTION: (before, after)}


def _seconds(address: str, text: str) -> float:
    match = _INTERVAL.fullmatch(text.strip())
    if match is None:
        raise LoadError(f"{address}: its property {_RETENTION} is {text!r}: set it as 'interval 7 days'")
    return int(match[1]) * _UNITS[match[2].lower()]


def _last_commit(table: DeltaTable) -> list[int]:
    """The version with the last run of the table's load, if the log has it."""
    load = table.metadata().configuration.get(LOAD_PROPERTY)
    for limit in (_RECENT, None) if load else ():
        for commit in table.history(limit):
            entry = commit.get(COMMIT_ENTRY)
            if isinstance(entry, dict) and entry.get("load") == load:
                return [commit["version"]]
    return []


class _Log:
    """The files of a table's log, and what it says of the time since `cutoff`."""

    def __init__(self, store: LocalFolder | ArrowFolder, cutoff: float) -> None:
        self._store, self._cutoff = store, cutoff
        self.commits: dict[int, float] = {}
        self._checkpoints: set[int] = set()
        self._sizes: dict[int, dict[str, int]] = defaultdict(dict)
        parts: dict[tuple[int, int], int] = defaultdict(int)
        for path, entry in store.entries_below(_LOG).items():
            if (match := _OF_VERSION.fullmatch(entry.name)) is None or path != f"{_LOG}/{entry.name}":
                continue
            version = int(match[1])
            self._sizes[version][path] = entry.size
            if match[2] == "json":
                self.commits[version] = entry.time
            elif match[3]:
                parts[version, int(match[4])] += 1
                if parts[version, int(match[4])] == int(match[4]):
                    self._checkpoints.add(version)
            elif match[2]:
                self._checkpoints.add(version)

    @property
    def is_young(self) -> bool:
        """Whether it has no commit from before the cutoff, so that it does not tell what was removed since."""
        return min(self.commits.values(), default=self._cutoff) >= self._cutoff

    @property
    def state(self) -> int:
        """The version that the table had at the cutoff; the first one if it is younger."""
        old = [version for version, changed in self.commits.items() if changed < self._cutoff]
        return max(old, default=min(self.commits, default=0))

    def since_cutoff(self, until: float) -> list[int]:
        """The commits after the cutoff, up to a time."""
        return [version for version, changed in self.commits.items() if self._cutoff <= changed <= until]

    def removed(self, versions: Iterable[int]) -> set[str]:
        """The files that these commits have removed: checkpoints forget them after a time."""
        removed = set[str]()
        for version in versions:
            for line in self._store.lines(f"{_LOG}/{version:020}.json"):
                if b'"remove"' in line and (action := json.loads(line).get("remove")):
                    removed.add(unquote(action["path"]))
        return removed

    def before(self, version: int) -> tuple[int, dict[str, int]]:
        """How many versions are before those that are needed to read this one and later ones, and their files."""
        first = max((each for each in self._checkpoints if each <= version), default=0)
        old = sorted(each for each in self._sizes if each < first)
        sizes = {path: size for each in old for path, size in self._sizes[each].items()}
        return sum(each in self.commits for each in old), sizes
