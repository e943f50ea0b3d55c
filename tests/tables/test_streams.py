"""Streams from topics into Spark's own sinks of Delta and Iceberg, with the real jars.

Each statement of docs/recipes/tables-streaming.md has its test here. SPARK_KLOG_KILLS sets the number of kills of each
sink (default: two). The sinks are not ours, and a micro-batch of theirs takes seconds of processor time: so
`make test-all` has only the kill between two commits, and `make soak` the rest.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from spark_klog.embedded import EmbeddedCluster
from tests.load.support import Place, expected, kills
from tests.spark.support import create_topic, produce, values
from tests.support.runs.soak import in_soak
from tests.support.spark.spark_tables import Kind, SparkTables
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.peer, pytest.mark.test_all("version")]

Sink = Literal["delta", "batches", "iceberg"]
_SINKS: tuple[Sink, ...] = ("delta", "batches", "iceberg")
_PARTITIONS = 2
#: Records of a micro-batch.
_EACH = 40
_SECONDS = 120
_COLUMNS = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int"
)


class Flow:
    """A stream from a topic into a table, a micro-batch at a time."""

    def __init__(self, spark: SparkTables, servers: str, topic: str, sink: Sink, folder: Path) -> None:
        self.spark, self.topic, self.sink, self.folder = spark, topic, sink, folder
        self.target = f"tests.db.{topic.replace('-', '_')}" if sink == "iceberg" else str(folder / "table")
        self.name = self.target if sink == "iceberg" else f"delta.`{self.target}`"
        self.checkpoint = folder / "checkpoint"
        self.application: str | None = "clicks"
        self._servers, self.start, self.sent = servers, "earliest", 0
        folder.mkdir(parents=True)
        create_topic(servers, topic, _PARTITIONS)
        if sink == "iceberg":
            spark.sql(f"CREATE TABLE {self.name} ({_COLUMNS}) USING iceberg")

    @property
    def source(self) -> dict[str, str]:
        return {
            "kafka.bootstrap.servers": self._servers,
            "subscribe": self.topic,
            "startingOffsets": self.start,
        }

    def send(self, count: int = _EACH) -> None:
        produce(self._servers, self.topic, values(count, start=self.sent, partitions=_PARTITIONS))
        self.sent += count

    def run(self) -> list[int]:
        """Run the query with AvailableNow, which before pyspark 4.2 is one micro-batch; the ids of those that ran."""
        before = self._done()
        self.spark.stream(self.source, self.sink, self.target, self.checkpoint, self.application)
        return sorted(self._done() - before)

    def _done(self) -> set[int]:
        return {int(path.name) for path in (self.checkpoint / "commits").glob("[0-9]*")}

    def killed_between_the_commits(self) -> int:
        """Leave the checkpoint as a kill does after the table's commit and before the checkpoint's; the batch's id."""
        last = max(self._done())
        (self.checkpoint / "commits" / str(last)).unlink()
        (self.checkpoint / "commits" / f".{last}.crc").unlink(missing_ok=True)
        return last

    def start_from_the_table(self) -> None:
        """Begin a new query after the records of the table."""
        text = f"SELECT partition, max(offset) + 1 AS next FROM {self.name} WHERE topic = '{self.topic}' GROUP BY 1"
        offsets = {str(number): -2 for number in range(_PARTITIONS)}
        offsets |= {str(row["partition"]): row["next"] for row in self.spark.sql(text).to_pylist()}
        self.start = json.dumps({self.topic: offsets})

    def places(self) -> list[Place]:
        rows = self.spark.sql(f"SELECT topic, partition, offset FROM {self.name} ORDER BY ALL").to_pylist()
        return [(row["topic"], row["partition"], row["offset"]) for row in rows]

    def whole(self) -> list[Place]:
        return expected(self.topic, dict.fromkeys(range(_PARTITIONS), self.sent // _PARTITIONS))


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Kind], SparkTables]]:
    """Return a function for the session of a kind."""
    folder = tmp_path_factory.mktemp("sessions")
    sessions: dict[Kind, SparkTables] = {}

    def of(kind: Kind) -> SparkTables:
        if kind not in sessions:
            sessions[kind] = _session(kind, folder)
        return sessions[kind]

    yield of
    for made in sessions.values():
        made.close()


def _session(kind: Kind, folder: Path) -> SparkTables:
    warehouse = folder / "warehouse"
    warehouse.mkdir(exist_ok=True)
    spark = SparkTables(kind, folder, warehouse=warehouse)
    if kind == "iceberg":
        spark.sql("CREATE NAMESPACE IF NOT EXISTS tests.db")
    return spark


@pytest.fixture(params=_SINKS)
def flow(
    request: pytest.FixtureRequest,
    cluster: EmbeddedCluster,
    topic: str,
    session: Callable[[Kind], SparkTables],
    tmp_path: Path,
) -> Flow:
    """Two micro-batches are in the table."""
    sink: Sink = request.param
    spark = session("iceberg" if sink == "iceberg" else "delta")
    made = Flow(spark, cluster.bootstrap_servers, topic, sink, tmp_path / "flow")
    for number in range(2):
        made.send()
        assert made.run() == [number]
    return made


@pytest.mark.parametrize(
    "flow", [*(pytest.param(kind, marks=in_soak) for kind in ("delta", "batches")), "iceberg"], indirect=True
)
def test_killed_between_the_two_commits(flow: Flow) -> None:
    """The micro-batch is done again, and the table takes it once."""
    assert flow.killed_between_the_commits() == 1
    flow.send()
    assert flow.run() + flow.run() == [1, 2]
    assert flow.places() == flow.whole()
    if flow.sink == "batches":  # what the option is for
        flow.application = None
        flow.killed_between_the_commits()
        assert flow.run() == [2]
        assert len(flow.places()) == len(flow.whole()) + _EACH


@in_soak
def test_a_checkpoint_that_moves(flow: Flow) -> None:
    """The query's id is in the checkpoint: its copy elsewhere goes on, with a micro-batch that was not finished."""
    flow.killed_between_the_commits()
    moved = flow.folder / "elsewhere"
    flow.checkpoint.rename(moved)
    flow.checkpoint = moved
    flow.send()
    assert flow.run() + flow.run() == [1, 2]
    assert flow.places() == flow.whole()


@in_soak
def test_a_checkpoint_that_is_lost(flow: Flow) -> None:
    """A new one is a new query, which begins again: the offsets of the table are where it has to begin."""
    shutil.rmtree(flow.checkpoint)
    flow.send()
    if flow.sink == "batches":
        stored = flow.places()
        assert flow.run() == [0]
        assert flow.places() == stored, "the table has had a batch 0 of the application"
        shutil.rmtree(flow.checkpoint)
        flow.application = "clicks, from the table on"
    flow.start_from_the_table()
    assert flow.run() == [0]
    assert flow.places() == flow.whole()
    # what happens otherwise
    shutil.rmtree(flow.checkpoint)
    flow.application, flow.start = "clicks, from the first record on", "earliest"
    assert flow.run() == [0]
    assert flow.places() == sorted(2 * flow.whole())


@in_soak
def test_a_checkpoint_of_a_backup(flow: Flow) -> None:
    """It plans micro-batches anew that the table has had with other records: what is new in them is lost."""
    shutil.copytree(flow.checkpoint, flow.folder / "backup")
    flow.send()
    flow.run()
    shutil.rmtree(flow.checkpoint)
    flow.checkpoint = flow.folder / "backup"
    flow.send()
    stored = flow.places()
    assert flow.run() == [2]
    assert flow.places() == stored, "the newest records are missing"
    shutil.rmtree(flow.checkpoint)
    flow.application = "clicks, after the backup"
    flow.start_from_the_table()
    flow.run()
    assert flow.places() == flow.whole()


@in_soak
@pytest.mark.parametrize("flow", ["iceberg"], indirect=True)
def test_snapshots_that_expire(flow: Flow) -> None:
    """Iceberg's sink looks for the query in the summaries of snapshots: without them it writes a micro-batch twice."""
    flow.killed_between_the_commits()
    flow.spark.sql(f"INSERT INTO {flow.name} VALUES (null, null, 'another', 0, 0, current_timestamp(), 0)")
    assert flow.run() == [1]
    own = [place for place in flow.places() if place[0] == flow.topic]
    assert own == flow.whole(), "snapshots of other writers do not hide it"
    flow.killed_between_the_commits()
    name = flow.name.removeprefix("tests.")
    flow.spark.sql(
        f"CALL tests.system.expire_snapshots(table => '{name}', older_than => current_timestamp(), retain_last => 1)"
    )
    assert flow.run() == [1]
    own = [place for place in flow.places() if place[0] == flow.topic]
    assert len(own) == len(flow.whole()) + _EACH


@in_soak
@pytest.mark.parametrize("flow", ["delta"], indirect=True)
def test_transactions_that_expire(flow: Flow) -> None:
    """Delta's sink looks for the query's last transaction, which the table may be told to forget."""
    flow.killed_between_the_commits()
    retention = "'delta.setTransactionRetentionDuration' = 'interval 1 milliseconds'"
    flow.spark.sql(f"ALTER TABLE {flow.name} SET TBLPROPERTIES ({retention})")
    assert flow.run() == [1]
    assert len(flow.places()) == len(flow.whole()) + _EACH


@pytest.mark.timeout(0)  # SPARK_KLOG_KILLS sets the duration; each step has its own deadline
@in_soak
@pytest.mark.parametrize("sink", _SINKS)
def test_killed_at_any_time(cluster: EmbeddedCluster, topic: str, tmp_path: Path, sink: Sink) -> None:
    """SIGKILL of the driver, its JVM and the workers, while records come: each is in the table once."""
    chance = random.Random(int(os.environ.get("SPARK_KLOG_SEED", "1")))
    kind: Kind = "iceberg" if sink == "iceberg" else "delta"
    spark = _session(kind, tmp_path)
    flow = Flow(spark, cluster.bootstrap_servers, topic, sink, tmp_path / "flow")
    commits = flow.checkpoint / "commits"
    try:
        for _ in range(kills() or 2):
            before = set(commits.glob("[0-9]*"))
            flow.spark.stream(flow.source, flow.sink, flow.target, flow.checkpoint, flow.application, wait=False)
            ended = threading.Event()
            sender = threading.Thread(target=_send_on, args=(flow, ended))
            sender.start()
            try:
                wait_until(lambda before=before: set(commits.glob("[0-9]*")) - before, "a micro-batch", _SECONDS)
                time.sleep(chance.uniform(0, 3))
            finally:
                flow.spark.close()
                ended.set()
                sender.join()
            flow.spark = _session(kind, tmp_path)
        while flow.run():
            pass
        assert flow.places() == flow.whole()
    finally:
        flow.spark.close()


def _send_on(flow: Flow, ended: threading.Event) -> None:
    while not ended.wait(0.05):
        flow.send()
