"""Checks of a release's files: `python -m release.checks FOLDER...`, by the Python of `wheels.tool_environment`.

Each wheel has the package and its three native modules, for its platform: they need the C library alone, of a version
that the wheel's name promises (auditwheel; for macOS its own tables), Python's stable ABI where the name says so
(abi3audit), and contain no path of the machine that built them. PyPI would take all files (twine).
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from release.wheels import ABIS, PLATFORMS, RELATIVE_LINK, STABLE, Abi, Platform

_MODULES = ("_avro", "_kernel", "_protobuf")
_LIBSYSTEM = "/usr/lib/libSystem.B.dylib"
_OLDEST_MACOS = 11 << 16
_CPUS = {"x86_64": 0x01000007, "aarch64": 0x0100000C}
_PATHS = re.compile(rb"/(?:home|root|tmp|Users|work|opt|usr/local)/[\w./-]*")
_SECONDS = 300


class ReleaseError(Exception):
    """A file of a release is not as it must be."""


def check_folder(folder: Path) -> None:
    """`ReleaseError` unless the folder has the sdist and all wheels, and each passes its checks."""
    files = sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])
    wheels = {path.name.split("-", 2)[2]: path for path in files if path.suffix == ".whl"}
    expected = {f"{abi.tag}-{platform.tag}.whl": (abi, platform) for abi in ABIS for platform in PLATFORMS}
    if wheels.keys() != expected.keys() or len(files) != len(expected) + 1:
        raise ReleaseError(f"{folder} has {[path.name for path in files]}, not an sdist and {sorted(expected)}")
    for name, path in wheels.items():
        check_wheel(path, *expected[name])
    _tool("twine", "check", "--strict", *files)


def check_wheel(path: Path, abi: Abi, platform: Platform) -> None:
    """`ReleaseError` unless the wheel is as its name says."""
    with zipfile.ZipFile(path) as archive, TemporaryDirectory() as name:
        names = archive.namelist()
        suffixes = {Path(name).suffix for name in names}
        if suffixes & {".c", ".pyx", ".pxi", ".pyc"} or not any(name.endswith("/licenses/LICENSE") for name in names):
            raise ReleaseError(f"{path.name} has files of its build, or no licence")
        described = [archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
        if links := RELATIVE_LINK.findall("".join(described)):
            raise ReleaseError(f"{path.name}: an index's page can't resolve the links {links} of README.md")
        modules = {Path(name).name.partition(".")[0]: name for name in names if name.endswith(".so")}
        if sorted(modules) != list(_MODULES) or not all(name.endswith(abi.suffix) for name in modules.values()):
            raise ReleaseError(f"{path.name} has the native modules {sorted(modules.values())}")
        for module, member in modules.items():
            content = archive.read(member)
            if match := _PATHS.search(content):
                raise ReleaseError(f"{member} of {path.name} has a path of its build: {match[0].decode()}")
            if "macos" in platform.tag:
                extracted = Path(archive.extract(member, name))
                check_mach_o(extracted, module, _CPUS[platform.architecture])
    if "macos" not in platform.tag:
        shown = _tool("auditwheel", "show", path)
        if f'platform tag: "{platform.tag}"' not in " ".join(shown.split()):
            raise ReleaseError(f"auditwheel does not find {path.name} to be {platform.tag}:\n{shown}")
    if abi is STABLE:
        _tool("abi3audit", "--strict", path)


def check_mach_o(path: Path, module: str, cpu: int) -> None:
    """`ReleaseError` unless a module for macOS needs nothing but Python and the system's library, for this CPU.

    ARM loads only what is signed, if by nobody; the oldest system must be that of the wheel's name.
    """
    from macholib.mach_o import LC_BUILD_VERSION, LC_CODE_SIGNATURE
    from macholib.MachO import MachO
    from macholib.SymbolTable import SymbolTable

    spec = find_spec("ziglang")
    assert spec is not None
    assert spec.origin is not None
    # what the system's library has, by zig's copy of Apple's own list
    libc = Path(spec.origin).parent / "lib" / "libc" / "darwin" / "libSystem.tbd"
    system = set(re.findall(r"[\w$]+", libc.read_text()))
    file = MachO(str(path))
    (header,) = file.headers
    libraries = {name for _, _, name in header.walkRelocatables()}
    table = SymbolTable(file)
    undefined = [symbol.decode() for _, symbol in table.undefsyms]
    strangers = [name for name in undefined if not name.startswith(("_Py", "__Py")) and name not in system]
    exported = [symbol for _, symbol in table.extdefsyms]
    if header.header.cputype != cpu or libraries != {_LIBSYSTEM} or strangers or len(undefined) <= 50:
        raise ReleaseError(f"{path.name}: CPU {header.header.cputype:#x}, libraries {libraries}, unknown {strangers}")
    commands = {int(load.cmd): command for load, command, _ in header.commands}
    oldest = int(commands[LC_BUILD_VERSION].minos)
    if oldest != _OLDEST_MACOS or (cpu == _CPUS["aarch64"] and LC_CODE_SIGNATURE not in commands):
        raise ReleaseError(f"{path.name} is for macOS {oldest >> 16}.{oldest >> 8 & 255}, or is not signed")
    if f"_PyInit_{module}".encode() not in exported:
        raise ReleaseError(f"{path.name} does not export PyInit_{module}")


def _tool(name: str, *arguments: str | Path) -> str:
    """The output of a program of this Python's environment; `ReleaseError` if it fails."""
    command = [Path(sys.executable).with_name(name), *arguments]
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_SECONDS, check=False
    )
    if ran.returncode:
        raise ReleaseError(f"{name} {' '.join(map(str, arguments))}:\n{ran.stdout}")
    return ran.stdout


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        check_folder(Path(argument))
