"""What a merge reads of a table: the files that can have its keys, and its commit says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from spark_klog.errors import LoadError
from spark_klog.tables.change_order import all_outlived
from spark_klog.tables.changes import ChangeFormat
from spark_klog.tables.table import Table
from tests.tables.change_support import written
from tests.tables.test_upserts import FORMATS, catalog_options, content, make_table, run

_ROW = pa.struct([("id", pa.int64()), ("city", pa.string()), ("note", pa.string())])
_KEY = pa.struct([("id", pa.int64())])
_ENVELOPE = pa.struct([("op", pa.string()), ("before", _ROW), ("after", _ROW)])
_FORMAT = ChangeFormat(_KEY, _ENVELOPE, (), "debezium")
_UNAVAILABLE = "__debezium_unavailable_value"
_LAYOUTS = {"delta": "city", "iceberg": "bucket(8, id), city"}


def _changes(rows: list[dict[str, Any] | None], start: int) -> pa.RecordBatch:
    """Records from an offset on; None is a truncation."""
    values = [
        {"op": "t", "before": None, "after": None} if row is None else {"op": "u", "before": None, "after": row}
        for row in rows
    ]
    count = len(rows)
    batch = pa.RecordBatch.from_pydict(
        {
            "key": pa.array([None if row is None else {"id": row["id"]} for row in rows], _KEY),
            "value": pa.array(values, _ENVELOPE),
            "topic": pa.array(["rows"] * count),
            "partition": pa.array([0] * count, pa.int32()),
            "offset": pa.array(range(start, start + count), pa.int64()),
            "timestamp": pa.array(range(start, start + count), pa.timestamp("us", tz="UTC")),
        }
    )
    return _FORMAT.changes(batch)


class _Target:
    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.table = kind, folder, make_table(kind, folder)
        self._runs = self._offset = 0
        self.read_rows: list[int] = []

    def merge(self, rows: list[dict[str, Any] | None]) -> dict[str, int]:
        """What the commit says of it."""
        self.table.prepare(_FORMAT.row, _LAYOUTS[self.kind], "", "load", key=_FORMAT.key)
        files = written(self.folder / f"{self._runs}", [_changes(rows, self._offset)], key=_FORMAT.key)
        schema = self.table.schema()
        assert schema is not None
        assert not list(files.without_row(schema, self._rows))
        self._runs, self._offset = self._runs + 1, self._offset + len(rows)
        self.table.upsert(files, run(self._runs))
        if self.kind == "delta":
            history: list[dict[str, Any]] = DeltaTable(self.folder / "table").history()
            entry: dict[str, Any] = next(one["klog"] for one in history if "klog" in one)
        else:
            head = load_catalog("local", **catalog_options(self.folder)).load_table("space.table").current_snapshot()
            assert head is not None
            assert head.summary is not None
            texts = head.summary.additional_properties
            entry = {name.removeprefix("klog.").replace("-", "_"): text for name, text in texts.items()}
        return {name: int(entry[name]) for name in ("table_files", "read_files", "read_rows", "read_bytes")}

    def _rows(self, names: Any, keys: pa.Table) -> Any:
        for batch in self.table.rows(names, keys):
            self.read_rows.append(len(batch))
            yield batch

    def rows(self) -> list[dict[str, Any]]:
        table = content(self.kind, self.folder).select(_ROW.names)
        return sorted(table.to_pylist(), key=lambda row: int(row["id"]))


def _row(number: int, note: str = "n") -> dict[str, Any]:
    return {"id": number, "city": f"{number // 10}", "note": note}


@pytest.mark.parametrize("kind", FORMATS)
def test_files_that_cannot_have_the_keys_are_left_out(tmp_path: Path, kind: str) -> None:
    target = _Target(kind, tmp_path)
    target.merge([_row(number) for number in range(100)])
    found = target.merge([_row(31, "new"), _row(1000, "new")])
    assert found["read_files"] == 1 < found["table_files"]
    assert 0 < found["read_rows"] <= 10
    assert found["read_bytes"] > 0
    # a value that the change lacks is looked for in the same files
    assert target.merge([_row(31, _UNAVAILABLE) | {"city": "x"}])["read_files"] == 1
    assert sum(target.read_rows) <= 10
    assert target.merge([_row(39, "last of its file")])["read_files"] == 1
    # a row that leaves its partition
    changed = {31: {"city": "x", "note": "new"}, 39: {"note": "last of its file"}}
    expected = [_row(number) | changed.get(number, {}) for number in range(100)]
    assert target.rows() == [*expected, _row(1000, "new")]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_truncation_reads_no_rows(tmp_path: Path, kind: str) -> None:
    """If all of them are older: what comes after it in the run stays."""
    target = _Target(kind, tmp_path)
    target.merge([_row(number) for number in range(20)])
    found = target.merge([_row(3, "old"), None, _row(4, "new")])
    assert found["table_files"] > 1
    assert [found[name] for name in ("read_files", "read_rows", "read_bytes")] == [0, 0, 0]
    assert target.rows() == [_row(4, "new")]
    assert target.merge([None])["read_files"] == 0
    assert target.rows() == []
    target.merge([_row(5)])
    assert target.rows() == [_row(5)]


def test_texts_of_keys_of_any_kind_find_their_rows(tmp_path: Path) -> None:
    """Also long ones and such with quotes, as ranges of them are in a condition of SQL."""
    form = ChangeFormat(pa.struct([("id", pa.string())]), pa.struct([("v", pa.int64())]))
    texts = ["", "'", "a'b\\", "\x00\n", "ü" * 200, "ü" * 200 + "b", "\U0010ffff" * 40, *(f"k{n}" for n in range(200))]
    for kind in FORMATS:
        (tmp_path / kind).mkdir()
        table: Table = make_table(kind, tmp_path / kind)
        table.prepare(form.row, "none", "", "load", key=form.key)
        for number in (1, 2):
            batch = pa.RecordBatch.from_pydict(
                {
                    "key": pa.array([{"id": text} for text in texts], form.key_type),
                    "value": pa.array([{"v": number}] * len(texts), form.value_type),
                    "topic": pa.array(["rows"] * len(texts)),
                    "partition": pa.array([0] * len(texts), pa.int32()),
                    "offset": pa.array(range(number * 1000, number * 1000 + len(texts)), pa.int64()),
                    "timestamp": pa.array([number] * len(texts), pa.timestamp("us", tz="UTC")),
                }
            )
            files = written(tmp_path / kind / f"c{number}", [form.changes(batch)], key=form.key)
            table.upsert(files, run(number))
        found = content(kind, tmp_path / kind)
        assert sorted(found["id"].to_pylist()) == sorted(texts)
        assert set(found["v"].to_pylist()) == {2}


def test_an_empty_key_in_a_partition_of_delta_is_refused(tmp_path: Path) -> None:
    target = _Target("delta", tmp_path)
    form = ChangeFormat(pa.struct([("city", pa.string())]), pa.struct([("id", pa.int64())]))
    target.table.prepare(form.row, "city", "", "load", key=form.key)
    batch = pa.RecordBatch.from_pydict(
        {
            "key": pa.array([{"city": ""}], form.key_type),
            "value": pa.array([{"id": 1}], form.value_type),
            "topic": pa.array(["rows"]),
            "partition": pa.array([0], pa.int32()),
            "offset": pa.array([0], pa.int64()),
            "timestamp": pa.array([0], pa.timestamp("us", tz="UTC")),
        }
    )
    files = written(tmp_path / "c", [form.changes(batch)], key=form.key)
    with pytest.raises(LoadError, match="the key's column city is empty in a change, and a partition column"):
        target.table.upsert(files, run(1))


def test_bounds_tell_what_a_truncation_outlives() -> None:
    """Of all places within small bounds, compared one by one."""
    places = [(inc, part, at, time) for inc in (0, 1) for part in (0, 1) for at in (4, 5) for time in (6, 7)]

    def is_older(row: tuple[int, ...], by: tuple[int, ...]) -> bool:
        if row[1] == by[1]:
            return (by[0], by[2]) > (row[0], row[2])
        return (by[3], by[1]) > (row[3], row[1])

    names = ["_klog_incarnation", "_klog_partition", "_klog_offset", "_klog_timestamp"]
    told = set()
    for by in places:
        truncation = pa.table({name: pa.array([value]) for name, value in zip(names, by, strict=True)})
        for first in places:
            for last in places:
                bounds = dict(zip(names, zip(first, last, strict=True), strict=True))
                rows = [row for row in places if all(low <= v <= high for v, (low, high) in zip(row, bounds.values()))]  # noqa: B905
                if not rows:
                    continue
                found = all_outlived(bounds, truncation)
                told.add(found)
                kinds = {is_older(row, by) for row in rows}
                assert found is None or kinds == {found}, json.dumps([by, bounds])
    assert told == {True, False, None}
