"""Kill programs and brokers at any moment: a read_committed consumer must find each row once.

SPARK_KLOG_KILLS is the number of kills (default 2), SPARK_KLOG_SEED the random seed.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import SparkSession

from spark_klog.embedded import EmbeddedCluster
from tests.jobs.support import Running, kill, named
from tests.spark.exactly_once.support import PARTITIONS, fill, once, read
from tests.spark.support import create_topic
from tests.support.kafka import NEWEST, Kafka
from tests.support.waiting import wait_until

from . import copy_program

pytestmark = [pytest.mark.timeout(0)]  # each step has its own deadline

KILLS = int(os.environ.get("SPARK_KLOG_KILLS", "2"))
RECORDS_A_BATCH = 30
#: For each kill: more records than the program copies until then.
RECORDS = 3000
_PROGRAM = Path(__file__).with_name("copy_program.py")
_SECONDS = 600.0
#: Runs to start until one is alive at the chosen moment: a killed worker may end its run.
_STARTS = 5
_BROKER = "broker"


def _workers(tree: list[psutil.Process]) -> list[psutil.Process]:
    """The processes that pyspark.daemon forked: tasks, and the sink's steps on the driver."""
    return [child for daemon in named(tree, "pyspark.daemon") for child in _children(daemon)]


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children())
    except psutil.Error:
        return []


#: In the order of the kills: a short test makes only the first ones. Killing the broker does not end the JVM.
_TARGETS: dict[str, Callable[[list[psutil.Process]], list[psutil.Process]]] = {
    "jvm": lambda tree: named(tree, "org.apache.spark.deploy.SparkSubmit"),
    _BROKER: lambda tree: [],
    "workers": _workers,
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


class Copy:
    """The copy program and its checkpoint."""

    def __init__(self, servers: str, topic: str, folder: Path, chance: random.Random) -> None:
        self._settings = {"servers": servers, "from": f"{topic}-from", "to": topic}
        self._folder, self._chance = folder.resolve(), chance
        self._checkpoint = self._folder / "checkpoint"
        self.runs = 0

    def _given(self, **settings: Any) -> dict[str, Any]:
        self.runs += 1
        tasks = self._chance.randint(3, 5)
        return {**self._settings, "checkpoint": str(self._checkpoint), "tasks": tasks, **settings}

    def start(self) -> Running:
        given = self._given(records=RECORDS_A_BATCH, to_the_end=False)
        return Running([sys.executable, str(_PROGRAM), json.dumps(given)], self._folder, self.runs)

    def to_the_end(self, spark: SparkSession) -> None:
        """Run the program's query in this process until it has copied everything."""
        given = self._given(records=None, to_the_end=True)
        query = copy_program.start(spark, given)
        try:
            assert query.awaitTermination(_SECONDS)
        finally:
            query.stop()

    def begun(self) -> int:
        """The number of the last micro-batch that has begun, or -1."""
        names = [path.name for path in (self._checkpoint / "offsets").glob("[0-9]*")]
        return max((int(name) for name in names if name.isdecimal()), default=-1)

    def at_a_moment(self, running: Running) -> Running:
        """Wait until 1 to 3 more micro-batches have begun, and up to 1 s longer; start another run if this one ends."""
        for _ in range(_STARTS):
            wanted = self.begun() + self._chance.randint(1, 3)
            wait_until(lambda: running.ended or self.begun() >= wanted, "the micro-batch", _SECONDS)  # noqa: B023 - called here
            time.sleep(self._chance.uniform(0, 1))
            if not running.ended:
                return running
            running = self.start()
        raise AssertionError(f"{_STARTS} runs ended by themselves")


@pytest.mark.parametrize("kills", [1, pytest.param(KILLS, marks=pytest.mark.test_all("kill"))])
def test_every_row_once(
    request: pytest.FixtureRequest, brokers: Brokers, topic: str, server_dir: Path, kills: int
) -> None:
    seed = int(os.environ.get("SPARK_KLOG_SEED", "1"))
    print(f"seed {seed}")  # noqa: T201 - pytest shows it with a failure
    chance = random.Random(seed)
    create_topic(brokers.servers, f"{topic}-from", PARTITIONS)
    create_topic(brokers.servers, topic, PARTITIONS)
    records = RECORDS * kills
    fill(brokers.servers, topic, 0, records)
    copy = Copy(brokers.servers, topic, server_dir, chance)
    killed: Counter[str] = Counter()
    running = copy.start()
    try:
        for turn in range(3 * kills):
            if killed.total() == kills:
                break
            running = copy.at_a_moment(running)
            target = [*_TARGETS][turn % len(_TARGETS)]
            if target == _BROKER:
                brokers.restart()
                killed[target] += 1
            elif kill(_TARGETS[target](running.tree())):
                killed[target] += 1
            if target in ("jvm", "python driver", "everything"):
                assert running.ends_within(_SECONDS)
        running.kill()
        seen = read(brokers.servers, topic)
        assert max(seen.values(), default=0) <= 1
        copy.to_the_end(request.getfixturevalue("spark"))  # not earlier: it is one more JVM
    finally:
        running.kill()
    wanted = once(records)
    deadline = time.monotonic() + 30
    while (found := read(brokers.servers, topic)) != wanted and time.monotonic() < deadline:
        time.sleep(0.5)  # coordinators answer EndTxn before they write the markers
    assert sorted((found - wanted).items())[:10] == []
    assert sorted((wanted - found).items())[:10] == []
    print(f"killed {dict(killed)} in {copy.runs} runs, after {copy.begun()} micro-batches, {len(seen)} rows")  # noqa: T201
