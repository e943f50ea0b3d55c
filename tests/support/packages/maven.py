"""Get jars from Maven into folders of a cache outside the checkout."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tests.support.packages.registries import cache_root, download, program

_SECONDS = 900
# Written last, before the folder gets its name; a folder without it is not from `resolve`.
_MARKER = ".artifacts"


def resolve(name: str, artifacts: Sequence[str], dependencies: bool = True) -> Path:
    """The folder with the jars of `artifacts` ("group:artifact:version") and of their run-time dependencies.

    Downloads on the first call for `name`, or if its artifacts have changed. Without `dependencies`: those jars only,
    as for an artifact with a classifier ("group:artifact:version:classifier").
    """
    pom = _pom(artifacts, dependencies)
    root = cache_root() / "maven"
    folder = root / name
    if _holds(folder, artifacts):
        return folder
    root.mkdir(parents=True, exist_ok=True)
    # One lock for all names: Maven's local repository is not safe for concurrent writers.
    with _locked(root / ".lock"):
        if not _holds(folder, artifacts):
            _download(pom, artifacts, folder)
    return folder


def _holds(folder: Path, artifacts: Sequence[str]) -> bool:
    try:
        return (folder / _MARKER).read_text() == _marker_text(artifacts)
    except FileNotFoundError:
        return False


def _marker_text(artifacts: Sequence[str]) -> str:
    return "".join(f"{artifact}\n" for artifact in artifacts)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _pom(artifacts: Sequence[str], dependencies: bool) -> str:
    wanted = []
    for coordinates in artifacts:
        parts = coordinates.split(":")
        if len(parts) not in (3, 4) or not all(parts):
            raise ValueError(f"not group:artifact:version: {coordinates!r}")
        group, artifact, version, *classifier = map(escape, parts)
        # jdk.tools names a file of Java 8
        excluded = "jdk.tools" if dependencies and not classifier else "*"
        wanted.append(
            f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>"
            f"{''.join(f'<classifier>{name}</classifier>' for name in classifier)}<exclusions><exclusion>"
            f"<groupId>{excluded}</groupId><artifactId>*</artifactId></exclusion></exclusions></dependency>"
        )
    return (
        "<project><modelVersion>4.0.0</modelVersion>"
        "<groupId>spark_klog</groupId><artifactId>test-peers</artifactId><version>1</version>"
        f"<dependencies>{''.join(wanted)}</dependencies></project>\n"
    )


def _download(pom: str, artifacts: Sequence[str], folder: Path) -> None:
    mvn = program(("mvn",), "maven")
    for left_by_a_killed_process in folder.parent.glob(".download-*"):  # no other process uses it: the lock is held
        shutil.rmtree(left_by_a_killed_process, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=".download-", dir=folder.parent))
    try:
        (work / "pom.xml").write_text(pom)
        jars = work / "jars"
        command = [
            mvn,
            "-U",  # otherwise mvn caches a miss, and a retry does not ask the registry
            "-B",
            "-q",
            "dependency:copy-dependencies",
            f"-DoutputDirectory={jars}",
            "-DincludeScope=runtime",
        ]
        download(
            ", ".join(artifacts),
            command,
            cwd=work,
            seconds=_SECONDS,
            is_done=lambda status: status == 0 and any(jars.glob("*.jar")),
        )
        (jars / _MARKER).write_text(_marker_text(artifacts))
        shutil.rmtree(folder, ignore_errors=True)
        jars.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
