"""`klog offsets`: show, set and copy the offsets of groups, in any store.

The text files of Kafka's ExportZkOffsets and ImportZkOffsets (0.7 to 1.1) have a line a partition:

    /consumers/GROUP/offsets/TOPIC/PARTITION:OFFSET
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from spark_klog.base.addresses import without_user
from spark_klog.base.clock import system_ms
from spark_klog.base.names import TopicPartition
from spark_klog.cli.clusters import ChosenCluster, client_options, parse_topics, partitions_of
from spark_klog.cli.foreign import CommandGroup
from spark_klog.cli.output import print_lines, reading_arguments
from spark_klog.client import Admin
from spark_klog.client.cluster import Cluster
from spark_klog.client.places import OffsetSpec, TimeSpec, offsets_by_partition, parse_time
from spark_klog.errors import ConfigError, DecodeError
from spark_klog.groups.stores import (
    Change,
    CoordinatorStore,
    OffsetStore,
    ShiftBy,
    Target,
    open_store,
    plan_changes,
    target_offsets,
)
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from spark_klog.trees.paths import consumer_offset_path, parse_offset

_LINE = re.compile(r"/consumers/([^/]+)/offsets/([^/]+)/([0-9]{1,10}):([0-9]+)")
_HOST_PORT = re.compile(r"[^/]+:[0-9]+(/.*)?")
#: An address of a cluster with a user, perhaps with a password; stores of files may have @ in their addresses.
_WITH_USER = re.compile(r"(?:(?:kafka|(?:sasl_)?(?:plaintext|ssl))://[^/]*|[^/]*:[^/]*)@", re.IGNORECASE)
_F = TypeVar("_F", bound=Callable[..., Any])


@click.group(cls=CommandGroup)
def offsets() -> None:
    """Show, set and copy the offsets of groups.

    \b
    STORE is one of:
      kafka://HOST:PORT              the group's coordinator
      zookeeper://HOST:PORT/CHROOT   /consumers/GROUP/offsets in ZooKeeper
      file:///PATH, s3://..., ...    the same as plain files
      checkpoint:///PATH             the checkpoint of a Spark query (read only)
    """


_group_option = click.option("--group", required=True, help="Name of the group.")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print a line of JSON per partition.")
_topic_option = click.option(
    "--topic", "topics", multiple=True, metavar="TOPIC[:0,1]", help="Only this topic or these partitions; repeatable."
)
_servers_option = click.option(
    "-b",
    "--bootstrap-server",
    "servers",
    help="The cluster that has the topics, unless a STORE is kafka://HOST:PORT; the default is bootstrap.servers of "
    "--command-config.",
)


def _writing_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        _json_option,
        client_options,
        _servers_option,
        click.option(
            "--force", is_flag=True, help="Write although the group is active; not possible at a coordinator."
        ),
        click.option("--dry-run", is_flag=True, help="Show the changes, and write nothing."),
    ):
        function = option(function)
    return function


def _store_address(_ctx: click.Context, _parameter: click.Parameter, address: str) -> str:
    """Reject HOST:PORT without a scheme as STORE, which would name a folder."""
    if _WITH_USER.match(address) and not Path(address).exists():
        raise click.BadParameter("it has a character @, and is not shown, as a password may be before it")
    if _HOST_PORT.fullmatch(address) and not Path(address).exists():
        raise click.BadParameter(f"{address} has no scheme: did you mean kafka://{address} or zookeeper://{address}?")
    return address


def _store_option(option: str, name: str, verb: str) -> Callable[[_F], _F]:
    text = f"{verb} them here: see klog offsets --help."
    return click.option(option, name, required=True, metavar="STORE", callback=_store_address, help=text)


def _chosen(offsets: Mapping[TopicPartition, int], topics: Mapping[str, set[int] | None]) -> dict[TopicPartition, int]:
    """The offsets of the topics; all offsets if `topics` is empty."""
    return {
        (topic, partition): offset
        for (topic, partition), offset in offsets.items()
        if not topics or (topic in topics and ((only := topics[topic]) is None or partition in only))
    }


def _stored(store: OffsetStore, address: str, group: str, topics: Mapping[str, set[int] | None]) -> dict[Any, int]:
    stored = _chosen(store.fetch(), topics)
    if not stored:
        of = f" of {', '.join(topics)}" if topics else ""
        raise ConfigError(f"{without_user(address)} has no offsets{of} for group {group}")
    return stored


@offsets.command(
    epilog="""\b
Examples:
  klog offsets show --group billing --from kafka://broker:9092
  klog offsets show --group billing --from zookeeper://zk:2181 --topic clicks:0,1
"""
)
@_group_option
@_store_option("--from", "source", "Read")
@_topic_option
@client_options
@click.option(
    "--export",
    "as_lines",
    is_flag=True,
    help="Print /consumers/GROUP/offsets/TOPIC/PARTITION:OFFSET, as ExportZkOffsets writes.",
)
@_json_option
def show(
    group: str, source: str, topics: tuple[str, ...], cluster: ChosenCluster, as_lines: bool, as_json: bool
) -> None:
    """Show a group's offsets: the next record to read in each partition."""
    if as_lines and as_json:
        raise click.UsageError("give --export or --json, not both")
    chosen = parse_topics("--topic ", topics)
    with ExitStack() as stack:
        with reading_arguments():
            store = stack.enter_context(open_store(source, group, cluster.client_settings()))
        offsets = sorted(_stored(store, source, group, chosen).items())
    if as_lines:
        for key, offset in offsets:
            click.echo(f"{consumer_offset_path(group, *key)}:{offset}")
        return
    lines = [{"topic": topic, "partition": partition, "offset": offset} for (topic, partition), offset in offsets]
    print_lines(as_json, lines, ("topic", "partition", "offset"))


@offsets.command(
    "copy",
    epilog="""\b
Examples:
  klog offsets copy --group billing --from zookeeper://zk:2181 --to kafka://broker:9092 --dry-run
""",
)
@_group_option
@_store_option("--from", "source", "Read")
@_store_option("--to", "target", "Write")
@_topic_option
@_writing_options
def copy(
    group: str,
    source: str,
    target: str,
    topics: tuple[str, ...],
    dry_run: bool,
    force: bool,
    cluster: ChosenCluster,
    as_json: bool,
) -> None:
    """Copy a group's offsets from one STORE to another.

    If one STORE is a coordinator, or with --bootstrap-server, offsets outside a partition's range become its first or
    last offset, and partitions that do not exist are skipped. The offsets of a checkpoint are the end of its last
    completed micro-batch.
    """
    chosen = parse_topics("--topic ", topics)
    with _opened(group, target, [source], cluster, force) as (to_store, (from_store,), topics_of):
        new_offsets = _stored(from_store, source, group, chosen)
        _apply(to_store, plan_changes(to_store.fetch(), new_offsets, topics_of), dry_run, as_json)


@offsets.command(
    "set",
    epilog="""\b
Examples:
  klog offsets set --group billing --to kafka://broker:9092 --topic clicks --to-time -1h --dry-run
  klog offsets set --group billing --to kafka://broker:9092 --topic clicks:0 --to-offset 42
""",
)
@_group_option
@_store_option("--to", "store", "Write")
@_topic_option
@click.option("--to-earliest", "to_earliest", is_flag=True, help="The first record.")
@click.option("--to-latest", "to_latest", is_flag=True, help="The end of the partition.")
@click.option(
    "--to-time",
    metavar="TIME",
    help="The first record since, or else the end: ISO 8601 (UTC without a zone), ms, or -10m.",
)
@click.option("--shift-by", type=int, metavar="N", help="N offsets forward, or back if N is negative.")
@click.option("--to-offset", type=click.IntRange(0), metavar="N", help="This offset.")
@click.option(
    "--from-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help='An offset for each partition: {"TOPIC":{"0":23}}, or the lines that --export and ExportZkOffsets write.',
)
@_writing_options
def set_(
    group: str,
    store: str,
    topics: tuple[str, ...],
    to_earliest: bool,
    to_latest: bool,
    to_time: str | None,
    shift_by: int | None,
    to_offset: int | None,
    from_file: Path | None,
    dry_run: bool,
    force: bool,
    cluster: ChosenCluster,
    as_json: bool,
) -> None:
    """Set a group's offsets. An offset outside a partition's range becomes its first or last offset."""
    targets: list[Target] = []
    targets += [OffsetSpec(EARLIEST)] if to_earliest else []
    targets += [OffsetSpec(LATEST)] if to_latest else []
    with reading_arguments():
        targets += [TimeSpec(parse_time("--to-time", to_time))] if to_time is not None else []
    targets += [ShiftBy(shift_by)] if shift_by is not None else []
    targets += [to_offset] if to_offset is not None else []
    if len(targets) + (from_file is not None) != 1:
        raise click.UsageError(
            "give exactly one of --to-earliest, --to-latest, --to-time, --shift-by, --to-offset and --from-file"
        )
    chosen = parse_topics("--topic ", topics)
    if not chosen and targets:
        raise click.UsageError("--topic is required")
    if any(isinstance(target, TimeSpec) and (target.everywhere or 0) > system_ms() for target in targets):
        text = "is in the future: without records that late the group gets the ends as they are now, not those of then"
        click.echo(f"klog: --to-time {to_time} {text}", err=True)
    with _opened(group, store, [], cluster, force) as (opened, _, topics_of):
        if topics_of is None:
            raise click.UsageError("--bootstrap-server is required: the cluster that has the topics")
        current = opened.fetch()
        if from_file is not None:
            new_offsets = _chosen(_parse_file(from_file, group), chosen)
        else:
            new_offsets = target_offsets(topics_of, targets[0], partitions_of(topics_of, chosen), current)
        _apply(opened, plan_changes(current, new_offsets, topics_of), dry_run, as_json)


@reading_arguments()
def _parse_file(path: Path, group: str) -> dict[TopicPartition, int]:
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    if text.lstrip().startswith("/"):
        return _parse_export(text, group, str(path))
    each = offsets_by_partition("--from-file", text).each
    if any(offset < 0 for _, offset in each):
        raise ConfigError(f'{path} must have an offset of at least 0 for each partition: {{"TOPIC":{{"0":23}}}}')
    return dict(each)


def _parse_export(text: str, group: str, where: str) -> dict[TopicPartition, int]:
    """The offsets of `group` in such a file; `ConfigError`, which begins with `where`, for other lines and without any.

    Lines of other groups are left out: an export may have all.
    """
    offsets: dict[TopicPartition, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ConfigError(
                f"{where}, line {number}: {line[:200]!r} must be /consumers/GROUP/offsets/TOPIC/PARTITION:OFFSET"
            )
        if match[1] == group:
            try:
                offsets[match[2], int(match[3])] = parse_offset(match[4].encode(), where)
            except DecodeError as error:
                raise ConfigError(f"{where}, line {number}: {error}") from None
    if not offsets:
        raise ConfigError(f"{where} has no offsets of group {group}")
    return offsets


@contextmanager
def _opened(
    group: str, target: str, sources: Sequence[str], cluster: ChosenCluster, force: bool
) -> Iterator[tuple[OffsetStore, list[OffsetStore], Cluster | None]]:
    """Open the store to write, the stores to read, and the cluster that has the topics.

    `ConfigError` if the group is active in one of them, unless `force` allows it.
    """
    settings = cluster.settings()
    with ExitStack() as stack:
        with reading_arguments():
            to_store = stack.enter_context(open_store(target, group, settings, writing=True))
            from_stores = [stack.enter_context(open_store(source, group, settings)) for source in sources]
        stores = list(zip((target, *sources), (to_store, *from_stores), strict=True))
        topics_of = next((store.cluster for _, store in stores if store.cluster is not None), None)
        if cluster.servers is not None or (topics_of is None and "bootstrap.servers" in settings):
            admin = stack.enter_context(Admin(settings))
            topics_of = admin.cluster
            stores.append((settings["bootstrap.servers"], CoordinatorStore(admin, group)))
        for address, store in stores:
            can_force = store is not to_store or store.cluster is None
            if not (force and can_force) and (members := store.members()):
                otherwise = (
                    ", or use --force" if can_force else ": a coordinator rejects offsets while a group has members"
                )
                raise ConfigError(
                    f"group {group} is active: {without_user(address)} has its member{'s' if len(members) > 1 else ''} "
                    f"{', '.join(sorted(members))}; stop them first{otherwise}"
                )
        yield to_store, from_stores, topics_of


def _apply(store: OffsetStore, changes: Iterable[Change], dry_run: bool, as_json: bool) -> None:
    changes = list(changes)
    written = {(change.topic, change.partition): change.new for change in changes if change.new is not None}
    if not dry_run:
        store.commit(written)
    lines = [change._asdict() | {"written": not dry_run and change.new is not None} for change in changes]
    print_lines(as_json, lines, ("topic", "partition", "old", "new", "note"))
    if dry_run and not as_json:
        click.echo("nothing was written", err=True)
