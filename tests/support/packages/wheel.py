"""Build the project's wheel as `pip install` does."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.packages.registries import download

_ROOT = Path(__file__).parents[3]
_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "pyspark_klog.py", "spark_klog", "tests", "jobs", "notebooks")
#: What Cython makes.
_C_FILES = ("_kernel.c", "_avro.c", "_protobuf.c")
_SECONDS = 500


def copied_checkout(folder: Path) -> Path:
    """Copy the package's sources to a checkout in `folder`, without a native kernel."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", *_C_FILES)
    return shutil.copytree(_ROOT / "spark_klog", folder / "checkout" / "spark_klog", ignore=ignored).parent


def build_wheel(
    folder: Path, python: Path | str = sys.executable, *, is_quick: bool = False, **environment: str
) -> Path:
    """Copy the sources to `folder` and build a wheel there for `python`; `environment` adds variables.

    A quick build uses this environment's setuptools and Cython, and the C files that are there and not older than
    their sources.
    """
    copy = folder / "sources"
    folder.mkdir(parents=True, exist_ok=True)
    for name in _SOURCES:
        source = _ROOT / name
        if source.is_dir():
            ignored = ["__pycache__", "*.so", "*.egg-info", *(() if is_quick else _C_FILES)]
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns(*ignored))
        else:
            copy.mkdir(exist_ok=True)
            shutil.copy2(source, copy / name)
    options = ["--no-deps", "--disable-pip-version-check", *(["--no-build-isolation"] if is_quick else [])]
    ran = subprocess.run(
        [python, "-m", "pip", "wheel", *options, "-w", folder / "dist", copy],
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
            # `make test` itself begins with an isolated build
            build_wheel(building, is_quick=True, CFLAGS="-O0")
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
