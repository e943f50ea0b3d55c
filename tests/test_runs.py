"""Runs with this suite's conftest: the order of files, servers for all workers, and what is said of a failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.support.processes import kill, tree_of
from tests.support.runs import schedule
from tests.support.runs.schedule import LongestFirst
from tests.support.runs.soak import commands
from tests.support.waiting import wait_until

_ROOT = Path(__file__).parent.parent
_CONFTEST = """
from pathlib import Path
import tests.conftest
from tests.support.servers import kafka, shared_kafka

tests.conftest._LOGS = Path(__file__).parent / "logs"

class Stub(kafka.Process):
    def __init__(self, version, folder, settings):
        super().__init__("kafka", folder)
        self.mark = f"{folder}/mark"

    def __enter__(self):
        self.start()
        return self

    def close(self):
        self.stop()

    def _command(self):
        return ["bash", "-c", "seq -f 'line %g' 99; touch $0; exec tail -f $0", self.mark]

    def _is_ready(self):
        return "line 99" in self.output.read_text()

shared_kafka.Kafka = Stub
"""
_TESTS = """
import os, pathlib, time

def test_shared(shared_kafkas):
    mark = shared_kafkas.get("any").mark
    with open("marks", "a") as file:
        file.write(mark + "\\n")
    until = time.monotonic() + 60
    while len(pathlib.Path("marks").read_text().split()) < 2 and time.monotonic() < until:
        time.sleep(0.01)
"""
_FAILS = """
import pytest

def test_fails(server_dir):
    (server_dir / "broker.log").write_text("".join(f"line {n}\\n" for n in range(50)))
    (server_dir / f"{0:020}.log").write_text("records")
    assert 0

@pytest.fixture
def broken(shared_kafkas):
    shared_kafkas.get("any")
    raise OSError

def test_error(broken):
    pass

@pytest.mark.parametrize("number", range(3))
def test_skipped(number):
    pytest.skip("there is no moon")
"""

_ENDS = """
import os
import pytest

@pytest.fixture
def broker(server_dir):
    yield
    (server_dir / "broker.log").write_text("it does not stop\\n")
    raise OSError

def test_teardown(broker):
    pass

def test_end(server_dir):
    (server_dir / "broker.log").write_text("the last words\\n")
    os._exit(1)

def test_after(server_dir):
    pass
"""


def test_reasons_not_to_be_in_make_test() -> None:
    """CONTRIBUTING.md explains the words."""
    table = re.findall(r"^\| `([a-z]+)` \|", (_ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    used = {
        f"{path.relative_to(_ROOT)}: {reason}"
        for path in (_ROOT / "tests").rglob("*.py")
        for reason in re.findall(r"mark\.test_all\b(.*)", path.read_text())
        if not reason.startswith(tuple(f'("{word}")' for word in table))
    }
    assert used == set()


@pytest.mark.parametrize(("target", "names"), [("soak", {"SOAK", "in_soak"}), ("matrix", {"in_matrix"})])
def test_what_test_all_cuts_short_is_whole_elsewhere(target: str, names: set[str]) -> None:
    """The Makefile runs all of each file that asks for the target's variable."""
    whole = {word for line in commands(target) if " -k " not in line for word in line.split()}
    users = {
        path.relative_to(_ROOT)
        for path in (_ROOT / "tests").rglob("test_*.py")
        for imported in re.findall(r"^from tests\.support\.runs\.soak import (.+)$", path.read_text(), re.MULTILINE)
        if names & set(imported.split(", "))
    }
    assert users
    assert [user for user in users if not whole & {str(user), *map(str, user.parents)}] == []


def _pytest(folder: Path, files: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    for name, text in {"conftest.py": _CONFTEST, **files}.items():
        (folder / name).write_text(text)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _stubs(folder: Path) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if f"{folder}/" in str(process.info["cmdline"] or "")
    ]


def test_a_server_for_all_workers(tmp_path: Path) -> None:
    files = {"test_a.py": _TESTS, "test_b.py": _TESTS}
    run = _pytest(tmp_path, files, "-q", "-n2", "--dist=loadfile")
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    assert len(set((tmp_path / "marks").read_text().split())) == 1
    assert _stubs(tmp_path / "logs") == []
    assert list(tmp_path.glob("logs/*")) == []  # no test failed


def test_no_server_outlives_a_run(tmp_path: Path) -> None:
    run = _pytest(tmp_path, {"test_a.py": _TESTS}, "-q", "-n1", "--dist=loadfile")
    try:
        wait_until((tmp_path / "marks").exists, seconds=60)
        assert _stubs(tmp_path / "logs") != []
    finally:
        run.kill()
        run.wait(timeout=60)
        assert run.stdout is not None
        run.stdout.close()
    wait_until(lambda: _stubs(tmp_path / "logs") == [], seconds=60)


def test_a_failure_is_said_last_with_its_servers_log(tmp_path: Path) -> None:
    run = _pytest(tmp_path, {"test_a.py": _FAILS}, "-q", "-n1", "--dist=loadfile")
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 1, output
    first, last = re.split(r"\n1 failed, 3 skipped, .*1 error", output)
    assert "FAILED test_a.py::test_fails (call)\n" in first
    assert "FAILED test_a.py::test_error (setup)\n" in first
    assert "SKIPPED 3: there is no moon\n" in first
    lines = last.splitlines()
    assert "line 49" in lines
    assert "line 34" not in lines
    assert "line 99" in lines
    assert "records" not in last
    named = [line.split() for line in lines[-2:]]
    assert [words[:2] for words in named] == [["FAILED", "test_a.py::test_fails"], ["FAILED", "test_a.py::test_error"]]
    assert (Path(named[0][2]) / "broker.log").exists()
    assert (Path(named[1][2]) / "kafka.log").exists()


def test_failures_beside_a_test_are_said_last_too(tmp_path: Path) -> None:
    """Of a fixture's end, of a process, which ends once, and of a collection."""
    files = {"test_a.py": _ENDS, "test_b.py": "import nothing_of_this_name"}
    output, _ = _pytest(tmp_path, files, "-q", "-n1", "--dist=loadfile").communicate(timeout=120)
    first, last = re.split(r"\n1 failed, 2 passed, .*2 errors", output)
    assert "FAILED test_a.py::test_end (its process has ended)\n" in first
    lines = last.splitlines()
    assert "it does not stop" in lines
    assert "the last words" in lines
    named = [line.split() for line in lines[-3:]]
    assert {words[1] for words in named} == {"test_a.py::test_teardown", "test_a.py::test_end", "test_b.py"}
    kept = {Path(words[2]) for words in named if len(words) > 2}
    assert kept == set((tmp_path / "logs").iterdir())
    assert len(kept) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["test_a.py", "test_b.py"], "not found: test_b.py"), (["--quick"], "`make test-all` runs")],
    ids=["no such file", "left out"],
)
def test_why_nothing_has_run(tmp_path: Path, arguments: list[str], said: str) -> None:
    files = {"test_a.py": 'import pytest\n@pytest.mark.test_all("kill")\ndef test_a(): pass\n'}
    output, _ = _pytest(tmp_path, files, "-q", "-n1", "--dist=loadfile", *arguments).communicate(timeout=120)
    assert said in output


class _Worker:
    """A worker of pytest-xdist that runs a file at a time."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id="worker")
        self.shutting_down = False
        self.given: list[int] = []

    def send_runtest_some(self, indexes: list[int]) -> None:
        self.given += indexes

    def shutdown(self) -> None:
        self.shutting_down = True


def _schedule(seconds: dict[str, int], workers: int, quick: bool = False) -> list[list[str]]:
    """The files that each worker runs, if they take these seconds."""
    config: Any = SimpleNamespace(
        getvalue=lambda name: ["popen"] * workers,
        getoption={"quick": quick}.__getitem__,
        option=SimpleNamespace(loadscopereorder=False),
    )
    made = LongestFirst(config)
    made._seconds = seconds
    made._with_spark = {file: "spark" in file for file in seconds}
    tests = [f"{file}::test_{number}" for file in seconds for number in range(3)]
    nodes: list[Any] = [_Worker() for _ in range(workers)]
    for node in nodes:
        made.add_node(node)
    for node in nodes:
        made.add_node_collection(node, tests)
    made.schedule()
    clocks, done = dict.fromkeys(nodes, 0.0), dict.fromkeys(nodes, 0)
    while running := [node for node in nodes if done[node] < len(node.given)]:
        node = min(running, key=lambda node: clocks[node])
        index = node.given[done[node]]
        clocks[node] += seconds[tests[index].partition("::")[0]] / 3
        done[node] += 1
        made.mark_test_complete(node, index)
    assert made.tests_finished
    assert sorted(index for node in nodes for index in node.given) == list(range(len(tests)))
    return [list(dict.fromkeys(tests[index].partition("::")[0] for index in node.given)) for node in nodes]


def test_the_longest_files_first_and_spark_in_few_workers() -> None:
    seconds = {"a": 30, "spark-a": 40, "b": 60, "spark-b": 70, "c": 50, "spark-c": 20, "d": 45}
    assert _schedule(seconds, 4) == [["spark-b"], ["spark-a", "spark-c"], ["b", "a"], ["c", "d"]]
    assert _schedule(seconds, 4, quick=True) == [["spark-b", "spark-a", "spark-c"], ["b"], ["c"], ["d", "a"]]


def test_spark_in_more_workers_if_nothing_else_is_left() -> None:
    seconds = {f"spark-{number}": 60 for number in range(16)}
    assert all(_schedule(seconds, 4))
    assert _schedule({"spark-a": 60, "spark-b": 50, "spark-c": 40}, 3) == [["spark-a"], ["spark-b", "spark-c"], []]


def test_recorded_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that did not run keep their record, unless they are gone."""
    monkeypatch.setattr(schedule, "_SECONDS", tmp_path / "seconds.json")
    schedule._SECONDS.write_text(
        '{"tests/test_embedded.py": 7, "tests/test_gone.py": 8, "tests/conftest.py": 9, "tests/test_runs.py": 3}'
    )
    recorder = schedule.Recorder()
    for nodeid, seconds in (
        ("test_runs.py::test_a", 1.6),
        ("conftest.py::test_a", 1.2),
        ("test_runs.py::test_b", 8),
    ):
        report: Any = SimpleNamespace(nodeid=f"tests/{nodeid}", duration=seconds)
        recorder.pytest_runtest_logreport(report)
    recorder.pytest_sessionfinish(pytest.ExitCode.INTERRUPTED)
    assert schedule.recorded_seconds()["tests/test_runs.py"] == 3
    recorder.pytest_sessionfinish(pytest.ExitCode.OK)
    assert list(schedule.recorded_seconds().items()) == [("tests/test_runs.py", 10), ("tests/test_embedded.py", 7)]


def test_the_processes_of_a_program_that_has_ended() -> None:
    """Its pid may be another process's by then, here this one's: nobody kills that."""
    program = subprocess.Popen(["sleep", "60"])
    assert [process.pid for process in tree_of(program)] == [program.pid]
    assert kill(tree_of(program)) == 1
    program.wait(30)
    program.pid = os.getpid()
    assert tree_of(program) == []


@pytest.mark.skipif(sys.platform != "linux", reason="others count children that are waited for only")
def test_processor_seconds_of_processes_that_nobody_waits_for() -> None:
    work = "import time\nwhile time.process_time() < 1: pass"
    leaves = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); sys.exit(3)"
    command = [sys.executable, "-m", "tests.support.runs.processor_seconds", sys.executable, "-c", leaves, work]
    result = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 3
    seconds, text = result.stdout.strip().split(" ", 1)
    assert text == "processor seconds of all processes"
    assert 1 <= int(seconds) <= 3
