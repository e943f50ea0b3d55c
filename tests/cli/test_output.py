"""Tables, and the line that is drawn over."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from contextlib import ExitStack
from io import StringIO

import pytest

from spark_klog.cli import output
from spark_klog.cli.jobs.running import complain
from spark_klog.cli.output import (
    Bar,
    Counter,
    StatusLine,
    duration_text,
    fitting,
    print_table,
    size_text,
    table_lines,
    terminal_size,
)


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def _stderr(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    """A terminal as stderr. (No fixture: pytest sets sys.stderr after those.)"""
    made = _Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", made)
    monkeypatch.setattr(output, "terminal_size", lambda stream: os.terminal_size((40, 10)))
    monkeypatch.setattr(output, "_DRAWN_EVERY", 0.0)
    return made


def test_columns_are_as_wide_as_their_cells() -> None:
    rows = [("clicks", "1", "-"), ("日本", "1,000", "x"), ("e\u0301", "20", "")]
    assert table_lines(("topic", "lag", "gaps"), rows, right=("lag",)) == [
        "topic     lag  gaps",
        "clicks      1  -",
        "日本    1,000  x",
        "e\u0301          20",
    ]
    assert table_lines(("topic", "lag"), []) == ["topic  lag"]


def test_a_table_in_a_pipe_has_no_colours_and_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("topic", "lag"), [("x" * 300, "5"), ("a\nb\x1b[31m", "7")])
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["topic", "lag"]
    assert first == "x" * 300 + "  5"
    assert second.split() == ["a\\nb\\x1b[31m", "7"]


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [("abc", 3, "abc"), ("abcd", 3, "abc"), ("日本", 3, "日"), ("", 0, "")],
)
def test_what_fits_a_terminal(text: str, width: int, expected: str) -> None:
    assert fitting(text, width) == expected


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _stderr(monkeypatch)
    with Bar("x" * 30, 1000) as bar:
        bar.update(0)
        bar.update(500)
        bar.erase()
        terminal.write("a message\n")
        bar.update(2000)
    drawn = terminal.getvalue()
    assert re.sub("\x1b\\[K", "", drawn).split("\r")[-1] == "", "erased at the end"
    assert "\r\x1b[Ka message\n" in drawn
    assert all(len(line) < 40 for line in drawn.split("\r\x1b[K"))


def test_a_bar_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _stderr(monkeypatch)
    bar = Bar("in", 1000)
    bar.update(500)
    assert f"in [{'#' * 12}{'-' * 12}] 500/1,0" in terminal.getvalue()
    Bar("found", None).update(1234)
    assert terminal.getvalue().endswith("found 1,234")


def test_nothing_is_drawn_without_a_terminal_or_if_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _stderr(monkeypatch)
    with Bar("records", 10, is_quiet=True) as bar, StatusLine(StringIO()) as status:
        bar.update(5)
        status.show("connecting")
        assert not bar.is_shown
        assert not status.is_shown
    monkeypatch.setenv("TERM", "dumb")
    Bar("records", 10).update(5)
    assert terminal.getvalue() == ""


def test_a_counter_with_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _stderr(monkeypatch)
    monkeypatch.setattr(output, "_BAR_AFTER", -1.0)
    monkeypatch.setattr("sys.stdout", _Terminal())
    with Counter(True, 10) as counter:
        counter.add(5, 50)
    assert "5/10" not in terminal.getvalue(), "stdout is a terminal: records appear there"
    monkeypatch.setattr("sys.stdout", StringIO())
    with Counter(True, 10) as counter:
        counter.add(5, 50)
    assert "5/10" in terminal.getvalue()
    last = terminal.getvalue().splitlines()[-1]
    assert last.rpartition("\x1b[K")[2].startswith("5 records, 50 bytes in ")


def test_the_width_is_that_of_the_terminal_that_is_drawn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """stdout may be a file, or another terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 10, 30, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(output, "_DRAWN_EVERY", 0.0)
    with ExitStack() as opened:
        stderr = opened.enter_context(open(theirs, "w"))
        opened.callback(os.close, ours)
        with monkeypatch.context() as patched:
            patched.setattr("sys.stderr", stderr)
            Bar("x" * 50, 10).update(5)
        assert os.read(ours, 4096) == b"\r\x1b[K" + b"x" * 29
        assert terminal_size(stderr) == (30, 10)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, bytes(8))
        assert terminal_size(stderr) == (80, 24), "a terminal that does not say"
    assert terminal_size(StringIO()) == (80, 24)


@pytest.mark.parametrize(
    ("name", "value", "is_plain"), [("TERM", "dumb", True), ("NO_COLOR", "1", True), ("NO_COLOR", "", False)]
)
def test_styles(monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_plain: bool) -> None:
    """Neither a dumb terminal nor one whose user has set NO_COLOR (no-color.org) gets escape sequences."""
    for variable in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, value)
    terminal = _Terminal()
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", terminal)
        patched.setattr("sys.stderr", terminal)
        print_table(("topic", "lag"), [("clicks", "5")])
        complain("load", "no topic")
    assert ("\x1b" not in terminal.getvalue()) == is_plain
    assert re.sub("\x1b\\[[0-9]*m", "", terminal.getvalue()) == "topic   lag\nclicks  5\nload: no topic\n"


def test_times_and_sizes() -> None:
    assert [duration_text(ms) for ms in (0, 59_900, 65_000, 3_865_000, 2 * 86_400_000)] == [
        *("0.0s", "59.9s", "1m05s", "1h04m", "2d00h")
    ]
    assert [size_text(size) for size in (0, 999, 1000, 999_949, 999_950, 1_500_000, 1 << 63)] == [
        *("0 B", "999 B", "1.0 kB", "999.9 kB", "1.0 MB", "1.5 MB", "9.2 EB")
    ]


def test_a_bar_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _stderr(monkeypatch)
    bar = Bar("", 4_000_000, is_size=True)
    monkeypatch.setattr(bar, "_began", bar._began - 3865)
    monkeypatch.setattr(output, "_BAR_CELLS", 4)
    bar.update(2_000_000)
    assert terminal.getvalue().endswith(" [##--] 2.0 MB/4.0 MB  1h04m left")
