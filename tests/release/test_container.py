"""The Containerfile: buildah builds it without a daemon, and its broker runs as nobody and is healthy.

The registry of base images is not reached: the image that the file begins with is made here, of Debian's packages, and
stays in the cache (270 MB). The tools change the machine, so they are installed for CI alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from release import ROOT
from tests.support.packages.registries import cache_root, download, program
from tests.support.waiting import wait_until

_FILE = ROOT / "Containerfile"
#: Debian's suite with the Python of the base image.
_SUITE = "trixie"
_AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
_SECONDS = 1500
#: Programs and the packages that have them.
_TOOLS = {"buildah": "buildah", "debootstrap": "debootstrap", "ip": "iproute2"}
_PRODUCE = "echo one | klog produce -b localhost:9092 kept && klog consume -b localhost:9092 kept"


@pytest.mark.test_all("long")
@pytest.mark.timeout(3000)
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or os.geteuid() != 0, reason="buildah runs as root here"
)
@pytest.mark.skipif(
    "CI" not in os.environ and not all(map(shutil.which, _TOOLS)),
    reason=f"it takes {', '.join(_TOOLS.values())}, which only CI installs",
)
def test_the_image_is_built_and_its_broker_is_healthy(tmp_path: Path) -> None:
    for name, package in _TOOLS.items():
        program((name,), package)

    def buildah(*arguments: str) -> str:
        return _run([*_command(tmp_path), *arguments])

    base = _FILE.read_text().partition("FROM ")[2].split()[0]
    of_base = buildah("from", "scratch").strip()
    buildah("add", of_base, str(_root_folder()), "/")
    # pip in the image reaches the registry as pip outside does
    buildah("config", "--env", f"PIP_CERT={_AUTHORITIES}", of_base)
    buildah("commit", "--rm", of_base, base)
    options = ["--isolation", "chroot", "--pull-never", "--format", "docker", "--tag", "klog-broker"]
    buildah("bud", *options, "--file", str(_FILE), str(ROOT))
    image = json.loads(buildah("inspect", "--type", "image", "klog-broker"))["Docker"]["config"]
    assert (image["User"], [*image["ExposedPorts"]], [*image["Volumes"]]) == ("klog", ["9092/tcp"], ["/data"])
    kind, *check = image["Healthcheck"]["Test"]
    assert kind == "CMD"
    container = buildah("from", "--pull-never", "klog-broker").strip()
    # the port may be taken on this machine: the container has a network of its own
    network = subprocess.Popen(["unshare", "--net", "sh", "-c", "ip link set lo up && exec sleep 1000"])
    inside = ["nsenter", f"--net=/proc/{network.pid}/ns/net", *_command(tmp_path), "run", "--isolation", "chroot"]
    inside += [container, "--"]
    try:
        up = [*inside[:2], "sh", "-c", "ip -oneline address show lo up | grep -q 127.0.0.1"]
        wait_until(lambda: _passes(up), "its network")
        assert not _passes([*inside, *check]), "there is no broker yet"
        broker = subprocess.Popen([*inside, *image["Entrypoint"], *image["Cmd"]])
        try:
            wait_until(lambda: _passes([*inside, *check]), "its health", 60)
            owner = "import os; status = os.stat('/data'); print(status.st_uid, os.getuid())"
            owns, runs = _run([*inside, "python", "-c", owner]).split()
            assert owns == runs != "0"
            assert _run([*inside, "sh", "-c", _PRODUCE]).splitlines()[-1] == "one"
        finally:
            broker.terminate()
            broker.wait(30)
    finally:
        network.kill()
        network.wait()


def _command(folder: Path) -> list[str]:
    """buildah, with images in a folder."""
    places = ["--root", str(folder / "images"), "--runroot", str(folder / "run"), "--storage-driver", "vfs"]
    return ["buildah", *places]


def _passes(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False).returncode == 0


def _run(command: list[str]) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert ran.returncode == 0, f"{' '.join(command)}:\n{ran.stdout[-4000:]}{ran.stderr[-4000:]}"
    return ran.stdout


def _root_folder() -> Path:
    """A folder of the cache with a small Debian, and Python by the names that the base image has."""
    root = cache_root()
    made = root / f"debian-{_SUITE}-python"
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{made.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            building = root / f".{made.name}"
            shutil.rmtree(building, ignore_errors=True)
            packages = "python3,python3-venv,ca-certificates"
            options = ["--variant=minbase", f"--include={packages}", _SUITE, str(building)]
            download("a small Debian", ["debootstrap", *options], seconds=_SECONDS)
            shutil.copy2(_AUTHORITIES, building / _AUTHORITIES.relative_to("/"))
            (building / "usr" / "local" / "bin" / "python").symlink_to("/usr/bin/python3")
            building.rename(made)
    return made
