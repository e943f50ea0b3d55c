"""A PostgreSQL server on 127.0.0.1: this machine's, or that of Debian's packages, which are unpacked into the cache."""

from __future__ import annotations

import fcntl
import os
import platform
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import NamedTuple

from tests.support.packages.pythons import apt_of, unpack
from tests.support.packages.registries import RegistryUnreachable, cache_root, download
from tests.support.servers.kafka import HOST, Process, free_port

_SECONDS = 60
_DOWNLOAD_SECONDS = 600
#: The machine's own C library takes its place: programs are begun by that one's loader. LLVM and Perl are large, and
#: only for a compiler of queries and Debian's own commands.
_LEFT_OUT = ("libc6_*.deb", "libc-bin_*.deb", "libllvm*.deb", "libz3*.deb", "perl*.deb", "libperl*.deb")


class Programs(NamedTuple):
    """The server's programs, which Debian does not put on PATH; `libraries` are theirs, if the machine lacks them."""

    folder: Path
    libraries: Sequence[Path] = ()
    #: Where they are unpacked; None if they are installed.
    root: Path | None = None

    @classmethod
    def below(cls, root: Path) -> Programs:
        """The newest of Debian's unpacked programs below a root; `RegistryUnreachable` if there are none."""
        folders = _folders(root)
        if not folders:
            raise RegistryUnreachable("Debian's package postgresql has no initdb")
        libraries = [path for parent in ("lib", "usr/lib") for path in (root / parent).glob("*-linux-gnu")]
        return cls(folders[-1], libraries, root)

    def command(self, name: str, *arguments: str) -> list[str]:
        """What begins a program."""
        libraries = ["env", f"LD_LIBRARY_PATH={':'.join(map(str, self.libraries))}"] if self.libraries else []
        return [*libraries, str(self.folder / name), *arguments]


def _programs() -> Programs:
    if (initdb := shutil.which("initdb")) is not None:
        return Programs(Path(initdb).resolve().parent)
    folders = _folders(Path("/"))
    return Programs(folders[-1]) if folders else unpacked_programs()


def unpacked_programs() -> Programs:
    """Debian's programs, unpacked in the cache: nothing is installed.

    `RegistryUnreachable` if they are not to be had.
    """
    if shutil.which("apt-get") is None:
        raise RegistryUnreachable("PostgreSQL is not on this machine, and apt-get, which has it, is not either")
    suite = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    root, name = cache_root(), f"postgresql-{suite}"
    made = root / name
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            with TemporaryDirectory(prefix=f".{name}.", dir=root) as text:
                folder = Path(text)
                apt = apt_of(folder, suite)
                install = [*apt, "install", "--yes", "--download-only", "--no-install-recommends", "postgresql"]
                download("postgresql", [*apt, "update"], install, seconds=_DOWNLOAD_SECONDS)
                for path in (path for pattern in _LEFT_OUT for path in (folder / "archives").glob(pattern)):
                    path.unlink()
                unpack(folder / "archives", folder / "unpacked")
                (folder / "unpacked").rename(made)
    return Programs.below(made)


def _folders(root: Path) -> list[Path]:
    """The folders of Debian's versions below a root, the newest last."""
    paths = [path.parent for path in (root / "usr" / "lib" / "postgresql").glob("*/bin/initdb")]
    return sorted(paths, key=lambda path: int(path.parts[-2]))


class Postgres(Process):
    """A server with a database that the connector of Debezium can follow; a context manager.

    It refuses to run as root, so root runs it as Debian's user `postgres`, or as nobody, in a folder of its own.
    """

    user = "postgres"

    def __init__(self, work_dir: Path, programs: Programs | None = None) -> None:
        super().__init__("postgres", work_dir)
        self._programs = _programs() if programs is None else programs
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="klog-postgres-"))
        self._data = self._folder / "data"
        self._as_user: list[str] = []
        if os.geteuid() == 0:
            owner = next(entry for name in (self.user, "nobody") for entry in pwd.getpwall() if entry.pw_name == name)
            os.chown(self._folder, owner.pw_uid, owner.pw_gid)
            # --pdeathsig: a change of user drops the signal that was set before
            user = f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups"
            self._as_user = ["setpriv", *user, "--pdeathsig=KILL"]
            if self._programs.root is not None:  # the cache may be in root's home, which others may not enter
                copy = Path(shutil.copytree(self._programs.root, self._folder / "programs", symlinks=True))
                self._programs = Programs.below(copy)
        self._run("initdb", "-D", str(self._data), "-U", self.user, "-A", "trust", "-E", "UTF8", "--no-sync")

    def _run(self, name: str, *arguments: str) -> None:
        command = [*self._as_user, *self._programs.command(name, *arguments)]
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
            "jit": "off",  # LLVM takes longer than these queries
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        arguments = "-D", str(self._data), "-p", str(self.port), *options
        return [*self._as_user, *self._programs.command("postgres", *arguments)]

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
        psql = self._programs.command("psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1")
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
