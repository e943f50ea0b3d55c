"""Plant faults, one at a time, in a copy of this checkout, and see which tests find them.

    python -m tests.mutations                              each fault against the tests nearest to it
    python -m tests.mutations --only log-swap-not-on-disk  one of them; the option may be repeated
    python -m tests.mutations --room log                   those of a part of the product
    python -m tests.mutations --whole --json found.json    the others also against all tests

A fault is looked for as `make test` does (pytest --quick) and, if that does not find it, as `make test-all` does. It
is found if a test fails that passes without it. A run that hangs is ended after --deadline, and has found nothing: a
test's own timeout has to end it. The command fails if `make test` finds more than two faults less than
`make test-all`, or if there are faults that neither finds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue

from tests.mutations.faults import FAULTS, ROOT, Fault

_PARTS = (*("spark_klog", "tests", "jobs", "notebooks", "benchmarks", "docs"), *(".ci", ".dockerignore", ".gitignore"))
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "test-logs")
#: Lines of pytest's summary.
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::\S.*?)(?: - .*)?$", re.MULTILINE)
#: The line of the test under way, if its timeout has ended the process: "tests/log/test_log.py::test_roll ".
_UNDER_WAY = re.compile(r"^(tests/\S+?::\S.*?) *(?:$|\+{3,})", re.MULTILINE)
_ENDED_BY_TIMEOUT = re.compile(r"^\++ Timeout \++$", re.MULTILINE)
_DESELECTED = re.compile(r"\b\d+ deselected\b")
_PASSED, _SOME_FAILED, _NONE_RAN = 0, 1, 5
#: Without those of `make check`, and without the test of the list of faults, which fails as soon as one is planted.
_ALL_TESTS = ("tests", "--ignore=tests/papers", "--ignore=tests/mutations")
_TEST_SECONDS = 120
#: How many faults less than `make test-all` the short gate may find.
_MOST_MISSED = 2


@dataclass
class Found:
    """Which test has found a fault as `make test` and as `make test-all` run it; "" for none."""

    name: str
    room: str
    quick: str = ""
    all: str = ""
    seconds: float = 0.0


class Checkout:
    """A copy of this checkout with its built kernel. The packages come from the environment that runs this."""

    _times = count(int(time.time()) + 10)

    def __init__(self, folder: Path, deadline: float) -> None:
        self.root, self._log = folder / "checkout", folder / "output"
        self._deadline = deadline
        #: Whether the last run left out tests that it was asked for.
        self.has_left_out = False
        for name in (*_PARTS, *(path.name for path in ROOT.iterdir() if path.is_file())):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.root / name, ignore=_LEFT_OUT)
            elif source.is_file():
                self.root.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, self.root / name)

    def write(self, file: str, source: str) -> None:
        """Replace a file, with a time that no compiled module has: times count in whole seconds there."""
        path = self.root / file
        path.write_text(source)
        at = next(self._times)
        os.utime(path, (at, at))

    def failing(self, tests: Sequence[str], *options: str) -> str:
        """The first test that fails; "" if none does, or if the run had to be ended."""
        command = [sys.executable, "-m", "pytest", *options, "-x", "-v", f"--timeout={_TEST_SECONDS}"]
        command += ["-p", "no:cacheprovider", *tests]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        variables |= {
            # before the editable install of this checkout, also in the processes that tests start
            "PYTHONPATH": str(self.root),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "COLUMNS": "1000",
        }
        with self._log.open("w") as log:
            process = subprocess.Popen(
                command, cwd=self.root, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(self._deadline)
            except subprocess.TimeoutExpired:
                self.has_left_out = True
                return ""
            finally:
                process.kill()
                process.wait()
                self._end_servers()
        output = self._log.read_text(errors="replace")
        self.has_left_out = _DESELECTED.search(output) is not None
        if code in (_PASSED, _NONE_RAN):
            return ""
        failed = _FAILED.search(output)
        if failed is None and _ENDED_BY_TIMEOUT.search(output):
            failed = list(_UNDER_WAY.finditer(output))[-1]
        if code != _SOME_FAILED or failed is None:
            raise RuntimeError(f"pytest has ended with {code}:\n{output[-4000:]}")
        return failed[1].strip()

    def _end_servers(self) -> None:
        """Kill what tests that were ended have left: processes that they start have this checkout in PYTHONPATH."""
        own = os.fsencode(f"PYTHONPATH={self.root}")
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if own in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:  # it has ended, or is another user's
                continue


def look_for(fault: Fault, checkout: Checkout, *, whole: bool) -> Found:
    """Plant a fault, and look for it."""
    found, begin = Found(fault.name, fault.room), time.monotonic()
    sound = (ROOT / fault.file).read_text()

    def finding(tests: Sequence[str], *options: str) -> str:
        deselected: list[str] = []
        while True:
            checkout.write(fault.file, fault.applied(sound))
            failed = checkout.failing(tests, *options, *(f"--deselect={each}" for each in deselected))
            checkout.write(fault.file, sound)
            if not failed or not checkout.failing([failed]):
                return failed
            _show(f"{failed} fails without {fault.name}, too: it is left out")
            deselected.append(failed)

    try:
        asked = (fault.where, _ALL_TESTS) if whole else (fault.where,)
        again = []
        for tests in asked:
            found.quick = found.quick or finding(tests, "--quick")
            if checkout.has_left_out:
                again.append(tests)
        found.all = found.quick
        for tests in again:
            found.all = found.all or finding(tests)
    finally:
        checkout.write(fault.file, sound)
    found.seconds = round(time.monotonic() - begin, 1)
    return found


def _look_for_all(faults: Sequence[Fault], arguments: argparse.Namespace, folder: Path) -> list[Found]:
    checkouts: SimpleQueue[Checkout] = SimpleQueue()
    for number in range(arguments.jobs):
        checkouts.put(Checkout(folder / str(number), arguments.deadline))

    def run(fault: Fault) -> Found:
        checkout = checkouts.get()
        try:
            found = look_for(fault, checkout, whole=arguments.whole)
        finally:
            checkouts.put(checkout)
        _show(f"{found.name:38} {found.seconds:6.0f} s  {found.quick or f'test-all: {found.all or None}'}")
        return found

    with ThreadPoolExecutor(arguments.jobs) as pool:
        return list(pool.map(run, faults))


def _table(found: Sequence[Found]) -> str:
    rows = [("fault", "room", "found by make test", "found by make test-all", "seconds")]
    rows += [
        (item.name, item.room, item.quick or "-", "as well" if item.quick else item.all or "-", f"{item.seconds:.0f}")
        for item in found
    ]
    rows.insert(1, ("---",) * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _show(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description="Look for planted faults by tests.")
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help="this fault; may be repeated")
    rooms = sorted({fault.room for fault in FAULTS})
    parser.add_argument("--room", action="append", choices=rooms, help="the faults of this room; may be repeated")
    parser.add_argument("--whole", action="store_true", help="if the nearest tests find nothing, run all tests")
    parser.add_argument("--jobs", type=int, default=1, help="how many faults to look for at the same time")
    parser.add_argument("--deadline", type=float, help="seconds for each run of pytest (1800; with --whole 14400)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there, too")
    parsed = parser.parse_args(arguments)
    parsed.deadline = parsed.deadline or (14_400.0 if parsed.whole else 1_800.0)  # all tests in one process: two hours
    return parsed


def main(arguments: list[str]) -> int:
    parsed = _parse(arguments)
    asked = {*(parsed.only or ()), *(parsed.room or ())}
    faults = [fault for fault in FAULTS if not asked or asked & {fault.name, fault.room}]
    for fault in faults:
        fault.applied((ROOT / fault.file).read_text())
    with tempfile.TemporaryDirectory(prefix="klog-mutations-") as folder:
        found = _look_for_all(faults, parsed, Path(folder))
    by_quick, by_all = (sum(bool(getattr(item, way)) for item in found) for way in ("quick", "all"))
    _show(f"\n{_table(found)}\n\nof {len(found)} faults make test finds {by_quick}, make test-all {by_all}")
    if parsed.json is not None:
        parsed.json.write_text(json.dumps([asdict(item) for item in found], indent=1) + "\n")
    return int(by_all < len(found) or by_quick < by_all - _MOST_MISSED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
