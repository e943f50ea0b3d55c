"""Output of the commands: tables for people, lines of JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from spark_klog.cli.log_format import escaped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Exit code after Ctrl-C, as shells give it.
INTERRUPTED = 130
#: Width of tables that do not go to a terminal: programs may parse them, so lines must not wrap.
_WIDE = 10_000


def say(as_json: bool, line: Mapping[str, Any], text: str) -> None:
    """Print one line, as JSON or as text."""
    click.echo(json.dumps(line) if as_json else text)


def print_json(lines: Iterable[Mapping[str, Any]]) -> None:
    """Print each line as JSON."""
    for line in lines:
        click.echo(json.dumps(line))


def cell(value: object) -> str:
    """Format a value for a table: lists with commas, None as "-"."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "-" if value is None else str(value)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Build a table without borders."""
    from rich.table import Table

    made = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        made.add_row(*map(escaped, row))  # names of groups and members come from their clients
    return made


def console() -> Console:
    """A console for stdout, which wraps no lines unless it is a terminal."""
    from rich.console import Console

    made = Console(markup=False, emoji=False, highlight=False)
    if not made.is_terminal:
        made.width = _WIDE
    return made


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    console().print(table(columns, rows))


def os_error_text(error: OSError) -> str:
    """The file's name, if the error has one, and the reason."""
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror or error}"
