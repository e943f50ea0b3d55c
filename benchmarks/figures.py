"""The figures of a run: what a benchmark is, its lines, `results.json` with the sections of all runs, `results.md`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any


@dataclass
class Side:
    """The figures of one side, in the unit of the result: a warm-up run, then the repeats."""

    name: str
    samples: list[float] = field(default_factory=list)
    cold: float | None = None
    failed: str | None = None

    def add(self, value: float) -> None:
        """Add the figure of a run; the first one is the warm-up."""
        if self.cold is None:
            self.cold = value
        else:
            self.samples.append(value)

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


def latencies(
    work: str, figures: Sequence[tuple[Side, Sequence[float]]], probes: int, command: str
) -> Iterator[Result]:
    """The percentiles of each side's milliseconds; a side that has failed has none."""
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        result = Result(
            f"{work}, {name} of {probes}",
            "ms",
            *(Side(figure.name, failed=figure.failed) for figure, _ in figures),
            command,
            higher_is_better=False,
        )
        for side, (_, milliseconds) in zip(result.sides, figures, strict=True):
            if milliseconds:
                rank = min(len(milliseconds) - 1, int(share * len(milliseconds)))
                side.samples.append(sorted(milliseconds)[rank])
        yield result


def failures(results: Sequence[Result]) -> list[tuple[Result, Side]]:
    return [(result, side) for result in results for side in result.sides if side.failed is not None]


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

    `notes` explain in the report what was done. One that is not `is_of_all`, as it takes long, has to be named.
    """

    name: str
    run: Callable[[Bench], Iterator[Result]]
    notes: tuple[str, ...]
    is_of_all: bool = True


_LISTS_OF_NUMBERS = re.compile(r"\[\n([-+.\de,\s]+)\]")


@dataclass(frozen=True)
class Circumstances:
    """The command of a run, the code, the machine, and its load before the run."""

    command: str
    commit: str
    is_dirty: bool
    machine: dict[str, str]
    load: float


@dataclass(frozen=True)
class Section:
    """The results of a work, `measured` at a time in words (UTC)."""

    name: str
    measured: str
    circumstances: Circumstances
    notes: tuple[str, ...]
    results: tuple[Result, ...]


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def load(path: Path) -> dict[str, Section]:
    """The sections by name; empty if there is no file yet."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    return {name: _section(name, fields) for name, fields in json.loads(text).items()}


def save(path: Path, sections: Mapping[str, Section]) -> None:
    text = json.dumps({name: _fields(section) for name, section in sections.items()}, indent=1, ensure_ascii=False)
    replace(path, _LISTS_OF_NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n")


def replace(path: Path, text: str) -> None:
    """Replace a file atomically: it has the old or the new content, never a part."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _fields(section: Section) -> dict[str, Any]:
    return {
        "measured": section.measured,
        **asdict(section.circumstances),
        "notes": section.notes,
        "results": [_result_fields(result) for result in section.results],
    }


def _section(name: str, fields: Mapping[str, Any]) -> Section:
    return Section(
        name,
        fields["measured"],
        Circumstances(**{key: fields[key] for key in Circumstances.__dataclass_fields__}),
        tuple(fields["notes"]),
        tuple(_result(result) for result in fields["results"]),
    )


def _result_fields(result: Result) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "work": result.work,
        "unit": result.unit,
        "higher_is_better": result.higher_is_better,
        "command": result.command,
        "sides": [asdict(side) for side in result.sides],
    }
    if result.noted_ratio is not None:
        fields["noted_ratio"] = result.noted_ratio
    return fields


def _result(fields: Mapping[str, Any]) -> Result:
    klog, *peers = (Side(**side) for side in fields["sides"])
    return Result(
        fields["work"],
        fields["unit"],
        klog,
        peers[0] if peers else None,
        fields["command"],
        fields["higher_is_better"],
        fields.get("noted_ratio"),
    )


_HEAD = (
    "Written by `python -m benchmarks.run` from the figures in `{kept}`; `--only` renews some sections and leaves the "
    "others, so that each says when, by which command and at which commit it was measured. **Compare figures only "
    "within one section: it is one run.** Figures are medians. The ratio says how many times as good as the peer klog "
    "is, above 1 is better."
)


def render(sections: Sequence[Section], kept: str) -> str:
    """The whole text, with the sections in their order; `kept` is the name of the file that stores them."""
    parts = ["# Benchmark results", _HEAD.format(kept=kept)]
    parts.append(_summary([result for section in sections for result in section.results]))
    for section in sections:
        parts += _section_parts(section)
    parts += _machine_parts(sections)
    return "\n\n".join(parts) + "\n"


def _summary(results: Sequence[Result]) -> str:
    rows = [_line(result) for result in results]
    return _table(["work", "unit", "klog", "peer", "ratio", "the peer"], rows)


def _section_parts(section: Section) -> list[str]:
    failed = failures(section.results)
    parts = [
        f"## {section.name}",
        _measured(section),
        _table(
            ["work", "unit", "klog", "peer", "ratio", "the peer", "repeats"],
            [[*_line(result), _repeats(result)] for result in section.results],
        ),
    ]
    if failed:
        parts += ["Failed:", "\n".join(_failure_lines(failed))]
    rows = [
        (result.work, result.unit, side.name, _number(side.cold), ", ".join(map(_number, side.samples)) or "-")
        for result in section.results
        for side in result.sides
    ]
    return [
        *parts,
        "Every run:",
        # a side with several peers is in several results
        _table(["work", "unit", "side", "cold (first run)", "repeats"], list(dict.fromkeys(rows))),
        "\n".join(f"- {note}" for note in section.notes),
    ]


def _measured(section: Section) -> str:
    """When, at which commit and by which command a section was measured."""
    made = section.circumstances
    commit = f"`{made.commit}`" + (" with uncommitted changes" if made.is_dirty else "")
    alone = list(dict.fromkeys(result.command for result in section.results))
    again = "" if alone == [made.command] else f" (this section alone: {', '.join(f'`{it}`' for it in alone)})"
    return (
        f"Measured {section.measured} at {commit} by `{made.command}`{again}. The machine's load average was "
        f"{made.load:.2f} before the run; above 0.5 it was not idle."
    )


def _machine_parts(sections: Sequence[Section]) -> list[str]:
    """A table for each machine, with the sections that were measured on it."""
    machines: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for section in sections:
        machines.setdefault(tuple(section.circumstances.machine.items()), []).append(section.name)
    parts = ["## Machine"]
    for machine, names in machines.items():
        parts += [f"Of {', '.join(names)}:", _table(["", ""], machine)]
    return parts


def _line(result: Result) -> list[str]:
    ratio = "-" if result.ratio is None else f"{result.ratio:.2f}"
    peer = result.peer.name if result.peer else "-"
    return [result.work, result.unit, _figure(result.klog), _figure(result.peer), ratio, peer]


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
