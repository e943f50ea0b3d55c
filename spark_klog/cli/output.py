"""Output of the commands: tables for people, lines of JSON for machines; progress and the log on stderr.

A line of the log is text, or JSON: time (ISO 8601, UTC, in ms), level, logger, message, and with an error exception
(its traceback).

Names of clients, users and groups come from outside. A line break in one would forge a line of the log, and an escape
sequence would act on the reader's terminal: control characters are written as Python escapes, in text as in JSON, and
the lines of a traceback are indented.

A command ends with 2 if it refuses its arguments or its configuration, whatever file they stand in (`WrongArguments`),
before its work. It ends with 1 for what it finds at work: an address in use, a broker id that is taken, damaged data.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from math import inf
from typing import IO, Any, TypeVar
from unicodedata import combining, east_asian_width

import click

from spark_klog.errors import ConfigError, MissingPackage
from spark_klog.wire.listening import AddressRefused

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
#: Between two columns of a table.
_GAP = "  "
#: Milliseconds.
_PERIODS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "m"))
#: Seconds of the units in which users give durations.
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
#: Of sizes.
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_ERASE_LINE = "\r\x1b[K"
_BAR_CELLS = 24
#: Columns and lines of a terminal that does not say how many it has.
_USUAL_SIZE = os.terminal_size((80, 24))
#: Seconds between two drawings of a bar.
_DRAWN_EVERY = 0.1


def duration(text: str) -> float:
    """The seconds of 30s, 5m, 1h, 7d, or of a number."""
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds < inf:
        raise click.BadParameter(f"{text!r} is not a positive duration: give one like 30s, 5m, 1h or 7d")
    return seconds


class WrongArguments(ConfigError):
    """Arguments, or what they name, are refused before the work: the exit code is 2, as for click's errors."""


@contextmanager
def reading_arguments() -> Iterator[None]:
    """Around what reads arguments, or as a decorator: its `ConfigError` becomes `WrongArguments`.

    An address that is in use is no wrong one.
    """
    try:
        yield
    except (AddressRefused, MissingPackage, WrongArguments):
        raise
    except ConfigError as error:
        raise WrongArguments(str(error)) from None


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
        self._bar: Bar | None = None

    def add(self, records: int, size: int) -> None:
        """Count records of a size in bytes."""
        self._records += records
        self._bytes += size
        if self._bar is None and self._shows_bar and time.monotonic() - self._began > _BAR_AFTER:
            self._bar = Bar("records", self._total)
        if self._bar is not None:
            self._bar.update(self._records)

    def forget(self) -> None:
        """Count from 0: what was counted is not written after all."""
        self._records = self._bytes = 0

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.erase()
        if self._shows_line:
            seconds = time.monotonic() - self._began
            per_second = self._records / seconds if seconds else 0.0
            click.echo(
                f"{self._records:,} records, {self._bytes:,} bytes in {seconds:.2f} s ({per_second:,.0f} records/s)",
                err=True,
            )


_Line = TypeVar("_Line", bound="StatusLine")


class StatusLine:
    """The last line of a terminal, which is drawn over; a context manager that erases it at the end.

    It shows nothing if the stream is not a terminal, or a dumb one, or if it `is_quiet`.
    """

    def __init__(self, stream: IO[str] | None = None, *, is_quiet: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.is_shown = not is_quiet and can_move_cursor(self._stream)
        self._is_drawn = False

    def show(self, text: str) -> None:
        if self.is_shown:
            self._is_drawn = True
            self._write(_ERASE_LINE + fitting(escaped(text), terminal_size(self._stream).columns - 1))

    def erase(self) -> None:
        """Make room for another line, until the next `show`."""
        if self._is_drawn:
            self._is_drawn = False
            self._write(_ERASE_LINE)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def __enter__(self: _Line) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.erase()


class Bar(StatusLine):
    """A bar of progress on stderr: what, how many of `total` (None: unknown) are done, and the time that is left.

    `is_size` says that they are bytes.
    """

    def __init__(self, what: str, total: int | None, *, is_quiet: bool = False, is_size: bool = False) -> None:
        super().__init__(is_quiet=is_quiet)
        self.what, self.total = what, total
        self._amount: Callable[[int], str] = size_text if is_size else "{:,}".format
        self._began = time.monotonic()
        self._drawn_at = 0.0

    def update(self, done: int) -> None:
        """Draw the bar, if it is some time since the last drawing."""
        now = time.monotonic()
        if self.is_shown and now - self._drawn_at >= _DRAWN_EVERY:
            self._drawn_at = now
            self.show(self._text(done, now - self._began))

    def update_of(self, done: int, total: int) -> None:
        """As `update`, of a total that is now known."""
        self.total = total
        self.update(done)

    def _text(self, done: int, seconds: float) -> str:
        if not self.total:
            return f"{self.what} {self._amount(done)}"
        part = min(1.0, done / self.total)
        cells = "#" * int(part * _BAR_CELLS)
        left = f"  {duration_text(round(1000 * (seconds / part - seconds)))} left" if part else ""
        return f"{self.what} [{cells:-<{_BAR_CELLS}}] {self._amount(done)}/{self._amount(self.total)}{left}"


def can_move_cursor(stream: IO[str]) -> bool:
    """Whether the stream is a terminal that knows escape sequences."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def terminal_size(stream: IO[str]) -> os.terminal_size:
    """Columns and lines of the terminal that the stream is; stdout may be another one, or none."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):  # no terminal; no file
        return _USUAL_SIZE
    return size if size.columns and size.lines else _USUAL_SIZE


def size_text(size: int) -> str:
    """Bytes in a unit of powers of 1000: 999 B, 1.5 MB."""
    if size < 1000:
        return f"{size} B"
    number, units = float(size), iter(_UNITS)
    unit = next(units)
    while number >= 999.95:
        number, unit = number / 1000, next(units)
    return f"{number:.1f} {unit}"


def duration_text(ms: int) -> str:
    """Format a duration: 12.3s, 4m05s, 3h07m, 2d01h."""
    for (size, unit), (smaller, smaller_unit) in zip(_PERIODS, (*_PERIODS[1:], (1000, "s")), strict=True):
        if ms >= size:
            return f"{ms // size}{unit}{ms % size // smaller:02}{smaller_unit}"
    return f"{ms / 1000:.1f}s"


def secho(text: str, *, err: bool = False, **style: Any) -> None:
    """Print a line in a style (`click.style`), if it goes to a terminal that shows styles and NO_COLOR is not set."""
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    click.secho(text, err=err, color=False if is_plain else None, **style)


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
    for name in ("kazoo", "httpx"):  # what they do each second, or with each request
        logging.getLogger(name).setLevel(logging.WARNING)


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


def table_lines(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()) -> list[str]:
    """The lines of a table without borders, the heads first; the columns `right` are aligned at their right ends."""
    lines = [list(columns), *([escaped(cell) for cell in row] for row in rows)]  # names come from their clients
    widths = [max(map(_width, cells)) for cells in zip(*lines, strict=True)]
    return [
        _GAP.join(
            " " * (width - _width(text)) + text if name in right else text + " " * (width - _width(text))
            for name, text, width in zip(columns, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


def _width(text: str) -> int:
    """Cells of a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(letter) else 2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def fitting(text: str, width: int) -> str:
    """The beginning of `text` that takes at most `width` cells of a terminal."""
    while _width(text) > width:
        text = text[: min(len(text) - 1, width)]
    return text


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()) -> None:
    """Print `table_lines`. Lines are not cut: programs may parse them."""
    head, *lines = table_lines(columns, rows, right=right)
    secho(head, bold=True)
    for line in lines:
        click.echo(line)


def os_error_text(error: OSError) -> str:
    """The file's name, if the error has one, and the reason."""
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror or error}"
