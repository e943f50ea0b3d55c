"""A catalog in SQLite whose database another program has locked."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from spark_klog.errors import LoadError
from tests.tables.iceberg_tables import Warehouse, rows, run_of, write


def test_a_locked_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A COMMIT that was refused leaves a transaction that only its connection sees: the run is not in the table."""
    place = tmp_path / "catalog.db"
    warehouse = Warehouse(tmp_path, uri=f"sqlite:///{place}?timeout=0.05")
    table, schema = warehouse.prepared("none")
    files = [write(table, schema, "a", rows(range(5)))]
    monkeypatch.setattr(table, "_seconds", 0.5)
    other = sqlite3.connect(place, check_same_thread=False, isolation_level=None)
    other.execute("BEGIN")
    other.execute("SELECT * FROM iceberg_tables").fetchall()  # a shared lock, until the transaction ends
    with pytest.raises(LoadError, match="database is locked"):
        table.append(files, run_of(1, 5))
    assert warehouse.offsets() == []
    monkeypatch.setattr(table, "_seconds", 30)
    timer = threading.Timer(0.3, lambda: other.execute("ROLLBACK"))
    timer.start()
    table.append(files, run_of(1, 5))
    timer.join()
    other.close()
    assert warehouse.offsets() == [*range(5)]
