"""Third-party command line tools: kcat (Debian: kafkacat), and runtimes of clients in other languages."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from functools import cache

from .maven import RegistryUnreachable, cache_root

_ATTEMPTS = 4
_FIRST_PAUSE_SECONDS = 2.0
_unreachable: dict[str, RegistryUnreachable] = {}


class ToolFailed(Exception):
    """A tool failed; the text contains its standard error."""


@cache
def program(names: tuple[str, ...], package: str) -> str:
    """Find one of these programs on PATH; if there is none and this process is root, install Debian's `package`.

    `RegistryUnreachable` if that fails; later calls do not try again.
    """
    found = _find(names)
    if found is not None:
        return found
    if package in _unreachable:
        raise _unreachable[package]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RegistryUnreachable(f"{names[0]} is not on PATH, and installing it takes root and apt-get")
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:  # only one apt-get at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        output = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
            for command in (["apt-get", "update"], ["apt-get", "install", "-y", package]):
                output = _run(command)
            found = _find(names)
            if found is not None:
                return found
    reason = f"{names[0]} is not on PATH, and apt-get install {package} failed:\n{output}"
    _unreachable[package] = RegistryUnreachable(reason)
    raise _unreachable[package]


def _find(names: tuple[str, ...]) -> str | None:
    return next((path for path in map(shutil.which, names) if path is not None), None)


def kcat_path() -> str:
    """The path of the `kcat` binary, see `program`."""
    return program(("kcat", "kafkacat"), "kafkacat")


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=300,
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not end in 300 s"
    return done.stdout[-4000:]


def kcat(*arguments: str, stdin: bytes = b"", timeout: float = 60) -> bytes:
    """Run kcat and return its standard output; `ToolFailed` if it fails."""
    done = subprocess.run([kcat_path(), *arguments], input=stdin, capture_output=True, timeout=timeout)
    if done.returncode:
        raise ToolFailed(f"kcat {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr.decode()}")
    return done.stdout
