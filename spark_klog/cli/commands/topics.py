"""`klog topics`: create, list, describe, alter and delete topics of any cluster; their offsets."""

from __future__ import annotations

import sys
from base64 import urlsafe_b64encode
from collections.abc import Sequence

import click

from spark_klog.base.settings import parse_settings
from spark_klog.cli.clusters import ChosenCluster, cluster_options, parse_topics, partitions_of
from spark_klog.cli.foreign import CommandGroup
from spark_klog.cli.output import print_lines, reading_arguments, say
from spark_klog.client import Admin
from spark_klog.client.admin.topics import ConfigResource
from spark_klog.client.offsets import NO_OFFSET, first_and_end, list_offsets
from spark_klog.client.places import parse_time
from spark_klog.errors import ErrorCode, ProtocolError
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.records import EARLIEST, LATEST

#: As GetOffsetShell has them, too.
_NAMED_TIMES = {"latest": LATEST, "-1": LATEST, "earliest": EARLIEST, "-2": EARLIEST}
_INTERNAL = ("__consumer_offsets", "__transaction_state")


@click.group(cls=CommandGroup)
def topics() -> None:
    """Create, list, describe, alter and delete topics; offsets of their partitions."""


@topics.command(
    epilog="""\b
Examples:
  klog topics create clicks --partitions 6
  klog topics create prices --config cleanup.policy=compact --if-not-exists
"""
)
@click.argument("name")
@click.option("--partitions", default=1, show_default=True, type=click.IntRange(1), help="Number of partitions.")
@click.option("--replication-factor", default=1, show_default=True, type=click.IntRange(1), help="Copies of each.")
@click.option("--config", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of the topic; repeatable.")
@click.option("--if-not-exists", is_flag=True, help="Do nothing if the topic exists.")
@cluster_options
def create(
    name: str,
    partitions: int,
    replication_factor: int,
    settings: tuple[str, ...],
    if_not_exists: bool,
    cluster: ChosenCluster,
    as_json: bool,
) -> None:
    """Create the topic NAME."""
    created = True
    with reading_arguments():
        configs = parse_settings(settings)
    with cluster.connect() as admin:
        try:
            admin.create_topic(name, partitions, replication_factor=replication_factor, configs=configs)
        except ProtocolError as error:
            if not (if_not_exists and error.code == ErrorCode.TOPIC_ALREADY_EXISTS):
                raise
            created = False
    say(as_json, {"name": name, "created": created}, f"{name} {'created' if created else 'already exists'}")


@topics.command(
    "list",
    epilog="""\b
Examples:
  klog topics list -b broker:9092
  klog topics list --json | jq -r .name
""",
)
@click.option("--all", "internal_too", is_flag=True, help="Include internal topics.")
@cluster_options
def list_(internal_too: bool, cluster: ChosenCluster, as_json: bool) -> None:
    """List topics and their numbers of partitions."""
    with cluster.connect() as admin:
        listed = admin.list_topics(include_internal=internal_too)
    lines = [{"name": topic.name, "partitions": topic.partitions, "internal": topic.is_internal} for topic in listed]
    print_lines(as_json, lines, {"topic": "name", "partitions": "partitions"})


@topics.command(
    epilog="""\b
Examples:
  klog topics describe clicks
  klog topics describe --json | jq '.partitions[].latest'
"""
)
@click.argument("names", nargs=-1)
@cluster_options
def describe(names: tuple[str, ...], cluster: ChosenCluster, as_json: bool) -> None:
    """Describe topics (default: all but internal ones).

    Prints the id and the settings that differ from the defaults; for each partition the leader, the replicas, those in
    sync, and the earliest and latest offset, which are empty if the partition has no leader.
    """
    with cluster.connect() as admin:
        described = _describe(admin, names)
    for topic in described:
        differing = [f"{name}={value}" for name, value in topic["settings"].items()]
        say(as_json, topic, "  ".join([topic["name"], topic["id"] or "no id", *differing]))
        if not as_json:
            columns = ("partition", "leader", "replicas", "inSync", "earliest", "latest")
            print_lines(False, topic["partitions"], columns)


@topics.command(
    epilog="""\b
Examples:
  klog topics offsets clicks
  klog topics offsets clicks:0,1 --time earliest
  klog topics offsets --time 2026-11-21T10:00 --json
"""
)
@click.argument("chosen", nargs=-1, metavar="[TOPIC[:0,1]]...")
@click.option(
    "--time",
    "moment",
    default="latest",
    show_default=True,
    metavar="TIME",
    help="latest or -1, earliest or -2, or of the first record since: ISO 8601 (UTC without a zone), ms, or -10m.",
)
@cluster_options
def offsets(chosen: tuple[str, ...], moment: str, cluster: ChosenCluster, as_json: bool) -> None:
    """Print the offset of each partition at a time, as TOPIC:PARTITION:OFFSET (default: all but internal topics).

    The offset is empty if the partition has no record that late.
    """
    wanted = parse_topics("", chosen)
    time = _NAMED_TIMES.get(moment.strip())
    if time is None:
        time = parse_time("--time", moment)
    with cluster.connect() as admin:
        keys = partitions_of(admin.cluster, wanted or dict.fromkeys(topic.name for topic in admin.list_topics()))
        offsets = sorted(list_offsets(admin.cluster, dict.fromkeys(keys, time)).items())
    for (topic, partition), offset in offsets:
        known = None if offset == NO_OFFSET else offset
        line = {"topic": topic, "partition": partition, "offset": known}
        say(as_json, line, f"{topic}:{partition}:{'' if known is None else known}")


def _describe(admin: Admin, names: Sequence[str]) -> list[Message]:
    topics = admin.describe_topics(names or [topic.name for topic in admin.list_topics()]).check()
    settings = admin.describe_configs([("topic", name) for name in topics]).check()
    led = [(name, entry.partition) for name in topics for entry in topics[name].partitions if entry.leader is not None]
    earliest, latest = first_and_end(admin.cluster, led)
    return [
        {
            "name": name,
            # as Kafka's tools write it: 22 characters of base64
            "id": topic.topic_id and urlsafe_b64encode(topic.topic_id.bytes).decode().rstrip("="),
            "internal": topic.is_internal,
            "settings": {
                entry.name: entry.value or ""
                for _, entry in sorted(settings[ConfigResource("topic", name)].items())
                if not entry.is_default
            },
            "partitions": [
                {
                    "partition": entry.partition,
                    "leader": entry.leader,
                    "replicas": list(entry.replicas),
                    "inSync": list(entry.in_sync),
                    "earliest": earliest.get((name, entry.partition)),
                    "latest": latest.get((name, entry.partition)),
                }
                for entry in topic.partitions
            ],
        }
        for name, topic in topics.items()
    ]


@topics.command(
    epilog="""\b
Examples:
  klog topics alter clicks --config retention.ms=86400000
  klog topics alter clicks --partitions 12 --delete-config retention.ms
"""
)
@click.argument("name")
@click.option("--partitions", type=click.IntRange(1), help="The new number of partitions; it can only grow.")
@click.option("--config", "settings", multiple=True, metavar="NAME=VALUE", help="Set a setting; repeatable.")
@click.option("--delete-config", "removed", multiple=True, metavar="NAME", help="Reset to the default; repeatable.")
@cluster_options
def alter(
    name: str,
    partitions: int | None,
    settings: tuple[str, ...],
    removed: tuple[str, ...],
    cluster: ChosenCluster,
    as_json: bool,
) -> None:
    """Alter the settings or the number of partitions of the topic NAME."""
    if partitions is None and not settings and not removed:
        raise click.UsageError("nothing to alter: give --partitions, --config or --delete-config")
    with reading_arguments():
        changes = parse_settings(settings)
    if both := set(changes) & set(removed):
        raise click.UsageError(f"{', '.join(sorted(both))}: give only one of --config and --delete-config")
    with cluster.connect() as admin:
        admin.describe_topic(name)
        if changes or removed:
            admin.alter_configs({("topic", name): {**changes, **dict.fromkeys(removed)}}).check()
        if partitions is not None:
            admin.create_partitions({name: partitions}).check()
    say(as_json, {"name": name, "altered": True}, f"{name} altered")


@topics.command(
    epilog="""\b
Examples:
  klog topics delete clicks
  klog topics delete clicks visits --yes --if-exists
"""
)
@click.argument("names", nargs=-1, required=True)
@click.option("--if-exists", is_flag=True, help="Do nothing for a topic that does not exist.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--internal", is_flag=True, help="Delete internal topics too: all groups lose their offsets.")
@cluster_options
def delete(
    names: tuple[str, ...], if_exists: bool, yes: bool, internal: bool, cluster: ChosenCluster, as_json: bool
) -> None:
    """Delete topics with all their records. If one can't be deleted, delete the others, and exit with code 1."""
    kept = [name for name in names if name in _INTERNAL]
    if kept and not internal:
        raise click.UsageError(
            f"{', '.join(kept)}: the broker keeps the offsets of all groups and the transactions there; "
            "give --internal to delete it nevertheless"
        )
    if not yes:
        click.confirm(f"Delete {', '.join(names)} with all records?", abort=True, err=True)
    failed = False
    with cluster.connect() as admin:
        for name, error in admin.delete_topics(names).items():
            deleted = error is None
            is_missing = isinstance(error, ProtocolError) and error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            if error is not None and not (if_exists and is_missing):
                failed = True
                click.echo(f"klog: {error}", err=True)
                continue
            say(as_json, {"name": name, "deleted": deleted}, f"{name} {'deleted' if deleted else 'does not exist'}")
    if failed:
        sys.exit(1)
