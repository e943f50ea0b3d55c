"""A Delta table: its commits as deltalake, DuckDB and Polars see them, two writers, other writers, existing tables."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.exceptions import CommitFailedError

from spark_klog.columns.schema import FULL
from spark_klog.errors import ConfigError, LoadError
from spark_klog.tables import delta
from spark_klog.tables.change_order import PLACE
from spark_klog.tables.columns import NAN_COLUMNS, nan_columns
from spark_klog.tables.delta import DeltaLakeTable
from spark_klog.tables.delta_statistics import statistics_json
from spark_klog.tables.delta_stores import storage_options
from spark_klog.tables.opening import open_table
from spark_klog.tables.table import DataFile, Run, RunConflict, Table, TableFile

_COLUMNS = pa.schema(
    [pa.field("offset", pa.int64()), pa.field("topic", pa.string()), pa.field("partition", pa.int32())]
)
_HOUR = 472_222
_DAY = date(2023, 11, 14)


def _run(number: int, token: str = "abc1234") -> Run:
    return Run("load", number, token, {"t": {"0": number * 10}}, {"t": "id"})


def _file(folder: Path, first: int, hour: int | None = None) -> DataFile:
    """A file of ten records. Polars takes the values of partition columns from the path, as a load has them."""
    path = f"t/date=2023-11-14/hour=22/{first}.parquet" if hour else f"t/{first}.parquet"
    rows = {"offset": range(first, first + 10), "topic": ["t"] * 10, "partition": [0] * 10}
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(rows, schema=_COLUMNS), folder / path)
    return DataFile(path, (folder / path).stat().st_size, pq.read_metadata(folder / path), hour)


def _offsets(folder: Path) -> list[int]:
    """The offsets in the table, by three readers that agree."""
    found: list[int] = sorted(DeltaTable(folder).to_pyarrow_table()["offset"].to_pylist())
    with duckdb.connect() as connection:
        uris = DeltaTable(folder).file_uris()
        duck = connection.execute(f'SELECT "offset" FROM read_parquet({uris!r}, hive_partitioning=false)').fetchall()
    assert sorted(one for (one,) in duck) == found
    assert sorted(polars.read_delta(str(folder))["offset"].to_list()) == found
    return found


def test_runs_are_commits(tmp_path: Path) -> None:
    table: Table = open_table(f"delta:{tmp_path}")
    assert (table.schema(), table.load_id(), table.last_run("load")) == (None, None, None)
    assert table.prepare(_COLUMNS, "hour", "timestamp", "load").names == _COLUMNS.names
    assert table.load_id() == "load"
    for number in (1, 2):
        table.append([_file(tmp_path, number * 10, _HOUR)], _run(number))
    table.append([], _run(3))
    assert table.last_run("load") == _run(3)
    assert table.last_run("another") is None
    assert _offsets(tmp_path) == list(range(10, 30))
    found = polars.read_delta(str(tmp_path)).select("date", "hour").unique()
    assert found.rows() == [(_DAY, 22)]
    files = sorted(table.files(), key=lambda item: item.path)
    paths = [f"t/date=2023-11-14/hour=22/{first}.parquet" for first in (10, 20)]
    sizes = [(tmp_path / path).stat().st_size for path in paths]
    assert files == [
        TableFile(paths[0], sizes[0], 10, {("t", 0): (10, 19)}),
        TableFile(paths[1], sizes[1], 10, {("t", 0): (20, 29)}),
    ]


def test_the_second_commit_of_a_run_conflicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have looked before one commits; an answer that was lost is no conflict."""
    table = DeltaLakeTable(str(tmp_path))
    table.prepare(_COLUMNS, "none", "", "load")
    table.append([_file(tmp_path, 0)], _run(1))
    with pytest.raises(RunConflict, match="run 1; nothing of this one"):
        table.append([_file(tmp_path, 10)], _run(1, "other12"))
    table.append([_file(tmp_path, 0)], _run(1))
    real = DeltaTable.create_write_transaction
    first = threading.Event()

    def write(self: DeltaTable, *arguments: Any, **options: Any) -> None:
        if not first.is_set():
            first.set()
            DeltaLakeTable(str(tmp_path)).append([_file(tmp_path, 20)], _run(2, "quicker"))
        real(self, *arguments, **options)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", write)
    with pytest.raises(RunConflict, match="run 2"):
        table.append([_file(tmp_path, 30)], _run(2))
    assert _offsets(tmp_path) == [*range(10), *range(20, 30)]
    last = table.last_run("load")
    assert last is not None
    assert last.token == "quicker"


@pytest.mark.parametrize("other", ["append", "compact", "columns", "vacuum"])
def test_others_write_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    table = DeltaLakeTable(str(tmp_path))
    table.prepare(_COLUMNS, "none", "", "load")
    for number in (1, 2):
        table.append([_file(tmp_path, number * 10)], _run(number))
    row = pa.table({"offset": [1], "topic": ["q"], "partition": pa.array([0], pa.int32())})
    actions: dict[str, Any] = {
        "append": lambda found: write_deltalake(found, row, mode="append"),
        "compact": lambda found: found.optimize.compact(),
        "columns": lambda found: found.alter.add_columns([Field("more", "long")]),
        "vacuum": lambda found: found.vacuum(0, dry_run=False, enforce_retention_duration=False),
    }
    real = DeltaTable.create_write_transaction
    first = threading.Event()

    def write(self: DeltaTable, *arguments: Any, **options: Any) -> None:
        if not first.is_set():
            first.set()
            actions[other](DeltaTable(tmp_path))
        real(self, *arguments, **options)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", write)
    table.append([_file(tmp_path, 30)], _run(3))
    assert _offsets(tmp_path) == sorted([*range(10, 40), *([1] if other == "append" else [])])
    assert table.last_run("load") == _run(3)


def test_a_merge_that_takes_longer_than_it_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others come before it: it is tried some times, however long each takes."""
    table = DeltaLakeTable(str(tmp_path))
    table.prepare(_COLUMNS, "none", "", "load")
    monkeypatch.setattr(delta, "_RETRY_S", 0)
    real, conflicts = DeltaTable.create_write_transaction, [4, 9]

    def write(self: DeltaTable, *arguments: Any, **options: Any) -> None:
        conflicts[0] -= 1
        if conflicts[0] >= 0:
            raise CommitFailedError("others have committed")
        real(self, *arguments, **options)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", write)
    table.append([_file(tmp_path, 10)], _run(1))
    assert table.last_run("load") == _run(1)
    conflicts.pop(0)
    with pytest.raises(LoadError, match="others have committed"):
        table.append([_file(tmp_path, 20)], _run(2))
    assert _offsets(tmp_path) == list(range(10, 20))


def test_a_table_that_others_restore(tmp_path: Path) -> None:
    """RESTORE leaves the app transactions of the runs that it takes away."""
    table = DeltaLakeTable(str(tmp_path))
    table.prepare(_COLUMNS, "none", "", "load")
    versions = []
    for number in (1, 2, 3):
        table.append([_file(tmp_path, number * 10)], _run(number))
        versions.append(DeltaTable(tmp_path).version())
    log = tmp_path / "_delta_log"
    before = datetime.fromtimestamp((log / f"{versions[2]:020}.json").stat().st_mtime - 0.001, timezone.utc)
    for place, is_refused in [(versions[1], True), (versions[2], False), (before, True), (versions[2] + 2, False)]:
        DeltaTable(tmp_path).restore(place)
        if is_refused:
            assert len(_offsets(tmp_path)) < 30
            for use in (lambda: table.last_run("load"), lambda: table.append([_file(tmp_path, 40)], _run(4))):
                with pytest.raises(LoadError, match=f"restored to a version before {versions[2]}, which has run 3"):
                    use()
        else:
            assert _offsets(tmp_path) == list(range(10, 40))
            assert table.last_run("load") == _run(3)


def test_a_table_that_others_replace(tmp_path: Path) -> None:
    """The app transactions stay, as with RESTORE."""
    table = DeltaLakeTable(str(tmp_path))
    table.prepare(_COLUMNS, "none", "", "load")
    for number in (1, 2):
        table.append([_file(tmp_path, number * 10)], _run(number))
    DeltaTable.create(tmp_path, _COLUMNS, mode="overwrite")
    assert not DeltaTable(tmp_path).file_uris()
    message = r"was replaced by version 3 \(CREATE OR REPLACE TABLE\), after version 2, which has run 2"
    for use in (lambda: table.last_run("load"), lambda: table.append([_file(tmp_path, 30)], _run(3))):
        with pytest.raises(LoadError, match=message):
            use()
    DeltaTable(tmp_path).restore(2)
    table.append([_file(tmp_path, 30)], _run(3))
    assert _offsets(tmp_path) == list(range(10, 40))


def test_operations_that_replace_a_table() -> None:
    """The names that Spark and deltalake have for them."""
    names = ("CREATE OR REPLACE TABLE", "REPLACE TABLE", "CREATE TABLE")
    for name in (*names, *(f"{one} AS SELECT" for one in names), "CLONE"):
        assert delta._REPLACES.match(name), name
    for name in ("REPLACE COLUMNS", "WRITE", "RESTORE", "SET TBLPROPERTIES", "MERGE", "OPTIMIZE"):
        assert not delta._REPLACES.match(name), name


def _clean(folder: Path, last: int) -> None:
    """What the log's cleanup does to commits up to one: they are older than the retention, and in a checkpoint."""
    DeltaTable(folder, version=last + 1).create_checkpoint()
    long_ago = time.time() - 40 * 86_400
    for version in range(last + 1):
        os.utime(folder / f"_delta_log/{version:020}.json", (long_ago, long_ago))
    DeltaTable(folder).cleanup_metadata()
    assert min(commit["version"] for commit in DeltaTable(folder).history()) == last + 1


def test_a_log_without_the_last_run(tmp_path: Path) -> None:
    """A table that is as it was is loaded on; one that others may have taken the run from is not."""
    for name in ("whole", "restored before", "restored after", "replaced", "cleaned again"):
        folder = tmp_path / name.replace(" ", "-")
        table = DeltaLakeTable(str(folder))
        table.prepare(_COLUMNS, "none", "", "load")
        for number in (1, 2):
            table.append([_file(folder, number * 10)], _run(number))
        row = pa.table({"offset": [1], "topic": ["q"], "partition": pa.array([0], pa.int32())})
        for _ in range(2):  # versions 3 and 4
            write_deltalake(folder, row, mode="append")
        if name in ("replaced", "cleaned again"):
            DeltaTable.create(folder, _COLUMNS, mode="overwrite")
        elif name != "whole":
            DeltaTable(folder).restore(1 if name == "restored before" else 3)
        if name == "cleaned again":
            write_deltalake(folder, row, mode="append")
        _clean(folder, 5 if name == "cleaned again" else 2)
        table = DeltaLakeTable(str(folder))
        if name in ("whole", "restored after"):
            assert table.last_run("load") == Run("load", 2, "", {})
            table.append([_file(folder, 30)], _run(3))
            assert set(_offsets(folder)) == {1, *range(10, 40)}
            continue
        messages = {
            "restored before": r"was restored to another version by version 5 \(RESTORE\), after run 2",
            "replaced": r"was replaced by version 5 \(CREATE OR REPLACE TABLE\), after run 2",
            "cleaned again": "run 2 of load load, whose .*, and not the property klog.load",
        }
        with pytest.raises(LoadError, match=messages[name]):
            table.last_run("load")


def test_app_transactions_that_the_table_forgets(tmp_path: Path) -> None:
    """With delta.setTransactionRetentionDuration Spark's checkpoints lack old ones, and all without a time."""
    table = DeltaLakeTable(str(tmp_path))
    table.prepare(_COLUMNS, "none", "", "load")
    before = time.time() * 1000 - 1
    for number in (1, 2):
        table.append([_file(tmp_path, number * 10)], _run(number))
    DeltaTable(tmp_path).create_checkpoint()
    log = tmp_path / "_delta_log"
    (checkpoint,) = log.glob("*.checkpoint.parquet")
    actions = pq.read_table(checkpoint)
    transactions = actions["txn"].to_pylist()
    assert [one["lastUpdated"] >= before for one in transactions if one] == [True]
    kept = actions.filter(pa.array([one is None for one in transactions]))
    pq.write_table(kept, checkpoint)
    (log / "_last_checkpoint").write_text(json.dumps({"version": 2, "size": len(kept)}))
    assert DeltaTable(tmp_path).transaction_version("load") is None

    table = DeltaLakeTable(str(tmp_path))
    assert table.last_run("load") == _run(2)
    assert table.last_run("another") is None
    with pytest.raises(RunConflict):
        table.append([_file(tmp_path, 20)], _run(1))
    table.append([_file(tmp_path, 30)], _run(3))
    assert _offsets(tmp_path) == list(range(10, 40))
    assert table.last_run("load") == _run(3)


def test_compact(tmp_path: Path) -> None:
    table = DeltaLakeTable(str(tmp_path))
    table.prepare(_COLUMNS, "none", "", "load")
    for number in (1, 2, 3):
        table.append([_file(tmp_path, number * 10)], _run(number))
    assert table.compact(1 << 20) == 3
    assert _offsets(tmp_path) == list(range(10, 40))
    assert [item.offsets for item in table.files()] == [{("t", 0): (10, 39)}]
    assert table.last_run("load") == _run(3)


def test_statistics_are_those_of_deltalake(tmp_path: Path) -> None:
    """Each bound that a file has by its footer is that of deltalake's own writer."""
    times = [datetime(2023, 11, 14, 22, 13, 20, 123_456, timezone.utc), datetime(1969, 1, 1, tzinfo=timezone.utc), None]
    columns = {
        "number": pa.array([3, None, -7], pa.int32()),
        "text": pa.array(["b", "äöü", None]),
        "long": pa.array(["x" * 50, "a" * 40, "m"]),
        "bytes": pa.array([b"a", None, b"b"]),
        "time": pa.array(times, pa.timestamp("us", tz="UTC")),
        "day": pa.array([_DAY, None, _DAY + timedelta(1)]),
        "real": pa.array([1.5, None, -2.0]),
        "price": pa.array([Decimal("1.25"), Decimal("-3.50"), None], pa.decimal128(10, 2)),
        "flag": pa.array([True, None, False]),
        "none": pa.array([None, None, None], pa.int64()),
        "place": pa.array([{"lat": 1, "name": None}, None, {"lat": 9, "name": "n"}]),
        "tags": pa.array([["a"], None, []], pa.list_(pa.string())),
    }
    data = pa.table(columns)
    write_deltalake(tmp_path / "theirs", data)
    has_nan = nan_columns(data)
    assert has_nan == {6: False}
    pq.write_table(
        data.replace_schema_metadata({NAN_COLUMNS: json.dumps(has_nan)}), tmp_path / "mine.parquet", row_group_size=2
    )
    table = DeltaLakeTable(str(tmp_path / "ours"))
    table.prepare(data.schema, "none", "", "load")
    (tmp_path / "mine.parquet").rename(tmp_path / "ours/mine.parquet")
    footer = pq.read_metadata(tmp_path / "ours/mine.parquet")
    table.append([DataFile("mine.parquet", 1, footer)], _run(1))
    ours, theirs = (
        pa.table(DeltaTable(tmp_path / name).get_add_actions(flatten=True)).to_pylist()[0]
        for name in ("ours", "theirs")
    )
    left_out = {"null_count.tags", "null_count.bytes", "min.long", "max.long"}
    for name in theirs.keys() - {"path", "size_bytes", "modification_time"} - left_out:
        up = timedelta(milliseconds=name == "max.time")  # deltalake cuts the microseconds off, which is no bound
        assert ours.get(name) == (theirs[name] + up if up else theirs[name]), name
    assert ours["min.long"] == "a" * 32
    assert ours["max.long"] == "x" * 32 + "\U0010ffff"


def test_bounds_that_json_cannot_have(tmp_path: Path) -> None:
    """A file without one of its minima (or maxima) has none: deltalake takes one that is missing for no row at all."""

    def bounds(column: pa.Array, nan: str | None = '{"0": false}') -> tuple[Any, Any]:
        rows = pa.table({"x": column, "offset": pa.array(range(len(column)))})
        pq.write_table(rows.replace_schema_metadata(nan and {NAN_COLUMNS: nan}), tmp_path / "file.parquet")
        made = json.loads(statistics_json(pq.read_metadata(tmp_path / "file.parquet"), {}))
        assert made["nullCount"] == {"x": 0, "offset": 0}
        return tuple(made[name]["x"] if name in made else None for name in ("minValues", "maxValues"))

    times = pa.timestamp("us", tz="UTC")
    last = 253_402_300_799_999_999
    assert bounds(pa.array([1 << 60, 0], times)) == ("1970-01-01T00:00:00.000Z", None)
    assert bounds(pa.array([-(1 << 60), last], times)) == (None, "9999-12-31T23:59:59.999999Z")
    assert bounds(pa.array([1, last + 1], pa.timestamp("us"))) == ("1970-01-01T00:00:00.000", None)
    assert bounds(pa.array([-(1 << 30), 1 << 30], pa.int32()).cast(pa.date32())) == (None, None)
    assert bounds(pa.array([-1.0, float("inf")])) == (-1, "Infinity")
    reals = pa.array([1.0, float("nan")])
    nested = pa.StructArray.from_arrays([reals, reals.slice(0, 1).take([0, 0])], ["a", "b"])
    assert nan_columns(pa.table({"x": nested, "tags": pa.array([[], [1]]), "y": reals})) == {0: True, 1: False, 3: True}
    assert bounds(reals, '{"0": true}') == (1, None)
    assert bounds(pa.array([1.0, 2.0]), nan=None) == (1, None)  # of an older version
    assert bounds(pa.array(["b" * 5000, "a"])) == ("", "\U0010ffff" * 64)
    assert bounds(pa.array(["b" * 32 + "\U0010ffff" * 3])) == ("b" * 32, "b" * 32 + "\U0010ffff" * 4)


def test_an_existing_table_is_taken_as_it_is(tmp_path: Path) -> None:
    """Its own columns stay and files have them; new ones are added, also in structs."""
    mine = pa.schema(
        [
            pa.field("id", pa.int64()),
            pa.field("offset", pa.int64()),
            pa.field("value", pa.struct([pa.field("a", pa.int64())])),
        ]
    )
    DeltaTable.create(tmp_path, mine)
    table = DeltaLakeTable(str(tmp_path))
    value = pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.list_(pa.field("element", pa.string())))])
    columns = pa.schema([pa.field("offset", pa.int64()), pa.field("value", value), pa.field("flag", pa.bool_())])
    made = table.prepare(columns, "none", "", "load")
    assert made.names == ["id", "offset", "value", "flag"]
    assert made.field("value").type.field("a").type == pa.int64()
    assert made.field("value").type.names == ["a", "b"]
    assert table.prepare(columns, "none", "", "load") == made
    with pytest.raises(LoadError, match="belongs to another load \\(load\\)"):
        table.prepare(columns, "none", "", "other")


@pytest.mark.parametrize(
    ("fields", "layout", "message"),
    [
        ([pa.field("offset", pa.string())], "none", "offset is string in the table and int64 in the load"),
        ([pa.field("Offset", pa.int64())], "none", "offset differs from Offset by case only"),
        ([pa.field("id", pa.int64(), nullable=False)], "none", "id is required"),
        ([pa.field("offset", pa.int64())], "day", "is not partitioned; the load's would be partitioned by date"),
    ],
)
def test_an_existing_table_that_does_not_fit(tmp_path: Path, fields: Any, layout: Any, message: str) -> None:
    DeltaTable.create(tmp_path, pa.schema(fields))
    with pytest.raises(LoadError, match=message):
        DeltaLakeTable(str(tmp_path)).prepare(_COLUMNS, layout, "timestamp", "load")
    assert DeltaTable(tmp_path).version() == 0


@pytest.mark.parametrize("nested", [lambda kind: kind, pa.list_, lambda kind: pa.struct([pa.field("deep", kind)])])
def test_a_map_whose_values_get_a_field(tmp_path: Path, nested: Callable[[pa.DataType], pa.DataType]) -> None:
    """Upserts refuse it before they write: deltalake does not rewrite the older rows, as a compaction shows."""

    def columns(*names: str) -> pa.Schema:
        values = pa.map_(pa.string(), pa.struct([pa.field(name, pa.int64()) for name in names]))
        return pa.schema([pa.field("id", pa.int64()), pa.field("value", nested(values)), *PLACE])

    def prepare(*names: str, key: tuple[str, ...] = ("id",)) -> pa.Schema:
        return DeltaLakeTable(str(tmp_path)).prepare(columns(*names), "none", "", "load", key=key)

    prepare("a")
    prepare("a", "b")  # no row is there yet
    for number in (1, 2):
        rows = [{"id": number, "value": None}]
        write_deltalake(tmp_path, pa.Table.from_pylist(rows, schema=columns("a", "b")), mode="append")
    version = DeltaTable(tmp_path).version()
    with pytest.raises(LoadError, match=r"the values of the map value(\.deep)? have new fields"):
        prepare("a", "b", "c")
    assert DeltaTable(tmp_path).version() == version
    prepare("a", "b", "c", key=())
    with pytest.raises(LoadError, match=r"can't be compacted: .*[Cc]ast"):
        DeltaLakeTable(str(tmp_path)).compact(1 << 20)


@pytest.mark.parametrize("nested", [lambda kind: kind, pa.list_, lambda kind: pa.map_(pa.string(), kind)])
def test_fields_that_differ_by_case_only(tmp_path: Path, nested: Callable[[pa.DataType], pa.DataType]) -> None:
    """Spark does not read such a table; deltalake makes it."""

    def columns(*names: str) -> pa.Schema:
        inner = pa.struct([pa.field(name, pa.int64()) for name in names])
        return pa.schema([pa.field("value", nested(pa.struct([pa.field("a", inner)])))])

    table = DeltaLakeTable(str(tmp_path / "table"))
    with pytest.raises(LoadError, match=r"can't have both value\.a\.x and value\.a\.X, which differ by case only"):
        table.prepare(columns("x", "X"), "none", "", "load")
    with pytest.raises(LoadError, match="can't have both n and N"):
        table.prepare(pa.schema([("n", pa.int64()), ("N", pa.int64())]), "none", "", "load")
    with pytest.raises(LoadError, match="Date is the table's partition column"):
        table.prepare(pa.schema([("Date", pa.int64())]), "day", "", "load")
    assert not (tmp_path / "table").exists()
    table.prepare(columns("x"), "none", "", "load")
    table.append([], _run(1))
    with pytest.raises(LoadError, match=r"value.*\.a\.X differs from value.*\.a\.x by case only"):
        table.prepare(columns("X", "y"), "none", "", "load")
    assert DeltaTable(tmp_path / "table").version() == 1


def test_columns_that_no_commit_has(tmp_path: Path) -> None:
    """A run that may never commit adds none; a table without a commit gets others, unless it is a user's."""
    table = DeltaLakeTable(str(tmp_path / "ours"))
    table.prepare(pa.schema([("a", pa.int64())]), "none", "", "load", "plan")
    table.prepare(pa.schema([("a", pa.string())]), "day", "", "load", "tasks")
    table.prepare(pa.schema([("a", pa.string())]), "none", "", "load", "tasks")
    table.append([], _run(1))
    more = pa.schema([("a", pa.string()), ("b", pa.int64())])
    assert table.prepare(more, "none", "", "load", "tasks").names == ["a", "b"]
    assert pa.schema(DeltaTable(tmp_path / "ours").schema().to_arrow()) == pa.schema([("a", pa.string())])
    again = pa.schema([("a", pa.string()), ("b", pa.struct([("c", pa.date32())]))])
    assert table.prepare(again, "none", "", "load", "tasks") == again
    table.append([], _run(2))
    assert pa.schema(DeltaTable(tmp_path / "ours").schema().to_arrow()) == again
    with pytest.raises(LoadError, match="b is struct"):
        table.prepare(more, "none", "", "load", "tasks")
    DeltaTable.create(tmp_path / "users", pa.schema([("a", pa.int64())]))
    with pytest.raises(LoadError, match="a is int64 in the table and string in the load"):
        DeltaLakeTable(str(tmp_path / "users")).prepare(pa.schema([("a", pa.string())]), "none", "", "load")


def test_a_table_with_a_constraint_is_refused(tmp_path: Path) -> None:
    DeltaTable.create(tmp_path, _COLUMNS).alter.add_constraint({"positive": '"offset" >= 0'})
    with pytest.raises(LoadError, match="constraint"):
        DeltaLakeTable(str(tmp_path)).prepare(_COLUMNS, "none", "", "load")


def test_records_of_a_load_as_a_table(tmp_path: Path) -> None:
    table = DeltaLakeTable(str(tmp_path))
    assert table.prepare(FULL, "day", "timestamp", "load") == FULL
    columns = pa.schema([pa.field("date", pa.string())])
    with pytest.raises(LoadError, match="date is the table's partition column"):
        DeltaLakeTable(str(tmp_path / "x")).prepare(columns, "day", "", "load")


def test_storage_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    uri = "s3://key:sec%2Fret@bucket/folder?endpoint_override=127.0.0.1:9000&scheme=http&region=eu-west-1"
    assert storage_options(uri) == (
        "s3://bucket/folder",
        {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "sec/ret",
            "AWS_ENDPOINT_URL": "http://127.0.0.1:9000",
            "AWS_REGION": "eu-west-1",
            "AWS_ALLOW_HTTP": "true",
        },
    )
    assert storage_options("gs://bucket/folder") == ("gs://bucket/folder", {})
    url, options = storage_options("gs://anonymous@bucket/folder?scheme=http&endpoint_override=127.0.0.1%3A9")
    account = json.loads(options.pop("google_service_account_key"))
    assert (url, account["gcs_base_url"], account["disable_oauth"]) == (
        "gs://bucket/folder",
        "http://127.0.0.1:9",
        True,
    )
    assert options == {"google_base_url": "http://127.0.0.1:9", "allow_http": "true"}
    plain = "abfss://container@account.dfs.core.windows.net/folder"
    assert storage_options(plain) == (
        "az://container/folder",
        {"azure_storage_account_name": "account"},
    )
    of_key = {"azure_storage_account_name": "account", "azure_storage_account_key": "k/="}
    for uri_with_key in (
        plain.replace("@", ":k%2F%3D@"),
        "abfs://:k%2F%3D@account.blob.core.windows.net/container/folder",
    ):
        assert storage_options(uri_with_key) == ("az://container/folder", of_key)
    assert storage_options("abfs://account:k%2F%3D@127.0.0.1:9/container/folder?enable_tls=false") == (
        "az://container/folder",
        {**of_key, "azure_storage_endpoint": "http://127.0.0.1:9/account", "allow_http": "true"},
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:9000")
    options = storage_options("s3://bucket/folder")[1]
    assert options == {"AWS_ENDPOINT_URL": "http://localhost:9000", "AWS_ALLOW_HTTP": "true"}
    assert DeltaLakeTable(uri).address == (
        "delta:s3://***@bucket/folder?endpoint_override=127.0.0.1:9000&scheme=http&region=eu-west-1"
    )


def test_addresses() -> None:
    for address in ("delta:", "hudi:/x", "/x"):
        with pytest.raises(ConfigError):
            open_table(address)
