"""Names of failed tests: at once, and last of all that a run prints, with the ends of their servers' logs."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

_TESTS = 10
_LOGS = 4
_LINES = 15
_WIDTH = 300
_PHASES = ("setup", "call", "teardown")
_LAST_BYTES = 100_000
#: Logs of servers and processes; a segment of a broker's data has a number for a name.
_LOG = re.compile(r"(?!\d{20}\.).*\.(log|err|out)|stderr|stdout")


class Failures:
    """A plugin of a run's main process; reports of tests that have servers name their folders as `server_dirs`."""

    def __init__(
        self,
        config: pytest.Config,
        shared_dirs: Callable[[str], Iterable[Path]],
        own_dirs: Callable[[str], Iterable[Path]],
    ) -> None:
        """`shared_dirs` returns the folders of the servers that a file's tests shared with others.

        `own_dirs` returns those of a test's or file's own servers, whose process may have crashed.
        """
        self._config = config
        self._shared_dirs, self._own_dirs = shared_dirs, own_dirs
        self._folders: dict[str, list[Path]] = {}  # by the failed test's node id

    @property
    def files(self) -> set[str]:
        """The files of failed tests."""
        return {nodeid.partition("::")[0] for nodeid in self._folders}

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        if report.when in _PHASES:
            self._note(report.nodeid, report.when, map(Path, getattr(report, "server_dirs", ())))
        else:
            names = report.nodeid.partition("::")[0], report.nodeid
            self._note(
                report.nodeid, "its process has ended", [path for name in names for path in self._own_dirs(name)]
            )

    @pytest.hookimpl(trylast=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Each worker reports the same, and the tests of other files run."""
        if report.failed:
            self._note(report.nodeid, "collection", ())

    def _note(self, nodeid: str, when: str, new: Iterable[Path]) -> None:
        is_new = nodeid not in self._folders
        folders = self._folders.setdefault(nodeid, [])
        folders += [path for path in new if path not in folders]
        terminal = self._terminal()
        if is_new and terminal is not None and terminal.verbosity <= 0:
            terminal.ensure_newline()
            if terminal._tw.width_of_current_line:
                terminal.line("")
            terminal.line(f"FAILED {nodeid} ({when})", red=True)

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        """The reasons of skipped tests, with their numbers."""
        reasons = Counter(
            report.longrepr[2].removeprefix("Skipped: ")
            for report in terminalreporter.getreports("skipped")
            if isinstance(report.longrepr, tuple)
        )
        for reason, count in reasons.most_common(20):
            terminalreporter.line(f"SKIPPED {count}: {reason}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, None, None]:
        yield  # the terminal's summary
        terminal = self._terminal()
        if not self._folders or terminal is None:
            return
        shown: set[Path] = set()
        for nodeid, folders in list(self._folders.items())[:_TESTS]:
            folders += [path for path in self._shared_dirs(nodeid.partition("::")[0]) if path not in folders]
            for path in _logs(folders):
                if path not in shown:
                    shown.add(path)
                    terminal.line(f"\n{nodeid}\nthe end of {path}:", bold=True)
                    for line in _end(path):
                        terminal.line(line)
        terminal.line("")
        for nodeid, folders in list(self._folders.items())[:_TESTS]:
            terminal.line(
                " ".join([f"FAILED {nodeid}", *(f"{folder}" for folder in folders if folder.exists())]), red=True
            )
        if len(self._folders) > _TESTS:
            terminal.line(f"and {len(self._folders) - _TESTS} more", red=True)

    def _terminal(self) -> TerminalReporter | None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        return terminal if isinstance(terminal, TerminalReporter) else None


def _logs(folders: Iterable[Path]) -> list[Path]:
    """The newest logs in the folders, the newest last."""
    changed: dict[Path, float] = {}
    for folder, _, names in (found for top in folders for found in os.walk(top)):
        for path in (Path(folder, name) for name in names if _LOG.fullmatch(name)):
            with suppress(OSError):  # servers that still run delete files
                stat = path.stat()
                if stat.st_size:
                    changed[path] = stat.st_mtime
    return sorted(changed, key=lambda path: changed[path])[-_LOGS:]


def _end(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LAST_BYTES))
            return [line[:_WIDTH] for line in file.read().decode(errors="replace").splitlines()[-_LINES:]]
    except OSError:  # it is gone
        return []
