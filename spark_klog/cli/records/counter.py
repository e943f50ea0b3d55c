"""How many records a command has read or written: a bar while it works, a line at its end, both on stderr."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: Work that is done sooner shows no bar.
_BAR_AFTER = 1.0


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
            self._start()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._records)

    def forget(self) -> None:
        """Count from 0: what was counted is not written after all."""
        self._records = self._bytes = 0

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        bar = Progress(MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), console=Console(stderr=True))
        self._bar, self._task = bar, bar.add_task("records", total=self._total)
        bar.start()

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
