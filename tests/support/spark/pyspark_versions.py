"""Virtual environments with other versions of pyspark than the tests' own, in the cache outside the checkout.

They contain the project's dependencies but not the project: callers add it with `PYTHONPATH`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from tests.support.packages import pythons

log = logging.getLogger(__name__)

#: The newest version of pyspark whose Kafka connector is on Maven.
WITH_CONNECTOR = "4.1.1"
#: (Python, pyspark) pairs of `make matrix`, in addition to `oldest` and `with_connector`.
_NEWER = (("3.12", "4.1.4"), ("3.12", "4.2.1"), ("3.13", "4.3.0"), ("3.14", "4.3.0"))
_ROOT = Path(__file__).parents[3]


def with_connector() -> Path:
    """Python of an environment with pyspark `WITH_CONNECTOR`, pandas 2 and the newest other dependencies."""
    packages = _with_pyspark(WITH_CONNECTOR, "pandas<3")
    return pythons.environment(f"pyspark-{WITH_CONNECTOR}-klog", sys.executable, packages)


def newer() -> tuple[list[Path], list[str]]:
    """Pythons of environments with newer pysparks and the newest other dependencies; and the names of skipped pairs.

    A pair is skipped if its Python is not to be had and an earlier pair has its pyspark: with a substitute Python it
    would test nothing new.
    """
    found, left_out, pysparks = [], [], set[str]()
    for version, pyspark in _NEWER:
        python = pythons.find(version)
        if not python and pyspark in pysparks:
            left_out.append(f"pyspark-{pyspark}-python{version}")
            continue
        pysparks.add(pyspark)
        python = python or pythons.stand_in(version)
        found.append(pythons.environment(f"pyspark-{pyspark}-{Path(python).name}", python, _with_pyspark(pyspark)))
    return found, left_out


def oldest() -> Path:
    """Python of an environment with Python 3.10 (or its substitute) and the dependencies' lower bounds."""
    python = pythons.find("3.10") or pythons.stand_in("3.10")
    versions = [lower_bound(text) for text in _dependencies()]
    name = "-".join(re.findall(r"pyspark\S*==([\d.]+)", " ".join(versions))).rstrip(".")
    return pythons.environment(f"oldest-{name}-{Path(python).name}", python, versions)


def _with_pyspark(version: str, *more: str) -> list[str]:
    return [f"pyspark=={version}", *more, *(text for text in _dependencies() if not text.startswith("pyspark"))]


def lower_bound(requirement: str) -> str:
    """Pin a requirement to its lower bound: "lz4>=4.3" to "lz4==4.3.*", pyspark to a patch version; keeps markers."""
    found = re.fullmatch(r"([\w.-]+(?:\[[^]]*\])?)[^;]*>=([\d.]+)[^;]*(;.*)?", requirement)
    assert found, requirement
    name, version, marker = found.groups()
    exact = f"{version}.0" if name.startswith("pyspark") else f"{version}.*"
    return f"{name}=={exact}{marker or ''}"


def _dependencies() -> list[str]:
    """The requirements of the connector: those of the base, and of the extras spark and pyspark."""
    texts = (
        re.sub(r"""(;| and) extra == ["'](pyspark|spark)["']$""", "", text) for text in requires("spark-klog") or []
    )
    return [text for text in texts if "extra ==" not in text and not text.startswith("spark-klog")]


def child_environment(python: Path | str) -> dict[str, str]:
    """This process's environment for `python`, without variables that point it to another Spark or other modules.

    It keeps SPARK_SUBMIT_OPTS, the options of the JVM.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "SPARK_SUBMIT_OPTS" or not (name.startswith(("SPARK_", "PYSPARK_")) or name == "PYTHONPATH")
    }
    return {**kept, "PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}


def report_of(
    python: Path | str, program: Path, folder: Path, seconds: float, *arguments: str | Path
) -> tuple[dict[str, Any], str]:
    """Run a program of the tests with the Python of another environment; what it leaves in found.json, and its output.

    `folder`, where it runs and leaves that file, is the last of its arguments.
    """
    ran = subprocess.run(
        [python, program, *arguments, folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=seconds,
        cwd=folder,
        env={**child_environment(python), "PYTHONPATH": str(_ROOT), "SPARK_LOCAL_IP": "127.0.0.1"},
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-8000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found, ran.stdout
