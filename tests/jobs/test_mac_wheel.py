"""Wheels for macOS, built by a cross compiler: the native kernel compiles and links there. No Mac runs them here.

Python's public headers ask pyconfig.h for sizes and features that are the same on 64-bit Linux and macOS, so those of
the Python that runs the tests will do.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.packages.registries import download
from tests.support.packages.wheel import build_wheel
from tests.support.runs.soak import in_soak

#: zig is a C compiler with the libraries of its targets, in a wheel; macholib reads what it makes.
_TOOLS = ("ziglang==0.17.*", "macholib==1.16.*")
_SECONDS = 300
_LIBSYSTEM = "/usr/lib/libSystem.B.dylib"
_CPU_X86_64, _CPU_ARM64 = 0x01000007, 0x0100000C


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *_TOOLS]
    download("ziglang", [*command, "--disable-pip-version-check"], seconds=_SECONDS)
    return folder


@pytest.mark.test_all("long")
@pytest.mark.parametrize(
    ("architecture", "target", "cpu"),
    [("arm64", "aarch64", _CPU_ARM64), pytest.param("x86_64", "x86_64", _CPU_X86_64, marks=in_soak)],
)
def test_the_native_kernel_is_built_for_macos(
    architecture: str, target: str, cpu: int, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = f"{tools}/ziglang/zig cc -target {target}-macos.11.0"
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    wheel = build_wheel(
        tmp_path,
        CC=compiler,
        LDSHARED=f"{compiler} -dynamiclib -undefined dynamic_lookup",
        SETUPTOOLS_EXT_SUFFIX=f".cpython-{python[2:]}-darwin.so",
        _PYTHON_HOST_PLATFORM=f"macosx-11.0-{architecture}",
        ZIG_GLOBAL_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert wheel.name.endswith(f"-{python}-{python}-macosx_11_0_{architecture}.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name.partition(".")[0]: name for name in archive.namelist() if name.endswith(".so")}
        assert names.keys() == {"_kernel", "_avro", "_protobuf"}
        modules = {module: archive.extract(name, tmp_path) for module, name in names.items()}
    monkeypatch.syspath_prepend(str(tools))
    from macholib.MachO import MachO
    from macholib.SymbolTable import SymbolTable

    system = set(re.findall(r"[\w$]+", (tools / "ziglang/lib/libc/darwin/libSystem.tbd").read_text()))
    for module, path in modules.items():
        file = MachO(path)
        (header,) = file.headers
        assert header.header.cputype == cpu
        assert {path for _, _, path in header.walkRelocatables()} == {_LIBSYSTEM}
        table = SymbolTable(file)
        assert f"_PyInit_{module}".encode() in [symbol for _, symbol in table.extdefsyms]
        undefined = [symbol.decode() for _, symbol in table.undefsyms]
        assert [symbol for symbol in undefined if not symbol.startswith(("_Py", "__Py")) and symbol not in system] == []
        assert len(undefined) > 50
