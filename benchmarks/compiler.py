"""Programs in C and Java that a benchmark compiles when it runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.sides import SideFailed


def compile_c(source: Path, program: Path) -> None:
    """Make a program of one file; `SideFailed` with the compiler's words."""
    _run(["cc", "-O2", "-Wall", "-o", str(program), str(source)])


def compile_java(libs: Path, source: Path, folder: Path) -> str:
    """Make a class of one file, with these jars; the class path that runs it. `SideFailed` with javac's words."""
    _run(["javac", "-cp", f"{libs}/*", "-d", str(folder), str(source)])
    return f"{libs}/*:{folder}"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SideFailed(f"{command[0]}: {done.stderr[-500:]}")
