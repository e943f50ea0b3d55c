"""Run the `klog` command as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def klog_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "spark_klog.cli", *arguments]


def klog(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; the caller checks the exit code and the output."""
    return subprocess.run(klog_command(*arguments), capture_output=True, text=True, timeout=60)


def klog_lines(*arguments: str) -> list[dict[str, Any]]:
    """The command's lines of JSON; asserts that it succeeds and prints nothing else."""
    done = klog(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done
    return [json.loads(line) for line in done.stdout.splitlines()]


def klog_refusal(*arguments: str, code: int = 1) -> str:
    """The last line of the error message; asserts the exit code."""
    done = klog(*arguments)
    assert (done.returncode, done.stdout) == (code, ""), done
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]
