"""Two brokers, a mirror, a load and a stream are exchanged, one process after the other, by those of another version.

The old version is a wheel, unpacked: until there is a release, one of this checkout. Records flow all the time, and in
the end each is there once, wherever it was copied to.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.golden.support import NUMBERS
from tests.load.support import by_duckdb, expected
from tests.spark.support import consume, create_topic
from tests.support.clients.klog import klog_command
from tests.support.papers.pages import ROOT
from tests.support.servers.broker import broker_command
from tests.support.servers.kafka import HOST, free_port
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.test_all("long"), pytest.mark.timeout(900)]
_SECONDS = 120.0
_PARTITIONS = 4
#: A run of a load, without Spark.
_LOAD = "import sys; from tests.load.support import run; run(*sys.argv[1:])"
_WHERE = "import spark_klog; print(spark_klog.__file__)"


class _Upgraded:
    """A command whose process is replaced by one of another code."""

    def __init__(self, folder: Path, name: str, command: list[str], ready: str) -> None:
        self._folder, self._command, self._ready = folder, command, ready
        self._log = folder / f"{name}.log"

    def start(self, code: Path) -> None:
        """Start the process, and wait until its log says that it is ready."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=_environment(code),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_until(lambda: self._ready in self._log.read_text(), f"{self._ready!r} in {self._log}", _SECONDS)

    def stop(self, number: int) -> None:
        assert self._process.poll() is None, self._log.read_text()[-3000:]
        os.killpg(self._process.pid, number)
        self._process.communicate(timeout=_SECONDS)

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def __enter__(self) -> _Upgraded:
        return self


def _environment(code: Path) -> dict[str, str]:
    """That of a process which takes spark_klog from `code`, and tests from the checkout."""
    return os.environ | {"PYTHONPATH": f"{code}{os.pathsep}{ROOT}", "PYSPARK_PYTHON": sys.executable}


@pytest.fixture
def old(wheel: Path, tmp_path: Path) -> Path:
    """The folder of the old version's code."""
    folder = tmp_path / "old"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    command = [sys.executable, "-c", _WHERE]
    where = subprocess.run(command, cwd=tmp_path, env=_environment(folder), capture_output=True, check=True, text=True)
    assert where.stdout.startswith(str(folder))
    return folder


@contextmanager
def _flow(servers: str) -> Iterator[list[int]]:
    """Produce numbers, 200 a second, until the block ends; yields a list whose only item is their count."""
    count, is_over, failures = [0], threading.Event(), []

    def produce() -> None:
        producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 5, "log_level": 0})
        while not is_over.wait(0.05):
            for number in range(count[0], count[0] + 10):
                noted = lambda error, _: failures.append(error) if error else None  # noqa: E731
                producer.produce(NUMBERS, b"%d" % number, partition=number % _PARTITIONS, on_delivery=noted)
            count[0] += 10
            producer.poll(0)
        assert producer.flush(_SECONDS) == 0

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield count
    finally:
        is_over.set()
        thread.join(_SECONDS)
    assert failures == []


def _values(servers: str, topic: str) -> Counter[int]:
    return Counter(int(seen.value or b"-1") for seen in consume(servers, topic, isolation_level="read_committed"))


def test_each_process_is_exchanged_while_records_flow(old: Path, server_dir: Path) -> None:
    ports = [free_port() for _ in range(3)]
    *both, target = (f"{HOST}:{port}" for port in ports)
    servers = ",".join(both)
    load = [sys.executable, "-c", _LOAD, servers, str(server_dir / "load"), NUMBERS]

    def run_load(code: Path) -> None:
        subprocess.run(load, cwd=server_dir, env=_environment(code), check=True, timeout=_SECONDS)

    with ExitStack() as stack:

        def begin(name: str, command: list[str], ready: str) -> _Upgraded:
            made = stack.enter_context(_Upgraded(server_dir, name, command, ready))
            made.start(old)
            return made

        brokers = []
        for number, port in enumerate(ports):
            shared = ["--directories", str(server_dir / "directories"), "--broker-id", str(number)]
            command = broker_command(server_dir / str(number), port, *(shared if number < 2 else ()))
            brokers.append(begin(f"broker-{number}", command, " ready on "))
        for topic in (NUMBERS, "exact"):
            create_topic(servers, topic, _PARTITIONS)
        (server_dir / "source").write_text(f"bootstrap.servers={servers}\n")
        (server_dir / "target").write_text(f"bootstrap.servers={target}\n")
        sides = ("--from", "source", "--to", "target", "--topics", NUMBERS, "--name", "rolling", "--exactly-once")
        with _flow(servers) as count:
            mirror = begin("mirror", klog_command("mirror", *sides, "--json"), '"partitions": 4')
            program = [sys.executable, "-m", "tests.golden.copy_program", servers, str(server_dir / "checkpoints")]
            stream = begin("stream", program, "done")
            run_load(old)
            for process in (brokers[0], mirror, stream, brokers[1], brokers[2]):
                process.stop(signal.SIGKILL if process is stream else signal.SIGTERM)
                process.start(ROOT)
                before = count[0]
                wait_until(lambda before=before: count[0] > before + 200, "records flow", _SECONDS)  # type: ignore[misc]
                run_load(ROOT if process is mirror else old)
        every = Counter(range(count[0]))
        assert _values(servers, NUMBERS) == every
        wait_until(lambda: _values(target, NUMBERS) == every, "the mirror has all", _SECONDS)
        wait_until(lambda: _values(servers, "exact") == every, "the stream has all", _SECONDS)
        run_load(ROOT)
    each = count[0] // _PARTITIONS
    counts = {partition: each + (partition < count[0] % _PARTITIONS) for partition in range(_PARTITIONS)}
    assert by_duckdb(server_dir / "load") == expected(NUMBERS, counts)
