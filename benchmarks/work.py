"""The parameters and results of a work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Result


@dataclass(frozen=True)
class Bench:
    """The settings of a run."""

    records: int
    repeat: int
    work_dir: Path
    command: str

    def folder(self, name: str) -> Path:
        """A new folder for files that are deleted when the run ends."""
        path = self.work_dir / name
        path.mkdir(parents=True)
        return path


@dataclass(frozen=True)
class Work:
    """A benchmark: `run` yields a result for each line of the report; if it raises an error, that is reported, too.

    `notes` explain in the report what was done.
    """

    name: str
    run: Callable[[Bench], Iterator[Result]]
    notes: tuple[str, ...]
