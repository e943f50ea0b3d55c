"""`klog ui`: a page about a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from spark_klog.cli.clusters import (
    DEFAULT_SERVERS,
    chosen_cluster,
    cluster_settings,
    command_config_option,
)
from spark_klog.errors import ConfigError


@click.command(
    epilog="""\b
Examples:
  klog ui -b broker:9092                       look; the page is at http://127.0.0.1:8080/
  klog ui --cluster prod --checkpoint /mnt/checkpoints/clean
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
@click.option("--allow-remote", is_flag=True, help="Let --listen be a host that is not loopback. There is no log-in.")
@click.option("--checkpoint", "checkpoints", multiple=True, metavar="DIR", help="A Spark query to show; repeatable.")
@click.option("--load", "loads", multiple=True, metavar="DIR", help="The output of a load to show; repeatable.")
@click.option("--zookeeper", metavar="CONNECT", help="Show the offsets of groups in this ZooKeeper, too.")
@click.option("--offsets-path", metavar="PATH", help="Show the offsets of groups in files, too: a folder or URI.")
@click.option(
    "-b",
    "--bootstrap-server",
    "servers",
    help=f"HOST:PORT[,...]; the default is bootstrap.servers of --command-config, or else {DEFAULT_SERVERS}.",
)
@command_config_option
def ui(
    listen: str,
    allow_changes: bool,
    allow_remote: bool,
    checkpoints: tuple[str, ...],
    loads: tuple[str, ...],
    zookeeper: str | None,
    offsets_path: str | None,
    servers: str | None,
    command_config: Path | None,
) -> None:
    """Serve a page about a cluster: topics, messages, groups, Spark queries, loads. Ends with Ctrl-C.

    The page listens on loopback, asks no other server for anything, and is read-only without --allow-changes. It has no
    log-in: whoever has an account on this machine can open it, and sees what this command may read.
    """
    try:
        from spark_klog.cli.records.form import json_lines
        from spark_klog.ui.app import Sources, serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "anyio"):
            raise
        raise ConfigError("klog ui needs Starlette and Uvicorn: pip install 'spark-klog[ui]'") from None
    settings = {"bootstrap.servers": DEFAULT_SERVERS, **cluster_settings(servers, command_config)}
    stores = [*([f"zookeeper://{zookeeper}"] if zookeeper else []), *([offsets_path] if offsets_path else [])]
    config = None if command_config is None else command_config.absolute()
    sources = Sources(settings, json_lines, stores, checkpoints, loads, chosen_cluster(), config)
    serve(sources, listen, allow_changes, allow_remote, lambda address: click.echo(f"the page is at {address}"))
