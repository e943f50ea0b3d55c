"""The upkeep of tables: what expires, and what never does; kills, other writers, and upkeeps at once."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable, write_deltalake

from spark_klog.cli.jobs import batch_load
from spark_klog.cli.main import main
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError
from spark_klog.files import open_folder
from spark_klog.load.audit import status
from spark_klog.load.by_topic import Outcome, output_of
from spark_klog.load.run import LoadOptions, load
from spark_klog.load.upkeep import Upkeep, expire, expired_text
from spark_klog.load.verify import verify
from spark_klog.tables.opening import open_table
from spark_klog.tables.upkeep import Expired, Kept
from tests.load.change_source import KEYED, ChangeSource, rows_of
from tests.load.job_program import Runner
from tests.load.support import InProcess, run
from tests.load.tables import Kind, Lake, check_each_once, make_lake
from tests.spark.support import create_topic, produce, values
from tests.tables.delta_vectors import delete_by_vector

_KINDS = pytest.mark.parametrize("kind", ["delta", "iceberg"])
_LONG, _KILL = pytest.mark.test_all("long"), pytest.mark.test_all("kill")
_SECONDS = 60
#: Nothing but the current state.
_NOW = Kept(0.001)
_DAYS = 3 * 24 * 3600.0


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> Lake:
    return make_lake(kind, tmp_path, monkeypatch)


class _Loads:
    """Runs of a load into a lake's table; each has records of both partitions."""

    def __init__(self, cluster: EmbeddedCluster, topic: str, lake: Lake) -> None:
        self.servers, self.topic, self.lake = cluster.bootstrap_servers, topic, lake
        self.sent = 0
        create_topic(self.servers, topic, 2)

    def run(self, count: int = 1, **options: Any) -> None:
        for _ in range(count):
            produce(self.servers, self.topic, values(20, start=self.sent, partitions=2))
            self.sent += 20
            run(self.servers, self.lake.address, self.topic, max_task_records=5, **options)

    def check(self) -> None:
        assert check_each_once(self.lake, self.topic, self.sent) == self.sent
        assert status(self.lake.address).findings == []


@pytest.fixture
def loads(cluster: EmbeddedCluster, topic: str, lake: Lake) -> _Loads:
    return _Loads(cluster, topic, lake)


def _there(lake: Lake) -> set[str]:
    """The Parquet files in the table's folder, also those that it does not have."""
    below = open_folder(open_table(lake.address).location).paths_below("")
    return {path for path in below if path.endswith(".parquet") and not path.startswith("_")}


def _current(lake: Lake) -> set[str]:
    return {file.path for file in open_table(lake.address).files()}


def _age(lake: Lake, seconds: float = _DAYS) -> None:
    """Let all files that are there look older."""
    folder, then = open_folder(open_table(lake.address).location), time.time() - seconds
    for path in folder.paths_below(""):
        if not path.startswith(("_klog", "_delta_log")):
            os.utime(folder.uri(path), (then, then))


def _expire(lake: Lake, kept: Kept = _NOW, **options: Any) -> Any:
    time.sleep(0.01)
    return expire(lake.address, kept, **options)


@_KINDS
def test_nobody_needs_replaced_files(loads: _Loads, lake: Lake) -> None:
    loads.run(3)
    before = _there(lake)
    assert open_table(lake.address).compact(1 << 30)
    asked = _expire(lake, is_dry=True)
    assert set(asked.files)
    assert _there(lake) == before | _current(lake)
    done = _expire(lake)
    assert (done.states, done.files) == (asked.states, asked.files)
    assert _there(lake) == _current(lake)
    assert not _expire(lake).files
    loads.check()
    loads.run(2)
    loads.check()
    assert verify(lake.address).findings == []


@_LONG
@_KINDS
def test_readers_of_the_kept_time(loads: _Loads, lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """They travel to each state of the time, and to the last ones, however old these are."""
    loads.run(2)
    open_table(lake.address).compact(1 << 30)
    time.sleep(0.05)
    since = time.time()
    time.sleep(0.05)
    loads.run()
    seen = _history(lake)[-2:]  # with the one that the table had when the time began
    open_table(lake.address).compact(1 << 30)
    loads.run()
    now = SimpleNamespace(time=lambda: since + 1)
    with monkeypatch.context() as clock:
        clock.setattr(f"spark_klog.tables.{lake.kind}_expiry.time", now)
        assert expire(lake.address, Kept(1)).files
    assert [_rows_at(lake, state) for state in seen] == [40, 60]
    last = _history(lake)[-3:]  # of Delta with the commit of a property
    _expire(lake, Kept(0.001, 3))
    assert [_rows_at(lake, state) for state in last] == ([60, 80, 80] if lake.kind == "delta" else [60, 60, 80])
    loads.check()


def _history(lake: Lake) -> list[int]:
    """The table's states, the oldest one first."""
    if lake.kind == "delta":
        return sorted(commit["version"] for commit in DeltaTable(lake.uri).history())
    return [entry.snapshot_id for entry in lake.catalog.load_table(lake.name).metadata.snapshots]


def _rows_at(lake: Lake, state: int) -> int:
    if lake.kind == "delta":
        return int(DeltaTable(lake.uri, version=state).to_pyarrow_table().num_rows)
    return len(lake.catalog.load_table(lake.name).scan(snapshot_id=state).to_arrow())


@_KINDS
def test_files_of_a_killed_run(loads: _Loads, lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay, however old, and the next run has them; those that no attempt has go after a day."""
    loads.run()
    known = type(open_table(lake.address))
    real = known.append

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(known, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        loads.run()
    monkeypatch.setattr(known, "append", real)
    folder = open_folder(open_table(lake.address).location)
    waiting = _there(lake) - _current(lake)
    assert waiting
    for name in ("compacted-old.parquet", f"{loads.topic}/part-old.parquet"):
        folder.write(name, b"of a compaction that was killed")
    _age(lake)
    folder.write("upsert-young.parquet", b"of a merge that is under way")
    done = _expire(lake)
    assert {path.rpartition("/")[2] for path in done.files} >= {"compacted-old.parquet", "part-old.parquet"}
    assert _there(lake) - _current(lake) == waiting | {"upsert-young.parquet"}
    runner = InProcess()
    load(LoadOptions({"bootstrap.servers": loads.servers}, [loads.topic], lake.address), runner)
    assert runner.ran == []
    loads.check()


@_LONG
@_KINDS
def test_the_last_run_stays_known(loads: _Loads, lake: Lake) -> None:
    """Others write for long after it: it is found, also by its token, and the next one follows."""
    loads.run()
    owner = open_table(lake.address).load_id()
    assert owner is not None
    known = open_table(lake.address).last_run(owner)
    assert known is not None
    assert known.token
    for number in range(25):
        _others_append(lake, number)
    if lake.kind == "delta":
        DeltaTable(lake.uri).create_checkpoint()
    _expire(lake)
    again = open_table(lake.address).last_run(owner)
    assert again is not None
    assert (again.number, again.token) == (known.number, known.token)
    produce(loads.servers, loads.topic, values(20, start=20, partitions=2))
    assert run(loads.servers, lake.address, loads.topic).runs == [2]
    if lake.kind == "delta":
        DeltaTable(lake.uri).create_checkpoint()
    assert _expire(lake).states >= 25
    assert open_table(lake.address).last_run(owner).number == 2  # type: ignore[union-attr]


def _others_append(lake: Lake, number: int) -> None:
    schema = open_table(lake.address).schema()
    assert schema is not None
    row = pa.Table.from_pylist([{"topic": "theirs", "partition": 9, "offset": number}], schema)
    if lake.kind == "delta":
        write_deltalake(lake.uri, row, mode="append")
    else:
        lake.catalog.load_table(lake.name).append(row)


@_KILL
@_KINDS
def test_killed_between_two_steps(loads: _Loads, lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has its rows at any time, and the next call does the rest, at the latest a day later."""
    known = type(open_table(lake.address))
    real = known.remove
    for removals in (*range(3), 7):
        loads.run(2)
        open_table(lake.address).compact(1 << 30)
        left = removals

        def remove(self: Any, path: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            real(self, path)

        monkeypatch.setattr(known, "remove", remove)
        with pytest.raises(KeyboardInterrupt):
            _expire(lake)
        monkeypatch.setattr(known, "remove", real)
        loads.check()
        _age(lake)
        _expire(lake)
        assert _there(lake) == _current(lake)
        loads.check()


@_LONG
@_KINDS
def test_upkeeps_at_once_beside_runs(loads: _Loads, lake: Lake) -> None:
    loads.run()
    rounds = 3

    def expires() -> None:
        for _ in range(3 * rounds):
            expire(lake.address, _NOW)

    _at_once(lambda: loads.run(rounds), expires, expires)
    loads.check()
    _at_once(lambda: loads.run(rounds), lambda: _keep(lake, rounds, _NOW))
    loads.check()
    assert verify(lake.address).findings == []
    _age(lake)
    _expire(lake)
    assert _there(lake) == _current(lake)


@_LONG
@_KINDS
def test_beside_merges(cluster: EmbeddedCluster, topic: str, lake: Lake) -> None:
    """Files that a merge reads stay for the kept time."""
    source = ChangeSource(cluster.bootstrap_servers, topic, 100)
    rounds = 3

    def merges() -> None:
        for _ in range(rounds):
            source.change(80)
            run(source.servers, lake.address, topic, settings=KEYED)

    merges()
    _at_once(merges, lambda: _keep(lake, rounds, Kept(_SECONDS)))
    for name, read in lake.readers().items():
        assert rows_of(read()) == source.rows(source.end), name
    _age(lake)
    _expire(lake)
    assert _there(lake) == _current(lake)
    for name, read in lake.readers().items():
        assert rows_of(read()) == source.rows(source.end), name


def _keep(lake: Lake, rounds: int, kept: Kept) -> None:
    for _ in range(rounds):
        open_table(lake.address).compact(1 << 30)
        expire(lake.address, kept)


def _at_once(*works: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS)
        assert not thread.is_alive()
    assert not failed, failed


# A format's own


@pytest.mark.parametrize("kind", ["delta"])
def test_of_delta(loads: _Loads, lake: Lake) -> None:
    """Deletion vectors in use stay, the log is shortened, and it knows removed files for as long as readers need."""
    loads.run(2)
    delete_by_vector(Path(lake.uri), DeltaTable(lake.uri).file_uris()[0], [0])
    _age(lake)
    name = "delta.deletedFileRetentionDuration"
    change = f"property {name}: interval 1 week -> interval 21600 seconds"
    for is_dry in (True, False):
        assert change in expired_text(_expire(lake, is_dry=is_dry))
    assert (Path(lake.uri) / "vector.bin").exists()
    assert sum(len(rows) for rows in open_table(lake.address).rows(["offset"])) == loads.sent - 1
    assert DeltaTable(lake.uri).metadata().configuration[name] == "interval 21600 seconds"
    _expire(lake, Kept())
    with pytest.raises(
        LoadError, match=f"knows the files that it has removed for 21600 s only: set its property {name}"
    ):
        _expire(lake, Kept(7 * 3600))
    DeltaTable(lake.uri).alter.set_table_properties({name: "7 d"}, raise_if_not_exists=False)
    with pytest.raises(LoadError, match=f"its property {name} is '7 d': set it as 'interval 7 days'"):
        _expire(lake)


def test_states_whose_removed_files_the_log_has_forgotten(tmp_path: Path) -> None:
    """Those of the last commits stay, however old, also after a checkpoint that no longer names their files."""
    folder, forgets = tmp_path / "table", {"delta.deletedFileRetentionDuration": "interval 0 seconds"}
    for number in range(3):
        write_deltalake(folder, pa.table({"id": [number]}), mode="overwrite", configuration=forgets)
    DeltaTable(folder).create_checkpoint()
    then = time.time() - _DAYS
    for file in folder.glob("*.parquet"):
        os.utime(file, (then, then))
    gone = expire(f"delta:{folder}", Kept(count=2))
    assert len([path for path in gone.files if not path.startswith("_")]) == 1
    assert [DeltaTable(folder, version=number).to_pyarrow_table()["id"].to_pylist() for number in (1, 2)] == [[1], [2]]


@_KINDS
def test_tables_within_the_folder(loads: _Loads, lake: Lake) -> None:
    """As of a namespace with the table's name: what is in the folder of another table or load is not the table's."""
    loads.run()
    below = Path(open_table(lake.address).location.removeprefix("file://"))
    others = [below / "a", below / "b" / "c", below / "d"]
    write_deltalake(others[0], pa.table({"id": [1]}))
    for folder, file in zip(others[1:], ("metadata/v1.metadata.json", "_klog/load.json"), strict=True):
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text("{}")
        (folder / "data").mkdir()
        (folder / "data" / "one.parquet").write_bytes(b"rows")
    (below / "b" / "orphan.parquet").write_bytes(b"rows")
    live = next((below / "data").rglob("*.parquet"), below / "x.parquet")
    live.with_name(f"{live.name}#orphan.parquet").write_bytes(b"rows")  # for pyiceberg the name of the live one
    _age(lake)
    orphans = {path.rpartition("/")[2] for path in _expire(lake).files if "orphan" in path}
    assert {"orphan.parquet"} <= orphans <= {"orphan.parquet", f"{live.name}#orphan.parquet"}
    assert [len(list(folder.rglob("*.parquet"))) for folder in others] == [1, 1, 1]
    loads.check()


@pytest.mark.parametrize("kind", ["delta"])
def test_the_log_of_delta(loads: _Loads, lake: Lake) -> None:
    loads.run(2)
    DeltaTable(lake.uri).create_checkpoint()
    loads.run(1)
    log = Path(lake.uri) / "_delta_log"
    first = min(log.glob("*.json")).name
    (log / "00000000000000000001.checkpoint.0000000001.0000000002.parquet").write_bytes(b"one of two parts")
    assert _expire(lake, Kept(_SECONDS)).states == 0
    done = _expire(lake)
    assert done.states == len(done.files) - 1 > 1
    assert first not in {path.name for path in log.iterdir()}
    assert min(log.glob("*.json")).name.split(".")[0] == min(log.glob("*.checkpoint.parquet")).name.split(".")[0]
    loads.check()


@pytest.mark.parametrize("kind", ["iceberg"])
def test_of_iceberg(loads: _Loads, lake: Lake) -> None:
    """Branches and tags stay, as does everything if the table's files may be those of others."""
    loads.run(2)
    tagged, last = _history(lake)[-2:]
    lake.catalog.load_table(lake.name).manage_snapshots().create_tag(tagged, "audit").commit()
    open_table(lake.address).compact(1 << 30)
    _expire(lake)
    assert tagged in _history(lake)
    assert last not in _history(lake)
    assert _rows_at(lake, tagged) == 20
    lake.catalog.load_table(lake.name).manage_snapshots().remove_tag("audit").commit()
    assert _expire(lake).states == 1
    with lake.catalog.load_table(lake.name).transaction() as transaction:
        transaction.set_properties({"gc.enabled": "false"})
    with pytest.raises(LoadError, match=r"gc\.enabled=false"):
        _expire(lake)
    loads.check()


@_LONG
@pytest.mark.parametrize("kind", ["iceberg"])
@pytest.mark.parametrize("is_committed", [True, False])
def test_a_lost_answer(loads: _Loads, lake: Lake, monkeypatch: pytest.MonkeyPatch, is_committed: bool) -> None:
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.exceptions import CommitStateUnknownException

    loads.run(2)
    open_table(lake.address).compact(1 << 30)
    real, lost = SqlCatalog.commit_table, list[bool]()

    def commit(*arguments: Any) -> Any:
        if not lost:
            lost.append(True)
            if is_committed:
                real(*arguments)
            raise CommitStateUnknownException("no answer")
        return real(*arguments)

    monkeypatch.setattr(SqlCatalog, "commit_table", commit)
    assert _expire(lake).states == 2
    assert lost
    assert _there(lake) == _current(lake)
    loads.check()


@pytest.mark.parametrize("kind", ["iceberg"])
def test_a_tag_that_is_made_meanwhile(loads: _Loads, lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyiceberg.catalog.sql import SqlCatalog

    loads.run(3)
    table = lake.catalog.load_table(lake.name)
    first, real, made = table.snapshots()[0].snapshot_id, SqlCatalog.commit_table, list[bool]()

    def commit(*arguments: Any) -> Any:
        if not made:
            made.append(True)
            table.manage_snapshots().create_tag(first, "kept").commit()
        return real(*arguments)

    monkeypatch.setattr(SqlCatalog, "commit_table", commit)
    assert _expire(lake).states == 1
    now = lake.catalog.load_table(lake.name)
    assert (now.metadata.refs["kept"].snapshot_id, len(now.snapshots())) == (first, 2)
    assert len(now.scan(snapshot_id=first).to_arrow()) == 20
    loads.check()


def test_an_interrupt_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is removed that had not been begun with."""
    go, begun = threading.Event(), list[str]()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            go.set()
            super().shutdown(wait=wait)

    def remove(path: str) -> None:
        begun.append(path)
        if path != "0":
            assert go.wait(_SECONDS)

    def tell(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    paths = dict.fromkeys(map(str, range(100)), 1)
    table = SimpleNamespace(location=str(tmp_path), expire=lambda *_, **_more: Expired(1, paths), remove=remove)
    monkeypatch.setattr("spark_klog.load.upkeep.existing_table", lambda _: table)
    monkeypatch.setattr("spark_klog.load.upkeep.ThreadPoolExecutor", Pool)
    with pytest.raises(KeyboardInterrupt):
        expire("delta:table", _NOW, tell=tell)
    assert len(begun) < 20


# The commands


@_KINDS
def test_the_command(loads: _Loads, lake: Lake) -> None:
    loads.run(2)
    open_table(lake.address).compact(1 << 30)
    time.sleep(0.01)
    command = ["load", "expire", lake.address, "--older-than", "0.001s"]
    listed = CliRunner().invoke(main, [*command, "--dry-run"])
    assert listed.exit_code == 0, listed.output
    told, *shown = listed.stdout.splitlines()
    line = json.loads(CliRunner().invoke(main, [*command, "--json", "--dry-run"]).stdout)
    assert (line["paths"], line["files"], line["dry_run"]) == ([path.strip() for path in shown], len(shown), True)
    assert f" {len(shown):,} files, {line['bytes']:,} bytes would be removed" in told
    done = CliRunner().invoke(main, command)
    assert "are removed" in done.stdout, done.output
    again = CliRunner().invoke(main, command)
    assert again.stdout == "there is nothing to remove\n"
    by_topic = lake.address.replace("clicks" if lake.kind == "iceberg" else "table", "{topic}")
    run(loads.servers, named := output_of(by_topic, loads.topic), loads.topic)
    all_of_them = CliRunner().invoke(main, ["load", "expire", by_topic, "--json"])
    line = {"output": named, "dry_run": False, "states": 0, "files": 0, "bytes": 0, "properties": []}
    assert json.loads(all_of_them.stdout) == {"loads": [line]}, all_of_them.output
    wrong = CliRunner().invoke(main, ["load", "expire", str(lake.warehouse)])
    assert (wrong.exit_code, "is not the address of a table" in wrong.stderr) == (2, True)
    arguments = ["-b", "127.0.0.1:1", "--topics", "t", "--table", lake.address, "--follow", "--expire", "1d"]
    alone = CliRunner().invoke(batch_load.main, arguments)
    assert (alone.exit_code, "--expire needs --compact-every" in alone.stderr) == (2, True)


@_LONG
@_KINDS
def test_while_it_follows(loads: _Loads, lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first upkeep fails: it is told and counted, the runs go on, and the next one has done it."""
    monkeypatch.setattr(batch_load, "SparkRunner", Runner)
    known, upkeeps = type(open_table(lake.address)), list[str]()
    real = known.compact

    def compact(self: Any, target_bytes: int) -> int:
        upkeeps.append("")
        if len(upkeeps) == 1:
            raise LoadError("the store is gone")
        return real(self, target_bytes)

    monkeypatch.setattr(known, "compact", compact)
    monkeypatch.setattr(batch_load.Stop, "is_asked", lambda _self: len(upkeeps) > 1)
    loads.run(2)
    arguments = ["-b", loads.servers, "--topics", loads.topic, "--table", lake.address, "--json"]
    arguments += ["--follow", "--every", "0.05s", "--compact-every", "0.05s", "--expire", "0.001s"]
    found = CliRunner().invoke(batch_load.main, arguments)
    assert found.exit_code == 0, found.output
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    kept = [line["upkeep"][0] for line in lines if "upkeep" in line]
    assert [each.get("error") for each in kept[:2]] == ["the store is gone", None]
    assert kept[1]["merged"] > 1
    loads.check()


def test_outputs_without_news_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.load.test_follow import _loaded

    kept: list[str] = []
    monkeypatch.setattr("spark_klog.load.upkeep.compact", lambda output: kept.append(output) or Failing())
    upkeep = Upkeep(0.0, Kept())

    class Failing:
        @property
        def files_before(self) -> int:
            if kept[-1] == "bad":
                raise LoadError("is damaged")
            return 2

    def after(*outputs: str, runs: list[int]) -> list[tuple[str, int, str]]:
        done = upkeep.after([Outcome(each, each, _loaded(runs)) for each in outputs], lambda: False)
        return [] if done is None else [(each.topic, each.merged, str(each.error or "")) for each in done.outputs]

    assert after("a", "b", "bad", runs=[]) == [("a", 2, ""), ("b", 2, ""), ("bad", 0, "is damaged")]
    assert after("a", "bad", runs=[]) == [("bad", 0, "is damaged")]
    assert after("b", runs=[7]) == [("bad", 0, "is damaged"), ("b", 2, "")]
    # tables of dead letters, once there are some
    news = _loaded([8])
    with_bad = replace(news, partitions=[replace(part, bad=1) for part in news.partitions])
    for loaded, wanted in ((news, ["bad", "a", "letters"]), (news, ["bad", "a"]), (with_bad, ["bad", "a", "letters"])):
        kept.clear()
        upkeep.after([Outcome("", "a", loaded, letters="letters")], lambda: False)
        assert kept == wanted
    assert upkeep.after([Outcome("c", "c", None, LoadError("no topic"))], lambda: True) is not None
    assert "c" not in kept
