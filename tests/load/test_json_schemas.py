"""A --schema of JSON values that changes from call to call: fields are added, numbers widened, the rest is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from pyiceberg.catalog import load_catalog

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError
from spark_klog.files.folder import LocalFolder
from spark_klog.load.audit import status
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import VALUES, WriteSettings
from spark_klog.load.target import FolderTarget
from spark_klog.load.values import evolved_schema
from spark_klog.schemas.json_schema.ddl import parse_schema, schema_text
from spark_klog.tables.changes import debezium_type
from spark_klog.tables.opening import open_table
from tests.load.support import Killed, die, failing, run
from tests.load.test_upserts import FORMATS, address_of, content, environment
from tests.spark.support import Sent, create_topic, produce

__all__ = ["environment"]


def _text(ddl: str) -> str:
    return schema_text(parse_schema(ddl))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("a int", "a int, b string", "a int, b string"),
        ("a int, c date", "b string, c date, a int", "a int, c date, b string"),
        ("a int, b string", "b string, a int", "a int, b string"),
        ("a struct<x: int>", "a struct<y: string, x: int>", "a struct<x: int, y: string>"),
        ("a array<struct<x: int>>", "a array<struct<x: int, y: int>>", "a array<struct<x: int, y: int>>"),
        ("a int, b float", "a bigint, b double", "a bigint, b double"),
        ("a decimal(10,2)", "a decimal(12,2)", "a decimal(12,2)"),
        ("a int, b int", "a int", ["b is missing"]),
        (
            "a struct<x: int>, b date",
            "a struct<y: int>, b string",
            ["a.x is missing", "b is string, and was date"],
        ),
        ("a bigint", "a int", ["a is int, and was bigint"]),
        ("a array<int>", "a int", ["a is int, and was array<int>"]),
    ],
)
def test_what_a_load_takes(old: str, new: str, expected: str | list[str]) -> None:
    found, hindrances = evolved_schema(_text(old), _text(new), widens=True)
    assert hindrances == ([] if isinstance(expected, str) else expected)
    if isinstance(expected, str):
        assert found == _text(expected)
        wrapped = [schema_text(debezium_type(parse_schema(ddl))) for ddl in (old, new, expected)]
        assert evolved_schema(*wrapped[:2], widens=True) == (wrapped[2], [])


def test_files_have_no_wider_numbers() -> None:
    assert evolved_schema("a int", "a bigint", widens=False)[1] == ["a is bigint, and was int"]


def _send(servers: str, topic: str, *rows: dict[str, Any] | None) -> None:
    produce(servers, topic, [Sent(None if row is None else json.dumps(row).encode(), b"k") for row in rows])


@pytest.mark.parametrize("kind", FORMATS)
def test_what_files_of_values_have(cluster: EmbeddedCluster, tmp_path: Path, environment: Any, kind: str) -> None:
    """Their topic, partition and offsets, also of compacted files, by the columns beside those of the values."""
    servers, address = cluster.bootstrap_servers, address_of(kind, tmp_path)
    topic = f"values-in-{kind}"  # Delta's bounds have 32 characters
    create_topic(servers, topic)
    for topic_of_value in ("other", "another"):
        _send(servers, topic, {"topic": topic_of_value, "partition": 7, "offset": 9}, {"topic": topic_of_value})
        settings = WriteSettings(schema="topic string, partition int, offset bigint", table_columns=VALUES)
        run(servers, address, topic, settings=settings)
    table = open_table(address)
    assert sorted(list(file.offsets.items()) for file in table.files()) == [
        [((topic, 0), (0, 1))],
        [((topic, 0), (2, 3))],
    ]
    assert table.compact(1 << 30) == 2
    assert [file.offsets for file in table.files()] == [{(topic, 0): (0, 3)}]


def _rows(address: str, *names: str) -> list[tuple[Any, ...]]:
    found = content(address).sort_by("_klog_offset")
    return list(zip(*(found[name].to_pylist() for name in names), strict=True))


def _loader(servers: str, address: str, topic: str) -> Callable[..., Any]:
    """Loads the values into the table's columns by a DDL."""

    def load(ddl: str, **options: Any) -> Any:
        settings = WriteSettings(schema=_text(ddl), table_columns=VALUES)
        return run(servers, address, topic, settings=settings, max_task_records=2, **options)

    return load


@pytest.mark.parametrize("kind", FORMATS)
def test_a_field_is_added_in_the_same_run(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str
) -> None:
    """Also by a call that finishes a killed run, whose complete tasks stay; an older schema is refused from then on."""
    servers, address = cluster.bootstrap_servers, address_of(kind, tmp_path)
    create_topic(servers, topic)
    load = _loader(servers, address, topic)

    _send(servers, topic, {"id": 0})
    load("id int")
    _send(servers, topic, *({"id": n, "mail": f"m{n}", "at": {"lat": 1.5}} for n in range(1, 7)))
    with pytest.raises(Killed), failing(LocalFolder, -8, die):
        load("id int")
    complete = len(list(tmp_path.glob("**/_klog/runs/00000002/offsets-*")))
    assert complete == 1
    with pytest.raises(LoadError, match=r"--schema: id is string, and was int\. A load takes one that adds fields, or"):
        load("id string, mail string")
    assert load("mail string, id int").runs == [2]
    assert _rows(address, "id", "mail") == [(0, None), (1, None), (2, None), *((n, f"m{n}") for n in range(3, 7))]
    _send(servers, topic, {"id": 7, "at": {"lat": 2.5}, "mail": "m7"})
    with pytest.raises(LoadError, match=r"mail is missing\. .*use another --output or --table"):
        load("id int")
    load("id int, mail string, at struct<lat: double>")
    assert _rows(address, "id", "mail", "at")[-2:] == [(6, "m6", None), (7, "m7", {"lat": 2.5})]
    assert status(address).findings == []


@pytest.mark.parametrize("kind", FORMATS)
def test_a_number_that_the_schema_has_no_room_for(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str
) -> None:
    """The run is refused; a wider schema loads it, if the table can have it."""
    servers, address = cluster.bootstrap_servers, address_of(kind, tmp_path)
    create_topic(servers, topic)
    load = _loader(servers, address, topic)

    _send(servers, topic, {"id": 0}, {"id": 1})
    load("id int")
    _send(servers, topic, {"id": 2}, {"id": 3}, {"id": 1 << 40}, {"id": 4})
    with pytest.raises(LoadError, match="or with a --schema that has room for them"):
        load("id int")
    if kind == "iceberg":
        assert load("id bigint").bad == 0
        assert _rows(address, "id") == [(0,), (1,), (2,), (3,), (1 << 40,), (4,)]
    else:
        for _ in range(2):
            with pytest.raises(LoadError, match="id is int32 in the table and int64 in the load"):
                load("id bigint")
        assert load("id int", max_bad=MaxBad(1)).runs == [2]
        assert _rows(address, "id") == [(0,), (1,), (2,), (3,), (4,)]
    assert status(address).findings == []


def test_a_field_of_changed_rows(cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any) -> None:
    servers, address = cluster.bootstrap_servers, address_of(FORMATS[0], tmp_path)
    create_topic(servers, topic)

    def load(ddl: str, **options: Any) -> Any:
        schema = schema_text(debezium_type(parse_schema(ddl)))
        settings = WriteSettings(schema=schema, upsert_key="id", envelope="debezium")
        return run(servers, address, topic, settings=settings, max_task_records=2, **options)

    def change(**row: Any) -> dict[str, Any]:
        return {"before": None, "after": row, "op": "u"}

    _send(servers, topic, change(id=1, name="Ada"), change(id=2, name="Bob"))
    load("id bigint, name string")
    _send(servers, topic, *(change(id=n, name="Eve", mail=f"m{n}") for n in range(2, 7)))
    with pytest.raises(Killed), failing(LocalFolder, -8, die):
        load("id bigint, name string")
    with pytest.raises(LoadError, match="name is missing"):
        load("id bigint, mail string")
    assert load("id bigint, name string, mail string").runs == [2]
    assert _rows(address, "id", "name", "mail") == [
        (1, "Ada", None),
        *((n, "Eve", f"m{n}") for n in range(2, 7)),
    ]
    assert status(address).findings == []


def test_files_take_fields_if_asked(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)

    def load(ddl: str, **options: Any) -> Any:
        return run(servers, tmp_path, topic, settings=WriteSettings(schema=_text(ddl)), **options)

    _send(servers, topic, {"id": 0})
    load("id int")
    _send(servers, topic, {"id": 1, "mail": "m1"})
    with pytest.raises(LoadError, match="take the new fields by --schema-evolution latest"):
        load("mail string, id int")
    with pytest.raises(LoadError, match=r"id is bigint, and was int\. A load takes one that adds fields: use"):
        load("id bigint", evolution="latest")
    load("mail string, id int", evolution="latest")
    newest = max(tmp_path.glob(f"{topic}/*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    assert ds.dataset(newest).to_table()["value"].to_pylist() == [{"id": 1, "mail": "m1"}]
    load("id int, mail string")


@pytest.mark.parametrize("kind", ["files", *FORMATS])
def test_what_no_commit_has_binds_nobody(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str
) -> None:
    """A wrong type in a run that was refused or killed, the first one or a later one, is mended by the next call."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    output = str(tmp_path / "files") if kind == "files" else address_of(kind, tmp_path)

    def load(ddl: str, **options: Any) -> Any:
        columns = {} if kind == "files" else {"table_columns": VALUES}
        settings = WriteSettings(schema=_text(ddl), **columns)
        return run(servers, output, topic, settings=settings, max_task_records=2, evolution="latest", **options)

    def rows(*names: str) -> list[tuple[Any, ...]]:
        if kind != "files":
            return _rows(output, *names)
        found = ds.dataset(output, schema=_newest(output), partitioning=None).to_table().sort_by("offset")
        return [tuple((row or {}).get(name) for name in names) for row in found["value"].to_pylist()]

    _send(servers, topic, {"id": 0, "name": "x"}, {"id": 1, "name": "y"})
    with pytest.raises(LoadError, match="has 2 bad record batches or values"):
        load("id int, name int")
    load("id int, name string")
    _send(servers, topic, {"id": 2, "qty": "7"}, {"id": 3, "qty": "8", "at": {"lat": "x"}})
    with pytest.raises(LoadError, match="has 2 bad record batches or values"):
        load("id int, name string, qty int, at struct<lat: double>")
    with pytest.raises(LoadError, match="name is missing"):  # what a commit has, does bind
        load("id int, qty string")
    with pytest.raises(LoadError, match="has 1 bad record batches or values"):
        load("id int, name string, qty string, at struct<lat: double>")
    load("id int, name string, qty string, at struct<lat: string>")
    expected = [(0, None, None), (1, None, None), (2, "7", None), (3, "8", {"lat": "x"})]
    assert rows("id", "qty", "at") == expected

    # a killed run, whose complete task has values of the field that goes, or gets another type
    _send(servers, topic, *({"id": n, "day": f"2024-01-0{n}", "gone": n} for n in range(4, 8)))
    known = "id int, name string, qty string, at struct<lat: string>"
    with pytest.raises(Killed), failing(LocalFolder, -5 if kind == "files" else -8, die):
        load(f"{known}, day date, gone int")
    [run_folder] = tmp_path.glob("**/_klog/runs/00000003")
    assert list(run_folder.glob("offsets-*"))
    assert not (run_folder / "manifest.json").exists()
    load(f"{known}, day string")
    assert rows("id", "day")[4:] == [(n, f"2024-01-0{n}") for n in range(4, 8)]
    _send(servers, topic, {"id": 8, "gone": "text"})
    load(f"{known}, day string, gone string")
    assert rows("id", "gone")[7:] == [(7, None), (8, "text")]
    assert status(output).findings == []


@pytest.mark.parametrize("kind", FORMATS)
def test_a_layout_of_a_first_run_that_was_refused(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str
) -> None:
    servers, address = cluster.bootstrap_servers, address_of(kind, tmp_path)
    create_topic(servers, topic)

    def load(ddl: str, layout: str, event_time: str, **options: Any) -> None:
        settings = WriteSettings(schema=_text(ddl), table_columns=VALUES, layout=layout, event_time=event_time)
        run(servers, address, topic, settings=settings, max_task_records=1, **options)

    rows = [{"id": n, "at": f"2024-05-0{n + 1}T07:00:00Z", "by": f"2024-06-0{n + 1}T00:00:00Z"} for n in range(2)]
    _send(servers, topic, *rows, {"id": "x"})
    for layout, event_time in (("hour", "at"), ("none", ""), ("hour", "at"), ("day", "at")):
        with pytest.raises(LoadError, match="has 1 bad record batches or values"):
            load("id int, at timestamp", layout, event_time)
    load("id int, at timestamp, by timestamp", "day", "by", max_bad=MaxBad(1))
    assert _rows(address, "id") == [(0,), (1,)]
    assert status(address).findings == []
    if kind == "iceberg":
        partitions = load_catalog("local").load_table("space.rows").inspect.files()["partition"].to_pylist()
        assert sorted(str(one["by_day"]) for one in partitions) == ["2024-06-01", "2024-06-02"]
    _send(servers, topic, rows[0])
    with pytest.raises(LoadError, match="with --partition-by day, not"):
        load("id int, at timestamp, by timestamp", "hour", "at")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_corrected_type_has_the_values_of_complete_tasks(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, environment: Any, kind: str
) -> None:
    """It holds all of them, and Iceberg has a new column for it: what was written into the old one is written again."""
    servers, address = cluster.bootstrap_servers, address_of(kind, tmp_path)
    create_topic(servers, topic)
    load = _loader(servers, address, topic)
    _send(servers, topic, {"id": 0}, {"id": 1})
    load("id int")
    _send(servers, topic, {"id": 2, "qty": 7}, {"id": 3, "qty": 7}, {"id": 4, "qty": "x"}, {"id": 5, "qty": 7})
    with pytest.raises(LoadError, match="has 1 bad record batches or values"):
        load("id int, qty int")
    assert len(list(tmp_path.glob("**/_klog/runs/00000002/offsets-*"))) == 2
    load("id int, qty double", max_bad=MaxBad(1))
    assert _rows(address, "id", "qty") == [(0, None), (1, None), (2, 7.0), (3, 7.0), (5, 7.0)]
    assert status(address).findings == []


def _newest(output: str) -> Any:
    """The schema of the newest file of a folder."""
    return ds.dataset(max(Path(output).rglob("*.parquet"), key=lambda path: path.name.split("+")[2])).schema


def test_other_settings_after_a_run_that_was_refused(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Its complete tasks run again: no record is in the folder of another event time, or without one."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    rows = [{"at": "2024-05-06T07:00:00Z", "by": f"2024-05-0{n}T00:00:00Z"} for n in range(1, 5)]
    _send(servers, topic, *rows, {"at": 1})
    asked: dict[str, Any] = {"schema": _text("at timestamp, by timestamp")}
    for settings in ({"layout": "hour", "event_time": "at"}, {"layout": "none"}, {"layout": "day", "event_time": "by"}):
        with pytest.raises(LoadError, match="has 1 bad record batches or values"):
            run(servers, tmp_path, topic, settings=WriteSettings(**asked | settings), max_task_records=2)
    loaded = run(
        servers, tmp_path, topic, settings=WriteSettings(**asked | settings), max_task_records=2, max_bad=MaxBad(1)
    )
    assert [(item.records, item.bad) for item in loaded.partitions] == [(4, 1)]
    assert sorted(path.parent.name for path in tmp_path.rglob("*.parquet")) == [
        f"date=2024-05-0{n}" for n in range(1, 5)
    ]
    assert len(list((tmp_path / "_klog/dead-letters").iterdir())) == 1
    with pytest.raises(LoadError, match="with --event-time by, not"):
        run(servers, tmp_path, topic, settings=WriteSettings(**asked | {"layout": "day", "event_time": "at"}))
    assert status(str(tmp_path)).findings == []


def test_an_upload_that_ends_after_its_run_began_anew(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a store where files have their final names at once: here a folder stands for it."""
    create_topic(cluster.bootstrap_servers, topic)
    _send(cluster.bootstrap_servers, topic, *({"id": n, "mail": "m"} for n in range(20)))
    monkeypatch.setattr(LocalFolder, "shows_whole_files_only", True)
    uploads: list[tuple[LocalFolder, bytes, str]] = []

    def begin(folder: LocalFolder, source: Path, path: str) -> None:
        uploads.append((folder, Path(source).read_bytes(), path))
        raise Killed

    def load(ddl: str) -> Any:
        settings = WriteSettings(schema=_text(ddl))
        return run(cluster.bootstrap_servers, tmp_path / "out", topic, settings=settings, evolution="latest")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "put", begin)
        with pytest.raises(Killed):
            load("id int")
    end_attempts = FolderTarget.end_attempts

    def ended_too_late(target: FolderTarget, *arguments: Any) -> None:
        end_attempts(target, *arguments)
        while uploads:
            folder, data, path = uploads.pop()
            folder.write(path, data)

    monkeypatch.setattr(FolderTarget, "end_attempts", ended_too_late)
    load("id int, mail string")
    assert ds.dataset(tmp_path / "out" / topic).count_rows() == 20
    load("id int, mail string")
    assert not list(tmp_path.glob("out/_klog/attempts/*"))
