"""Checkpoints: the sum of a load's runs in one file, so that nobody reads a year of manifests to know what it has.

    OUTPUT/_klog/checkpoint-RUN.json   {"sha256": of the rest, "state": the sum of the runs up to RUN}

The manifests are the truth, and a checkpoint follows them: it is written after the commit of each `EVERY`-th run or so,
holds for the load and the manifest that it names, and is left out if it is damaged, missing or of another time (a
folder that was restored). What it does not have is then read from the manifests.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from typing import Any

from spark_klog.errors import LoadError
from spark_klog.load.journal import history, paths
from spark_klog.load.journal.history import Identity
from spark_klog.load.journal.model import FileEntry, RangeResult
from spark_klog.load.journal.store import Store
from spark_klog.load.journal.summary import COMPACTION, LOAD, Finding, Summary

_log = logging.getLogger(__name__)
#: Runs from one checkpoint to the next: so many manifests are read at most beside it.
EVERY = 50
_VERSION = 1
_NAME = re.compile(r"checkpoint-([0-9]{8,})\.json")
_CONTENT = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n"state": (.*)\}\n', re.DOTALL)


def checkpoint_path(run: int) -> str:
    return f"{paths.FOLDER}/checkpoint-{paths.run_name(run)}.json"


def read_summary(store: Store, *, with_ranges: bool = False) -> Summary:
    """The sum of all committed runs; `LoadError` if a manifest is damaged.

    `with_ranges` also of the ranges that can be loaded again, for which files of tasks are read.
    """
    last = history.last_committed(store)
    return _continued(store, _last_checkpoint(store, last, with_ranges), last, with_ranges)


def _last_checkpoint(store: Store, last: int, with_ranges: bool) -> Summary:
    """What the last checkpoint has that can be used; without one, the sum of no runs."""
    for number in checkpoints(store):
        summary = read_checkpoint(store, number, with_ranges=with_ranges) if number <= last else None
        if summary is not None:
            return summary
    return Summary(_identity(store).first - 1)


def _identity(store: Store) -> Identity:
    return history.read_identity(store) or Identity("", "", "")


def _continued(store: Store, summary: Summary, last: int, with_ranges: bool) -> Summary:
    """The same summary, with the runs after it."""
    for manifest in history.manifests(store, summary.run + 1, last):
        kind = COMPACTION if history.is_compaction(store, manifest) else LOAD
        summary.add(manifest, kind, _results(store, manifest.run) if with_ranges else None)
    return summary


def _results(store: Store, run: int) -> list[RangeResult]:
    tasks = history.complete_tasks(store, run)
    return [result for number in tasks for result in history.task_results(store, run, number) or ()]


def checkpoints(store: Store) -> list[int]:
    """The runs that have a checkpoint, the last one first."""
    matches = (_NAME.fullmatch(name) for name in store.names(paths.FOLDER))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def write_checkpoint(store: Store) -> None:
    """Write a checkpoint after a commit if one is due. An error is logged: the run is committed, and the next one
    tries again."""
    try:
        there = checkpoints(store)
        last = history.last_committed(store)
        if last - next((number for number in there if number <= last), 0) < EVERY:
            return
        before = _last_checkpoint(store, last, with_ranges=True)
        kept = {last, before.run}  # two that can be used, so that one may be damaged
        store.write(checkpoint_path(last), _content(store, _continued(store, before, last, with_ranges=True)))
        for number in there:
            if number not in kept:
                store.remove(checkpoint_path(number))
    except LoadError as error:
        _log.warning("%s has no new checkpoint; the next run tries again: %s", store.address, error)


def _content(store: Store, summary: Summary) -> bytes:
    state = {
        "version": _VERSION,
        "load": _identity(store).load,
        "first": _identity(store).first,
        "run": summary.run,
        "manifest": _digest(store.read(paths.manifest(summary.run)) or b""),
        **_state(summary),
    }
    body = json.dumps(state, ensure_ascii=False, separators=(",", ":")).encode()
    return b'{"sha256": "%s",\n"state": %s}\n' % (_digest(body).encode(), body)


def read_checkpoint(store: Store, run: int, *, with_ranges: bool) -> Summary | None:
    """The sum of the runs up to `run`; None if its checkpoint can't be used, which is logged."""
    path = checkpoint_path(run)
    match = _CONTENT.fullmatch(store.read(path) or b"")
    if match is None or _digest(match[2]).encode() != match[1]:
        _log.warning("%s/%s is damaged; the runs are read in its place", store.address, path)
        return None
    state = json.loads(match[2])
    if state["version"] != _VERSION:
        _log.info("%s/%s is of another version of the program", store.address, path)
        return None
    manifest, identity = store.read(paths.manifest(run)) or b"", _identity(store)
    if [state[name] for name in ("load", "first", "manifest")] != [identity.load, identity.first, _digest(manifest)]:
        _log.warning("%s/%s is not of the runs that are there; they are read in its place", store.address, path)
        return None
    return _summary(state, with_ranges)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _state(summary: Summary) -> dict[str, Any]:
    """Rows instead of objects: a year has tens of thousands."""
    numbers = {path: number for number, path in enumerate(summary.files)}
    ranges = [
        [*key, [[*_range_row(each), [numbers[file.path] for file in each.files]] for each in of_key.values()]]
        for key, of_key in summary.ranges.items()
    ]
    return {
        "runs": [list(line.values()) for line in summary.runs],
        "totals": list(summary.totals.values()),
        "hours": summary.hours,
        "findings": [list(vars(finding).values()) for finding in summary.findings],
        "extents": [[*key, extents] for key, extents in summary.extents.items()],
        "taken": [[*key, extents] for key, extents in summary.taken.items()],
        "files": [[*vars(file).values(), run] for file, run in summary.files.values()],
        "letters": [[name, *place] for name, place in summary.letters.items()],
        "ranges": ranges,
        "unranged": [[*key, *place] for key, place in summary.unranged.items()],
    }


_RUN = ("run", "kind", "started", "finished", "records", "bytes", "files", "bad", "failed", "lag")
_RANGE = ("start", "until", "records", "bytes", "min_time", "max_time", "gaps", "hours", "dead_letters", "bad_values")


def _range_row(result: RangeResult) -> list[Any]:
    return [getattr(result, name) for name in _RANGE]


def _summary(state: dict[str, Any], with_ranges: bool) -> Summary:
    files = [(FileEntry(*row[:-1]), row[-1]) for row in state["files"]]
    summary = Summary(state["run"])
    summary.runs = [dict(zip(_RUN, row, strict=True)) for row in state["runs"]]
    summary.totals = {(line["topic"], line["partition"]): line for line in state["totals"]}
    summary.hours = {topic: Counter(each) for topic, each in state["hours"].items()}
    summary.findings = [Finding(*row) for row in state["findings"]]
    summary.extents = {tuple(key): [tuple(extent) for extent in extents] for *key, extents in state["extents"]}
    summary.taken = {tuple(key): [tuple(extent) for extent in extents] for *key, extents in state["taken"]}
    summary.files = {file.path: (file, run) for file, run in files}
    summary.letters = {name: (run, place) for name, run, place in state["letters"]}
    for topic, partition, incarnation, rows in state["ranges"] if with_ranges else ():
        known = summary.ranges[topic, partition, incarnation] = {}
        for *row, numbers in rows:
            of_range = [files[number][0] for number in numbers]
            result = RangeResult(topic, partition, files=of_range, **dict(zip(_RANGE, row, strict=True)))
            known[result.start, result.until] = result
    summary.unranged = {tuple(key): tuple(place) for *key, place in ((*row[:3], row[3:]) for row in state["unranged"])}
    return summary
