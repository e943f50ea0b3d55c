"""Deleted keys that a table remembers: for how long, and what dead letters and other queries do to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from spark_klog.errors import ConfigError, LoadError
from spark_klog.files.folder import LocalFolder
from spark_klog.spark import versions
from spark_klog.tables import deleted_keys, stream_upserts, upsert
from spark_klog.tables.change_order import LACKING, lacking_column
from spark_klog.tables.deleted_keys import remember, with_memory
from spark_klog.tables.table import Run
from tests.tables.change_support import Change, change_batch, records, rows_in, written
from tests.tables.test_stream_upserts import Frame
from tests.tables.test_upserts import FORMATS, content, make_table

_DAY = 86_400


def _run(number: int) -> Run:
    return Run("load", number, f"token{number}", {})


class Memory:
    """What runs remember, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store, self.runs = folder, LocalFolder(folder, LoadError), 0

    def run(self, *changes: Change, seconds: float, lost: Sequence[int] = ()) -> list[int]:
        """Remember the deletions of changes, of which those of the `lost` ids are dead letters; what is remembered."""
        batch = change_batch(changes)
        lacks = pa.array([one.id in lost for one in changes]).to_numpy(zero_copy_only=False)
        batch = batch.append_column(LACKING, lacking_column({"name": lacks}, len(batch)))
        files = written(self.folder / f"changes{self.runs}", [batch])
        last = _run(self.runs) if self.runs else None
        files = with_memory(files, self.store, last)
        self.runs += 1
        letters = frozenset((one.partition, one.offset) for one in changes if one.id in lost)
        remember(replace(files, letters=letters), self.store, last, _run(self.runs), seconds)
        known = with_memory(files, self.store, _run(self.runs)).memory
        assert known is not None
        return sorted(known["id"].to_pylist())


def test_they_are_forgotten_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the duration that the run has, since the run that deleted them; another deletion begins it anew."""
    now = [1_000_000.0]
    monkeypatch.setattr(deleted_keys.time, "time", lambda: now[0])
    memory = Memory(tmp_path)
    assert memory.run(Change(1, None, 0, 1), Change(2, None, 0, 2), seconds=7 * _DAY) == [1, 2]
    now[0] += 6 * _DAY
    assert memory.run(Change(2, None, 0, 3), Change(3, None, 0, 4), seconds=7 * _DAY) == [1, 2, 3]
    now[0] += _DAY
    assert memory.run(Change(9, "a", 0, 5), seconds=7 * _DAY) == [1, 2, 3]
    now[0] += 1
    assert memory.run(Change(9, "a", 0, 6), seconds=7 * _DAY) == [2, 3]
    now[0] += 1
    assert memory.run(Change(9, "a", 0, 7), seconds=_DAY) == []


def test_a_dead_letter_forgets_no_key(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    assert memory.run(Change(1, None, 0, 1), Change(2, None, 0, 2), seconds=_DAY) == [1, 2]
    lost = Change(1, "no row has its values", 0, 3)
    assert memory.run(lost, Change(2, "back", 0, 4), seconds=_DAY, lost=[1]) == [1]
    # one after a deletion of its own run is the deletion
    assert memory.run(Change(5, None, 0, 5), Change(5, "lost", 0, 6), seconds=_DAY, lost=[5]) == [1, 5]


@pytest.mark.parametrize("kind", FORMATS)
def test_in_a_stream(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older change of another partition brings no row back, also after a query that remembers none."""
    monkeypatch.setattr(versions, "arrow_schema", lambda schema: schema)
    monkeypatch.setattr(stream_upserts, "open_table", lambda _address: make_table(kind, tmp_path))
    monkeypatch.setattr(stream_upserts, "_merged_ends", {})
    ids: dict[str, int] = {}

    def merge(query: str, *changes: Change, **options: Any) -> list[int]:
        ids[query] = ids.get(query, -1) + 1
        call: Any = upsert("a table", stream=query, **options)
        call(Frame(records(changes)), ids[query])
        return [row[0] for row in rows_in(content(kind, tmp_path))]

    keeps = {"keep_deletes": 7 * _DAY}
    assert merge("a", Change(1, "a", 0, 0, 10), Change(2, "a", 0, 1, 10), **keeps) == [1, 2]
    assert merge("a", Change(1, None, 0, 2, 20), **keeps) == [2]
    assert merge("b", Change(7, "b", 2, 0, 15)) == [2, 7]
    assert merge("a", Change(1, "late", 1, 0, 15), **keeps) == [2, 7]
    assert merge("a", Change(1, "new", 1, 1, 25), **keeps) == [1, 2, 7]
    assert len(list(tmp_path.rglob("_klog/deleted/*.parquet"))) == 1
    assert merge("a", Change(7, None, 2, 1, 30), keep_deletes=math.inf) == [1, 2]
    for wrong in (0, -1, math.nan, "7d"):
        with pytest.raises(ConfigError, match="must be a number of seconds above 0, such as 7"):
            upsert("delta:/x", keep_deletes=wrong)  # type: ignore[arg-type]
