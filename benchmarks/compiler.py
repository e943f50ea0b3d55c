"""Compile the C and Java programs of benchmarks."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.sides import SideFailed


def compile_c(source: Path, program: Path) -> None:
    """Compile a C file to a program; `SideFailed` has the compiler's message."""
    _run(["cc", "-O2", "-Wall", "-o", str(program), str(source)])


def compile_java(libs: Path, source: Path, folder: Path) -> str:
    """Compile a Java file with these jars; return the class path to run it. `SideFailed` has javac's message."""
    _run(["javac", "-cp", f"{libs}/*", "-d", str(folder), str(source)])
    return f"{libs}/*:{folder}"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SideFailed(f"{command[0]}: {done.stderr[-500:]}")
