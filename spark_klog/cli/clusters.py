"""What commands that talk to a cluster have in common: options, the connection, a quiet log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from spark_klog.client.cluster import Cluster

_F = TypeVar("_F", bound=Callable[..., Any])
#: Where a cluster is looked for.
DEFAULT_SERVERS = "127.0.0.1:9092"

command_config_option = click.option(
    "--command-config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Client settings, in the syntax of Kafka's properties files.",
)


def cluster_options(function: _F) -> _F:
    """What all commands take that ask one cluster: servers, command_config, as_json."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Lines of JSON."),
        command_config_option,
        click.option("--bootstrap-server", "servers", default=DEFAULT_SERVERS, show_default=True),
    ):
        function = option(function)
    return function


def quiet_client(ctx: click.Context) -> None:
    """Log the client's warnings only, unless a level was given.

    What is tried again is nobody's business where it succeeds, and an error where it does not.
    """
    if ctx.find_root().get_parameter_source("log_level") is ParameterSource.DEFAULT:
        logging.getLogger("spark_klog.client").setLevel(logging.WARNING)


def client_settings(command_config: Path | None) -> dict[str, str]:
    """The settings in a properties file; `ConfigError`."""
    from spark_klog.broker.properties import parse_properties

    return parse_properties(command_config.read_bytes(), str(command_config)) if command_config else {}


@contextmanager
def connected(servers: str, command_config: Path | None) -> Iterator[Cluster]:
    """A cluster, closed afterwards; errors as of `Cluster.connect`."""
    with Cluster.connect(client_settings(command_config) | {"bootstrap.servers": servers}) as cluster:
        yield cluster
