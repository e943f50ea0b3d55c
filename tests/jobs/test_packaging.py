"""The wheel that `pip install` builds, with and without a C compiler."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import spark_klog
from tests.jobs.support import ROOT
from tests.support.packages.wheel import build_wheel

_KERNELS = (
    "spark_klog/records/kernels/_kernel.",
    "spark_klog/schemas/avro/_avro.",
    "spark_klog/schemas/protobuf/_protobuf.",
)
_SECONDS = 240
_METADATA = """
import json, sys, spark_klog
from importlib.metadata import distributions
(found,) = distributions(name="spark-klog", path=[path for path in sys.path if path.startswith(sys.prefix)])
points = sorted([point.group, point.name, point.value] for point in found.entry_points)
metadata = found.metadata
print(json.dumps({"version": found.version, "file": spark_klog.__file__, "license": metadata["License-Expression"],
    "classifiers": metadata.get_all("Classifier"), "requires": found.requires, "entry_points": points}))
"""
_PROBE = "import pyspark_klog, spark_klog.records.kernels as kernels; kernels.load(); print(kernels.__file__)"


_CLASSIFIERS = ("Framework :: Apache Spark", "Typing :: Typed", "Programming Language :: Python :: 3.10")


def _check(wheel: Path, folder: Path) -> list[str]:
    """Check the contents of a wheel and that it can be imported; return the names of its files."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"pyspark_klog.py", "spark_klog/__init__.py", "spark_klog/py.typed"} <= set(names)
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "spark_klog").rglob("*.py")}
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "spark_klog" / "ui" / "static").iterdir()}
    assert expected | {"spark_klog/metrics/dashboard.json"} <= set(names)
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
    assert ran.stdout.strip() == str(unpacked / "spark_klog" / "records" / "kernels" / "__init__.py")
    return names


@pytest.mark.test_all("long")  # make test installs the checkout with the kernels
@pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler here")
def test_wheel_has_the_native_kernels(wheel: Path, tmp_path: Path) -> None:
    names = _check(wheel, tmp_path)
    for kernel in _KERNELS:
        assert [name for name in names if name.startswith(kernel) and name.endswith(".so")]


@pytest.mark.test_all("long")
def test_wheel_without_a_compiler(tmp_path: Path) -> None:
    names = _check(build_wheel(tmp_path, CC="/bin/false"), tmp_path)
    assert not [name for name in names if name.endswith(".so")]


@pytest.mark.test_all("long")
def test_the_wheel_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """pip installs the wheel without a compiler on PATH: the commands run, the kernel loads, the metadata is right."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=_SECONDS)
    python, klog = folder / "bin" / "python", folder / "bin" / "klog"
    environment = {"PATH": str(folder / "bin"), "HOME": str(tmp_path), "LANG": "C.UTF-8"}

    def run(*command: str | Path) -> str:
        ran = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=_SECONDS, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", wheel]
    run(sys.executable, "-m", "pip", "--python", python, *install)
    # use the dependencies of the test environment
    (site,) = folder.glob("lib/python*/site-packages")
    dependencies = site / "dependencies.pth"
    dependencies.write_text(sysconfig.get_paths()["purelib"] + "\n")
    kernel = "native" if shutil.which(os.environ.get("CC", "cc")) else "reference"
    said = run(klog, "version")
    assert said.startswith(f"klog {spark_klog.__version__}, Python {platform.python_version()}, pyspark ")
    assert said.endswith(f", kernel {kernel}\n")
    assert "Run a broker" in run(klog, "--help")
    found = json.loads(run(python, "-c", _METADATA))
    assert found["version"] == spark_klog.__version__
    assert found["file"].startswith(str(site))
    assert found["license"] == "Apache-2.0"
    assert set(_CLASSIFIERS) <= set(found["classifiers"])
    assert found["entry_points"] == [
        ["console_scripts", "klog", "spark_klog.cli.main:main"],
        ["pytest11", "klog", "spark_klog.pytest_plugin"],
    ]
    assert any(text.startswith("pyspark[sql]") and ">=4.0" in text for text in found["requires"])
    base = [text for text in found["requires"] if "extra ==" not in text]
    assert not [text for text in base if text.startswith(("pyspark", "pandas", "pyarrow", "numpy", "zstandard"))]
