"""Logs that become shorter, records deleted by retention, two attempts of a task, records of many hours."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spark_klog.base import durable
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch import ranges
from spark_klog.client.places import TimeSpec
from spark_klog.columns.schema import FULL
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import DataLossError
from spark_klog.files import folder
from spark_klog.load import planning
from spark_klog.load.audit import status
from spark_klog.load.journal import paths
from spark_klog.load.journal.model import Range
from spark_klog.load.run import LoadOptions, MaxBad, load
from spark_klog.load.settings import WriteSettings
from spark_klog.load.tasks import writers
from spark_klog.spark.read import tasks as tasks_module
from spark_klog.spark.read.ranges import DELETED, RECREATED
from tests.load.support import Frozen, InProcess, TwinFails, by_duckdb, by_pyarrow, expected, run
from tests.spark.support import Sent, create_topic, delete_records, delete_topic, produce, values

_HOUR_MS = 3_600_000
_TIME = 1_700_002_800_000


@pytest.mark.parametrize("elsewhere", [0, 5], ids=["nothing new", "new records in another partition"])
def test_a_log_that_is_shorter_and_grows_again(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: int
) -> None:
    """Brokers before 2.8 have no topic ids, so a run that has seen the shorter log must record that."""
    servers = cluster.bootstrap_servers

    def without_ids(cluster: Cluster, topics: list[str]) -> dict[planning.Key, str]:
        return dict.fromkeys(real(cluster, topics), "")

    real = planning.partitions_of
    monkeypatch.setattr(planning, "partitions_of", without_ids)
    create_topic(servers, topic, 2)
    produce(servers, topic, values(30))
    run(servers, tmp_path, topic)
    delete_topic(servers, topic)
    create_topic(servers, topic, 2)
    produce(servers, topic, [item._replace(partition=1) for item in values(elsewhere)])
    loaded = run(servers, tmp_path, topic, fail_on_loss=False)
    assert [item["cause"] for item in loaded.lost] == ["truncated"]
    assert loaded.runs == [2]
    again = run(servers, tmp_path, topic)
    assert (again.runs, again.lost) == ([], [])
    produce(servers, topic, values(50))
    run(servers, tmp_path, topic)
    assert by_duckdb(tmp_path) == sorted(expected(topic, {0: 30}) + expected(topic, {0: 50, 1: elsewhere}))
    [finding] = status(str(tmp_path)).findings
    assert "truncated" in finding.what


def test_records_that_retention_took_are_named_once(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, values(30))
    run(servers, tmp_path, topic)
    produce(servers, topic, values(30))
    delete_records(servers, topic, {0: 60})
    assert run(servers, tmp_path, topic, fail_on_loss=False).runs == [2]
    produce(servers, topic, values(10))
    assert run(servers, tmp_path, topic).runs == [3]
    assert len(by_duckdb(tmp_path)) == 40
    [finding] = status(str(tmp_path)).findings
    assert "[30, 60) lost" in finding.what


def test_partitions_of_which_a_run_reads_nothing(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Partition 1 is empty in the first run, 2 has only records before --from-time; both go on from there."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 3)
    produce(servers, topic, [Sent(b"v", None, 2, _TIME), Sent(b"v", None, 0, _TIME + 2 * _HOUR_MS)])
    first = run(servers, tmp_path, topic, start=TimeSpec(_TIME + _HOUR_MS))
    assert first.offsets == {(topic, 0): 1, (topic, 1): 0, (topic, 2): 1}
    produce(servers, topic, [Sent(b"v", None, number, _TIME) for number in (1, 1, 1, 2)])
    delete_records(servers, topic, {1: 2})
    with pytest.raises(DataLossError, match=rf"{topic}-1: wanted \[0, 2\)"):
        run(servers, tmp_path, topic)
    run(servers, tmp_path, topic, fail_on_loss=False)
    assert by_duckdb(tmp_path) == [(topic, 0, 0), (topic, 1, 2), (topic, 2, 1)]
    [finding] = status(str(tmp_path)).findings
    assert "[0, 2) lost" in finding.what


@pytest.mark.parametrize("first", [_TIME, _TIME * 1000], ids=["ms", "us taken for ms, of the year 55840"])
def test_few_files_are_open_for_many_hours(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """A compacted topic has records of years next to each other, so an Arrow batch may have many hours.

    Hours out of the range of dates share a folder, where no file may replace another one.
    """
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    count = 200
    produce(servers, topic, [Sent(b"v", None, 0, first + number * _HOUR_MS) for number in range(count)])
    opened, most = [0], [0]

    class Counted(writers._JsonWriter):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            opened[0] += 1
            most[0] = max(most[0], opened[0])

        def close(self) -> None:
            super().close()
            opened[0] -= 1

    monkeypatch.setattr(writers, "_JsonWriter", Counted)
    run(servers, tmp_path, topic, settings=WriteSettings("json", "none", layout="hour"))
    assert most[0] <= writers.MOST_OPEN
    assert opened[0] == 0
    lines = [line for path in tmp_path.glob("**/*.jsonl") for line in path.read_text().splitlines()]
    assert len(lines) == len(set(lines)) == count
    found = status(str(tmp_path))
    assert (found.findings, sum(found.hours[topic].values())) == ([], count)


def test_a_few_records_of_another_hour_keep_no_others_in_memory(tmp_path: Path) -> None:
    """One late record in each Arrow batch waits for a row group of its hour, which never fills."""
    count, rows = 50, 1000
    settings = WriteSettings(layout="hour", row_group_bytes=2 * rows * 1000)
    writer = writers.RangeWriter(Range("t", 0, 0, count * rows), settings, tmp_path, lambda *_: None, "0123abc")
    before = pa.total_allocated_bytes()
    for number in range(count):
        times = np.full(rows, _TIME * 1000)
        times[0] -= _HOUR_MS * 1000
        columns: dict[str, pa.Array] = {name: pa.nulls(rows, FULL.field(name).type) for name in FULL.names}
        columns["value"] = pa.array([b"%01000d" % row for row in range(rows)], pa.binary())
        columns["offset"] = pa.array(range(number * rows, (number + 1) * rows), pa.int64())
        columns["timestamp"] = pa.array(times).cast(FULL.field("timestamp").type)
        writer.add(pa.RecordBatch.from_arrays(list(columns.values()), schema=FULL), times, times)
    del columns
    assert pa.total_allocated_bytes() - before < 10 * rows * 1000
    writer.finish(count * rows)


def test_an_attempt_that_fails_beside_one_that_is_done(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, values(100))
    options = LoadOptions({"bootstrap.servers": servers}, [topic], str(tmp_path))
    assert load(options, TwinFails()).failed == []
    assert by_duckdb(tmp_path) == expected(topic, {0: 100})


@pytest.mark.parametrize("at", ["scratch", "put", "settle", "create"])
def test_an_attempt_that_goes_on_after_the_commit(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, at: str
) -> None:
    """It reads what retention has left: its files do not replace those that the run has committed."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, [*values(100), Sent(b"1", None, 0, 1 << 60), Sent(b"2", None, 0, 1 << 60)])
    client = {"bootstrap.servers": servers}
    options = LoadOptions(client, [topic], str(tmp_path), max_bad=MaxBad(2), fail_on_loss=False)
    late = Frozen(folder.LocalFolder, at)
    load(options, late)
    letters = _letters(tmp_path)
    delete_records(servers, topic, {0: 60})
    late.thaw()
    produce(servers, topic, values(10, start=102))
    for _ in range(2):
        assert _letters(tmp_path) == letters
        run(servers, tmp_path, topic, max_bad=MaxBad(2))
    places = [place for place in expected(topic, {0: 112}) if place[2] not in (100, 101)]
    assert by_duckdb(tmp_path) == by_pyarrow(tmp_path) == places
    assert status(str(tmp_path)).findings == []
    assert [path for path in tmp_path.rglob("*.part") if path.is_file()] == []


def _letters(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (output / paths.LETTERS).iterdir()}


@pytest.mark.parametrize("is_again", [False, True], ids=["deleted", "created again"])
def test_a_topic_that_is_gone_is_awaited_once(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_again: bool
) -> None:
    """It is deleted between the plan and the tasks: the first range waits for request.timeout.ms, the others do not."""
    servers, count = cluster.bootstrap_servers, 8
    create_topic(servers, topic, count)
    produce(servers, topic, values(count * 5, partitions=count))
    asked, real = [0], tasks_module.fetch_range

    def fetch_range(*arguments: Any) -> Any:
        asked[0] += 1
        return real(*arguments)

    class Deleted(InProcess):
        def run(self, tasks: Any, job: Any) -> None:
            delete_topic(servers, topic)
            if is_again:
                create_topic(servers, topic, count)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tasks_module, "fetch_range", fetch_range)
                super().run(tasks, job)

    client = {"bootstrap.servers": servers, "request.timeout.ms": "3000"}
    loaded = load(LoadOptions(client, [topic], str(tmp_path), max_task_records=5, fail_on_loss=False), Deleted())
    assert asked == [1]
    assert [item.gaps for item in loaded.partitions] == [{RECREATED if is_again else DELETED: 5}] * count


def test_records_that_are_lost_since_the_plan(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """The error names the job's option, as the job has none of Spark's source."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, values(10))

    class Late(InProcess):
        def run(self, tasks: Any, job: Any) -> None:
            delete_records(servers, topic, {0: 5})
            super().run(tasks, job)

    [failed] = load(LoadOptions({"bootstrap.servers": servers}, [topic], str(tmp_path)), Late()).failed
    assert "--fail-on-data-loss false goes on without them" in failed.error
    assert "failOnDataLoss" not in failed.error


@pytest.mark.parametrize("corrupted", [False, True])
def test_short_ranges_are_fetched_together(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corrupted: bool
) -> None:
    """One request fetches the ranges of all partitions; those that it can't serve are fetched one by one."""
    servers, count = cluster.bootstrap_servers, 60
    create_topic(servers, topic, count)
    produce(servers, topic, values(count * 20, partitions=count))
    requests, real = [0], ranges.fetch_short

    def fetch_short(*arguments: Any) -> Any:
        requests[0] += 1
        answer = real(*arguments)
        if corrupted:
            for key in [key for key in answer.fetched if key[1] % 3 == 0]:
                del answer.fetched[key]
        return answer

    monkeypatch.setattr(ranges, "fetch_short", fetch_short)
    loaded = run(servers, tmp_path, topic)
    assert 1 <= requests[0] <= 4
    assert [item.records for item in loaded.partitions] == [20] * count
    assert by_duckdb(tmp_path) == expected(topic, dict.fromkeys(range(count), 20))
    assert status(str(tmp_path)).findings == []


def test_files_are_on_disk_before_the_offsets_that_name_them(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order survives a power failure: content, name, folder, then the task's file of offsets."""
    servers, count = cluster.bootstrap_servers, 5
    create_topic(servers, topic, count)
    produce(servers, topic, values(count * 20, partitions=count))
    synced: set[str] = set()
    unsafe: set[str] = set()
    tasks = files = 0

    def sync(path: Path) -> None:
        durable.sync_folder(path)
        synced.add(str(path))
        unsafe.difference_update({name for name in unsafe if Path(name).parent == path})

    def replace(source: Path, place: Path) -> None:
        nonlocal files
        os.replace(source, place)
        if str(place).endswith(paths.STAGED):
            assert str(source) in synced
            unsafe.add(str(place))
            files += 1

    def link(source: Path, place: Path) -> None:
        nonlocal tasks
        if Path(place).name.startswith("offsets-"):
            assert unsafe == set()
            tasks += 1
        os.link(source, place)

    monkeypatch.setattr(folder, "sync_folder", sync)
    monkeypatch.setattr(folder, "os", SimpleNamespace(**{**vars(os), "replace": replace, "link": link}))
    assert run(servers, tmp_path, topic).failed == []
    assert files == count
    assert tasks
