"""What processes and folders take over time: memory, descriptors, threads, files, bytes."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

#: The share of the time after which servers are no longer restarted; two parts of the time behind it are compared.
SETTLED = 0.5
_PARTS = ((SETTLED, 0.7), (0.8, 1.0))
_MB = 1 << 20


class Limit(NamedTuple):
    """What the median of a figure in the last fifth of the time may be, by that of a fifth before."""

    times: float
    more: float


#: By figure. Java's heap is Java's: only its descriptors and threads count.
LIMITS = {
    "memory": Limit(1.05, 12 * _MB),
    "descriptors": Limit(1.0, 8),
    "threads": Limit(1.0, 4),
    # as many as there were file reads at once: delta-rs keeps up to 512, as long as one in ten seconds is used
    "threads of delta-rs": Limit(1.0, 512),
    "files": Limit(1.1, 20),
    "bytes": Limit(1.1, 4 * _MB),  # a segment of each partition
    # its table is small: each compaction writes all of it again, until there are files of 128 MB
    "load, memory": Limit(1.25, 12 * _MB),
}


class Watch:
    """Samples of processes, by the pid that `trees` return, with their descendants, and of folders; both by name."""

    def __init__(
        self, trees: Mapping[str, Callable[[], int]], folders: Mapping[str, Callable[[], Iterable[Path]]], output: Path
    ) -> None:
        self._trees, self._folders, self._output = trees, folders, output
        self._samples: list[dict[str, dict[str, float]]] = []
        self._times: list[float] = []

    def sample(self, share: float) -> None:
        """Take a sample; `share` is the part of the time that has passed, from 0 to 1."""
        taken: dict[str, dict[str, float]] = {}
        for name, pid in self._trees.items():
            taken[name] = _processes(pid())
        for name, folder in self._folders.items():
            taken[name] = _below(folder())
        self._samples.append(taken)
        self._times.append(share)
        with self._output.open("a") as file:
            file.write(json.dumps({"share": round(share, 4), **taken}) + "\n")

    def grown(self) -> list[str]:
        """What has grown by more than it may, in words."""
        return [
            f"{name}: {figure} from {before:,.0f} to {after:,.0f}"
            for name, figure, before, after in self.table()
            if after > (limit := LIMITS.get(f"{name}, {figure}", LIMITS[figure])).times * before + limit.more
        ]

    def table(self) -> Iterator[tuple[str, str, float, float]]:
        """(name, figure, its median in the fifth after the restarts, its median in the last fifth)."""
        for name in self._samples[-1]:
            for figure in self._samples[-1][name]:
                before, after = (median(self._within(name, figure, *part)) for part in _PARTS)
                yield name, figure, before, after

    def _within(self, name: str, figure: str, first: float, last: float) -> Sequence[float]:
        pairs = zip(self._times, self._samples, strict=True)
        return [sample[name][figure] for at, sample in pairs if first <= at <= last and figure in sample.get(name, {})]


def _processes(pid: int) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in [top, *top.children(recursive=True)]:
            with suppress(psutil.Error, OSError):
                values: dict[str, Any] = {"descriptors": process.num_fds(), **_threads(process)}
                if process.name() != "java":
                    # of pages that forked processes share, each has its part
                    values["memory"] = process.memory_full_info().pss
                for figure, value in values.items():
                    sums[figure] += value
    return dict(sums)


def _threads(process: psutil.Process) -> dict[str, int]:
    names = []
    for path in Path(f"/proc/{process.pid}/task").glob("*/comm"):
        with suppress(OSError):
            names.append(path.read_text())
    count = sum(name.startswith("tokio") for name in names)
    return {"threads": process.num_threads() - count, "threads of delta-rs": count}


def _below(folders: Iterable[Path]) -> dict[str, float]:
    files = size = 0
    for path, _, names in chain.from_iterable(map(os.walk, folders)):
        for name in names:
            with suppress(FileNotFoundError):
                size += os.stat(os.path.join(path, name)).st_size
                files += 1
    return {"files": files, "bytes": size}
