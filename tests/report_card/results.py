"""What a part has shown: figures read from what its command has written, kept as a JSON file."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
#: Tests without the name of another server ask ours.
OURS = "klog"
#: What decides the outcome of a part: the code and the tests, not the results.
_CODE = ("spark_klog", "tests", "jobs", "notebooks", "Makefile", "pyproject.toml", ":!tests/report_card")
_SERVER = re.compile(r"\[(?:.*-)?(0\.10\.2\.2|3\.9\.1|4\.\d\.\d|kfake)(?=[-\]])")
_HYPOTHESIS = "hypothesis-statistics-"
_EXAMPLES = re.compile(r"(\d+) passing(?: examples)?, (\d+) failing")
_MESSAGE_CHARACTERS = 300


@dataclass
class Cell:
    """Outcomes of a row's tests at one server, and the sums of what they have counted."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    counted: dict[str, int] = field(default_factory=dict)

    def add(self, outcome: str) -> None:
        setattr(self, outcome, getattr(self, outcome) + 1)

    def count(self, name: str, number: int) -> None:
        self.counted[name] = self.counted.get(name, 0) + number


@dataclass
class Figures:
    """Cells by row and server; messages of failed tests by their names, and how many were skipped by each reason."""

    rows: dict[str, dict[str, Cell]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def cell(self, row: str, server: str = OURS) -> Cell:
        return self.rows.setdefault(row, {}).setdefault(server, Cell())


@dataclass(frozen=True)
class Result:
    """A part's figures (None if the command wrote none), and how they came about.

    `command` is what a reader types; `commit` the one whose code ran, `has_changes` if files of it were changed;
    `date` is in UTC; `error` is the end of the output of a command that wrote no figures.
    """

    part: str
    is_slice: bool
    command: str
    commit: str
    has_changes: bool
    date: str
    machine: dict[str, str]
    seconds: float
    exit_code: int
    figures: Figures | None
    error: str = ""


def load(folder: Path = RESULTS) -> dict[str, Result]:
    """The kept results by the names of their parts."""
    kept = {}
    for path in sorted(folder.glob("*.json")):
        read = json.loads(path.read_text())
        if (figures := read["figures"]) is not None:
            rows = figures.pop("rows")
            cells = {row: {server: Cell(**cell) for server, cell in cells.items()} for row, cells in rows.items()}
            read["figures"] = Figures(cells, **figures)
        kept[read["part"]] = Result(**read)
    return kept


def save(result: Result, folder: Path = RESULTS) -> None:
    """Replace the part's file at once: a run that is killed leaves the old result."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f".{result.part}.json.new"
    new.write_text(json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n")
    os.replace(new, folder / f"{result.part}.json")


def commit() -> tuple[str, bool]:
    """The current commit, and whether code or tests differ from it."""
    head = _git("rev-parse", "--short=10", "HEAD").stdout.strip()
    return head, bool(_git("status", "--porcelain", "--", *_CODE).stdout.strip())


def is_current(result: Result) -> bool:
    """Whether the code and the tests are those that the result is of."""
    if result.has_changes or result.figures is None:
        return False
    return _git("diff", "--quiet", result.commit, "--", *_CODE).returncode == 0


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "--no-optional-locks", "-C", ROOT, *arguments], capture_output=True, text=True)


def of_junit(path: Path, row: str, servers: Mapping[str, str] | None = None) -> Figures:
    """Figures of a pytest run by its --junitxml (xunit1); the first group of `row` in a test's id is its row.

    Tests whose ids name no server are at that of `servers` for their file, else at ours. A test that `row` does not
    match belongs to no row; if it fails, it is among the failures.
    """
    figures, files = Figures(), {}
    reasons: dict[str, int] = defaultdict(int)
    suites = ElementTree.parse(path).getroot()
    for case in suites.iter("testcase"):
        name = _node_id(case)
        outcome, message = _outcome(case)
        if outcome == "failed":
            figures.failures[name] = message
        if outcome == "skipped":
            reasons[message] += 1
        label = re.search(row, name)
        if label is None:
            continue
        server = _SERVER.search(name)
        cell = figures.cell(label[1], server[1] if server else (servers or {}).get(case.attrib.get("file", ""), OURS))
        cell.add(outcome)
        files[name] = cell
        for figure in case.iter("property"):
            key, value = figure.attrib["name"], figure.attrib["value"]
            if key == "note":
                figures.notes.append(value)
            elif value.isdecimal():
                cell.count(key, int(value))
    for figure in suites.iter("property"):
        key = figure.attrib["name"]
        if key.startswith(_HYPOTHESIS) and (cell := files.get(key.removeprefix(_HYPOTHESIS))) is not None:
            text = base64.b64decode(figure.attrib["value"]).decode()
            cell.count("examples", sum(int(a) + int(b) for a, b in _EXAMPLES.findall(text)))
    figures.skipped = dict(sorted(reasons.items()))
    return figures


def _node_id(case: ElementTree.Element) -> str:
    file, names = case.attrib.get("file", ""), case.attrib["classname"].split(".")
    inner = names[len(file.removesuffix(".py").split("/")) :]
    return "::".join([file, *inner, case.attrib["name"]])


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    """passed, failed or skipped, and the message of the last two. What is expected to fail has failed."""
    for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (element := case.find(kind)) is not None:
            lines = element.attrib.get("message", "").splitlines() or [""]
            outcome = "failed" if element.attrib.get("type") == "pytest.xfail" else outcome
            return outcome, lines[0][:_MESSAGE_CHARACTERS]
    return "passed", ""


def of_mutations(path: Path) -> Figures:
    """Figures of `python -m tests.mutations --json`: a row a room; the failures are faults that no test finds."""
    figures = Figures()
    read: list[dict[str, Any]] = json.loads(path.read_text())
    for fault in read:
        cell = figures.cell(fault["room"])
        cell.add("passed" if fault["all"] else "failed")
        cell.count("make test", int(bool(fault["quick"])))
        if not fault["all"]:
            figures.failures[fault["name"]] = "no test finds this fault"
    return figures
