"""`klog checkpoint`: what the checkpoint of a Spark query holds."""

from __future__ import annotations

import json
import sys

import click

from spark_klog.cli.output import print_table
from spark_klog.trees.checkpoint import CheckpointState, checkpoint_state, to_json

_NOT_SAFE = 2
#: What changes with format("klog") and no checkpoint shows.
_CHANGES_TO_KLOG = (
    "a static DataFrame that the stream joins keeps the offsets of its first use: load() it within foreachBatch",
    "Trigger.AvailableNow with limits ends after one micro-batch with pyspark 4.0 and 4.1, and leaves the rest to the "
    "next run",
    "kafka.group.id commits no offsets here either, unless commitOffsets=true; then no other application may use the "
    "group",
)


@click.group()
def checkpoint() -> None:
    """Look at the checkpoint of a Spark query."""


@checkpoint.command(
    epilog="""\b
Examples:
  klog checkpoint show /mnt/checkpoints/clean
  klog checkpoint show /mnt/checkpoints/clean --to klog && spark-submit job.py
"""
)
@click.argument("directory")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
@click.option("--to", type=click.Choice(["klog", "kafka"]), help="Exit with 2 if this switch is not safe.")
def show(directory: str, as_json: bool, to: str | None) -> None:
    """Show the offsets in DIRECTORY, a query's checkpointLocation, and whether they survive a change of format.

    With --to klog also what else changes, which no checkpoint shows.

    Stop the query first: its state may change while it is read.
    """
    found = checkpoint_state(directory)
    if as_json:
        line = {
            "query": found.query,
            "planned": found.planned,
            "done": found.done,
            "stateful": found.is_stateful,
            "sources": [None if source.offsets is None else to_json(source.offsets) for source in found.sources],
            "to_klog": found.to_klog,
            "to_kafka": found.to_kafka,
        }
        click.echo(json.dumps(line))
    else:
        _print(found)
        if to == "klog":
            click.echo("what else changes (docs/recipes/switch.md):")
            for change in _CHANGES_TO_KLOG:
                click.echo(f"  {change}")
    if to is not None and (found.to_klog if to == "klog" else found.to_kafka):
        sys.exit(_NOT_SAFE)


def _print(found: CheckpointState) -> None:
    kind = "stateful" if found.is_stateful else "stateless"
    click.echo(f"query {found.query or '(no file metadata)'}, {kind}")
    if found.planned >= 0:
        done = "done" if found.done >= found.planned else "not done: the next run repeats it"
        click.echo(f"last micro-batch: {found.planned}, {done}")
        rows = []
        for source in found.sources:
            if source.offsets is None:
                rows.append((str(source.number), "(reads no topics)", "-", "-"))
                continue
            for (topic, partition), offset in sorted(source.offsets.items()):
                rows.append((str(source.number), topic, str(partition), str(offset)))
        print_table(("source", "topic", "partition", "offset"), rows)
    for form, reasons in (("klog", found.to_klog), ("kafka", found.to_kafka)):
        click.echo(f'to format("{form}"): {"not safe: " + "; ".join(reasons) if reasons else "safe"}')
