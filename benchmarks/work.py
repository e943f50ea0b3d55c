"""What a piece of work is given and gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Result


@dataclass(frozen=True)
class Bench:
    """One run's settings."""

    records: int
    repeat: int
    work_dir: Path
    command: str

    def folder(self, name: str) -> Path:
        """A new folder for files that may go when the run ends."""
        path = self.work_dir / name
        path.mkdir(parents=True)
        return path


@dataclass(frozen=True)
class Work:
    """A piece of work: `run` yields a result for each line of the report; what it raises is reported, too.

    `notes` say what was done, for the report.
    """

    name: str
    run: Callable[[Bench], Iterator[Result]]
    notes: tuple[str, ...]
