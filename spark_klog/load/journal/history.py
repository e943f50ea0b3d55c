"""The runs of a load: which is the last, and which one was killed on its way."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from spark_klog.errors import ConfigError, LoadError
from spark_klog.load.journal.model import (
    FOLDER,
    IDLE,
    LATEST,
    LOAD,
    VERSION,
    Idle,
    Manifest,
    Plan,
    RangeResult,
    from_json,
    manifest_path,
    plan_path,
    run_name,
    run_path,
    task_path,
)
from spark_klog.load.journal.store import Store, open_store, read_json, to_json
from spark_klog.load.json_schemas import evolved_schema
from spark_klog.load.rows import ANOTHER
from spark_klog.load.settings import RECORDS, WriteSettings
from spark_klog.load.values import name_now
from spark_klog.tables.opening import DELTA, existing_table, is_table, open_table
from spark_klog.tables.table import Table

_T = TypeVar("_T")
#: What the plan of a compaction says that it was asked for.
COMPACTED = "compaction"
_RESULTS = re.compile(r"offsets-([0-9]{5,})\.json")  # the name that `task_path` makes
#: The settings that decide on the folders of records, the layout first, with the job's options.
_LAYOUT = {"layout": "--partition-by", "time_zone": "--time-zone", "event_time": "--event-time"}
#: Those that say what a record does to a table, and what a plan says that has none of them.
_CHANGES = {"upsert_key": "--upsert-key", "envelope": "--envelope"}
_APPENDED = {"upsert_key": "", "envelope": "none"}
#: All settings that bind the later runs of a load.
BINDING = (*_LAYOUT, *_CHANGES, "table_columns")
_BEGINS = "; --from-time or --from-offsets set where it begins"


@dataclass(frozen=True)
class Identity:
    load: str
    cluster_id: str
    format: str
    schema: str = ""
    #: Of keys and values that are rows, by column.
    rows: dict[str, str] = field(default_factory=dict)
    #: Of a load into a table: its format, or its address if that has no secrets.
    table: str = ""
    #: The first run that the journal has; the manifests of those before it were lost.
    first: int = 1
    version: int = VERSION

    #: Versions that are read: 2 has been compacted in an object store.
    VERSIONS = (VERSION, 2)

    def table_at(self, output: str) -> Table | None:
        """The load's table; None if it has none. `output` is what the load was opened by."""
        if not self.table:
            return None
        if is_table(output):
            return open_table(output)
        return open_table(f"{self.table}:{output}" if self.table == DELTA else self.table)


def _read(store: Store, kind: type[_T], path: str) -> _T | None:
    value = read_json(store, path)
    return None if value is None else from_json(kind, value, f"{store.address}/{path}")


def read_identity(store: Store) -> Identity | None:
    """The load that a folder is of; None if there is none."""
    return _read(store, Identity, LOAD)


def read_manifest(store: Store, run: int) -> Manifest | None:
    """The manifest of a run; None before its commit."""
    return _read(store, Manifest, manifest_path(run))


def read_plan(store: Store, run: int) -> Plan | None:
    """The plan of a run; None if there is no such run."""
    return _read(store, Plan, plan_path(run))


def last_committed(store: Store) -> int:
    """The number of the last committed run, 0 before the first; `LoadError` if `latest.json` names no such run.

    The pointer may be a run behind, if a run was killed between its commit and the pointer.
    """
    pointer = read_json(store, LATEST)
    where = f"{store.address}/{LATEST}"
    number = 0
    if pointer is not None:
        name = pointer.get("run")
        if not isinstance(name, str) or not name.isascii() or not name.isdecimal():
            raise LoadError(f"{where} names no run ({name!r}): restore it")
        number = int(name)
        if store.size(manifest_path(number)) is None:
            raise LoadError(f"{where} names run {name}, which is not committed: restore it")
    while store.size(manifest_path(number + 1)) is not None:
        number += 1
    if pointer is not None and number > int(pointer["run"]) + 1:
        raise LoadError(
            f"{where} names run {pointer['run']}, but runs up to {run_name(number)} are committed: restore it"
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
    folder = plan_path(run).rpartition("/")[0]
    if not store.shows_whole_files_only:
        store.remove(folder)
        return
    # never the whole folder: the commit of a process that stood still may be on its way
    for name in store.names(folder):
        if run_path(run, name) != manifest_path(run):
            store.remove(run_path(run, name))


def is_compaction(store: Store, manifest: Manifest) -> bool:
    """Whether a committed run has compacted others."""
    plan = read_plan(store, manifest.run) if manifest.replaced else None
    return plan is not None and plan.asked == COMPACTED


def raise_version(store: Store) -> None:
    """Have earlier versions of the program refuse the load from now on."""
    identity = read_identity(store)
    if identity is not None and identity.version < max(Identity.VERSIONS):
        store.write(LOAD, to_json(replace(identity, version=max(Identity.VERSIONS))))


def is_pointed_to(store: Store, run: int) -> bool:
    """Whether `latest.json` names the run: it is the last step of showing it."""
    return (read_json(store, LATEST) or {}).get("run") == run_name(run)


def manifests(store: Store, first: int, last: int) -> Iterator[Manifest]:
    """The committed runs from `first` to `last`."""
    for number in range(first, last + 1):
        found = read_manifest(store, number)
        if found is None:
            raise LoadError(f"{store.address}/{manifest_path(number)} is missing: restore it")
        yield found


def complete_tasks(store: Store, run: int) -> list[int]:
    """The numbers of the tasks of a run that have their file of offsets, in order."""
    names = store.names(task_path(run, 0).rpartition("/")[0])
    return [int(found[1]) for name in names if (found := _RESULTS.fullmatch(name))]


def task_results(store: Store, run: int, number: int) -> list[RangeResult] | None:
    """The content of a task's file of offsets; None before the task is complete, `LoadError` if it is damaged."""
    path = task_path(run, number)
    value = read_json(store, path)
    if value is None:
        return None
    where = f"{store.address}/{path}"
    ranges = value.get("ranges")
    if not isinstance(ranges, list):
        raise LoadError(f"{where} is not what a run has written (no ranges): restore it")
    return [from_json(RangeResult, item, where) for item in ranges]


def read_idle(store: Store, run: int) -> Idle | None:
    """Read what a call with nothing to load has found since run `run`; None if there was no such call."""
    found = _read(store, Idle, IDLE)
    return found if found is not None and found.run >= run else None


def open_load(output: str) -> tuple[Store, Identity]:
    """The load in a folder or URI, or of the table at an address; `LoadError` if there is none."""
    table = existing_table(output) if is_table(output) else None
    location = output if table is None else table.location
    store = open_store(location)
    identity = read_identity(store)
    if identity is None:
        raise LoadError(f"{(table or store).address} has no load: name the --output or --table of jobs/batch_load.py")
    return (open_store(location, of_table=True) if identity.table else store), identity


def check_output(
    store: Store,
    cluster_id: str | None,
    settings: Mapping[str, Any],
    rows: Mapping[str, str],
    kind: str = "",
    table: Table | None = None,
) -> Identity | None:
    """The load that the output belongs to; None if it is new. `settings` are those of `WriteSettings`, as JSON, `rows`
    the formats of columns that become rows, `kind` is as `Identity.table`.

    `LoadError` if it belongs to a load of another cluster, format, layout or table, or has other files, unless the
    `table` is there. Of two schemas of JSON `check_schema` decides.
    """
    format_name, schema = settings["format"], settings["schema"]
    where = (table or store).address  # as the user names it
    found = read_identity(store)
    if found is None and table is not None and table.schema() is not None:
        return None
    if found is None:
        others = [name for name in store.names("") if name != FOLDER and not name.startswith((".", "_"))]
        if others:
            former = any(name.startswith("batch=") for name in others)
            advice = (
                f"jobs/batch_load.py wrote it before it kept runs. Use {ANOTHER}, which loads what the topics "
                "still have; this one stays readable"
                if former
                else f"use {ANOTHER}"
            )
            raise LoadError(f"{where} belongs to another load, or to none (it has {others[0]}): {advice}")
        return None
    if cluster_id and found.cluster_id and found.cluster_id != cluster_id:
        raise _of_another(where, f"of cluster {found.cluster_id}, and this is cluster {cluster_id}")
    if found.table != kind:
        texts = [f"into the table {one}" if one else "into files" for one in (found.table, kind)]
        raise LoadError(f"{where} belongs to a load {texts[0]}, not {texts[1]}: name it by --table or --output")
    if found.format != format_name:
        raise _of_another(where, f"with --format {found.format}, not {format_name}")
    if (bool(found.schema), found.rows) != (bool(schema), rows):
        texts = [_contents(found.schema, found.rows), _contents(schema, rows)]
        raise _of_another(where, f"with {texts[0]}, not {texts[1]}", _BEGINS)
    plan = _committed_plan(store, table)
    for name, option in _CHANGES.items():
        was = settings[name] if plan is None else plan.settings.get(name, _APPENDED[name])
        if was != settings[name]:
            texts = [
                f"without {option}" if value == _APPENDED[name] else f"with {option} {value}"
                for value in (was, settings[name])
            ]
            raise _of_another(where, f"{texts[0]}, not {texts[1]}")
    columns = plan.settings.get("table_columns", RECORDS) if plan is not None else settings["table_columns"]
    if columns != settings["table_columns"]:
        raise _of_another(where, f"with --table-columns {columns}, not {settings['table_columns']}")
    for name, option in _LAYOUT.items():
        # Spark leaves out files outside of the folders, or refuses the folders, without knowing that they are one load;
        # in another time zone, or by another time, records of one time would be in two folders.
        was = settings[name] if plan is None else plan.settings.get(name, settings[name])
        if was != settings[name]:
            texts = [f"with {option} {value}" if value else f"without {option}" for value in (was, settings[name])]
            raise _of_another(where, f"{texts[0]}, not {texts[1]}", _BEGINS)
        if name == "layout" and was == "none":
            break
    return found


def _last_plan(store: Store) -> Plan | None:
    """The plan of the last run, committed or not."""
    number = last_committed(store)
    return read_plan(store, number + 1) or read_plan(store, number)


def _committed_plan(store: Store, table: Table | None) -> Plan | None:
    """The plan of the last committed run, which binds the next ones; of a table, as the journal may be a run behind."""
    number = last_committed(store)
    identity = read_identity(store)
    if table is not None and identity is not None and store.size(plan_path(number + 1)) is not None:
        last = table.last_run(identity.load)
        number = max(number, 0 if last is None else last.number)
    return read_plan(store, number) if number else None


def event_time_now(store: Store, asked: str) -> str:
    """The name that the field of the event time has in the last run, if it was called `asked` before; else `asked`."""
    plan = _last_plan(store) if asked else None
    if plan is None:
        return asked
    try:
        last = WriteSettings.of(plan.settings)
    except (TypeError, ValueError, ConfigError):  # whoever needs these settings says so
        return asked
    names = {name_now(one.type, asked) for one in last.rows if one.column == "value"}
    return last.event_time if names == {last.event_time} else asked


def check_schema(store: Store, found: Identity, schema: str, table: Table | None, *, takes_new: bool) -> str:
    """The schema of JSON values from now on, if a call gives `schema`, and the load is one of JSON.

    It may have more fields than that of the last committed run, in a table also wider numbers, if the load `takes_new`
    ones; else it is a `LoadError`, which names the differences.
    """
    where, plan = (table or store).address, _committed_plan(store, table)
    if plan is None and not last_committed(store):
        return schema
    before = found.schema if plan is None else str(plan.settings.get("schema") or found.schema)
    if schema == before:
        return schema
    evolved, hindrances = evolved_schema(before, schema, widens=bool(found.table))
    if takes_new and not hindrances:
        return evolved
    if not hindrances:
        what = f"with {_contents(before, {})}, not {_contents(schema, {})}"
        raise _of_another(where, what, f"{_BEGINS}. Or have it take the new fields by --schema-evolution latest")
    adds = "adds fields, or makes numbers wider" if found.table else "adds fields"
    what = f"with another --schema: {'; '.join(hindrances)}. A load takes one that {adds}"
    raise _of_another(where, what, _BEGINS)


def _of_another(where: str, what: str, more: str = "") -> LoadError:
    return LoadError(f"{where} belongs to a load {what}: use {ANOTHER}{more}")


def _contents(schema: str, rows: Mapping[str, str]) -> str:
    values = f"values of the schema '{schema}'" if schema else f"values as {rows.get('value', 'bytes')}"
    return f"{values} and keys as {rows['key']}" if "key" in rows else values


def new_identity(
    cluster_id: str | None, settings: Mapping[str, Any], rows: Mapping[str, str], table: str = ""
) -> Identity:
    """A new load; the arguments are those of `check_output`."""
    kind = settings["format"], settings["schema"]
    return Identity(uuid.uuid4().hex, cluster_id or "", *kind, dict(rows), table)


def claim_output(store: Store, identity: Identity) -> Identity:
    """Make an output that `check_output` found new this load's, or that of another run that was quicker."""
    values = vars(identity)
    if not identity.table:  # earlier versions of the program read a load of files, and know no tables
        values = {name: value for name, value in values.items() if name not in ("table", "first")}
    return identity if store.create(LOAD, to_json(values)) else read_identity(store) or identity
