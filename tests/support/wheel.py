"""Build the project's wheel as `pip install` does."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .registries import download

_ROOT = Path(__file__).parent.parent.parent
_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "pyspark_klog.py", "spark_klog", "tests", "jobs", "notebooks")
_SECONDS = 500


def copied_checkout(folder: Path) -> Path:
    """Copy the package's sources to a checkout in `folder`, without a native kernel."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "_kernel.c", "_avro.c", "_protobuf.c")
    return shutil.copytree(_ROOT / "spark_klog", folder / "checkout" / "spark_klog", ignore=ignored).parent


def build_wheel(folder: Path, python: Path | str = sys.executable, **environment: str) -> Path:
    """Copy the sources to `folder` and build a wheel there for `python`; `environment` adds variables."""
    copy = folder / "sources"
    folder.mkdir(parents=True, exist_ok=True)
    for name in _SOURCES:
        source = _ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so", "_kernel.c", "_avro.c", "_protobuf.c", "*.egg-info")
            shutil.copytree(source, copy / name, ignore=ignored)
        else:
            copy.mkdir(exist_ok=True)
            shutil.copy2(source, copy / name)
    ran = subprocess.run(
        [python, "-m", "pip", "wheel", "--no-deps", "--disable-pip-version-check", "-w", folder / "dist", copy],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | environment,
        timeout=_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    (wheel,) = (folder / "dist").glob("spark_klog-*.whl")
    return wheel


def wheel_of_run(root: Path) -> Path:
    """The wheel of this checkout; the first process that calls this builds it. `root` is the test run's folder."""
    folder = root / "wheel"
    with (root / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            building = root / "wheel-building"
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            build_wheel(building, CFLAGS="-O0")  # compiles faster, which is enough here
            building.rename(folder)
    (wheel,) = (folder / "dist").glob("spark_klog-*.whl")
    return wheel


def pip_of(python: Path) -> list[str]:
    """A pip that installs for another Python. With the checkout in PYTHONPATH it would take that for installed."""
    return ["env", "-u", "PYTHONPATH", sys.executable, "-m", "pip", "--python", str(python)]


def fresh_environment(folder: Path, *packages: str) -> Path:
    """The Python of a virtual environment in `folder`, made if it is not there, with these packages and no pip."""
    python = folder / "environment" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", python.parents[1]], check=True, timeout=_SECONDS)
    command = [*pip_of(python), "install", "--quiet", *packages]
    download(packages[0], [*command, "--disable-pip-version-check"], seconds=_SECONDS)
    return python


def site_packages(python: Path) -> Path:
    """The folder of an environment's packages."""
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    return site
