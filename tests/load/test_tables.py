"""Loads into Delta tables: kills at each step, two loads at once, other writers between runs, lost journals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import TableNotFoundError

from spark_klog.client.places import TimeSpec
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, LoadError
from spark_klog.files.arrow import ArrowFolder
from spark_klog.files.folder import LocalFolder
from spark_klog.load import files
from spark_klog.load.audit import status
from spark_klog.load.journal import paths
from spark_klog.load.places import AtRun
from spark_klog.load.run import LoadOptions, load
from spark_klog.load.settings import WriteSettings
from spark_klog.tables.delta import DeltaLakeTable
from spark_klog.tables.delta_stores import storage_options
from spark_klog.tables.opening import open_table
from spark_klog.tables.table import STREAMS, Run, RunConflict
from tests.load.buckets import bucket, seen as seen_in_bucket
from tests.load.support import DiesLate, InProcess, Killed, Place, die, expected, failing, run
from tests.spark.support import Sent, create_topic, delete_topic, produce, values
from tests.support.runs.soak import SOAK, in_soak


def seen(location: Path) -> list[Place]:
    """(topic, partition, offset) of all records of a table, by three readers that agree."""
    names = ["topic", "partition", "offset"]
    if not DeltaTable.is_deltatable(str(location)):
        return []
    table = DeltaTable(location)
    found = sorted(zip(*(table.to_pyarrow_table()[name].to_pylist() for name in names), strict=True))
    if found:
        with duckdb.connect() as connection:
            query = (
                f'SELECT topic, partition, "offset" FROM read_parquet({table.file_uris()!r}, hive_partitioning=false)'
            )
            assert sorted(connection.execute(query).fetchall()) == found
        assert sorted(polars.read_delta(str(location)).select(names).rows()) == found
    return found


def data_files(location: Path) -> list[str]:
    return sorted(path.relative_to(location).as_posix() for path in location.glob("[!_]*/**/*.parquet"))


def committed(location: Path) -> list[str]:
    return sorted(item.path for item in DeltaLakeTable(str(location)).files())


def test_runs_of_a_table(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers, address = cluster.bootstrap_servers, f"delta:{tmp_path}"
    create_topic(servers, topic, 2)
    assert run(servers, address, topic, settings=WriteSettings(layout="hour")).runs == []
    assert polars.read_delta(str(tmp_path)).shape == (0, 10), "a call with nothing new makes the table"
    assert status(address).findings == []
    for number in (1, 2):
        produce(servers, topic, values(40, start=(number - 1) * 40, partitions=2))
        assert run(servers, address, topic, settings=WriteSettings(layout="hour")).runs == [number]
        assert seen(tmp_path) == expected(topic, dict.fromkeys(range(2), number * 20))
        assert data_files(tmp_path) == committed(tmp_path)
    assert run(servers, address, topic, settings=WriteSettings(layout="hour")).runs == []
    history = DeltaTable(tmp_path).history(1)[0]["klog"]
    assert history["offsets"] == {topic: {"0": 40, "1": 40}}
    for output in (address, str(tmp_path)):
        found = status(output)
        assert (found.findings, len(found.runs)) == ([], 2)
        assert [(item.topic, item.records) for item in files(output)] == [(topic, 20)] * 4
    assert polars.read_delta(str(tmp_path)).select("date", "hour").unique().height == 1
    with pytest.raises(LoadError, match="belongs to a load into the table delta, not into files"):
        run(servers, tmp_path, topic)


_KILL = pytest.mark.test_all("kill")


@pytest.mark.parametrize(
    ("side", "step"),
    [(1, 6), pytest.param(1, 1, marks=[_KILL, in_soak]), pytest.param(-1, 1 if SOAK else 4, marks=_KILL)],
    ids=["some", "before", "after"],
)
def test_killed_at_each_change(cluster: EmbeddedCluster, topic: str, tmp_path: Path, side: int, step: int) -> None:
    """Nobody sees records twice, nothing is loaded again that is in the table, no orphans stay."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    produce(servers, topic, values(120, partitions=2))
    whole = expected(topic, {0: 60, 1: 60})
    number, died = 0, True
    while died:
        number += step
        output = tmp_path / f"{number}"
        try:
            with failing(LocalFolder, side * number, die):
                run(servers, f"delta:{output}", topic, max_task_records=40)
            died = False
        except Killed:
            pass
        assert seen(output) in ([], whole)
        loaded = run(servers, f"delta:{output}", topic, max_task_records=40)
        assert seen(output) == whole
        assert data_files(output) == committed(output)
        found = status(str(output))
        assert (found.findings, found.unfinished, len(found.runs)) == ([], "", 1), loaded
        assert run(servers, f"delta:{output}", topic).runs == []
        assert not list((output / paths.ATTEMPTS).iterdir())  # an attempt that did not count might have gone on
    assert number > 12


@pytest.mark.parametrize("after", [False, True], ids=["before the commit", "after it"])
def test_killed_around_the_commit(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    servers, address = cluster.bootstrap_servers, f"delta:{tmp_path}"
    create_topic(servers, topic)
    produce(servers, topic, values(30))
    _kill_at_commit(servers, address, topic, monkeypatch, after=after)
    assert len(seen(tmp_path)) == 30 * after
    before = data_files(tmp_path)
    produce(servers, topic, values(10, start=30))
    runner = InProcess()
    options = LoadOptions({"bootstrap.servers": servers}, [topic], address)
    loaded = load(options, runner)
    assert loaded.runs == ([2] if after else [1, 2])
    assert len(runner.ran) == 1  # the task of the new run
    assert seen(tmp_path) == expected(topic, {0: 40})
    assert set(before) <= set(data_files(tmp_path))
    assert len(status(str(tmp_path)).runs) == 2


def _kill_at_commit(
    servers: str, address: str, topic: str, monkeypatch: pytest.MonkeyPatch, *, after: bool, **options: Any
) -> None:
    real = DeltaLakeTable.append

    def append(self: DeltaLakeTable, *arguments: Any) -> None:
        if after:
            real(self, *arguments)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(DeltaLakeTable, "append", append)
        with pytest.raises(Killed):
            run(servers, address, topic, **options)


def test_earlier_versions_can_be_read(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed is finished, and its orphans go; files that a compaction has replaced stay for VACUUM."""
    servers, address = cluster.bootstrap_servers, f"delta:{tmp_path}"
    create_topic(servers, topic)
    produce(servers, topic, values(30))
    run(servers, address, topic, max_task_records=10)
    version, before = DeltaTable(tmp_path).version(), data_files(tmp_path)
    assert DeltaTable(tmp_path).optimize.compact()["numFilesRemoved"] == 3
    produce(servers, topic, values(10, start=30))
    _kill_at_commit(servers, address, topic, monkeypatch, after=False)
    for _ in range(2):
        run(servers, address, topic)
        assert seen(tmp_path) == expected(topic, {0: 40})
        assert set(before) <= set(data_files(tmp_path))
    assert DeltaTable(tmp_path, version=version).to_pyarrow_table().num_rows == 30


@pytest.mark.parametrize("lost", ["journal", "candidate"])
def test_the_journal_is_lost(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """The next run goes on where the table's last commit says."""
    servers, address = cluster.bootstrap_servers, f"delta:{tmp_path}"
    create_topic(servers, topic, 2)
    for number in range(3):
        produce(servers, topic, values(20, start=number * 20, partitions=2))
        run(servers, address, topic)
    produce(servers, topic, values(20, start=60, partitions=2))
    if lost == "candidate":
        _kill_at_commit(servers, address, topic, monkeypatch, after=True)
        [candidate] = tmp_path.glob("_klog/runs/*/candidate-*")
        candidate.unlink()
    elif lost == "journal":
        shutil.rmtree(tmp_path / "_klog")
    elif lost == "manifest":
        (tmp_path / "_klog/runs/00000003/manifest.json").unlink()
        pointer = tmp_path / paths.LATEST
        pointer.write_text(pointer.read_text().replace("00000003", "00000002"))
    else:
        for path in tmp_path.glob("_klog/runs/0000000[23]"):
            shutil.rmtree(path)
        pointer = tmp_path / paths.LATEST
        pointer.write_text(pointer.read_text().replace("00000003", "00000001"))
    load_id = DeltaLakeTable(str(tmp_path)).load_id()
    before = data_files(tmp_path)
    loaded = run(servers, address, topic)
    assert loaded.runs == ([] if lost == "candidate" else [4])
    produce(servers, topic, values(20, start=80, partitions=2))
    assert run(servers, address, topic).runs == [5]
    assert seen(tmp_path) == expected(topic, {0: 50, 1: 50})
    assert set(before) <= set(data_files(tmp_path))
    assert json.loads((tmp_path / paths.LOAD).read_text())["load"] == load_id
    assert status(address).unfinished == ""


@pytest.mark.parametrize(
    "lost",
    [False, pytest.param(True, marks=pytest.mark.test_all("long"))],
    ids=["the journal is there", "the journal is lost"],
)
def test_the_commit_is_no_longer_in_the_history(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, lost: bool
) -> None:
    """The table's log was cleaned up to a checkpoint: that has the number of the last run, but not its offsets."""
    servers, address = cluster.bootstrap_servers, f"delta:{tmp_path}"
    create_topic(servers, topic)
    for number in range(2):
        produce(servers, topic, values(10, start=number * 10))
        run(servers, address, topic)
    DeltaTable(tmp_path).create_checkpoint()
    write_deltalake(tmp_path, pa.table({"topic": ["theirs"]}), mode="append", schema_mode="merge")
    for path in tmp_path.glob("_delta_log/*.json"):
        if int(path.stem) < DeltaTable(tmp_path).version():
            path.unlink()
    if lost:
        shutil.rmtree(tmp_path / "_klog")
    produce(servers, topic, values(10, start=20))
    if lost:
        with pytest.raises(LoadError, match="run 2, of which neither the table's history nor its journal"):
            run(servers, address, topic)
    else:
        assert run(servers, address, topic).runs == [3]
        assert [place for place in seen(tmp_path) if place[0] == topic] == expected(topic, {0: 30})


def test_topics_and_times_of_a_table(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Two topics, one of a hidden name; days of the year 1 and 9999."""
    servers, address, other = cluster.bootstrap_servers, f"delta:{tmp_path}", f"_{topic}"
    for name in (topic, other):
        create_topic(servers, name)
        produce(servers, name, [Sent(b'{"at":"%s"}' % day) for day in (b"0001-01-02", b"9999-12-31", b"2026-11-23")])
    settings = WriteSettings(schema="at date", event_time="at", layout="hour")
    run(servers, address, topic, other, settings=settings)
    found = DeltaTable(tmp_path).to_pyarrow_table(columns=["topic", "value", "date", "hour"]).to_pylist()
    assert sorted({row["topic"] for row in found}) == sorted([topic, other])
    assert [row["hour"] for row in found] == [0] * 6
    assert all(row["value"]["at"] == row["date"] for row in found)
    assert status(address).findings == []


def test_the_table_is_lost(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Nothing is loaded from the middle into a table that was made anew, or into a copy."""
    servers, address = cluster.bootstrap_servers, f"delta:{tmp_path / 'table'}"
    create_topic(servers, topic)
    produce(servers, topic, values(20))
    run(servers, address, topic)
    shutil.rmtree(tmp_path / "table/_delta_log")
    produce(servers, topic, values(20, start=20))
    with pytest.raises(LoadError, match=r"has no run of this load last, and its journal .* run 1"):
        run(servers, address, topic)
    copy = tmp_path / "copy"
    write_deltalake(copy, pa.table({"topic": ["x"]}), configuration={"delta.appendOnly": "false"})
    DeltaTable(copy).alter.set_table_properties({"klog.load": "abc"}, raise_if_not_exists=False)
    with pytest.raises(LoadError, match="it is a copy of that load's table"):
        run(servers, f"delta:{copy}", topic)


def test_files_are_vacuumed_before_the_commit(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tasks whose files are gone run again, those of which some are there do not."""
    servers, address = cluster.bootstrap_servers, f"delta:{tmp_path}"
    create_topic(servers, topic, 3)
    produce(servers, topic, values(300, partitions=3))
    run(servers, address, topic)
    produce(servers, topic, values(300, start=300, partitions=3))
    _kill_at_commit(servers, address, topic, monkeypatch, after=False, max_task_records=50)
    orphans = set(data_files(tmp_path)) - set(committed(tmp_path))
    assert len(orphans) == 6
    kept = sorted(orphans)[0]
    hidden = tmp_path / "_klog/kept"
    (tmp_path / kept).rename(hidden)
    gone = DeltaTable(tmp_path).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert len(gone) == 5
    hidden.rename(tmp_path / kept)
    runner = InProcess()
    load(LoadOptions({"bootstrap.servers": servers}, [topic], address, max_task_records=50), runner)
    assert len(runner.ran) == 5
    assert seen(tmp_path) == expected(topic, dict.fromkeys(range(3), 200))
    assert data_files(tmp_path) == committed(tmp_path)
    assert kept in committed(tmp_path)


def test_another_writer_between_runs(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers, address = cluster.bootstrap_servers, f"delta:{tmp_path}"
    create_topic(servers, topic, 2)
    for number in range(3):
        produce(servers, topic, values(20, start=number * 20, partitions=2))
        run(servers, address, topic)
        table = DeltaTable(tmp_path)
        row = {"topic": ["theirs"], "partition": pa.array([9], pa.int32()), "offset": [number]}
        write_deltalake(table, pa.table(row), mode="append", schema_mode="merge")
        DeltaTable(tmp_path).optimize.compact()
        DeltaTable(tmp_path).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
        ours = expected(topic, dict.fromkeys(range(2), 10 * (number + 1)))
        assert seen(tmp_path) == sorted([*ours, *(("theirs", 9, offset) for offset in range(number + 1))])
        assert status(address).findings == []
        assert sorted(item.path for item in files(address)) == sorted(DeltaTable(tmp_path).file_uris())


def _seen_in(uri: str) -> list[Place]:
    """The records of a table in a bucket, by deltalake."""
    url, options = storage_options(uri)
    try:
        table = DeltaTable(url, storage_options=options)
    except TableNotFoundError:
        return []
    rows = table.to_pyarrow_table()
    return sorted(zip(*(rows[name].to_pylist() for name in ("topic", "partition", "offset")), strict=True))


@pytest.mark.test_all("kill")
@pytest.mark.parametrize("step", [25, pytest.param(3, marks=in_soak)])
def test_killed_at_each_change_in_a_bucket(cluster: EmbeddedCluster, topic: str, s3_process: str, step: int) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    produce(servers, topic, values(120, partitions=2))
    whole = expected(topic, {0: 60, 1: 60})
    number, died = 0, True
    while died:
        number += step
        uri = bucket(s3_process, f"table{number}-{step}")
        try:
            with failing(ArrowFolder, number, die):
                run(servers, f"delta:{uri}", topic, max_task_records=40, settings=WriteSettings(layout="day"))
            died = False
        except Killed:
            pass
        assert _seen_in(uri) in ([], whole)
        run(servers, f"delta:{uri}", topic, max_task_records=40, settings=WriteSettings(layout="day"))
        assert _seen_in(uri) == seen_in_bucket(uri) == whole, "no orphans"
        assert status(f"delta:{uri}").findings == []
    assert number > 25


def test_an_attempt_that_dies_after_the_commit(cluster: EmbeddedCluster, topic: str, s3_process: str) -> None:
    """Its upload ends when the run is committed and orphans are removed: the next run removes the file."""
    servers, uri = cluster.bootstrap_servers, bucket(s3_process, "late")
    create_topic(servers, topic)
    produce(servers, topic, values(30))
    late = DiesLate(ArrowFolder)
    load(LoadOptions({"bootstrap.servers": servers}, [topic], f"delta:{uri}"), late)
    late.thaw()
    assert _seen_in(uri) == expected(topic, {0: 30})
    assert len(seen_in_bucket(uri)) == 60
    assert run(servers, f"delta:{uri}", topic).runs == []
    assert _seen_in(uri) == seen_in_bucket(uri) == expected(topic, {0: 30})


class _Beside(InProcess):
    """Does something after the tasks, before the run commits."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self._action = action

    def run(self, tasks: Any, job: Any) -> None:
        super().run(tasks, job)
        self._action()


def test_two_loads_at_once(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without locks, as on object stores: the second one is told, and both go on; nothing is lost or double."""
    servers, address = cluster.bootstrap_servers, f"delta:{tmp_path}"
    create_topic(servers, topic, 2)
    monkeypatch.setattr("spark_klog.load.run.locked", _unlocked)
    options = LoadOptions({"bootstrap.servers": servers}, [topic], address, max_task_records=20)
    for number in range(2):
        produce(servers, topic, values(60, start=number * 60, partitions=2))
        with pytest.raises(RunConflict, match=f"committed run {number + 1}"):
            load(options, _Beside(lambda: load(options, InProcess())))
        assert seen(tmp_path) == expected(topic, dict.fromkeys(range(2), 30 * (number + 1)))
        assert load(options, InProcess()).runs == []
        assert data_files(tmp_path) == committed(tmp_path)
    assert status(address).findings == []


class _unlocked:
    def __init__(self, _store: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def test_a_topic_is_made_anew(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Also if the journal is lost meanwhile: the commit has the topic's id."""
    servers, address = cluster.bootstrap_servers, f"delta:{tmp_path}"
    create_topic(servers, topic)
    produce(servers, topic, values(20))
    run(servers, address, topic)
    shutil.rmtree(tmp_path / "_klog")
    delete_topic(servers, topic)
    create_topic(servers, topic)
    produce(servers, topic, values(30))
    loaded = run(servers, address, topic, fail_on_loss=False)
    assert [item["cause"] for item in loaded.lost] == ["recreated"]
    assert seen(tmp_path) == sorted(expected(topic, {0: 20}) + expected(topic, {0: 30}))


def test_changes_of_a_topic_that_is_made_anew(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Also after the journal is lost: the commit has how often the topic was made, by which changes are newer."""
    servers, address = cluster.bootstrap_servers, f"delta:{tmp_path}"
    changes = WriteSettings(schema="id bigint, name string", upsert_key="id")

    def merged(*names: str) -> list[tuple[int, str]]:
        produce(
            servers, topic, [Sent(b'{"id": %d, "name": "%s"}' % pair) for pair in enumerate(map(str.encode, names))]
        )
        run(servers, address, topic, settings=changes, fail_on_loss=False)
        rows = DeltaTable(tmp_path).to_pyarrow_table()
        return sorted(zip(rows["id"].to_pylist(), rows["name"].to_pylist(), strict=True))

    create_topic(servers, topic)
    assert merged("a", "b", "c") == [(0, "a"), (1, "b"), (2, "c")]
    delete_topic(servers, topic)
    create_topic(servers, topic)
    assert merged("a2") == [(0, "a2"), (1, "b"), (2, "c")]
    shutil.rmtree(tmp_path / "_klog")
    assert merged("a3", "b3") == [(0, "a3"), (1, "b3"), (2, "c")]


def test_a_table_of_streams(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers, table = cluster.bootstrap_servers, open_table(f"delta:{tmp_path}")
    changes = WriteSettings(schema="id bigint, name string", upsert_key="id")
    create_topic(servers, topic)
    change_format = changes.change_format(topic)
    assert change_format is not None
    table.prepare(change_format.row, "none", "", STREAMS)
    table.upsert(None, Run(STREAMS, 1, "token", {"a query": {"batch": 0}}))
    with pytest.raises(LoadError, match=r"belongs to streams, by .*: use another table"):
        run(servers, f"delta:{tmp_path}", topic, settings=changes)
    assert not (tmp_path / "_klog").exists()


def test_what_a_table_does_not_do(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers, address = cluster.bootstrap_servers, f"delta:{tmp_path}"
    create_topic(servers, topic)
    produce(servers, topic, values(20))
    with pytest.raises(ConfigError, match="files of --format parquet, not json"):
        run(servers, address, topic, settings=WriteSettings("json", "none"))
    run(servers, address, topic, start=TimeSpec(0))
    with pytest.raises(ConfigError, match="--from-run"):
        run(servers, address, topic, start=AtRun(1))
    with pytest.raises(ConfigError, match="a table is not loaded again"):
        run(servers, address, topic, start=TimeSpec(0))
    assert paths.token_of(committed(tmp_path)[0])
