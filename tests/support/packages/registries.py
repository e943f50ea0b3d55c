"""Get programs and packages from registries (Debian, Maven, PyPI, npm, Go), with retries."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

_ATTEMPTS = 5
_FIRST_PAUSE_SECONDS = 2.0
_ATTEMPT_SECONDS = 300
#: What could not be fetched: later calls do not try again.
_unreachable: dict[str, RegistryUnreachable] = {}


class RegistryUnreachable(Exception):
    """A registry did not deliver something; the text ends with the last output of its tool."""


def cache_root() -> Path:
    """`$SPARK_KLOG_CACHE`, else `~/.cache/spark_klog`."""
    configured = os.environ.get("SPARK_KLOG_CACHE")
    return Path(configured).absolute() if configured else Path.home() / ".cache" / "spark_klog"


def run(
    command: Sequence[str],
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    seconds: float = _ATTEMPT_SECONDS,
) -> tuple[int, str]:
    """Run a command; return its exit code (-1 after a timeout) and the tail of standard output and error."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return -1, f"{command[0]} did not end in {seconds} s"
    return done.returncode, done.stdout[-4000:]


def download(
    what: str,
    *commands: Sequence[str],
    cwd: Path | None = None,
    seconds: float = _ATTEMPT_SECONDS,
    is_done: Callable[[int], object] = lambda status: status == 0,
) -> None:
    """Run commands of a package manager until `is_done`, which takes the exit code of the last one.

    `RegistryUnreachable`, which names `what`, if that fails repeatedly.
    """
    if what in _unreachable:
        raise _unreachable[what]
    status, output = -1, ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
        for command in commands:
            status, output = run(command, cwd, seconds=seconds)
        if is_done(status):
            return
    _unreachable[what] = RegistryUnreachable(
        f"{commands[-1][0]} could not fetch {what} in {_ATTEMPTS} attempts; its last output:\n{output}"
    )
    raise _unreachable[what]


@cache
def program(names: tuple[str, ...], package: str) -> str:
    """Find one of these programs on PATH; if there is none and this process is root, install Debian's `package`.

    `RegistryUnreachable` if that fails.
    """
    found = _find(names)
    if found is not None:
        return found
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RegistryUnreachable(f"{names[0]} is not on PATH, and installing it takes root and apt-get")
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:  # only one apt-get at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = _find(names)  # another process may have installed it
        if found is None:
            # exit codes do not count: old lists may suffice, and a service that can't be started fails its installation
            commands = ["apt-get", "update"], ["apt-get", "install", "-y", package]
            download(package, *commands, is_done=lambda _: _find(names))
            found = _find(names)
    assert found is not None
    return found


def _find(names: tuple[str, ...]) -> str | None:
    return next((path for path in map(shutil.which, names) if path is not None), None)
