"""What `spark_klog.tables.upsert` knows of its queries and of a topic that was created again, without Spark."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from spark_klog.errors import ConfigError, LoadError
from spark_klog.spark import versions
from spark_klog.tables import stream_upserts, upsert
from spark_klog.tables.table import STREAMS, Run
from tests.tables.change_support import Change, change_batch, records, rows_in, rows_of, written
from tests.tables.test_upserts import FORMATS, Source, content, make_table

_ROWS = [Change(number, "old", number % 2, 500 + number, 1_000 + number) for number in range(10)]


def _again(changes: list[Change], folder: Path, source: Source, **options: Any) -> None:
    function: Any = upsert("delta:/not-there", **options)
    function._check_incarnation(source.table, written(folder, [change_batch(changes)]))


@pytest.mark.parametrize("kind", FORMATS)
def test_changes_of_a_topic_that_was_created_again(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = Source(kind, tmp_path)
    source.merge(_ROWS, 1)
    anew = [Change(number, "new", number % 2, number, 2_000 + number) for number in range(4)]
    message = (
        r"than 4 of the changes, .* created again\. Give upsert\(incarnation=1\), or incarnation=0 if it is the same"
    )
    with pytest.raises(LoadError, match=message):
        _again(anew, tmp_path / "a", source)
    with caplog.at_level(logging.WARNING):
        _again(anew, tmp_path / "b", source, incarnation=0)
    assert "than 4 of the changes" in caplog.text
    # another record in the place of a row, be its clock behind
    with pytest.raises(LoadError, match="than 1 of the changes"):
        _again([Change(3, "new", 1, 503, 900)], tmp_path / "c", source)

    caplog.clear()
    _again([one._replace(incarnation=1) for one in anew], tmp_path / "d", source, incarnation=1)
    _again(_ROWS, tmp_path / "e", source)  # a range that is read again, and what was before it
    _again([one._replace(offset=one.offset - 99, time=one.time - 9) for one in _ROWS], tmp_path / "f", source)
    late = [one._replace(offset=one.offset - 99, time=one.time + 9 * (-1) ** one.id) for one in _ROWS]
    _again(late, tmp_path / "g", source)  # clocks that differ
    _again([Change(3, "new", 0, 2, 9_000)], tmp_path / "h", source)  # of another partition, where the clock decides
    _again([Change(77, "new", 0, 2, 9_000)], tmp_path / "i", source)
    assert caplog.text == ""

    source.merge([one._replace(incarnation=2) for one in anew], 2)
    for incarnation in (None, 1):
        with pytest.raises(LoadError, match=rf"of incarnation {incarnation or 0}: .* Give upsert\(incarnation=2\)"):
            _again([Change(77, "new", 0, 900, 9_000)], tmp_path / f"j{incarnation}", source, incarnation=incarnation)


def test_a_table_that_may_have_deletion_vectors(tmp_path: Path) -> None:
    """Its rows are compared, as those of others are."""
    source = Source("delta", tmp_path)
    source.merge(_ROWS, 1)
    DeltaTable(tmp_path / "table").alter.set_table_properties({"delta.enableDeletionVectors": "true"})
    assert "deletionVectors" in (DeltaTable(tmp_path / "table").protocol().reader_features or [])
    anew = [Change(number, "new", number % 2, number, 2_000 + number) for number in range(4)]
    with pytest.raises(LoadError, match="than 4 of the changes"):
        _again(anew, tmp_path / "a", source)
    _again([Change(99, "new", 0, 600, 2_000)], tmp_path / "b", source)
    source.merge([Change(3, None, 1, 600, 2_000)], 2)
    rows = pa.Table.from_batches(source.table.rows(["name", "id"]))
    assert rows.column_names == ["name", "id"]
    assert sorted(rows["id"].to_pylist()) == [0, 1, 2, *range(4, 10)]


class Frame:
    """Of a frame of Spark what an upsert calls, with the task in this process."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch, self.schema = batch, batch.schema

    def select(self, *names: str) -> Frame:
        return Frame(self._batch.select(list(names)))

    def mapInArrow(
        self, work: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], _columns: str
    ) -> SimpleNamespace:
        rows = [SimpleNamespace(**row) for made in work(iter([self._batch])) for row in made.to_pylist()]
        return SimpleNamespace(collect=lambda: rows)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_topic_created_again_begins_with_new_keys(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its later micro-batches are compared with the rows, too, until their offsets are past those of the table."""
    monkeypatch.setattr(versions, "arrow_schema", lambda schema: schema)
    monkeypatch.setattr(stream_upserts, "open_table", lambda _address: make_table(kind, tmp_path))
    monkeypatch.setattr(stream_upserts, "_merged_ends", {})
    compared: list[int] = []
    real = stream_upserts._compared
    monkeypatch.setattr(stream_upserts, "_compared", lambda *given: compared.append(1) or real(*given))
    log: list[Change] = []

    def merge(changes: list[Change], number: int, incarnation: int | None = None) -> None:
        call: Any = upsert("a table", stream="query", incarnation=incarnation)
        call(Frame(records(changes)), number)
        log.extend(one._replace(incarnation=incarnation or 0) for one in changes)

    merge([Change(number, "old", 0, 10 + number, 1_000) for number in range(5)], 0)
    merge([Change(5, "old", 0, 15, 1_000)], 1)
    assert len(compared) == 1
    stream_upserts._merged_ends.clear()  # another driver
    merge([Change(100, "new", 0, 0, 5_000), Change(101, "new", 0, 1, 5_000)], 2)
    anew = [Change(number, "new", 0, 2 + number, 5_000) for number in range(5)]
    for _ in range(2):
        with pytest.raises(LoadError, match=r"than 5 of the changes, .* Give upsert\(incarnation=1\)"):
            merge(anew, 3)
    assert rows_in(content(kind, tmp_path)) == rows_of(log)
    merge(anew, 3, 1)
    merge([Change(3, None, 0, 7, 6_000)], 4, 1)
    compared.clear()
    merge([Change(4, "later", 0, 8, 6_000)], 5, 1)
    assert compared == []
    assert rows_in(content(kind, tmp_path)) == rows_of(log)
    # the incarnation is forgotten, and the first micro-batch has a new key only, also in the same driver
    with pytest.raises(LoadError, match=r"rows of incarnation 1, .* Give upsert\(incarnation=1\)"):
        merge([Change(9, "x", 0, 9, 7_000)], 6)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_key_of_another_type(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared with the table's rows once the table has taken it, or is refused by name."""
    monkeypatch.setattr(versions, "arrow_schema", lambda schema: schema)
    monkeypatch.setattr(stream_upserts, "open_table", lambda _address: make_table(kind, tmp_path))
    monkeypatch.setattr(stream_upserts, "_merged_ends", {})

    def merge(key: Any, of: pa.DataType, number: int) -> None:
        keys = pa.array([{"id": key}], pa.struct([pa.field("id", of)]))
        call: Any = upsert("a table", stream=f"query {number}")
        call(Frame(records([Change(1, "a", 0, number)]).set_column(0, "key", keys)), number)

    merge(1, pa.int32(), 0)
    with pytest.raises(LoadError, match=r"id is int\S* in the table"):
        merge("one", pa.string(), 1)
    if kind == "iceberg":
        merge(1 << 40, pa.int64(), 2)
        assert sorted(content(kind, tmp_path)["id"].to_pylist()) == [1, 1 << 40]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"incarnation": each}, f"incarnation {each!r} must be an int of 0") for each in (-1, "1", 1.5, True, 2**31)),
        *(({"key": each}, "upsert key None must be a string") for each in (None, [None], ["id", None])),
        ({"key": b"id"}, "upsert key 105 must be a string"),
    ],
)
def test_wrong_arguments(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        upsert("delta:/not-there", **options)


def test_a_micro_batch_is_known_by_its_start_and_its_end() -> None:
    batch = {"batch": 0, "rows-0": 10, "rows-0:start": 5}
    last = Run(STREAMS, 7, "token", {"query": {**batch, "run": 7}})
    assert stream_upserts._has(last, "query", batch)
    assert not stream_upserts._has(last, "query", {**batch, "rows-0:start": 0})
    assert not stream_upserts._has(last, "another", batch)
    assert not stream_upserts._has(None, "query", batch)


@pytest.mark.parametrize("kind", FORMATS)
def test_commits_keep_the_last_queries(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_upserts, "_MOST_QUERIES", 3)
    source = Source(kind, tmp_path)
    with_load: Any = upsert("delta:/not-there")
    table = source.table
    files = written(tmp_path / "changes", [change_batch(_ROWS)])
    monkeypatch.setattr(stream_upserts, "STREAMS", "load")
    for number, query in enumerate(["d", "c", "b", "d", "a"]):
        with_load._commit(table, files, query, {"batch": number})
    last = table.last_run("load")
    assert last is not None
    assert sorted(last.offsets) == ["a", "b", "d"]
    assert last.offsets["d"] == {"batch": 3, "run": 4}
    with_load._commit(table, files, "d", {"batch": 3})
    assert table.last_run("load") == last
