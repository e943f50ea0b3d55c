"""`klog topics`: topics of any cluster, of brokers of ours and of Apache Kafka."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from spark_klog.broker.config import parse_settings
from spark_klog.cli.clusters import cluster_options, connected, quiet_client
from spark_klog.cli.output import cell, print_json, print_table, say
from spark_klog.client.admin import add_partitions, alter_topic_settings, create_topic, delete_topic, topic_settings
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import list_offsets
from spark_klog.errors import ErrorCode, ProtocolError
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST

#: A broker may not know yet what another one has created.
_UNKNOWN_MS = 1_000


@click.group()
@click.pass_context
def topics(ctx: click.Context) -> None:
    """Create, list, describe, alter and delete topics."""
    quiet_client(ctx)


def _await_known(cluster: Cluster, names: Sequence[str]) -> None:
    """`ProtocolError` for a topic that does not exist; the other requests would be tried again for half a minute."""
    cluster.attempt(lambda: cluster.partitions(names), _UNKNOWN_MS)


@topics.command()
@click.argument("name")
@click.option("--partitions", default=1, show_default=True, type=click.IntRange(1))
@click.option("--replication-factor", default=1, show_default=True, type=click.IntRange(1))
@click.option("--config", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of the topic; repeatable.")
@click.option("--if-not-exists", is_flag=True, help="A topic that is there is no error, and stays as it is.")
@cluster_options
def create(
    name: str,
    partitions: int,
    replication_factor: int,
    settings: tuple[str, ...],
    if_not_exists: bool,
    servers: str,
    command_config: Path | None,
    as_json: bool,
) -> None:
    """Create the topic NAME."""
    created = True
    with connected(servers, command_config) as cluster:
        try:
            create_topic(cluster, name, partitions, parse_settings(settings), replication_factor)
        except ProtocolError as error:
            if not (if_not_exists and error.code == ErrorCode.TOPIC_ALREADY_EXISTS):
                raise
            created = False
    say(as_json, {"name": name, "created": created}, f"{name} {'created' if created else 'was there'}")


@topics.command("list")
@click.option("--all", "internal_too", is_flag=True, help="Internal topics, too.")
@cluster_options
def list_(internal_too: bool, servers: str, command_config: Path | None, as_json: bool) -> None:
    """List topics with their numbers of partitions."""
    with connected(servers, command_config) as cluster:
        found = sorted(cluster.metadata(None).items())
    lines = [
        {"name": name, "partitions": len(topic["partitions"]), "internal": topic["is_internal"]}
        for name, topic in found
        if internal_too or not topic["is_internal"]
    ]
    if as_json:
        print_json(lines)
    else:
        print_table(("topic", "partitions"), [(str(line["name"]), str(line["partitions"])) for line in lines])


@topics.command()
@click.argument("names", nargs=-1)
@cluster_options
def describe(names: tuple[str, ...], servers: str, command_config: Path | None, as_json: bool) -> None:
    """Describe topics (without NAMES: all but internal ones).

    Ids, the settings that differ from the defaults (by the topic's or the brokers' configuration); of each partition
    the leader, replicas, those in sync, and the earliest and latest offset (nothing where no broker leads it).
    """
    with connected(servers, command_config) as cluster:
        described = _describe(cluster, names)
    if as_json:
        print_json(described)
        return
    for topic in described:
        differing = [f"{name}={value}" for name, value in topic["settings"].items()]
        click.echo("  ".join([topic["name"], topic["id"] or "no id", *differing]))
        columns = ("partition", "leader", "replicas", "inSync", "earliest", "latest")
        print_table(columns, [[cell(entry[column]) for column in columns] for entry in topic["partitions"]])


def _describe(cluster: Cluster, names: Sequence[str]) -> list[Message]:
    if names:
        _await_known(cluster, names)
    found = cluster.metadata(names or None)
    names = names or sorted(name for name, topic in found.items() if not topic["is_internal"])
    settings = topic_settings(cluster, names)
    led = [
        (name, entry["partition_index"])
        for name in names
        for entry in found[name]["partitions"]
        if entry["leader_id"] >= 0
    ]
    earliest = list_offsets(cluster, dict.fromkeys(led, EARLIEST))
    latest = list_offsets(cluster, dict.fromkeys(led, LATEST))
    return [
        {
            "name": name,
            "id": _id(cluster, name),
            "internal": found[name]["is_internal"],
            "settings": dict(sorted(settings[name].items())),
            "partitions": [
                {
                    "partition": entry["partition_index"],
                    "leader": entry["leader_id"] if entry["leader_id"] >= 0 else None,
                    "replicas": list(entry["replica_nodes"]),
                    "inSync": list(entry["isr_nodes"]),
                    "earliest": earliest.get((name, entry["partition_index"])),
                    "latest": latest.get((name, entry["partition_index"])),
                }
                for entry in sorted(found[name]["partitions"], key=lambda entry: int(entry["partition_index"]))
            ],
        }
        for name in names
    ]


def _id(cluster: Cluster, name: str) -> str | None:
    """As Kafka's tools write it: 22 characters of base64."""
    from base64 import urlsafe_b64encode

    found = cluster.topic_ids.get(name)
    return None if found is None else urlsafe_b64encode(found.bytes).decode().rstrip("=")


@topics.command()
@click.argument("name")
@click.option("--partitions", type=click.IntRange(1), help="So many partitions: more than there are.")
@click.option("--config", "settings", multiple=True, metavar="NAME=VALUE", help="Set a setting; repeatable.")
@click.option("--delete-config", "removed", multiple=True, metavar="NAME", help="Back to the default; repeatable.")
@cluster_options
def alter(
    name: str,
    partitions: int | None,
    settings: tuple[str, ...],
    removed: tuple[str, ...],
    servers: str,
    command_config: Path | None,
    as_json: bool,
) -> None:
    """Alter the topic NAME: its settings, its number of partitions."""
    if partitions is None and not settings and not removed:
        raise click.UsageError("nothing to alter: give --partitions, --config or --delete-config")
    changes = parse_settings(settings)
    if both := set(changes) & set(removed):
        raise click.UsageError(f"{', '.join(sorted(both))}: --config and --delete-config exclude each other")
    with connected(servers, command_config) as cluster:
        _await_known(cluster, [name])
        if changes or removed:
            alter_topic_settings(cluster, name, changes, removed)
        if partitions is not None:
            add_partitions(cluster, name, partitions)
    say(as_json, {"name": name, "altered": True}, f"{name} altered")


@topics.command()
@click.argument("names", nargs=-1, required=True)
@click.option("--if-exists", is_flag=True, help="A topic that is not there is no error.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@cluster_options
def delete(
    names: tuple[str, ...], if_exists: bool, yes: bool, servers: str, command_config: Path | None, as_json: bool
) -> None:
    """Delete topics with all their records. The others are deleted where one can't be; then the exit code is 1."""
    if not yes:
        click.confirm(f"Delete {', '.join(names)} with all records?", abort=True, err=True)
    failed = False
    with connected(servers, command_config) as cluster:
        for name in dict.fromkeys(names):
            deleted = True
            try:
                _await_known(cluster, [name])
                delete_topic(cluster, name)
            except ProtocolError as error:
                if not (if_exists and error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
                    failed = True
                    click.echo(f"klog: {error}", err=True)
                    continue
                deleted = False
            say(as_json, {"name": name, "deleted": deleted}, f"{name} {'deleted' if deleted else 'was not there'}")
    if failed:
        sys.exit(1)
