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
from tests.support.wheel import build_wheel

pytestmark = pytest.mark.slow

_KERNEL = "spark_klog/records/kernels/_kernel."
_PROBE = "import pyspark_klog, spark_klog.records.kernels as kernels; kernels.load(); print(kernels.__file__)"


def _check(wheel: Path, folder: Path) -> list[str]:
    """What every wheel has, and that it can be used; the names in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
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
    assert ran.stdout.strip() == str(unpacked / "spark_klog" / "records" / "kernels" / "__init__.py")
    return names


@pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler here")
def test_wheel_has_the_native_kernel(wheel: Path, tmp_path: Path) -> None:
    names = _check(wheel, tmp_path)
    assert [name for name in names if name.startswith(_KERNEL) and name.endswith(".so")]


def test_wheel_without_a_compiler(tmp_path: Path) -> None:
    names = _check(build_wheel(tmp_path, CC="/bin/false"), tmp_path)
    assert not [name for name in names if name.endswith(".so")]
