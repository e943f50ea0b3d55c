"""Spark standalone master with workers; to Spark each worker is a host of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.jobs.support import spark_submit

from .support import wait_for

HOST = "127.0.0.1"


def environment(python: Path | str) -> dict[str, str]:
    """The environment of Spark processes that use this Python."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_HOME")}
    return kept | {"PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python), "SPARK_LOCAL_IP": HOST}


@contextmanager
def standalone(folder: Path, hosts: Sequence[str] = (HOST,), cores: int = 2, memory: str = "2g") -> Iterator[str]:
    """Run a master, and a worker with `cores` cores on each loopback address; yield the master's URL."""
    port, web_port = _free_port(), _free_port()
    url = f"spark://{HOST}:{port}"
    deploy = "org.apache.spark.deploy"
    commands = [[f"{deploy}.master.Master", "--host", HOST, "--port", str(port), "--webui-port", str(web_port)]]
    for host in hosts:
        command = [f"{deploy}.worker.Worker", url, "--host", host, "--cores", str(cores), "--memory", memory]
        commands.append([*command, "--webui-port", "0", "--work-dir", str(folder / f"work-{host}")])
    spark_class = Path(spark_submit()).with_name("spark-class")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"{number}-{command[0].rsplit('.')[-1]}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [spark_class, *command], stdout=log, stderr=log, env=environment(sys.executable), cwd=folder
                    )
                )
        wait_for(lambda: _alive_workers(web_port) == len(hosts), "the workers at their master", 120)
        yield url
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(60)


def _alive_workers(port: int) -> int:
    with suppress(OSError, ValueError), urllib.request.urlopen(f"http://{HOST}:{port}/json/", timeout=5) as answer:
        found: int = json.load(answer)["aliveworkers"]
        return found
    return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
