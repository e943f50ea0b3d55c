"""The machine and versions of a run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


def describe() -> dict[str, str]:
    """Names and values for the report's table."""
    return {
        "CPU": f"{_cpu_model()}, {os.cpu_count()} cores",
        "memory": _memory(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "Java": _java(),
        "record kernel": _kernel(),
        **{name: _package(name) for name in ("spark-klog", "pyspark", "pyarrow")},
    }


def commit() -> tuple[str, bool]:
    """The current commit, and whether files other than a run's results differ from it."""
    git = ["git", "--no-optional-locks", "-C", str(ROOT)]
    head = _output([*git, "rev-parse", "--short", "--verify", "HEAD"])
    if head is None:
        return "none", False
    written = (":!benchmarks/results.md", ":!benchmarks/results.json")
    return head, _output([*git, "status", "--porcelain", "--", ".", *written]) != ""


def code_state() -> frozenset[tuple[str, int]]:
    """The project's files and their times: if they change during a run, it measures no single version."""
    files = [path for kind in ("*.py", "*.so") for path in (ROOT / "spark_klog").rglob(kind)]
    return frozenset((str(path), path.stat().st_mtime_ns) for path in files)


def _kernel() -> str:
    """The kernel that decodes records: the native one, or the reference in Python."""
    code = "from spark_klog.records import kernels; print(kernels.load().__name__)"
    return _output([sys.executable, "-c", code]) or "unknown"


def processor_time(pid: int | None) -> float:
    """CPU seconds of a process and its descendants so far; Spark's Python workers live until their session ends."""
    process = psutil.Process(pid)
    times = [part.cpu_times() for part in (process, *process.children(recursive=True))]
    return float(sum(time.user + time.system for time in times))


def _cpu_model() -> str:
    return _proc_field("/proc/cpuinfo", "model name") or platform.processor() or "unknown"


def _memory() -> str:
    total = _proc_field("/proc/meminfo", "MemTotal")
    return f"{int(total.split()[0]) / 2**20:.1f} GiB" if total else "unknown"


def _proc_field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _java() -> str:
    text = _output(["java", "-version"])
    return text.splitlines()[0] if text else "none"


def _package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _output(command: list[str]) -> str | None:
    """The output of a command (java prints its version to standard error), or None if it fails."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
