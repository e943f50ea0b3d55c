"""Object stores that are neither ours nor a mock in Python: programs of registries, built or installed once.

versitygw 1.8         an S3 server over files, by Go's proxy
fake-gcs-server 1.56  an emulator of Google's storage, by Go's proxy
Azurite 3.37          Microsoft's emulator of Azure's storage, by npm
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from tests.support.clients.build import built, compile_program, copy_into
from tests.support.packages.registries import download, program
from tests.support.servers.kafka import HOST, Process, free_port

_PROGRAMS = Path(__file__).with_name("programs")
#: The login of the S3 server, and of Azurite, whose account and key are Microsoft's for emulators.
ACCESS_KEY, SECRET_KEY = "key", "secret"
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_AZURITE = "3.37.0"


class Server(Process):
    """A server that listens on `port`; a context manager."""

    def __init__(self, name: str, folder: Path, command: Callable[[int], Sequence[str]]) -> None:
        super().__init__(name, folder)
        self.port = free_port()
        self._arguments = command(self.port)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _command(self) -> Sequence[str]:
        return self._arguments

    def _is_ready(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex((HOST, self.port)) == 0


def s3_gateway(folder: Path) -> Server:
    """versitygw over a folder; path-style requests, with `ACCESS_KEY` and `SECRET_KEY`."""
    binary = _of_go("versitygw", "github.com/versity/versitygw/cmd/versitygw")
    data, sidecar = folder / "data", folder / "sidecar"  # not all file systems have extended attributes
    for each in (data, sidecar):
        each.mkdir(parents=True)
    login = ("--access", ACCESS_KEY, "--secret", SECRET_KEY)
    return Server(
        "versitygw",
        folder,
        lambda port: [str(binary), "--port", f"{HOST}:{port}", *login, "posix", "--sidecar", str(sidecar), str(data)],
    )


def gcs_emulator(folder: Path) -> Server:
    """fake-gcs-server in memory."""
    binary = _of_go("fake_gcs", "github.com/fsouza/fake-gcs-server")
    return Server(
        "fake-gcs",
        folder,
        lambda port: [
            *(str(binary), "-scheme", "http", "-host", HOST, "-port", str(port), "-backend", "memory"),
            *("-public-host", f"{HOST}:{port}", "-log-level", "error"),
        ],
    )


def azure_emulator(folder: Path) -> Server:
    """Azurite's blobs, in memory, of `ACCOUNT` with `ACCOUNT_KEY`."""
    node = program(("node", "nodejs"), "nodejs")

    def install(target: Path) -> None:
        npm = program(("npm",), "npm")
        (target / "package.json").write_text("{}")
        command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", f"azurite@{_AZURITE}"]
        download(f"azurite {_AZURITE}", command, cwd=target)

    modules = built(f"azurite-{_AZURITE}", [], install) / "node_modules"
    entry = modules / "azurite" / "dist" / "src" / "blob" / "main.js"
    options = ("--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry")
    return Server(
        "azurite",
        folder,
        lambda port: [node, str(entry), "--blobHost", HOST, "--blobPort", str(port), *options],
    )


def _of_go(name: str, package: str) -> Path:
    """A program of a module whose versions and checksums are in programs/NAME."""
    go = program(("go",), "golang-go")
    files = [_PROGRAMS / name / file for file in ("go.mod", "go.sum")]

    def build(target: Path) -> None:
        copy_into(target, files)
        download(f"the modules of {name}", [go, "mod", "download"], cwd=target)
        offline = {"GOPROXY": "off", "CGO_ENABLED": "0"}  # stripped and without cgo: saves a minute of CPU
        compile_program([go, "build", "-ldflags=-s -w", "-o", name, package], target, offline, 1800)

    return built(name, files, build) / name
