"""Environments with other versions of pyspark than the one that the tests run with, in the cache outside the checkout.

They have the project's dependencies, not the project: `PYTHONPATH` gives them the checkout, with the reference kernel
where their Python is another one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import requires
from pathlib import Path

from .maven import RegistryUnreachable, cache_root

log = logging.getLogger(__name__)

#: The newest version whose Kafka connector Maven has.
WITH_CONNECTOR = "4.1.1"
#: Pythons and pysparks of `make matrix`, beside the oldest pair and the one with Spark's connector.
_NEWER = (("3.12", "4.2.1"), ("3.13", "4.3.0"), ("3.14", "4.3.0"))
_ATTEMPTS = 5
_FIRST_PAUSE_SECONDS = 2.0
_INSTALL_SECONDS = 900


def with_connector() -> Path:
    """The Python with `WITH_CONNECTOR` and the newest of the other dependencies."""
    return _environment(f"pyspark-{WITH_CONNECTOR}-klog", sys.executable, _with_pyspark(WITH_CONNECTOR))


def newer() -> tuple[list[Path], list[str]]:
    """Pythons of the newer versions of pyspark, with the newest of the other dependencies; names of the pairs left out.

    A pair is left out if its Python is not on this machine and another pair has its pyspark: with another Python it
    would show nothing new.
    """
    found, left_out, pysparks = [], [], set[str]()
    for version, pyspark in _NEWER:
        python = _on_machine(version)
        if not python and pyspark in pysparks:
            left_out.append(f"pyspark-{pyspark}-python{version}")
            continue
        pysparks.add(pyspark)
        python = python or _stand_in(version)
        found.append(_environment(f"pyspark-{pyspark}-{Path(python).name}", python, _with_pyspark(pyspark)))
    return found, left_out


def oldest() -> Path:
    """The oldest Python that is here, with the lower bound of each dependency in pyproject.toml."""
    python = _on_machine("3.10") or _stand_in("3.10")
    versions = [lower_bound(text) for text in _dependencies()]
    name = "-".join(re.findall(r"pyspark\S*==([\d.]+)", " ".join(versions))).rstrip(".")
    return _environment(f"oldest-{name}-{Path(python).name}", python, versions)


def _on_machine(version: str) -> str | None:
    """The path of this Python, on PATH or of pyenv."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for python in filter(None, [shutil.which(name), *map(str, pyenv.glob(f"versions/{version}.*/bin/{name}"))]):
        # a shim of pyenv for a Python that is not chosen fails
        if not subprocess.run([python, "--version"], capture_output=True, check=False).returncode:
            return python
    return None


def _stand_in(version: str) -> str:
    """The Python that runs the tests, for one that is not on this machine."""
    log.warning("python%s is not on this machine: %s takes its place", version, sys.executable)
    return sys.executable


def _with_pyspark(version: str) -> list[str]:
    return [f"pyspark=={version}", *(text for text in _dependencies() if not text.startswith("pyspark"))]


def lower_bound(requirement: str) -> str:
    """ "lz4>=4.3" as "lz4==4.3.*"; markers are kept. An exact patch version is kept, too."""
    found = re.fullmatch(r"([\w.-]+(?:\[[^]]*\])?)[^;]*>=([\d.]+)[^;]*(;.*)?", requirement)
    assert found, requirement
    name, version, marker = found.groups()
    exact = f"{version}.0" if name.startswith("pyspark") else f"{version}.*"
    return f"{name}=={exact}{marker or ''}"


def _dependencies() -> list[str]:
    return [text for text in requires("spark-klog") or [] if "extra ==" not in text]


def _environment(name: str, interpreter: str, packages: Sequence[str]) -> Path:
    """The Python of the environment `name`; the first call makes it, `RegistryUnreachable` if pip can't."""
    root = cache_root()
    folder = root / name
    python, complete = folder / "bin" / "python", folder / ".complete"
    content = "\n".join(packages)
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (python.exists() and complete.exists() and complete.read_text() == content):
            log.info("installing %s into %s", packages[0], folder)
            subprocess.run([interpreter, "-m", "venv", "--clear", str(folder)], check=True, timeout=_INSTALL_SECONDS)
            _pip_install(python, packages)
            complete.write_text(content)
    return python


def _pip_install(python: Path, packages: Sequence[str]) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    output = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
        try:
            done = subprocess.run(
                command,
                env=child_environment(python),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_INSTALL_SECONDS,
            )
        except subprocess.TimeoutExpired:
            output = f"pip did not end in {_INSTALL_SECONDS} s"
            continue
        if done.returncode == 0:
            return
        output = done.stdout[-4000:]
    what = f"pip could not install {packages[0]} in {_ATTEMPTS} attempts"
    raise RegistryUnreachable(f"{what}; its last output:\n{output}")


def child_environment(python: Path | str) -> dict[str, str]:
    """This process's environment without variables that point `python` to another Spark or other modules."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SPARK_", "PYSPARK_")) and name != "PYTHONPATH"
    }
    return {**kept, "PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}
