"""The runs of a load: which is the last, and which one was killed on its way."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from spark_klog.errors import LoadError
from spark_klog.load.journal import paths
from spark_klog.load.journal.model import (
    VERSION,
    Idle,
    Latest,
    LettersInTopic,
    Manifest,
    Plan,
    RangeResult,
    TaskResults,
    from_json,
)
from spark_klog.load.journal.store import Store, open_store, read_json, to_json
from spark_klog.schemas.json_schema.ddl import INFER
from spark_klog.tables.opening import LOADING, existing_table, is_table, named_table, open_table
from spark_klog.tables.table import Table

_T = TypeVar("_T")
#: What the plan of a compaction says that it was asked for.
COMPACTED = "compaction"
_RESULTS = re.compile(r"offsets-([0-9]{5,})\.json")  # the name that `task_path` makes


@dataclass(frozen=True)
class Identity:
    load: str
    cluster_id: str
    format: str
    schema: str = ""
    #: Of keys and values that are rows, by column.
    rows: dict[str, str] = field(default_factory=dict)
    #: Of a load into a table: its `journal_name`.
    table: str = ""
    #: The first run that the journal has; the manifests of those before it were lost.
    first: int = 1
    version: int = VERSION

    def table_at(self, output: str) -> Table | None:
        """The load's table; None if it has none. `output` is what the load was opened by."""
        if not self.table:
            return None
        return open_table(output) if is_table(output) else named_table(self.table, output)


def _read(store: Store, kind: type[_T], path: str) -> _T | None:
    value = read_json(store, path)
    return None if value is None else from_json(kind, value, f"{store.address}/{path}")


def read_identity(store: Store) -> Identity | None:
    """The load that a folder is of; None if there is none."""
    return _read(store, Identity, paths.LOAD)


def read_manifest(store: Store, run: int) -> Manifest | None:
    """The manifest of a run; None before its commit."""
    return _read(store, Manifest, paths.manifest(run))


def read_plan(store: Store, run: int) -> Plan | None:
    """The plan of a run; None if there is no such run."""
    return _read(store, Plan, paths.plan(run))


def last_committed(store: Store) -> int:
    """The number of the last committed run, 0 before the first; `LoadError` if `latest.json` names no such run.

    The pointer may be a run behind, if a run was killed between its commit and the pointer.
    """
    pointer = _read(store, Latest, paths.LATEST)
    where = f"{store.address}/{paths.LATEST}"
    number = 0
    if pointer is not None:
        name = pointer.run
        if not name.isascii() or not name.isdecimal():
            raise LoadError(f"{where} names no run ({name!r}): restore it")
        number = int(name)
        if store.size(paths.manifest(number)) is None:
            raise LoadError(f"{where} names run {name}, which is not committed: restore it")
    while store.size(paths.manifest(number + 1)) is not None:
        number += 1
    if pointer is not None and number > int(pointer.run) + 1:
        raise LoadError(
            f"{where} names run {pointer.run}, but runs up to {paths.run_name(number)} are committed: restore it"
        )
    return number


def settled_run(store: Store) -> int:
    """The number of the last committed run, as `last_committed`; what a compaction has left that was killed before its
    commit is discarded. Nobody else may write."""
    number = last_committed(store)
    plan = read_plan(store, number + 1)
    if plan is not None and plan.asked == COMPACTED:
        discard_run(store, number + 1)
    return number


def discard_run(store: Store, run: int) -> None:
    """Remove what is there of a run, which is not committed."""
    folder = paths.plan(run).rpartition("/")[0]
    if not store.shows_whole_files_only:
        store.remove(folder)
        return
    # never the whole folder: the commit of a process that stood still may be on its way
    for name in store.names(folder):
        if paths.in_run(run, name) != paths.manifest(run):
            store.remove(paths.in_run(run, name))


def is_compaction(store: Store, manifest: Manifest) -> bool:
    """Whether a committed run has compacted others."""
    plan = read_plan(store, manifest.run) if manifest.replaced else None
    return plan is not None and plan.asked == COMPACTED


def is_pointed_to(store: Store, run: int) -> bool:
    """Whether `latest.json` names the run: it is the last step of showing it."""
    pointer = _read(store, Latest, paths.LATEST)
    return pointer is not None and pointer.run == paths.run_name(run)


def manifests(store: Store, first: int, last: int) -> Iterator[Manifest]:
    """The committed runs from `first` to `last`."""
    for number in range(first, last + 1):
        manifest = read_manifest(store, number)
        if manifest is None:
            raise LoadError(f"{store.address}/{paths.manifest(number)} is missing: restore it")
        yield manifest


def complete_tasks(store: Store, run: int) -> list[int]:
    """The numbers of the tasks of a run that have their file of offsets, in order."""
    names = store.names(paths.task(run, 0).rpartition("/")[0])
    return [int(match[1]) for name in names if (match := _RESULTS.fullmatch(name))]


def task_results(store: Store, run: int, number: int) -> list[RangeResult] | None:
    """The content of a task's file of offsets; None before the task is complete, `LoadError` if it is damaged."""
    results = _read(store, TaskResults, paths.task(run, number))
    return None if results is None else results.ranges


def read_idle(store: Store, run: int) -> Idle | None:
    """Read what a call with nothing to load has found since run `run`; None if there was no such call."""
    idle = _read(store, Idle, paths.IDLE)
    return idle if idle is not None and idle.run >= run else None


def letters_in_topic(store: Store, topic: str, topic_id: str) -> int:
    """Up to which number a topic has the dead letters, as the journal notes it; 0 for another topic of that name."""
    noted = _read(store, LettersInTopic, paths.letters_in(topic))
    return noted.until if noted is not None and noted.topic_id == topic_id else 0


def open_load(output: str) -> tuple[Store, Identity]:
    """The load in a folder or URI, or of the table at an address; `LoadError` if there is none."""
    table = existing_table(output) if is_table(output) else None
    location = output if table is None else table.location
    store = open_store(location)
    identity = read_identity(store)
    if identity is None:
        raise LoadError(f"{(table or store).address} has no load: name the --output or --table of `{LOADING}`")
    return (open_store(location, of_table=True) if identity.table else store), identity


def new_identity(
    cluster_id: str | None, settings: Mapping[str, Any], rows: Mapping[str, str], table: str = ""
) -> Identity:
    """A new load. `settings` are those of `WriteSettings`, as JSON, `rows` the formats of columns that become rows."""
    return Identity(uuid.uuid4().hex, cluster_id or "", settings["format"], schema_of(settings), dict(rows), table)


def schema_of(settings: Mapping[str, Any]) -> str:
    """The `schema` of the load that has such settings of `WriteSettings`, as JSON."""
    return str(settings["schema"]) or (INFER if settings["infers"] else "")


def claim_output(store: Store, identity: Identity) -> Identity:
    """Make a new output this load's; returns the load that has it, which is another one if its run was quicker."""
    return identity if store.create(paths.LOAD, to_json(identity)) else read_identity(store) or identity
