"""`klog ui`: a page about a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from spark_klog.base.extras import require
from spark_klog.cli.clusters import ChosenCluster, client_options, servers_option
from spark_klog.cli.output import reading_arguments
from spark_klog.cli.schema_registry import ChosenRegistry, registry_options
from spark_klog.errors import MissingPackage
from spark_klog.groups.stores import tree_addresses

if TYPE_CHECKING:
    from spark_klog.ui.log_in import Token


@click.command(
    epilog="""\b
Examples:
  klog ui -b broker:9092                       look; it prints the address of the page
  klog ui --cluster prod --checkpoint /mnt/checkpoints/clean
  klog ui -b broker:9092 --schema-registry http://registry:8081    show messages by their schemas
  klog ui --allow-changes --listen 9000        change topics, offsets and records, too
"""
)
@click.option(
    "--listen", metavar="HOST:PORT", default="127.0.0.1:8080", show_default=True, help="A port alone: 127.0.0.1."
)
@click.option(
    "--allow-changes",
    is_flag=True,
    help="Let the page create, alter and delete topics, move groups, and produce messages.",
)
@click.option("--allow-remote", is_flag=True, help="Let --listen be a host that is not loopback. It has no encryption.")
@click.option(
    "--token",
    envvar="KLOG_UI_TOKEN",
    metavar="TEXT|off",
    help="What opens the page, as in http://127.0.0.1:8080/?token=TEXT; off, on loopback only, lets everybody in. "
    "KLOG_UI_TOKEN sets it where other users do not see it. The default is a new one.",
)
@click.option("--checkpoint", "checkpoints", multiple=True, metavar="DIR", help="A Spark query to show; repeatable.")
@click.option("--load", "loads", multiple=True, metavar="DIR", help="The output of a load to show; repeatable.")
@click.option("--zookeeper", metavar="CONNECT", help="Show the offsets of groups in this ZooKeeper, too.")
@click.option("--offsets-path", metavar="PATH", help="Show the offsets of groups in files, too: a folder or URI.")
@registry_options
@servers_option
@client_options
def ui(
    listen: str,
    allow_changes: bool,
    allow_remote: bool,
    token: str | None,
    checkpoints: tuple[str, ...],
    loads: tuple[str, ...],
    zookeeper: str | None,
    offsets_path: str | None,
    registry: ChosenRegistry,
    cluster: ChosenCluster,
) -> None:
    """Serve a page about a cluster: topics, messages, groups, Spark queries, loads. Ends with Ctrl-C.

    The page listens on loopback, asks no other server for anything, and is read-only without --allow-changes. Who
    has the address that is printed, with its token, sees what this command may read. Each start has a new one.
    """
    require("klog ui", "starlette", "uvicorn", "pyarrow")
    from spark_klog.cli.records.arrow_form import json_lines
    from spark_klog.ui.app import Sources, serve

    stores = tree_addresses(zookeeper, offsets_path)
    config = None if cluster.command_config is None else cluster.command_config.absolute()
    settings = cluster.local_settings()
    decoding = registry.settings(cluster, settings)
    if decoding is not None and not registry.is_given:
        try:
            require("messages by a schema registry", "httpx")
        except MissingPackage as error:  # the cluster's settings are for other programs, too
            click.echo(f"klog: {error}; the page shows bytes", err=True)
            decoding = None
    sources = Sources(settings, json_lines, stores, checkpoints, loads, cluster.name, config, decoding)
    with reading_arguments():
        serve(sources, listen, allow_changes, allow_remote, token, _tell)


def _tell(address: str, token: Token | None) -> None:
    """Print the page's address. A token that the user has chosen is not shown: this line may be logged."""
    if token is None:
        click.echo(f"the page is at {address}")
    elif token.is_given:
        click.echo(f"the page is at {address}?token=TOKEN, with your token")
    else:
        click.echo(f"the page is at {address}?token={token.text}")
