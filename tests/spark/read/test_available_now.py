"""Trigger.AvailableNow with limits on a pyspark that ends it after one micro-batch: 4.0 and 4.1.

Without such a pyspark, `Run` does with a source what Spark does there; with 4.1 Spark's own connector is the oracle.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql.streaming.query import StreamingQuery

import spark_klog
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError
from spark_klog.groups.checkpoint import from_json, left_in, start_in, with_left
from spark_klog.spark import versions
from spark_klog.spark.read import stream
from spark_klog.spark.read.source import KlogDataSource
from tests.spark.support import create_topic, delete_topic, produce, values
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.runs.soak import in_matrix
from tests.support.spark.jvm_connector import connector_jars
from tests.support.spark.pyspark_versions import report_of, with_connector

_PROGRAM = Path(__file__).with_name("available_now_program.py")
_SECONDS = 300


class FailedMicroBatch(Exception):
    pass


class Run:
    """A run of a query as Spark 4.0 and 4.1 make it: one micro-batch, whose end is the first latest offset.

    It `fails` with its micro-batch planned and not done; the next run `repeats` that, and nothing else. With
    `is_wrapped` Spark asks for the latest offset before it tells where the query goes on
    (spark.sql.streaming.triggerAvailableNowWrapper.enabled).
    """

    def __init__(
        self,
        servers: str,
        topic: str,
        checkpoint: list[str],
        *,
        fails: bool = False,
        repeats: bool = False,
        is_wrapped: bool = False,
        **options: str,
    ) -> None:
        settings = {"kafka.bootstrap.servers": servers, "subscribe": topic, "startingOffsets": "earliest", **options}
        source = KlogDataSource(settings)
        reader = cast("Any", source.streamReader(source.schema()))
        self.rows = 0
        self.lastProgress: Any = None
        wrapped = reader.latestOffset() if is_wrapped else None
        if repeats:
            before, end = [reader.initialOffset(), *map(json.loads, checkpoint)][-2:]
            self._run(reader, before, end, {"queryPlanning": 1})
        else:
            before = reader.initialOffset()
            if checkpoint:
                before = json.loads(checkpoint[-1])
                assert reader.partitions(before, before) == []
            end = wrapped or reader.latestOffset()
            if end != before:
                checkpoint.append(json.dumps(end))
                if fails:
                    reader.stop()
                    raise FailedMicroBatch
                self._run(reader, before, end, {"latestOffset": 3, "queryPlanning": 1})
        reader.stop()

    def _run(self, reader: Any, before: Any, end: Any, durations: dict[str, int]) -> None:
        for partition in reader.partitions(before, end):
            self.rows += sum(batch.num_rows for batch in reader.read(partition))
        reader.commit(end)
        sources = [{"endOffset": 5}, {"endOffset": end}, {"endOffset": None}]
        self.lastProgress = SimpleNamespace(json=json.dumps({"sources": sources, "durationMs": durations}))

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        return None if timeout is None else True

    def stop(self) -> None:
        raise AssertionError("it has ended")


@pytest.fixture
def without_admission_control(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (versions, stream):
        monkeypatch.setattr(module, "HAS_ADMISSION_CONTROL", False)


def started(runs: list[Run], make: Callable[[], Run]) -> Callable[[], StreamingQuery]:
    def start() -> StreamingQuery:
        runs.append(make())
        return cast("StreamingQuery", runs[-1])

    return start


@pytest.mark.usefixtures("without_admission_control")
def test_it_is_started_again_until_nothing_is_left(servers: str, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    create_topic(servers, topic, 3)
    produce(servers, topic, values(800, partitions=3))
    checkpoint: list[str] = []
    runs: list[Run] = []

    def make() -> Run:
        run = Run(servers, topic, checkpoint, maxOffsetsPerTrigger="100")
        produce(servers, topic, values(50, partitions=3))  # they go on without end
        return run

    queries = spark_klog.run_available_now(started(runs, make))
    assert queries == runs
    assert 800 <= sum(run.rows for run in runs) <= 900, "what was there at the first start"
    assert max(run.rows for run in runs) <= 103, "a share below one record is rounded up"
    assert all("start of " not in name for name in from_json(json.loads(checkpoint[-1])))
    (told,) = {record.getMessage() for record in caplog.records if record.levelno == logging.WARNING}
    assert all(word in told for word in ("run_available_now", "availableNow=all", "docs/recipes/switch.md"))
    # nothing new: one run without a micro-batch
    produced = sum(run.rows for run in runs)
    every = Run(servers, topic, checkpoint, availableNow="all", maxOffsetsPerTrigger="100")
    assert every.rows == 800 + 50 * len(runs) - produced
    runs.clear()
    assert len(spark_klog.run_available_now(started(runs, lambda: Run(servers, topic, checkpoint)))) == 1
    assert runs[0].lastProgress is None


@pytest.mark.usefixtures("without_admission_control")
def test_the_option_reads_all_at_once(servers: str, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    create_topic(servers, topic, 3)
    produce(servers, topic, values(800, partitions=3))
    checkpoint: list[str] = []
    limits: dict[str, Any] = {"maxOffsetsPerTrigger": "10", "maxBytesPerTrigger": "1", "minOffsetsPerTrigger": "5"}
    assert Run(servers, topic, checkpoint, availableNow="all", **limits).rows == 800
    assert "start of" not in checkpoint[0]
    assert caplog.records == []
    # the start of a query, a limit and what is left
    later: list[str] = []
    start = json.dumps({topic: {"0": 5, "1": -2, "2": -1}})
    assert Run(servers, topic, later, maxOffsetsPerTrigger="30", startingOffsets=start).rows <= 33
    entry = json.loads(later[0])
    assert left_in(entry) == {(topic, 0): 267, (topic, 1): 267}
    assert start_in(entry, {}, is_first=True)[topic, 0] == 5


@pytest.mark.usefixtures("without_admission_control")
@pytest.mark.parametrize(
    ("limit", "rows"),
    [
        ({"maxOffsetsPerTrigger": "40"}, [40] * 6),
        ({"maxOffsetsPerTrigger": "100"}, [100, 100, 20]),
        ({}, [100, 110]),
    ],
)
def test_a_micro_batch_that_failed(servers: str, topic: str, limit: dict[str, Any], rows: list[int]) -> None:
    create_topic(servers, topic)
    produce(servers, topic, values(100))
    checkpoint: list[str] = []
    with pytest.raises(FailedMicroBatch):
        Run(servers, topic, checkpoint, fails=True, **limit)
    produce(servers, topic, values(100))
    runs: list[Run] = []

    def make() -> Run:
        run = Run(servers, topic, checkpoint, repeats=not runs, **limit)
        produce(servers, topic, values(10))  # the second run is the first to see what is there: 210 records
        return run

    spark_klog.run_available_now(started(runs, make))
    assert [run.rows for run in runs] == rows


@pytest.mark.usefixtures("without_admission_control")
def test_spark_asks_before_it_says_where_the_query_goes_on(servers: str, topic: str) -> None:
    create_topic(servers, topic)
    produce(servers, topic, values(100))
    checkpoint: list[str] = []
    for _ in range(2):
        Run(servers, topic, checkpoint, maxOffsetsPerTrigger="30")
    later = list(checkpoint)
    for limit in ("30", "80"):
        with pytest.raises(ConfigError, match=r"triggerAvailableNowWrapper.*run_available_now.*availableNow=all"):
            Run(servers, topic, later, is_wrapped=True, maxOffsetsPerTrigger=limit)
        assert later == checkpoint, "nothing is planned"
    assert Run(servers, topic, later, is_wrapped=True, maxOffsetsPerTrigger="30", availableNow="all").rows == 40
    assert Run(servers, topic, checkpoint, is_wrapped=True).rows == 40
    # before the query's first micro-batch the start is known; a repeated one says it
    new: list[str] = []
    assert Run(servers, topic, new, is_wrapped=True, maxOffsetsPerTrigger="30").rows == 30
    with pytest.raises(FailedMicroBatch):
        Run(servers, topic, new, fails=True, maxOffsetsPerTrigger="30")
    with pytest.raises(ConfigError, match="triggerAvailableNowWrapper"):
        Run(servers, topic, new, repeats=True, is_wrapped=True, maxOffsetsPerTrigger="30")


@pytest.mark.usefixtures("without_admission_control")
def test_a_leader_that_comes_back() -> None:
    """Trigger.AvailableNow ends with the first latest offset, so that it has all partitions; other triggers go on."""
    with ScriptedCluster({"t": 2}, nodes=2) as brokers:
        for partition in range(2):
            brokers.append("t", partition, [b"x"] * 3)
            brokers.leaders["t", partition] = partition
        source = KlogDataSource({"kafka.bootstrap.servers": brokers.bootstrap_servers, "subscribe": "t"})
        stream = cast("Any", source.streamReader(source.schema()))
        before = {"t": {"0": 1, "1": 1}}
        assert stream.partitions(before, before) == []
        brokers.leaders["t", 1] = -1
        back = threading.Timer(1.5, brokers.leaders.update, [{("t", 1): 1}])
        back.start()
        end = stream.latestOffset()
        back.join()
        assert end == {"t": {"0": 3, "1": 3}}
        assert len(stream.partitions(before, end)) == 2
        brokers.leaders["t", 1] = -1
        brokers.append("t", 0, [b"y"])
        assert stream.latestOffset() == {"t": {"0": 4, "1": 3}}
        stream.stop()


@pytest.mark.usefixtures("without_admission_control")
def test_a_topic_that_is_created_again_ends_it(servers: str, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    create_topic(servers, topic)
    produce(servers, topic, values(100))
    checkpoint: list[str] = []
    runs: list[Run] = []

    def make() -> Run:
        if len(runs) == 1:
            delete_topic(servers, topic)
            create_topic(servers, topic)
            produce(servers, topic, values(5))
        return Run(servers, topic, checkpoint, maxOffsetsPerTrigger="40", failOnDataLoss="false")

    spark_klog.run_available_now(started(runs, make))
    assert [run.rows for run in runs] == [40, 0, 0], "to a new process its log was truncated"
    assert "the query got no further, though 95 of the offsets" in caplog.text


def test_two_sources_of_which_one_is_read_first() -> None:
    """Runs go on while the other one gets further."""
    small, latest = {"small": {"0": 5}}, {("large", 0): 90}
    runs: list[int] = []

    def start() -> StreamingQuery:
        runs.append(30 * (len(runs) + 1))
        large = with_left({"large": {"0": runs[-1]}}, {("large", 0): runs[-1]}, latest)
        progress = {"sources": [{"endOffset": small}, {"endOffset": large}], "durationMs": {"latestOffset": 1}}
        query = SimpleNamespace(awaitTermination=lambda: None, lastProgress=SimpleNamespace(json=json.dumps(progress)))
        return cast("StreamingQuery", query)

    spark_klog.run_available_now(start)
    assert runs == [30, 60, 90]


def test_a_query_that_does_not_end() -> None:
    class Endless:
        def awaitTermination(self, timeout: float) -> bool:
            assert timeout <= 7
            return False

        def stop(self) -> None:
            self.is_stopped = True

    query = Endless()
    with pytest.raises(TimeoutError, match=r"did not end within 7 s.*without \.trigger\(availableNow=True\) never"):
        spark_klog.run_available_now(lambda: cast("StreamingQuery", query), 7)
    assert query.is_stopped


def test_what_starts_no_query() -> None:
    with pytest.raises(ConfigError, match=r"must return the query, as \.start\(\) does, not NoneType"):
        spark_klog.run_available_now(lambda: cast("StreamingQuery", None))
    with pytest.raises(ConfigError, match="must be the function that starts the query, not SimpleNamespace"):
        spark_klog.run_available_now(cast("Callable[[], StreamingQuery]", SimpleNamespace(awaitTermination=None)))


def test_what_is_left_in_the_checkpoint() -> None:
    end, latest = {("t", 0): 3, ("t", 1): 5, ("u", 0): 0}, {("t", 0): 9, ("t", 1): 5, ("new", 0): 2}
    entry = with_left({"t": {"0": 3, "1": 5}}, end, latest)
    assert left_in(entry) == {("t", 0): 9}
    assert (from_json(entry), start_in(entry, {}, is_first=True)) == ({("t", 0): 3, ("t", 1): 5}, {})
    assert with_left({"t": {"1": 5}}, end, {("t", 1): 5}) == {"t": {"1": 5}}
    assert left_in({"t": {"1": 5}}) == {}


@pytest.mark.peer
@pytest.mark.test_all("version")
@in_matrix
def test_beside_the_connector(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers, limit, python = cluster.bootstrap_servers, 200, with_connector()
    create_topic(servers, topic, 3)
    produce(servers, topic, values(800, partitions=3))
    found, output = report_of(python, _PROGRAM, tmp_path, _SECONDS, connector_jars(), servers, topic, str(limit))
    every = sorted([number % 3, number // 3] for number in range(800))
    oracle = found["kafka"]["offsets"]
    assert oracle == every
    assert [sum(map(sum, found[name]["runs"])) for name in ("cut", "all", "again")] == [
        len(found["cut"]["offsets"]),
        800,
        800,
    ]
    assert len(found["cut"]["offsets"]) <= limit + 3
    for name in ("all", "again", "kafka again"):
        assert found[name]["offsets"] == oracle, name
    assert [len(found[name]["runs"]) for name in ("all", "kafka again")] == [1, 1]
    assert len(found["again"]["runs"]) == len(found["kafka"]["runs"][0]), "runs of ours, micro-batches of the connector"
    assert max(max(run, default=0) for run in found["again"]["runs"]) <= limit + 3
    assert found["failed klog"]["offsets"] == found["failed kafka"]["offsets"]
    assert len(found["failed klog"]["runs"]) == 2
    arrived = found["arriving"]["offsets"]
    assert [one for one in arrived if one in every] == every
    assert len(found["arriving"]["runs"]) <= 10, "it does not follow what arrives"
    late = [one for one in found["klog"]["offsets"] if one not in every]
    assert sorted(one for one in found["klog"]["offsets"] if one in every) == every
    assert len(late) == 3 * len(found["arriving"]["runs"])
    assert output.count("spark_klog.run_available_now") >= 6
