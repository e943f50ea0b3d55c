"""Tables, and the line that is drawn over."""

from __future__ import annotations

import os
import re
from io import StringIO

import pytest

from spark_klog.cli import output
from spark_klog.cli.output import Bar, Counter, StatusLine, fitting, print_table, table_lines


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def _stderr(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    """A terminal as stderr. (No fixture: pytest sets sys.stderr after those.)"""
    made = _Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", made)
    monkeypatch.setattr(output.shutil, "get_terminal_size", lambda: os.terminal_size((40, 10)))
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
