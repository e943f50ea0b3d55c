"""Build a release and check it.

    python -m release.dist [--commit HEAD] [--out dist]      make dist

Builds the commit twice, in two folders, and compares the files byte by byte; checks them; writes the SBOM. Only then
the files are moved to `--out`, with SHA256SUMS. `make test-dist` installs and runs them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.version import Version

from release import ROOT
from release.checks import ReleaseError
from release.wheels import build, git, tool_environment
from spark_klog.base.names import VERSION


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--tag", help="refuse unless this is the version's tag, and the changelog has the version")
    arguments = parser.parse_args()
    if arguments.tag is not None:
        check_tag(arguments.tag, (ROOT / "CHANGELOG.md").read_text())
    if git("status", "--porcelain", "--untracked-files=no"):
        print("changes that are not committed are left out")
    with TemporaryDirectory(prefix="klog-dist-") as name:
        dist = make_release(arguments.commit, Path(name))
        shutil.rmtree(arguments.out, ignore_errors=True)
        shutil.copytree(dist, arguments.out)
    for path in sorted(arguments.out.iterdir()):
        print(f"{path.stat().st_size:>10,}  {path.name}")


def check_tag(tag: str, changelog: str) -> None:
    """`ReleaseError` unless a tag is that of the version that the sources have, which the changelog describes."""
    if tag != f"v{VERSION}":
        raise ReleaseError(f"the tag {tag} is not v{VERSION}: set VERSION in spark_klog/base/names.py before the tag")
    if Version(VERSION).is_devrelease:
        raise ReleaseError(f"{VERSION} is what VERSION is between two releases: set the release's before the tag")
    if not re.search(rf"^## {re.escape(VERSION)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        raise ReleaseError(f"CHANGELOG.md has no section '## {VERSION} (YYYY-MM-DD)'")
    if not Version(VERSION).is_prerelease and not (ROOT / "tests" / "golden" / VERSION).is_dir():
        raise ReleaseError(f"tests/golden has no folder {VERSION}: python -m tests.golden.make, and commit it")


def make_release(commit: str, folder: Path) -> Path:
    """Return the folder of a commit's checked sdist, wheels, SBOM and SHA256SUMS, which is in `folder`.

    `ReleaseError`, or the error of the step that failed.
    """
    with _step("build"):
        dist = build(commit, folder / "first")
    with _step("build again"):
        compare(dist, build(commit, folder / "a-second-folder"))
    tools = tool_environment()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with _step("check"):
        subprocess.run([tools, "-m", "release.checks", dist], env=environment, cwd=ROOT, check=True)
    wheel = next(dist.glob("*-cp311-abi3-manylinux*_x86_64.whl"))
    made = datetime.fromtimestamp(int(git("show", "--no-patch", "--format=%ct", commit)), timezone.utc)
    with _step("SBOM"):
        program: list[str | Path] = ["-m", "release.sbom", wheel, folder / "sbom.json", made.isoformat()]
        subprocess.run([tools, *program], env=environment, cwd=ROOT, check=True)
    (folder / "sbom.json").rename(dist / f"{'-'.join(wheel.name.split('-')[:2])}.cdx.json")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(dist.iterdir())]
    (dist / "SHA256SUMS").write_text("".join(sums))
    return dist


def compare(first: Path, second: Path) -> None:
    """`ReleaseError` unless two folders have the same files with the same bytes."""
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (first, second)]
    names = {name for both in files for name in both}
    different = sorted(name for name in names if files[0].get(name) != files[1].get(name))
    if different or not names:
        raise ReleaseError(f"two builds of one commit differ: {different}")


@contextmanager
def _step(name: str) -> Iterator[None]:
    print(f"== {name}", flush=True)
    began = time.monotonic()
    yield
    print(f"   {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
