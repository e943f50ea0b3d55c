"""The `klog` command, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def klog_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "spark_klog.cli", *arguments]


def klog(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end; the caller looks at the exit code and the output."""
    return subprocess.run(klog_command(*arguments), capture_output=True, text=True, timeout=60)


def klog_lines(*arguments: str) -> list[dict[str, Any]]:
    """Its lines of JSON; it must succeed and say nothing else."""
    done = klog(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done
    return [json.loads(line) for line in done.stdout.splitlines()]


def klog_refusal(*arguments: str, code: int = 1) -> str:
    """The last line of what it says when it refuses."""
    done = klog(*arguments)
    assert (done.returncode, done.stdout) == (code, ""), done
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]
