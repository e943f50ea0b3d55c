"""Build or install programs once, and keep them in the cache outside the checkout."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.packages.registries import cache_root, download, program, run

_SECONDS = 300.0


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


def compile_program(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], seconds: float = _SECONDS
) -> None:
    """Run a compiler, which needs no network; `BuildFailed` if it fails."""
    status, output = run(command, folder, environment, seconds)
    if status:
        raise BuildFailed(f"{' '.join(command)} ended with {status}:\n{output}")


def go_program(name: str) -> Path:
    """The program of the Go sources in the folder of that name beside this file."""
    go = program(("go",), "golang-go")
    files = [Path(__file__).parent / name / file for file in ("go.mod", "go.sum", "main.go")]

    def build(folder: Path) -> None:
        copy_into(folder, files)
        download(f"the modules of {name}", [go, "mod", "download"], cwd=folder)
        # Stripped and without cgo: saves a minute of CPU.
        offline = {"GOPROXY": "off", "CGO_ENABLED": "0"}
        compile_program([go, "build", "-ldflags=-s -w", "-o", name, "."], folder, offline)

    return built(name, files, build) / name


def copy_into(folder: Path, files: Sequence[Path]) -> None:
    for file in files:
        shutil.copyfile(file, folder / file.name)
