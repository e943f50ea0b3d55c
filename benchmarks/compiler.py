"""Programs in C that a benchmark compiles when it runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.sides import SideFailed


def compile_c(source: Path, program: Path) -> None:
    """Make a program of one file; `SideFailed` with the compiler's words."""
    command = ["cc", "-O2", "-Wall", "-o", str(program), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SideFailed(f"cc: {done.stderr[-500:]}")
