"""JSON without a schema: what a load infers is in its plan, grows run by run, and does not depend on how it read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError
from spark_klog.files.folder import LocalFolder
from spark_klog.load.audit import status
from spark_klog.load.journal.history import read_plan
from spark_klog.load.journal.store import open_store
from spark_klog.load.places import AtOffsets
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import VALUES, WriteSettings
from spark_klog.schemas.json_schema import inference
from spark_klog.spark.read import sampling
from tests.load.support import Killed, die, failing, run
from tests.load.test_upserts import FORMATS, address_of, content, environment
from tests.spark.support import Sent, create_topic, produce
from tests.support.runs.soak import SOAK

__all__ = ["environment"]
_INFERRED = WriteSettings(infers=True)


def _send(servers: str, topic: str, *rows: Any) -> None:
    produce(servers, topic, [Sent(row if isinstance(row, bytes) else json.dumps(row).encode()) for row in rows])


def _schema(output: Path, run_number: int) -> str:
    plan = read_plan(open_store(str(output)), run_number)
    assert plan is not None
    return str(plan.settings["schema"])


def _values(output: Path) -> list[Any]:
    newest = ds.dataset(max(output.rglob("*.parquet"), key=lambda path: path.name.split("+")[2])).schema
    rows = ds.dataset(output, schema=newest, partitioning=None).to_table().sort_by("offset")
    return rows["value"].to_pylist()


@pytest.fixture
def servers(cluster: EmbeddedCluster, topic: str) -> str:
    create_topic(cluster.bootstrap_servers, topic)
    return cluster.bootstrap_servers


def _blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the sample have the first record of each range only."""
    monkeypatch.setattr(sampling, "_RECORDS", 2)
    monkeypatch.setattr(sampling, "_LEAST", 2)
    monkeypatch.setattr(sampling, "_ends", lambda ranges, _: [span._replace(end=span.start + 1) for span in ranges])


_ROWS = (
    {"id": 1, "user": {"name": "Ada", "tags": []}, "note": None, "n": 1, "mixed": "a"},
    {"id": 2, "user": {"name": "Bob", "tags": ["x"]}, "n": 2.5, "mixed": 5, "big": 1},
    {"id": 3, "user": None, "empty": {}, "mixed": {"x": [1.10]}, "big": 1 << 63},
    {"id": 4, "seen": True, "user": {"name": "Eve", "age": 7}},
)
_FOUND = (
    "big decimal(20,0), id bigint, mixed json, n double, seen boolean, user struct<age: bigint, name: string, tags: "
    "array<string>>"
)


@pytest.mark.parametrize("is_blind", [False, True], ids=["sample", "tasks"])
@pytest.mark.parametrize("size", [1, 3, None])
def test_the_columns_of_a_first_run(
    servers: str, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None, is_blind: bool
) -> None:
    """They are the same whether the sample or the tasks find them, and however the range is split."""
    if is_blind:
        _blind(monkeypatch)
    _send(servers, topic, *_ROWS)
    loaded = run(servers, tmp_path, topic, settings=_INFERRED, max_task_records=size)
    assert (loaded.runs, loaded.bad) == ([1], 0)
    assert _schema(tmp_path, 1) == _FOUND
    first, second, third, last = _values(tmp_path)
    assert first["user"] == {"age": None, "name": "Ada", "tags": []}
    assert [row["mixed"] for row in (first, second, third, last)] == ['"a"', "5", '{"x":[1.1]}', None]
    assert (second["n"], first["n"], third["big"], last["seen"]) == (2.5, 1.0, 1 << 63, True)
    assert status(str(tmp_path)).findings == []


def test_a_first_call_without_records(servers: str, topic: str, tmp_path: Path) -> None:
    """The load is one of inferred rows from then on, for all calls after it."""
    assert run(servers, tmp_path, topic, settings=_INFERRED).runs == []
    for number in (1, 2):
        _send(servers, topic, {"id": number})
        assert run(servers, tmp_path, topic, settings=_INFERRED).runs == [number]
    assert _values(tmp_path) == [{"id": 1}, {"id": 2}]


@pytest.mark.parametrize("kind", FORMATS)
def test_fields_come_and_types_stay(servers: str, topic: str, tmp_path: Path, environment: Any, kind: str) -> None:
    """One event of another type is a dead letter, and stops none of the others."""
    address = address_of(kind, tmp_path)
    settings = WriteSettings(infers=True, table_columns=VALUES)
    _send(servers, topic, {"id": 1, "at": {"lat": 1.5}}, {"id": 2})
    run(servers, address, topic, settings=settings)
    _send(
        servers,
        topic,
        {"id": 3, "at": {"lat": 2.5, "lon": 1}, "mail": "m"},
        {"id": "four"},
        {"id": 5, "_klog_offset": 1},
    )
    _send(servers, topic, {"id": 6, "ID": 7}, {"id": 7, "mail": None})
    with pytest.raises(LoadError, match="has 3 bad record batches or values"):
        run(servers, address, topic, settings=settings)
    loaded = run(servers, address, topic, settings=settings, max_bad=MaxBad(3), max_task_records=2)
    assert (loaded.runs, loaded.bad) == ([2], 3)
    rows = content(address).sort_by("_klog_offset").select(["id", "at", "mail"]).to_pylist()
    lon = {"lon": None}
    assert rows == [
        {"id": 1, "at": {"lat": 1.5} | lon, "mail": None},
        {"id": 2, "at": None, "mail": None},
        {"id": 3, "at": {"lat": 2.5, "lon": 1}, "mail": "m"},
        {"id": 7, "at": None, "mail": None},
    ]
    letters = [json.loads(line) for path in tmp_path.rglob("values+*.jsonl") for line in path.open()]
    reasons = {letter["offset"]: letter["reason"] for letter in letters}
    assert "must be an integer of 64 bits" in reasons[3]
    assert "field _klog_offset gets no column" in reasons[4]
    assert "field ID gets no column" in reasons[5]
    assert status(address).findings == []


def test_integers_that_a_double_rounds(servers: str, topic: str, tmp_path: Path) -> None:
    """In the first run the column is text; in a column of doubles, which stays, they are dead letters."""
    large = (1 << 53) + 1
    _send(servers, topic, {"n": [1.5], "id": 0}, {"n": [large], "id": 1})
    run(servers, tmp_path / "text", topic, settings=_INFERRED)
    assert _schema(tmp_path / "text", 1) == "id bigint, n array<json>"
    _send(servers, topic, {"id": 2, "x": 1.5, "y": {"z": [1.5]}})
    output = tmp_path / "numbers"
    run(servers, output, topic, settings=_INFERRED, start=AtOffsets("", {(topic, 0): 2}))
    _send(servers, topic, {"id": 3, "x": large}, {"id": 4, "y": {"z": [2, large]}}, {"id": 5, "x": large - 1})
    _send(servers, topic, {"id": 6, "x": 1 << 64}, {"id": 7, "x": (1 << 64) + 1}, {"id": 8, "x": 1e300})
    loaded = run(servers, output, topic, settings=_INFERRED, max_bad=MaxBad(3))
    assert loaded.bad == 3
    assert [row["id"] for row in _values(output)] == [2, 5, 6, 8]
    letters = [json.loads(line)["reason"] for path in output.rglob("values+*.jsonl") for line in path.open()]
    assert sorted(reason.partition(" rounds")[0] for reason in letters) == [
        "field x is an integer that its column",
        "field x is an integer that its column",
        "field y.z[] is an integer that its column",
    ]


def test_a_schema_takes_over_and_gives_back(servers: str, topic: str, tmp_path: Path) -> None:
    """A load may begin with a DDL and infer later, and the other way round."""
    _send(servers, topic, {"id": 1, "x": 1.5}, {"id": 2, "x": "y"})
    run(servers, tmp_path, topic, settings=_INFERRED)
    assert _schema(tmp_path, 1) == "id bigint, x json"
    _send(servers, topic, {"id": 3, "x": {}, "z": 1})
    with pytest.raises(LoadError, match="x is string, and was json"):
        run(servers, tmp_path, topic, settings=WriteSettings(schema="id bigint, x string"))
    run(servers, tmp_path, topic, settings=WriteSettings(schema="id bigint, x json"))
    assert [row["x"] for row in _values(tmp_path)] == ["1.5", '"y"', "{}"]
    _send(servers, topic, {"id": 4, "z": 1})
    run(servers, tmp_path, topic, settings=_INFERRED)
    assert _schema(tmp_path, 3) == "id bigint, x json, z bigint"


@pytest.mark.parametrize(
    "kind", ["files", *(pytest.param(kind, marks=pytest.mark.test_all("kill")) for kind in FORMATS)]
)
def test_kills(
    servers: str, topic: str, tmp_path: Path, environment: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a run is killed between the sample and its end, the next call goes on, and each row is there once."""
    _blind(monkeypatch)
    output = str(tmp_path / "files") if kind == "files" else address_of(kind, tmp_path)
    settings = WriteSettings(infers=True) if kind == "files" else WriteSettings(infers=True, table_columns=VALUES)

    def load() -> None:
        run(servers, output, topic, settings=settings, max_task_records=2)

    count, at = 0, 1
    while at < 200:
        rows = [{"id": count + n, f"f{count}_{n}": "x" if n % 2 else {"y": n}} for n in range(4)]
        _send(servers, topic, *rows)
        count += len(rows)
        try:
            with failing(LocalFolder, at, die):
                load()
            break
        except Killed:
            load()
        at += 1 if SOAK else 8
    assert at < 200
    found = _values(tmp_path / "files") if kind == "files" else content(output).sort_by("_klog_offset").to_pylist()
    assert [row["id"] for row in found] == list(range(count))
    for number, row in enumerate(found):
        expected = "x" if number % 2 else {"y": number % 4}
        assert row[f"f{number // 4 * 4}_{number % 4}"] == expected
    assert status(output).findings == []


def test_maps(servers: str, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object with ever more names is text; a record with them is refused, and later ones are dead letters."""
    _blind(monkeypatch)
    monkeypatch.setattr(inference, "MOST_NAMES", 50)
    rows = [{"id": n, "by": {f"k{n}_{m}": m for m in range(20)}} for n in range(9)]
    _send(servers, topic, *rows)
    run(servers, tmp_path / "one", topic, settings=_INFERRED, max_task_records=2)
    assert _schema(tmp_path / "one", 1) == "by json, id bigint"
    assert [json.loads(row["by"]) for row in _values(tmp_path / "one")] == [row["by"] for row in rows]

    _send(servers, topic, *({"id": n} | {f"k{n}_{m}": 1 for m in range(20)} for n in range(4)))
    with pytest.raises(LoadError, match=r"the values have more than 50 fields of different names, as of a map: give"):
        run(servers, tmp_path / "two", topic, settings=_INFERRED)
    assert run(servers, tmp_path / "one", topic, settings=_INFERRED, max_bad=MaxBad(4)).bad == 4


@pytest.mark.parametrize("size", [1, 2, None])
def test_structs_that_become_maps(
    servers: str, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    """A struct of an earlier run with too many new names, which no task has seen alone, gets none of them."""
    monkeypatch.setattr(inference, "MOST_NAMES", 50)
    _send(servers, topic, {"id": 0, "by": {"k": 1}})
    run(servers, tmp_path, topic, settings=_INFERRED)
    _send(servers, topic, *({"id": n, "by": {f"k{n}_{m}": m for m in range(20)}} for n in range(4)), {"id": 5, "n": 1})
    loaded = run(servers, tmp_path, topic, settings=_INFERRED, max_task_records=size, max_bad=MaxBad(4))
    assert (loaded.runs, loaded.bad) == ([2], 4)
    assert _schema(tmp_path, 2) == "by struct<k: bigint>, id bigint, n bigint"
    assert [row["id"] for row in _values(tmp_path)] == [0, 5]
    _send(servers, topic, *({f"k{n}_{m}": 1 for m in range(20)} for n in range(4)), {"id": 6})
    loaded = run(servers, tmp_path, topic, settings=_INFERRED, max_task_records=size, max_bad=MaxBad(4))
    assert (loaded.runs, loaded.bad) == ([3], 4)
    assert [row["id"] for row in _values(tmp_path)] == [0, 5, 6]
    assert status(str(tmp_path)).findings == []


def test_values_that_tell_nothing(servers: str, topic: str, tmp_path: Path) -> None:
    for rows in ((b"rubbish", [1], "text", {}), ({"a": None, "b": [[], []]},)):
        _send(servers, topic, *rows)
        with pytest.raises(LoadError, match="none of them is a JSON object with a field"):
            run(servers, tmp_path, topic, settings=_INFERRED)
    assert not list(tmp_path.rglob("*.parquet"))
    _send(servers, topic, {"a": 1})
    assert run(servers, tmp_path, topic, settings=_INFERRED, max_bad=MaxBad(3)).bad == 3
    assert _schema(tmp_path, 1) == "a bigint"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["plain", "wrapped"])
def test_rows_in_envelopes(
    servers: str, topic: str, tmp_path: Path, environment: Any, kind: str, is_wrapped: bool
) -> None:
    """Debezium's: the row's fields are found in all places that have rows, and grow as those of values do."""
    address = address_of(kind, tmp_path)
    settings = WriteSettings(infers=True, upsert_key="id", envelope="debezium", order_by="source.lsn")

    def load(**options: Any) -> Any:
        return run(servers, address, topic, settings=settings, max_task_records=2, **options)

    def send(*changes: tuple[str, Any, Any]) -> None:
        source = {"lsn": 7, "name": "shop", "snapshot": None, "tags": [{"a": 1}]}
        events = [{"before": b, "after": a, "op": op, "ts_ms": 5, "source": source} for op, b, a in changes]
        _send(
            servers,
            topic,
            *({"schema": {"x": [1, "y"]}, "payload": event} if is_wrapped else event for event in events),
        )

    send(("r", None, {"id": 1, "name": "Ada"}), ("c", None, {"id": 2, "name": "Bob", "score": 1.5}))
    send(("d", {"id": 1, "name": "Ada"}, None))
    load()
    names = ["id", "name", "score"]
    assert content(address).select(names).to_pylist() == [{"id": 2, "name": "Bob", "score": 1.5}]
    send(("u", {"id": 2}, {"id": 2, "name": "Bob", "score": 2, "at": {"lat": 1}}), ("c", None, {"id": 3, "name": 5}))
    assert load(max_bad=MaxBad(1)).bad == 1
    [row] = content(address).select([*names, "at"]).to_pylist()
    assert row == {"id": 2, "name": "Bob", "score": 2.0, "at": {"lat": 1}}
    assert status(address).findings == []


def test_rows_that_are_text(servers: str, topic: str, tmp_path: Path) -> None:
    """As MongoDB's connector writes them."""
    _send(servers, topic, {"before": None, "after": '{"_id": 1}', "op": "c"})
    settings = WriteSettings(infers=True, upsert_key="_id", envelope="debezium")
    with pytest.raises(LoadError, match="rows are text, and no JSON objects of Debezium's connector for MongoDB"):
        run(servers, f"delta:{tmp_path / 'rows'}", topic, settings=settings)
