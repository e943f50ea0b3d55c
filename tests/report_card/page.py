"""The page of the report card, made from the kept results alone."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tests.report_card.parts import Part, Section
from tests.report_card.results import OURS, ROOT, Cell, Result

PAGE = ROOT / "docs" / "reference" / "report-card.md"
_SOURCES = "https://github.com/spark-klog/spark-klog/blob/main/"
_HEAD = """# Report card

What tests show that compare this package with what others wrote, kill processes, search all states, or plant faults.
`make report-card` runs them in parts and writes this page; no figure is typed in by hand.
[How this is checked](../explanation/correctness.md) says what the tests do, and what they do not.
"""
_NOT_RUN = "not run"
_SLICES = "Of these parts a slice was run, with fewer kills, seconds or examples than the whole [at the end](#parts):"
#: Counts of the tests of a suite.
_SUITE = "suite: "


@dataclass(frozen=True)
class _Row:
    """A row of a part's figures: its cells by server."""

    label: str
    cells: Mapping[str, Cell]
    result: Result

    def sum(self, name: str) -> int:
        return sum(cell.counted.get(name, 0) for cell in self.cells.values())

    @property
    def outcomes(self) -> Cell:
        """Of all servers together."""
        cells = self.cells.values()
        return Cell(*(sum(getattr(cell, name) for cell in cells) for name in ("passed", "failed", "skipped")))


def render(parts: Mapping[str, Part], results: Mapping[str, Result]) -> str:
    """The text of the page; its date and machine are those of the newest result, commits stand at the parts."""
    kept = {name: results[name] for name in parts if name in results}
    if not kept:
        return "\n".join([_HEAD, "No part was run yet: `make report-card`.", "", *_parts(parts, kept, None), ""])
    newest = max(kept.values(), key=lambda result: result.date)
    machine = "; ".join(f"{name}: {value}" for name, value in newest.machine.items())
    lines = [_HEAD, f"{_dates(kept)}; the commit of each part stands in its line [at the end](#parts). {machine}.", ""]
    for section in Section:
        of_section = {name: part for name, part in parts.items() if part.section is section}
        lines += [f"## {_TITLES[section][0]}", "", _TITLES[section][1], ""]
        lines += [*_table(section, [*_rows(of_section, kept)]), *_failures(of_section, kept)]
        if slices := [name for name in of_section if name in kept and kept[name].is_slice]:
            lines += [f"{_SLICES} {', '.join(f'{name} ({kept[name].seconds:,.0f} s)' for name in slices)}.", ""]
        left = [name for name in of_section if name not in kept]
        if left:
            lines += [f"Not run on this machine: {', '.join(left)}. The commands stand at the end.", ""]
    return "\n".join([*lines, *_parts(parts, kept, newest)]) + "\n"


_TITLES: dict[Section, tuple[str, str]] = {
    Section.CLIENTS: (
        "Clients of others",
        """Each client writes with all codecs that it has, reads what each other client wrote, looks up offsets
by time, and shares a topic within a group. A cell has the tests of the client that passed, of those that ran, at that
server.""",
    ),
    Section.SUITES: (
        "Suites and tools of others",
        """Test suites, programs for system tests and tools that others wrote, at our broker and on its files. Where a
test also runs at Apache Kafka, that column shows that the test is right.""",
    ),
    Section.OUR_CLIENT: (
        "Our client and connector at Kafka",
        """The first column has tests at our broker and at scripted ones. The others have the same tests, or
those that only this server needs, at Apache Kafka and at kfake, franz-go's broker for tests.""",
    ),
    Section.KILLS: (
        "Kills",
        "What tests kill by SIGKILL while they run, by kind of process, and what must hold afterwards.",
    ),
    Section.FAULTS: (
        "Planted faults",
        """`python -m tests.mutations` changes one place of the product, as a mistake would, and runs the tests nearest
to it. A fault is found if a test fails.""",
    ),
    Section.MODELS: (
        "Models",
        """States are all that can be reached from a start, each visited once. Sequences and examples are random, and
compared with a model after each step.""",
    ),
    Section.FUZZ: (
        "Fuzzing",
        """Inputs tried in this run. What failed once is kept in `tests/fuzz/regressions/`, and each run of the tests
reads it.""",
    ),
}


def _dates(kept: Mapping[str, Result]) -> str:
    """From the oldest result to the newest."""
    dates = sorted(result.date for result in kept.values())
    return f"Run {' to '.join(dict.fromkeys([dates[0], dates[-1]]))} UTC"


def _rows(parts: Mapping[str, Part], kept: Mapping[str, Result]) -> Iterator[_Row]:
    for name in parts:
        if (result := kept.get(name)) is not None and result.figures is not None:
            for label, cells in result.figures.rows.items():
                yield _Row(label, cells, result)


def _table(section: Section, rows: list[_Row]) -> list[str]:
    if not rows:
        return []
    if section in (Section.CLIENTS, Section.SUITES, Section.OUR_CLIENT):
        return _beside_each_other(section, rows)
    if section is Section.KILLS:
        rows = _once_each([row for row in rows if any(name.startswith("kills: ") for name in _counted(row))])
        cells = [[_linked(row.label), _about(row.label), _kills(row), _outcomes(row.outcomes)] for row in rows]
        total = sum((_killed(row) for row in rows), Counter[str]())
        summary = ", ".join(f"{number:,} {kind}" for kind, number in total.most_common())
        return [*_lines(["test", "what it checks", "killed", "tests"], cells), f"Together: {summary}.", ""]
    if section is Section.FAULTS:
        cells = [
            [
                row.label,
                f"{row.outcomes.passed + row.outcomes.failed}",
                f"{row.sum('make test')}",
                f"{row.outcomes.passed}",
            ]
            for row in rows
        ]
        sums = [str(sum(int(cell[column]) for cell in cells)) for column in (1, 2, 3)]
        return _lines(
            ["part of the product", "faults", "found by `make test`", "by `make test-all`"],
            [*cells, ["**together**", *sums]],
        )
    if section is Section.MODELS:
        names = [name for name in ("states", "sequences", "examples") if any(row.sum(name) for row in rows)]
        cells = [
            [
                _linked(row.label),
                _about(row.label),
                *(_number(row.sum(name)) for name in names),
                _outcomes(row.outcomes),
            ]
            for row in rows
        ]
        return _lines(["test", "what it searches", *names, "tests"], cells)
    tried = {row.label: row.sum("inputs") + row.sum("examples") for row in rows}
    rows = [row for row in rows if tried[row.label]]  # beside tests that have examples by hand
    cells = [
        [row.label, _number(tried[row.label]), _number(row.sum("seconds")), _outcomes(row.outcomes)] for row in rows
    ]
    seconds = sum(row.sum("seconds") for row in rows)
    together = f"Together {seconds:,} seconds ({seconds / 3600:.2f} hours)."
    return [*_lines(["target", "inputs", "seconds", "tests"], cells), together, ""]


def _once_each(rows: list[_Row]) -> list[_Row]:
    """Without a file's rows of parts that ran fewer of its tests than another part: kills are not counted twice."""
    most: dict[str, _Row] = {}
    for row in rows:
        if (other := most.get(row.label)) is None or other.outcomes.passed < row.outcomes.passed:
            most[row.label] = row
    return [*most.values()]


def _beside_each_other(section: Section, rows: list[_Row]) -> list[str]:
    servers = sorted({server for row in rows for server in row.cells} - {OURS}, key=_version, reverse=True)
    ours = "our broker" if section is not Section.OUR_CLIENT else "our broker, scripted ones"
    head = ["client" if section is Section.CLIENTS else "tests", ours, *(_server_name(server) for server in servers)]
    if section is not Section.CLIENTS:
        head.insert(1, "what they check")
    cells = []
    for row in rows:
        line = [_outcomes(row.cells[server]) if server in row.cells else "-" for server in (OURS, *servers)]
        if section is Section.CLIENTS:
            cells.append([row.label.replace("_", " "), *line])
        else:
            cells.append([_linked(row.label), _about(row.label), *line])
    notes = (
        [f"* {note}" for note in dict.fromkeys(note for row in rows for note in row.result.figures.notes)]
        if rows
        else []
    )
    return [*_lines(head, cells), *([*notes, ""] if notes else [])]


def _failures(parts: Mapping[str, Part], kept: Mapping[str, Result]) -> list[str]:
    """What failed, and why what was left out was left out."""
    lines = []
    for name in parts:
        if (result := kept.get(name)) is None:
            continue
        if result.figures is None:
            lines.append(f"* **{name}** ended with {result.exit_code} and wrote no figures: {_text(result.error)}")
            continue
        lines += [f"* **failed**: `{test}`: {_text(why)}" for test, why in result.figures.failures.items()]
        lines += [f"* {name}: {number} skipped: {_text(why)}" for why, number in result.figures.skipped.items()]
    return [*lines, ""] if lines else []


def _parts(parts: Mapping[str, Part], kept: Mapping[str, Result], newest: Result | None) -> list[str]:
    """How each part came about, with its commit. The machine is named if it is another than the page's."""
    cells = []
    for name, part in parts.items():
        if (result := kept.get(name)) is None:
            cells.append([name, f"**{_NOT_RUN} on this machine**", "", f"`{part.command(is_slice=False)}`"])
            continue
        assert newest is not None
        when = f"{result.date}, {result.seconds:,.0f} s, at {_commit(result)}"
        if result.machine != newest.machine:
            when += ", on another machine: " + "; ".join(result.machine.values())
        extent = "slice" if result.is_slice else "whole"
        if result.exit_code:
            extent += f", **exit code {result.exit_code}**"
        command = f"`{result.command}`"
        if result.is_slice:
            command += f"; whole: `{part.command(is_slice=False)}`"
        cells.append([name, extent, when, command])
    text = """A slice is what `make test-all` runs of a part; the whole is what `make soak` runs of it, with the
variables that stand before its command. `make report-card ARGS=NAME` runs a part again, with `--whole` all of it.
Without a name it runs what was not run at this state of the code, the shortest first: it goes on where it stopped. The
results are in `tests/report_card/results`; a part's machine is named if it is not the page's."""
    return ["## Parts", "", text, "", *_lines(["part", "run", "when", "command"], cells)]


def _commit(result: Result) -> str:
    return result.commit + (" with changes" if result.has_changes else "")


def _version(server: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", server))


def _server_name(server: str) -> str:
    return f"Kafka {server}" if _version(server) else server


def _outcomes(cell: Cell) -> str:
    """Of tests; of a suite that others wrote, which is one test here, of the suite's tests."""
    if suite := {name: number for name, number in cell.counted.items() if name.startswith(_SUITE)}:
        cell = Cell(**{name.removeprefix(_SUITE): number for name, number in suite.items()})
    ran = cell.passed + cell.failed
    text = f"{cell.passed:,} of {ran:,}" if ran else "-"
    if cell.failed:
        text = f"**{text}**"
    return f"{text} ({cell.skipped} skipped)" if cell.skipped else text


def _counted(row: _Row) -> set[str]:
    return {name for cell in row.cells.values() for name in cell.counted}


def _killed(row: _Row) -> Counter[str]:
    return Counter(
        {name.removeprefix("kills: "): row.sum(name) for name in sorted(_counted(row)) if name.startswith("kills: ")}
    )


def _kills(row: _Row) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in _killed(row).most_common())


def _number(number: int) -> str:
    return f"{number:,}" if number else "-"


def _linked(label: str) -> str:
    """A test's file as a link into the sources, by its name alone."""
    return f"[{label.rpartition('/')[2].removeprefix('test_').removesuffix('.py')}]({_SOURCES}{label})"


def _about(label: str) -> str:
    """The first sentence of what a file of tests says of itself."""
    path = ROOT / label
    if not path.is_file():
        return "-"
    text = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return _text(" ".join(text.split()))


def _text(text: str) -> str:
    """A text as it may stand in a table or a list."""
    return (
        text.replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("`", "'")
        .replace("_", "\\_")
        .replace("*", "\\*")
        .replace("[", "\\[")
    )


def _lines(head: list[str], cells: Iterable[list[str]]) -> list[str]:
    rows = [head, ["---"] * len(head), *cells]
    return [*(f"| {' | '.join(row)} |" for row in rows), ""]
