"""Every notebook, run from top to bottom by the interpreter that runs the tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a kernel that is this interpreter, whatever kernels the machine has."""
    folder = tmp_path / "jupyter" / "kernels" / "klog-tests"
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "tests", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    return "klog-tests"


def _run(path: Path, kernel: str, cwd: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name=kernel, resources={"metadata": {"path": str(cwd)}}).execute()
    return notebook


def _text(notebook: nbformat.NotebookNode) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs if output.output_type == "stream")


def _pictures(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_explore_a_topic(kernel: str, tmp_path: Path) -> None:
    notebook = _run(NOTEBOOKS / "01-explore-a-topic.ipynb", kernel, tmp_path)
    text = _text(notebook)
    assert "5000 clicks\n" in text
    assert "5000 clicks counted\n" in text
    assert "6000 clicks counted\n" in text
    assert _pictures(notebook) == 1


def test_follow_a_stream(kernel: str, tmp_path: Path) -> None:
    notebook = _run(NOTEBOOKS / "02-follow-a-stream.ipynb", kernel, tmp_path)
    text = _text(notebook)
    assert "20000 rows in 5 micro-batches\n" in text
    assert 'klog_query_lag_records{query="readings",source="0",topic="readings",partition="0"}' in text
    assert _pictures(notebook) == 1


def test_exactly_once_through_a_kill(kernel: str, tmp_path: Path) -> None:
    notebook = _run(NOTEBOOKS / "03-exactly-once-through-a-kill.ipynb", kernel, tmp_path)
    text = _text(notebook)
    assert "killed: True\n" in text
    assert "none twice: True\n" in text
    assert "exit code 0\n20000 records, 20000 different ones\nexactly once: True\n" in text
    assert _pictures(notebook) == 1


def test_replay_and_audit(kernel: str, tmp_path: Path) -> None:
    notebook = _run(NOTEBOOKS / "04-replay-and-audit.ipynb", kernel, tmp_path)
    text = _text(notebook)
    for partition in (0, 1):
        assert f"clicks-{partition}: offsets 0 to 10000, 10000 records\n" in text
    assert "missing: []\n" in text
    assert "6000 replayed, [] missing\n" in text
    assert "the same records: True\n" in text
    assert _pictures(notebook) == 1


def test_log_directories(kernel: str, tmp_path: Path) -> None:
    notebook = _run(NOTEBOOKS / "05-log-directories.ipynb", kernel, tmp_path)
    text = _text(notebook)
    assert "5000 old records, 15000 new records\n" in text
    assert "upgraded: 5000 the same values: True\n" in text
    assert _pictures(notebook) == 1


def test_notebooks_are_committed_without_outputs() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        assert not any(cell.get("outputs") for cell in notebook.cells), path
