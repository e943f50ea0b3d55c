"""Output of the commands: tables for people, lines of JSON for machines; progress and the log on stderr.

A line of the log is text, or JSON: time (ISO 8601, UTC, in ms), level, logger, message, and with an error exception
(its traceback).

Names of clients, users and groups come from outside. A line break in one would forge a line of the log, and an escape
sequence would act on the reader's terminal: control characters are written as Python escapes, in text as in JSON, and
the lines of a traceback are indented.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, TaskID
    from rich.table import Table

#: Work that is done sooner shows no bar.
_BAR_AFTER = 1.0
TEXT, JSON = "text", "json"
FORMATS = (TEXT, JSON)
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: Controls (C0, DEL, C1), separators of lines and paragraphs, and marks that turn the direction of text.
_CONTROLS = "\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069"
_CONTROL = re.compile(f"[{_CONTROLS}]")
_CONTROL_IN_LINES = re.compile(f"(?![\n\t])[{_CONTROLS}]")
#: Exit code after Ctrl-C, as shells give it.
INTERRUPTED = 130
#: Width of tables that do not go to a terminal: programs may parse them, so lines must not wrap.
_WIDE = 10_000


class Counter:
    """Counts records and bytes; a context manager.

    `shown` None means: if stderr is a terminal. The bar needs also that stdout is none, where records appear.
    """

    def __init__(self, shown: bool | None, total: int | None = None) -> None:
        is_terminal = sys.stderr.isatty()
        self._shows_line = is_terminal if shown is None else shown
        self._shows_bar = is_terminal and shown is not False and not sys.stdout.isatty()
        self._total = total
        self._records = self._bytes = 0
        self._began = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def add(self, records: int, size: int) -> None:
        """Count records of a size in bytes."""
        self._records += records
        self._bytes += size
        if self._bar is None and self._shows_bar and time.monotonic() - self._began > _BAR_AFTER:
            from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

            self._bar = progress(MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
            self._task = self._bar.add_task("records", total=self._total)
            self._bar.start()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._records)

    def forget(self) -> None:
        """Count from 0: what was counted is not written after all."""
        self._records = self._bytes = 0

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._shows_line:
            seconds = time.monotonic() - self._began
            per_second = self._records / seconds if seconds else 0.0
            click.echo(
                f"{self._records:,} records, {self._bytes:,} bytes in {seconds:.2f} s ({per_second:,.0f} records/s)",
                err=True,
            )


def progress(*columns: ProgressColumn, is_quiet: bool = False) -> Progress:
    """A progress bar on stderr, if that is a terminal; it disappears when it ends."""
    from rich.console import Console
    from rich.progress import Progress

    made = Console(stderr=True)
    is_quiet = is_quiet or not made.is_terminal
    # rich would otherwise redirect stdout to the console, which is stderr
    return Progress(*columns, console=made, disable=is_quiet, transient=True, redirect_stdout=False)


def escaped(text: str, *, has_lines: bool = False) -> str:
    """Escape control characters as Python does, "\\n" for a line break; with `has_lines` keep line breaks and tabs."""
    pattern = _CONTROL_IN_LINES if has_lines else _CONTROL
    return pattern.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class TextFormatter(logging.Formatter):
    """Formats each log record as one line of text, and its traceback as indented lines."""

    def __init__(self) -> None:
        super().__init__(_TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {line}" for line in escaped(super().formatException(ei), has_lines=True).split("\n"))


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": escaped(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = escaped(self.formatException(record.exc_info), has_lines=True)
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(level: str, log_format: str) -> None:
    """Log to stderr in one of `FORMATS`, replacing earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == JSON else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("kazoo").setLevel(logging.WARNING)


def say(as_json: bool, line: Mapping[str, Any], text: str) -> None:
    """Print one line, as JSON or as text."""
    click.echo(json.dumps(line) if as_json else text)


def print_lines(as_json: bool, lines: Iterable[Mapping[str, Any]], columns: Mapping[str, str] | Sequence[str]) -> None:
    """Print each line as JSON, or all as a table. `columns` are names of fields, or fields by the heads of columns."""
    if as_json:
        for line in lines:
            click.echo(json.dumps(line))
        return
    fields = list(columns.values() if isinstance(columns, Mapping) else columns)
    print_table(list(columns), [[cell(line[field]) for field in fields] for line in lines])


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
    console().print(table(columns, rows))


def os_error_text(error: OSError) -> str:
    """The file's name, if the error has one, and the reason."""
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror or error}"
