"""Runs that merge changes: after each of them the table has the rows of a model, in Delta and in Iceberg."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.schema import ArrayType, PrimitiveType
from hypothesis import example, given, settings, strategies as st
from pyiceberg.catalog import load_catalog
from pyiceberg.types import ListType, StringType

from spark_klog.errors import LoadError
from spark_klog.tables.change_order import Outcome
from spark_klog.tables.changes import ChangeFormat
from spark_klog.tables.delta import DeltaLakeTable
from spark_klog.tables.delta_merge import _settled
from spark_klog.tables.iceberg import IcebergTable
from spark_klog.tables.table import STREAMS, DataFile, Run, RunConflict, Table
from tests.tables.change_support import (
    FORMAT,
    KEY,
    VALUE,
    Change,
    applied,
    change_batch,
    records,
    rows_in,
    rows_of,
    written,
)

FORMATS = ("delta", "iceberg")


def make_table(kind: str, folder: Path) -> Table:
    if kind == "delta":
        return DeltaLakeTable(str(folder / "table"))
    return IcebergTable("local.space.table", catalog_options(folder))


def catalog_options(folder: Path) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}


def content(kind: str, folder: Path) -> pa.Table:
    """The table as another program reads it."""
    if kind == "delta":
        return DeltaTable(folder / "table").to_pyarrow_table()
    return load_catalog("local", **catalog_options(folder)).load_table("space.table").scan().to_arrow()


def run(number: int, token: str = "abcdefg") -> Run:
    return Run("load", number, token, {"rows": {"0": number}})


class Source:
    """A table that follows a log of changes."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.table = kind, folder, make_table(kind, folder)
        self.table.prepare(FORMAT.row, "none", "", "load")
        self.log: list[Change] = []
        self.runs = 0

    def merge(self, changes: list[Change], number: int, slice_bytes: int = 1 << 27) -> None:
        files = None
        if changes:
            batches = (
                [change_batch(changes[:3]), change_batch(changes[3:])] if len(changes) > 3 else [change_batch(changes)]
            )
            files = written(self.folder / f"changes-{number}-{len(self.log)}", batches, slice_bytes)
        self.table.upsert(files, run(number))

    def check(self) -> None:
        assert rows_in(content(self.kind, self.folder)) == rows_of(self.log)


class Keys(NamedTuple):
    """How keys are written: their type, the values of three of them, each by turns, and whether they are JSON."""

    type: pa.DataType
    values: tuple[tuple[Any, ...], ...]
    is_json: bool = False


_DECIMALS = tuple((Decimal(f"1234567890123456.78{digit}"),) for digit in (90, 91, 92))
_KEYS = {
    "long": Keys(pa.int64(), ((1,), (2,), (1 << 60,))),
    "double": Keys(pa.float64(), ((0.0, -0.0), (1.5,), (1e300,))),
    "double in JSON": Keys(pa.float64(), ((-0.0, 0.0), (0.1,), (1e-300,)), is_json=True),
    "decimal": Keys(pa.decimal128(20, 4), _DECIMALS),
    "decimal in JSON": Keys(pa.decimal128(20, 4), _DECIMALS, is_json=True),
    "long in JSON": Keys(pa.int64(), ((1,), ((1 << 60) + 1,), ((1 << 60) + 2,)), is_json=True),
}
_CHANGES = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([None, "a", "b"]), st.integers(0, 2), st.integers(0, 9)),
    max_size=12,
)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["run", "from an earlier offset"]), _CHANGES),
        st.tuples(
            st.sampled_from(
                [
                    "answer lost",
                    "behind",
                    "compaction",
                    "a field more",
                    "a field less",
                    "renamed",
                    "named back",
                    "added",
                ]
            ),
            st.just([]),
        ),
    ),
    min_size=1,
    max_size=8,
)


class KeyedSource:
    """A table that follows a log of changes, whose keys get a field and lose it, and whose columns others rename."""

    def __init__(self, kind: str, keys: Keys, folder: Path) -> None:
        self.kind, self.keys, self.folder, self.table = kind, keys, folder, make_table(kind, folder)
        self.log: list[Change] = []
        self.last: list[Change] = []
        self.rows: dict[int, Change] = {}
        self.runs = self.calls = 0
        self.has_tenant = self.rows_have_tenant = False
        self.id_name = "id"

    @property
    def format(self) -> ChangeFormat:
        if self.keys.is_json:
            value = pa.struct([pa.field("id", self.keys.type), *VALUE])
            return ChangeFormat(pa.binary(), value, ("id",))
        more = [pa.field("tenant", pa.string())] if self.has_tenant else []
        return ChangeFormat(pa.struct([pa.field("id", self.keys.type), *more]), VALUE)

    def records(self, changes: list[Change]) -> pa.RecordBatch:
        plain = records(changes)
        ids = [self.keys.values[one.id][one.offset % len(self.keys.values[one.id])] for one in changes]
        values = plain["value"]
        if self.keys.is_json:
            keys = pa.array([f'{{"id": {one}}}'.encode() for one in ids])
            arrays = [pa.array(ids, self.keys.type), *values.flatten()]
            values = pa.StructArray.from_arrays(arrays, fields=list(self.format.value_type), mask=values.is_null())
        else:
            keys = pa.array([{"id": one, "tenant": "main"} for one in ids], self.format.key_type)
        columns = dict(zip(plain.schema.names, plain.columns, strict=True)) | {"key": keys, "value": values}
        return pa.RecordBatch.from_pydict(columns)

    def merge(self, changes: list[Change], number: int, slice_bytes: int) -> None:
        self.calls += 1
        form = self.format
        self.table.prepare(form.row, "none", "", "load", key=form.key)
        parts = [part for part in (changes[:3], changes[3:]) if part]
        batches = [form.changes(self.records(part)) for part in parts]
        files = written(self.folder / f"changes-{self.calls}", batches, slice_bytes, form.key) if batches else None
        self.table.upsert(files, run(number))

    def run(self, changes: list[Change], number: int, slice_bytes: int) -> None:
        """A run, which is refused if it would not find rows by their key."""
        if self.rows and (self.id_name != "id" or self.has_tenant != self.rows_have_tenant):
            names = content(self.kind, self.folder).column_names
            with pytest.raises(LoadError, match="has rows by"):
                self.merge(changes, number, slice_bytes)
            assert content(self.kind, self.folder).column_names == names
            return
        self.merge(changes, number, slice_bytes)
        self.id_name, self.rows_have_tenant = "id", self.has_tenant
        if number > self.runs:
            self.rows, self.last, self.runs = applied(self.rows, changes), changes, number

    def rename(self, name: str) -> None:
        """As somebody else does; a Delta table has no such names."""
        if self.kind == "iceberg" and self.runs and name != self.id_name:
            place = load_catalog("local", **catalog_options(self.folder)).load_table("space.table")
            with place.update_schema() as update:
                update.rename_column(self.id_name, name)
            self.id_name = name

    def add_column(self) -> None:
        name = f"theirs_{self.calls}"
        if self.runs and name not in content(self.kind, self.folder).column_names:
            if self.kind == "delta":
                DeltaTable(self.folder / "table").alter.add_columns([Field(name, PrimitiveType("string"))])
            else:
                place = load_catalog("local", **catalog_options(self.folder)).load_table("space.table")
                with place.update_schema() as update:
                    update.add_column(name, StringType())

    def check(self) -> None:
        if self.runs:
            found = content(self.kind, self.folder)
            keys = {value: key for key, values in enumerate(self.keys.values) for value in values}
            ids = [keys[value] for value in found[self.id_name].to_pylist()]
            rest = [found[name].to_pylist() for name in ("name", "amount", "_klog_partition", "_klog_offset")]
            assert sorted(zip(ids, *rest, strict=True)) == sorted(
                (one.id, one.name, one.offset / 2, one.partition, one.offset) for one in self.rows.values()
            )


def _check_model(kind: str, keys: str, steps: list[Any], slice_bytes: int) -> None:
    with TemporaryDirectory() as name:
        source = KeyedSource(kind, _KEYS[keys], Path(name))
        for number, (step, drawn) in enumerate(steps):
            if step == "compaction":
                if source.runs:
                    source.table.compact(1 << 20)
            elif step == "answer lost":
                if source.runs:
                    source.run(source.last, source.runs, slice_bytes)
            elif step == "behind":
                if source.runs:
                    with pytest.raises(RunConflict):
                        source.table.upsert(None, run(source.runs, "another"))
            elif step in ("a field more", "a field less"):
                source.has_tenant = step == "a field more" and not source.keys.is_json
            elif step in ("renamed", "back"):
                source.rename("id" if step == "back" else f"id_{number}")
            elif step == "added":
                source.add_column()
            else:
                start = len(source.log)
                for id_, text, partition, clock in drawn:
                    offset = len(source.log)
                    source.log.append(Change(id_, text, partition, offset, clock))
                source.run(source.log[start // 2 if step != "run" else start :], source.runs + 1, slice_bytes)
            source.check()


_MODEL = {"keys": st.sampled_from([*_KEYS]), "steps": _STEPS, "slice_bytes": st.sampled_from([400, 1 << 27])}


@pytest.mark.parametrize("kind", FORMATS)
@settings(deadline=None, max_examples=6)
@given(**_MODEL)
@example(keys="long", steps=[("run", []), ("renamed", []), ("run", [])], slice_bytes=400)
def test_the_table_equals_the_model_after_each_run(kind: str, keys: str, steps: list[Any], slice_bytes: int) -> None:
    _check_model(kind, keys, steps, slice_bytes)


@pytest.mark.test_all("long")
@pytest.mark.parametrize("kind", FORMATS)
@settings(deadline=None, max_examples=int(os.environ.get("SPARK_KLOG_UPSERTS", "15")))
@given(**_MODEL)
def test_many_tables_equal_the_model(kind: str, keys: str, steps: list[Any], slice_bytes: int) -> None:
    _check_model(kind, keys, steps, slice_bytes)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2)])
def test_a_key_that_moves_while_clocks_are_in_no_order(kind: str, cuts: tuple[int, ...], tmp_path: Path) -> None:
    """What a later offset of its own partition has replaced is newer than nothing, in whichever runs the log is cut."""
    log = [Change(1, "first", 0, 0, 1000), Change(1, "second", 0, 1, 950), Change(1, "third", 2, 0, 980)]
    source = Source(kind, tmp_path)
    for number, (start, end) in enumerate(pairwise([0, *cuts, len(log)]), 1):
        source.merge(log[start:end], number)
    assert content(kind, tmp_path)["name"].to_pylist() == ["third"]
    source.merge([log[0], log[1]], len(cuts) + 2)
    assert content(kind, tmp_path)["name"].to_pylist() == ["third"]


def test_changes_are_put_in_order_once_for_all_rows_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each batch of them: the changes may be millions."""
    log = [Change(1, "a", 0, 0, 10), Change(1, "b", 1, 0, 20), Change(2, "c", 0, 1, 30)]
    files = written(tmp_path, [FORMAT.changes(records(log))])
    [changes] = files.slices()
    old = [Change(1, "late", 1, 5, 5), *(Change(3 + number, "other", 0, number) for number in range(20))]
    rows = pa.Table.from_batches([FORMAT.changes(records(old))])
    calls: list[Outcome] = []
    latest: Any = Outcome.latest.fget  # type: ignore[attr-defined]

    def counted(outcome: Outcome) -> Any:
        calls.append(outcome)
        return latest(outcome)

    monkeypatch.setattr(Outcome, "latest", property(counted))
    settled, is_newest = _settled(
        changes, files, FORMAT.row, lambda names, _: rows.select(list(names)).to_batches(max_chunksize=1)
    )
    assert is_newest
    assert len(calls) == 2
    assert sorted(settled["name"].to_pylist()) == ["a", "c"]


@pytest.mark.parametrize("kind", FORMATS)
def test_fields_that_are_called_as_our_own_columns(kind: str, tmp_path: Path) -> None:
    names = ("_row", "_change", "_slot", "_wins", "0", "row.change", 'a"b')
    key = pa.struct([pa.field(name, pa.int64()) for name in names[:4]])
    form = ChangeFormat(key, pa.struct([pa.field(name, pa.string()) for name in names[4:]]))
    table = make_table(kind, tmp_path)

    def merge(number: int, *rows: tuple[int, str | None, int]) -> None:
        plain = records([Change(1, "", partition, number) for *_, partition in rows])
        columns = dict(zip(plain.schema.names, plain.columns, strict=True))
        columns["key"] = pa.array([dict.fromkeys(names[:4], each) for each, *_ in rows], key)
        values = [None if text is None else dict.fromkeys(names[4:], text) for _, text, _ in rows]
        columns["value"] = pa.array(values, form.value_type)
        table.prepare(form.row, "none", "", "load", key=form.key)
        changes = form.changes(pa.RecordBatch.from_pydict(columns))
        table.upsert(written(tmp_path / f"changes-{number}", [changes], key=form.key), run(number))

    merge(1, (1, "a", 0), (2, "b", 0))
    merge(2, (1, None, 0), (2, "c", 0), (2, "d", 1), (3, "e", 0))
    found = content(kind, tmp_path).select(names).to_pylist()
    expected = [dict.fromkeys(names[:4], key) | dict.fromkeys(names[4:], text) for key, text in ((2, "d"), (3, "e"))]
    assert sorted(found, key=lambda row: row["_row"]) == expected


def test_what_deltalakes_merge_can_not_have_is_refused(tmp_path: Path) -> None:
    row = pa.schema([pa.field("__delta_rs_source", pa.int64()), *FORMAT.row])
    with pytest.raises(LoadError, match="column __delta_rs_source of its own: rename the field"):
        make_table("delta", tmp_path).prepare(row, "none", "", "load", key=FORMAT.key)


def test_a_key_that_equals_nothing_is_no_key() -> None:
    form = ChangeFormat(pa.struct([pa.field("id", pa.float64())]), VALUE)
    plain = records([Change(number, "a", 0, number) for number in range(3)])
    keys = pa.array([{"id": one} for one in (-0.0, float("nan"), 1.5)], form.key_type)
    batch = plain.set_column(0, "key", keys)
    bad: dict[int, str] = {}
    assert str(form.changes(batch, bad=bad)["id"].to_pylist()) == "[0.0, 1.5]"
    assert bad == {1: "has NaN as id, which is in the key of its row, and equals nothing"}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_of_another_writer_is_older_than_any_change(kind: str, tmp_path: Path) -> None:
    source = Source(kind, tmp_path)
    foreign = pa.table({"id": [1, 2, 2, 9], "name": ["x", "y", "z", "stays"]})
    if kind == "delta":
        write_deltalake(tmp_path / "table", foreign, mode="append", schema_mode="merge")
    else:
        load_catalog("local", **catalog_options(tmp_path)).load_table("space.table").append(foreign)
    source.merge([Change(1, "a", 0, 0), Change(2, None, 0, 1), Change(3, None, 0, 2)], 1)
    found = content(kind, tmp_path)
    assert sorted(zip(found["id"].to_pylist(), found["name"].to_pylist(), strict=True)) == [(1, "a"), (9, "stays")]


@pytest.mark.parametrize("kind", FORMATS)
def test_columns_that_the_changes_lack(kind: str, tmp_path: Path) -> None:
    """One that a user has added keeps its values; one that the load has had, and the rows no longer, is null."""
    source = Source(kind, tmp_path)
    tags = ["x", "y"]

    def shown() -> list[tuple[Any, ...]]:
        found = content(kind, tmp_path)
        return sorted(zip(*(found[name].to_pylist() for name in ("id", "name", "amount", "tags")), strict=True))

    source.merge([Change(1, "a", 0, 2), Change(2, "b", 0, 4)], 1)
    if kind == "delta":
        table = DeltaTable(tmp_path / "table")
        table.alter.add_columns([Field("tags", ArrayType(PrimitiveType("string"), True))])
        DeltaTable(tmp_path / "table").update({"tags": "['x', 'y']"})
    else:
        place = load_catalog("local", **catalog_options(tmp_path)).load_table("space.table")
        rows = place.scan().to_arrow()
        with place.update_schema() as update:
            update.add_column("tags", ListType(100, StringType(), False))
        column = pa.array([tags] * len(rows), pa.list_(pa.string()))
        place.overwrite(rows.append_column("tags", column))
    source.table = make_table(kind, tmp_path)
    source.table.prepare(FORMAT.row, "none", "", "load")
    source.merge([Change(1, "c", 0, 6), Change(3, "d", 0, 8)], 2)
    assert shown() == [(1, "c", 3.0, tags), (2, "b", 2.0, tags), (3, "d", 4.0, None)]

    fewer = ChangeFormat(FORMAT.key_type, pa.struct([pa.field("name", pa.string())]))
    batch = records([Change(1, "e", 0, 10), Change(4, "f", 0, 12)])
    value = batch["value"].cast(fewer.value_type)
    batch = batch.set_column(batch.schema.get_field_index("value"), "value", value)
    source.table.prepare(fewer.row, "none", "", "load")
    source.table.upsert(written(tmp_path / "fewer", [fewer.changes(batch)]), run(3))
    assert shown() == [(1, "e", None, tags), (2, "b", 2.0, tags), (3, "d", 4.0, None), (4, "f", None, None)]
    source.table.prepare(FORMAT.row, "none", "", "load")
    source.merge([Change(1, "g", 0, 14), Change(2, None, 0, 15)], 4)
    assert shown() == [(1, "g", 7.0, tags), (3, "d", 4.0, None), (4, "f", None, None)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dies", ["before tasks", "at the commit", "not"])
def test_a_users_column_is_the_loads_from_the_commit_of_a_run_with_it(
    kind: str, dies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is refused or dies may have named it by mistake, and the next one does so no longer."""
    source = Source(kind, tmp_path)
    source.merge([Change(1, "a", 0, 0), Change(2, "b", 0, 1)], 1)
    if kind == "delta":
        DeltaTable(tmp_path / "table").alter.add_columns([Field("note", PrimitiveType("string"))])
        DeltaTable(tmp_path / "table").update({"note": "'mine'"})
    else:
        place = load_catalog("local", **catalog_options(tmp_path)).load_table("space.table")
        rows = place.scan().to_arrow()
        with place.update_schema() as update:
            update.add_column("note", StringType())
        place.overwrite(rows.append_column("note", pa.array(["mine"] * len(rows))))

    more = ChangeFormat(FORMAT.key_type, pa.struct([*VALUE, pa.field("note", pa.string())]))
    batch = records([Change(1, "c", 0, 2)])
    values = pa.array([{"name": "c", "amount": 1.0, "note": "the load's"}], more.value_type)
    batch = batch.set_column(batch.schema.get_field_index("value"), "value", values)
    table, number = make_table(kind, tmp_path), 2
    table.prepare(more.row, "none", "", "load", "plan", FORMAT.key)
    if dies != "before tasks":
        table.prepare(more.row, "none", "", "load", "tasks", FORMAT.key)
        files = written(tmp_path / "more", [more.changes(batch)])
        if dies == "at the commit":
            with monkeypatch.context() as patch:
                patch.setattr("spark_klog.tables.delta.merge", _killed)
                patch.setattr("spark_klog.tables.iceberg.IcebergTable._commit", _killed)
                with pytest.raises(KeyboardInterrupt):
                    table.upsert(files, run(2))
        else:
            table.upsert(files, run(2))
            number = 3

    source = Source(kind, tmp_path)
    source.merge([Change(1, "d", 0, 4)], number)
    found = content(kind, tmp_path)
    notes = dict(zip(found["id"].to_pylist(), found["note"].to_pylist(), strict=True))
    assert notes == {1: None if dies == "not" else "mine", 2: "mine"}


def _killed(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_commit_of_delta_has_the_columns_that_its_table_does_not_say_yet(tmp_path: Path) -> None:
    """Killed after the merge, before the property: the column is the load's all the same."""
    source = Source("delta", tmp_path)
    source.merge([Change(1, "a", 0, 0)], 1)
    table = DeltaTable(tmp_path / "table")
    before = table.metadata().configuration["klog.columns"].replace('"amount", ', "")
    assert "amount" not in before
    table.alter.set_table_properties({"klog.columns": before}, raise_if_not_exists=False)
    fewer = ChangeFormat(FORMAT.key_type, pa.struct([pa.field("name", pa.string())]))
    for number, name in ((2, "b"), (3, "c")):
        batch = records([Change(1, name, 0, 2 * number)])
        value = batch["value"].cast(fewer.value_type)
        batch = batch.set_column(batch.schema.get_field_index("value"), "value", value)
        source.table.upsert(written(tmp_path / name, [fewer.changes(batch)]), run(number))
        assert content("delta", tmp_path)["amount"].to_pylist() == [None]
    assert "amount" in DeltaTable(tmp_path / "table").metadata().configuration["klog.columns"]


_OF_BOTH = [
    ("klog.columns", "id, name", "set it to that"),
    ("klog.columns", '[["id"]]', "set it to that"),
    ("klog.columns", "", "set it to that"),
    ("klog.key", '{"id": ', "set it as it was, or remove it if the key never changed"),
    ("klog.key", '["id"]', "set it as it was"),
]
#: In Delta a run is in its commit.
_OF_ICEBERG = [
    ("klog.offsets", "{", "set it as the summary of the load's last snapshot has it"),
    ("klog.offsets", '{"rows": 5}', "set it as the summary"),
    ("klog.snapshot", "5", "of the snapshot of the load's last run: set it to that"),
    ("klog.run", "last", "set it as the summary"),
]


@pytest.mark.parametrize(
    ("kind", "name", "text", "advice"),
    [("delta", *case) for case in _OF_BOTH] + [("iceberg", *case) for case in (*_OF_BOTH, *_OF_ICEBERG)],
)
def test_a_property_that_somebody_broke(kind: str, name: str, text: str, advice: str, tmp_path: Path) -> None:
    """Named with its table; the table stays as it is, and goes on when the property is mended."""
    source = Source(kind, tmp_path)
    source.merge([Change(1, "a", 0, 0)], 1)
    whole = _set_property(kind, tmp_path, name, text)
    with pytest.raises(LoadError) as refused:
        source.merge([Change(1, "b", 0, 1)], 2)
    assert f"{source.table.address}: its property {name} is {text!r}, but must be " in str(refused.value)
    assert advice in str(refused.value)
    assert content(kind, tmp_path)["name"].to_pylist() == ["a"]
    _set_property(kind, tmp_path, name, whole)
    source.merge([Change(1, "b", 0, 1)], 2)
    assert content(kind, tmp_path)["name"].to_pylist() == ["b"]


def _set_property(kind: str, folder: Path, name: str, text: str) -> str:
    """Set a property as another program does; return what it was."""
    if kind == "delta":
        table = DeltaTable(folder / "table")
        before = table.metadata().configuration.get(name, "{}")
        table.alter.set_table_properties({name: text}, raise_if_not_exists=False)
        return before
    iceberg = load_catalog("local", **catalog_options(folder)).load_table("space.table")
    before = iceberg.metadata.properties.get(name, "{}")
    with iceberg.transaction() as transaction:
        transaction.set_properties({name: text})
    return before


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_that_only_move_stay_as_they_are(kind: str, tmp_path: Path) -> None:
    """A null list is not an empty one, as pyiceberg writes and scans it: so files are written and read without it."""
    source = Source(kind, tmp_path)
    tags = pa.array([None, [], [{"word": None}], [None]], pa.list_(pa.struct([pa.field("word", pa.string())])))
    words = pa.array([None, [], [("a", None)], [("b", 1)]], pa.map_(pa.string(), pa.int64()))
    place = pa.array([None, {"city": None}, {"city": "x"}, None], pa.struct([pa.field("city", pa.string())]))
    foreign = pa.table({"id": [11, 12, 13, 14], "tags": tags, "words": words, "place": place})
    schema = source.table.prepare(pa.schema([*FORMAT.row, *list(foreign.schema)[1:]]), "none", "", "load")
    names = set(foreign.column_names)
    whole = [foreign[one.name] if one.name in names else pa.nulls(4, one.type) for one in schema]
    folder = Path(source.table.location.removeprefix("file://"))
    footers: list[pq.FileMetaData] = []
    table = pa.Table.from_arrays(
        [column.cast(one.type) for column, one in zip(whole, schema, strict=True)], schema=schema
    )
    pq.write_table(table, folder / "foreign.parquet", metadata_collector=footers)
    source.table.append([DataFile("foreign.parquet", (folder / "foreign.parquet").stat().st_size, footers[0])], run(1))
    source.merge([Change(14, "a", 0, 0)], 2)
    paths = [str(folder / one.path) for one in source.table.files()]
    rows = duckdb.read_parquet(paths, union_by_name=True).arrow().read_all().sort_by("id").slice(0, 3)
    for name in ("tags", "words", "place"):
        assert rows[name].to_pylist() == foreign[name].slice(0, 3).to_pylist(), name


@pytest.mark.parametrize("kind", FORMATS)
def test_a_topic_that_is_created_again_begins_with_small_offsets(kind: str, tmp_path: Path) -> None:
    source = Source(kind, tmp_path)
    source.log = [Change(1, "old", 0, 500), Change(2, "kept", 0, 501)]
    source.merge(source.log, 1)
    source.log.append(Change(1, "new", 0, 3, 1, 1))
    source.merge(source.log[2:], 2)
    source.check()
    assert len(source.log) == 3


@pytest.mark.parametrize("kind", FORMATS)
def test_two_runs_at_once(kind: str, tmp_path: Path) -> None:
    """Both have seen the same table: one of them is told so, and the rows are those of the other."""
    source = Source(kind, tmp_path)
    source.merge([Change(number, "a", 0, number) for number in range(20)], 1)
    tables = [make_table(kind, tmp_path) for _ in range(2)]
    ready = threading.Barrier(2)
    ends: list[Any] = [None, None]

    def work(number: int) -> None:
        log = [Change(key, f"by {number}", 0, 100 + key) for key in range(10 * number, 10 + 10 * number)]
        files = written(tmp_path / f"changes-of-{number}", [change_batch(log)])
        ready.wait(30)
        try:
            tables[number].upsert(files, run(2, f"token-{number}"))
        except RunConflict as conflict:
            ends[number] = conflict

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sum(isinstance(end, RunConflict) for end in ends) == 1
    winner = ends.index(None)
    last = source.table.last_run("load")
    assert last is not None
    assert (last.number, last.token) == (2, f"token-{winner}")
    names = content(kind, tmp_path)["name"].to_pylist()
    assert sorted(names) == sorted(["a"] * 10 + [f"by {winner}"] * 10)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_wrong_key_of_a_run_that_was_refused(kind: str, tmp_path: Path) -> None:
    """Rows of somebody else have no key: the one of the first commit binds the later ones."""
    foreign = pa.table({"id": pa.array([1], pa.int64()), "name": ["Ada"], "amount": [0.5]})
    if kind == "delta":
        write_deltalake(tmp_path / "table", foreign)
    else:
        catalog = load_catalog("local", **catalog_options(tmp_path))
        catalog.create_namespace("space")
        catalog.create_table("space.table", foreign.schema).append(foreign)
    table = make_table(kind, tmp_path)
    table.prepare(FORMAT.row, "none", "", "load", "plan", ("name",))
    table.prepare(FORMAT.row, "none", "", "load", "tasks", ("name",))
    table = make_table(kind, tmp_path)
    table.prepare(FORMAT.row, "none", "", "load", "tasks", ("id",))
    table.upsert(written(tmp_path / "changes", [change_batch([Change(1, "Eve", 0, 1)])]), run(1))
    assert content(kind, tmp_path)["name"].to_pylist() == ["Eve"]
    with pytest.raises(LoadError, match="has rows by the key id, and the changes are by name"):
        make_table(kind, tmp_path).prepare(FORMAT.row, "none", "", "load", "plan", ("name",))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("others", [[], [pa.field("more", pa.string())]])
def test_two_streams_and_a_new_field(kind: str, tmp_path: Path, others: list[pa.Field]) -> None:
    """One has it, and the other, whose micro-batch comes between, does not, or has it as another type."""

    def merge(number: int, *fields: pa.Field, between: Callable[[], object] | None = None) -> None:
        kinds = pa.struct([*VALUE, *fields])
        made = ChangeFormat(KEY, kinds)
        batch = records([Change(number, "a", 0, number)])
        more = [pa.array([7 if field.type == pa.int32() else "seven"], field.type) for field in fields]
        value = pa.StructArray.from_arrays([*batch["value"].flatten(), *more], fields=list(kinds))
        changes = made.changes(batch.set_column(1, pa.field("value", kinds), value))
        table = make_table(kind, tmp_path)
        table.prepare(made.row, "none", "", STREAMS, key=made.key)
        if between is not None:
            between()
        last = table.last_run(STREAMS)
        files = written(tmp_path / f"{number}-{len(fields)}-{last and last.number}", [changes])
        table.upsert(files, Run(STREAMS, last.number + 1 if last else 1, f"token-{number}", {"rows": {"0": number}}))

    new = pa.field("more", pa.int32())
    merge(1)
    if not others:
        merge(2, new, between=lambda: merge(3))
        expected = {1: None, 2: 7, 3: None}
    elif kind == "iceberg":
        with pytest.raises(LoadError, match=r"more is string in the table, int in the load\), as .*: run again"):
            merge(2, new, between=lambda: merge(3, *others))
        expected = {1: None, 3: "seven"}
    else:  # the first one to come has committed its column
        with pytest.raises(LoadError, match="more is int32 in the table and string in the load"):
            merge(2, new, between=lambda: merge(3, *others))
        expected = {1: None}
    assert {row["id"]: row.get("more") for row in content(kind, tmp_path).to_pylist()} == expected


@pytest.mark.parametrize("kind", FORMATS)
def test_an_append_of_another_writer_meanwhile(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has read the table before the append merges again, with the new rows."""
    source = Source(kind, tmp_path)
    source.merge([Change(1, "a", 0, 0)], 1)
    calls: list[int] = []

    def intrude(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:
                foreign = pa.table({"id": [7], "name": ["foreign"]})
                if kind == "delta":
                    write_deltalake(tmp_path / "table", foreign, mode="append", schema_mode="merge")
                else:
                    load_catalog("local", **catalog_options(tmp_path)).load_table("space.table").append(foreign)
            return real(*arguments, **options)

        return call

    if kind == "delta":
        from spark_klog.tables import delta

        monkeypatch.setattr(delta, "merge", intrude(delta.merge))
    else:
        from spark_klog.tables.iceberg_transaction import OneAttempt

        monkeypatch.setattr(OneAttempt, "commit_transaction", intrude(OneAttempt.commit_transaction))
    source.log = [Change(1, "b", 0, 1), Change(7, "ours", 0, 2)]
    source.merge(source.log, 2)
    source.check()
    assert len(calls) == 2


def test_other_readers_see_the_rows_of_delta(tmp_path: Path) -> None:
    source = Source("delta", tmp_path)
    source.log = [Change(number % 7, "n", 0, number) for number in range(20)]
    source.merge(source.log, 1)
    ids = sorted(one[0] for one in rows_of(source.log))
    assert sorted(polars.read_delta(str(tmp_path / "table"))["id"].to_list()) == ids
    with duckdb.connect() as connection:
        files = DeltaTable(tmp_path / "table").file_uris()
        assert sorted(row[0] for row in connection.execute(f"SELECT id FROM read_parquet({files})").fetchall()) == ids
