"""Install a release from an index as users do, with each Python that is here, and run tests and the demo on it.

    python -m release.installs [FOLDER] [--only WORD] [--again]      make test-dist

The index is a folder served on this machine; what the package needs comes from the registry. For platforms that can't
run here pip downloads what it would install there. What has passed is written to build/test-dist.json, and is not done
again for the same files: a call goes on where the one before it was stopped or failed, and then prints the same lines.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from packaging.requirements import Requirement

from release import ROOT
from release.checks import ReleaseError
from release.wheels import PLATFORMS, STABLE, tool_environment
from tests.spark.matrix import TOOLS
from tests.support.packages import pythons
from tests.support.packages.registries import RegistryUnreachable, download, program
from tests.support.packages.wheel import pip_of
from tests.support.spark.pyspark_versions import child_environment

#: Versions of Python that a release is for.
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: Tests of what differs between builds: native modules and codecs. The demo has broker, clients, Spark and a load.
_TESTS = (
    "tests/records/test_kernel_parity.py",
    "tests/records/test_kernel_runs.py",
    "tests/records/test_batch_run.py",
    "tests/wire/test_codecs.py",
    "tests/schemas/avro/test_properties.py",
    "tests/schemas/avro/test_encoder.py",
    "tests/cli/test_consume_produce.py",
)
_TEST_PACKAGES = (*TOOLS, "fastavro")
_SECONDS = 1800
_LEFT_OUT = "left out"
_RECORD = ROOT / "build" / "test-dist.json"

#: Decodes records by both kernels. A broker would take minutes to start, emulated.
_BOTH_KERNELS = """
from spark_klog.records import kernels
from spark_klog.records.contract import COLUMNS
from spark_klog.records.kernels.reference import append_record
import spark_klog.schemas.avro._avro, spark_klog.schemas.protobuf._protobuf

body = bytearray()
for number in range(1000):
    append_record(body, number, number, b"key %d" % number if number % 3 else None, b"v" * (number % 300))

def decoded(name):
    builder = kernels.load(name).builder(frozenset(COLUMNS))
    builder.append(bytes(body), 1000, 0, 1_700_000_000_000, None, 0, 1000)
    columns = builder.finish()
    return columns.key.values(), columns.value.values(), bytes(columns.offset), bytes(columns.timestamp)

native, reference = decoded("native"), decoded("reference")
assert native == reference
assert len(native[0]) == 1000
"""


@contextmanager
def index_of(packages: Path) -> Iterator[str]:
    """Serve the packages of a folder as an index for pip, whose address is returned.

    A page of the index is the listing of a folder (PEP 503), which Python's server makes.
    """
    with TemporaryDirectory() as name:
        (Path(name) / "simple").mkdir()
        (Path(name) / "simple" / "spark-klog").symlink_to(packages.absolute())
        handler = partial(_QuietHandler, directory=name)
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield f"http://127.0.0.1:{server.server_port}/simple/"
            finally:
                server.shutdown()


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def check_downloads(index: str, version: str, packages: Path, folder: Path) -> str:
    """Download the wheel of each platform by pip, for the oldest and newest Python; say what was done.

    `ReleaseError` if pip takes another file.
    """
    for target in PLATFORMS:
        for python, abi, tag in (("3.10", "cp310", "cp310-cp310"), (PYTHONS[-1], "abi3", STABLE.tag)):
            to = folder / f"{python}-{target.tag}"
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            wanted = [f"--platform={target.tag}", f"--python-version={python}", "--implementation=cp", f"--abi={abi}"]
            _run([*pip, *wanted, "--no-cache-dir", f"--index-url={index}", f"--dest={to}", f"spark-klog=={version}"])
            (got,) = to.iterdir()
            expected = packages / f"spark_klog-{version}-{tag}-{target.tag}.whl"
            if got.name != expected.name or got.read_bytes() != expected.read_bytes():
                raise ReleaseError(f"for {target.tag} and Python {python} pip takes {got.name}")
    return f"it takes the wheel of each, for Python 3.10 and {PYTHONS[-1]}"


def check_python(version: str, index: str, release: str, sources: Path, folder: Path) -> str:
    """Install the release with a version of Python, run tests of `sources` and the demo; say what was done.

    `ReleaseError` if pip takes another file than the index's wheel; `subprocess.CalledProcessError` if a command fails.
    """
    interpreter = pythons.find(version)
    if interpreter is None:
        return f"{_LEFT_OUT}: it is neither on this machine nor to be had from Debian"
    python = folder / f"python{version}" / "bin" / "python"
    _run([interpreter, "-m", "venv", "--without-pip", python.parents[1]])
    report = folder / f"python{version}.json"
    pip = [*pip_of(python), "install", "--quiet", f"--report={report}"]
    download(
        f"spark-klog for {version}",
        [*pip, f"--extra-index-url={index}", f"spark-klog[demo]=={release}"],
        seconds=_SECONDS,
    )
    _check_source(json.loads(report.read_text()), index)
    download(_TEST_PACKAGES[0], [*pip_of(python), "install", "--quiet", *_TEST_PACKAGES], seconds=_SECONDS)
    tree = folder / f"tree{version}"
    for part in ("tests", "jobs", "notebooks"):
        shutil.copytree(sources / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(sources / "pyproject.toml", tree)
    environment = child_environment(python) | {"SPARK_KLOG_KERNEL": "native", "SPARK_LOCAL_IP": "127.0.0.1"}
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--quick", *_TESTS]
    passed = _run([python, *tests], cwd=tree, environment=environment)
    demo = folder / f"demo{version}"
    demo.mkdir()
    said = _run([python.with_name("klog"), "version"], cwd=demo, environment=environment)
    if not said.endswith("kernel native\n"):
        raise ReleaseError(f"Python {version}: {said}")
    _run([python.with_name("klog"), "demo"], cwd=demo, environment=environment)
    for path in (python.parents[1], tree, demo):
        shutil.rmtree(path)
    counts = re.findall(r"\d+ (?:passed|skipped)\b", passed)
    return f"{', '.join(counts)}; the demo ran"


def check_emulated(index: str, release: str, folder: Path) -> str:
    """Install the base for aarch64, which qemu emulates, and run its native modules; say what was done.

    `ReleaseError` if the native kernel is not used; `subprocess.CalledProcessError` if a command fails.
    """
    python = pythons.find_foreign(PYTHONS[-1], "arm64")
    if python is None:
        return f"{_LEFT_OUT}: no Python for it is to be had from Debian"
    qemu = program(("qemu-aarch64", "qemu-aarch64-static"), "qemu-user")
    platforms = [f"manylinux_2_{minor}_aarch64" for minor in (17, 28)]
    # crcmod has no wheels; in Python it works anywhere
    site = _install_base(index, release, folder / "aarch64", PYTHONS[-1], platforms, {"crcmod": {}})
    _run_base([qemu, python], site, _BOTH_KERNELS)
    return "both kernels decode the same, the native modules load"


def _install_base(
    index: str,
    release: str,
    site: Path,
    version: str,
    platforms: Sequence[str],
    sources: Mapping[str, Mapping[str, str]],
) -> Path:
    """Install the base of a release, for another platform, into a folder, which is returned.

    `sources` are the packages without wheels for it, and the variables to build them with.
    """
    pip = [str(tool_environment()), "-m", "pip", "install", "--quiet", "--no-deps", f"--target={site}", "--upgrade"]
    wanted = [*(f"--platform={name}" for name in platforms), f"--python-version={version}", "--implementation=cp"]
    wanted += ["--only-binary=:all:", f"--abi=cp{version.replace('.', '')}", "--abi=abi3", "--abi=none"]
    _run([*pip, *wanted, f"--index-url={index}", f"spark-klog=={release}"])
    (installed,) = distributions(name="spark-klog", path=[str(site)])
    needed = [Requirement(text) for text in installed.requires or ()]
    machine = "x86_64" if platforms[0].endswith("x86_64") else "aarch64"
    there = {"extra": "", "platform_machine": machine, "python_version": version}
    names = [need.name for need in needed if need.marker is None or need.marker.evaluate(there)]
    for name, variables in sources.items():
        named = [f"{key}={value}" for key, value in variables.items()]
        download(name, ["env", *named, *pip, f"--no-binary={name}", "--no-cache-dir", name], seconds=_SECONDS)
        names.remove(name)
    download(names[0], [*pip, *wanted, *names])
    return site


def _run_base(python: Sequence[str | Path], site: Path, code: str) -> None:
    """Run a program on what `_install_base` has installed; `ReleaseError` if the native kernel is not used."""
    environment = {**os.environ, "PYTHONPATH": str(site), "SPARK_KLOG_KERNEL": "native"}
    work = site.with_name(f"{site.name}-work")
    work.mkdir(exist_ok=True)
    said = _run([*python, "-m", "spark_klog.cli", "version"], work, environment)
    if not said.endswith("kernel native\n"):
        raise ReleaseError(f"{site.name}: {said}")
    _run([*python, "-c", code], work, environment)


def _check_source(report: dict[str, Any], index: str) -> None:
    (installed,) = (part for part in report["install"] if part["metadata"]["name"] == "spark-klog")
    url = installed["download_info"]["url"]
    if not url.startswith(index) or not url.endswith(".whl"):
        raise ReleaseError(f"pip took {url}, not a wheel of {index}")


def _run(command: Sequence[str | Path], cwd: Path | None = None, environment: dict[str, str] | None = None) -> str:
    ran = subprocess.run(
        command,
        cwd=cwd,
        env=environment or dict(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_SECONDS,
        check=False,
    )
    if ran.returncode:
        print(ran.stdout[-8000:])
        ran.check_returncode()
    return ran.stdout


def check_installs(packages: Path, sources: Path, folder: Path, only: str = "", *, again: bool = False) -> None:
    """Do all of the above for packages, with the tests of `sources`; `folder` is for the environments.

    With `only` what has that word in its name, such as "3.12".
    `ReleaseError` at the end, which names what has failed: the others are done nevertheless.
    """
    (sdist,) = packages.glob("*.tar.gz")
    release = sdist.name.removesuffix(".tar.gz").rpartition("-")[2]
    done = _Done(packages, only, again=again)
    with index_of(packages) as index:
        downloads = partial(check_downloads, index, release, packages, folder / "downloads")
        done.do(f"pip download for {', '.join(target.tag for target in PLATFORMS)}", downloads)
        for version in PYTHONS:
            done.do(f"Python {version}", partial(check_python, version, index, release, sources, folder))
        if platform.system() == "Linux" and platform.machine() == "x86_64":
            done.do("aarch64, emulated", partial(check_emulated, index, release, folder))
    if done.failed:
        raise ReleaseError(f"failed: {', '.join(done.failed)}; the next call does these alone")


class _Done:
    """What was done with a release's files: a line of text by name, kept in a file for the next call."""

    def __init__(self, packages: Path, only: str = "", *, again: bool = False) -> None:
        self._only = only
        paths = sorted([*packages.glob("*.whl"), *packages.glob("*.tar.gz")])
        self._hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
        known = json.loads(_RECORD.read_text()) if _RECORD.exists() and not again else {}
        self._said: dict[str, str] = known["said"] if known.get("packages") == self._hashes else {}
        self.failed: list[str] = []

    def do(self, name: str, work: Callable[[], str]) -> None:
        """Do the work and print what it says, unless it was done before."""
        if self._only not in name:
            return
        said = self._said.get(name)
        if said is None:
            try:
                said = work()
            except (ReleaseError, RegistryUnreachable, subprocess.SubprocessError) as error:
                self.failed.append(name)
                said = f"FAILED: {error}"
            else:
                self._keep(name, said)
        print(f"   {name}: {said}", flush=True)

    def _keep(self, name: str, said: str) -> None:
        if said.startswith(_LEFT_OUT):  # it may be there the next time
            return
        self._said[name] = said
        _RECORD.parent.mkdir(exist_ok=True)
        written = _RECORD.with_suffix(".new")
        written.write_text(json.dumps({"packages": self._hashes, "said": self._said}, indent=1) + "\n")
        written.replace(_RECORD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--only", default="", metavar="WORD", help="what has this word in its name: 3.12, musl")
    parser.add_argument("--again", action="store_true", help="also what has passed before")
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="klog-installs-") as name:
        check_installs(arguments.packages, ROOT, Path(name), arguments.only, again=arguments.again)


if __name__ == "__main__":
    main()
