"""The figures of a run, and `results.md` made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from statistics import median

from benchmarks import machine


@dataclass
class Side:
    """One side's figures, in the unit of the result: a warm-up run, then the repeats."""

    name: str
    samples: list[float] = field(default_factory=list)
    cold: float | None = None
    failed: str | None = None

    @property
    def median(self) -> float | None:
        return median(self.samples) if self.samples and self.failed is None else None


@dataclass
class Result:
    """One line of the report: the same work by klog and by a peer (None where the peer has no such thing)."""

    work: str
    unit: str
    klog: Side
    peer: Side | None
    command: str
    higher_is_better: bool = True

    @property
    def sides(self) -> list[Side]:
        return [self.klog] if self.peer is None else [self.klog, self.peer]

    @property
    def ratio(self) -> float | None:
        """How many times as good as the peer klog is: above 1 it is the better one."""
        ours, theirs = self.klog.median, self.peer.median if self.peer else None
        if not ours or not theirs:
            return None
        return ours / theirs if self.higher_is_better else theirs / ours


def failures(results: Sequence[Result]) -> list[tuple[Result, Side]]:
    return [(result, side) for result in results for side in result.sides if side.failed is not None]


def render(results: Sequence[Result], notes: Sequence[str], command: str) -> str:
    """The whole text of `results.md`."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    failed = failures(results)
    parts = [
        "# Benchmark results",
        f"Written by `{command}` on {now}; the next run overwrites it. Figures are medians. "
        "The ratio says how many times as good as the peer klog is, above 1 is better. "
        "Compare figures only within one run.",
        _table(
            ["work", "unit", "klog", "peer", "ratio", "repeats", "the peer"],
            [
                [
                    result.work,
                    result.unit,
                    _figure(result.klog),
                    _figure(result.peer),
                    "-" if result.ratio is None else f"{result.ratio:.2f}",
                    _repeats(result),
                    result.peer.name if result.peer else "-",
                ]
                for result in results
            ],
        ),
    ]
    if failed:
        parts += ["## Failed", "\n".join(_failure_lines(failed))]
    parts += [
        "## Every run",
        _table(
            ["work", "unit", "side", "cold (first run)", "repeats"],
            [
                [
                    result.work,
                    result.unit,
                    side.name,
                    _number(side.cold),
                    ", ".join(map(_number, side.samples)) or "-",
                ]
                for result in results
                for side in result.sides
            ],
        ),
        "## How",
        "\n".join(f"- {note}" for note in notes),
        _table(["work", "command"], [[result.work, f"`{result.command}`"] for result in results]),
        "## Machine",
        _table(["", ""], [list(row) for row in machine.describe()]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _figure(side: Side | None) -> str:
    if side is None:
        return "-"
    return "**failed**" if side.failed is not None else _number(side.median)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _repeats(result: Result) -> str:
    counts = {len(side.samples) for side in result.sides if side.failed is None}
    return " / ".join(map(str, sorted(counts))) or "-"


def _failure_lines(failed: Sequence[tuple[Result, Side]]) -> list[str]:
    """A line for each reason, with all the work that it stopped."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for result, side in failed:
        reasons.setdefault((side.name, side.failed or ""), []).append(result.work)
    return [f"- {name}: {'; '.join(work)}: {_inline(reason)}" for (name, reason), work in reasons.items()]


def _inline(text: str) -> str:
    return "`" + " ".join(text.replace("`", "'").split()) + "`"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
