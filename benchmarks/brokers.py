"""Our broker and Kafka 3.9.1 as processes with the same settings, for clients that use them in turn."""

from __future__ import annotations

import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.data import PARTITIONS
from benchmarks.figures import Side
from benchmarks.record_batches import take_turns
from benchmarks.sides import Lines, SideFailed, project_environment
from tests.support.servers.kafka import HOST, Kafka, free_port
from tests.support.spark.pyspark_versions import child_environment

_READY = re.compile(r"klog broker \S+ ready on (\S+)")
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
#: ApiVersions (18), version 0, correlation id 1, client id null.
_API_VERSIONS = struct.pack(">ihhih", 10, 18, 0, 1, -1)


class Broker(Protocol):
    """What the measurements need of a broker; `tests.support.servers.kafka.Kafka` has it, too."""

    @property
    def bootstrap_servers(self) -> str: ...

    @property
    def pid(self) -> int | None: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


class KlogBroker:
    """The embedded broker, started by its command; `start` returns at its ready line.

    Its directories are files that brokers could share, or it `is_alone`.
    """

    def __init__(self, work_dir: Path, settings: Mapping[str, str] | None = None, *, is_alone: bool = False) -> None:
        """`settings` are the broker's, by Kafka's names."""
        self._work_dir, self._is_alone = work_dir, is_alone
        self._settings = [word for item in (settings or {}).items() for word in ("--set", "=".join(item))]
        self._log = work_dir / "klog-broker.log"
        self.bootstrap_servers = f"{HOST}:{free_port()}"
        self.ready_seconds = 0.0
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        self._work_dir.mkdir(parents=True, exist_ok=True)
        data = ["--listen", self.bootstrap_servers, "--data-dir", str(self._work_dir / "data")]
        data += [] if self._is_alone else ["--directories", str(self._work_dir / "directories")]
        data += self._settings
        data.append("--stop-with-stdin")  # the broker ends when this process does
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "spark_klog.cli", "broker", *data],
            cwd=self._work_dir,
            env={**child_environment(sys.executable), **project_environment()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        lines = Lines(self._process.stdout, copy=self._log)
        deadline = started + _START_SECONDS
        while True:
            try:
                line = lines.get(max(0.0, deadline - time.perf_counter()))
            except TimeoutError:
                raise SideFailed(f"no ready line in {_START_SECONDS:.0f} s; {self._tail()}") from None
            if line is None:
                raise SideFailed(f"the broker ended with {self._process.wait()}; {self._tail()}")
            if _READY.search(line[1]):
                self.ready_seconds = line[0] - started
                return

    def stop(self, *, kills: bool = False) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if kills:
            process.kill()
        else:
            process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        finally:
            assert process.stdin is not None
            process.stdin.close()

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-1500:].strip() if self._log.exists() else "no output"


class FirstAnswer:
    """Sends ApiVersions to an address in a thread, until the first answer."""

    def __init__(self, bootstrap_servers: str) -> None:
        host, _, port = bootstrap_servers.rpartition(":")
        self._address = (host, int(port))
        self._started = time.perf_counter()
        self._seconds: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def seconds(self) -> float:
        """The seconds until the first answer; the broker must be up by now."""
        self._thread.join(_START_SECONDS)
        self.stop()
        if self._seconds is None:
            raise SideFailed(f"no answer to ApiVersions in {_START_SECONDS:.0f} s")
        return self._seconds

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            if self._answers():
                self._seconds = time.perf_counter() - self._started
                return
            time.sleep(0.005)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(self._address, timeout=5) as connection:
                connection.sendall(_API_VERSIONS)
                answer = connection.makefile("rb").read(10)
        except OSError:
            return False
        # size, correlation id, error code
        return len(answer) == 10 and struct.unpack(">ih", answer[4:]) == (1, 0)


def resident_mb(pid: int) -> float:
    """VmRSS of a process and its children, in MB (10^6)."""
    status = Path(f"/proc/{pid}/status").read_text()
    own = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0)
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return own * 1024 / 1e6 + sum(map(resident_mb, children))


KAFKA = "Kafka 3.9.1, ZooKeeper mode, -Xmx1g"
#: Records may have old timestamps; deleted files must go before the next run fills the disk.
SETTINGS = {"log.retention.ms": "-1", "log.segment.delete.delay.ms": "1000"}
_SECONDS = 30.0


@contextmanager
def broker_pair(folder: Path) -> Iterator[tuple[KlogBroker, Kafka]]:
    """Yield both brokers, ready."""
    klog = KlogBroker(folder / "klog", SETTINGS)
    try:
        klog.start()
        with Kafka("3.9.1", folder / "kafka", SETTINGS, full_speed=True) as kafka:
            yield klog, kafka
    finally:
        klog.stop()


def compare(brokers: tuple[Broker, Broker], repeat: int, run: Callable[[Broker], float]) -> tuple[Side, Side]:
    """Run `run` at our broker and at Kafka in turn: a warm-up of each, then `repeat` runs."""
    klog, kafka = brokers
    sides = Side("klog"), Side(KAFKA)
    take_turns([(sides[0], lambda: run(klog)), (sides[1], lambda: run(kafka))], repeat)
    return sides


@contextmanager
def topic(servers: str, name: str, partitions: int = PARTITIONS) -> Iterator[str]:
    """Yield a new topic whose partitions have leaders; delete it afterwards."""
    create_topic(servers, name, partitions)
    try:
        yield name
    finally:
        delete_topic(servers, name)


def delete_topic(servers: str, name: str) -> None:
    """Delete a topic; the broker deletes its files a little later."""
    admin = _admin(servers)  # keeps the client alive until the response arrives
    admin.delete_topics([name])[name].result(_SECONDS)


def create_topic(servers: str, name: str, partitions: int = PARTITIONS) -> None:
    """Create a topic, and wait until each broker knows a leader of each partition."""
    admin = _admin(servers)
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result(_SECONDS)
    deadline = time.monotonic() + _SECONDS
    for server in servers.split(","):
        admin = _admin(server)
        while not _has_leaders(admin, name, partitions):
            if time.monotonic() > deadline:
                raise SideFailed(f"topic {name} has no leaders after {_SECONDS:.0f} s")
            time.sleep(0.05)


def _has_leaders(admin: AdminClient, name: str, partitions: int) -> bool:
    # ask for all topics, as a request for an unknown topic could create it
    found = admin.list_topics(timeout=_SECONDS).topics.get(name)
    return found is not None and sum(entry.leader >= 0 for entry in found.partitions.values()) == partitions


def partitions_by_leader(servers: str, name: str) -> dict[int, list[int]]:
    """The partitions of a topic, by their leader's port."""
    found = _admin(servers).list_topics(name, timeout=_SECONDS)
    by_port: dict[int, list[int]] = {}
    for partition in found.topics[name].partitions.values():
        by_port.setdefault(found.brokers[partition.leader].port, []).append(partition.id)
    return by_port


def check_count(broker: Broker, name: str, wanted: int, partitions: int = PARTITIONS) -> None:
    """Raise `SideFailed` unless the topic, from which nothing was deleted, has `wanted` records."""
    consumer = Consumer({**_client(broker.bootstrap_servers), "group.id": "bench"})
    try:
        places = [TopicPartition(name, partition) for partition in range(partitions)]
        found = sum(consumer.get_watermark_offsets(place, timeout=_SECONDS)[1] for place in places)
    finally:
        consumer.close()
    if found != wanted:
        raise SideFailed(f"topic {name} holds {found} records, {wanted} were sent")


def _admin(servers: str) -> AdminClient:
    return AdminClient(_client(servers))


def _client(servers: str) -> dict[str, str | int]:
    return {"bootstrap.servers": servers, "log_level": 3}  # errors only
