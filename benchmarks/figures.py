"""The figures of a run: a line for each measured work, with its sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass
class Side:
    """The figures of one side, in the unit of the result: a warm-up run, then the repeats."""

    name: str
    samples: list[float] = field(default_factory=list)
    cold: float | None = None
    failed: str | None = None

    @property
    def median(self) -> float | None:
        return median(self.samples) if self.samples and self.failed is None else None


@dataclass
class Result:
    """One line of the report: the same work by klog and by a peer (None if no peer can do it).

    `noted_ratio` is the ratio of the exact figures, if only rounded ones were kept.
    """

    work: str
    unit: str
    klog: Side
    peer: Side | None
    command: str
    higher_is_better: bool = True
    noted_ratio: float | None = None

    @property
    def sides(self) -> list[Side]:
        return [self.klog] if self.peer is None else [self.klog, self.peer]

    @property
    def ratio(self) -> float | None:
        """How many times better klog is than the peer; below 1 it is worse."""
        if self.noted_ratio is not None:
            return self.noted_ratio
        ours, theirs = self.klog.median, self.peer.median if self.peer else None
        if not ours or not theirs:
            return None
        return ours / theirs if self.higher_is_better else theirs / ours


def failures(results: Sequence[Result]) -> list[tuple[Result, Side]]:
    return [(result, side) for result in results for side in result.sides if side.failed is not None]
