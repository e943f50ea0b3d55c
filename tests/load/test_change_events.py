"""Loads of what databases send beside rows: truncations, values that were not sent, and an order of their own."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, LoadError
from spark_klog.files.folder import LocalFolder
from spark_klog.load.audit import status
from spark_klog.load.journal import paths
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import WriteSettings
from spark_klog.load.values import parse_schema, schema_text
from spark_klog.tables.changes import UNAVAILABLE, debezium_type
from tests.load.support import Killed, die, failing, run
from tests.load.test_upserts import FORMATS, address_of, content, environment
from tests.spark.support import Sent, create_topic, produce

__all__ = ["environment"]
_ICEBERG_FIRST = ["iceberg", pytest.param("delta", marks=pytest.mark.test_all("long"))]

ROW = "id bigint, name string, note string"


def settings_by(order: str = "", kind: pa.DataType | None = None, **more: Any) -> WriteSettings:
    types = {order: kind or pa.int64()} if order else {}
    schema = schema_text(debezium_type(parse_schema(ROW), types))
    return WriteSettings(schema=schema, upsert_key="id", envelope="debezium", order_by=order, **more)


def write(key: int, name: str, note: str | None, lsn: Any = None, op: str = "u") -> dict[str, Any]:
    return {"before": None, "after": {"id": key, "name": name, "note": note}, "op": op, "source": {"lsn": lsn}}


def sent(*events: Any, partition: int = 0) -> list[Sent]:
    return [Sent(None if each is None else json.dumps(each).encode(), b"k", partition) for each in events]


def rows_at(address: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in content(address).select(["id", "name", "note"]).to_pylist())


@pytest.mark.parametrize("kind", _ICEBERG_FIRST)
def test_a_truncation_empties_the_table_at_its_place(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str
) -> None:
    """Also if the run is killed at any change of the journal."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    before = [write(1, "a", "x"), write(2, "b", "x")]
    produce(servers, topic, sent(*before))
    after = [write(2, "late", "x"), {"op": "t", "source": {"lsn": 5}}, write(3, "c", "x"), write(1, "again", "x")]
    addresses = [address_of(kind, tmp_path, f"t{number}") for number in range(3, 40, 9)]
    for address in addresses:
        run(servers, address, topic, settings=settings_by())
        assert rows_at(address) == [(1, "a", "x"), (2, "b", "x")]
    produce(servers, topic, sent(*after))
    for number, address in enumerate(addresses):
        try:
            with failing(LocalFolder, 3 + 9 * number, die):
                run(servers, address, topic, settings=settings_by())
        except Killed:
            pass
        run(servers, address, topic, settings=settings_by())
        assert rows_at(address) == [(1, "again", "x"), (3, "c", "x")]
        assert (status(address).findings, len(status(address).runs)) == ([], 2)
    produce(servers, topic, sent({"op": "t"}))
    run(servers, addresses[0], topic, settings=settings_by())
    assert rows_at(addresses[0]) == []
    produce(servers, topic, sent({"op": "t"}, write(9, "z", None)))
    run(servers, addresses[0], topic, settings=settings_by())
    assert rows_at(addresses[0]) == [(9, "z", None)]


@pytest.mark.parametrize("kind", _ICEBERG_FIRST)
def test_a_key_that_changes(cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str) -> None:
    """Debezium deletes the row of the old key and creates that of the new one, each in the partition of its key: runs
    may read them in any order. Headers name the other key, and nobody needs them.
    """
    servers, address = cluster.bootstrap_servers, address_of(kind, tmp_path)
    create_topic(servers, topic, 3)

    def gone(key: int, other: int, lsn: int) -> list[Sent]:
        event = {"before": {"id": key}, "after": None, "op": "d", "source": {"lsn": lsn}}
        headers = (("__debezium.newkey", b'{"id": %d}' % other),)
        body, name = json.dumps(event).encode(), b'{"id": %d}' % key
        return [Sent(body, name, key, headers=headers), Sent(None, name, key)]

    def made(key: int, other: int, note: str, lsn: int) -> list[Sent]:
        headers = (("__debezium.oldkey", b'{"id": %d}' % other),)
        return [Sent(json.dumps(write(key, "a", note, lsn, "c")).encode(), b'{"id": %d}' % key, key, headers=headers)]

    def rows(*records: list[Sent]) -> list[tuple[Any, ...]]:
        for each in records:
            produce(servers, topic, each)
        run(servers, address, topic, settings=settings_by("source.lsn"))
        return rows_at(address)

    assert rows(sent(write(0, "a", "x", 1, "c"))) == [(0, "a", "x")]
    assert rows(made(1, 0, "x", 2)) == [(0, "a", "x"), (1, "a", "x")], "its deletion comes in a later run"
    assert rows(gone(0, 1, 2)) == [(1, "a", "x")]
    assert rows(gone(1, 2, 3)) == [], "its creation comes in a later run"
    assert rows(made(2, 1, "y", 3)) == [(2, "a", "y")]
    # there and back, and on
    assert rows(gone(2, 1, 4), made(1, 2, "y", 4), gone(1, 2, 5), made(2, 1, "z", 5)) == [(2, "a", "z")]
    assert rows(made(1, 2, "z", 6), gone(2, 1, 6), gone(1, 0, 7), made(0, 1, "z", 7)) == [(0, "a", "z")]
    assert status(address).findings == []

    # the event of the new key has what the database's log has
    for each in (gone(0, 1, 8), made(1, 0, UNAVAILABLE, 8)):
        produce(servers, topic, each)
    with pytest.raises(LoadError, match=f"{topic}-1 at offset .* the record has {UNAVAILABLE} as note"):
        run(servers, address, topic, settings=settings_by("source.lsn"))
    assert rows_at(address) == [(0, "a", "z")]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_value_that_was_not_sent(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str
) -> None:
    """The row keeps its own, in its run and in later ones; without a row the record is a dead letter."""
    servers, address = cluster.bootstrap_servers, address_of(kind, tmp_path)
    create_topic(servers, topic)
    lacking = write(1, "c", UNAVAILABLE)
    produce(servers, topic, sent(write(1, "a", "one"), write(2, "a", "two"), lacking, write(2, "b", UNAVAILABLE)))
    run(servers, address, topic, settings=settings_by())
    assert rows_at(address) == [(1, "c", "one"), (2, "b", "two")]
    produce(servers, topic, sent(write(1, "d", UNAVAILABLE)))
    run(servers, address, topic, settings=settings_by())
    assert rows_at(address) == [(1, "d", "one"), (2, "b", "two")]

    gone = {"op": "d", "before": {"id": 2}}
    produce(servers, topic, sent(gone, write(2, "new", UNAVAILABLE), write(7, "e", UNAVAILABLE), write(8, "f", "g")))
    with pytest.raises(LoadError, match="has 2 bad record batches or values, more than --max-bad 0"):
        run(servers, address, topic, settings=settings_by())
    for number in (4, 8, 12):
        try:
            with failing(LocalFolder, number, die):
                run(servers, address, topic, settings=settings_by(), max_bad=MaxBad(2))
        except Killed:
            pass
    run(servers, address, topic, settings=settings_by(), max_bad=MaxBad(2))
    assert rows_at(address) == [(1, "d", "one"), (8, "f", "g")]
    found = status(address)
    assert (found.findings, len(found.runs), found.partitions[0]["gaps"]) == ([], 3, {"unparsed": 2})
    [letters] = Path(content_folder(address), paths.LETTERS).iterdir()
    lines = [json.loads(line) for line in letters.read_text().splitlines()]
    assert [line["offset"] for line in lines] == [6, 7]
    assert json.loads(base64.b64decode(lines[1]["value"])) == write(7, "e", UNAVAILABLE)
    assert lines[1]["reason"].startswith(f"the record has {UNAVAILABLE} as note: the connector has not")

    other = address_of(kind, tmp_path, "other")
    with pytest.raises(LoadError, match="has 5 bad record batches or values"):
        run(servers, other, topic, settings=settings_by(unavailable="dead-letter"))


def content_folder(address: str) -> str:
    from spark_klog.tables.opening import open_table

    return open_table(address).location.removeprefix("file://")


@pytest.mark.parametrize("kind", FORMATS)
def test_the_database_says_which_change_is_the_last(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str
) -> None:
    """A key that moves to another partition, whose records were written later and have an earlier time."""
    servers, address = cluster.bootstrap_servers, address_of(kind, tmp_path)
    create_topic(servers, topic, 2)
    by_lsn = settings_by("source.lsn")
    produce(servers, topic, sent(write(1, "new", "x", 90), write(2, "new", "x", 20), partition=1))
    produce(servers, topic, sent(write(1, "old", "x", 9), write(2, "newer", "x", 100)))
    run(servers, address, topic, settings=by_lsn)
    assert rows_at(address) == [(1, "new", "x"), (2, "newer", "x")]
    assert sorted(content(address)["_klog_order"].to_pylist()) == ["02:90", "03:100"]
    produce(servers, topic, sent(write(1, "older", "x", 80), write(2, "same", "x", 100)))
    produce(servers, topic, sent({"op": "t", "source": {"lsn": 85}}, partition=1))
    run(servers, address, topic, settings=by_lsn)
    assert rows_at(address) == [(1, "new", "x"), (2, "same", "x")], "of one order the offset decides"
    with pytest.raises(LoadError, match=r"with --order-by source.lsn, not without --order-by: use another"):
        run(servers, address, topic, settings=settings_by())

    produce(servers, topic, sent(write(3, "a", "x", None), write(4, "a", "x", "text")))
    loaded = run(servers, address, topic, settings=by_lsn, max_bad=MaxBad(2))
    assert loaded.bad == 2
    [letters] = Path(content_folder(address), paths.LETTERS).iterdir()
    reasons = [json.loads(line)["reason"] for line in letters.read_text().splitlines()]
    assert any("has no source.lsn, by which its change is ordered" in reason for reason in reasons)
    assert any("source.lsn must be a number" in reason or "source.lsn" in reason for reason in reasons)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_snapshot_while_changes_go_on(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str
) -> None:
    """Debezium's incremental snapshots have no lsn: their rows are later than what is before them in the topic."""
    servers, address = cluster.bootstrap_servers, address_of(kind, tmp_path)
    create_topic(servers, topic)
    by_lsn = settings_by("source.lsn")
    produce(servers, topic, sent(write(1, "a", "x", 90), write(2, "a", "x", 91), write(1, "read", "y", op="r")))
    run(servers, address, topic, settings=by_lsn)
    assert rows_at(address) == [(1, "read", "y"), (2, "a", "x")]
    produce(servers, topic, sent(write(2, "read", "y", op="r"), write(1, "b", "z", 95)))
    run(servers, address, topic, settings=by_lsn)
    assert rows_at(address) == [(1, "b", "z"), (2, "read", "y")]
    produce(servers, topic, sent(write(2, "b", UNAVAILABLE, 96), {"op": "t", "source": {"lsn": 97}}))
    produce(servers, topic, sent(write(3, "read", "y", op="r")))
    run(servers, address, topic, settings=by_lsn)
    assert rows_at(address) == [(3, "read", "y")]


@pytest.mark.parametrize("infers", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_mistyped_order_is_mended_by_the_next_call(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str, infers: bool
) -> None:
    """What no commit has binds nobody; the schema of the one does not have the fields of the other's order."""
    servers, address = cluster.bootstrap_servers, address_of(kind, tmp_path)
    create_topic(servers, topic)
    produce(servers, topic, sent(write(1, "new", None, 9), write(1, "old", None, 8)))

    def load(order: str) -> None:
        settings = replace(settings_by(order), **({"schema": "", "infers": True} if infers else {}))
        run(servers, address, topic, settings=settings)

    for order in ("source.lsnn", "ts_ms"):
        with pytest.raises(
            LoadError, match=rf"has 2 bad .* {topic}-0 at offset 0: the record has no {order}, by which"
        ):
            load(order)
    load("source.lsn")
    assert [(row["name"], row["_klog_order"]) for row in content(address).to_pylist()] == [("new", "01:9")]


@pytest.mark.parametrize("kind", _ICEBERG_FIRST)
def test_deleted_keys_are_remembered(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str
) -> None:
    """An older change of another partition that a later run reads brings back no row; nor one before a truncation."""
    servers, address, forgets = (
        cluster.bootstrap_servers,
        address_of(kind, tmp_path),
        address_of(kind, tmp_path, "other"),
    )
    create_topic(servers, topic, 2)
    by_lsn, keeps = settings_by("source.lsn"), {"keep_deletes": 3600.0}

    def load(*events: Any, partition: int) -> tuple[list[Any], list[Any]]:
        produce(servers, topic, sent(*events, partition=partition))
        try:
            with failing(LocalFolder, next(numbers), die):
                run(servers, address, topic, settings=by_lsn, **keeps)
        except Killed:
            pass
        run(servers, address, topic, settings=by_lsn, **keeps)
        run(servers, forgets, topic, settings=by_lsn)
        return rows_at(address), rows_at(forgets)

    numbers = iter(range(4, 100, 5))
    gone = {"op": "d", "before": {"id": 1}, "source": {"lsn": 20}}
    one, two = (1, "a", "x"), (2, "b", "x")
    assert load(write(2, "b", "x", 5), gone, partition=0) == ([two], [two])
    assert load(write(1, "a", "x", 10), partition=1) == ([two], [one, two])
    assert load(write(1, "a", "x", 21), partition=1) == ([one, two], [one, two])
    assert load({"op": "t", "source": {"lsn": 30}}, partition=0) == ([], [])
    assert load(write(2, "b", "x", 29), partition=1) == ([], [two])
    folder = Path(content_folder(address), "_klog/deleted")
    assert len(list(folder.iterdir())) == 1
    run(servers, address, topic, settings=by_lsn)
    assert load(write(2, "b", "x", 31), partition=1) == ([two], [two])
    assert status(address).findings == []
    with pytest.raises(ConfigError, match="--keep-deletes is for changes of rows"):
        run(servers, address, topic, **keeps)
    [file] = folder.iterdir()
    pq.write_table(pq.read_table(file).replace_schema_metadata({"klog.version": "2"}), file)
    produce(servers, topic, sent(write(2, "b", "x", 32)))
    with pytest.raises(LoadError, match=rf"{file.name} has version 2, and this klog .* or remove it to forget them"):
        run(servers, address, topic, settings=by_lsn, **keeps)
