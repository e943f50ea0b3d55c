"""What commands print: tables for people, lines of JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Tables are not folded where nobody sees them, but a program may.
_WIDE = 10_000


def say(as_json: bool, line: Mapping[str, Any], text: str) -> None:
    """One line on stdout, as JSON or for people."""
    click.echo(json.dumps(line) if as_json else text)


def print_json(lines: Iterable[Mapping[str, Any]]) -> None:
    """A line of JSON each."""
    for line in lines:
        click.echo(json.dumps(line))


def cell(value: object) -> str:
    """A value in a table: lists by comma, "-" for None."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "-" if value is None else str(value)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A plain table of rich."""
    from rich.table import Table

    made = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        made.add_row(*row)
    return made


def console() -> Console:
    """Of rich, for stdout; nothing is folded where that is no terminal."""
    from rich.console import Console

    made = Console(markup=False, emoji=False, highlight=False)
    if not made.is_terminal:
        made.width = _WIDE
    return made


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on stdout."""
    console().print(table(columns, rows))
