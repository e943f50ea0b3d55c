"""Run the `klog` command as users run it."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


def klog_command(*arguments: str) -> list[str]:
    """The command line of `klog` in a new interpreter."""
    return [sys.executable, "-m", "spark_klog.cli", *arguments]


class _Zygote:
    """A process of klog_zygote.py; it ends when its socket is closed."""

    def __init__(self) -> None:
        ours, its = socket.socketpair()
        command = [sys.executable, "-m", "tests.support.clients.klog_zygote", str(its.fileno())]
        root = Path(__file__).parents[3]
        self._process = subprocess.Popen(command, pass_fds=[its.fileno()], cwd=root, start_new_session=True)
        its.close()
        self._socket = ours
        self._answers = ours.makefile("rb")

    def run(
        self, arguments: tuple[str, ...], stdin: bytes, env: Mapping[str, str]
    ) -> subprocess.CompletedProcess[bytes]:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
            for path, content in zip(files, (stdin, b"", b""), strict=True):
                path.write_bytes(content)
            request = {"argv": arguments, "files": [*map(str, files)], "env": dict(env), "cwd": str(Path.cwd())}
            self._socket.settimeout(120)
            try:
                self._socket.sendall(json.dumps(request).encode() + b"\n")
                code = int(self._answers.readline())
            except (ConnectionError, ValueError):  # its output, which is this process's, says why
                _zygote.cache_clear()
                raise AssertionError(f"the process of commands has ended with {self._process.wait(30)}") from None
            except BaseException:
                os.killpg(self._process.pid, signal.SIGKILL)
                _zygote.cache_clear()
                raise
            return subprocess.CompletedProcess(arguments, code, files[1].read_bytes(), files[2].read_bytes())

    def close(self) -> None:
        self._socket.close()
        self._answers.close()
        self._process.wait(30)


@cache
def _zygote() -> _Zygote:
    made = _Zygote()
    atexit.register(made.close)
    return made


def klog_bytes(
    *arguments: str, stdin: bytes = b"", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run the command to its end, without a terminal; the caller checks the exit code and the output."""
    return _zygote().run(arguments, stdin, os.environ if env is None else env)


def klog(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command to its end; the caller checks the exit code and the output."""
    done = klog_bytes(*arguments, stdin=stdin.encode())
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def klog_lines(*arguments: str) -> list[dict[str, Any]]:
    """Run the command with --json and parse its lines; asserts that it succeeds and prints nothing else."""
    done = klog(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done
    return [json.loads(line) for line in done.stdout.splitlines()]


def klog_refusal(*arguments: str, code: int = 1) -> str:
    """Run a command that must fail with this exit code; return the last line of its error message."""
    done = klog(*arguments)
    assert (done.returncode, done.stdout) == (code, ""), done
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]
