"""The sdist and the wheels of a commit, for all platforms, built on this machine: zig is the C compiler of all of them.

A wheel by Python's stable ABI serves 3.11 and later. It begins with 3.11, as buffers are not part of the ABI before;
Python 3.10 has a wheel of its own. Two builds of a commit are the same bytes: sources come from git, times are the
commit's, the tools' versions are pinned, and the compiler gets no flag of the Python that runs it.

zig needs nothing but Python's public headers. They ask pyconfig.h for sizes and features, which are the same on all
64-bit Linux and macOS, so those of this machine's Python will do.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from release import ROOT
from tests.support.packages import pythons
from tests.support.packages.registries import RegistryUnreachable

#: What the bytes of a wheel depend on; ziglang only in the environment of the stable ABI.
_BUILDERS = ("setuptools==84.2.1", "Cython==3.3.1")
_ZIG = "ziglang==0.17.1"
#: What checks wheels (see checks.py).
_CHECKERS = (
    "auditwheel==6.8.2",
    "abi3audit==0.0.26",
    "twine==7.0.0",
    "macholib==1.16.4",
    "cyclonedx-python-lib[json-validation]==11.12.0",
)
#: UBSan is zig's default; it would add a runtime of 1 MB with paths of this machine.
_FLAGS = "-O3 -DNDEBUG -fwrapv -fno-strict-aliasing -fno-sanitize=undefined"
_MUSL_LIBC = "libc.musl-{}.so.1"
#: A link of README.md to a file of the sources; in a checkout it is relative to that.
RELATIVE_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")
_SECONDS = 900


@dataclass(frozen=True)
class Platform:
    """A platform that wheels are built for."""

    #: The last part of a wheel's name.
    tag: str
    #: zig's name of it, with the oldest version of its C library or system.
    target: str
    #: Python's name of it (`sysconfig.get_platform`).
    host: str

    @property
    def architecture(self) -> str:
        return "x86_64" if self.tag.endswith("x86_64") else "aarch64"


PLATFORMS = (
    Platform("manylinux_2_17_x86_64", "x86_64-linux-gnu.2.17", "linux-x86_64"),
    Platform("manylinux_2_17_aarch64", "aarch64-linux-gnu.2.17", "linux-aarch64"),
    Platform("musllinux_1_2_x86_64", "x86_64-linux-musl", "linux-x86_64"),
    Platform("musllinux_1_2_aarch64", "aarch64-linux-musl", "linux-aarch64"),
    Platform("macosx_11_0_x86_64", "x86_64-macos.11.0", "macosx-11.0-x86_64"),
    Platform("macosx_11_0_arm64", "aarch64-macos.11.0", "macosx-11.0-arm64"),
)


@dataclass(frozen=True)
class Abi:
    """A Python ABI that wheels are built for, by the Python whose headers it takes."""

    tag: str
    python: str
    suffix: str
    flags: str = ""
    option: str = ""


STABLE = Abi(
    "cp311-abi3", "3.11", ".abi3.so", " -DPy_LIMITED_API=0x030B0000 -DCYTHON_LIMITED_API=1", "--py-limited-api=cp311"
)
#: Each Python loads modules with this suffix; that of 3.10 on musl names glibc.
OLDEST = Abi("cp310-cp310", "3.10", ".so")
ABIS = (STABLE, OLDEST)


def tool_environment(abi: Abi = STABLE) -> Path:
    """The Python of the environment, in the cache, that builds wheels of an ABI; that of STABLE also checks them.

    `RegistryUnreachable` if its Python is not to be had.
    """
    python = pythons.find(abi.python)
    if python is None:
        raise RegistryUnreachable(f"python{abi.python} is needed for the wheels {abi.tag}, and is not on this machine")
    tools = (*_BUILDERS, _ZIG, *_CHECKERS) if abi is STABLE else _BUILDERS
    return pythons.environment(f"release-{abi.tag}", python, tools)


def build(commit: str, folder: Path, platforms: Sequence[Platform] = PLATFORMS, abis: Sequence[Abi] = ABIS) -> Path:
    """Build the sdist of a commit, and wheels from that sdist; return the folder that has them.

    `subprocess.CalledProcessError`, with the tool's output printed, if a step fails.
    """
    epoch = int(git("show", "--no-patch", "--format=%ct", commit))
    exported, out = folder / "exported", folder / "dist"
    with tarfile.open(fileobj=io.BytesIO(_git_bytes("archive", "--format=tar", commit))) as archive:
        archive.extractall(exported, filter="data")
    readme = exported / "README.md"
    readme.write_text(absolute_links(readme.read_text(), *_repository_and_version(exported)))
    out.mkdir()
    environments = {abi: tool_environment(abi) for abi in abis}
    tools = tool_environment()
    _hook(tools, "build_sdist", exported, out, epoch)
    (sdist,) = out.glob("*.tar.gz")
    normalize(sdist, epoch)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (sources,) = (folder / "unpacked").iterdir()
    modules = [path.relative_to(sources) for path in sorted(sources.rglob("*.pyx"))]
    _run([tools, "-m", "cython", *modules], cwd=sources)
    cache = folder / "zig-cache"
    for platform in platforms:
        if "musl" in platform.target:
            _make_libc_stub(tools, platform, folder, cache)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(_build_wheel, sources, out, abi, environments[abi], platform, folder, epoch)
            for platform in platforms
            for abi in abis
        ]
    for job in jobs:
        job.result()
    return out


def _repository_and_version(sources: Path) -> tuple[str, str]:
    repository = re.search(r'^Repository = "(.+)"$', (sources / "pyproject.toml").read_text(), re.MULTILINE)
    names = (sources / "spark_klog" / "base" / "names.py").read_text()
    version = re.search(r'^VERSION\b.*= "(.+)"$', names, re.MULTILINE)
    assert repository is not None
    assert version is not None
    return repository[1], version[1]


def absolute_links(text: str, repository: str, version: str) -> str:
    """A text with addresses of the version's files in place of relative links, which an index's page can't resolve.

    An image needs the address of its bytes.
    """
    files = repository.replace("https://github.com/", "https://raw.githubusercontent.com/", 1)

    def address(link: re.Match[str]) -> str:
        folder = f"{files}/v{version}" if link[1].endswith((".png", ".svg")) else f"{repository}/blob/v{version}"
        return f"]({folder}/{link[1]})"

    return RELATIVE_LINK.sub(address, text)


def _build_wheel(
    sources: Path, out: Path, abi: Abi, python: Path, platform: Platform, folder: Path, epoch: int
) -> None:
    copy = folder / f"{abi.tag}-{platform.tag}"
    shutil.copytree(sources, copy)
    compiler = f"{tool_environment()} -m ziglang cc -target {platform.target}"
    linker = f"{compiler} -shared"
    if "macos" in platform.target:
        linker = f"{compiler} -dynamiclib -undefined dynamic_lookup"
    elif "musl" in platform.target:
        linker = f"{compiler} -shared -nostdlib {_stub(platform, folder)}"
    environment = {
        "CC": compiler,
        "LDSHARED": linker,
        "CFLAGS": f"{_FLAGS}{abi.flags}",
        "SETUPTOOLS_EXT_SUFFIX": abi.suffix,
        "_PYTHON_HOST_PLATFORM": platform.host,
        "ZIG_GLOBAL_CACHE_DIR": str(folder / "zig-cache"),
    }
    options = [f"--plat-name={platform.tag}", *filter(None, [abi.option])]
    _hook(python, "build_wheel", copy, out, epoch, {"--build-option": options}, **environment)
    shutil.rmtree(copy)


def _stub(platform: Platform, folder: Path) -> Path:
    return folder / platform.tag / _MUSL_LIBC.format(platform.architecture)


def _make_libc_stub(python: Path, platform: Platform, folder: Path, cache: Path) -> None:
    """An empty library by the name that Alpine gives its C library: modules then ask for that, not for zig's own."""
    stub = _stub(platform, folder)
    stub.parent.mkdir()
    source = stub.with_name("stub.c")
    source.touch()
    options = ["-target", platform.target, "-shared", "-nostdlib", f"-Wl,-soname,{stub.name}"]
    _run([python, "-m", "ziglang", "cc", *options, "-o", stub, source], cwd=folder, ZIG_GLOBAL_CACHE_DIR=str(cache))


def _hook(
    python: Path, name: str, sources: Path, out: Path, epoch: int, settings: object = None, **environment: str
) -> None:
    """Call a hook of setuptools as pip does (PEP 517)."""
    program = f"from setuptools import build_meta; build_meta.{name}({str(out)!r}, {settings!r})"
    _run([python, "-c", program], cwd=sources, SOURCE_DATE_EPOCH=str(epoch), **environment)


def _run(command: Sequence[str | Path], cwd: Path, **environment: str) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ran = subprocess.run(
        command,
        cwd=cwd,
        env={**kept, "LC_ALL": "C", "PYTHONHASHSEED": "0", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        umask=0o022,
        timeout=_SECONDS,
        check=False,
    )
    if ran.returncode:
        print(ran.stdout[-8000:])
        ran.check_returncode()


def normalize(sdist: Path, epoch: int) -> None:
    """Write the archive again, in the order of names, without times, users and the gzip header's time."""
    with tarfile.open(sdist) as old:
        members = sorted(old.getmembers(), key=lambda member: member.name)
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as new:
            for member in members:
                plain = tarfile.TarInfo(member.name)
                plain.type, plain.size, plain.mtime = member.type, member.size, epoch
                plain.mode = 0o755 if member.isdir() else 0o644
                new.addfile(plain, old.extractfile(member))
    sdist.write_bytes(gzip.compress(content.getvalue(), mtime=epoch))


def git(*arguments: str) -> str:
    return _git_bytes(*arguments).decode().strip()


def _git_bytes(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
