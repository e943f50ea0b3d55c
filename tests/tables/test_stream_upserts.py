"""What `spark_klog.tables.upsert` knows of its queries and of a topic that was created again, without Spark."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from spark_klog.errors import ConfigError, LoadError
from spark_klog.tables import stream_upserts, upsert
from spark_klog.tables.table import STREAMS, Run
from tests.tables.change_support import Change, change_batch, written
from tests.tables.test_upserts import FORMATS, Source

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
    with pytest.raises(LoadError, match=r"Give upsert\(incarnation=2\)"):
        _again([one._replace(time=3_000) for one in anew], tmp_path / "j", source)


def test_an_incarnation_is_not_negative() -> None:
    with pytest.raises(ConfigError, match="incarnation -1 must be 0 or more"):
        upsert("delta:/not-there", incarnation=-1)


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


def test_what_a_process_remembers_is_bounded() -> None:
    known: dict[int, int] = {}
    for number in [0, 1, *range(2, 500), 400]:
        stream_upserts._remember(known, number, number)
    assert [*known] == [*range(401, 500), 400]
