"""`klog mirror`: copy topics of one cluster into another."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import click

from spark_klog.base.interrupts import stop_signals
from spark_klog.base.names import topic_pattern
from spark_klog.cli.clusters import ChosenCluster
from spark_klog.cli.output import StatusLine, reading_arguments, say
from spark_klog.client.settings import parse_bootstrap
from spark_klog.errors import ConfigError
from spark_klog.mirror.mirror import Mirror, Totals
from spark_klog.mirror.settings import MirrorSettings

#: Objects between two collections of cyclic garbage, which a mirror hardly makes; by default 700.
_COLLECTED_AFTER = 20_000


@click.command(
    epilog="""\b
Examples:
  klog mirror --from old:9092 --to new:9092 --topics 'clicks.*' --until-end
  klog mirror --from prod --to backup --exactly-once --groups '.*'
"""
)
@click.option(
    "--from",
    "source",
    required=True,
    metavar="FILE|HOST:PORT|NAME",
    help="The source: client settings, HOST:PORT[,...] or a named cluster.",
)
@click.option("--to", "target", required=True, metavar="FILE|HOST:PORT|NAME", help="The target, likewise.")
@click.option("--topics", default=".*", show_default=True, metavar="PATTERN", help="Topics whose whole name matches.")
@click.option("--exclude", metavar="PATTERN", help="Topics to leave out. Internal ones need to be named by --topics.")
@click.option("--prefix", default="", metavar="TEXT", help="Put before the names of topics at the target.")
@click.option(
    "--name",
    help="Of the mirror, whose progress and transactions belong to it. Default: the source's cluster id and --prefix.",
)
@click.option("--exactly-once", is_flag=True, help="Write in transactions: each record once, also after a crash.")
@click.option("--groups", metavar="PATTERN", help="Translate the offsets of these consumer groups.")
@click.option(
    "--start",
    default="earliest",
    show_default=True,
    type=click.Choice(["earliest", "latest"]),
    help="Where a new mirror begins.",
)
@click.option(
    "--recreated",
    default="fail",
    show_default=True,
    type=click.Choice(["fail", "begin"]),
    help="A topic that was deleted and created again at the source: fail, or mirror it behind the copy of the old one.",
)
@click.option(
    "--copy-again",
    multiple=True,
    metavar="TOPIC",
    help="A topic whose copy was deleted: copy it from its beginning. May be repeated.",
)
@click.option("--replication-factor", type=click.IntRange(1), help="Of new topics. Default: as at the source.")
@click.option(
    "--commit-interval",
    "commit_seconds",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.01),
    help="Seconds between commits of progress.",
)
@click.option(
    "--refresh-interval",
    "refresh_seconds",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0.1),
    help="Seconds between looks for new topics and partitions.",
)
@click.option("--until-end", is_flag=True, help="Stop at the offsets that the source has now.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON after each commit.")
def mirror(until_end: bool, as_json: bool, **options: Any) -> None:
    """Copy topics of a cluster into another, with their partitions, until SIGTERM or Ctrl-C.

    Record batches are copied as they are. Progress is kept at the target, in the topic klog-mirror.NAME.internal: a
    mirror that was stopped or killed goes on where it was.
    """
    settings = mirror_settings(**options)
    gc.freeze()  # modules and classes stay: no collection has to look at them
    gc.set_threshold(_COLLECTED_AFTER)
    running = Mirror(settings)
    status = StatusLine(sys.stdout, is_quiet=as_json)

    is_stopping = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal is_stopping
        if is_stopping:
            raise KeyboardInterrupt
        is_stopping = True
        running.stop()
        os.write(2, b"klog: stopping after the next commit; a second signal stops at once\n")

    def show(totals: Totals) -> None:
        if as_json:
            say(True, vars(totals), "")
        else:
            status.show(_text(totals))

    status.show("connecting")
    with stop_signals(stop), status:
        running.run(until_end=until_end, on_progress=show)
    if not as_json:
        click.echo(_text(running.totals))


@reading_arguments()
def mirror_settings(
    source: str, target: str, topics: str, exclude: str | None, groups: str | None = None, **others: Any
) -> MirrorSettings:
    """The settings that options name; `others` are fields of `MirrorSettings`. `ConfigError`."""
    patterns = (("--topics", topics), ("--exclude", exclude), ("--groups", groups))
    compiled = {option[2:]: topic_pattern(f"{option}: {text!r}", text) for option, text in patterns if text is not None}
    sides = {"source": _side_settings("--from", source), "target": _side_settings("--to", target)}
    return MirrorSettings(**{**sides, **compiled, **others, "copy_again": frozenset(others["copy_again"])})


def _side_settings(option: str, value: str) -> dict[str, str]:
    """The client settings of a side: those of a properties file, an address, or a named cluster. `ConfigError`."""
    if Path(value).is_file():
        settings = ChosenCluster(command_config=Path(value)).client_settings()
        if "bootstrap.servers" not in settings:
            raise ConfigError(f"{option}: {value} does not set bootstrap.servers")
        return settings
    if ":" not in value:
        try:
            return ChosenCluster(name=value).settings()
        except ConfigError as error:
            raise ConfigError(
                f"{option}: {value} is neither a file nor HOST:PORT[,HOST:PORT...], nor a named cluster ({error})"
            ) from None
    parse_bootstrap(value, option)
    return {"bootstrap.servers": value}


def _text(totals: Totals) -> str:
    parts = [
        f"{totals.records:,} records of {totals.partitions:,} partitions",
        f"{totals.bytes / 1e6:,.1f} MB",
        f"{totals.copied:,} batches copied, {totals.rebuilt:,} rebuilt",
        f"lag {'-' if totals.lag is None else format(totals.lag, ',')}",
    ]
    if totals.groups:
        parts.append(f"{totals.groups:,} groups translated")
    if totals.lost:
        parts.append(f"{totals.lost:,} offsets lost at the source")
    if totals.restarts:
        parts.append(f"{totals.restarts:,} restarts")
    return ", ".join(parts)
