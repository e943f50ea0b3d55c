"""Options and connection of the commands that talk to a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from spark_klog.base.names import TopicPartition
from spark_klog.base.settings import parse_settings
from spark_klog.client import Admin
from spark_klog.client.cluster import Cluster
from spark_klog.client.security.config import Settings
from spark_klog.client.settings import check_names, named_cluster, parse_bootstrap
from spark_klog.errors import ConfigError

_F = TypeVar("_F", bound=Callable[..., Any])
DEFAULT_SERVERS = "127.0.0.1:9092"
#: Where the context of a command keeps the name of its cluster.
_CLUSTER = "spark_klog.cluster"


def parse_topics(before: str, texts: Sequence[str]) -> dict[str, set[int] | None]:
    """Parse TOPIC (all partitions: None) or TOPIC:0,1; errors begin with `before`."""
    found: dict[str, set[int] | None] = {}
    for text in texts:
        name, colon, numbers = text.partition(":")
        parts = numbers.split(",")
        if not name or (colon and not all(part.isascii() and part.isdecimal() for part in parts)):
            raise click.UsageError(f"{before}{text} must be TOPIC or TOPIC:0,1")
        found[name] = {int(part) for part in parts} if colon else None
    return found


def partitions_of(cluster: Cluster, topics: Mapping[str, set[int] | None]) -> list[TopicPartition]:
    """The chosen partitions; `ProtocolError` if a topic does not exist, `ConfigError` if a partition does not."""
    found = []
    for topic, there in cluster.partitions(list(topics)).items():
        numbers = topics[topic]
        if missing := (numbers or set()).difference(there):
            raise ConfigError(f"topic {topic} has no partition {', '.join(map(str, sorted(missing)))}")
        found += [(topic, partition) for partition in there if numbers is None or partition in numbers]
    return found


def _keep_cluster(ctx: click.Context, _: click.Parameter, name: str | None) -> None:
    if name is not None:
        ctx.meta[_CLUSTER] = name


def command_config_option(function: _F) -> _F:
    """Add the options of client settings: --command-config, and --cluster, which `client_settings` finds."""
    function = click.option(
        "--command-config",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="Client settings, in the syntax of Kafka's properties files.",
    )(function)
    return click.option(
        "--cluster",
        metavar="NAME",
        expose_value=False,
        callback=_keep_cluster,
        help="A cluster of ~/.config/klog/clusters.toml, or of the file that KLOG_CONFIG names.",
    )(function)


def cluster_options(function: _F) -> _F:
    """Add the options of all commands for one cluster: servers, command_config, as_json."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print lines of JSON."),
        command_config_option,
        click.option(
            "-b",
            "--bootstrap-server",
            "servers",
            help=f"HOST:PORT[,...]; the default is bootstrap.servers of --command-config, or else {DEFAULT_SERVERS}.",
        ),
    ):
        function = option(function)
    return function


def chosen_cluster() -> str | None:
    """The command's --cluster."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(_CLUSTER)


def client_settings(command_config: Path | None, cluster: str | None = None) -> dict[str, str]:
    """Read client settings from a properties file, or take those of a named cluster, by default the command's.

    `ConfigError` for bad syntax, an unknown cluster, or both.
    """
    if cluster is None:
        cluster = chosen_cluster()
    if cluster is not None:
        if command_config is not None:
            raise ConfigError("give only one of --cluster and --command-config")
        return named_cluster(cluster)
    from spark_klog.base.properties import parse_properties

    return Settings(parse_properties(command_config.read_bytes(), str(command_config)) if command_config else {})


def cluster_settings(
    servers: str | None,
    command_config: Path | None,
    option: str = "--bootstrap-server",
    cluster: str | None = None,
) -> dict[str, str]:
    """Client settings with bootstrap.servers from the option, or else from the file or the cluster, or else missing.

    `ConfigError` if both have them and differ, or the cluster has none: a command must not change another cluster than
    the one that was meant.
    """
    settings = client_settings(command_config, cluster)
    own = settings.get("bootstrap.servers")
    if servers is None:
        if own is None and (named_one := cluster or chosen_cluster()):
            check_names(settings)
            raise ConfigError(f"cluster {named_one} has no bootstrap.servers: set them in its table")
        return settings
    given = set(parse_bootstrap(servers, option))
    named = f"bootstrap.servers {f'in {command_config}' if command_config else 'of the cluster'}"
    if own is not None and given != set(parse_bootstrap(own, named)):
        raise ConfigError(f"{option} {servers} and {named} differ ({own}): remove one of them")
    return settings | {"bootstrap.servers": servers}


def set_settings(settings: tuple[str, ...], servers: str | None) -> dict[str, str]:
    """The settings of --set; `ConfigError` if one is not NAME=VALUE, or names other servers than --bootstrap-server."""
    found = parse_settings(settings)
    own = found.get("bootstrap.servers")
    if servers is not None and own is not None and own != servers:
        raise ConfigError(f"--bootstrap-server {servers} and --set bootstrap.servers={own} differ: remove one of them")
    return found


@contextmanager
def connected(servers: str | None, command_config: Path | None) -> Iterator[Admin]:
    """Connect to a cluster for the duration of the block; errors as of `cluster_settings` and `Admin`."""
    settings = cluster_settings(servers, command_config)
    settings.setdefault("bootstrap.servers", DEFAULT_SERVERS)
    with Admin(settings) as admin:
        yield admin
