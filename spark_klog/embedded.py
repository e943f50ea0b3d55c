"""A cluster inside the caller's process tree: real brokers, and a real ZooKeeper where asked for.

    DATA_DIR/broker-N/       data directory of broker N      DATA_DIR/broker-N.log   its log
    DATA_DIR/directories/    the brokers' shared tree, without ZooKeeper
    DATA_DIR/zookeeper/      ZooKeeper's data                DATA_DIR/zookeeper.log

Every process started here reads a pipe from the caller and stops when that ends: none outlives it.
"""

from __future__ import annotations

import importlib.util
import logging
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO

from spark_klog.broker import fault_control
from spark_klog.broker.faults import Fault
from spark_klog.errors import ConfigError, KlogError

_log = logging.getLogger(__name__)
_HOST = "127.0.0.1"
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
#: Runs a program that does not read its stdin, until the pipe that is ours ends.
_SUPERVISED = (
    "sh",
    "-c",
    '"$@" </dev/null & child=$!; cat >/dev/null; kill $child 2>/dev/null; wait $child',
    "sh",
)


class ClusterStartError(KlogError):
    """A process of the cluster did not start; the message ends with its log."""


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-2000:] if path.exists() else ""


class _Process:
    """A subprocess whose stdin we hold."""

    def __init__(self, command: list[str], log: Path, stdout: int | IO[bytes]) -> None:
        with log.open("ab") as file:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file if stdout == subprocess.STDOUT else stdout,
                stderr=file,
                start_new_session=True,
            )

    def tell(self, line: bytes) -> None:
        """A line to its stdin."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(line)
        self.popen.stdin.flush()

    def stop(self) -> None:
        """End its stdin, then insist."""
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


class EmbeddedCluster:
    """A context manager: `brokers` brokers on free loopback ports, in `data_dir` (None: a temporary one).

    `settings` are broker settings by Kafka's names; unlike a broker of its own it keeps records for ever
    (log.retention.ms=-1): those of tests and examples often have times of long ago. `log_format` is that of the
    brokers' logs, "text" or "json". `ClusterStartError` names what did not start.

    `faults` (see `spark_klog.broker.faults`) happen from the first request on; while it is not None, be it empty,
    `inject` and `clear_faults` change them. They wait until every broker has obeyed: what is asked of it from then on
    meets the new faults. A broker that is restarted begins them anew. `ConfigError` for a fault that can't be.
    """

    def __init__(
        self,
        brokers: int = 1,
        zookeeper: bool = False,
        data_dir: str | Path | None = None,
        settings: dict[str, str] | None = None,
        faults: Iterable[Fault] | None = None,
        log_format: str = "text",
    ) -> None:
        if brokers < 1:
            raise ConfigError(f"brokers={brokers}: at least one is wanted")
        self._count = brokers
        self._with_zookeeper = zookeeper
        self._given_dir = Path(data_dir) if data_dir is not None else None
        self._settings = {"log.retention.ms": "-1", "group.initial.rebalance.delay.ms": "0"} | (settings or {})
        self._log_format = log_format
        self._brokers: dict[int, _Process] = {}
        self._ports: dict[int, int] = {}
        self._zookeeper: _Process | None = None
        self.zookeeper_connect: str | None = None
        self._faults = None if faults is None else list(faults)
        #: One dialogue with the brokers at a time.
        self._telling = threading.Lock()
        for fault in self._faults or ():
            self._check_broker(fault)

    @property
    def bootstrap_servers(self) -> str:
        """HOST:PORT of every broker, those that were killed too."""
        return ",".join(f"{_HOST}:{port}" for _, port in sorted(self._ports.items()))

    def start(self) -> EmbeddedCluster:
        """Start everything; on failure nothing is left running."""
        self.data_dir = self._given_dir or Path(tempfile.mkdtemp(prefix="klog-"))
        self.data_dir.mkdir(parents=True, exist_ok=True)
        try:
            if self._with_zookeeper:
                self._start_zookeeper()
            for broker_id in range(self._count):
                self.restart(broker_id)
        except BaseException:
            self.stop()
            raise
        return self

    def _start_zookeeper(self) -> None:
        spec = importlib.util.find_spec("pyspark")
        java = shutil.which("java")
        if spec is None or spec.origin is None or java is None:
            raise ClusterStartError("ZooKeeper needs Java 17 on the PATH, and pyspark for its jars")
        port = _free_port()
        data = self.data_dir / "zookeeper"
        data.mkdir(exist_ok=True)
        config = self.data_dir / "zookeeper.properties"
        config.write_text(
            f"dataDir={data}\nclientPort={port}\nclientPortAddress={_HOST}\ntickTime=1000\n"
            "admin.enableServer=false\nmaxClientCnxns=0\n"
        )
        jars = Path(spec.origin).parent / "jars"
        log = self.data_dir / "zookeeper.log"
        command = [
            java,
            "-Xmx256m",
            "-cp",
            f"{jars}/*",
            "org.apache.zookeeper.server.ZooKeeperServerMain",
            str(config),
        ]
        self._zookeeper = _Process([*_SUPERVISED, *command], log, subprocess.STDOUT)
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(port):
            if time.monotonic() > deadline or self._zookeeper.popen.poll() is not None:
                raise ClusterStartError(f"ZooKeeper did not start; {log} ends with:\n{_tail(log)}")
            time.sleep(0.05)
        self.zookeeper_connect = f"{_HOST}:{port}"

    def restart(self, broker_id: int) -> None:
        """Start a broker that was killed (or not yet started) on its port and data."""
        running = self._brokers.get(broker_id)
        if running is not None and running.popen.poll() is None:
            raise ConfigError(f"broker {broker_id} is running; kill it first")
        tree = (
            ["--zookeeper", self.zookeeper_connect]
            if self.zookeeper_connect
            else ["--directories", str(self.data_dir / "directories")]
        )
        command = [sys.executable, "-m", "spark_klog.cli", "broker", "--stop-with-stdin"]
        command += ["--broker-id", str(broker_id), *tree]
        if "listeners" not in self._settings:
            command += ["--listen", f"{_HOST}:{self._ports.get(broker_id, 0)}"]
        command += ["--data-dir", str(self.data_dir / f"broker-{broker_id}"), "--log-format", self._log_format]
        if self._faults is not None:
            command += ["--faults"]
        for name, value in self._settings.items():
            command += ["--set", f"{name}={value}"]
        log = self.data_dir / f"broker-{broker_id}.log"
        process = _Process(command, log, subprocess.PIPE)
        with self._telling:
            self._brokers[broker_id] = process
            if self._faults is not None:
                process.tell(fault_control.encode("add", self._of_broker(broker_id, self._faults)))
            line = _next_line(process)
        if not line:
            process.kill()
            raise ClusterStartError(f"broker {broker_id} did not start; {log} ends with:\n{_tail(log)}")
        self._ports[broker_id] = int(line.rsplit(":", 1)[1])

    def kill(self, broker_id: int) -> None:
        """SIGKILL a broker."""
        self._brokers[broker_id].kill()

    def inject(self, *faults: Fault) -> None:
        """Put faults after those that are there."""
        for fault in faults:
            self._check_broker(fault)
        with self._telling:
            self._tell_all("add", faults)
            assert self._faults is not None
            self._faults += faults

    def clear_faults(self) -> None:
        """Let everything go well again; what has fired is forgotten too."""
        with self._telling:
            self._tell_all("clear")
            self._faults = []

    def faults_fired(self) -> dict[Fault, int]:
        """How often each fault fired, on all brokers that run, since it was injected."""
        with self._telling:
            return dict(self._tell_all("fired"))

    def _tell_all(self, command: str, faults: tuple[Fault, ...] = ()) -> Counter[Fault]:
        if self._faults is None:
            raise ConfigError("this cluster takes no faults: start it with faults=[], or with the first ones")
        fired: Counter[Fault] = Counter()
        for broker_id, process in self._brokers.items():
            if process.popen.poll() is not None:
                continue
            try:
                process.tell(fault_control.encode(command, self._of_broker(broker_id, faults)))
                answer = _next_line(process)
            except OSError:
                answer = ""
            if not answer:
                raise KlogError(
                    f"broker {broker_id} does not answer; {self.data_dir}/broker-{broker_id}.log is its log"
                )
            for fault, count in fault_control.decode_answer(answer):
                fired[fault] += count
        return fired

    def _check_broker(self, fault: Fault) -> None:
        if fault.broker is not None and fault.broker not in range(self._count):
            raise ConfigError(f"fault for broker {fault.broker}: there are {self._count}, numbered from 0 on")

    @staticmethod
    def _of_broker(broker_id: int, faults: Iterable[Fault]) -> tuple[Fault, ...]:
        return tuple(fault for fault in faults if fault.broker in (None, broker_id))

    def pid(self, broker_id: int) -> int:
        return self._brokers[broker_id].popen.pid

    def stop(self) -> None:
        """Stop everything cleanly; remove a temporary data directory."""
        for process in self._brokers.values():
            process.stop()
        if self._zookeeper is not None:
            self._zookeeper.stop()
        self._brokers.clear()
        self._zookeeper = None
        if self._given_dir is None:
            shutil.rmtree(self.data_dir, ignore_errors=True)

    def __enter__(self) -> EmbeddedCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _next_line(process: _Process) -> str:
    """The line that a broker prints when it serves, or has obeyed; empty where it ended or took too long."""
    stdout = process.popen.stdout
    assert stdout is not None
    readable, _, _ = select.select([stdout], [], [], _START_SECONDS)
    return stdout.readline().decode().strip() if readable else ""


def _answers(port: int) -> bool:
    try:
        with socket.create_connection((_HOST, port), 1):
            return True
    except OSError:
        return False
