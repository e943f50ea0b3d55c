"""Run a `klog broker` process, started as users start it."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from tests.support.clients.klog import klog_refusal
from tests.support.servers.kafka import HOST, ServerStartError, free_port

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


def broker_command(data_dir: Path, port: int, *arguments: str) -> list[str]:
    """The command line of a broker on 127.0.0.1; a setting `listeners` replaces --listen."""
    command = [sys.executable, "-m", "spark_klog.cli", "broker"]
    if not any(argument.startswith("listeners=") for argument in arguments):
        command += ["--listen", f"{HOST}:{port}"]
    # The tests' records have old timestamps, and new groups wait for no more members.
    settings = ("--set", "log.retention.ms=-1", "--set", "group.initial.rebalance.delay.ms=0")
    return [*command, "--data-dir", str(data_dir), *settings, *arguments]


def refusal(command: list[str], code: int = 2) -> str:
    """Run a broker that can't start and return its error message; asserts its exit code and no traceback.

    2 is for arguments that are refused, as of klog everywhere, and 1 for what is found at work.
    """
    interpreter, *arguments = command
    assert (interpreter, arguments[:2]) == (sys.executable, ["-m", "spark_klog.cli"])
    return klog_refusal(*arguments[2:], code=code)


class KlogBroker:
    """A broker of this project on a fixed port; its log is `log`. It ends with this process."""

    def __init__(self, work_dir: Path, *arguments: str, name: str = "broker") -> None:
        work_dir.mkdir(parents=True, exist_ok=True)
        self.data_dir = work_dir / name
        self.log = work_dir / f"{name}.log"
        self.port = free_port()
        self.ready_line = ""
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap_servers(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start with the same data and port as before; return when it is ready."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                broker_command(self.data_dir, self.port, "--stop-with-stdin", *self._arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], _START_SECONDS)
        self.ready_line = self._process.stdout.readline().decode() if readable else ""
        if not self.ready_line:
            self.kill()
            raise ServerStartError(f"the broker is not ready:\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """Send SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        try:
            code = process.wait(_STOP_SECONDS)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        return code

    def rss_bytes(self) -> int:
        """Resident memory of the process."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return 1024 * int(status.split("VmRSS:")[1].split()[0])

    def wait_for_log(self, *texts: str, seconds: float = 60) -> str:
        """Wait for a log line that contains all `texts`, and return it; TimeoutError after `seconds`.

        A client's port does not identify a line: another listener, or an earlier client, may have had the same port.
        """
        deadline = time.monotonic() + seconds
        while True:
            for line in self.log.read_text().splitlines():
                if all(text in line for text in texts):
                    return line
            if time.monotonic() > deadline:
                raise TimeoutError(f"no line of {self.log} has {' and '.join(map(repr, texts))}")
            time.sleep(0.02)

    def __enter__(self) -> KlogBroker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
