"""Kill programs and brokers at any moment: what tests of this folder share.

SPARK_KLOG_KILLS is the number of kills (default 1), SPARK_KLOG_SEED the random seed.
"""

from __future__ import annotations

import os
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from spark_klog.embedded import EmbeddedCluster
from tests.jobs.support import Running
from tests.support.processes import kill, named, workers
from tests.support.servers.kafka import NEWEST, Kafka
from tests.support.waiting import wait_until

KILLS = int(os.environ.get("SPARK_KLOG_KILLS", "1"))
SEED = int(os.environ.get("SPARK_KLOG_SEED", "1"))
SECONDS = 600.0
#: Runs to start until one is alive at the chosen moment: a killed worker may end its run.
_STARTS = 5
_BROKER = "broker"
#: In the order of the kills: a short test makes only the first ones. Killing the broker does not end the JVM.
_TARGETS: dict[str, Callable[[list[psutil.Process]], list[psutil.Process]]] = {
    "jvm": lambda tree: named(tree, "org.apache.spark.deploy.SparkSubmit"),
    _BROKER: lambda tree: [],
    "workers": workers,
    "python driver": lambda tree: tree[:1],
    "daemons": lambda tree: named(tree, "pyspark.daemon"),
    "everything": lambda tree: tree,
}


class Brokers:
    """A broker that can be killed, ours or Kafka's."""

    def __init__(self, servers: str, restart: Callable[[], None]) -> None:
        self.servers, self.restart = servers, restart


@pytest.fixture(
    params=[
        "ours",
        pytest.param(
            "3.9.1",
            marks=[pytest.mark.peer, pytest.mark.skipif("SPARK_KLOG_KILLS" not in os.environ, reason="make soak")],
        ),
        pytest.param(
            NEWEST,
            marks=[pytest.mark.peer, pytest.mark.skipif("SPARK_KLOG_KILLS" not in os.environ, reason="make soak")],
        ),
    ]
)
def brokers(request: pytest.FixtureRequest, server_dir: Path) -> Iterator[Brokers]:
    if request.param == "ours":
        with EmbeddedCluster(data_dir=server_dir / "ours") as cluster:

            def restart() -> None:
                cluster.kill(0)
                cluster.restart(0)

            yield Brokers(cluster.bootstrap_servers, restart)
        return
    with Kafka(request.param, server_dir / "kafka") as kafka:

        def restart_kafka() -> None:
            kafka.kill()
            kafka.start()

        yield Brokers(kafka.bootstrap_servers, restart_kafka)


class Program(ABC):
    """A program that goes on where its last run ended; `begun` is the number of its last step."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    @abstractmethod
    def start(self) -> Running:
        """Start another run."""

    @abstractmethod
    def begun(self) -> int:
        """The number of the last step that has begun, or -1."""

    def at_a_moment(self, running: Running) -> Running:
        """Wait until 1 to 3 more steps have begun, and up to 1 s longer; start another run if this one ends."""
        for _ in range(_STARTS):
            wanted = self.begun() + self.chance.randint(1, 3)
            wait_until(lambda: running.ended or self.begun() >= wanted, "the step", SECONDS)  # noqa: B023 - called here
            time.sleep(self.chance.uniform(0, 1))
            if not running.ended:
                return running
            running = self.start()
        raise AssertionError(f"{_STARTS} runs ended by themselves")

    def kill(self, brokers: Brokers, kills: int) -> Counter[str]:
        """Run the program and kill something again and again, at last the program; return what was killed."""
        print(f"seed {SEED}")  # noqa: T201 - pytest shows it with a failure
        killed: Counter[str] = Counter()
        running = self.start()
        try:
            for turn in range(3 * kills):
                if killed.total() == kills:
                    break
                running = self.at_a_moment(running)
                target = [*_TARGETS][turn % len(_TARGETS)]
                if target == _BROKER:
                    brokers.restart()
                    killed[target] += 1
                elif kill(_TARGETS[target](running.tree())):
                    killed[target] += 1
                if target in ("jvm", "python driver", "everything"):
                    assert running.ends_within(SECONDS)
        finally:
            running.kill()
        return killed
