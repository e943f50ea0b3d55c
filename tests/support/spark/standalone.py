"""A Spark standalone cluster of processes: a master, and workers that tests add, drain and kill.

To Spark each worker is a host of its own: each has a loopback address. An executor gets its Python, as on a real
cluster, from an archive (`packed_environment`), which it unpacks into a folder of its own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.jobs.support import spark_submit
from tests.support.processes import kill, named, tree_of
from tests.support.waiting import wait_until

HOST = "127.0.0.1"
EXECUTOR = "CoarseGrainedExecutorBackend"
_SECONDS = 240.0
_DEPLOY = "org.apache.spark.deploy"


def environment(python: Path | str) -> dict[str, str]:
    """The environment of Spark processes that use this Python."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_HOME")}
    return kept | {"PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python), "SPARK_LOCAL_IP": HOST}


class Worker:
    """A worker's JVM on an address of its own."""

    def __init__(self, host: str, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.host, self.process, self.folder = host, process, folder

    def tree(self) -> list[psutil.Process]:
        """The worker, its executors and their Python processes."""
        return tree_of(self.process)

    def executors(self) -> list[psutil.Process]:
        return named(self.tree(), EXECUTOR)

    def kill(self) -> None:
        """End the worker and all its processes, as a machine that loses power."""
        kill(self.tree())
        self.process.wait()

    def drain(self) -> None:
        """Decommission it as `sbin/decommission-worker.sh` does: no new tasks, those that run may end."""
        self.process.send_signal(signal.SIGPWR)


class Standalone:
    """A running master (`url`, with its page at `web`) and its workers; their logs and files are in `folder`."""

    def __init__(self, folder: Path, cores: int, memory: str, confs: Mapping[str, str]) -> None:
        self.folder, self._cores, self._memory = folder, cores, memory
        properties = folder / "daemons.conf"
        properties.write_text("".join(f"{name} {value}\n" for name, value in confs.items()))
        self._properties = ["--properties-file", str(properties)] if confs else []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.workers: list[Worker] = []
        port, web_port = _free_port(), _free_port()
        self.web = f"http://{HOST}:{web_port}/"
        self.url = f"spark://{HOST}:{port}"
        words = ["--host", HOST, "--port", str(port), "--webui-port", str(web_port)]
        self._start("master", f"{_DEPLOY}.master.Master", *words)

    def _start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        spark_class = Path(spark_submit()).with_name("spark-class")
        variables = environment(sys.executable) | {"SPARK_DAEMON_MEMORY": "160m"}
        variables["SPARK_DAEMON_JAVA_OPTS"] = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [spark_class, *command, *self._properties], stdout=log, stderr=log, env=variables, cwd=self.folder
            )
        self._processes.append(process)
        return process

    def add(self, host: str) -> Worker:
        """Start a worker on this loopback address; it is there when `wait_for_workers` says so."""
        number = len(self._processes)
        folder = self.folder / f"work-{number}"
        words = ["--host", host, "--cores", str(self._cores), "--memory", self._memory, "--webui-port", "0"]
        command = [f"{_DEPLOY}.worker.Worker", self.url, *words, "--work-dir", str(folder)]
        worker = Worker(host, self._start(f"worker-{number}", *command), folder)
        self.workers.append(worker)
        return worker

    def state(self) -> dict[str, Any]:
        """What the master says of its workers and applications; {} while it does not answer."""
        with suppress(OSError, ValueError):
            with urllib.request.urlopen(f"{self.web}json/", timeout=5) as answer:
                state: dict[str, Any] = json.load(answer)
                return state
        return {}

    def wait_for_workers(self, count: int) -> None:
        """Wait until the master has so many workers that are alive."""
        wait_until(lambda: self.state().get("aliveworkers") == count, f"{count} workers at their master", _SECONDS)

    def close(self) -> None:
        for process in reversed(self._processes):
            kill(tree_of(process))
        for process in self._processes:
            process.wait(60)


@contextmanager
def standalone(
    folder: Path,
    hosts: Sequence[str] = (HOST,),
    cores: int = 2,
    memory: str = "2g",
    confs: Mapping[str, str] | None = None,
) -> Iterator[Standalone]:
    """Run a master, and a worker with `cores` cores and `memory` for executors on each loopback address.

    `confs` are settings of master and workers.
    """
    cluster = Standalone(folder, cores, memory, confs or {})
    try:
        for host in hosts:
            cluster.add(host)
        cluster.wait_for_workers(len(hosts))
        yield cluster
    finally:
        cluster.close()


def bare_environment(folder: Path) -> Path:
    """The Python of a new environment with the package's dependencies, but without the package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=_SECONDS)
    (_site_packages(folder) / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = folder / "bin" / "python"
    command = [python, "-c", "import importlib.util, pyspark; assert importlib.util.find_spec('spark_klog') is None"]
    subprocess.run(command, check=True, cwd=folder, env=environment(python), timeout=_SECONDS)
    return python


def packed_environment(bare_python: Path, wheel: Path, folder: Path) -> tuple[Path, Path]:
    """Pack an environment with the wheel for spark.archives; (the archive, the Python of a copy for the driver)."""
    root = bare_python.parents[1]
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--disable-pip-version-check"]
    installed, archive, driver = folder / "installed", folder / "environment.tar.gz", folder / "driver"
    subprocess.run([*command, "--quiet", "--target", installed, wheel], check=True, timeout=_SECONDS)
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(root, ".")
        packed.add(installed, str(_site_packages(root).relative_to(root)))
    with tarfile.open(archive) as packed:
        packed.extractall(driver, filter="fully_trusted")
    return archive, driver / "bin" / "python"


def _site_packages(root: Path) -> Path:
    (site,) = root.glob("lib/python*/site-packages")
    return site


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
