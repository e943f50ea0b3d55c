"""Run parts of the report card, and write docs/reference/report-card.md (`make report-card`).

    python -m tests.report_card                      what was not run at this state of the code, the shortest first
    python -m tests.report_card franz-go kills-load  these parts again
    python -m tests.report_card --whole log-model    all of it, which may take hours; otherwise what make test-all has
    python -m tests.report_card --again registry     run a part again, and compare its figures with the kept ones
    python -m tests.report_card --page               the page alone

A part that is interrupted keeps its earlier result. The output of commands is in build/report-card. The exit code is 1
if a part that ran has failed, or its figures were others.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.machine import describe
from tests.report_card.page import PAGE, render
from tests.report_card.parts import Part, parts
from tests.report_card.results import (
    RESULTS,
    ROOT,
    Figures,
    Result,
    commit,
    is_current,
    load,
    of_junit,
    of_mutations,
    save,
)

OUTPUT = ROOT / "build" / "report-card"
_MACHINE = ("CPU", "memory", "kernel", "Python", "Java", "record kernel")
#: Of a command that wrote no figures.
_LAST_CHARACTERS = 600
#: Counted by the clock: another run has another number.
_BY_CLOCK = ("inputs", "seconds", "sequences", "kills: ")


def main(
    arguments: Sequence[str] | None = None,
    *,
    known: dict[str, Part] | None = None,
    folder: Path = RESULTS,
    page: Path = PAGE,
) -> int:
    """The exit code; `known` are the parts, whose results are in `folder`."""
    known = parts() if known is None else known
    asked = _parse(arguments, known)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the command that runs ends, too
    kept, has_failed = load(folder), False
    for part in [] if asked.page else _to_run(known, kept, asked):
        old = kept.get(part.name)
        is_slice = old.is_slice if asked.again and old is not None else part.has_slice and not asked.whole
        _show(f"{part.name}: {part.command(is_slice=is_slice)}")
        result = run(part, is_slice=is_slice)
        _show(f"{part.name}: {_summary(result)}, {result.seconds:.0f} s")
        has_failed |= result.exit_code != 0
        if asked.again and old is not None:
            differences = compare(old.figures, result.figures)
            _show("\n".join(differences or [f"{part.name}: the same figures"]))
            has_failed |= bool(differences)
            continue
        save(result, folder)
        page.write_text(render(known, load(folder)))
    page.write_text(render(known, load(folder)))
    return int(has_failed)


def _parse(arguments: Sequence[str] | None, known: dict[str, Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.report_card", description="Run parts of the report card.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"these parts: {', '.join(known)}")
    parser.add_argument("--whole", action="store_true", help="all of each part, not a slice: some take hours")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    parser.add_argument("--again", action="store_true", help="compare the figures with the kept ones, and keep those")
    parsed = parser.parse_args(arguments)
    if unknown := [name for name in parsed.names if name not in known]:
        parser.error(f"no part has the name {', '.join(unknown)}; there are {', '.join(known)}")
    if parsed.again and not parsed.names:
        parser.error("--again needs the names of parts")
    return parsed


def _to_run(known: dict[str, Part], kept: dict[str, Result], asked: argparse.Namespace) -> list[Part]:
    """The named parts; without names those whose results are of other code, or are a slice if the whole is asked for.

    A slice does not replace the result of a whole run: that takes the part's name.
    """
    if asked.names:
        return [known[name] for name in dict.fromkeys(asked.names)]

    def is_done(part: Part) -> bool:
        result = kept.get(part.name)
        if result is None or result.command != part.command(is_slice=result.is_slice):
            return False
        if part.has_slice and result.is_slice == asked.whole:
            return not asked.whole
        return is_current(result)

    return [part for part in known.values() if not is_done(part)]


def run(part: Part, *, is_slice: bool) -> Result:
    """Run a part's command, with its output in build/report-card; the result has what the command wrote."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    written, log = OUTPUT / f"{part.name}.{'xml' if part.kind == 'pytest' else 'json'}", OUTPUT / f"{part.name}.log"
    written.unlink(missing_ok=True)
    words = [sys.executable, "-m", *part.words]
    words += (
        ["--junitxml", str(written), "-o", "junit_family=xunit1"] if part.kind == "pytest" else ["--json", str(written)]
    )
    variables = dict(os.environ) | ({} if is_slice else part.variables)
    head, has_changes = commit()
    date, begin = datetime.now(timezone.utc), time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(words, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    figures = _figures(part, written)
    machine = {name: value for name, value in describe().items() if name in _MACHINE}
    error = "" if figures is not None else log.read_text(errors="replace").strip()[-_LAST_CHARACTERS:]
    seconds = round(time.monotonic() - begin, 1)
    command = part.command(is_slice=is_slice)
    when = date.strftime("%Y-%m-%d %H:%M")
    return Result(part.name, is_slice, command, head, has_changes, when, machine, seconds, code, figures, error)


def _figures(part: Part, written: Path) -> Figures | None:
    """None if the command did not come so far, or ran no test."""
    if not written.exists():
        return None
    figures = of_junit(written, part.row, part.servers) if part.kind == "pytest" else of_mutations(written)
    return figures if figures.rows or figures.failures else None


def compare(old: Figures | None, new: Figures | None) -> list[str]:
    """What differs between two runs' figures, except what depends on the clock."""
    if old is None or new is None:
        return [] if old is new else [f"figures: {old is not None} before, {new is not None} now"]
    differences = []
    for row in dict.fromkeys([*old.rows, *new.rows]):
        before, after = (
            {server: _fixed(asdict(cell)) for server, cell in figures.rows.get(row, {}).items()}
            for figures in (old, new)
        )
        if before != after:
            differences.append(f"{row}: {before} before, {after} now")
    if old.failures.keys() != new.failures.keys():
        differences.append(f"failures: {sorted(old.failures)} before, {sorted(new.failures)} now")
    return differences


def _fixed(cell: dict[str, object]) -> dict[str, object]:
    counted = cell.pop("counted")
    assert isinstance(counted, dict)
    return cell | {name: number for name, number in counted.items() if not name.startswith(_BY_CLOCK)}


def _summary(result: Result) -> str:
    if result.figures is None:
        return f"no figures, exit code {result.exit_code}"
    cells = [cell for cells in result.figures.rows.values() for cell in cells.values()]
    passed, failed, skipped = (sum(getattr(cell, name) for cell in cells) for name in ("passed", "failed", "skipped"))
    return f"{passed} passed, {failed} failed, {skipped} skipped"


def _show(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command


if __name__ == "__main__":
    sys.exit(main())
