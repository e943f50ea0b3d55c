"""Eight workers of one core, a packed environment for their Pythons, and programs that tests submit to them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.jobs.support import Running, spark_submit
from tests.support.spark.standalone import (
    HOST,
    Standalone,
    bare_environment,
    environment,
    packed_environment,
    standalone,
)

WORKERS = 8
_PROGRAM = Path(__file__).with_name("program.py")
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": HOST,
    "spark.driver.host": HOST,
    "spark.driver.memory": "700m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    "spark.pyspark.python": "./environment/bin/python",
    "spark.scheduler.minRegisteredResourcesRatio": "1",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "4",
    # a killed worker is noticed by its closed connection; this is for the machine that is silent
    "spark.network.timeout": "60s",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are part of make soak: an application on eight workers costs a minute of a core."""
    is_left_out = os.environ.get("SPARK_KLOG_MASTERS") != "all"
    for item in items:
        if item.path.parent == _PROGRAM.parent:
            item.add_marker(pytest.mark.test_all("long"))
            item.add_marker(pytest.mark.timeout(0))  # each step has its own deadline
            if is_left_out:
                item.add_marker(pytest.mark.skip(reason="part of make soak"))


class Packed(NamedTuple):
    """The environment's archive, and the Python of the driver's copy."""

    archive: Path
    python: Path


class Programs:
    """Submits programs to the cluster as a user does, with the packed environment."""

    def __init__(self, master: str, packed: Packed, folder: Path) -> None:
        self._master, self._packed, self._folder = master, packed, folder
        self._running: list[Running] = []

    def arguments(self, **confs: str) -> list[str]:
        """What follows `spark-submit`; `confs` have __ for dots."""
        settings = {**_SETTINGS, "spark.pyspark.driver.python": str(self._packed.python)}
        settings |= {name.replace("__", "."): value for name, value in confs.items()}
        words = ["--master", self._master, "--archives", f"{self._packed.archive}#environment"]
        return words + [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]

    def submit(
        self, program: Path, *words: str, variables: dict[str, str] | None = None, main: str = "", **confs: str
    ) -> Running:
        """Start spark-submit with a program and its arguments, or with a class that is Spark's own (`main`)."""
        command = [spark_submit(), *self.arguments(**confs), *(["--class", main] if main else []), str(program), *words]
        variables = environment(self._packed.python) | (variables or {})
        self._running.append(Running(command, self._folder, len(self._running), variables))
        return self._running[-1]

    def start(
        self, action: str, given: dict[str, Any], variables: dict[str, str] | None = None, **confs: str
    ) -> Running:
        """Start an action of program.py; what is given is in a file, so no command line has it."""
        file = self._folder / f"given-{len(self._running)}.json"
        file.write_text(json.dumps(given))
        return self.submit(_PROGRAM, action, str(file), variables=variables, **confs)

    def close(self) -> None:
        for running in self._running:
            running.kill()


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Packed:
    folder = tmp_path_factory.mktemp("packed")
    return Packed(*packed_environment(bare_environment(folder / "bare"), wheel, folder))


@pytest.fixture(scope="session")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A worker on each of eight addresses. Whoever kills one that others use starts another one."""
    hosts = [f"127.0.0.{number}" for number in range(1, WORKERS + 1)]
    # SIGPWR drains a worker
    folder = tmp_path_factory.mktemp("standalone")
    confs = {"spark.decommission.enabled": "true", "spark.local.dir": str(folder / "local")}
    with standalone(folder, hosts, cores=1, memory="600m", confs=confs) as running:
        yield running


@pytest.fixture
def programs(spark_cluster: Standalone, packed: Packed, tmp_path: Path) -> Iterator[Programs]:
    made = Programs(spark_cluster.url, packed, tmp_path)
    yield made
    made.close()
