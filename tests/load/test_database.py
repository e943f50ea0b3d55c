"""The PostgreSQL server of the tests with Debezium, of packages that are not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.servers.postgres import Postgres, unpacked_programs


@pytest.mark.peer
@pytest.mark.test_all("long")
def test_postgres_of_the_cache(tmp_path: Path) -> None:
    with Postgres(tmp_path, unpacked_programs()) as database:
        database.sql("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (5)")
        assert database.sql("SELECT id FROM t").strip() == "5"
        assert database.sql("SHOW wal_level").strip() == "logical"
        database.sql("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        database.kill()
        database.start()
        assert database.sql("SELECT id FROM t").strip() == "5"
