"""A PostgreSQL server of Debian's packages on 127.0.0.1."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.support.packages.registries import download
from tests.support.servers.kafka import HOST, Process, free_port

_SECONDS = 60


def _programs() -> Path:
    """The folder of the server's programs, which Debian does not put on PATH."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).resolve().parent
    if not _installed():
        commands = ["apt-get", "update"], ["apt-get", "install", "-y", "postgresql"]
        download("postgresql", *commands, is_done=lambda _: _installed())
    return _installed()[-1]


def _installed() -> list[Path]:
    """The folders of Debian's versions, the newest last."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    return sorted(found, key=lambda path: int(path.parts[-2]))


class Postgres(Process):
    """A server with a database that the connector of Debezium can follow; a context manager.

    It refuses to run as root, so root runs it as Debian's user `postgres`, in a folder of its own.
    """

    user = "postgres"

    def __init__(self, work_dir: Path) -> None:
        super().__init__("postgres", work_dir)
        self._programs = _programs()
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="klog-postgres-"))
        self._as_user: list[str] = []
        if os.geteuid() == 0:
            shutil.chown(self._folder, self.user, self.user)
            # --pdeathsig: a change of user drops the signal that was set before
            user = f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"
            self._as_user = ["setpriv", *user, "--pdeathsig=KILL"]
        self._run("initdb", "-D", str(self._folder), "-U", self.user, "-A", "trust", "-E", "UTF8", "--no-sync")

    def _run(self, name: str, *arguments: str) -> None:
        command = [*self._as_user, str(self._programs / name), *arguments]
        done = subprocess.run(command, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"

    def _command(self) -> Sequence[str]:
        settings = {
            "listen_addresses": HOST,
            "unix_socket_directories": "",
            "wal_level": "logical",
            "fsync": "off",  # only a crash of the machine would lose data
            "max_wal_senders": 20,
            "max_replication_slots": 20,
            "timezone": "UTC",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [
            *self._as_user,
            *(str(self._programs / "postgres"), "-D", str(self._folder), "-p", str(self.port)),
            *options,
        ]

    def _is_ready(self) -> bool:
        try:
            socket.create_connection((HOST, self.port), timeout=2).close()
            self.sql("SELECT 1")
        except (OSError, DatabaseError):
            return False
        return True

    def stop(self) -> None:
        """Stop without waiting for its clients."""
        self._end(signal.SIGINT)

    def close(self) -> None:
        """Stop, and remove its data."""
        try:
            self.stop()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def sql(self, *commands: str) -> str:
        """Run commands, each in a transaction of its own, and return what psql prints; `DatabaseError`."""
        psql = [str(self._programs / "psql"), "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1"]
        done = subprocess.run(
            [*psql, "-h", HOST, "-p", str(self.port), "-U", self.user, self.user],
            input="".join(f"{command};\n" for command in commands),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        if done.returncode:
            raise DatabaseError(done.stderr)
        return done.stdout

    def __enter__(self) -> Postgres:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DatabaseError(Exception):
    """The database refuses a command; in its words."""
