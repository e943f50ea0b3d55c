"""The report card: its figures are those that commands wrote, a run goes on where it stopped, old results say so."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report_card import __main__ as command, results
from tests.report_card.page import PAGE, render
from tests.report_card.parts import Part, Section, parts
from tests.report_card.results import OURS, RESULTS, ROOT, Cell, Figures, Result, load, of_junit, of_mutations, save
from tests.support.papers.pages import tracked
from tests.support.runs.figures import kind_of
from tests.support.waiting import wait_until

_TESTS = """
    import os, signal, subprocess, sys
    import pytest
    from hypothesis import given, settings, strategies as st
    from tests.support.runs.figures import count, note

    @pytest.mark.parametrize("client", ["a_client", "another"])
    @pytest.mark.parametrize("server", ["klog", "4.4.0"])
    def test_counts(server, client):
        count("states", 3)

    class TestInner:
        def test_fails(self):
            raise ValueError("it is | so")

    def test_kills():
        for number in (signal.SIGTERM, signal.SIGKILL):
            process = subprocess.Popen(["sleep", "99"])
            process.send_signal(number)
            process.wait()
            process.kill()  # it has ended: no kill

    @pytest.mark.skip(reason="no such version")
    def test_skipped():
        pass

    @pytest.mark.xfail(reason="it has no such thing")
    def test_known():
        note("what is known")
        raise ValueError

    @settings(max_examples=7, database=None)
    @given(st.integers())
    def test_given(number):
        pass

    @pytest.fixture
    def sleeper():
        process = subprocess.Popen(["sleep", "99"])
        yield
        process.kill()
        process.wait()

    def test_fixture(sleeper):
        pass
"""


_CONFTEST = """
from pathlib import Path
import tests.conftest

tests.conftest._LOGS = Path(__file__).parent / "logs"
"""


@pytest.fixture(scope="module")
def junit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pytest wrote of the tests above."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "tests").mkdir()
    (folder / "tests" / "test_some.py").write_text(textwrap.dedent(_TESTS))
    (folder / "conftest.py").write_text(_CONFTEST)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    words += ["--junitxml", str(folder / "out.xml"), "-o", "junit_family=xunit1", "tests"]
    environment = kept | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    return folder / "out.xml"


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("tests/zookeeper/connector_program.py", "client"),
        ("tests/spark/exactly_once/stream_program.py", "Python driver of Spark"),
        ("spark_klog broker", "broker"),
        ("pyspark.daemon", "Spark's Python worker"),
        ("something", "other process"),
    ],
)
def test_kinds_of_processes(word: str, kind: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()", word], stdin=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            wait_until(lambda: kind_of(process.pid) == kind, kind)
        finally:
            process.kill()
    assert kind_of(process.pid) is None


def test_figures_of_a_run(junit: Path) -> None:
    found = of_junit(junit, r"(tests/\w+\.py|nothing)")
    assert found.rows == {
        "tests/test_some.py": {
            OURS: Cell(5, 2, 1, {"states": 6, "kills: other process": 1, "examples": 7}),
            "4.4.0": Cell(2, 0, 0, {"states": 6}),
        }
    }
    assert found.failures == {
        "tests/test_some.py::TestInner::test_fails": "ValueError: it is | so",
        "tests/test_some.py::test_known": "it has no such thing",
    }
    assert found.notes == ["what is known"]
    assert found.skipped == {"no such version": 1}


def test_rows_by_the_names_of_tests(junit: Path) -> None:
    found = of_junit(junit, r"\[(?:klog|4\.4\.0)-(\w+)\]")
    cell = Cell(1, 0, 0, {"states": 3})
    assert found.rows == {"a_client": {OURS: cell, "4.4.0": cell}, "another": {OURS: cell, "4.4.0": cell}}
    assert len(found.failures) == 2  # of no row, but they failed


def test_files_at_another_server_than_ours(junit: Path) -> None:
    found = of_junit(junit, r"(tests/\w+\.py)", {"tests/test_some.py": "0.10.2.2"})
    assert {server: cell.passed for server, cell in found.rows["tests/test_some.py"].items()} == {
        "0.10.2.2": 5,
        "4.4.0": 2,
    }


def test_parts_name_files_that_they_run() -> None:
    assert all({*part.servers} <= {*part.words} for part in parts().values())


def test_faults_that_were_found(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    entries = [("log-a", "log", "t", "t"), ("log-b", "log", "", "t"), ("wire-c", "wire", "", "")]
    path.write_text(json.dumps([dict(zip(("name", "room", "quick", "all"), entry, strict=True)) for entry in entries]))
    found = of_mutations(path)
    assert found.rows == {
        "log": {OURS: Cell(2, 0, 0, {"make test": 1})},
        "wire": {OURS: Cell(0, 1, 0, {"make test": 0})},
    }
    assert list(found.failures) == ["wire-c"]


class Card:
    """A card of small parts, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.page = folder / "results", folder / "page.md"
        (folder / "test_good.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
        (folder / "test_bad.py").write_text("def test_a(): pass\ndef test_b(): raise ValueError('no')\n")
        self.parts = {name: self.part(name, folder / f"test_{name}.py") for name in ("good", "bad", "missing")}

    def part(self, name: str, file: Path, **variables: str) -> Part:
        words = ("pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={file.parent}", str(file))
        return Part(name, Section.SUITES, words, variables, row=r"(test_\w+\.py)")

    def run(self, *arguments: str) -> int:
        return command.main(arguments, known=self.parts, folder=self.folder, page=self.page)

    @property
    def kept(self) -> dict[str, Result]:
        return load(self.folder)

    @property
    def text(self) -> str:
        return self.page.read_text()


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Card:
    monkeypatch.setattr(command, "OUTPUT", tmp_path / "output")
    monkeypatch.setattr(command, "describe", lambda: {"CPU": "of this test"})
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    # the state of this checkout is not the test's
    monkeypatch.setattr(command, "commit", lambda: ("abc", False))
    monkeypatch.setattr(command, "is_current", lambda result: result.commit == "abc" and result.figures is not None)
    return Card(tmp_path)


def test_parts_are_run_once(card: Card, capsys: pytest.CaptureFixture[str]) -> None:
    """A part that fails does not keep others from running; one that wrote no figures is run again."""
    assert card.run() == 1
    assert [(name, result.exit_code) for name, result in card.kept.items()] == [("bad", 1), ("good", 0), ("missing", 4)]
    assert "**1 of 2**" in card.text
    assert "* **failed**: `test_bad.py::test_b`: ValueError: no" in card.text
    assert "2 of 2" in card.text
    assert "**missing** ended with 4 and wrote no figures: " in card.text
    capsys.readouterr()
    assert card.run() == 1
    assert re.findall(r"^(\w+): python", capsys.readouterr().out, re.MULTILINE) == ["missing"]
    assert card.run("good", "good") == 0
    assert re.findall(r"^(\w+): python", capsys.readouterr().out, re.MULTILINE) == ["good"]


def test_a_killed_run_goes_on_with_the_part_that_it_was_in(card: Card, tmp_path: Path) -> None:
    waits = tmp_path / "test_waits.py"
    wait = tmp_path / "wait"
    waits.write_text(f"import os, time\ndef test_a():\n    while os.path.exists({str(wait)!r}): time.sleep(0.01)\n")
    program = f"""
import sys
from pathlib import Path
from tests.report_card import __main__ as command, test_report_card
folder = Path({str(tmp_path)!r})
card = test_report_card.Card(folder)
card.parts = {{"good": card.parts["good"], "waits": card.part("waits", folder / "test_waits.py")}}
command.OUTPUT, command.commit = folder / "output", lambda: ("abc", False)
command.is_current = lambda result: result.commit == "abc"
command.describe = lambda: {{}}
sys.exit(card.run())
"""
    wait.touch()
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "output" / "waits.log").exists(), "the second part", seconds=60)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert list(card.kept) == ["good"]
    good = card.kept["good"]
    wait.unlink()
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0
    assert card.kept["good"] == good
    assert list(card.kept) == ["good", "waits"]


def test_slices(card: Card, tmp_path: Path) -> None:
    """A slice says so; it does not replace the whole, unless the part is named."""
    (tmp_path / "test_long.py").write_text("import os\ndef test_a(): assert os.environ.get('LONG', '2') == '2'\n")
    card.parts = {"long": card.part("long", tmp_path / "test_long.py", LONG="2")}
    assert card.run() == 0
    assert card.kept["long"].is_slice
    row = next(line for line in card.text.splitlines() if line.startswith("| long |"))
    assert "| slice |" in row
    assert "; whole: `LONG=2 python -m pytest" in row
    assert f": long ({card.kept['long'].seconds:.0f} s).\n" in card.text
    assert card.run("--whole") == 0
    assert "Of these parts a slice" not in card.text
    whole = card.kept["long"]
    assert not whole.is_slice
    assert "| whole |" in card.text
    save(replace(whole, commit="old"), card.folder)
    assert card.run() == 0
    assert card.kept["long"].commit == "old"
    assert card.run("--whole") == 0
    assert card.kept["long"].commit == "abc"
    assert card.run("long") == 0
    assert card.kept["long"].is_slice


def test_a_second_run_is_compared(card: Card, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card.run("good")
    kept = card.kept["good"]
    assert card.run("--again", "good") == 0
    assert "good: the same figures" in capsys.readouterr().out
    (tmp_path / "test_good.py").write_text("def test_a(): pass\ndef test_b(): assert 0\n")
    assert card.run("--again", "good") == 1
    printed = capsys.readouterr().out
    assert "test_good.py: " in printed
    assert "failures: [] before, ['test_good.py::test_b'] now" in printed
    assert card.kept["good"] == kept


def test_the_page_says_what_is_not_of_its_commit(card: Card) -> None:
    assert card.run("--page") == 0
    assert "No part was run yet" in card.text
    assert card.text.count("**not run on this machine**") == 3
    card.run("good")
    card.run("bad")
    good = card.kept["good"]
    save(replace(good, commit="older", date="2000-01-01 00:00", machine={"CPU": "another"}), card.folder)
    card.run("--page")
    assert f"Run 2000-01-01 00:00 to {card.kept['bad'].date} UTC; " in card.text
    row = next(line for line in card.text.splitlines() if line.startswith("| good |"))
    assert "2000-01-01 00:00" in row
    assert ", at older, on another machine: another" in row
    assert card.text.count(", at abc |") == 1
    assert "Not run on this machine: missing." in card.text
    assert f"`{card.parts['missing'].command(is_slice=False)}`" in card.text


def test_kills_of_a_file_that_two_parts_ran_are_counted_once() -> None:
    both = {name: Part(name, Section.KILLS, ("pytest",)) for name in ("all", "some")}
    rows = {"all": Cell(3, 0, 0, {"kills: load": 5}), "some": Cell(1, 0, 0, {"kills: load": 2})}
    kept = {
        name: Result(name, False, "", "abc", False, "", {}, 1, 0, Figures({"tests/test_a.py": {OURS: cell}}))
        for name, cell in rows.items()
    }
    for parts_in_order in (both, dict(reversed(both.items()))):
        text = render(parts_in_order, kept)
        assert text.count("tests/test_a.py)") == 1
        assert "Together: 5 load." in text


def test_unknown_parts_are_refused(card: Card, capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in ((["none"], "no part has the name none; there are good"), (["--again"], "needs the names")):
        with pytest.raises(SystemExit):
            card.run(*words)
        assert text in capsys.readouterr().err


def test_a_change_of_the_code_outdates_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *names, *words], check=True, capture_output=True)

    monkeypatch.setattr(results, "ROOT", tmp_path)
    for name in ("tests/test_a.py", "docs/page.md", "tests/report_card/results/a.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    head, has_changes = results.commit()
    assert not has_changes
    result = Result("a", False, "", head, has_changes, "", {}, 0, 0, Figures())
    for name in ("docs/page.md", "tests/report_card/results/a.json"):
        (tmp_path / name).write_text("changed")
        git("commit", "-qam", "no code")
        assert results.is_current(result)
    (tmp_path / "tests/test_a.py").write_text("changed")
    assert results.commit()[1]
    assert not results.is_current(result)
    git("commit", "-qam", "code")
    assert not results.is_current(result)
    assert not results.is_current(replace(result, commit="0123456789"))  # of a history that is not here


def test_the_page_is_made_of_the_kept_results() -> None:
    assert PAGE.read_text() == render(parts(), load()), "python -m tests.report_card --page"
    assert {path.stem for path in RESULTS.glob("*.json")} <= {*parts()}


def test_parts_name_files_that_are_there() -> None:
    names = [word for part in parts().values() for word in part.words if word.startswith("tests/")]
    assert [name for name in names if not (ROOT / name).exists()] == []
    assert len({part.command(is_slice=False) for part in parts().values()}) == len(parts())


def test_links_of_the_pages_lead_into_this_checkout() -> None:
    """To files of the sources by their address, as the pages are read on a site, too."""
    for page in (PAGE, ROOT / "docs" / "explanation" / "correctness.md"):
        links = re.findall(
            r"\(https://github\.com/spark-klog/spark-klog/(?:blob|tree)/main/([^)#]+)\)", page.read_text()
        )
        assert links or page == PAGE  # it has none before the first result
        assert [link for link in links if (ROOT / link).resolve() not in tracked()] == []
