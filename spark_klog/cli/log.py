"""`klog log`: looking into log files."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from spark_klog.errors import DecodeError
from spark_klog.log.dump import Damage, Dumped
from spark_klog.log.dump import dump as dump_file
from spark_klog.records.contract import NO_TIMESTAMP_TYPE, Record


@click.group()
def log() -> None:
    """Look into log files."""


@log.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--batches", is_flag=True, help="A line a batch, control batches too, instead of a line a record.")
@click.option("--json", "as_json", is_flag=True, help="No progress on stderr, for machines.")
def dump(files: tuple[Path, ...], batches: bool, as_json: bool) -> None:
    """Print the records of .log files (and .kafka files of Kafka 0.7) as JSON, one a line.

    offset, timestamp (ms, null without one), timestampType (0 none, 1 create time, 2 log append time), key and value
    (base64 or null), headers ([[name, base64 or null], ...]). Damaged batches are named on stderr; then the exit code
    is 1.
    """
    damaged = 0
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    quiet = as_json or sys.stdout.isatty() or not console.is_terminal
    # redirected, stdout would be printed on the console, which is stderr
    with Progress(*columns, console=console, disable=quiet, transient=True, redirect_stdout=False) as progress:
        for path in files:
            task = progress.add_task(path.name, total=path.stat().st_size)
            for found in dump_file(path):
                reason = found.reason if isinstance(found, Damage) else _print(found, batches)
                if reason:
                    damaged += 1
                    click.echo(f"{path}: position {found.position}, {found.size} bytes: {reason}", err=True)
                progress.update(task, completed=found.position + found.size)
    if damaged:
        sys.exit(1)


def _print(found: Dumped, batches: bool) -> str | None:
    """Print a batch or its records; why it can't be read, or None."""
    try:
        if batches:
            lines = [found.describe()]
        elif found.header.is_control:
            return None
        else:
            lines = [_line(record) for record in found.records()]
    except DecodeError as error:
        return str(error)
    sys.stdout.write("".join(f"{json.dumps(line)}\n" for line in lines))
    return None


def _base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _line(record: Record) -> dict[str, object]:
    return {
        "offset": record.offset,
        "timestamp": None if record.timestamp_type == NO_TIMESTAMP_TYPE else record.timestamp,
        "timestampType": record.timestamp_type + 1,
        "key": _base64(record.key),
        "value": _base64(record.value),
        "headers": [[name, _base64(value)] for name, value in record.headers],
    }
