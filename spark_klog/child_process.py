"""Child processes of a cluster: each reads a pipe from the caller and stops when the pipe ends."""

from __future__ import annotations

import fcntl
import logging
import select
import subprocess
import time
from pathlib import Path
from typing import IO

from spark_klog.errors import KlogError, LogDirLocked
from spark_klog.log.layout import usable

_log = logging.getLogger(__name__)
START_SECONDS = 60.0
_STOP_SECONDS = 30.0
#: Shell command that runs a program which does not read its stdin, and stops it when our pipe ends.
SUPERVISED = ("sh", "-c", '"$@" </dev/null & child=$!; cat >/dev/null; kill $child 2>/dev/null; wait $child', "sh")
#: Prefix of a broker's last line if it refuses to start: the reason follows.
_REFUSAL = "klog: "


class ClusterStartError(KlogError):
    """A process of the cluster did not start; the message has the reason or the end of its log."""


def await_orphans(lock: int, data_dir: Path) -> None:
    """Wait until the processes of a cluster whose parent was killed have ended; they share its lock (flock).

    `LogDirLocked` after 30 s.
    """
    deadline = time.monotonic() + _STOP_SECONDS
    is_logged = False
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not is_logged:
                _log.warning("%s: waiting for processes of a killed cluster to stop", data_dir)
                is_logged = True
            if time.monotonic() > deadline:
                raise LogDirLocked(f"{data_dir} is in use by processes of a killed cluster; stop them first") from None
        time.sleep(0.05)


class ChildProcess:
    """A subprocess with its stdin as a pipe; it inherits `lock`. `DataDirectoryError` if its log can't be written."""

    def __init__(self, command: list[str], log: Path, stdout: int | IO[bytes], lock: int) -> None:
        self.log = log
        with usable(log.parent):
            file = log.open("ab")
            self._log_start = file.tell()
        with file:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file if stdout == subprocess.STDOUT else stdout,
                stderr=file,
                start_new_session=True,
                pass_fds=(lock,),
            )

    def start_error(self, name: str) -> ClusterStartError:
        """The error with the reason that the process gave, or with what it logged since its start."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            text = file.read().decode(errors="replace").strip()
        last = text.rpartition("\n")[2]
        if last.startswith(_REFUSAL):
            return ClusterStartError(f"{name} did not start: {last.removeprefix(_REFUSAL)}")
        return ClusterStartError(f"{name} did not start; {self.log} ends with:\n{text[-2000:]}")

    def send(self, line: bytes) -> None:
        """Send a line to the process's stdin; OSError if it has ended."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(line)
        self.popen.stdin.flush()

    def stop(self) -> None:
        """Close stdin, wait for the process to end, kill it after 30 s."""
        if self.popen.stdin is not None:
            self.popen.stdin.close()
        try:
            self.popen.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL."""
        self.popen.kill()
        self.popen.wait()
        if self.popen.stdin is not None:
            self.popen.stdin.close()

    def next_line(self) -> str:
        """The next line that a broker prints: it is ready, or has applied a command; empty if it ended or is late."""
        stdout = self.popen.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], START_SECONDS)
        return stdout.readline().decode().strip() if readable else ""
