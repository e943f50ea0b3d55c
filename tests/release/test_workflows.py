"""The workflows in .github: what they use is pinned, what they may is little, and what they do is `make`."""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
from pathlib import Path

import pytest

from release import ROOT
from tests.support.packages.registries import cache_root, download, program

_WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
_ACTIONLINT, _ZIZMOR = "v1.7.12", "zizmor==1.32.0"
_SECONDS = 300
_PINNED = re.compile(r"[\w-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
#: All but make that a step may run.
_PREPARES = "sudo apt-get update && sudo apt-get install --yes libkrb5-dev"


@pytest.mark.parametrize("path", _WORKFLOWS, ids=lambda path: path.stem)
def test_steps(path: Path) -> None:
    text = path.read_text()
    assert "\npermissions: {}\n" in text
    used = re.findall(r"uses: (.*)", text)
    assert used
    assert [name for name in used if not _PINNED.fullmatch(name)] == []
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in re.findall(r"run: (.*)", text):
        words = command.split()
        assert command == _PREPARES or (words[0] == "make" and words[1] in {*targets, '"$TARGET"'}), command
    for targets_of_matrix in re.findall(r"target: \[(.*)\]", text):
        assert set(targets_of_matrix.split(", ")) <= targets


def test_one_action_has_one_version() -> None:
    used = {name for path in _WORKFLOWS for name in re.findall(r"uses: (.*)", path.read_text())}
    assert len({name.partition("@")[0] for name in used}) == len(used)


@pytest.mark.test_all("long")
def test_linters_find_nothing() -> None:
    tools = _linters()
    for command in (
        [tools / "actionlint", *_WORKFLOWS],
        [tools / "bin" / "zizmor", "--offline", "--persona=pedantic", "."],
    ):
        ran = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout


def _linters() -> Path:
    """The folder of actionlint and zizmor, in the cache."""
    folder = cache_root() / f"linters-{_ACTIONLINT}-{_ZIZMOR}"
    folder.mkdir(parents=True, exist_ok=True)
    go = program(("go",), "golang-go")
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "actionlint").exists():
            package = f"github.com/rhysd/actionlint/cmd/actionlint@{_ACTIONLINT}"
            download(package, ["env", f"GOBIN={folder}", go, "install", package], seconds=_SECONDS)
        if not (folder / "bin" / "zizmor").exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), _ZIZMOR]
            download(_ZIZMOR, [*pip, "--disable-pip-version-check"], seconds=_SECONDS)
    return folder
