"""Every notebook, run from top to bottom by the interpreter that runs the tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.runs.soak import in_soak

NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a kernel that runs this interpreter, whatever kernels the machine has."""
    folder = tmp_path / "jupyter" / "kernels" / "klog-tests"
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "tests", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    return "klog-tests"


@pytest.fixture
def run(kernel: str, tmp_path: Path) -> Callable[[str], str]:
    """Run a notebook, which draws one picture, and return the text that it prints."""

    def run_one(name: str) -> str:
        notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
        folder = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(notebook, timeout=300, kernel_name=kernel, resources=folder).execute()
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
        return "".join(output.get("text", "") for output in outputs if output.output_type == "stream")

    return run_one


@pytest.mark.test_all("long")
def test_explore_a_topic(run: Callable[[str], str]) -> None:
    text = run("01-explore-a-topic")
    assert "5000 clicks\n" in text
    assert "5000 clicks counted\n" in text
    assert "6000 clicks counted\n" in text


@pytest.mark.test_all("long")
@in_soak
def test_follow_a_stream(run: Callable[[str], str]) -> None:
    text = run("02-follow-a-stream")
    assert "20000 rows in 5 micro-batches\n" in text
    assert 'klog_query_lag_records{query="readings",source="0",topic="readings",partition="0"}' in text


@pytest.mark.test_all("long")
@in_soak
def test_exactly_once_through_a_kill(run: Callable[[str], str]) -> None:
    text = run("03-exactly-once-through-a-kill")
    assert "killed: True\n" in text
    assert "none twice: True\n" in text
    assert "exit code 0\n20000 records, 20000 different ones\nexactly once: True\n" in text


@pytest.mark.test_all("long")
@in_soak
def test_replay_and_audit(run: Callable[[str], str]) -> None:
    text = run("04-replay-and-audit")
    for partition in (0, 1):
        assert f"clicks-{partition}: offsets 0 to 10000, 10000 records\n" in text
    assert "missing: []\n" in text
    assert "6000 replayed, [] missing\n" in text
    assert "the same records: True\n" in text


@pytest.mark.test_all("long")
@in_soak
def test_log_directories(run: Callable[[str], str]) -> None:
    text = run("05-log-directories")
    assert "5000 old records, 15000 new records\n" in text
    assert "upgraded: 5000 the same values: True\n" in text


@pytest.mark.test_all("long")
@in_soak
def test_rows_by_schemas(run: Callable[[str], str]) -> None:
    text = run("06-rows-by-schemas")
    assert "version 1 id 1\n" in text
    assert "versions [1, 2] {None: 10000, 'WELCOME': 500}\n" in text
    assert "by version 1: ['id', 'customer', 'total']\n" in text
    assert "refused: True\n" in text
    assert "10500 rows, and a letter: orders 0 the record at offset " in text


@pytest.mark.test_all("long")
def test_topic_to_delta(run: Callable[[str], str]) -> None:
    text = run("07-topic-to-delta")
    assert "10000 clicks in 24 hours; the most on [('/products/" in text
    assert "12500 clicks, each once: True\n" in text
    assert "run ends at {'0': 5000, '1': 5000}\nrun ends at {'0': 6250, '1': 6250}\n" in text


def test_notebooks_are_committed_without_outputs() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        assert not any(cell.get("outputs") for cell in notebook.cells), path
