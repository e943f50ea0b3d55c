"""Build or install programs once, and keep them in the cache outside the checkout."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.maven import RegistryUnreachable, cache_root, run

_ATTEMPTS = 4
_FIRST_PAUSE_SECONDS = 2.0
_SECONDS = 300


class BuildFailed(Exception):
    """A compiler failed; the text ends with its output."""


def built(name: str, sources: Sequence[Path], build: Callable[[Path], None]) -> Path:
    """The folder that `build` filled from exactly these sources; built on the first call."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.name} {source.stat().st_size}\n".encode() + source.read_bytes())
    root = cache_root() / "clients"
    folder = root / f"{name}-{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=root) as work:
                whole = Path(work) / "whole"
                whole.mkdir()
                build(whole)
                whole.rename(folder)
    return folder


def download(command: Sequence[str], folder: Path) -> None:
    """Run a package manager; `RegistryUnreachable` if it fails repeatedly."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
        status, output = run(command, folder, seconds=_SECONDS)
        if status == 0:
            return
    raise RegistryUnreachable(f"{' '.join(command)} failed in {_ATTEMPTS} attempts; its last output:\n{output}")


def compile_program(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Run a compiler, which needs no network; `BuildFailed` if it fails."""
    status, output = run(command, folder, environment, _SECONDS)
    if status:
        raise BuildFailed(f"{' '.join(command)} ended with {status}:\n{output}")


def copy_into(folder: Path, files: Sequence[Path]) -> None:
    for file in files:
        shutil.copyfile(file, folder / file.name)
