"""Iceberg tables: runs as commits, conflicts, lost answers, other writers; read by pyiceberg, DuckDB and Polars."""

from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from itertools import product
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException, ForbiddenError
from pyiceberg.expressions import GreaterThan

from spark_klog.columns.schema import FULL
from spark_klog.errors import ConfigError, LoadError
from spark_klog.tables.opening import open_table
from spark_klog.tables.table import RunConflict
from tests.support.clients.klog import klog
from tests.support.packages.registries import RegistryUnreachable, cache_root
from tests.tables.iceberg_tables import LOAD, TOPIC, Warehouse, before_commit, lose_answer, rows, run_of, write


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return Warehouse(tmp_path)


def test_who_only_looks_makes_nothing(warehouse: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in warehouse.options.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__C__{name.upper()}", value)
    for address, command in product(("iceberg:c.typo.t", f"delta:{tmp_path}/typo"), ("status", "compact")):
        done = klog("load", command, address)
        assert (done.returncode, f"{address}: no table yet, nothing is loaded" in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "typo").exists()
    assert warehouse.catalog.list_namespaces() == []


@pytest.mark.parametrize("name", ["ns.t", "a.b.t"])
def test_a_location_is_known_before_there_is_a_namespace(tmp_path: Path, name: str) -> None:
    warehouse = Warehouse(tmp_path, name)
    table, namespace = warehouse.open(), tuple(name.split(".")[:-1])
    location = table.location
    assert warehouse.catalog.list_namespaces() == []
    warehouse.catalog.create_namespace(namespace)
    warehouse.catalog.create_table((*namespace, "other"), pa.schema([("a", pa.int64())]))
    assert warehouse.catalog.load_table((*namespace, "other")).location() == location.rpartition("/")[0] + "/other"
    table.prepare(FULL, "none", "timestamp", LOAD)
    assert warehouse.stranger().location() == location


def test_another_run_creates_the_namespace(warehouse: Warehouse) -> None:
    """Between the look and the creation, which a database then refuses by an error of its own."""
    table = warehouse.open()
    real = table._catalog.create_namespace

    def create(*arguments: Any) -> None:
        real(*arguments)
        raise OSError("UNIQUE constraint failed")

    table._catalog.create_namespace = create  # type: ignore[method-assign]
    table.prepare(FULL, "none", "timestamp", LOAD)
    assert warehouse.open().load_id() == LOAD


def test_runs_are_commits(warehouse: Warehouse, tmp_path: Path) -> None:
    table = warehouse.open()
    assert (table.schema(), table.load_id(), table.last_run(LOAD)) == (None, None, None)
    location = table.location
    schema = table.prepare(FULL, "hour", "timestamp", LOAD)
    assert schema.equals(FULL)
    assert (table.location, warehouse.open().load_id()) == (location, LOAD)
    for number in (1, 2):
        first = number * 20
        files = [
            write(table, schema, f"{number}-{hour}", rows(range(first + hour * 5, first + hour * 5 + 5), hour))
            for hour in range(3)
        ]
        table.append(files, run_of(number, first + 15))
        assert warehouse.open().last_run(LOAD) == run_of(number, first + 15)
    table.append([], run_of(3, 55))
    assert table.last_run(LOAD) == run_of(3, 55)
    assert table.last_run("another") is None
    expected = [*range(20, 35), *range(40, 55)]
    assert warehouse.offsets() == expected
    assert warehouse.offsets(row_filter="timestamp >= '2024-01-01T02:00:00+00:00'") == [*range(30, 35), *range(50, 55)]
    assert warehouse.offsets(row_filter=GreaterThan("value", b"000051")) == [52, 53, 54]
    assert len(list(warehouse.stranger().scan(row_filter="timestamp < '2024-01-01T01:00:00+00:00'").plan_files())) == 2
    assert pl.scan_iceberg(warehouse.stranger()).select("offset").collect()["offset"].sort().to_list() == expected
    found = {one.path: (one.records, one.offsets) for one in table.files()}
    assert found[f"{TOPIC}/2-1.parquet"] == (5, {(TOPIC, 0): (45, 49)})
    assert len(found) == 6
    assert sum(one.size for one in table.files()) == sum(
        path.stat().st_size for path in Path(table.location.removeprefix("file://")).glob(f"{TOPIC}/*")
    )


def test_read_by_duckdb(warehouse: Warehouse) -> None:
    table, schema = warehouse.prepared()
    table.append([write(table, schema, "a", rows(range(9)))], run_of(1, 9))
    at = warehouse.stranger().metadata_location
    with duckdb.connect(config={"extension_directory": str(cache_root() / "duckdb")}) as reader:
        try:
            reader.execute("INSTALL iceberg; LOAD iceberg")
        except duckdb.Error as error:
            raise RegistryUnreachable(f"DuckDB's extension iceberg: {error}") from error
        assert reader.sql(f"""SELECT count(*), sum("offset") FROM iceberg_scan('{at}')""").fetchall() == [(9, 36)]


def test_a_run_of_the_same_number_conflicts(warehouse: Warehouse) -> None:
    table, schema = warehouse.prepared()
    files = [write(table, schema, "a", rows(range(5)))]
    other = write(table, schema, "b", rows(range(5)))
    before_commit(table, lambda: warehouse.open().append([other], run_of(1, 5, "other")))
    with pytest.raises(RunConflict, match="has run 1 of load load-1, so that run 1 can't follow"):
        table.append(files, run_of(1, 5))
    with pytest.raises(RunConflict):
        table.append(files, run_of(3, 5))
    assert warehouse.offsets() == [*range(5)]
    assert table.last_run(LOAD) == run_of(1, 5, "other")
    names = {
        path.name for path in Path(warehouse.stranger().location().removeprefix("file://")).glob("metadata/*.avro")
    }
    snapshot = warehouse.stranger().current_snapshot()
    assert snapshot is not None
    kept = {snapshot.manifest_list, *(one.manifest_path for one in snapshot.manifests(warehouse.stranger().io))}
    assert names == {name.rpartition("/")[2] for name in kept}  # nothing is left of what was not committed


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        CommitStateUnknownException("504"),
        CommitFailedException("lost"),
        ValueError("no such answer"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_answer_is_lost(warehouse: Warehouse, error: Exception, is_committed: bool) -> None:
    table, schema = warehouse.prepared()
    lose_answer(table, error, is_committed)
    files = [write(table, schema, "a", rows(range(5)))]
    if isinstance(error, ValueError) and not is_committed:
        with pytest.raises(LoadError, match="can't be given run 1: no such answer"):
            table.append(files, run_of(1, 5))
    table.append(files, run_of(1, 5))
    assert warehouse.offsets() == [*range(5)]
    assert len(warehouse.stranger().metadata.snapshots) == 1


def test_a_catalog_that_stays_away(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    table, schema = warehouse.prepared()
    files = [write(table, schema, "a", rows(range(5)))]
    monkeypatch.setattr(table, "_seconds", 0.3)

    def refuse(*_: object) -> None:
        raise ConnectionError("postgresql://me:hidden@host is down")

    monkeypatch.setattr(SqlCatalog, "commit_table", refuse)
    with pytest.raises(
        LoadError, match=r"iceberg:c\.ns\.t can't be given run 1 within 0\.3 s: postgresql://\*\*\*@host"
    ):
        table.append(files, run_of(1, 5))

    def forbid(*_: object) -> None:
        raise ForbiddenError("not you")

    monkeypatch.setattr(table, "_seconds", 60)
    monkeypatch.setattr(SqlCatalog, "commit_table", forbid)
    with pytest.raises(LoadError, match="can't be given run 1: not you"):
        table.append(files, run_of(1, 5))


def test_a_merge_that_takes_longer_than_it_is_tried_again(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others come before it: it is tried some times, however long each takes."""
    table, schema = warehouse.prepared("none")
    monkeypatch.setattr(table, "_seconds", 0)
    conflicts = iter(range(4))
    real = SqlCatalog.commit_table

    def commit(catalog: SqlCatalog, *arguments: Any) -> Any:
        if next(conflicts, None) is not None:
            raise CommitFailedException("others have committed")
        return real(catalog, *arguments)

    monkeypatch.setattr(SqlCatalog, "commit_table", commit)
    table.append([write(table, schema, "a", rows(range(5)))], run_of(1, 5))
    assert warehouse.open().last_run(LOAD) == run_of(1, 5)
    conflicts = iter(range(9))
    with pytest.raises(LoadError, match="within 0 s: others have committed"):
        table.append([write(table, schema, "b", rows(range(5, 10)))], run_of(2, 10))
    assert warehouse.offsets() == [*range(5)]


def test_a_database_that_is_locked(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader keeps SQLite from a COMMIT; the connection then reads the commit that has failed."""
    warehouse.options["uri"] += "?timeout=0.1"
    table, schema = warehouse.prepared()
    files = [write(table, schema, "a", rows(range(5)))]
    reader = sqlite3.connect(warehouse.options["uri"].partition("?")[0].removeprefix("sqlite:///"))
    lock = reader.execute("SELECT 1 FROM iceberg_tables UNION ALL SELECT 2 FROM iceberg_tables")
    lock.fetchone()
    monkeypatch.setattr(table, "_seconds", 0.5)
    with pytest.raises(LoadError, match=r"can't be given run 1 within .*database is locked"):
        table.append(files, run_of(1, 5))
    assert table.last_run(LOAD) is None
    lock.close()
    reader.close()
    table.append(files, run_of(1, 5))
    assert warehouse.open().last_run(LOAD) == run_of(1, 5)
    assert warehouse.offsets() == [*range(5)]


def test_others_append_delete_and_expire_during_commits(warehouse: Warehouse) -> None:
    table, schema = warehouse.prepared("none")  # pyiceberg needs pyiceberg_core to write partitions
    table.append([write(table, schema, "1", rows(range(5)))], run_of(1, 5))
    before_commit(table, lambda: warehouse.stranger().append(pa.Table.from_pylist(rows([100]), FULL)))
    table.append([write(table, schema, "2", rows(range(5, 10)))], run_of(2, 10))
    before_commit(table, lambda: warehouse.stranger().delete("offset = 3"))
    table.append([write(table, schema, "3", rows(range(10, 15)))], run_of(3, 15))
    before_commit(table, lambda: _expire(warehouse))
    table.append([write(table, schema, "4", rows(range(15, 20)))], run_of(4, 20))
    assert warehouse.offsets() == [0, 1, 2, *range(4, 20), 100]
    warehouse.stranger().append(pa.Table.from_pylist(rows([101]), FULL))
    _expire(warehouse)
    assert len(warehouse.stranger().metadata.snapshots) == 1
    assert warehouse.open().last_run(LOAD) == run_of(4, 20)  # by the table's properties
    table.append([], run_of(5, 20))
    with warehouse.stranger().transaction() as transaction:
        transaction.remove_properties("klog.run", "klog.snapshot")
    assert warehouse.open().last_run(LOAD) == run_of(5, 20)  # by the summary


def _expire(warehouse: Warehouse) -> None:
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    warehouse.stranger().maintenance.expire_snapshots().older_than(later).commit()


def test_rolled_back(warehouse: Warehouse) -> None:
    table, schema = warehouse.prepared("none")  # pyiceberg needs pyiceberg_core to write partitions
    ids = []
    for number in (1, 2, 3):
        table.append([write(table, schema, str(number), rows([number]))], run_of(number, number))
        ids.append(warehouse.stranger().metadata.current_snapshot_id)
    warehouse.stranger().manage_snapshots().rollback_to_snapshot(ids[1]).commit()
    message = (
        rf"run 3 of load load-1 \(snapshot {ids[2]}\) is not in the history .* up to 2.* set the current .* {ids[2]}"
    )
    with pytest.raises(LoadError, match=message):
        table.last_run(LOAD)
    warehouse.stranger().append(pa.Table.from_pylist(rows([100]), FULL))
    with pytest.raises(LoadError, match=message):
        table.append([write(table, schema, "4", rows([4]))], run_of(4, 4))
    with warehouse.stranger().transaction() as transaction:
        transaction.remove_properties("klog.run")
    assert table.last_run(LOAD) == run_of(2, 2)
    table.append([write(table, schema, "3b", rows([3]))], run_of(3, 3, "again"))
    assert warehouse.offsets() == [1, 2, 3, 100]
    warehouse.stranger().manage_snapshots().set_current_snapshot(ids[0]).commit()
    with pytest.raises(LoadError, match="up to 1"):
        table.last_run(LOAD)
    head = max(warehouse.stranger().metadata.snapshots, key=lambda one: one.sequence_number or 0)
    warehouse.stranger().manage_snapshots().set_current_snapshot(head.snapshot_id).commit()
    assert table.last_run(LOAD) == run_of(3, 3, "again")


def test_two_committers_race(warehouse: Warehouse) -> None:
    _, schema = warehouse.prepared()
    wins = list[str]()

    def commit(token: str) -> None:
        mine = warehouse.open()
        for number in range(1, 7):
            one = write(mine, schema, f"{token}-{number}", rows([number]))
            try:
                mine.append([one], run_of(number, number, token))
                wins.append(f"{token}-{number}")
            except RunConflict:
                pass
            while (last := mine.last_run(LOAD)) is None or last.number < number:
                pass

    threads = [threading.Thread(target=commit, args=(token,)) for token in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert warehouse.offsets() == [*range(1, 7)]
    assert sorted(name[2:] for name in wins) == [str(number) for number in range(1, 7)]


def test_addresses(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for bad in ("iceberg:", "iceberg:c", "iceberg:c.t", "iceberg:c..t"):
        with pytest.raises(ConfigError, match=r"must be iceberg:CATALOG\.NAMESPACE\.TABLE"):
            open_table(bad)
    with pytest.raises(LoadError, match=r"catalog 'nowhere' can't be opened: .* PYICEBERG_CATALOG__NOWHERE__URI"):
        open_table("iceberg:nowhere.ns.t").schema()
    monkeypatch.setattr(
        "pyiceberg.catalog._ENV_CONFIG.get_catalog_config", lambda name: warehouse.options if name == "mine" else None
    )
    table = open_table("iceberg:mine.a.b.t")
    assert table.location == f"file://{tmp_path}/warehouse/a.b/t"
    table.prepare(FULL, "none", "timestamp", LOAD)
    table.append([], run_of(1, 0))
    assert table.last_run(LOAD) == run_of(1, 0)


def test_a_new_catalog_that_many_open_at_once(
    warehouse: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them create its tables in the database; pyiceberg looks whether they are there just before."""
    for number in range(5):
        uri = f"sqlite:///{tmp_path}/new-{number}.db"
        monkeypatch.setattr(
            "pyiceberg.catalog._ENV_CONFIG.get_catalog_config", lambda _name, uri=uri: {**warehouse.options, "uri": uri}
        )
        begin = threading.Barrier(6)

        def schema(name: str, begin: threading.Barrier = begin) -> pa.Schema | None:
            begin.wait(10)
            return open_table(f"iceberg:new.ns.{name}").schema()

        with ThreadPoolExecutor(6) as threads:
            assert [*threads.map(schema, "abcdef")] == [None] * 6
