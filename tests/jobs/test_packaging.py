"""The wheel that `pip install` makes of this project, with a C compiler and without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.jobs.support import ROOT

pytestmark = pytest.mark.slow

_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "pyspark_klog.py", "spark_klog", "tests", "jobs", "notebooks")
_KERNEL = "spark_klog/records/_kernel."
_PROBE = "import pyspark_klog, spark_klog.records.kernels as kernels; kernels.load(); print(kernels.__file__)"


def _wheel(folder: Path, **environment: str) -> tuple[Path, list[str]]:
    """The wheel of a copy of the sources, and the names in it."""
    copy = folder / "sources"
    for name in _SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "_kernel.c", "*.egg-info")
            )
        else:
            copy.mkdir(exist_ok=True)
            shutil.copy2(source, copy / name)
    ran = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--disable-pip-version-check", "-w", folder / "dist", copy],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | environment,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    (wheel,) = (folder / "dist").glob("spark_klog-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return wheel, archive.namelist()


def _check(wheel: Path, names: list[str], folder: Path) -> None:
    """What every wheel has, and that it can be used."""
    assert {"pyspark_klog.py", "spark_klog/__init__.py", "spark_klog/py.typed"} <= set(names)
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "spark_klog").rglob("*.py")}
    assert expected <= set(names)
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"pyspark_klog.py", "spark_klog"}
    unpacked = folder / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    ran = subprocess.run(
        [sys.executable, "-c", _PROBE],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(unpacked)},
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str(unpacked / "spark_klog" / "records" / "kernels.py")


@pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler here")
def test_wheel_has_the_native_kernel(tmp_path: Path) -> None:
    wheel, names = _wheel(tmp_path)
    _check(wheel, names, tmp_path)
    assert [name for name in names if name.startswith(_KERNEL) and name.endswith(".so")]


def test_wheel_without_a_compiler(tmp_path: Path) -> None:
    wheel, names = _wheel(tmp_path, CC="/bin/false")
    _check(wheel, names, tmp_path)
    assert not [name for name in names if name.endswith(".so")]
