"""What an earlier run of a load binds the later ones to: its cluster, formats, folders and schemas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from spark_klog.errors import LoadError
from spark_klog.load.commit import settings_of
from spark_klog.load.journal import paths
from spark_klog.load.journal.history import Identity, last_committed, read_identity, read_plan, schema_of
from spark_klog.load.journal.model import Plan
from spark_klog.load.journal.store import Store, open_store
from spark_klog.load.rows import ANOTHER
from spark_klog.load.settings import WriteSettings
from spark_klog.load.table_commit import TableTarget
from spark_klog.load.target import FolderTarget, Target
from spark_klog.load.values import evolved_schema, name_now
from spark_klog.schemas.json_schema.ddl import INFER
from spark_klog.tables.opening import is_table, open_table

#: The settings that bind later runs, with the job's options: what a record does to a table, a table's columns, and the
#: folders of records. Spark leaves out files outside of the folders, or refuses the folders, without knowing that they
#: are one load; in another time zone, or by another time, records of one time would be in two folders.
BINDING = {
    "upsert_key": "--upsert-key",
    "envelope": "--envelope",
    "order_by": "--order-by",
    "table_columns": "--table-columns",
    "layout": "--partition-by",
    "time_zone": "--time-zone",
    "event_time": "--event-time",
}
_OF_FOLDERS = ("layout", "time_zone", "event_time")
#: The values of those that are as good as not given.
_NOTHING = {"upsert_key": "", "envelope": "none", "order_by": "", "event_time": ""}
_BEGINS = "; --from-time or --from-offsets set where it begins"


def open_target(output: str) -> Target:
    """The target at a folder's path or URI, or at a table's address; errors as of `open_table` and `open_store`."""
    return TableTarget(open_table(output)) if is_table(output) else FolderTarget(open_store(output), output)


def check_output(
    target: Target, cluster_id: str | None, settings: Mapping[str, Any], rows: Mapping[str, str]
) -> Identity | None:
    """The load that the target belongs to; None if it is new. `settings` are those of `WriteSettings`, as JSON, `rows`
    the formats of columns that become rows. A load into files takes another cluster, format and schema before its first
    run has a plan: nothing is written by them. A table has its columns from the first call on.

    `LoadError` if it belongs to a load of another cluster, format, layout or table, or has other files. Of two schemas
    of JSON `check_schema` decides.
    """
    known = read_identity(target.store)
    if known is None:
        _check_new(target)
        return None
    if known.table != target.journal_name:
        texts = [f"into the table {name}" if name else "into files" for name in (known.table, target.journal_name)]
        raise LoadError(
            f"{target.address} belongs to a load {texts[0]}, not {texts[1]}: name it by --table or --output"
        )
    schema = schema_of(settings)
    if not known.table and not last_committed(target.store) and read_plan(target.store, 1) is None:
        kind = replace(known, format=settings["format"], schema=schema, rows=dict(rows))
        return replace(kind, cluster_id=cluster_id or known.cluster_id)
    if cluster_id and known.cluster_id and known.cluster_id != cluster_id:
        raise _of_another(target, f"of cluster {known.cluster_id}, and this is cluster {cluster_id}")
    if known.format != settings["format"]:
        raise _of_another(target, f"with --format {known.format}, not {settings['format']}")
    if (bool(known.schema), known.rows) != (bool(schema), rows):
        texts = [_contents(known.schema, known.rows), _contents(schema, rows)]
        raise _of_another(target, f"with {texts[0]}, not {texts[1]}", _BEGINS)
    plan = _committed_plan(target)
    was = settings if plan is None else {**asdict(WriteSettings()), **plan.settings}
    for name, option in BINDING.items():
        if was[name] != settings[name] and not (name == "time_zone" and was["layout"] == "none"):
            texts = [
                f"without {option}" if value == _NOTHING.get(name) else f"with {option} {value}"
                for value in (was[name], settings[name])
            ]
            raise _of_another(target, f"{texts[0]}, not {texts[1]}", _BEGINS if name in _OF_FOLDERS else "")
    return known


def _check_new(target: Target) -> None:
    """`LoadError` if the folder of a new load has files of others."""
    names = () if target.exists() else target.store.names("")
    others = [name for name in names if name != paths.FOLDER and not name.startswith((".", "_"))]
    if others:
        raise LoadError(f"{target.address} belongs to another load, or to none (it has {others[0]}): use {ANOTHER}")


def _committed_plan(target: Target) -> Plan | None:
    """The plan of the last committed run, which binds the next ones; the journal may be a run behind its target."""
    number = last_committed(target.store)
    identity = read_identity(target.store)
    if identity is not None and target.store.size(paths.plan(number + 1)) is not None:
        number = max(number, target.last_run(identity.load))
    return read_plan(target.store, number) if number else None


def event_time_now(store: Store, asked: str) -> str:
    """The name that the field of the event time has in the last run, if it was called `asked` before; else `asked`."""
    if not asked:
        return asked
    number = last_committed(store)
    plan = read_plan(store, number + 1) or read_plan(store, number)  # committed or not
    if plan is None:
        return asked
    try:
        last = settings_of(store, plan)
    except LoadError:  # whoever needs these settings says so
        return asked
    names = {name_now(row.type, asked) for row in last.rows if row.column == "value"}
    return last.event_time if names == {last.event_time} else asked


def check_schema(target: Target, known: Identity, schema: str, *, takes_new: bool) -> str:
    """The schema of JSON values from now on, if a call gives `schema`, and the load is one of JSON.

    It may have more fields than that of the last committed run, also wider numbers if the target takes them, if the
    load `takes_new` ones; else it is a `LoadError`, which names the differences.
    """
    plan = _committed_plan(target)
    if plan is None and not last_committed(target.store):
        return schema
    before = known.schema if plan is None else str(plan.settings.get("schema") or known.schema)
    if before in (schema, INFER):  # nobody knows what the runs had, whose journal is lost
        return schema
    evolved, hindrances = evolved_schema(before, schema, widens=target.widens)
    if takes_new and not hindrances:
        return evolved
    if not hindrances:
        what = f"with {_contents(before, {})}, not {_contents(schema, {})}"
        raise _of_another(target, what, f"{_BEGINS}. Or have it take the new fields by --schema-evolution latest")
    adds = "adds fields, or makes numbers wider" if target.widens else "adds fields"
    what = f"with another --schema: {'; '.join(hindrances)}. A load takes one that {adds}"
    raise _of_another(target, what, _BEGINS)


def _of_another(target: Target, what: str, more: str = "") -> LoadError:
    return LoadError(f"{target.address} belongs to a load {what}: use {ANOTHER}{more}")


def _contents(schema: str, rows: Mapping[str, str]) -> str:
    values = f"values of the schema '{schema}'" if schema else f"values as {rows.get('value', 'bytes')}"
    return f"{values} and keys as {rows['key']}" if "key" in rows else values
