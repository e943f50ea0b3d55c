"""`klog groups`: list, describe and delete groups, and show their lag."""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache, wraps
from importlib.resources import files
from typing import Any, NamedTuple

import click

from spark_klog.base.clock import system_ms
from spark_klog.cli.clusters import ChosenCluster, cluster_options
from spark_klog.cli.foreign import CommandGroup
from spark_klog.cli.output import (
    can_move_cursor,
    cell,
    duration_text,
    escaped,
    fitting,
    print_lines,
    print_table,
    reading_arguments,
    say,
    table_lines,
    terminal_size,
)
from spark_klog.client import Admin
from spark_klog.client.admin.groups import DEAD, GroupDescription
from spark_klog.errors import ConfigError, ErrorCode, KlogError, ProtocolError, RequestTimedOut
from spark_klog.groups.lag import LagMetrics, group_json, lags_json
from spark_klog.groups.look import Look
from spark_klog.groups.stores import CoordinatorStore, OffsetStore, open_store, tree_addresses
from spark_klog.metrics import metrics_page
from spark_klog.wire.http import LOOPBACK, HttpThread
from spark_klog.wire.listening import parse_listen

_log = logging.getLogger(__name__)
#: Time of a call, unless the settings say otherwise: an outage should be seen soon.
_TIMEOUTS = {"default.api.timeout.ms": "10000", "request.timeout.ms": "10000"}


_Line = dict[str, Any]
#: Columns and rows.
_Table = tuple[list[str], list[list[str]]]


@click.group(cls=CommandGroup)
def groups() -> None:
    """List, describe and delete groups, and show their lag."""


def _stores_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for stores of a group's offsets besides its coordinator: `stores` has their addresses."""

    @click.option("--zookeeper", metavar="CONNECT", help="Offsets in ZooKeeper: HOST:PORT[,HOST:PORT...][/CHROOT].")
    @click.option("--offsets-path", metavar="PATH", help="Offsets in plain files: a folder or URI.")
    @wraps(function)
    def command(*args: Any, zookeeper: str | None, offsets_path: str | None, **others: Any) -> Any:
        return function(*args, stores=tree_addresses(zookeeper, offsets_path), **others)

    return command


@groups.command(
    "list",
    epilog="""\b
Examples:
  klog groups list -b broker:9092
  klog groups list --json | jq -r .group
""",
)
@cluster_options
def list_(cluster: ChosenCluster, as_json: bool) -> None:
    """List all groups, including those that only have offsets."""
    with cluster.connect() as admin:
        listed = admin.list_groups()
    fields = {"group": "group", "state": "state", "type": "type", "protocol type": "protocolType"}
    fields["coordinator"] = "coordinator"
    none = "" if as_json else None
    values = (
        (group.group, group.state, group.group_type or none, group.protocol_type or none, group.coordinator)
        for group in listed
    )
    print_lines(as_json, [dict(zip(fields.values(), each, strict=True)) for each in values], fields)


class _GroupSources(NamedTuple):
    """A group, with the cluster and the stores that know it."""

    admin: Admin
    group: str
    stores: list[OffsetStore]


@contextmanager
def _open_sources(
    groups: Iterable[str], cluster: ChosenCluster, stores: Sequence[str]
) -> Iterator[list[_GroupSources]]:
    """The groups, by one client: each has connections to all brokers."""
    settings = cluster.client_settings()
    with ExitStack() as stack:
        admin = stack.enter_context(cluster.connect())
        sources = []
        for group in dict.fromkeys(groups):
            opened = [stack.enter_context(open_store(address, group, settings)) for address in stores]
            sources.append(_GroupSources(admin, group, [CoordinatorStore(admin, group), *opened]))
        yield sources


def _read_group(sources: _GroupSources, look: Look) -> tuple[GroupDescription, list[_Line]]:
    """The group's current state, and a line for each partition; `ConfigError` if there is no such group."""
    described = sources.admin.describe_group(sources.group)
    offsets = {store.kind: store.fetch() for store in sources.stores}
    if described.state == DEAD and not any(offsets.values()):
        raise ConfigError(described.reason or f"group {sources.group} does not exist")
    return described, lags_json(sources.admin.cluster, described, offsets, "stores", look)


def _lags_table(sources: _GroupSources, partitions: Sequence[_Line], totals: _Line | None = None) -> _Table:
    """Each store has an offset, the lag in records, the lost ones, and the lag in time."""
    total = {"topic": "total", "partition": None, "member": None, "latest": None, "stores": totals}
    lines = [*partitions, total] if totals is not None else partitions
    kinds = [store.kind for store in sources.stores]
    columns = ["topic", "partition", "member", "latest"]
    columns += [column for kind in kinds for column in (kind, "lag", "lost", "time")]
    rows = []
    for line in lines:
        row = [cell(line[column]) for column in columns[:4]]
        for kind in kinds:
            lag = line["stores"].get(kind, {})
            least = ">=" if line is total and any(line["error"] for line in partitions) else ""
            row.append(cell(lag.get("offset")))
            row += [cell(lag.get(name)) if lag.get(name) is None else f"{least}{lag[name]}" for name in ("lag", "lost")]
            lag_ms = lag.get("lagMs")
            row.append("-" if lag_ms is None else duration_text(lag_ms))
        rows.append(row)
    return columns, rows


@groups.command(
    epilog="""\b
Examples:
  klog groups describe billing
  klog groups describe billing --zookeeper zk:2181 --json
"""
)
@click.argument("group")
@_stores_options
@cluster_options
def describe(group: str, stores: Sequence[str], cluster: ChosenCluster, as_json: bool) -> None:
    """Describe GROUP: its state, its members and their assignments, its offsets and lag.

    With --zookeeper or --offsets-path the offsets there stand next to those at the coordinator.
    If brokers do not answer, the rest is shown, and the exit code is 1.
    """
    look = Look()
    with _open_sources([group], cluster, stores) as [sources]:
        described, lines = _read_group(sources, look)
        columns, rows = _lags_table(sources, lines)
    if as_json:
        click.echo(json.dumps(group_json(described) | {"partitions": lines}))
        _check_complete(look)
        return
    kind = described.group_type and f"{described.group_type} group"
    parts = group, described.state, kind, described.protocol_type, described.protocol
    click.echo(escaped("  ".join((*filter(None, parts), f"coordinator {described.coordinator}"))))
    if described.members:
        names = ("member", "instance", "client", "host", "assignment")
        print_table(
            names,
            [
                (
                    *(each.member_id, cell(each.instance_id), each.client_id, each.host),
                    " ".join(
                        f"{topic}:{cell(partitions)}" for topic, partitions in sorted((each.assignment or {}).items())
                    )
                    or "-",
                )
                for each in described.members
            ],
        )
    if rows:
        print_table(columns, rows)
    _check_complete(look)


def _check_complete(look: Look) -> None:
    """Raise `RequestTimedOut` if something is missing, after the rest was shown."""
    if missing := look.missing:
        raise RequestTimedOut("; ".join(missing))


@groups.command()
@click.argument("names", metavar="GROUP...", nargs=-1)
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C; with --json print a line per round.")
@click.option(
    "--metrics",
    metavar="HOST:PORT",
    help="Serve the lag of GROUP..., by default of all groups, to Prometheus at http://HOST:PORT/metrics. "
    "A port alone is one of 127.0.0.1.",
)
@click.option("--interval", default=2.0, show_default=True, type=click.FloatRange(0.1), help="Seconds between rounds.")
@_stores_options
@cluster_options
def lag(
    names: tuple[str, ...],
    watch: bool,
    metrics: str | None,
    interval: float,
    stores: Sequence[str],
    cluster: ChosenCluster,
    as_json: bool,
) -> None:
    """Show the lag of each GROUP: the number of unread records, by their offsets, and the age of the oldest of them.

    Of these, `lost` are deleted: the group will never read them. Without others the age is not known.
    If brokers do not answer, the rest is shown, totals as "at least" (>=), and the exit code is 1 without --watch.
    With --metrics, rounds are at least twice as far apart as one takes.

    \b
    klog groups lag readers writers
    klog groups lag readers --watch
    klog groups lag --metrics 9404 --interval 15
    """
    if metrics is not None:
        if watch or as_json:
            raise click.UsageError("give --metrics without --watch and --json")
        _serve_lag(names, metrics, interval, stores, cluster)
        return
    if not names:
        raise click.UsageError("give at least one GROUP; only --metrics serves all")
    with _open_sources(names, cluster, stores) as sources:
        rounds = _rounds(sources, interval if watch else None)
        with suppress(KeyboardInterrupt):
            if as_json:
                for of_groups in rounds:
                    for _, line in of_groups:
                        click.echo(json.dumps(line))
            elif not (watch and can_move_cursor(sys.stdout)):
                for of_groups in rounds:
                    for title, table in _lag_tables(of_groups, len(sources) > 1):
                        if title:
                            click.echo(title)
                        print_table(*table)
            else:
                drawn = 0
                for of_groups in rounds:  # each round replaces the last one
                    size = terminal_size(sys.stdout)
                    tables = _lag_tables(of_groups, len(sources) > 1)
                    lines = [text for title, table in tables for text in (*filter(None, [title]), *table_lines(*table))]
                    shown = [fitting(text, size.columns) for text in lines[: size.lines - 1]]
                    up = f"\x1b[{drawn}A\r\x1b[J" if drawn else ""
                    sys.stdout.write("".join([up, *(f"{text}\n" for text in shown)]))
                    sys.stdout.flush()
                    drawn = len(shown)


def _lag_tables(lags: Sequence[tuple[_GroupSources, _Line]], are_several: bool) -> list[tuple[str, _Table]]:
    """A table of each group, and a title if several groups were named."""
    return [
        (
            escaped(f"{line['group']}  {line['state']}") if are_several else "",
            _lags_table(of_group, line["partitions"], line["stores"]),
        )
        for of_group, line in lags
    ]


def _lag_of(sources: _GroupSources, look: Look) -> _Line:
    """A group's lag now. The stores' totals are of what is known, None if nothing is."""
    described, lines = _read_group(sources, look)
    totals = {}
    for store in sources.stores:
        lags = [line["stores"][store.kind] for line in lines if store.kind in line["stores"]]
        known = {name: [lag[name] for lag in lags if lag[name] is not None] for name in ("lag", "lost", "lagMs")}
        totals[store.kind] = {name: sum(known[name]) if known[name] else None for name in ("lag", "lost")}
        totals[store.kind]["lagMs"] = max(known["lagMs"], default=None)
    return {
        "time": system_ms(),
        "group": sources.group,
        "state": described.state,
        "stores": totals,
        "unanswered": sum(line["error"] is not None for line in lines),
        "partitions": lines,
    }


def _rounds(sources: Sequence[_GroupSources], interval: float | None) -> Iterator[list[tuple[_GroupSources, _Line]]]:
    """Yield the lag of each group, every `interval` seconds; once if it is None.

    After the round in which a group does not exist, `ConfigError`: the lag of the others is shown before it. After the
    only round, `RequestTimedOut` if something is missing.
    """
    while True:
        began = time.monotonic()
        look = Look()
        lags, problems = [], []
        for of_group in sources:
            try:
                lags.append((of_group, _lag_of(of_group, look)))
            except ConfigError as error:
                problems.append(str(error))
        yield lags
        if problems:
            raise ConfigError("; ".join(problems))
        if interval is None:
            _check_complete(look)
            return
        time.sleep(max(0.0, began + interval - time.monotonic()))


def _serve_lag(
    groups: Sequence[str], address: str, interval: float, stores: Sequence[str], cluster: ChosenCluster
) -> None:
    """Serve the lag until Ctrl-C or SIGTERM, read every `interval` seconds, or after twice the time that it took.

    A first look-up that fails ends the command; a later one is logged, and the last figures are served.
    """
    with reading_arguments():
        parse_listen(address, "--metrics", LOOPBACK)  # a mistyped one must not wait for a broker
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    own = cluster.client_settings()
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        settings = cluster.local_settings()
        if not settings.keys() & _TIMEOUTS.keys():
            settings.update(_TIMEOUTS)
        with reading_arguments():
            admin = stack.enter_context(Admin(settings))

        @cache
        def others(group: str) -> list[OffsetStore]:
            return [stack.enter_context(open_store(store, group, own)) for store in stores]

        metrics = LagMetrics(admin, groups, others)
        began = time.monotonic()
        metrics.refresh()
        took = time.monotonic() - began
        served = stack.enter_context(closing(HttpThread(address, metrics_page(metrics.page))))
        click.echo(f"metrics at http://{served.address}/metrics")
        is_failing = False
        while True:
            time.sleep(max(interval, 2 * took))
            began = time.monotonic()
            try:
                metrics.refresh()
            except (KlogError, OSError) as error:
                if not is_failing:
                    _log.warning("can't read the lag, serving the last figures until it succeeds: %s", error)
                is_failing = True
            else:
                if is_failing:
                    _log.warning("the lag is read again")
                is_failing = False
            took = time.monotonic() - began


@groups.command(
    epilog="""\b
Examples:
  klog groups delete billing
  klog groups delete billing audit --yes --if-exists
"""
)
@click.argument("names", metavar="GROUP...", nargs=-1, required=True)
@click.option("--if-exists", is_flag=True, help="Do nothing for a group that does not exist.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@cluster_options
def delete(names: tuple[str, ...], if_exists: bool, yes: bool, cluster: ChosenCluster, as_json: bool) -> None:
    """Delete groups without members, with the offsets that they have committed.

    Whoever joins such a group again begins where auto.offset.reset says. If one can't be deleted, as it has members,
    delete the others, and exit with code 1. Offsets in ZooKeeper and in files stay.
    """
    if not yes:
        click.confirm(f"Delete {', '.join(names)} with all committed offsets?", abort=True, err=True)
    failed = False
    with cluster.connect() as admin:
        for name, error in admin.delete_groups(names).items():
            is_missing = isinstance(error, ProtocolError) and error.code == ErrorCode.GROUP_ID_NOT_FOUND
            if error is not None and not (if_exists and is_missing):
                failed = True
                click.echo(f"klog: {error}", err=True)
                continue
            deleted = error is None
            say(as_json, {"group": name, "deleted": deleted}, f"{name} {'deleted' if deleted else 'does not exist'}")
    if failed:
        sys.exit(1)


@groups.command(
    epilog="""\b
Examples:
  klog groups dashboard > klog-lag.json
"""
)
def dashboard() -> None:
    """Print a Grafana dashboard of the metrics of `klog groups lag --metrics`.

    Import it in Grafana under Dashboards > New > Import. It asks for the Prometheus data source.
    """
    click.echo(files("spark_klog.metrics").joinpath("dashboard.json").read_text(encoding="utf-8"), nl=False)
