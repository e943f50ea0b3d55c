"""Wheels of the checkout for other platforms, built by a cross compiler, and two builds: a part of `make dist`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from release import ROOT, dist, wheels
from release.wheels import OLDEST, PLATFORMS, STABLE
from tests.support.runs.soak import SOAK, in_soak

#: `make soak` builds both for macOS, and for musl as well as for glibc.
_MACOS = [platform for platform in PLATFORMS if "macos" in platform.tag and (SOAK or platform.tag.endswith("arm64"))]
_LINUX = [
    platform
    for platform in PLATFORMS
    if platform.tag.endswith("linux_2_17_x86_64") or (SOAK and "musl" in platform.tag)
]
_CHECK = """
import sys
from pathlib import Path
from release import checks, wheels
for path in Path(sys.argv[1]).glob("*.whl"):
    (abi,) = (abi for abi in wheels.ABIS if abi.tag in path.name)
    (platform,) = (platform for platform in wheels.PLATFORMS if platform.tag in path.name)
    checks.check_wheel(path, abi, platform)
    print(path.name)
"""
_SECONDS = 900


def _checked(folder: Path) -> list[str]:
    """The names of the folder's wheels, which pass the checks of a release."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [wheels.tool_environment(), "-c", _CHECK, folder]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return sorted(ran.stdout.split())


@pytest.fixture(scope="module")
def commit() -> str:
    """A commit with this checkout's files, those that are changed and not committed too."""
    return wheels.git("stash", "create") or "HEAD"


@pytest.mark.test_all("long")
@pytest.mark.timeout(_SECONDS)
def test_the_native_kernel_is_built_for_macos(commit: str, tmp_path: Path) -> None:
    """It compiles and links there; no Mac runs it here."""
    names = _checked(wheels.build(commit, tmp_path, _MACOS, [STABLE]))
    assert [name.partition("-cp311-")[2] for name in names] == sorted(f"abi3-{target.tag}.whl" for target in _MACOS)


@in_soak  # `make dist` builds twice itself
@pytest.mark.timeout(_SECONDS)
def test_two_builds_are_the_same_bytes(commit: str, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "another-folder").mkdir()
    made = wheels.build(commit, tmp_path / "first", _LINUX, [STABLE, OLDEST])
    dist.compare(made, wheels.build(commit, tmp_path / "another-folder", _LINUX, [STABLE, OLDEST]))
    assert len(_checked(made)) == 2 * len(_LINUX)
