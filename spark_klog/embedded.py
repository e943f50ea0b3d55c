"""A cluster in child processes of the caller: brokers, and ZooKeeper and a schema registry on request.

    DATA_DIR/broker-N/       data directory of broker N      DATA_DIR/broker-N.log   its log
    DATA_DIR/schema-registry.log                             the schema registry's log; its state is a topic
    DATA_DIR/schema-registry.url                             its address, for the brokers
    DATA_DIR/directories/    the brokers' shared tree, without ZooKeeper
    DATA_DIR/zookeeper/      ZooKeeper's data                DATA_DIR/zookeeper.log
    DATA_DIR/klog-cluster.properties   marks the directory as a cluster's (see `log.layout`)
    DATA_DIR/.lock                     one cluster at a time (see `log.file_system`)

Every process reads a pipe from the caller and stops when the pipe ends, so none outlives the caller.
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from spark_klog.base.durable import replace_file
from spark_klog.base.extras import require
from spark_klog.broker.faults import Fault, control as fault_control
from spark_klog.broker.metadata.registration import answers
from spark_klog.client.forks import Maker
from spark_klog.client.settings import check_settings
from spark_klog.errors import ConfigError, DirectoryError, KlogError, LogDirLocked
from spark_klog.log.file_system import take_lock
from spark_klog.log.layout import check_cluster_directory, mark_cluster, usable
from spark_klog.schemas.registry.settings import BROKER_URL
from spark_klog.security.config import FILE
from spark_klog.trees.opening import open_tree
from spark_klog.trees.paths import host_and_port
from spark_klog.wire.listening import bind, parse_listen

__all__ = ["ClusterStartError", "EmbeddedCluster"]

_log = logging.getLogger(__name__)
_HOST = "127.0.0.1"
START_SECONDS = 60.0
_STOP_SECONDS = 30.0
#: Shell command that runs a program which does not read its stdin, and stops it when our pipe ends.
SUPERVISED = ("sh", "-c", '"$@" </dev/null & child=$!; cat >/dev/null; kill $child 2>/dev/null; wait $child', "sh")
#: What ZooKeeper logs if it can't bind its port; the shell that supervises it lives on.
_TAKEN = "BindException"
#: How many free ports ZooKeeper is started on, if it can't bind the one before.
_PORT_ATTEMPTS = 3
_ZOOKEEPER_MAIN = "org.apache.zookeeper.server.ZooKeeperServerMain"
#: Prefix of a broker's last line if it refuses to start: the reason follows.
_REFUSAL = "klog: "


#: What differs from a single broker: tests and examples write old timestamps, and wait for rebalances.
_SETTINGS = {
    "log.retention.ms": "-1",
    "group.initial.rebalance.delay.ms": "0",
    "group.consumer.heartbeat.interval.ms": "100",
    "group.consumer.session.timeout.ms": "10000",
}


class ClusterStartError(KlogError):
    """A process of the cluster did not start; the message has the reason or the end of its log."""

    #: The exit code of a broker that refused to start: 2 for its settings, as of all commands.
    _exit_code = 1


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
        text = self.logged()
        last = text.rpartition("\n")[2]
        if last.startswith(_REFUSAL):
            error = ClusterStartError(f"{name} did not start: {last.removeprefix(_REFUSAL)}")
            with suppress(subprocess.TimeoutExpired):
                error._exit_code = self.popen.wait(_STOP_SECONDS)
            return error
        return ClusterStartError(f"{name} did not start; {self.log} ends with:\n{text[-2000:]}")

    def logged(self) -> str:
        """What it has logged since its start."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace").strip()

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
            self.popen.kill()
        self._ended()

    def kill(self) -> None:
        self.popen.kill()
        self._ended()

    def _ended(self) -> None:
        self.popen.wait()
        for pipe in filter(None, (self.popen.stdin, self.popen.stdout)):
            pipe.close()

    def next_line(self) -> str:
        """The next line that a broker prints: it is ready, or has applied a command; empty if it ended or is late."""
        stdout = self.popen.stdout
        assert stdout is not None
        waiting = select.poll()  # select takes no descriptor above 1023, which a program with many clients has
        waiting.register(stdout, select.POLLIN)
        readable = waiting.poll(1000 * START_SECONDS)
        return stdout.readline().decode().strip() if readable else ""


class EmbeddedCluster:
    """A context manager: `brokers` brokers on free loopback ports, with data in `data_dir` (None: a temporary one).

    `listen` is HOST:PORT of broker 0 (the others get free ports of that host), `zookeeper_port` is ZooKeeper's. If a
    port is in use: `ConfigError`, or `ClusterStartError` of the broker. `DataDirectoryError` if `data_dir` is neither
    new nor a cluster's directory, or can't be written; `LogDirLocked` if a cluster runs on it.

    `settings` are broker settings by Kafka's names. Unlike a single broker, the cluster keeps records for ever
    (log.retention.ms=-1), because tests and examples often write old timestamps, and groups rebalance quickly: they do
    not wait for more members (group.initial.rebalance.delay.ms=0), and members of KIP-848 send heartbeats every 100 ms
    and time out after 10 s (group.consumer.heartbeat.interval.ms, group.consumer.session.timeout.ms). `log_format` of
    the brokers' logs is "text" or "json". `ClusterStartError` names the process that did not start.

    With `schema_registry` a schema registry with Confluent's REST API is served at `schema_registry_url`: True picks a
    free loopback port, a number is one, a text is HOST:PORT or a port. For topics that validate schemas the brokers ask
    it, unless `settings` have another `confluent.schema.registry.url`. Its state is the topic `_schemas`, so it needs a
    listener without security: otherwise `ConfigError`, and see `spark_klog.schema_registry`.

    `faults` (see `spark_klog.broker.faults`) apply from the first request on. If it is not None (it may be empty),
    `inject` and `clear_faults` change them, and return when every broker has applied the change. A restarted broker
    starts them from the beginning. `ConfigError` for an invalid fault.
    """

    def __init__(
        self,
        brokers: int = 1,
        zookeeper: bool = False,
        data_dir: str | Path | None = None,
        settings: dict[str, str] | None = None,
        faults: Iterable[Fault] | None = None,
        log_format: str = "text",
        listen: str | None = None,
        zookeeper_port: int | None = None,
        schema_registry: bool | int | str = False,
    ) -> None:
        if type(brokers) is not int:
            raise ConfigError(f"brokers={brokers!r} must be a number")
        if settings is not None:
            check_settings("EmbeddedCluster", settings, "'num.partitions': '2'")
        if brokers < 1:
            raise ConfigError(f"brokers={brokers}: give at least 1")
        if zookeeper_port is not None and not zookeeper:
            raise ConfigError(f"zookeeper_port={zookeeper_port} needs zookeeper=True")
        if isinstance(faults, Fault):
            raise ConfigError("faults is a single Fault: give a list of faults")
        if listen is not None and "listeners" in (settings or {}):
            raise ConfigError(f"listen={listen!r} and the setting listeners exclude each other: give one of them")
        first = (settings or {}).get("listeners", "PLAINTEXT:")
        if schema_registry is not False and not first.startswith("PLAINTEXT:"):
            raise ConfigError(
                "schema_registry=True needs a first listener without security: start a "
                "spark_klog.schema_registry.SchemaRegistry with client settings that log in"
            )
        host, port = parse_listen(listen, "listen") if listen is not None else (_HOST, 0)
        self._listen_first, self._listen_others = host_and_port(host, port), host_and_port(host, 0)
        self._count = brokers
        self._maker = Maker("cluster", KlogError)
        self._with_zookeeper = zookeeper
        self._given_dir = Path(data_dir) if data_dir is not None else None
        self._settings = _SETTINGS | (settings or {})
        self._log_format = log_format
        self._brokers: dict[int, ChildProcess] = {}
        #: HOST:PORT of each started broker.
        self._addresses: dict[int, str] = {}
        self._zookeeper: ChildProcess | None = None
        self._zookeeper_port = zookeeper_port or 0
        #: Descriptor with the directory's lock while the cluster runs.
        self._lock: int | None = None
        self.zookeeper_connect: str | None = None
        #: Where the schema registry listens, or is to listen; None without one.
        self._registry_address: str | None = (
            (f"{_HOST}:0" if schema_registry else None) if isinstance(schema_registry, bool) else str(schema_registry)
        )
        self._registry: ChildProcess | None = None
        self.schema_registry_url: str | None = None
        self._faults = None if faults is None else list(faults)
        #: Held during a command to the brokers and their answers.
        self._commands = threading.Lock()
        for fault in self._faults or ():
            self._check_fault(fault)

    @property
    def bootstrap_servers(self) -> str:
        """HOST:PORT of every started broker, killed ones included."""
        return ",".join(address for _, address in sorted(self._addresses.items()))

    def start(self) -> EmbeddedCluster:
        """Start all processes; if one fails, stop the others."""
        if self._lock is not None:
            raise ConfigError("the cluster is already started")
        self.data_dir = self._given_dir or Path(tempfile.mkdtemp(prefix="klog-"))
        try:
            self._open_data_dir()
            if self._with_zookeeper:
                self._start_zookeeper()
            for broker_id in range(self._count):
                self.restart(broker_id)
            if self._registry_address is not None:
                self.restart_schema_registry()
        except BaseException:
            self.stop()
            raise
        return self

    def _open_data_dir(self) -> None:
        known = check_cluster_directory(self.data_dir, zookeeper=self._with_zookeeper)
        with usable(self.data_dir):
            self.data_dir.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.data_dir)
            self._await_orphans(self._lock)
        mark_cluster(self.data_dir, zookeeper=self._with_zookeeper)
        if missing := [str(broker_id) for broker_id in known if broker_id >= self._count]:
            _log.warning(
                "%s has data of %d brokers, only %d started: partitions of broker %s are unavailable",
                *(self.data_dir, len(known), self._count, ", ".join(missing)),
            )

    def _await_orphans(self, lock: int) -> None:
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
                    _log.warning("%s: waiting for processes of a killed cluster to stop", self.data_dir)
                    is_logged = True
                if time.monotonic() > deadline:
                    raise LogDirLocked(
                        f"{self.data_dir} is in use by processes of a killed cluster; stop them first"
                    ) from None
            time.sleep(0.05)

    def _start_zookeeper(self) -> None:
        """Start ZooKeeper. Others may take a free port before the JVM binds it: then another one is tried."""
        for left in reversed(range(_PORT_ATTEMPTS)):
            try:
                self._try_zookeeper()
                break
            except ClusterStartError as error:
                if self._zookeeper is None or self._zookeeper_port or not left or _TAKEN not in str(error):
                    raise
                self._zookeeper.stop()
                _log.info("ZooKeeper's port was taken meanwhile, trying another one")

    def _try_zookeeper(self) -> None:
        require("ZooKeeper, which is in its jars,", "pyspark")
        spec = importlib.util.find_spec("pyspark")
        java = shutil.which("java")
        if spec is None or spec.origin is None or java is None:
            raise ClusterStartError("ZooKeeper needs Java 17 on the PATH, and pyspark for its jars")
        with bind(_HOST, self._zookeeper_port, "--zookeeper-port (zookeeper_port)") as free:
            port: int = free.getsockname()[1]
        data = self.data_dir / "zookeeper"
        config = self.data_dir / "zookeeper.properties"
        with usable(self.data_dir):
            data.mkdir(exist_ok=True)
            config.write_text(
                f"dataDir={data}\nclientPort={port}\nclientPortAddress={_HOST}\ntickTime=1000\n"
                "admin.enableServer=false\nmaxClientCnxns=0\n"
            )
        jars = Path(spec.origin).parent / "jars"
        command = [java, "-Xmx256m", "-cp", f"{jars}/*", _ZOOKEEPER_MAIN, str(config)]
        assert self._lock is not None
        log = self.data_dir / "zookeeper.log"
        self._zookeeper = ChildProcess([*SUPERVISED, *command], log, subprocess.STDOUT, self._lock)
        deadline = time.monotonic() + START_SECONDS
        while not self._has_sessions(port):
            has_ended = self._zookeeper.popen.poll() is not None or _TAKEN in self._zookeeper.logged()
            if time.monotonic() > deadline or has_ended:
                raise self._zookeeper.start_error("ZooKeeper")
            time.sleep(0.05)
        self.zookeeper_connect = f"{_HOST}:{port}"

    def _has_sessions(self, port: int) -> bool:
        """Whether ZooKeeper opens a session; it accepts connections before it does."""
        if not answers((_HOST, port)):
            return False
        with suppress(DirectoryError):
            open_tree(f"zookeeper://{_HOST}:{port}").close()
            return True
        return False

    def restart(self, broker_id: int) -> None:
        """Start a broker that was killed (or not yet started), with its port and data.

        `ConfigError` if it is running or unknown; `ClusterStartError`.
        """
        self._check_id(broker_id)
        if self._lock is None:
            raise ConfigError(f"broker {broker_id} can't start before the cluster: call start() first")
        running = self._brokers.get(broker_id)
        if running is not None and running.popen.poll() is None:
            raise ConfigError(f"broker {broker_id} is running; kill it first")
        command = [sys.executable, "-m", "spark_klog.cli", "broker", "--stop-with-stdin", "--broker-id", str(broker_id)]
        if self.zookeeper_connect:
            command += ["--zookeeper", self.zookeeper_connect]
        else:
            command += ["--directories", str(self.data_dir / "directories")]
        if "listeners" not in self._settings:
            first = self._listen_others if broker_id else self._listen_first
            command += ["--listen", self._addresses.get(broker_id, first)]
        command += ["--data-dir", str(self.data_dir / f"broker-{broker_id}"), "--log-format", self._log_format]
        if self._faults is not None:
            command += ["--faults"]
        settings = {BROKER_URL: f"{FILE}{self._url_file}"} if self._registry_address is not None else {}
        for name, value in (settings | self._settings).items():
            command += ["--set", f"{name}={value}"]
        process = ChildProcess(command, self.data_dir / f"broker-{broker_id}.log", subprocess.PIPE, self._lock)
        name = f"broker {broker_id}"
        with self._commands:
            self._brokers[broker_id] = process
            try:
                if self._faults is not None:
                    process.send(fault_control.encode("add", self._of_broker(broker_id, self._faults)))
                line = process.next_line()
            except OSError:  # it has ended
                line = ""
        if not line:
            error = process.start_error(name)
            process.kill()
            raise error
        self._addresses[broker_id] = line.rsplit(" ", 1)[1]

    def kill(self, broker_id: int) -> None:
        """SIGKILL a broker; `ConfigError` if it is unknown or was not started."""
        self._started(broker_id).kill()

    def restart_schema_registry(self) -> None:
        """Start the schema registry that was killed, with its address. It reads its topic before it serves.

        `ConfigError` if it is running, or the cluster has none; `ClusterStartError`.
        """
        if self._registry_address is None or self._lock is None:
            raise ConfigError("there is no schema registry: start the cluster with schema_registry=True")
        if self._registry is not None and self._registry.popen.poll() is None:
            raise ConfigError("the schema registry is running; kill it first")
        command = [sys.executable, "-m", "spark_klog.cli", "schema-registry", "--stop-with-stdin"]
        command += ["--bootstrap-server", self.bootstrap_servers, "--listen", self._registry_address]
        self._registry = ChildProcess(command, self.data_dir / "schema-registry.log", subprocess.PIPE, self._lock)
        line = self._registry.next_line()
        if not line:
            self._registry.kill()
            raise self._registry.start_error("the schema registry")
        self.schema_registry_url = line.rsplit(" ", 1)[1]
        self._registry_address = self.schema_registry_url.removeprefix("http://")
        with usable(self.data_dir):
            replace_file(self._url_file, self.schema_registry_url.encode(), self._url_file.with_suffix(".new"))

    @property
    def _url_file(self) -> Path:
        """Where brokers find the registry, which has its port only after they have started."""
        return self.data_dir / "schema-registry.url"

    def kill_schema_registry(self) -> None:
        """SIGKILL the schema registry; `ConfigError` if there is none."""
        if self._registry is None:
            raise ConfigError("there is no schema registry: start the cluster with schema_registry=True")
        self._registry.kill()

    def ended(self) -> dict[str, int]:
        """Exit codes of the processes that ended before `stop`; -N for signal N."""
        processes = {f"broker {broker_id}": process for broker_id, process in self._brokers.items()}
        if self._zookeeper is not None:
            processes["ZooKeeper"] = self._zookeeper
        if self._registry is not None:
            processes["schema registry"] = self._registry
        codes = {name: process.popen.poll() for name, process in processes.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def _started(self, broker_id: int) -> ChildProcess:
        self._check_id(broker_id)
        if broker_id not in self._brokers:
            raise ConfigError(f"broker {broker_id} is not running; start the cluster first")
        return self._brokers[broker_id]

    def _check_id(self, broker_id: int) -> None:
        if broker_id not in range(self._count):
            last = f", numbered 0 to {self._count - 1}" if self._count > 1 else ", broker 0"
            raise ConfigError(f"there is no broker {broker_id}: the cluster has {self._count}{last}")

    def inject(self, *faults: Fault) -> None:
        """Append faults to the current ones."""
        for fault in faults:
            self._check_fault(fault)
        with self._commands:
            self._send_all("add", faults)
            assert self._faults is not None
            self._faults += faults

    def clear_faults(self) -> None:
        """Remove all faults, and reset the counts of `faults_fired`."""
        with self._commands:
            self._send_all("clear")
            self._faults = []

    def faults_fired(self) -> dict[Fault, int]:
        """How often each fault fired since it was injected, on all running brokers."""
        with self._commands:
            return dict(self._send_all("fired"))

    def _send_all(self, command: str, faults: tuple[Fault, ...] = ()) -> Counter[Fault]:
        if self._faults is None:
            raise ConfigError("this cluster was started without faults: start it with faults=[] or a list of faults")
        fired: Counter[Fault] = Counter()
        for broker_id, process in self._brokers.items():
            if process.popen.poll() is not None:
                continue
            try:
                process.send(fault_control.encode(command, self._of_broker(broker_id, faults)))
                answer = process.next_line()
            except OSError:
                answer = ""
            if not answer:
                raise KlogError(f"broker {broker_id} does not answer; see {self.data_dir}/broker-{broker_id}.log")
            for fault, count in fault_control.decode_answer(answer):
                fired[fault] += count
        return fired

    def _check_fault(self, fault: Fault) -> None:
        if not isinstance(fault, Fault):
            raise ConfigError(f"{fault!r} is not a Fault: give Fault({fault!r}, api=...)")
        if fault.broker is not None and fault.broker not in range(self._count):
            raise ConfigError(f"fault for broker {fault.broker}: the cluster has {self._count}, numbered from 0")

    @staticmethod
    def _of_broker(broker_id: int, faults: Iterable[Fault]) -> tuple[Fault, ...]:
        return tuple(fault for fault in faults if fault.broker in (None, broker_id))

    def pid(self, broker_id: int) -> int:
        """Process id of a broker; `ConfigError` as in `kill`."""
        return self._started(broker_id).popen.pid

    def stop(self) -> None:
        """Stop all processes cleanly, and remove a temporary data directory; in a forked process do nothing."""
        if self._maker.is_forked:
            return  # the processes, the lock and the directory are the parent's
        if self._registry is not None:
            self._registry.stop()
            self._registry = None
        for process in self._brokers.values():
            process.stop()
        if self._zookeeper is not None:
            self._zookeeper.stop()
        self._brokers.clear()
        self._zookeeper = None
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing is not enough: a forked child of the caller may have it
            os.close(self._lock)
            self._lock = None
        if self._given_dir is None and hasattr(self, "data_dir"):
            shutil.rmtree(self.data_dir, ignore_errors=True)

    def __enter__(self) -> EmbeddedCluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
