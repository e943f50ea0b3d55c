"""A commit's outcome, the answer to it, and what others do before the load looks: no file goes that readers need.

The table is read by pyiceberg or deltalake, at all its snapshots, after the call and after the next run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError
from deltalake.table import TableMerger, TableOptimizer
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

from spark_klog.tables.delta import DeltaLakeTable
from spark_klog.tables.iceberg import IcebergTable
from spark_klog.tables.table import DataFile, Run, Table
from tests.support.runs.soak import SOAK
from tests.tables.change_support import FORMAT, Change, change_batch, written

_ANSWERS: dict[str, Callable[[], Exception]] = {
    "conflict": lambda: CommitFailedException("branch main has changed"),
    "timeout": lambda: TimeoutError("no answer"),
    "unknown": lambda: CommitStateUnknownException("502"),
}
#: Whether the catalog has the commit: at once, never, or after the load has looked.
_OUTCOMES = ("committed", "refused", "late")
_OTHERS = ("nothing", "append", "append and expire", "compact and expire", "rewrite manifests and expire", "roll back")
_CALLS = ("append", "upsert", "compact")
_LONG = pytest.mark.test_all("long")


def _cases() -> list[Any]:
    """All in `make soak`, otherwise one of seven beside those of `make test`: seven divides none of the lengths."""
    cases = []
    product = itertools.product(_CALLS, _OUTCOMES, _ANSWERS, _OTHERS)
    for number, (call, outcome, answer, others) in enumerate(product):
        is_telling = answer == "conflict" and (
            (outcome == "committed" and others in ("append and expire", "rewrite manifests and expire"))
            or (outcome == "late" and others == "nothing")
        )
        if is_telling or SOAK or number % 7 == 0:
            cases.append(pytest.param(call, outcome, answer, others, marks=() if is_telling else _LONG))
    return cases


class _Lake:
    """An Iceberg table with two runs, and those who write to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.options = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
        self.table = IcebergTable("c.ns.t", self.options)
        self.table._seconds = 20
        self.table.prepare(FORMAT.row, "none", "", "load")
        for number, id_ in ((1, 1), (2, 2)):
            _upsert(self.table, folder, number, [Change(id_, "a", 0, number)])

    def stranger(self) -> Any:
        return load_catalog("c", **self.options).load_table("ns.t")

    def do(self, others: str) -> None:
        """What somebody else does, with the snapshot that they found."""
        found = self.stranger().metadata.current_snapshot_id
        if others == "roll back":
            past = [one.snapshot_id for one in self.stranger().history() if one.snapshot_id != found]
            self.stranger().manage_snapshots().set_current_snapshot(past[-1]).commit()
            self.stranger().manage_snapshots().set_current_snapshot(found).commit()
        elif others.startswith("compact"):
            IcebergTable("c.ns.t", self.options).compact(1 << 20)
            self.stranger().append(self._row(1000))
        elif others != "nothing":
            if others.startswith("rewrite"):
                with self.stranger().transaction() as transaction:
                    transaction.set_properties({"commit.manifest.min-count-to-merge": "2"})
            self.stranger().append(self._row(1000))
            if others.startswith("rewrite"):
                self.stranger().append(self._row(1001))
        if others.endswith("expire"):
            later = datetime.now(timezone.utc) + timedelta(hours=1)
            self.stranger().maintenance.expire_snapshots().older_than(later).commit()

    def _row(self, id_: int) -> pa.Table:
        schema = self.stranger().schema().as_arrow()
        return pa.Table.from_pylist([dict.fromkeys(schema.names) | {"id": id_, "name": "other"}], schema)

    def rows(self) -> list[tuple[int, str]]:
        """The rows of the current snapshot; all others can be read, too."""
        table = self.stranger()
        for one in table.metadata.snapshots:
            table.scan(snapshot_id=one.snapshot_id).to_arrow()
        found = table.scan().to_arrow()
        return sorted(zip(found["id"].to_pylist(), found["name"].to_pylist(), strict=True))


def _run(number: int) -> Run:
    return Run("load", number, f"token-{number}", {"rows": {"0": number}})


def _upsert(table: Table, folder: Path, number: int, changes: list[Change]) -> None:
    table.upsert(written(folder / f"changes-{number}", [change_batch(changes)]), _run(number))


def _append(table: Table, folder: Path, number: int, id_: int) -> None:
    schema = table.prepare(FORMAT.row, "none", "", "load")
    row = dict.fromkeys(schema.names) | {"id": id_, "name": "c"}
    place, footers = Path(table.location.removeprefix("file://")) / f"{number}.parquet", list[Any]()
    pq.write_table(pa.Table.from_pylist([row], schema), place, metadata_collector=footers)
    table.append([DataFile(place.name, place.stat().st_size, footers[0])], _run(number))


def _call(table: Table, folder: Path, call: str) -> None:
    if call == "append":
        _append(table, folder, 3, 3)
    elif call == "upsert":
        _upsert(table, folder, 3, [Change(1, "b", 0, 3), Change(3, "c", 0, 4)])
    else:
        table.compact(1 << 20)


def _wanted(call: str, others: str) -> list[tuple[int, str]]:
    rows = {1: "b" if call == "upsert" else "a", 2: "a"} | ({} if call == "compact" else {3: "c"})
    rows |= {} if others in ("nothing", "roll back") else {1000: "other"}
    return sorted((rows | ({1001: "other"} if others.startswith("rewrite") else {})).items())


@pytest.mark.parametrize(("call", "outcome", "answer", "others"), _cases())
def test_iceberg(
    call: str, outcome: str, answer: str, others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = _Lake(tmp_path)
    real, waiting, calls = SqlCatalog.commit_table, list[Any](), list[int]()

    def commit(catalog: SqlCatalog, *request: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            while waiting:
                try:
                    real(catalog, *waiting.pop())
                except CommitFailedException:
                    pass
            return real(catalog, *request)
        monkeypatch.setattr(SqlCatalog, "commit_table", real)
        if outcome == "committed":
            real(catalog, *request)
        elif outcome == "late":
            waiting.append(request)
        lake.do(others)
        monkeypatch.setattr(SqlCatalog, "commit_table", commit)
        raise _ANSWERS[answer]()

    monkeypatch.setattr(SqlCatalog, "commit_table", commit)
    _call(lake.table, tmp_path, call)
    monkeypatch.undo()
    assert calls
    assert lake.rows() == _wanted(call, others)
    number = 2 if call == "compact" else 3
    assert IcebergTable("c.ns.t", lake.options).last_run("load") == _run(number)
    _append(lake.table, tmp_path, number + 1, 20)
    assert lake.rows() == sorted([*_wanted(call, others), (20, "c")])


@pytest.mark.parametrize("others", ["append", *(pytest.param(one, marks=_LONG) for one in ("nothing", "compact"))])
@pytest.mark.parametrize("call", _CALLS)
def test_delta(call: str, others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit goes through, and its answer is a conflict; versions before it stay readable, too."""
    place = tmp_path / "table"
    table = DeltaLakeTable(str(place))
    table.prepare(FORMAT.row, "none", "", "load")
    for number, id_ in ((1, 1), (2, 2)):
        _upsert(table, tmp_path, number, [Change(id_, "a", 0, number)])
    owner, name = {
        "append": (DeltaTable, "create_write_transaction"),
        "upsert": (TableMerger, "execute"),
        "compact": (TableOptimizer, "compact"),
    }[call]
    real = getattr(owner, name)

    def conflict(*arguments: Any, **options: Any) -> Any:
        real(*arguments, **options)
        monkeypatch.undo()
        if others == "append":
            write_deltalake(place, pa.table({"id": [1000], "name": ["other"]}), mode="append", schema_mode="merge")
        elif others == "compact":
            DeltaTable(place).optimize.compact()
        raise CommitFailedError("a concurrent transaction")

    def rows(version: int | None) -> list[tuple[int, str]]:
        found = DeltaTable(place, version=version).to_pyarrow_table()
        return sorted(zip(found["id"].to_pylist(), found["name"].to_pylist(), strict=True))

    monkeypatch.setattr(owner, name, conflict)
    _call(table, tmp_path, call)
    assert rows(None) == [one for one in _wanted(call, others) if others == "append" or one[0] < 1000]
    for version in range(DeltaTable(place).version()):
        rows(version)
    assert DeltaLakeTable(str(place)).last_run("load") == _run(2 if call == "compact" else 3)
