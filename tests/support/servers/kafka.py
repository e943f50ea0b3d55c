"""Real Apache Kafka and ZooKeeper servers on 127.0.0.1, for tests."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib.util
import os
import random
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Literal

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic  # the stubs of .admin do not export it

from tests.support.packages.maven import resolve

HOST = "127.0.0.1"
#: The newest fix of each of 4.2 to 4.4; all others have tests of their own, or are what older tests were written with.
Version = Literal["0.10.2.2", "3.9.1", "4.1.0", "4.2.2", "4.3.1", "4.4.0"]
#: What quick tests use, where one version tells enough.
NEWEST: Final = "4.4.0"
#: Versions with KRaft and without ZooKeeper.
KRAFT: tuple[Version, ...] = ("4.1.0", "4.2.2", "4.3.1", "4.4.0")
#: Those of them that only a small set of tests uses.
OTHERS_OF_KRAFT: tuple[Version, ...] = ("4.1.0", "4.2.2", "4.3.1")


def _of_kraft(version: Version) -> tuple[str, ...]:
    # Unlike the others, these include no logger.
    logger = "org.slf4j:slf4j-simple:1.7.36"
    return f"org.apache.kafka:kafka_2.13:{version}", f"org.apache.kafka:kafka-tools:{version}", logger


_ARTIFACTS: dict[Version, tuple[str, ...]] = {
    # Java 9 and later do not include javax.xml.bind.
    "0.10.2.2": ("org.apache.kafka:kafka_2.11:0.10.2.2", "javax.xml.bind:jaxb-api:2.3.1"),
    "3.9.1": ("org.apache.kafka:kafka_2.13:3.9.1", "org.apache.kafka:kafka-tools:3.9.1"),
    **{version: _of_kraft(version) for version in KRAFT},
}
#: Whether to test with all versions; CI tests only the most important one.
ALL_VERSIONS = os.environ.get("SPARK_KLOG_KAFKAS") == "all"
_READY_SECONDS = 60.0
_STOP_SECONDS = 30.0
_LOG_TAIL_LINES = 60
#: Of Java, for short-lived or idle processes.
QUICK_START = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
#: What Kafka's own start script gives a broker's JVM.
_FULL_SPEED = ("-Xms1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35")
_PR_SET_PDEATHSIG = 1
# Loaded here, not in the child, which should do as little as possible between fork and exec.
_LIBC = ctypes.CDLL(None, use_errno=True)
_random = random.SystemRandom()  # not the global one: seeded tests would always draw the same ports
_ports_given: set[int] = set()
#: The main process of a run says here how many workers it has.
WORKERS = "SPARK_KLOG_TEST_WORKERS"


class ServerStartError(Exception):
    """A server ended before it was ready, or was not ready in time; the text ends with the tail of its log."""


def versions(first: Version, *others: Version) -> list[Version]:
    """The versions for a test's parameters: `others` are for `make soak`, which sets SPARK_KLOG_KAFKAS=all."""
    return [first, *others] if ALL_VERSIONS else [first]


def free_port() -> int:
    """A free TCP port of 127.0.0.1 that no other call in this test run has returned.

    Each worker of pytest-xdist, and the main process, has its own set of ports, so that none takes the port of a broker
    that is stopped for a restart.

    The port is below the ephemeral range: a client that keeps connecting to a stopped server's ephemeral port can get
    this port as its own and connect to itself, and then the server can't start again.
    """
    try:
        ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        ephemeral = 32768
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT") or os.environ.get(WORKERS, "0"))
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw-1").removeprefix("gw")) + 1  # 0: the main one
    processes = max(workers, process) + 1  # a worker in place of one that crashed has a number of its own
    for _ in range(1000):
        port = _random.randrange(10_000 + process, max(ephemeral, 20_000), processes)
        if port in _ports_given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        _ports_given.add(port)
        return port
    raise OSError("no free port")


def _dies_with(parent: int) -> Callable[[], None]:
    def set_parent_death_signal() -> None:
        if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            os._exit(126)
        if os.getppid() != parent:  # the parent died before the prctl: no signal will come
            os._exit(126)

    return set_parent_death_signal


def write_properties(path: Path, properties: Mapping[str, object]) -> Path:
    path.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
    return path


class Process:
    """A server in a process of its own, which dies with the thread that started it.

    PR_SET_PDEATHSIG applies to the thread, so start servers from the main thread.
    """

    def __init__(self, name: str, work_dir: Path) -> None:
        self._name = name
        #: The folder of its data and output.
        self.work_dir = work_dir.absolute()
        self.work_dir.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None

    def __getstate__(self) -> dict[str, object]:
        """A copy in another process knows the server's port and folder, but does not own its process."""
        return {**self.__dict__, "_process": None}

    def _command(self) -> Sequence[str]:
        raise NotImplementedError

    def _is_ready(self) -> bool:
        raise NotImplementedError

    @property
    def output(self) -> Path:
        """The file with standard output and error of all runs of the server."""
        return self.work_dir / f"{self._name}.log"

    @property
    def pid(self) -> int | None:
        """The process id; None while the server is not running."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Start with the same data and port as before; return when ready."""
        if self.pid is not None:
            return
        with self.output.open("ab") as output:
            self._process = process = subprocess.Popen(
                self._command(),
                cwd=self.work_dir,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_dies_with(os.getpid()),
            )
        try:
            deadline = time.monotonic() + _READY_SECONDS
            while not self._is_ready():
                if process.poll() is not None:
                    raise ServerStartError(f"{self._name} ended with {process.returncode}:\n{self._tail()}")
                if time.monotonic() > deadline:
                    raise ServerStartError(f"{self._name} was not ready in {_READY_SECONDS:.0f} s:\n{self._tail()}")
                time.sleep(0.05)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Send SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if the server does not end."""
        self._end(signal.SIGTERM)

    def _end(self, signal_number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.send_signal(signal_number)
            process.wait(_STOP_SECONDS)
        except BaseException as error:
            process.kill()
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise

    def _tail(self) -> str:
        lines = self.output.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])


class ZooKeeperServer(Process):
    """A standalone ZooKeeper, by default from pyspark's jars, so that nothing is downloaded.

    Its data and output are in `log_dir`. Session timeouts are 2 to 20 times `tick_ms`, and expire at multiples of it.
    """

    def __init__(
        self,
        log_dir: Path,
        libs: Path | None = None,
        java_options: Sequence[str] = (),
        tick_ms: int = 3000,
    ) -> None:
        super().__init__("zookeeper", log_dir)
        self._libs = pyspark_jars() if libs is None else libs
        self._java_options = java_options
        self._tick_ms = tick_ms
        self._port = free_port()

    @property
    def connect(self) -> str:
        return f"{HOST}:{self._port}"

    def __enter__(self) -> ZooKeeperServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _command(self) -> Sequence[str]:
        # With the arguments PORT DIR instead of a file it would listen on every address of the machine.
        config = write_properties(
            self.work_dir / "zookeeper.properties",
            {
                "clientPort": self._port,
                "clientPortAddress": HOST,
                "dataDir": self.work_dir / "zookeeper",
                "tickTime": self._tick_ms,
                "admin.enableServer": "false",
                "4lw.commands.whitelist": "srvr",
                "maxClientCnxns": 0,
                "forceSync": "no",  # without fsync only a crash of the machine would lose data
            },
        )
        return [
            "java",
            "-Xmx256m",
            *QUICK_START,
            *self._java_options,
            "-cp",
            f"{self._libs}/*",
            "org.apache.zookeeper.server.ZooKeeperServerMain",
            str(config),
        ]

    def _is_ready(self) -> bool:
        try:
            with socket.create_connection((HOST, self._port), timeout=2) as connection:
                connection.sendall(b"srvr")
                answer = b""
                while received := connection.recv(4096):
                    answer += received
        except OSError:
            return False
        return answer.startswith(b"Zookeeper version")


def pyspark_jars() -> Path:
    spec = importlib.util.find_spec("pyspark")  # finds a package without importing it
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("pyspark is not installed", name="pyspark")
    return Path(spec.submodule_search_locations[0]) / "jars"


class Kafka(Process):
    """A broker: 4.1.0 and later with KRaft, the others with a ZooKeeper of their own.

    0.10.2.2 stores magic 1, and magic 0 in topics with the config `message.format.version=0.9.0`.
    """

    def __init__(
        self,
        version: Version,
        work_dir: Path,
        overrides: Mapping[str, object] | None = None,
        full_speed: bool = False,
        beside: Kafka | None = None,
        listeners: Mapping[str, str] | None = None,
    ) -> None:
        """`overrides` are broker properties that replace the defaults.

        With `full_speed`, for benchmarks, the JVM and the threads are a real broker's; otherwise they use little CPU.
        `listeners` are additional listeners: security protocols by name; `ports` has their ports.
        `beside` is another broker of the same cluster, whose ZooKeeper this one uses; close `beside` last.
        """
        super().__init__("kafka", work_dir)
        self.broker_id: int = 1 if beside is None else beside.broker_id + 1
        self._is_first = beside is None
        self.version = version
        self.libs = kafka_libs(version)
        self.log_dir = self.work_dir / "kafka"
        self._port = free_port()
        self._full_speed = full_speed
        self._zookeeper: ZooKeeperServer | None = None
        self.ports = {name: free_port() for name in listeners or {}}
        more = "".join(f",{name}://{HOST}:{port}" for name, port in self.ports.items())
        protocols = "".join(f",{name}:{protocol}" for name, protocol in (listeners or {}).items())
        controller: dict[str, object]
        if version in KRAFT:
            controller_address = f"{HOST}:{free_port()}"
            controller = {
                "node.id": self.broker_id,
                "process.roles": "broker,controller",
                "listeners": f"PLAINTEXT://{self.bootstrap_servers},CONTROLLER://{controller_address}{more}",
                "listener.security.protocol.map": f"PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT{protocols}",
                "controller.listener.names": "CONTROLLER",
                "controller.quorum.voters": f"{self.broker_id}@{controller_address}",
                # After a kill, a broker can register only when the session of its killed process has ended.
                "broker.heartbeat.interval.ms": 500,
                "broker.session.timeout.ms": 3000,
                "share.coordinator.state.topic.num.partitions": 1,
                "share.coordinator.state.topic.replication.factor": 1,
                "share.coordinator.state.topic.min.isr": 1,
            }
        else:
            self._zookeeper = (
                ZooKeeperServer(self.work_dir, self.libs, self._logging_options())
                if beside is None
                else beside._zookeeper
            )
            assert self._zookeeper is not None, "brokers beside each other need a ZooKeeper"
            controller = {
                "broker.id": self.broker_id,
                "listeners": f"PLAINTEXT://{self.bootstrap_servers}{more}",
                "listener.security.protocol.map": f"PLAINTEXT:PLAINTEXT{protocols}",
                "zookeeper.connect": self._zookeeper.connect,
            }
        self._config = write_properties(
            self.work_dir / "server.properties",
            {
                **controller,
                "log.dirs": self.log_dir,
                "auto.create.topics.enable": "true",
                "num.partitions": 1,
                "default.replication.factor": 1,
                "auto.leader.rebalance.enable": "false",
                "group.initial.rebalance.delay.ms": 0,
                "offsets.topic.num.partitions": 1,
                "offsets.topic.replication.factor": 1,
                "transaction.state.log.num.partitions": 1,
                "transaction.state.log.replication.factor": 1,
                "transaction.state.log.min.isr": 1,
                # Retention uses the records' timestamps, and tests append records with old ones.
                "log.retention.ms": -1,
                # Idle threads wake up several times a second, and a test run has a dozen idle brokers.
                **({} if full_speed else {"num.io.threads": 2, "num.network.threads": 2}),
                **(overrides or {}),
            },
        )

    @property
    def bootstrap_servers(self) -> str:
        return f"{HOST}:{self._port}"

    @property
    def zookeeper_connect(self) -> str | None:
        return None if self._zookeeper is None else self._zookeeper.connect

    def __enter__(self) -> Kafka:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        if self.pid is not None:
            return
        if self._zookeeper is not None:
            self._zookeeper.start()
            self._delete_stale_registration()
        elif not (self.log_dir / "meta.properties").exists():
            self._format()
        super().start()

    def close(self) -> None:
        """Stop the broker and its ZooKeeper (`kill` and `stop` leave ZooKeeper running)."""
        try:
            self.stop()
        finally:
            if self._zookeeper is not None and self._is_first:
                self._zookeeper.stop()

    def create_topic(self, name: str, partitions: int = 1, configs: Mapping[str, str] | None = None) -> None:
        """Create a topic; return when each partition has a leader."""
        admin = self._admin()
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=dict(configs or {}))
        admin.create_topics([topic])[name].result(timeout=30)
        deadline = time.monotonic() + 60
        while True:
            # All topics: a request for one topic that the broker does not know yet would auto-create it.
            metadata = admin.list_topics(timeout=60).topics.get(name)
            known = [] if metadata is None else list(metadata.partitions.values())
            if len(known) == partitions and all(p.error is None and p.leader >= 0 for p in known):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"topic {name} has no leaders after 30 s")
            time.sleep(0.05)

    def tool(
        self, class_name: str, *args: str, stdin: str = "", timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a main class of the broker's jars; the caller checks the exit code and the output."""
        return subprocess.run(
            [*self._java(*QUICK_START), class_name, *args],
            cwd=self.work_dir,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            start_new_session=True,
            preexec_fn=_dies_with(os.getpid()),
        )

    def start_tool(self, class_name: str, *args: str, errors: IO[bytes]) -> subprocess.Popen[str]:
        """Start a main class whose output is read while it runs; it dies with the thread that started it."""
        return subprocess.Popen(
            [*self._java(*QUICK_START), class_name, *args],
            cwd=self.work_dir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            start_new_session=True,
            preexec_fn=_dies_with(os.getpid()),
        )

    def _java(self, *options: str) -> list[str]:
        return [
            "java",
            *options,
            "-Xmx1g" if self._full_speed else "-Xmx512m",
            "-Dfile.encoding=UTF-8",  # otherwise the locale's, also for standard output
            *self._logging_options(),
            "-cp",
            f"{self.libs}/*",
        ]

    def _command(self) -> Sequence[str]:
        options = _FULL_SPEED if self._full_speed else QUICK_START
        return [*self._java(*options), "kafka.Kafka", str(self._config)]

    def _is_ready(self) -> bool:
        # A client created before the broker listens backs off, and connects late.
        with contextlib.suppress(OSError, KafkaException):
            socket.create_connection((HOST, self._port), timeout=2).close()
            metadata = self._admin().list_topics(timeout=5)
            return metadata.controller_id in metadata.brokers and self.broker_id in metadata.brokers
        return False

    def _admin(self) -> AdminClient:
        # log_level: refused connections are expected during the start; keep them off standard error.
        return AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})

    def _logging_options(self) -> list[str]:
        """Log only warnings and errors, so that the tail of the log shows the cause of a failed start."""
        if self.version in KRAFT:
            return ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
        config = write_properties(
            self.work_dir / "log4j.properties",
            {
                "log4j.rootLogger": "WARN, stderr",
                "log4j.appender.stderr": "org.apache.log4j.ConsoleAppender",
                "log4j.appender.stderr.target": "System.err",
                "log4j.appender.stderr.layout": "org.apache.log4j.PatternLayout",
                "log4j.appender.stderr.layout.ConversionPattern": "%d %p %c: %m%n",
            },
        )
        return [f"-Dlog4j.configuration={config.as_uri()}"]

    def _format(self) -> None:
        cluster_id = "A" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]
        done = self.tool("kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(self._config))
        if done.returncode != 0:
            raise ServerStartError(f"StorageTool format failed:\n{done.stdout}{done.stderr}")

    def _delete_stale_registration(self) -> None:
        """Delete the ephemeral nodes of a killed broker in ZooKeeper.

        They live on until its session times out, and a broker does not start while its id is registered.
        """
        fresh = not (self.log_dir / "meta.properties").exists()
        if self._zookeeper is None or fresh or (self.log_dir / ".kafka_cleanshutdown").exists():
            return
        commands = f"delete /controller\ndelete /brokers/ids/{self.broker_id}\nquit\n"
        self.tool("org.apache.zookeeper.ZooKeeperMain", "-server", self._zookeeper.connect, stdin=commands)


def kafka_libs(version: Version) -> Path:
    """The folder of the jars of the broker and its tools."""
    return resolve(f"kafka-{version}", _ARTIFACTS[version])
