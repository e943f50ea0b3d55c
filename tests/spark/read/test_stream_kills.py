"""Kill processes of a streaming program at any moment: its Parquet files must have each record once.

SPARK_KLOG_KILLS is the number of kills (default 2), SPARK_KLOG_SEED the random seed.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from tests.jobs.support import Running
from tests.spark.read import stream_program
from tests.spark.support import Group, committed_offsets, consume, create_topic
from tests.support.processes import kill, named, workers

# Each step has its own deadline. `make test` kills a driver in exactly_once/test_exactly_once_kills.py, and workers in
# test_source_stream.py.
pytestmark = [pytest.mark.timeout(0), pytest.mark.test_all("kill")]

PARTITIONS = 3
RECORDS_A_BATCH = 200
_PROGRAM = Path(__file__).with_name("stream_program.py")
_SECONDS = 240.0
Offsets = dict[tuple[str, int], int]
#: Choose the processes to kill from all processes of the program, of which the first is its own.
TARGETS: dict[str, Callable[[list[psutil.Process]], list[psutil.Process]]] = {
    "a worker": lambda tree: workers(tree)[-1:],
    "jvm": lambda tree: named(tree, "org.apache.spark.deploy.SparkSubmit"),
    "source": lambda tree: named(tree, "python_streaming_source_runner"),
    "python driver": lambda tree: tree[:1],
    "all workers": lambda tree: named(tree, "pyspark.daemon"),
    "everything": lambda tree: tree,
}
#: Spark repeats the tasks of killed workers; any other kill ends the program.
_WORKERS = ("a worker", "all workers")
#: Spark's error if pyspark.daemon ends during its start; Spark does not start it again then.
_STARTING = "while reading the port number from pyspark.daemon"


class Writer(threading.Thread):
    """Produces small record batches until `stop` is called."""

    def __init__(self, servers: str, topic: str, seed: int) -> None:
        super().__init__(daemon=True)
        settings = {"bootstrap.servers": servers, "linger.ms": 5, "batch.num.messages": 10, "log_level": 0}
        self._producer, self._topic = Producer(settings), topic
        self._chance = random.Random(seed)
        self._done = threading.Event()
        self._failures: list[object] = []
        self.sent = 0

    def run(self) -> None:
        while not self._done.wait(0.1):
            for _ in range(self._chance.randint(1, 30)):
                partition = self._chance.randrange(PARTITIONS)
                value = self.value(self.sent)
                self._producer.produce(self._topic, value, None, partition, on_delivery=self._told)
                self.sent += 1
            self._producer.poll(0)

    def value(self, number: int) -> bytes:
        """The value of a record, which are numbered from 0."""
        return b"value %d" % number

    def _told(self, error: object, _: object) -> None:
        if error:
            self._failures.append(error)

    def stop(self) -> None:
        """Stop, and wait until all records are acknowledged."""
        self._done.set()
        self.join()
        assert self._producer.flush(_SECONDS) == 0
        assert self._failures == []


class Stream:
    """The program, its checkpoint and its group; `options` are more options of its source."""

    def __init__(self, servers: str, topic: str, folder: Path, **options: str) -> None:
        self._options = options
        self._folder = folder.resolve()
        self._topic, self._servers = topic, servers
        self._runs = 0
        self._running: Running | None = None
        self._group = Group(servers, "killed", topic, PARTITIONS)
        self._shown: Offsets = {}
        self.output, self.checkpoint = self._folder / "output", self._folder / "checkpoint"

    def _settings(self, *, to_the_end: bool) -> dict[str, Any]:
        return {
            "servers": self._servers,
            "topic": self._topic,
            "group": "killed",
            "output": str(self.output),
            "checkpoint": str(self.checkpoint),
            "records": None if to_the_end else RECORDS_A_BATCH,
            "to_the_end": to_the_end,
            "options": self._options,
        }

    def start(self) -> Running:
        command = [sys.executable, str(_PROGRAM), json.dumps(self._settings(to_the_end=False))]
        self._running = Running(command, self._folder, self._runs)
        self._runs += 1
        return self._running

    def run_to_the_end(self, spark: SparkSession) -> None:
        """Run the program's query in this process until it has read everything."""
        with ThreadPoolExecutor(1) as pool:
            ran = pool.submit(stream_program.run, spark, self._settings(to_the_end=True))
            try:
                self.check_group_until(ran.done, "the end of the topic")
            finally:
                for query in spark.streams.active:
                    query.stop()
            ran.result()

    def end(self) -> int:
        """Wait until all processes of the program have ended; return its exit code."""
        running = self._running
        assert running is not None
        self.check_group_until(lambda: running.ended, "the end")
        self._running = None
        return running.result(_SECONDS).code

    def close(self) -> None:
        if self._running is not None:
            self._running.kill()
        self._group.close()

    def lost_tasks(self) -> int:
        """The number of failed tasks in all runs."""
        return sum(path.read_text(errors="replace").count("Lost task") for path in self._folder.glob("run-*.stderr"))

    def errors(self) -> str:
        """The standard error of the last run."""
        return (self._folder / f"run-{self._runs - 1}.stderr").read_text(errors="replace")

    def committed(self) -> Offsets:
        return committed_offsets(self.checkpoint)

    def last_batch(self) -> int:
        """The number of the last committed micro-batch, or -1."""
        names = [path.name for path in (self.checkpoint / "commits").glob("[0-9]*")]
        return max((int(name) for name in names if name.isdecimal()), default=-1)

    def check_group(self) -> Offsets:
        """Return the group's offsets; they must not be ahead of the checkpoint, or go back."""
        shown = self._group.offsets()
        committed = self.committed()  # read after the group's offsets: it can only have grown
        ahead = {key: offset for key, offset in shown.items() if offset > committed.get(key, -1)}
        assert not ahead, f"the group is ahead of the checkpoint: {shown}, {committed}"
        back = {key: offset for key, offset in self._shown.items() if offset > shown.get(key, -1)}
        assert not back, f"the group went back: {self._shown}, {shown}"
        self._shown = shown
        return shown

    def check_group_until(self, condition: Callable[[], bool], what: str, seconds: float = _SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
            self.check_group()
            time.sleep(0.05)

    def wait_for_batch(self, number: int) -> None:
        running = self._running
        assert running is not None
        self.check_group_until(lambda: running.ended or self.last_batch() >= number, f"batch {number}")

    def wait_for_a_moment(self, chance: random.Random) -> None:
        """Wait for 1 to 3 more micro-batches and up to 0.5 s; one time in five only up to 8 s, perhaps in the start."""
        seconds = chance.uniform(0, 8)
        if chance.random() < 0.8:
            self.wait_for_batch(self.last_batch() + chance.randint(1, 3))
            seconds = chance.uniform(0, 0.5)
        self.check_group_for(seconds)

    def check_group_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.check_group_until(lambda: time.monotonic() >= end, "the time is over")


@pytest.fixture
def stream(servers: str, topic: str, server_dir: Path) -> Iterator[Stream]:
    """The program; processes that still run at the test's end are killed."""
    create_topic(servers, topic, PARTITIONS)
    made = Stream(servers, topic, server_dir)
    yield made
    made.close()


@pytest.fixture
def writer(servers: str, topic: str, stream: Stream) -> Iterator[Writer]:
    made = Writer(servers, topic, 1)
    made.start()
    yield made
    made.stop()


def _kill_in_a_task(stream: Stream, running: Running, target: str, chance: random.Random) -> bool:
    """Kill workers until a task fails or the run ends; kills between tasks have no effect. False after 20 attempts."""
    before = stream.lost_tasks()
    for _ in range(20):
        kill(TARGETS[target](running.tree()))
        stream.check_group_for(chance.uniform(0.2, 1))
        if stream.lost_tasks() > before or running.ended:
            return True
    return False


def test_killed_at_any_moment(
    request: pytest.FixtureRequest, servers: str, topic: str, stream: Stream, writer: Writer
) -> None:
    kills = int(os.environ.get("SPARK_KLOG_KILLS", "2"))
    seed = int(os.environ.get("SPARK_KLOG_SEED", "1"))
    print(f"seed {seed}")  # noqa: T201 - pytest shows it with a failure
    chance = random.Random(seed)
    killed: Counter[str] = Counter()
    moments = 0
    running = stream.start()
    while killed.total() < kills:
        moments += 1
        assert moments <= 3 * kills, f"too often there was nobody to kill: {killed}"
        if running.ended:
            running = stream.start()
        target = [*TARGETS][killed.total() % len(TARGETS)]
        stream.wait_for_a_moment(chance)
        assert not running.ended, "the program ended by itself"
        if target in _WORKERS:
            stream.wait_for_batch(stream.last_batch() + 1)  # during the start Spark does not repeat their work
            killed[target] += _kill_in_a_task(stream, running, target, chance)
            stream.wait_for_batch(stream.last_batch() + 2)  # the next one may have finished its tasks already
            if running.ended:
                assert _STARTING in stream.errors(), f"the program ended as {target} was killed"
        elif kill(TARGETS[target](running.tree())):
            killed[target] += 1
            assert stream.end() != 0, f"{target} killed, and the program has not noticed"
    if not running.ended:
        kill(TARGETS["everything"](running.tree()))
        stream.end()

    writer.stop()
    spark: SparkSession = request.getfixturevalue("spark")  # not earlier: it is one more JVM
    stream.run_to_the_end(spark)
    wanted = [(record.partition, record.offset, record.value) for record in consume(servers, topic)]
    assert sorted(str(value) for *_, value in wanted) == sorted(
        str(b"value %d" % number) for number in range(writer.sent)
    )
    rows = spark.read.parquet(str(stream.output)).select("partition", "offset", "value").collect()
    assert sorted((row.partition, row.offset, bytes(row.value)) for row in rows) == wanted
    ends = Counter((topic, partition) for partition, _, _ in wanted)
    assert stream.check_group() == stream.committed() == ends
    print(f"killed {dict(killed)}; {stream.lost_tasks()} tasks ran again; {len(wanted)} records")  # noqa: T201
