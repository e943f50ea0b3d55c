"""Options and connection of the commands that talk to a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import click

from spark_klog.base.names import OF_REGISTRY, TopicPartition
from spark_klog.base.settings import parse_settings
from spark_klog.cli.output import reading_arguments
from spark_klog.client import Admin
from spark_klog.client.cluster import Cluster
from spark_klog.client.settings import check_names, named_cluster, of_bytes, parse_bootstrap
from spark_klog.errors import ConfigError
from spark_klog.security.config import Settings

_Command = Callable[..., Any]
DEFAULT_SERVERS = "127.0.0.1:9092"
#: -b, for `client_options`.
servers_option = click.option(
    "-b",
    "--bootstrap-server",
    "servers",
    help=f"HOST:PORT[,...]; the default is bootstrap.servers of --command-config, or else {DEFAULT_SERVERS}.",
)


def parse_topics(before: str, texts: Sequence[str]) -> dict[str, set[int] | None]:
    """Parse TOPIC (all partitions: None) or TOPIC:0,1; errors begin with `before`."""
    chosen: dict[str, set[int] | None] = {}
    for text in texts:
        name, colon, numbers = text.partition(":")
        parts = numbers.split(",")
        if not name or (colon and not all(part.isascii() and part.isdecimal() for part in parts)):
            raise click.UsageError(f"{before}{text} must be TOPIC or TOPIC:0,1")
        chosen[name] = {int(part) for part in parts} if colon else None
    return chosen


def partitions_of(cluster: Cluster, topics: Mapping[str, set[int] | None]) -> list[TopicPartition]:
    """The chosen partitions; `ProtocolError` if a topic does not exist, `ConfigError` if a partition does not."""
    partitions = []
    for topic, there in cluster.partitions(list(topics)).items():
        numbers = topics[topic]
        if missing := (numbers or set()).difference(there):
            only = f"{min(there)} to {max(there)}" if len(there) > 1 else str(*there)
            raise ConfigError(f"topic {topic} has no partition {', '.join(map(str, sorted(missing)))}, only {only}")
        partitions += [(topic, partition) for partition in there if numbers is None or partition in numbers]
    return partitions


class ChosenCluster(NamedTuple):
    """The cluster that options name: -b, --command-config, --cluster. `option` is how -b was spelled."""

    servers: str | None = None
    command_config: Path | None = None
    name: str | None = None
    option: str = "--bootstrap-server"

    @reading_arguments()
    def client_settings(self) -> dict[str, str]:
        """The client's settings of the properties file or of the named cluster, without -b; errors as of `_given`."""
        return Settings({name: value for name, value in self._given().items() if not name.startswith(OF_REGISTRY)})

    @reading_arguments()
    def registry_settings(self, url: str | None, own: Mapping[str, str]) -> Settings:
        """The settings of the schema registry without their prefix, of the file or cluster, --set and the option -r.

        {} if there are none; `ConfigError` for settings without a URL, for unknown ones, and for URLs that differ: one
        registry must not get another one's password.
        """
        from spark_klog.schemas.registry.settings import check_names as check_registry_names

        given, named = self._given(), f"{OF_REGISTRY}url"
        urls = {address for address in (url, own.get(named), given.get(named)) if address is not None}
        if len(urls) > 1:
            raise ConfigError(f"--schema-registry, --set {named} and {named} of the client settings differ: give one")
        settings = Settings(
            {
                name.removeprefix(OF_REGISTRY): value
                for name, value in {**given, **own}.items()
                if name.startswith(OF_REGISTRY)
            }
        )
        if urls:
            settings["url"] = urls.pop()
        check_registry_names(settings, OF_REGISTRY)
        if settings and "url" not in settings:
            raise ConfigError(f"{OF_REGISTRY}{next(iter(settings))} is set, but no URL: give --schema-registry URL")
        return settings

    def _given(self) -> dict[str, str]:
        """All settings of the properties file or of the named cluster.

        `ConfigError` for bad syntax, an unknown cluster, or both.
        """
        if self.name is not None:
            if self.command_config is not None:
                raise ConfigError("give only one of --cluster and --command-config")
            return of_bytes(named_cluster(self.name))
        from spark_klog.base.properties import parse_properties

        file = self.command_config
        return of_bytes(parse_properties(file.read_bytes(), str(file)) if file else {})

    @reading_arguments()
    def settings(self) -> dict[str, str]:
        """Client settings with bootstrap.servers of -b, or else of the file or the cluster, or else missing.

        `ConfigError` if both have them and differ, or the cluster has none: a command must not change another cluster
        than the one that was meant.
        """
        settings = self.client_settings()
        own = settings.get("bootstrap.servers")
        if self.servers is None:
            if own is None and self.name is not None:
                check_names(settings)
                raise ConfigError(f"cluster {self.name} has no bootstrap.servers: set them in its table")
            return settings
        given, named = set(parse_bootstrap(self.servers, self.option)), self._named
        if own is not None and given != set(parse_bootstrap(own, named)):
            raise ConfigError(f"{self.option} {self.servers} and {named} differ ({own}): remove one of them")
        return settings | {"bootstrap.servers": self.servers}

    @property
    def _named(self) -> str:
        return f"bootstrap.servers {f'in {self.command_config}' if self.command_config else 'of the cluster'}"

    def local_settings(self) -> dict[str, str]:
        """`settings`, with this machine's broker if they name none."""
        return Settings({"bootstrap.servers": DEFAULT_SERVERS}) | self.settings()

    @reading_arguments()
    def set_settings(self, settings: tuple[str, ...]) -> dict[str, str]:
        """The settings of --set, a registry's, too.

        `ConfigError` if one is not NAME=VALUE, or names other servers than -b, the file or the cluster.
        """
        texts = of_bytes(parse_settings(settings))
        own = texts.get("bootstrap.servers")
        if own is None or (servers := self.settings().get("bootstrap.servers")) is None:
            return texts
        where = f"{self.option} {self.servers}" if self.servers is not None else f"{self._named} ({servers})"
        if set(parse_bootstrap(own, "--set bootstrap.servers")) != set(parse_bootstrap(servers, where)):
            raise ConfigError(f"{where} and --set bootstrap.servers={own} differ: remove one of them")
        return texts

    def connect(self) -> Admin:
        """Connect to the cluster; errors as of `settings` and `Admin`."""
        with reading_arguments():
            return Admin(self.local_settings())


def client_options(function: _Command) -> _Command:
    """Add --cluster and --command-config; the function gets them, and -b if it has that, as `cluster`."""

    @click.option(
        "--cluster",
        metavar="NAME",
        help="A cluster of ~/.config/klog/clusters.toml, or of the file that KLOG_CONFIG names.",
    )
    @click.option(
        "--command-config",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="Client settings, in the syntax of Kafka's properties files.",
    )
    @wraps(function)
    def command(
        *args: Any, cluster: str | None, command_config: Path | None, servers: str | None = None, **others: Any
    ) -> Any:
        return function(*args, cluster=ChosenCluster(servers, command_config, cluster), **others)

    return command


def cluster_options(function: _Command) -> _Command:
    """Add the options of most commands for one cluster: `cluster`, `as_json`."""
    as_json = click.option("--json", "as_json", is_flag=True, help="Print lines of JSON.")
    return servers_option(client_options(as_json(function)))
