"""`results.md`, rendered from all sections."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.figures import Result, Side, failures
from benchmarks.sections import Section

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
