"""A schema registry that is not ours: franz-go's fake of Confluent's, in a process; it is built on the first call."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.clients.build import go_program
from tests.support.servers.kafka import HOST


class SrFake:
    """A registry at `url`, whose requests are in `requests`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def requests(self) -> list[str]:
        """Method, path and query of each request so far."""
        return self._log.read_text().splitlines()[1:]

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 60
        while not self._log.read_text().startswith("listening ") or not self._log.read_text().endswith("\n"):
            assert process.poll() is None, "srfake ended"
            assert time.monotonic() < deadline, "srfake does not start"
            time.sleep(0.01)
        self.port = int(self._log.read_text().splitlines()[0].rpartition(":")[2])


@contextmanager
def serving_srfake(folder: Path, *arguments: str | Path, port: int = 0) -> Iterator[SrFake]:
    """Run one in `folder`; `arguments` are srfake's after its address. It begins empty."""
    command = [str(go_program("srfake")), f"{HOST}:{port}", *map(str, arguments)]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"srfake-{time.monotonic_ns()}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, env=os.environ)
    try:
        registry = SrFake(log)
        registry.wait(process)
        yield registry
    finally:
        process.kill()
        process.wait()


@contextmanager
def running_srfake() -> Iterator[str]:
    """The URL of one, for who needs no more."""
    with TemporaryDirectory() as folder, serving_srfake(Path(folder)) as registry:
        yield registry.url
